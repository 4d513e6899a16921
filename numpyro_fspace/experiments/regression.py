"""Regression with a network under a GP prior: the model that every method reads, and the scores they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

from numpyro_fspace import measurement, metrics
from numpyro_fspace.baselines import implicit_process
from numpyro_fspace.experiments.catalog import Settings, check_activation, hidden_layers
from numpyro_fspace.mcmc import Report, Warmup
from numpyro_fspace.model import fan_in, functional_prior, random_module
from numpyro_fspace.posterior.diagnostics import function_diagnostics
from numpyro_fspace.priors import CalibratedPrior, GPFit, NetworkPrior

__all__ = [
    "Config",
    "FunctionPosterior",
    "build_model",
    "density_scores",
    "random_functions",
    "scores",
    "training_points",
]

#: Those that take no arguments.
PRECONDITIONERS = ("identity", "prior_scale", "rmsprop")
#: Random networks that the law of a network is fitted to, for each measurement point.
DRAWS_PER_POINT = 10


@dataclass(frozen=True)
class Config(Settings):
    """Every number of a run of a network under a functional prior.

    Attributes:
        widths: hidden widths of the network.
        activation: of its hidden units, a name in ``jax.nn`` (or ``"tanh"``).
        num_warmup, num_samples, num_chains: of ``MCMC``.
        num_steps: gradient steps of a draw of our kernels; None is the kernel's own number.
        step_size: of our kernels, held; None lets warm-up find it.
        preconditioner: of our kernels, a name in ``fs.preconditioners``.
        warm_start: fraction of the warm-up that their optimizer takes.
        anchored: whether it is drawn to where the chain started, in place of the mode of the weights' prior.
        batch_size: minibatch; None is the full data.
        weight_scale: sd of a weight's prior times √fan-in.
        weight_scale_sd: sd of the log-normal prior of ``weight_scale``, which is then sampled; 0 keeps it fixed.
        centered: whether weights of a random scale are sampled themselves, of which thousands pin that scale down, or
            as standard ones times the scale.
        weight_sd: if given, the sd of every weight's prior instead.
        learned_prior: whether the scale (or sd) of the weights' prior is optimized, for each array of weights.
        num_functions: if given, the function is an implicit process of so many draws of the network
            (``fs.baselines.implicit_process``), in place of the network itself.
        max_lengthscale: cap on the GP's lengthscales, in whose units the network reads its inputs.
        calibrated: whether the functional prior takes the network's own law into account (``fs.CalibratedPrior``); the
            measurement points must then be fixed.
        noise_sd: sd of the log-normal prior of the noise, around the trained GP's.
        noise_factor: factor on that center: a prior that is mistaken about the noise.
        num_updates, learning_rate: of Adam, with a cosine decay, for the variational methods.
        num_gp_steps: of Adam on the kernel's parameters, where it is trained.
    """

    QUICK: ClassVar[Mapping[str, object]] = {
        "widths": (20,),
        "num_warmup": 100,
        "num_samples": 100,
        "num_updates": 200,
        "num_gp_steps": 50,
    }

    widths: tuple[int, ...] = (50, 50)
    activation: str = "tanh"
    num_warmup: int = 1000
    num_samples: int = 1000
    num_chains: int = 1
    num_steps: int | None = None
    step_size: float | None = None
    preconditioner: str = "rmsprop"
    warm_start: float = Warmup().warm_start
    anchored: bool = Warmup().anchored
    batch_size: int | None = None
    weight_scale: float = 1.0
    weight_scale_sd: float = 0.0
    centered: bool = True
    weight_sd: float | None = None
    learned_prior: bool = False
    num_functions: int | None = None
    max_lengthscale: float = 5.0
    calibrated: bool = False
    noise_sd: float = 0.3
    noise_factor: float = 1.0
    num_updates: int = 10_000
    learning_rate: float = 5e-3
    num_gp_steps: int = 300

    def __post_init__(self):
        check_activation(self.activation)
        Warmup(warm_start=self.warm_start, anchored=self.anchored).check()
        if self.preconditioner not in PRECONDITIONERS:
            raise ValueError(
                f"preconditioner={self.preconditioner!r} is unknown; choose from {', '.join(PRECONDITIONERS)}."
            )


class FunctionPosterior(NamedTuple):
    """What a method says of a regression at test inputs.

    Attributes:
        f: draws of the function [C, S, N] or [C, S, N, K], or None for a GP.
        sigma: draws of the noise sd [C, S], or the GP's; None where the model has no noise.
        f_mean, f_sd: moments of the function [N].
        seconds: wall time of fitting, compilation included; of a GP that ``prepare`` has trained, of its conditioning.
        num_gradients: gradient steps per chain (of up to three gradients each, with control variates), 0 for a GP.
        num_diverging: undone draws.
        is_chain: whether the draws come from Markov chains, whose convergence is a question.
        report: what ``fs.report`` says of our chains at the test inputs; None for other methods.
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


def build_model(config: Config, gp: GPFit, points, *, functional: bool):
    """A network with a log-normal noise prior and, if ``functional``, the trained GP as prior on it.

    The network reads its inputs in units of the GP's lengthscales (see ``input_scale``).

    Args:
        config: widths and minibatch.
        gp: the trained GP: kernel of the functional prior, scale of the inputs, center of the noise prior.
        points: measurement points.
        functional: whether the model declares the functional prior.
    """
    from flax import linen as nn

    scale = input_scale(gp, config.max_lengthscale)
    network = nn.Sequential([lambda x: x * scale, *hidden_layers(config), nn.Dense(1)])
    log_noise = 0.5 * float(np.log(gp.noise_variance)) + math.log(config.noise_factor)

    function = random_functions(config, network, gp.prior, points, functional=functional)

    def model(x, y=None):
        f = function(x.shape[-1])
        sigma = numpyro.sample("sigma", dist.LogNormal(log_noise, config.noise_sd))
        with numpyro.plate("data", x.shape[0], subsample_size=config.batch_size):
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb).squeeze(-1), sigma), obs=yb)

    return model


