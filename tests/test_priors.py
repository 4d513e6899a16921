"""Priors over functions against scipy, scikit-learn and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tinygp
from support.tiers import some
from tinygp.kernels import (
    Cosine,
    Custom,
    DotProduct,
    Exp,
    ExpSineSquared,
    ExpSquared,
    Matern32,
    Matern52,
    RationalQuadratic,
    distance,
    quasisep,
)
from tinygp.transforms import Linear, Subspace, Transform

from numpyro_fspace.model.measurement import fixed
from numpyro_fspace.model.networks.random_module import flat, random_function
from numpyro_fspace.priors import GPPrior, NetworkPrior, StudentTPrior, check_prior, dirichlet_targets, fit_gp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 2))
F = RNG.normal(size=12)
SCALE, NUGGET = 0.8, 0.05


def rbf(x1, x2, variance=1.0, scale=SCALE):
    """The squared exponential in plain NumPy: the oracle."""
    return variance * np.exp(-0.5 * np.sum((x1[:, None] - x2[None]) ** 2, -1) / np.asarray(scale) ** 2)


def sigma(x=X, nugget=NUGGET):
    return rbf(x, x) + nugget * np.eye(len(x))


def normal_logpdf(f, mean, covariance):
    return scipy.stats.multivariate_normal(None, covariance).logpdf(f - mean)


def test_a_prior_says_what_it_is():
    assert repr(GPPrior(ExpSquared(), nugget=0.01)).endswith("mean=0, nugget=0.01)")
    assert repr(GPPrior(ExpSquared(), num_outputs=2)).endswith("mean=0, num_outputs=2)")


def p_value(draws, covariance):
    """χ² of whitened draws [S, M] against N(0, covariance): mean and variance together."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), np.asarray(draws, float).T)
    return 2 * min(
        scipy.stats.chi2(white.size).cdf(np.sum(white**2)), scipy.stats.chi2(white.size).sf(np.sum(white**2))
    )


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_log_prob_is_scipys(x64, traced):
    """Concrete and traced points, in both precisions; condition number 1e2: 1e-4 in float32."""
    with jax.enable_x64(x64):
        prior = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET, mean=0.3)
        value = jax.jit(prior.log_prob)(X, F) if traced else prior.log_prob(X, F)
        assert value.dtype == (jnp.float64 if x64 else jnp.float32)
        np.testing.assert_allclose(value, normal_logpdf(F, 0.3, sigma()), rtol=1e-10 if x64 else 1e-4)


def l2(kernel, **parameters):
    return kernel(distance=distance.L2Distance(), **parameters)


@pytest.mark.parametrize(
    "kernel, summands",
    [
        (1.5 * ExpSquared(scale=SCALE) + DotProduct(), [1.5 * rbf(X, X), X @ X.T]),
        (ExpSquared(scale=SCALE) * DotProduct(), [rbf(X, X) * (X @ X.T)]),
        (
            tinygp.transforms.Linear(np.array([2.0, 0.5]), ExpSquared()),
            [rbf(X * [2.0, 0.5], X * [2.0, 0.5], scale=1.0)],
        ),
        (Custom(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2))), [rbf(X, X, scale=np.sqrt(0.5))]),
    ],
    ids=["sum", "product", "ard", "custom"],
)
def test_kernels(kernel, summands):
    """Sums, products, ARD, custom kernels; the nugget is 1e-2 of the points' mean variance, of the smallest summand."""
    covariance = sum(summands) + 1e-2 * min(map(np.trace, summands)) / len(X) * np.eye(len(X))
    np.testing.assert_allclose(GPPrior(kernel).log_prob(X, F), normal_logpdf(F, 0.0, covariance), rtol=1e-4)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda a, b: Linear(jnp.ones(1), ExpSquared(1.0))(a[:, :1], b[:, :1]),
        Linear(jnp.ones((3, 2)), Linear(jnp.ones(3), ExpSquared(1.0))),
        Subspace(slice(0, 2), Linear(jnp.ones(2), ExpSquared(1.0))),
        Transform(lambda x: jnp.concatenate([x, x]), Linear(jnp.ones(4), ExpSquared(1.0))),
        2.0 * Linear(jnp.ones(1), ExpSquared(1.0)) + 1.0,
    ],
)
def test_scales_that_fit_the_inputs_of_their_part_are_let_through(kernel):
    x = np.random.default_rng(0).normal(size=(4, 2))
    assert np.isfinite(GPPrior(kernel).log_prob(x, np.ones(4)))


