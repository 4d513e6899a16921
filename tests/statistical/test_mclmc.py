"""MCLMC: its parts solve their equations, a tested chain has the exact distribution, and misuse is refused."""

from __future__ import annotations

from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
import tinygp
from support.compilation import quick_jit
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.sgmcmc import mclmc
from numpyro_fspace.sgmcmc.preconditioners import Diagonal, Identity

SHAPE, RATE = 3.0, 5.0
SIZE, NUM_CHAINS = 3, 20_000


# ---- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [0.05, 0.7, 6.0])
def test_the_kick_solves_its_equation_and_its_work_is_that_of_the_force(step_size):
    """Against a numerical solution of du/dt = √P/(P-1) (f - (f·u) u), in single precision."""
    momentum = jnp.array([0.4, -1.2, 0.9, 0.3])
    momentum *= 2.0 / jnp.linalg.norm(momentum)
    gradient, scale, temperature = jnp.array([1.0, 0.5, -2.0, 0.1]), jnp.array([1.0, 0.5, 2.0, 1.0]), 1.5
    p, work = mclmc.turn(momentum, gradient, step_size, Diagonal(scale), temperature)
    force = -np.asarray(scale * gradient, float) / temperature

    def slope(t, state):
        u = state[:4]
        return [*(2.0 / 3.0 * (force - (force @ u) * u)), 2.0 * force @ u]

    start = [*np.asarray(momentum, float) / 2.0, 0.0]
    end = scipy.integrate.solve_ivp(slope, (0.0, step_size), start, rtol=1e-10, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(p, 2.0 * end[:4], atol=2e-5)
    assert float(work) == pytest.approx(end[4], abs=1e-4)


def test_a_refresh_is_reversible_and_keeps_the_uniform_distribution(key):
    """p and p' are exchangeable: odd moments of both agree, to five standard errors of 200 000 draws."""
    first, noise = (jax.random.normal(k, (200_000, 3)) for k in jax.random.split(key))
    p = jax.vmap(mclmc._on_sphere)(first)
    after = jax.vmap(lambda p, xi: mclmc.refresh(p, xi, 0.5, 1.0))(p, noise)
    np.testing.assert_allclose(jnp.linalg.norm(after, axis=1), np.sqrt(3.0), rtol=1e-5)
    a, b = np.asarray(p, float), np.asarray(after, float)
    for statistic in (a[:, 0] ** 2 - b[:, 0] ** 2, a[:, 0] * b[:, 0] ** 3 - a[:, 0] ** 3 * b[:, 0], a[:, 0] - b[:, 0]):
        assert abs(statistic.mean()) < 5 * statistic.std() / np.sqrt(len(a))
    assert np.mean(np.sum(a * b, 1)) / 3.0 == pytest.approx(np.exp(-0.5), abs=0.1)  # most of the momentum is kept


def quartic(w, key):
    return 0.25 * jnp.sum(w**4) + 0.5 * jnp.sum(w**2)


def path(state, step_size, num_steps):
    """A path without noise."""
    kernel = quick_jit(
        lambda state: mclmc.build_kernel()(
            jax.random.key(0), state, quartic, step_size, num_steps=num_steps, friction=0.0, metric=Identity()
        )
    )
    return kernel(state)


@pytest.mark.slow
def test_a_path_without_noise_is_reversible_and_loses_energy_of_second_order(key):
    state = mclmc.init(jnp.array([0.5, -1.0, 0.3]), key)
    forward, _ = path(state, 0.1, 8)
    back, _ = path(forward._replace(momentum=-forward.momentum), 0.1, 8)
    np.testing.assert_allclose(back.position, state.position, atol=1e-5)
    np.testing.assert_allclose(back.momentum, -state.momentum, atol=1e-5)
    keys = jax.random.split(key, 50)
    states = jax.vmap(mclmc.init)(jax.random.normal(key, (50, 3)), keys)
    with mock.patch.object(mclmc, "accept", lambda key, gain: (jnp.array(True), gain)):
        gains = [
            np.abs(jax.vmap(lambda state, n=n: path(state, 0.8 / n, n)[1].accept_prob)(states)).mean()
            for n in (8, 16, 32)
        ]
    assert gains[0] / gains[1] == pytest.approx(4.0, rel=0.2)
    assert gains[1] / gains[2] == pytest.approx(4.0, rel=0.2)


# ---- the distribution ----------------------------------------------------------------------------


def potential(z, key):
    """-log density of z = log x for independent x ~ Gamma(SHAPE, RATE)."""
    return jnp.sum(RATE * jnp.exp(z) - SHAPE * z)


def p_value(key, *, step_size=0.9, num_transitions=4, **settings):
    """Of chains that start from the target and still have its distribution some transitions later."""
    algorithm = mclmc.as_top_level_api(potential, step_size, num_steps=4, **settings)

    def chain(key):
        key_start, key_init, *keys = jax.random.split(key, 2 + num_transitions)
        state = algorithm.init(jnp.log(jax.random.gamma(key_start, SHAPE, (SIZE,)) / RATE), key_init)
        for one in keys:
            state, info = algorithm.step(one, state)
        return state.position, info.accept_prob

    z, accept_prob = quick_jit(jax.vmap(chain))(jax.random.split(key, NUM_CHAINS))
    ranks = scipy.stats.gamma(SHAPE, scale=1.0 / RATE).cdf(np.exp(np.asarray(z, float)))
    sums = scipy.stats.gamma(SIZE * SHAPE, scale=1.0 / RATE).cdf(np.exp(np.asarray(z, float)).sum(1))
    tests = [scipy.stats.kstest(column, "uniform").pvalue for column in (*ranks.T, sums)]
    return min(1.0, len(tests) * min(tests)), float(accept_prob.mean())


@pytest.mark.parametrize("settings", some([{}, {"refresh_every": 2}, {"friction": 0.1}], 1), ids=str)
def test_the_distribution_is_exact_at_a_long_step(key, settings):
    p, accept_prob = p_value(key, metropolis=True, **settings)
    assert p > 1e-4
    assert 0.1 < accept_prob < 0.95


@pytest.mark.slow
def test_the_same_step_without_the_test_is_seen_to_be_wrong(key):
    p, accept_prob = p_value(key)
    assert p < 1e-6
    assert accept_prob < 0.95  # what a test would accept


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["half the ratio", "twice the ratio"])
def test_a_wrong_ratio_is_seen(key, factor):
    right = mclmc.accept
    with mock.patch.object(mclmc, "accept", lambda key, log_ratio: right(key, factor * log_ratio)):
        p, _ = p_value(key, metropolis=True, num_transitions=20)
    assert p < 1e-6


