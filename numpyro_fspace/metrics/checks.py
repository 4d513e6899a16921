"""Checked conversion of a metric's arguments to float64 arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace._checks import not_numbers

if TYPE_CHECKING:
    from jaxtyping import ArrayLike


def as_real(value: ArrayLike, name: str) -> np.ndarray:
    """``value`` in float64; a TypeError if it is not numeric."""
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        trouble = not_numbers(array)
        if trouble is not None:
            raise TypeError(f"it {trouble}")
        if array.dtype.kind == "c":
            raise TypeError("it holds complex numbers")
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a real numeric array, got {type(value).__name__} ({error}).") from error


def as_finite(value: ArrayLike, name: str) -> np.ndarray:
    """``value`` in float64; a TypeError if it is not numeric, a ValueError if it is empty, NaN or infinite."""
    array = as_real(value, name)
    if array.size == 0:
        raise ValueError(f"{name} is empty (shape {array.shape}); a score needs at least one point.")
    bad = np.count_nonzero(~np.isfinite(array))
    if bad:
        raise ValueError(
            f"{name} holds {bad} NaN or infinite values among {array.size}. A chain that diverged produces them: drop "
            "those draws, or reduce the step size."
        )
    return array


def as_vector(value: ArrayLike, name: str) -> np.ndarray:
    """A finite ``[N]`` array."""
    array = as_finite(value, name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have shape [N], got {array.shape}; reshape(-1) it, or score one output at a time."
        )
    return array


def as_draws(value: ArrayLike, name: str, num_points: int) -> np.ndarray:
    """A finite ``[S, N]`` array with ``N = num_points``."""
    array = as_finite(value, name)
    if array.ndim != 2 or array.shape[1] != num_points:
        raise ValueError(
            f"{name} must have shape [S, {num_points}] (draws first, one column per target), got "
            f"{array.shape}; merge chains into one axis of draws."
        )
    return array


def per_point(value: ArrayLike, name: str, num_points: int) -> np.ndarray:
    """A scalar or ``[N]`` as ``[N]``."""
    array = as_finite(value, name)
    if array.shape not in ((), (num_points,)):
        raise ValueError(f"{name} must be a scalar or have shape [{num_points}], got {array.shape}.")
    return np.broadcast_to(array, (num_points,))


def positive(array: np.ndarray, name: str) -> np.ndarray:
    """``array`` itself; a ValueError unless all its entries are positive."""
    if array.min() <= 0:
        raise ValueError(f"{name} must be positive, but its smallest entry is {array.min():g}.")
    return array


def as_level(level: float) -> float:
    """A probability strictly between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}; write 0.9 for a 90 % interval.")
    return float(level)


def as_probs(probs: ArrayLike) -> np.ndarray:
    """Probabilities ``[..., K]`` that sum to one over the last axis, up to the rounding of half precision."""
    array = as_finite(probs, "probs")
    if array.ndim == 0 or array.min() < 0 or np.abs(array.sum(-1) - 1).max() > 1e-3:
        raise ValueError(
            "probs must be non-negative and sum to one over the last axis (classes); apply softmax to logits "
            "first, and write a binary problem as the two columns 1 - p and p."
        )
    return array / array.sum(-1, keepdims=True)


def as_probs_and_labels(probs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities ``[N, K]`` and integer labels ``[N]``."""
    array = as_probs(probs)
    if array.ndim != 2:
        raise ValueError(f"probs must have shape [N, K], got {array.shape}; average the draws' probabilities first.")
    classes = as_vector(labels, "labels")
    if len(classes) != len(array):
        raise ValueError(f"labels has {len(classes)} entries, probs has {len(array)} rows; they must agree.")
    if np.any(classes != np.floor(classes)) or classes.min() < 0 or classes.max() >= array.shape[1]:
        raise ValueError(
            f"labels must be integers from 0 to {array.shape[1] - 1} (probs has {array.shape[1]} columns)."
        )
    return array, classes.astype(np.int64)