def test_kernel_subclass_and_distance():
    """A subclass works, and the distance is the kernel's own: Matern defaults to L1."""

    class Brownian(tinygp.kernels.Kernel):
        def evaluate(self, x1, x2):
            return jnp.minimum(x1[0], x2[0])

    x = np.arange(1.0, 5.0)[:, None]
    expected = normal_logpdf(F[:4], 0.0, np.minimum(x, x.T) + 0.1 * np.eye(4))
    np.testing.assert_allclose(GPPrior(Brownian(), nugget=0.1).log_prob(x, F[:4]), expected, rtol=1e-5)

    r = np.sqrt(3) * np.sqrt(((X[:, None] - X) ** 2).sum(-1))
    covariance = GPPrior(l2(Matern32, scale=1.0)).moments(X)[1]
    np.testing.assert_allclose(covariance, (1 + r) * np.exp(-r), atol=1e-12)
    assert np.abs(GPPrior(Matern32(scale=1.0)).moments(X)[1] - covariance).max() > 0.05


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("traced", [False, True])
def test_outputs_are_independent(own, traced):
    """K outputs sum their log densities, with a mean per output."""
    scales, means = ([0.8, 2.0, 0.8] if own else [0.8] * 3), np.array([0.0, 1.0, -2.0])
    kernel = [ExpSquared(scale=s) for s in scales] if own else ExpSquared(scale=0.8)
    prior = GPPrior(kernel, mean=means, nugget=NUGGET, num_outputs=3)
    f = RNG.normal(size=(12, 3))
    value = jax.jit(prior.log_prob)(X, f) if traced else prior.log_prob(X, f)
    each = [
        normal_logpdf(f[:, k], means[k] * np.ones(12), rbf(X, X, scale=scales[k]) + NUGGET * np.eye(12))
        for k in range(3)
    ]
    np.testing.assert_allclose(value, sum(each), rtol=1e-4)
    mean, covariance = prior.moments(X)
    assert mean.shape == (12, 3) and covariance.shape == (3, 12, 12)
    np.testing.assert_allclose(covariance[1], rbf(X, X, scale=scales[1]), atol=1e-12)


def test_callable_mean_and_column_values():
    prior = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET, mean=lambda x: jnp.sin(x[:, 0]))
    expected = normal_logpdf(F, np.sin(X[:, 0]), sigma())
    np.testing.assert_allclose(prior.log_prob(X, F), expected, rtol=1e-4)
    np.testing.assert_allclose(prior.log_prob(X, F[:, None]), expected, rtol=1e-4)


def test_gradient_in_values():
    """∂ log p / ∂f = -Σ⁻¹ f, through the constant factor and through the traced one."""
    prior = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET)
    expected = -np.linalg.solve(sigma(), F)
    np.testing.assert_allclose(jax.grad(prior.log_prob, 1)(X, F), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(prior.log_prob, 1))(X, F), expected, rtol=1e-3, atol=1e-3)


def test_gradient_in_kernel_parameters():
    """Traced kernel parameters, mean and nugget: central differences of scipy's density, in float64."""

    def ours(parameters):
        scale, mean, nugget = parameters
        return GPPrior(ExpSquared(scale=scale), mean=mean, nugget=nugget).log_prob(X, F)

    def scipys(parameters):
        scale, mean, nugget = parameters
        return normal_logpdf(F, mean * np.ones(12), rbf(X, X, scale=scale) + nugget * np.eye(12))

    at, step = np.array([0.8, 0.2, 0.1]), 1e-5
    expected = [(scipys(at + step * e) - scipys(at - step * e)) / (2 * step) for e in np.eye(3)]
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(jax.grad(ours))(jnp.asarray(at)), expected, rtol=1e-6)
        stacked = jax.jit(jax.vmap(ours))(jnp.stack([at, 2 * at]))
    np.testing.assert_allclose(stacked, [scipys(at), scipys(2 * at)], rtol=1e-8)


def test_parameters_closed_over_by_a_custom_kernel():
    """A traced value hidden in a closure, not a leaf of the kernel, is found too."""

    def ours(scale):
        return GPPrior(Custom(lambda a, b: jnp.exp(-0.5 * jnp.sum((a - b) ** 2) / scale**2)), nugget=0.1).log_prob(X, F)

    assert jnp.isfinite(jax.jit(jax.grad(ours))(0.8))
    np.testing.assert_allclose(jax.jit(ours)(0.8), normal_logpdf(F, 0.0, sigma(nugget=0.1)), rtol=1e-4)


def test_concrete_covariance_enters_as_a_constant():
    """The jitted program at concrete x holds no factorization, and factorizes once for all traces."""
    calls = []

    def kernel(x1, x2):
        calls.append(1)
        return ExpSquared(scale=SCALE)(x1, x2)

    prior = GPPrior(kernel, nugget=NUGGET)
    at = jax.jit(lambda f: prior.log_prob(X, f))
    text = at.lower(jnp.asarray(F)).as_text()
    assert "cholesky" not in text and "triangular" not in text and "potrf" not in text
    traced = jax.jit(prior.log_prob).lower(X, F).as_text()
    assert "cholesky" in traced or "potrf" in traced
    before = len(calls)
    jax.jit(lambda f: 2 * prior.log_prob(X, f))(F)
    assert len(calls) == before
    np.testing.assert_allclose(at(F), normal_logpdf(F, 0.0, sigma()), rtol=1e-4)


def test_cache_tells_points_apart():
    prior = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET)
    for x in (X, 2 * X, X.reshape(8, 3), *(X + i for i in range(10)), X):
        f = F[: len(x)]
        np.testing.assert_allclose(prior.log_prob(x, f), normal_logpdf(f, 0.0, sigma(x)), rtol=1e-4)


def test_chains_share_a_constant_factor():
    """vmap over values, not points."""
    prior, f = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET), RNG.normal(size=(5, 12))
    values = jax.jit(jax.vmap(lambda one: prior.log_prob(X, one)))(f)
    np.testing.assert_allclose(values, normal_logpdf(f, 0.0, sigma()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, np.float64, np.int64])
def test_values_of_other_types(dtype):
    """Half precision and integers are lifted before the product with L⁻¹."""
    f = jnp.asarray(np.round(F), dtype) if dtype in (jnp.bfloat16, jnp.int32) else np.round(F).astype(dtype)
    value = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET).log_prob(X, f)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, normal_logpdf(np.round(F), 0.0, sigma()), rtol=1e-4)


