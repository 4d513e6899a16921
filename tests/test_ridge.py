"""Ridge regression by orthogonal factors, and the white parameters of a last layer, beside their closed forms."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compilation import quick_jit

from numpyro_fspace.model.ridge import Reduction, Ridge

#: Rows and columns of Ψ: narrower than the points, wider, and nearly square, which is solved by the rows.
SIZES = [(20, 6), (8, 30), (12, 16)]
#: Rounding errors in float32 by τ: that of the type times the condition number of [Ψ; τI].
ROUNDING = {0.1: 3e-6, 0.001: 3e-5}


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
    found = np.asarray(Ridge(jnp.asarray(psi, jnp.float32), tau)(jnp.asarray(root, jnp.float32)), np.float64)
    exact = gain(psi, tau) @ root
    np.testing.assert_allclose(psi @ found, psi @ exact, atol=ROUNDING[tau])
    if size[0] < size[1]:  # by the rows: nothing outside of their span
        np.testing.assert_allclose(found, exact, atol=10 * ROUNDING[tau] * np.abs(exact).max())


@pytest.mark.parametrize("size", SIZES)
def test_derivatives_are_those_of_the_closed_form(x64, size):
    psi, r, tau = smooth_features(*size), np.random.default_rng(1).normal(size=(size[0], 2)), 0.1

    def loss(psi, r, tau):
        return jnp.sum(jnp.sin(Ridge(psi, tau)(r)))

    def exact(psi, r, tau):
        return jnp.sum(jnp.sin(psi.T @ jnp.linalg.solve(psi @ psi.T + tau**2 * jnp.eye(len(psi)), r)))

    def derivatives(fn):
        gradient = jax.grad(fn, (0, 1, 2))
        return jax.jvp(gradient, (psi, r, tau), (np.cos(9 * psi), np.sin(r), 1.0))

    for a, b in zip(*(jax.tree.leaves(quick_jit(partial(derivatives, fn))()) for fn in (loss, exact)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", SIZES)
def test_white_parameters_are_white_and_leave_nothing_out(x64, size, dtype):
    """QᵀQ = I, and QQᵀ keeps all of w that the last layer depends on: B Q Qᵀ = B, at the points."""
    for tau, rounding in ROUNDING.items():
        psi, root = smooth_features(*size), covariance_root(size[0], tau)
        reduction = Reduction(Ridge(jnp.asarray(psi, dtype), tau), jnp.asarray(root, dtype)[None], 1)
        parts = reduction._basis(reduction.roots[0])
        q = np.concatenate([np.asarray(parts[site], np.float64) for site in reduction.sites])
        tolerance = 1e-9 if dtype == np.float64 else rounding
        np.testing.assert_allclose(q.T @ q, np.eye(size[1]), atol=tolerance)
        b = psi @ last_layer_map(psi, root, tau)
        np.testing.assert_allclose(b @ q @ q.T, b, atol=tolerance)


def as_vector(values, output):
    return np.concatenate([np.asarray(values[site])[:, output] for site in Reduction.sites])


@pytest.mark.parametrize("num_roots", [1, 2])
def test_lifted_values_are_white(x64, num_roots):
    """By exact algebra, the map from c and fresh numbers w' to w = Qc + (I - QQᵀ)w' has a product with its transpose
    that is the identity; with no fresh numbers it is QQᵀ, which has rank H."""
    size, tau = (7, 4), 0.1
    psi = jnp.asarray(smooth_features(*size))
    roots = jnp.stack([jnp.asarray((1.0 + k) * covariance_root(size[0], tau)) for k in range(num_roots)])
    reduction = Reduction(Ridge(psi, tau), roots, 2)
    keys = jax.random.split(jax.random.key(1), 2000)
    white = jax.random.normal(jax.random.key(2), (2000, reduction.size))
    draws = quick_jit(jax.vmap(reduction.lift))(white, keys)
    w = np.concatenate([np.asarray(draws[site]) for site in reduction.sites], 1)  # [S, W, K]
    w = w.reshape(len(w), -1)
    second = w.T @ w / len(w)
    error = len(w) * (np.sum((second - np.eye(len(second)))[np.triu_indices(len(second), 1)] ** 2))
    num = len(second) * (len(second) - 1) / 2
    assert abs(error - num) < 5 * np.sqrt(2 * num)  # χ² with so many degrees of freedom
    plain = reduction.lift(white[0])
    for k in range(2):
        root = np.asarray(roots[k % num_roots])
        b = last_layer_map(np.asarray(psi), root, tau)
        projector = b.T @ np.linalg.solve(b @ b.T, b)
        w = as_vector(plain, k)
        np.testing.assert_allclose(projector @ w, w, atol=1e-9)
        fresh = as_vector(reduction.lift(white[0], keys[0]), k)
        np.testing.assert_allclose(b @ fresh, b @ w, atol=1e-9)  # the last layer does not see the fresh part
        assert np.abs(fresh - w).max() > 0.1


@pytest.mark.parametrize("twin", ["no residual", "other τ"])
def test_a_wrong_basis_is_noticed(x64, twin):
    """The checks above reject Q without the residual, and that of another tolerance."""
    size, tau = (20, 6), 0.1
    psi, root = smooth_features(*size), covariance_root(size[0], tau)
    used = tau if twin == "no residual" else 1.2 * tau
    reduction = Reduction(Ridge(jnp.asarray(psi), used), jnp.asarray(root)[None], 1)
    parts = reduction._basis(reduction.roots[0])
    if twin == "no residual":
        parts["residual"] = jnp.zeros_like(parts["residual"])
    q = np.concatenate([np.asarray(parts[site]) for site in reduction.sites])
    b = psi @ last_layer_map(psi, root, tau)
    assert np.abs(q.T @ q - np.eye(6)).max() > 1e-4 or np.abs(b @ q @ q.T - b).max() > 1e-4