def test_work_that_is_left_out_is_seen(key):
    right = mclmc.turn
    with mock.patch.object(mclmc, "turn", lambda *given: (right(*given)[0], jnp.zeros(()))):
        p, _ = p_value(key, metropolis=True)
    assert p < 1e-6


@pytest.mark.slow
def test_a_momentum_that_is_not_reversed_after_a_rejection_is_seen(key):
    with mock.patch.object(mclmc.jnp, "negative", lambda p: p):
        p, _ = p_value(key, metropolis=True, friction=0.01, num_transitions=10)
    assert p < 1e-6


# ---- the kernels ---------------------------------------------------------------------------------


def line(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size):
        rows, targets = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(rows @ w, 0.5), obs=targets)


def table(num_inputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, num_inputs)).astype(np.float32)
    return x, (x[:, 0] + 0.5 * rng.normal(size=60)).astype(np.float32)


def run(kernel, *args, num_warmup=20, num_samples=10, **kwargs):
    mcmc = fs.MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *args, **kwargs)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("metropolis", [False, True])
def test_linear_regression_has_its_posterior_at_defaults(metropolis):
    """Standard deviations within 5 %; a step of 0.9 acceptance makes them about 1 % too large without the test."""
    x, y = table(12)
    precision = np.eye(12) + x.T.astype(float) @ x / 0.25
    mean, sd = np.linalg.solve(precision, x.T.astype(float) @ y / 0.25), np.sqrt(np.diag(np.linalg.inv(precision)))
    w = run(fs.MCLMC(line, metropolis=metropolis), x, y, num_warmup=500, num_samples=1500).get_samples()["w"]
    assert np.abs((np.mean(w, 0) - mean) / sd).max() < 0.1
    np.testing.assert_allclose(np.std(w, 0) / sd, 1.0, atol=0.05)


