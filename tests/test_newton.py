"""The warm start of few parameters: any units, correlations and scales, and its preconditioner."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import linen as nn
from jax.flatten_util import ravel_pytree

import numpyro_fspace as fs
from numpyro_fspace.mcmc.warmup.newton import approach, hessian
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.sgmcmc.linear_maps import Dense, PartlyDense, narrowed, put, take, whitened


def run(kernel, *args, seed=0, num_samples=600):
    settings = {"num_samples": num_samples, "num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(kernel, num_warmup=200, **settings)
    mcmc.run(jax.random.key(seed), *args)
    return mcmc


def flat(support, *shape):
    return dist.ImproperUniform(support, shape, ())


def linear(X, y=None):
    beta = numpyro.sample("beta", flat(dist.constraints.real, X.shape[1]))
    sigma = numpyro.sample("sigma", flat(dist.constraints.positive))
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGHMC, fs.SGLD])
@pytest.mark.parametrize("unit", [3e4, 2e-5])
def test_a_regression_in_raw_units_with_flat_priors_has_its_closed_form(kernel, unit):
    """With s² = RSS / (N - 3), beta is Student's t and (N - 3) s² / sigma² chi-squared, of N - 3 degrees of freedom."""
    rng = np.random.default_rng(3)
    X = np.stack([np.ones(80), rng.uniform(1750, 1850, 80)], 1).astype(np.float32)
    y = (unit * (X @ [-50.0, 0.04] + rng.normal(size=80))).astype(np.float32)
    draws = run(kernel(linear), X, y).get_samples()
    X, y, dof = X.astype(float), y.astype(float), 77
    mean = np.linalg.lstsq(X, y, rcond=None)[0]
    variance = np.sum((y - X @ mean) ** 2) / dof
    sd = np.sqrt(variance * dof / (dof - 2) * np.diag(np.linalg.inv(X.T @ X)))
    beta, sigma = np.asarray(draws["beta"], float), np.asarray(draws["sigma"], float)
    np.testing.assert_allclose((beta.mean(0) - mean) / sd, 0.0, atol=0.2)
    np.testing.assert_allclose(beta.std(0) / sd, 1.0, atol=0.12)
    np.testing.assert_allclose(np.mean(sigma**2) / (variance * dof / (dof - 2)), 1.0, atol=0.03)


def counts(x, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    numpyro.sample("y", dist.Poisson(jnp.exp(intercept + slope * x)), obs=y)


@pytest.mark.slow
def test_counts_by_a_column_of_thousands_start_where_the_density_overflows():
    rng = np.random.default_rng(4)
    x = rng.uniform(0.0, 5000.0, 60)
    y = rng.poisson(np.exp(0.5 + 4e-4 * x))
    draws = run(fs.SGHMC(counts), x.astype(np.float32), y.astype(np.float32)).get_samples()
    a, b = np.meshgrid(np.linspace(-1, 2, 301), np.linspace(0.0, 1e-3, 301), indexing="ij")
    log_rate = a[..., None] + b[..., None] * x
    log_density = np.sum(y * log_rate - np.exp(log_rate), -1) - (a**2 + b**2) / 18
    weights = np.exp(log_density - log_density.max())
    for name, grid in (("intercept", a), ("slope", b)):
        mean = np.average(grid, weights=weights)
        sd = np.sqrt(np.average((grid - mean) ** 2, weights=weights))
        np.testing.assert_allclose((np.mean(draws[name]) - mean) / sd, 0.0, atol=0.2)
        np.testing.assert_allclose(np.std(draws[name]) / sd, 1.0, atol=0.12)


def groups(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1e4))
    spread = numpyro.sample("spread", flat(dist.constraints.positive))
    value = numpyro.sample("value", dist.Normal(mean, spread).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(value, 50.0).to_event(1), obs=y)


@pytest.mark.slow
def test_the_scale_of_groups_does_not_go_to_zero_with_their_spread(key):
    """The density is unbounded where all groups are equal and their scale is zero; the posterior is elsewhere."""
    y = jnp.asarray(4000.0 + 300.0 * np.random.default_rng(5).normal(size=12), jnp.float32)
    spread = run(fs.SGHMC(groups), y).get_samples()["spread"]
    grid = np.linspace(10.0, 3000.0, 5000)
    variance = grid**2 + 50.0**2
    log_density = -5.5 * np.log(variance) - 0.5 * np.sum((y - y.mean()) ** 2) / variance  # the mean integrated out
    weights = np.exp(log_density - log_density.max())
    mean = np.average(grid, weights=weights)
    sd = np.sqrt(np.average((grid - mean) ** 2, weights=weights))
    assert abs(np.mean(spread) - mean) < 0.25 * sd
    assert 0.8 < np.std(spread) / sd < 1.25


