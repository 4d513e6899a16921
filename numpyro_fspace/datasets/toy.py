"""Toy problems: one-dimensional regressions with a gap and unobserved borders, two moons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace._checks import check_key

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def extrapolation(
    key: Array, *, num_per_side: int = 10, noise: float = 0.5
) -> tuple[Float[Array, "N 1"], Float[Array, " N"]]:
    """Noisy observations of `extrapolation_truth` on both sides of a gap.

    ``y = f(x) + noise * e`` with ``e ~ N(0, 1)``. Half of the ``x`` are from ``U(-0.75, -0.25)``, half from
    ``U(0.25, 0.75)``.

    Args:
        key: random key.
        num_per_side: number of points on each side of the gap.
        noise: standard deviation of the observation noise.

    Returns:
        Inputs ``[N, 1]`` and targets ``[N]``, ``N = 2 * num_per_side``, not standardized.

    Raises:
        ValueError: if ``num_per_side`` is below 1 or ``noise`` is negative.

    Example:
        >>> import jax
        >>> from numpyro_fspace.datasets import extrapolation
        >>> x, y = extrapolation(jax.random.key(0))
        >>> x.shape, y.shape
        ((20, 1), (20,))

    Reference:
        M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural networks*.
    """
    _check("num_per_side", num_per_side, 1, noise)
    check_key(key, "key", single=True)
    key_left, key_right, key_noise = jax.random.split(key, 3)
    left = jax.random.uniform(key_left, (num_per_side, 1), minval=-0.75, maxval=-0.25)
    right = jax.random.uniform(key_right, (num_per_side, 1), minval=0.25, maxval=0.75)
    x = jnp.concatenate([left, right])
    return x, extrapolation_truth(x) + noise * jax.random.normal(key_noise, (2 * num_per_side,))


def extrapolation_truth(x: Float[Array, "N 1"]) -> Float[Array, " N"]:
    """The noise-free function ``sin(3 pi x) + 0.3 cos(9 pi x) + 0.5 sin(7 pi x)``.

    Args:
        x: inputs ``[N, 1]``.

    Returns:
        Values ``[N]``.

    Raises:
        ValueError: if ``x`` is not ``[N, 1]``.

    Example:
        >>> from numpyro_fspace.datasets import extrapolation_grid, extrapolation_truth
        >>> extrapolation_truth(extrapolation_grid(5)).shape
        (5,)
    """
    if jnp.ndim(x) != 2 or jnp.shape(x)[1] != 1:
        raise ValueError(f"x must have shape [N, 1], got {list(jnp.shape(x))}.")
    phase = jnp.pi * jnp.asarray(x)[:, 0]
    return jnp.sin(3 * phase) + 0.3 * jnp.cos(9 * phase) + 0.5 * jnp.sin(7 * phase)


def extrapolation_grid(num: int = 201, low: float = -1.0, high: float = 1.0) -> Float[Array, "num 1"]:
    """Inputs ``[num, 1]``, evenly spaced from ``low`` to ``high``, for plots of the extrapolation example."""
    return jnp.linspace(low, high, num)[:, None]


def sine(key: Array, *, num_per_side: int = 10, noise: float = 0.1) -> tuple[Float[Array, "N 1"], Float[Array, " N"]]:
    """Noisy observations of ``sin(2 pi x)`` on both sides of a gap.

    Half of the ``x`` are from ``U(-1, -0.5)``, half from ``U(0.5, 1)``.

    Args:
        key: random key.
        num_per_side: number of points on each side of the gap.
        noise: standard deviation of the observation noise.

    Returns:
        Inputs ``[N, 1]`` and targets ``[N]``, ``N = 2 * num_per_side``.

    Raises:
        ValueError: if ``num_per_side`` is below 1 or ``noise`` is negative.

    Example:
        >>> import jax
        >>> from numpyro_fspace.datasets import sine
        >>> x, y = sine(jax.random.key(0))
        >>> x.shape, y.shape
        ((20, 1), (20,))

    Reference:
        T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space variational inference
        in Bayesian neural networks*, appendix A.3.1.
    """
    _check("num_per_side", num_per_side, 1, noise)
    check_key(key, "key", single=True)
    key_x, key_noise = jax.random.split(key)
    side = jnp.repeat(jnp.array([-1.0, 1.0]), num_per_side)[:, None]
    x = side * jax.random.uniform(key_x, side.shape, minval=0.5, maxval=1.0)
    return x, jnp.sin(2 * jnp.pi * x[:, 0]) + noise * jax.random.normal(key_noise, (2 * num_per_side,))


def two_moons(key: Array, *, num: int = 100, noise: float = 0.1) -> tuple[Float[Array, "N 2"], Int[Array, " N"]]:
    """Two interleaved half circles of radius 1, with Gaussian noise.

    Args:
        key: random key.
        num: number of points, half of them (rounded down) of class 0.
        noise: standard deviation of the noise in each coordinate.

    Returns:
        Inputs ``[N, 2]`` and labels ``[N]``, 0 for the upper moon around (0, 0), 1 for the lower one around (1, 0.5).

    Raises:
        ValueError: if ``num`` is below 2 or ``noise`` is negative.

    Example:
        >>> import jax
        >>> from numpyro_fspace.datasets import two_moons
        >>> x, labels = two_moons(jax.random.key(0))
        >>> x.shape, int(labels.sum())
        ((100, 2), 50)

    Reference:
        As for :func:`sine`: two-dimensional classification.
    """
    _check("num", num, 2, noise)
    check_key(key, "key", single=True)
    key_angle, key_noise = jax.random.split(key)
    labels = (jnp.arange(num) >= num // 2).astype(int)
    angle = jax.random.uniform(key_angle, (num,), maxval=jnp.pi)
    upper = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
    lower = jnp.stack([1.0 - jnp.cos(angle), 0.5 - jnp.sin(angle)], 1)
    return jnp.where(labels[:, None], lower, upper) + noise * jax.random.normal(key_noise, (num, 2)), labels


def _check(name, num, least, noise):
    if num < least:
        raise ValueError(f"{name} must be at least {least}, got {num}.")
    if noise < 0:
        raise ValueError(f"noise is a standard deviation and must not be negative, got {noise}.")
