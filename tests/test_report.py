"""``report`` is quiet on a good run and names what is wrong with each kind of bad one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import linen as nn
from numpyro.infer import MCMC as NumPyroMCMC
from numpyro.infer import NUTS
from tinygp.kernels import ExpSquared

import numpyro_fspace as fs
from numpyro_fspace.mcmc.reporting import report as reporting
from numpyro_fspace.mcmc.reporting.doubts import advice
from numpyro_fspace.mcmc.reporting.report import Report
from numpyro_fspace.mcmc.warmup.friction import differences_of, noise_variances
from numpyro_fspace.posterior.convergence_doubts import Doubt
from numpyro_fspace.posterior.diagnostics import diagnose
from numpyro_fspace.posterior.judged_quantities import quantities_of

NUM_DATA = 64


@pytest.fixture(scope="module")
def data():
    key_x, key_y = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (NUM_DATA, 3))
    return x, x[:, 0] + 0.5 * jax.random.normal(key_y, (NUM_DATA,))


def linear(weights=None, batch_size=None):
    def model(x, y=None):
        f = fs.random_module("f", nn.Dense(1, use_bias=False), input_shape=(x.shape[1],), prior=weights)
        with numpyro.plate("data", len(x), subsample_size=batch_size):
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb)[:, 0], 0.5), obs=yb)

    return model


def run(kernel, data, num_warmup=200, num_samples=600, num_chains=2):
    mcmc = numpyro.infer.MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *data)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGHMC, fs.SGLD])
def test_quiet_on_a_good_run(kernel, data):
    found = fs.report(run(kernel(linear()), data), *data)
    assert found.advice == ()
    assert "No doubts." in str(found)
    assert found.functions.max_rhat < 1.05
    assert found.acceptance > 0.7
    np.testing.assert_allclose(found.drift, 1.0, atol=0.2)
    assert np.isnan(found.temperature).all() == (kernel is fs.SGLD)


@pytest.mark.slow
def test_one_chain(data):
    found = fs.report(run(fs.SGHMC(linear()), data, num_chains=1), *data)
    assert found.temperature.shape == found.drift.shape == (1,)
    assert found.advice == ()


@pytest.mark.slow
def test_names_chains_that_have_not_met(data):
    kernel = fs.SGLD(linear(), step_size=1e-6, warmup=fs.Warmup(warm_start=0.0))
    advice = fs.report(run(kernel, data, 10, 50), *data).advice
    assert any(line.startswith("R-hat of f reaches") for line in advice)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key": 0}, TypeError, "key must be a random key.*got 0"),
        ({"inputs": np.full((2, 3), np.nan)}, ValueError, "inputs holds NaN"),
        pytest.param(
            {"inputs": "a"}, TypeError, "inputs must be an array of real numbers, got str", marks=pytest.mark.slow
        ),
        pytest.param(
            {"inputs": np.ma.masked_less(np.eye(3), 1.0)},
            TypeError,
            "inputs must be .*mask would be lost",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"y": np.ma.masked_less(np.ones(NUM_DATA), 2.0)},
            TypeError,
            "argument 'y' of report is a masked array",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_are_named(data, given, error, message):
    mcmc = numpyro.infer.MCMC(
        fs.SGLD(linear(), step_size=1e-3), num_warmup=1, num_samples=2, num_chains=1, progress_bar=False
    )
    mcmc.run(jax.random.key(0), *data)
    args = data[:1] if "y" in given else data
    with pytest.raises(error, match=message):
        fs.report(mcmc, *args, **given)


def placed(model, starts, *data, kernel=fs.SGLD, **settings):
    """A run whose chains stay at ``starts`` [C, …] of the weights."""
    kernel = kernel(model, step_size=1e-10, warmup=fs.Warmup(warm_start=0.0), control_variates=False, **settings)
    mcmc = fs.MCMC(
        kernel,
        num_warmup=1,
        num_samples=10,
        num_chains=len(starts),
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = jnp.asarray(starts, jnp.float32)[..., None]
    mcmc.run(jax.random.key(0), *data, init_params={"f.kernel": starts if len(starts) > 1 else starts[0]})
    return fs.report(mcmc, *data)


APART = "the log likelihood of chain"


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 8])
def test_names_a_chain_that_is_stuck(data, batch_size):
    """Of three chains that hardly move one is far from where the data want it; a row that minibatches seldom hold."""
    x, y = (np.array(values) for values in data)
    y[5] = 100.0
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    starts = np.stack([best, best + 0.01, best + 2.0])
    found = placed(linear(batch_size=batch_size), starts, x, y)
    loss = 0.5 * np.sum((y - starts @ x.T) ** 2, 1) / 0.5**2
    np.testing.assert_allclose(found.shortfall, loss - loss[0], rtol=1e-3, atol=0.1)
    (line,) = [line for line in found.advice if line.startswith(APART)]
    assert "the log likelihood of chain 2 (the first being 0) is " in line
    alone = placed(linear(batch_size=batch_size), starts[2:], x, y)
    assert alone.shortfall == 0.0 and not any(line.startswith(APART) for line in alone.advice)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*draws diverged:RuntimeWarning")  # where a minibatch holds the row
def test_names_a_chain_whose_likelihood_is_no_number(data):
    x, y = data

    def model(x, y):
        f = fs.random_module("f", nn.Dense(1, use_bias=False), input_shape=(3,))
        with numpyro.plate("data", len(x), subsample_size=8):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            mean = f(xb)[:, 0]
            numpyro.sample("y", dist.Normal(jnp.where(mean > 50.0, jnp.nan, mean), 0.5), obs=yb)

    x = x.at[7].set(30.0)  # one row of 64
    starts = np.array([3 * [0.1], 3 * [0.1001], 3 * [2.0]])
    found = placed(model, starts, x, y)
    np.testing.assert_array_equal(np.isinf(found.shortfall), [False, False, True])
    assert any("chain 2 (the first being 0)" in line for line in found.advice)


@pytest.mark.slow
def test_what_chance_allows_of_a_likelihood(data):
    """The square root of half the weights, or of half the data if those are fewer, times the temperature."""
    _, y = data
    for width, temperature, size in ((3, 1.0, 3), (3, 4.0, 3), (300, 1.0, NUM_DATA)):
        mcmc = run(fs.SGHMC(linear(batch_size=8), temperature=temperature), (jnp.ones((NUM_DATA, width)), y), 10, 10)
        target = mcmc.sampler._target(mcmc.last_state.plan, mcmc._args, mcmc._kwargs)
        _, chance = reporting._shortfall(target, mcmc.last_state, jax.random.key(0))
        assert chance == pytest.approx(temperature * np.sqrt(0.5 * size))


def test_a_factor_hides_the_number_of_data(data):
    def model(x, y):
        f = fs.random_module("f", nn.Dense(1), input_shape=(3,))
        numpyro.factor("y", -jnp.sum((y - f(x)[:, 0]) ** 2))

    assert fs.SGLD(model)._model_potential(data, {}).num_observed() == np.inf


@pytest.mark.parametrize(
    ("about", "is_named"), [([], False), (["ESS"], False), (["R-hat"], True), (["movement"], True), (["values"], True)]
)
def test_chains_that_have_met_are_not_apart(about, is_named):
    """The likelihood of latent values of rows varies by more than that of a Gaussian law, and means nothing alone."""
    shortfall = np.array([0.0, 10.1])
    found = Report(None, None, (), 0, np.ones(2), None, 0.9, 0.0, 0.0, np.ones(2), shortfall, {}, ())
    lines = [Doubt(one, "") for one in about]
    said = list(advice(found, convergence=lines, sampler=[], shortfall_sd=1.0, is_tested=False))
    assert any(line.startswith(APART) for line in said) == is_named


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The draws are doubtful:RuntimeWarning")  # a second one
def test_names_noisy_minibatches(data):
    with pytest.warns(RuntimeWarning, match="kinetic temperature"):
        mcmc = run(fs.SGHMC(linear(batch_size=8), step_size=0.02, control_variates=False), data)
    found = fs.report(mcmc, *data)
    assert found.noise_share > 0.5
    assert any("the gradient's noise adds" in line for line in found.advice)
    assert any("kinetic temperature" in line for line in found.advice)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")  # one momentum, and too few steps to renew it
def test_noise_share_is_the_one_of_the_formula(data):
    """One weight, x = 1: the gradient of a row is (w - y_i) / σ², its batch estimate's variance is known."""
    _, y = data
    x = jnp.ones((NUM_DATA, 1))
    batch, epsilon = 8, 2e-5
    found = {}
    for control in (False, True):
        kernel = fs.SGHMC(
            linear(dist.Normal(), batch_size=batch), step_size=epsilon, friction=2.0, control_variates=control
        )
        found[control] = fs.report(run(kernel, (x, y), 100, 100), x, y).noise_share
    variance = NUM_DATA**2 / batch * (1 - batch / NUM_DATA) * np.var(np.asarray(y) / 0.25, ddof=1)
    expected = epsilon * variance / (2.0 * 2.0)
    assert 0.5 * expected < found[False] < 2.0 * expected
    assert found[True] < 1e-6 * expected  # every row has the same second derivative


