"""Ridge regression by orthogonal factors, and the white parameters of a last layer, beside their closed forms."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import quick_jit
from support.tiers import some

from numpyro_fspace.model.last_layer.given_features import LastLayerPrior, last_layer_given
from numpyro_fspace.model.last_layer.marginal_likelihood import log_marginal
from numpyro_fspace.model.last_layer.ridge import ridge_solver

#: Rows and columns of Ψ: narrower than the points, wider, and nearly square, which is solved by the rows.
SIZES = [(20, 6), (8, 30), (12, 16)]
#: Rounding errors in float32 by τ: that of the type times the condition number of [Ψ; τI], which is at most 4 / τ here.
#: Those of a solution by ΨᵀΨ or ΨΨᵀ are 4e-3 to 4e-2 at τ = 0.001.
ROUNDING = {0.1: 3e-6, 0.001: 4e-4}


def smooth_features(num_points, num_features):
    """Features of a random tanh network: singular values that fall by many orders of magnitude."""
    rng, x = np.random.default_rng(0), np.linspace(-1.0, 1.0, num_points)[:, None]
    psi = np.tanh(2.0 * x @ rng.normal(size=(1, num_features)) + 2.0 * rng.normal(size=num_features))
    return np.float64(np.float32(psi / np.sqrt(np.mean(np.sum(psi**2, 1)))))  # exact in either precision


def covariance_root(num_points, tau):
    x = np.linspace(-1.0, 1.0, num_points)[:, None]
    return np.linalg.cholesky(np.exp(-0.5 * ((x - x.T) / 0.3) ** 2) + tau**2 * np.eye(num_points))


def gain(psi, tau):
    """G = Ψᵀ (ΨΨᵀ + τ²I)⁻¹, from a singular value decomposition."""
    left, values, right = np.linalg.svd(psi, full_matrices=False)
    return right.T * (values / (values**2 + tau**2)) @ left.T


def last_layer_map(psi, root, tau):
    """B of the module: the last layer as a linear function of the sites (last_layer, values, residual)."""
    g = gain(psi, tau)
    return np.concatenate([np.eye(psi.shape[1]) - g @ psi, g @ root, -tau * g], 1)


@pytest.mark.parametrize("tau", [0.1, 0.001])
@pytest.mark.parametrize("size", SIZES)
def test_solutions_are_those_of_a_singular_value_decomposition(size, tau):
    """In float32, with a condition number of ΨᵀΨ + τ²I up to 3e7, at the points and in the coefficients."""
    psi, root = smooth_features(*size), covariance_root(size[0], tau)
    found = np.asarray(ridge_solver(jnp.asarray(psi, jnp.float32), tau)(jnp.asarray(root, jnp.float32)), np.float64)
    exact = gain(psi, tau) @ root
    np.testing.assert_allclose(psi @ found, psi @ exact, atol=ROUNDING[tau])
    if size[0] < size[1]:  # by the rows: nothing outside of their span
        np.testing.assert_allclose(found, exact, atol=2.5 * ROUNDING[tau] * np.abs(exact).max())


@pytest.mark.parametrize("size", SIZES)
def test_derivatives_are_those_of_the_closed_form(x64, size):
    psi, r, tau = smooth_features(*size), np.random.default_rng(1).normal(size=(size[0], 2)), 0.1

    def loss(psi, r, tau):
        return jnp.sum(jnp.sin(ridge_solver(psi, tau)(r)))

    def exact(psi, r, tau):
        return jnp.sum(jnp.sin(psi.T @ jnp.linalg.solve(psi @ psi.T + tau**2 * jnp.eye(len(psi)), r)))

    def derivatives(fn):
        gradient = jax.grad(fn, (0, 1, 2))
        return jax.jvp(gradient, (psi, r, tau), (np.cos(9 * psi), np.sin(r), 1.0))

    for a, b in zip(*(jax.tree.leaves(quick_jit(partial(derivatives, fn))()) for fn in (loss, exact)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max())


@pytest.mark.slow
def test_gradients_of_a_sampled_last_layer_in_float32_beside_float64(x64):
    """Of the density of data near a network's own values, in its hidden weights: to 1 % at τ = 0.001.

    If the solution multiplies R⁻ᵀ by Ψᵀr, rather than Q₁ᵀ by r, the error is 39 %.
    """
    num_points, num_features, tau, rng = 60, 51, 0.001, np.random.default_rng(2)
    x, places = np.linspace(-1.0, 1.0, 40)[:, None], np.linspace(-1.0, 1.0, num_points)[:, None]
    hidden = np.float32(2.0 * np.random.default_rng(0).normal(size=(2, num_features)))
    start = np.float32(rng.normal(size=(num_features, 1)))
    values = np.float32(covariance_root(num_points, tau) @ rng.normal(size=(num_points, 1)))

    def outputs(hidden):
        at_data, at_points = (jnp.tanh(a.astype(hidden.dtype) * hidden[0] + hidden[1]) / 7.0 for a in (x, places))
        white = {"last_layer": start, "values": values, "residual": np.zeros_like(values)}
        white = {site: jnp.asarray(value, hidden.dtype) for site, value in white.items()}
        return at_data @ last_layer_given(at_points, tau, jnp.zeros((num_points, 1), hidden.dtype), **white)

    data = np.float32(outputs(jnp.asarray(hidden, float)) + 0.1 * rng.normal(size=(40, 1)))

    def gradient(dtype):
        def density(hidden):
            return -50.0 * jnp.sum((data.astype(dtype) - outputs(hidden)) ** 2)

        return np.asarray(quick_jit(jax.grad(density))(jnp.asarray(hidden, dtype)), float)

    exact = gradient(jnp.float64)
    assert np.linalg.norm(gradient(jnp.float32) - exact) < 0.01 * np.linalg.norm(exact)


def last_layer_prior(psi, roots, tau, center, dtype=float):
    return LastLayerPrior(*(jnp.asarray(a, dtype) for a in (psi, tau, roots, center)))


def matrix_of(prior):
    """``(mean, L)`` of the last layer b = mean + L c, for one output or several in the order of ``b.ravel()``."""
    start = jnp.zeros(prior.size, prior.center.dtype)

    def b(white):
        return prior.last_layer(white).ravel()

    return (np.asarray(a, np.float64) for a in (b(start), jax.jacfwd(b)(start)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", some(SIZES, 1))
def test_the_last_layer_has_the_covariance_of_its_sites(x64, size, dtype):
    """At the points, with the map B from the sites: Ψ L (Ψ L)ᵀ = ΨB (ΨB)ᵀ, and the mean is G c."""
    center = np.cos(np.arange(size[0]))[:, None]
    for tau, rounding in ROUNDING.items():
        psi, root = smooth_features(*size), covariance_root(size[0], tau)
        mean, factor = matrix_of(last_layer_prior(psi, root[None], tau, center, dtype))
        tolerance = 1e-9 if dtype == np.float64 else 2 * rounding
        b = psi @ last_layer_map(psi, root, tau)
        np.testing.assert_allclose(psi @ mean, psi @ (gain(psi, tau) @ center)[:, 0], atol=tolerance)
        np.testing.assert_allclose(psi @ factor @ (psi @ factor).T, b @ b.T, atol=tolerance)


@pytest.mark.slow
def test_dependent_outputs_share_one_factor(x64):
    """A joint covariance of all values of two outputs, with correlations between them."""
    (num_points, num_features), tau = (7, 4), 0.1
    psi = smooth_features(num_points, num_features)
    between = np.linalg.cholesky(np.array([[1.0, 0.6], [0.6, 2.0]]))
    root = np.kron(covariance_root(num_points, tau), between)  # of f.ravel()
    mean, factor = matrix_of(last_layer_prior(psi, root[None], tau, np.zeros((num_points, 2))))
    g, unit = gain(psi, tau), np.eye(2)
    all_sites = [np.kron(np.eye(num_features) - g @ psi, unit), np.kron(g, unit) @ root, -tau * np.kron(g, unit)]
    b = np.concatenate(all_sites, 1)
    np.testing.assert_allclose(factor @ factor.T, b @ b.T, atol=1e-9)
    np.testing.assert_array_equal(mean, 0.0)


KINDS = ["one root", "a root each", "dependent"]


def two_outputs(kind):
    """``(psi, roots, B)`` of two outputs, with the map B from each output's sites, or from all."""
    (num_points, num_features), tau = (7, 4), 0.1
    psi, root = smooth_features(num_points, num_features), covariance_root(num_points, tau)
    if kind == "dependent":
        roots = np.kron(root, np.array([[1.0, 0.0], [0.6, 1.3]]))[None]
    else:
        roots = np.stack([root, 2.0 * root]) if kind == "a root each" else root[None]
    return psi, roots, tau


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_derivatives_of_the_distribution_are_those_of_the_closed_form(x64, kind):
    """First and second ones of a function of the mean and the covariance, in Ψ, τ, the roots and the center."""
    psi, roots, tau = two_outputs(kind)
    (num_points, num_features), center = psi.shape, np.cos(np.arange(2 * len(psi))).reshape(-1, 2)
    mixed = np.random.default_rng(1).normal(size=(2 * num_features, 2 * num_features))

    def score(mean, covariance):  # of b.ravel()
        return jnp.sum(jnp.sin(mixed @ covariance)) + jnp.sum(jnp.cos(mixed @ mean))

    def loss(*given):
        prior = LastLayerPrior(*given)
        factor = jax.jacfwd(lambda c: prior.last_layer(c).ravel())(jnp.zeros(prior.size))
        return score(prior.last_layer(jnp.zeros(prior.size)).ravel(), factor @ factor.T)

    def exact(psi, tau, roots, center):
        g = psi.T @ jnp.linalg.inv(psi @ psi.T + tau**2 * jnp.eye(num_points))
        rest, unit = jnp.eye(num_features) - g @ psi, jnp.eye(2)
        if kind == "dependent":
            gain = jnp.kron(g, unit)
            return score(gain @ center.ravel(), gain @ roots[0] @ roots[0].T @ gain.T + jnp.kron(rest, unit))
        parts = [g @ roots[k % len(roots)] @ roots[k % len(roots)].T @ g.T + rest for k in range(2)]
        covariance = sum(jnp.kron(part, jnp.diag(unit[k])) for k, part in enumerate(parts))
        return score((g @ center).ravel(), covariance)

    given = tuple(jnp.asarray(a, float) for a in (psi, tau, roots, center))

    def derivatives(fn):
        return jax.jvp(jax.grad(fn, (0, 1, 2, 3)), given, tuple(jnp.cos(9 * a) for a in given))

    found, expected = (jax.tree.leaves(quick_jit(partial(derivatives, fn))()) for fn in (loss, exact))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max())


