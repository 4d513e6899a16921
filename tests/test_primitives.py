"""functional_prior: a factor for whoever evaluates a density, invisible to whoever lists observations."""

from __future__ import annotations

import functools

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from models import NOISE, POINTS, Independent, Revealing, X, Y, line, linear, random_points, run, trace
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import log_density
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.data.minibatches import minibatch
from numpyro_fspace.model.handlers import full_plates
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.sites import FunctionalPriorSite, is_functional_prior

W = jnp.array([0.4, -0.7])
DRAWS = {"w": jnp.array([[0.4, -0.7], [1.0, 0.0], [0.0, 2.0]])}


def prior_by_scipy(w, points=POINTS, sd=0.5):
    return scipy.stats.norm.logpdf(w[0] + w[1] * points[:, 0], points[:, 0], sd).sum()


def density(model, w=W, data=(X, Y)):
    return float(log_density(model, data, {}, {"w": w})[0])


def subsampled_density(model, key):
    return float(log_density(handlers.seed(model, key), (X, Y), {}, {"w": W})[0])


# ---- the density -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_density_gains_scale_times_the_prior(scale):
    gained = density(linear(POINTS, scale=scale)) - density(linear())
    assert gained == pytest.approx(scale * prior_by_scipy(np.asarray(W)), rel=1e-5)


def test_density_gains_the_gaussian_process():
    from tinygp.kernels import ExpSquared

    gp = fs.GPPrior(2.0 * ExpSquared(1.5), nugget=0.1)
    covariance = 2.0 * np.exp(-0.5 * ((POINTS - POINTS.T) / 1.5) ** 2) + 0.1 * np.eye(3)
    expected = scipy.stats.multivariate_normal(np.zeros(3), covariance).logpdf(0.4 - 0.7 * POINTS[:, 0])
    assert density(linear(POINTS, prior=gp)) - density(linear()) == pytest.approx(expected, rel=1e-4)


def test_handlers_scale_scales_it():
    """At twice the model's density the prior counts twice; an ignored scale would count it once."""
    twice = density(handlers.scale(linear(POINTS), scale=2.0)) - density(handlers.scale(linear(), scale=2.0))
    assert twice == pytest.approx(2 * prior_by_scipy(np.asarray(W)), rel=1e-5)


def test_mask_removes_it():
    assert density(handlers.mask(linear(POINTS), mask=False)) == 0.0


@pytest.mark.parametrize("counts", some([True, False], 1))
def test_a_mask_that_is_an_array_leaves_it_what_it_is(counts):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with handlers.mask(mask=jnp.array(counts)):
            fs.functional_prior("f", line(w), Independent(), POINTS)
        numpyro.sample("y", dist.Normal(line(w)(x), NOISE).to_event(1), obs=y)

    kernel = fs.SGHMC(model, step_size=0.01, num_steps=1)
    mcmc = run(kernel, num_warmup=0, num_samples=1, extra_fields=("log_functional_prior",), init_params={"w": W})
    (found,) = mcmc.get_extra_fields()["log_functional_prior"]
    assert found == pytest.approx(counts * prior_by_scipy(mcmc.get_samples()["w"][0]), rel=0.05)
    assert set(fs.predict(mcmc, jax.random.key(0), X)) == {"f", "y"}


def test_a_mask_of_rows_is_refused():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with handlers.mask(mask=jnp.ones(8, bool)):
            fs.functional_prior("f", line(w), Independent(), POINTS)

    with pytest.raises(ValueError, match="a mask must be one bool"):
        density(model)


@pytest.mark.parametrize("inside", [False, True], ids=["outside the plate", "inside the plate"])
def test_a_subsampled_plate_does_not_scale_it(inside, key):
    """With B = 2 of N = 8 a rescaled term would be four times as large."""
    with_prior = subsampled_density(linear(POINTS, batch=2, inside=inside), key)
    without = subsampled_density(linear(batch=2), key)
    assert with_prior - without == pytest.approx(prior_by_scipy(np.asarray(W)), rel=1e-4)


def test_several_priors_add_up():
    def model(x, y=None):
        f = line(numpyro.sample("w", dist.Normal().expand([2]).to_event(1)))
        fs.functional_prior("near", f, Independent(), POINTS)
        fs.functional_prior("far", f, Independent(2.0), 10 * POINTS, scale=0.5)
        numpyro.sample("y", dist.Normal(f(x), NOISE).to_event(1), obs=y)

    gained = density(model) - density(linear())
    expected = prior_by_scipy(np.asarray(W)) + 0.5 * prior_by_scipy(np.asarray(W), 10 * POINTS, 2.0)
    assert gained == pytest.approx(expected, rel=1e-5)


def test_returns_the_function_itself():
    f = line(W)
    assert fs.functional_prior("f", f, Independent(), POINTS) is f


