"""The posterior of a function at test inputs, which every method of the experiments returns, and its scores."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np
from numpyro.infer import NUTS

from numpyro_fspace import metrics
from numpyro_fspace.mcmc import MCMC, Report, report
from numpyro_fspace.posterior import predict
from numpyro_fspace.posterior.diagnostics import function_diagnostics

#: Half-width of the central 90 % interval of a standard normal.
Z90 = 1.6448536269514722
#: Maximum number of test inputs in the report of a run.
MAX_REPORTED = 100


class FunctionPosterior(NamedTuple):
    """The posterior of a function at test inputs, and what it cost.

    Attributes:
        f: draws of the function [C, S, N] or [C, S, N, K]; None for a GP.
        sigma: draws of the noise sd [C, S], or [C, S, N K] if it depends on the inputs, or that of the GP; None if the
            model has no noise.
        f_mean, f_sd: moments of the function [N].
        seconds: wall time of fitting including compilation; for a GP that is already trained, of conditioning it.
        num_gradients: gradient steps per chain (of up to three gradients each, with control variates), 0 for a GP.
        num_diverging: number of draws that were undone.
        is_chain: whether the draws come from Markov chains, whose convergence has to be checked.
        report: result of ``fs.report`` for chains of this package at the test inputs; None for other methods.
    """

    f: np.ndarray | None
    sigma: np.ndarray | None
    f_mean: np.ndarray
    f_sd: np.ndarray
    seconds: float
    num_gradients: int
    num_diverging: int
    is_chain: bool = False
    report: Report | None = None

    @property
    def cost(self) -> dict:
        """The entries of a record for time, gradients and undone draws."""
        return {name: getattr(self, name) for name in ("seconds", "num_gradients", "num_diverging")}

    @property
    def reported(self) -> dict:
        """The entries of a record from the report of a run, if there is one."""
        if self.report is None:
            return {}
        return {
            "temperature": float(np.max(self.report.temperature)),
            "acceptance": self.report.acceptance,
            "noise_share": self.report.noise_share,
            "noise_heat": self.report.weighted_noise_share,
            "advice": list(self.report.advice),
        }

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the pointwise central 90 % intervals of f, from draws or, without draws, of a Gaussian."""
        if self.f is None:
            return self.f_mean - Z90 * self.f_sd, self.f_mean + Z90 * self.f_sd
        low, high = np.quantile(self.f.reshape(-1, self.f.shape[-1]), (0.05, 0.95), axis=0)
        return low, high

    def at(self, rows) -> FunctionPosterior:
        """The posterior at some of the inputs."""
        f = None if self.f is None else self.f[..., rows]
        return self._replace(f=f, f_mean=self.f_mean[rows], f_sd=self.f_sd[rows])


def one_output(f):
    """Draws [S, N] of a function with one output, [S, N, K] of any other."""
    return f[..., 0] if f.ndim == 3 and f.shape[-1] == 1 else f


def run_chains(mcmc: MCMC, config, data: tuple, x_new, key, *, judged: bool = True) -> FunctionPosterior:
    """Run the chains of a sampler and return the posterior of the network ``"net"`` at ``x_new``.

    Args:
        mcmc: the driver, with a kernel of this package or ``NUTS``.
        config: settings of the run, of which the numbers of draws and chains are used.
        data: x and y.
        x_new: inputs of the posterior.
        key: key of the run.
        judged: whether to make the report of the run; there is none for NUTS.
    """
    start, is_nuts = time.perf_counter(), isinstance(mcmc.sampler, NUTS)
    key, key_predict = jax.random.split(key)
    mcmc.run(key, *data, extra_fields=("num_steps",) * is_nuts)
    jax.block_until_ready(mcmc.last_state.z)
    seconds = time.perf_counter() - start
    values = predict(mcmc, key_predict, x_new)
    draws = one_output(values["net"])
    fields, sigma = mcmc.get_extra_fields(), mcmc.get_samples(group_by_chain=True).get("sigma")
    if "log_noise" in values:
        factor = np.exp(values["log_noise"].reshape(*sigma.shape, -1))
        sigma = np.repeat(sigma[..., None] * factor, draws[0].size // len(x_new), -1)  # of all outputs
    per_draw = float(np.mean(fields["num_steps"])) if is_nuts else mcmc.sampler.num_steps
    some = np.unique(np.linspace(0, len(x_new) - 1, MAX_REPORTED).astype(int))
    about = {"key": jax.random.fold_in(key_predict, 1), "inputs": x_new[some]}
    return FunctionPosterior(
        f=draws.reshape(config.num_chains, config.num_samples, *draws.shape[1:]),
        sigma=None if sigma is None else np.asarray(sigma),
        f_mean=draws.mean(0),
        f_sd=draws.std(0),
        seconds=seconds,
        num_gradients=round(per_draw * (config.num_warmup + config.num_samples)),
        num_diverging=int(np.sum(fields["diverging"] if is_nuts else mcmc.last_state.num_diverging)),
        is_chain=True,
        report=report(mcmc, *data, **about) if judged and not is_nuts else None,
    )


def convergence(posterior: FunctionPosterior, points: slice = slice(None)) -> dict:
    """The largest R-hat and the smallest ESS of f at some of the inputs; None if there are no chains."""
    if not posterior.is_chain or posterior.f is None:
        return {"rhat_max": None, "ess_min": None}
    f = posterior.f[:, :, points]
    found = function_diagnostics(f.reshape(*f.shape[:2], -1))
    return {"rhat_max": found.max_rhat, "ess_min": found.min_ess}


def density_scores(posterior: FunctionPosterior, y, key) -> dict:
    """Scores of targets y [N] or [N, K] over all of their entries, in closed form for a Gaussian.

    ``lpd`` is the mean log density of the predictive distribution (the mixture over draws). ``gibbs`` is the posterior
    mean of the log density, which some papers call expected log-likelihood. ``coverage90`` is that of 90 % intervals.
    """
    assert posterior.sigma is not None, "a regression has noise"
    y, mean = np.ravel(y), np.ravel(posterior.f_mean)
    result = {"rmse": metrics.rmse(y, mean)}
    if posterior.f is None:
        spread, noise = np.ravel(posterior.f_sd) ** 2, float(posterior.sigma) ** 2
        return result | {
            "lpd": metrics.gaussian_lpd(y, mean, spread + noise),
            "gibbs": metrics.gaussian_lpd(y, mean, noise) - 0.5 * float(np.mean(spread)) / noise,
            "coverage90": metrics.gaussian_coverage(y, mean, spread + noise, 0.9),
        }
    f = posterior.f.reshape(-1, y.size)
    sigma = np.reshape(posterior.sigma, (len(f), -1))
    log_lik = -0.5 * (np.log(2 * np.pi * sigma**2) + (y - f) ** 2 / sigma**2)
    return result | {
        "lpd": metrics.lpd(log_lik),
        "gibbs": metrics.gibbs_score(log_lik),
        "coverage90": metrics.coverage(y, f + sigma * np.asarray(jax.random.normal(key, f.shape)), 0.9),
    }


def scores(posterior: FunctionPosterior, y, key) -> dict:
    """``density_scores``, ``convergence``, and entries from the report of a run."""
    return density_scores(posterior, y, key) | convergence(posterior) | posterior.reported