@pytest.mark.slow
def test_no_noise_without_minibatches(data):
    found = fs.report(run(fs.SGHMC(linear()), data, 50, 50), *data)
    assert found.noise_share < 1e-6 and found.weighted_noise_share < 1e-6


def test_the_old_name_of_the_weighted_share_works_and_warns():
    found = fs.mcmc.Report(None, None, (), 0, np.ones(2), None, 0.9, 0.1, 0.5, np.ones(2), np.zeros(2), {}, ())
    with pytest.warns(DeprecationWarning, match="now Report.weighted_noise_share"):
        assert found.noise_heat == found.weighted_noise_share == 0.5


def test_variances_of_noise_are_unbiased():
    """Means over 4000 sets of 16 gradients whose variances are 9, 4 and 97 times .01; within 4.5 standard errors."""
    variances = jnp.append(jnp.array([9.0, 4.0]), jnp.full(97, 0.01))
    noise = jnp.sqrt(variances) * jax.random.normal(jax.random.key(0), (4000, 16, 99))
    traces, weighted = (np.asarray(v) for v in jax.vmap(lambda g: noise_variances(differences_of(g)))(1.0 + noise))
    trace, square = float(jnp.sum(variances)), float(jnp.sum(variances**2))
    found = {trace: traces, square: traces * weighted}
    for expected, values in found.items():
        assert abs(values.mean() - expected) < 4.5 * values.std() / np.sqrt(len(values))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
