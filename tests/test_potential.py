"""The potential of a model: closed forms, unbiased minibatches, fresh randomness, what is constrained."""

from __future__ import annotations

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
import tinygp
from models import NOISE, POINTS, Revealing, X, Y, linear, random_points

import numpyro_fspace as fs
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.scale_sites import scale_sites

W = jnp.array([0.4, -0.7])
KEYS = jax.random.split(jax.random.key(0), 2000)


def potential(model, *args, **kwargs):
    return ModelPotential(model, args or (X, Y), kwargs, key=jax.random.key(0))


def energy_by_scipy(w=W):
    """-log p(y | w) - log p(w) of the linear model, for each observation and for the weights."""
    w = np.asarray(w, float)
    likelihood = -scipy.stats.norm.logpdf(Y, w[0] + w[1] * X[:, 0], NOISE)
    return likelihood, -scipy.stats.norm.logpdf(w).sum()


@pytest.mark.slow
def test_a_distribution_that_is_no_tree_of_jax():
    """tinygp's, of which JAX cannot list the arrays, with random hyperparameters."""
    x, y = np.linspace(0.0, 1.0, 6), np.sin(np.arange(6.0))

    def model(x, y):
        s = numpyro.sample("s", dist.HalfNormal())
        gp = tinygp.GaussianProcess(tinygp.kernels.Matern52(0.5), x, diag=s**2)
        numpyro.sample("y", gp.numpyro_dist(), obs=y)

    found = ModelPotential(model, (x, y), key=jax.random.key(0))
    found.check_data()
    values = {"s": jnp.asarray(0.3)}
    expected = -tinygp.GaussianProcess(tinygp.kernels.Matern52(0.5), x, diag=np.exp(0.6)).log_probability(y)
    expected -= dist.HalfNormal().log_prob(jnp.exp(0.3)) + 0.3
    assert found(values, jax.random.key(1))[0] == pytest.approx(float(expected), rel=1e-4)


def test_is_minus_the_log_density():
    likelihood, weights = energy_by_scipy()
    functional = scipy.stats.norm.logpdf(0.4 - 0.7 * POINTS[:, 0], POINTS[:, 0], 0.5).sum()
    value, reported = potential(linear(POINTS))({"w": W}, KEYS[0])
    assert float(reported) == pytest.approx(functional, rel=1e-5)
    assert float(value) == pytest.approx(likelihood.sum() + weights - functional, rel=1e-5)


