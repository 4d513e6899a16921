"""The papers' 1-D extrapolation: 20 points in two clusters, a gap between them and nothing outside."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import extrapolation, extrapolation_grid, extrapolation_truth
from numpyro_fspace.diagnostics import function_diagnostics
from numpyro_fspace.experiments.methods import fit
from numpyro_fspace.experiments.records import record
from numpyro_fspace.experiments.regression import Config, scores
from numpyro_fspace.measurement import PointSampler
from numpyro_fspace.priors import GPFit, GPPrior

__all__ = ["CONFIG", "Problem", "build", "prepare", "run_seed"]

NOISE = 0.5
#: The papers' network, with the noise known (as the exact GP knows it) and a weight prior so wide that the functional
#: prior decides; its nugget forgives the network the wiggles that wide weights cannot avoid.
CONFIG = Config(widths=(100, 100), num_chains=4, weight_sd=2.0, noise_sd=0.02)
NUGGET = 0.1


def build():
    """``(gp, points)``: the RBF prior of the experiment with the true noise, and the measurement points.

    M = 40 points: the 20 inputs of the data, and 20 uniform ones on [-1, 1] redrawn at every gradient.
    """
    import tinygp

    prior = GPPrior(tinygp.kernels.ExpSquared(0.1), nugget=NUGGET)
    gp = GPFit(prior=prior, noise_variance=NOISE**2, losses=np.zeros(0), params={})
    return gp, lambda x: measurement.union(measurement.fixed(x), measurement.uniform(-1.0, 1.0, 20))


class Problem(NamedTuple):
    """The data of a seed, the truth on a grid, the functional prior and the measurement points."""

    x: np.ndarray
    y: np.ndarray
    grid: np.ndarray
    truth: np.ndarray
    gp: GPFit
    points: PointSampler


def prepare(seed: int) -> tuple[Problem, tuple]:
    """The problem of a seed, and keys for test targets, the fit and the scores."""
    key_data, *keys = jax.random.split(jax.random.key(seed), 4)
    x, y = (np.asarray(a) for a in extrapolation(key_data))
    grid = extrapolation_grid()
    gp, points = build()
    return Problem(x, y, np.asarray(grid), np.asarray(extrapolation_truth(grid)), gp, points(x)), tuple(keys)


def run_seed(method: str, seed: int, *, quick: bool = False, config=None, progress=False):
    """One record: ``method`` on the data of ``seed``.

    ``rmse``, ``lpd``, ``coverage90``, R-hat and ESS are those of the observed region, against the noiseless truth
    (rmse) or fresh noisy targets (the others). ``sd_seen`` and ``sd_unseen`` are the mean posterior sd of f in the
    observed region and beside it.
    """
    config = CONFIG if config is None else config
    if quick:
        config = config.quick()
    (x, y, grid, truth, gp, points), (key_test, key_fit, key_scores) = prepare(seed)
    seen = (np.abs(grid[:, 0]) >= 0.25) & (np.abs(grid[:, 0]) <= 0.75)
    posterior = fit(method, config, gp, points, x, y, grid, key_fit, progress=progress)
    exact = fit("gp", config, gp, None, x, y, grid, None)
    y_test = truth + NOISE * np.asarray(jax.random.normal(key_test, truth.shape))
    result = scores(_at(posterior, seen), y_test[seen], key_scores)
    gp_result = scores(_at(exact, seen), y_test[seen], key_scores)
    everywhere = None if posterior.f is None or posterior.report is None else function_diagnostics(posterior.f).max_rhat
    return record(
        experiment="extrapolation",
        dataset="extrapolation",
        method=method,
        split=0,
        seed=seed,
        **result | {"rmse": metrics.rmse(truth[seen], posterior.f_mean[seen])},
        rmse_raw=metrics.rmse(truth[seen], posterior.f_mean[seen]),
        lpd_raw=result["lpd"],
        seconds=posterior.seconds,
        num_gradients=posterior.num_gradients,
        num_diverging=posterior.num_diverging,
        gp_rmse=metrics.rmse(truth[seen], exact.f_mean[seen]),
        gp_lpd=gp_result["lpd"],
        w2_gp=metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2),
        sd_seen=float(posterior.f_sd[seen].mean()),
        sd_unseen=float(posterior.f_sd[~seen].mean()),
        rhat_everywhere=everywhere,
        finite=bool(np.isfinite(posterior.f_mean).all()),
        config=asdict(config),
    )


def _at(posterior, rows):
    f = None if posterior.f is None else posterior.f[..., rows]
    return posterior._replace(f=f, f_mean=posterior.f_mean[rows], f_sd=posterior.f_sd[rows])
