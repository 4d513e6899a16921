"""Rows that a model mixes are never evaluated in parts; those of other models are, whatever their numbers' types."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.posterior import draw_batches

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(21, 2)).astype(np.float32)
DRAWS = {"w": np.array([[1.0, -0.5], [0.3, 2.0]], np.float32)}


def model_of(function, law=None):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        mean = numpyro.deterministic("mean", function(x, w))
        numpyro.sample("y", dist.Normal(mean, 0.1) if law is None else law(mean), obs=y)

    return model


def half(x):
    return x.astype(jnp.bfloat16)


MIXING = {
    "inputs standardized": lambda x, w: ((x - x.mean(0)) / x.std(0)) @ w,
    "attention": lambda x, w: jax.nn.softmax(x @ x.T) @ (x @ w),
    "cumulative sum": lambda x, w: jnp.cumsum(x @ w),
    "the largest": lambda x, w: x @ w / jnp.abs(x).max(),
    "the first row": lambda x, w: (x - x[0]) @ w,
    "ranks": lambda x, w: jnp.argsort(jnp.argsort(x[:, 0])) * w[0],
    "a threshold": lambda x, w: (x[:, 0] > jnp.median(x[:, 0])) * w[0],
    "a recurrence": lambda x, w: jax.lax.scan(lambda h, r: (0.5 * h + r @ w,) * 2, 0.0, x)[1],
    "a lag": lambda x, w: (x - jnp.pad(x, ((3, 0), (0, 0)))[: len(x)]) @ w,
    "numbers of rows": lambda x, w: x @ w + 0.05 * jnp.arange(len(x)),
    "how many rows": lambda x, w: x @ w / len(x) ** 0.5,
    "half precision": lambda x, w: ((half(x) - half(x).mean(0)) @ half(w)).astype(jnp.float32),
    "a fixed number of rows": lambda x, w: x @ w + jnp.arange(21.0),
}
ALONE = {
    "a product": lambda x, w: x @ w,
    "row by row": lambda x, w: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "half precision": lambda x, w: jnp.tanh(half(x) @ half(w)).astype(jnp.float32),
    "integers": lambda x, w: jnp.asarray(x[:, 0] * 10, jnp.int32) * w[0],
    "NaN": lambda x, w: jnp.sqrt(x[:, 0]) * w[1],
    "normalized rows": lambda x, w: (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w,
}


def predict(model, **settings):
    return fs.predict(DRAWS, KEY, X, model=model, inputs=X, **settings)


@pytest.mark.parametrize("kind", some(MIXING, 2))
def test_rows_that_are_mixed_are_not_cut(kind, monkeypatch):
    """Asked for, an error; else the values are those of all rows, however little room there is."""
    model = model_of(MIXING[kind])
    whole = predict(model)["mean"]
    with pytest.raises(ValueError, match=r"input_batch_size=5: .*part"):
        predict(model, input_batch_size=5)
    monkeypatch.setattr(draw_batches, "CHUNK", 20)
    np.testing.assert_allclose(predict(model)["mean"], whole, rtol=1e-2 if kind == "half precision" else 1e-5)


@pytest.mark.filterwarnings("ignore:.*are NaN in 2 of 2 draws:RuntimeWarning")
@pytest.mark.parametrize("kind", some(ALONE, 2))
def test_rows_that_stand_alone_are_cut(kind):
    model = model_of(ALONE[kind])
    np.testing.assert_allclose(predict(model, input_batch_size=5)["mean"], predict(model)["mean"], rtol=1e-5, atol=1e-6)


LAWS = {
    "normal": (lambda m: dist.Normal(m, 1.0).to_event(1), True),
    "a random walk": (lambda m: dist.GaussianRandomWalk(0.1, len(m)), False),
    "a spread of all rows": (lambda m: dist.Normal(m, m.std()), False),
    "counts": (lambda m: dist.Poisson(jnp.exp(m)), True),
    "two numbers a row": (lambda m: dist.MultivariateNormal(jnp.stack([m, m], -1), jnp.eye(2)), True),
    "the same law for all": (lambda m: dist.Gamma(2.0).expand(m.shape).to_event(1), True),
    "correlated rows": (lambda m: dist.MultivariateNormal(m, 0.5 * jnp.eye(len(m)) + 0.5), False),
}


@pytest.mark.parametrize("kind", some(LAWS, 3))
def test_what_is_drawn_must_be_independent_between_rows(kind):
    law, is_alone = LAWS[kind]
    model = model_of(ALONE["a product"], law)
    if is_alone:
        assert predict(model, input_batch_size=5)["y"].shape[:2] == (2, 21)
        return
    with pytest.raises(ValueError, match=r"\['y'\] cannot be put together"):
        predict(model, input_batch_size=5)


def shared_effect(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    shift = numpyro.sample("shift", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Normal(x @ w + shift, 0.1), obs=y)


def shared_noise(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w + 10.0 * jax.random.normal(numpyro.prng_key()), 0.1), obs=y)


@pytest.mark.parametrize("model", some([shared_effect, shared_noise], 1))
def test_parts_do_not_draw_apart_what_rows_share(model, monkeypatch):
    settings = {"from_prior": ["shift"] if model is shared_effect else []}
    with pytest.raises(ValueError, match=r"'y'\] cannot be put together"):
        predict(model, input_batch_size=5, **settings)
    monkeypatch.setattr(draw_batches, "CHUNK", 20)
    left = predict(model, **settings)["y"] - DRAWS["w"] @ X.T
    assert np.ptp(left, axis=1).max() < 1.0 < np.abs(left).max()


def test_a_network_that_mixes_rows_is_evaluated_whole():
    class Centered(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x - x.mean(0))

    def model(x, y=None):
        f = fs.random_module("net", Centered(), input_shape=2)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)

    draws = {"net.Dense_0.kernel": np.ones((3, 2, 1), np.float32), "net.Dense_0.bias": np.zeros((3, 1), np.float32)}
    with pytest.raises(ValueError, match=r"\['net', 'y'\] cannot be put together"):
        fs.predict(draws, KEY, X, model=model, input_batch_size=5)
