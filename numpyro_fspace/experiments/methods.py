"""The methods that experiments compare, by name: one model in, a posterior of its function at new inputs out."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np

from numpyro_fspace.experiments.regression import Config, FunctionPosterior, build_model
from numpyro_fspace.infer import MCMC, SGHMC, SGLD, fSGHMC, fSGLD
from numpyro_fspace.networks import init_to_network
from numpyro_fspace.prediction import predict
from numpyro_fspace.priors import GPFit
from numpyro_fspace.reporting import report
from numpyro_fspace.variational import (
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

__all__ = ["DIVERGENCES", "KERNELS", "METHODS", "fit"]

KERNELS = {"sgld": SGLD, "sghmc": SGHMC, "fsgld": fSGLD, "fsghmc": fSGHMC}
#: Divergences of the functional bound; None is NumPyro's own bound, against the prior of the weights.
DIVERGENCES = {
    "gfsvi": RegularizedKL(),
    "tfsvi": PushforwardKL(),
    "gwi": Wasserstein2(),
    "fbnn": SpectralSteinKL(),
    "fvi": Wasserstein1(),
    "ifbnn": BridgeWasserstein(),
    "bbb": None,
}
METHODS = (*KERNELS, "nuts", *DIVERGENCES, "gp")
#: Test inputs at which a run's report looks.
MAX_REPORTED = 100
#: Trees of NUTS have at most 2^8 - 1 steps.
NUTS_DEPTH = 8


def fit(
    method: str, config: Config, gp: GPFit, points, x, y, x_new, key, *, progress: bool = False
) -> FunctionPosterior:
    """Fit ``method``, one of ``METHODS``, to (x, y) and give its posterior of the function at ``x_new``.

    Args:
        method: its name.
        config: every number of the run.
        gp: the trained GP: functional prior, units of the inputs, centre of the noise's prior.
        points: measurement points.
        x, y: training data.
        x_new: where the posterior is wanted.
        key: of the run; None for ``"gp"``.
        progress: show a progress bar.
    """
    if method == "gp":
        return _condition(gp, x, y, x_new)
    run = _optimise if method in DIVERGENCES else _sample
    return run(method, config, gp, points, x, y, x_new, key, progress)


def _sample(method, config, gp, points, x, y, x_new, key, progress):
    from numpyro.infer import NUTS

    start = time.perf_counter()
    functional = method in ("fsgld", "fsghmc", "nuts")
    model = build_model(config, gp, points, functional=functional)
    is_nuts = method == "nuts"
    kernel = (
        NUTS(model, init_strategy=init_to_network, max_tree_depth=NUTS_DEPTH) if is_nuts else KERNELS[method](model)
    )
    mcmc = MCMC(
        kernel,
        num_warmup=config.num_warmup,
        num_samples=config.num_samples,
        num_chains=config.num_chains,
        chain_method="vectorized",
        progress_bar=progress,
    )
    key_run, key_predict = jax.random.split(key)
    mcmc.run(key_run, x, y, extra_fields=("num_steps",) if is_nuts else ())
    jax.block_until_ready(mcmc.last_state.z)
    seconds = time.perf_counter() - start
    draws = predict(mcmc, key_predict, x_new)["net"][..., 0]
    some = np.unique(np.linspace(0, len(x_new) - 1, MAX_REPORTED).astype(int))
    fields = mcmc.get_extra_fields()
    per_draw = float(np.mean(fields["num_steps"])) if is_nuts else kernel.num_steps
    key_report = jax.random.fold_in(key_predict, 1)
    return FunctionPosterior(
        f=draws.reshape(config.num_chains, config.num_samples, -1),
        sigma=np.asarray(mcmc.get_samples(group_by_chain=True)["sigma"]),
        f_mean=draws.mean(0),
        f_sd=draws.std(0),
        seconds=seconds,
        num_gradients=round(per_draw * (config.num_warmup + config.num_samples)),
        num_diverging=int(np.sum(fields["diverging"] if is_nuts else mcmc.last_state.num_diverging)),
        is_chain=True,
        report=None if is_nuts else report(mcmc, x, y, key=key_report, inputs=x_new[some]),
    )


def _optimise(method, config, gp, points, x, y, x_new, key, progress):
    import optax
    from numpyro.infer import SVI, Trace_ELBO

    start = time.perf_counter()
    divergence = DIVERGENCES[method]
    # The divergence stands for the weights' prior, which the functional prior then need not take into account.
    config = replace(config, calibrated=False, learned_prior=method == "ifbnn")
    model = build_model(config, gp, points, functional=divergence is not None)
    guide = mean_field(model)
    loss = Trace_ELBO() if divergence is None else FunctionalELBO(divergence)
    optimiser = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.num_updates))
    key_run, key_draws, key_predict = jax.random.split(key, 3)
    svi = SVI(model, guide, optimiser, loss)
    params = jax.block_until_ready(svi.run(key_run, config.num_updates, x, y, progress_bar=progress).params)
    seconds = time.perf_counter() - start
    posterior = svi_posterior(svi, params, key_draws, x, y, num_samples=config.num_samples)
    functional = divergence is not None
    f = predict(posterior, key_predict, x_new)["f" if functional else "net"].reshape(config.num_samples, -1)
    return FunctionPosterior(
        f=f[None],
        sigma=np.asarray(posterior.samples["sigma"])[None],
        f_mean=f.mean(0),
        f_sd=f.std(0),
        seconds=seconds,
        num_gradients=config.num_updates,
        num_diverging=0,
    )


def _condition(gp, x, y, x_new):
    start = time.perf_counter()
    mean, variance = gp.predict(x, y, x_new)
    sd = np.sqrt(np.maximum(np.asarray(variance) - gp.noise_variance, 0.0))
    sigma = np.sqrt(gp.noise_variance)
    return FunctionPosterior(None, sigma, np.asarray(mean), sd, time.perf_counter() - start, 0, 0)
