"""How close the posterior of a finite network is to the exact GP posterior, with and without a calibrated prior."""

from __future__ import annotations

import jax
import numpy as np
import tinygp

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import extrapolation, extrapolation_grid
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.function_posterior import convergence
from numpyro_fspace.experiments.methods import METHODS, fit
from numpyro_fspace.experiments.regression import Config, known_gp

NOISE = 0.5
LENGTHSCALE, NUGGET = 0.3, 0.01
#: The network is wider than the process, its inputs are in units of the lengthscale, and the noise is known.
CONFIG = Config(
    weight_scale=3.0, calibrated=True, noise_sd=0.02, num_warmup=500, num_samples=500, num_chains=4, max_lengthscale=1.0
)
NUM_GRID = 30


def run(job: Job[Config]) -> dict:
    """A method on the data of the 1-D extrapolation, under a GP prior at fixed points.

    ``w2_gp`` is the mean over [-1, 1] of the pointwise 2-Wasserstein distance to the exact GP posterior, ``mean_error``
    the root mean squared difference of the means, ``sd`` the mean posterior sd of f, and ``gp_sd`` that of the GP. The
    setting ``calibrated`` chooses between the density ratio and the plain product.
    """
    config = job.config
    key_data, key_fit = jax.random.split(jax.random.key(job.seed))
    x, y = (np.asarray(a) for a in extrapolation(key_data))
    grid = np.asarray(extrapolation_grid())
    gp = known_gp(tinygp.kernels.ExpSquared(LENGTHSCALE), NOISE, nugget=NUGGET, lengthscale=LENGTHSCALE)
    spread = np.linspace(-1.0, 1.0, NUM_GRID)[:, None]
    points = measurement.fixed(np.concatenate([x, spread]).astype(np.float32))
    posterior = fit(job.method, config, gp, (x, y), grid, points=points, key=key_fit, progress=job.progress)
    exact = fit("gp", config, gp, (x, y), grid)
    return {
        **posterior.cost,
        **convergence(posterior),
        "w2_gp": metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2),
        "mean_error": metrics.rmse(exact.f_mean, posterior.f_mean),
        "sd": float(posterior.f_sd.mean()),
        "gp_sd": float(exact.f_sd.mean()),
    }


EXPERIMENT = Experiment(
    summary="How close the posterior of a finite network is to the exact GP posterior.",
    run=run,
    config=CONFIG,
    methods=METHODS,
    defaults=("fsghmc", "sghmc"),
    datasets=("extrapolation",),
    minutes=1,
    columns={
        "w2_gp": "W2 to the GP",
        "mean_error": "error of the mean",
        "sd": "sd",
        "gp_sd": "sd of the GP",
        "rhat_max": "R-hat",
    },
    unused=("num_gp_steps",),
)
