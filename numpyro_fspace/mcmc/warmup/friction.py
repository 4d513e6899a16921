"""Friction for the noise of gradients: leading directions of the noise, its variance, and the friction for it.

``sgmcmc/gradient_noise.py`` applies the friction along these directions, and ``mcmc/plan.py`` has that of gradients
without noise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul

#: Excess temperature that noise outside its leading directions may cause; friction is raised to keep it.
MAX_NOISE_EXCESS = 0.3
#: Variance that the noise of one gradient may add to a momentum, over the temperature; the step is shortened for it.
MAX_KICK = 0.25
#: Gradients at the end of a draw of burn-in from which their noise is estimated.
NUM_GRADIENTS = 4
#: Number of directions of the noise that get a friction of their own.
NUM_DIRECTIONS = 8


class Noise(NamedTuple):
    """Estimates of the covariance V of gradients, in the preconditioner's coordinates.

    Attributes:
        basis: leading directions of V, orthonormal rows Q [R, P]; rows Y with Yᵀ Y ≈ Σ V while they are estimated,
            and zeros before.
        variances: of the gradient along them, [R]; zeros before they are measured.
        rest: weighted mean variance of the remaining noise, tr V² / tr V (see ``noise_variances``) of the covariance
            (I - Qᵀ Q) V (I - Qᵀ Q).
        squares: sums of those variances since they were last renewed, [R].
        traces: the same sums for tr V and tr V² of the remaining noise, [2].
        num: draws in these sums.
    """

    basis: jax.Array
    variances: jax.Array
    rest: jax.Array
    squares: jax.Array
    traces: jax.Array
    num: jax.Array

    @classmethod
    def start(cls, position, num_directions: int) -> Noise:
        """The initial state, for flat ``position`` [P]."""
        num = min(num_directions, position.size)
        basis, along, rest, traces = (jnp.zeros(n, position.dtype) for n in ((num, position.size), num, (), 2))
        return cls(basis, along, rest, along, traces, jnp.zeros((), int))

    def with_noise_rows(self, rows) -> Noise:
        """A copy that has seen more rows [G, P] of covariance V: the leading singular vectors of old and new rows."""
        both = jnp.concatenate([self.basis, rows])
        _, rotation = jnp.linalg.eigh(matmul(both, both.T))
        return self._replace(basis=matmul(rotation[:, : len(rows) - 1 : -1].T, both))  # largest first

    def with_directions(self) -> Noise:
        """This with orthonormal directions, along which no variance is measured yet."""
        return jax.tree.map(jnp.zeros_like, self)._replace(basis=jnp.linalg.qr(self.basis.T)[0].T, rest=self.rest)

    def with_measured(self, differences) -> Noise:
        """This with the rows [G, P] of covariance V of one more draw added to the sums."""
        along = matmul(differences, self.basis.T)
        trace, weighted = noise_variances(differences - matmul(along, self.basis))
        return self._replace(
            squares=self.squares + jnp.mean(along**2, axis=0),
            traces=self.traces + jnp.stack([trace, trace * weighted]),
            num=self.num + 1,
        )

    def renewed(self, is_last) -> Noise:
        """This with variances from the sums, which are reset. The last time, the variance of the rest may only rise."""
        trace, squared = self.traces
        rest = jnp.where(trace > 0, squared / jnp.where(trace > 0, trace, 1.0), 0.0)  # zero: all is along directions
        rest = jnp.where(self.num > 0, rest, self.rest)
        rest = jnp.where(is_last, jnp.maximum(rest, self.rest), rest)
        variances = jnp.where(self.num > 0, self.squares / jnp.maximum(self.num, 1), self.variances)
        cleared = jax.tree.map(jnp.zeros_like, self)
        return cleared._replace(basis=self.basis, variances=variances.astype(rest.dtype), rest=rest)


def friction_for(step_size, noise_variance, temperature):
    """The friction, at least 1, with which noise of this variance adds at most ``MAX_NOISE_EXCESS`` to the temperature.

    Noise of variance v raises the temperature of a direction by ε v / (2γ), to leading order.
    """
    return jnp.maximum(1.0, 0.5 * step_size * noise_variance / (MAX_NOISE_EXCESS * temperature))


def steadying(step_size, noise_variance, temperature):
    """Factor on the step size with which noise of this variance adds at most ``MAX_KICK`` of a temperature.

    A kick adds ε² v to the variance of the momentum, which moves the chain before any friction acts.
    """
    limit = jnp.sqrt(MAX_KICK * temperature / jnp.where(noise_variance > 0, noise_variance, 1.0))
    return jnp.where(noise_variance > 0, jnp.minimum(1.0, limit / step_size), 1.0)


def differences_of(gradients):
    """Rows of covariance V and mean zero [G/2, P], from independent gradients [G, P]."""
    return (gradients[::2] - gradients[1::2]) / jnp.sqrt(2.0)


def noise_variances(differences):
    """``(tr V, tr V² / tr V)`` of the covariance V of rows of mean zero [G, P], such as ``differences_of`` gradients.

    The second is a mean of the variances v along the directions of V, weighted by v. The squared product of two rows
    has the mean tr V².
    """
    products = matmul(differences, differences.T)
    num = len(products)
    trace = jnp.trace(products) / num
    relative = (products / jnp.where(trace > 0, trace, 1.0)) ** 2  # the squares of the products may overflow
    return trace, trace * (jnp.sum(relative) - jnp.trace(relative)) / (num * (num - 1))
