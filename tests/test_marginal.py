"""The last layer integrated out: densities, derivatives and draws beside closed forms, and where it does not apply."""

from __future__ import annotations

from functools import partial

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
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from support.compilation import quick_jit
from support.laws import gaussian_p_values
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.last_layer.integrable import find_block
from numpyro_fspace.model.last_layer.marginal_likelihood import draw_parameters, log_marginal
from numpyro_fspace.model.last_layer.marginal_potential import MarginalPotential
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.run_model import run_model

pytestmark = pytest.mark.filterwarnings("ignore:gp_network:RuntimeWarning")

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)[:, None]
Y = np.sin(3.0 * X[:, 0]).astype(np.float32)
POINTS = np.linspace(-1.0, 1.0, 5, dtype=np.float32)[:, None]
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
NET = nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(1)])
SCALES = {"hidden_scale": 2.0, "tolerance": 0.03}
NOISE = 0.2

#: A network with fixed features, so that all is linear and has a closed form.
FREQUENCIES = np.arange(1.0, 5.0, dtype=np.float32)


def fixed_features(weights, x):
    return jnp.concatenate([jnp.sin(x * FREQUENCIES), jnp.cos(x * FREQUENCIES)], 1) @ weights["a"]


FIXED = (lambda key, x: {"a": jnp.zeros((8, 1))}, fixed_features)


def gp(name="f", net=NET, prior=GP, **settings):
    return fs.gp_network(name, net, prior, POINTS, input_shape=1, **(SCALES | settings))


def model(x, y=None):
    f = gp()
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)


def linear(x, y=None):
    f = gp(net=FIXED)
    sigma = numpyro.sample("sigma", dist.LogNormal(jnp.log(NOISE), 0.3))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)


def potentials(model, *args):
    """The potential of all sites, and that of those which are left."""
    full = ModelPotential(model, args, key=jax.random.key(0))
    block, why = find_block(full)
    assert block and why is None
    return full, MarginalPotential(model, args, block=block, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("kernel", "expected"), [(fs.fSGHMC, (True,)), (partial(fs.fSGHMC, marginalize=False), (True, False))]
)
def test_how_curvature_is_computed(kernel, expected):
    """Second derivatives are wrong in float32 where a last layer is integrated out, gradients where it is sampled."""
    assert kernel(model).prepare((X, Y), {}, 10).curvatures == expected


def as_linear(model, potential, *args):
    """``(J [N, W], mean [N], sites)`` of the observations in all white sites w, at z, and w's structure."""
    zeros, unravel = ravel_pytree({k: jnp.zeros_like(potential.trace[k]["value"]) for k in potential.block})

    def linearized(z):
        values = potential._values(z)

        def means(w):
            trace = run_model(model, args, key=jax.random.key(0), substitute=values | unravel(w))
            return jnp.ravel(trace["y"]["fn"].mean)

        return jax.jacfwd(means)(zeros), means(zeros), values

    return linearized


# ---- the density -------------------------------------------------------------------------------


def problem(num, size, dtype):
    rng = np.random.default_rng(0)
    jacobian = rng.normal(size=(num, size)) * np.geomspace(1.0, 1e-3, size)
    return tuple(jnp.asarray(a, dtype) for a in (jacobian, rng.normal(size=num), np.geomspace(0.1, 0.3, num)))


def exact_log_density(jacobian, residual, sd):
    covariance = jacobian @ jacobian.T + jnp.diag(sd**2)
    return dist.MultivariateNormal(covariance_matrix=covariance).log_prob(residual)


@pytest.mark.parametrize("size", [3, 12])
def test_value_gradient_and_hessian_vector_products(x64, size):
    arguments = problem(6, size, float)
    directions = jax.tree.map(jnp.cos, arguments)

    def derivatives(fn):
        gradient = jax.grad(fn, (0, 1, 2))
        return fn(*arguments), jax.jvp(gradient, arguments, directions)

    found = quick_jit(lambda: derivatives(lambda *a: log_marginal(*a)))()
    expected = quick_jit(lambda: derivatives(exact_log_density))()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * np.abs(b).max())


