"""Surface currents of the Gulf of Mexico: twenty drifters' velocities, and the mean currents on a grid."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_fspace._checks import one_line
from numpyro_fspace.datasets.files import Source, load
from numpyro_fspace.datasets.split import check_dtype, npz, read_npz

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from jaxtyping import Float
    from numpy.typing import DTypeLike


def build_drifters(parts: Sequence[bytes]) -> bytes:
    """Content of an npz file: positions and velocities ``train_pos train_vel test_pos test_vel``, and ``test_shape``.

    Args:
        parts: two tables as text, of the drifters and of the grid, each with a heading and the columns number,
            longitude, latitude, eastward and northward velocity. The table of the grid has a sixth column, which begins
            with the numbers of latitudes and of longitudes.

    Raises:
        ValueError: if a table has other columns, or the size of the grid differs from the stated one.
    """
    tables = []
    for part, columns in zip(parts, (",lon,lat,ubar,vbar", ",lon,lat,ubar,vbar,shape"), strict=True):
        heading = part.split(b"\n", 1)[0].decode().strip()
        if heading != columns:
            raise ValueError(f"a table of drifters must have the columns {columns!r}, got {heading!r}.")
        tables.append(np.loadtxt(io.BytesIO(part), delimiter=",", skiprows=1, ndmin=2))
    train, test = tables
    shape = test[:2, 5].astype(int)
    if shape.prod() != len(test):
        raise ValueError(f"the grid has {len(test)} rows, but states the size {shape[0]} × {shape[1]}.")
    return npz(
        train_pos=train[:, 1:3],
        train_vel=train[:, 3:5],
        test_pos=test[:, 1:3],
        test_vel=test[:, 3:5],
        test_shape=shape,
    )


_URL = "https://raw.githubusercontent.com/JaxGaussianProcesses/static/3e2ae250c3d6105bcad610cdf0f651c9d2737c4b/data"
DRIFTERS_SOURCE = Source(
    path="drifters/gulfdrifters_gpjax.npz",
    urls=(f"{_URL}/gulfdata_train.csv", f"{_URL}/gulfdata_test.csv"),
    sha256="aa0d67f4a22f4bbc2ba550241fab9e06190c8d4a1048704c04f2c68079c55f17",
    build=build_drifters,
)


class Drifters(NamedTuple):
    """The data that ``load_drifters`` returns.

    Attributes:
        x: positions of the drifters, longitude and latitude in degrees, [20, 2].
        y: their velocities, eastward and northward in m/s, [20, 2].
        grid: centers of the grid's cells, longitude and latitude in degrees, [544, 2]; the longitude changes fastest.
        currents: mean velocities in these cells, eastward and northward in m/s, [544, 2].
        shape: the grid's numbers of latitudes and longitudes, (16, 34).
    """

    x: Float[np.ndarray, "N 2"]
    y: Float[np.ndarray, "N 2"]
    grid: Float[np.ndarray, "G 2"]
    currents: Float[np.ndarray, "G 2"]
    shape: tuple[int, int]

    def __repr__(self) -> str:
        return one_line(self)


def load_drifters(*, data_dir: str | os.PathLike[str] | None = None, dtype: DTypeLike = np.float32) -> Drifters:
    """Twenty velocities of surface drifters in the Gulf of Mexico, and the mean currents around them.

    This is the extract of GulfDrifters in the vector-field example of GPJax: four positions on each of five drifter
    tracks, and the velocities of all drifters averaged over cells of a fifth of a degree, which serve as the truth.

    Args:
        data_dir: directory that holds ``drifters/gulfdrifters_gpjax.npz``; None looks in ``NUMPYRO_FSPACE_DATA`` and
            the user's cache, and downloads the public files otherwise.
        dtype: floating point type of the arrays.

    Returns:
        The :class:`Drifters`, in degrees and m/s.

    Raises:
        TypeError: if ``dtype`` is not a dtype.
        ValueError: if the dtype is unknown, or the file is damaged.
        DataNotFoundError: if the file is not on disk and could not be downloaded.
        ChecksumError: if the downloaded data are not the expected ones.

    Example:
        >>> from numpyro_fspace.datasets import load_drifters
        >>> load_drifters().currents.shape  # doctest: +SKIP
        (544, 2)

    Reference:
        Lilly & Pérez-Brunius (2021), *GulfDrifters*; Berlinghieri et al. (2023).
    """
    dtype = check_dtype(dtype)
    (x, y, grid, currents), shape = load(DRIFTERS_SOURCE, data_dir, _read)
    return Drifters(x.astype(dtype), y.astype(dtype), grid.astype(dtype), currents.astype(dtype), shape)


def _read(path: Path) -> tuple[list[np.ndarray], tuple[int, int]]:
    *tables, (num_longitudes, num_latitudes) = read_npz(
        path,
        train_pos=("float", ("N", 2)),
        train_vel=("float", ("N", 2)),
        test_pos=("float", ("G", 2)),
        test_vel=("float", ("G", 2)),
        test_shape=("int", (2,)),
    )
    if num_longitudes * num_latitudes != len(tables[2]):
        raise ValueError(f"its grid has {len(tables[2])} rows, but states the size {num_longitudes} × {num_latitudes}")
    return tables, (int(num_latitudes), int(num_longitudes))
