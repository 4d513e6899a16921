"""Edible and poisonous mushrooms with 22 visible features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.datasets.files import Source, load
from numpyro_fspace.datasets.split import check_dtype

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from jaxtyping import Bool, Float
    from numpy.typing import DTypeLike

MUSHROOM_SOURCE = Source(
    path="mushroom/agaricus-lepiota.data",
    urls=("https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/agaricus-lepiota.data",),
    sha256="e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e",
)
#: Columns of the file: the class and the features.
NUM_COLUMNS = 23


def load_mushroom(
    *, data_dir: str | os.PathLike[str] | None = None, dtype: DTypeLike = np.float32
) -> tuple[Float[np.ndarray, "8124 117"], Bool[np.ndarray, " 8124"]]:
    """The 8124 mushrooms of UCI's Mushroom data set (3916 of them poisonous).

    The 22 features are categories. Each level that occurs has a column of its own, in the order of the file's columns
    and of the levels' letters; an unknown stalk root (``?``) is a level like the others.

    Args:
        data_dir: directory that holds ``mushroom/agaricus-lepiota.data``; None looks in ``NUMPYRO_FSPACE_DATA`` and the
            user's cache, and downloads the public file otherwise.
        dtype: floating point type of the features.

    Returns:
        Columns of 0 and 1, ``[8124, 117]``, with one 1 for each of the 22 features; and whether each mushroom is
        poisonous, ``[8124]``.

    Raises:
        TypeError: if ``dtype`` is not a dtype.
        ValueError: if the dtype is unknown, or the file differs from the published one.
        DataNotFoundError: if the file is not on disk and could not be downloaded.
        ChecksumError: if the downloaded data are not the expected ones.

    Example:
        >>> from numpyro_fspace.datasets import load_mushroom
        >>> x, poisonous = load_mushroom()  # doctest: +SKIP

    Reference:
        UCI Machine Learning Repository, *Mushroom* (1981), doi:10.24432/C5959T; CC BY 4.0.
    """
    dtype = check_dtype(dtype)
    table = load(MUSHROOM_SOURCE, data_dir, _read, is_published=True)
    x = np.concatenate([column[:, None] == np.unique(column) for column in table[:, 1:].T], axis=1)
    return x.astype(dtype), table[:, 0] == "p"


def _read(path: Path) -> np.ndarray:
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").split()]
    if not rows or any(len(row) != NUM_COLUMNS or row[0] not in ("e", "p") for row in rows):
        raise ValueError(f"it is no table of {NUM_COLUMNS} columns, of which the first is e or p")
    return np.array(rows)
