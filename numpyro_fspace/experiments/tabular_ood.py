"""Detection of rows from another data set by the posterior spread of f."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from numpyro_fspace import metrics
from numpyro_fspace.datasets import UCI_NAMES, load_images, load_uci
from numpyro_fspace.datasets.images import image_sources
from numpyro_fspace.datasets.uci import UCI_SPLITS
from numpyro_fspace.experiments import uci
from numpyro_fspace.experiments.catalog import Experiment, Job, published
from numpyro_fspace.experiments.methods import METHODS
from numpyro_fspace.experiments.uci import UCIConfig


def run(job: Job[UCIConfig]) -> dict:
    """A method of ``fspace run uci`` on a split, evaluated at the test inputs and at as many out-of-distribution rows.

    ``ood_accuracy`` is the accuracy of the best threshold on the variance of f (not of targets), ``ood_auc`` is the
    area under the ROC curve of that variance, and ``sd`` and ``sd_ood`` are the mean sd of f at the two kinds of rows.
    """
    data = load_uci(job.dataset, job.split, train_share=job.config.train_share)
    num = len(data.x_test)
    extra = ood_rows(num, data.x_test.shape[1], job.seed + job.split)
    _, posterior = uci.fit_split(job, extra)
    inside, outside = posterior.f_sd[:num] ** 2, posterior.f_sd[num:] ** 2
    return {
        "ood_accuracy": metrics.ood_accuracy(inside, outside),
        "ood_auc": metrics.ood_auc(inside, outside),
        "rmse": metrics.rmse(data.y_test, posterior.f_mean[:num]),
        "sd": float(posterior.f_sd[:num].mean()),
        "sd_ood": float(posterior.f_sd[num:].mean()),
        **posterior.cost,
    }


def ood_rows(num: int, num_inputs: int, seed: int) -> np.ndarray:
    """Out-of-distribution rows: leading principal components of handwritten digits, with mean 0 and sd 1.

    The paper uses rows of UCI's songs (YearPredictionMSD) with 90 features, standardized in the same way. The test
    digits of MNIST are another real data set with enough features for every UCI set.
    """
    rows = np.random.default_rng(seed).permutation(len(_components()))[:num]
    return _components()[rows, :num_inputs]


@lru_cache(maxsize=1)
def _components(num: int = 20) -> np.ndarray:
    """The first principal components of MNIST's test digits, [10 000, num], standardized."""
    pixels = load_images("mnist").test.reshape(10_000, -1).astype(np.float64)
    pixels -= pixels.mean(0)
    directions = np.linalg.eigh(pixels.T @ pixels)[1][:, ::-1][:, :num]
    components = pixels @ directions
    return (components / components.std(0)).astype(np.float32)


#: Cinquin and Bamler, table 4: accuracies with songs as the out-of-distribution rows. Their FVI is ``fbnn``, their MFVI
#: ``bbb``.
PUBLISHED = {
    "gfsvi": (0.893, 0.656, 0.997, 0.588, 0.860, 0.665, 0.616),
    "fbnn": (0.594, 0.583, 0.696, 0.604, 0.810, 0.517, 0.604),
    "tfsvi": (0.705, 0.511, 0.997, 0.576, 0.841, 0.549, 0.659),
    "bbb": (0.563, 0.605, 0.678, 0.570, 0.693, 0.542, 0.642),
    "vip": (0.628, 0.601, 0.682, 0.563, 0.549, 0.706, 0.688),
    "laplace": (0.557, 0.578, 0.782, 0.606, 0.629, 0.531, 0.612),
    "gwi": (0.817, 0.730, 0.998, 0.602, 0.942, 0.810, 0.563),
    "svgp": (0.947, 0.776, 0.998, 0.608, 0.967, 0.781, 0.762),
    "gp": (0.952, 0.933, 0.998, None, None, 0.787, 0.787),
}
PUBLISHED_SETS = ("boston", "concrete", "energy", "kin8nm", "protein", "wine_red", "yacht")

EXPERIMENT = Experiment(
    summary="Regression on UCI sets: does the spread of f detect rows of another data set?",
    run=run,
    config=uci.CONFIG,
    methods=METHODS,
    defaults=("gp", "fsghmc", "sghmc", "bbb"),
    datasets=UCI_NAMES,
    num_splits=UCI_SPLITS,
    files=(
        *(f"uci/{name}.npz" for name in UCI_NAMES),
        *(source.path for source in image_sources("mnist").values()),
    ),
    minutes=1,
    columns={
        "ood_accuracy": "OOD accuracy",
        "ood_auc": "OOD AUC",
        "sd": "sd of f",
        "sd_ood": "sd of f, OOD",
        "rmse": "RMSE",
        "seconds": "seconds",
    },
    published=published(PUBLISHED_SETS, ood_accuracy=PUBLISHED),
    source="Cinquin and Bamler, table 4 (songs as the out-of-distribution rows)",
)
