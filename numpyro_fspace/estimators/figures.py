"""Pictures of a fitted estimator: predicted against observed, and partial dependence."""

from __future__ import annotations

import numpy as np

from numpyro_fspace import metrics
from numpyro_fspace.estimators.base import NetworkEstimator
from numpyro_fspace.estimators.classifier import Classifier
from numpyro_fspace.estimators.table import Design

#: Maximum number of inputs that are shown, number of values of each, and maximum number of rows averaged over.
MAX_INPUTS, NUM_PLACES, NUM_ROWS = 6, 15, 40


def predicted_observed_figure(estimator: NetworkEstimator, x, y):
    """Observed against predicted targets with 90 % intervals; for classes, a reliability diagram."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.subplots()
    if isinstance(estimator, Classifier):
        labels = np.searchsorted(estimator.classes_, y)
        curve = metrics.reliability_curve(estimator.predict_proba(x), labels)
        axes.plot([0, 1], [0, 1], color="0.6", lw=1)
        axes.plot(curve.confidence, curve.accuracy, "o-")
        axes.set(xlabel="probability of the predicted class", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
        return figure
    low, middle, high = np.moveaxis(estimator.predict_quantiles(x), -1, 0)
    axes.errorbar(middle, y, xerr=[middle - low, high - middle], fmt=".", ms=5, lw=0.6, alpha=0.6)
    ends = [min(middle.min(), y.min()), max(middle.max(), y.max())]
    axes.plot(ends, ends, color="0.3", lw=1)
    axes.set(xlabel="predicted (median and 90 % interval)", ylabel="observed")
    return figure


def partial_dependence_figure(estimator: NetworkEstimator, design: Design, x):
    """The mean prediction over some rows as one input changes, with 90 % bands of its posterior.

    It shows the inputs whose lengthscales in the trained process are the shortest relative to their spread.
    """
    from matplotlib.figure import Figure

    rows = x[np.random.default_rng(0).permutation(len(x))[:NUM_ROWS]]
    shown = _columns(estimator, design)[:MAX_INPUTS]
    places = [_places(column, x[:, where], rows, where) for column, where in shown]
    draws = _draws(estimator, np.concatenate([block.reshape(-1, x.shape[1]) for _, block in places]))
    num_columns = min(3, len(shown))
    num_lines = -(-len(shown) // num_columns)
    figure = Figure(figsize=(4 * num_columns, 3 * num_lines), layout="constrained")
    grid = figure.subplots(num_lines, num_columns, squeeze=False, sharey=True).ravel()
    ends = np.cumsum([len(block) * len(rows) for _, block in places])
    parts = np.split(draws, ends[:-1], axis=1)
    for axes, (column, _), (labels, block), part in zip(grid, shown, places, parts, strict=False):
        values = part.reshape(len(draws), len(block), len(rows), -1).mean(2)
        for k in range(values.shape[-1]):
            low, middle, high = np.quantile(values[..., k], (0.05, 0.5, 0.95), axis=0)
            if column.kind == "levels":
                axes.errorbar(labels, middle, yerr=[middle - low, high - middle], fmt="o", color=f"C{k % 10}")
                axes.tick_params(axis="x", rotation=45)
            else:
                axes.plot(labels, middle, color=f"C{k % 10}")
                axes.fill_between(labels, low, high, alpha=0.25, color=f"C{k % 10}", lw=0)
        axes.set_xlabel(f"{column.name} (days since {column.start[:10]})" if column.kind == "date" else column.name)
    for axes in grid[len(shown) :]:
        axes.remove()
    if isinstance(estimator, Classifier):
        names = [str(name) for name in estimator.classes_[len(estimator.classes_) == 2 :]]
        grid[0].set_ylabel(f"probability of {names[0]}" if len(names) == 1 else "probabilities of the classes")
    else:
        grid[0].set_ylabel(design.target)
    return figure


def _draws(estimator, x):
    """Draws of the mean, or of probabilities, [S, N, K]."""
    draws = estimator.sample(x, None, noise=False, random_state=0)
    if draws.ndim == 2:
        return draws[..., None]
    return draws[..., 1:] if draws.shape[-1] == 2 else draws


def _columns(estimator, design) -> list:
    """Columns with the places of their numbers, the most relevant first."""
    relevance = 1.0 / np.asarray(estimator.model.lengthscale)
    ends = np.cumsum([len(column.labels) for column in design.columns])
    places = np.split(np.arange(len(relevance)), ends[:-1])
    return sorted(zip(design.columns, places, strict=True), key=lambda item: -relevance[item[1]].max())


def _places(column, values, rows, where) -> tuple:
    """``(labels, x)``: what a column is set to, and the rows with it, [P, R, D]."""
    if column.kind == "levels":
        labels = np.array(column.levels)
        numbers = np.eye(len(labels))[:, len(labels) == 2 :]
    else:
        labels = np.unique(np.quantile(values[:, 0], np.linspace(0.02, 0.98, NUM_PLACES)))
        numbers = labels[:, None]
    block = np.tile(rows, (len(numbers), 1, 1))
    block[:, :, where] = numbers[:, None, :]
    return labels, block
