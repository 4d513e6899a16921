"""The Helmholtz kernel against closed forms, and dependent outputs of Gaussian priors against brute force."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from tinygp.kernels import ExpSquared, Matern52, RationalQuadratic, distance
from tinygp.transforms import Subspace

import numpyro_fspace as fs
from numpyro_fspace.variational.pushforward import LinearizedPushforward

RNG = np.random.default_rng(0)
X, F = RNG.normal(size=(6, 2)), RNG.normal(size=(6, 2))
VARIANCES, SCALES, NUGGET = (0.7, 1.3), (0.8, 1.1), 0.05
ROTATION = np.array([[0.0, 1.0], [-1.0, 0.0]])


def kernel(potential=VARIANCES[0], stream=VARIANCES[1]):
    return fs.priors.Helmholtz(*(v * ExpSquared(scale) for v, scale in zip((potential, stream), SCALES, strict=True)))


def mixed(x1, x2, variance, scale):
    """∂²k/∂x∂x' of the squared exponential by hand: k (I / ℓ² - d dᵀ / ℓ⁴), [M, L, 2, 2]."""
    d = x1[:, None] - x2[None]
    k = variance * np.exp(-0.5 * np.sum(d**2, -1) / scale**2)
    return k[..., None, None] * (np.eye(2) / scale**2 - d[..., :, None] * d[..., None, :] / scale**4)


def covariance(x1=X, x2=X):
    """Of f.ravel(), [2M, 2L]: the oracle."""
    parts = [mixed(x1, x2, v, scale) for v, scale in zip(VARIANCES, SCALES, strict=True)]
    total = parts[0] + ROTATION @ parts[1] @ ROTATION.T
    return total.transpose(0, 2, 1, 3).reshape(2 * len(x1), 2 * len(x2))


def prior(**kwargs):
    return fs.GPPrior(kernel(), **({"nugget": NUGGET, "num_outputs": 2} | kwargs))


def derivatives(field, x):
    """Cov of the Jacobian entries ∂_i f_k(x) with f_l(x'): the covariance differentiated in its first place."""

    def row(a, b):
        return field(a[None], b[None])[0, :, 0, :]

    return jax.vmap(jax.vmap(jax.jacfwd(row), (None, 0)), (0, None))(x, x)  # [M, L, k, l, i]


def test_covariance_is_the_closed_form(x64):
    found = kernel()(X, X[:4])
    assert found.shape == (6, 2, 4, 2)
    np.testing.assert_allclose(found.reshape(12, 8), covariance(X, X[:4]), atol=1e-12)
    assert np.abs(covariance() - np.kron(covariance()[::2, ::2], np.eye(2))).max() > 0.1  # the components do depend


@pytest.mark.slow
def test_stream_has_no_divergence_and_potential_no_curl(x64):
    """Where a field's divergence (curl) has zero covariance with the field everywhere, it is zero."""
    stream, potential = (derivatives(kernel(*v), X) for v in ((1e-30, 1.0), (1.0, 1e-30)))

    def divergence(d):
        return d[..., 0, :, 0] + d[..., 1, :, 1]

    def curl(d):
        return d[..., 1, :, 0] - d[..., 0, :, 1]

    assert np.abs(divergence(stream)).max() < 1e-12 < 0.1 < np.abs(curl(stream)).max()
    assert np.abs(curl(potential)).max() < 1e-12 < 0.1 < np.abs(divergence(potential)).max()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("nugget", [NUGGET, np.linspace(0.05, 0.2, 6), np.linspace(0.05, 0.2, 12).reshape(6, 2)])
def test_log_prob_is_scipys(x64, traced, nugget):
    wide = np.broadcast_to(np.asarray(nugget).reshape(*np.shape(nugget), *[1] * (2 - np.ndim(nugget))), (6, 2))
    value = scipy.stats.multivariate_normal(None, covariance() + np.diag(wide.ravel())).logpdf((F - 0.3).ravel())
    evidence = functools.partial(prior(mean=0.3).log_marginal_likelihood, noise_variance=nugget)
    np.testing.assert_allclose(jax.jit(evidence)(X, F) if traced else evidence(X, F), value, rtol=1e-9)


def test_log_prob_uses_the_nugget_and_law_says_so():
    mean, total = prior().marginal(X)
    np.testing.assert_allclose(total, covariance() + NUGGET * np.eye(12), atol=1e-12)
    np.testing.assert_allclose(
        prior(nugget=None).marginal(X)[1], covariance() + 0.01 * np.trace(covariance()) / 12 * np.eye(12)
    )
    value = scipy.stats.multivariate_normal(None, total).logpdf(F.ravel())
    np.testing.assert_allclose(prior().log_prob(X, F), value, rtol=1e-4)
    assert mean.shape == (6, 2)


