"""``fspace demo``: two years of carbon dioxide predict the third, with and without a functional prior."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from tinygp import kernels

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import load_co2
from numpyro_fspace.mcmc import MCMC, SGHMC, fSGHMC, report
from numpyro_fspace.model import gp_network, random_module
from numpyro_fspace.posterior import plot_functions, predict, to_arviz
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import GPPrior

#: Two years of weeks are seen, the third is held out.
FIRST, CUT, LAST = 1995.0, 1997.0, 1998.0
#: Standard deviation of the noise in units of that of the values seen.
NOISE = 0.2
#: The prior, in these units and in years: a season of period one that changes over decades, and a slow drift.
KERNEL = kernels.ExpSquared(20.0) * kernels.ExpSineSquared(scale=1.0, gamma=1.0) + 0.09 * kernels.ExpSquared(2.0)
NAMES = ("with the prior", "without the prior", "exact GP")


class Series(NamedTuple):
    """Years since 1997 [N, 1], and ppm [N] as ``line`` + ``scale`` × ``z``, where the first ``num_seen`` are seen."""

    x: np.ndarray
    z: np.ndarray
    line: np.ndarray
    scale: float
    num_seen: int

    def ppm(self, z):
        """Standardized values at all x, [..., N], in parts per million."""
        return self.line + self.scale * np.asarray(z)


def load_series() -> Series:
    """Weekly values, standardized by the least-squares line of the weeks that are seen."""
    t, co2 = load_co2("weekly", dtype=np.float64)
    kept = (t[:, 0] >= FIRST) & (t[:, 0] < LAST)
    x, co2 = t[kept] - CUT, co2[kept]
    num_seen = int((x[:, 0] < 0).sum())
    line = np.polyval(np.polyfit(x[:num_seen, 0], co2[:num_seen], 1), x[:, 0])
    scale = float((co2 - line)[:num_seen].std())
    return Series(x.astype(np.float32), ((co2 - line) / scale).astype(np.float32), line, scale, num_seen)


def _network():
    return nn.Sequential([nn.Dense(50), jnp.tanh, nn.Dense(50), jnp.tanh, nn.Dense(1)])


def _observe(f, x, y):
    sigma = numpyro.sample("sigma", dist.LogNormal(np.log(NOISE), 0.3))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f(x).squeeze(-1), sigma), obs=y)


def with_prior(x, y=None):
    """The network has the distribution of the Gaussian process at 36 points, a month apart."""
    points = measurement.space_filling(FIRST - CUT, LAST - CUT, 36)
    _observe(gp_network("f", _network(), GPPrior(KERNEL), points), x, y)


def without_prior(x, y=None):
    """The same network with standard normal weights."""
    _observe(random_module("f", _network(), input_shape=1, prior=dist.Normal(0.0, 1.0)), x, y)


def run_demo(out: str | Path, *, quick: bool = False):
    """Fit both networks, print diagnostics and scores, save a picture and a netCDF file in the folder ``out``."""
    out, start = Path(out), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    series = load_series()
    n, size = series.num_seen, 20 if quick else 300
    print(f"Carbon dioxide at Mauna Loa: {n} weeks to learn from, {len(series.x) - n} of the next year to predict.")
    print("The prior says: a straight line, a season that repeats every year, and a slow drift.")
    fits = {}
    for name, kernel in zip(NAMES, (fSGHMC(with_prior), SGHMC(without_prior)), strict=False):
        print(f"Sampling the network {name} ...", flush=True)
        with warnings.catch_warnings():
            if quick or name != NAMES[0]:  # the table below says it
                warnings.simplefilter("ignore", RuntimeWarning)
            mcmc = MCMC(kernel, num_warmup=size, num_samples=size, num_chains=2)
            mcmc.run(jax.random.key(0), series.x[:n], series.z[:n], extra_fields=("potential_energy", "temperature"))
            fits[name] = mcmc, predict(mcmc, jax.random.key(1), series.x)
    mcmc, _ = fits[NAMES[0]]
    print()
    print("A quick run: too short to judge." if quick else report(mcmc))
    print()
    _print_scores(series, fits, with_rhat=not quick)
    print("\nThe report judges the chains. Coverage depends on the prior too, which is stated here and not trained.")
    _picture(series, {name: draws["f"][..., 0] for name, (_, draws) in fits.items()}, out / "co2.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of ArviZ, about its next version
        to_arviz(mcmc).to_netcdf(str(out / "co2.nc"), engine="h5netcdf")
    print(f"\nWrote {out / 'co2.png'} and {out / 'co2.nc'} after {time.perf_counter() - start:.0f} s.")


def exact(series: Series):
    """Mean and variance of the exact Gaussian process, without noise, at all x."""
    seen = slice(series.num_seen)
    posterior = GPPrior(KERNEL).condition(series.x[seen], series.z[seen], noise_variance=NOISE**2)
    mean, covariance = posterior.moments(series.x)
    return np.asarray(mean), np.asarray(covariance).diagonal()


def _print_scores(series: Series, fits, *, with_rhat: bool):
    later = slice(series.num_seen, None)
    y, scale = series.z[later], series.scale
    mean, variance = (moment[later] for moment in exact(series))
    of_gp = (
        metrics.rmse(y, mean),
        metrics.gaussian_lpd(y, mean, variance + NOISE**2),
        metrics.gaussian_coverage(y, mean, variance + NOISE**2, 0.9),
    )
    rows: dict[str, tuple[float, float, float, str]] = {}
    for name, (mcmc, draws) in fits.items():
        f, sigma = np.asarray(draws["f"])[:, later, 0], np.asarray(mcmc.get_samples()["sigma"])
        covered = metrics.coverage(y, np.asarray(draws["y"])[:, later], 0.9)
        worst = np.max(function_diagnostics(f.reshape(2, -1, f.shape[1])).rhat)
        rows[name] = (
            metrics.rmse(y, f.mean(0)),
            metrics.gaussian_mixture_lpd(y, f, sigma),
            covered,
            f"{worst:.2f}" if with_rhat else "",
        )
    rows[NAMES[2]] = (*of_gp, "")
    rhat_title = "worst R-hat" if with_rhat else ""
    print(f"{'1997, held out':<18}{'RMSE, ppm':>10}{'lpd':>8}{'90 % interval covers':>23}{rhat_title:>13}".rstrip())
    for name, (rmse, lpd, covered, rhat) in rows.items():
        row = f"{name:<18}{scale * rmse:>10.2f}{lpd - np.log(scale):>8.2f}{covered:>22.0%} {rhat:>13}"
        print(row.rstrip())


def _picture(series: Series, functions, path: Path):
    """A panel for each network: band and draws, weeks seen and held out, the exact process (dashed)."""
    from matplotlib import pyplot as plt

    seen, year = series.num_seen, series.x[:, 0] + CUT
    mean, variance = exact(series)
    reference = (series.ppm(mean), series.scale * np.sqrt(variance))
    data = {"x_data": year[:seen], "y_data": series.ppm(series.z)[:seen], "reference": reference}
    figure, panels = plt.subplots(1, len(functions), figsize=(8.0, 3.4), sharey=True, layout="constrained")
    for ax, name in zip(panels, reversed(functions), strict=True):
        plot_functions(year, series.ppm(functions[name]), **data, num_draws=8, ax=ax)
        for stretch in list(ax.patches):
            stretch.remove()
        ax.plot(year[seen:], series.ppm(series.z)[seen:], ".", color="#009E73", ms=4, label="held out", zorder=7)
        ax.axvline(CUT, color="0.6", lw=0.8)
        ax.get_legend().remove()
        ax.set_title(f"Network {name}", fontsize=12)
        ax.set(xlabel="year", ylabel="", ylim=(352, 374))
        ax.set(xlim=(FIRST - 0.05, LAST + 0.05), xticks=(FIRST, FIRST + 1, CUT, LAST))
    panels[0].set_ylabel("carbon dioxide, ppm")
    handles, labels = panels[-1].get_legend_handles_labels()
    names = {"90 % of f": "90 % band", "draws of f": "draws", "reference": "exact GP", "data": "seen"}
    labels = [names.get(label, label) for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
