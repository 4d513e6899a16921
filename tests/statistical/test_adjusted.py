"""With a Metropolis test SGLD and SGHMC have the exact distribution at any step size; it is made where it can be."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from support.compilation import quick_jit
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.sgmcmc import sghmc, sgld

SHAPE, RATE = 3.0, 5.0
NUM_CHAINS, NUM_TRANSITIONS = 20_000, 4


def potential(z, key):
    """-log density of z = log x for x ~ Gamma(SHAPE, RATE): skewed, and stiffer on one side."""
    return RATE * jnp.exp(z) - SHAPE * z


def ranks(z):
    """Ranks of draws under the target, uniform if the draws are right."""
    return scipy.stats.gamma(SHAPE, scale=1.0 / RATE).cdf(np.exp(np.asarray(z, float)))


def p_value(module, step_size, key, *, num_transitions=NUM_TRANSITIONS, **settings):
    """Of chains that start from the target and still have its distribution some transitions later."""
    algorithm = module.as_top_level_api(potential, step_size, num_steps=4, **settings)

    def chain(key):
        key_start, key_init, *keys = jax.random.split(key, 2 + num_transitions)
        start = jnp.log(jax.random.gamma(key_start, SHAPE) / RATE)
        state = algorithm.init(start, key_init)
        for one in keys:
            state, info = algorithm.step(one, state)
        return state.position, info.accept_prob

    z, accept_prob = quick_jit(jax.vmap(chain))(jax.random.split(key, NUM_CHAINS))
    return scipy.stats.kstest(ranks(z), "uniform").pvalue, float(accept_prob.mean())


ALGORITHMS = [
    pytest.param(sgld, 0.35, {}, id="sgld"),
    pytest.param(sghmc, 0.8, {}, id="sghmc"),
    pytest.param(sghmc, 0.8, {"refresh_every": 2}, marks=pytest.mark.slow, id="sghmc refreshed at every other step"),
    pytest.param(
        sghmc, 0.8, {"resample_momentum": True, "refresh_every": 4}, marks=pytest.mark.slow, id="sghmc resampled"
    ),
]


@pytest.mark.parametrize(("module", "step_size", "settings"), ALGORITHMS)
def test_the_distribution_is_exact_at_a_long_step(key, module, step_size, settings):
    p, accept_prob = p_value(module, step_size, key, metropolis=True, **settings)
    assert p > 1e-4
    assert 0.1 < accept_prob < 0.95


@pytest.mark.parametrize(("module", "step_size", "settings"), ALGORITHMS)
def test_the_same_step_without_the_test_is_seen_to_be_wrong(key, module, step_size, settings):
    p, accept_prob = p_value(module, step_size, key, **settings)
    assert p < 1e-6
    assert accept_prob == 1.0


@pytest.mark.parametrize("module", some([sgld, sghmc], 1))
@pytest.mark.parametrize("factor", some([0.0, 2.0, 0.5], 1), ids=["accepts all", "twice the ratio", "half the ratio"])
def test_a_wrong_ratio_is_seen(key, module, factor):
    right = module.accept
    with mock.patch.object(module, "accept", lambda key, log_ratio: right(key, factor * log_ratio)):
        p, _ = p_value(module, 0.35 if module is sgld else 0.8, key, metropolis=True)
    assert p < 1e-6


@pytest.mark.slow
def test_a_momentum_that_is_not_reversed_after_a_rejection_is_seen(key):
    with mock.patch.object(sghmc.jnp, "negative", lambda p: p):
        p, _ = p_value(sghmc, 0.8, key, metropolis=True, friction=0.01, num_transitions=10)
    assert p < 1e-6


@pytest.mark.parametrize("module", some([sgld, sghmc], 1))
def test_what_lies_outside_the_support_is_never_returned(key, module):
    def simplex(w, key):
        return jnp.where((w.min() > 0) & (w.sum() < 1), 0.0, jnp.inf)

    for num_steps in (1, 5):
        for metropolis in (False, True):
            algorithm = module.as_top_level_api(simplex, 0.02, num_steps=num_steps, metropolis=metropolis)
            state = algorithm.init(jnp.array([0.3, 0.3]), key)

            def step(state, key, algorithm=algorithm):
                state, info = algorithm.step(key, state)
                return state, (state.position, info.is_diverging)

            _, (w, diverging) = quick_jit(lambda s, k, step=step: jax.lax.scan(step, s, k))(
                state, jax.random.split(key, 200)
            )
            assert np.all((w.min(1) > 0) & (w.sum(1) < 1))
            assert np.all(np.any(np.diff(w, axis=0) != 0, axis=1) | (metropolis | diverging[1:]))
            if not metropolis:
                assert diverging.any()


@pytest.mark.parametrize("module", some([sgld, sghmc], 1))
def test_a_gradient_that_is_nan_where_the_density_is_finite_is_reported(key, module):
    @jax.custom_jvp
    def square(w):
        return 0.5 * w @ w

    @square.defjvp
    def _(primals, tangents):
        (w,), (dw,) = primals, tangents
        return square(w), jnp.where(w.max() > 1.0, jnp.nan, 1.0) * (w @ dw)

    algorithm = module.as_top_level_api(lambda w, key: square(w), 0.5, num_steps=1, metropolis=True)
    starts = jax.vmap(algorithm.init, (None, 0))(jnp.full(2, 0.9), jax.random.split(key, 100))
    out, info = quick_jit(jax.vmap(algorithm.step))(jax.random.split(key, 100), starts)
    assert 0 < info.is_diverging.sum() < 100
    assert jnp.all(out.position[info.is_diverging] == 0.9) and jnp.isfinite(out.position).all()


def precision(y, *, subsample_size=None):
    """y ~ N(0, 1/t), t ~ Gamma(1, 1): the posterior is a Gamma distribution."""
    t = numpyro.sample("t", dist.Gamma(1.0, 1.0))
    with numpyro.plate("data", len(y), subsample_size=subsample_size):
        batch = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(0.0, t**-0.5), obs=batch)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGLD, fs.SGHMC])
def test_a_sampled_precision_has_its_posterior_at_defaults(kernel):
    y = np.random.default_rng(1).normal(0.0, 1.5, 5).astype(np.float32)
    shape, rate = 1.0 + len(y) / 2, 1.0 + np.sum(y**2) / 2
    mcmc = fs.MCMC(
        kernel(precision), num_warmup=400, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(0), y)
    t = np.asarray(mcmc.get_samples()["t"], float)
    assert np.mean(t) == pytest.approx(shape / rate, rel=0.05)
    assert np.std(t) == pytest.approx(np.sqrt(shape) / rate, rel=0.07)
    assert np.all((mcmc.last_state.mean_accept_prob > 0.75) & (mcmc.last_state.mean_accept_prob < 1.0))


def run(kernel, *args, **kwargs):
    mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGLD, fs.SGHMC])
def test_the_test_is_made_where_the_density_is_exact(kernel):
    y = jnp.ones(8)
    assert run(kernel(precision), y).last_state.mean_accept_prob < 1.0
    assert run(kernel(precision), y, subsample_size=4).last_state.mean_accept_prob == 1.0

    def is_tested(kernel, **kwargs):
        return kernel.prepare((y,), kwargs, 20).sampler.metropolis

    assert is_tested(kernel(precision))
    assert not is_tested(kernel(precision), subsample_size=4)
    assert not is_tested(kernel(precision, metropolis=False))
    assert not is_tested(kernel(precision, step_size=lambda count: 0.01))
    assert not is_tested(fs.SGHMC(precision, integrator="euler"))


@pytest.mark.parametrize(
    ("settings", "arguments", "reason"),
    [
        ({}, {"subsample_size": 4}, "minibatches"),
        ({"step_size": lambda count: 0.01}, {}, "schedule"),
        ({"integrator": "euler"}, {}, "euler"),
    ],
)
def test_a_test_that_makes_no_sense_is_refused(settings, arguments, reason):
    with pytest.raises(ValueError, match=f"metropolis=True.*{reason}"):
        run(fs.SGHMC(precision, metropolis=True, **settings), jnp.ones(8), **arguments)


@pytest.mark.slow
def test_a_step_that_the_test_rejects_is_warned_of():
    with pytest.warns(RuntimeWarning, match=r"accepts only \d+ % of the moves"):
        run(fs.SGLD(precision, step_size=3.0, num_steps=4), jnp.ones(8))
