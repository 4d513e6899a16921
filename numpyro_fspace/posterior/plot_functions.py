"""Plots of function draws.

Matplotlib is imported when a function is called, no global setting is changed and nothing is shown: the caller gets the
axes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_fspace._checks import as_numbers, check_count, check_positive

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float
    from matplotlib.axes import Axes

    from numpyro_fspace.priors import GaussianProcess

# Okabe and Ito's colors, told apart under the common kinds of color blindness.
_BLUE, _SKY, _ORANGE, _BLACK = "#0072B2", "#56B4E9", "#D55E00", "#000000"


def plot_functions(
    x: Float[ArrayLike, "N D"] | Float[ArrayLike, " N"],
    f_draws: Float[ArrayLike, "S N"],
    *,
    x_data: Float[ArrayLike, "M 1"] | Float[ArrayLike, " M"] | None = None,
    y_data: Float[ArrayLike, " M"] | None = None,
    truth: Float[ArrayLike, " N"] | None = None,
    reference: tuple[Float[ArrayLike, " N"], Float[ArrayLike, " N"]] | GaussianProcess | None = None,
    noise_draws: Float[ArrayLike, "S N"] | None = None,
    level: float = 0.9,
    num_draws: int = 20,
    ax: Axes | None = None,
) -> Axes:
    """Draws of a function against its input; with several inputs, predictions against observations.

    With one input the plot has the mean, the central band of ``f``, some draws, and, if given, the data, the band of
    noisy targets, the true function and a reference distribution. The background is shaded where every training input
    is farther away than a twentieth of the range of ``x``. With several inputs the plot has ``y_data`` (observed at the
    rows of ``x``) on the horizontal axis, the mean of ``f`` with interval bars on the vertical axis, and the diagonal
    of perfect prediction.

    Args:
        x: inputs of the draws, ``[N]`` or ``[N, D]``, in any order.
        f_draws: draws of one output of the function, ``[S, N]`` or ``[S, N, 1]``, of all chains together.
        x_data: inputs of the training data, ``[M]`` or ``[M, 1]``; one input only.
        y_data: targets at ``x_data``, ``[M]``; with several inputs, targets at ``x``, ``[N]`` (required).
        truth: the true function at ``x``, ``[N]``; one input only.
        reference: a Gaussian process to compare with, such as the exact posterior ``gp.condition(...)`` of f, or its
            mean and standard deviation at ``x``; drawn as a dashed band of the same level; one input only.
        noise_draws: draws of noisy targets at ``x``, ``[S, N]``, for an outer band (one input) or the bars
            (several inputs; without them the bars are those of f).
        level: probability of the bands and bars, in (0, 1).
        num_draws: number of draws to show, evenly spread over ``S``; one input only.
        ax: where to draw; by default a new figure, with the legend beside the axes.

    Returns:
        Matplotlib's axes.

    Raises:
        ValueError: a shape, ``level`` or ``num_draws`` is wrong, values are not finite, or arguments do not go
            together.
        TypeError: what is drawn is not an array of real numbers.
        ImportError: Matplotlib is missing.

    Example:
        >>> x = np.linspace(-1, 1, 50)
        >>> ax = plot_functions(x, np.random.default_rng(0).normal(size=(100, 50)))
        >>> len(ax.lines)
        21
    """
    x, f_draws, noise_draws = _check(x, f_draws, noise_draws, level, num_draws)
    if x.shape[1] == 1:
        given = {"x_data": x_data, "y_data": y_data, "truth": truth, "reference": reference, "noise_draws": noise_draws}
        return _plot_line(x[:, 0], f_draws, **given, level=level, num_draws=num_draws, ax=ax)
    if y_data is None:
        raise ValueError(f"y_data is required when x has {x.shape[1]} inputs: the targets at the rows of x.")
    for name, value in {"x_data": x_data, "truth": truth, "reference": reference}.items():
        if value is not None:
            raise ValueError(f"{name} is for one input only and x has {x.shape[1]}; leave it out.")
    y = _vector(y_data, "y_data", len(x))
    draws = f_draws if noise_draws is None else noise_draws
    return _plot_observed(draws, f_draws.mean(axis=0), y, level, ax)


def _plot_line(x, f_draws, *, x_data, y_data, truth, reference, noise_draws, level, num_draws, ax) -> Axes:
    if np.ptp(x) == 0:
        raise ValueError("x must hold at least two different points to draw a line through.")
    if (x_data is None) != (y_data is None):
        raise ValueError("x_data and y_data go together; give both or neither.")
    if x_data is not None:
        y_data = _vector(y_data, "y_data")
        x_data = _vector(x_data, "x_data", len(y_data))
    truth = None if truth is None else _vector(truth, "truth", len(x))
    if reference is not None:
        mean, sd = (_vector(part, "reference", len(x)) for part in _mean_and_sd(reference, x))
        if np.any(sd < 0):
            raise ValueError(f"reference holds a negative standard deviation: {sd.min()}.")
    order = np.argsort(x)
    grid, f_draws = x[order], f_draws[:, order]
    axes = _axes(ax)
    if x_data is not None:
        _shade_gaps(axes, grid, x_data)
    if noise_draws is not None:
        _band(axes, grid, noise_draws[:, order], level, "y", color=_SKY, alpha=0.2, zorder=1)
    _band(axes, grid, f_draws, level, "f", color=_BLUE, alpha=0.25, zorder=2)
    _lines(axes, grid, f_draws, num_draws)
    if reference is not None:
        _reference(axes, grid, mean[order], sd[order], level)
    if truth is not None:
        axes.plot(grid, truth[order], color=_BLACK, lw=1.2, ls=(0, (1, 1.5)), label="truth", zorder=5)
    ends = grid[[0, -1]]
    if x_data is not None:
        axes.plot(x_data, y_data, "o", ms=4, color=_BLACK, mec="white", mew=0.6, label="data", zorder=6)
        ends = np.concatenate([ends, x_data])
    axes.set(xlabel="x", ylabel="f(x)", xlim=(ends.min(), ends.max()))
    return _finish(axes, beside=ax is None)


def _real(value: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(as_numbers(value, name))
    if array.dtype.kind == "c":
        raise TypeError(f"{name} must be real, got {array.dtype}.")
    return array.astype(np.float64)


def _vector(value: ArrayLike, name: str, size: int | None = None) -> Float[np.ndarray, " N"]:
    array = _real(value, name)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or (size is not None and len(array) != size):
        raise ValueError(f"{name} must have shape [{'N' if size is None else size}], got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN or infinite values; drop them.")
    return array


def _check(x, f_draws, noise_draws, level, num_draws) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    x = _real(x, "x")
    x = x[:, None] if x.ndim == 1 else x
    if x.ndim != 2 or x.size == 0:
        raise ValueError(f"x must have shape [N] or [N, D] and not be empty, got {x.shape}.")
    if not np.isfinite(x).all():
        raise ValueError("x holds NaN or infinite values; drop them.")
    f_draws = _draws(f_draws, "f_draws", len(x))
    noise_draws = None if noise_draws is None else _draws(noise_draws, "noise_draws", len(x))
    check_positive(level, "level")
    if not level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}; write 0.9 for a 90 % band.")
    check_count(num_draws, "num_draws", minimum=0)
    return x, f_draws, noise_draws


def _draws(value: ArrayLike, name: str, size: int) -> Float[np.ndarray, "S N"]:
    array = _real(value, name)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.ndim != 2 or array.shape[1] != size or len(array) == 0:
        raise ValueError(
            f"{name} must have shape [S, {size}] (draws first), got {np.shape(value)}; merge the "
            f"chains into one axis of draws, and plot one output at a time."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN or infinite values; drop the draws of the chain that diverged.")
    return array


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        if not hasattr(ax, "fill_between"):
            raise TypeError(f"ax must be Matplotlib's axes, such as plt.subplots()[1], got {type(ax).__name__}.")
        return ax
    return pyplot().subplots(figsize=(7.0, 3.6), layout="constrained")[1]


def pyplot():
    """Matplotlib's pyplot, imported now.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "numpyro_fspace[plots]".') from error
    return plt


