"""What an object prints: one line with its class and its settings, the same in every process."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen as nn
from numpyro.infer import NUTS
from tinygp import kernels

import numpyro_fspace as fs
from numpyro_fspace.variational.fvimc_stages import FVIMCResult, VStage

X = np.linspace(-1, 1, 20)[:, None]
GP = fs.GPPrior(kernels.ExpSquared(0.7), nugget=0.01)
NETWORK = fs.priors.NetworkPrior(fs.model.random_function(nn.Dense(1), input_shape=1), jax.random.key(0), num_draws=50)
SUBSET, BOX = fs.measurement.subset(X, 3), fs.measurement.uniform(-1.5, 1.0, 4)
SETTINGS = {"num_warmup": 5, "num_samples": 6, "num_chains": 2, "chain_method": "vectorized"}


def model(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * x[:, 0], 0.3), obs=y)


POSTERIOR = fs.Posterior(model, {"slope": jnp.zeros(4)}, args=(X,))

#: Each object with what its text must name.
# fmt: off  # one object a row
OBJECTS = [
    (fs.SGLD(model, step_size=0.1, num_steps=3), ["SGLD(model=model", "step_size=0.1", "num_steps=3"]),
    (fs.SGHMC(model, friction=2.0), ["SGHMC(model=model", "friction=2.0", "integrator='baoab'", "Warmup(warm_start="]),
    (fs.fSGLD(model, temperature=0.5), ["fSGLD(model=model", "temperature=0.5", "fs.preconditioners.automatic"]),
    (fs.fSGHMC(model, refresh_every=4), ["fSGHMC(model=model", "refresh_every=4", "init_strategy=init_to_network"]),
    (fs.fHMC(model, num_steps=7), ["fHMC(model=model", "num_steps=7", "target_accept_prob=0.8"]),
    (fs.MCLMC(model, friction=0.2), ["MCLMC(model=model", "friction=0.2", "metropolis=False"]),
    (fs.fMCLMC(model, num_steps=8), ["fMCLMC(model=model", "num_steps=8"]),
    (fs.fMALA(model, target_accept_prob=0.6), ["fMALA(model=model", "num_steps=1", "target_accept_prob=0.6"]),
    (fs.MCMC(fs.SGLD(model), **SETTINGS), ["MCMC(sampler=SGLD(model=model", "num_warmup=5", "'vectorized'"]),
    (fs.MCMC(NUTS(model), **SETTINGS), ["MCMC(sampler=<numpyro.infer.hmc.NUTS object>", "num_samples=6"]),
    (fs.Warmup(warm_start=0.1), ["Warmup(warm_start=0.1"]),
    (fs.preconditioners.rmsprop(), ["fs.preconditioners.rmsprop"]),
    (fs.preconditioners.diagonal(jnp.ones(3)), ["fs.preconditioners.diagonal("]),
    (fs.measurement.fixed(X), ["Fixed(num_points=20, num_inputs=1", "pool=float32[20, 1]"]),
    (SUBSET, ["Subset(num_points=3", "pool=float32[20, 1]"]),
    (BOX, ["Uniform(num_points=4", "low=[-1.5], high=[1]"]),
    (fs.measurement.perturb(X, 0.1, 2), ["Perturb(num_points=2", "scale=0.1"]),
    (fs.measurement.union(SUBSET, BOX), ["Union(num_points=7", "members=(Subset(num_points=3", "Uniform(num_points=4"]),
    (fs.measurement.as_points(lambda key: jnp.zeros((3, 1))), ["Own(is_random=True, fn=<lambda>)"]),
    (GP, ["GPPrior(kernel=ExpSquared(scale=0.7", "nugget=0.01"]),
    (fs.GPPrior([2.0 * kernels.Matern32(0.5)] * 2, mean=np.ones(2)), ["Constant(value=2.0)", "mean=[1, 1], num_out"]),
    (GP.condition(X, X[:, 0], noise_variance=0.1), ["ConditionedGP(prior=GPPrior(", "x=float64[20, 1]"]),
    (NETWORK, ["NetworkPrior(draw=", "num_draws=50"]),
    (fs.priors.CalibratedPrior(GP, NETWORK), ["CalibratedPrior(prior=GPPrior(", "base=NetworkPrior("]),
    (fs.priors.StudentTPrior(kernels.ExpSquared(0.7), 4.5), ["StudentTPrior(df=4.5", "scale=0.7"]),
    (fs.priors.Helmholtz(kernels.ExpSquared(0.7), kernels.ExpSquared(0.8)), ["Helmholtz(potential=", "scale=0.8"]),
    (fs.priors.GPFit(GP, 0.1, np.ones(9), {"0": np.ones(9)}), ["GPFit(prior=GPPrior(", "noise_variance=0.1"]),
    (fs.baselines.SVGPFit(GP.kernel, 0.1, X, X, X, -3.0, np.ones(9), {}), ["SVGPFit(noise_variance=0.1, bound=-3.0)"]),
    (fs.mcmc.KernelState(3, {"w": jnp.ones(9)}, *range(7), None), ["KernelState(i=3, z={'w': float32[9]}, momentum=0"]),
    (fs.OnDemand(X), ["OnDemand(ndarray of shape [20, 1]"]),
    (POSTERIOR, ["Posterior(model, num_draws=4"]),
    (fs.Predictive(POSTERIOR), ["Predictive(Posterior(model, num_draws=4"]),
    (fs.FunctionalELBO(fs.variational.Wasserstein2()), ["FunctionalELBO(divergence=Wasserstein2(), num_particles=1)"]),
    (fs.FVIMC(model, num_updates=3), ["FVIMC(model=model", "num_updates=3", "kernel=partial(fSGLD, warmup=Warmup("]),
    (FVIMCResult({}, (), (VStage(np.ones(9), {}),)), ["FVIMCResult(", "stages=(VStage(losses=float64[9]"]),
    (fs.variational.RegularizedKL(gamma=0.1), ["RegularizedKL(gamma=0.1)"]),
    (fs.variational.PushforwardKL(), ["PushforwardKL(prior_scale=1.0"]),
    (fs.variational.Wasserstein2(), ["Wasserstein2()"]),
    (fs.variational.Wasserstein1(), ["Wasserstein1(num_draws=64"]),
    (fs.variational.BridgeWasserstein(), ["BridgeWasserstein(distance=Wasserstein1("]),
    (fs.variational.SpectralSteinKL(), ["SpectralSteinKL(num_draws=100"]),
    (fs.posterior.Decomposition("variance", *np.ones((3, 9))), ["Decomposition(kind='variance'", "mean=float64[9]"]),
    (fs.metrics.Reliability(*np.ones((3, 9))), ["Reliability(confidence=float64[9]"]),
    (fs.datasets.Drifters(*np.ones((4, 20, 2)), (4, 5)), ["Drifters(x=float64[20, 2]", "shape=(4, 5)"]),
]
# fmt: on


@pytest.mark.parametrize("obj, words", OBJECTS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_the_text_is_one_line_of_class_and_settings(obj, words):
    text = repr(obj)
    assert "\n" not in text and not re.search(r"0x[0-9a-f]{4}", text)
    assert type(obj).__name__.strip("_") in text
    assert [word for word in words if word not in text] == []


def test_every_public_class_is_among_them():
    """But for errors, protocols, base classes and tables; data sets have tests of their own."""
    elsewhere = {"Images", "Split", "Report"}
    modules = (fs, fs.priors, fs.variational, fs.baselines, fs.datasets, fs.metrics, fs.model, fs.mcmc, fs.posterior)
    found = {getattr(module, name) for module in modules for name in module.__all__}
    classes = {one for one in found if isinstance(one, type) and not issubclass(one, Exception)}
    classes = {one for one in classes if not inspect.isabstract(one) and not getattr(one, "_is_protocol", False)}
    assert {one.__name__ for one in classes} - elsewhere - {type(obj).__name__ for obj, _ in OBJECTS} == set()


def test_text_of_a_prior_with_sampled_degrees_of_freedom():
    """An error message inside a compiled program shows it."""

    @jax.jit
    def text_length(df):
        return len(repr(fs.priors.StudentTPrior(kernels.ExpSquared(0.7), df)))

    assert text_length(4.5) > 20
