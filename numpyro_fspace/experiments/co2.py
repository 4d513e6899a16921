"""Carbon dioxide at Mauna Loa: a trend and a seasonal cycle learned until 1985 and extrapolated to 2001."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tinygp
from flax import linen as nn

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import load_co2
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import panels
from numpyro_fspace.experiments.function_posterior import scores
from numpyro_fspace.experiments.methods import METHODS, fit
from numpyro_fspace.experiments.networks import hidden_layers
from numpyro_fspace.experiments.regression import Config, noisy_model, random_functions
from numpyro_fspace.priors import GPFit, GPPrior, fit_gp

#: The first year that is held out.
CUT = 1985.0
#: Initial parameters of the marginal likelihood: variances of standardized values, lengthscales in years.
START = {"trend": 10.0, "trend_scale": 40.0, "season": 0.3, "season_scale": 150.0, "roughness": 0.5}
START_NOISE = 2e-3


@dataclass(frozen=True)
class Co2Config(Config):
    """Settings of a run: those of ``Config``, and the measurement points.

    Attributes:
        points_per_year: measurement points of the functional prior per year, from the first year to the last.
    """

    QUICK: ClassVar[Mapping[str, object]] = {**Config.QUICK, "num_gp_steps": 20, "points_per_year": 2.3}

    points_per_year: float = 6.0


CONFIG = Co2Config(
    num_chains=2, num_warmup=500, num_samples=500, num_gp_steps=100, num_updates=3000, calibrated=True, weight_scale=2.0
)


def kernel(params: Mapping):
    """A smooth trend plus a slowly changing seasonal cycle: squared exponentials of the year and of ``circle``."""
    squared = tinygp.kernels.ExpSquared
    season = tinygp.kernels.ExpSineSquared(scale=1.0, gamma=params["roughness"])
    trend = params["trend"] * squared(params["trend_scale"])
    return trend + params["season"] * squared(params["season_scale"]) * season


def circle(x, roughness: float):
    """The position of a day of the year on a circle, [M, 2].

    tinygp's exp(-γ sin²(π τ)) is the squared exponential of the distance between such positions for γ = ``roughness``,
    so that periodic functions of the prior are smooth functions of these inputs.
    """
    angle = 2 * jnp.pi * x
    return jnp.sqrt(roughness / 2) * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)


class Problem(NamedTuple):
    """Years since 1985 and standardized values, for training and for testing, with the GP trained on the former."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    mean: float
    scale: float
    gp: GPFit


@lru_cache(maxsize=1)
def prepare(num_gp_steps: int) -> Problem:
    """The monthly means and the trained GP, cached for the next method."""
    t, y = load_co2("monthly", dtype=np.float64)
    seen = t[:, 0] < CUT
    mean, scale = float(y[seen].mean()), float(y[seen].std())
    x, y = (t - CUT).astype(np.float32), ((y - mean) / scale).astype(np.float32)
    gp = fit_gp(kernel, x[seen], y[seen], params=START, noise_variance=START_NOISE, num_steps=num_gp_steps)
    gp = replace(gp, prior=GPPrior(gp.prior.kernel, nugget=gp.noise_variance))
    return Problem(x[seen], y[seen], x[~seen], y[~seen], mean, scale, gp)


def _build(config: Co2Config, gp: GPFit, points, *, functional: bool):
    """A network of the year and the position on the circle, in units of the process, with a log-normal noise prior."""
    params = {name: float(value) for name, value in gp.params.items()}
    amplitude = np.sqrt(params["trend"] + params["season"])

    def features(x):
        both = jnp.concatenate([x / params["trend_scale"], circle(x, params["roughness"])], -1)
        return np.sqrt(both.shape[-1]) * both

    network = nn.Sequential([features, *hidden_layers(config), nn.Dense(1), lambda f: amplitude * f])
    return noisy_model(config, gp, random_functions(config, network, gp.prior, points, functional=functional))


