"""What a run warns of, by itself."""

from __future__ import annotations

import jax
import numpy as np

from numpyro_fspace.mcmc.chain import KernelState
from numpyro_fspace.posterior.configurational_temperature import configurational_temperature
from numpyro_fspace.posterior.convergence import MIN_DRAWS, MIN_RUN, standstill
from numpyro_fspace.posterior.diagnostics import diagnose, doubts
from numpyro_fspace.posterior.quantities import quantities_of, points_of
from numpyro_fspace.posterior.warnings import warn, without_harm

__all__ = [
    "MIN_ACCEPT_PROB",
    "by_chain",
    "temperature_doubts",
    "warn_of_draws",
    "warn_of_trouble",
]

#: Rows of the data, and points of each other kind, at which its functions are judged.
NUM_POINTS, NUM_OTHERS = 30, 15
#: Of its gradient steps, how many may be spent on its temperature.
SHARE = 0.03
#: Configurational temperatures that are too high, on average and in one direction (where a standard deviation is too
#: large by a tenth and a fifth), and how many standard errors tell them from chance.
HOT, HOT_DIRECTION, NUM_ERRORS = 1.2, 1.44, 3.5
#: Mean acceptance probability of a Metropolis-tested chain below which a run warns.
MIN_ACCEPT_PROB = 0.1


def warn_of_draws(mcmc):
    """Warn of a run whose draws are doubtful, once: the chains have not met or stood still, or the law is too wide."""
    state = mcmc.last_state
    leaves = jax.tree.leaves(state)
    is_far = getattr(mcmc, "mesh", None) is not None and mcmc.mesh.is_multi_process
    if is_far or mcmc.num_samples < MIN_RUN or any(isinstance(a, jax.core.Tracer) for a in leaves):
        return
    with without_harm("The draws of this run"):
        lines = _doubts(mcmc, state)
        if lines:
            warn(f"The draws are doubtful: {' Also, '.join(lines)}")


def _doubts(mcmc, state):
    draws = mcmc.get_samples(group_by_chain=True)
    is_kept = mcmc.num_samples // mcmc.thinning >= MIN_DRAWS
    lines = _doubts_of_convergence(mcmc, draws) if is_kept else []
    if isinstance(state, KernelState):
        args, kwargs = mcmc._args, mcmc._kwargs
        found = configurational_temperature(
            mcmc.sampler, by_chain(state), draws, args, kwargs, jax.random.key(0), SHARE
        )
        lines += [] if found is None else temperature_doubts(found)
    return lines


def _doubts_of_convergence(mcmc, draws):
    args, kwargs, model = mcmc._args, mcmc._kwargs, getattr(mcmc.sampler, "model", None)
    if model is None or getattr(mcmc, "functions_at", None) is not None:
        leaves = jax.tree_util.tree_leaves_with_path(draws)
        parts = [points_of({jax.tree_util.keystr(path, simple=True): v for path, v in leaves})]
    else:
        parts = quantities_of(model, draws, args, kwargs, num_points=NUM_POINTS, num_others=NUM_OTHERS)[:2]
    parts = [part for part in parts if part is not None]
    if not parts:
        return []
    still = np.min([standstill(np.moveaxis(part.draws, 2, 0)) for part in parts], axis=0)
    return doubts([diagnose(*part) for part in parts], still)


def by_chain(state):
    """``state`` with an axis of chains, which that of a single one lacks."""
    return state if state.potential_energy.ndim else jax.tree.map(lambda a: a[None], state)


