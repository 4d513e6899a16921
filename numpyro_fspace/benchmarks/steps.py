"""Time of a gradient step, compared with samplers of other libraries, with plain SGD, and with a scan without MCMC."""

from __future__ import annotations

import jax

from numpyro_fspace.benchmarks.peers import contenders, num_draws
from numpyro_fspace.benchmarks.problems import NUM_STEPS, SIZES, data, fixed_kernel, params, sampler, turns
from numpyro_fspace.experiments.methods import KERNELS


def bench_steps(size: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: microseconds of a gradient step, median over seven rounds, and seconds of the first run.

    The kernels of this package run under ``fs.MCMC``, which is included in the time, with a fixed step size and without
    warm-up and control variates. BlackJAX's ``sgld`` and ``sghmc`` run under ``jax.lax.scan``, those of posteriors (if
    it is installed) in a Python loop, as in their documentation. All have the same network, prior, minibatch size and
    number of kept draws. ``sgd`` is optax's SGD, a lower bound. The functional kernels have a GP prior at 40 points
    drawn anew at each step (uniform points, or 40 of 2000 images); on boston455 the points are all data and fixed.
    ``cpu_us`` is the CPU time of all cores together, which depends less on other load. ``faster_than_peers`` compares
    with the fastest sampler of the other libraries, whatever its dynamics.
    """
    problem = SIZES[size]._replace(num_draws=2) if quick else SIZES[size]
    first, wall, cores = turns(contenders(problem, *data(problem)), repeat, quick=quick)
    us, cpu_us = (
        {name: 1e6 * seconds / (num_draws(name, problem) * NUM_STEPS) for name, seconds in times.items()}
        for times in (wall, cores)
    )
    fastest = min(us[name] for name in us.keys() - {*KERNELS, "sgd"})
    return {
        "benchmark": "steps",
        "size": size,
        "repeat": repeat,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(params(problem))),
        "us": us,
        "cpu_us": cpu_us,
        "first_seconds": first,
        "faster_than_peers": {name: fastest / us[name] for name in ("sgld", "sghmc")},
        "slower_than_sgd": {name: us[name] / us["sgd"] for name in KERNELS},
        "functional": {name: us["f" + name] / us[name] for name in ("sgld", "sghmc")},
        "device": jax.devices()[0].device_kind,
    }


def bench_loop(size: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: by kernel, the time of a run of ``fs.MCMC`` with progress bar, relative to a plain scan.

    The scan makes the same number of draws by ``kernel.sample`` and keeps only the weights. ``fs.MCMC`` also starts the
    chain, keeps further fields of the draws, and checks the run at its end. ``seconds`` holds the medians over seven
    rounds of both.
    """
    problem = SIZES[size]._replace(num_draws=2) if quick else SIZES[size]
    x, y = data(problem)
    seconds = {}
    for name, kernel in KERNELS.items():
        runs = {"mcmc": sampler(kernel, problem, x, y, progress_bar=True), "scan": scanned(kernel, problem, x, y)}
        seconds[name] = turns(runs, repeat, quick=quick)[1]
    return {
        "benchmark": "loop",
        "size": size,
        "repeat": repeat,
        "num_draws": problem.num_draws,
        "seconds": seconds,
        "over_scan": {name: wall["mcmc"] / wall["scan"] for name, wall in seconds.items()},
        "device": jax.devices()[0].device_kind,
    }


def scanned(kernel, problem, x, y):
    """``run(key)``: draws of a kernel by a plain scan from a chain that was started before; the key is not used."""
    kernel = fixed_kernel(kernel, problem)
    start = kernel.init(jax.random.key(0), 0, None, (x, y), {})

    @jax.jit
    def draws(state, x, y):
        def step(state, _):
            state = kernel.sample(state, (x, y), {})
            return state, state.z

        return jax.lax.scan(step, state, length=problem.num_draws)

    return lambda key: jax.block_until_ready(draws(start, x, y))