@pytest.mark.parametrize("size", [12, 60])
def test_small_noise_in_float32_beside_float64(x64, size):
    """sd = .005 with a signal of one: the value to 1e-3, gradients to 1 % of the largest of their kind."""
    jacobian, _, _ = problem(40, size, float)
    rng = np.random.default_rng(1)
    arguments = (jacobian, jacobian @ rng.normal(size=size) + 0.005 * rng.normal(size=40), jnp.full(40, 0.005))
    arguments = tuple(jnp.asarray(np.float32(a), float) for a in arguments)
    run = quick_jit(jax.value_and_grad(lambda *a: log_marginal(*a), (0, 1, 2)))
    exact = quick_jit(jax.value_and_grad(exact_log_density, (0, 1, 2)))(*arguments)
    found = run(*(jnp.asarray(a, jnp.float32) for a in arguments))
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-3)
    for a, b in zip(found[1], exact[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2 * np.abs(b).max())


@pytest.mark.parametrize("sd", [1e-3, 1e-4, 1e20])
def test_few_observations_with_extreme_noise_in_float32(x64, sd):
    """Two observations at each input: the density to 0.1, and draws of c that give them to within their noise."""
    rng = np.random.default_rng(0)
    jacobian = np.repeat(np.float32(rng.normal(size=(15, 91)) * np.geomspace(1.0, 1e-3, 91)), 2, axis=0)
    residual = np.float32(jacobian @ rng.normal(size=91) + min(sd, 1.0) * rng.normal(size=30))
    noise = np.full(30, sd, np.float32)
    exact = exact_log_density(*(jnp.asarray(a, float) for a in (jacobian, residual, noise)))
    np.testing.assert_allclose(quick_jit(log_marginal)(jacobian, residual, noise), exact, rtol=1e-6, atol=0.1)
    draws = quick_jit(jax.vmap(draw_parameters, in_axes=(None, None, None, 0)))
    c = np.asarray(draws(jacobian, residual, noise, jax.random.split(jax.random.key(0), 500)), float)
    missing = (residual - c @ np.float64(jacobian).T) / sd
    covariance = np.float64(jacobian) @ np.float64(jacobian).T
    share = sd**2 * np.linalg.inv(covariance + sd**2 * np.eye(30))  # s²C⁻¹
    expected = np.trace(np.eye(30) - share) + np.sum((share @ residual / sd) ** 2)  # r - Jc ~ N(s²C⁻¹r, s² - s⁴C⁻¹)
    np.testing.assert_allclose(np.mean(np.sum(missing**2, 1)), expected, rtol=0.05, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("has_few_observations", [True, False])
def test_the_potential_and_its_derivatives_are_those_of_the_closed_form(x64, has_few_observations):
    """-log N(y; 0, MMᵀ + σ²I) with M by all white sites of the model, however the code reduces them."""
    x, y = (X, Y) if has_few_observations else (np.concatenate([X, 0.9 * X]), np.concatenate([Y, Y]))
    _, marginal = potentials(model, x, y)
    assert marginal.has_few_observations is has_few_observations
    linearized, (position, unravel) = as_linear(model, marginal, x, y), ravel_pytree(marginal.init_params())
    direction = jnp.cos(jnp.arange(len(position)))

    def exact(z):
        jacobian, mean, values = linearized(z)
        noise = jnp.full(len(y), values["sigma"])
        return marginal.prior_potential(z) - exact_log_density(jacobian, y - mean, noise)

    def derivatives(fn):
        def flat(position):
            return fn(unravel(position))

        return flat(position), *jax.jvp(jax.grad(flat), (position,), (direction,))

    found = quick_jit(lambda: derivatives(lambda z: marginal(z, None)[0]))()
    expected = quick_jit(lambda: derivatives(exact))()
    for a, b in zip(found, expected, strict=True):  # flax computes in float32
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.slow
def test_the_prior_of_what_is_left_has_the_jacobian_of_constrained_sites():
    """log sigma ~ N(log .2, .3²): a chain that moves by log sigma has no other factor."""
    _, marginal = potentials(linear, X, Y)
    for value in (-2.0, -1.0):
        exact = -dist.Normal(jnp.log(NOISE), 0.3).log_prob(value)
        np.testing.assert_allclose(marginal.prior_potential({"sigma": jnp.asarray(value)}), exact, rtol=1e-5)


# ---- draws of the last layer -------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [pytest.param(8, marks=pytest.mark.slow), 5])
def test_completed_draws_have_the_posterior_given_the_rest_and_do_not_change(num_rows):
    """All white sites of 4000 positions that differ in the last bits only, by χ² against N(m, C) in closed form."""
    x, y = X[:num_rows], Y[:num_rows]
    full, marginal = potentials(linear, x, y)
    assert marginal.has_few_observations is (num_rows < 8)  # of eight features
    z = marginal.init_params()
    jacobian, mean, values = quick_jit(as_linear(linear, marginal, x, y))(z)
    jacobian, sigma = np.asarray(jacobian, np.float64), float(values["sigma"])
    gain = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + sigma**2 * np.eye(len(y)))
    exact_mean, covariance = gain @ (y - mean), np.eye(jacobian.shape[1]) - gain @ jacobian
    near = {"sigma": z["sigma"] * (1.0 + 1.2e-7 * jnp.arange(4000))}
    complete = quick_jit(jax.vmap(lambda z: ravel_pytree({k: marginal.completed(z)[k] for k in marginal.block})[0]))
    draws = np.asarray(complete(near))
    assert len(np.unique(draws[:, 0])) > 3900
    assert min(gaussian_p_values(draws, exact_mean, covariance).values()) > 1e-4
    assert min(gaussian_p_values(1.03 * draws, exact_mean, covariance).values()) < 1e-4
    np.testing.assert_array_equal(draws, complete(near))
    assert set(marginal.completed(z)) == set(full.latents)


# ---- where it does not apply -------------------------------------------------------------------


def observed(site, f, x, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
    mean = f(x)[:, 0]
    laws = {
        "Poisson": lambda: dist.Poisson(jnp.exp(mean)),
        "StudentT": lambda: dist.StudentT(4.0, mean, sigma),
        "exp": lambda: dist.Normal(jnp.exp(mean), sigma),
        "scale": lambda: dist.Normal(0.0, 0.1 + mean**2),
        "mask": lambda: dist.Normal(mean, sigma).mask(np.arange(len(x)) < 4),
        "log-normal": lambda: dist.LogNormal(mean, sigma),
    }
    numpyro.sample("y", laws[site](), obs=y)


def of_kind(kind):
    """A model that one thing keeps from being marginalized."""

    def model(x, y=None):
        f = gp()
        if kind == "functional prior":
            f = fs.functional_prior("prior", f, fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(0.5), df=4.0), POINTS)
        if kind == "dependent site":
            numpyro.sample("other", dist.Normal(jnp.mean(f(x)), 1.0))
        if kind == "factor":
            numpyro.factor("more", -jnp.sum(f(x) ** 2))
        if kind == "minibatch":
            with numpyro.plate("data", len(x), subsample_size=4):
                xb, yb = numpyro.subsample(x, event_dim=1), y if y is None else numpyro.subsample(y, event_dim=0)
                numpyro.sample("y", dist.Normal(f(xb)[:, 0], 0.1), obs=yb)
        elif kind == "scaled":
            with handlers.scale(scale=0.5):
                numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)
        elif kind == "both scales":
            log_sd = gp("g")
            numpyro.sample("y", dist.Normal(0.0, jnp.exp(f(x)[:, 0] + log_sd(x)[:, 0])), obs=y)
        elif kind == "square of a sum":
            other = gp("g")
            numpyro.sample("y", dist.Normal((f(x)[:, 0] + other(x)[:, 0]) ** 2, 0.1), obs=y)
        elif kind in ("functional prior", "dependent site", "factor"):
            numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)
        else:
            observed(kind, f, x, y)

    return model


