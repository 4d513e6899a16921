"""What runs and predictions are warned of: chains apart, at rest or too wide, wherever they are; and what is not."""

from __future__ import annotations

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen as nn
from models import NOISE, Independent, X, Y, linear, run
from numpyro.infer import NUTS
from tinygp.kernels import ExpSquared
from tinygp.transforms import Linear

import numpyro_fspace as fs
from numpyro_fspace.mcmc.reporting import doubts, end_of_run
from numpyro_fspace.mcmc.state import with_chains
from numpyro_fspace.posterior.configurational_temperature import ConfigurationalTemperature, configurational_temperature
from numpyro_fspace.posterior.convergence_doubts import convergence_doubts
from numpyro_fspace.posterior.diagnostics import FunctionDiagnostics, diagnose
from numpyro_fspace.posterior.judged_draws import judged_draws
from numpyro_fspace.posterior.judged_quantities import quantities_of
from numpyro_fspace.posterior.model_structure import structure
from numpyro_fspace.posterior.rhat_ess import standstill
from numpyro_fspace.posterior.thresholds import MIN_RUN

KEY = jax.random.key(0)


def temperature(model, draws, *args, kernel=fs.SGHMC, **settings):
    """Of given draws [C, S, …], with the preconditioner of a kernel that has hardly run."""
    kernel = kernel(model, step_size=1e-3, num_steps=2, **settings)
    mcmc = fs.MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(KEY, *args)
    num_chains = len(next(iter(draws.values())))
    state = jax.tree.map(lambda a: jnp.broadcast_to(a, (num_chains, *a.shape)), mcmc.last_state)
    draws = {k: np.asarray(v, np.float32) for k, v in draws.items()}
    return configurational_temperature(kernel, state, draws, args, {}, key=jax.random.key(1), share=1e9)


def gaussian(precision, mean, shape, factor=1.0, seed=0):
    """Draws of a Gaussian whose covariance is ``factor`` times the inverse of ``precision``."""
    noise = np.random.default_rng(seed).normal(size=(*shape, len(mean)))
    return mean + np.sqrt(factor) * noise @ np.linalg.inv(np.linalg.cholesky(precision))


def posterior(x, y, noise, extra=0.0):
    """Precision and mean of linear regression, weights N(0, 1)."""
    x = np.asarray(x, np.float64)
    precision = np.eye(x.shape[1]) + x.T @ x / noise**2 + extra
    return precision, np.linalg.solve(precision, x.T @ np.asarray(y, np.float64) / noise**2)


