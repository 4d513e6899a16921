"""``gp_network``: the distribution of its values, beside closed forms that know nothing of its code.

Given hidden weights the values are linear in white sites, so that their covariance follows from a Jacobian, without
Monte Carlo. With features Ψ = ΦA^½ in units of the process's amplitude, T = ΨΨᵀ and S = T + τ²I it is

    cov f(X_M) = τ² T S⁻¹ + (I - τ²S⁻¹) (K + τ²I) (I - τ²S⁻¹),

and that of f(X_M) + τe', where e' = (f̃ - f(X_M)) / τ is what the features leave, is K + τ²I.
"""

from __future__ import annotations

import importlib
import warnings
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import Predictive
from support.compilation import quick_jit
from support.laws import gaussian_p_values
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.last_layer.find_last_layer import find_last_layer
from numpyro_fspace.model.last_layer.given_features import LastLayerPrior
from numpyro_fspace.model.last_layer.hidden_scale import find_scales
from numpyro_fspace.model.last_layer.input_units import units_of
from numpyro_fspace.model.last_layer.ridge import ridge_solver
from numpyro_fspace.model.networks.adapters import read_network

#: The tests of broken code and tiny networks are warned that they cannot follow the process.
pytestmark = pytest.mark.filterwarnings("ignore:gp_network:RuntimeWarning")

#: The name ``numpyro_fspace.model.gp_network`` is that of the function.
MODULE = importlib.import_module("numpyro_fspace.model.last_layer.given_features")
POINTS = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]
FLAT = np.random.default_rng(0).uniform(-1.0, 1.0, (6, 2)).astype(np.float32)
SMOOTH, ROUGH = tinygp.kernels.ExpSquared(0.6), 4.0 * tinygp.kernels.Matern32(0.5)
GP = fs.GPPrior(SMOOTH)
#: A tolerance that shows: without it, or with another in its place, covariances differ by a hundredth.
SCALES = {"hidden_scale": 2.0, "tolerance": 0.1}


def network(width, num_outputs=1):
    return nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(num_outputs)])


def gp_model(net, prior, points, **settings):
    """A model of f alone; its trace has the values at the points as the site "f_M"."""

    def model():
        f = fs.gp_network("f", net, prior, points, **settings)
        numpyro.deterministic("f_M", f(points))

    return model


def values_at_points(model, key, noise=None):
    """``(f_M, jacobian, white)``: f(X_M) as a vector, affine in the white sites given the drawn hidden weights."""
    start = handlers.trace(handlers.seed(model, key)).get_trace()
    hidden = {
        k: s["value"]
        for k, s in start.items()
        if s["type"] == "sample" and k.split(".")[-1] not in LastLayerPrior.sites
    }
    white = {f"f.{k}": start[f"f.{k}"]["value"] for k in LastLayerPrior.sites}
    zeros, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, white))

    def values(flat):
        given = handlers.substitute(model, data=hidden | unravel(flat))
        return jnp.ravel(handlers.trace(handlers.seed(given, 0)).get_trace()["f_M"]["value"])

    return *quick_jit(lambda z: (values(z), jax.jacfwd(values)(z)))(zeros), hidden


def moments(prior, points, num_outputs):
    """Mean [M K] and covariance without nugget [M K, M K] of the process's values, ravelled like [M, K]."""
    mean, covariance = prior.moments(points)
    size = len(points) * num_outputs
    if covariance.shape != (size, size):
        covariance = np.broadcast_to(covariance, (num_outputs, len(points), len(points)))
        covariance = np.einsum("kij,kl->ikjl", covariance, np.eye(num_outputs)).reshape(size, size)
    return np.ravel(mean), np.asarray(covariance, np.float64)


class Expected(NamedTuple):
    """By the formulas of this module, in float64: the covariances of f(X_M) and of f(X_M) + τe', Ψ, and sds."""

    of_f: np.ndarray
    total: np.ndarray
    psi: np.ndarray
    units: np.ndarray


def expected(hidden, net, prior, points, num_outputs=1):
    shape = points.shape[1:]
    layer = find_last_layer("f", read_network("f", net, shape), shape)
    to_units = units_of(prior, points, is_random=False)
    scale = find_scales("f", layer, prior, points, to_units, **SCALES).last_layer
    weights = {k.removeprefix("f."): v for k, v in hidden.items()}
    psi = np.asarray(layer.features(weights, jnp.asarray(to_units(points))), np.float64) * layer.typical_scale() * scale
    psi, tau = np.kron(psi, np.eye(num_outputs)), SCALES["tolerance"]
    covariance = moments(prior, points, num_outputs)[1]
    sd = np.sqrt(np.diag(covariance).reshape(len(points), -1).mean(0))
    units = np.outer(np.tile(sd, len(points)), np.tile(sd, len(points)))
    target = covariance / units + tau**2 * np.eye(len(units))
    t = psi @ psi.T
    left = tau**2 * np.linalg.inv(t + tau**2 * np.eye(len(t)))
    rest = np.eye(len(t)) - left
    return Expected((left @ t + rest @ target @ rest) * units, target * units, psi, units)