def test_names_heat_that_few_directions_hide(data):
    """The data inform one of 300 weights, in minibatches: the share says by how much its variance is too large."""
    _, y = data
    x = jnp.zeros((NUM_DATA, 300)).at[:, 0].set(1.0)
    settings = {"step_size": 0.01, "num_steps": 20, "control_variates": False, "warmup": fs.Warmup(warm_start=0.0)}
    settings |= {"preconditioner": fs.preconditioners.identity()}
    mcmc = run(fs.SGHMC(linear(dist.Normal(), batch_size=20), **settings), (x, y), 100, 800)
    found = fs.report(mcmc, x, y)
    precision = 1.0 + NUM_DATA / 0.5**2
    hotter = float(jnp.var(mcmc.get_samples()["f.kernel"][:, 0])) * precision
    assert found.noise_share < 0.1 and (found.temperature < 1.1).all()
    assert 0.5 * hotter < 1.0 + found.weighted_noise_share < 2.0 * hotter
    assert any("times that of the rest" in line for line in found.advice)


@pytest.mark.slow
def test_names_a_drift_of_the_weights(data):
    """A flat prior on thirty weights that the data never see: they walk away."""
    x, y = data
    x = jnp.concatenate([x, jnp.zeros((len(x), 30))], 1)
    kernel = fs.SGHMC(linear(fs.model.flat()), step_size=0.03, warmup=fs.Warmup(warm_start=0.0))
    found = fs.report(run(kernel, (x, y), 10, 400), x, y)
    assert (found.drift > 1.2).all()
    assert any("improper" in line for line in found.advice)


@pytest.mark.slow
def test_names_steps_a_metropolis_test_would_refuse(data):
    """Near the limit of stability BAOAB is exact on this Gaussian, so nothing but the acceptance can tell."""
    x = jnp.eye(NUM_DATA)
    y = jnp.zeros(NUM_DATA)
    stiffest = np.sqrt(1.0 + 4.0)  # standardized: prior precision 1, likelihood 1 / .25
    found = fs.report(run(fs.SGHMC(linear(dist.Normal()), step_size=1.8 / stiffest, metropolis=False), (x, y)), x, y)
    assert found.acceptance < 0.3
    assert any("a Metropolis test would accept" in line for line in found.advice)


