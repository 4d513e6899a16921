"""Effective draws of f per gradient and per second on real problems."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np
import optax
from numpyro.infer import NUTS

from numpyro_fspace.benchmarks.blackjax_mclmc import microcanonical
from numpyro_fspace.experiments.methods import FUNCTIONAL, SAMPLERS, driver
from numpyro_fspace.experiments.regression import build_model
from numpyro_fspace.experiments.uci import CONFIG, prepare
from numpyro_fspace.mcmc import SGHMC, Warmup, fSGLD, report
from numpyro_fspace.metrics import rmse
from numpyro_fspace.model import init_to_network
from numpyro_fspace.posterior import Posterior, predict
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.sgmcmc.preconditioners import identity

ESS_METHODS = (*SAMPLERS, "fsgld_paper", "nuts", "blackjax_mclmc", "blackjax_adjusted_mclmc")
ESS_DATASETS = ("boston", "yacht", "energy", "concrete")
NUM_NUTS = (200, 200)


def bench_ess(
    method: str, repeat: int = 0, *, dataset: str = "boston", exact: bool = False, quick: bool = False
) -> dict:
    """One record: the number of effective draws of f at the test inputs per gradient and per second.

    The problem is a 2×50 tanh network on split 0 of a UCI set, with the functional prior of ``fspace run uci`` (with
    ``exact`` as ``gp_network``) and four vectorized chains. Samplers use their defaults. ``blackjax_mclmc``
    and ``blackjax_adjusted_mclmc`` are BlackJAX's, with its own tuners, on the density of ``nuts`` and with the
    gradients of ``fsghmc``. ``fsgld_paper`` uses the papers' schedule (10⁻³, times 0.9 every 5000 steps, in units of
    the weights), divided by ten until no draw diverges and a Metropolis test would accept half of the steps, because
    larger steps sample a different distribution. ``nuts`` uses NumPyro's defaults and trees of at
    most 255 steps. ``rmse`` and the mean standard deviations of f and of the noise show whether the distributions
    agree. Gradients are those of one chain including warm-up. Seconds are those of a second run, in which NumPyro
    compiles ``nuts`` again.
    """
    config = replace(CONFIG.quick() if quick else CONFIG, exact=exact)
    problem = prepare(dataset, 0, 0, config.num_gp_steps)
    data, functional = problem.data, method in FUNCTIONAL or method not in SAMPLERS
    model = build_model(config, problem.gp, problem.points, functional=functional)
    key = jax.random.fold_in(jax.random.key(0), repeat)
    train, step_size = (data.x_train, data.y_train), None
    if method == "nuts":
        num_warmup, num_samples = (10, 10) if quick else NUM_NUTS
        config = replace(config, num_warmup=num_warmup, num_samples=num_samples)
        kernel = NUTS(model, init_strategy=init_to_network, max_tree_depth=4 if quick else 8)
        mcmc, seconds = _timed_run(driver(kernel, config), key, train, extra_fields=("num_steps",))
        # Steps of the warm-up are not recorded; its draws are assumed to cost as much as later ones.
        per_draw = float(np.mean(mcmc.get_extra_fields()["num_steps"]))
        num_gradients = round(per_draw * (num_warmup + num_samples))
    elif method.startswith("blackjax"):
        num_gradients = SGHMC(model).num_steps * (config.num_warmup + config.num_samples)
        sizes = {"num_chains": config.num_chains, "num_steps": num_gradients // 4, "num_draws": config.num_samples}
        sample = microcanonical(model, train, adjusted="adjusted" in method, **sizes)
        (draws, num_gradients), seconds = _timed(lambda: sample(key))
        num_gradients = round(num_gradients)
        mcmc = Posterior(
            model, {k: a.reshape(-1, *a.shape[2:]) for k, a in draws.items()}, num_chains=config.num_chains, args=train
        )
    elif method == "fsgld_paper":
        mcmc, seconds, step_size = _paper_schedule(model, config, key, train)
    else:
        mcmc, seconds = _timed_run(driver(SAMPLERS[method](model), config), key, train)
    if method != "nuts" and not method.startswith("blackjax"):
        num_gradients = mcmc.sampler.num_steps * (config.num_warmup + config.num_samples)
    f = predict(mcmc, key, data.x_test)["net"][..., 0]
    noise = (mcmc.samples if isinstance(mcmc, Posterior) else mcmc.get_samples())["sigma"]
    found = function_diagnostics(f.reshape(config.num_chains, -1, f.shape[-1]))
    ess = float(np.median(found.ess_bulk))
    return {
        "benchmark": "ess",
        "method": method,
        "dataset": dataset,
        "exact": exact,
        "repeat": repeat,
        "ess_bulk_median": ess,
        "rhat_median": float(np.median(found.rhat)),
        "rhat_max": found.max_rhat,
        "num_gradients": num_gradients,
        "seconds": seconds,
        "ess_per_1000_gradients": 1000.0 * ess / (CONFIG.num_chains * num_gradients),
        "ess_per_second": ess / seconds,
        "step_size": step_size,
        "rmse": rmse(data.y_test, f.mean(0)),
        "f_sd": float(f.std(0).mean()),
        "noise_sd": float(noise.mean()),
        "device": jax.devices()[0].device_kind,
    }


def _timed(call):
    """The result of the second of two calls, and its seconds; the first call compiles."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - start


def _timed_run(mcmc, key, train, extra_fields=()):
    """The second of two runs, and its seconds."""

    def run():
        mcmc.run(key, *train, extra_fields=extra_fields)
        return mcmc.last_state.z

    return mcmc, _timed(run)[1]


def _paper_schedule(model, config, key, train):
    for step_size in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        kernel = fSGLD(
            model,
            step_size=optax.exponential_decay(step_size, 5000, 0.9, staircase=True),
            preconditioner=identity(),
            warmup=Warmup(warm_start=0.0),
        )
        mcmc = driver(kernel, config)
        mcmc.run(key, *train)
        if not np.any(mcmc.last_state.num_diverging) and report(mcmc, *train).acceptance >= 0.5:
            break
    mcmc, seconds = _timed_run(driver(kernel, config), key, train)
    return mcmc, seconds, step_size
