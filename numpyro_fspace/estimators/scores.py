"""Scores of an estimator on held-out rows, beside an exact Gaussian process and scikit-learn's own methods."""

from __future__ import annotations

import warnings

import numpy as np
from scipy.special import ndtri
from threadpoolctl import threadpool_limits

from numpyro_fspace import metrics
from numpyro_fspace.estimators.classifier import Classifier
from numpyro_fspace.estimators.regressor import Regressor

#: Maximum number of rows on which the exact process is conditioned.
MAX_CONDITIONING = 2000
LEVEL = 0.9


def regression_scores(estimator: Regressor, train: tuple, test: tuple) -> dict[str, dict[str, float]]:
    """Scores on the test rows, in units of y: ``{method: {score: value}}``.

    Args:
        estimator: fitted to the training rows.
        train, test: inputs [N, D] and targets [N].
    """
    x, y = test
    low, high = np.moveaxis(estimator.predict_quantiles(x, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2)), -1, 0)
    scale, center = float(estimator.y_scale_[0]), float(estimator.y_mean_[0])
    f, sigma = (draws[..., 0] for draws in estimator._mean_and_noise(x))
    lpd = metrics.gaussian_mixture_lpd((y - center) / scale, f, sigma) - float(np.log(scale))
    constant, spread = np.full(len(y), train[1].mean()), np.full(len(y), train[1].std())
    process = f"exact GP of {MAX_CONDITIONING} rows" if len(train[1]) > MAX_CONDITIONING else "exact GP"
    return {
        "network": _scores(y, estimator.predict(x), low, high, lpd=lpd),
        process: _exact_process(estimator, train, test),
        "gradient boosting": _boosting(train, test),
        "constant": _gaussian_scores(y, constant, spread),
    }


def _exact_process(estimator, train, test):
    x, y = train
    rows = np.random.default_rng(0).permutation(len(x))[:MAX_CONDITIONING]
    scale, center = float(estimator.y_scale_[0]), float(estimator.y_mean_[0])
    given = estimator.standardize(x[rows]), (y[rows] - center) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mean, variance = estimator.gp_.predict(*given, estimator.standardize(test[0]))
    return _gaussian_scores(test[1], center + scale * mean, scale * np.sqrt(variance))


def _gaussian_scores(y, mean, sd):
    reach = ndtri(0.5 + LEVEL / 2) * sd
    return _scores(y, mean, mean - reach, mean + reach, lpd=metrics.gaussian_lpd(y, mean, sd**2))


def _boosting(train, test):
    """Gradient boosting of the mean, and of two quantiles; it has no density."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    def fitted(**settings):
        return HistGradientBoostingRegressor(random_state=0, **settings).fit(*train).predict(test[0])

    with threadpool_limits(1):  # threads cost more than they save on small tables
        low, high = (fitted(loss="quantile", quantile=q) for q in (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
        mean = fitted()
    return _scores(test[1], mean, low, high, lpd=float("nan"))


def _scores(y, mean, low, high, *, lpd: float) -> dict[str, float]:
    """The scores of a mean and an interval, and a given log density."""
    return {
        "RMSE": metrics.rmse(y, mean),
        "lpd": lpd,
        "coverage90": float(((y >= low) & (y <= high)).mean()),
        "width90": float((high - low).mean()),
    }


def classification_scores(estimator: Classifier, train: tuple, test: tuple) -> dict[str, dict[str, float]]:
    """Scores on the test rows, ``{method: {score: value}}``. All their classes must occur among the training rows.

    Args:
        estimator: fitted to the training rows.
        train, test: inputs [N, D] and labels [N].
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, labels = test[0], np.searchsorted(estimator.classes_, test[1])
    shares = np.array([(train[1] == name).mean() for name in estimator.classes_])
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(*train)
    with threadpool_limits(1):
        boosting = HistGradientBoostingClassifier(random_state=0).fit(*train).predict_proba(x)
    found = {
        "network": estimator.predict_proba(x),
        "gradient boosting": boosting,
        "logistic regression": logistic.predict_proba(x),
        "shares of the classes": np.broadcast_to(shares, (len(x), len(shares))),
    }
    return {
        name: {
            "accuracy": metrics.accuracy(probs, labels),
            "log loss": metrics.nll(probs, labels),
            "ECE": metrics.ece(probs, labels),
            "Brier": metrics.brier(probs, labels),
        }
        for name, probs in found.items()
    }


def text_table(scores: dict[str, dict[str, float]]) -> str:
    """The scores as aligned text."""
    names = list(next(iter(scores.values())))
    width = max(map(len, scores)) + 2
    lines = ["".ljust(width) + "".join(f"{name:>12}" for name in names)]
    for method, values in scores.items():
        cells = ("-" if values[name] != values[name] else f"{values[name]:.4g}" for name in names)
        lines.append(method.ljust(width) + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
