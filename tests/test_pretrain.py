"""Training of kernel parameters by marginal likelihood."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tinygp.kernels import ExpSquared, Kernel, Matern32, Polynomial

from numpyro_fspace.priors import GPPrior, fit_gp

RNG = np.random.default_rng(1)
X = RNG.uniform(-2, 2, size=(60, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RNG.normal(size=60)


def test_reaches_the_optimum_of_sklearn():
    """ARD squared exponential: the same evidence and predictions as L-BFGS in scikit-learn."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(1.0) * RBF([1.0, 1.0], (1e-2, 1e9)) + WhiteKernel(0.1)
    reference = GaussianProcessRegressor(kernel, alpha=0.0).fit(X, Y)
    fit = fit_gp(None, X, Y)
    assert fit.losses.shape == (500,) and fit.losses.dtype == np.float64
    np.testing.assert_allclose(-60 * fit.losses.min(), reference.log_marginal_likelihood_value_, atol=0.1)
    np.testing.assert_allclose(fit.noise_variance, reference.kernel_.k2.noise_level, rtol=0.05)
    new = RNG.uniform(-2, 2, size=(9, 2))
    mean, variance = fit.predict(X, Y, new)
    expected, deviation = reference.predict(new, return_std=True)
    np.testing.assert_allclose(mean, expected, atol=0.02)
    np.testing.assert_allclose(variance, deviation**2, rtol=0.1)
    assert fit.params["lengthscale"][1] > 5 * fit.params["lengthscale"][0]


@pytest.mark.slow
def test_loss_is_the_evidence():
    """The closed-form loss and its gradient, against the prior's density and its automatic gradient."""
    from numpyro_fspace.priors.fit import _negative_evidence

    y = RNG.normal(size=(60, 2))
    fit = fit_gp(ExpSquared(scale=0.7), X, y, noise_variance=0.2, num_steps=1)
    prior = GPPrior(ExpSquared(scale=0.7), num_outputs=2)
    expected = -prior.log_marginal_likelihood(X, y, 0.2) / 120
    np.testing.assert_allclose(fit.losses, [expected], rtol=1e-5)
    assert fit.prior.num_outputs == 2
    with jax.enable_x64(True):
        ours = jax.grad(lambda s: _negative_evidence((s * jnp.eye(60) + s**2 * X @ X.T)[None], jnp.asarray(y)[None]))
        plain = jax.grad(
            lambda s: -GPPrior(lambda a, b: s**2 * a @ b.T, num_outputs=2).log_marginal_likelihood(X, y, s)
        )
        np.testing.assert_allclose(ours(0.5), plain(0.5), rtol=1e-8)


def test_starts_at_the_scales_of_the_data():
    """One step returns the start: the variance of y, and median distances in units of each input's spread."""
    import scipy.spatial.distance

    fit = fit_gp(None, X * [1.0, 30.0], 5.0 * Y, num_steps=1)
    median = np.sqrt(np.median(scipy.spatial.distance.pdist(X / X.std(0), "sqeuclidean")))
    np.testing.assert_allclose(fit.params["variance"], np.var(5.0 * Y), rtol=1e-6)
    np.testing.assert_allclose(fit.params["lengthscale"], X.std(0) * [1.0, 30.0] * median, rtol=1e-6)


def test_known_noise_is_kept():
    """Variances of the targets: the loss is the evidence with them, and scikit-learn's optimum is reached."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    known = RNG.uniform(0.01, 1.0, size=60)
    reference = GaussianProcessRegressor(ConstantKernel(1.0) * RBF([1.0, 1.0], (1e-2, 1e9)), alpha=known).fit(X, Y)
    fit = fit_gp(None, X, Y, noise_variance=known)
    np.testing.assert_allclose(-60 * fit.losses.min(), reference.log_marginal_likelihood_value_, atol=0.1)
    np.testing.assert_array_equal(fit.noise_variance, known)
    two, each = np.stack([Y, 0.1 * X[:, 0]], 1), np.stack([known, known[::-1]], 1)
    fit = fit_gp(ExpSquared(scale=0.7), X, two, noise_variance=each, num_steps=1)
    expected = -GPPrior(ExpSquared(scale=0.7), num_outputs=2).log_marginal_likelihood(X, two, each) / 120
    np.testing.assert_allclose(fit.losses, [expected], rtol=1e-5)
    some = fit_gp(None, X, two, noise_variance=each, max_points=20, key=jax.random.key(0), num_steps=5)
    assert np.isfinite(some.losses).all()


def test_kernel_function_of_a_dict():
    """A user's own parameters; the prior keeps them as concrete values."""
    fit = fit_gp(lambda p: p["a"] * ExpSquared(scale=p["l"]), X, Y, params={"a": 1.0, "l": 2.0}, num_steps=60)
    assert set(fit.params) == {"a", "l"} and fit.losses[-1] < fit.losses[0]
    covariance = fit.prior.moments(X[:2])[1]
    r2 = np.sum((X[0] - X[1]) ** 2)
    np.testing.assert_allclose(covariance[0, 1], fit.params["a"] * np.exp(-r2 / 2 / fit.params["l"] ** 2))
    assert jnp.isfinite(fit.prior.log_prob(X, Y))


