"""Model arguments as JAX sees them: arrays go into compiled functions as arguments, all else as constants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["as_jax", "split_arrays"]


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

    return arrays, (structure, others), join


def as_jax(tree):
    """``tree`` with JAX arrays in place of NumPy's, which cannot be indexed by the rows of a plate in a program."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