REFUSED = {
    "Poisson": "not a plain Normal",
    "StudentT": "not a plain Normal",
    "log-normal": "not a plain Normal",
    "mask": "not a plain Normal",
    "scaled": "not a plain Normal",
    "factor": "not a plain Normal",
    "exp": "not affine",
    "square of a sum": "not affine",
    "scale": "depends on a function",
    "both scales": "depends on a function",
    "dependent site": "depends on a function",
    "minibatch": "minibatches",
    "functional prior": "the functional prior 'prior' is not a plain Gaussian process",
}


@pytest.mark.parametrize("kind", some(REFUSED, 7))
def test_marginalize_true_says_why_it_cannot_and_none_does_not(kind):
    y = np.arange(8) if kind == "Poisson" else np.abs(Y) + 0.1
    kernel = fs.fSGHMC(of_kind(kind), marginalize=True)
    with pytest.raises(ValueError, match=rf"marginalize=True, but .*{REFUSED[kind]}"):
        kernel._model_potential((X, y), {})
    kernel.marginalize = None
    assert kernel._integrated_out((X, y), {}) == ()


@pytest.mark.parametrize("y", [Y[:3], Y[:, None]])
def test_observations_of_another_shape_are_named(y):
    with pytest.raises(ValueError, match=r"The observation 'y' has shape .* but its likelihood has shape \(8,\)"):
        fs.MCMC(fs.fSGHMC(model), num_warmup=2, num_samples=2, progress_bar=False).run(jax.random.key(0), X, y)


