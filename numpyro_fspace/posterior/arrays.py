"""Arrays of draws as files hold them: random keys and all else as plain NumPy arrays, chains one after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["is_key", "join_chains", "like", "plain"]


def is_key(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def like(array, leaf):
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    dtype = jnp.asarray(leaf).dtype
    return jnp.asarray(array.view(dtype) if array.dtype.kind == "V" else array, dtype)  # NumPy saves bfloat16 as bytes


def join_chains(array):
    """[C, S, …] as [C · S, …]: without a copy, if the draws lie on disk and the run is finished."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
