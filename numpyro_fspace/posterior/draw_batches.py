"""Evaluate a function at every draw: compiled, vectorized over draws, in chunks of bounded memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_count, native
from numpyro_fspace._xla import largest_array
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.programs.cache import options_of_outermost

#: Numbers in the largest array that draws evaluated together may make: 2²⁵ (128 MiB in float32).
CHUNK = 2**25


def compile_chunk(fn, given, *, is_quick: bool = False):
    """``fn`` over draws and keys, compiled; arrays in ``given`` enter as arguments.

    An array that stands at several places is one argument, so that what is computed from it is computed once.
    ``is_quick`` is for a program that takes longer to compile than to run.
    """
    arrays, _, join = split_arrays(given)
    places = [id(a) for a in arrays]
    first = [places.index(place) for place in places]

    @partial(jax.jit, compiler_options=options_of_outermost(is_quick=is_quick))
    def chunk(draws, keys, arrays):
        filled = join([arrays[i] for i in first])
        return jax.vmap(lambda draw, key: fn(draw, key, *filled))(draws, keys)

    return chunk


def map_draws(fn, draws, given: tuple) -> dict:
    """``fn(draw, key, *given)`` for every draw, a dict of arrays, collected as NumPy arrays [S, ...].

    Arrays in ``given`` enter the compiled function as arguments, all else as constants. The keys are always the same.
    """
    return map_compiled(compile_chunk(fn, given), draws, jax.random.key(0), given)


def map_compiled(chunk, draws, key, given: tuple, *, batch_size: int | None = None) -> dict:
    """``map_draws`` with what ``compile_chunk`` has made; ``batch_size`` draws at a time, or what memory allows."""
    num = jax.tree.leaves(draws)[0].shape[0]
    arrays = split_arrays(given)[0]
    keys = jax.random.split(key, num)
    if batch_size is None:
        batch_size = most_at_once(num, largest_array(chunk.trace(draws, keys, arrays).jaxpr.jaxpr))
    check_count(batch_size, "batch_size")
    values: dict = {}
    for start in range(0, num, batch_size):
        rows = slice(start, start + batch_size)
        part = jax.device_get(chunk(jax.tree.map(lambda a, rows=rows: a[rows], draws), keys[rows], arrays))
        for k, v in part.items():
            values.setdefault(k, np.empty((num, *v.shape[1:]), v.dtype))[rows] = v
    return values


def most_at_once(num: int, largest: int) -> int:
    """How many of ``num`` draws or rows can be evaluated together.

    Args:
        num: the number of all.
        largest: the size of the largest array that all of them together make.
    """
    return max(1, num * CHUNK // max(largest, CHUNK))


def share_equal(tree):
    """``tree`` with one array in place of all that are equal to it."""
    found: list = []

    def share(leaf):
        is_array = isinstance(leaf, np.ndarray | jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if not is_array or not leaf.ndim:
            return leaf
        value = jnp.asarray(native(leaf))
        for first, other in found:
            if value.dtype == other.dtype and value.shape == other.shape and np.array_equal(value, other):
                return first
        found.append((leaf, value))
        return leaf

    return jax.tree.map(share, tree)