def run(job: Job[Co2Config]) -> dict:
    """A method on the monthly means before 1985, scored on the later ones and compared with the exact GP.

    ``rmse_raw`` and ``lpd_raw`` are in parts per million, ``sd_end`` is the sd of f in the last year, and ``w2_gp`` is
    the mean distance of f to the exact GP over all years.
    """
    config = job.config
    problem = prepare(config.num_gp_steps)
    x, y, x_test, y_test, mean, scale, gp = problem
    everywhere = np.concatenate([x, x_test])
    exact = fit("gp", config, gp, (x, y), everywhere)
    posterior = exact
    key_fit, key_scores = jax.random.split(jax.random.key(job.seed))
    if job.method != "gp":
        num_points = round(config.points_per_year * float(everywhere[-1, 0] - everywhere[0, 0]))
        points = measurement.fixed(np.linspace(everywhere[0], everywhere[-1], num_points))
        settings = {"points": points, "key": key_fit, "build": _build, "progress": job.progress}
        posterior = fit(job.method, config, gp, (x, y), everywhere, **settings)
    tail = slice(len(x), None)
    later, gp_later = (scores(one.at(tail), y_test, key_scores) for one in (posterior, exact))
    rmse_raw, lpd_raw = metrics.to_raw_units(later["rmse"], later["lpd"], scale)
    seen = metrics.rmse(y, posterior.f_mean[: len(x)])
    return {
        **later,
        "rmse_raw": rmse_raw,
        "lpd_raw": lpd_raw,
        "rmse_seen": seen * scale,
        "gp_rmse": gp_later["rmse"],
        "gp_lpd": gp_later["lpd"],
        "w2_gp": scale * metrics.gaussian_w2(posterior.f_mean, posterior.f_sd**2, exact.f_mean, exact.f_sd**2),
        "sd_end": scale * float(posterior.f_sd[-12:].mean()),
        "sigma": scale * float(np.mean(np.asarray(posterior.sigma))),
        **posterior.cost,
        "curves": {name: mean + scale * curve for name, curve in _bands(posterior, exact).items()}
        | {"x": everywhere[:, 0], "co2": mean + scale * np.concatenate([y, y_test])},
    }


def _bands(posterior, exact):
    """Means and ends of central 90 % intervals of f, of a method and of the exact GP."""
    (low, high), (gp_low, gp_high) = posterior.band(), exact.band()
    return {"mean": posterior.f_mean, "low": low, "high": high, "gp_low": gp_low, "gp_high": gp_high}


def _panel(ax, curves):
    """Mean and 90 % band of f, the exact GP's band (dashed), training data (black) and test data (orange)."""
    seen, year = curves["x"] < 0.0, CUT + curves["x"]
    ax.axvline(CUT, color="0.6", lw=0.8)
    for rows, color in ((seen, "black"), (~seen, "#D55E00")):
        ax.plot(year[rows], curves["co2"][rows], ".", color=color, ms=2)
    ax.fill_between(year, curves["low"], curves["high"], color="#0072B2", alpha=0.3, lw=0)
    ax.plot(year, curves["mean"], color="#0072B2", lw=0.9)
    for name in ("gp_low", "gp_high"):
        ax.plot(year, curves[name], "--", color="black", lw=0.5)
    ax.set(xlim=(1976, 2002), ylim=(328, 384), ylabel="CO2, ppm")


EXPERIMENT = Experiment(
    summary="Carbon dioxide at Mauna Loa: a network with a prior of trend and season extrapolates 17 years.",
    run=run,
    config=CONFIG,
    methods=tuple(method for method in METHODS if method not in ("svgp", "vip", "ifbnn")),
    defaults=("gp", "fsghmc", "fsgld", "sghmc", "gfsvi", "ensemble"),
    datasets=("co2",),
    files=("timeseries/co2.csv",),
    minutes=1,
    columns={
        "rmse_raw": "RMSE, ppm",
        "rmse_seen": "RMSE until 1985",
        "lpd_raw": "lpd",
        "coverage90": "coverage",
        "sd_end": "sd of f, 2001",
        "w2_gp": "W2 to the GP",
        "rhat_max": "R-hat",
        "seconds": "seconds",
    },
    picture=lambda records: panels(records, _panel),
    unused=("batch_size", "noise_factor", "max_lengthscale"),
)
