"""Diabetes progression of 442 patients, through scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace._checks import renamed_argument
from numpyro_fspace.datasets.split import Split, check_dtype, check_split, make_split

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

NUM_SPLITS = 20


@renamed_argument("standardise", "standardize")
def load_diabetes(split: int = 0, *, standardize: bool = True, dtype: DTypeLike = np.float32) -> Split:
    """One random 90/10 split of the diabetes data, standardized on its training part.

    The data come with scikit-learn; nothing is downloaded.

    Args:
        split: number of the split, 0 to 19; it seeds the random choice of the 44 test rows.
        standardize: whether inputs and targets get mean 0 and standard deviation 1 over the training part.
        dtype: floating point type of the arrays.

    Returns:
        The `Split`, with 398 training and 44 test points and 10 inputs.

    Raises:
        ImportError: if scikit-learn is not installed.
        TypeError: if ``split`` is not an integer, or ``dtype`` is not a dtype.
        ValueError: if the split or the dtype is unknown.

    Example:
        >>> from numpyro_fspace.datasets import load_diabetes
        >>> load_diabetes(split=3)  # doctest: +SKIP
        Split('diabetes', split 3 of 20, 398 training and 44 test points, 10 inputs, float32)

    Reference:
        B. Efron, T. Hastie, I. Johnstone, R. Tibshirani (2004), *Least angle regression*.
    """
    split, dtype = check_split("diabetes", split, NUM_SPLITS), check_dtype(dtype)
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError('load_diabetes needs scikit-learn: pip install "numpyro_fspace[examples]"') from error
    x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    train_mask = np.ones(len(y), dtype=bool)
    train_mask[np.random.default_rng(split).permutation(len(y))[: len(y) // 10]] = False
    return make_split(
        "diabetes",
        x,
        y,
        train_mask,
        split=split,
        num_splits=NUM_SPLITS,
        standardize=standardize,
        dtype=dtype,
    )
