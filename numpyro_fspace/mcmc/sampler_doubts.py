"""Doubts about the sampler of a run and their cures: lines of the report's advice and of the run's warnings.

Those about convergence are in ``posterior/convergence_doubts.py``, and those about a product of priors in
``posterior/product_priors.py``. ``report_advice.py`` puts the lines of a report together.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from numpyro_fspace.posterior.limits import (
    KINETIC_LIMIT,
    LEADING_LIMIT,
    MEAN_LIMIT,
    MIN_ACCEPT_PROB,
    NUM_ERRORS,
    kinetic_margin,
)

__all__ = ["sampler_doubts", "temperature_doubts"]


def sampler_doubts(kernel, state, num_samples: int) -> Iterator[str]:
    """Lines on draws that diverged, were rejected or rounded, and on kinetic temperatures that are too high.

    Args:
        kernel: one of our kernels.
        state: the state of its chains at the end of the run.
        num_samples: draws of each chain.
    """
    num_diverging, num_chains = int(np.sum(state.num_diverging)), np.size(state.num_diverging)
    if num_diverging:
        yield (
            f"{num_diverging} of {num_samples * num_chains} draws diverged: a non-finite potential or position; each "
            "kept the last good state. A few in a thousand do no harm. Use a longer warm-up or a smaller step_size, "
            "keep scales away from 0 by their priors, and give a functional prior a larger nugget."
        )
    if kernel.step_size is None and np.any(np.asarray(state.warmup.step_size) == 0):
        yield (
            "warm-up found no step size, and the chain stood still: the potential has no positive curvature where the "
            "chain was. Give the kernel a step_size."
        )
    if _is_rounded(state):
        yield (
            f"{state.scale.dtype} does not resolve the posterior of some parameter, which is far from 0 and known "
            "precisely: its draws lie on a coarse grid. Center it (sample its difference from a known value), or call "
            'jax.config.update("jax_enable_x64", True) before anything else.'
        )
    accept_prob = np.asarray(state.mean_accept_prob)
    is_tested = kernel.metropolis is not False and np.any(accept_prob != 1.0)
    if np.any(accept_prob < MIN_ACCEPT_PROB):
        found = "accepts" if is_tested else "would accept"
        result = "the chain hardly moves" if is_tested else "the draws may have another spread than the posterior"
        is_given = kernel.step_size is not None
        yield (
            f"the Metropolis test {found} only {100 * np.min(accept_prob):.0f} % of the moves, so {result}. "
            f"Use a smaller step_size{', or leave it None for warm-up to find it' if is_given else ''}."
        )
    # With a test the draws have the right distribution, whatever the temperature.
    temperature = np.max(np.asarray(state.mean_temperature)) / kernel.temperature
    limit = KINETIC_LIMIT + kinetic_margin(state.scale.shape[-1], max(1, num_samples))
    if kernel.has_momentum and not is_tested and temperature > limit:
        yield (
            f"the kinetic temperature is too high: {temperature:.2f} times the sampler's on average, so the draws are "
            "wider than the posterior. Use a smaller step_size, a larger friction, or larger minibatches."
        )


def _is_rounded(state) -> bool:
    """Whether the sd of some parameter, given all others, is below ten units in its last place.

    The matrix of a dense preconditioner tells; without one the answer is no.
    """
    factor = np.asarray(state.warmup.learned.factor, float)
    if not factor.size:
        return False
    inverse = np.linalg.pinv(np.asarray(state.scale, float)[..., None] * factor)
    precision = np.sqrt(np.sum(inverse**2, axis=-2))  # its diagonal is that of (S Sᵀ)⁻¹
    z = np.concatenate([np.reshape(a, (*state.scale.shape[:-1], -1)) for a in jax.tree.leaves(state.z)], -1)
    return bool(np.any(np.finfo(state.scale.dtype).eps * np.abs(z) * precision > 0.1))


def temperature_doubts(found) -> list[str]:
    """A line if a configurational temperature is too high, or too low, by more than chance allows."""
    cure = (
        "Shorten step_size (try half of it), enlarge the minibatch, fix the measurement points or take more of "
        "them, or raise friction."
    )
    from scipy.stats import norm, t

    num_errors = t.isf(norm.sf(NUM_ERRORS), found.num_draws - 1)  # their size is estimated too
    limits = {"mean": MEAN_LIMIT, "leading": LEADING_LIMIT}
    for name, where in (("mean", ""), ("leading", " in the direction that the data determine best")):
        value, error = getattr(found, name), getattr(found, f"{name}_error")
        if value > limits[name] and np.log(value) > num_errors * error:
            return [
                f"the configurational temperature is {value:.2f} times the target's{where}: the draws are too wide, by "
                f"a factor of about {np.sqrt(value):.2f}, though R-hat may be fine. {cure}"
            ]
    if found.mean < 1.0 / MEAN_LIMIT and np.log(1.0 / max(found.mean, 1e-30)) > num_errors * found.mean_error:
        return [
            f"the configurational temperature is {found.mean:.2f} times the target's: the draws are not yet as wide as "
            "the posterior. Run longer, with a longer warm-up."
        ]
    return []
