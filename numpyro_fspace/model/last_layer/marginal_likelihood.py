r"""Normal observations whose mean is linear in white parameters c: the density without c, and exact draws of c.

.. math:: \log N(r; 0, C), \qquad C = J J^\top + \mathrm{diag}(s^2), \qquad
          c \mid r \sim N(J^\top C^{-1} r, P), \qquad P = (I + J^\top \mathrm{diag}(s^{-2}) J)^{-1}.

With fewer observations than parameters everything is computed from the triangular factor of [Jᵀ; diag(s)], else from
that of [J/s; I]. The condition numbers are the square roots of those of C and P, which float32 often cannot factorize.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul
from numpyro_fspace.priors.lapack import root_and_inverse

#: Refinement steps of each solution, because the error of one by R alone grows with cond(R)².
NUM_REFINEMENTS = 2


class ByRows(NamedTuple):
    """C for fewer observations than parameters.

    Attributes:
        jacobian: J [N, R].
        sd: s [N].
        inverse: V [N, N], with C⁻¹ = V Vᵀ.
    """

    jacobian: jax.Array
    sd: jax.Array
    inverse: jax.Array

    def times_precision(self, right):
        """C⁻¹ times vectors or matrices."""
        return matmul(self.inverse, matmul(self.inverse.T, right))

    def solve(self, residual):
        """``(C⁻¹ r, Jᵀ C⁻¹ r, rᵀ C⁻¹ r)``.

        The second is refined beside the first, whose entries are of the order 1/s, so that its errors are below s.
        """
        pull = self.times_precision(residual)
        mean = matmul(self.jacobian.T, pull)
        for _ in range(NUM_REFINEMENTS):
            rest = residual - matmul(self.jacobian, mean) - self.sd * (self.sd * pull)
            step = self.times_precision(rest)
            pull, mean = pull + step, mean + matmul(self.jacobian.T, step)
        return pull, mean, matmul(residual, pull)

    def half_log_det(self):
        """½ log det C."""
        return -jnp.sum(jnp.log(jnp.diagonal(self.inverse)))

    def precision_by_jacobian(self):
        """C⁻¹ J."""
        return self.times_precision(self.jacobian)

    def precision_diagonal(self):
        """The diagonal of C⁻¹."""
        return jnp.sum(self.inverse**2, 1)

    def draw(self, residual, key):
        """c given r: c' + JᵀC⁻¹(r - Jc' - e) for a draw c' from the prior and a draw e of the noise."""
        key_prior, key_noise = jax.random.split(key)
        prior = jax.random.normal(key_prior, self.jacobian.shape[1:], residual.dtype)
        noise = self.sd * jax.random.normal(key_noise, residual.shape, residual.dtype)
        _, step, _ = self.solve(residual - matmul(self.jacobian, prior) - noise)
        return prior + step


class ByColumns(NamedTuple):
    """P for at most as many parameters as observations.

    Attributes:
        jacobian: J [N, R].
        sd: s [N].
        inverse: V [R, R], with P = V Vᵀ.
    """

    jacobian: jax.Array
    sd: jax.Array
    inverse: jax.Array

    def solve(self, residual):
        """``(C⁻¹ r, Jᵀ C⁻¹ r, rᵀ C⁻¹ r)``; the second is the posterior mean, P Jᵀ (r / s²)."""
        scaled, target = self.jacobian / self.sd[:, None], residual / self.sd
        mean = matmul(self.inverse, matmul(self.inverse.T, matmul(scaled.T, target)))
        for _ in range(NUM_REFINEMENTS):
            rest = matmul(scaled.T, target - matmul(scaled, mean)) - mean
            mean = mean + matmul(self.inverse, matmul(self.inverse.T, rest))
        rest = target - matmul(scaled, mean)
        return rest / self.sd, mean, jnp.sum(rest**2) + jnp.sum(mean**2)

    def half_log_det(self):
        """½ log det C."""
        return jnp.sum(jnp.log(self.sd)) - jnp.sum(jnp.log(jnp.diagonal(self.inverse)))

    def precision_by_jacobian(self):
        """C⁻¹ J = diag(s⁻²) J P."""
        return matmul(self._half(), self.inverse.T) / self.sd[:, None]

    def precision_diagonal(self):
        """The diagonal of C⁻¹."""
        return (1.0 - jnp.sum(self._half() ** 2, 1)) / self.sd**2

    def _half(self):
        return matmul(self.jacobian / self.sd[:, None], self.inverse)

    def draw(self, residual, key):
        """c given r."""
        _, mean, _ = self.solve(residual)
        return mean + matmul(self.inverse, jax.random.normal(key, mean.shape, mean.dtype))


def _factorized(jacobian, sd):
    num, size = jacobian.shape
    if num < size:
        return ByRows(jacobian, sd, root_and_inverse(jnp.concatenate([jacobian.T, jnp.diag(sd)]))[1])
    unit = jnp.eye(size, dtype=jacobian.dtype)
    return ByColumns(jacobian, sd, root_and_inverse(jnp.concatenate([jacobian / sd[:, None], unit]))[1])


def draw_parameters(jacobian, residual, sd, key):
    """An exact draw of c given r.

    Args:
        jacobian: J [N, R].
        residual: r [N].
        sd: s [N].
        key: a PRNG key.
    """
    return _factorized(jacobian, sd).draw(residual, key)


@jax.custom_vjp
def log_marginal(jacobian, residual, sd):
    """log N(r; 0, J Jᵀ + diag(s²)); minus infinity where the noise is so small that the density overflows.

    Args:
        jacobian: J [N, R].
        residual: r [N].
        sd: s [N].
    """
    return _forward(jacobian, residual, sd)[0]


def _forward(jacobian, residual, sd):
    factor = _factorized(jacobian, sd)
    pull, mean, square = factor.solve(residual)
    value = -0.5 * square - factor.half_log_det() - 0.5 * len(residual) * jnp.log(2 * jnp.pi)
    # If the noise is so small that the density or its derivative overflows, no Metropolis test may accept the state.
    given = (jacobian, residual, sd)
    overflows = ~(jnp.isfinite(value) & jnp.all(jnp.isfinite(pull**2)))
    is_beyond = overflows & jnp.all(jnp.array([jnp.all(jnp.isfinite(part)) for part in given]))
    return jnp.where(is_beyond, -jnp.inf, value), (factor, pull, mean)


def _backward(saved, slope):
    factor, pull, mean = saved
    by_jacobian = pull[:, None] * mean - factor.precision_by_jacobian()
    by_sd = (pull**2 - factor.precision_diagonal()) * factor.sd
    return slope * by_jacobian, -slope * pull, slope * by_sd


log_marginal.defvjp(_forward, _backward)
