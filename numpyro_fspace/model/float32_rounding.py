"""A check for float64 values whose differences are lost when JAX rounds them to float32."""

from __future__ import annotations

import jax
import numpy as np


def lost_to_rounding(array: np.ndarray) -> str | None:
    """A message if JAX's float32 would lose the differences in an array; None if it does not, or JAX uses float64."""
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        return None
    rows = np.atleast_1d(array).astype(np.float64)
    is_known = np.isfinite(rows)
    if not is_known.any():
        return None
    rows = rows if is_known.all() else np.ma.masked_invalid(rows)
    with np.errstate(over="ignore"):
        cast = rows.astype(np.float32)
        spread = np.std(rows, axis=0)
        lost = np.max(np.abs(cast.astype(np.float64) - rows), axis=0)
        varies = np.ptp(rows, axis=0) > 0
    if np.ma.filled(np.isfinite(cast), True).all() and not np.any(varies & (lost > 1e-3 * spread)):
        return None
    return (
        f"is {array.dtype} and JAX would round it to float32, which loses its differences (its values are too large "
        'for their spread). Standardize it, or call jax.config.update("jax_enable_x64", True) first'
    )
