"""Model arguments as JAX sees them: arrays go into compiled functions as arguments, all else as constants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["split_arrays", "with_rows"]


def split_arrays(tree):
    """``(arrays, static, join)``: the arrays of ``tree``, what is left of it, and the way back.

    ``join(arrays)`` puts other arrays (traced ones, say) in the place of the first. ``static`` is hashable if the
    leaves of ``tree`` that are no arrays are.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    is_array = [isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0 for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    others = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))

    def join(arrays):
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(others, is_array, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return arrays, (structure, tuple(map(_hashable, others))), join


def _hashable(leaf):
    """A number in an array by its type and value, as arrays have no hash."""
    is_number = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if is_number and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.item()
    return (type(leaf), leaf) if isinstance(leaf, bool | int | float) else leaf  # True == 1 == 1.0


class Rows(np.ndarray):
    """A NumPy array of which rows can be taken inside a compiled program, where their numbers are not known."""

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.asarray(self)[index]
        return super().__getitem__(index)


def with_rows(tree):
    """``tree`` with ``Rows`` in place of NumPy's arrays."""
    return jax.tree.map(lambda leaf: leaf.view(Rows) if isinstance(leaf, np.ndarray) else leaf, tree)
