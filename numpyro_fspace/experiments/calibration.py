"""How near the posterior of a finite network comes to the exact GP posterior, and what a calibrated prior adds."""

from __future__ import annotations

import jax
import numpy as np

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import extrapolation, extrapolation_grid
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.methods import METHODS, fit
from numpyro_fspace.experiments.regression import Config
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import GPFit, GPPrior

__all__ = ["EXPERIMENT"]

NOISE = 0.5
LENGTHSCALE, NUGGET = 0.3, 0.01
#: Weights wider than the process, inputs in its lengthscales, the noise known. Fixed points: the data and a grid.
CONFIG = Config(
    weight_scale=3.0, calibrated=True, noise_sd=0.02, num_warmup=500, num_samples=500, num_chains=4, max_lengthscale=1.0
)
NUM_GRID = 30


def run(job: Job[Config]) -> dict:
    """A method on the data of the 1-D extrapolation, under a GP prior at fixed points.

    ``w2_gp`` is the mean over [-1, 1] of the pointwise 2-Wasserstein distance to the exact GP posterior, ``mean_error``
    the root mean squared distance of its mean, ``sd`` the mean posterior sd of f, and ``gp_sd`` the exact one.
    ``calibrated`` in the config tells the density ratio from the plain product.
    """
    import tinygp

    config = job.config
    key_data, key_fit = jax.random.split(jax.random.key(job.seed))
    x, y = (np.asarray(a) for a in extrapolation(key_data))
    grid = np.asarray(extrapolation_grid())
    prior = GPPrior(tinygp.kernels.ExpSquared(LENGTHSCALE), nugget=NUGGET)
    params = {"lengthscale": np.full(1, LENGTHSCALE)}
    gp = GPFit(prior=prior, noise_variance=NOISE**2, losses=np.zeros(0), params=params)
    spread = np.linspace(-1.0, 1.0, NUM_GRID)[:, None]
    points = measurement.fixed(np.concatenate([x, spread]).astype(np.float32))
    posterior = fit(job.method, config, gp, points, x, y, grid, key_fit, progress=job.progress)
    exact = fit("gp", config, gp, None, x, y, grid, None)
    found = function_diagnostics(posterior.f) if posterior.is_chain and posterior.f is not None else None
    return {
        "seconds": posterior.seconds,
        "num_gradients": posterior.num_gradients,
        "num_diverging": posterior.num_diverging,
        "rhat_max": found and found.max_rhat,
        "ess_min": found and found.min_ess,
        "w2_gp": metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2),
        "mean_error": metrics.rmse(exact.f_mean, posterior.f_mean),
        "sd": float(posterior.f_sd.mean()),
        "gp_sd": float(exact.f_sd.mean()),
    }


EXPERIMENT = Experiment(
    summary="How near the posterior of a finite network comes to the exact GP posterior.",
    run=run,
    config=CONFIG,
    methods=METHODS,
    defaults=("fsghmc", "sghmc"),
    datasets=("extrapolation",),
    minutes=3,
    columns={
        "w2_gp": "W2 to the GP",
        "mean_error": "error of the mean",
        "sd": "sd",
        "gp_sd": "sd of the GP",
        "rhat_max": "R-hat",
    },
    unused=("num_gp_steps",),
)
