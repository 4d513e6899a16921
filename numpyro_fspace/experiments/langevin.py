"""Langevin dynamics of the weights of ever wider networks, beside Langevin dynamics of functions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_fspace import metrics
from numpyro_fspace.experiments.catalog import Experiment, Job, Settings, check_activation
from numpyro_fspace.experiments.network_laws import BIAS, SCORES, gaussian_score, infinite_kernels, root
from numpyro_fspace.model import fan_in, random_module

__all__ = ["EXPERIMENT", "LangevinConfig"]

WIDTHS = (20, 50, 100, 200, 500)
#: Number of data and layers by the name of a data set.
PROBLEMS = {"n3_depth2": (3, 2), "n3_depth3": (3, 3), "n7_depth2": (7, 2), "n7_depth3": (7, 3)}
#: Variance of the observations' noise; the point at which the law of f is looked at beside the data.
NOISE, BETWEEN = 0.01, 0.25
GRID = np.linspace(-3.0, 3.0, 61, dtype=np.float32)[:, None]
#: Iterations whose bands are kept, and the level of the bands: the paper's 80 %.
SHOWN, LEVEL = (10, 100, 1000), 0.8
#: The rate is told by the iterations until the discrepancy has fallen by this factor.
TENTH = 10.0
#: Weights, in millions, whose chains run side by side.
MILLIONS = 0.5


@dataclass(frozen=True)
class LangevinConfig(Settings):
    """Every number of a run.

    Attributes:
        num_chains, num_iterations: of MALA.
        step_size: times 1/(N · width) for weights, 1/N for functions.
        activation: of the hidden units, a name in ``jax.nn``. The paper names none; its step is too long for relu.
        score: ``"mixture"``, exact up to Monte Carlo error, or ``"spectral"``, estimated from draws of the function.
        num_units: random hidden units of a layer, of all the networks together that the prior's score is made of: the
            narrower a network the farther its law is from Gaussian, and the more of them are needed.
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


class Dynamics(NamedTuple):
    """A Langevin dynamics with its Metropolis test.

    Attributes:
        start: ``key -> position``, a draw of the prior.
        log_density: ``position -> log p``, up to a constant.
        values: ``(position, x) -> f(x)`` at inputs among the data, ``BETWEEN`` and ``GRID``.
        step_size: ε.
        size: number of coordinates.
    """

    start: Callable
    log_density: Callable
    values: Callable
    step_size: float
    size: int


def run(job: Job[LangevinConfig]) -> dict:
    """Chains of the Metropolis-adjusted Langevin algorithm on weights or functions, from draws of the prior.

    ``"weight100"`` runs on the weights of a network of width 100, ``"function"`` on the values of the function, under
    the Gaussian process that the network's law tends to and with the tangent kernel's limit as metric. ``ksd`` is the
    root of the kernelised Stein discrepancy, at the end, between the chains' values of f at the data and one point
    more, and their posterior *for this width*; ``ksd_floor`` the root of what as many draws of that posterior would
    give on average; ``tenth`` the iterations after which it is a tenth of what it was at the start. ``w2_gp`` compares
    the law of f on [-3, 3] with the exact posterior at infinite width.
    """
    config = job.config
    num, depth = PROBLEMS[job.dataset]
    key_data, key_run, key_score = jax.random.split(jax.random.key(job.seed), 3)
    x, y = data(key_data, num)
    at = np.concatenate([x, [[BETWEEN]]]).astype(np.float32)
    limit = infinite_kernels(np.concatenate([at, GRID]), depth, config.activation)
    width = None if job.method == "function" else int(job.method.removeprefix("weight"))
    start = time.perf_counter()
    if width is None:
        dynamics = function_dynamics(limit, y, config.step_size)
    else:
        dynamics = weight_dynamics(x, y, depth, width, config)
    iterations = recorded(config.num_iterations)
    f, acceptance = simulate(dynamics, np.concatenate([at, GRID]), iterations, config.num_chains, key_run)
    seconds = time.perf_counter() - start
    kernel = limit[0][: num + 1, : num + 1]
    exact_mean, exact_sd, axes = _exact(limit[0], y)
    if width is None:
        score = gaussian_score(kernel)
    else:
        score = SCORES[config.score](key_score, at, depth, width, config.activation, config.num_units)
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


