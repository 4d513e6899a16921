"""svi_posterior: one object from a fit to predict and ArviZ, with the functions that were fitted."""

from __future__ import annotations

import functools

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from models import NOISE, POINTS, X, Y
from numpyro.infer import SVI, Trace_ELBO

import numpyro_fspace as fs

KEY = jax.random.key(0)


def curved(x, y=None, *, functional=True):
    w = numpyro.sample("w", dist.Normal(0.5, 1.0))
    scale = numpyro.param("scale", 3.0)

    def f(x):
        return scale * jax.numpy.sin(w * x[:, 0])

    if functional:
        f = fs.functional_prior("f", f, fs.GPPrior(lambda a, b: 1.0 + a @ b.T), POINTS)
    numpyro.sample("y", dist.Normal(f(x), NOISE).to_event(1), obs=y)


def fitted(loss, **settings):
    guide = fs.variational.guides.mean_field(curved)
    svi = SVI(curved, guide, optax.adam(0.05), loss, **settings)
    params = svi.run(KEY, 50, X, Y, progress_bar=False).params
    return svi, params, fs.svi_posterior(svi, params, jax.random.key(1), X, Y, num_samples=40)


@pytest.mark.slow
def test_predictions_are_of_the_linearized_function_with_the_learned_parameters():
    svi, params, posterior = fitted(fs.FunctionalELBO())
    w, m = posterior.samples["w"], float(svi.guide.median(params)["w"])
    scale, x = float(params["scale"]), X[:, 0]
    assert abs(scale - 3.0) > 0.1 and w.shape == (40,)
    expected = scale * (np.sin(m * x) + np.cos(m * x) * x * (w[:, None] - m))
    np.testing.assert_allclose(fs.predict(posterior, KEY, X)["f"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_divergence_by_draws_leaves_the_network_as_it_is():
    _, params, posterior = fitted(fs.FunctionalELBO(fs.variational.SpectralSteinKL(num_draws=10)))
    expected = float(params["scale"]) * np.sin(posterior.samples["w"][:, None] * X[:, 0])
    np.testing.assert_allclose(fs.predict(posterior, KEY, X)["f"], expected, rtol=1e-3, atol=1e-4)


def test_guides_that_are_plain_functions():
    def guide(x, y=None):
        numpyro.sample("w", dist.Normal(numpyro.param("loc", 0.5), 1e-4))

    svi = SVI(functools.partial(curved, functional=False), guide, optax.adam(0.05), Trace_ELBO())
    params = svi.run(KEY, 20, X, Y, progress_bar=False).params
    posterior = fs.svi_posterior(svi, params, KEY, X, Y, num_samples=5)
    assert set(posterior.samples) == {"w"}
    np.testing.assert_allclose(posterior.samples["w"], np.full(5, params["loc"]), atol=1e-3)


@pytest.mark.slow
def test_arviz_reads_it():
    data = fs.to_arviz(fitted(fs.FunctionalELBO())[2])
    assert set(data["constant_data"].data_vars) == {"x", "probe_inputs"}
    assert data["posterior"]["f"].shape == (1, 40, 8) and data["log_likelihood"]["y"].shape[:2] == (1, 40)
    assert len(az.summary(data, var_names=["w"])) == 1


def test_another_model_may_be_given():
    posterior = fs.Posterior(curved, {"w": np.ones(3)})
    given = fs.predict(
        posterior, KEY, X, model=lambda x: numpyro.deterministic("d", numpyro.sample("w", dist.Normal()))
    )
    np.testing.assert_allclose(given["d"], np.ones(3))


def test_a_model_may_close_over_its_data():
    def model():
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w * X[:, 0], 1.0).to_event(1), obs=Y)

    data = fs.to_arviz(fs.Posterior(model, {"w": np.ones(5, np.float32)}))
    assert data["posterior"]["w"].shape == (1, 5) and data["observed_data"]["y"].shape == Y.shape


def test_an_argument_may_be_called_inputs():
    def model(inputs, y=None):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w * inputs[:, 0], 1.0), obs=y)

    posterior = fs.Posterior(model, {"w": np.ones(5, np.float32)}, kwargs={"inputs": X, "y": Y})
    data = fs.to_arviz(posterior)
    assert data["log_likelihood"]["y"].shape == data["posterior_predictive"]["y"].shape == (1, 5, len(X))


def test_fields_by_position_work_and_warn():
    with pytest.warns(DeprecationWarning, match="num_chains=, args= by keyword"):
        posterior = fs.Posterior(curved, {"w": np.zeros(4)}, 2, (X,))
    assert posterior.num_chains == 2 and posterior.args == (X,)
    assert repr(posterior) == "Posterior(curved, num_draws=4, num_chains=2, num_sites=1)"


