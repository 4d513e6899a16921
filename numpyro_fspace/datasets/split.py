"""A regression data set cut into a training and a test part, standardized on the training part."""

from __future__ import annotations

import io
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from numpy.typing import DTypeLike


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Training and test parts of a data set, as NumPy arrays.

    Raw values are ``x * x_scale + x_mean`` and ``y * y_scale + y_mean``. In raw units a root mean squared error is
    ``y_scale`` times the standardized one, and a log predictive density is lower by ``log(y_scale)``.

    Args:
        name: name of the data set.
        split: number of this split, from 0.
        x_train: training inputs ``[N, D]``.
        y_train: training targets ``[N]``.
        x_test: test inputs ``[T, D]``.
        y_test: test targets ``[T]``.
        x_mean: what was subtracted from the raw inputs, ``[D]``; 0 without standardization.
        x_scale: what the centered inputs were divided by, ``[D]``; 1 for a constant input or without standardization.
        y_mean: what was subtracted from the raw targets.
        y_scale: what the centered targets were divided by.
        num_splits: number of splits of the data set.
    """

    name: str
    split: int
    x_train: Float[np.ndarray, "N D"]
    y_train: Float[np.ndarray, " N"]
    x_test: Float[np.ndarray, "T D"]
    y_test: Float[np.ndarray, " T"]
    x_mean: Float[np.ndarray, " D"]
    x_scale: Float[np.ndarray, " D"]
    y_mean: float
    y_scale: float
    num_splits: int

    def __repr__(self) -> str:
        num_train, num_inputs = self.x_train.shape
        return (
            f"Split({self.name!r}, split {self.split} of {self.num_splits}, {num_train} training and "
            f"{len(self.y_test)} test points, {num_inputs} inputs, {self.x_train.dtype})"
        )


def check_split(name: str, split: int, num_splits: int) -> int:
    """The number of a split as an int, or an error that names the number of splits."""
    try:
        number = operator.index(split)
    except TypeError:
        raise TypeError(f"split must be an integer, got {split!r}.") from None
    if not 0 <= number < num_splits:
        raise ValueError(f"split={number} is out of range: {name!r} has {num_splits} splits, 0 to {num_splits - 1}.")
    return number


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """A floating point dtype of NumPy."""
    checked = np.dtype(dtype)
    if checked.kind != "f":
        raise ValueError(f"dtype must be a floating point type such as 'float32', got {dtype!r}.")
    return checked


def read_npz(path, **expected: tuple[str, tuple]) -> tuple[np.ndarray, ...]:
    """Arrays of an npz file, by name.

    Args:
        path: of the file.
        expected: of each array its kind (``"float"``: finite real numbers, ``"int"``, ``"bool"`` or ``"uint8"``) and
            its shape, in which a word stands for one size of at least 1 wherever it occurs.

    Raises:
        ValueError: if an array is missing or differs from what is expected.
    """
    with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
        missing = [name for name in expected if name not in file]
        if missing:
            raise ValueError(f"it holds no {', '.join(missing)}")
        arrays = {name: file[name] for name in expected}
    sizes: dict[str, int] = {}
    for name, (kind, shape) in expected.items():
        array = arrays[name]
        kinds = {"float": "iuf", "int": "iu", "bool": "b", "uint8": "u"}[kind]
        if array.dtype.kind not in kinds or (kind == "uint8" and array.dtype != np.uint8):
            raise ValueError(f"{name} has dtype {array.dtype}, not {kind}")
        known = dict(zip(shape, array.shape, strict=False)) | sizes
        wanted = tuple(known[size] if isinstance(size, str) and size in known else size for size in shape)
        if array.shape != wanted or 0 in array.shape:
            raise ValueError(f"{name} has shape {list(array.shape)}, not [{', '.join(map(str, shape))}]")
        sizes = {size: known[size] for size in known if isinstance(size, str)}
        if kind == "float" and not (np.abs(array) < np.finfo(np.float32).max).all():
            raise ValueError(f"{name} holds NaN or infinite values")
    return tuple(arrays.values())


def npz(**arrays) -> bytes:
    """The content of an npz file."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def make_split(
    name: str,
    x: Float[np.ndarray, "R D"],
    y: Float[np.ndarray, " R"],
    train_mask: Bool[np.ndarray, " R"],
    *,
    split: int,
    num_splits: int,
    standardize: bool,
    dtype: np.dtype,
) -> Split:
    """Cut raw rows by a mask; with ``standardize``, subtract the training mean and divide by the training sd.

    Columns that are constant on the training part are centered and left unscaled. The statistics are
    computed in float64.

    Returns:
        The split; without ``standardize`` its means are 0 and its scales 1.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    x_mean, x_scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
    y_mean, y_scale = np.zeros(()), np.ones(())
    if standardize:
        x_mean, x_scale = _moments(x[train_mask])
        y_mean, y_scale = _moments(y[train_mask])
    x, y = ((x - x_mean) / x_scale).astype(dtype), ((y - y_mean) / y_scale).astype(dtype)
    return Split(
        name=name,
        split=split,
        x_train=x[train_mask],
        y_train=y[train_mask],
        x_test=x[~train_mask],
        y_test=y[~train_mask],
        x_mean=x_mean.astype(dtype),
        x_scale=x_scale.astype(dtype),
        y_mean=float(y_mean),
        y_scale=float(y_scale),
        num_splits=num_splits,
    )


def _moments(rows: Float[np.ndarray, "N ..."]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over rows, the latter 1 where all rows are equal."""
    return rows.mean(axis=0), np.where(np.ptp(rows, axis=0) == 0, 1.0, rows.std(axis=0))