def temperature_doubts(found) -> list[str]:
    """A line if a configurational temperature is too high, or too low, by more than chance allows."""
    cure = (
        "Shorten step_size (the half is a good try), enlarge the minibatch, fix the measurement points or take more of "
        "them, or raise friction."
    )
    from scipy.stats import norm, t

    num_errors = t.isf(norm.sf(NUM_ERRORS), found.num_draws - 1)  # their size is estimated too
    lowest = {"mean": HOT, "leading": HOT_DIRECTION}
    for name, where in (("mean", ""), ("leading", " in the direction that the data determine best")):
        value, error = getattr(found, name), getattr(found, f"{name}_error")
        if value > lowest[name] and np.log(value) > num_errors * error:
            return [
                f"the configurational temperature is {value:.2f} times the target's{where}: the draws are too wide, by "
                f"a factor of about {np.sqrt(value):.2f}, though R-hat may be fine. {cure}"
            ]
    if found.mean < 1.0 / HOT and np.log(1.0 / max(found.mean, 1e-30)) > num_errors * found.mean_error:
        return [
            f"the configurational temperature is {found.mean:.2f} times the target's: the draws are not yet as wide as "
            "the posterior. Run longer, with a longer warm-up."
        ]
    return []


def is_rounded(state) -> bool:
    """Whether a parameter is known, given the others, to less than ten units in its last place.

    Only the matrix of a dense preconditioner tells.
    """
    factor = np.asarray(state.warmup.learned.factor, float)
    if not factor.size:
        return False
    inverse = np.linalg.pinv(np.asarray(state.scale, float)[..., None] * factor)
    precision = np.sqrt(np.sum(inverse**2, axis=-2))  # its diagonal is that of (S Sᵀ)⁻¹
    z = np.concatenate([np.reshape(a, (*state.scale.shape[:-1], -1)) for a in jax.tree.leaves(state.z)], -1)
    return bool(np.any(np.finfo(state.scale.dtype).eps * np.abs(z) * precision > 0.1))


def warn_of_trouble(mcmc):
    """Warn when draws diverged, were rejected or rounded, or the chain ran hot, in the sampling phase of ``mcmc``."""
    state = mcmc.last_state
    if not isinstance(state, KernelState) or isinstance(state.num_diverging, jax.core.Tracer):
        return
    num = int(np.sum(state.num_diverging))
    total = mcmc.num_samples * mcmc.num_chains
    if num:
        warn(
            f"{num} of {total} draws diverged: a non-finite potential or position; each kept the last good state. "
            "Use a smaller step_size (or a decaying schedule), a longer warm-up, or a larger nugget in the "
            "functional prior."
        )
    temperature = np.asarray(state.mean_temperature) / mcmc.sampler.temperature
    if mcmc.sampler.step_size is None and np.any(np.asarray(state.warmup.step_size) == 0):
        warn(
            "Warm-up found no step size, and the chain stood still: the potential has no positive curvature where the "
            "chain was. Give the kernel a step_size."
        )
    if is_rounded(state):
        warn(
            f"Rounding to {state.scale.dtype} is not small beside the posterior's width for some parameter, so the "
            "draws are coarse: it is far from 0 and known precisely. Center it (sample its difference from a known "
            'value), or jax.config.update("jax_enable_x64", True) before anything else.'
        )
    accept_prob = np.asarray(state.mean_accept_prob)
    if np.any(accept_prob < MIN_ACCEPT_PROB):
        warn(
            f"The Metropolis test accepts {100 * np.min(accept_prob):.0f} % of the steps, so the chain hardly moves. "
            "Use a smaller step_size, or leave it None for warm-up to find it."
        )
    is_tested = np.any(accept_prob != 1.0)  # then the draws have the right distribution, whatever the temperature
    size = state.scale.shape[-1]
    tolerance = 0.1 + 4.0 * np.sqrt(2.0 / (size * max(1, mcmc.num_samples)))
    if mcmc.sampler.has_momentum and not is_tested and np.any(temperature > 1.0 + tolerance):
        warn(
            f"The chain runs hot: mean kinetic temperature {np.max(temperature):.2f} instead of 1, so the draws are "
            "wider than the posterior. Use a smaller step_size, a larger friction, or larger minibatches."
        )