def random_functions(config: Config, network, prior, points, *, functional: bool, dependent: bool = False):
    """``num_inputs -> f``, to be called inside a model: the network with random weights, under ``prior``.

    Args:
        config: the weights' prior, whether it is learned, whether the functional prior is calibrated to it, whether
            an implicit process takes the network's place.
        network: a flax network.
        prior: the functional prior.
        points: measurement points.
        functional: whether the model declares the functional prior.
        dependent: whether the outputs are dependent under the prior, as the components of a velocity are.
    """

    def weights():
        """The prior of the weights, with what is random or learned about it."""
        if config.learned_prior:
            return _learned_prior(config)
        if config.weight_sd is not None:
            return dist.Normal(0.0, config.weight_sd)
        if not _has_random_scale(config):
            return fan_in(config.weight_scale)
        law = dist.LogNormal(math.log(config.weight_scale), config.weight_scale_sd)
        return fan_in(numpyro.sample("weight_scale", law))

    def random_network(num_inputs):
        prior = weights()
        with handlers.reparam(config={} if config.centered or not _has_random_scale(config) else _non_centered):
            return random_module("net", network, input_shape=(num_inputs,), prior=prior)

    def draw(key, x):
        with handlers.block(hide_fn=lambda site: site["type"] != "param"), handlers.seed(rng_seed=key):
            return random_network(x.shape[-1])(x)

    if functional and config.calibrated:
        if points.is_random:
            raise ValueError("calibrated=True needs fixed measurement points; this experiment draws them anew.")
        num_outputs = prior.num_outputs
        num_draws = DRAWS_PER_POINT * points.num_points * (num_outputs if dependent else 1)
        settings = {"num_draws": num_draws, "num_outputs": num_outputs, "dependent": dependent}
        prior = CalibratedPrior(prior, NetworkPrior(draw, jax.random.key(0), **settings))

    def function(num_inputs):
        if config.num_functions:
            return implicit_process("net", draw, config.num_functions, jax.random.key(0))
        f = random_network(num_inputs)
        return functional_prior("f", f, prior, points) if functional else f

    return function


def _has_random_scale(config):
    return bool(config.weight_scale_sd) and config.weight_sd is None and not config.learned_prior


def _non_centered(site):
    """Weights as their scale times standard ones."""
    return None if site["name"].endswith("_decentered") else LocScaleReparam(0)


def _learned_prior(config):
    """A prior of the weights with a learned scale for each array."""

    def prior(path, shape):
        def scale(start):
            return numpyro.param(f"net.{path}.scale", start, constraint=dist.constraints.positive)

        if config.weight_sd is not None:
            return dist.Normal(0.0, scale(config.weight_sd))
        return fan_in(scale(config.weight_scale))

    return prior


def input_scale(gp: GPFit, max_lengthscale: float) -> np.ndarray:
    """√D / min(ℓ_d, max_lengthscale) for each of D inputs; 1 if the GP was not trained.

    Weights with variance 1/D then give the first layer inputs that vary as fast as the process does. The cap keeps
    a little of the inputs that the GP found irrelevant.
    """
    if "lengthscale" not in gp.params:
        return np.ones((), np.float32)
    lengthscale = np.asarray(gp.params["lengthscale"], np.float32)
    return np.sqrt(np.float32(lengthscale.size)) / np.minimum(lengthscale, np.float32(max_lengthscale))


def density_scores(posterior: FunctionPosterior, y, key) -> dict:
    """Scores of targets y [N] or [N, K], over all of their entries; closed forms for a Gaussian.

    ``lpd`` is the mean log density of the predictive law (the mixture over draws), ``gibbs`` the mean over the
    posterior of the log density, which some papers call expected log-likelihood; ``coverage90`` that of 90 % intervals.
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
    f, sigma = posterior.f.reshape(-1, y.size), posterior.sigma.reshape(-1, 1)
    log_lik = -0.5 * (np.log(2 * np.pi * sigma**2) + (y - f) ** 2 / sigma**2)
    return result | {
        "lpd": metrics.lpd(log_lik),
        "gibbs": metrics.gibbs_score(log_lik),
        "coverage90": metrics.coverage(y, f + sigma * np.asarray(jax.random.normal(key, f.shape)), 0.9),
    }


def scores(posterior: FunctionPosterior, y, key) -> dict:
    """``density_scores``, the worst R-hat and ESS of the function, and what the report of a run says."""
    result = density_scores(posterior, y, key)
    found = function_diagnostics(posterior.f) if posterior.is_chain and posterior.f is not None else None
    result |= {"rhat_max": found and found.max_rhat, "ess_min": found and found.min_ess}
    if posterior.report is None:
        return result
    return result | {
        "temperature": float(np.max(posterior.report.temperature)),
        "acceptance": posterior.report.acceptance,
        "noise_share": posterior.report.noise_share,
        "noise_heat": posterior.report.noise_heat,
        "advice": list(posterior.report.advice),
    }


def training_points(x, num: int, key):
    """All training inputs if there are at most ``num``, else a fixed random subset of that size."""
    if len(x) <= num:
        return measurement.fixed(x)
    rows = np.sort(np.asarray(jax.random.permutation(key, len(x))[:num]))
    return measurement.fixed(x[rows])
