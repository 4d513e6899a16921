"""The samplers of measurement points that ``fs.measurement`` makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_fspace._checks import check_key, one_line
from numpyro_fspace.priors.base import as_real

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float, Int, Key


@runtime_checkable
class PointSampler(Protocol):
    """A sampler of measurement points.

    Attributes:
        num_points: M, or None if unknown.
        num_inputs: D, or None if unknown.
        is_random: whether the points depend on the key.
        pool: all possible points, [N, D], or None if there is no finite list of them.
    """

    # Properties declare that the attributes are only read. Plain attributes satisfy the protocol too.
    @property
    def num_points(self) -> int | None: ...

    @property
    def num_inputs(self) -> int | None: ...

    @property
    def is_random(self) -> bool: ...

    @property
    def pool(self) -> Float[Array, "N D"] | None: ...

    def __call__(self, key: Key[Array, ""]) -> Float[Array, "M D"]:
        """Draw the points."""


@dataclass(frozen=True, eq=False, repr=False)
class BasePointSampler(ABC):
    """Base class of the samplers of this package."""

    num_points: int | None
    num_inputs: int | None
    is_random: bool = True
    pool: Array | None = None

    __repr__ = one_line

    @abstractmethod
    def __call__(self, key: Key[Array, ""]) -> Float[Array, "M D"]:
        """Draw the points."""

    def rows(self, key: Key[Array, ""]) -> Int[Array, " M"] | None:
        """The row numbers in the pool of the points ``self(key)``, or None if there is no pool."""
        return None

    @property
    def constant(self) -> Float[Array, "M D"] | None:
        """The points that are the same in every draw, with NaN for all others; None if M is not known."""
        with jax.ensure_compile_time_eval():
            return jnp.full((self.num_points, self.num_inputs), jnp.nan)


@dataclass(frozen=True, eq=False, repr=False)
class Fixed(BasePointSampler):
    """The same points at every draw."""

    def __call__(self, key):
        return self.pool

    def rows(self, key):
        return jnp.arange(self.num_points)

    @property
    def constant(self):
        return self.pool


@dataclass(frozen=True, eq=False, repr=False)
class Subset(BasePointSampler):
    """Distinct rows of the pool."""

    def __call__(self, key):
        return self.pool[self.rows(key)]

    def rows(self, key):
        return _distinct(key, len(self.pool), self.num_points)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Uniform(BasePointSampler):
    """Independent uniform points in a box."""

    low: Array
    high: Array

    def __call__(self, key):
        return self.low + (self.high - self.low) * _matrix(jax.random.uniform, key, self, self.low.dtype)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Perturb(BasePointSampler):
    """Rows of x with normal noise."""

    x: Array
    scale: Array

    def __call__(self, key):
        key_rows, key_noise = jax.random.split(key)
        rows = jax.random.randint(key_rows, (self.num_points,), 0, len(self.x))
        return self.x[rows] + self.scale * _matrix(jax.random.normal, key_noise, self, self.x.dtype)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Union(BasePointSampler):
    """The points of several samplers."""

    members: tuple[PointSampler, ...]

    def __call__(self, key):
        keys = jax.random.split(key, len(self.members)) if self.is_random else [key] * len(self.members)
        draws = [member(one) for member, one in zip(self.members, keys, strict=True)]
        check_num_inputs([draw.shape[1] for draw in draws])
        return jnp.concatenate(draws)

    @property
    def constant(self):
        return concatenated([member.constant for member in self.members])

    def rows(self, key):
        if self.pool is None:
            return None
        keys, before = jax.random.split(key, len(self.members)), 0
        numbers = []
        for member, one in zip(self.members, keys, strict=True):
            numbers.append(before + member.rows(one))
            before += len(member.pool)
        return jnp.concatenate(numbers)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Own(BasePointSampler):
    """A user's callable of a key."""

    fn: Callable

    @property
    def constant(self):
        return None

    def __call__(self, key):
        points = self.fn(key)
        as_real(points, "points(key)")
        points = jnp.asarray(points)
        if points.ndim != 2:
            raise ValueError(f"points(key) must return shape [M, D], got {list(points.shape)}.")
        return points


def _matrix(draw, key: Key[Array, ""], sampler, dtype) -> Float[Array, "M D"]:
    """``draw(key, (M, D))``, drawn as a vector: the numbers are the same.

    On a CPU, XLA takes ten times as long to compile draws of a matrix under ``vmap``.
    """
    check_key(key, "key", single=True)
    return draw(key, (sampler.num_points * sampler.num_inputs,), dtype).reshape(sampler.num_points, -1)


def _distinct(key: Key[Array, ""], size: int, num: int) -> Int[Array, " num"]:
    """A uniform subset of {0, ..., size - 1}, in O(num log num): Floyd's algorithm without its loop.

    For j = size - num, ..., size - 1, Floyd's algorithm adds a uniform t ≤ j, or j if t is already in the set. t is in
    the set if an earlier step drew the same t, or if the step with j = t added j. The chain of such steps points only
    backwards, and pointer doubling follows it.
    """
    check_key(key, "key")
    last = jnp.arange(size - num, size)
    drawn = jax.random.randint(key, (num,), 0, last + 1)
    order = jnp.argsort(drawn, stable=True)
    repeated = jnp.zeros(num, bool).at[order[1:]].set(drawn[order[1:]] == drawn[order[:-1]])
    step = drawn - (size - num)
    parent = jnp.where(step >= 0, step, jnp.arange(num))
    for _ in range(max(num - 1, 0).bit_length()):
        repeated, parent = repeated | repeated[parent], parent[parent]
    return jnp.where(repeated, last, drawn)


def concatenated(pools: list):
    """Concatenated arrays of points, concrete even while an outer function is traced; None if one of them is None."""
    if any(pool is None for pool in pools):
        return None
    with jax.ensure_compile_time_eval():
        return jnp.concatenate(pools)


def check_num_inputs(sizes: list[int]) -> None:
    """Raise a ValueError unless all samplers have the same number of inputs."""
    if len(set(sizes)) > 1:
        raise ValueError(f"samplers must agree on the number of inputs D, got {sizes}.")