def data(key, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The paper's N points, two thirds of them on [-2.5, -.5] and the rest on [1, 2]; y with noise of variance .01."""
    first = 2 * num // 3
    x = np.concatenate([np.linspace(-2.5, -0.5, first), np.linspace(1.0, 2.0, num - first)])
    y = x * np.sin(1.5 * x) + 0.125 * x**3 + np.sqrt(NOISE) * np.asarray(jax.random.normal(key, x.shape))
    return x[:, None].astype(np.float32), y.astype(np.float32)


def recorded(num_iterations: int) -> list[int]:
    """0, 1, 2, 3, 5, 10, 20, 30, 50, … and the last."""
    some = {0, num_iterations}
    some |= {digit * 10**power for digit in (1, 2, 3, 5) for power in range(9)}
    return sorted(i for i in some if i <= num_iterations)


# ---- dynamics --------------------------------------------------------------------------------------------------------


def simulate(dynamics: Dynamics, x, iterations: Sequence[int], num_chains: int, key):
    """f at x after each of the iterations, [I, C, M], and the mean acceptance probability."""
    import blackjax

    kernel = blackjax.mala(dynamics.log_density, dynamics.step_size)
    x = jnp.asarray(x)

    def chain(key):
        key_start, key_run = jax.random.split(key)
        state = kernel.init(dynamics.start(key_start))

        def step(i, carry):
            state, total = carry
            state, info = kernel.step(jax.random.fold_in(key_run, i), state)
            return state, total + info.acceptance_rate

        def several(carry, ends):
            carry = jax.lax.fori_loop(*ends, step, carry)
            return carry, dynamics.values(carry[0].position, x)

        first, ends = dynamics.values(state.position, x), (jnp.asarray(iterations[:-1]), jnp.asarray(iterations[1:]))
        (_, total), rest = jax.lax.scan(several, (state, jnp.zeros(())), ends)
        return jnp.concatenate([first[None], rest]), total / iterations[-1]

    together = max(1, min(num_chains, int(MILLIONS * 1e6 / dynamics.size)))
    run_chains = jax.jit(lambda keys: jax.lax.map(chain, keys, batch_size=together))
    f, acceptance = jax.device_get(run_chains(jax.random.split(key, num_chains)))
    return np.moveaxis(f, 0, 1), acceptance.mean()


def weight_dynamics(x, y, depth: int, width: int, config: LangevinConfig) -> Dynamics:
    """Langevin dynamics of a network's weights under the paper's priors, N(0, 1/fan-in) and N(0, .1) for biases."""
    layers = (1, *(width,) * (depth - 1), 1)
    activation = getattr(jax.nn, config.activation)

    def init(key, input_shape):
        return [{"weight": jnp.zeros((a, b)), "bias": jnp.zeros(b)} for a, b in itertools.pairwise(layers)]

    def model(x, y):
        network = (init, lambda weights, x: forward(weights, x, activation)[:, 0])
        f = random_module("net", network, input_shape=1, prior=prior)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x), NOISE**0.5), obs=y)
        return f

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(x, y)
        return {name: site["value"] for name, site in trace.items() if name.startswith("net.")}

    def values(weights, at):
        return handlers.seed(handlers.substitute(model, weights), 0)(x, y)(at)

    def log_density(weights):
        return numpyro.infer.util.log_density(model, (x, y), {}, weights)[0]

    size = sum(a * b + b for a, b in itertools.pairwise(layers))
    return Dynamics(draw, log_density, values, config.step_size / (len(x) * width), size)


def prior(path, shape):
    """The paper's prior of a weight array."""
    return dist.Normal(0.0, BIAS**0.5) if path.endswith("bias") else fan_in()


def forward(layers, x, activation):
    """The network's output, linear in the last layer."""
    for layer in layers[:-1]:
        x = activation(x @ layer["weight"] + layer["bias"])
    return x @ layers[-1]["weight"] + layers[-1]["bias"]


def function_dynamics(limit, y, step_size: float) -> Dynamics:
    """Langevin dynamics of f at M inputs, the data first, under N(0, K) and with the tangent kernel Θ as metric.

    With f = A u, A Aᵀ = Θ, this is plain Langevin dynamics of u, as in the paper's example 2.1.
    """
    kernel, tangent = (root(matrix) for matrix in limit)
    precision = tangent.T @ np.linalg.solve(kernel @ kernel.T, tangent)
    outward, start = jnp.asarray(tangent, jnp.float32), jnp.asarray(np.linalg.solve(tangent, kernel), jnp.float32)
    precision, y = jnp.asarray(precision, jnp.float32), jnp.asarray(y)

    def log_density(u):
        return -0.5 * (u @ precision @ u + jnp.sum((outward[: len(y)] @ u - y) ** 2) / NOISE)

    return Dynamics(
        lambda key: start @ jax.random.normal(key, (len(start),)),
        log_density,
        lambda u, x: outward @ u,
        step_size / len(y),
        len(start),
    )


def _exact(kernel, y):
    """Mean and sd of f under the Gaussian process posterior, the data first, and a root at the data and one point."""
    num = len(y)
    gain = np.linalg.solve(kernel[:num, :num] + NOISE * np.eye(num), kernel[:num]).T
    covariance = kernel - gain @ kernel[:num]
    few = covariance[: num + 1, : num + 1]
    return gain @ y, np.sqrt(np.maximum(np.diagonal(covariance), 0.0)), np.linalg.cholesky(few)


# ---- picture ---------------------------------------------------------------------------------------------------------


def picture(records):
    """A row for each data set: the discrepancy against iterations, and the bands after three of them, by method."""
    import matplotlib.pyplot as plt

    records = [line for line in records if line.get("curves")]
    if not records:
        raise ValueError("no record holds curves to draw; make some with fspace run ... --out FILE.")
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
    summary="Langevin dynamics of weights, for ever wider networks, beside Langevin dynamics of functions.",
    run=run,
    config=LangevinConfig(),
    methods=("function", *(f"weight{width}" for width in WIDTHS)),
    defaults=("function", *(f"weight{width}" for width in WIDTHS)),
    datasets=tuple(PROBLEMS),
    minutes=3,
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
