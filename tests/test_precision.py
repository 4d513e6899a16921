"""A network in half precision: weights, prior and dynamics stay in float32, and functions keep their law."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp

import numpyro_fspace as fs

X = jnp.linspace(-1.0, 1.0, 20)[:, None]
Y = jnp.sin(3.0 * X[:, 0])


def draws(dtype):
    """Draws of f [S, 20] of a network that computes in ``dtype``."""
    net = nn.Sequential([nn.Dense(20, dtype=dtype), nn.tanh, nn.Dense(1, dtype=dtype)])
    prior, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), fs.measurement.uniform(-1.0, 1.0, 10)

    def model(x, y=None):
        f = fs.functional_prior("f", fs.random_module("net", net, input_shape=(1,)), prior, points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0].astype(jnp.float32), 0.2), obs=y)

    kernel = fs.fSGHMC(model)
    mcmc = fs.MCMC(kernel, num_warmup=200, num_samples=400, num_chains=8, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert {leaf.dtype for leaf in jax.tree.leaves(mcmc.last_state)} & {jnp.dtype("bfloat16")} == set()
    return np.asarray(fs.predict(mcmc, jax.random.key(1), X)["f"], np.float32)[..., 0]


@pytest.mark.slow
def test_half_precision_moves_functions_by_little_of_their_spread():
    """Means to a sixth of an sd, sds to a seventh: what Monte Carlo leaves of two equal laws is half as much."""
    exact, half = draws(jnp.float32), draws(jnp.bfloat16)
    assert half.dtype == np.float32
    sd = exact.std(0)
    assert np.max(np.abs(half.mean(0) - exact.mean(0)) / sd) < 1 / 6
    assert np.max(np.abs(half.std(0) / sd - 1.0)) < 1 / 7
