"""Potentials in two stages: the same value and gradient, and what lies in which stage."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp

import numpyro_fspace as fs
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.sgmcmc import staged_potential
from numpyro_fspace.sgmcmc.control_variates import ControlVariate, with_control_variate
from numpyro_fspace.sgmcmc.staged_potential import stage

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 100)[:, None]
Y = jnp.sin(3.0 * X[:, 0])


def model(x=X, y=Y):
    f = fs.random_module("net", nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(1)]), input_shape=(1,))
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
    f = fs.functional_prior("f", f, prior, fs.measurement.uniform(-1.0, 1.0, 7))
    with numpyro.plate("data", len(x), subsample_size=10) as rows:
        numpyro.sample("y", dist.Normal(f(x[rows])[:, 0], 0.1), obs=y[rows])


def same(staged, potential, z, key):
    draws = staged.draw(key)
    found, wanted = (
        jax.jit(jax.value_and_grad(fn, has_aux=True))(z)
        for fn in (lambda z: staged.value(z, draws), lambda z: potential(z, key))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), found, wanted)
    assert jax.tree.map(jnp.shape, staged.zeros) == jax.tree.map(jnp.shape, wanted[0])


def primitives(fn, *args):
    names = set()

    def collect(program):
        for equation in program.eqns:
            names.add(str(equation.primitive))
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                collect(inner)

    collect(jax.make_jaxpr(fn)(*args).jaxpr)
    return names


@pytest.mark.slow
def test_value_and_gradient_of_a_model_are_unchanged():
    potential = ModelPotential(model, key=KEY)
    z = potential.init_params()
    staged = stage(potential, z, KEY)
    for i in range(3):
        same(staged, potential, z, jax.random.key(i))


@pytest.mark.slow
def test_factors_and_random_numbers_lie_in_the_first_stage():
    potential = ModelPotential(model, key=KEY)
    z = potential.init_params()
    staged = stage(potential, z, KEY)
    first, second = primitives(staged.draw, KEY), primitives(staged.value, z, staged.draw(KEY))
    for name in ("cholesky", "random_bits"):
        assert any(name in one for one in first)
        assert not any(name in one for one in second)
    assert not any("tanh" in one for one in first)


@pytest.mark.slow
def test_the_gradient_at_a_center_lies_in_the_first_stage():
    """A control variate's gradient depends on the minibatch, but not on where the chain is."""
    potential = ModelPotential(model, key=KEY)
    z = potential.init_params()
    control = ControlVariate(jax.tree.map(jnp.zeros_like, z), jax.tree.map(jnp.ones_like, z))
    corrected = with_control_variate(potential, potential.data_potential, control)
    staged = stage(corrected, z, KEY)
    same(staged, corrected, z, jax.random.key(1))
    assert any("tanh" in one for one in primitives(staged.draw, KEY))


def test_large_arrays_are_made_in_the_second_stage(monkeypatch):
    """What they are made of crosses instead."""

    def potential(w, key):
        x = jax.random.normal(key, (50,))
        return jnp.sum(w * jnp.exp(x)) + jnp.sum(x), jnp.sum(x)

    w = jnp.ones(50)
    assert {a.shape for a in stage(potential, w, KEY).draw(KEY)} == {(50,), ()}
    monkeypatch.setattr(staged_potential, "MAX_NUMBERS", 49)
    staged = stage(potential, w, KEY)
    assert all(a.size == 1 for a in staged.draw(KEY))
    same(staged, potential, w, KEY)


def test_python_is_called_in_the_first_stage():
    """A file is read for several steps at once, however large the rows."""
    rows = np.arange(2**19, dtype=np.float32)

    def potential(w, key):
        index = jax.random.randint(key, (), 0, 2)
        part = jax.pure_callback(lambda i: rows * i, jax.ShapeDtypeStruct(rows.shape, np.float32), index)
        return jnp.sum(w * part), index

    staged = stage(potential, jnp.ones(()), KEY)
    assert "pure_callback" not in primitives(staged.value, jnp.ones(()), staged.draw(KEY))


def test_potentials_that_need_no_key_or_no_position():
    for potential in (lambda w, key: (w**2, w), lambda w, key: (jnp.float32(1.0), 2.0), lambda w, key: (3.0, w)):
        staged = stage(potential, jnp.ones(()), KEY)
        assert [float(v) for v in staged.value(jnp.ones(()), staged.draw(KEY))] == [
            float(v) for v in potential(jnp.ones(()), KEY)
        ]


def test_traced_data_and_chains_side_by_side():
    @jax.jit
    def values(data, positions, keys):
        def one(w, key):
            def potential(w, key):
                return jnp.sum((data[jax.random.randint(key, (3,), 0, len(data))] - w) ** 2)

            staged = stage(potential, w, key)
            return staged.value(w, staged.draw(key)) - potential(w, key)

        return jax.vmap(one)(positions, keys)

    np.testing.assert_allclose(values(jnp.arange(10.0), jnp.ones(4), jax.random.split(KEY, 4)), np.zeros(4), atol=1e-4)