def test_integer_inputs_are_cast():
    x = np.arange(4)[:, None]
    value = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET).log_prob(x, F[:4])
    np.testing.assert_allclose(value, normal_logpdf(F[:4], 0.0, sigma(x * 1.0)), rtol=1e-4)


@pytest.mark.parametrize("traced", [False, True])
def test_sample_follows_log_prob(traced):
    """Shapes, and the law with the nugget: false alarms 1e-5; 2 % more variance would give p < 1e-5."""
    prior = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET, mean=2.0)
    key = jax.random.key(1)
    draws = (jax.jit(prior.sample, static_argnums=2) if traced else prior.sample)(key, X, (20000,))
    assert draws.shape == (20000, 12) and prior.sample(key, X).shape == (12,)
    assert p_value(draws - 2.0, sigma()) > 1e-5


def test_sample_of_outputs():
    """Each output has its own kernel and no correlation with the others."""
    prior = GPPrior([ExpSquared(scale=0.3), ExpSquared(scale=3.0)], nugget=NUGGET)
    draws = np.asarray(prior.sample(jax.random.key(2), X, (4, 5000)))
    assert draws.shape == (4, 5000, 12, 2)
    joint = draws.reshape(-1, 24, order="C").reshape(-1, 12, 2).transpose(0, 2, 1).reshape(-1, 24)
    blocks = [rbf(X, X, scale=s) + NUGGET * np.eye(12) for s in (0.3, 3.0)]
    assert p_value(joint, scipy.linalg.block_diag(*blocks)) > 1e-5
    shared = GPPrior(ExpSquared(scale=0.3), nugget=NUGGET, num_outputs=2).sample(jax.random.key(3), X, (9000,))
    joint = np.asarray(shared).transpose(0, 2, 1).reshape(-1, 24)
    assert p_value(joint, scipy.linalg.block_diag(blocks[0], blocks[0])) > 1e-5


