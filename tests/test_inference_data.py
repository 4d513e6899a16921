"""to_arviz: what ArviZ 0.23 and 1.x are given, and that their functions work on it."""

from __future__ import annotations

import warnings

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

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The kinetic temperature:RuntimeWarning")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_are_hidden_unless_asked_for(network_run):
    """Functions stand for the weights. Names with a slash, which ArviZ 1.x refuses, have a dot."""
    functions = {"net", "prior.f", "noise"}
    assert names(fs.to_arviz(network_run, log_lik=False), "posterior") == functions
    full = fs.to_arviz(network_run, weights=True, log_lik=False)
    assert names(full, "posterior") == functions | {"net.kernel", "net.bias"}


@pytest.mark.slow
def test_weights_of_a_reparametrized_network_are_hidden_too():
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


# ---- points that do not count, plates, weights that are fixed ----------------------------------------------

KNOWN = np.array([True, False, True, True, False, True, True, True])
HOLES = np.stack([KNOWN, np.ones(8, bool)], 1)


def regression(observe):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        observe(w * x[:, 0], y)

    return model


def export(observe, y, **settings):
    draws = np.linspace(0.0, 1.0, 40, dtype=np.float32)
    return fs.to_arviz(fs.Posterior(regression(observe), {"w": draws}, args=(X, y)), **settings)


def under(handler):
    def observe(f, y):
        with handler(), numpyro.plate("rows", 8):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return observe


MASKED = {
    "handlers.mask": under(lambda: handlers.mask(mask=KNOWN)),
    "a scale of 0": under(lambda: handlers.scale(scale=jnp.where(KNOWN, 2.0, 0.0))),
    "dist.mask": lambda f, y: numpyro.sample("y", dist.Normal(f, NOISE).mask(KNOWN), obs=y),
    "obs_mask": None,
}


def with_obs_mask(x, y=None):
    w = numpyro.sample("w", dist.Normal())
    numpyro.sample("y", dist.Normal(w * x[:, 0], NOISE), obs=y, obs_mask=jnp.asarray(KNOWN))


@pytest.mark.parametrize("kind", MASKED)
def test_masked_rows_are_no_data(kind):
    """Each of the kept rows has the likelihood of its own, and LOO counts them alone."""
    y = np.where(KNOWN, Y, 99.0).astype(np.float32)
    if kind == "obs_mask":
        draws = {"w": np.linspace(0.0, 1.0, 40, dtype=np.float32), "y_unobserved": np.zeros((40, 8), np.float32)}
        data, name = fs.to_arviz(fs.Posterior(with_obs_mask, draws, args=(X, y))), "y_observed"
    else:
        data, name = export(MASKED[kind], y), "y"
    expected = scipy.stats.norm.logpdf(Y, np.linspace(0.0, 1.0, 40)[:, None] * X[:, 0], NOISE)[:, KNOWN]
    np.testing.assert_allclose(data["log_likelihood"][name].values[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(data["observed_data"][name].values, Y[KNOWN])
    assert data["posterior_predictive"][name].shape == (1, 40, 6)
    (dim,) = data["observed_data"][name].dims
    for group in ("log_likelihood", "observed_data", "posterior_predictive"):
        np.testing.assert_array_equal(data[group][name].coords[dim].values, np.flatnonzero(KNOWN))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert az.loo(data).n_data_points == 6


def test_points_that_are_no_rows_are_listed():
    def observe(f, y):
        with handlers.mask(mask=HOLES):
            numpyro.sample("y", dist.Normal(f[:, None], NOISE).expand([8, 2]), obs=y)

    y = np.where(HOLES, np.stack([Y, 2 * Y], 1), 99.0).astype(np.float32)
    data = export(observe, y)
    assert data["log_likelihood"]["y"].shape == (1, 40, 14)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, y[HOLES])
    np.testing.assert_array_equal(data["observed_data"]["y"].coords["y_point"].values, np.flatnonzero(HOLES))


def test_a_factor_of_the_data_is_named():
    """It has no rows for ArviZ. A factor of latent values alone is a prior."""
    draws = {"w": np.linspace(0.0, 1.0, 40, dtype=np.float32)}

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        numpyro.factor("prior", -(w**2))
        numpyro.factor("censored", dist.Normal(w * x[:, 0], NOISE).log_prob(2.0))
        numpyro.sample("y", dist.Normal(w * x[:, 0], NOISE), obs=y)

    with pytest.warns(RuntimeWarning, match=r"leaves out numpyro.factor 'censored', whose rows"):
        fs.to_arviz(fs.Posterior(model, draws, args=(X, Y)))


def test_masked_parts_of_a_point_are_not_observed():
    """A mask of columns inside to_event: every row still counts, by the columns that are left."""

    def observe(f, y):
        numpyro.sample("y", dist.Normal(f[:, None], NOISE).expand([8, 2]).mask(HOLES).to_event(1), obs=y)

    y = np.where(HOLES, np.stack([Y, 2 * Y], 1), 99.0).astype(np.float32)
    data = export(observe, y)
    assert data["log_likelihood"]["y"].shape == (1, 40, 8)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, np.where(HOLES, y, np.nan))


