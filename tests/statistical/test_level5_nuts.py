"""Level 5: f of a small network under the NumPyro kernels agrees with long NUTS chains on the same model.

The law is multimodal in the weights and not in f; only f is compared. NUTS is the oracle: fixed measurement points and
the full data make the model a density that both sample.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro.infer import MCMC, NUTS

import numpyro_fspace as fs

X = np.linspace(-1.0, 1.0, 16, dtype=np.float32)[:, None]
Y = np.sin(2.5 * X[:, 0]) + 0.2 * np.cos(37.0 * X[:, 0])
PROBES = np.linspace(-1.5, 1.5, 100, dtype=np.float32)[:, None]
POINTS = fs.measurement.fixed(np.linspace(-1.5, 1.5, 12, dtype=np.float32)[:, None])
GP = fs.GPPrior(0.2 * tinygp.kernels.ExpSquared(0.7), nugget=0.02)


def model(x, y=None):
    from flax import linen as nn

    f = fs.random_module("net", nn.Sequential([nn.Dense(6), jnp.tanh, nn.Dense(1)]), input_shape=1)
    f = fs.functional_prior("f", f, GP, POINTS)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.3), obs=y)


def functions(kernel, num_warmup, num_samples, seed):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), X, Y)
    f = fs.predict(mcmc, jax.random.key(seed + 1), X, inputs=PROBES)["net"][..., 0]
    return f.reshape(4, num_samples, len(PROBES))


@pytest.fixture(scope="module")
def oracle():
    return functions(NUTS(model, init_strategy=fs.model.init_to_network), 300, 800, 0)


def compare(f, oracle, bias):
    """Largest error of mean and sd of f over the probes, in units of what chance and ``bias`` (in sd) allow."""
    ours, theirs = (fs.diagnostics.function_diagnostics(draws) for draws in (f, oracle))
    assert theirs.max_rhat < 1.05, "the oracle has not converged"
    assert ours.max_rhat < 1.05
    mean_error = np.abs(ours.mean - theirs.mean) / (5 * np.hypot(ours.mcse_mean, theirs.mcse_mean) + bias * theirs.sd)
    # The sd's own Monte Carlo error, from the effective size of the centered squares.
    squares = [fs.diagnostics.function_diagnostics((d - d.mean((0, 1))) ** 2) for d in (f, oracle)]
    mcse_sd = np.hypot(*(s.mcse_mean / (2 * d.sd) for s, d in zip(squares, (ours, theirs), strict=True)))
    sd_error = np.abs(ours.sd - theirs.sd) / (5 * mcse_sd + bias * theirs.sd)
    return mean_error.max(), sd_error.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [fs.fSGHMC, partial(fs.fSGHMC, marginalize=False), fs.fMCLMC], ids=["marginal", "all weights", "fMCLMC"]
)
def test_it_agrees_with_nuts(oracle, kernel):
    mean_error, sd_error = compare(functions(kernel(model), 200, 800, 10), oracle, bias=0.03)
    assert mean_error < 1
    assert sd_error < 1


@pytest.mark.slow
def test_without_the_functional_prior_it_does_not(oracle):
    """The comparison has the power to see that the functional prior was left out."""
    blind = fs.SGHMC(numpyro.handlers.block(model, hide=["f"]))
    mean_error, sd_error = compare(functions(blind, 200, 800, 20), oracle, bias=0.03)
    assert max(mean_error, sd_error) > 2


@pytest.mark.nightly
def test_fsgld_agrees_with_nuts(oracle):
    """SGLD's second moments are off by ελ/2 ≤ 20 % in the stiffest direction, by far less in f."""
    mean_error, sd_error = compare(
        functions(fs.fSGLD(model, num_steps=200, marginalize=False), 200, 800, 30), oracle, bias=0.1
    )
    assert mean_error < 1
    assert sd_error < 1
