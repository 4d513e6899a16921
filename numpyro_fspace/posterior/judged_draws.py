"""Draws of the quantities whose convergence is judged as one array, with a name for each number."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.functions import some_rows

#: Where functions are judged, as labels say after their names: at the data and away from it.
KINDS = ("", " at permuted rows", " at measurement points")
#: Ends the label of the places that numbers have in a larger array, among values by label.
PLACES = " (places)"
#: The most numbers in all draws of one function or site.
MAX_NUMBERS = 2**21


class JudgedDraws(NamedTuple):
    """Draws [C, S, P] of P numbers, with their names."""

    draws: np.ndarray
    names: tuple[str, ...]


def judged_draws(draws: dict, most: int | None = None, *, places: Mapping = MappingProxyType({})) -> JudgedDraws | None:
    """Draws [C, S, …] by label as one array, with at most ``most`` points of each label.

    Names give the place of each number in its array. If the draws are a part of a larger array, ``places`` has, by
    label, the place there of each of their rows [N, D].

    Numbers that are the same in all draws while others move are constants, such as the zeros of a triangular matrix,
    and are left out. So are values that are not finite away from the data; at the data they show that a chain diverged.
    """
    parts, names = [], []
    for label, values in draws.items():
        shape = values.shape[2:]
        flat = np.asarray(values).reshape(*values.shape[:2], -1)
        if jnp.issubdtype(flat.dtype, jnp.floating) and flat.dtype.kind != "f":  # bfloat16, which NumPy does not know
            flat = flat.astype(np.float32)
        if flat.dtype.kind not in "fiu" or not flat.size:
            continue
        kept = (flat != flat[:1, :1]).any(axis=(0, 1))  # NaN differs from itself
        if not kept.any():
            kept[:] = True
        if label.endswith(KINDS[1:]):
            kept &= np.isfinite(flat).all(axis=(0, 1))
        chosen = some_rows(np.flatnonzero(kept), MAX_NUMBERS // flat[..., 0].size or 1)
        chosen = chosen if most is None else some_rows(chosen, most)
        parts.append(flat[..., chosen])
        index = np.stack(np.unravel_index(chosen, shape), axis=1) if shape else np.zeros((len(chosen), 0), int)
        if label in places:
            index = np.concatenate([places[label][index[:, 0]], index[:, 1:]], axis=1)
        names += [f"{label}{place}" if place else label for place in index.tolist()]
    if not names:
        return None
    return JudgedDraws(np.concatenate(parts, axis=2), tuple(names))