def _interval(draws: Float[np.ndarray, "S N"], level: float) -> Float[np.ndarray, "2 N"]:
    tails = [(1 - level) / 2, (1 + level) / 2]
    return np.quantile(draws, tails, axis=0, method="weibull")  # as ``metrics.coverage``


def _shade_gaps(ax: Axes, grid: np.ndarray, x_data: np.ndarray) -> None:
    """Shade the stretches of the grid farther than a twentieth of its length from every training input."""
    reach = 0.05 * (grid[-1] - grid[0])
    edges = np.concatenate([[-np.inf], np.sort(x_data), [np.inf]])
    label = "far from data"
    for left, right in zip(edges[:-1] + reach, edges[1:] - reach, strict=True):
        left, right = max(left, grid[0]), min(right, grid[-1])
        if left < right:
            ax.axvspan(left, right, color="0.5", alpha=0.12, lw=0, label=label, zorder=0)
            label = "_nolegend_"


def _band(ax: Axes, grid: np.ndarray, draws: np.ndarray, level: float, name: str, **style) -> None:
    ax.fill_between(grid, *_interval(draws, level), lw=0, label=f"{100 * level:g} % of {name}", **style)


def _lines(ax: Axes, grid: np.ndarray, draws: np.ndarray, num_draws: int) -> None:
    shown = np.linspace(0, len(draws) - 1, min(num_draws, len(draws))).astype(int)
    for i, draw in enumerate(draws[shown]):
        label = "_nolegend_" if i else "draws of f"
        ax.plot(grid, draw, color=_BLUE, lw=0.5, alpha=0.4, label=label, zorder=3)
    ax.plot(grid, draws.mean(axis=0), color=_BLUE, lw=2.0, label="mean", zorder=4)


