"""Linear maps S from the coordinates u of a sampler to flat parameters w = S u."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul

#: Largest width, in prior scales, that a dense preconditioner assigns to a direction.
MAX_WIDTH = 1e8
#: Smallest ratio of an eigenvalue of a Hessian to the largest one that float32 resolves.
MIN_EIGENVALUE = 1e-6


class Identity(NamedTuple):
    """S = I."""

    def scale(self, u):
        """S u."""
        return u

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return gradient


class Diagonal(NamedTuple):
    """S = diag(s), with ``s`` a pytree of positive scales shaped like the position."""

    s: jax.Array

    def scale(self, u):
        """S u."""
        return jax.tree.map(jnp.multiply, self.s, u)

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return jax.tree.map(jnp.multiply, self.s, gradient)


class Dense(NamedTuple):
    """S = ``s``, an invertible matrix [P, P], for flat positions [P]."""

    s: jax.Array

    def scale(self, u):
        """S u."""
        return matmul(self.s, u)

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return matmul(gradient, self.s)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartlyDense:
    """S = diag(s), but for a dense block of parameters: in flat positions [P] those of some ranges, one after another.

    Attributes:
        s: positive scales [P]; those of the block are not used.
        factor: the block, an invertible matrix [B, B].
        ranges: ``(start, stop)`` of each range.
    """

    s: jax.Array
    factor: jax.Array
    ranges: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})

    def scale(self, u):
        """S u."""
        return put(self.s * u, self.ranges, matmul(self.factor, take(u, self.ranges)))

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return put(self.s * gradient, self.ranges, matmul(take(gradient, self.ranges), self.factor))


def take(position, ranges):
    """The parameters [B] in some ranges of a flat position [P], one range after another."""
    return jnp.concatenate([position[start:stop] for start, stop in ranges])


def put(position, ranges, values):
    """``position`` [P] with ``values`` [B] in some ranges, from where ``take`` takes them."""
    done = 0
    for start, stop in ranges:
        position = position.at[start:stop].set(values[done : done + stop - start])
        done += stop - start
    return position


def whitened(factor, hessian):
    """A new S [P, P] for which Sᵀ ∇²U S has eigenvalues ±1, given that it is ``hessian`` for ``factor``.

    Returns ``factor`` if the new S would not be finite.
    """
    values, vectors = jnp.linalg.eigh(hessian + matmul(factor.T, factor) / MAX_WIDTH**2)
    values = jnp.abs(values)
    values = jnp.maximum(values, MIN_EIGENVALUE * jnp.max(values))
    new = matmul(matmul(factor, vectors * values**-0.5), vectors.T)
    return jnp.where(jnp.all(jnp.isfinite(new)), new, factor)


def narrowed(factor, max_width: float):
    """``factor`` with no direction wider than ``max_width``."""
    left, widths, right = jnp.linalg.svd(factor)
    return matmul(left * jnp.minimum(widths, max_width), right)
