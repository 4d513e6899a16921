"""Linear maps S from the coordinates u of a sampler to flat parameters w = S u."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul

__all__ = ["Dense", "Diagonal", "Identity", "PartlyDense", "put", "take"]


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


class PartlyDense(NamedTuple):
    """S = diag(s), but for a dense block of parameters: in flat positions [P] those of some ranges, one after another.

    Attributes:
        s: positive scales [P]; those of the block are not used.
        factor: the block, an invertible matrix [B, B].
        ranges: ``(start, stop)`` of each range.
    """

    s: jax.Array
    factor: jax.Array
    ranges: tuple[tuple[int, int], ...]

    def scale(self, u):
        """S u."""
        return put(self.s * u, self.ranges, matmul(self.factor, take(u, self.ranges)))

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return put(self.s * gradient, self.ranges, matmul(take(gradient, self.ranges), self.factor))


def take(position, ranges):
    """The parameters [..., B] of some ranges of a flat position [..., P], one range after another."""
    return jnp.concatenate([position[..., start:stop] for start, stop in ranges], -1)


def put(position, ranges, values):
    """``position`` [P] with ``values`` [B] in some ranges, the inverse of ``take``."""
    done = 0
    for start, stop in ranges:
        position = position.at[start:stop].set(values[done : done + stop - start])
        done += stop - start
    return position
