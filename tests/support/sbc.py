"""Simulation-based calibration: ranks of the truth among draws, and how well their χ² tells right from wrong.

If (θ, y) come from a model's joint law and L independent draws of θ from its posterior given y, the rank of h(θ, y)
among the draws' own h is uniform on {0, …, L}, for every h [Talts et al. 2018].
"""

from __future__ import annotations

import numpy as np
import scipy.stats

__all__ = ["joint_p_value", "p_values", "plot_ecdf", "power"]


def p_values(ranks, num_draws: int, num_bins: int):
    """χ² of the ranks [N, Q] in 0, …, num_draws against the uniform law, in ``num_bins`` equal bins, [Q]."""
    width, rest = divmod(num_draws + 1, num_bins)
    assert not rest, f"{num_draws + 1} ranks do not fill {num_bins} bins equally"
    counts = [np.bincount(column // width, minlength=num_bins) for column in np.asarray(ranks).T]
    return scipy.stats.chisquare(counts, axis=1).pvalue


def joint_p_value(ranks, num_draws: int, num_bins: int) -> float:
    """The smallest of the Q p-values, times Q: below α with probability α at most, whatever their dependence."""
    values = p_values(ranks, num_draws, num_bins)
    return min(1.0, len(values) * float(values.min()))


def power(dimension: int, sd_ratio: float, num_simulations: int, num_bins: int, num_quantities: int, level: float):
    """Probability that the joint p-value is below ``level`` because of the log joint density alone.

    For a Gaussian posterior of so many dimensions the log density falls by half a χ² variable, and by sd_ratio² times
    that for draws that are too wide by ``sd_ratio``; the χ² of the ranks is then noncentral.
    """
    law = scipy.stats.chi2(dimension)
    below = law.cdf(sd_ratio**2 * law.ppf(np.linspace(0.0, 1.0, num_bins + 1)))  # P(truth < quantiles of the draws)
    excess = num_simulations * num_bins * np.sum((np.diff(below) - 1.0 / num_bins) ** 2)
    threshold = scipy.stats.chi2.isf(level / num_quantities, num_bins - 1)
    return float(scipy.stats.ncx2.sf(threshold, num_bins - 1, excess))


def plot_ecdf(ax, ranks, num_draws: int, labels, level: float = 0.95, num_null: int = 4000):
    """The ECDF of each quantity's ranks less the uniform law's, over the band that holds a whole curve with ``level``.

    The band is pointwise binomial, widened until it is simultaneous, by ``num_null`` curves of uniform ranks [Säilynoja
    et al. 2022].
    """
    num, grid = len(ranks), np.arange(num_draws + 1)
    below = (grid + 1.0) / (num_draws + 1)

    def ecdf(columns):
        return np.stack([np.searchsorted(np.sort(column), grid, side="right") for column in columns])

    null = ecdf(np.random.default_rng(0).integers(0, num_draws + 1, (num_null, num)))
    law = scipy.stats.binom(num, below[:-1])
    tails = 2.0 * np.minimum(law.cdf(null[:, :-1]), law.sf(null[:, :-1] - 1))
    pointwise = np.quantile(tails.min(1), 1.0 - level)
    low, high = law.ppf(0.5 * pointwise) / num, law.isf(0.5 * pointwise) / num
    ax.fill_between(below[:-1], low - below[:-1], high - below[:-1], color="0.85", label=f"{level:.0%} band")
    for curve, label in zip(ecdf(ranks.T) / num, labels, strict=True):
        ax.plot(below, curve - below, lw=1.0, label=label)
