"""Model arguments for compiled functions: arrays become arguments, everything else becomes constants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_fspace._checks import native, shown
from numpyro_fspace.model.programs.cache import content_key, hashable


def split_arrays(tree):
    """``(arrays, static, join)``: the arrays of ``tree``, the rest of it, and the function that joins them.

    ``join(arrays)`` returns ``tree`` with other arrays, for example traced ones. ``static`` identifies everything but
    the values, shapes and types of the arrays: a program compiled for one ``static`` must not be used for another. It
    is hashable if all leaves of ``tree`` that are not arrays are hashable.
    """
    leaves, structure = jax.tree.flatten(tree)  # None is part of the structure and not a leaf
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [native(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array]
    others = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))

    def join(arrays):
        given = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(others, is_array, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return arrays, (structure, tuple(map(hashable, others))), join


def structure_of(args, kwargs):
    """A key of the structure, shapes and types of the model's arguments."""
    arrays, (structure, others), _ = split_arrays((args, kwargs))
    return structure, content_key(others), tuple((np.shape(a), jnp.result_type(a)) for a in arrays)


def _is_array(leaf) -> bool:
    is_traced = isinstance(leaf, jax.core.Tracer)
    return is_traced or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0)


def check_model(model, args: tuple, kwargs: Mapping) -> None:
    """The model must be a function that takes these arguments.

    Raises:
        TypeError: naming what is missing or unknown.
    """
    if not callable(model):
        raise TypeError(f"model must be a NumPyro model, a function, got {model!r}.")
    while isinstance(model, Messenger):  # an effect handler around the function
        model = model.fn
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # a function of another language, which has none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise TypeError(f"{error}: the model is {name}{signature}. Pass the arguments that it takes.") from None


def describe(args: tuple, kwargs: Mapping) -> str:
    """Arguments in one line, arrays by type and shape: ``float32[12, 1], y=float32[3]``."""
    return ", ".join([*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())])


class Rows(np.ndarray):
    """A NumPy array that can be indexed by traced row numbers inside a compiled program."""

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.asarray(self)[index]
        return super().__getitem__(index)


def with_rows(tree):
    """``tree`` with ``Rows`` in place of NumPy's arrays."""
    return jax.tree.map(lambda leaf: native(leaf).view(Rows) if isinstance(leaf, np.ndarray) else leaf, tree)
