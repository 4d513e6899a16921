"""The parts of warm-up: curvature, phases, what a hot or diverging draw does to the step size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_fspace as fs
from numpyro_fspace.infer.chain import _cooled
from numpyro_fspace.infer.warmup import largest_curvature
from numpyro_fspace.sgmcmc.preconditioners import Diagonal, Identity


@pytest.mark.parametrize("scale", [None, [1.0, 0.5, 3.0]])
def test_largest_curvature_is_that_of_the_preconditioned_hessian(scale, key):
    hessian = np.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 9.0]], np.float32)
    metric = Identity() if scale is None else Diagonal(jnp.array(scale))
    s = np.eye(3) if scale is None else np.diag(scale)
    found, direction = largest_curvature(
        lambda w, k: 0.5 * w @ hessian @ w, jnp.ones(3), jax.random.normal(key, (3,)), key, metric
    )
    values, vectors = np.linalg.eigh(s @ hessian @ s)
    np.testing.assert_allclose(found, values[-1], rtol=1e-3)
    np.testing.assert_allclose(abs(direction @ vectors[:, -1]), 1.0, rtol=1e-3)


def test_phases():
    warmup = fs.Warmup(warm_start=0.3)
    assert warmup.num_optimiser_draws(1000) == 300
    assert warmup.calibration_draws(1000) == [300, 475, 650, 825]
    assert warmup.calibration_draws(0) == []
    assert fs.Warmup(warm_start=0.0).calibration_draws(8) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("temperature", "diverging", "factor"),
    [(1.0, False, 1.0), (1.05, False, 1.0), (1.4, False, 0.9), (5.0, False, 0.5), (1.0, True, 0.5), (0.2, False, 1.0)],
)
def test_heat_shortens_the_step(temperature, diverging, factor):
    found = fs.Warmup().shortening(jnp.array(temperature), jnp.array(diverging), 10_000)
    np.testing.assert_allclose(found, factor)


def test_few_parameters_fluctuate_more():
    """With 8 parameters a temperature of 2 is within chance, with 8000 it is not."""
    assert fs.Warmup().shortening(jnp.array(2.0), jnp.array(False), 8) == 1.0
    assert fs.Warmup().shortening(jnp.array(2.0), jnp.array(False), 8000) < 1.0


def test_momentum_of_an_undone_draw_is_cooled_and_never_heated():
    hot = jnp.full((4,), 3.0)
    np.testing.assert_allclose(jnp.mean(_cooled(hot, 2.0) ** 2), 2.0, rtol=1e-6)
    np.testing.assert_array_equal(_cooled(0.1 * hot, 1.0), 0.1 * hot)
    assert _cooled(jnp.zeros((0,)), 1.0).shape == (0,)
