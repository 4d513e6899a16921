"""The methods that experiments compare, by name: they fit a model and return the posterior of its function."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import optax
from numpyro.infer import NUTS, SVI, RenyiELBO, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_fspace.baselines import ensemble, fit_svgp, laplace
from numpyro_fspace.experiments.function_posterior import FunctionPosterior, one_output, run_chains
from numpyro_fspace.experiments.regression import Config, build_model
from numpyro_fspace.mcmc import MCLMC, MCMC, SGHMC, SGLD, Warmup, fMCLMC, fSGHMC, fSGLD
from numpyro_fspace.model import init_to_network
from numpyro_fspace.posterior import predict
from numpyro_fspace.priors import GPFit
from numpyro_fspace.sgmcmc import preconditioners
from numpyro_fspace.variational import (
    FVIMC,
    BridgeWasserstein,
    FunctionalELBO,
    PushforwardKL,
    RegularizedKL,
    SpectralSteinKL,
    Wasserstein1,
    Wasserstein2,
    mean_field,
    svi_posterior,
)

KERNELS = {"sgld": SGLD, "sghmc": SGHMC, "fsgld": fSGLD, "fsghmc": fSGHMC}
SAMPLERS = KERNELS | {"mclmc": MCLMC, "fmclmc": fMCLMC}
#: Methods that sample a model with the functional prior, and those whose density must be known exactly, so that the
#: measurement points must be fixed.
FUNCTIONAL = ("nuts", *(name for name, kernel in SAMPLERS.items() if kernel.needs_functional_prior))
EXACT_DENSITY = ("nuts", *(name for name, kernel in SAMPLERS.items() if kernel.needs_exact_density))
#: Divergences of the functional bound; None means NumPyro's bound, with the KL to the prior of the weights.
DIVERGENCES: dict[str, Callable | None] = {
    "gfsvi": RegularizedKL(),
    "tfsvi": PushforwardKL(),
    "gwi": Wasserstein2(),
    "fbnn": SpectralSteinKL(),
    "fvi": Wasserstein1(),
    "ifbnn": BridgeWasserstein(),
    "bbb": None,
}
#: Divergences of the V-stages of FVIMC.
HYBRIDS: dict[str, Callable | None] = {"fvimc": Wasserstein1(), "fvimc_kl": RegularizedKL()}
#: Methods whose divergence replaces the prior of the weights.
VARIATIONAL = (*DIVERGENCES, *HYBRIDS)
#: Nugget of their functional prior, relative to the variance of the process. These methods have no other prior, so that
#: the nugget is as small as float32 allows.
VARIATIONAL_NUGGET = 1e-3
METHODS = (*SAMPLERS, "nuts", *VARIATIONAL, "laplace", "ensemble", "vip", "svgp", "gp")
#: Trees of NUTS have at most 2^8 - 1 steps.
NUTS_DEPTH = 8
#: FVIMC: number of V- and M-stages; share of the gradients in M-stages; gradient steps of a draw (T-stages need many).
NUM_STAGES, SAMPLING_SHARE, HYBRID_STEPS = 5, 0.4, 4
#: Members of an ensemble; functions of an implicit process (the paper's number); inducing points.
NUM_MEMBERS, NUM_FUNCTIONS, NUM_INDUCING = 10, 20, 100
#: Initial sd of the weights for divergences estimated from draws, which hardly depend on the spread if it is smaller.
WIDE_START = 0.1


class _Task(NamedTuple):
    """The arguments of a function that fits a method; ``build(config, functional=...)`` makes the model."""

    method: str
    config: Config
    build: Callable
    data: tuple
    key: jax.Array
    progress: bool


def fit(
    method: str,
    config: Config,
    gp: GPFit,
    data: tuple,
    x_new,
    *,
    points=None,
    key=None,
    build=build_model,
    progress=False,
) -> FunctionPosterior:
    """Fit ``method``, one of ``METHODS``, to data and return its posterior of the function at ``x_new``.

    Args:
        method: name of the method.
        config: settings of the run.
        gp: the trained GP, which gives the functional prior, the units of the inputs and the center of the noise prior.
        data: x and y.
        x_new: inputs of the posterior.
        points: measurement points; not needed for ``"gp"``.
        key: key of the run; not needed for ``"gp"``.
        build: ``(config, gp, points, functional=...) -> model``.
        progress: whether to show a progress bar.
    """
    if method == "gp":
        return _condition(gp, data, x_new)
    task = _Task(method, config, functools.partial(build, gp=gp, points=points), data, key, progress)
    if method in (*SAMPLERS, "nuts"):
        return _sample(task, x_new)
    if config.varying_noise:
        raise ValueError(f"varying_noise=True needs one of the samplers or nuts, not {method!r}.")
    if method == "svgp":
        return _sparse(config, data, x_new, key)
    start = time.perf_counter()
    key_fit, key_predict = jax.random.split(key)
    fit_task = _FITS.get(method) or (_hybrid if method in HYBRIDS else _optimize)
    posterior, name, num_gradients = fit_task(task._replace(key=key_fit))
    seconds = time.perf_counter() - start
    f = one_output(predict(posterior, key_predict, x_new, inputs=x_new)[name])
    sigma = posterior.samples.get("sigma")
    return FunctionPosterior(
        f=f[None],
        sigma=None if sigma is None else np.asarray(sigma)[None],
        f_mean=f.mean(0),
        f_sd=f.std(0),
        seconds=seconds,
        num_gradients=num_gradients,
        num_diverging=0,
    )


def sampler(method, model, config):
    """The kernel of a method with the settings of a config; settings that are None keep the kernel's defaults."""
    names = ["num_steps", "step_size"] + ["friction"] * issubclass(SAMPLERS[method], SGHMC)
    settings = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    settings["preconditioner"] = getattr(preconditioners, config.preconditioner)()
    return SAMPLERS[method](model, warmup=Warmup(warm_start=config.warm_start, anchored=config.anchored), **settings)


