"""Factors and solves of one matrix after another: the values and derivatives of JAX's own, and no waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fspace.priors import lapack

TWO_PRIORS = """
import os
import jax, numpy as np, numpyro, numpyro.distributions as dist
from flax import linen as nn
from tinygp import kernels
import numpyro_fspace as fs

x = np.linspace(-1.0, 1.0, 30, dtype=np.float32)[:, None]
prior = fs.GPPrior(kernels.ExpSquared(0.5), nugget=1e-3)
points = fs.measurement.uniform([-2.0], [2.0], 150)

def model(x, y=None):
    f = 0.0
    for name in "ab":
        network = nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)])
        g = fs.random_module(name, network, input_shape=(1,))
        f = f + fs.functional_prior("f" + name, g, prior, points)(x)[:, 0]
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

mcmc = fs.MCMC(fs.fSGHMC(model), num_warmup=20, num_samples=20, num_chains=4, progress_bar=False)
mcmc.run(jax.random.key(0), x, np.sin(3.0 * x[:, 0]))
fs.report(mcmc, x, y=np.sin(3.0 * x[:, 0]))
print("done", flush=True)
os._exit(0)
"""


def energy(covariances, columns):
    """A Gaussian's log density: a function of both that uses both ways of solving."""
    factor = lapack.cholesky(covariances)
    white = lapack.solve_lower(factor, columns)
    solved = lapack.solve_lower(factor, white, transposed=True)
    return jnp.sum(solved * columns) + jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum()


@pytest.fixture
def problem(key, x64):
    roots, columns, covariance_change, column_change = (
        jax.random.normal(k, shape)
        for k, shape in zip(
            jax.random.split(key, 4), [(3, 2, 6, 6), (3, 2, 6, 2), (3, 2, 6, 6), (3, 2, 6, 2)], strict=True
        )
    )
    return roots @ roots.mT + jnp.eye(6), columns, covariance_change, column_change


@pytest.mark.parametrize("transformed", ["value", "gradient", "second"])
def test_values_and_derivatives_are_those_of_jax(problem, monkeypatch, transformed):
    covariances, columns, *changes = problem

    def second(*arguments):
        return jax.jvp(jax.grad(energy, argnums=(0, 1)), arguments[:2], arguments[2:])

    function = {"value": energy, "gradient": jax.grad(energy, argnums=(0, 1)), "second": second}[transformed]
    arguments = (covariances, columns, *changes) if transformed == "second" else (covariances, columns)
    found = {}
    for waits in (True, False):
        monkeypatch.setattr(lapack, "batches_may_deadlock", lambda waits=waits: waits)
        # A fresh function for each route: jit remembers programs by function.
        found[waits] = jax.jit(jax.vmap(lambda *a: function(*a)))(*arguments)
    for one_by_one, batched in zip(*map(jax.tree.leaves, (found[True], found[False])), strict=True):
        np.testing.assert_allclose(one_by_one, batched, rtol=1e-9, atol=1e-9)
        assert np.abs(one_by_one).max() > 0.1


def test_root_and_inverse_have_the_derivatives_of_the_cholesky_factor(key, x64):
    matrix, change, *weights = jax.random.normal(key, (4, 7, 4))
    of_root, of_inverse = (part[:4] for part in weights)

    def by_qr(matrix):
        root, inverse = lapack.root_and_inverse(matrix)
        return jnp.sum(of_root * root**2), jnp.sum(of_inverse * inverse**2)

    def by_cholesky(matrix):
        root = jnp.linalg.cholesky(matrix.T @ matrix).T
        return jnp.sum(of_root * root**2), jnp.sum(of_inverse * jnp.linalg.inv(root) ** 2)

    for function in (jax.jacrev, lambda f: lambda a: jax.jvp(jax.jacrev(f), (a,), (change,))):
        expected, found = jax.tree.leaves(function(by_cholesky)(matrix)), jax.tree.leaves(function(by_qr)(matrix))
        for one, two in zip(expected, found, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-8, atol=1e-8 * np.abs(one).max())


def test_one_matrix_at_a_time(monkeypatch):
    """No batch of matrices is left in the program of several chains."""
    monkeypatch.setattr(lapack, "batches_may_deadlock", lambda: True)
    covariances, columns = jnp.stack([jnp.eye(6)] * 8).reshape(4, 2, 6, 6), jnp.ones((4, 2, 6, 1))
    program = jax.jit(jax.vmap(jax.grad(lambda c, r: energy(c, r)))).lower(covariances, columns).as_text()
    calls = [line for line in program.splitlines() if "lapack_spotrf" in line or "lapack_strsm" in line]
    assert calls or jax.default_backend() != "cpu"
    assert not [line for line in calls if re.search(r"tensor<[24]x", line.rsplit(" : ", 1)[1])]


def test_no_factor_is_nan(monkeypatch):
    monkeypatch.setattr(lapack, "batches_may_deadlock", lambda: True)
    assert jnp.isnan(lapack.cholesky(-jnp.eye(3)[None])).any()


@pytest.mark.slow
def test_chains_with_two_priors_at_random_points_do_not_wait_for_ever():
    """Two batches of covariances at once, on two threads: hung in jaxlib 0.10."""
    environment = {**os.environ, "PJRT_NPROC": "2"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWO_PRIORS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout.strip() == "done", result.stderr
