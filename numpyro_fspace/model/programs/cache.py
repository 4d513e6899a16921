"""Compiled programs, kept by all that they depend on: keys of arguments by their contents, the look-up, and options.

A cache is a dict of the object whose programs it holds. The shapes of arrays are a part of each key that is passed in.
"""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import compiler_options
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.data.on_demand import OnDemand

#: Most entries of a cache that ``keep`` fills.
MAX_KEPT = 200


def content_key(value):
    """A hashable key for ``value`` (for example a setting), which is the same for equal contents."""
    if isinstance(value, jax.core.Tracer):
        return _Same(value)
    if isinstance(value, np.ndarray | jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()
    if isinstance(value, dict):
        return type(value), tuple((name, content_key(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(content_key, value))
    if isinstance(value, functools.partial):
        return content_key((value.func, value.args, value.keywords))
    leaf = hashable(value)
    try:
        hash(leaf)
    except TypeError:
        return _Same(value)
    return leaf


class _Same:
    """A key that equals only keys of the same object."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def cached_program(programs: dict, static, key, program):
    """The program that ``programs`` holds for these arguments and this key, which is ``program`` at the first call.

    It is always ``program`` if an argument is not hashable, or is an object whose hash does not change with its
    contents.
    """
    objects = [leaf for leaf in static[1] if type(leaf).__hash__ is object.__hash__]
    # Functions, which have names, do not change. Other objects may.
    if not all(leaf is None or hasattr(leaf, "__name__") or isinstance(leaf, OnDemand) for leaf in objects):
        return program
    try:
        return programs.setdefault((static, key), program)
    except TypeError:
        return program


def options_of_outermost(*, is_quick: bool = False) -> dict | None:
    """Compiler options of a program; None inside of another program, whose options are those of its parts.

    ``is_quick`` is for a program that takes longer to compile than to run.
    """
    return None if is_nested() else compiler_options(is_quick=is_quick)


def keep(memory: dict, key, value):
    """Put an entry into a cache, which drops its oldest entry once it holds ``MAX_KEPT``."""
    if len(memory) >= MAX_KEPT:
        del memory[next(iter(memory))]
    memory[key] = value


def hashable(leaf):
    """A number as its type and its text, because True == 1 == 1.0 and 0.0 == -0.0, and arrays have no hash."""
    if isinstance(leaf, np.ndarray | jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), repr(leaf.item())
    return (type(leaf), repr(leaf)) if isinstance(leaf, bool | int | float | complex | np.generic) else leaf
