"""Draws that lack latent values of the model are refused, where the prior would silently take their place."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import NOISE, POINTS, Independent, X, Y, line, run
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive
from numpyro.infer.reparam import LocScaleReparam

import numpyro_fspace as fs

KEY = jax.random.key(0)


def network(x, y=None):
    f = fs.random_module("net", nn.Dense(1), input_shape=1)
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 0.1))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma).to_event(1), obs=y)


@pytest.fixture(scope="module")
def exported():
    """The default export of a run, as a dict of draws: it leaves the weights out."""
    posterior = fs.to_arviz(run(fs.SGHMC(network, step_size=0.01)))["posterior"]
    return {k: v.values.reshape(-1, *v.shape[2:]) for k, v in posterior.data_vars.items()}


@pytest.mark.slow
def test_a_default_export_is_no_posterior(exported):
    assert set(exported) == {"net", "sigma"}
    for use in (
        lambda: fs.predict(exported, KEY, X, model=network),
        lambda: fs.predict(exported, KEY, X, model=network, inputs=X),
        lambda: fs.predict(fs.Posterior(network, exported, args=(X, Y)), KEY, X),
        lambda: fs.to_arviz(fs.Posterior(network, exported, args=(X, Y))),
        lambda: fs.to_arviz(fs.Posterior(network, exported, args=(X, Y)), log_lik=False),
    ):
        with pytest.raises(ValueError, match=r"lack the latent sites \['net.bias', 'net.kernel'\].*weights=True"):
            use()


@pytest.mark.slow
def test_an_export_with_weights_is_one():
    mcmc = run(fs.SGHMC(network, step_size=0.01))
    posterior = fs.to_arviz(mcmc, weights=True, log_lik=False)["posterior"]
    draws = {k: v.values.reshape(-1, *v.shape[2:]) for k, v in posterior.data_vars.items()}
    for given in (draws, {k: v for k, v in draws.items() if k != "net"}):
        np.testing.assert_array_equal(fs.predict(given, KEY, X, model=network)["y"], fs.predict(mcmc, KEY, X)["y"])


def flat_weights(x, y=None):
    f = fs.random_module("net", nn.Dense(1), input_shape=1, prior=fs.model.flat())
    numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)


def reparametrized(x, y=None):
    with handlers.reparam(config={"net.kernel": LocScaleReparam(0)}):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)
    numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)


@pytest.mark.parametrize(("model", "name"), [(flat_weights, "net.kernel"), (reparametrized, "net.kernel_decentered")])
def test_weights_of_any_prior_are_missed(model, name):
    with pytest.raises(ValueError, match=f"lack the latent sites.*'{name}'"):
        fs.predict({"net.bias": np.zeros((3, 1), np.float32)}, KEY, X, model=model)


def scaled(x, y=None):
    """A function that is no network, and a scale that its likelihood alone needs."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 0.1))
    f = fs.functional_prior("f", line(w), Independent(), POINTS)
    y = numpyro.sample("y", dist.Normal(f(x), sigma).to_event(1), obs=y)
    numpyro.deterministic("twice", 2.0 * y)


W, SIGMA = np.ones((3, 2), np.float32), np.ones(3, np.float32)


def test_every_latent_site_is_missed_and_no_observation():
    with pytest.raises(ValueError, match=r"lack the latent sites \['sigma'\]"):
        fs.predict({"w": W}, KEY, X, model=scaled)
    with pytest.raises(ValueError, match=r"lack the latent sites \['w'\]"):
        fs.predict({"sigma": SIGMA}, KEY, X, model=scaled)
    found = fs.predict({"w": W, "sigma": SIGMA}, KEY, X, model=scaled)
    np.testing.assert_allclose(found["twice"], 2.0 * found["y"], rtol=1e-6)


def test_functions_alone_miss_their_latent_values():
    def model(x):
        w, v = (numpyro.sample(k, dist.Normal().expand([2]).to_event(1)) for k in "wv")
        fs.functional_prior("f", line(w + v), Independent(), POINTS)

    with pytest.raises(ValueError, match=r"lack the latent sites \['v'\]"):
        fs.predict({"w": W}, KEY, X, model=model)


def test_sites_from_the_prior_are_named():
    found = fs.predict({"w": np.ones((400, 2), np.float32)}, KEY, X, model=scaled, from_prior=["sigma"])
    assert np.std(np.log(found["sigma"])) == pytest.approx(0.1, abs=0.02)
    replaced = fs.predict({"w": W, "sigma": 100.0 * SIGMA}, KEY, X, model=scaled, from_prior="sigma")
    assert replaced["sigma"].max() < 1.0
    with pytest.raises(ValueError, match=r"from_prior: \['s'\] are no latent sites of the model"):
        fs.predict({"w": W}, KEY, X, model=scaled, from_prior=["s"])
    with pytest.raises(ValueError, match="leaves no draws"):
        fs.predict({"w": W}, KEY, X, model=scaled, from_prior=["w"])


@pytest.mark.slow
def test_a_run_that_dropped_a_site_can_have_it_from_the_prior():
    mcmc = run(fs.SGHMC(scaled, step_size=0.01), extra_fields=("~z.sigma",))
    with pytest.raises(ValueError, match=r"did not keep the draws of \['sigma'\].*from_prior=\['sigma'\]"):
        fs.predict(mcmc, KEY, X)
    assert fs.predict(mcmc, KEY, X, from_prior=["sigma"])["sigma"].shape == (4,)


