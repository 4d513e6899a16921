"""The time of a gradient step: beside BlackJAX's samplers and plain SGD, by turns in one process; on data on disk."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import blackjax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import tinygp

from numpyro_fspace import measurement
from numpyro_fspace.experiments.methods import KERNELS
from numpyro_fspace.infer import MCMC, Warmup
from numpyro_fspace.networks import fan_in, random_module
from numpyro_fspace.on_demand import OnDemand
from numpyro_fspace.primitives import functional_prior
from numpyro_fspace.priors import GPPrior
from numpyro_fspace.sgmcmc.preconditioners import identity

__all__ = ["NUM_ROWS", "SIZES", "bench_rows", "bench_steps"]

STEP_SIZE = 1e-7
#: Gradient steps of a draw that is kept.
NUM_STEPS = 50
#: BlackJAX's own default of gradient steps within a transition of SGHMC.
NUM_INTEGRATION_STEPS = 10
NUM_POINTS = 40
NUM_TURNS = 7


class Size(NamedTuple):
    """A problem: a tanh network from D inputs to K outputs, N data in minibatches of B (None: all), draws of a run."""

    num_inputs: int
    widths: tuple[int, ...]
    num_outputs: int
    num_data: int
    batch_size: int | None
    num_draws: int


SIZES = {
    "1d": Size(1, (100, 100), 1, 20, None, 400),
    "boston": Size(13, (10, 10), 1, 455, 32, 800),
    "protein64": Size(9, (50, 50), 1, 40_000, 64, 400),
    "protein1000": Size(9, (50, 50), 1, 40_000, 1000, 100),
    "mnist": Size(784, (50, 50), 10, 10_000, 125, 100),
    "million": Size(784, (800, 400), 10, 10_000, 125, 4),
}


def bench_steps(size: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: microseconds of a gradient step, median over seven turns, and what compiling took.

    Our kernels run under ``fs.MCMC``, which is counted in, at a fixed step size, without warm-up and without control
    variates; BlackJAX's ``sgld`` and ``sghmc`` under ``jax.lax.scan``, as its documentation has it, on the density of
    the same network with the same prior, minibatch size and number of draws kept; ``sgd`` is optax's, the floor. The
    functional kernels have a GP prior at 40 uniform points, drawn anew at each step. ``cpu`` gives the microseconds of
    all cores together, which a busy machine hardly changes.
    """
    problem = SIZES[size]._replace(num_draws=2) if quick else SIZES[size]
    x, y = _data(problem)
    runs = {name: _ours(kernel, problem, x, y) for name, kernel in KERNELS.items()}
    runs |= {"blackjax_sgld": _blackjax("sgld", problem, x, y), "blackjax_sghmc": _blackjax("sghmc", problem, x, y)}
    runs["sgd"] = _sgd(problem, x, y)
    first = {name: _clock(run, jax.random.key(repeat))[0] for name, run in runs.items()}
    times: dict[str, list] = {name: [] for name in runs}
    for turn in range(2 if quick else NUM_TURNS):
        for name, run in runs.items():
            times[name].append(_clock(run, jax.random.key(1000 * repeat + turn + 1)))
    total = problem.num_draws * NUM_STEPS
    us = {name: 1e6 / total * np.median(values, 0) for name, values in times.items()}
    medians, cpu = ({name: float(pair[i]) for name, pair in us.items()} for i in range(2))
    peers = {"sgld": "blackjax_sgld", "sghmc": "blackjax_sghmc"}
    return {
        "benchmark": "steps",
        "size": size,
        "repeat": repeat,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(_params(problem))),
        "us": medians,
        "cpu_us": cpu,
        "first_seconds": first,
        "faster_than_blackjax": {name: medians[peer] / medians[name] for name, peer in peers.items()},
        "slower_than_sgd": {name: medians[name] / medians["sgd"] for name in KERNELS},
        "functional": {name: medians["f" + name] / medians[name] for name in peers},
        "device": jax.devices()[0].device_kind,
    }


#: Rows of the data sets of ``bench_rows``.
NUM_ROWS = (10**3, 10**5, 10**7)


def bench_rows(num_rows: int, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: microseconds of a gradient step of SGHMC on data in memory and on the same data on disk.

    Nine inputs, a 2×50 network, minibatches of 1024 (of half the rows, if they are fewer), no control variates, whose
    full gradient grows with the data; the file is one that the system has just written, so it lies in its cache if it
    fits. ``mib`` is by how much the process's own memory grew in the run, the data in memory not counted.
    """
    num_rows = min(num_rows, 10**4) if quick else num_rows
    problem = SIZES["protein1000"]._replace(num_data=num_rows, batch_size=min(1024, num_rows // 2))
    problem = problem._replace(num_draws=2 if quick else 40)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npy" for name in ("x", "y")}
        for file, values in zip(files.values(), _data(problem), strict=True):
            np.save(file, values)
        mapped = [OnDemand(np.load(file, mmap_mode="r")) for file in files.values()]
        runs, mib = {}, {}
        for name, data in (("on_disk", mapped), ("in_memory", [jnp.asarray(np.load(f)) for f in files.values()])):
            before = _own_memory()
            runs[name] = _ours(KERNELS["sghmc"], problem, *data)
            runs[name](jax.random.key(repeat))
            mib[name] = _own_memory() - before
        times: dict[str, list] = {name: [] for name in runs}
        for turn in range(2 if quick else NUM_TURNS):
            for name, run in runs.items():
                times[name].append(_clock(run, jax.random.key(1000 * repeat + turn + 1)))
    total = problem.num_draws * NUM_STEPS
    us = {name: 1e6 / total * np.median(values, 0) for name, values in times.items()}
    return {
        "benchmark": "rows",
        "num_rows": num_rows,
        "batch_size": problem.batch_size,
        "repeat": repeat,
        "us": {name: float(pair[0]) for name, pair in us.items()},
        "cpu_us": {name: float(pair[1]) for name, pair in us.items()},
        "on_disk_over_in_memory": float(us["on_disk"][0] / us["in_memory"][0]),
        "mib": mib,
        "device": jax.devices()[0].device_kind,
    }


def _own_memory():
    """MiB of this process's memory that belong to no file; NaN where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), float("nan"))


def _clock(run, key):
    """Seconds on the wall, and of all cores together."""
    start = time.perf_counter(), time.process_time()
    run(key)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def _data(problem):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(problem.num_data, problem.num_inputs)).astype(np.float32)
    if problem.num_outputs == 1:
        return jnp.asarray(x), jnp.asarray(np.sin(x[:, 0]))
    return jnp.asarray(x), jnp.asarray(rng.integers(0, problem.num_outputs, problem.num_data))


