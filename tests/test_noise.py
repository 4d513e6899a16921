"""The samplers' normals: the hash against JAX's, the law of the numbers, no two streams alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from numpyro_fspace.sgmcmc.random_normals import normal_like, normals, threefry

WORDS = np.random.default_rng(0).integers(0, 2**32, (2, 1000), dtype=np.uint32)


def test_with_twenty_rounds_the_hash_is_jax_s():
    key = jnp.array([123, 2**31 + 7], jnp.uint32)
    ours = threefry(key, jnp.asarray(WORDS), 20)
    np.testing.assert_array_equal(jnp.concatenate(ours), threefry_2x32(key, jnp.asarray(WORDS.ravel())))


def test_with_thirteen_rounds_it_is_the_published_one():
    """The known answer of the Random123 library for a key and a counter of zeros."""
    zero = jnp.zeros((), jnp.uint32)
    assert [hex(word) for word in threefry((zero, zero), (zero, zero))] == ["0x9d1c5ec6", "0x8bd50731"]


def rows(key, like, num, part=0):
    return jax.vmap(normals(key, like, num, part))(jnp.arange(num))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_numbers_are_normal(dtype):
    """Moments and Kolmogorov-Smirnov on 10⁶ numbers; false alarms below 1e-5 each."""
    with jax.enable_x64(dtype == jnp.float64):
        draws = np.asarray(rows(jax.random.key(1), jnp.zeros((1000, 125), dtype), 8), float).ravel()
    assert abs(draws.mean()) < 4.5e-3
    assert abs(draws.var() - 1.0) < 4.5 * np.sqrt(2e-6)
    assert abs(stats.skew(draws)) < 4.5 * np.sqrt(6e-6)
    assert abs(stats.kurtosis(draws)) < 4.5 * np.sqrt(24e-6)
    assert stats.kstest(draws, "norm").pvalue > 1e-5


def test_all_values_are_equally_likely():
    """χ² over the quantiles of 2²⁰ numbers in 4096 cells; false alarms 1e-5."""
    for draws in rows(jax.random.key(2), jnp.zeros(2**20), 4):
        counts = np.histogram(stats.norm.cdf(draws), 4096, (0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-5 / 4


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_places_rows_parts_and_keys_are_independent(impl):
    """Correlations between neighbors of each kind, of the numbers and of their squares; false alarms 2e-5 each."""
    keys = jax.random.split(jax.random.key(3, impl=impl), 50)
    draws = jax.vmap(lambda key: jax.vmap(lambda part: rows(key, jnp.zeros(50), 10, part))(jnp.arange(12)))(keys)
    draws = np.asarray(draws, float)
    for values in (draws, (draws**2 - 1.0) / np.sqrt(2.0)):
        for axis in range(4):
            one, other = (np.take(values, np.arange(a, values.shape[axis] - 1 + a), axis) for a in (0, 1))
            assert abs(np.mean(one * other)) < 4.3 / np.sqrt(one.size)


def test_shapes_and_types():
    tree = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(()), "c": jnp.zeros((0,))}
    noise = normal_like(jax.random.key(0), tree)
    assert jax.tree.map(jnp.shape, noise) == jax.tree.map(jnp.shape, tree)
    assert not np.any(noise["a"] == noise["b"])
    assert normal_like(jax.random.key(0), jnp.zeros(2, jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="more than"):
        jax.eval_shape(lambda like: normal_like(jax.random.key(0), like), jax.ShapeDtypeStruct((2**32,), jnp.bfloat16))