def effects(x, y=None, *, new=False):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    shift = numpyro.sample("shift", dist.Normal(0.0, 0.1)) if new else 0.0
    with numpyro.plate("rows", len(x)):
        effect = numpyro.sample("effect", dist.Normal(0.0, 0.1))
        numpyro.sample("y", dist.Normal(line(w)(x) + effect + shift, 0.01), obs=y)


def test_values_of_rows_are_drawn_anew_where_that_is_asked_for():
    draws = {"w": W, "effect": np.zeros((3, len(X)), np.float32)}
    posterior = fs.Posterior(effects, draws, args=(X, Y))
    with pytest.raises(
        ValueError, match=r"'effect' have shape \(8,\), but the model has \(5,\).*from_prior=\['effect'\]"
    ):
        fs.predict(posterior, KEY, X[:5])
    found = fs.predict(posterior, KEY, X[:5], from_prior=["effect"])
    np.testing.assert_allclose(found["y"], line(W[0])(X[:5]) + found["effect"], atol=0.06)
    assert 0.05 < np.std(found["effect"]) < 0.2


def test_a_latent_value_that_the_fit_did_not_have_is_new():
    """Nothing need be said where the arguments of the fit are known."""
    posterior = fs.Posterior(effects, {"w": W, "effect": np.zeros((3, len(X)), np.float32)}, args=(X, Y))
    assert fs.predict(posterior, KEY, X, new=True)["shift"].shape == (3,)
    with pytest.raises(ValueError, match=r"lack the latent sites \['effect'\]"):
        fs.predict(fs.Posterior(effects, {"w": W}, args=(X, Y)), KEY, X)


def walk(x, y=None):
    """Observations of which one depends on the last, inside a scan."""
    rate = numpyro.sample("rate", dist.Normal())

    def step(last, y):
        return numpyro.sample("y", dist.Normal(rate * last, 0.1), obs=y), None

    scan(step, 0.0, y, length=len(x))


def test_observations_of_a_scan_are_observations():
    assert fs.predict({"rate": SIGMA}, KEY, X, model=walk)["y"].shape == (3, 8)


def test_draws_of_the_prior_are_complete():
    draws = Predictive(scaled, num_samples=5)(KEY, X)
    del draws["y"]
    assert fs.predict(draws, KEY, X, model=scaled)["y"].shape == (5, 8)


def test_draws_of_another_shape_are_refused():
    """Though it would broadcast."""
    draws = {"w": jnp.ones((3, 2)), "sigma": jnp.ones((3, 8))}
    with pytest.raises(ValueError, match=r"draws of 'sigma' have shape \(8,\), but the model has \(\)"):
        fs.predict(draws, KEY, X, model=scaled)


def line_with_hidden(names):
    def model(x, y=None):
        with handlers.block(hide=names):
            a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal())
            numpyro.deterministic("ratio", a / b)
            numpyro.sample("y", dist.Normal(a + b * x[:, 0], NOISE).to_event(1), obs=y)

    return model


@pytest.mark.parametrize("names", [["b"], ["a", "b"], ["ratio", "b"]])
def test_sites_that_block_hides_are_refused(names):
    """They come from the prior: as they are sampled, and as draws of other kernels are used."""
    for model in (line_with_hidden(names), handlers.block(line_with_hidden([]), hide=names)):
        with pytest.raises(ValueError, match=r"block hides the latent site '.'.*numpyro.handlers.condition"):
            run(fs.SGHMC(model, step_size=0.01))
        draws = {"a": np.ones(3, np.float32)}
        fitted = fs.Posterior(model, draws, args=(X, Y))
        for use in (
            lambda fitted=fitted: fs.predict(fitted, KEY, X),
            lambda fitted=fitted: fs.to_arviz(fitted),
            lambda model=model, draws=draws: fs.predict(draws, KEY, X, model=model),
        ):
            with pytest.raises(ValueError, match=r"hides the latent sites \[.*'b'\].*from_prior"):
                use()
    if names == ["b"]:
        assert set(fs.predict(fitted, KEY, X, from_prior="b")) == {"ratio", "y"}


def test_a_hidden_weight_is_refused():
    with pytest.raises(ValueError, match=r"block hides the latent site 'net.kernel'"):
        run(fs.SGHMC(handlers.block(network, hide=["net.kernel"]), step_size=0.01))


@pytest.mark.slow
def test_block_may_hide_what_is_no_latent_value():
    draws = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    for names, left in ((["y"], {"ratio"}), (["ratio"], {"y"}), (["y", "ratio"], set())):
        assert set(fs.predict(draws, KEY, X, model=line_with_hidden(names))) == left

    def noisy(x, y=None):
        a = numpyro.sample("a", dist.Normal())
        with handlers.block():
            error = 0.01 * jax.random.normal(numpyro.prng_key())
        numpyro.sample("y", dist.Normal(a + error, NOISE).expand(x[:, 0].shape).to_event(1), obs=y)

    assert set(run(fs.SGHMC(noisy, step_size=0.01)).get_samples()) == {"a"}