# ---- HMC and NUTS ----------------------------------------------------------------------------------------


def test_nuts_sees_fixed_points():
    """NumPyro's own potential has the term, gradient included, and its samplers run on it."""
    potentials = [
        numpyro.infer.util.initialize_model(jax.random.key(0), linear(points), model_args=(X, Y)).potential_fn
        for points in (POINTS, None)
    ]
    value, slope = jax.value_and_grad(lambda w: potentials[1]({"w": w}) - potentials[0]({"w": w}))(W)
    residual = (np.asarray(line(W)(POINTS)) - POINTS[:, 0]) / 0.25
    assert float(value) == pytest.approx(prior_by_scipy(np.asarray(W)), rel=1e-5)
    np.testing.assert_allclose(slope, [-residual.sum(), -(residual * POINTS[:, 0]).sum()], rtol=1e-4)
    kernel = HMC(linear(POINTS), num_steps=2, trajectory_length=None)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert set(mcmc.get_samples()) == {"w"}


@pytest.mark.parametrize("engine", [NUTS, HMC])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: handlers.seed(m, jax.random.key(0))], ids=["bare", "seeded"])
def test_nuts_refuses_random_points(engine, wrap):
    mcmc = MCMC(engine(wrap(linear(random_points()))), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"'f'.*Freeze the points: points=fs\.measurement\.fixed\(points\("):
        mcmc.run(jax.random.key(0), X, Y)


# ---- SVI -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("points", [POINTS, random_points()], ids=["fixed", "random"])
def test_svi_runs(loss, points):
    model = linear(points)
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), loss())
    state, first = svi.update(svi.init(jax.random.key(0), X, Y), X, Y)
    assert np.isfinite(float(svi.evaluate(state, X, Y))) and np.isfinite(float(first))


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
def test_svi_loss_holds_the_prior_once(loss):
    """With a point guide the loss is -log density, so the two models differ by the prior."""
    losses = []
    for points in (POINTS, None):
        model = linear(points)
        guide = AutoDelta(model, init_loc_fn=numpyro.infer.init_to_value(values={"w": W}))
        svi = SVI(model, guide, numpyro.optim.Adam(0.01), loss())
        losses.append(float(svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y)))
    assert losses[1] - losses[0] == pytest.approx(prior_by_scipy(np.asarray(W)), rel=1e-4)


def test_svi_redraws_random_points():
    """The revealing prior is the only randomness: each key gives another loss, with the points' mean of zero."""
    model = linear(random_points(1), prior=Revealing())
    guide = AutoDelta(model, init_loc_fn=numpyro.infer.init_to_value(values={"w": W}))
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    base = -density(linear())
    loss = jax.jit(jax.vmap(lambda key: Trace_ELBO().loss(key, params, model, guide, X, Y)))
    points = base - np.asarray(loss(jax.random.split(jax.random.key(1), 400)))
    assert len(np.unique(np.round(points, 3))) > 300
    assert abs(points.mean()) < 5 * points.std() / 20 and points.std() == pytest.approx(4 / np.sqrt(12), rel=0.1)


# ---- not an observation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [POINTS, random_points()], ids=["fixed", "random"])
class TestNotListed:
    def test_predictive(self, points):
        assert set(Predictive(linear(points), DRAWS)(jax.random.key(0), X)) == {"y"}

    def test_prior_predictive(self, points):
        assert set(Predictive(linear(points), num_samples=2)(jax.random.key(0), X)) == {"w", "y"}

    @pytest.mark.parametrize("seeded", [False, True], ids=["bare", "seeded"])
    def test_log_likelihood(self, points, seeded):
        model = handlers.seed(linear(points), jax.random.key(0)) if seeded else linear(points)
        values = log_likelihood(model, DRAWS, X, Y)
        assert set(values) == {"y"} and values["y"].shape == (3, 8)

    @pytest.mark.slow
    def test_arviz(self, points):
        mcmc = run(fs.fSGHMC(linear(points), num_steps=5, step_size=0.05))
        data = az.from_numpyro(mcmc, log_likelihood=True)
        for group in ("observed_data", "log_likelihood"):
            assert set(data[group].data_vars) == {"y"}
        assert set(data["posterior"].data_vars) == {"w"}


def test_random_points_without_a_key():
    """A density cannot be computed, and says so; a likelihood can."""
    with pytest.raises(ValueError, match=r"no key to draw them.*numpyro\.handlers\.seed"):
        density(linear(random_points()))
    assert np.isfinite(density(handlers.seed(linear(random_points()), jax.random.key(0))))


# ---- handlers --------------------------------------------------------------------------------------------