def test_samples_follow_the_law(key):
    """χ² of 4000 whitened draws of 12 values; it fails by chance once in 10⁵ keys."""
    draws = np.asarray(prior().sample(key, X, (50, 80)), float).reshape(4000, 12)
    white = np.linalg.solve(np.linalg.cholesky(covariance() + NUGGET * np.eye(12)), draws.T)
    scatter = white @ white.T / 4000
    p = scipy.stats.chi2(white.size).cdf(np.sum(white**2))
    assert min(p, 1 - p) > 5e-6
    assert np.abs(scatter - np.eye(12)).max() < 6 * np.sqrt(2 / 4000)


@pytest.mark.parametrize("noise", [0.1, pytest.param(np.linspace(0.05, 0.3, 12).reshape(6, 2), marks=pytest.mark.slow)])
def test_condition_is_brute_force(noise):
    new = RNG.normal(size=(3, 2))
    total = covariance() + np.diag(np.broadcast_to(noise, (6, 2)).ravel())
    gain = covariance(new, X) @ np.linalg.inv(total)
    posterior = prior().condition(X, F, noise)
    mean, found = posterior.moments(new)
    np.testing.assert_allclose(mean.ravel(), gain @ F.ravel(), atol=1e-10)
    np.testing.assert_allclose(found, covariance(new, new) - gain @ covariance(X, new), atol=1e-10)
    value = scipy.stats.multivariate_normal(mean.ravel(), found + NUGGET * np.eye(6)).logpdf(np.zeros(6))
    np.testing.assert_allclose(posterior.log_prob(new, np.zeros((3, 2))), value, rtol=1e-4)


def test_student_t_has_one_scale_for_all_values(key):
    t = fs.priors.StudentTPrior(kernel(), df=4.0, nugget=NUGGET, num_outputs=2)
    value = scipy.stats.multivariate_t(None, covariance() + NUGGET * np.eye(12), df=4.0).logpdf(F.ravel())
    np.testing.assert_allclose(t.log_prob(X, F), value, rtol=1e-4)
    draws = np.asarray(t.sample(key, X, (4000,)), float).reshape(4000, 12)
    white = np.linalg.solve(np.linalg.cholesky(covariance() + NUGGET * np.eye(12)), draws.T)
    # |z|² / 12 ~ F(12, 4) only if the scale is common to all twelve values.
    assert scipy.stats.kstest((white**2).sum(0) / 12, scipy.stats.f(12, 4).cdf).pvalue > 1e-5


@pytest.mark.slow
def test_training_finds_the_evidence_of_brute_force():
    """The loss of the first step is the evidence at the start; training lowers it, also with known noises."""
    y = np.asarray(prior().sample(jax.random.key(1), X), float)
    start = {"stream": 1.3, "scale": 1.1}

    def made(params):
        return fs.priors.Helmholtz(VARIANCES[0] * ExpSquared(SCALES[0]), params["stream"] * ExpSquared(params["scale"]))

    for noise in (0.1, np.full((6, 2), 0.1)):
        fit = fs.fit_gp(made, X, y, params=start, noise_variance=noise, num_steps=30)
        floor = 0.0 if np.ndim(noise) else 1e-6 * y.var()
        total = covariance() + (0.1 + floor) * np.eye(12)
        np.testing.assert_allclose(
            fit.losses[0], -scipy.stats.multivariate_normal(None, total).logpdf(y.ravel()) / 12, rtol=1e-9
        )
        assert fit.losses.min() < fit.losses[0]
    mean, variance = fs.fit_gp(made, X, y, params=start, num_steps=3).predict(X, y, X[:2])
    assert mean.shape == variance.shape == (2, 2)


def law_of(weights, sd):
    """A linear field f(x) = W x with normal weights."""

    def function(w, x):
        return x @ w.reshape(2, 2)

    return LinearizedPushforward(function, weights, lambda rows: rows * sd)


def gaussian_kl(mean_q, cov_q, mean_p, cov_p):
    inverse = np.linalg.inv(cov_p)
    difference = mean_p - mean_q
    log_det = np.linalg.slogdet(cov_p)[1] - np.linalg.slogdet(cov_q)[1]
    return 0.5 * (np.trace(inverse @ cov_q) + difference @ inverse @ difference - len(mean_q) + log_det)


@pytest.mark.slow
def test_divergences_take_the_outputs_together(x64):
    weights, sd, gamma = jnp.array([0.3, -0.2, 0.5, 1.0]), jnp.array([0.2, 0.4, 0.1, 0.3]), 1e-3
    x = jnp.asarray(X[:4])
    jacobian = np.asarray(jax.jacobian(lambda w: (x @ w.reshape(2, 2)).ravel())(weights))
    q = (jacobian @ weights, jacobian @ np.diag(sd**2) @ jacobian.T)
    mean, total = (np.asarray(part) for part in prior(mean=0.1).marginal(x))
    extra = gamma * len(x) * np.eye(8)
    wanted = gaussian_kl(q[0], q[1] + extra, mean.ravel(), total + extra)
    found = fs.variational.RegularizedKL(gamma)(law_of(weights, sd), prior(mean=0.1), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-8)
    root = np.linalg.cholesky(total)
    overlap = np.sqrt(np.maximum(np.linalg.eigvalsh(root.T @ q[1] @ root), 0.0)).sum()
    wanted = np.sum((q[0] - mean.ravel()) ** 2) + np.trace(q[1] + total) - 2 * overlap
    np.testing.assert_allclose(
        fs.variational.Wasserstein2()(law_of(weights, sd), prior(mean=0.1), x), wanted, rtol=1e-5
    )


