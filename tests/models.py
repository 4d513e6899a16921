"""Tiny models, priors and runs shared by the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

import numpyro_fspace as fs

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)[:, None]
Y = (0.3 + 0.5 * X[:, 0] + 0.1 * np.cos(20 * X[:, 0])).astype(np.float32)
POINTS = np.array([[-2.0], [0.5], [3.0]], np.float32)
NOISE = 0.5


class Independent:
    """f(x) ~ N(x, sd² I): a prior whose density is a sum of squares."""

    def __init__(self, sd=0.5):
        self.sd = sd

    def log_prob(self, x, f):
        return dist.Normal(x[:, 0], self.sd).log_prob(f).sum()

    def sample(self, key, x, sample_shape=()):
        return x[:, 0] + self.sd * jax.random.normal(key, (*sample_shape, len(x)))


class Revealing:
    """log P0 is the sum of the points, whatever f: it tells which points were drawn."""

    def log_prob(self, x, f):
        return x.sum() + 0.0 * f.sum()

    def sample(self, key, x, sample_shape=()):
        return jnp.zeros((*sample_shape, len(x)))


def line(w):
    """The function x ↦ w₀ + w₁ x."""
    return lambda x: w[..., 0] + w[..., 1] * x[:, 0]


def linear(points=None, *, prior=None, scale=1.0, batch=None, inside=False):
    """Linear regression, w ~ N(0, I₂), with a functional prior "f" if ``points`` are given.

    ``batch`` subsamples the data; ``inside`` puts the functional prior into the data's plate.
    """
    prior = Independent() if prior is None else prior

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        f = line(w)
        if points is not None and not inside:
            fs.functional_prior("f", f, prior, points, scale=scale)
        with numpyro.plate("data", len(x), subsample_size=batch):
            if points is not None and inside:
                fs.functional_prior("f", f, prior, points, scale=scale)
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb), NOISE), obs=yb)

    return model


def random_points(num=3):
    return fs.measurement.uniform(-2.0, 2.0, num)


def run(kernel, *args, seed=0, num_warmup=4, num_samples=4, extra_fields=(), init_params=None, data=(X, Y), **settings):
    """An ``fs.MCMC`` that has run on the shared data (or ``data``), without progress bar."""
    settings = {"progress_bar": False} | settings
    mcmc = fs.MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)
    mcmc.run(jax.random.key(seed), *data, *args, extra_fields=extra_fields, init_params=init_params)
    return mcmc


def trace(model, *args, seed=0, **kwargs):
    """The trace of a model under a seed."""
    return handlers.trace(handlers.seed(model, jax.random.key(seed))).get_trace(*args, **kwargs)
