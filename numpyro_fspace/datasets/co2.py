"""Atmospheric carbon dioxide at Mauna Loa, 1958 to 2001."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.datasets.files import Source, load
from numpyro_fspace.datasets.split import check_dtype

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from jaxtyping import Float
    from numpy.typing import DTypeLike

CO2_SOURCE = Source(
    path="timeseries/co2.csv",
    urls=(
        "https://raw.githubusercontent.com/statsmodels/statsmodels/"
        "82c59e378bdfb5ae324006c477954879ad3e24be/statsmodels/datasets/co2/co2.csv",
    ),
    sha256="16695fa2786e53414e5a6b54767a3fdf5de99cfbc68617f69d1362d92776a92f",
    package=("statsmodels", "datasets/co2/co2.csv"),
)


def load_co2(
    frequency: str = "weekly",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[Float[np.ndarray, "N 1"], Float[np.ndarray, " N"]]:
    """Carbon dioxide concentration at Mauna Loa against time, in raw units.

    Args:
        frequency: ``"weekly"`` (2225 values: 59 of the 2284 weeks are missing) or ``"monthly"``, the means of
            time and value over the weeks measured in a calendar month.
        data_dir: directory that holds ``timeseries/co2.csv``; None looks in ``NUMPYRO_FSPACE_DATA``, the
            user's cache and statsmodels, if installed, and downloads the public file otherwise.
        dtype: floating point type of the arrays.

    Returns:
        Decimal years ``[N, 1]`` and parts per million by volume ``[N]``, in order of time.

    Raises:
        TypeError: if ``dtype`` is not a dtype.
        ValueError: if the frequency or the dtype is unknown, or the file differs from the published one.
        DataNotFoundError: if the file is not on disk and could not be downloaded.
        ChecksumError: if the downloaded data are not the expected ones.

    Example:
        >>> from numpyro_fspace.datasets import load_co2
        >>> t, y = load_co2("monthly")  # doctest: +SKIP

    Reference:
        Keeling & Whorf (2004), Scripps Institution of Oceanography; public domain.
    """
    if frequency not in ("weekly", "monthly"):
        raise ValueError(f"frequency must be 'weekly' or 'monthly', got {frequency!r}.")
    dtype = check_dtype(dtype)
    days, value = load(CO2_SOURCE, data_dir, _read, is_published=True)
    time = _decimal_year(days)
    if frequency == "monthly":
        _, month, count = np.unique(days.astype("datetime64[M]"), return_inverse=True, return_counts=True)
        time, value = np.bincount(month, time) / count, np.bincount(month, value) / count
    return time[:, None].astype(dtype), value.astype(dtype)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Days and values; weeks without a value are left out."""
    lines = path.read_text(encoding="utf-8").split()[1:]
    rows = [line.split(",") for line in lines if not line.endswith(",")]
    days = np.array([f"{day[:4]}-{day[4:6]}-{day[6:]}" for day, _ in rows], dtype="datetime64[D]")
    return days, np.array([float(co2) for _, co2 in rows])


def _decimal_year(days: np.ndarray) -> Float[np.ndarray, " N"]:
    """Year and elapsed part of the year, at the beginning of each day."""
    year = days.astype("datetime64[Y]")
    start, end = year.astype("datetime64[D]"), (year + np.timedelta64(1, "Y")).astype("datetime64[D]")
    return 1970 + year.astype(int) + (days - start) / (end - start)