@pytest.mark.parametrize("noise", [0.1, np.linspace(0.05, 0.3, 12)], ids=["scalar", "each"])
def test_condition_is_sklearns(noise):
    """Posterior moments in float64 although JAX computes in float32, against scikit-learn."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    reference = GaussianProcessRegressor(RBF(SCALE), alpha=noise, optimizer=None).fit(X, F)
    new = RNG.normal(size=(7, 2))
    prior = GPPrior(ExpSquared(scale=SCALE), nugget=1e-3)
    posterior = prior.condition(X, F, noise)
    mean, covariance = posterior.moments(new)
    expected_mean, expected_covariance = reference.predict(new, return_cov=True)
    assert mean.dtype == covariance.dtype == np.float64
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(covariance, expected_covariance, atol=1e-7)
    np.testing.assert_allclose(
        prior.log_marginal_likelihood(X, F, noise), reference.log_marginal_likelihood_value_, rtol=1e-4
    )

    f = RNG.normal(size=7) * 0.1 + expected_mean
    expected = normal_logpdf(f, expected_mean, expected_covariance + 1e-3 * np.eye(7))
    np.testing.assert_allclose(posterior.log_prob(new, f), expected, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(posterior.log_prob)(new, f), expected, rtol=1e-2)
    draws = posterior.sample(jax.random.key(5), new, (5000,))
    assert p_value(draws - expected_mean, expected_covariance + 1e-3 * np.eye(7)) > 1e-5


def test_condition_in_two_steps():
    """Conditioning a posterior on more data is conditioning the prior on all of them."""
    prior = GPPrior(ExpSquared(scale=SCALE))
    both = prior.condition(X, F, 0.1).moments(X + 0.1)
    steps = prior.condition(X[:5], F[:5], 0.1).condition(X[5:], F[5:], 0.1).moments(X + 0.1)
    for a, b in zip(both, steps, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


def test_condition_of_outputs():
    """Shared kernel; noise [N, K] gives each output its own factor."""
    y, noise = RNG.normal(size=(12, 2)), np.stack([np.full(12, 0.1), np.linspace(0.1, 1, 12)], 1)
    prior = GPPrior(ExpSquared(scale=SCALE), num_outputs=2, mean=np.array([1.0, -1.0]))
    mean, covariance = prior.condition(X, y, noise).moments(X[:3])
    for k, m in enumerate([1.0, -1.0]):
        gain = rbf(X[:3], X) @ np.linalg.inv(rbf(X, X) + np.diag(noise[:, k]))
        np.testing.assert_allclose(mean[:, k], m + gain @ (y[:, k] - m), atol=1e-10)
        np.testing.assert_allclose(covariance[k], rbf(X[:3], X[:3]) - gain @ rbf(X, X[:3]), atol=1e-10)
    shared = prior.condition(X, y, 0.1).moments(X[:3])
    np.testing.assert_allclose(shared[0][:, 0], mean[:, 0], atol=1e-10)
    assert shared[1].shape == (2, 3, 3)


def test_condition_on_traced_data():
    with jax.enable_x64(True):
        prior = GPPrior(ExpSquared(scale=SCALE))
        traced = jax.jit(lambda x, y: prior.condition(x, y, 0.1).moments(x + 0.1))(X, F)
        for a, b in zip(prior.condition(X, F, 0.1).moments(X + 0.1), traced, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-10)


def test_covariance_without_a_factor_is_reported():
    """An error with the eigenvalue, at trace time too, if x is concrete; NaN, not -inf, if x is traced."""
    repelling = tinygp.kernels.Custom(lambda a, b: jnp.where((a == b).all(), 1.0, -0.9))
    prior = GPPrior(repelling, nugget=1e-3)
    with pytest.raises(ValueError, match=r"smallest eigenvalue is -\d.*larger nugget"):
        prior.check(X)
    with pytest.raises(ValueError, match="not positive definite"):
        prior.log_prob(X, F)
    with pytest.raises(ValueError, match="not positive definite"):
        jax.jit(lambda f: prior.log_prob(X, f))(F)
    value, gradient = jax.jit(jax.value_and_grad(prior.log_prob, 1))(X, F)
    assert jnp.isnan(value) and jnp.isnan(gradient).all()
    assert jax.jit(prior.check)(X) is None  # x is not known yet
    with pytest.raises(ValueError, match="NaN or infinity"):
        GPPrior(ExpSquared(scale=np.nan)).log_prob(X, F)
    assert GPPrior(ExpSquared()).check(X) is None


GOOD = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET)
TWO = GPPrior(ExpSquared(scale=SCALE), nugget=NUGGET, num_outputs=2)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: GPPrior(ExpSquared(), nugget=0.0), ValueError, "nugget must be positive"),
        (lambda: GPPrior(ExpSquared(), nugget=-1.0), ValueError, "nugget must be positive"),
        (lambda: GPPrior(ExpSquared(), nugget=np.ones(3)), ValueError, "nugget must have at most 0"),
        (lambda: GPPrior(ExpSquared(), nugget="small"), TypeError, "nugget"),
        (lambda: GPPrior(ExpSquared), TypeError, "kernel must be a tinygp kernel instance"),
        (lambda: GPPrior(1.0), TypeError, "kernel"),
        (lambda: GPPrior([ExpSquared()] * 2, num_outputs=3), ValueError, "2 kernels but num_outputs=3"),
        (lambda: GPPrior([]), ValueError, "num_outputs"),
        (lambda: GPPrior(ExpSquared(), num_outputs=0), ValueError, "num_outputs"),
        (
            lambda: GPPrior(ExpSquared(), mean=np.zeros(3)),
            ValueError,
            "mean has shape .3. but num_outputs=None",
        ),
        (
            lambda: GPPrior(ExpSquared(), mean=lambda x: x).log_prob(X, F),
            ValueError,
            r"mean must return shape \[12\]",
        ),
        (lambda: GOOD.log_prob(X[:, 0], F), ValueError, r"x\[:, None\]"),
        (lambda: GOOD.log_prob(X[None], F), ValueError, r"x must have shape \[M, D\]"),
        (lambda: GOOD.log_prob(X[:0], F[:0]), ValueError, "at least one point"),
        (lambda: GOOD.log_prob(X.astype(str), F), (TypeError, ValueError), "x"),
        (lambda: GOOD.log_prob(np.where(X > 1, np.nan, X), F), ValueError, "x holds NaN"),
        (lambda: GOOD.log_prob(X + 1j, F), TypeError, "real numbers"),
        (lambda: GOOD.log_prob(X, F[:5]), ValueError, r"f must have shape \[12\].*got \[5\]"),
        (lambda: GOOD.log_prob(X, np.zeros((12, 2))), ValueError, "num_outputs=2"),
        (lambda: TWO.log_prob(X, F), ValueError, "num_outputs=2"),
        (lambda: TWO.log_prob(X, np.zeros((12, 3))), ValueError, "num_outputs=3"),
        (lambda: GPPrior(lambda a, b: jnp.ones(3)).log_prob(X, F), ValueError, "kernel must return shape"),
        (lambda: GOOD.condition(X, F, 0.0), ValueError, "noise_variance must be positive"),
        (lambda: GOOD.condition(X, F, np.ones(5)), ValueError, "noise_variance"),
        (lambda: GOOD.condition(X, F, np.ones((12, 1, 1))), ValueError, "at most 2 dimensions"),
        (lambda: GOOD.condition(X, F * np.nan, 0.1), ValueError, "y holds NaN"),
        (lambda: GOOD.condition(X, F[:4], 0.1), ValueError, "y must have shape"),
        (lambda: StudentTPrior(ExpSquared(), df=0.0), ValueError, "df must be positive"),
        (lambda: NetworkPrior(3.0, jax.random.key(0)), TypeError, "draw"),
        (lambda: NetworkPrior(lambda key, x: x, jax.random.key(0), num_draws=1), ValueError, "num_draws"),
        (lambda: NetworkPrior(lambda key, x: x, jax.random.key(0)).log_prob(X, F), ValueError, "draw"),
        (lambda: check_prior(GPPrior), TypeError, "instance"),
        (lambda: check_prior(ExpSquared()), TypeError, "log_prob"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_check_prior_accepts_any_object_with_the_two_methods():
    class Own:
        def log_prob(self, x, f):
            return -jnp.sum(f**2)

        def sample(self, key, x, sample_shape=()):
            return jax.random.normal(key, (*sample_shape, len(x)))

    own = Own()
    assert check_prior(own) is own and check_prior(GOOD) is GOOD


@pytest.mark.parametrize("x64", [False, True])
def test_student_t_is_scipys(x64):
    with jax.enable_x64(x64):
        prior = StudentTPrior(ExpSquared(scale=SCALE), df=3.5, mean=0.3, nugget=NUGGET)
        value = prior.log_prob(X, F)
    expected = scipy.stats.multivariate_t(0.3 * np.ones(12), sigma(), df=3.5).logpdf(F)
    np.testing.assert_allclose(value, expected, rtol=1e-8 if x64 else 1e-4)


def test_student_t_of_outputs_and_its_gaussian_limit():
    f = RNG.normal(size=(12, 2))
    prior = StudentTPrior(ExpSquared(scale=SCALE), df=4.0, nugget=NUGGET, num_outputs=2)
    expected = scipy.stats.multivariate_t(np.zeros(12), sigma(), df=4.0).logpdf(f.T).sum()
    np.testing.assert_allclose(prior.log_prob(X, f), expected, rtol=1e-4)
    np.testing.assert_allclose(prior.moments(X)[1][0], 2 * rbf(X, X), atol=1e-6)
    with jax.enable_x64(True):
        wide = StudentTPrior(ExpSquared(scale=SCALE), df=1e7, nugget=NUGGET, num_outputs=2)
        np.testing.assert_allclose(wide.log_prob(X, f), TWO.log_prob(X, f), rtol=1e-4)


@pytest.mark.parametrize("df", [1.0, 30.0, 1e5, 1e7, 1e10])
def test_student_t_of_any_degrees_of_freedom_in_single_precision(df):
    prior = StudentTPrior(ExpSquared(scale=SCALE), df=df, nugget=NUGGET)
    expected = scipy.stats.multivariate_t(np.zeros(12), sigma(), df=df).logpdf(F)
    np.testing.assert_allclose(prior.log_prob(X, F), expected, rtol=1e-4)


@pytest.mark.parametrize("df, factor", [(1.5, np.inf), (2.0, np.inf), (2.5, 5.0), (2.9, 29 / 9), (10.0, 1.25)])
def test_student_t_variance(df, factor):
    prior = StudentTPrior(ExpSquared(scale=SCALE), df=df)
    np.testing.assert_allclose(np.diagonal(prior.moments(X)[1]), factor, rtol=1e-4)


def test_student_t_sample():
    """Mahalanobis squares over M are F(M, df), for each output on its own; false alarms 1e-5."""
    prior = StudentTPrior(ExpSquared(scale=SCALE), df=3.0, mean=1.0, nugget=NUGGET, num_outputs=2)
    draws = np.asarray(prior.sample(jax.random.key(0), X, (4000,)), float) - 1.0
    white = np.linalg.solve(np.linalg.cholesky(sigma()), draws)
    squares = np.sum(white**2, axis=1) / 12
    for k in range(2):
        assert scipy.stats.kstest(squares[:, k], scipy.stats.f(12, 3.0).cdf).pvalue > 1e-5
    assert abs(scipy.stats.spearmanr(squares[:, 0], squares[:, 1]).statistic) < 0.08
    assert prior.sample(jax.random.key(0), X).shape == (12, 2)


def linear_draw(key, x):
    return x @ jax.random.normal(key, (2, 2))


def test_network_prior_fits_its_law():
    """A linear network is exactly Gaussian with covariance x xᵀ: the fit misses it by Monte Carlo alone."""
    prior = NetworkPrior(linear_draw, jax.random.key(0), num_draws=20000, nugget=0.5, num_outputs=2)
    mean, covariance = prior.moments(X)
    np.testing.assert_allclose(mean, 0.0, atol=0.1)
    np.testing.assert_allclose(covariance[0], X @ X.T, atol=0.25)
    f = RNG.normal(size=(12, 2))
    expected = normal_logpdf(f.T, 0.0, X @ X.T + 0.5 * np.eye(12)).sum()
    np.testing.assert_allclose(prior.log_prob(X, f), expected, rtol=1e-2)
    np.testing.assert_allclose(jax.jit(prior.log_prob)(X, f), prior.log_prob(X, f), rtol=1e-4)


def test_network_prior_samples_functions():
    """Draws are of the network, not of the Gaussian: linear in x, fresh for each key, the same at all x."""
    prior = NetworkPrior(linear_draw, jax.random.key(0), num_outputs=2)
    draws = prior.sample(jax.random.key(1), X, (3, 5))
    assert draws.shape == (3, 5, 12, 2)
    np.testing.assert_allclose(prior.sample(jax.random.key(1), 2 * X, (3, 5)), 2 * draws, rtol=1e-5)
    assert np.linalg.matrix_rank(np.asarray(draws).transpose(0, 1, 3, 2).reshape(-1, 12), tol=1e-3) == 2
    single = NetworkPrior(lambda key, x: linear_draw(key, x)[:, 0], jax.random.key(0))
    assert single.sample(jax.random.key(1), X).shape == (12,)


# ---- Dirichlet targets ---------------------------------------------------------------------------------------


def test_network_prior_takes_keys_of_the_old_style():
    draw = random_function(nn.Dense(1), input_shape=1)
    found = []
    for make in (jax.random.key, jax.random.PRNGKey):
        found.append(NetworkPrior(draw, make(0), num_draws=50).sample(make(1), np.ones((4, 1)), (3,)))
    np.testing.assert_array_equal(*found)
    assert found[0].shape == (3, 4)


def test_random_function_of_tokens_and_of_nothing():
    tokens = nn.Sequential([nn.Embed(11, 4), lambda x: x.mean(-2), nn.Dense(1)])
    assert random_function(tokens, input_shape=2)(jax.random.key(0), np.zeros((3, 2), int)).shape == (3, 1)
    with pytest.raises(ValueError, match="prior is improper"):
        random_function(nn.Dense(1), input_shape=1, prior=flat())


def test_dirichlet_targets_of_traced_labels():
    labels = np.array([0, 2, 1, 1])
    found = jax.jit(lambda labels: dirichlet_targets(labels, 3))(labels)
    for one, expected in zip(found, dirichlet_targets(labels, 3), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_dirichlet_targets_match_the_gamma_moments():
    """exp(ỹ + s e) has the mean α and the variance α of the gamma variable with that shape."""
    labels = np.array([0, 2, 1])
    targets, variances = dirichlet_targets(labels, 3, concentration=0.1)
    alpha = 0.1 + np.eye(3)[labels]
    np.testing.assert_allclose(np.exp(targets + variances / 2), alpha)
    np.testing.assert_allclose((np.exp(variances) - 1) * np.exp(2 * targets + variances), alpha)


@pytest.mark.parametrize(
    ("labels", "num_classes", "concentration", "text"),
    [
        ([0, 3], 3, 0.01, "0 to num_classes - 1 = 2"),
        ([-1, 0], 3, 0.01, "got -1 to 0"),
        ([0.0, 1.0], 2, 0.01, "labels must be integers"),
        ([0, 0], 1, 0.01, "num_classes"),
        ([0, 1], 2, 0.0, "concentration"),
    ],
)
def test_bad_labels(labels, num_classes, concentration, text):
    with pytest.raises(ValueError, match=text):
        dirichlet_targets(labels, num_classes, concentration=concentration)


SEASON = 0.5 * ExpSineSquared(scale=1.0, gamma=1.0) * ExpSquared(8.0)


@pytest.mark.parametrize(
    "kernel",
    [
        60.0 * ExpSquared(4.0) + SEASON,
        (60.0 * ExpSquared(4.0) + SEASON) * ExpSquared(100.0),
        tinygp.transforms.Subspace(0, SEASON + 60.0 * ExpSquared(4.0)),
    ],
    ids=["sum", "product", "subspace"],
)
def test_the_default_nugget_does_not_drown_a_small_summand(kernel):
    """The right period wins by as much as with a nugget of a hundredth of the season's variance."""
    t = np.linspace(0.0, 4.0, 60)[:, None]

    def right_over_wrong(prior):
        right, wrong = (0.7 * np.sin(2.0 * np.pi * t[:, 0] / period) for period in (1.0, 0.63))
        return float(prior.log_prob(t, right) - prior.log_prob(t, wrong))

    assert right_over_wrong(GPPrior(kernel)) > 0.8 * right_over_wrong(GPPrior(kernel, nugget=0.005)) > 100.0


