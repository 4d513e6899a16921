"""The error of the predictive mean, and log densities of the predictive distribution, at held-out targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.metrics.checks import as_draws, as_finite, as_real, as_vector, per_point, positive

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float


def rmse(y: Float[ArrayLike, " N"], mean: Float[ArrayLike, " N"]) -> float:
    r"""Root mean squared error :math:`\sqrt{\frac1N \sum_i (y_i - m_i)^2}`.

    Args:
        y: targets, ``[N]``.
        mean: predictive means, ``[N]``: means over draws, not a single draw.

    Returns:
        The error, in the units of ``y``.

    Raises:
        ValueError: if a shape is wrong or a value is not finite.

    Example:
        >>> rmse([0.0, 2.0], [1.0, 1.0])
        1.0
    """
    y = as_vector(y, "y")
    mean = as_vector(mean, "mean")
    if mean.shape != y.shape:
        raise ValueError(f"mean has {len(mean)} entries, y has {len(y)}; they must agree.")
    return float(np.sqrt(np.mean((y - mean) ** 2)))


def _as_log_lik(log_lik: ArrayLike) -> np.ndarray:
    """Log densities ``[S, N]``. The value -inf is allowed: under that draw the target has density zero."""
    array = as_real(log_lik, "log_lik")
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"log_lik must have shape [S, N] (draws first) and not be empty, got {array.shape}; merge chains into one "
            "axis."
        )
    if np.isnan(array).any() or np.isposinf(array).any():
        raise ValueError("log_lik holds NaN or +inf; check the draws for divergences and the scales for zeros.")
    return array


def lpd(log_lik: Float[ArrayLike, "S N"]) -> float:
    r"""Mean log predictive density of the mixture over draws.

    .. math:: \frac1N \sum_i \log \frac1S \sum_s p(y_i \mid f_s(x_i), \theta_s)

    Args:
        log_lik: :math:`\log p(y_i \mid f_s(x_i), \theta_s)` at held-out targets, ``[S, N]``.

    Returns:
        The score in nats per point; higher is better. It depends on the units of ``y`` (see :func:`to_raw_units`).

    Raises:
        ValueError: if ``log_lik`` is not ``[S, N]``, or holds NaN or +inf.

    Example:
        >>> round(lpd(np.log([[0.2], [0.4]])), 6) == round(float(np.log(0.3)), 6)
        True
    """
    log_lik = _as_log_lik(log_lik)
    return float(np.mean(np.logaddexp.reduce(log_lik, axis=0) - np.log(len(log_lik))))


def gibbs_score(log_lik: Float[ArrayLike, "S N"]) -> float:
    r"""Mean log density over draws and points.

    .. math:: \frac1{NS} \sum_{i,s} \log p(y_i \mid f_s(x_i), \theta_s)

    Some papers call this the "expected log-likelihood". By Jensen's inequality it is at most :func:`lpd`. State which
    of the two you report.

    Args:
        log_lik: log densities at held-out targets, ``[S, N]``.

    Returns:
        The score in nats per point; higher is better. It depends on the units of ``y``, as :func:`lpd` does.

    Raises:
        ValueError: if ``log_lik`` is not ``[S, N]``, or holds NaN or +inf.

    Example:
        >>> gibbs_score([[-1.0, -3.0], [-2.0, -2.0]])
        -2.0
    """
    return float(np.mean(_as_log_lik(log_lik)))


def _gaussian_log_density(y: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


def gaussian_lpd(
    y: Float[ArrayLike, " N"], mean: Float[ArrayLike, " N"], variance: Float[ArrayLike, " N"] | float
) -> float:
    r"""Mean log density of one Gaussian per point, :math:`\frac1N \sum_i \log N(y_i; m_i, v_i)`.

    Args:
        y: targets, ``[N]``.
        mean: predictive means, scalar or ``[N]``.
        variance: predictive variances *including the noise variance*, scalar or ``[N]``, positive.

    Returns:
        The score; higher is better.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or a variance is not positive.

    Example:
        >>> round(gaussian_lpd([0.0], [0.0], 1.0), 4)
        -0.9189
    """
    y = as_vector(y, "y")
    mean = per_point(mean, "mean", len(y))
    variance = positive(per_point(variance, "variance", len(y)), "variance")
    return float(np.mean(_gaussian_log_density(y, mean, variance)))


def gaussian_mixture_lpd(
    y: Float[ArrayLike, " N"],
    f: Float[ArrayLike, "S N"],
    sigma: Float[ArrayLike, "S N"] | Float[ArrayLike, " S"] | float,
) -> float:
    r"""The :func:`lpd` of function draws under Gaussian noise.

    .. math:: \frac1N \sum_i \log \frac1S \sum_s N(y_i; f_{si}, \sigma_{si}^2)

    Args:
        y: targets, ``[N]``.
        f: function draws, ``[S, N]``.
        sigma: noise standard deviations in the units of ``y``: a scalar, one per draw ``[S]``, or ``[S, N]``; positive.

    Returns:
        The score; higher is better.

    Raises:
        ValueError: if a shape is wrong, a value is not finite, or a standard deviation is not positive.

    Example:
        >>> round(gaussian_mixture_lpd([0.0], [[-1.0], [1.0]], 1.0), 4)
        -1.4189
    """
    y = as_vector(y, "y")
    f = as_draws(f, "f", len(y))
    sigma = positive(as_finite(sigma, "sigma"), "sigma")
    if sigma.shape not in ((), (len(f),), (len(f), 1), f.shape):
        raise ValueError(f"sigma must be a scalar or have shape [{len(f)}] or {f.shape}, got {sigma.shape}.")
    sigma = sigma[:, None] if sigma.ndim == 1 else sigma
    return lpd(_gaussian_log_density(y, f, sigma**2))


def to_raw_units(rmse: float, lpd: float, y_std: float) -> tuple[float, float]:
    r"""Scores of standardized targets, :math:`(y - \bar y) / s`, in the units of ``y``.

    Args:
        rmse: root mean squared error on the standardized scale.
        lpd: mean log (predictive) density on the standardized scale.
        y_std: :math:`s`, the standard deviation by which the targets were divided, positive.

    Returns:
        ``(rmse * y_std, lpd - log(y_std))``.

    Raises:
        ValueError: if ``y_std`` is not positive and finite.

    Example:
        >>> to_raw_units(0.5, -1.0, 1.0)
        (0.5, -1.0)
    """
    if not (np.isfinite(y_std) and y_std > 0):
        raise ValueError(f"y_std must be positive and finite, got {y_std}.")
    return float(rmse * y_std), float(lpd - np.log(y_std))
