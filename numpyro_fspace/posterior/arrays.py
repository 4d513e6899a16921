"""Arrays of draws, on a device or mapped from disk: their form in files, and arguments that are named."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._xla import one_program


def is_key(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def like(array, leaf):
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    dtype = jnp.asarray(leaf).dtype
    return jnp.asarray(array.view(dtype) if array.dtype.kind == "V" else array, dtype)  # NumPy saves bfloat16 as bytes


@one_program
def joined(draws):
    """Draws [C, S, …] as [C · S, …]: without a copy, if they lie on disk and the run is finished."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), draws)


def named_arrays(model, args, kwargs) -> dict:
    """The arrays among a model's arguments, by the names of its parameters."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
        more = {p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_POSITIONAL}
        named = bound.arguments
        for name in more & named.keys():
            named |= {f"{name}_{i}": value for i, value in enumerate(named.pop(name))}
        named |= kwargs
    except (TypeError, ValueError):
        named = {f"arg_{i}": value for i, value in enumerate(args)} | kwargs
    return {k: plain(v) for k, v in named.items() if isinstance(v, np.ndarray | jax.Array) and np.ndim(v)}
