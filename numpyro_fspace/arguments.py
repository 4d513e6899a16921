"""Model arguments as JAX sees them: arrays go into compiled functions as arguments, all else as constants."""

from __future__ import annotations

import datetime
import functools
import hashlib
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.on_demand import OnDemand

__all__ = ["as_numbers", "frozen", "is_table", "kept", "native", "not_numbers", "split_arrays", "with_rows"]


def native(array):
    """A NumPy array as JAX takes it: of the machine's byte order, and at most 64 bits; all else as it is."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        return array
    if isinstance(array, np.ma.MaskedArray):
        array = array.data
    dtype = array.dtype.newbyteorder("=")
    narrow = {np.dtype(np.longdouble): np.float64, np.dtype(np.clongdouble): np.complex128}
    return array.astype(narrow.get(dtype, dtype), copy=False)


def is_table(value) -> bool:
    """Whether ``value`` is another library's array, a pandas Series say, which NumPy reads and JAX does not."""
    return hasattr(value, "__array__") and not isinstance(value, type | np.ndarray | np.generic | jax.Array)


def not_numbers(array: np.ndarray) -> str | None:
    """What is wrong with an array that does not hold numbers, and the cure; None if it does."""
    if np.ma.is_masked(array):
        return "is a masked array, whose mask would be lost: drop the masked rows, or give them values with .filled()"
    parts = array.ravel() if array.dtype == object else ()
    if array.dtype.kind == "M" or any(isinstance(part, datetime.date | np.datetime64) for part in parts):
        return (
            f"holds dates (dtype {array.dtype}); encode it as numbers, such as days: "
            '(x - x[0]) / np.timedelta64(1, "D") with x = np.asarray(x, "datetime64[s]")'
        )
    if array.dtype.kind == "m" or any(isinstance(part, datetime.timedelta | np.timedelta64) for part in parts):
        return f'holds durations (dtype {array.dtype}); encode it as numbers, such as days: x / np.timedelta64(1, "D")'
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    return None if is_number else f"has dtype {array.dtype}; encode it as numbers first"


def as_numbers(value, name: str):
    """``value`` as an array of numbers that JAX takes; arrays of JAX, traced ones too, as they are.

    Raises:
        TypeError: dates, durations, text, other objects, masked values.
    """
    if isinstance(value, jax.Array) or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(value)
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype == object and all(isinstance(part, numbers.Number | None) for part in array.ravel()):
        array = array.astype(np.float64)  # None is NaN
    trouble = not_numbers(array)
    if trouble is not None:
        raise TypeError(f"{name} {trouble}.")
    return native(array)


def split_arrays(tree):
    """``(arrays, static, join)``: the arrays of ``tree``, what is left of it, and the way back.

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