PRIORS = {
    "one output": (GP, POINTS, 1),
    "a mean and a nugget": (fs.GPPrior(SMOOTH, mean=lambda x: 1.0 + x[:, 0], nugget=0.1), POINTS, 1),
    "two outputs, one kernel": (fs.GPPrior(SMOOTH, num_outputs=2), POINTS, 2),
    "two outputs, two kernels": (fs.GPPrior([SMOOTH, ROUGH]), POINTS, 2),
    "dependent outputs": (
        fs.GPPrior(
            fs.priors.Helmholtz(tinygp.kernels.ExpSquared(0.8), 0.5 * tinygp.kernels.ExpSquared(0.5)), num_outputs=2
        ),
        FLAT,
        2,
    ),
    "conditioned": (fs.GPPrior(ROUGH).condition(POINTS[1:3] + 0.1, np.array([[1.0], [2.0]]), 0.3), POINTS, 1),
}


@pytest.mark.parametrize("name", some(PRIORS, 2))
def test_a_narrow_network_has_the_covariance_of_the_formula(key, name):
    """With four features, fewer than points."""
    prior, points, num_outputs = PRIORS[name]
    net = network(3, num_outputs)
    _, jacobian, hidden = values_at_points(gp_model(net, prior, points, **SCALES), key)
    of_f, total, *_ = expected(hidden, net, prior, points, num_outputs)
    np.testing.assert_allclose(jacobian @ jacobian.T, of_f, atol=3e-6 * np.abs(total).max())


@pytest.mark.parametrize("name", some(PRIORS, 3))
def test_values_of_a_wide_network_have_the_covariance_of_the_process(key, name):
    """For every v: the smallest singular value of the features is many times τ."""
    prior, points, num_outputs = PRIORS[name]
    model = gp_model(network(60, num_outputs), prior, points, hidden_scale=6.0, tolerance=1e-3)
    mean, jacobian, _ = values_at_points(model, key)
    process_mean, covariance = moments(prior, points, num_outputs)
    np.testing.assert_allclose(jacobian @ jacobian.T, covariance, atol=2e-3 * np.abs(covariance).max())
    np.testing.assert_allclose(mean, process_mean, atol=2e-3 * max(1.0, np.abs(process_mean).max()))


def test_prior_draws_have_the_distribution_of_the_process():
    """χ² of mean, variances and correlations of 10 000 draws, hidden weights and all; false alarms 3e-4."""
    points = POINTS[::2]
    model = gp_model(network(30), GP, points, hidden_scale=6.0, tolerance=1e-3)
    keys = jax.random.split(jax.random.key(0), 10_000)
    draws = quick_jit(jax.vmap(lambda key: handlers.trace(handlers.seed(model, key)).get_trace()["f_M"]["value"]))(keys)
    mean, covariance = moments(GP, points, 1)
    assert min(gaussian_p_values(draws[..., 0], mean, covariance).values()) > 1e-4
    assert min(gaussian_p_values(0.97 * draws[..., 0], mean, covariance).values()) < 1e-4


@pytest.mark.parametrize("width", some([3, 40], 1))
def test_what_the_features_leave_goes_into_the_residual(key, width):
    """f(X_M) + τe' with e' = e + τS⁻¹(f̃ - Φa₀ - τe), the residual after the correction, has covariance K + τ²I."""
    net, tau = network(width), SCALES["tolerance"]
    _, jacobian, hidden = values_at_points(gp_model(net, GP, POINTS, **SCALES), key)
    _, total, psi, _ = expected(hidden, net, GP, POINTS)
    inverse = np.linalg.inv(psi @ psi.T + tau**2 * np.eye(len(psi)))
    by_site = {
        "last_layer": -tau * inverse @ psi,
        "residual": np.eye(len(psi)) - tau**2 * inverse,
        "values": tau * inverse @ np.linalg.cholesky(total),
    }
    sum_of_both = jacobian + tau * np.concatenate([by_site[site] for site in sorted(by_site)], 1)
    np.testing.assert_allclose(sum_of_both @ sum_of_both.T, total, atol=1e-5)