@pytest.mark.slow
def test_latent_values_of_any_support(data):
    """A simplex has fewer unconstrained values than constrained ones, and a positive one another unit."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3)))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        points = fs.measurement.fixed(np.linspace(-1.0, 1.0, 5)[:, None])
        f = fs.functional_prior("f", lambda x: scale * x[:, 0] * w[0], fs.GPPrior(lambda a, b: 1.0 + a @ b.T), points)
        numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)

    found = fs.report(run(fs.fSGHMC(model), data), *data)
    assert (found.drift > 0.5).all() and (found.drift < 2.0).all()


@pytest.mark.slow
def test_counts_divergences(data):
    kernel = fs.SGHMC(linear(), step_size=1e3, warmup=fs.Warmup(warm_start=0.0), metropolis=False)
    with pytest.warns(RuntimeWarning, match="diverged"):
        mcmc = run(kernel, data, 10, 20)
    found = fs.report(mcmc, *data)
    assert found.num_diverging == 40
    assert any("draws diverged" in line for line in found.advice)


@pytest.mark.slow
@pytest.mark.parametrize("driver", [fs.MCMC, NumPyroMCMC])
def test_runs_of_other_kernels_are_judged_by_their_draws(driver):
    """The same quantities as of our kernels; what NUTS does not tell is left out of the table."""
    x = np.linspace(-1.0, 1.0, 12, dtype=np.float32)[:, None]
    points = x[::3]

    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1, prior=fs.fan_in(0.01))
        fs.functional_prior("f", lambda x: f(x)[:, 0], fs.GPPrior(ExpSquared(1.0)), points)
        sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 0.3))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)

    settings = {"num_samples": 60, "num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = driver(NUTS(model, max_tree_depth=3), num_warmup=60, **settings)
    mcmc.run(jax.random.key(0), x, x[:, 0])
    found = fs.report(mcmc)
    judged = quantities_of(model, mcmc.get_samples(group_by_chain=True), (x, x[:, 0]), {})
    for mine, points_of in zip((found.functions, found.sites), judged[:2], strict=True):
        np.testing.assert_array_equal(mine.rhat, diagnose(*points_of).rhat)
    assert found.num_diverging == int(mcmc.get_extra_fields()["diverging"].sum())
    np.testing.assert_allclose(found.acceptance, np.mean(mcmc.last_state.mean_accept_prob))
    assert "nan" not in str(found) and "R-hat" in str(found) and "diverging" in str(found)
    assert "temperature" not in str(found) and found.configurational is None
    assert found.product_shares["f"] < 0.1 and "gp_network" in found.advice[-1]


@pytest.mark.slow
def test_divergences_of_nuts_are_doubted():
    def funnel(y=None):
        scale = numpyro.sample("scale", dist.Normal(0.0, 3.0))
        x = numpyro.sample("x", dist.Normal(0.0, jnp.exp(scale / 2.0)).expand([30]).to_event(1))
        numpyro.sample("y", dist.Normal(x[0], 1.0), obs=y)

    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    kernel = NUTS(funnel, step_size=1.0, max_tree_depth=4, **fixed)
    mcmc = NumPyroMCMC(kernel, num_warmup=20, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), 0.3)
    found = fs.report(mcmc)
    assert found.num_diverging > 0
    assert any("draws diverged" in line and "target_accept_prob" in line for line in found.advice)


@pytest.mark.slow
def test_refuses_what_it_cannot_judge(data):
    by_density = NUTS(potential_fn=lambda z: 0.5 * z**2)
    with pytest.raises(TypeError, match="NUTS was given none"):
        fs.report(fs.MCMC(by_density, num_warmup=1, num_samples=1), *data)
    with pytest.raises(ValueError, match="call run first"):
        fs.report(fs.MCMC(NUTS(linear()), num_warmup=1, num_samples=1), *data)
    with pytest.raises(TypeError, match=r"got Posterior\. Print the report of a run before it is saved"):
        fs.report(fs.Posterior(linear(), {"w": np.zeros((4, 2))}, args=data))
    with pytest.raises(TypeError, match="got int"):
        fs.report(3)
    with pytest.raises(ValueError, match="call run first"):
        fs.report(fs.MCMC(fs.SGHMC(linear()), num_warmup=1, num_samples=1), *data)

    def no_network(y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal()), 1.0), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(no_network), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.ones(()))
    with pytest.raises(ValueError, match="no f to judge"):
        fs.report(mcmc, 1.0, inputs=jnp.ones((3, 1)))
    assert fs.report(mcmc, 1.0).sites.names == ("mu",)

    def uncalled(y=None):
        fs.random_module("f", nn.Dense(1), input_shape=1)
        no_network(y)

    mcmc = fs.MCMC(fs.SGHMC(uncalled), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.ones(()))
    found = fs.report(mcmc, 1.0)
    assert found.functions is None and any(line.startswith("f (it reaches") for line in found.left_out)
    with pytest.raises(ValueError, match=r"report judges \['f'\], got inputs of \['g'\]"):
        fs.report(mcmc, 1.0, inputs={"g": jnp.ones((3, 1))})


@pytest.mark.slow
def test_arguments_are_those_of_the_run(data):
    mcmc = run(fs.SGHMC(linear(), num_steps=5), data, 50, 50)
    assert repr(fs.report(mcmc)) == repr(fs.report(mcmc, *data))


@pytest.mark.slow
def test_judges_other_networks_if_asked():
    """A network of the noise beside the function under a prior: not part of f, but there for who names it."""
    gp = fs.GPPrior(tinygp.kernels.ExpSquared(1.0))

    def model(x, y=None):
        f = fs.random_module("net", nn.Dense(1), input_shape=1)
        f = fs.functional_prior("f", f, gp, fs.measurement.uniform(-1.0, 1.0, 4))
        noise = fs.random_module("noise", nn.Dense(1), input_shape=1)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], jnp.exp(noise(x)[:, 0])).to_event(1), obs=y)

    x = jnp.linspace(-1.0, 1.0, 40)[:, None]
    y = x[:, 0] + 0.5 * jax.random.normal(jax.random.key(1), (40,))
    mcmc = run(fs.fSGHMC(model), (x, y), num_warmup=300, num_samples=200)

    def judged(**given):
        return {name.split("[")[0].split(" at ")[0] for name in fs.report(mcmc, **given).functions.names}

    assert judged() == judged(inputs={"f": x}) == {"f"}
    assert judged(inputs={"f": x, "noise": x}) == {"f", "noise"}
    with pytest.raises(ValueError, match=r"report judges .*'noise'.* got inputs of .'nois'"):
        fs.report(mcmc, inputs={"nois": x})


@pytest.mark.slow
@pytest.mark.parametrize("scale", [lambda n: 2.0 * jnp.ones(n), lambda n: np.ones(n)], ids=["of JAX", "of NumPy"])
def test_a_model_whose_likelihood_is_scaled_by_an_array(scale):
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        with numpyro.plate("data", len(y)), numpyro.handlers.scale(scale=scale(len(y)) + 1.0):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    mcmc = run(fs.SGHMC(model), (jax.random.normal(jax.random.key(1), (50,)),), num_warmup=200, num_samples=200)
    assert "Sites" in str(fs.report(mcmc))


@pytest.mark.slow
def test_drift_where_a_support_depends_on_another_site():
    """The weights' mean square is that of unconstrained values, which the chain has."""

    def bounded(y):
        low = numpyro.sample("low", dist.Normal())
        high = numpyro.sample("high", dist.TruncatedNormal(0.0, 1.0, low=low))
        numpyro.sample("y", dist.Normal(high, 1.0).expand([3]).to_event(1), obs=y)

    mcmc = fs.MCMC(fs.SGHMC(bounded), num_warmup=100, num_samples=200, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.zeros(3), extra_fields=("z.low", "z.high"))
    z, scale = mcmc.get_extra_fields(), np.asarray(mcmc.last_state.scale)
    squares = np.stack([np.asarray(z["z.high"]), np.asarray(z["z.low"])], 1) ** 2 / scale**2
    squares = squares.sum(1)
    assert fs.report(mcmc).drift == pytest.approx(squares[-50:].mean() / squares[:50].mean(), rel=1e-3)
