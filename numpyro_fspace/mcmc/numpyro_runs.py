"""Runs of our kernels by ``numpyro.infer.MCMC``, which does not tell a kernel when a run ends.

NumPyro's driver has no hook at the end of a run. When the first of our kernels is made, its method ``run`` is wrapped
once: after a run of one of our kernels it warns as ``fs.MCMC`` does. Runs of all other kernels stay as they are, and
importing the package changes nothing.
"""

from __future__ import annotations

import functools

from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace.mcmc.run_warnings import judge
from numpyro_fspace.mcmc.state import KernelState

__all__ = ["judge_numpyro_runs"]


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