TWINS = {
    "G without τ": lambda matrix, tau: ridge_solver(matrix, 0.01 * tau),
    "A for S": lambda matrix, tau: lambda r: matrix.T @ r,
    "transposed gain": lambda matrix, tau: lambda r: -ridge_solver(matrix, tau)(r),
}


@pytest.mark.parametrize("twin", some([*TWINS, "e left out"], 1))
def test_broken_twins_have_another_covariance(key, monkeypatch, twin):
    """By at least a thousandth, a hundred times what the true one may be off."""

    def find(broken):
        if broken and twin in TWINS:
            monkeypatch.setattr(MODULE, "ridge_solver", TWINS[twin])
        net = network(40)
        _, jacobian, hidden = values_at_points(gp_model(net, GP, POINTS, **SCALES), key)
        if broken and twin == "e left out":
            jacobian = jacobian.at[:, 41 : 41 + len(POINTS)].set(0.0)  # the sites in alphabetical order
        return np.abs(jacobian @ jacobian.T - expected(hidden, net, GP, POINTS).of_f).max()

    assert find(broken=False) < 1e-5
    assert find(broken=True) > 1e-3


@pytest.mark.parametrize("mean", [1e4, lambda x: 100.0 * jnp.sin(20.0 * x[:, 0])], ids=["large", "rough"])
def test_the_mean_of_the_process_is_added_to_the_network(key, mean):
    """Also between the points, where a network of its smoothness would not follow it."""
    x = np.linspace(-1.0, 1.0, 23, dtype=np.float32)[:, None]

    def values(prior):
        def model():
            return fs.gp_network("f", network(40), prior, POINTS)(x).squeeze(-1)

        return np.asarray(handlers.seed(model, key)())

    expected = np.broadcast_to(mean(x) if callable(mean) else mean, 23)
    np.testing.assert_allclose(values(fs.GPPrior(SMOOTH, mean=mean)) - values(GP), expected, atol=2e-3)


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(np.float32(0.6), marks=pytest.mark.slow),
        np.float64(0.6),
        pytest.param(np.array(0.6), marks=pytest.mark.slow),
    ],
    ids=["f32", "f64", "array"],
)
def test_a_kernel_of_numpy_numbers_is_known_in_a_compiled_model(key, scale):
    """Made inside the model, under jit, it has the scales and units that it has outside."""

    def model():
        return fs.gp_network("f", network(8), fs.GPPrior(tinygp.kernels.ExpSquared(scale)), POINTS)(POINTS)

    seeded = handlers.seed(model, key)
    np.testing.assert_allclose(jax.jit(seeded)(), seeded(), atol=1e-4)


def test_constants_of_a_nested_program_are_part_of_the_network(key):
    """Networks that differ by the frequencies in a compiled function of theirs alone."""

    def net(frequencies):
        features = jax.jit(lambda h: jnp.concatenate([jnp.sin(h * frequencies), jnp.cos(h * frequencies)], -1))
        return nn.Sequential([nn.Dense(8), features, nn.Dense(1)])

    points = POINTS.astype(np.float32)
    layers = [
        find_last_layer("f", read_network("f", net(np.linspace(*ends, 8, dtype=np.float32)), (1,)), (1,), points)
        for ends in [(0.5, 1.5), (0.5, 1.5), (0.001, 0.002)]
    ]
    assert layers[0].program == layers[1].program != layers[2].program


@pytest.mark.parametrize("domain", some([jnp.sqrt, jnp.log], 1))
def test_a_network_of_positive_inputs_is_examined_at_its_points(key, domain):
    points, num = np.linspace(0.5, 2.0, 6, dtype=np.float32)[:, None], 400
    net = nn.Sequential([domain, nn.Dense(50), nn.tanh, nn.Dense(1)])
    values = quick_jit(
        jax.vmap(lambda key: handlers.trace(handlers.seed(gp_model(net, GP, points), key)).get_trace()["f_M"]["value"])
    )
    variance = np.var(values(jax.random.split(key, num)), axis=0)
    np.testing.assert_allclose(variance, 1.0, atol=5 * np.sqrt(2 / num))


@pytest.mark.slow
def test_a_network_with_features_of_its_own_gets_its_inputs_unchanged():
    """A function of the time of year has the period of a year, and a prior of this period at its points."""
    prior = fs.GPPrior(tinygp.kernels.ExpSineSquared(scale=1.0, gamma=1.0))
    points = fs.measurement.space_filling(0.0, 3.0, 40)

    def on_circle(x):
        return jnp.concatenate([jnp.cos(2 * jnp.pi * x), jnp.sin(2 * jnp.pi * x)], -1)

    def model(x):
        net = nn.Sequential([on_circle, nn.Dense(20), nn.tanh, nn.Dense(1)])
        numpyro.deterministic("values", fs.gp_network("f", net, prior, points)(x))

    x, predictive = jnp.linspace(0.0, 1.0, 11)[:, None], numpyro.infer.Predictive(model, num_samples=4000)
    draws = predictive(jax.random.key(0), jnp.concatenate([x, x + 1.0]))["values"][..., 0]
    now, later = draws[:, :11], draws[:, 11:]
    np.testing.assert_allclose(now, later, atol=1e-3)
    covariance = np.asarray(prior.covariance_function(x, x)).reshape(11, 11)
    assert np.abs(np.cov(now.T) - covariance).max() < 0.1