def _network(problem):
    layers = [layer for width in problem.widths for layer in (nn.Dense(width), nn.tanh)]
    return nn.Sequential([*layers, nn.Dense(problem.num_outputs)])


def _params(problem):
    return _network(problem).init(jax.random.key(0), jnp.zeros((1, problem.num_inputs)))


def _likelihood(problem, output):
    if problem.num_outputs == 1:
        return dist.Normal(output.squeeze(-1), 0.5)
    return dist.Categorical(logits=output)


# ---- those who run -------------------------------------------------------------------------------------------


def _ours(kernel, problem, x, y):
    gp = GPPrior(tinygp.kernels.ExpSquared(2.0 * problem.num_inputs**0.5), nugget=1e-3, num_outputs=problem.num_outputs)
    side = np.full(problem.num_inputs, 1.0)
    points = measurement.uniform(-side, side, NUM_POINTS)

    def model(x, y):
        f = random_module("net", _network(problem), input_shape=problem.num_inputs, prior=fan_in(1.0))
        if kernel.needs_functional_prior:
            f = functional_prior("f", f, gp, points)
        with numpyro.plate("data", problem.num_data, subsample_size=problem.batch_size) as rows:
            xb, yb = (x, y) if problem.batch_size is None else (x[rows], y[rows])
            numpyro.sample("y", _likelihood(problem, f(xb)), obs=yb)

    settings = {"preconditioner": identity(), "warmup": Warmup(warm_start=0.0), "control_variates": False}
    sampler = kernel(model, step_size=STEP_SIZE, num_steps=NUM_STEPS, **settings)
    mcmc = MCMC(sampler, num_warmup=0, num_samples=problem.num_draws, progress_bar=False)

    def run(key):
        mcmc.run(key, x, y)
        jax.block_until_ready(mcmc.last_state.z)

    return run


def _log_density(problem):
    network = _network(problem)

    def log_density(params, batch):
        x, y = batch
        log_likelihood = jnp.sum(_likelihood(problem, network.apply(params, x)).log_prob(y))
        scales = [1.0 if leaf.ndim == 1 else leaf.shape[0] ** -0.5 for leaf in jax.tree.leaves(params)]
        laws = [dist.Normal(0.0, scale) for scale in scales]
        log_prior = sum(jnp.sum(law.log_prob(w)) for law, w in zip(laws, jax.tree.leaves(params), strict=True))
        return log_prior + problem.num_data / len(y) * log_likelihood

    return log_density


def _batch(problem, x, y, key):
    if problem.batch_size is None:
        return x, y
    rows = jax.random.randint(key, (problem.batch_size,), 0, problem.num_data)
    return x[rows], y[rows]


def _scanned(step, state, num_draws, num_inner, kept):
    """``run(key)``: ``num_draws`` draws of ``num_inner`` steps each."""

    @jax.jit
    def scan(key, state):
        def draw(state, key):
            keys = jax.random.split(key, num_inner)
            state, _ = jax.lax.scan(lambda state, key: (step(state, key), None), state, keys)
            return state, kept(state)

        return jax.lax.scan(draw, state, jax.random.split(key, num_draws))

    return lambda key: jax.block_until_ready(scan(key, state))


def _blackjax(name, problem, x, y):
    gradient = jax.grad(_log_density(problem))
    per_step = 1 if name == "sgld" else NUM_INTEGRATION_STEPS
    make = {"sgld": blackjax.sgld, "sghmc": functools.partial(blackjax.sghmc, num_integration_steps=per_step)}[name]
    algorithm = make(gradient)

    def step(position, key):
        key_batch, key_step = jax.random.split(key)
        return algorithm.step(key_step, position, _batch(problem, x, y, key_batch), STEP_SIZE)

    start = algorithm.init(_params(problem))
    return _scanned(step, start, problem.num_draws, NUM_STEPS // per_step, lambda position: position)


def _sgd(problem, x, y):
    log_density, optimiser = _log_density(problem), optax.sgd(STEP_SIZE)

    def step(state, key):
        params, inner = state
        gradient = jax.grad(lambda w: -log_density(w, _batch(problem, x, y, key)))(params)
        updates, inner = optimiser.update(gradient, inner)
        return optax.apply_updates(params, updates), inner

    params = _params(problem)
    return _scanned(step, (params, optimiser.init(params)), problem.num_draws, NUM_STEPS, lambda state: state[0])