def test_a_note_in_a_plain_trace():
    """Under seed and trace nothing is computed: the site tells what was declared, as (fn, prior, points)."""
    prior, points = Independent(), random_points()
    sites = trace(linear(points, prior=prior), X, Y)
    law = sites["f"]["fn"]
    assert sites["f"]["type"] == "functional_prior" and isinstance(law, FunctionalPriorSite)
    assert law.prior is prior and law.points is points and callable(law.fn)
    assert law.x is None and law.log_factor is None
    np.testing.assert_allclose(law.fn(X), line(sites["w"]["value"])(X))
    assert [k for k, site in sites.items() if is_functional_prior(site)] == ["f"]


def test_a_site_where_a_density_is_wanted():
    site = log_density(linear(POINTS), (X, Y), {}, {"w": W})[1]["f"]
    assert site["type"] == "sample" and not site["is_observed"] and site["scale"] is None
    np.testing.assert_array_equal(site["fn"].x, POINTS)
    assert site["fn"].points.num_points == 3
    assert float(site["fn"].log_factor) == pytest.approx(prior_by_scipy(np.asarray(W)), rel=1e-5)


def test_condition_and_substitute_reach_the_weights():
    model = handlers.condition(linear(POINTS), {"w": W})
    assert density(model) - density(handlers.condition(linear(), {"w": W})) == pytest.approx(
        prior_by_scipy(np.asarray(W)), rel=1e-5
    )
    sites = trace(handlers.substitute(linear(POINTS), {"w": W}), X, Y)
    np.testing.assert_array_equal(sites["w"]["value"], W)
    assert is_functional_prior(sites["f"]) and not sites["f"].get("is_observed", False)


def test_block_hides_it():
    hidden = handlers.block(linear(POINTS), hide=["f"])
    assert "f" not in trace(hidden, X, Y)
    assert density(hidden) == pytest.approx(density(linear()), rel=1e-6)


def test_scope_renames_it():
    scoped = handlers.scope(linear(POINTS), prefix="a", divider=".")
    sites = trace(scoped, X, Y)
    assert "a.f" in sites and "f" not in sites
    gained = log_density(scoped, (X, Y), {}, {"a.w": W})[0] - density(linear())
    assert float(gained) == pytest.approx(prior_by_scipy(np.asarray(W)), rel=1e-4)


def test_two_priors_of_one_name_are_refused():
    def model():
        f = line(numpyro.sample("w", dist.Normal().expand([2]).to_event(1)))
        fs.functional_prior("f", f, Independent(), POINTS)
        fs.functional_prior("f", f, Independent(), POINTS)

    with pytest.raises(AssertionError, match="unique names"):
        log_density(model, (), {}, {"w": W})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: handlers.seed(m, jax.random.key(0)),
        lambda m: functools.partial(handlers.seed(m, jax.random.key(0))),
        lambda m: handlers.scale(handlers.seed(m, jax.random.key(0)), scale=1.0),
        lambda m: handlers.block(functools.partial(handlers.seed(m, rng_seed=0)), hide=["y"]),
    ],
    ids=["seed", "partial", "scale", "block of partial"],
)
def test_kernels_refuse_a_seeded_model(wrap):
    kernel = fs.fSGHMC(wrap(linear(POINTS)))
    with pytest.raises(ValueError, match="Pass the bare model"):
        kernel.init(jax.random.key(0), 1, None, (X, Y), {})


# ---- plates and minibatches --------------------------------------------------------------------------------


def test_full_plates_ignore_subsample_size():
    sites = trace(full_plates(linear(batch=2)), X, Y)
    np.testing.assert_array_equal(sites["y"]["value"], Y)
    assert sites["y"]["scale"] is None


@pytest.mark.parametrize("size, batch", [(12, 3), (1000, 3), (11, 4), (7, 6), (5, 5)])
def test_minibatch_indices_are_distinct_and_have_equal_chances(size, batch):
    """χ² over the indices; false alarms 1e-5. At 11 and 7 the strata are of unequal length."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: minibatch(k, size, batch)))(keys))
    counts = np.bincount(draws.ravel(), minlength=size)
    assert counts.sum() == 20_000 * batch and len(counts) == size
    assert scipy.stats.chisquare(counts).pvalue > 1e-5
    assert all(len(set(row)) == batch for row in draws.tolist())


def test_log_functional_prior_is_what_the_density_gained():
    """Also under handlers.scale: the reported sum is the one in the potential."""
    for model, factor in [(linear(POINTS, scale=0.5), 0.5), (handlers.scale(linear(POINTS), scale=3.0), 3.0)]:
        potential = ModelPotential(model, (X, Y), key=jax.random.key(0))
        _, reported = potential({"w": W}, jax.random.key(1))
        assert float(reported) == pytest.approx(factor * prior_by_scipy(np.asarray(W)), rel=1e-5)
