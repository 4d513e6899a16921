"""Samplers of measurement points: laws, composition, errors."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from numpyro_fspace.model.measurement import (
    PointSampler,
    as_points,
    fixed,
    perturb,
    space_filling,
    subset,
    uniform,
    union,
)

POOL = np.arange(12.0).reshape(6, 2)
KEY = jax.random.key(0)


def many(sampler, num):
    return np.asarray(jax.jit(jax.vmap(sampler))(jax.random.split(KEY, num)))


@pytest.mark.parametrize("size, num", [(6, 1), (5, 5), (7, 4)])
def test_subsets_are_distinct_and_equally_likely(size, num):
    """χ² over all subsets; false alarms 1e-5. With replacement, or without the chains, p < 1e-100."""
    draws = np.sort(many(subset(np.arange(float(size))[:, None], num), 20000)[..., 0].astype(int), axis=1)
    assert (np.diff(draws, axis=1) > 0).all()
    subsets = {s: i for i, s in enumerate(itertools.combinations(range(size), num))}
    counts = np.bincount([subsets[tuple(d)] for d in draws.tolist()], minlength=len(subsets))
    assert len(subsets) == 1 or scipy.stats.chisquare(counts).pvalue > 1e-5


def test_large_subset_is_distinct():
    rows = jax.jit(subset(np.arange(2_000.0)[:, None], 1_800))(KEY)
    assert len(np.unique(rows)) == 1_800


def test_subset_costs_nothing_in_the_pool_size():
    """Apart from the pool itself, no array of the program is as large as the pool."""
    pool = np.zeros((100_003, 2))
    text = jax.make_jaxpr(subset(pool, 7))(KEY)
    shapes = [v.aval.shape for eqn in text.jaxpr.eqns for v in eqn.outvars]
    assert all(100_003 not in shape for shape in shapes)


def test_uniform_fills_its_box():
    """Bounds, and the law by Kolmogorov–Smirnov; false alarms 1e-5."""
    low, high = np.array([-1.0, 5.0]), np.array([1.0, 5.5])
    draws = many(uniform(low, high, 10), 2000).reshape(-1, 2)
    assert (draws >= low).all() and (draws <= high).all()
    for d in range(2):
        assert scipy.stats.kstest((draws[:, d] - low[d]) / (high - low)[d], "uniform").pvalue > 1e-5
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.04
    assert jax.eval_shape(uniform(-1.0, 1.0, 3), KEY).shape == (3, 1)
    assert jax.eval_shape(uniform(-1.0, [1.0, 2.0, 3.0], 3), KEY).shape == (3, 3)


def test_space_filling():
    """Equally spaced with one input; with several every half of the box gets half of the points; always the same."""
    np.testing.assert_allclose(space_filling(-1.0, 3.0, 5).pool[:, 0], [-1, 0, 1, 2, 3])
    points = space_filling(np.zeros(3), np.array([1.0, 10.0, 100.0]), 16)
    assert points.pool.shape == (16, 3) and not points.is_random
    unit = np.asarray(points.pool) / [1, 10, 100]
    assert ((unit >= 0) & (unit <= 1)).all() and ((unit < 0.5).sum(0) == 8).all()
    np.testing.assert_array_equal(points.pool, space_filling(np.zeros(3), np.array([1.0, 10.0, 100.0]), 16).pool)
    np.testing.assert_array_equal(space_filling([0.0, 2.0], [1.0, 4.0], 1).pool, [[0.5, 3.0]])
    for num in (1, 2, 3, 100):
        assert space_filling([0.0, 0.0], 1.0, num).pool.shape == (num, 2)


@pytest.mark.parametrize(
    ("box", "message"),
    [((1.0, 0.0, 3), "low must be below high"), ((0.0, 1.0, 0), "num=0 must be"), ((0.0, np.inf, 3), "high")],
)
def test_space_filling_refuses(box, message):
    with pytest.raises(ValueError, match=message):
        space_filling(*box)


def test_space_filling_refuses_traced_corners():
    with pytest.raises(ValueError, match="low and high must be numbers that are known"):
        jax.jit(lambda high: space_filling(0.0, high, 3).pool)(1.0)


def test_perturb_is_a_cloud_around_the_rows():
    """Rows equally likely, residuals normal of the given scale in each input; false alarms 1e-5."""
    centers = 100.0 * POOL
    draws = many(perturb(centers, [1.0, 3.0], 4), 3000).reshape(-1, 2)
    nearest = np.argmin(((draws[:, None] - centers) ** 2).sum(-1), axis=1)
    assert scipy.stats.chisquare(np.bincount(nearest, minlength=6)).pvalue > 1e-5
    residual = draws - centers[nearest]
    for d, scale in enumerate([1.0, 3.0]):
        assert scipy.stats.kstest(residual[:, d] / scale, "norm").pvalue > 1e-5
    assert jax.eval_shape(perturb(POOL, 0.1, 50), KEY).shape == (50, 2)


def test_union_gives_each_member_its_own_key():
    both = union(uniform([0.0] * 2, [1.0] * 2, 4), uniform([0.0] * 2, [1.0] * 2, 4), POOL)
    points = jax.jit(both)(KEY)
    assert points.shape == (14, 2) and both.num_points == 14 and both.num_inputs == 2 and both.is_random
    assert not np.isclose(points[:4], points[4:8]).any()
    np.testing.assert_array_equal(points[8:], POOL)


def test_fixed_points_stay_concrete_under_jit():
    """A prior can factorize at trace time, be the sampler made outside or inside, and in a union."""

    @jax.jit
    def traced(key):
        for sampler in (outside, fixed(POOL), as_points(POOL), union(POOL, fixed(POOL + 1))):
            assert not isinstance(sampler(key), jax.core.Tracer)
            assert not sampler.is_random
        return outside(key)

    outside = fixed(POOL)
    np.testing.assert_array_equal(traced(KEY), POOL)
    argument = jax.jit(lambda x: fixed(x)(KEY))(POOL)
    np.testing.assert_array_equal(argument, POOL)


def test_attributes():
    for sampler, count, random in [
        (fixed(POOL), 6, False),
        (subset(POOL, 3), 3, True),
        (perturb(POOL, 1.0, 9), 9, True),
        (uniform([0.0] * 2, 1.0, 5), 5, True),
    ]:
        assert (sampler.num_points, sampler.num_inputs, sampler.is_random) == (count, 2, random)
        assert isinstance(sampler, PointSampler)
        drawn = jax.eval_shape(sampler, KEY)
        assert drawn.shape == (count, 2) and drawn.dtype == jnp.float32
        assert as_points(sampler) is sampler
    np.testing.assert_array_equal(subset(POOL, 3).pool, POOL)
    np.testing.assert_array_equal(fixed(POOL).pool, POOL)
    assert uniform(0.0, 1.0, 1).pool is None


def test_own_sampler():
    own = as_points(lambda key: jax.random.normal(key, (3, 2)))
    assert own.is_random and own.num_points is None and own(KEY).shape == (3, 2)
    joined = union(own, POOL)
    assert joined.num_points is None and joined.num_inputs == 2 and joined(KEY).shape == (9, 2)

    class Grid:
        is_random, num_points, num_inputs = False, 6, 2

        def __call__(self, key):
            return POOL

    grid = as_points(Grid())
    assert not grid.is_random and grid.num_points == 6
    both = union(Grid(), POOL)
    assert not both.is_random and both(None).shape == (12, 2)
    with pytest.raises(ValueError, match=r"\[M, D\]"):
        as_points(lambda key: jnp.zeros(3))(KEY)
    with pytest.raises(ValueError, match="number of inputs"):
        union(own, lambda key: jnp.zeros((3, 1)))(KEY)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: fixed(POOL[:, 0]), ValueError, r"x\[:, None\]"),
        (lambda: fixed(POOL[:0]), ValueError, "at least one point"),
        (lambda: fixed(np.where(POOL > 3, np.nan, POOL)), ValueError, "x holds NaN"),
        (lambda: fixed("abc"), TypeError, "real numbers"),
        (lambda: subset(POOL, 7), ValueError, "num=7 exceeds the 6 rows"),
        (lambda: subset(POOL, 0), ValueError, "num=0 must be at least 1"),
        (lambda: subset(POOL, 2.5), TypeError, "num must be an integer"),
        (lambda: subset(POOL, True), TypeError, "num must be an integer"),
        (lambda: uniform(1.0, 1.0, 3), ValueError, "low must be below high"),
        (lambda: uniform([0.0, 2.0], [1.0, 1.0], 3), ValueError, "low must be below high"),
        (lambda: uniform([0.0, 2.0], [1.0, 1.0, 3.0], 3), ValueError, "low and high"),
        (lambda: uniform(np.zeros((2, 2)), 1.0, 3), ValueError, "low and high"),
        (lambda: uniform(-np.inf, 1.0, 3), ValueError, "low must be finite, got -inf"),
        (lambda: uniform(0.0, 1.0, -1), ValueError, "num"),
        (lambda: perturb(POOL, 0.0, 3), ValueError, "scale must be positive"),
        (lambda: perturb(POOL, [1.0, 2.0, 3.0], 3), ValueError, "scale must"),
        (lambda: union(), ValueError, "at least one sampler"),
        (lambda: union(POOL, np.zeros((3, 1))), ValueError, "number of inputs"),
        (lambda: as_points(None), TypeError, "points must be an array"),
        (lambda: as_points("data"), TypeError, "points must be an array"),
        (lambda: as_points(dict), TypeError, "points must be an array"),
        (lambda: as_points(POOL[0], "points"), ValueError, r"points\[:, None\]"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_unions_of_points_that_are_arguments_of_a_model():
    x, pool = np.linspace(0.0, 1.0, 5)[:, None], np.arange(4.0)[:, None]
    for parts in (lambda x: (x, pool), lambda x: (subset(x, 3), pool)):
        inside = jax.jit(lambda x, parts=parts: union(*parts(x))(KEY))(x)
        np.testing.assert_allclose(inside, union(*parts(x))(KEY))
