"""What a run warns of at its end."""

from __future__ import annotations

import functools

import jax
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace._checks import warn
from numpyro_fspace.mcmc.reporting.doubts import sampler_doubts, temperature_doubts
from numpyro_fspace.mcmc.reporting.report_of_draws import diagnosed
from numpyro_fspace.mcmc.start_checks import continued
from numpyro_fspace.mcmc.state import KernelState, with_chains
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.handlers import one_at_a_time
from numpyro_fspace.posterior.configurational_temperature import configurational_temperature
from numpyro_fspace.posterior.judged_draws import judged_draws
from numpyro_fspace.posterior.judged_quantities import quantities_of
from numpyro_fspace.posterior.prediction_warnings import without_harm
from numpyro_fspace.posterior.thresholds import MIN_DRAWS, MIN_RUN
from numpyro_fspace.priors.tracing import is_traced

#: Rows of the data, and points of each other kind, at which its functions are judged.
NUM_POINTS, NUM_OTHERS = 30, 15
#: The share of the run's gradient steps that its configurational temperature may cost.
SHARE = 0.03


def judge(mcmc):
    """Warn of what went wrong in the run that ``mcmc`` has finished; nothing where it is part of another program."""
    if not is_nested():
        one_at_a_time(warn_of_trouble)(mcmc)
        one_at_a_time(warn_of_draws)(mcmc)


def warn_of_draws(mcmc):
    """Warn, once, of chains that have not converged or stood still, and of draws that are too wide."""
    is_far = getattr(mcmc, "mesh", None) is not None and mcmc.mesh.is_multi_process
    if is_far or mcmc.num_samples < MIN_RUN:
        return
    with without_harm("The draws of this run"):
        lines = _doubts(mcmc, mcmc.last_state)
        if lines:
            warn(f"The draws are doubtful: {' Also, '.join(lines)}")


def _doubts(mcmc, state):
    draws, args, kwargs = mcmc.get_samples(group_by_chain=True), mcmc._args, mcmc._kwargs
    is_kept = mcmc.num_samples // mcmc.thinning >= MIN_DRAWS
    lines = [doubt.text for doubt in diagnosed(_judged(mcmc, draws, args, kwargs))[1]] if is_kept else []
    if isinstance(state, KernelState):
        found = configurational_temperature(
            mcmc.sampler, with_chains(state), draws, args, kwargs, key=jax.random.key(0), share=SHARE
        )
        lines += [] if found is None else temperature_doubts(found, is_tested=state.plan.sampler.metropolis)
    return lines


def _judged(mcmc, draws, args, kwargs):
    """What is judged: functions and sites; all draws if there is no model, or if functions are kept in their place."""
    model = getattr(mcmc.sampler, "model", None)
    if model is None or getattr(mcmc, "functions_at", None) is not None:
        leaves = jax.tree_util.tree_leaves_with_path(draws)
        return [judged_draws({jax.tree_util.keystr(path, simple=True): v for path, v in leaves})]
    programs = getattr(mcmc.sampler, "_programs", None)
    settings = {"num_points": NUM_POINTS, "num_others": NUM_OTHERS, "programs": programs}
    return quantities_of(model, draws, args, kwargs, **settings)[:2]


def warn_of_trouble(mcmc):
    """Warn when draws of ``mcmc`` diverged, were rejected or rounded, or the kinetic temperature was too high."""
    state = mcmc.last_state
    if isinstance(state, KernelState):
        for line in sampler_doubts(mcmc.sampler, state, mcmc.num_samples):
            warn(line[0].upper() + line[1:])


def judge_numpyro_runs():
    """Let ``numpyro.infer.MCMC`` judge runs of our kernels at their end, as ``fs.MCMC`` does.

    NumPyro's driver does not tell a kernel when a run begins and ends. The first of our kernels that is made therefore
    replaces the method ``numpyro.infer.MCMC.run``, once for the whole process, by one that lets a run continue with the
    kernel's settings and on the data that it is given, calls NumPyro's, and then warns. Runs of all other kernels stay
    as they are, and importing the package changes nothing.
    """
    run = NumPyroMCMC.run
    if hasattr(run, "of_numpyro"):
        return

    @functools.wraps(run)
    def judged(self, rng_key, *args, **kwargs):
        phase, is_ours = dict(self._collection_params), getattr(self, "has_warned", False)
        start = self.post_warmup_state
        if not is_ours and isinstance(start, KernelState) and phase["phase"] != "warmup":
            given = {k: v for k, v in kwargs.items() if k not in ("extra_fields", "init_params")}
            # The last step of this driver's own warm-up may be due.
            is_own = not is_traced(start.i) and bool(np.all(np.asarray(start.i) == self.num_warmup))
            state = continued(self.sampler, start, args, given, num_warmup=self.num_warmup, is_own=is_own)
            self.post_warmup_state = state
        try:
            run(self, rng_key, *args, **kwargs)
        finally:
            if is_nested():  # the state of a program is no state to begin from
                self.post_warmup_state = start
        has_draws = phase["phase"] != "warmup" and (start is not None or phase["lower"] < phase["upper"])
        if has_draws and not is_ours and isinstance(self.last_state, KernelState):
            judge(self)

    judged.of_numpyro = run
    NumPyroMCMC.run = judged
