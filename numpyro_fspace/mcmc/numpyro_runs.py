"""Runs of our kernels by ``numpyro.infer.MCMC``, which tells a kernel neither when a run ends nor who reads its model.

NumPyro's driver has no hook at the end of a run. When the first of our kernels is made, its method ``run`` is wrapped
once: after a run of one of our kernels it warns as ``fs.MCMC`` does. Runs of all other kernels stay as they are, and
importing the package changes nothing.
"""

from __future__ import annotations

import functools

from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace._xla import is_nested
from numpyro_fspace.mcmc.plan import one_at_a_time
from numpyro_fspace.mcmc.run_warnings import warn_of_draws, warn_of_trouble
from numpyro_fspace.mcmc.state import KernelState

__all__ = ["ModelOfRows", "judge", "judge_numpyro_runs"]


def judge(mcmc):
    """Warn of what went wrong in the run that ``mcmc`` has finished; nothing where it is part of another program."""
    if not is_nested():
        one_at_a_time(warn_of_trouble)(mcmc)
        one_at_a_time(warn_of_draws)(mcmc)


def judge_numpyro_runs():
    """Let ``numpyro.infer.MCMC`` judge runs of our kernels at their end; a second call does nothing."""
    run = NumPyroMCMC.run
    if hasattr(run, "of_numpyro"):
        return

    @functools.wraps(run)
    def judged(self, *args, **kwargs):
        phase = dict(self._collection_params)
        run(self, *args, **kwargs)
        has_draws = phase["phase"] != "warmup" and (
            self.post_warmup_state is not None or phase["lower"] < phase["upper"]
        )
        if has_draws and not getattr(self, "has_warned", False) and isinstance(self.last_state, KernelState):
            judge(self)

    judged.of_numpyro = run
    NumPyroMCMC.run = judged


class ModelOfRows:
    """A model with minibatches, as a kernel hands it out after a run.

    It says what to do where somebody runs it without a random key, as ``arviz.from_numpyro`` and
    ``numpyro.infer.log_likelihood`` do; in all else it is the model.
    """

    def __init__(self, model):
        functools.update_wrapper(self, model, updated=())
        self.fn = model

    def __call__(self, *args, **kwargs):
        try:
            return self.fn(*args, **kwargs)
        except ValueError as error:
            if "random key to generate subsample" not in str(error):
                raise
            raise ValueError(
                "The model draws minibatches and has no random key here, so that the log-likelihood of all rows is "
                "not known. In place of arviz.from_numpyro(mcmc) call fs.to_arviz(mcmc), which evaluates the model at "
                "its full data; or leave it out, arviz.from_numpyro(mcmc, log_likelihood=False)."
            ) from error
