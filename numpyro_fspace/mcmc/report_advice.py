"""The lines of a report's advice: one for each doubt, with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.mcmc.sampler_doubts import temperature_doubts
from numpyro_fspace.posterior.limits import (
    ACCEPTANCE_LIMIT,
    DRIFT_LIMIT,
    NOISE_LIMIT,
    SHORTFALL_LIMIT,
    WEIGHTED_NOISE_LIMIT,
)

if TYPE_CHECKING:
    from numpyro_fspace.mcmc.report_table import Report
    from numpyro_fspace.posterior.convergence_doubts import Doubt

__all__ = ["advice"]


def advice(
    report: Report, *, convergence: list[Doubt], sampler: list[str], shortfall_sd: float, is_tested: bool
) -> Iterator[str]:
    """The lines of a report's advice, the most severe first.

    A chain whose log likelihood falls short is named only beside a doubt that is not about effective sample sizes: the
    likelihood of latent values of rows varies by more than ``shortfall_sd``.

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
        yield from temperature_doubts(report.configurational)
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