def network(x, y=None):
    net = nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)])
    gp, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), fs.measurement.fixed(np.linspace(-1.0, 1.0, 10)[:, None])
    f = fs.gp_network("f", net, gp, points)
    numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.3), obs=y)


@pytest.mark.slow
def test_an_exact_functional_prior_gives_the_process_s_posterior():
    """With the last layer integrated out. Means of f within a fifth of an sd: the network is not the process itself."""
    x = np.linspace(-1.0, 1.0, 12, dtype=np.float32)[:, None]
    y = np.sin(3.0 * x[:, 0])
    mcmc = run(fs.fMCLMC(network), x, y, num_warmup=300, num_samples=500)
    f = np.asarray(fs.predict(mcmc, jax.random.key(1), x)["f"], float)[..., 0]
    process = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)).condition(x, y, noise_variance=0.09)
    mean, covariance = process.moments(x)
    sd = np.sqrt(np.diagonal(np.squeeze(np.asarray(covariance))))
    assert np.abs((f.mean(0) - np.ravel(mean)) / sd).max() < 0.2
    np.testing.assert_allclose(f.std(0) / sd, 1.0, atol=0.1)
    assert mcmc.last_state.mean_accept_prob.min() > 0.75


def random_points(x, y=None):
    f = fs.random_module("net", nn.Dense(1), input_shape=x.shape[1])
    f = fs.functional_prior("f", f, fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), fs.measurement.uniform(-1.0, 1.0, 4))
    numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.3), obs=y)


@pytest.mark.parametrize(
    ("kernel", "arguments", "reason"),
    [
        (fs.MCLMC(line), {"batch_size": 10}, "MCLMC needs the exact density, but minibatches"),
        (fs.fMCLMC(random_points), {}, "fMCLMC needs the exact density, but minibatches, random measurement points"),
        (fs.MCLMC(line, step_size=lambda count: 0.1), {}, "step_size is a schedule"),
        (fs.fMCLMC(line), {}, "declares a prior over functions"),
        (fs.MCLMC(line), {"num_inputs": 1}, "at least two parameters"),
    ],
)
def test_what_it_cannot_sample_is_refused(kernel, arguments, reason):
    arguments = dict(arguments)
    x, y = table(arguments.pop("num_inputs", 2))
    if kernel.model is random_points:
        x = x[:, :1]
    with pytest.raises(ValueError, match=reason):
        run(kernel, x, y, **arguments)


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        ({"friction": 0.0}, ValueError, "friction"),
        ({"refresh_every": 3}, ValueError, "must divide num_steps=20"),
        ({"step_size": True}, TypeError, "step_size must be a positive number, got True"),
        ({"metropolis": None}, TypeError, "metropolis must be True or False"),
    ],
)
def test_settings_are_checked(settings, error, reason):
    with pytest.raises(error, match=reason):
        fs.MCLMC(line, **settings)


def test_a_step_that_a_test_would_refuse_is_warned_of():
    x, y = table(3)
    with pytest.warns(RuntimeWarning, match=r"would accept only \d+ % of the moves"):
        run(fs.MCLMC(line, step_size=0.12, preconditioner=fs.preconditioners.identity()), x, y, num_samples=50)