def test_a_summand_below_the_default_nugget_is_said_and_one_without_variance_is_none():
    x = np.linspace(0.0, 1.0, 5)[:, None]
    with pytest.warns(RuntimeWarning, match="summand of the kernel has the share 0.0001 of the variance.*Pass nugget="):
        GPPrior(ExpSquared(1.0) + 1e-4 * ExpSquared(0.1)).check(x)
    nugget = GPPrior(ExpSquared(1.0) + 1e-9 * ExpSquared(0.1)).marginal(x)[1][0, 0] - 1.0
    assert nugget == pytest.approx(0.01, rel=1e-3)


def test_a_table_of_a_sum_has_its_nugget():
    pool = np.linspace(0.0, 4.0, 30)[:, None]
    prior, rows = GPPrior(60.0 * ExpSquared(4.0) + SEASON), np.arange(0, 30, 3)
    f = np.sin(2.0 * np.pi * pool[rows, 0])
    expected = prior.log_prob(pool[rows], f)
    np.testing.assert_allclose(prior.tabulated(pool).log_prob(rows[:, None], f), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "plain"),
    [
        (quasisep.Matern32(1.3), Matern32(1.3)),
        (2.0 * quasisep.Matern52(0.7), 2.0 * Matern52(0.7)),
        (ExpSquared(1.0) + quasisep.Matern32(2.0), ExpSquared(1.0) + Matern32(2.0)),
        (tinygp.transforms.Linear(2.0, quasisep.Matern32(1.0)), Matern32(0.5)),
    ],
    ids=["one", "scaled", "mixed", "transformed"],
)
def test_quasiseparable_kernels_are_those_of_the_same_name(kernel, plain):
    x = np.linspace(0.0, 3.0, 8)[:, None]
    np.testing.assert_allclose(GPPrior(kernel).moments(x)[1], GPPrior(plain).moments(x)[1], atol=1e-12)
    np.testing.assert_allclose(GPPrior(kernel).log_prob(x, x[:, 0]), GPPrior(plain).log_prob(x, x[:, 0]), rtol=1e-5)


