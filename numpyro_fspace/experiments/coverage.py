"""How often 90 % bands of the function cover it, where data are drawn from the functional prior itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np

from numpyro_fspace import measurement
from numpyro_fspace.datasets import extrapolation
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.methods import KERNELS, METHODS, driver, fit, sampler
from numpyro_fspace.experiments.regression import Config, FunctionPosterior, build_model
from numpyro_fspace.posterior import predict
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import GPFit, GPPrior

__all__ = ["EXPERIMENT", "CoverageConfig"]


@dataclass(frozen=True)
class CoverageConfig(Config):
    """As ``Config``, for ``num_sets`` data sets of each seed."""

    num_sets: int = 200

    QUICK: ClassVar[Mapping[str, object]] = {**Config.QUICK, "num_sets": 3}


NOISE, LENGTHSCALE, NUGGET = 0.5, 0.3, 0.01
#: Measurement points and test inputs, both evenly spaced on [-1, 1].
NUM_POINTS, NUM_GRID = 40, 41
#: As in ``calibration``: weights wider than the process, inputs in its lengthscales, the noise known.
CONFIG = CoverageConfig(
    weight_scale=3.0, calibrated=True, noise_sd=0.02, num_warmup=200, num_samples=200, num_chains=2, max_lengthscale=1.0
)
#: z of a Gaussian's central 90 % interval.
Z90 = 1.6448536269514722


def run(job: Job[CoverageConfig]) -> dict:
    """Coverage of a method's pointwise 90 % bands of f, mean over the data sets of a seed.

    Each set has a function drawn from the GP and 20 noisy values of it, at inputs as in the 1-D extrapolation. The
    exact GP posterior covers 90 % on average; ``gp_coverage90`` is what it covers on these sets. ``coverage90_se`` is
    the standard error over sets, ``difference_se`` that of the difference from the exact GP. ``coverage90_seen`` and
    ``coverage90_unseen`` belong to test inputs where there are data and where there are none, ``width`` is the bands'
    mean width. ``rhat_max`` and ``ess_min`` are the worst of all sets, ``num_diverging`` the sum over them;
    ``num_gradients`` are those of one chain on one set.
    """
    import tinygp
    from tqdm import tqdm

    method, config, num_sets = job.method, job.config, job.config.num_sets
    prior = GPPrior(tinygp.kernels.ExpSquared(LENGTHSCALE), nugget=NUGGET)
    gp = GPFit(prior, NOISE**2, np.zeros(0), {"lengthscale": np.full(1, LENGTHSCALE)})
    grid, spread = (np.linspace(-1.0, 1.0, n, dtype=np.float32)[:, None] for n in (NUM_GRID, NUM_POINTS))
    apply, exact = _fitter(method, config, gp, measurement.fixed(spread)), _fitter("gp", config, gp, None)
    seen = (np.abs(grid[:, 0]) >= 0.25) & (np.abs(grid[:, 0]) <= 0.75)
    key_data, key_fit = jax.random.split(jax.random.key(job.seed))

    start, ours, theirs, convergence, num_diverging = time.perf_counter(), [], [], [], 0
    for i in tqdm(range(num_sets), disable=not job.progress, desc=method):
        x, y, truth = _draw_set(prior, jax.random.fold_in(key_data, i), grid)
        posterior = apply(x, y, grid, jax.random.fold_in(key_fit, i))
        reference = posterior if method == "gp" else exact(x, y, grid, None)
        ours.append(_judge(posterior, truth))
        theirs.append(_judge(reference, truth))
        num_diverging += posterior.num_diverging
        if posterior.is_chain:
            found = function_diagnostics(posterior.f)
            convergence.append((found.max_rhat, found.min_ess))
    inside, width = (np.array(part) for part in zip(*ours, strict=True))
    inside_gp, width_gp = (np.array(part) for part in zip(*theirs, strict=True))
    rhat, ess = np.array(convergence or [(np.nan, np.nan)]).T
    return {
        "coverage90": float(inside.mean()),
        "seconds": time.perf_counter() - start,
        "num_gradients": posterior.num_gradients,
        "num_diverging": num_diverging,
        "rhat_max": float(rhat.max()),
        "ess_min": float(ess.min()),
        "coverage90_se": _standard_error(inside.mean(1)),
        "coverage90_seen": float(inside[:, seen].mean()),
        "coverage90_unseen": float(inside[:, ~seen].mean()),
        "gp_coverage90": float(inside_gp.mean()),
        "difference_se": _standard_error(inside.mean(1) - inside_gp.mean(1)),
        "width": float(width.mean()),
        "gp_width": float(width_gp.mean()),
        "rhat_median": float(np.median(rhat)),
    }


def _draw_set(prior, key, grid):
    """Inputs and targets of a data set, and its function on the grid."""
    key_x, key_f, key_y = jax.random.split(key, 3)
    x = np.asarray(extrapolation(key_x)[0])
    covariance = prior.moments(np.concatenate([x, grid]))[1]
    root = np.linalg.cholesky(covariance + 1e-6 * np.eye(len(covariance)))
    f = root @ np.asarray(jax.random.normal(key_f, (len(root),)))
    noise = NOISE * np.asarray(jax.random.normal(key_y, (len(x),)))
    return x, (f[: len(x)] + noise).astype(np.float32), f[len(x) :]


def _fitter(method, config, gp, points):
    """``(x, y, x_new, key) -> FunctionPosterior``; a sampler is compiled for the first data set alone."""
    if method not in KERNELS:
        return functools.partial(fit, method, config, gp, points)
    kernel = sampler(method, build_model(config, gp, points, functional=method.startswith("f")), config)
    mcmc = driver(kernel, config)

    def sample(x, y, x_new, key):
        start = time.perf_counter()
        key_run, key_predict = jax.random.split(key)
        mcmc.run(key_run, x, y)
        f = predict(mcmc, key_predict, x_new)["net"][..., 0]
        return FunctionPosterior(
            f=f.reshape(config.num_chains, config.num_samples, -1),
            sigma=None,
            f_mean=f.mean(0),
            f_sd=f.std(0),
            seconds=time.perf_counter() - start,
            num_gradients=kernel.num_steps * (config.num_warmup + config.num_samples),
            num_diverging=int(np.sum(mcmc.last_state.num_diverging)),
            is_chain=True,
        )

    return sample


def _judge(posterior, truth):
    """Where the pointwise central 90 % interval of f, by draws or of a Gaussian, holds the truth; its mean width."""
    if posterior.f is None:
        low, high = posterior.f_mean - Z90 * posterior.f_sd, posterior.f_mean + Z90 * posterior.f_sd
    else:
        low, high = np.quantile(posterior.f.reshape(-1, len(truth)), (0.05, 0.95), axis=0)
    return (low <= truth) & (truth <= high), np.mean(high - low)


def _standard_error(values):
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


EXPERIMENT = Experiment(
    summary="How often 90 % bands of the function cover it, on data drawn from the functional prior.",
    run=run,
    config=CONFIG,
    methods=METHODS,
    defaults=("gp", "fsghmc"),
    datasets=("gp_draws",),
    minutes=40,
    columns={
        "coverage90": "coverage",
        "gp_coverage90": "of the GP",
        "coverage90_seen": "near data",
        "coverage90_unseen": "elsewhere",
        "width": "width",
        "gp_width": "of the GP",
        "rhat_median": "R-hat, median",
    },
    unused=("num_gp_steps",),
)
