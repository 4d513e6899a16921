"""The experiment on ocean currents: its network, its exact GP, a quick run."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpyro import handlers
from tinygp.kernels import ExpSquared

from numpyro_fspace import measurement
from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments.catalog import find
from numpyro_fspace.experiments.function_posterior import FunctionPosterior, density_scores
from numpyro_fspace.experiments.ocean import CONFIG, _build, velocity_network
from numpyro_fspace.experiments.records import read
from numpyro_fspace.priors import GPFit, GPPrior, Helmholtz

CENTRE, UNIT, SPEED = np.array([-87.0, 26.0]), 1.3, 0.2


@pytest.fixture(scope="module")
def network():
    init, apply = velocity_network(CONFIG.quick(), CENTRE, UNIT, SPEED)
    return init(jax.random.key(0), (2,)), apply


def jacobian(network, weights, x):
    return np.asarray(jax.vmap(jax.jacfwd(lambda at: network[1](weights, at[None])[0]))(x))


@pytest.mark.slow
def test_network_is_gradient_and_rotation(network, x64):
    """Without its potential the field has no divergence, without its stream function no curl; both together add."""
    x = jnp.asarray(np.random.default_rng(0).uniform((-91, 24), (-84, 27.5), (20, 2)))
    weights = jax.tree.map(lambda a: 3.0 * a, network[0])
    parts = [{**weights, off: jax.tree.map(jnp.zeros_like, weights[off])} for off in ("potential", "stream")]
    stream, potential = (jacobian(network, part, x) for part in parts)
    divergence, curl = (lambda j: j[:, 0, 0] + j[:, 1, 1]), (lambda j: j[:, 1, 0] - j[:, 0, 1])
    assert np.abs(divergence(stream)).max() < 1e-12 < 1e-3 < np.abs(curl(stream)).max()
    assert np.abs(curl(potential)).max() < 1e-12 < 1e-3 < np.abs(divergence(potential)).max()
    both = sum(network[1](part, x) for part in parts)
    np.testing.assert_allclose(network[1](weights, x), both, atol=1e-12)


def test_scores_of_draws_and_of_a_gaussian_agree():
    """20 000 draws of a Gaussian field against the closed forms; errors of .01 are ten standard errors."""
    rng = np.random.default_rng(0)
    mean, sd, noise = rng.normal(size=(8, 2)), rng.uniform(0.2, 1.0, (8, 2)), 0.7
    currents = mean + sd * rng.normal(size=(8, 2))
    f = (mean + sd * rng.normal(size=(20_000, 8, 2)))[None]
    rest = {"seconds": 0.0, "num_gradients": 0, "num_diverging": 0}
    exact = density_scores(FunctionPosterior(None, noise, mean, sd, **rest), currents, None)
    draws = FunctionPosterior(f, np.full((1, 20_000), noise), mean, sd, **rest)
    found = density_scores(draws, currents, jax.random.key(0))
    assert found.keys() == exact.keys()
    np.testing.assert_allclose([found["rmse"], exact["rmse"]], np.sqrt(np.mean((mean - currents) ** 2)), rtol=1e-12)
    assert exact["gibbs"] < exact["lpd"]
    for name in ("gibbs", "lpd"):
        assert abs(found[name] - exact[name]) < 0.02
    # Noise that depends on the inputs, in draws [C, S, N K], if it is the same everywhere.
    same = density_scores(draws._replace(sigma=np.full((1, 20_000, 16), noise)), currents, jax.random.key(0))
    assert same == pytest.approx(found, rel=1e-6)


def test_scores_of_noise_that_depends_on_the_inputs():
    y, sd = np.array([0.5, -2.0]), np.array([[[0.1, 2.0], [0.2, 3.0]]])
    posterior = FunctionPosterior(np.zeros((1, 2, 2)), sd, np.zeros(2), np.ones(2), 0.0, 0, 0)
    found = density_scores(posterior, y, jax.random.key(0))
    densities = scipy.stats.norm.pdf(y, 0.0, sd[0])
    assert found["lpd"] == pytest.approx(np.log(densities.mean(0)).mean(), rel=1e-6)
    assert found["gibbs"] == pytest.approx(np.log(densities).mean(), rel=1e-6)


@pytest.mark.slow
def test_prior_is_calibrated_to_the_model_s_own_law():
    """The base's variance is that of the model's own draws, also where the weights' scale is not that of fan_in."""
    config = replace(CONFIG.quick(), weight_sd=3.0)
    x = np.random.default_rng(0).uniform((-91, 24), (-84, 27.5), (8, 2)).astype(np.float32)
    params = {"potential": 0.02, "stream": 0.02, "stream_scale": UNIT}
    gp = GPFit(
        GPPrior(Helmholtz(ExpSquared(1.0), ExpSquared(1.0)), nugget=0.01, num_outputs=2), 0.01, np.zeros(0), params
    )
    model = _build(config, gp, measurement.fixed(x), functional=True)
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(x)
    base = trace["f"]["fn"].prior.base

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(x)
        return trace["f"]["fn"].fn(x)

    own = jnp.mean(jax.vmap(draw)(jax.random.split(jax.random.key(1), 100)) ** 2)
    calibrated = jnp.mean(base.sample(jax.random.key(2), x, (100,)) ** 2)
    assert calibrated == pytest.approx(own, rel=0.5)  # with fan_in(2) it would be .0001 of it


def run(tmp_path, *arguments):
    path = tmp_path / "ocean.jsonl"
    assert main(["run", "ocean", *arguments, "--out", str(path)]) == 0
    return path


@pytest.mark.slow
def test_exact_gp_is_the_published_one(data_dir, tmp_path):
    """Table 3 says a mean squared error of .013 and an expected log-likelihood of .507 (with a minus sign)."""
    (line,) = read(run(tmp_path, "--method", "gp"))
    assert 0.0125 < line["mse"] < 0.0135
    assert -0.56 < line["gibbs"] < -0.45
    assert line["w2_gp"] == 0
    assert find("ocean").published["gulf", "gp"] == {"gibbs": -0.507, "mse": 0.013}


@pytest.mark.slow
def test_quick_run_and_picture(data_dir, tmp_path):
    path = run(tmp_path, "--method", "gp", "fsghmc", "--quick")
    gp, line = read(path)
    still = np.mean(np.square(gp["curves"]["currents"]))
    assert line["num_diverging"] == 0
    assert line["mse"] < still  # better than no current at all
    assert np.shape(line["curves"]["mean"]) == (544, 2)
    assert json.loads(json.dumps(line["config"]))["calibrated"]
    picture = tmp_path / "ocean.png"
    assert main(["figure", "ocean", str(path), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