def test_counts_the_jacobian():
    """σ = e^z with σ ~ HalfNormal: U(z) = -log p(e^z) - z. Without the Jacobian it would lack z."""

    def model(x, y=None):
        sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
        numpyro.sample("y", dist.Normal(0.0, sigma).expand([8]).to_event(1), obs=y)

    z = 0.3
    expected = -scipy.stats.halfnorm.logpdf(np.exp(z), scale=2.0) - z - scipy.stats.norm.logpdf(Y, 0, np.exp(z)).sum()
    assert float(potential(model)({"sigma": jnp.array(z)}, KEYS[0])[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_minibatches_are_unbiased(batch):
    """Value and variance over keys: N/B · Σ over one index of each run, all turned. 5 standard errors."""
    likelihood, weights = energy_by_scipy()
    model = potential(linear(batch=batch))
    values = np.asarray(jax.jit(jax.vmap(lambda key: model({"w": W}, key)[0]))(KEYS), float)
    runs = {1: [range(8)], 3: [(0, 1), (2, 3, 4), (5, 6, 7)]}[batch]
    rows = (np.array(list(itertools.product(*runs)))[:, None] + np.arange(8)[:, None]) % 8
    variance = (8 / batch * likelihood[rows].sum(-1)).var()
    assert abs(values.mean() - likelihood.sum() - weights) < 5 * np.sqrt(variance / len(KEYS))
    assert values.var() == pytest.approx(variance, rel=0.1)


def test_random_points_are_fresh_and_leave_the_rest_alone():
    """U + log P0 is the same for every key, log P0 (the sum of the points) differs; a key gives one value."""
    model = potential(linear(random_points(), prior=Revealing()))
    evaluate = jax.jit(jax.vmap(lambda key: model({"w": W}, key)))
    energy, functional = evaluate(KEYS[:100])
    assert len(np.unique(functional)) == 100
    np.testing.assert_allclose(energy + functional, energy[0] + functional[0], rtol=1e-4)
    np.testing.assert_array_equal(evaluate(KEYS[:100])[0], energy)


def test_every_site_has_a_key_of_its_own():
    """Two priors and two plates of one evaluation draw different points and indices."""
    seen = {}

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        for name in ("first", "second"):
            fs.functional_prior(name, lambda x: w[0] * x[:, 0], Revealing(), random_points(5))
            with numpyro.plate(f"{name} plate", 1000, subsample_size=5) as index:
                seen[name] = index
                numpyro.sample(f"{name} y", dist.Normal(w[1], 1.0), obs=jnp.zeros(5))

    laws = potential(model).functional_priors
    assert list(laws) == ["first", "second"]
    assert not np.isin(laws["first"].x, laws["second"].x).any()
    assert not np.array_equal(np.sort(seen["first"]), np.sort(seen["second"]))


def test_keys_reach_the_model():
    """numpyro.prng_key() in a model is fresh at every evaluation, too (data augmentation, say)."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        jitter = 10.0 * jax.random.normal(numpyro.prng_key())
        numpyro.sample("y", dist.Normal(w + jitter, 1.0).expand([8]).to_event(1), obs=y)

    values = [float(potential(model)({"w": jnp.zeros(())}, key)[0]) for key in KEYS[:3]]
    assert len(set(values)) == 3


def mixed(x, y=None):
    positive = numpyro.sample("positive", dist.LogNormal(0.0, 0.5))
    below = numpyro.sample("below", dist.Uniform(0.0, positive))
    numpyro.sample("wide", dist.Normal(1.0, 3.0).expand([2]).to_event(1))
    numpyro.deterministic("double", 2 * below)
    with numpyro.plate("data", 8, subsample_size=2):
        yb = numpyro.subsample(y, event_dim=0)
        numpyro.deterministic("local", yb)
        numpyro.sample("y", dist.Normal(below, 1.0), obs=yb)
    with numpyro.plate("full", 8):
        numpyro.deterministic("global", below + x[:, 0])


def test_values_come_back_constrained():
    """The law's support, also where it depends on another site; deterministic sites but not those of a minibatch."""
    z = {"positive": jnp.array(-1.0), "below": jnp.array(0.0), "wide": jnp.zeros(2)}
    values = potential(mixed).constrain_fn()(z)
    assert set(values) == {"positive", "below", "wide", "double", "global"}
    positive = np.exp(-1.0)
    assert float(values["positive"]) == pytest.approx(positive, rel=1e-6)
    assert float(values["below"]) == pytest.approx(positive / 2, rel=1e-6)
    assert float(values["double"]) == pytest.approx(positive, rel=1e-6)
    np.testing.assert_allclose(values["global"], positive / 2 + X[:, 0], rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_random_bound_is_that_of_the_draw(shape):
    """Also under ``to_event``, which hides the bounds of a support."""

    def model(y=None):
        bound = numpyro.sample("bound", dist.LogNormal(0.0, 1.0))
        w = numpyro.sample("w", dist.Uniform(0.0, bound).expand(shape).to_event(len(shape)))
        numpyro.sample("y", dist.Normal(jnp.sum(w), 1.0), obs=y)

    constrain = ModelPotential(model, (1.0,), key=jax.random.key(0)).constrain_fn()
    for log_bound in (-3.0, 4.0):
        values = constrain({"bound": jnp.array(log_bound), "w": jnp.zeros(shape)})
        np.testing.assert_allclose(values["w"], np.exp(log_bound) / 2, rtol=1e-5)


def test_initial_values_are_unconstrained_medians():
    """The sample median of 15 draws of log σ ~ N(0, 0.5²); its standard error is 0.16."""
    z = potential(mixed).init_params()
    assert set(z) == {"positive", "below", "wide"} and z["wide"].shape == (2,)
    assert abs(float(z["positive"])) < 0.8


def test_scales_are_prior_standard_deviations():
    """Exact for normals and fan-in weights; from 200 draws' quartiles (5 standard errors) for others."""

    def model(x, y=None):
        mixed(x, y)
        fs.random_module("net", nn.Dense(4), input_shape=9)

    scales = potential(model).scale()
    np.testing.assert_allclose(scales["wide"], [3.0, 3.0])
    np.testing.assert_allclose(scales["net.kernel"], np.full((9, 4), 1 / 3), rtol=1e-6)
    np.testing.assert_allclose(scales["net.bias"], np.ones(4))
    assert float(scales["positive"]) == pytest.approx(0.5, rel=0.4)
    assert {k: v.shape for k, v in scales.items()} == {k: v.shape for k, v in potential(model).init_params().items()}


@pytest.mark.slow
def test_gradients_reach_the_prior_s_own_parameters():
    """A length scale sampled in the model: the covariance is in the graph; compared with finite differences."""
    from tinygp.kernels import ExpSquared

    def model(x, y=None):
        length = numpyro.sample("length", dist.LogNormal())
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))

        def f(x):
            return w[0] + w[1] * x[:, 0]

        fs.functional_prior("f", f, fs.GPPrior(ExpSquared(length), nugget=0.1), POINTS)
        numpyro.sample("y", dist.Normal(f(x), NOISE).to_event(1), obs=y)

    with jax.enable_x64(True):
        energy = potential(model)

        def at(z):
            return energy({"length": z, "w": W.astype(float)}, KEYS[0])[0]

        z, h = jnp.array(0.2), 1e-5
        assert float(jax.grad(at)(z)) == pytest.approx(float(at(z + h) - at(z - h)) / (2 * h), rel=1e-5)


def test_sites_above_a_bound_are_scales():
    """However the bound is written: half-normal, truncated or Pareto."""

    def model():
        numpyro.sample("half", dist.HalfNormal(1.0))
        numpyro.sample("truncated", dist.TruncatedNormal(0.3, 0.3, low=0.0))
        numpyro.sample("pareto", dist.Pareto(1.0, 2.0))
        numpyro.sample("share", dist.Uniform(0.0, 1.0))
        numpyro.sample("real", dist.Normal())
        numpyro.sample("y", dist.Normal(), obs=0.0)

    potential = ModelPotential(model, key=jax.random.key(0))
    assert scale_sites(potential) == ["half", "truncated", "pareto"]


def of_noise(log_sd):
    """A mean, and a noise whose logarithm is the function ``log_sd`` of other sites."""

    def model(x, y=None):
        mean = numpyro.sample("mean", dist.Normal())
        sd = jnp.exp(log_sd(x))
        with numpyro.plate("rows", len(x), subsample_size=4):
            numpyro.sample("y", dist.StudentT(3.0, mean, numpyro.subsample(sd, 0)), obs=numpyro.subsample(y, 0))

    return model


def of_network(x):
    net = nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)])
    return fs.gp_network("g", net, fs.GPPrior(tinygp.kernels.ExpSquared()), np.linspace(-1, 1, 8)[:, None])(x[:, None])[
        :, 0
    ]


