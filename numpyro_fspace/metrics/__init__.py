"""Scores of predictions: arrays in, floats (or arrays) out, computed in NumPy in float64.

Regression takes targets ``y`` of shape ``[N]`` with either draws ``[S, N]`` or a Gaussian ``mean`` and
``variance`` per point; classification takes ``probs`` of shape ``[N, K]`` and integer ``labels`` of shape
``[N]``. Higher is better for log densities (:func:`lpd`, :func:`gaussian_lpd`, :func:`gaussian_mixture_lpd`,
:func:`gibbs_score`), :func:`accuracy`, :func:`ood_auc` and :func:`ood_accuracy`; coverage should equal its level;
lower is better for errors, the other scores and distances.
Two scores are easily taken for one another: :func:`lpd` is the log density of the *averaged* predictive distribution,
:func:`gibbs_score` the average of the draws' log densities, which is never higher.
"""

from __future__ import annotations

from numpyro_fspace.metrics.classification import (
    Reliability,
    accuracy,
    brier,
    ece,
    entropy,
    nll,
    ood_accuracy,
    ood_auc,
    reliability_curve,
)
from numpyro_fspace.metrics.density import (
    gaussian_lpd,
    gaussian_mixture_lpd,
    gibbs_score,
    lpd,
    rmse,
    to_raw_units,
)
from numpyro_fspace.metrics.distribution import (
    calibration_curve,
    coverage,
    crps,
    gaussian_coverage,
    gaussian_crps,
    gaussian_w2,
    sample_w2,
)
from numpyro_fspace.metrics.stein import ksd

__all__ = [
    "Reliability",
    "accuracy",
    "brier",
    "calibration_curve",
    "coverage",
    "crps",
    "ece",
    "entropy",
    "gaussian_coverage",
    "gaussian_crps",
    "gaussian_lpd",
    "gaussian_mixture_lpd",
    "gaussian_w2",
    "gibbs_score",
    "ksd",
    "lpd",
    "nll",
    "ood_accuracy",
    "ood_auc",
    "reliability_curve",
    "rmse",
    "sample_w2",
    "to_raw_units",
]
