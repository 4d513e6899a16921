"""How often 90 % bands of the function cover it if the data are drawn from the functional prior itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
import tinygp
from tqdm import tqdm

from numpyro_fspace import measurement
from numpyro_fspace.datasets import extrapolation
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.function_posterior import convergence, run_chains
from numpyro_fspace.experiments.methods import FUNCTIONAL, METHODS, SAMPLERS, driver, fit, sampler
from numpyro_fspace.experiments.regression import Config, build_model, known_gp


@dataclass(frozen=True)
class CoverageConfig(Config):
    """Settings of a run: those of ``Config``, and ``num_sets``, the number of data sets of each seed."""

    num_sets: int = 200

    QUICK: ClassVar[Mapping[str, object]] = {**Config.QUICK, "num_sets": 3}


NOISE, LENGTHSCALE, NUGGET = 0.5, 0.3, 0.01
#: Measurement points and test inputs, both evenly spaced on [-1, 1].
NUM_POINTS, NUM_GRID = 40, 41
#: As in ``calibration``: a network wider than the process, inputs in units of its lengthscale, known noise.
CONFIG = CoverageConfig(
    weight_scale=3.0, calibrated=True, noise_sd=0.02, num_warmup=200, num_samples=200, num_chains=2, max_lengthscale=1.0
)


def run(job: Job[CoverageConfig]) -> dict:
    """Coverage of a method's pointwise 90 % bands of f, averaged over the data sets of a seed.

    Each set has a function drawn from the GP and 20 noisy values of it, at inputs as in the 1-D extrapolation. The
    exact GP posterior covers 90 % on average; ``gp_coverage90`` is its coverage on these sets. ``coverage90_se`` is the
    standard error over sets, ``difference_se`` that of the difference from the exact GP. ``coverage90_seen`` and
    ``coverage90_unseen`` are for test inputs with and without data nearby, and ``width`` is the mean width of the
    bands. ``rhat_max`` and ``ess_min`` are the worst values of all sets, ``num_diverging`` is the sum over sets, and
    ``num_gradients`` is the number for one chain on one set.
    """
    method, config, num_sets = job.method, job.config, job.config.num_sets
    gp = known_gp(tinygp.kernels.ExpSquared(LENGTHSCALE), NOISE, nugget=NUGGET, lengthscale=LENGTHSCALE)
    grid, spread = (np.linspace(-1.0, 1.0, n, dtype=np.float32)[:, None] for n in (NUM_GRID, NUM_POINTS))
    apply, exact = _fitter(method, config, gp, measurement.fixed(spread)), _fitter("gp", config, gp, None)
    seen = (np.abs(grid[:, 0]) >= 0.25) & (np.abs(grid[:, 0]) <= 0.75)
    key_data, key_fit = jax.random.split(jax.random.key(job.seed))

    start, of_method, of_gp, worst, num_diverging = time.perf_counter(), [], [], [], 0
    for i in tqdm(range(num_sets), disable=not job.progress, desc=method):
        x, y, truth = _draw_set(gp.prior, jax.random.fold_in(key_data, i), grid)
        posterior = apply(x, y, grid, jax.random.fold_in(key_fit, i))
        reference = posterior if method == "gp" else exact(x, y, grid, None)
        of_method.append(_coverage(posterior, truth))
        of_gp.append(_coverage(reference, truth))
        num_diverging += posterior.num_diverging
        if posterior.is_chain:
            worst.append(tuple(convergence(posterior).values()))
    inside, width = (np.array(part) for part in zip(*of_method, strict=True))
    inside_gp, width_gp = (np.array(part) for part in zip(*of_gp, strict=True))
    rhat, ess = np.array(worst or [(np.nan, np.nan)]).T
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
    """``(x, y, x_new, key) -> FunctionPosterior``; a sampler is compiled only once, for the first data set."""
    if method not in SAMPLERS:
        return lambda x, y, x_new, key: fit(method, config, gp, (x, y), x_new, points=points, key=key)
    kernel = sampler(method, build_model(config, gp, points, functional=method in FUNCTIONAL), config)
    mcmc = driver(kernel, config)
    return lambda x, y, x_new, key: run_chains(mcmc, config, (x, y), x_new, key, judged=False)


def _coverage(posterior, truth):
    """Whether the pointwise central 90 % interval of f contains the truth, and its mean width."""
    low, high = posterior.band()
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
    minutes=3,
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
