"""Calibration and sharpness of predictive distributions, and distances between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.metrics.checks import as_draws, as_finite, as_level, as_vector, per_point, positive

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float


def coverage(y: Float[ArrayLike, " N"], draws: Float[ArrayLike, "S N"], level: float = 0.9) -> float:
    r"""Fraction of targets in the draws' central interval, from :math:`(1-\ell)/2` to :math:`(1+\ell)/2`.

    Args:
        y: targets, ``[N]``.
        draws: draws of the targets, *including observation noise*, ``[S, N]``. Intervals of the function alone cover
            too few targets.
        level: nominal probability :math:`\ell` of the interval.

    Returns:
        The fraction, which is ``level`` on average for calibrated predictions and independent draws. The interval of S
        draws covers at most (S - 1)/(S + 1): 82 % for ten, 90 % for nineteen. Intervals of counts contain their ends,
        and so cover more than ``level`` even where predictions are calibrated. To judge calibration, add uniform noise
        on (-1/2, 1/2) to the targets and to the draws.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or ``level`` is not in (0, 1).

    Example:
        >>> coverage([0.0, 9.0], [[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]], level=0.5)
        0.5
    """
    return float(calibration_curve(y, draws, np.array([level]))[0])


def calibration_curve(
    y: Float[ArrayLike, " N"], draws: Float[ArrayLike, "S N"], levels: Float[ArrayLike, " L"]
) -> Float[np.ndarray, " L"]:
    """The :func:`coverage` of central intervals of several levels; if it is below them, predictions are overconfident.

    Args:
        y: targets, ``[N]``.
        draws: draws of the targets, including observation noise, ``[S, N]``.
        levels: nominal probabilities in (0, 1), ``[L]``.

    Returns:
        Observed fractions, ``[L]``.

    Raises:
        ValueError: as for :func:`coverage`.

    Example:
        >>> calibration_curve([0.0, 9.0], [[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]], [0.5, 0.9])
        array([0.5, 0.5])
    """
    y = as_vector(y, "y")
    draws = as_draws(draws, "draws", len(y))
    levels = np.array([as_level(level) for level in as_vector(levels, "levels")])
    # By this rule an interval of a few draws covers its level on average. NumPy's default covers less.
    tails = [(1 - levels) / 2, (1 + levels) / 2]
    low, high = np.quantile(draws, tails, axis=0, method="weibull")  # each [L, N]
    return np.mean((low <= y) & (y <= high), axis=1)


def gaussian_coverage(
    y: Float[ArrayLike, " N"],
    mean: Float[ArrayLike, " N"],
    variance: Float[ArrayLike, " N"] | float,
    level: float = 0.9,
) -> float:
    """The :func:`coverage` of Gaussian predictive distributions.

    Args:
        y: targets, ``[N]``.
        mean: predictive means, scalar or ``[N]``.
        variance: predictive variances including the noise variance, scalar or ``[N]``, positive.
        level: nominal probability of the interval.

    Returns:
        The fraction of targets in their intervals.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, a variance is not positive, or ``level`` is not in
            (0, 1).

    Example:
        >>> gaussian_coverage([0.0, 1.9, 2.0], 0.0, 1.0, level=0.95)
        0.6666666666666666
    """
    from scipy.special import ndtri

    z = _standardize(y, mean, variance)[0]
    return float(np.mean(np.abs(z) <= ndtri((1 + as_level(level)) / 2)))


def crps(y: Float[ArrayLike, " N"], draws: Float[ArrayLike, "S N"], *, fair: bool = True) -> float:
    r"""Mean continuous ranked probability score, estimated from draws in :math:`O(S \log S)`.

    .. math::
        \frac1N \sum_i \Big[ \frac1S \sum_s |x_{si} - y_i|
        - \frac1{2 S (S-1)} \sum_{s,t} |x_{si} - x_{ti}| \Big]

    The *fair* estimate, which is the one above and the default, is an unbiased estimate of the score of the
    distribution of the draws if they are independent, so values for different ``S`` are comparable. With ``fair=False``
    the divisor of the second sum is :math:`2S^2`, and the score is that of the empirical distribution.

    Args:
        y: targets, ``[N]``.
        draws: draws of the targets, including observation noise, ``[S, N]``.
        fair: whether to compute the fair estimate.

    Returns:
        The score in the units of ``y``; lower is better. A fair score of few draws can be negative.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or a fair score of a single draw is requested.

    Example:
        >>> crps([0.0], [[-1.0], [1.0]]), crps([0.0], [[-1.0], [1.0]], fair=False)
        (0.0, 0.5)

    Reference: C. Ferro (2014), *Fair scores for ensemble forecasts*.
    """
    y = as_vector(y, "y")
    draws = as_draws(draws, "draws", len(y))
    num_draws = len(draws)
    if fair and num_draws < 2:
        raise ValueError(
            "draws holds one draw, but the fair score needs at least two; pass fair=False for the absolute error."
        )
    # For draws in ascending order x_(r), r = 1..S: sum_{s<t} |x_s - x_t| = sum_r (2r - S - 1) x_(r).
    weights = 2 * np.arange(1, num_draws + 1) - num_draws - 1
    pairs = weights @ np.sort(draws, axis=0)
    divisor = num_draws * (num_draws - 1 if fair else num_draws)
    return float(np.mean(np.abs(draws - y).mean(axis=0) - pairs / divisor))


def gaussian_crps(
    y: Float[ArrayLike, " N"], mean: Float[ArrayLike, " N"], variance: Float[ArrayLike, " N"] | float
) -> float:
    r"""Mean continuous ranked probability score of Gaussian predictive distributions, in closed form.

    .. math:: \frac1N \sum_i \sigma_i \Big[ z_i (2 \Phi(z_i) - 1) + 2 \varphi(z_i) - \pi^{-1/2} \Big], \qquad
              z_i = (y_i - m_i) / \sigma_i

    Args:
        y: targets, ``[N]``.
        mean: predictive means, scalar or ``[N]``.
        variance: predictive variances including the noise variance, scalar or ``[N]``, positive.

    Returns:
        The score in the units of ``y``; lower is better.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or a variance is not positive.

    Example:
        >>> round(gaussian_crps([0.0], 0.0, 1.0), 4)
        0.2337

    Reference: T. Gneiting, A. Raftery (2007), *Strictly proper scoring rules, prediction, and estimation*.
    """
    from scipy.special import ndtr

    z, sd = _standardize(y, mean, variance)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return float(np.mean(sd * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / np.sqrt(np.pi))))


def _standardize(y: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    y = as_vector(y, "y")
    sd = np.sqrt(positive(per_point(variance, "variance", len(y)), "variance"))
    return (y - per_point(mean, "mean", len(y))) / sd, sd


def gaussian_w2(
    mean1: Float[ArrayLike, " N"],
    var1: Float[ArrayLike, " N"],
    mean2: Float[ArrayLike, " N"],
    var2: Float[ArrayLike, " N"],
    *,
    squared: bool = False,
) -> float:
    r"""Mean over points of the 2-Wasserstein distance between the marginals of two Gaussian distributions.

    .. math:: \frac1N \sum_i W_2(i), \qquad W_2(i)^2 = (m_{1i} - m_{2i})^2 + (\sigma_{1i} - \sigma_{2i})^2

    Args:
        mean1: first means, ``[N]``.
        var1: first variances, scalar or ``[N]``, non-negative.
        mean2: second means, scalar or ``[N]``.
        var2: second variances, scalar or ``[N]``, non-negative.
        squared: whether to average :math:`W_2^2` instead. Published figures may be either: in one dimension, transport
            libraries usually return the square.

    Returns:
        The mean distance, in the units of the means (squared if ``squared``).

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or a variance is negative.

    Example:
        >>> gaussian_w2([0.0], 1.0, [3.0], 25.0)
        5.0
    """
    mean1 = as_vector(mean1, "mean1")
    mean2 = per_point(mean2, "mean2", len(mean1))
    var1, var2 = per_point(var1, "var1", len(mean1)), per_point(var2, "var2", len(mean1))
    if min(var1.min(), var2.min()) < 0:
        raise ValueError("var1 and var2 must not be negative; clip rounding errors with numpy.maximum(var, 0).")
    w2_squared = (mean1 - mean2) ** 2 + (np.sqrt(var1) - np.sqrt(var2)) ** 2
    return float(np.mean(w2_squared if squared else np.sqrt(w2_squared)))


def sample_w2(draws1: Float[ArrayLike, "S N"], draws2: Float[ArrayLike, "S N"], *, squared: bool = False) -> float:
    r"""Mean over points of the 2-Wasserstein distance between the marginals of two samples.

    The distance between two samples of the same distribution is positive: for ``S = 1000`` draws of a standard normal
    distribution the mean of :math:`W_2` is about 0.08, and that of its square about 0.006.

    Args:
        draws1: first sample, ``[S, N]``.
        draws2: second sample, ``[S, N]``, with as many draws.
        squared: whether to average :math:`W_2^2` instead, as in :func:`gaussian_w2`.

    Returns:
        The mean distance, in the units of the draws (squared if ``squared``).

    Raises:
        ValueError: if the shapes differ or a value is not finite.

    Example:
        >>> sample_w2([[0.0], [1.0]], [[3.0], [2.0]])
        2.0
    """
    draws1 = as_finite(draws1, "draws1")
    if draws1.ndim != 2:
        raise ValueError(f"draws1 must have shape [S, N], got {draws1.shape}.")
    draws2 = as_draws(draws2, "draws2", draws1.shape[1])
    if len(draws1) != len(draws2):
        raise ValueError(f"draws1 has {len(draws1)} draws, draws2 has {len(draws2)}; thin the longer one.")
    w2_squared = np.mean((np.sort(draws1, axis=0) - np.sort(draws2, axis=0)) ** 2, axis=0)
    return float(np.mean(w2_squared if squared else np.sqrt(w2_squared)))