def test_a_custom_matrix_kernel():
    """Two outputs that share a process: B ⊗ k, the intrinsic model of coregionalisation."""
    mixing = np.array([[1.0, 0.6], [0.6, 0.5]])

    def shared(x1, x2):
        return ExpSquared(0.8)(x1, x2)[:, None, :, None] * mixing[None, :, None, :]

    total = np.kron(np.asarray(ExpSquared(0.8)(jnp.asarray(X), jnp.asarray(X))), mixing) + NUGGET * np.eye(12)
    value = scipy.stats.multivariate_normal(None, total).logpdf(F.ravel())
    gp = fs.GPPrior(shared, nugget=NUGGET, num_outputs=2)
    np.testing.assert_allclose(gp.log_prob(X, F), value, rtol=1e-4)


@pytest.mark.slow
def test_calibrated_to_a_dependent_law():
    """Random linear fields f = W x: where the base is the wider law, the ratio of the two Gaussians, brute force."""
    x, f = X[:2], F[:2]

    def draw(key, x):
        return 10.0 * x @ jax.random.normal(key, (2, 2))

    base = fs.priors.NetworkPrior(draw, jax.random.key(0), num_draws=500, num_outputs=2, dependent=True)
    mean, total = (np.asarray(part) for part in base.moments(x))
    assert total.shape == (4, 4)
    assert np.allclose(total, np.cov(np.stack([np.ravel(d) for d in base._fitted(jnp.asarray(x))]).T), rtol=1e-3)
    law = prior().marginal(x)[1]
    assert np.linalg.eigvalsh(total - law).min() > 0  # the wider law in every direction
    wanted = scipy.stats.multivariate_normal(None, law).logpdf(f.ravel())
    wanted -= scipy.stats.multivariate_normal(mean.ravel(), total).logpdf(f.ravel())
    calibrated = fs.priors.CalibratedPrior(prior(), base)
    np.testing.assert_allclose(calibrated.log_prob(x, f), wanted, rtol=1e-3)
    np.testing.assert_allclose(calibrated.marginal(x)[1], law, atol=1e-3)
    assert calibrated.sample(jax.random.key(1), x, (3,)).shape == (3, 2, 2)
    independent = fs.priors.NetworkPrior(draw, jax.random.key(0), num_draws=500, num_outputs=2)
    with pytest.raises(ValueError, match="dependent in both prior and base"):
        fs.priors.CalibratedPrior(prior(), independent).log_prob(x, f)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: fs.priors.Helmholtz(ExpSquared, ExpSquared()),
            TypeError,
            "potential must be a tinygp kernel instance",
        ),
        (lambda: fs.priors.Helmholtz(ExpSquared(), 3.0), TypeError, r"stream must be .* got 3\.0"),
        (
            lambda: fs.priors.Helmholtz(Subspace(7, ExpSquared()), ExpSquared()),
            ValueError,
            "the kernel uses input 7 of x",
        ),
        (lambda: prior().log_prob(X[:, :1], F), ValueError, r"kernel of the plane, got inputs \[6, 1\]"),
        (lambda: prior(num_outputs=None).log_prob(X, F[:, 0]), ValueError, "matrix-valued kernel must return shape"),
        (lambda: prior(num_outputs=3).log_prob(X, np.ones((6, 3))), ValueError, "got .* with num_outputs=3"),
        (lambda: prior().log_prob(X, F[:, 0]), ValueError, r"f must have shape \[6, 2\]"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("rough", [Matern52(0.8, distance=distance.L2Distance()), RationalQuadratic(alpha=1.0)])
def test_a_kernel_whose_derivative_jumps_is_refused(rough):
    with pytest.raises(ValueError, match=r"derivative .* of stream jumps at x' = x"):
        fs.priors.Helmholtz(ExpSquared(), rough)


def test_parameters_may_be_random():
    """Inside a program the check is left out, and the gradient in a parameter is that of the closed form."""

    def value(variance):
        gp = fs.GPPrior(kernel(stream=variance), nugget=NUGGET, num_outputs=2)
        return gp.log_prob(jnp.asarray(X), jnp.asarray(F))

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(value))(1.3)
        numeric = (value(1.3 + 1e-4) - value(1.3 - 1e-4)) / 2e-4
    np.testing.assert_allclose(found, numeric, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1e3])
def test_smooth_kernels_of_any_lengthscale_are_taken(scale):
    fs.priors.Helmholtz(ExpSquared(scale), ExpSquared(scale))