def test_bad_input():
    with pytest.raises(ValueError, match="same leading axis"):
        fs.Posterior(curved, {"w": np.zeros(3), "v": np.zeros(4)})
    with pytest.raises(ValueError, match="does not hold the arguments"):
        fs.to_arviz(fs.Posterior(curved, {"w": np.zeros(3)}))
    with pytest.raises(TypeError, match="MCMC object, a Posterior or a dict"):
        fs.predict("run", KEY, X)
    with pytest.raises(TypeError, match="needs the MCMC object"):
        fs.to_arviz({"w": np.zeros(3)})
    svi, params, _ = fitted(fs.FunctionalELBO())
    with pytest.raises(ValueError, match="num_samples"):
        fs.svi_posterior(svi, params, KEY, X, Y, num_samples=0)


def groups(t, group, y=None):
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal())
    with numpyro.plate("rows", len(t)):
        numpyro.sample("y", dist.Normal(a[group] * t, 0.3), obs=y)


@pytest.mark.parametrize("array", [np.asarray, jax.numpy.asarray])
def test_latents_may_be_indexed_by_arguments(array):
    """As in every hierarchical model: in ArviZ the plate of groups is a dimension, and each row has its likelihood."""
    rng = np.random.default_rng(0)
    t, group, y = rng.normal(size=30), array(np.arange(30) % 4), rng.normal(size=30)
    a = rng.normal(size=(6, 4))
    posterior = fs.Posterior(groups, {"a": a}, args=(t, group, y))
    tree = fs.to_arviz(posterior)
    mean = a[:, np.asarray(group)] * t
    exact = -0.5 * ((y - mean) / 0.3) ** 2 - np.log(0.3 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(np.asarray(tree["log_likelihood"]["y"])[0], exact, rtol=1e-4, atol=1e-4)
    assert fs.predict(posterior, jax.random.key(0), t[:5], group[:5])["y"].shape == (6, 5)


class Cauchyish(dist.Distribution):
    """A likelihood without ``sample``, as users write them."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(batch_shape=jax.numpy.shape(loc))

    def log_prob(self, value):
        return -jax.numpy.log1p((value - self.loc) ** 2)


def test_observations_that_cannot_be_drawn_are_left_out():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        f = numpyro.deterministic("f", w * x)
        numpyro.sample("y", Cauchyish(f), obs=y)

    x, w = np.linspace(-1.0, 1.0, 5), np.arange(3.0)
    posterior = fs.Posterior(model, {"w": w}, args=(x, np.zeros(5)))
    for given in ((x,), (x, np.zeros(5))):
        with pytest.warns(RuntimeWarning, match=r"\['y'\] cannot be drawn, as Cauchyish has no method sample"):
            found = fs.predict(posterior, jax.random.key(0), *given)
        assert set(found) == {"f"}
        np.testing.assert_allclose(found["f"], w[:, None] * x, rtol=1e-6)
    with pytest.warns(RuntimeWarning, match="cannot be drawn"):
        tree = fs.to_arviz(posterior)
    np.testing.assert_allclose(np.asarray(tree["log_likelihood"]["y"])[0], -np.log1p((w[:, None] * x) ** 2), rtol=1e-5)


def test_draws_that_are_traced_are_refused():
    def inside(w):
        return fs.Posterior(groups, {"a": w}, args=(np.ones(4), np.arange(4), np.ones(4)))

    with pytest.raises(TypeError, match=r"The draws are traced: .*Return mcmc\.get_samples\(\)"):
        jax.jit(inside)(np.ones((3, 4)))
    with pytest.raises(ValueError, match="samples is empty: pass the draws of all latent sites"):
        fs.Posterior(groups, {})


def test_deterministic_sites_among_the_draws_are_computed_anew():
    """Draws of NumPyro's MCMC include them, at the inputs of the run."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        f = numpyro.deterministic("f", w * x)
        numpyro.sample("y", dist.Normal(f, 1e-3), obs=y)

    x, w = np.linspace(-1.0, 1.0, 4), np.arange(1.0, 4.0)
    posterior = fs.Posterior(model, {"w": w, "f": w[:, None] * x}, args=(x, np.zeros(4)))
    for new in (10 * x, np.linspace(0.0, 3.0, 7)):
        found = fs.predict(posterior, jax.random.key(0), new)
        np.testing.assert_allclose(found["f"], w[:, None] * new, rtol=1e-5)
        np.testing.assert_allclose(found["y"], found["f"], atol=0.01)


class Undrawable(dist.Normal):
    """A prior from which nothing can be drawn."""

    sample = dist.Distribution.sample


def test_what_comes_from_the_prior_must_be_drawable():
    def model(x, y=None):
        w, b = numpyro.sample("w", Undrawable()), numpyro.sample("b", dist.Normal())
        numpyro.sample("y", dist.Normal(w * x + b, 1.0), obs=y)

    posterior = fs.Posterior(model, {"b": np.ones(3)}, args=(np.ones(4), np.ones(4)))
    with pytest.raises(ValueError, match=r"\['w'\] cannot be drawn, as Undrawable has no method sample.*pass draws"):
        fs.predict(posterior, jax.random.key(0), np.ones(4), from_prior=["w"])
