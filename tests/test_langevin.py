"""Langevin dynamics of weights and functions: symmetric weights, the laws beside it, the experiment."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments import langevin, langevin_dynamics, network_priors
from numpyro_fspace.experiments.network_priors import Architecture
from numpyro_fspace.sgmcmc import sgld
from numpyro_fspace.sgmcmc.integrators import euler_maruyama
from numpyro_fspace.sgmcmc.preconditioners import Identity

AT = np.array([[-2.5], [-0.5], [1.0], [0.25]], np.float32)

# ---- example 2.2 of Wang et al.: f(x) = Σ sin(θ_i x), whose weights may change places -----------------------

X, Y, SD = jnp.linspace(0.2, 2.5, 8), jnp.array([0.5, 1.2, 1.9, 1.7, 1.1, 0.7, -0.2, -0.9]), 0.3


def sines(theta, x=X):
    return jnp.sin(x[:, None] * theta).sum(1)


def potential(theta, key=None, shapes=3.0):
    """Gamma priors of the weights, which keep them above zero, and Gaussian noise."""
    log_prior = jnp.sum((shapes - 1.0) * jnp.log(theta) - 1.5 * theta)
    fits = 0.5 * jnp.sum((sines(theta) - Y) ** 2) / SD**2
    return jnp.where((theta > 0).all(), fits - log_prior, jnp.inf)


def trajectories(key, shapes, num_steps=300, num_weights=4):
    """f along a chain of weights, and along one that is sorted at each step and driven by noise in that order."""
    gradient = jax.jit(jax.grad(lambda theta: potential(theta, shapes=shapes)))
    theta = ordered = 1.0 + 0.01 * jnp.arange(float(num_weights))
    seen, crossings = [], 0
    for k in jax.random.split(key, num_steps):
        noise = jax.random.normal(k, (num_weights,))
        rank = jnp.argsort(theta)
        theta, _ = euler_maruyama(theta, gradient(theta), noise, 1e-3, 1.0, Identity())
        ordered, _ = euler_maruyama(ordered, gradient(ordered), noise[rank], 1e-3, 1.0, Identity())
        crossings += int((jnp.diff(ordered) < 0).any())
        ordered = jnp.sort(ordered)
        seen.append((sines(theta), sines(ordered)))
    return np.array(seen).swapaxes(0, 1), crossings


@pytest.mark.usefixtures("x64")
def test_langevin_dynamics_of_weights_is_reflected_dynamics_of_functions(key):
    """Their equation 3: kept by reflection in one cone, where f is a coordinate, it visits the same functions."""
    (free, reflected), crossings = trajectories(key, 3.0)
    assert crossings > 0
    np.testing.assert_allclose(free, reflected, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_a_prior_that_tells_weights_apart_breaks_the_symmetry(key):
    (free, reflected), crossings = trajectories(key, jnp.array([1.0, 5.0, 25.0, 50.0]))
    assert crossings > 0
    assert np.abs(free - reflected).max() > 1e-4


@pytest.mark.slow
def test_the_law_of_functions_is_that_of_one_cone(key):
    """Chains that start in different cones have the law of f that quadrature over a single cone gives."""
    grid = np.linspace(1e-3, 8.0, 600)
    first, second = np.meshgrid(grid, grid, indexing="ij")
    cone = np.stack([first, second], -1)[first < second]
    log_p = -jax.jit(jax.vmap(potential))(jnp.asarray(cone, jnp.float32))
    weights = np.asarray(jax.nn.softmax(log_p), np.float64)
    f = np.asarray(jax.vmap(sines)(jnp.asarray(cone)), np.float64)
    mean = weights @ f
    sd = np.sqrt(weights @ (f - mean) ** 2)

    starts = jnp.where(jnp.arange(400)[:, None] % 2 == 0, jnp.array([0.7, 1.6]), jnp.array([1.6, 0.7]))
    kernel = sgld.build_kernel()

    def chain(key, theta):
        state, _ = kernel(key, sgld.init(theta), potential, 5e-4, num_steps=4000)
        return sines(state.position)

    draws = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(key, 400), starts))
    error = sd / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - mean) < 5.0 * error + 0.01).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.25)


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_kernels_are_those_of_a_wide_network(key, depth):
    """Covariance of f over random networks of width 200; mean tangent kernel of some."""
    kernel, tangent = network_priors.infinite_kernels(AT, depth, "tanh")
    width = 200
    dynamics = langevin_dynamics.weight_dynamics(
        AT[:3], np.zeros(3, np.float32), Architecture(depth, width, "tanh"), 0.025
    )
    draws = jax.jit(lambda keys: jax.lax.map(lambda k: dynamics.values(dynamics.start(k), AT), keys, batch_size=20))
    f = np.asarray(draws(jax.random.split(key, 1000)))
    np.testing.assert_allclose(f.T @ f / len(f), kernel, atol=0.15)

    @jax.jit
    def product(key):
        jacobian = jax.jacobian(lambda weights: dynamics.values(weights, jnp.asarray(AT)))(dynamics.start(key))
        flat = jnp.concatenate([jnp.reshape(part, (len(AT), -1)) for part in jax.tree.leaves(jacobian)], 1)
        return flat @ flat.T / width

    found = np.mean([product(k) for k in jax.random.split(key, 8)], 0)
    np.testing.assert_allclose(found, tangent, atol=0.15)
    assert np.abs(kernel - tangent).max() > 0.05


def test_erf_has_a_closed_form(monkeypatch):
    """Williams' arcsine kernel."""
    monkeypatch.setattr(jax.nn, "erf", jax.scipy.special.erf, raising=False)
    base = AT @ AT.T + network_priors.BIAS
    size = np.sqrt((1.0 + 2.0 * np.diagonal(base))[:, None] * (1.0 + 2.0 * np.diagonal(base)))
    exact = 2.0 / np.pi * np.arcsin(2.0 * base / size)
    np.testing.assert_allclose(network_priors.infinite_kernels(AT, 2, "erf")[1], exact, atol=1e-6)