def test_other_reasons_of_the_kernel_and_the_model():
    with pytest.raises(ValueError, match=r"temperature=0\.5 is not 1"):
        fs.fSGHMC(model, temperature=0.5, marginalize=True)._model_potential((X, Y), {})

    def all_known(x, y=None):
        f = gp(net=FIXED)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE), obs=y)

    with pytest.raises(ValueError, match="there is no other site"):
        fs.fSGHMC(all_known, marginalize=True)._model_potential((X, Y), {})

    def only_noise(x, y=None):
        f, sigma = gp(net=FIXED), numpyro.sample("sigma", dist.HalfNormal(0.3))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)

    assert isinstance(fs.fSGHMC(only_noise)._model_potential((X, Y), {}), MarginalPotential)
    assert not isinstance(fs.fMCLMC(only_noise)._model_potential((X, Y), {}), MarginalPotential)  # whose momentum turns
    with pytest.raises(ValueError, match=r"it would leave too few parameters \(1\)"):
        fs.fMCLMC(only_noise, marginalize=True)._model_potential((X, Y), {})
    kernel = fs.fSGHMC(model)
    assert isinstance(kernel._model_potential((X, Y), {}), MarginalPotential)
    with handlers.scale(scale=0.5):  # the same kernel and data under another handler are another model
        assert not isinstance(kernel._model_potential((X, Y), {}), MarginalPotential)


@pytest.mark.slow
def test_two_functions_that_are_added_are_both_integrated_out(x64):
    def additive(x, y=None):
        f, g = gp(), gp("g", prior=fs.GPPrior(2.0 * tinygp.kernels.Matern32(0.3)))
        sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x)[:, 0] + g(x)[:, 0] * x[:, 0], sigma), obs=y)

    _, marginal = potentials(additive, X, Y)
    assert {name.split(".")[0] for name in marginal.block} == {"f", "g"}
    z = marginal.init_params()
    jacobian, mean, values = quick_jit(as_linear(additive, marginal, X, Y))(z)
    exact = marginal.prior_potential(z) - exact_log_density(jacobian, Y - mean, jnp.full(8, values["sigma"]))
    np.testing.assert_allclose(quick_jit(lambda z: marginal(z, None)[0])(z), exact, rtol=1e-6)


