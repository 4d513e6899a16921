"""The kernelized Stein discrepancy between draws and a distribution with known score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace._checks import check_choice
from numpyro_fspace.metrics.checks import as_finite, positive

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float

#: Radial kernels by name: k and its first two derivatives with respect to r² = |x - y|²/ℓ².
_KERNELS = {
    "imq": lambda r2: ((1 + r2) ** -0.5, -0.5 * (1 + r2) ** -1.5, 0.75 * (1 + r2) ** -2.5),
    "rbf": lambda r2: (np.exp(-0.5 * r2), -0.5 * np.exp(-0.5 * r2), 0.25 * np.exp(-0.5 * r2)),
}
#: Number of rows of the matrix of pairs in memory at a time.
_NUM_ROWS = 500


def ksd(
    draws: Float[ArrayLike, "S D"],
    score: Float[ArrayLike, "S D"],
    *,
    kernel: str = "imq",
    bandwidth: float | None = None,
    unbiased: bool = False,
) -> float:
    r"""Squared kernelized Stein discrepancy between the distribution q of draws and a distribution p with known score.

    .. math::
        \mathrm{KSD}^2 &= E_{x, y \sim q}\big[s(x)^\top s(y)\, k + s(x)^\top \nabla_y k + s(y)^\top \nabla_x k
        + \mathrm{tr}\, \nabla_x \nabla_y k\big], \\
        s &= \nabla \log p, \quad k = k(x, y)

    Under mild conditions it is zero if and only if q = p. Neither draws from p nor its normalizing constant are needed.
    For S draws from p itself, the estimate over all pairs has the mean
    :math:`\frac1S E[s^\top s + \mathrm{tr}\,\nabla_x \nabla_y k(x, x)]`, and the estimate over pairs of different draws
    has the mean zero.

    Args:
        draws: draws from q, ``[S, D]``.
        score: s = ∇ log p at each draw, ``[S, D]``.
        kernel: ``"imq"``, :math:`(1 + r^2)^{-1/2}`, which detects every deviation from p, or ``"rbf"``,
            :math:`\exp(-r^2/2)`, which may miss deviations in many dimensions; :math:`r = |x - y| / \ell`.
        bandwidth: ℓ, in the units of the draws; None means the median distance between (at most 1000) draws. To compare
            values, use the same ℓ for all of them, and scale the coordinates alike.
        unbiased: whether to average over pairs of different draws (the U-statistic), which can be negative. The
            default averages over all pairs (the V-statistic) and gives the squared discrepancy of the sample itself.

    Returns:
        KSD². Liu et al. call KSD² the discrepancy, Gorham and Mackey its root.

    Raises:
        ValueError: if the shapes differ, a value is not finite, the bandwidth is not positive, the kernel is
            unknown, or there are fewer than two draws.

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(500, 2))
        >>> score = -draws  # of N(0, I)
        >>> ksd(draws, score) < 0.02 < ksd(draws + 1.0, -(draws + 1.0))
        True

    Reference: Q. Liu, J. Lee, M. Jordan (2016), *A kernelized Stein discrepancy for goodness-of-fit tests*; J. Gorham,
    L. Mackey (2017), *Measuring sample quality with kernels*.
    """
    draws, score = as_finite(draws, "draws"), as_finite(score, "score")
    if draws.ndim != 2 or draws.shape != score.shape:
        raise ValueError(f"draws and score must both have shape [S, D], got {draws.shape} and {score.shape}.")
    num_draws, num_dims = draws.shape
    if num_draws < 2:
        raise ValueError("draws holds one draw; a discrepancy needs two or more.")
    check_choice(kernel, "kernel", _KERNELS)
    bandwidth = _median_distance(draws) if bandwidth is None else bandwidth
    bandwidth = float(positive(as_finite(bandwidth, "bandwidth"), "bandwidth"))
    points: np.ndarray = draws - draws.mean(0)  # the kernel depends only on differences
    squares, dots = np.sum(points**2, 1), np.sum(score * points, 1)
    total = 0.0
    for start in range(0, num_draws, _NUM_ROWS):
        rows = slice(start, start + _NUM_ROWS)
        r2 = np.maximum(squares[rows, None] + squares - 2 * points[rows] @ points.T, 0) / bandwidth**2
        k, slope, curve = _KERNELS[kernel](r2)
        # With k = φ(r²): ∇_x k = 2φ' (x - y)/ℓ² = -∇_y k, tr ∇_x ∇_y k = -(2Dφ' + 4φ'' r²)/ℓ².
        cross = dots[rows, None] - score[rows] @ points.T + dots - points[rows] @ score.T
        terms = (score[rows] @ score.T) * k
        terms -= (2 * slope * cross + 2 * num_dims * slope + 4 * curve * r2) / bandwidth**2
        total += terms.sum()
    if not unbiased:
        return float(total / num_draws**2)
    slope = _KERNELS[kernel](np.zeros(()))[1]
    diagonal = np.sum(score**2) - 2 * num_draws * num_dims * slope / bandwidth**2
    return float((total - diagonal) / (num_draws * (num_draws - 1)))


def _median_distance(draws):
    """Median distance between draws, computed from at most 1000 of them."""
    from scipy.spatial.distance import pdist

    return float(np.median(pdist(draws[:: -(-len(draws) // 1000)])))
