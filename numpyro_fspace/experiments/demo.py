"""``fspace demo``: the README's model on real data, from training the prior to saving the results."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn

from numpyro_fspace import measurement, metrics
from numpyro_fspace.datasets import load_diabetes
from numpyro_fspace.mcmc import MCMC, fSGHMC
from numpyro_fspace.model import gp_network
from numpyro_fspace.posterior import plot_functions, predict, to_arviz
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import fit_gp

__all__ = ["run_demo"]


def run_demo(out: str | Path, *, quick: bool = False):
    """Fit scikit-learn's diabetes data, print diagnostics and scores, save a picture and a netCDF file in ``out``."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    start, data = time.perf_counter(), load_diabetes()
    x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
    print(f"Diabetes progression: {len(x)} patients to learn from, {len(x_test)} to predict, {x.shape[1]} inputs.")
    print("Training the Gaussian-process prior by marginal likelihood ...")
    gp = fit_gp(None, x, y, num_steps=50 if quick else 300)
    points = measurement.fixed(x[:200])

    def model(x, y=None):
        network = nn.Sequential([nn.Dense(50), jnp.tanh, nn.Dense(50), jnp.tanh, nn.Dense(1)])
        f = gp_network("f", network, gp.prior, points)
        sigma = numpyro.sample("sigma", dist.LogNormal(0.5 * np.log(gp.noise_variance), 0.3))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f(x).squeeze(-1), sigma), obs=y)

    print("Sampling functions with fSGHMC ...")
    size = 20 if quick else 500
    mcmc = MCMC(fSGHMC(model), num_warmup=size, num_samples=size, num_chains=2, chain_method="vectorized")
    key_run, key_predict = jax.random.split(jax.random.key(0))
    mcmc.run(key_run, x, y, extra_fields=("potential_energy", "step_size", "temperature"))

    draws = predict(mcmc, key_predict, x_test)
    f = draws["f"][..., 0]
    print()
    print(function_diagnostics(f.reshape(2, size, -1)))
    print()
    _print_scores(gp, data, f, np.asarray(mcmc.get_samples()["sigma"]), draws["y"])
    axes = plot_functions(x_test, f, y_data=y_test, noise_draws=draws["y"])
    axes.set_title("Diabetes progression (standardized), held-out patients")
    axes.figure.savefig(out / "diabetes.png", dpi=120, bbox_inches="tight")  # type: ignore[union-attr]
    to_arviz(mcmc).to_netcdf(str(out / "diabetes.nc"), engine="h5netcdf")
    print(f"\nWrote {out / 'diabetes.png'} and {out / 'diabetes.nc'} after {time.perf_counter() - start:.0f} s.")


def _print_scores(gp, data, f, sigma, y_draws):
    x, y, x_test, y_test = data.x_train, data.y_train, data.x_test, data.y_test
    mean, variance = (np.asarray(a) for a in gp.predict(x, y, x_test))
    constant = np.full_like(y_test, y.mean())
    rows = {
        "fSGHMC": (
            metrics.rmse(y_test, f.mean(0)),
            metrics.gaussian_mixture_lpd(y_test, f, sigma),
            metrics.coverage(y_test, y_draws, 0.9),
        ),
        "exact GP": (
            metrics.rmse(y_test, mean),
            metrics.gaussian_lpd(y_test, mean, variance),
            metrics.gaussian_coverage(y_test, mean, variance, 0.9),
        ),
        "constant": (
            metrics.rmse(y_test, constant),
            metrics.gaussian_lpd(y_test, constant, np.full_like(constant, y.var())),
            metrics.gaussian_coverage(y_test, constant, np.full_like(constant, y.var()), 0.9),
        ),
    }
    print(f"{'test scores':<12}{'RMSE':>8}{'lpd':>9}{'90 % interval covers':>23}")
    for name, (rmse, lpd, covered) in rows.items():
        print(f"{name:<12}{rmse:>8.3f}{lpd:>9.3f}{covered:>22.0%}")
