"""to_arviz: what ArviZ 0.23 and 1.x are given, and that their functions work on it."""

from __future__ import annotations

import arviz as az
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from models import NOISE, POINTS, X, Y, linear, random_points, run
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

import numpyro_fspace as fs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The chain runs hot:RuntimeWarning")


def run_on(model, **settings):
    kernel = fs.SGHMC(model, step_size=0.02, num_steps=5)
    return run(kernel, num_chains=2, chain_method="vectorized", num_samples=60, **settings)


@pytest.fixture(scope="module")
def mcmc():
    return run_on(linear(random_points(), batch=4), extra_fields=("potential_energy", "step_size"))


@pytest.fixture(scope="module")
def data(mcmc):
    return fs.to_arviz(mcmc)


def names(data, group):
    return set(data[group].data_vars)


def test_groups(data):
    """The functional prior is a function of the posterior and nowhere among the data."""
    assert names(data, "posterior") == {"w", "f"}
    assert names(data, "posterior_predictive") == names(data, "log_likelihood") == names(data, "observed_data") == {"y"}
    assert names(data, "constant_data") == {"x", "probe_inputs"}
    assert names(data, "sample_stats") == {"diverging", "lp", "step_size"}


def test_functions_are_those_at_the_probes(data, mcmc):
    """Chains and draws in their places; the data's rows, all 8 of them, are the probes."""
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    np.testing.assert_array_equal(data["constant_data"]["probe_inputs"].values, X)
    np.testing.assert_allclose(
        data["posterior"]["f"].values, draws[..., :1] + draws[..., 1:] * X[:, 0], rtol=1e-4, atol=1e-5
    )


def test_log_likelihood_and_data_are_full(data, mcmc):
    """In spite of minibatches of 4."""
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    expected = scipy.stats.norm.logpdf(Y, draws[..., :1] + draws[..., 1:] * X[:, 0], NOISE)
    np.testing.assert_allclose(data["log_likelihood"]["y"].values, expected, rtol=1e-3)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, Y)
    assert data["posterior_predictive"]["y"].shape == (2, 60, 8)


def test_predictions_are_those_of_their_draws(data):
    """What is left without f, of 960 values, is the noise: Kolmogorov-Smirnov, false alarms 1e-5."""
    noise = data["posterior_predictive"]["y"].values - data["posterior"]["f"].values
    assert scipy.stats.kstest(noise.ravel() / NOISE, "norm").pvalue > 1e-5


def test_lp_is_minus_the_potential(data, mcmc):
    energy = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["potential_energy"])
    np.testing.assert_allclose(data["sample_stats"]["lp"].values, -energy)


def test_arviz_works_on_it(data):
    """loo needs no var_name, as there is one likelihood; summary, rhat and ess speak of functions."""
    assert np.isfinite(az.loo(data).elpd_loo if hasattr(az.loo(data), "elpd_loo") else az.loo(data).elpd)
    assert len(az.summary(data, var_names=["f"])) == 8
    assert np.isfinite(np.asarray(az.rhat(data, var_names=["f"])["f"])).all()


def test_a_model_without_arguments():
    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w, 1.0).expand(Y.shape), obs=Y)

    mcmc = fs.MCMC(fs.SGHMC(model, step_size=0.1), num_warmup=5, num_samples=7, progress_bar=False)
    mcmc.run(jax.random.key(0))
    assert fs.to_arviz(mcmc).posterior["w"].shape == (1, 7)


def test_own_probes_and_no_likelihood(mcmc):
    new = np.array([[0.0], [5.0]], np.float32)
    data = fs.to_arviz(mcmc, inputs=new, log_lik=False)
    assert data["posterior"]["f"].shape == (2, 60, 2)
    np.testing.assert_array_equal(data["constant_data"]["probe_inputs"].values, new)
    assert not hasattr(data, "log_likelihood") and not hasattr(data, "posterior_predictive")
    some = fs.to_arviz(mcmc, num_probes=3, log_lik=False)
    assert some["posterior"]["f"].shape == (2, 60, 3)
    np.testing.assert_array_equal(some["constant_data"]["probe_inputs"].values, X[[0, 3, 7]])


@pytest.fixture(scope="module")
def network_run():
    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)
        fs.functional_prior("prior/f", lambda x: f(x)[:, 0], fs.GPPrior(unit_kernel), POINTS)
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.1))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], noise).to_event(1), obs=y)

    return run_on(model)


def unit_kernel(x1, x2):
    return 1.0 + x1 @ x2.T


def test_weights_are_hidden_unless_asked_for(network_run):
    """Functions stand for the weights. Names with a slash, which ArviZ 1.x refuses, have a dot."""
    functions = {"net", "prior.f", "noise"}
    assert names(fs.to_arviz(network_run, log_lik=False), "posterior") == functions
    full = fs.to_arviz(network_run, weights=True, log_lik=False)
    assert names(full, "posterior") == functions | {"net.kernel", "net.bias"}


def test_weights_of_a_reparametrised_network_are_hidden_too():
    def model(x, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        with handlers.reparam(config={"net.kernel": LocScaleReparam(0), "net.bias": LocScaleReparam(0)}):
            f = fs.random_module("net", nn.Dense(1), input_shape=1, prior=dist.Normal(0.0, scale))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)

    mcmc = run_on(model)
    assert "net.kernel_decentered" in mcmc.get_samples()
    assert names(fs.to_arviz(mcmc), "posterior") == {"net", "scale"}
    assert "net.kernel_decentered" in names(fs.to_arviz(mcmc, weights=True), "posterior")


def own_minibatch(x, y=None):
    rows = jax.random.randint(numpyro.prng_key(), (3,), 0, len(x))
    w = numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", 3), handlers.scale(scale=len(x) / 3):
        numpyro.sample("y", dist.Normal(w * x[rows, 0], 1.0), obs=None if y is None else y[rows])


def test_a_model_that_draws_its_own_rows_has_no_pointwise_log_likelihood():
    posterior = fs.Posterior(own_minibatch, {"w": np.zeros(4, np.float32)}, args=(X, Y))
    with pytest.raises(ValueError, match=r"to_arviz: the model draws the rows of \['y'\] itself"):
        fs.to_arviz(posterior)
    data = fs.to_arviz(posterior, log_lik=False)
    assert names(data, "posterior") == {"w"} and not hasattr(data, "observed_data")


def imputed(x, y):
    noise = numpyro.sample("noise", dist.HalfNormal())
    missing = numpyro.sample("missing", dist.Normal().expand([1]).to_event(1))
    numpyro.sample("y", dist.Normal(x[:, 0], noise).to_event(1), obs=jnp.where(jnp.isnan(y), missing, y))


def test_imputed_targets_are_no_rows_drawn_anew():
    draws = {"noise": np.ones(4, np.float32), "missing": np.zeros((4, 1), np.float32)}
    y = np.where(np.arange(len(Y)) == 1, np.nan, Y)
    data = fs.to_arviz(fs.Posterior(imputed, draws, args=(X, y)))
    assert names(data, "log_likelihood") == names(data, "observed_data") == {"y"}
