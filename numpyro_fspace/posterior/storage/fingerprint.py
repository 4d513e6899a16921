"""Fingerprints of arrays and settings, by which a checkpoint knows them; they are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from numpyro_fspace.model.checks.arguments import arguments_of
from numpyro_fspace.model.data.on_demand import OnDemand
from numpyro_fspace.model.functions import some_rows
from numpyro_fspace.posterior.arrays import is_key, plain

#: Separates what kind of value an input has from the hash of its values.
HASHED = ", SHA-256 "


def fingerprint(array) -> str:
    """Type, shape and SHA-256 of an array."""
    value = plain(array)
    content = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
    return f"{value.dtype}{list(value.shape)}{HASHED}{hashlib.sha256(content).hexdigest()}"


def leaves_as_text(value) -> dict:
    """The leaves of an input as text, by their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda leaf: leaf is None)
    text = {jax.tree_util.keystr(place): text_of(leaf) for place, leaf in leaves}
    return text if jax.tree_util.treedef_is_leaf(structure) else text | {" (its structure)": text_of(structure)}


def other_arguments(inputs: Mapping, model: Callable, args: tuple, kwargs: Mapping) -> list[str]:
    """Names of arguments whose values differ from those of a run, whether they are passed by position or by keyword.

    Only arrays and numbers of the run's type or of a wider one are compared, and only arguments that were passed both
    now and to the run, whose values ``inputs`` describes.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [k for k, one in inspect.signature(model).parameters.items() if one.kind in positional]
    except (TypeError, ValueError):
        names = []

    def by_name(found):
        i = int(found[1])
        return f"argument {names[i]!r}" if i < len(names) else found[0]

    def named(values):
        return {re.sub(r"^positional argument (\d+)", by_name, name): value for name, value in values.items()}

    before = named(inputs)
    given = named(arguments_of(args, kwargs))
    others = []
    for name, value in given.items():
        leaves = jax.tree_util.tree_leaves_with_path(value)
        if any(_is_other(str(before.get(name + jax.tree_util.keystr(place))), leaf) for place, leaf in leaves):
            others.append(name)
    return others


def _is_other(text: str, value) -> bool:
    """Whether an array or a number is certainly not the one that the run describes by ``text``."""
    if isinstance(value, bool | int | float) and HASHED not in text:
        try:
            return text != text_of(value) and float(text) != float(value)
        except (ValueError, OverflowError):
            return False
    kind = re.match(r"(\w+)\[", text)
    if not isinstance(value, np.ndarray | jax.Array) or not kind or is_key(value):
        return False
    try:
        array = np.asarray(value)
        is_narrower = not np.can_cast(kind[1], array.dtype)
        return not is_narrower and fingerprint(array.astype(kind[1])) != text
    except (TypeError, ValueError):
        return False


def text_of(value) -> str:
    """A setting, or a leaf of an input, as text that is the same in every process."""
    if isinstance(value, np.ndarray | jax.Array):
        return fingerprint(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, OnDemand):  # up to 1000 rows, evenly spaced, represent all
        return f"{text} of {fingerprint(value[some_rows(np.arange(len(value)), 1000)])}"
    if isinstance(value, functools.partial):  # an init_strategy with its values
        value = (value.args, value.keywords)
    elif hasattr(value, "__array__"):  # a table, whose text leaves rows out
        value = np.asarray(value)
    return " ".join([text, *map(fingerprint, _arrays(value))])


def _arrays(value):
    """The arrays in a value, those in objects of this package too (measurement points, priors)."""
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, np.ndarray | jax.Array):
            yield leaf
        elif type(leaf).__module__.startswith("numpyro_fspace.") and hasattr(leaf, "__dict__"):
            yield from _arrays([part for name, part in vars(leaf).items() if not name.startswith("_")])
