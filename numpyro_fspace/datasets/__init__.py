"""Data sets of the experiments: files on disk, downloaded if they are missing, and toy problems.

Nothing is read or downloaded at import. If ``data_dir`` is given, only this directory is searched for files. Otherwise
the directory named by the environment variable ``NUMPYRO_FSPACE_DATA`` is searched, then the user's cache. A file that
is in neither is downloaded into the cache (see ``numpyro_fspace.datasets.files``).
"""

from numpyro_fspace.datasets.co2 import load_co2
from numpyro_fspace.datasets.diabetes import load_diabetes
from numpyro_fspace.datasets.drifters import Drifters, load_drifters
from numpyro_fspace.datasets.files import ChecksumError, DataNotFoundError
from numpyro_fspace.datasets.images import IMAGE_NAMES, Images, load_images
from numpyro_fspace.datasets.mushroom import load_mushroom
from numpyro_fspace.datasets.split import Split
from numpyro_fspace.datasets.toy import extrapolation, extrapolation_grid, extrapolation_truth, sine, two_moons
from numpyro_fspace.datasets.uci import UCI_NAMES, load_uci

__all__ = [
    "IMAGE_NAMES",
    "UCI_NAMES",
    "ChecksumError",
    "DataNotFoundError",
    "Drifters",
    "Images",
    "Split",
    "extrapolation",
    "extrapolation_grid",
    "extrapolation_truth",
    "load_co2",
    "load_diabetes",
    "load_drifters",
    "load_images",
    "load_mushroom",
    "load_uci",
    "sine",
    "two_moons",
]
