"""One-dimensional regression under a GP prior, compared with the exact posterior."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fspace import measurement, metrics
from numpyro_fspace.experiments.catalog import Job
from numpyro_fspace.experiments.function_posterior import Z90, convergence, scores
from numpyro_fspace.experiments.methods import EXACT_DENSITY, VARIATIONAL, VARIATIONAL_NUGGET, fit
from numpyro_fspace.experiments.regression import Config
from numpyro_fspace.model.measurement import PointSampler
from numpyro_fspace.priors import GPFit, GPPrior

#: Number of measurement points of an exact prior, which are spread evenly over the grid.
NUM_EXACT = 60
#: Number of draws in a picture.
NUM_DRAWN = 5
#: Columns of the table of records.
COLUMNS = {
    "rmse": "RMSE to the truth",
    "lpd": "lpd",
    "coverage90": "coverage",
    "sd_seen": "sd, data",
    "sd_unseen": "sd, no data",
    "w2_gp": "W2 to the GP",
    "rhat_max": "R-hat",
}


class Problem(NamedTuple):
    """Data, the truth on a grid, and the prior of the function.

    Attributes:
        x, y: data [N, 1], [N].
        grid: inputs at which the function is scored [G, 1].
        truth: the noiseless function on the grid [G].
        seen: which points of the grid lie in the observed region [G].
        gp: the functional prior and the true noise.
        points: measurement points.
        nugget: nugget of the functional prior for variational methods.
    """

    x: np.ndarray
    y: np.ndarray
    grid: np.ndarray
    truth: np.ndarray
    seen: np.ndarray
    gp: GPFit
    points: PointSampler
    nugget: float = VARIATIONAL_NUGGET


def judge(problem: Problem, job: Job[Config], keys) -> dict:
    """Fit a method and return the entries of its record.

    ``rmse``, ``lpd``, ``coverage90``, R-hat and ESS are those of the observed region. The RMSE is relative to the
    noiseless truth, the other scores use new noisy targets. ``sd_seen`` and ``sd_unseen`` are the mean posterior sd of
    f in the observed region and outside of it.

    Args:
        problem: the data and the prior.
        job: the method and its settings.
        keys: keys of the test targets, the fit and the scores.
    """
    config, (key_test, key_fit, key_scores) = job.config, keys
    x, y, grid, truth, seen, gp, points, nugget = problem
    exact = fit("gp", config, gp, (x, y), grid)
    if job.method in VARIATIONAL:
        gp = replace(gp, prior=GPPrior(gp.prior.kernel, nugget=nugget))
    if job.method in EXACT_DENSITY:
        points = measurement.fixed(np.asarray(points(jax.random.key(0))))
    if config.exact:
        points = measurement.space_filling(grid.min(0), grid.max(0), NUM_EXACT)
    posterior = fit(job.method, config, gp, (x, y), grid, points=points, key=key_fit, progress=job.progress)
    y_test = truth + np.sqrt(gp.noise_variance) * np.asarray(jax.random.normal(key_test, truth.shape))
    result = scores(posterior.at(seen), y_test[seen], key_scores)
    gp_result = scores(exact.at(seen), y_test[seen], key_scores)
    everywhere = None if posterior.report is None else convergence(posterior)["rhat_max"]
    rmse = metrics.rmse(truth[seen], posterior.f_mean[seen])
    return {
        **result | {"rmse": rmse},
        "rmse_raw": rmse,
        "lpd_raw": result["lpd"],
        **posterior.cost,
        "gp_rmse": metrics.rmse(truth[seen], exact.f_mean[seen]),
        "gp_lpd": gp_result["lpd"],
        "w2_gp": metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2),
        "sd_seen": float(posterior.f_sd[seen].mean()),
        "sd_unseen": float(posterior.f_sd[~seen].mean()),
        "rhat_everywhere": everywhere,
        "finite": bool(np.isfinite(posterior.f_mean).all()),
        "curves": _curves(posterior)
        | {"x": x[:, 0], "y": y, "grid": grid[:, 0], "truth": truth}
        | {"gp_mean": exact.f_mean, "gp_sd": exact.f_sd},
    }


def _curves(posterior):
    """Mean, central 90 % band and, if there are any, a few draws of the function."""
    low, high = posterior.band()
    curves = {"mean": posterior.f_mean, "low": low, "high": high}
    if posterior.f is None:
        return curves
    f = posterior.f.reshape(-1, posterior.f.shape[-1])
    return curves | {"draws": f[np.linspace(0, len(f) - 1, NUM_DRAWN).astype(int)]}


def panel(ax, curves):
    """Mean, 90 % band and draws of a method; the exact GP posterior, the truth and the data."""
    grid = curves["grid"]
    ax.fill_between(grid, curves["low"], curves["high"], color="#0072B2", alpha=0.25, lw=0, label="90 % band of f")
    for draw in curves.get("draws", ()):
        ax.plot(grid, draw, color="#0072B2", lw=0.5, alpha=0.4)
    ax.plot(grid, curves["mean"], color="#0072B2", lw=2.0, label="mean")
    bands = np.array([curves["gp_mean"] + z * curves["gp_sd"] for z in (-Z90, 0.0, Z90)]).T
    ax.plot(grid, bands, "--", color="#D55E00", lw=0.9, label=["exact GP: mean, 90 % band", None, None])
    ax.plot(grid, curves["truth"], ":", color="black", lw=1.2, label="truth")
    ax.plot(curves["x"], curves["y"], "o", color="black", ms=4, mec="white", mew=0.6, label="data")
    ax.set(xlim=(grid[0], grid[-1]), ylim=(-4.0, 4.0))
