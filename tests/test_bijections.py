"""Bijections of function values: inverses, derivatives, ranges, where they start."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fspace.variational.bijections import MARGIN, Bijection, Fitted, Linear, Sigmoid, Tanh, as_bijections

KINDS = [Linear, Tanh, Sigmoid]
X = jnp.linspace(-1.0, 2.0, 7)[:, None]
DRAWS = 0.5 + jax.random.normal(jax.random.key(0), (20, 7, 2))


def perturbed(kind, size=0.3):
    """A bijection with parameters away from where it starts, biases and all."""
    bijection = kind((8, 8))
    params = bijection.init(jax.random.key(1), X, DRAWS)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    leaves = [leaf + size * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
    moved = jax.tree.unflatten(tree, leaves) | {"inputs": params["inputs"]}
    return Fitted(bijection, bijection.cover(moved, X, DRAWS))


def derivative_error(fitted, f):
    _, slopes = jax.jvp(lambda f: fitted.forward(X, f), (f,), (jnp.ones_like(f),))
    return float(jnp.max(jnp.abs(fitted.log_det(X, f) - jnp.log(slopes))))


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_is_exact_in_float32(kind):
    fitted = perturbed(kind)
    f = 0.5 + jax.random.normal(jax.random.key(3), (100, 7, 2))
    y = fitted.forward(X, f)
    assert y.dtype == jnp.float32 and y.shape == f.shape
    np.testing.assert_allclose(fitted.inverse(X, y), f, atol=1e-5)
    assert float(jnp.abs(y - f).max()) > 0.1, "not the identity"


@pytest.mark.parametrize("kind", KINDS)
def test_log_det_is_that_of_automatic_differentiation(kind):
    fitted, f = perturbed(kind), DRAWS[0]
    assert derivative_error(fitted, f) < 1e-4

    class Wrong(kind):
        def log_det(self, params, x, f):
            return -super().log_det(params, x, f)

    assert derivative_error(Fitted(Wrong(fitted.bijection.hidden), fitted.params), f) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_transformed_one_by_one(kind):
    fitted, f = perturbed(kind), DRAWS[0]
    jacobian = jax.jacobian(lambda f: fitted.forward(X, f).ravel())(f).reshape(14, 14)
    assert float(jnp.abs(jacobian - jnp.diag(jnp.diag(jacobian))).max()) == 0.0
    assert bool(jnp.all(jnp.diag(jacobian) > 0))


@pytest.mark.parametrize(("kind", "tolerance"), [(Linear, 1e-6), (Tanh, 0.1), (Sigmoid, 0.15)])
@pytest.mark.parametrize("shift", [0.0, -2.0])
def test_it_starts_near_the_identity_on_the_draws(kind, tolerance, shift):
    bijection, draws = kind((8, 8)), DRAWS + shift
    params = bijection.init(jax.random.key(0), X, draws)
    assert float(jnp.abs(bijection.forward(params, X, draws) - draws).max()) < tolerance * float(jnp.ptp(draws))


@pytest.mark.parametrize("kind", [Tanh, Sigmoid])
def test_the_range_holds_the_draws_whatever_the_parameters(kind):
    for size in (0.1, 1.0, 3.0):
        fitted = perturbed(kind, size)
        name = "outer" if kind is Tanh else "middle"
        middle = fitted.bijection._bias(fitted.params, name, X, 2)
        half = fitted.forward(X, jnp.full((7, 2), 1e3))[0] - middle[0]
        assert bool(jnp.all(jnp.abs(DRAWS - middle) <= half / (1.0 + MARGIN) * 1.03))
        f = fitted.inverse(X, DRAWS)
        assert bool(jnp.all(jnp.isfinite(f)))
        np.testing.assert_allclose(fitted.forward(X, f), DRAWS, atol=2e-5 * float(half.max()))


@pytest.mark.parametrize("kind", [Tanh, Sigmoid])
def test_beyond_the_range_nothing_is_nan_and_the_density_is_nearly_zero(kind):
    fitted = perturbed(kind)
    y = DRAWS + 100.0 * jnp.sign(DRAWS)
    f = fitted.inverse(X, y)
    assert bool(jnp.all(jnp.isfinite(f))) and float(jnp.abs(f).min()) > 1e3
    np.testing.assert_allclose(fitted.forward(X, f), y, rtol=1e-3)
    gradient = jax.grad(lambda y: fitted.inverse(X, y).sum() + fitted.log_det(X, y).sum())(y)
    assert bool(jnp.all(jnp.isfinite(gradient)))


def test_it_is_tanh_to_float32():
    fitted = perturbed(Tanh)
    p, f = fitted.params, jnp.linspace(-8.0, 8.0, 7 * 2).reshape(7, 2)
    bias = {name: fitted.bijection._bias(p, name, X, 2) for name in ("inner", "outer")}
    half = p["reach"] * (1.0 + MARGIN + jnp.exp(p["log_margin"]))
    literal = half * jnp.tanh(jnp.exp(p["log_slope"]) * f + bias["inner"]) + bias["outer"]
    np.testing.assert_allclose(fitted.forward(X, f), literal, atol=1e-5)


def test_it_is_the_sigmoid():
    fitted = perturbed(Sigmoid)
    p, f = fitted.params, jnp.linspace(-3.0, 3.0, 7 * 2).reshape(7, 2)
    scale = 2.0 * p["reach"] * (1.0 + MARGIN + jnp.exp(p["log_margin"]))
    bias = fitted.bijection._bias(p, "middle", X, 2) - 0.5 * scale
    literal = scale * jax.nn.sigmoid(jnp.exp(p["log_slope"]) * f) + bias
    np.testing.assert_allclose(fitted.forward(X, f), literal, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_shape_and_draws_that_do_not_vary(kind):
    x, y = jnp.ones((3, 2, 2)), jnp.zeros((4, 3, 1))
    bijection = kind((5,))
    params = bijection.cover(bijection.init(jax.random.key(0), x, y), x, y)
    assert bool(jnp.all(jnp.isfinite(bijection.forward(params, x, y))))


def test_names_and_objects():
    named = as_bijections(("linear", Tanh((10,)), Tanh((20,))))
    assert list(named) == ["linear", "tanh", "tanh'"] and all(isinstance(b, Bijection) for b in named.values())
    assert list(as_bijections("sigmoid")) == ["sigmoid"]
    with pytest.raises(ValueError, match=r"bijections='spline' is unknown.*'linear', 'tanh', 'sigmoid'"):
        as_bijections(("linear", "spline"))
    with pytest.raises(ValueError, match="empty"):
        as_bijections(())
    with pytest.raises(TypeError, match="names"):
        as_bijections((Tanh,))
    with pytest.raises(ValueError, match="hidden"):
        Tanh((0,))
