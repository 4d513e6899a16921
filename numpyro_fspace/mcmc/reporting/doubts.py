"""Doubts about a run and their cures: the lines of a report's advice, and of the warnings at the end of a run.

Their thresholds are in ``posterior/thresholds.py``. Doubts about convergence, which predictions share, are in
``posterior/convergence_doubts.py``, and those about a product of priors in ``posterior/product_priors.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from numpyro_fspace.mcmc.reporting.report_table import Report
from numpyro_fspace.posterior.convergence_doubts import Doubt
from numpyro_fspace.posterior.thresholds import (
    ACCEPTANCE_LIMIT,
    DRIFT_LIMIT,
    KINETIC_LIMIT,
    LEADING_LIMIT,
    MEAN_LIMIT,
    MIN_ACCEPT_PROB,
    NOISE_LIMIT,
    NUM_ERRORS,
    SHORTFALL_LIMIT,
    WEIGHTED_NOISE_LIMIT,
    kinetic_margin,
)


def advice(
    report: Report, *, convergence: list[Doubt], sampler: list[str], shortfall_sd: float, is_tested: bool
) -> Iterator[str]:
    """The lines of a report's advice, the most severe first.

    A chain with a low log likelihood is named only beside another doubt, other than one about effective sample sizes:
    with a latent value for each row, the log likelihood varies by more than ``shortfall_sd`` in good chains too.

    Args:
        report: a report without advice.
        convergence: doubts about R-hat, effective sample sizes and chains that stand still.
        sampler: the lines of ``sampler_doubts``.
        shortfall_sd: the standard deviation of the log likelihood in a chain that has converged.
        is_tested: whether the steps passed a Metropolis test.
    """
    yield from (doubt.text for doubt in convergence)
    (apart,) = np.nonzero(report.shortfall > SHORTFALL_LIMIT * shortfall_sd)
    if len(apart) and any(doubt.about != "ESS" for doubt in convergence):
        are_several = len(apart) > 1
        yield (
            f"the log likelihood of chain{'s' if are_several else ''} {', '.join(map(str, apart))} (the first being 0) "
            f"is {'up to ' if are_several else ''}{report.shortfall.max():.4g} below that of the best chain, far more "
            "than chance explains. A chain far below most others is probably stuck, and one far above them may "
            "interpolate the data. Leave such a chain out, or run again with another key or a larger num_warmup."
        )
    yield from sampler
    if report.configurational is not None:
        yield from temperature_doubts(report.configurational, is_tested=is_tested)
    if not is_tested and report.acceptance < ACCEPTANCE_LIMIT:
        yield (
            f"a Metropolis test would accept {report.acceptance:.2f} of the draws: the discretization may bias them. "
            "Compare f with a run at half the step size."
        )
    if report.noise_share > NOISE_LIMIT:
        yield (
            f"the gradient's noise adds {100 * report.noise_share:.0f} % to the temperature: enlarge the minibatch, "
            "fix the measurement points or take more of them, or shorten step_size."
        )
    elif report.weighted_noise_share > WEIGHTED_NOISE_LIMIT:
        yield (
            f"the gradient's noise raises the temperature of the few directions that it acts on to "
            f"{1.0 + report.weighted_noise_share:.1f} times that of the rest, which the mean temperature does not "
            "show: f is too uncertain there. Enlarge the minibatch, fix the measurement points, or raise friction."
        )
    if np.all(report.drift > 1.0 + 0.5 * (DRIFT_LIMIT - 1.0)) and np.mean(report.drift) > DRIFT_LIMIT:
        yield (
            f"the weights' mean square grew by a factor {np.mean(report.drift):.2f} over the run: warm-up was too "
            "short, or their distribution is improper (fs.model.flat())."
        )


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
            f"{num_diverging} of {num_samples * num_chains} draws diverged: a potential or position is not finite, or "
            "the momentum is hotter than 10⁴; each kept the last good state. Use a longer warm-up or a smaller "
            "step_size, keep scales away from 0 by their priors, and give a functional prior a larger nugget. If the "
            "run continues from a state of other data, warm up again."
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
            f"Use a smaller step_size{', or leave it None for warm-up to find it' if is_given else ''}. If the "
            "run continues from a state of another model or data, warm up again."
        )
    # With a test the draws have the right distribution, whatever the temperature.
    temperature = np.max(np.asarray(state.mean_temperature)) / kernel.temperature
    limit = KINETIC_LIMIT + kinetic_margin(state.scale.shape[-1], max(1, num_samples))
    if kernel.sampler_type.has_momentum and not is_tested and temperature > limit:
        yield (
            f"the kinetic temperature is too high: {temperature:.2f} times the sampler's on average, so the draws are "
            "wider than the posterior. Use a smaller step_size, a larger friction, or larger minibatches."
        )


def _is_rounded(state) -> bool:
    """Whether the sd of some parameter, given all others, is below ten units in its last place.

    The matrix of a preconditioner that is dense in all parameters tells; without one the answer is no.
    """
    factor = np.asarray(state.warmup.learned.factor, float)
    if factor.shape[-1] != state.scale.shape[-1]:
        return False
    inverse = np.linalg.pinv(np.asarray(state.scale, float)[..., None] * factor)
    precision = np.sqrt(np.sum(inverse**2, axis=-2))  # its diagonal is that of (S Sᵀ)⁻¹
    z = np.concatenate([np.reshape(a, (*state.scale.shape[:-1], -1)) for a in jax.tree.leaves(state.z)], -1)
    return bool(np.any(np.finfo(state.scale.dtype).eps * np.abs(z) * precision > 0.1))


def temperature_doubts(found, *, is_tested: bool = False) -> list[str]:
    """A line if a configurational temperature is too high, or too low, by more than chance allows.

    With a Metropolis test every step size samples the posterior, so that only a chain that has not reached it is wide.
    """
    cure = (
        "The chain has not reached the posterior: run longer, with a longer warm-up."
        if is_tested
        else "Shorten step_size (try half of it), enlarge the minibatch, fix the measurement points or take more of "
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