def driver(kernel, config, *, progress: bool = False) -> MCMC:
    """``MCMC`` with the chains of a config, vectorized unless the config says otherwise."""
    return MCMC(
        kernel,
        num_warmup=config.num_warmup,
        num_samples=config.num_samples,
        num_chains=config.num_chains,
        chain_method=getattr(config, "chain_method", "vectorized"),
        progress_bar=progress,
    )


def _sample(task: _Task, x_new):
    method, config, build, data, key, progress = task
    model = build(config, functional=method in FUNCTIONAL)
    trees = {"init_strategy": init_to_network, "max_tree_depth": NUTS_DEPTH}
    kernel = NUTS(model, **trees) if method == "nuts" else sampler(method, model, config)
    return run_chains(driver(kernel, config, progress=progress), config, data, x_new, key)


# Each of the following functions returns a Posterior, the name of its function and the number of gradients.


def _optimize(task: _Task):
    method, config, build, data, key, progress = task
    divergence = DIVERGENCES[method]
    # The divergence replaces the prior of the weights, so there is nothing to calibrate the functional prior to.
    config = replace(config, calibrated=False, learned_prior=method == "ifbnn")
    model = build(config, functional=divergence is not None)
    loss = Trace_ELBO() if divergence is None else FunctionalELBO(divergence)
    svi = SVI(model, _guide(method)(model), _adam(config, config.num_updates), loss)
    key_run, key_draws = jax.random.split(key)
    params = jax.block_until_ready(svi.run(key_run, config.num_updates, *data, progress_bar=progress).params)
    posterior = svi_posterior(svi, params, key_draws, *data, num_samples=config.num_samples)
    return posterior, "net" if divergence is None else "f", config.num_updates


