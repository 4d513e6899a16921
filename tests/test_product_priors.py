"""How much of a Gaussian process a product with the prior of the weights leaves, beside closed forms."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import linen as nn

import numpyro_fspace as fs
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.posterior.product_priors import product_doubts, product_shares

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32)[:, None]
KERNEL = tinygp.kernels.ExpSquared(0.5)


def line(sd, prior, num_outputs=1, points=X, scale=1.0):
    """f_k(x) = w_k x with w ~ N(0, sd²) under ``prior``."""

    def model(x, y=None):
        net = nn.Dense(num_outputs, use_bias=False)
        f = fs.random_module("net", net, input_shape=1, prior=dist.Normal(0.0, sd))
        f = fs.functional_prior("f", f, prior, points, scale=scale)
        numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)

    return model


def shares(model, two=False):
    y = np.zeros((12, 2 if two else 1))
    return product_shares(ModelPotential(model, (X, y), key=jax.random.key(0)))


def exact(sd, variance=1.0, scale=1.0):
    covariance = variance * np.exp(-0.5 * ((X - X.T) / 0.5) ** 2) + 0.01 * np.eye(len(X))
    own = sd**2 * X.astype(float) @ X.T
    return np.trace(covariance @ np.linalg.solve(covariance + scale * own, own)) / np.trace(covariance)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_a_tempered_prior_leaves_another_share(scale):
    """The product has the precision s K⁻¹ + Q⁻¹."""
    found = shares(line(0.4, fs.GPPrior(KERNEL, nugget=0.01), scale=scale))["f"]
    assert abs(found - exact(0.4, scale=scale)) < 0.15 * exact(0.4, scale=scale)
    assert abs(found - exact(0.4)) > 0.15 * exact(0.4)


@pytest.mark.parametrize("sd", [0.2, 0.4])
def test_the_share_of_a_line_is_the_closed_form(sd):
    """Q = sd² x xᵀ, of which 400 draws know sd² to 7 %."""
    found = shares(line(sd, fs.GPPrior(KERNEL, nugget=0.01)))["f"]
    assert abs(found - exact(sd)) < 0.15 * exact(sd)
    assert abs(found - exact(2.0 * sd)) > 0.15 * exact(sd)  # what wider weights would have


def test_outputs_with_processes_of_their_own():
    prior = fs.GPPrior([KERNEL, 4.0 * KERNEL], nugget=0.01, num_outputs=2)
    found = shares(line(1.0, prior, num_outputs=2), two=True)["f"]
    expected = (1.01 * exact(1.0) + 4.01 * exact(1.0, variance=4.0)) / 5.02  # each by its variance
    assert abs(found - expected) < 0.15 * expected


def test_random_points_are_judged_at_one_draw():
    found = shares(line(0.4, fs.GPPrior(KERNEL, nugget=0.01), points=fs.measurement.uniform(-1.0, 1.0, 12)))["f"]
    assert 0.5 * exact(0.4) < found < 2.0 * exact(0.4)


@pytest.mark.slow
def test_only_products_are_judged():
    def network(x, y=None):
        f = fs.gp_network("f", nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)]), fs.GPPrior(KERNEL), X)
        numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)

    calibrated = fs.priors.NetworkPrior(lambda key, x: jax.random.normal(key) * x[:, 0], jax.random.key(0))
    assert shares(network) == {}
    assert shares(line(1.0, fs.priors.CalibratedPrior(fs.GPPrior(KERNEL), calibrated))) == {}


def test_a_small_share_is_a_doubt_that_names_the_cure():
    (text,) = product_doubts({"f": 0.2, "g": 0.8})
    assert "functional_prior('f')" in text and "20 %" in text and "fs.gp_network" in text


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.1, None])
def test_the_report_has_it(sd):
    """A network of small weights; and none where weights are so wide that the process rules."""

    def model(x, y=None):
        net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        prior = fs.fan_in(5.0) if sd is None else dist.Normal(0.0, sd)
        f = fs.functional_prior("f", fs.random_module("net", net, input_shape=1, prior=prior), fs.GPPrior(KERNEL), X)
        numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)

    mcmc = fs.MCMC(fs.fSGHMC(model), num_warmup=50, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), X, np.sin(3.0 * X))
    report = fs.report(mcmc)
    assert any("fs.gp_network" in text for text in report.advice) == (sd == 0.1)
    assert f"{100 * report.product_shares['f']:.0f} % under f" in str(report)
