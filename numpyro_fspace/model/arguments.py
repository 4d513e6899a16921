"""Model arguments as JAX sees them: arrays go into compiled functions as arguments, all else as constants."""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import native
from numpyro_fspace.model.on_demand import OnDemand

__all__ = ["frozen", "kept", "split_arrays", "with_rows"]


def split_arrays(tree):
    """``(arrays, static, join)``: the arrays of ``tree``, the rest of it, and the function that joins them.

    ``join(arrays)`` puts other arrays (traced ones, say) in the place of the first. ``static`` names all but the
    arrays' numbers, shapes and types: a program made for one must not be used for another. It is hashable if the leaves
    of ``tree`` that are no arrays are, and cannot change in place.
    """
    leaves, structure = jax.tree.flatten(tree)  # the structure tells None from an array
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [native(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array]
    others = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))

    def join(arrays):
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(others, is_array, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return arrays, (structure, tuple(map(_hashable, others))), join


def frozen(value):
    """What tells ``value``, a setting say, from others: hashable, and the same for equal contents."""
    if isinstance(value, jax.core.Tracer):
        return _Same(value)
    if isinstance(value, np.ndarray | jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest()
    if isinstance(value, dict):
        return type(value), tuple((name, frozen(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, functools.partial):
        return frozen((value.func, value.args, value.keywords))
    leaf = _hashable(value)
    try:
        hash(leaf)
    except TypeError:
        return _Same(value)
    return leaf


class _Same:
    """A key that is equal for the same object only."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def kept(programs: dict, static, key, program):
    """``program``, or the first one for such arguments under this key.

    Not if an argument cannot be hashed, or is an object that may be changed in place, of which its hash says nothing.
    """
    objects = [leaf for leaf in static[1] if type(leaf).__hash__ is object.__hash__]
    # A function has a name; a callable object without one may be changed in place too.
    if not all(leaf is None or hasattr(leaf, "__name__") or isinstance(leaf, OnDemand) for leaf in objects):
        return program
    try:
        return programs.setdefault((static, key), program)
    except TypeError:
        return program


def _is_array(leaf) -> bool:
    is_traced = isinstance(leaf, jax.core.Tracer)
    return is_traced or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0)


def _hashable(leaf):
    """A number by its type and what it prints as: True == 1 == 1.0 and 0.0 == -0.0, and arrays have no hash."""
    if isinstance(leaf, np.ndarray | jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), repr(leaf.item())
    return (type(leaf), repr(leaf)) if isinstance(leaf, bool | int | float | complex | np.generic) else leaf


class Rows(np.ndarray):
    """A NumPy array of which rows can be taken inside a compiled program, where their numbers are not known."""

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.asarray(self)[index]
        return super().__getitem__(index)


def with_rows(tree):
    """``tree`` with ``Rows`` in place of NumPy's arrays."""
    return jax.tree.map(lambda leaf: native(leaf).view(Rows) if isinstance(leaf, np.ndarray) else leaf, tree)
