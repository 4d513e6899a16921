"""Samplers of the measurement points X_M, at which a functional prior evaluates a network.

A point sampler is a function from a key to points [M, D]. Kernels draw random points anew at each gradient step. Their
target is then exp(log-likelihood + log p0(w) + E log P0(f(X_M))), which depends on M and on the distribution of the
points. With fixed points the target is likelihood · p0(w) · P0(f(X_M)). (p0 is the prior of the weights w, and P0 the
functional prior.)

Example:
    >>> import jax, numpy as np
    >>> x = np.linspace(-1, 1, 20)[:, None]
    >>> points = union(subset(x, 5), uniform(-2.0, 2.0, 10))
    >>> points(jax.random.key(0)).shape, points.num_points, points.is_random
    ((15, 1), 15, True)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_count
from numpyro_fspace.model.float32_rounding import lost_to_rounding
from numpyro_fspace.model.point_samplers import (
    BasePointSampler,
    Fixed,
    Own,
    Perturb,
    PointSampler,
    Subset,
    Uniform,
    Union,
    check_num_inputs,
    concatenated,
)
from numpyro_fspace.priors.base import as_inputs, as_positive, as_real
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float

__all__ = ["PointSampler", "as_points", "fixed", "perturb", "space_filling", "subset", "uniform", "union"]

#: The number of places at which the precision of random points is checked.
NUM_PLACES = 50
#: The most numbers in a set of points.
MAX_NUMBERS = 2**31


def fixed(x: Float[ArrayLike, "M D"]) -> PointSampler:
    """The same points at every step, so that a prior factorizes its covariance only once.

    Args:
        x: points [M, D].

    Raises:
        TypeError, ValueError: x is not numeric, not [M, D], empty, holds NaN, or holds float64 values whose differences
            are lost in JAX's float32 (for example time in seconds since 1970).

    Example:
        >>> import jax, numpy as np, numpyro_fspace as fs
        >>> points = fs.measurement.fixed(np.linspace(0, 1, 3)[:, None])
        >>> points(jax.random.key(0))[:, 0].tolist()
        [0.0, 0.5, 1.0]
    """
    return _fixed(x, "x")


def subset(x: Float[ArrayLike, "N D"], num: int) -> PointSampler:
    """``num`` distinct rows of x; all subsets are equally likely, and the cost of a draw does not grow with N.

    Args:
        x: pool [N, D], for example the training inputs.
        num: M, at most N.

    Raises:
        TypeError, ValueError: as for ``fixed``; num is not a positive integer, or larger than N.

    Example:
        >>> import jax, numpy as np, numpyro_fspace as fs
        >>> points = fs.measurement.subset(np.linspace(0, 1, 50)[:, None], 10)
        >>> points(jax.random.key(0)).shape, points.is_random
        ((10, 1), True)
    """
    check_count(num, "num")
    x = _points(x, "x")
    if num > len(x):
        raise ValueError(f"num={num} exceeds the {len(x)} rows of x: pass at most {len(x)}.")
    return Subset(int(num), x.shape[1], pool=x)


def uniform(low: float | Float[ArrayLike, " D"], high: float | Float[ArrayLike, " D"], num: int) -> PointSampler:
    """``num`` independent uniform points in the box [low, high).

    Args:
        low: lower corner [D]; a number if D = 1, or if it is the same for all inputs and high is an array.
        high: upper corner, likewise.
        num: M.

    Raises:
        TypeError, ValueError: the corners are not numeric, have different shapes, or hold NaN or infinity; low ≥ high;
            num is not a positive integer; JAX's precision does not resolve the box.

    Example:
        >>> import jax, numpyro_fspace as fs
        >>> fs.measurement.uniform([-1.0, 0.0], [1.0, 5.0], 20)(jax.random.key(0)).shape
        (20, 2)
    """
    check_count(num, "num")
    low, high = as_real(low, "low"), as_real(high, "high")
    shapes = {corner.shape for corner in (low, high) if corner.ndim}
    if len(shapes) > 1 or any(len(shape) > 1 for shape in shapes) or (0,) in shapes:
        raise ValueError(f"low and high must be numbers or arrays [D], got {list(low.shape)} and {list(high.shape)}.")
    size = shapes.pop() if shapes else (1,)
    if num * size[0] > MAX_NUMBERS:
        raise ValueError(f"num={num} points with {size[0]} inputs each are more than {MAX_NUMBERS:.0e} numbers.")
    if not is_traced((low, high)):
        if not (low < high).all():
            raise ValueError(f"low must be below high in every input, got low={low} and high={high}.")
        width = np.asarray(high, np.float64) - np.asarray(low, np.float64)
        if not (width <= jnp.finfo(jnp.result_type(float)).max).all():
            raise ValueError(f"the box from low={low} to high={high} is too wide for {jnp.result_type(float)}.")
        _check_precision(np.linspace(low, high, NUM_PLACES), "the box from low to high")
    lower, upper = (jnp.broadcast_to(_constant(corner), size) for corner in (low, high))
    return Uniform(int(num), *size, low=lower, high=upper)


def space_filling(low: float | Float[ArrayLike, " D"], high: float | Float[ArrayLike, " D"], num: int) -> PointSampler:
    """``num`` fixed points that fill the box from low to high evenly, the same ones at every call.

    With one input they are equally spaced and include both ends. With several they are the first points of a Sobol'
    sequence (``scipy.stats.qmc``). A single point is the center.

    Args:
        low: lower corner [D]; a number if D = 1, or if it is the same for all inputs and high is an array.
        high: upper corner, likewise.
        num: M.

    Raises:
        TypeError, ValueError: as for ``uniform``; the corners are traced; there are more inputs than SciPy has Sobol'
            sequences for.

    Example:
        >>> space_filling(-1.0, 1.0, 5).pool.ravel().tolist()
        [-1.0, -0.5, 0.0, 0.5, 1.0]
    """
    if is_traced((low, high)):
        raise ValueError("low and high must be numbers that are known when the program is compiled.")
    uniform(low, high, num)  # checks the arguments
    low, high = np.broadcast_arrays(*(np.atleast_1d(np.asarray(corner, np.float64)) for corner in (low, high)))
    if num == 1:
        return fixed(0.5 * (low + high)[None])
    if len(low) == 1:
        return fixed(np.linspace(low, high, num))
    from scipy.stats import qmc

    if len(low) > qmc.Sobol.MAXDIM:
        raise ValueError(
            f"space_filling fills boxes of at most {qmc.Sobol.MAXDIM} inputs, got {len(low)}: in so many dimensions "
            "take points near the data, fs.measurement.subset(x, num) or perturb(x, scale, num)."
        )
    power = max(1, math.ceil(math.log2(num)))
    return fixed(qmc.scale(qmc.Sobol(len(low), scramble=False).random_base2(power)[:num], low, high))


def perturb(x: Float[ArrayLike, "N D"], scale: float | Float[ArrayLike, " D"], num: int) -> PointSampler:
    """``num`` rows of x, drawn with replacement, plus noise scale · N(0, I): points around the data.

    Args:
        x: centers [N, D].
        scale: standard deviation of the noise, a positive number or array [D].
        num: M.

    Raises:
        TypeError, ValueError: as for ``fixed``; scale has another shape or is not positive; num is not a positive
            integer.

    Example:
        >>> import jax, numpy as np, numpyro_fspace as fs
        >>> fs.measurement.perturb(np.zeros((50, 2)), 0.1, 20)(jax.random.key(0)).shape
        (20, 2)
    """
    check_count(num, "num")
    x, scale = _points(x, "x"), as_positive(scale, "scale", ndim=1)
    if scale.shape not in [(), x.shape[1:]]:
        raise ValueError(f"scale must be a number or have shape [{x.shape[1]}], got {list(scale.shape)}.")
    if not is_traced((x, scale)):
        farthest = np.abs(np.asarray(x, np.float64)).max(0)
        _check_precision(np.linspace(farthest - scale, farthest + scale, NUM_PLACES), "x with its noise (scale)")
    return Perturb(int(num), x.shape[1], x=x, scale=_constant(scale))


def union(*samplers) -> PointSampler:
    """The points of several samplers together. Each sampler has its own key, and fixed points stay fixed.

    Args:
        *samplers: samplers, callables of a key, or arrays [M, D].

    Raises:
        TypeError, ValueError: there are no samplers, their numbers of inputs differ, or one is not what ``as_points``
            takes.

    Example:
        >>> import numpy as np, numpyro_fspace as fs
        >>> box = fs.measurement.uniform(-1.0, 1.0, 20)
        >>> fs.measurement.union(np.zeros((3, 1)), box).num_points
        23
    """
    members = tuple(as_points(one, f"samplers[{i}]") for i, one in enumerate(samplers))
    if not members:
        raise ValueError("samplers must name at least one sampler.")
    known = [member.num_inputs for member in members if member.num_inputs is not None]
    check_num_inputs(known)
    pool = concatenated([member.pool if isinstance(member, Fixed | Subset | Union) else None for member in members])
    if all(isinstance(member, Fixed) for member in members):
        return fixed(pool)
    known_counts = [member.num_points for member in members if member.num_points is not None]
    total = sum(known_counts) if len(known_counts) == len(members) else None
    return Union(total, known[0] if known else None, any(m.is_random for m in members), pool, members=members)


def as_points(points, name: str = "points") -> PointSampler:
    """``points`` as a ``PointSampler``: an array [M, D] gives fixed points, and a callable of a key is wrapped.

    Args:
        points: a sampler, an array [M, D], or a callable from a key to [M, D]. A callable is random unless its
            attribute ``is_random`` is false. It may also have the attributes ``num_points``, ``num_inputs`` and
            ``pool``.
        name: what errors call the points.

    Raises:
        TypeError: points is neither an array nor a callable.
        ValueError: points is an array that ``fixed`` refuses.
    """
    if isinstance(points, BasePointSampler):
        return points
    if isinstance(points, type) or points is None or isinstance(points, str):
        raise TypeError(f"{name} must be an array [M, D] or a callable of a key, got {points!r}.")
    if callable(points):
        known = {n: getattr(points, n, None) for n in ("num_points", "num_inputs", "pool")}
        return Own(**known, is_random=bool(getattr(points, "is_random", True)), fn=points)
    return _fixed(points, name)


def _fixed(x, name: str) -> PointSampler:
    pool = _points(x, name)
    return Fixed(len(pool), pool.shape[1], is_random=False, pool=pool)


def _constant(value: np.ndarray | Array) -> Array:
    """A JAX array, concrete even while an outer function is traced, unless the value itself is traced."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value, float)


def _points(x, name: str) -> Float[Array, "M D"]:
    x = as_inputs(x, name)
    if isinstance(x, np.ndarray):
        largest = float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
        limit = float(jnp.finfo(jnp.result_type(float)).max)
        if largest > limit:
            raise ValueError(f"{name} holds {largest:.3g}, which exceeds JAX's limit {limit:.3g}; rescale {name}.")
        _check_precision(x, name)
    return _constant(x)


def _check_precision(points: np.ndarray, name: str) -> None:
    """Raise a ValueError for points whose differences JAX's precision would lose."""
    trouble = lost_to_rounding(points)
    if trouble is not None:
        raise ValueError(f"{name} {trouble}.")
