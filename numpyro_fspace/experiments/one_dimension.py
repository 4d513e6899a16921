"""One-dimensional regression under a GP prior: a method's function beside the exact posterior."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fspace import measurement, metrics
from numpyro_fspace.experiments.catalog import Job
from numpyro_fspace.experiments.methods import VARIATIONAL, VARIATIONAL_NUGGET, fit
from numpyro_fspace.experiments.regression import Config, scores
from numpyro_fspace.model.measurement import PointSampler
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import GPFit, GPPrior

__all__ = ["COLUMNS", "Problem", "judge", "panel"]

#: z of a Gaussian's central 90 % interval; draws in a picture.
Z90, NUM_DRAWN = 1.6448536269514722, 5
#: Of the table of records.
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
    """Data, the truth on a grid, and what is believed of the function.

    Attributes:
        x, y: data [N, 1], [N].
        grid: where the function is judged [G, 1].
        truth: the noiseless function there [G].
        seen: which of these lie among the data [G].
        gp: the functional prior, and the true noise.
        points: measurement points.
        nugget: of the functional prior under variational methods.
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
    """What a record says of a method.

    ``rmse``, ``lpd``, ``coverage90``, R-hat and ESS are those of the observed region, against the noiseless truth
    (rmse) or fresh noisy targets (the others). ``sd_seen`` and ``sd_unseen`` are the mean posterior sd of f in the
    observed region and beside it.

    Args:
        problem: what is to be learned.
        job: by which method.
        keys: of the test targets, the fit and the scores.
    """
    config, (key_test, key_fit, key_scores) = job.config, keys
    x, y, grid, truth, seen, gp, points, nugget = problem
    exact = fit("gp", config, gp, None, x, y, grid, None)
    if job.method in VARIATIONAL:
        gp = replace(gp, prior=GPPrior(gp.prior.kernel, nugget=nugget))
    if job.method == "nuts":  # a density that does not change
        points = measurement.fixed(np.asarray(points(jax.random.key(0))))
    posterior = fit(job.method, config, gp, points, x, y, grid, key_fit, progress=job.progress)
    y_test = truth + np.sqrt(gp.noise_variance) * np.asarray(jax.random.normal(key_test, truth.shape))
    result = scores(_at(posterior, seen), y_test[seen], key_scores)
    gp_result = scores(_at(exact, seen), y_test[seen], key_scores)
    everywhere = None if posterior.f is None or posterior.report is None else function_diagnostics(posterior.f).max_rhat
    return {
        **result | {"rmse": metrics.rmse(truth[seen], posterior.f_mean[seen])},
        "rmse_raw": metrics.rmse(truth[seen], posterior.f_mean[seen]),
        "lpd_raw": result["lpd"],
        "seconds": posterior.seconds,
        "num_gradients": posterior.num_gradients,
        "num_diverging": posterior.num_diverging,
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
    """Mean, central 90 % band and a few draws of the function; a Gaussian's band if it has no draws."""
    if posterior.f is None:
        width = Z90 * posterior.f_sd
        return {"mean": posterior.f_mean, "low": posterior.f_mean - width, "high": posterior.f_mean + width}
    f = posterior.f.reshape(-1, posterior.f.shape[-1])
    low, high = np.quantile(f, (0.05, 0.95), axis=0)
    draws = f[np.linspace(0, len(f) - 1, NUM_DRAWN).astype(int)]
    return {"mean": posterior.f_mean, "low": low, "high": high, "draws": draws}


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


def _at(posterior, rows):
    f = None if posterior.f is None else posterior.f[..., rows]
    return posterior._replace(f=f, f_mean=posterior.f_mean[rows], f_sd=posterior.f_sd[rows])