def test_a_likelihood_that_is_masked_as_a_whole_is_none():
    data = export(under(lambda: handlers.mask(mask=False)), Y)
    assert not hasattr(data, "log_likelihood") and not hasattr(data, "observed_data")


def two_likelihoods(f, y, mask=True):
    with numpyro.plate("rows", 8):
        numpyro.sample("a", dist.Normal(f, NOISE), obs=y)
        with handlers.mask(mask=mask):
            numpyro.sample("b", dist.Normal(2.0 * f, NOISE), obs=y)


def test_likelihoods_of_one_plate_add_up_by_rows():
    pointwise = export(two_likelihoods, Y)["log_likelihood"]
    assert pointwise["a"].dims == pointwise["b"].dims == ("chain", "draw", "rows")
    assert (pointwise["a"] + pointwise["b"]).shape == (1, 40, 8)
    both = export(lambda f, y: handlers.mask(two_likelihoods, mask=KNOWN)(f, y), Y)["log_likelihood"]
    assert (both["a"] + both["b"]).shape == (1, 40, 6)
    other = export(lambda f, y: two_likelihoods(f, y, KNOWN), Y)["log_likelihood"]  # each has rows of its own
    assert other["a"].sizes["rows"] == 8 and other["b"].sizes["rows_b"] == 6


def nested(x, y=None):
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal().expand([3, 2]).to_event(1))
    with numpyro.plate("outputs", 2, dim=-1), numpyro.plate("rows", len(x), dim=-2):
        mean = numpyro.deterministic("mean", x * effect.sum(0))
        numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def test_dimensions_are_named_after_plates_or_by_hand():
    posterior = fs.Posterior(nested, {"effect": np.ones((4, 3, 2), np.float32)}, args=(X, np.stack([Y, Y], 1)))
    data = fs.to_arviz(posterior)
    assert data["posterior"]["effect"].dims == ("chain", "draw", "groups", "effect_dim_1")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "rows", "outputs")
    names = {"effect": ["groups", "outputs"], "y": ["time"], "x": ["time"]}
    coords = {"time": np.arange(8) * 0.5, "outputs": ["u", "v"]}
    data = fs.to_arviz(posterior, dims=names, coords=coords)
    assert data["posterior"]["effect"].sel(outputs="v").shape == (1, 4, 3)
    assert data["observed_data"]["y"].dims == ("time", "outputs") and data["constant_data"]["x"].dims[0] == "time"
    np.testing.assert_array_equal(data["log_likelihood"]["y"].coords["time"].values, coords["time"])


def test_deterministic_sites_are_those_of_the_arguments():
    """Draws hold those of the rows of the run, which are other rows than held-out ones, perhaps of equal number."""
    effect = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    x, y = X + 10.0, np.stack([Y, Y], 1)
    for draws in ({"effect": effect}, {"effect": effect, "mean": np.zeros((4, 8, 2), np.float32)}):
        for log_lik in (True, False):
            posterior = fs.to_arviz(fs.Posterior(nested, draws, args=(x, y)), log_lik=log_lik)["posterior"]
            np.testing.assert_allclose(posterior["mean"].values[0], x * effect.sum(1)[:, None], rtol=1e-5)
            assert posterior["mean"].dims == ("chain", "draw", "rows", "outputs")


def test_coordinates_of_rows_that_are_left():
    names = [f"row {i}" for i in range(8)]
    data = export(MASKED["handlers.mask"], Y, coords={"rows": names})
    assert list(data["observed_data"]["y"].coords["rows"].values) == [n for n, k in zip(names, KNOWN, strict=True) if k]