@pytest.mark.slow
def test_a_network_that_standardizes_its_inputs_gets_them_unchanged():
    """Standardized twice, years would all be nearly equal for it."""
    years = np.linspace(1960.0, 2020.0, 30)[:, None]
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(10.0))

    def model():
        net = nn.Sequential([lambda x: (x - 1990.0) / 20.0, nn.Dense(50), nn.tanh, nn.Dense(50), nn.tanh, nn.Dense(1)])
        numpyro.deterministic("values", fs.gp_network("f", net, prior, years)(years))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        values = Predictive(model, num_samples=2000)(jax.random.key(0))["values"][..., 0]
    covariance = np.asarray(prior.covariance_function(years, years))[0]
    assert np.abs(np.cov(values.T) - covariance).max() < 0.15


@pytest.mark.slow
def test_function_values_of_a_sampled_lengthscale_are_those_of_predictions():
    """Runs compile the model before its lengthscale has a value; the function of a known one has other scales."""
    x, net = np.linspace(-1.0, 1.0, 12)[:, None], network(20)

    def model(x):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
        f = fs.gp_network("f", net, fs.GPPrior(tinygp.kernels.ExpSquared(lengthscale)), x_points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 1.0), obs=jnp.zeros(12))

    x_points = x
    draw = {k: v[0] for k, v in Predictive(model, num_samples=2)(jax.random.key(0), x).items() if k != "y"}
    values = fs.model.function_values(model, draw, (x,), {}, x)["f"]
    predicted = fs.predict({k: v[None] for k, v in draw.items()}, jax.random.key(1), x, model=model)["f"][0]
    np.testing.assert_allclose(values, predicted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num", some([12, 60], 1))
def test_tolerances_at_the_limit_are_right_and_smaller_ones_refused(num):
    """In float32 the ridge regression of M points has a condition number of √M/τ."""
    points = np.linspace(-1.0, 1.0, num, dtype=np.float32)[:, None]
    prior, net = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), network(100)
    least = 16.0 * max(num, 40) ** 0.5 * np.finfo(np.float32).eps

    def model(tolerance):
        numpyro.deterministic("f_points", fs.gp_network("f", net, prior, points, tolerance=tolerance)(points))

    with pytest.raises(ValueError, match="is below"), handlers.seed(rng_seed=0):
        model(0.9 * least)
    draws = Predictive(lambda: model(1.1 * least), num_samples=500)(jax.random.key(0))["f_points"]
    assert abs(float(draws.var()) - 1.0) < 0.25


@pytest.mark.parametrize("is_random", [False, True])
def test_a_constant_input_is_no_unit(is_random):
    """The standard deviation of 20 numbers 0.1 is computed as 1.4e-17, in which units no new input may be."""
    x = np.stack([np.linspace(-1.0, 1.0, 20), np.full(20, 0.1)], -1)
    to_units = units_of(fs.GPPrior(tinygp.kernels.ExpSquared(1.0)), x, is_random=is_random)
    assert np.abs(to_units(x + np.array([0.0, 0.5]))[:, 1]).max() < 2.0


@pytest.mark.slow
def test_function_values_need_all_sites_of_the_functions():
    """Those that a draw lacks would come from the prior; sites that no function needs may be missing."""
    net, points = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(1)]), np.linspace(-1.0, 1.0, 8)[:, None]
    x = jnp.asarray(points)

    def model(x, y=None):
        f = fs.gp_network("f", net, fs.GPPrior(tinygp.kernels.ExpSquared(2.0)), points)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)

    drawn = Predictive(model, num_samples=1)(jax.random.key(0), x)
    draw, data = {k: v[0] for k, v in drawn.items() if k not in ("y", "sigma")}, (x, jnp.zeros(8))
    assert fs.model.function_values(model, draw, data, {}, x)["f"].shape == (8, 1)
    weight = next(k for k in draw if "kernel" in k)
    with pytest.raises(ValueError, match="the draw lacks some of the sites"):
        fs.model.function_values(model, {k + "s" * (k == weight): v for k, v in draw.items()}, data, {}, x)