def test_float32_serves_for_a_condition_number_of_ten_to_the_tenth(key):
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(40, 4)) @ np.triu(np.ones((4, 4))) * [1.0, 1e3, 1e-2, 10.0]
    target = rng.normal(size=4) * [1e3, 1.0, 1e5, 1e2]
    rows, y = jnp.asarray(rows, jnp.float32), jnp.asarray(rows @ target, jnp.float32)

    def potential(w):
        return 0.5 * jnp.sum((rows @ w - y) ** 2)

    position, factor = approach(key, jnp.zeros(4), jnp.eye(4), potential, scale=jnp.ones(4), num_steps=100)
    np.testing.assert_allclose(position, target, rtol=1e-3)
    np.testing.assert_allclose(hessian(potential, position, Dense(factor)), np.eye(4), atol=1e-3)


@pytest.mark.slow
def test_the_map_is_frozen_after_warm_up_and_the_same_in_every_run():
    y = jnp.asarray(np.random.default_rng(7).normal(900.0, 20.0, 30), jnp.float32)
    X = jnp.ones((30, 1))
    first, again = (run(fs.SGHMC(linear), X, y, num_samples=50) for _ in range(2))
    np.testing.assert_array_equal(first.get_samples()["beta"], again.get_samples()["beta"])
    factor = np.asarray(first.last_state.warmup.learned.factor)
    first.post_warmup_state = first.last_state
    first.run(jax.random.key(1), X, y)
    np.testing.assert_array_equal(first.last_state.warmup.learned.factor, factor)


def columns(X, y=None, batch=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=batch) as rows:
        numpyro.sample("y", dist.Normal(X[rows] @ beta, 1.0), obs=y if y is None else y[rows])


def network(X, y=None):
    f = fs.random_module("net", nn.Dense(1), input_shape=X.shape[1])
    numpyro.sample("y", dist.Normal(f(X)[:, 0], 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "num_columns", "kwargs", "is_dense"),
    [
        (columns, 64, {}, True),
        (columns, 65, {}, False),
        (columns, 3, {"batch": 2}, False),
        (network, 3, {}, False),
    ],
)
def test_the_default_is_dense_for_few_parameters_whose_density_is_known(key, model, num_columns, kwargs, is_dense):
    args = (jnp.ones((5, num_columns)), jnp.ones(5))
    parameters = ModelPotential(model, args, kwargs, key=key).parameters()
    assert parameters.size == num_columns + (model is network)
    chosen = fs.SGHMC(model).preconditioner.chosen(parameters)
    assert chosen.is_dense == is_dense
    given = fs.preconditioners.rmsprop()
    assert given.chosen(parameters) is given


def counts_of_process(x, y=None, likelihood=dist.Poisson):
    f = fs.gp_network("f", nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)]), PROCESS, POINTS)(x)[:, 0]
    numpyro.sample("y", dist.Normal(f, 0.1) if likelihood is dist.Normal else likelihood(jnp.exp(f)), obs=y)


PROCESS = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
POINTS = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]


def test_the_default_is_dense_in_the_values_of_a_process_that_are_sampled(key):
    args = POINTS, jnp.ones(len(POINTS))
    for likelihood, is_sampled in ((dist.Poisson, True), (dist.Normal, False)):
        kernel = fs.fSGHMC(counts_of_process)
        plan = kernel.prepare(args, {"likelihood": likelihood}, 20)
        assert bool(plan.preconditioner.ranges) == is_sampled
    hidden = 8 + 8 + 9 + 6  # weights, biases, last layer, residual come before the values
    assert fs.fSGHMC(counts_of_process).prepare(args, {}, 20).preconditioner.ranges == ((hidden, hidden + 6),)