def test_wrong_names_of_dimensions():
    with pytest.raises(ValueError, match=r"dims: \['z'\] are no variables; there are"):
        export(two_likelihoods, Y, dims={"z": ["time"]})
    with pytest.raises(ValueError, match=r"coords: 'rows' has 8 rows, got coordinates of shape \(2,\)"):
        export(two_likelihoods, Y, coords={"rows": [0, 1]})


def test_sites_whose_names_would_be_one():
    def model(x, y=None):
        a, b = numpyro.sample("a/b", dist.Normal()), numpyro.sample("a.b", dist.Normal())
        numpyro.sample("y", dist.Normal(a + b * x[:, 0]), obs=y)

    posterior = fs.Posterior(model, {"a/b": np.zeros(6), "a.b": np.ones(6)}, args=(X, Y))
    with pytest.raises(ValueError, match=r"the sites '.*' and '.*' would both be 'a\.b': rename one"):
        fs.to_arviz(posterior)


def test_a_site_with_the_name_of_a_dimension():
    def model(x, y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("chain", dist.Normal()) * x[:, 0]), obs=y)

    with pytest.raises(ValueError, match=r"\['chain'\] are the names of ArviZ's dimensions of draws"):
        fs.to_arviz(fs.Posterior(model, {"chain": np.zeros(6)}, args=(X, Y)))


def test_coordinates_may_hold_nan():
    rows = np.where(np.arange(8) < 7, np.arange(8.0), np.nan)
    data = export(two_likelihoods, Y, coords={"rows": rows})
    assert data["observed_data"]["a"].dims == ("rows",)
    np.testing.assert_array_equal(data["observed_data"].coords["rows"], rows)


def pinned(prior=None, **data):
    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1, prior=prior)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE).to_event(1), obs=y)

    return handlers.condition(model, data=data) if data else model


@pytest.mark.slow
def test_a_weight_under_condition_is_no_data():
    mcmc = run_on(pinned(**{"net.bias": jnp.array([0.3])}))
    assert set(mcmc.get_samples()) == {"net.kernel"}
    data = fs.to_arviz(mcmc)
    assert names(data, "log_likelihood") == names(data, "observed_data") == names(data, "posterior_predictive") == {"y"}
    values = fs.predict(mcmc, jax.random.key(0), X)
    assert set(values) == {"net", "y"}
    expected = mcmc.get_samples()["net.kernel"][:, 0] * X[:, 0] + 0.3
    np.testing.assert_allclose(values["net"][..., 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.array([0.3]), 0.3, np.array([0.3], np.float16)], ids=["array", "number", "half"])
def test_a_weight_with_a_delta_prior_stays_where_it_is(value):
    mcmc = run_on(pinned({"kernel": dist.Normal(), "bias": dist.Delta(value)}))
    np.testing.assert_allclose(mcmc.get_samples()["net.bias"], np.full((120, 1), 0.3), rtol=1e-3)
    np.testing.assert_allclose(
        fs.predict(mcmc, jax.random.key(0), 0.0 * X)["net"], np.full((120, 8, 1), 0.3), rtol=1e-3
    )
    assert names(fs.to_arviz(mcmc), "posterior") == {"net"}


def test_values_that_would_not_stay_are_refused():
    with pytest.raises(ValueError, match=r"latent site 'w' has a Delta prior.*numpyro.deterministic\('w', value\)"):
        run_on(lambda x, y: numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Delta(0.3)), 1.0), obs=y[0]))
    transformed = dist.TransformedDistribution(dist.Delta(0.3), dist.transforms.ExpTransform())
    mixed = dist.MixtureGeneral(
        dist.Categorical(probs=jnp.array([0.5, 0.5])),
        [dist.TransformedDistribution(dist.Delta(0.0), dist.transforms.AffineTransform(0.0, 1.0)), dist.Normal()],
    )
    same = dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.5, 0.5])), dist.Delta(jnp.array([0.0, 1.0])))
    for law in (
        transformed,
        transformed.expand([2]).to_event(1),
        dist.FoldedDistribution(dist.Delta(0.3)),
        mixed,
        same,
    ):
        with pytest.raises(ValueError, match="latent site 'w' has a Delta prior, or one made of a Delta"):
            run_on(
                lambda x, y, law=law: numpyro.sample("y", dist.Normal(numpyro.sample("w", law).sum(), 1.0), obs=y[0])
            )
    substituted = handlers.substitute(pinned(), data={"net.bias": jnp.array([0.3])})
    with pytest.raises(ValueError, match=r"substitute with values of \['net.bias'\].*numpyro.handlers.condition"):
        run_on(substituted)
    with (
        handlers.substitute(data={"net.bias": jnp.array([0.3])}),
        pytest.raises(ValueError, match=r"substitute with values of \['net.bias'\]"),
    ):
        run_on(pinned())


