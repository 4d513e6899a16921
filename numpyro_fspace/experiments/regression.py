"""Regression with a network under a GP prior: the settings and the model that all methods share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

from numpyro_fspace import measurement
from numpyro_fspace.baselines import implicit_process
from numpyro_fspace.experiments.catalog import Settings
from numpyro_fspace.experiments.networks import check_activation, hidden_layers
from numpyro_fspace.mcmc import Warmup
from numpyro_fspace.model import fan_in, functional_prior, gp_network, random_module
from numpyro_fspace.priors import CalibratedPrior, GPFit, GPPrior, NetworkPrior

#: Preconditioners without arguments.
PRECONDITIONERS = ("automatic", "identity", "prior_scale", "rmsprop")
#: Number of random networks for each measurement point, in the Gaussian approximation of a network's prior.
DRAWS_PER_POINT = 10


@dataclass(frozen=True)
class Config(Settings):
    """Settings of a run with a network under a functional prior.

    Attributes:
        widths: hidden widths of the network.
        activation: activation of the hidden units, a name in ``jax.nn``.
        num_warmup, num_samples, num_chains: those of ``MCMC``.
        num_steps: gradient steps of a draw of the kernels of this package; None means the kernel's default.
        step_size: fixed step size of these kernels; None means that warm-up adapts it.
        preconditioner: preconditioner of these kernels, a name in ``fs.preconditioners``.
        warm_start: fraction of the warm-up that is spent on optimization.
        anchored: whether the optimizer is regularized towards the start of the chain instead of the prior mode.
        batch_size: size of minibatches; None means the full data.
        weight_scale: sd of the prior of a weight times √fan-in.
        weight_scale_sd: sd of the log-normal prior of ``weight_scale``, which is then sampled; 0 keeps it fixed.
        centered: whether weights with a random scale are sampled directly, or as standard normals times the scale.
        weight_sd: if given, the sd of the prior of every weight instead.
        learned_prior: whether the scale (or sd) of the weights' prior is optimized, for each array of weights.
        num_functions: if given, the function is an implicit process of this number of draws of the network
            (``fs.baselines.implicit_process``) instead of the network itself.
        max_lengthscale: upper bound of the GP's lengthscales, which are the units of the network's inputs.
        calibrated: whether the functional prior is divided by the network's own distribution
            (``fs.priors.CalibratedPrior``); the measurement points must then be fixed.
        exact: whether the network is a ``fs.gp_network``, whose values at the measurement points have the distribution
            of the functional prior; random points are drawn once, and the settings of the weights' prior are ignored.
        noise_sd: sd of the log-normal prior of the noise, which is centered at the noise of the trained GP.
        noise_factor: factor on this center, for experiments with a wrong prior of the noise.
        varying_noise: whether the noise depends on the inputs: its logarithm is a second network with the same hidden
            layers and N(0, 1/fan-in) weights, plus that of the noise above. The variational methods cannot have it.
        num_updates, learning_rate: steps and learning rate of Adam, with a cosine decay, for the variational methods.
        num_gp_steps: Adam steps on the kernel's parameters, if the kernel is trained.
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
    preconditioner: str = "automatic"
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
    exact: bool = False
    noise_sd: float = 0.3
    noise_factor: float = 1.0
    varying_noise: bool = False
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


def build_model(config: Config, gp: GPFit, points, *, functional: bool):
    """A model of a network with a log-normal noise prior and, if ``functional``, the trained GP as functional prior.

    The inputs of the network are in units of the GP's lengthscales (see ``input_scale``).

    Args:
        config: settings of the run.
        gp: the trained GP: kernel of the functional prior, scale of the inputs, center of the noise prior.
        points: measurement points.
        functional: whether the model declares the functional prior.
    """
    is_exact = functional and config.exact  # gp_network chooses the units of its inputs
    scale = np.ones((), np.float32) if is_exact else input_scale(gp, config.max_lengthscale)
    network = nn.Sequential([lambda x: x * scale, *hidden_layers(config), nn.Dense(1)])
    return noisy_model(config, gp, random_functions(config, network, gp.prior, points, functional=functional))