@pytest.mark.slow
def test_the_mixture_is_the_law_of_random_networks(key):
    """Of width 3, far from Gaussian: ∇ log p against finite differences of a density estimated from as many others."""
    values = np.array([[0.3, 0.1, -0.2, 0.0], [-1.5, -0.4, 0.8, 0.3]])
    ours = [
        network_priors.mixture_score(k, AT, Architecture(2, 3, "tanh"), 3000)(values) for k in jax.random.split(key, 6)
    ]
    spread = np.std(ours, 0, ddof=1) / np.sqrt(6.0)
    phi = np.asarray(
        network_priors._hidden(jax.random.fold_in(key, 7), AT, Architecture(2, 3, "tanh"), 1000), np.float64
    )
    scale = (
        network_priors.JITTER
        * np.trace(phi @ phi.swapaxes(1, 2) / 3 + network_priors.BIAS, axis1=1, axis2=2).mean()
        / len(AT)
    )

    def log_density(f):
        covariances = phi @ phi.swapaxes(1, 2) / 3 + network_priors.BIAS + scale * np.eye(len(AT))
        return np.log(np.mean([stats.multivariate_normal.pdf(f, cov=c) for c in covariances]))

    step = 1e-4
    for f, mean, sd in zip(values, np.mean(ours, 0), spread, strict=True):
        slopes = [(log_density(f + step * e) - log_density(f - step * e)) / (2 * step) for e in np.eye(4)]
        assert (np.abs(slopes - mean) < 6.0 * np.sqrt(7.0) * sd + 1e-3).all()


@pytest.mark.slow
def test_scores_of_a_wide_network_are_those_of_the_process(key):
    kernel = network_priors.infinite_kernels(AT, 2, "tanh")[0]
    values = np.random.default_rng(0).normal(size=(50, 4)) @ np.linalg.cholesky(kernel).T
    exact = network_priors.gaussian_score(kernel)(values)
    size = np.sqrt(np.mean(exact**2))
    mixture = network_priors.mixture_score(key, AT, Architecture(2, 500, "tanh"), 100_000)(values)
    spectral = network_priors.spectral_score(key, AT, Architecture(2, 500, "tanh"), 100_000)(values)
    assert np.sqrt(np.mean((mixture - exact) ** 2)) < 0.25 * size
    assert np.sqrt(np.mean((spectral - exact) ** 2)) < size  # .25 to .9 of it, by the key: the estimator is a poor one
    assert np.corrcoef(spectral.ravel(), exact.ravel())[0, 1] > 0.25  # .43 to .97


# ---- the experiment --------------------------------------------------------------------------------------------------


def test_the_function_dynamics_has_the_exact_law(key):
    """MALA on functions: mean and sd of f at the data and between them, by 500 chains."""
    kernel, tangent = network_priors.infinite_kernels(AT, 2, "tanh")
    y = np.array([-1.0, 0.4, 0.9], np.float32)
    dynamics = langevin_dynamics.function_dynamics((kernel, tangent), y, 0.025)
    f, acceptance = langevin_dynamics.simulate(dynamics, AT, [0, 1000], 500, key)
    mean, sd, _ = langevin._exact(kernel, y)
    assert acceptance > 0.6
    np.testing.assert_allclose(f[0].std(0), np.sqrt(np.diagonal(kernel)), rtol=0.2)
    assert (np.abs(f[-1].mean(0) - mean) < 5.0 * sd / np.sqrt(500)).all()
    np.testing.assert_allclose(f[-1].std(0), sd, rtol=0.2)


@pytest.mark.slow
def test_quick_records(capsys, tmp_path):
    path, image = str(tmp_path / "records.jsonl"), tmp_path / "picture.png"
    argv = ["--dataset", "n3_depth2", "--method", "function", "weight20", "weight200", "--quick", "--out", path]
    assert main(["run", "langevin", *argv]) == 0
    with open(path) as file:
        lines = {line["method"]: line for line in map(json.loads, file)}
    for line in lines.values():
        ksd = line["curves"]["ksd"]
        assert ksd[0] > 8.0 * ksd[-1] > 8.0 * 0.5 * line["ksd_floor"]  # from the prior towards the posterior
        assert line["acceptance"] > 0.6
    assert lines["function"]["curves"]["iterations"][:6] == [0, 1, 2, 3, 5, 10]
    # As wide as it gets the dynamics of weights is that of functions.
    wide, limit = (np.array(lines[name]["curves"]["ksd"]) for name in ("weight200", "function"))
    assert np.abs(np.log(wide / limit)).max() < 0.5
    assert main(["figure", "langevin", path, "--out", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_settings_that_are_unknown():
    with pytest.raises(ValueError, match="score='exact' is unknown; choose from mixture, spectral"):
        langevin.LangevinConfig(score="exact")
