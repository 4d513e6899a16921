r"""The density of normal observations whose mean is linear in white parameters, which are integrated out.

.. math:: \log N(r; 0, J J^\top + \mathrm{diag}(s^2))

Everything is computed from the triangular factor of [J/s; I]. Its condition number is the square root of that of
P⁻¹ = I + Jᵀ diag(s⁻²) J, which float32 often cannot factorize.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul
from numpyro_fspace.priors._lapack import root_and_inverse

__all__ = ["log_marginal"]

#: Refinement steps for the posterior mean, because the error of a solution by R alone grows with cond(R)².
NUM_REFINEMENTS = 2
#: Log densities below minus this number are replaced by minus infinity.
LARGEST = 1e12


@jax.custom_vjp
def log_marginal(jacobian, residual, sd):
    """``(log N(r; 0, J Jᵀ + diag(s²)), ĉ, V)`` with the posterior N(ĉ, V Vᵀ) of c; only the first has a gradient.

    Args:
        jacobian: J [N, R].
        residual: r [N].
        sd: s [N].
    """
    return _log_marginal(jacobian, residual, sd)


def _log_marginal(jacobian, residual, sd):
    scaled, target = jacobian / sd[:, None], residual / sd
    size = jacobian.shape[1]
    _, inverse = root_and_inverse(jnp.concatenate([scaled, jnp.eye(size, dtype=scaled.dtype)]))
    mean = matmul(inverse, matmul(inverse.T, matmul(scaled.T, target)))
    for _ in range(NUM_REFINEMENTS):
        rest = matmul(scaled.T, target - matmul(scaled, mean)) - mean
        mean = mean + matmul(inverse, matmul(inverse.T, rest))
    square = jnp.sum((target - matmul(scaled, mean)) ** 2) + jnp.sum(mean**2)
    log_det = jnp.sum(jnp.log(sd)) - jnp.sum(jnp.log(jnp.diagonal(inverse)))
    value = -0.5 * square - log_det - 0.5 * len(target) * jnp.log(2 * jnp.pi)
    # If the noise is so small that the density or its derivative overflows, no Metropolis test may accept the state.
    given = (jacobian, residual, sd)
    is_beyond = ~(value > -LARGEST) & jnp.all(jnp.array([jnp.all(jnp.isfinite(part)) for part in given]))
    return jnp.where(is_beyond, -jnp.inf, value), mean, inverse


def _forward(jacobian, residual, sd):
    value, mean, inverse = _log_marginal(jacobian, residual, sd)
    return (value, mean, inverse), (jacobian, residual, sd, mean, inverse)


def _backward(saved, slopes):
    jacobian, residual, sd, mean, inverse = saved
    slope, *_ = slopes
    pull = (residual - matmul(jacobian, mean)) / sd**2  # (J Jᵀ + diag(s²))⁻¹ r
    half = matmul(jacobian / sd[:, None], inverse)
    explained = matmul(half, inverse.T)  # J P / s
    by_jacobian = pull[:, None] * mean - explained / sd[:, None]
    by_sd = pull**2 * sd - (1.0 - jnp.sum(half**2, 1)) / sd
    return slope * by_jacobian, -slope * pull, slope * by_sd


log_marginal.defvjp(_forward, _backward)