def test_kernel_instance_of_a_sum():
    fit = fit_gp(2.0 * ExpSquared(scale=0.5) + ExpSquared(scale=3.0), X, Y, num_steps=40)
    assert len(fit.params) == 3 and fit.losses[-1] < fit.losses[0]


def test_subset_of_large_data():
    """The subset is drawn by the key."""
    first, second = (fit_gp(None, X, Y, max_points=20, num_steps=1, key=jax.random.key(s)) for s in (0, 1))
    assert first.losses[0] != second.losses[0]


def test_a_constant_column_has_a_lengthscale_of_one_and_no_say():
    """0.1, which no binary number is: the deviation of equal numbers may be a rounding error and not zero."""
    x = np.linspace(-1.0, 1.0, 10)[:, None]
    with_constant = np.c_[x, np.full(10, 0.1)]
    assert with_constant.std(0)[1] > 0.0
    fits = [fit_gp(None, inputs, np.sin(3.0 * x[:, 0]), num_steps=20) for inputs in (x, with_constant)]
    assert fits[1].losses[-1] == pytest.approx(fits[0].losses[-1], rel=1e-4)
    assert 0.1 < fits[1].params["lengthscale"][1] < 10.0


@pytest.mark.slow
def test_noiseless_and_constant_targets_do_not_break():
    """The noise floor keeps the factorization alive, and a constant target has a scale of one."""
    for y in (np.sin(X[:, 0]), np.zeros(60)):
        fit = fit_gp(None, X, y, noise_variance=1e-3, learning_rate=0.3, num_steps=200)
        assert np.isfinite(fit.losses).all() and fit.noise_variance > 0


def test_best_iterate_is_returned(capsys):
    """A step size that overshoots: the parameters are those of the smallest loss, not the last."""
    fit = fit_gp(None, X, Y, learning_rate=2.0, num_steps=30)
    value = -fit.prior.log_marginal_likelihood(X, Y, fit.noise_variance) / 60
    np.testing.assert_allclose(value, np.nanmin(fit.losses), rtol=1e-3)
    assert not capsys.readouterr().err  # no progress bar away from a terminal