def _hybrid(task: _Task):
    """FVIMC, whose stages share the number of gradients of a variational method."""
    method, config, build, data, key, progress = task
    model = build(replace(config, calibrated=False), functional=True)
    num_sampling = NUM_STAGES // 2
    num_updates = max(1, round((1.0 - SAMPLING_SHARE) * config.num_updates / (NUM_STAGES - num_sampling)))
    num_draws = max(2, round(SAMPLING_SHARE * config.num_updates / num_sampling / HYBRID_STEPS))
    settings = {"num_warmup": num_draws // 2, "num_samples": num_draws - num_draws // 2, "num_updates": num_updates}
    fvimc = FVIMC(
        model,
        num_stages=NUM_STAGES,
        divergence=HYBRIDS[method],
        guide=_guide(method),
        optimizer=_adam(config, num_updates),
        kernel=functools.partial(fSGLD, warmup=Warmup(warm_start=0.0), num_steps=HYBRID_STEPS),
        num_transform_steps=num_updates,
        **settings,
    )
    key_run, key_draws = jax.random.split(key)
    fvimc.run(key_run, *data, progress_bar=progress)
    num_gradients = (NUM_STAGES - num_sampling) * num_updates + num_sampling * num_draws * HYBRID_STEPS
    return fvimc.posterior(key_draws, config.num_samples), "f", num_gradients


def _for_modes(config):
    """The config with a fixed scale of the weights, because the joint mode of a scale and its weights is at zero."""
    return replace(config, weight_scale_sd=0.0)


def _laplace(task: _Task):
    model, config = task.build(_for_modes(task.config), functional=False), task.config
    settings = {"num_updates": config.num_updates, "num_samples": config.num_samples}
    return laplace(model, task.key, *task.data, **settings), "net", config.num_updates


def _ensemble(task: _Task):
    model, num_updates = task.build(_for_modes(task.config), functional=False), task.config.num_updates
    members = ensemble(model, task.key, *task.data, num_members=NUM_MEMBERS, num_updates=num_updates)
    return members, "net", NUM_MEMBERS * num_updates


def _implicit(task: _Task):
    config = replace(task.config, learned_prior=True, num_functions=NUM_FUNCTIONS)
    model = task.build(config, functional=False)
    optimizer, loss = _adam(config, config.num_updates), RenyiELBO(alpha=0.5, num_particles=8)
    svi = SVI(model, AutoMultivariateNormal(model), optimizer, loss)
    key_run, key_draws = jax.random.split(task.key)
    params = svi.run(key_run, config.num_updates, *task.data, progress_bar=task.progress).params
    posterior = svi_posterior(svi, params, key_draws, *task.data, num_samples=config.num_samples)
    return posterior, "net", config.num_updates


_FITS = {"laplace": _laplace, "ensemble": _ensemble, "vip": _implicit}


def works_by_draws(method: str) -> bool:
    """Whether the divergence of a method is estimated from draws of functions."""
    return not getattr((DIVERGENCES | HYBRIDS).get(method), "linearized", True)


def _guide(method):
    """``model -> guide`` of a method."""
    return functools.partial(mean_field, init_scale=WIDE_START) if works_by_draws(method) else mean_field


def _adam(config, num_updates):
    return optax.adam(optax.cosine_decay_schedule(config.learning_rate, num_updates))


def _sparse(config, data, x_new, key):
    start = time.perf_counter()
    found = fit_svgp(None, *data, key=key, num_inducing=NUM_INDUCING, num_steps=config.num_updates // 5)
    mean, variance = found.predict(x_new)
    sd, sigma = np.sqrt(variance), np.sqrt(found.noise_variance)
    return FunctionPosterior(None, sigma, mean, sd, time.perf_counter() - start, config.num_updates // 5, 0)


def _condition(gp, data, x_new):
    start = time.perf_counter()
    mean, variance = gp.predict(*data, x_new)
    sd = np.sqrt(np.maximum(np.asarray(variance) - gp.noise_variance, 0.0))
    sigma = np.sqrt(gp.noise_variance)
    return FunctionPosterior(None, sigma, np.asarray(mean), sd, time.perf_counter() - start, 0, 0)