def test_a_quasiseparable_kernel_takes_one_input():
    with pytest.raises(ValueError, match=r"quasisep.Matern32 is a kernel of one input, but x has 2.*Subspace"):
        GPPrior(quasisep.Matern32(1.0)).moments(X)
    column = GPPrior(tinygp.transforms.Subspace(1, quasisep.Matern32(1.0))).moments(X)[1]
    np.testing.assert_allclose(column, GPPrior(Matern32(1.0)).moments(X[:, 1:])[1], atol=1e-12)


@pytest.mark.parametrize(
    "kernel",
    [
        Matern32(1.0),
        Matern52(1.0),
        RationalQuadratic(alpha=1.0),
        Cosine(1.0),
        l2(Cosine, scale=1.0),
        ExpSineSquared(scale=1.0, gamma=1.0),
        l2(ExpSineSquared, scale=1.0, gamma=1.0),
    ],
)
def test_a_kernel_that_is_no_covariance_in_the_plane_is_named_whatever_the_nugget(kernel):
    x = np.random.default_rng(3).normal(size=(50, 2))
    with pytest.warns(
        RuntimeWarning, match="not a covariance: at 50 points.*L2Distance.*Cosine and ExpSineSquared.*Subspace"
    ):
        GPPrior(kernel, nugget=50.0).check(x)
    GPPrior(kernel, nugget=50.0).check(x[:, :1])