@pytest.mark.parametrize("factor", [0.5, 1.0, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_temperature_is_that_of_the_draws(factor, batch):
    precision, mean = posterior(np.concatenate([np.ones_like(X), X], 1), Y, NOISE)
    found = temperature(linear(batch=batch), {"w": gaussian(precision, mean, (4, 300), factor)}, X, Y)
    assert found.mean_error < 0.15 and found.leading_error < 0.2
    assert abs(np.log(found.mean / factor)) < 4 * found.mean_error
    assert abs(np.log(found.leading / factor)) < 4 * found.leading_error


@pytest.mark.slow
def test_temperature_at_random_points_is_that_of_their_mean():
    """Points uniform on [-2, 2], f there N(x, sd²): the mean log prior is quadratic. Their noise is no heat."""
    sd, num = 0.1, 3
    precision, mean = posterior(np.concatenate([np.ones_like(X), X], 1), Y, NOISE)
    mean_square = np.diag([1.0, 4.0 / 3.0]) * num / sd**2
    shift = mean_square @ np.array([0.0, 1.0])
    total = precision + mean_square
    draws = gaussian(total, np.linalg.solve(total, precision @ mean + shift), (4, 300), seed=1)
    points = fs.measurement.uniform(-2.0, 2.0, num)
    found = temperature(linear(points, prior=Independent(sd)), {"w": draws}, X, Y)
    assert found.mean_error < 0.2
    assert abs(np.log(found.mean)) < 4 * found.mean_error and abs(np.log(found.leading)) < 4 * found.leading_error


@pytest.mark.slow
def test_temperature_of_sites_of_any_support():
    """The law is the prior (the data are masked), which can be drawn from."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfCauchy(2.0))
        numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
        numpyro.sample("between", dist.Uniform(0.0, scale))
        with numpyro.handlers.mask(mask=False):
            numpyro.sample("y", dist.Normal(scale, 1.0), obs=y)

    rng = np.random.default_rng(0)
    scale = np.abs(2.0 * rng.standard_cauchy((4, 300)))
    draws = {"scale": scale, "p": rng.dirichlet([2, 3, 4], (4, 300)), "between": scale * rng.uniform(size=(4, 300))}
    found = temperature(model, draws, jnp.ones(()))
    assert found.mean_error < 0.15 and abs(np.log(found.mean)) < 4 * found.mean_error


@pytest.mark.parametrize("shape", [pytest.param((4, 300), marks=pytest.mark.slow), (1, 1200)])
def test_temperature_names_one_hot_direction_of_a_hundred(shape):
    rng = np.random.default_rng(0)
    direction = np.ones(100) / 10.0
    x = (rng.normal(size=(200, 1)) * direction + 0.3 * rng.normal(size=(200, 100))).astype(np.float32)
    y = x @ direction
    precision, mean = posterior(x, y, 0.5)
    draws = gaussian(precision, mean, shape)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal().expand([100]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    found = temperature(model, {"w": draws}, x, y)
    assert doubts.temperature_doubts(found) == []
    _, vectors = np.linalg.eigh(precision)
    hot = draws + (np.sqrt(2.0) - 1.0) * ((draws - mean) @ vectors[:, -1:]) * vectors[:, -1]
    found = temperature(model, {"w": hot}, x, y)
    assert abs(np.log(found.leading / 2.0)) < 4 * found.leading_error
    assert found.mean < 1.2  # which hides it
    (line,) = doubts.temperature_doubts(found)
    assert "in the direction that the data determine best" in line


@pytest.mark.slow
def test_temperature_of_one_chain_that_moves_slowly_in_many_directions():
    """Oscillators which still know in the second half of the draws where they were in the first; all is right."""
    num, size = 300, 1000
    rng, period, memory = np.random.default_rng(0), 60.0, 200.0
    w = np.empty((num, size), complex)
    w[0] = rng.normal(size=size) + 1j * rng.normal(size=size)
    turn = np.exp(2j * np.pi / period - 1.0 / memory)
    for t in range(1, num):
        noise = rng.normal(size=size) + 1j * rng.normal(size=size)
        w[t] = turn * w[t - 1] + np.sqrt(1.0 - abs(turn) ** 2) * noise
    draws = w.real
    draws[:, 0] = 0.1 * rng.normal(size=num)

    def model(y):
        w = numpyro.sample("w", dist.Normal().expand([size]).to_event(1))
        numpyro.sample("y", dist.Normal(w[0], np.sqrt(1 / 99)), obs=y)

    found = temperature(model, {"w": draws[None]}, jnp.zeros(()))
    assert abs(np.log(found.mean)) < 4 * found.mean_error
    assert abs(np.log(found.leading)) < 4 * found.leading_error < 1.0
    assert doubts.temperature_doubts(found) == []


@pytest.mark.slow
def test_temperature_costs_no_more_than_it_may():
    kernel = fs.SGHMC(linear(), step_size=0.1, num_steps=2)
    mcmc = fs.MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(KEY, X, Y)
    state, draws = with_chains(mcmc.last_state), {"w": np.random.default_rng(0).normal(size=(1, 400, 2))}
    draws["w"] = draws["w"].astype(np.float32)

    def num_draws(num_made, share):
        made = state._replace(i=jnp.array([num_made]))
        found = configurational_temperature(kernel, made, draws, (X, Y), {}, key=KEY, share=share)
        return None if found is None else found.num_draws

    assert num_draws(400, 0.06) == 24
    assert num_draws(400, 0.03) == 20  # not 12: twenty may cost a tenth of the run
    assert num_draws(100, 0.03) == 10
    assert num_draws(70, 0.03) is None  # 7


def test_limits_are_wider_where_few_draws_are_looked_at():
    for num_draws, is_said in ((8, False), (20, True)):
        found = ConfigurationalTemperature(1.6, 1.0, 0.1, 0.1, num_draws)  # 4.7 standard errors
        assert bool(doubts.temperature_doubts(found)) == is_said


@pytest.mark.slow
@pytest.mark.parametrize("thinning", [1, 20])
def test_a_short_run_by_small_minibatches_warns(thinning):
    """N/B = 250 and gradients' noise that nothing absorbs; 3 % of the gradient steps afford 4 draws."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1000, 3)).astype(np.float32)
    y = x @ np.array([1.0, -1.0, 0.5], np.float32) + rng.normal(size=1000).astype(np.float32)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=4) as rows:
            numpyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    kernel = fs.SGLD(model, step_size=2e-4, num_steps=20, control_variates=False)
    mcmc = fs.MCMC(
        kernel,
        num_warmup=20,
        num_samples=400,
        thinning=thinning,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    with pytest.warns(RuntimeWarning, match="the configurational temperature is"):
        mcmc.run(KEY, x, y)


@pytest.mark.parametrize(
    ("value", "error", "start"),
    [
        (1.25, 0.05, "the configurational temperature is 1.25"),
        (1.25, 0.10, None),  # chance
        (1.15, 0.01, None),
        (0.7, 0.05, "the configurational temperature is 0.70"),
        (0.7, 0.2, None),
        (float("nan"), float("nan"), None),
    ],
)
def test_limits_of_the_temperature(value, error, start):
    found = ConfigurationalTemperature(value, 1.0, error, 0.1, 256)
    lines = doubts.temperature_doubts(found)
    found = ConfigurationalTemperature(value, 1.0, error, 0.1, 256)
    lines = doubts.temperature_doubts(found)
    assert len(lines) == (start is not None) and all(line.startswith(start) for line in lines)


@pytest.mark.parametrize("is_tested, cure", [(False, "Shorten step_size"), (True, "run longer, with a longer warm-up")])
def test_a_test_leaves_only_a_chain_that_has_not_converged(is_tested, cure):
    found = ConfigurationalTemperature(1.25, 1.0, 0.05, 0.1, 256)
    (line,) = doubts.temperature_doubts(found, is_tested=is_tested)
    assert cure in line and ("step_size" in line) == (not is_tested)


def test_a_run_with_too_long_a_step_warns():
    """SGLD at 1.6/λ of one stiff direction: its variance is five times the target's, R-hat 1."""
    data = np.concatenate([X] * 20), np.concatenate([Y] * 20)
    curvature = np.linalg.eigvalsh(posterior(np.concatenate([np.ones_like(data[0]), data[0]], 1), data[1], NOISE)[0])
    kernel = fs.SGLD(linear(), step_size=1.6 / curvature[-1], num_steps=10, metropolis=False)
    with pytest.warns(RuntimeWarning, match="doubtful: the configurational temperature is"):
        run(kernel, data=data, num_warmup=50, num_samples=400, num_chains=4, chain_method="vectorized")


@pytest.mark.parametrize("num_chains", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_frozen_run_warns(num_chains):
    settings = {"num_chains": num_chains, "chain_method": "vectorized", "num_warmup": 1, "num_samples": 400}
    kernel = fs.SGLD(linear(), step_size=1e-20, num_steps=1, warmup=fs.Warmup(warm_start=0.0))
    with pytest.warns(RuntimeWarning, match="stood still for 400 of 400 draws"):
        run(kernel, **settings)
    run(kernel, **settings | {"num_samples": 150})  # a trial, which is not judged


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_nuts_whose_chains_differ_warns(num_chains):
    """Two modes far apart: chains that start in one stay there."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 20.0))
        numpyro.sample("y", dist.Normal(jnp.abs(mu), 0.1), obs=y)

    settings = {"num_warmup": 100, "num_samples": 200, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(NUTS(model), num_chains=num_chains, **settings)
    start = {"mu": jnp.array([10.0, -10.0])[:num_chains].reshape(num_chains if num_chains > 1 else ())}
    if num_chains == 1:
        mcmc.run(KEY, 10.0, init_params=start)
    else:
        with pytest.warns(RuntimeWarning, match=r"R-hat of mu reaches .*the chains have not converged"):
            mcmc.run(KEY, 10.0, init_params=start)


def rows_and_draws(num_chains=2, num_draws=200):
    """A linear network whose chains agree in the first of two inputs, and the data vary only there."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(30, 1)), np.zeros((30, 1))], 1).astype(np.float32)
    kernel = rng.normal(size=(num_chains, num_draws, 2, 1)).astype(np.float32)
    kernel[..., 1, 0] += 3.0 * np.arange(num_chains)[:, None]
    return x, {"f.kernel": kernel}


def one_network(x, y=None):
    f = fs.random_module("f", nn.Dense(1, use_bias=False), input_shape=2)
    numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)


def test_predict_warns_where_chains_differ():
    x, draws = rows_and_draws()
    flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in draws.items()}
    found = fs.Posterior(one_network, flat, num_chains=2)
    fs.predict(found, KEY, x)  # a warning would be an error
    with pytest.warns(RuntimeWarning, match=r"At these inputs R-hat of [fy] reaches .*not converged"):
        fs.predict(found, KEY, x[:, ::-1].copy())
    fs.predict(flat, KEY, x[:, ::-1].copy(), model=one_network)  # no chains are known


@pytest.mark.parametrize("num", [1, 3, 5])
def test_predictions_of_fewer_rows_than_a_minibatch_are_quiet(num):
    draws = {"w": np.random.default_rng(0).normal(size=(2 * MIN_RUN, 2)).astype(np.float32)}
    posterior = fs.Posterior(linear(batch=4), draws, num_chains=2, args=(X, Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert fs.predict(posterior, KEY, X[:num])["y"].shape == (2 * MIN_RUN, num)


@pytest.mark.slow
def test_a_further_run_on_other_data_compiles_no_judgment_anew(caplog):
    x = np.random.default_rng(0).normal(size=(2, 30, 2)).astype(np.float32)
    mcmc = fs.MCMC(fs.SGLD(one_network, step_size=1e-3), num_warmup=0, num_samples=MIN_RUN, progress_bar=False)
    compiled = []
    for some in x:
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            mcmc.run(KEY, some, some[:, 0])
        messages = [record.getMessage() for record in caplog.records]
        compiled.append({m.split()[1] for m in messages if m.startswith("Compiling")})
    judgments = {"jit(calls)", "jit(chunk)"}
    assert judgments <= compiled[0] and not judgments & compiled[1]


def test_unseen_directions_are_judged():
    """The data move along one line: nothing but rows put together from several leaves it."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(30, 1)) * np.ones(2)).astype(np.float32)
    draws = rng.normal(size=(2, 200, 2, 1)).astype(np.float32)
    draws[1] += np.array([[5.0], [-5.0]], np.float32)  # across the line
    points = quantities_of(one_network, {"f.kernel": draws}, (x, x[:, 0]), {}).functions
    (line,) = convergence_doubts([diagnose(*points)], standstill(np.moveaxis(points.draws, 2, 0)))
    assert line.about == "R-hat" and line.text.startswith("R-hat of f at permuted rows reaches")


def test_one_small_effective_sample_size_of_many_is_chance():
    """One in twenty points of a function, each site by itself."""
    names = (*(f"f[{i}]" for i in range(40)), "sigma")
    good = np.full(41, 300.0)

    def lines(small):
        ess = np.where(np.isin(np.arange(41), small), 20.0, good)
        one = np.ones(41)
        found = FunctionDiagnostics(names, 1, 300, one, one, one, ess, ess, one)
        return [one.text for one in convergence_doubts([found], np.zeros(1))]

    assert lines([7]) == [] and lines([]) == []
    assert lines([7, 8])[0].startswith("the effective sample size of f falls to 20")
    assert lines([40])[0].startswith("the effective sample size of sigma falls to 20")


@pytest.mark.slow
def test_points_of_a_gp_network_are_judged():
    """With one input nothing else leaves the data, which here are on one side."""
    points = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    net = nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)])

    def model(x, y=None):
        f = fs.gp_network("f", net, fs.GPPrior(ExpSquared(0.5)), points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.3), obs=y)

    x = points[:4]
    draws = numpyro.infer.Predictive(model, num_samples=40)(KEY, x)
    draws = {k: np.asarray(v).reshape(2, 20, *v.shape[1:]) for k, v in draws.items() if k != "y"}
    found = quantities_of(model, draws, (x, x[:, 0]), {}).functions
    assert [name.split("[")[0] for name in found.names] == ["f"] * 4 + ["f at measurement points"] * 16
    flat = {k: v.reshape(40, *v.shape[2:]) for k, v in draws.items()}
    expected = fs.predict(fs.Posterior(model, flat, num_chains=2, args=(x, x[:, 0])), KEY, points)["f"]
    np.testing.assert_allclose(found.draws[..., 4:].reshape(40, 16), expected[..., 0], rtol=1e-3, atol=1e-4)


def test_what_reaches_the_likelihood_is_judged():
    def composed(x, y=None):
        trunk = fs.random_module("trunk", nn.Dense(2), input_shape=2)
        head = fs.random_module("head", nn.Dense(1), input_shape=2)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(head(trunk(x))[:, 0], sigma), obs=y)

    def added(x, y=None):
        parts = [fs.random_module(name, nn.Dense(1), input_shape=1) for name in ("first", "second")]
        numpyro.sample("y", dist.Normal(sum(f(x[:, i : i + 1]) for i, f in enumerate(parts))[:, 0], 0.3), obs=y)

    x = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    for model, sites in ((composed, {"sigma", "y.loc", "y.scale"}), (added, {"y.loc"})):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(model, KEY)).get_trace(x)
        latent = {k: s["value"] for k, s in trace.items() if s["type"] == "sample" and k != "y"}
        rng = np.random.default_rng(1)
        draws = {k: np.abs(rng.normal(size=(2, 120, *np.shape(v)))).astype(np.float32) for k, v in latent.items()}
        judged = quantities_of(model, draws, (x, x[:, 0]), {})
        assert judged.functions is None
        assert {name.split("[")[0].split(" at ")[0] for name in judged.others.names} == sites
        kinds = {name.split("[")[0] for name in judged.others.names}
        assert {"y.loc", "y.loc at permuted rows"} - kinds <= {"y.loc at permuted rows"}
        assert any("trunk" in line for line in judged.left_out) == (model is composed)
        assert structure(model, latent, (x, x[:, 0]), {}).weights == set(latent) - {"sigma"}


def test_a_known_function_of_a_latent_input_is_no_weight():
    def model(x, y=None):
        truth = numpyro.sample("truth", dist.Normal(x, 1.0))
        f = fs.random_module("f", nn.Dense(1), input_shape=1)
        numpyro.sample("y", dist.Normal(f(truth[:, None])[:, 0], 0.1), obs=y)

    draw = {"truth": np.zeros(5), "f.kernel": np.zeros((1, 1)), "f.bias": np.zeros(1)}
    plan = structure(model, draw, (np.zeros(5), np.zeros(5)), {})
    assert plan.weights == {"f.kernel", "f.bias"} and plan.monitored == ["f"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["event", "plate", "vector of amplitudes"])
def test_vectors_that_a_kernel_depends_on_are_judged(where):
    """The last layer of a ``gp_network`` depends on them; they are no weights."""
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)

    def model(x, y=None):
        prior = dist.LogNormal(1.0, 0.2)
        if where == "plate":
            with numpyro.plate("inputs", 2):
                scale = numpyro.sample("scale", prior)
        else:
            scale = numpyro.sample("scale", prior.expand([2]).to_event(1))
        if where == "vector of amplitudes":
            kernel = scale[0] * ExpSquared(2.0) + scale[1] * ExpSquared(3.0)
        else:
            kernel = Linear(1.0 / scale, ExpSquared())
        f = fs.gp_network("f", nn.Sequential([nn.Dense(60), nn.tanh, nn.Dense(1)]), fs.GPPrior(kernel), points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)

    points = x[:6]
    trace = numpyro.handlers.trace(numpyro.handlers.seed(model, KEY)).get_trace(x)
    draw = {k: np.asarray(s["value"]) for k, s in trace.items() if s["type"] == "sample" and k != "y"}
    plan = structure(model, draw, (x, x[:, 0]), {})
    assert plan.weights == set(draw) - {"scale"} and plan.monitored == ["f"] and not plan.by_hand
    draws = {k: np.stack([np.stack([v + 0.1 * i for i in range(9)])] * 2) for k, v in draw.items()}
    judged = quantities_of(model, draws, (x, x[:, 0]), {})
    assert [name.split("[")[0] for name in judged.others.names] == ["scale"] * 2


def test_arrays_that_are_taken_for_weights_are_named():
    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        f = fs.functional_prior("f", lambda x: jnp.tanh(x * a) @ b, fs.GPPrior(ExpSquared(1.0)), X[:3])
        numpyro.sample("y", dist.Normal(f(x), 0.1), obs=y)

    draws = {k: np.zeros((2, 5, 4), np.float32) for k in "ab"}
    hidden = structure(numpyro.handlers.block(model, hide=["f"]), {k: v[0, 0] for k, v in draws.items()}, (X, Y), {})
    assert hidden.by_hand == {"a", "b"}  # also where an effect handler hides the prior
    judged = quantities_of(model, draws, (X, Y), {})
    assert judged.others is None and judged.left_out == ("weights (units can be exchanged, with a, b)",)


@pytest.mark.slow
def test_entries_that_are_fixed_by_construction_are_not_frozen():
    def model(y=None):
        numpyro.sample("root", dist.LKJCholesky(3, 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    draws = np.asarray(dist.LKJCholesky(3, 1.0).sample(KEY, (2, 200)))
    judged = quantities_of(model, {"root": draws}, (1.0,), {})
    assert len(judged.others.names) == 5  # of nine: three zeros, and the first is 1
    assert convergence_doubts([diagnose(*judged.others)], np.zeros(2)) == []


def test_rejections_are_no_standstill():
    rng = np.random.default_rng(0)
    moves = rng.uniform(size=(2, 1000)) < 0.5
    x = np.take_along_axis(rng.normal(size=(2, 1000)), np.maximum.accumulate(np.where(moves, np.arange(1000), 0), 1), 1)
    still = standstill(x[None])
    assert 5 < still.max() < 30
    found = [diagnose(x[..., None], ("mu",))]
    assert convergence_doubts(found, still) == []
    first = convergence_doubts(found, np.array([1, 100]))[0]
    assert first.about == "movement"
    assert first.text.startswith("chain 1 (the first being 0) stood still for 100 of 1000")


@pytest.mark.parametrize(("num_draws", "start"), [(45, "the effective sample size of f falls to"), (150, None)])
def test_names_few_effective_draws(num_draws, start):
    """Fewer than 50 a chain, in any of several tables."""
    rng = np.random.default_rng(0)
    parts = [diagnose(rng.normal(size=(2, num_draws, 1)), (name,)) for name in ("f[0]", "f[1]")]
    lines = convergence_doubts(parts, np.zeros(2))
    assert len(lines) == (start is not None) and all(line.text.startswith(start) for line in lines)


@pytest.mark.slow
def test_an_error_of_the_judgement_costs_no_run(monkeypatch):
    monkeypatch.setattr(end_of_run, "quantities_of", lambda *_, **__: 1 / 0)
    with pytest.warns(RuntimeWarning, match="could not be judged: ZeroDivisionError"):
        mcmc = run(fs.SGHMC(linear(), step_size=0.1, num_steps=2), num_warmup=0, num_samples=200)
    assert mcmc.get_samples()["w"].shape == (200, 2)


def imputed(x, y, is_known):
    b, s = numpyro.sample("b", dist.Normal()), numpyro.sample("s", dist.HalfNormal())
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(b * x, s), obs=y, obs_mask=is_known)


@pytest.mark.slow
def test_values_that_a_mask_leaves_without_a_density_are_not_judged():
    """The known rows of ``obs_mask`` drift freely, by NumPyro's design, and mean nothing."""
    rng = np.random.default_rng(0)
    x, is_known = rng.normal(size=30), np.arange(30) % 6 > 0
    y = np.where(is_known, x + 0.5 * rng.normal(size=30), 0.0)
    mcmc = fs.MCMC(
        fs.SGHMC(imputed), num_warmup=300, num_samples=300, num_chains=2, chain_method="vectorized", progress_bar=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        mcmc.run(KEY, x, y, is_known)
    report = fs.report(mcmc)
    assert {k for k in report.sites.names if "[" in k} == {f"y_unobserved[{i}]" for i in range(0, 30, 6)}
    assert report.advice == () and np.all(np.abs(report.drift - 1.0) < 0.2)


@pytest.mark.slow
def test_a_good_run_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run(fs.SGHMC(linear()), num_warmup=100, num_samples=400, num_chains=2, chain_method="vectorized")


def test_functions_kept_in_place_of_weights_are_judged():
    x, _ = rows_and_draws()
    kernel = fs.SGLD(one_network, step_size=1e-20, num_steps=1, warmup=fs.Warmup(warm_start=0.0))
    mcmc = fs.MCMC(kernel, num_warmup=1, num_samples=200, functions_at=x[:3], progress_bar=False)
    with pytest.warns(RuntimeWarning, match="stood still for 200 of 200"):
        mcmc.run(KEY, x, x[:, 0])


def test_draws_on_disk_are_judged_like_those_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(3, 120, 2, 1)).astype(np.float32)
    np.save(tmp_path / "draws.npy", draws)
    on_disk = np.load(tmp_path / "draws.npy", mmap_mode="r")
    x = rng.normal(size=(30, 2)).astype(np.float32)
    one, other = (quantities_of(one_network, {"f.kernel": d}, (x, x[:, 0]), {}).functions for d in (draws, on_disk))
    assert one.names == other.names
    np.testing.assert_allclose(one.draws, other.draws, rtol=1e-5, atol=1e-5)


def test_functions_of_draws_that_were_not_kept_are_left_out():
    draws = {"sigma": np.ones((2, 120), np.float32)}

    def model(x, y=None):
        f = fs.random_module("f", nn.Dense(1), input_shape=2)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], numpyro.sample("sigma", dist.HalfNormal(1.0))), obs=y)

    judged = quantities_of(model, draws, (np.zeros((4, 2)), np.zeros(4)), {})
    assert judged.functions is None and judged.others.names == ("sigma",)
    assert any("f.bias, f.kernel were not kept" in line for line in judged.left_out)