@pytest.mark.parametrize("signs", [[-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
def test_points_under_a_mask_of_latent_values_are_data_where_a_draw_counts_them(signs):
    """Whatever the mask is at the median of the priors; a mask that is the same in all draws leaves its points out."""

    def model(x, y=None):
        gate = numpyro.sample("gate", dist.Normal())
        numpyro.sample("y", dist.Normal(x, 1.0).mask((gate > 0) & (x > -0.5)), obs=y)

    x = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    data = fs.to_arviz(fs.Posterior(model, {"gate": np.array(signs, np.float32)}, args=(x, x + 0.5)))
    is_counted = np.array(signs)[:, None] > 0
    expected = np.where(is_counted, -0.125 - 0.5 * np.log(2 * np.pi), np.zeros((2, 6)))
    np.testing.assert_allclose(data["log_likelihood"]["y"].values[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, x[2:] + 0.5)


def test_outputs_of_a_network_that_returns_several_are_exported():
    def init(key, shape):
        return {"w": jnp.ones(2)}

    def model(x, y=None):
        f = fs.random_module("f", (init, lambda p, x: (p["w"][0] * x, p["w"][1] * x)), input_shape=1)
        numpyro.sample("y", dist.Normal(f(x)[0][:, 0], 1.0).to_event(1), obs=y)

    draws = {"f.w": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)}
    for log_lik in (True, False):
        data = fs.to_arviz(fs.Posterior(model, draws, args=(X, Y)), log_lik=log_lik)
        np.testing.assert_allclose(data["posterior"]["f[1]"].values[0, :, :, 0], draws["f.w"][:, 1:] * X[:, 0])


def test_observations_computed_from_an_argument_are_not_that_argument():
    """Truth values and whole numbers, which are made from an array of numbers."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("any", dist.Bernoulli(logits=w * x).to_event(1), obs=y > 0)
        numpyro.sample("number", dist.Poisson(jnp.exp(w * x)).to_event(1), obs=jnp.floor(y).astype(int))

    x, y = np.arange(3, dtype=np.float32), np.array([0.0, 3.25, 1.5], np.float32)
    data = fs.to_arviz(fs.Posterior(model, {"w": np.zeros(4, np.float32)}, args=(x, y)))
    np.testing.assert_array_equal(data["observed_data"]["any"].values, [False, True, True])
    np.testing.assert_array_equal(data["observed_data"]["number"].values, [0, 3, 1])
    np.testing.assert_array_equal(data["constant_data"]["y"].values, y)


def test_sites_that_begin_as_a_network_does_are_no_weights():
    def model(x, y=None):
        f = fs.random_module("f", nn.Dense(1), input_shape=1)
        sigma = numpyro.sample("f.kernel_sd", dist.HalfNormal())
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma).to_event(1), obs=y)

    draws = {"f.kernel": np.ones((4, 1, 1)), "f.bias": np.ones((4, 1)), "f.kernel_sd": np.ones(4)}
    draws = {k: v.astype(np.float32) for k, v in draws.items()}
    assert names(fs.to_arviz(fs.Posterior(model, draws, args=(X, Y))), "posterior") == {"f", "f.kernel_sd"}


def test_arguments_have_the_names_of_their_parameters():
    def model(x, *more, y=None, w=None):
        slope = numpyro.sample("slope", dist.Normal())
        numpyro.sample("y", dist.Normal(slope * (x + sum(more)), 1.0).to_event(1), obs=y)

    x = np.arange(3, dtype=np.float32)
    posterior = fs.Posterior(model, {"slope": np.zeros(4, np.float32)}, args=(x, x + 10, x + 20), kwargs={"y": x + 5})
    found = fs.to_arviz(posterior)["constant_data"]
    assert set(found.data_vars) == {"x", "more_0", "more_1"}
    np.testing.assert_array_equal(found["more_1"].values, x + 20)
