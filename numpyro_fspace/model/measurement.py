"""Samplers of the measurement points X_M, where a functional prior looks at a network.

A sampler is a callable of a key to points [M, D], redrawn at each evaluation of the potential. With random
points a chain targets exp(log likelihood + log p0(w) + E log P0(f(X_M))), which depends on M and on the sampler's
law; with fixed ones, likelihood · p0(w) · P0(f(X_M)).

Example:
    >>> import jax, numpy as np
    >>> x = np.linspace(-1, 1, 20)[:, None]
    >>> points = union(subset(x, 5), uniform(-2.0, 2.0, 10))
    >>> points(jax.random.key(0)).shape, points.num_points, points.is_random
    ((15, 1), 15, True)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.rounding import lost_to_rounding
from numpyro_fspace.priors._cholesky import is_traced
from numpyro_fspace.priors.base import as_inputs, as_positive, as_real

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float, Int, Key

__all__ = ["PointSampler", "as_points", "fixed", "perturb", "subset", "uniform", "union"]

#: A cloud of random points is judged by so many of its places.
NUM_PLACES = 50


@runtime_checkable
class PointSampler(Protocol):
    """A sampler of measurement points.

    Attributes:
        num_points: M, or None if unknown.
        num_inputs: D, or None if unknown.
        is_random: whether the points depend on the key.
        pool: all points that can occur, [N, D], or None if there is no finite list of them.
    """

    # Properties, as they are only read: plain attributes will do.
    @property
    def num_points(self) -> int | None: ...

    @property
    def num_inputs(self) -> int | None: ...

    @property
    def is_random(self) -> bool: ...

    @property
    def pool(self) -> Float[Array, "N D"] | None: ...

    def __call__(self, key: Key[Array, ""]) -> Float[Array, "M D"]:
        """Draws the points."""


@dataclass(frozen=True, eq=False)
class _Sampler(ABC):
    """The attributes that samplers share."""

    num_points: int | None
    num_inputs: int | None
    is_random: bool = True
    pool: Array | None = None

    @abstractmethod
    def __call__(self, key: Key[Array, ""]) -> Float[Array, "M D"]:
        """Draws the points."""

    def rows(self, key: Key[Array, ""]) -> Int[Array, " M"] | None:
        """The numbers of the points that ``self(key)`` draws from the pool, or None if there is no pool."""
        del key
        return None

    @property
    def constant(self) -> Float[Array, "M D"] | None:
        """The points that are the same in every draw, with NaN in place of the others; None if M is not known."""
        with jax.ensure_compile_time_eval():
            return jnp.full((self.num_points, self.num_inputs), jnp.nan)


@dataclass(frozen=True, eq=False)
class _Fixed(_Sampler):
    def __call__(self, key):
        del key
        return self.pool

    def rows(self, key):
        del key
        return jnp.arange(self.num_points)

    @property
    def constant(self):
        return self.pool


@dataclass(frozen=True, eq=False)
class _Subset(_Sampler):
    def __call__(self, key):
        return self.pool[self.rows(key)]

    def rows(self, key):
        return _distinct(key, len(self.pool), self.num_points)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Uniform(_Sampler):
    low: Array
    high: Array

    def __call__(self, key):
        return self.low + (self.high - self.low) * _matrix(jax.random.uniform, key, self, self.low.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Perturb(_Sampler):
    x: Array
    scale: Array

    def __call__(self, key):
        key_rows, key_noise = jax.random.split(key)
        rows = jax.random.randint(key_rows, (self.num_points,), 0, len(self.x))
        return self.x[rows] + self.scale * _matrix(jax.random.normal, key_noise, self, self.x.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Union(_Sampler):
    members: tuple[PointSampler, ...]

    def __call__(self, key):
        keys = jax.random.split(key, len(self.members)) if self.is_random else [key] * len(self.members)
        draws = [member(one) for member, one in zip(self.members, keys, strict=True)]
        _same_inputs([draw.shape[1] for draw in draws])
        return jnp.concatenate(draws)

    @property
    def constant(self):
        parts = [member.constant for member in self.members]
        return None if any(part is None for part in parts) else _together(parts)

    def rows(self, key):
        if self.pool is None:
            return None
        keys, before = jax.random.split(key, len(self.members)), 0
        numbers = []
        for member, one in zip(self.members, keys, strict=True):
            numbers.append(before + member.rows(one))
            before += len(member.pool)
        return jnp.concatenate(numbers)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Own(_Sampler):
    fn: Callable

    @property
    def constant(self):
        return None

    def __call__(self, key):
        points = jnp.asarray(self.fn(key))
        if points.ndim != 2:
            raise ValueError(f"points(key) must return shape [M, D], got {list(points.shape)}.")
        return points


def fixed(x: Float[ArrayLike, "M D"]) -> PointSampler:
    """The same points at every step, so that a prior can factorize its covariance once.

    Args:
        x: points [M, D].

    Raises:
        TypeError, ValueError: x is not numeric, not [M, D], empty, holds NaN, or is float64 whose differences are lost
            in JAX's float32 (time in seconds since 1970, say).
    """
    pool = _points(x, "x")
    return _Fixed(len(pool), pool.shape[1], is_random=False, pool=pool)


def subset(x: Float[ArrayLike, "N D"], num: int) -> PointSampler:
    """``num`` distinct rows of x, all subsets equally likely; the cost of a draw does not grow with N.

    Args:
        x: pool [N, D], for example the training inputs.
        num: M, at most N.

    Raises:
        TypeError, ValueError: bad x as in ``fixed``; num not a positive integer, or larger than the pool.
    """
    x, num = _points(x, "x"), _count(num)
    if num > len(x):
        raise ValueError(f"num={num} exceeds the {len(x)} rows of x: pass at most {len(x)}.")
    return _Subset(num, x.shape[1], pool=x)


def uniform(low: float | Float[ArrayLike, " D"], high: float | Float[ArrayLike, " D"], num: int) -> PointSampler:
    """``num`` independent uniform points in the box [low, high).

    Args:
        low: lower corner [D]; a number if D = 1, or for all inputs alike if high is an array.
        high: upper corner, likewise.
        num: M.

    Raises:
        TypeError, ValueError: corners not numeric, of unlike shapes, NaN or infinite, or low ≥ high; bad num.
    """
    low, high, num = as_real(low, "low"), as_real(high, "high"), _count(num)
    shapes = {corner.shape for corner in (low, high) if corner.ndim}
    if len(shapes) > 1 or any(len(shape) > 1 for shape in shapes) or (0,) in shapes:
        raise ValueError(f"low and high must be numbers or arrays [D], got {list(low.shape)} and {list(high.shape)}.")
    size = shapes.pop() if shapes else (1,)
    if not is_traced((low, high)) and not (low < high).all():
        raise ValueError(f"low must be below high in every input, got low={low} and high={high}.")
    if not is_traced((low, high)):
        _check_precision(np.linspace(low, high, NUM_PLACES), "the box from low to high")
    lower, upper = (jnp.broadcast_to(_constant(corner), size) for corner in (low, high))
    return _Uniform(num, *size, low=lower, high=upper)


def perturb(x: Float[ArrayLike, "N D"], scale: float | Float[ArrayLike, " D"], num: int) -> PointSampler:
    """``num`` rows of x, drawn with replacement, plus scale · N(0, I): a cloud around the data.

    Args:
        x: centers [N, D].
        scale: standard deviation of the noise, a positive number or array [D].
        num: M.

    Raises:
        TypeError, ValueError: bad x as in ``fixed``; scale of another shape or not positive; bad num.
    """
    x, scale, num = _points(x, "x"), as_positive(scale, "scale", ndim=1), _count(num)
    if scale.shape not in [(), x.shape[1:]]:
        raise ValueError(f"scale must be a number or have shape [{x.shape[1]}], got {list(scale.shape)}.")
    if not is_traced((x, scale)):
        farthest = np.abs(np.asarray(x, np.float64)).max(0)
        _check_precision(np.linspace(farthest - scale, farthest + scale, NUM_PLACES), "x with its noise (scale)")
    return _Perturb(num, x.shape[1], x=x, scale=_constant(scale))


def union(*samplers) -> PointSampler:
    """The points of several samplers together, each with a key of its own; fixed ones stay fixed.

    Args:
        *samplers: samplers, callables of a key, or arrays [M, D].

    Raises:
        ValueError: no samplers, or different numbers of inputs.
    """
    members = tuple(as_points(one, f"samplers[{i}]") for i, one in enumerate(samplers))
    if not members:
        raise ValueError("samplers must name at least one sampler.")
    known = [member.num_inputs for member in members if member.num_inputs is not None]
    _same_inputs(known)
    if all(isinstance(member, _Fixed) for member in members):
        return fixed(_together([member.pool for member in members]))
    known_counts = [member.num_points for member in members if member.num_points is not None]
    total = sum(known_counts) if len(known_counts) == len(members) else None
    pools = [member.pool for member in members if isinstance(member, _Fixed | _Subset | _Union)]
    has_pool = len(pools) == len(members) and all(pool is not None for pool in pools)
    pool = _together(pools) if has_pool else None
    return _Union(total, known[0] if known else None, any(m.is_random for m in members), pool, members=members)


def as_points(points, name: str = "points") -> PointSampler:
    """Any sampler in one form: an array [M, D] becomes ``fixed``, a callable of a key gets the attributes.

    A callable counts as random unless it has an attribute ``is_random`` that says otherwise; it may also
    carry ``num_points``, ``num_inputs`` and ``pool``.

    Raises:
        TypeError: neither an array nor a callable.
        ValueError: an array that ``fixed`` refuses.
    """
    if isinstance(points, _Sampler):
        return points
    if isinstance(points, type) or points is None or isinstance(points, str):
        raise TypeError(f"{name} must be an array [M, D] or a callable of a key, got {points!r}.")
    if callable(points):
        known = {n: getattr(points, n, None) for n in ("num_points", "num_inputs", "pool")}
        return _Own(**known, is_random=bool(getattr(points, "is_random", True)), fn=points)
    pool = _points(points, name)
    return _Fixed(len(pool), pool.shape[1], is_random=False, pool=pool)


def _matrix(draw, key: Key[Array, ""], sampler, dtype) -> Float[Array, "M D"]:
    """``draw(key, (M, D))``, drawn as a list: the same numbers.

    On a CPU XLA takes ten times as long to compile a matrix of them under ``vmap``, where draws for several steps are
    made.
    """
    return draw(key, (sampler.num_points * sampler.num_inputs,), dtype).reshape(sampler.num_points, -1)


def _distinct(key: Key[Array, ""], size: int, num: int) -> Int[Array, " num"]:
    """A uniform subset of {0, ..., size - 1}, in O(num log num): Floyd's algorithm without its loop.

    Floyd adds, for j = size - num, ..., size - 1, a uniform t ≤ j, or j itself if t is in the set already.
    It is there if an earlier step drew the same t, or if the step of j = t added its own j; the latter chain
    of steps, which only points backwards, is followed by pointer doubling.
    """
    last = jnp.arange(size - num, size)
    drawn = jax.random.randint(key, (num,), 0, last + 1)
    order = jnp.argsort(drawn, stable=True)
    repeated = jnp.zeros(num, bool).at[order[1:]].set(drawn[order[1:]] == drawn[order[:-1]])
    step = drawn - (size - num)
    parent = jnp.where(step >= 0, step, jnp.arange(num))
    for _ in range(max(num - 1, 0).bit_length()):
        repeated, parent = repeated | repeated[parent], parent[parent]
    return jnp.where(repeated, last, drawn)


def _constant(value: np.ndarray | Array) -> Array:
    """A JAX array, concrete even while an outer function is traced, unless the value itself is traced."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value, float)


def _together(pools: list) -> Array:
    with jax.ensure_compile_time_eval():
        return jnp.concatenate(pools)


def _points(x, name: str) -> Float[Array, "M D"]:
    x = as_inputs(x, name)
    if isinstance(x, np.ndarray):
        largest = float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
        limit = float(jnp.finfo(jnp.result_type(float)).max)
        if largest > limit:
            raise ValueError(f"{name} holds {largest:.3g}, beyond the precision's {limit:.3g}; rescale {name}.")
        _check_precision(x, name)
    return _constant(x)


def _check_precision(points: np.ndarray, name: str) -> None:
    """That points differ in JAX's precision too."""
    trouble = lost_to_rounding(points)
    if trouble is not None:
        raise ValueError(f"{name} {trouble}.")


def _count(num) -> int:
    if isinstance(num, bool) or not isinstance(num, int | np.integer) or num < 1:
        raise ValueError(f"num must be a positive integer, got {num!r}.")
    return int(num)


def _same_inputs(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise ValueError(f"samplers must agree on the number of inputs D, got {sizes}.")