def of_both(x):
    """A slope of the noise whose spread is a site: both are scales, and a third one, which is not, has a factor."""
    spread, other = numpyro.sample("spread", dist.HalfNormal()), numpyro.sample("other", dist.Normal())
    numpyro.factor("known", -(other**2))
    return other + numpyro.sample("slope", dist.Normal(0.0, spread)) * x


@pytest.mark.parametrize(
    ("log_sd", "expected"),
    [
        (lambda x: 0.0 * x, []),
        (lambda x: numpyro.sample("log_sd", dist.Normal()) + 0.0 * x, ["log_sd"]),
        (of_both, ["spread", "slope"]),
        pytest.param(
            of_network,
            ["g.layers_0.bias", "g.layers_0.kernel", "g.last_layer", "g.values", "g.residual"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["constant", "one number", "hierarchical", "network"],
)
def test_sites_of_the_noise_alone_are_scales(log_sd, expected):
    """Sites that are not positive, but determine nothing except the scale of observations."""
    x = jnp.linspace(-1, 1, 8)
    potential = ModelPotential(of_noise(log_sd), (x, x), key=jax.random.key(0))
    assert scale_sites(potential) == expected


def test_a_model_of_scales_alone_holds_the_positive_ones():
    def model(y):
        log_sd, factor = numpyro.sample("log_sd", dist.Normal()), numpyro.sample("factor", dist.HalfNormal())
        numpyro.sample("y", dist.Normal(0.0, factor * jnp.exp(log_sd)), obs=y)

    potential = ModelPotential(model, (jnp.ones(()),), key=jax.random.key(0))
    assert scale_sites(potential) == ["factor"]


def test_a_support_that_depends_on_another_site_is_that_of_the_draw():
    def model():
        high = numpyro.sample("high", dist.HalfNormal(1.0))
        numpyro.sample("share", dist.Uniform(0.0, high))
        numpyro.sample("y", dist.Normal(), obs=0.0)

    constrain = ModelPotential(model, key=jax.random.key(0)).constrain_fn()
    for high in (0.5, 6.0):
        values = constrain({"high": jnp.log(high), "share": jnp.zeros(())})
        np.testing.assert_allclose(values["share"], 0.5 * high, rtol=1e-6)


def test_values_of_sites_that_a_model_lacks_are_named():
    """What ``condition`` and ``init_to_value`` give to a misspelled name changes nothing, which is said."""

    def model(y):
        t = numpyro.sample("t", dist.Normal())
        numpyro.sample("y", dist.Normal(t, 1.0), obs=y)

    with pytest.warns(RuntimeWarning, match=r"condition fixes \['tt'\], which the model does not have"):
        ModelPotential(numpyro.handlers.condition(model, {"tt": 1.0}), (0.5,), key=KEYS[0])
    inner = numpyro.handlers.condition(lambda y: (model(y), numpyro.sample("s", dist.Normal())), {"t": 1.0})
    with pytest.warns(RuntimeWarning, match=r"condition fixes \['zzz'\]"):
        ModelPotential(numpyro.handlers.condition(inner, {"zzz": 1.0}), (0.5,), key=KEYS[0])
    ModelPotential(numpyro.handlers.scope(inner, prefix="a"), (0.5,), key=KEYS[0])  # where t is named a/t
    start = partial(lambda values, site=None: numpyro.infer.init_to_median(site), np.ones(3))
    ModelPotential(model, (0.5,), key=KEYS[0], init_strategy=start)  # not NumPyro's
    with pytest.warns(RuntimeWarning, match=r"init_to_value.* starts \['s'\].* Its sites are \['t', 'y'\]"):
        ModelPotential(
            model, (0.5,), key=KEYS[0], init_strategy=numpyro.infer.init_to_value(values={"s": 1.0, "t": 0.2})
        )


@pytest.mark.slow
def test_a_start_that_is_rounded_to_the_boundary_is_moved_inside():
    """The median of Gamma(.001, .001) is 1e-301, which float32 rounds to zero: log t would be minus infinity."""

    def model(y):
        t = numpyro.sample("t", dist.Gamma(1e-3, 1e-3))
        numpyro.sample("y", dist.Normal(0.0, 1 / jnp.sqrt(t)), obs=y)

    def start(key):
        return ModelPotential(model, (0.5,), key=key).init_params()["t"]

    assert jax.jit(start)(KEYS[0]) == 0.0
    assert (jax.vmap(start)(KEYS[:3]) == 0.0).all()