@pytest.mark.parametrize(
    "kernel", [l2(Matern32, scale=1.0), l2(RationalQuadratic, alpha=1.0), Exp(1.0), DotProduct(), ExpSquared(5.0)]
)
def test_covariances_of_low_rank_or_near_it_are_not_accused(kernel):
    GPPrior(kernel, nugget=1e-3).check(np.random.default_rng(3).normal(size=(50, 2)))


@pytest.mark.parametrize("kind", ["datetime64[s]", "datetime64[ns]", "object"])
def test_dates_are_refused_wherever_a_prior_takes_numbers(kind):
    days = (np.datetime64("2020-01-01") + np.arange(5)).astype(kind)
    prior = GPPrior(ExpSquared(1.0))
    for call in (
        lambda: prior.moments(days[:, None]),
        lambda: prior.log_prob(np.ones((5, 1)), days),
        lambda: fixed(days[:, None]),
        lambda: fit_gp(None, days[:, None], np.ones(5)),
        lambda: fit_gp(None, np.ones((5, 1)), days),
    ):
        with pytest.raises(TypeError, match=r"holds dates .*as days"):
            call()
    with pytest.raises(TypeError, match=r"holds durations .*as days"):
        prior.moments((np.arange(5)[:, None]).astype("timedelta64[h]"))


@pytest.mark.slow
def test_a_kernel_with_complex_parameters_is_refused_and_the_cure_trains():
    x = np.linspace(0.0, 5.0, 40)[:, None]
    start = {"alpha": jnp.array([1.4, 0.3]), "beta": jnp.array([0.2, 0.1])}
    with pytest.raises(TypeError, match=r"a CARMA, has complex parameters .*SHO\(omega, quality\)"):
        fit_gp(quasisep.CARMA(**start), x, np.sin(x[:, 0]))
    fit = fit_gp(quasisep.SHO(omega=3, quality=1), x, np.sin(x[:, 0]), num_steps=20)
    assert fit.losses[-1] < fit.losses[0] and fit.prior.kernel.omega != 3 and fit.prior.kernel.quality != 1


class Counted(tinygp.kernels.Kernel):
    """A sum of cosines whose number, an integer, is no parameter to train, whatever its name."""

    c: int
    scale: jax.Array

    def evaluate(self, X1, X2):
        angles = jnp.arange(1, 4) * jnp.sum(X1 - X2) / self.scale
        return jnp.sum(jnp.where(jnp.arange(3) < self.c, jnp.cos(angles), 0.0))


def test_integers_of_a_kernel_of_ones_own_are_held():
    x = np.linspace(0.0, 2.0, 20)[:, None]
    fit = fit_gp(Counted(2, jnp.array(0.5)), x, np.sin(3 * x[:, 0]), num_steps=5)
    assert fit.prior.kernel.c == 2 and fit.prior.kernel.scale != 0.5


class Warped(tinygp.kernels.Kernel):
    """A squared exponential kernel of inputs that a function changes first."""

    warp: Callable
    scale: jax.Array

    def evaluate(self, X1, X2):
        return jnp.exp(-0.5 * jnp.sum(((self.warp(X1) - self.warp(X2)) / self.scale) ** 2))


def test_functions_among_the_parameters_of_a_kernel_are_held():
    x = np.linspace(0.0, 2.0, 20)[:, None]
    fit = fit_gp(Warped(jnp.sin, jnp.array(0.5)), x, np.sin(3 * x[:, 0]), num_steps=5)
    assert fit.prior.kernel.warp is jnp.sin and fit.prior.kernel.scale != 0.5


TRACED = {
    "moments by targets": lambda y, s: GOOD.condition(X, y, 0.1).moments(X)[0].sum(),
    "moments by noise": lambda y, s: GOOD.condition(X, F, s).moments(X)[0].sum(),
    "density by targets": lambda y, s: GOOD.condition(X, y, 0.1).log_prob(X, F),
    "density by noise": lambda y, s: GOOD.condition(X, F, s).log_prob(X, F),
    "draws by noise": lambda y, s: GOOD.condition(X, F, s).sample(jax.random.key(0), X).sum(),
    "mean": lambda y, s: GPPrior(ExpSquared(), mean=lambda x: s * x[:, 0]).marginal(X)[0].sum(),
    "Student t": lambda y, s: StudentTPrior(ExpSquared(), 3.0, mean=lambda x: s * x[:, 0]).log_prob(X, F),
}


