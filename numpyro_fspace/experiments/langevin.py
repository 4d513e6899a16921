"""Langevin dynamics of the weights of wider and wider networks, compared with Langevin dynamics of functions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np

from numpyro_fspace import metrics
from numpyro_fspace.experiments.catalog import Experiment, Job, Settings
from numpyro_fspace.experiments.figures import with_curves
from numpyro_fspace.experiments.langevin_dynamics import NOISE, data, function_dynamics, simulate, weight_dynamics
from numpyro_fspace.experiments.network_priors import SCORES, Architecture, gaussian_score, infinite_kernels
from numpyro_fspace.experiments.networks import check_activation

WIDTHS = (20, 50, 100, 200, 500)
#: Number of data and layers by the name of a data set.
PROBLEMS = {"n3_depth2": (3, 2), "n3_depth3": (3, 3), "n7_depth2": (7, 2), "n7_depth3": (7, 3)}
#: A point between the data, at which the distribution of f is compared too.
BETWEEN = 0.25
GRID = np.linspace(-3.0, 3.0, 61, dtype=np.float32)[:, None]
#: Iterations whose bands are kept, and the level of the bands: the paper's 80 %.
SHOWN, LEVEL = (10, 100, 1000), 0.8
#: The convergence rate is measured by the iterations until the discrepancy has fallen by this factor.
TENTH = 10.0


@dataclass(frozen=True)
class LangevinConfig(Settings):
    """Settings of a run.

    Attributes:
        num_chains, num_iterations: chains and iterations of MALA.
        step_size: multiplied by 1/(N · width) for weights and by 1/N for functions.
        activation: activation of the hidden units, a name in ``jax.nn``. The paper does not name one; its step size is
            too large for relu.
        score: ``"mixture"``, exact up to Monte Carlo error, or ``"spectral"``, estimated from draws of the function.
        num_units: number of random hidden units in a layer of all networks together, from which the score of the prior
            is computed. The prior of a narrow network is farther from Gaussian, which takes more random networks.
    """

    QUICK: ClassVar[Mapping[str, object]] = {"num_chains": 100, "num_iterations": 100, "num_units": 200_000}

    num_chains: int = 1000
    num_iterations: int = 1000
    step_size: float = 0.025
    activation: str = "tanh"
    score: str = "mixture"
    num_units: int = 2_000_000

    def __post_init__(self):
        check_activation(self.activation)
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r} is unknown; choose from {', '.join(SCORES)}.")


def run(job: Job[LangevinConfig]) -> dict:
    """Chains of the Metropolis-adjusted Langevin algorithm on weights or functions, started at draws of the prior.

    ``"weight100"`` samples the weights of a network of width 100. ``"function"`` samples the values of the function,
    under the Gaussian process that is the limit of the network's prior and with the limit of the tangent kernel as
    metric. ``ksd`` is the root of the final kernelized Stein discrepancy between the chains' values of f, at the data
    and one more point, and their posterior *for this width*. ``ksd_floor`` is the root of its mean for as many exact
    draws of that posterior, and ``tenth`` is the number of iterations until it has fallen to a tenth of its initial
    value. ``w2_gp`` compares the distribution of f on [-3, 3] with the exact posterior at infinite width.
    """
    config = job.config
    num, depth = PROBLEMS[job.dataset]
    key_data, key_run, key_score = jax.random.split(jax.random.key(job.seed), 3)
    x, y = data(key_data, num)
    at = np.concatenate([x, [[BETWEEN]]]).astype(np.float32)
    limit = infinite_kernels(np.concatenate([at, GRID]), depth, config.activation)
    width = None if job.method == "function" else int(job.method.removeprefix("weight"))
    start = time.perf_counter()
    network = None if width is None else Architecture(depth, width, config.activation)
    if network is None:
        dynamics = function_dynamics(limit, y, config.step_size)
    else:
        dynamics = weight_dynamics(x, y, network, config.step_size)
    iterations = recorded(config.num_iterations)
    f, acceptance = simulate(dynamics, np.concatenate([at, GRID]), iterations, config.num_chains, key_run)
    seconds = time.perf_counter() - start
    kernel = limit[0][: num + 1, : num + 1]
    exact_mean, exact_sd, axes = _exact(limit[0], y)
    score = SCORES[config.score](key_score, at, network, config.num_units) if network else gaussian_score(kernel)
    discrepancies, floors = [], []
    for values in np.asarray(f[:, :, : num + 1], np.float64):
        whole = score(values)
        whole[:, :num] += (y - values[:, :num]) / NOISE
        # In coordinates in which the exact posterior at infinite width is standard normal.
        u, s = np.linalg.solve(axes, (values - exact_mean[: num + 1]).T).T, whole @ axes
        bandwidth = np.sqrt(num + 1.0)
        discrepancies.append(np.sqrt(max(metrics.ksd(u, s, bandwidth=bandwidth), 0.0)))
        floors.append(np.sqrt((np.mean(np.sum(s**2, 1)) + (num + 1) / bandwidth**2) / len(u)))
    last = f[-1, :, num + 1 :]
    shown = [int(np.searchsorted(iterations, min(i, config.num_iterations))) for i in SHOWN]
    low, high = np.quantile(f[shown, :, num + 1 :], ((1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0), axis=1)
    fallen = np.log(np.asarray(discrepancies) / discrepancies[0]) + np.log(TENTH)
    first = int(np.argmax(fallen < 0.0))
    tenth = np.interp(0.0, -fallen[first - 1 : first + 1], iterations[first - 1 : first + 1]) if first else None
    moments = (last.mean(0), last.var(0), exact_mean[num + 1 :], exact_sd[num + 1 :] ** 2)
    return {
        "seconds": seconds,
        "num_gradients": config.num_iterations,
        "acceptance": float(acceptance),
        "ksd": discrepancies[-1],
        "ksd_floor": floors[-1],
        "tenth": tenth,
        "w2_gp": metrics.gaussian_w2(*moments),
        "sd": float(last.std(0).mean()),
        "gp_sd": float(exact_sd[num + 1 :].mean()),
        "num_weights": dynamics.size,
        "curves": {"iterations": iterations, "ksd": discrepancies, "floor": floors}
        | {"x": x[:, 0], "y": y, "grid": GRID[:, 0], "low": low, "high": high}
        | {"gp_mean": exact_mean[num + 1 :], "gp_sd": exact_sd[num + 1 :]},
    }


def recorded(num_iterations: int) -> list[int]:
    """The iterations 0, 1, 2, 3, 5, 10, 20, 30, 50, … and the last one."""
    some = {digit * 10**power for digit in (1, 2, 3, 5) for power in range(9)}
    return sorted(i for i in {0, num_iterations, *some} if i <= num_iterations)


def _exact(kernel, y):
    """Mean and sd of f under the GP posterior, the data first, and a root of its covariance at the first points."""
    num = len(y)
    gain = np.linalg.solve(kernel[:num, :num] + NOISE * np.eye(num), kernel[:num]).T
    covariance = kernel - gain @ kernel[:num]
    few = covariance[: num + 1, : num + 1]
    return gain @ y, np.sqrt(np.maximum(np.diagonal(covariance), 0.0)), np.linalg.cholesky(few)


def picture(records):
    """A row for each data set: the discrepancy against iterations, and bands of f after three of them, by method."""
    import matplotlib.pyplot as plt

    records = with_curves(records)
    datasets = list(dict.fromkeys(line["dataset"] for line in records))
    methods = [method for method in EXPERIMENT.methods if any(line["method"] == method for line in records)]
    shades = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, len(WIDTHS)))
    colors = dict(zip(EXPERIMENT.methods, ["black", *shades], strict=True))
    size = (4 * 3.2, 2.7 * len(datasets) + 0.4)
    figure, axes = plt.subplots(len(datasets), 1 + len(SHOWN), figsize=size, squeeze=False, layout="constrained")
    for row, dataset in zip(axes, datasets, strict=True):
        for method in methods:
            lines = [line for line in records if line["dataset"] == dataset and line["method"] == method]
            for line in lines[:1]:
                _draw(row, line["curves"], colors[method], method, dashed=method == "function")
        row[0].set(xscale="log", yscale="log", xlabel="iteration", ylabel="√KSD² (dotted: exact draws)", title=dataset)
        for ax, iteration in zip(row[1:], SHOWN, strict=True):
            ax.set(ylim=(-5.0, 4.0), title=f"80 % of f after {iteration}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _draw(axes, curves, color, label, *, dashed):
    style = {"color": color, "lw": 1.2, "ls": "--" if dashed else "-"}
    axes[0].plot(curves["iterations"][1:], curves["ksd"][1:], label=label, **style)
    axes[0].axhline(curves["floor"][-1], color=color, lw=0.6, ls=":")
    for ax, low, high in zip(axes[1:], curves["low"], curves["high"], strict=True):
        for edge in (low, high):
            ax.plot(curves["grid"], edge, **style)
        ax.plot(curves["x"], curves["y"], "o", color="#D55E00", ms=4, zorder=3)


EXPERIMENT = Experiment(
    summary="Langevin dynamics of the weights of wider and wider networks, compared with those of functions.",
    run=run,
    config=LangevinConfig(),
    methods=("function", *(f"weight{width}" for width in WIDTHS)),
    defaults=("function", *(f"weight{width}" for width in WIDTHS)),
    datasets=tuple(PROBLEMS),
    minutes=1,
    columns={
        "num_weights": "coordinates",
        "acceptance": "acceptance",
        "tenth": "iterations to a tenth",
        "ksd": "√KSD²",
        "ksd_floor": "of exact draws",
        "sd": "sd of f",
        "gp_sd": "of the GP",
        "w2_gp": "W2 to the GP",
        "seconds": "seconds",
    },
    picture=picture,
)