def test_minibatches_and_composed_networks_are_judged_by_rows():
    def model(x, y=None):
        trunk, head = (fs.random_module(k, nn.Dense(1), input_shape=1) for k in ("trunk", "head"))
        with numpyro.plate("data", 40, subsample_size=5):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(head(jnp.tanh(trunk(xb)))[:, 0], 0.3), obs=yb)

    rng = np.random.default_rng(0)
    sites = {
        f"{k}.{part}": (1, 1) if part == "kernel" else (1,) for k in ("trunk", "head") for part in ("kernel", "bias")
    }
    draws = {k: rng.normal(size=(2, 120, *shape)).astype(np.float32) for k, shape in sites.items()}
    judged = quantities_of(model, draws, (np.linspace(-1, 1, 40)[:, None], np.zeros(40)), {})
    x, w = np.linspace(-1, 1, 40), {k: v.reshape(2, 120, 1) for k, v in draws.items()}
    f = w["head.kernel"] * np.tanh(w["trunk.kernel"] * x + w["trunk.bias"]) + w["head.bias"]
    np.testing.assert_allclose(judged.others.draws[..., :40], f, atol=1e-4)


@pytest.mark.slow
def test_warnings_point_to_the_line_that_ran_the_sampler():
    mcmc = fs.MCMC(fs.SGHMC(linear(), step_size=1e-6), num_warmup=0, num_samples=200, progress_bar=False)
    with pytest.warns(RuntimeWarning, match="The draws are doubtful") as caught:
        mcmc.run(KEY, X, Y)
    assert {one.filename for one in caught} == {__file__}