@pytest.mark.parametrize("name", some(TRACED, 1))
def test_inputs_are_concrete_and_another_argument_is_traced(name):
    """In one program, and its derivative; the inputs are NumPy arrays, which are known in float64."""
    fn, y, noise = TRACED[name], np.asarray(F, np.float32), 0.2
    np.testing.assert_allclose(jax.jit(fn)(y, noise), fn(y, noise), rtol=2e-3, atol=1e-3)
    slopes = jax.grad(fn, argnums=(0, 1))(jnp.asarray(y), noise)
    step, direction = 1e-2, (np.ones_like(y), 1.0)
    ahead, behind = (fn(y + sign * step * direction[0], noise + sign * step) for sign in (1, -1))
    slope = jnp.sum(slopes[0]) + slopes[1]
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("kernel", "message"),
    {
        "nan": (lambda: tinygp.kernels.ExpSquared(float("nan")), "the prior covariance holds NaN or infinity"),
        "scale zero": (lambda: tinygp.kernels.ExpSquared(0.0), "the prior covariance holds NaN or infinity"),
        "returns nan": (lambda: tinygp.kernels.Custom(lambda a, b: jnp.nan), "the prior covariance holds NaN"),
        "negative": (lambda: -1.0 * tinygp.kernels.ExpSquared(1.0), "The process has the variance -1 at x"),
    }.values(),
)
@pytest.mark.parametrize("use", ["moments", "marginal", "check", "sample", "tabulated", "log_prob"])
def test_every_use_of_a_kernel_without_a_covariance_is_refused(kernel, message, use):
    prior = GPPrior(kernel())
    with pytest.raises(ValueError, match=message):
        {
            "sample": lambda: prior.sample(jax.random.key(0), X),
            "log_prob": lambda: prior.log_prob(X, np.zeros(len(X), np.float32)),
        }.get(use, lambda: getattr(prior, use)(X))()


def test_a_student_process_of_few_degrees_of_freedom_has_no_covariance():
    prior = StudentTPrior(tinygp.kernels.ExpSquared(0.01), df=1.5)
    assert np.isposinf(prior.moments(np.array([[0.0], [10.0]]))[1]).all()


def test_values_whose_squares_overflow_are_refused():
    prior = GPPrior(tinygp.kernels.ExpSquared(1.0))
    with pytest.raises(ValueError, match=r"f reaches 1e\+30, whose square is beyond float32: standardize f"):
        prior.log_prob(X, np.full(len(X), 1e30))
    assert np.isfinite(prior.log_prob(X, np.full(len(X), 1e15)))


@pytest.mark.slow
def test_a_posterior_with_negative_variances_is_refused():
    """The periodic kernel is no covariance in two dimensions, which the noise hides at the data."""
    x = np.random.default_rng(0).normal(size=(40, 2))
    posterior = GPPrior(tinygp.kernels.ExpSineSquared(1.0, gamma=3.0)).condition(x[:5], x[:5, 0], noise_variance=0.5)
    for use in (posterior.moments, posterior.marginal):
        with pytest.raises(ValueError, match=r"The process has the variance -.* not a covariance"):
            use(x)
    _, covariance = GPPrior(tinygp.kernels.ExpSquared(1.0)).condition(x, x[:, 0], noise_variance=1e-8).moments(x)
    assert np.abs(covariance).max() < 1e-6  # rounding errors may be negative
    first = GPPrior(1e4 * tinygp.kernels.ExpSquared(3.0)).condition(x, x[:, 0], noise_variance=1e-8)
    first.condition(x[:5], x[:5, 0], noise_variance=1e-8).moments(x)


def test_a_polynomial_with_scales_of_other_inputs_is_refused():
    """A single column would be broadcast."""
    prior = GPPrior(tinygp.kernels.Polynomial(order=1, scale=jnp.array([1.0, 2.0]), sigma=0.1))
    with pytest.raises(ValueError, match=r"scales of 2 inputs .*Polynomial.*, but x has 1"):
        prior.sample(jax.random.key(0), np.ones((3, 1), np.float32))


def test_a_large_mean_costs_no_digits():
    """log N(y; m, K) depends on y - m alone, which float32 would round if it were formed there."""
    x = np.linspace(0.0, 3.0, 30)[:, None]
    y, kernel = np.sin(2 * x[:, 0]), tinygp.kernels.ExpSquared(0.5)
    wanted = GPPrior(kernel).log_marginal_likelihood(x, y, 0.01)
    for offset in (1e4, 1e6):
        found = GPPrior(kernel, mean=offset).log_marginal_likelihood(x, y + offset, 0.01)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        exact = GPPrior(kernel, nugget=0.1).log_prob(x, y)
        np.testing.assert_allclose(GPPrior(kernel, nugget=0.1, mean=offset).log_prob(x, y + offset), exact, rtol=1e-4)


def test_a_prior_keeps_its_own_copy_of_arrays():
    x, mean = np.linspace(0.0, 3.0, 20)[:, None], np.array([1.0, 2.0])
    posterior = GPPrior(tinygp.kernels.ExpSquared(0.5)).condition(x, np.sin(x[:, 0]), 0.01)
    prior, grid = GPPrior(tinygp.kernels.ExpSquared(0.5), mean=mean, num_outputs=2), np.array([[1.05]])
    before = posterior.moments(grid)[0], prior.moments(grid)[0]
    x += 1.0
    mean += 5.0
    np.testing.assert_array_equal(posterior.moments(grid)[0], before[0])
    np.testing.assert_array_equal(prior.moments(grid)[0], before[1])


def test_the_axes_of_a_subspace_as_a_tuple_are_named():
    kernel = tinygp.transforms.Subspace((0, 1), tinygp.kernels.ExpSquared(1.0))
    with pytest.raises(ValueError, match=r"cannot take the inputs \(0, 1\), a tuple: write np.array\(\[0, 1\]\)"):
        GPPrior(kernel).moments(np.zeros((4, 3)))
