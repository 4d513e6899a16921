"""The low-rank preconditioner: the map it is, the directions it finds, the law it keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_fspace as fs
from numpyro_fspace.mcmc.warmup import leading_curvatures
from numpyro_fspace.sgmcmc.preconditioners import Diagonal, LowRank

SIZE, RANK = 12, 3
RNG = np.random.default_rng(0)
BASIS = np.linalg.qr(RNG.normal(size=(SIZE, SIZE)))[0]
CURVATURES = np.array([4e4, 1e4, 2e3] + [2.0] * (SIZE - 3))
HESSIAN = jnp.asarray(BASIS @ np.diag(CURVATURES) @ BASIS.T, jnp.float32)


def potential(w, key):
    return 0.5 * w @ HESSIAN @ w


def test_gradient_map_is_the_transpose():
    scale = jnp.linspace(0.5, 2.0, SIZE)
    metric = LowRank(scale, jnp.asarray(BASIS[:, :RANK]), jnp.array([-0.9, -0.5, 0.3]))
    forward, backward = (jax.vmap(f, 1, 1)(jnp.eye(SIZE)) for f in (metric.scale, metric.scale_gradient))
    wanted = np.diag(scale) @ (np.eye(SIZE) + BASIS[:, :RANK] @ np.diag([-0.9, -0.5, 0.3]) @ BASIS[:, :RANK].T)
    assert np.allclose(forward, wanted, atol=1e-5)
    assert np.allclose(backward, wanted.T, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_leading_directions_are_found(scale):
    start = jax.random.normal(jax.random.key(0), (SIZE, RANK))
    metric = Diagonal(jnp.full(SIZE, scale))
    basis, curvatures = leading_curvatures(potential, jnp.zeros(SIZE), start, jax.random.key(1), metric, 5)
    assert np.allclose(np.sort(curvatures), np.sort(scale**2 * CURVATURES[:RANK]), rtol=1e-3)
    overlap = np.linalg.svd(BASIS[:, :RANK].T @ basis)[1]
    assert np.allclose(overlap, 1.0, atol=1e-3)


X = RNG.normal(size=(60, SIZE)) @ np.diag([30.0, 10.0, 3.0] + [0.1] * (SIZE - 3)) @ BASIS.T
Y = X @ RNG.normal(size=SIZE) + RNG.normal(size=60)


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([SIZE]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def run(kernel, **settings):
    mcmc = MCMC(kernel, num_warmup=300, num_samples=1500, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X.astype(np.float32), Y.astype(np.float32))
    return mcmc


def test_it_takes_long_steps_and_keeps_the_law():
    """Condition number 5e4 along directions that are no axes: the diagonal cannot help, three directions do."""
    precision = np.eye(SIZE) + X.T @ X
    mean, covariance = np.linalg.solve(precision, X.T @ Y), np.linalg.inv(precision)
    tried = fs.preconditioners.low_rank(4), fs.preconditioners.rmsprop()
    found = {p: run(fs.SGHMC(regression, preconditioner=p, metropolis=False)) for p in tried}
    steps, errors = [], []
    for mcmc in found.values():
        w = np.asarray(mcmc.get_samples()["w"], float)
        white = np.linalg.solve(np.linalg.cholesky(covariance), (w - mean).T)
        errors.append(np.abs(white @ white.T / len(w) - np.eye(SIZE)).max())
        steps.append(float(np.min(mcmc.last_state.step_size)))
    assert errors[0] < 0.15
    assert steps[0] > 10.0 * steps[1]


def test_a_map_without_its_transpose_is_caught(monkeypatch):
    monkeypatch.setattr(LowRank, "scale_gradient", LowRank.scale)
    covariance = np.linalg.inv(np.eye(SIZE) + X.T @ X)
    w = np.asarray(run(fs.SGHMC(regression, preconditioner=fs.preconditioners.low_rank(4))).get_samples()["w"], float)
    white = np.linalg.solve(np.linalg.cholesky(covariance), (w - w.mean(0)).T)
    assert not np.abs(white @ white.T / len(w) - np.eye(SIZE)).max() < 0.3


def test_directions_are_frozen_for_the_second_half_of_burn_in():
    kernel = fs.SGLD(regression, preconditioner=fs.preconditioners.low_rank(2), warmup=fs.Warmup(warm_start=0.2))
    data = (X.astype(np.float32), Y.astype(np.float32))
    state = kernel.init(jax.random.key(0), 20, None, data, {})
    bases = []
    for _ in range(24):
        state = jax.jit(lambda s: kernel.sample(s, data, {}))(state)
        bases.append(np.asarray(state.warmup.learned.basis))
    changes = [i + 1 for i in range(23) if not np.array_equal(bases[i], bases[i + 1])]
    assert changes == [4, 8, 12]  # the rest of 16 draws begins at 4; its quarter is 8, its half 12


def test_more_directions_than_parameters():
    found = run(fs.SGHMC(regression, preconditioner=fs.preconditioners.low_rank(100)))
    assert found.last_state.warmup.learned.basis.shape[1:] == (SIZE, SIZE)
    assert np.isfinite(found.get_samples()["w"]).all()


@pytest.mark.parametrize(("rank", "error"), [(0, ValueError), (2.5, TypeError)])
def test_bad_ranks_are_refused(rank, error):
    with pytest.raises(error, match="rank"):
        fs.preconditioners.low_rank(rank)
