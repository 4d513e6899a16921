"""Scores of predictions. They take arrays, compute in float64 with NumPy, and return floats or arrays.

Regression scores take targets ``y`` ``[N]`` and either draws ``[S, N]`` or a Gaussian ``mean`` and ``variance`` for
each point. Classification scores take ``probs`` ``[N, K]`` and integer ``labels`` ``[N]``. Higher is better for log
densities (:func:`lpd`, :func:`gaussian_lpd`, :func:`gaussian_mixture_lpd`, :func:`gibbs_score`), :func:`accuracy`,
:func:`ood_auc` and :func:`ood_accuracy`. Coverage should equal its level. Lower is better for errors, distances and all
other scores. Arguments that are not arrays of real numbers raise a ``TypeError``.

Two scores are easily confused: :func:`lpd` is the log density of the *averaged* predictive distribution, and
:func:`gibbs_score` is the average of the log densities of the draws, which is never higher.
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
