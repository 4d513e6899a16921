"""Draws of the quantities whose convergence is judged as one array, with a name for each number."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_fspace.model.functions import some_rows

__all__ = ["KINDS", "JudgedDraws", "judged_draws"]

#: Where functions are judged, as labels say after their names: at the data and away from it.
KINDS = ("", " at permuted rows", " at measurement points")
#: The most numbers in all draws of one function or site.
MAX_NUMBERS = 2**21


class JudgedDraws(NamedTuple):
    """Draws [C, S, P] of P numbers, with their names."""

    draws: np.ndarray
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"JudgedDraws(draws of shape {np.shape(self.draws)})"


def judged_draws(draws: dict, most: int | None = None, *, numbers: dict | None = None) -> JudgedDraws | None:
    """Draws [C, S, …] by label as one array, with at most ``most`` points of each label.

    ``numbers`` has, by label, the numbers of the rows of the draws in a larger array, which their names give.

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
        chosen = some_rows(np.flatnonzero(kept), MAX_NUMBERS // flat[..., 0].size or 1) if kept.any() else []
        chosen = chosen if most is None or not len(chosen) else some_rows(chosen, most)
        parts.append(flat[..., chosen])
        named = (numbers or {}).get(label)
        for i in chosen:
            place = [int(k) for k in np.unravel_index(i, shape)]
            place[:1] = place[:1] if named is None else [int(named[place[0]])]
            names.append(f"{label}{place}" if shape else label)
    if not names:
        return None
    return JudgedDraws(np.concatenate(parts, axis=2), tuple(names))
