"""Random points out of a finite pool: what a prior says of them is looked up, and is what it says of the points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro import handlers
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.handlers import fresh_draws

RNG = np.random.default_rng(0)
POOL = RNG.uniform(-1.0, 1.0, (30, 2))
KERNEL = tinygp.kernels.ExpSquared(0.7)


def draw(key, x):
    return x @ jax.random.normal(key, x.shape[1:])


def draws(key, x):
    return x @ jax.random.normal(key, (x.shape[1], 3))


NETWORK = fs.priors.NetworkPrior(draw, jax.random.key(0), num_draws=200, nugget=0.1)
GP = fs.GPPrior(KERNEL, nugget=0.1)
HELMHOLTZ = fs.priors.Helmholtz(KERNEL, 2.0 * KERNEL)
PRIORS = {
    "one output": GP,
    "relative nugget": fs.GPPrior(KERNEL),
    "mean": fs.GPPrior(KERNEL, mean=lambda x: x[:, 0], nugget=0.1),
    "one kernel for three": fs.GPPrior(KERNEL, nugget=0.1, num_outputs=3),
    "two kernels": fs.GPPrior([KERNEL, 2.0 * KERNEL], mean=np.array([0.0, 1.0]), nugget=0.1),
    "dependent outputs": fs.GPPrior(HELMHOLTZ, nugget=0.1, num_outputs=2),
    "conditioned": GP.condition(POOL[:9], POOL[:9, 0], 0.05),
    "Student": fs.priors.StudentTPrior(KERNEL, df=3.0, nugget=0.1),
    "network": NETWORK,
    "network of three": fs.priors.NetworkPrior(draws, jax.random.key(0), num_draws=200, nugget=0.1, num_outputs=3),
    "calibrated": fs.priors.CalibratedPrior(GP, NETWORK),
}


@pytest.mark.parametrize("name", some(PRIORS, 4))
def test_a_table_says_what_the_prior_says(name, key):
    prior, rows = PRIORS[name], np.array([3, 17, 4, 29, 0])
    f = jax.random.normal(key, (5,) if prior.num_outputs is None else (5, prior.num_outputs))
    table = prior.tabulated(POOL)
    look_up = jax.jit(lambda rows: table.log_prob(rows[:, None], f))
    looked_up = look_up(rows)
    np.testing.assert_allclose(looked_up, prior.log_prob(POOL[rows], f), rtol=2e-4)
    assert abs(looked_up - look_up(rows + 0.0)) < 1e-6
    assert abs(look_up(rows[::-1]) - looked_up) > 1e-3  # it does depend on the rows


def model(prior, points, x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    f = fs.functional_prior("f", lambda x: jnp.tanh(x @ w), prior, points)
    numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)


@pytest.mark.parametrize(
    "points",
    [
        fs.measurement.subset(POOL, 7),
        pytest.param(fs.measurement.union(fs.measurement.subset(POOL[:9], 3), POOL[20:24]), marks=pytest.mark.slow),
        pytest.param(
            fs.measurement.union(POOL[:2], fs.measurement.union(POOL[4:6], fs.measurement.subset(POOL[9:], 3))),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["subset", "union", "union of unions"],
)
def test_a_model_has_the_density_at_the_points_it_drew(points, key):
    prior, w = PRIORS["mean"], jnp.array([0.5, -1.0])
    np.testing.assert_array_equal(points.pool[points.rows(key)], points(key))

    def site(key):
        with handlers.trace() as trace, fresh_draws(None, key), handlers.substitute(data={"w": w}):
            model(prior, points, POOL, POOL[:, 0])
        return trace["f"]["fn"].x, trace["f"]["fn"].log_factor

    x, log_factor = jax.jit(site)(key)
    np.testing.assert_allclose(log_factor, prior.log_prob(np.asarray(x), jnp.tanh(x @ w)), rtol=1e-4)
    assert set(map(tuple, np.asarray(x))) <= set(map(tuple, np.asarray(points.pool)))


@pytest.mark.slow
def test_no_kernel_is_evaluated_while_a_chain_runs():
    calls = []

    def kernel(x1, x2):
        jax.debug.callback(lambda: calls.append(len(x1)))
        return KERNEL(x1, x2)

    prior = fs.GPPrior(kernel, nugget=0.1)
    mcmc = fs.MCMC(fs.fSGLD(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), prior, fs.measurement.subset(POOL, 7), POOL, POOL[:, 0])
    jax.effects_barrier()
    assert set(calls) == {len(POOL)}


def test_what_cannot_be_looked_up_is_computed():
    assert fs.GPPrior(KERNEL).tabulated(np.zeros((3000, 1))) is None

    @jax.jit
    def density(lengthscale, key):
        prior = fs.GPPrior(tinygp.kernels.ExpSquared(lengthscale), nugget=0.1)
        assert prior.tabulated(POOL) is None
        with fresh_draws(None, key), handlers.trace() as trace, handlers.substitute(data={"w": jnp.ones(2)}):
            model(prior, fs.measurement.subset(POOL, 7), POOL, POOL[:, 0])
        return trace["f"]["fn"].log_factor, trace["f"]["fn"].x

    value, x = density(0.7, jax.random.key(0))
    np.testing.assert_allclose(value, GP.log_prob(np.asarray(x), jnp.tanh(x.sum(1))), rtol=1e-4)


def test_a_posterior_as_prior_at_random_points_keeps_its_factor():
    """In float32 its covariance is a difference that loses all its digits; in the table it is formed in float64."""
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)).condition(x, np.sin(3 * x[:, 0]), 1e-6, nugget=1e-7)
    pool = np.linspace(-1.0, 1.0, 200)[:, None]
    f = jnp.sin(3 * pool[::10, 0])
    table = prior.tabulated(pool)
    assert jnp.isnan(jax.jit(lambda x: prior.log_prob(x, f))(pool[::10]))
    assert jnp.isfinite(jax.jit(lambda rows: table.log_prob(rows, f))(np.arange(200.0)[::10, None]))