@pytest.mark.slow
def test_derivatives_in_float32_beside_float64(x64):
    """Of the marginal density of data, at a condition number of 1e5: to 2 % of the largest."""
    size, tau = (20, 16), 0.001
    psi, root, center = smooth_features(*size), covariance_root(size[0], tau), np.cos(np.arange(size[0]))[:, None]
    at_data = np.float64(np.float32(smooth_features(30, size[1])))

    def density(psi, features, center):
        prior = LastLayerPrior(psi, tau, jnp.asarray(root, psi.dtype)[None], center)
        start = jnp.zeros(prior.size, psi.dtype)
        slope = jax.jacfwd(lambda c: prior.last_layer(c)[:, 0])(start)
        residual = jnp.sin(7 * jnp.arange(30.0, dtype=psi.dtype)) - features @ prior.last_layer(start)[:, 0]
        return log_marginal(features @ slope, residual, jnp.full(30, 0.05, psi.dtype))

    gradient = quick_jit(jax.grad(density, (0, 1, 2)))
    exact = gradient(*(jnp.asarray(a, float) for a in (psi, at_data, center)))
    found = gradient(*(jnp.asarray(a, jnp.float32) for a in (psi, at_data, center)))
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_latents_are_white_and_give_the_last_layer(x64, kind):
    """With white c they are white, and the model's formula gives them the last layer that c gives."""
    psi, roots, tau = two_outputs(kind)
    num_points = len(psi)
    prior = last_layer_prior(psi, roots, tau, np.cos(np.arange(2 * num_points)).reshape(-1, 2))
    keys, white = jax.random.split(jax.random.key(1), 4000), jax.random.normal(jax.random.key(2), (4000, prior.size))
    draws = quick_jit(jax.vmap(prior.latents))(white, keys)
    w = np.concatenate([np.asarray(draws[site]).reshape(4000, -1) for site in prior.sites], 1)
    second = w.T @ w / len(w)
    off = second[np.triu_indices(len(second), 1)]
    assert abs(len(w) * np.sum(off**2) - len(off)) < 5 * np.sqrt(2 * len(off))  # χ² with so many degrees of freedom
    assert np.abs(np.diag(second) - 1.0).max() < 5 * np.sqrt(2 / len(w))

    def last_layer(w):
        if kind == "dependent":
            values = (roots[0] @ w["values"].ravel()).reshape(num_points, 2)
        else:
            values = np.stack([roots[k % len(roots)] @ w["values"][:, k] for k in range(2)], 1)
        missing = prior.center + values - psi @ w["last_layer"] - tau * w["residual"]
        return w["last_layer"] + gain(psi, tau) @ missing

    for i in range(3):
        one = {site: np.asarray(draws[site][i]) for site in prior.sites}
        np.testing.assert_allclose(last_layer(one), prior.last_layer(white[i]), atol=1e-9)


@pytest.mark.parametrize("twin", ["no residual", "other τ", "no values"])
def test_wrong_latents_are_noticed(x64, twin):
    """The checks above reject latents without one of the sites, and those of another tolerance."""
    psi, roots, tau = two_outputs("one root")
    center = np.zeros((len(psi), 2))
    prior = last_layer_prior(psi, roots, 1.2 * tau if twin == "other τ" else tau, center)
    white = jax.random.normal(jax.random.key(2), (prior.size,))
    w = {site: np.asarray(value) for site, value in prior.latents(white, jax.random.key(1)).items()}
    if twin.startswith("no "):
        w[twin[3:]] = np.zeros_like(w[twin[3:]])
    values = np.stack([roots[0] @ w["values"][:, k] for k in range(2)], 1)
    found = w["last_layer"] + gain(psi, tau) @ (values - psi @ w["last_layer"] - tau * w["residual"])
    assert np.abs(found - np.asarray(last_layer_prior(psi, roots, tau, center).last_layer(white))).max() > 1e-3