def mean_and_noise(x, y=None):
    """The noise comes first in the program, and both depend on it."""
    log_sd = gp("g", prior=fs.GPPrior(0.3 * tinygp.kernels.ExpSquared(0.9)))
    f, sigma = gp(), numpyro.sample("sigma", dist.LogNormal(jnp.log(NOISE), 0.3))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma * jnp.exp(log_sd(x)[:, 0])), obs=y)


def product(x, y=None):
    """Affine in either, not in both: the first one is integrated out."""
    f, g = gp(), gp("g")
    numpyro.sample("y", dist.Normal(f(x)[:, 0] * g(x)[:, 0], 0.1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [mean_and_noise, product])
def test_of_two_functions_the_one_that_is_affine_is_integrated_out(model, x64):
    full, marginal = potentials(model, X, Y)
    assert {name.split(".")[0] for name in marginal.block} == {"f"}
    assert {"g.values", "g.last_layer", "g.residual"} <= set(marginal.latents)
    moved = {k: v + 0.3 * jnp.cos(jnp.arange(v.size)).reshape(v.shape) for k, v in marginal.init_params().items()}
    jacobian, mean, values = quick_jit(as_linear(model, marginal, X, Y))(moved)
    trace = run_model(model, (X, Y), key=jax.random.key(0), substitute=values | zeros_of(marginal))
    noise = jnp.broadcast_to(trace["y"]["fn"].scale, 8)
    exact = marginal.prior_potential(moved) - exact_log_density(jacobian, Y - mean, noise)
    np.testing.assert_allclose(quick_jit(lambda z: marginal(z, None)[0])(moved), exact, rtol=1e-5)
    assert set(marginal.completed(moved)) == set(full.latents)


def zeros_of(marginal):
    return {k: jnp.zeros_like(marginal.trace[k]["value"]) for k in marginal.block}


@pytest.mark.slow
@pytest.mark.nightly
def test_posterior_of_a_mean_and_a_noise_is_that_of_nuts():
    """The mean's last layer is integrated out, the noise's is sampled. NUTS has 10 000 effective draws of each."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-1.0, 1.0, 40))[:, None].astype(np.float32)
    y = (np.sin(3.0 * x[:, 0]) + np.exp(-1.5 + x[:, 0]) * rng.normal(size=40)).astype(np.float32)
    prior, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.6)), fs.measurement.space_filling(-1.0, 1.0, 10)
    network = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)])

    def model(x, y=None):
        f, g = (fs.gp_network(name, network, prior, points, tolerance=0.1)(x)[:, 0] for name in "fg")
        numpyro.sample("y", dist.Normal(f, jnp.exp(-1.5 + g)), obs=y)

    def moments(kernel, **numbers):
        mcmc = fs.MCMC(kernel, num_chains=4, chain_method="vectorized", progress_bar=False, **numbers)
        mcmc.run(jax.random.key(1), x, y)
        draws = fs.predict(mcmc, jax.random.key(2), x)
        return np.array([[draws[name].mean(0), draws[name].std(0)] for name in "fg"])[..., 0]

    kernel = fs.fSGHMC(model)
    found = moments(kernel, num_warmup=2000, num_samples=6000, thinning=2)
    assert set(kernel._integrated_out((x, y), {})) == {"f.last_layer", "f.values", "f.residual"}
    wanted = moments(NUTS(model), num_warmup=1500, num_samples=4000)
    np.testing.assert_array_less(np.abs(found[:, 0] - wanted[:, 0]), 0.1 * wanted[:, 1])
    np.testing.assert_allclose(found[:, 1], wanted[:, 1], rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "size"), [(4, 12 + 12 + 12 + 11 + 5 + 5), (12, 12 + 11)])
def test_dependent_outputs_are_integrated_out_beside_independent_ones(x64, num_rows, size):
    """Velocities in the plane under a Helmholtz kernel, with a drift that has a process of its own."""
    kernel = fs.priors.Helmholtz(tinygp.kernels.ExpSquared(0.8), 0.5 * tinygp.kernels.ExpSquared(0.5))
    points = np.random.default_rng(0).uniform(-1.0, 1.0, (6, 2))
    net = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(2)])

    def currents(x, v=None):
        f = fs.gp_network("f", net, fs.GPPrior(kernel, num_outputs=2), points, **SCALES)
        g = gp("g")
        sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
        numpyro.sample("y", dist.Normal(f(x) + g(x[:, :1]), sigma).to_event(1), obs=v)

    x = np.random.default_rng(1).uniform(-1.0, 1.0, (num_rows, 2))
    v = np.sin(3.0 * x)
    full, marginal = potentials(currents, x, v)
    assert set(full.latents) - set(marginal.latents) == set(marginal.block)
    assert marginal.size == size
    z = marginal.init_params()
    jacobian, mean, values = quick_jit(as_linear(currents, marginal, x, v))(z)
    exact = marginal.prior_potential(z) - exact_log_density(
        jacobian, v.ravel() - mean, jnp.full(v.size, values["sigma"])
    )
    np.testing.assert_allclose(quick_jit(lambda z: marginal(z, None)[0])(z), exact, rtol=1e-6)
    completed = quick_jit(marginal.completed)(z)
    assert {k: v.shape for k, v in completed.items()} == {k: v.shape for k, v in full.init_params().items()}


# ---- posteriors --------------------------------------------------------------------------------


def exact_moments():
    """``(mean, sd)`` of sigma and of f(X) under ``linear``, from the evidence on a grid of sigma."""
    _, marginal = potentials(linear, X, Y)
    jacobian, mean, _ = (
        np.asarray(a, np.float64) if np.ndim(a) else a
        for a in as_linear(linear, marginal, X, Y)(marginal.init_params())
    )
    logs = np.linspace(np.log(NOISE) - 1.8, np.log(NOISE) + 1.8, 400)
    weights, means, variances = [], [], []
    prior = jacobian @ jacobian.T
    for log_sd in logs:
        noisy = prior + np.exp(2 * log_sd) * np.eye(len(Y))
        gain = prior @ np.linalg.inv(noisy)
        square = (Y - mean) @ np.linalg.solve(noisy, Y - mean)
        weights.append(-0.5 * square - 0.5 * np.linalg.slogdet(noisy)[1] - 0.5 * ((log_sd - np.log(NOISE)) / 0.3) ** 2)
        means.append(mean + gain @ (Y - mean))
        variances.append(np.diag(prior - gain @ prior))
    weights = np.exp(np.array(weights) - max(weights))
    weights /= weights.sum()
    first, second = weights @ means, weights @ (np.array(variances) + np.square(means))
    sigma = np.exp(logs)
    sigma_mean = weights @ sigma
    return np.append(first, sigma_mean), np.sqrt(np.append(second - first**2, weights @ sigma**2 - sigma_mean**2))


def moments_and_errors(draws):
    """Means and standard deviations of draws [C, S, Q], and the Monte Carlo standard errors of both."""
    centered = (draws - draws.mean((0, 1))) ** 2
    sizes = [numpyro.diagnostics.effective_sample_size(d) for d in (draws, centered)]
    sd = draws.std((0, 1))
    return draws.mean((0, 1)), sd, sd / np.sqrt(sizes[0]), centered.std((0, 1)) / np.sqrt(sizes[1]) / (2 * sd)


def quantities(mcmc, model):
    """Draws [C, S, 9] of f(X) and sigma."""
    samples = mcmc.get_samples(group_by_chain=True)
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), samples)
    f = np.asarray(fs.predict(flat, jax.random.key(0), X, model=model)["f"])[..., 0]
    return np.concatenate([f.reshape(*samples["sigma"].shape, -1), np.asarray(samples["sigma"])[..., None]], -1)


SAMPLERS = {
    "fSGHMC": fs.fSGHMC,
    "fSGLD": lambda model, **settings: fs.fSGLD(model, num_steps=40, **settings),
}


def sampled(kernel, num_samples=1500, num_warmup=500):
    driver = MCMC if isinstance(kernel, NUTS) else fs.MCMC
    settings = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = driver(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)
    mcmc.run(jax.random.key(0), X, Y)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("marginalize", [None, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_posterior_of_fixed_features_is_the_closed_form(name, marginalize):
    """Means and sds of f(X) and sigma within 4.5 Monte Carlo errors plus 3 % of an sd, what the step size may add."""
    mcmc = sampled(SAMPLERS[name](linear, marginalize=marginalize))
    assert ("f.values" in mcmc.last_state.z) == (marginalize is False)
    mean, sd, mean_error, sd_error = moments_and_errors(quantities(mcmc, linear))
    exact_mean, exact_sd = exact_moments()
    assert np.all(np.abs(mean - exact_mean) < 4.5 * mean_error + 0.03 * exact_sd)
    assert np.all(np.abs(sd - exact_sd) < 4.5 * sd_error + 0.03 * exact_sd)
    assert np.any(np.abs(1.2 * sd - exact_sd) > 4.5 * sd_error + 0.03 * exact_sd)


@pytest.mark.nightly
def test_posterior_of_a_network_is_that_of_nuts():
    """f(X) and sigma of a network of ten units, marginalized, beside NUTS on all sites."""

    def known_noise(x, y=None):  # to within a factor: with eight points a wide prior has a second mode of no noise
        f = gp()
        sigma = numpyro.sample("sigma", dist.LogNormal(jnp.log(NOISE), 0.3))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)

    reference = moments_and_errors(quantities(sampled(NUTS(known_noise), 1000), known_noise))
    found = moments_and_errors(quantities(sampled(fs.fSGHMC(known_noise)), known_noise))
    for value, error, k in [(0, 2, "mean"), (1, 3, "sd")]:
        bound = 4.5 * np.hypot(reference[error], found[error]) + 0.03 * reference[1]
        assert np.all(np.abs(found[value] - reference[value]) < bound), k


# ---- in a run ----------------------------------------------------------------------------------


def run(kernel=None, data=(X, Y), **settings):
    kernel = fs.fSGHMC(linear, step_size=0.05, warmup=fs.Warmup(warm_start=0.0)) if kernel is None else kernel
    settings = {
        "num_warmup": 4,
        "num_samples": 6,
        "num_chains": 2,
        "progress_bar": False,
        "chain_method": "vectorized",
    } | settings
    inits = {k: settings.pop(k) for k in ("init_params", "extra_fields") if k in settings}
    mcmc = fs.MCMC(kernel, **settings)
    mcmc.run(jax.random.key(0), *data, **inits)
    return mcmc


@pytest.fixture(scope="module")
def base():
    return run(extra_fields=("potential_energy",))


def equal(one, other, **tolerance):
    one, other = ((m if isinstance(m, dict) else m.get_samples()) for m in (one, other))
    assert one.keys() == other.keys()
    for k in one:
        np.testing.assert_allclose(one[k], other[k], err_msg=k, **({"rtol": 0.0} | tolerance))


def test_draws_have_all_sites_and_the_state_those_that_are_left(base):
    assert set(base.get_samples()) == {"sigma", *(f"f.{site}" for site in ("last_layer", "values", "residual"))}
    assert set(base.last_state.z) == {"sigma"}
    marginal = potentials(linear, X, Y)[1]
    z = jax.tree.map(lambda a: a[-1], base.last_state.z)
    np.testing.assert_allclose(base.get_extra_fields()["potential_energy"][-1], marginal(z, None)[0], rtol=1e-5)
    completed = marginal.completed(z)
    for site in marginal.block:
        np.testing.assert_allclose(base.get_samples()[site][-1], completed[site], atol=1e-4)


@pytest.mark.slow
def test_chains_do_not_depend_on_how_they_run(base):
    """The chain itself: a last bit of it that differs gives another draw of what was integrated out."""
    one, two = (mcmc.get_samples()["sigma"] for mcmc in (base, run(chain_method="sequential")))
    np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_holds_the_same_draws_and_goes_on(base, tmp_path):
    mcmc = run(checkpoint=tmp_path, checkpoint_every=2)
    equal(base, mcmc, atol=1e-4)
    equal(mcmc, run(checkpoint=tmp_path, checkpoint_every=2))
    equal(mcmc, fs.Posterior.from_checkpoint(tmp_path, linear, X, Y).samples)


@pytest.mark.slow
def test_thinning_and_numpyro_s_driver_keep_the_same_chain(base):
    """The sites that move: a last bit of them that differs gives another draw of what was integrated out."""
    chain = np.asarray(base.get_samples()["sigma"]).reshape(2, 6)
    thinned = run(num_samples=6, thinning=2).get_samples()["sigma"]
    np.testing.assert_allclose(thinned, chain[:, 1::2].ravel(), atol=1e-4)
    kernel = fs.fSGHMC(linear, step_size=0.05, warmup=fs.Warmup(warm_start=0.0))
    mcmc = MCMC(kernel, num_warmup=4, num_samples=6, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    np.testing.assert_allclose(mcmc.get_samples()["sigma"], chain.ravel(), atol=1e-4)


@pytest.mark.slow
def test_init_params_may_name_all_sites_or_those_that_are_left():
    full = {"sigma": jnp.array([0.1, -0.2])}
    full |= {k: jnp.ones((2, n, 1)) for k, n in {"f.last_layer": 8, "f.values": 5, "f.residual": 5}.items()}
    equal(run(init_params=full), run(init_params={"sigma": full["sigma"]}))
    one_by_one = [run(init_params=init, chain_method="sequential") for init in (full, {"sigma": full["sigma"]})]
    equal(*one_by_one)
    with pytest.raises(ValueError, match="init_params must be a dict with the sites"):
        run(init_params={"other": full["sigma"]})


@pytest.mark.slow
def test_continued_runs_and_new_data(base):
    mcmc = run(num_samples=3)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, X, Y)
    assert np.isfinite(mcmc.get_samples()["f.values"]).all()
    shifted = (X, Y + 1.0)
    one = fs.MCMC(
        fs.fSGHMC(linear, step_size=0.05, warmup=fs.Warmup(warm_start=0.0)),
        num_warmup=4,
        num_samples=6,
        num_chains=2,
        progress_bar=False,
        chain_method="vectorized",
    )
    one.run(jax.random.key(0), X, Y)
    one.run(jax.random.key(0), *shifted)
    equal(one, run(data=shifted))


@pytest.mark.slow
def test_functions_are_kept_and_predicted_saved_and_reported(base, tmp_path):
    values = run(functions_at=X).get_samples()["f"]
    predicted = fs.predict(base, jax.random.key(0), X)
    np.testing.assert_allclose(values.reshape(predicted["f"].shape), predicted["f"], atol=1e-4)
    assert predicted["y"].shape == (12, 8)
    fs.save(base, tmp_path / "run.npz")
    equal(base, dict(fs.Posterior.load(tmp_path / "run.npz", linear).samples))
    draws = Predictive(linear, base.get_samples())(jax.random.key(1), X)["y"]
    assert draws.shape == (12, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reports_and_arviz_read_such_a_run(base):
    assert "f" in str(fs.report(base, X, Y))
    tree = fs.to_arviz(base)
    assert {"f", "sigma"} <= set(tree.posterior)


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["AutoNormal", "mean_field"])
def test_variational_inference_takes_the_model_as_it_is(guide):
    guide = AutoNormal(linear) if guide == "AutoNormal" else fs.variational.guides.mean_field(linear)
    svi = SVI(linear, guide, numpyro.optim.Adam(0.02), Trace_ELBO())
    losses = svi.run(jax.random.key(0), 300, X, Y, progress_bar=False).losses
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 5
