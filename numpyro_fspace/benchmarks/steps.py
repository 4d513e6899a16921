"""The time of a gradient step, by turns in one process: beside other libraries' samplers and plain SGD, and beside the
same step without the driver around it."""

from __future__ import annotations

import jax

from numpyro_fspace.benchmarks.peers import contenders, num_draws
from numpyro_fspace.benchmarks.problems import NUM_STEPS, SIZES, data, fixed_kernel, params, sampler, turns
from numpyro_fspace.experiments.methods import KERNELS

__all__ = ["bench_loop", "bench_steps"]


def bench_steps(size: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: microseconds of a gradient step, median over seven turns, and seconds of the first run, compiling.

    Our kernels run under ``fs.MCMC``, which is counted in, at a fixed step size, without warm-up and without control
    variates; BlackJAX's ``sgld`` and ``sghmc`` under ``jax.lax.scan``, those of posteriors (if it is installed) in a
    loop of Python, as their documentation has it, on the density of the same network with the same prior, minibatch
    size and number of draws kept; ``sgd`` is optax's, the floor. The functional kernels have a GP prior at 40
    points drawn anew at each step, uniform ones or, of images, out of 2000; on boston455 at all data, held.
    ``cpu_us`` gives the microseconds of all cores together, which a busy machine
    changes less. ``faster_than_peers`` is against the fastest of the peers, whatever its dynamics.
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
    """One record: by kernel, how many times as long a run of ``fs.MCMC`` takes, progress bar on, as a bare scan.

    The scan makes as many draws by ``kernel.sample`` and keeps the weights alone; starting a chain, what else is kept
    of a draw, and what is reported at the end are ``fs.MCMC``'s own. Medians over seven turns. ``seconds`` gives both.
    """
    problem = SIZES[size]._replace(num_draws=2) if quick else SIZES[size]
    x, y = data(problem)
    seconds = {}
    for name, kernel in KERNELS.items():
        runs = {"mcmc": sampler(kernel, problem, x, y, progress_bar=True), "scan": _scan(kernel, problem, x, y)}
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


def _scan(kernel, problem, x, y):
    """``run(key)``: the draws of a kernel by a bare scan, from where a chain starts; the key is not used."""
    kernel = fixed_kernel(kernel, problem)
    start = kernel.init(jax.random.key(0), 0, None, (x, y), {})

    @jax.jit
    def draws(state, x, y):
        def step(state, _):
            state = kernel.sample(state, (x, y), {})
            return state, state.z

        return jax.lax.scan(step, state, length=problem.num_draws)

    return lambda key: jax.block_until_ready(draws(start, x, y))