def two_groups(rows, y):
    """Normal parameters with known covariances: those of a are correlated and of different scales, those of b not."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([70]).to_event(1))
    numpyro.sample("of_a", dist.Normal(rows @ a, 0.1), obs=y)
    numpyro.sample("of_b", dist.Normal(b, 1.0), obs=jnp.ones(70))


@pytest.mark.slow
def test_named_sites_get_a_matrix_and_the_others_a_diagonal():
    """S Sᵀ is the inverse Hessian of "a", the rest that of rmsprop, and the draws have their closed form."""
    rng = np.random.default_rng(0)
    rows = np.float32(rng.normal(size=(30, 3)) @ np.array([[1.0, 1.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 10.0]]))
    y = np.float32(rows @ [1.0, -1.0, 0.5] + 0.1 * rng.normal(size=30))
    mcmc = run(fs.SGHMC(two_groups, preconditioner=fs.preconditioners.dense("a")), rows, y, num_samples=1000)
    precision = np.eye(3) + rows.T.astype(float) @ rows / 0.01
    for factor in np.asarray(mcmc.last_state.warmup.learned.factor, float):
        np.testing.assert_allclose(factor.T @ precision @ factor, np.eye(3), atol=1e-2)
    assert np.all(np.asarray(mcmc.last_state.warmup.step_size) > 0.2)  # 0.05 with rmsprop alone
    draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples().items()}
    covariance = np.linalg.inv(precision)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((draws["a"].mean(0) - covariance @ rows.T @ y / 0.01) / sd, 0.0, atol=0.2)
    np.testing.assert_allclose(np.cov(draws["a"].T) / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=0.15)
    np.testing.assert_allclose(draws["b"].mean(), 0.8, atol=0.02)
    np.testing.assert_allclose(draws["b"].std(0).mean(), np.sqrt(0.8), atol=0.03)


def test_a_partly_dense_map_is_its_matrix(key):
    ranges, scale, factor = ((1, 3), (4, 5)), jnp.arange(1.0, 7.0), jax.random.normal(key, (3, 3))
    metric = PartlyDense(scale, factor, ranges)
    matrix = np.diag(np.arange(1.0, 7.0))
    matrix[np.ix_([1, 2, 4], [1, 2, 4])] = factor
    u = np.cos(np.arange(6.0))
    np.testing.assert_allclose(metric.scale(jnp.asarray(u)), matrix @ u, rtol=1e-5)
    np.testing.assert_allclose(metric.scale_gradient(jnp.asarray(u)), matrix.T @ u, rtol=1e-5)


def of_noise(x, y=None, batch=None):
    """A mean and a log noise that are functions with process values of their own, in minibatches."""
    mean, noise = (
        fs.gp_network(name, nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)]), PROCESS, POINTS)
        for name in ("mean", "noise")
    )
    with numpyro.plate("rows", len(x), subsample_size=batch) as rows:
        numpyro.sample(
            "y", dist.Normal(mean(x[rows])[:, 0], jnp.exp(noise(x[rows])[:, 0])), obs=y if y is None else y[rows]
        )


@pytest.mark.slow
def test_a_block_of_two_processes_is_the_inverse_hessian(key):
    """At the position where it is learned, averaged over minibatches that are all data here, and not wider than 1."""
    x = jnp.linspace(-1.0, 1.0, 40)[:, None]
    y = jnp.sin(3.0 * x[:, 0]) + 0.3 * jax.random.normal(key, (40,))
    kernel = fs.fSGHMC(of_noise, num_steps=4)
    plan = kernel.prepare((x, y), {"batch": 20}, 20)
    assert [stop - start for start, stop in plan.preconditioner.ranges] == [6, 6]
    model = kernel._model_potential((x, y), {"batch": 20}, key)
    position, unravel = ravel_pytree(model.init_params())
    learned = plan.preconditioner.start(position)
    metric = plan.preconditioner.build(jnp.ones_like(position), learned)
    values = take(position, plan.preconditioner.ranges)

    def energy(values):
        return model(unravel(put(position, plan.preconditioner.ranges, values)), key)[0]

    exact = np.asarray(jax.jit(jax.hessian(energy))(values))
    found = jax.jit(lambda values: hessian(energy, values, Dense(metric.factor)))(values)
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())
    factor = narrowed(whitened(learned.factor, found), 1.0)
    values, vectors = np.linalg.eigh(exact.astype(float))
    expected = vectors / np.maximum(np.abs(values), 1.0) @ vectors.T
    np.testing.assert_allclose(factor @ factor.T, expected, atol=2e-3)


@pytest.mark.slow
def test_two_processes_in_minibatches_are_sampled_and_continued(key):
    x = jnp.linspace(-1.0, 1.0, 60)[:, None]
    y = jnp.sin(3.0 * x[:, 0]) + 0.3 * jax.random.normal(key, (60,))
    mcmc = fs.MCMC(fs.fSGHMC(of_noise), num_warmup=100, num_samples=100, num_chains=2, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(key, x, y, batch=20)
        factor = np.asarray(mcmc.last_state.warmup.learned.factor)
        assert factor.shape == (2, 12, 12)
        assert np.linalg.svd(factor, compute_uv=False).max() < 1.01
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(key, x, y, batch=20)
    np.testing.assert_array_equal(mcmc.last_state.warmup.learned.factor, factor)
    mean = fs.predict(mcmc, key, x)["mean"].mean(0)[:, 0]
    assert np.sqrt(np.mean((mean - jnp.sin(3.0 * x[:, 0])) ** 2)) < 0.2


def continued(model, before, after, *args):
    """A run with one preconditioner, continued with another."""
    settings = {"num_warmup": 4, "num_samples": 2, "progress_bar": False}
    first = fs.MCMC(fs.SGHMC(model, num_steps=2, preconditioner=before), **settings)
    second = fs.MCMC(fs.SGHMC(model, num_steps=2, preconditioner=after), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first.run(jax.random.key(0), *args)
        second.post_warmup_state = first.last_state
        second.run(jax.random.key(0), *args)


@pytest.mark.slow
def test_a_state_with_another_matrix_is_refused():
    rows, y, dense = jnp.ones((4, 3)), jnp.ones(4), fs.preconditioners.dense
    continued(two_groups, dense("a"), dense("a"), rows, y)
    with pytest.raises(ValueError, match=r"another sampler or preconditioner .*dense\('a'\)\) than .*dense\('b'\)"):
        continued(two_groups, dense("a"), dense("b"), rows, y)


@pytest.mark.slow
def test_a_state_with_another_matrix_than_the_default_is_refused():
    with pytest.raises(ValueError, match=r"another .*rmsprop\) than the kernel's .*dense\('f.values'\)"):
        continued(counts_of_process, fs.preconditioners.rmsprop(), None, POINTS, jnp.ones(len(POINTS)))


def test_a_preconditioner_for_a_site_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"dense\('c'\): the model has no such latent site; it has 'a', 'b'"):
        run(fs.SGHMC(two_groups, preconditioner=fs.preconditioners.dense("c")), jnp.ones((4, 3)), jnp.ones(4))
    with pytest.raises(TypeError, match=r"dense\(3\): give names of latent sites"):
        fs.preconditioners.dense(3)
    assert repr(fs.preconditioners.dense("a", "b")) == "fs.preconditioners.dense('a', 'b')"


def far(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1e5))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(("num", "is_warned"), [(10_000, True), (20, False)])
def test_a_parameter_known_to_its_last_digits_is_warned_of(num, is_warned):
    y = jnp.full((num,), 5e4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(fs.SGHMC(far), y, num_samples=50)
    assert any("Float32 does not resolve" in str(w.message) for w in caught) == is_warned


class Correlated(fs.preconditioners.Preconditioner):
    """A user's matrix, which learns nothing: two parameters with a given correlation."""

    is_dense = True

    def build(self, scale, learned=None):
        return Dense(jnp.diag(scale) @ jnp.asarray([[1.0, 0.0], [0.6, 0.8]]))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 10], ids=["all data", "minibatches"])
def test_a_users_own_matrix_that_learns_nothing_has_the_posterior(batch_size):
    x, y = jnp.linspace(-1.0, 1.0, 40), 0.5 * jnp.linspace(-1.0, 1.0, 40) + 0.3

    def line(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", 40, subsample_size=batch_size):
            x, y = (numpyro.subsample(a, event_dim=0) for a in (x, y))
            numpyro.sample("y", dist.Normal(w[0] + w[1] * x, 0.5), obs=y)

    w = np.asarray(run(fs.SGHMC(line, preconditioner=Correlated()), x, y).get_samples()["w"])
    design = np.stack([np.ones(40), x], 1)
    covariance = np.linalg.inv(np.eye(2) + design.T @ design / 0.25)
    mean = covariance @ design.T @ np.asarray(y) / 0.25
    np.testing.assert_allclose((w.mean(0) - mean) / np.sqrt(np.diag(covariance)), 0.0, atol=0.25)
    np.testing.assert_allclose(w.std(0) / np.sqrt(np.diag(covariance)), 1.0, atol=0.15)
