"""Problems of the benchmarks of speed: random data, a network, samplers, and timing."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import tinygp
from jax.experimental.compilation_cache import compilation_cache
from tqdm.auto import tqdm

from numpyro_fspace import measurement
from numpyro_fspace.mcmc import MCMC, Warmup
from numpyro_fspace.model import fan_in, functional_prior, random_module
from numpyro_fspace.priors import GPPrior
from numpyro_fspace.sgmcmc.preconditioners import identity

STEP_SIZE = 1e-7
#: Gradient steps between kept draws.
NUM_STEPS = 40
NUM_POINTS = 40
#: Number of images from which measurement points are drawn.
NUM_POOL = 2000
NUM_TURNS = 7


class Size(NamedTuple):
    """A problem: a tanh network from D inputs to K outputs, N data in minibatches of B (None: all), draws of a run.

    If ``at_data``, all data are the fixed measurement points; otherwise 40 points are drawn anew at each step.
    """

    num_inputs: int
    widths: tuple[int, ...]
    num_outputs: int
    num_data: int
    batch_size: int | None
    num_draws: int
    at_data: bool = False


SIZES = {
    "1d": Size(1, (100, 100), 1, 20, None, 1600),
    "boston": Size(13, (10, 10), 1, 455, 32, 3200),
    "boston455": Size(13, (10, 10), 1, 455, None, 1600, at_data=True),
    "protein64": Size(9, (50, 50), 1, 40_000, 64, 1600),
    "protein1000": Size(9, (50, 50), 1, 40_000, 1000, 800),
    "mnist": Size(784, (50, 50), 10, 10_000, 125, 800),
    "million": Size(784, (800, 400), 10, 10_000, 125, 32),
}


def data(problem: Size):
    """Inputs [N, D], and targets [N] or classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(problem.num_data, problem.num_inputs)).astype(np.float32)
    if problem.num_outputs == 1:
        return jnp.asarray(x), jnp.asarray(np.sin(x[:, 0]))
    return jnp.asarray(x), jnp.asarray(rng.integers(0, problem.num_outputs, problem.num_data))


def network(problem: Size):
    """The network, in flax."""
    layers = [layer for width in problem.widths for layer in (nn.Dense(width), nn.tanh)]
    return nn.Sequential([*layers, nn.Dense(problem.num_outputs)])


def params(problem: Size):
    """The initial weights of the network."""
    return network(problem).init(jax.random.key(0), jnp.zeros((1, problem.num_inputs)))


def likelihood(problem: Size, output):
    """The distribution of the targets given the network's output."""
    if problem.num_outputs == 1:
        return dist.Normal(output.squeeze(-1), 0.5)
    return dist.Categorical(logits=output)


def model(problem: Size, *, functional: bool):
    """The NumPyro model; the functional prior is a GP at the data, at 40 uniform points, or at 40 of 2000 images."""
    gp = GPPrior(tinygp.kernels.ExpSquared(2.0 * problem.num_inputs**0.5), nugget=1e-3, num_outputs=problem.num_outputs)
    if problem.at_data:
        points = measurement.fixed(data(problem)[0])
    elif problem.num_outputs == 1:
        side = np.full(problem.num_inputs, 1.0)
        points = measurement.uniform(-side, side, NUM_POINTS)
    else:
        points = measurement.subset(data(problem)[0][:NUM_POOL], NUM_POINTS)

    def model(x, y):
        f = random_module("net", network(problem), input_shape=problem.num_inputs, prior=fan_in(1.0))
        if functional:
            f = functional_prior("f", f, gp, points)
        with numpyro.plate("data", problem.num_data, subsample_size=problem.batch_size) as rows:
            xb, yb = (x, y) if problem.batch_size is None else (x[rows], y[rows])
            numpyro.sample("y", likelihood(problem, f(xb)), obs=yb)

    return model


def fixed_kernel(kernel, problem: Size):
    """A kernel of this package with a fixed step size, without warm start and control variates, for all weights."""
    fixed = {"preconditioner": identity(), "warmup": Warmup(warm_start=0.0), "control_variates": False}
    fixed["marginalize"] = False
    target = model(problem, functional=kernel.needs_functional_prior)
    return kernel(target, step_size=STEP_SIZE, num_steps=NUM_STEPS, **fixed)


def sampler(kernel, problem: Size, x, y, **settings) -> Callable:
    """``run(key)``: ``fixed_kernel`` under ``fs.MCMC``, with ``settings``."""
    kernel, given = fixed_kernel(kernel, problem), {"progress_bar": False} | settings
    mcmc = MCMC(kernel, num_warmup=0, num_samples=problem.num_draws, **given)

    def run(key):
        with warnings.catch_warnings():
            # Only the time of the run matters.
            warnings.filterwarnings(
                "ignore", "The draws are doubtful|The kinetic temperature|.* diverged", RuntimeWarning
            )
            mcmc.run(key, x, y)
        jax.block_until_ready(mcmc.last_state.z)

    return run


def clock(run: Callable, key) -> tuple[float, float]:
    """Wall-clock seconds, and CPU seconds of all cores together."""
    start = time.perf_counter(), time.process_time()
    run(key)
    return time.perf_counter() - start[0], time.process_time() - start[1]


@contextlib.contextmanager
def compiled_afresh():
    """Disable JAX's persistent cache of compiled programs.

    On a CPU a program from the cache runs on one thread, while a newly compiled program may use several. If only some
    programs were in the cache, a benchmark would compare different numbers of threads. On other devices this does
    nothing.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def turns(
    runs: dict[Any, Callable], repeat: int, *, quick: bool, num_turns: int = NUM_TURNS
) -> tuple[dict, dict, dict]:
    """By name: seconds of the first run, and median wall-clock and CPU seconds of rounds A B C A B C …"""
    times: dict[str, list] = {name: [] for name in runs}
    num_turns = 2 if quick else num_turns
    with tqdm(total=len(runs) * (1 + num_turns), disable=None, leave=False) as bar:

        def timed(name, key):
            bar.set_postfix_str(str(name))
            seconds = clock(runs[name], key)
            bar.update()
            return seconds

        with compiled_afresh():
            first = {name: timed(name, jax.random.key(repeat))[0] for name in runs}
        for turn in range(num_turns):
            for name in runs:
                times[name].append(timed(name, jax.random.key(1000 * repeat + turn + 1)))
    wall, cores = ({name: float(np.median(values, 0)[i]) for name, values in times.items()} for i in range(2))
    return first, wall, cores
