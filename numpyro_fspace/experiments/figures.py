"""Pictures of what methods make of a toy problem, one panel each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from numpyro_fspace.experiments import extrapolation, two_moons
from numpyro_fspace.experiments.methods import fit
from numpyro_fspace.plots import plot_functions

if TYPE_CHECKING:
    from numpyro_fspace.experiments.regression import Config

__all__ = ["FIGURES", "draw_figure"]

#: Panels in a row; size of a panel in inches; functions drawn from an exact GP; points of the plane along an axis.
NUM_COLUMNS, PANEL, NUM_DRAWS, NUM_GRID = 3, (4.2, 2.8), 400, 80


def draw_figure(name: str, methods, seed: int, out: str | Path, *, config: Config | None = None, quick: bool = False):
    """Fit each of ``methods`` to the data of ``seed`` and write a picture with one panel for each to ``out``.

    Args:
        name: one of ``FIGURES``.
        methods: as for ``fspace run``.
        seed: of the data and the runs.
        out: file to write, its format told by its ending.
        config: numbers of the runs; the experiment's own if None.
        quick: tiny runs.
    """
    import matplotlib.pyplot as plt

    module, panel = FIGURES[name]
    config = module.CONFIG if config is None else config
    config = config.quick() if quick else config
    num_rows = -(-len(methods) // NUM_COLUMNS)
    num_columns = min(NUM_COLUMNS, len(methods))
    size = (PANEL[0] * num_columns, PANEL[1] * num_rows)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for ax, method in zip(axes.flat, methods, strict=False):
        panel(ax, method, seed, config)
        ax.set_title(method)
    for ax in axes.flat[len(methods) :]:
        ax.set_axis_off()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _extrapolation(ax, method, seed, config):
    """Mean, 90 % band and draws; dashed, the exact GP posterior."""
    (x, y, grid, truth, gp, points), (_, key, _) = extrapolation.prepare(seed)
    exact = fit("gp", config, gp, None, x, y, grid, None)
    if method == "gp":
        law = gp.prior.condition(x, y, gp.noise_variance)
        f = np.asarray(law.sample(key, grid, (NUM_DRAWS,)))
    else:
        posterior = fit(method, config, gp, points, x, y, grid, key)
        normal = np.asarray(jax.random.normal(key, (NUM_DRAWS, len(grid))))
        f = posterior.f_mean + posterior.f_sd * normal if posterior.f is None else posterior.f.reshape(-1, len(grid))
    reference = None if method == "gp" else (exact.f_mean, exact.f_sd)
    plot_functions(grid, f, x_data=x, y_data=y, truth=truth, reference=reference, num_draws=5, ax=ax)
    ax.set_ylim(-4.0, 4.0)
    if ax.get_legend() is not None:
        ax.get_legend().remove()


def _two_moons(ax, method, seed, config):
    """Probability of class 1 and the data."""
    key_data, _, key = jax.random.split(jax.random.key(seed), 3)
    x, labels = (np.asarray(a) for a in two_moons.two_moons(key_data))
    plane = two_moons.grid(NUM_GRID)
    probs, _ = two_moons.posterior_probs(method, config, x, labels, plane, key)
    shape = (NUM_GRID, NUM_GRID)
    ax.contourf(
        plane[:, 0].reshape(shape),
        plane[:, 1].reshape(shape),
        probs[:, 1].reshape(shape),
        levels=np.linspace(0.0, 1.0, 11),
        cmap="RdBu",
    )
    for label, colour in ((0, "#8b0000"), (1, "#00008b")):
        ax.scatter(*x[labels == label].T, s=8, color=colour, edgecolors="white", linewidths=0.3)


#: The experiment and the panel of each figure.
FIGURES = {"extrapolation": (extrapolation, _extrapolation), "two_moons": (two_moons, _two_moons)}