def noisy_model(config: Config, gp: GPFit, function):
    """A model of normal observations [N], or [N, K] with K outputs, of a function from ``random_functions``.

    The noise has a log-normal prior, which is centered at ``noise_factor`` times the noise of the trained GP. With
    ``varying_noise`` it is multiplied by exp(g(x)), where g is the network ``"log_noise"``.
    """
    log_noise = 0.5 * float(np.log(gp.noise_variance)) + math.log(config.noise_factor)
    if config.varying_noise:
        scale = input_scale(gp, config.max_lengthscale)
        noise_network = nn.Sequential([lambda x: x * scale, *hidden_layers(config), nn.Dense(1)])

    def model(x, y=None):
        f = function(x.shape[-1])
        sigma = numpyro.sample("sigma", dist.LogNormal(log_noise, config.noise_sd))
        if config.varying_noise:
            g = random_module("log_noise", noise_network, input_shape=x.shape[1:], prior=fan_in(1.0))
        with numpyro.plate("data", x.shape[0], subsample_size=config.batch_size):
            xb = numpyro.subsample(x, event_dim=1)
            mean = f(xb)
            mean = mean.squeeze(-1) if mean.shape[-1] == 1 else mean
            yb = None if y is None else numpyro.subsample(y, event_dim=mean.ndim - 1)
            if config.varying_noise:
                factor = jnp.exp(g(xb))  # [B, 1], of all outputs
                sd = sigma * (factor.squeeze(-1) if mean.ndim == 1 else factor)
            else:
                sd = sigma
            numpyro.sample("y", dist.Normal(mean, sd).to_event(mean.ndim - 1), obs=yb)

    return model


def random_functions(config: Config, network, prior, points, *, functional: bool, dependent: bool = False):
    """``num_inputs -> f``, to be called in a model; f is the network with random weights under ``prior``.

    Args:
        config: settings of the run: the prior of the weights, calibration, implicit processes.
        network: a flax network.
        prior: the functional prior.
        points: measurement points.
        functional: whether the model declares the functional prior.
        dependent: whether the outputs are dependent under the prior, as the components of a velocity are.
    """

    if functional and config.exact:
        fixed = points(jax.random.key(0)) if points.is_random else points
        return lambda num_inputs: gp_network("net", network, prior, fixed, input_shape=num_inputs)

    def weights():
        """The prior of the weights, with its random or learned scale."""
        if config.learned_prior:
            return _learned_prior(config)
        if config.weight_sd is not None:
            return dist.Normal(0.0, config.weight_sd)
        if not _has_random_scale(config):
            return fan_in(config.weight_scale)
        scale = dist.LogNormal(math.log(config.weight_scale), config.weight_scale_sd)
        return fan_in(numpyro.sample("weight_scale", scale))

    def random_network(num_inputs):
        prior = weights()
        with handlers.reparam(config={} if config.centered or not _has_random_scale(config) else _non_centered):
            return random_module("net", network, input_shape=(num_inputs,), prior=prior)

    def draw(key, x):
        with handlers.block(hide_fn=lambda site: site["type"] != "param"), handlers.seed(rng_seed=key):
            return random_network(x.shape[-1])(x)

    if functional and config.calibrated:
        if points.is_random:
            raise ValueError("calibrated=True needs fixed measurement points; those of this experiment are random.")
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
    """Weights as their scale times standard normals."""
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
    """√D / min(ℓ_d, max_lengthscale) for each of D inputs; 1 if the GP has no lengthscales.

    With weights of variance 1/D the first layer then varies as fast as the process. The upper bound leaves inputs that
    are irrelevant for the GP a small influence.
    """
    if "lengthscale" not in gp.params:
        return np.ones((), np.float32)
    lengthscale = np.asarray(gp.params["lengthscale"], np.float32)
    return np.sqrt(np.float32(lengthscale.size)) / np.minimum(lengthscale, np.float32(max_lengthscale))


def known_gp(kernel, noise_sd: float, *, nugget: float, lengthscale: float | None = None) -> GPFit:
    """A GP whose kernel and noise are known and not trained, in the form of ``fit_gp``."""
    params = {} if lengthscale is None else {"lengthscale": np.full(1, lengthscale)}
    return GPFit(GPPrior(kernel, nugget=nugget), noise_sd**2, np.zeros(0), params)


def training_points(x, num: int, key):
    """All training inputs if there are at most ``num``, otherwise a fixed random subset of that size."""
    if len(x) <= num:
        return measurement.fixed(x)
    rows = np.sort(np.asarray(jax.random.permutation(key, len(x))[:num]))
    return measurement.fixed(x[rows])