@pytest.mark.slow
def test_a_site_with_at_in_its_name_is_judged_where_it_is_not_finite():
    """Only functions away from the data are excused."""
    draws = np.ones((2, 50, 2), np.float32)
    draws[0, :, 0] = np.random.default_rng(0).normal(size=50)
    draws[1, 3, 1] = np.nan
    assert judged_draws({"rate at peak": draws}).names == ("rate at peak[0]", "rate at peak[1]")
    assert judged_draws({"f at permuted rows": draws}).names == ("f at permuted rows[0]",)


@pytest.mark.parametrize("declare", [pytest.param("gp_network", marks=pytest.mark.slow), "functional_prior"])
def test_names_of_judged_values_tell_the_row_of_the_data_and_the_measurement_point(declare):
    """Of many rows and points only some are judged; ``f[37, 0]`` is the value at row 37 of all, not of those."""
    rows, places = np.linspace(-1, 1, 250)[:, None], np.linspace(-2, 2, 70)[:, None]
    prior, points = fs.GPPrior(ExpSquared(1.0)), fs.measurement.fixed(places)
    net = nn.Dense(1)

    def model(x, y=None):
        if declare == "gp_network":
            f = fs.gp_network("f", nn.Sequential([nn.Dense(3), nn.tanh, net]), prior, points, input_shape=(1,))
        else:
            f = fs.random_module("f", net, input_shape=(1,))
            fs.functional_prior("f", f, prior, points)
        numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 1.0).to_event(1), obs=y)

    drawn = numpyro.infer.Predictive(model, num_samples=12)(KEY, rows)
    draws = {k: np.reshape(v, (2, 6, *v.shape[1:])) for k, v in drawn.items() if k != "y"}
    posterior = fs.Posterior(model, {k: v.reshape(12, *v.shape[2:]) for k, v in draws.items()})
    judged = quantities_of(model, draws, (rows, np.zeros(250, np.float32)), {}).functions
    at = {"f": rows, "f at measurement points": places}
    values = {k: np.reshape(fs.predict(posterior, KEY, x)["f"], (2, 6, -1)) for k, x in at.items()}
    seen = set()
    for name, found in zip(judged.names, np.moveaxis(judged.draws, -1, 0), strict=True):
        label, _, place = name.rpartition("[")
        if label in values:
            seen.add((label, row := int(place.split(",")[0])))
            np.testing.assert_allclose(found, values[label][..., row], rtol=1e-4, atol=1e-4)
    assert {("f", 249), ("f at measurement points", 69)} <= seen and len(seen) == 100 + 30