def test_progress_bar(capsys):
    fit_gp(None, X[:5], Y[:5], num_steps=3, progress=True)
    assert "fit_gp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: fit_gp(None, X[:, 0], Y), ValueError, r"x\[:, None\]"),
        (lambda: fit_gp(None, X, Y[:5]), ValueError, "y must have shape"),
        (lambda: fit_gp(None, X, np.where(Y > 0, np.nan, Y)), ValueError, "y holds NaN"),
        (lambda: fit_gp(None, X, Y, max_points=20), ValueError, "pass a key"),
        (lambda: fit_gp(None, X, Y, num_steps=0), ValueError, "num_steps"),
        (lambda: fit_gp(None, X, Y, noise_variance=0.0), ValueError, "noise_variance must be positive"),
        (lambda: fit_gp(None, X, Y, noise_variance=np.ones(5)), ValueError, r"or variances \[N\]"),
        (
            lambda: fit_gp(None, X, Y, noise_variance=np.ones(60), num_steps=1).predict(X, Y, X),
            ValueError,
            "new targets",
        ),
        (lambda: fit_gp(ExpSquared, X, Y), TypeError, "kernel must be"),
        (lambda: fit_gp(ExpSquared(scale=-1.0), X, Y), ValueError, "ExpSquared .* must be positive"),
        (lambda: fit_gp(lambda p: ExpSquared(scale=p["l"]), X, Y), ValueError, "params must give a kernel function"),
        (lambda: fit_gp(lambda p: p, X, Y, params={"l": -1.0}), ValueError, "params.'l'. must be positive"),
        (lambda: jax.jit(lambda x: fit_gp(None, x, Y).noise_variance)(X), TypeError, "concrete"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_kernel_that_is_no_covariance_is_named():
    """tinygp's Matérn 3/2 takes the L1 distance unless told otherwise, and has negative eigenvalues in the plane."""
    x = np.random.default_rng(0).normal(size=(40, 2))
    y = np.sin(2 * x[:, 0]) + 0.1 * x[:, 1]
    with pytest.warns(RuntimeWarning, match="not finite from step .*L2Distance"):
        fit_gp(1.0 * Matern32(1.0), x, y, noise_variance=0.1, num_steps=50)
    with pytest.raises(ValueError, match=r"not finite at the start: .*L2Distance"):
        fit_gp(1.0 * Matern32(1.0), x, y, noise_variance=0.01, num_steps=50)


def test_parameters_that_would_not_be_used_are_refused():
    x = np.linspace(-1.0, 1.0, 10)[:, None]
    for kernel in (None, ExpSquared(1.0)):
        with pytest.raises(ValueError, match="leave params out"):
            fit_gp(kernel, x, x[:, 0], params={"lengthscale": 0.01})


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e4])
def test_the_start_is_in_units_of_the_targets(unit):
    """A start of the noise in absolute units once led to interpolation where the targets were large."""
    random = np.random.default_rng(0)
    x = random.uniform(-1.0, 1.0, (60, 1))
    y = unit * (np.sin(4.0 * x[:, 0]) + 0.1 * random.normal(size=60))
    fit = fit_gp(None, x, y - y.mean(), num_steps=300)
    assert 0.05 < np.sqrt(fit.noise_variance) / unit < 0.2
    assert 0.2 < float(fit.params["lengthscale"][0]) < 1.0


@pytest.mark.slow
def test_equal_targets_do_not_vary_by_a_rounding_error():
    """Float64 numbers 0.1 have a computed variance of 1e-34, from which single precision could not start."""
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    fits = [fit_gp(None, x, np.full(20, 0.1, dtype), num_steps=20) for dtype in (np.float32, np.float64)]
    np.testing.assert_allclose(fits[1].losses, fits[0].losses, rtol=1e-4)
    with pytest.warns(RuntimeWarning, match="y has mean 123 and standard deviation 0,"):
        fit_gp(None, x, np.full(20, 123.4), num_steps=5)


def test_warns_of_targets_far_from_zero():
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    with pytest.warns(RuntimeWarning, match="subtract the mean"):
        fit_gp(None, x, 100.0 + x[:, 0], num_steps=5)


def test_warns_of_any_output_far_from_zero():
    """Means of outputs that cancel are far from zero all the same."""
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    with pytest.warns(RuntimeWarning, match="column 0 of y has mean 100"):
        fit_gp(None, x, np.concatenate([100.0 + x, 2.0 * x - 100.0], -1), num_steps=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"learning_rate": -1.0}, "learning_rate=-1.0 must be positive"), ({"num_steps": 60.0}, "num_steps")],
)
def test_refuses_other_settings(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit_gp(None, np.zeros((3, 1)), np.arange(3.0), **settings)


@pytest.mark.parametrize("order", [2, 2.0, np.int64(2), jnp.asarray(2)], ids=["int", "float", "NumPy", "JAX"])
def test_an_order_is_held(order):
    fit = fit_gp(1.0 * Polynomial(order=order, sigma=1.0), X, Y, num_steps=20)
    assert fit.params["1"] == 2 and fit.prior.kernel.kernel2.order == 2
    assert abs(fit.params["0"] - 1.0) > 0.05


def test_integers_are_held_but_those_that_stand_for_real_numbers():
    class Own(Kernel):
        degree: int
        is_smooth: bool
        scale: float

        def evaluate(self, a, b):
            return jnp.exp(-self.scale * jnp.sum((a - b) ** 2)) * self.degree

    fit = fit_gp(2 * Own(3, True, 1), X, Y, num_steps=20)
    assert fit.params["1"] == 3 and fit.params["2"] is True
    assert abs(fit.params["0"] - 2.0) > 0.05 and abs(fit.params["3"] - 1.0) > 0.05