def _mean_and_sd(reference, x):
    """Mean and standard deviation at x [N] of a process, or as given."""
    if hasattr(reference, "moments"):
        mean, covariance = reference.moments(x[:, None])
        return mean, np.sqrt(np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0.0))  # rounding: -1e-17
    if not isinstance(reference, list | tuple | np.ndarray) or len(reference) != 2:
        raise TypeError(
            "reference must be a Gaussian process, or a pair (mean, sd) of arrays with a number for each row of x."
        )
    return reference


def _reference(ax: Axes, grid: np.ndarray, mean: np.ndarray, sd: np.ndarray, level: float) -> None:
    from scipy.special import ndtri

    width = ndtri((1 + level) / 2) * sd
    style: dict[str, Any] = {"color": _ORANGE, "ls": (0, (5, 2)), "zorder": 4.5}
    ax.plot(grid, mean, lw=1.4, label="reference", **style)
    for edge in (mean - width, mean + width):
        ax.plot(grid, edge, lw=0.9, label="_nolegend_", **style)


def _plot_observed(draws, mean, y, level, ax) -> Axes:
    axes = _axes(ax)
    low, high = _interval(draws, level)
    inside = (low <= y) & (y <= high)
    for chosen, color, marker, word in ((inside, _BLUE, "o", "inside"), (~inside, _ORANGE, "D", "outside")):
        if chosen.any():
            axes.vlines(y[chosen], low[chosen], high[chosen], color=color, lw=0.9, alpha=0.45, zorder=2)
            label = f"{100 * chosen.mean():.0f} % {word} {100 * level:g} % bar"
            axes.plot(y[chosen], mean[chosen], marker, ms=4, color=color, mec="white", mew=0.4, label=label, zorder=3)
    ends = min(y.min(), mean.min()), max(y.max(), mean.max())
    axes.plot(ends, ends, color=_BLACK, lw=1.0, ls=(0, (1, 1.5)), label="perfect", zorder=1)
    axes.set(xlabel="observed", ylabel="predicted")
    return _finish(axes, beside=ax is None)


def _finish(ax: Axes, *, beside: bool) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0} if beside else {}
    ax.legend(frameon=False, fontsize="small", **place)
    return ax