def places_of(judged, label):
    """The places in the names of a label."""
    named = (name.rpartition("[") for name in judged.names)
    return [tuple(map(int, place.rstrip("]").split(","))) for found, _, place in named if found == label]


def test_names_of_judged_values_of_several_functions():
    """Points of the user's own, and a name that begins with another name and " at "."""
    day, night = np.linspace(-1, 1, 10)[:, None], np.linspace(-1, 1, 210)[:, None]
    prior, own = fs.GPPrior(ExpSquared(1.0)), lambda key: jnp.asarray(np.linspace(-2, 2, 70)[:, None])

    def model(day, night):
        scale = numpyro.sample("scale", dist.Normal().expand([2]).to_event(1))
        f = fs.functional_prior("f", lambda x: x[:, 0] * scale[0], prior, own)
        g = fs.functional_prior("f at night", lambda x: x[:, 0] * scale[1], prior, day)
        numpyro.sample("y", dist.Normal(f(day), 1.0).to_event(1), obs=np.zeros(10))
        numpyro.sample("z", dist.Normal(g(night), 1.0).to_event(1), obs=np.zeros(210))

    draws = {"scale": np.random.default_rng(0).normal(size=(2, 6, 2))}
    judged = quantities_of(model, draws, (day, night), {}).functions
    assert places_of(judged, "f")[-1] == (9,) and len(places_of(judged, "f")) == 10
    assert places_of(judged, "f at night")[-1] == (209,) and len(places_of(judged, "f at night")) == 100
    assert places_of(judged, "f at measurement points")[-1] == (69,)
    assert places_of(judged, "f at night at measurement points")[-1] == (9,)


@pytest.mark.parametrize("batch", [None, 20])
def test_names_of_judged_parameters_of_the_likelihood(batch):
    """Two networks that are added are judged by their sum, at 100 of 250 rows."""

    def model(x, y=None):
        f, g = (fs.random_module(name, nn.Dense(2), input_shape=(1,)) for name in "fg")
        with numpyro.plate("data", 250, subsample_size=batch):
            rows = numpyro.subsample(x, 1)
            numpyro.sample("y", dist.Normal(f(rows) + g(rows), 1.0).to_event(1), obs=numpyro.subsample(y, 1))

    x = np.linspace(-1, 1, 250)[:, None]
    rng = np.random.default_rng(0)
    kinds = {"kernel": (1, 2), "bias": (2,)}
    draws = {f"{name}.{k}": rng.normal(size=(2, 6, *s)) for name in "fg" for k, s in kinds.items()}
    judged = quantities_of(model, draws, (x, np.zeros((250, 2))), {}).others
    values = sum(x @ draws[f"{name}.kernel"] + draws[f"{name}.bias"][:, :, None] for name in "fg")
    places = places_of(judged, "y.loc")
    assert places[-1] == (249, 1)
    found = np.moveaxis(judged.draws, -1, 0)[[name.startswith("y.loc[") for name in judged.names]]
    for place, numbers in zip(places, found, strict=True):
        np.testing.assert_allclose(numbers, values[:, :, *place], rtol=1e-4, atol=1e-4)
