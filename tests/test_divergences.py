"""Divergences by draws and by transport: closed forms, broken twins, guides that are not Gaussian."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoBNAFNormal, AutoIAFNormal, AutoMultivariateNormal
from scipy.linalg import sqrtm
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.variational.pushforward import LinearizedPushforward, SampledPushforward
from numpyro_fspace.variational.sampled_divergences import spectral_stein_score, wasserstein1

X = jnp.array([[-1.0], [-0.4], [0.1], [0.5], [0.9]])
Y = jnp.array([0.3, -0.7, 0.2, 1.1, 0.6])
POINTS = jnp.array([[-1.2], [-0.3], [0.8]])
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=0.1, mean=0.2)
LOC, SD = jnp.array([0.3, -0.5, 0.8]), jnp.array([0.4, 0.7, 0.2])


def features(x):
    return jnp.stack([jnp.ones_like(x[:, 0]), x[:, 0], jnp.sin(2.0 * x[:, 0])], 1)


def function(w, x):
    return (features(x) @ w)[:, None]


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
    f = fs.functional_prior("f", lambda x: features(x) @ w, GP, POINTS)
    numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)


def exact_posterior():
    """Mean and covariance of w under the likelihood and the GP prior at ``POINTS``, and no prior of its own."""
    phi, phi_m = np.asarray(features(X)), np.asarray(features(POINTS))
    mean, covariance = GP.marginal(POINTS)
    precision = phi.T @ phi / 0.25 + phi_m.T @ np.linalg.solve(covariance, phi_m)
    return np.linalg.solve(precision, phi.T @ Y / 0.25 + phi_m.T @ np.linalg.solve(covariance, mean)), precision


# ---- the spectral Stein score --------------------------------------------------------------------------------

ROOT = np.array([[1.0, 0.0], [0.6, 0.5]])


def score_error(num_draws, seed=0, sign=1.0):
    """Root mean squared error of the score of a Gaussian, relative to the score's size."""
    draws = 1.0 + jax.random.normal(jax.random.key(seed), (num_draws, 2)) @ ROOT.T
    exact = -(draws - 1.0) @ np.linalg.inv(ROOT @ ROOT.T)
    return float(jnp.sqrt(jnp.mean((sign * spectral_stein_score(draws) - exact) ** 2) / jnp.mean(exact**2)))


@pytest.mark.slow
def test_score_of_a_gaussian():
    errors = [np.mean([score_error(num, seed) for seed in range(5)]) for num in (50, 200, 800)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.3
    assert score_error(800, sign=-1.0) > 1.5


def test_score_moves_with_the_draws_and_shrinks_with_their_scale():
    draws = jax.random.normal(jax.random.key(0), (100, 3))
    np.testing.assert_allclose(spectral_stein_score(draws + 5.0), spectral_stein_score(draws), atol=1e-2)
    np.testing.assert_allclose(spectral_stein_score(4.0 * draws), spectral_stein_score(draws) / 4.0, atol=1e-3)


@pytest.mark.slow
def test_score_elsewhere_is_extended_from_the_draws():
    draws = 1.0 + jax.random.normal(jax.random.key(0), (800, 2)) @ ROOT.T
    np.testing.assert_allclose(spectral_stein_score(draws, at=draws), spectral_stein_score(draws), atol=0.02)
    at = jnp.array([[1.5, 1.5], [0.5, 1.0], [1.0, 0.4]])
    exact = -(at - 1.0) @ np.linalg.inv(ROOT @ ROOT.T)
    np.testing.assert_allclose(spectral_stein_score(draws, at=at), exact, atol=0.7)
    assert np.abs(spectral_stein_score(draws, at=100.0 + at)).max() < 1e-6


# ---- SpectralSteinKL -----------------------------------------------------------------------------------------


def kl_gradient(divergence, params, seeds=range(8)):
    def value(params, key):
        law = SampledPushforward(function, lambda k: params[0] + params[1] * jax.random.normal(k, (3,)), key)
        return divergence(law, GP, POINTS)

    grads = [jax.grad(value)(params, jax.random.key(seed)) for seed in seeds]
    return [np.mean([g[i] for g in grads], 0) for i in range(2)]


@pytest.mark.slow
def test_gradient_is_that_of_the_exact_kl():
    """Of KL(N(Φm, ΦSΦᵀ + noise) ‖ N(m_p, K + nugget)), in the mean and the spread of the weights."""
    noise = 0.1
    phi, (mean, covariance) = features(POINTS), GP.marginal(POINTS)

    def exact(params):
        q = dist.MultivariateNormal(phi @ params[0], (phi * params[1] ** 2) @ phi.T + noise * jnp.eye(3))
        p = dist.MultivariateNormal(jnp.asarray(mean, float), jnp.asarray(covariance, float))
        return dist.kl_divergence(q, p)

    wanted = jax.grad(exact)((LOC, SD))
    found = kl_gradient(fs.variational.SpectralSteinKL(num_draws=500, noise=noise), (LOC, SD))
    for got, exact_part in zip(found, wanted, strict=True):
        assert np.linalg.norm(got - exact_part) < 0.15 * np.linalg.norm(exact_part)


@pytest.mark.slow
def test_without_the_entropy_the_gradient_is_another(monkeypatch):
    monkeypatch.setattr("numpyro_fspace.variational.sampled_divergences.spectral_stein_score", lambda f, _: 0.0 * f)
    crossed = kl_gradient(fs.variational.SpectralSteinKL(num_draws=500, noise=0.1), (LOC, SD))
    monkeypatch.undo()
    full = kl_gradient(fs.variational.SpectralSteinKL(num_draws=500, noise=0.1), (LOC, SD))
    assert np.linalg.norm(crossed[1] - full[1]) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide", [fs.variational.guides.mean_field, AutoMultivariateNormal, AutoIAFNormal, AutoBNAFNormal]
)
def test_it_finds_the_exact_mean_with_any_guide(guide):
    made = guide(model)
    loss = fs.FunctionalELBO(fs.variational.SpectralSteinKL(num_draws=40, noise=1e-3), num_particles=10)
    svi = SVI(model, made, optax.adam(optax.cosine_decay_schedule(0.03, 1500)), loss)
    result = svi.run(jax.random.key(0), 1500, X, Y, progress_bar=False)
    w = made.sample_posterior(jax.random.key(1), result.params, sample_shape=(2000,))["w"]
    mean, precision = exact_posterior()
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert np.all(np.abs(w.mean(0) - mean) < 0.5 * sd)


@pytest.mark.slow
def test_a_prior_that_is_not_gaussian():
    prior = fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(0.7), df=4.0, nugget=0.1)

    def divergence_at(shift):
        center = LOC.at[0].add(shift)
        law = SampledPushforward(function, lambda key: center + SD * jax.random.normal(key, (3,)), jax.random.key(0))
        return fs.variational.SpectralSteinKL()(law, prior, POINTS)

    assert jax.grad(divergence_at)(5.0) > 0.0 > jax.grad(divergence_at)(-5.0)  # back to the prior's mean
    law = LinearizedPushforward(function, LOC, lambda rows: rows * SD)
    for divergence in (fs.variational.Wasserstein2(), fs.variational.RegularizedKL()):
        with pytest.raises(TypeError, match=r"needs a Gaussian prior.*SpectralSteinKL"):
            divergence(law, prior, POINTS)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [({"num_draws": 1}, ValueError), ({"noise": 0.0}, ValueError), ({"explained": 1.5}, ValueError)],
)
def test_bad_arguments_are_refused(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        fs.variational.SpectralSteinKL(**kwargs)


# ---- Wasserstein2 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_points", some([50, 500], 1))
def test_the_distance_to_the_prior_itself_is_that_of_the_nugget(num_points):
    """In float32, where eigenvalues of a Gram matrix keep half of the digits: M roots of them add up to a distance."""
    x, nugget = jnp.linspace(-1.0, 1.0, num_points)[:, None], 1e-3
    prior = fs.GPPrior(lambda a, b: 1.0 + a @ b.T, nugget=nugget)

    def distance(sd):
        line = LinearizedPushforward(
            lambda w, x: (w[0] + w[1] * x[:, 0])[:, None], jnp.zeros(2), lambda rows: rows * sd
        )
        return fs.variational.Wasserstein2()(line, prior, x)

    value, slope = jax.value_and_grad(distance)(1.0)
    trace = num_points * 4 / 3
    np.testing.assert_allclose(value, (num_points - 2) * nugget, atol=1e-6 * trace)  # a line has two directions
    np.testing.assert_allclose(slope, 0.0, atol=1e-2 * trace)  # the nugget moves the optimum a little


def gaussian_w2(mean_q, cov_q, mean_p, cov_p):
    root = sqrtm(np.asarray(cov_p, float)).real
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ np.asarray(cov_q, float) @ root), 0.0)).sum()
    return np.sum((mean_q - mean_p) ** 2) + np.trace(cov_q + cov_p) - 2 * cross


@pytest.mark.parametrize("num_points", some([2, 3, 7], 1))
def test_wasserstein_is_the_closed_form(num_points, x64):
    """Also where the network's law is degenerate: three weights, seven points."""
    points = jnp.linspace(-1.0, 1.0, num_points)[:, None]
    found = fs.variational.Wasserstein2()(LinearizedPushforward(function, LOC, lambda rows: rows * SD), GP, points)
    phi = np.asarray(features(points))
    assert np.isclose(found, gaussian_w2(phi @ LOC, (phi * SD**2) @ phi.T, *GP.marginal(points)), rtol=1e-5)


@pytest.mark.slow
def test_wasserstein_of_two_outputs_is_the_sum(x64):
    double = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=0.1, mean=0.2, num_outputs=2)
    both = LinearizedPushforward(
        lambda w, x: jnp.stack([features(x) @ w[:3], features(x) @ w[3:]], 1),
        jnp.concatenate([LOC, -LOC]),
        lambda rows: rows * jnp.concatenate([SD, SD]),
    )
    parts = [LinearizedPushforward(function, loc, lambda rows: rows * SD) for loc in (LOC, -LOC)]
    total = sum(fs.variational.Wasserstein2()(part, GP, POINTS) for part in parts)
    assert np.isclose(fs.variational.Wasserstein2()(both, double, POINTS), total)


@pytest.mark.slow
def test_wasserstein_has_a_gradient_where_the_law_is_degenerate():
    points = jnp.linspace(-1.0, 1.0, 20)[:, None]

    def value(sd):
        return fs.variational.Wasserstein2()(LinearizedPushforward(function, LOC, lambda rows: rows * sd), GP, points)

    gradient, step = jax.grad(value)(SD), 1e-2
    numeric = [(value(SD.at[i].add(step)) - value(SD.at[i].add(-step))) / (2 * step) for i in range(3)]
    np.testing.assert_allclose(gradient, numeric, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_full_covariance_guides_reach_the_exact_posterior():
    """The Gaussian divergences take NumPyro's AutoMultivariateNormal too."""
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, 3000)), fs.FunctionalELBO())
    result = svi.run(jax.random.key(0), 3000, X, Y, progress_bar=False)
    law = guide.get_posterior(result.params)
    mean, precision = exact_posterior()
    np.testing.assert_allclose(law.loc, mean, atol=0.02)
    np.testing.assert_allclose(law.covariance_matrix @ precision, np.eye(3), atol=0.1)


# ---- Wasserstein1 --------------------------------------------------------------------------------------------


def normals_w1(shift, sd_f, sd_g):
    """∫ |F⁻¹ - G⁻¹| of two univariate normals, by quadrature."""
    z = np.linspace(-8.0, 8.0, 20_001)
    return np.trapezoid(np.abs(shift + (sd_f - sd_g) * z) * np.exp(-0.5 * z**2), z) / np.sqrt(2.0 * np.pi)


def estimate(shift, sd_f, sd_g, *, dims=1, num_steps=400, num_draws=2000, seeds=3):
    def one(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        f = shift + sd_f * jax.random.normal(keys[0], (num_draws, dims))
        return wasserstein1(f, sd_g * jax.random.normal(keys[1], (num_draws, dims)), keys[2], num_steps)

    return np.mean([one(seed) for seed in range(seeds)])


@pytest.mark.slow
@pytest.mark.parametrize("shift, sd_f, sd_g", [(1.0, 1.0, 1.0), (0.0, 1.0, 2.0), (3.0, 1.0, 0.1)])
def test_critic_against_the_closed_form(shift, sd_f, sd_g):
    """At most the distance, and nearly all of it (.15: the standard error of three times 2000 draws is .03)."""
    exact = normals_w1(shift, sd_f, sd_g)
    assert 0.85 * exact - 0.05 < estimate(shift, sd_f, sd_g) < exact + 0.1


@pytest.mark.slow
def test_a_trained_critic_sees_more_than_shift_and_scale():
    exact = normals_w1(0.5, 0.3, 1.0)
    start, trained = (estimate(0.5, 0.3, 1.0, num_steps=n) for n in (0, 1500))
    assert start < 0.65 * exact and 0.8 * exact < trained < 1.05 * exact


@pytest.mark.slow
def test_equal_laws_are_at_no_distance():
    assert abs(estimate(0.0, 1.0, 1.0, dims=10, num_steps=50)) < 0.15


@pytest.mark.slow
def test_scale_in_many_dimensions():
    """W1 between N(0, I) and N(0, 4 I) in D dimensions is E|z| ≈ √D."""
    assert 0.8 * np.sqrt(40) < estimate(0.0, 1.0, 2.0, dims=40, num_steps=20, num_draws=400) < np.sqrt(40)


@pytest.mark.slow
def test_distance_scales_with_the_values():
    keys = jax.random.split(jax.random.key(0), 3)
    f, g = jax.random.normal(keys[0], (100, 3)), 1.0 + jax.random.normal(keys[1], (100, 3))
    one, ten = (wasserstein1(c * f, c * g, keys[2]) for c in (1.0, 10.0))
    np.testing.assert_allclose(ten, 10.0 * one, rtol=1e-3)


def descend(divergence, start, num_steps=400):
    """Mean and sd of independent normal values at two points that minimize the divergence from ``GP``."""
    x = jnp.array([[0.0], [3.0]])  # so far apart that the prior's values are independent

    def value(params, key):
        law = SampledPushforward(
            lambda w, x: w[:, None], lambda k: params[0] + params[1] * jax.random.normal(k, (2,)), key
        )
        return divergence(law, GP, x)

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, num_steps))

    def step(carry, key):
        params, state = carry
        updates, state = optimizer.update(jax.grad(value)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), num_steps)
    (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    return params


@pytest.mark.slow
def test_wasserstein1_draws_a_law_to_the_prior():
    loc, sd = descend(fs.variational.Wasserstein1(), (jnp.array([2.0, -2.0]), jnp.array([0.2, 3.0])))
    np.testing.assert_allclose(loc, [0.2, 0.2], atol=0.15)
    np.testing.assert_allclose(jnp.abs(sd), np.full(2, np.sqrt(1.1)), atol=0.15)


def test_variance_term():
    """It is the sum over points of the differences of the variances."""
    key, f = jax.random.key(0), 2.0 * jax.random.normal(jax.random.key(1), (4000, 3, 1))
    off, on = (
        fs.variational.Wasserstein1(variance_weight=w, num_critic_steps=0).between(f, GP, POINTS, key)
        for w in (0.0, 1.0)
    )
    np.testing.assert_allclose(on - off, 3 * (4.0 - 1.1), rtol=0.1)


# ---- BridgeWasserstein ---------------------------------------------------------------------------------------


def bridged(x, y=None):
    scale = numpyro.param("scale", 0.5, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    line = fs.GPPrior(lambda a, b: 4.0 * (1.0 + a @ b.T), nugget=1e-3)  # of lines whose weights are N(0, 2²)
    f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0], line, POINTS)
    numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)


@pytest.mark.slow
def test_the_bridge_learns_the_prior_and_the_guide_the_posterior_under_it():
    guide = AutoMultivariateNormal(bridged)
    loss = fs.FunctionalELBO(fs.variational.BridgeWasserstein(strength=10.0), num_particles=10)
    svi = SVI(bridged, guide, optax.adam(optax.cosine_decay_schedule(0.03, 1500)), loss)
    params = svi.run(jax.random.key(0), 1500, X, Y, progress_bar=False).params
    assert 1.5 < params["scale"] < 2.5
    phi = np.stack([np.ones(5), X[:, 0]], 1)
    precision = phi.T @ phi / 0.25 + np.eye(2) / params["scale"] ** 2
    w = guide.sample_posterior(jax.random.key(1), params, sample_shape=(4000,))["w"]
    np.testing.assert_allclose(w.mean(0), np.linalg.solve(precision, phi.T @ Y / 0.25), atol=0.05)
    np.testing.assert_allclose(np.cov(w.T), np.linalg.inv(precision), atol=0.02)


@pytest.mark.slow
def test_without_parameters_the_bridge_s_gradient_is_the_weights_kl():
    """Against the closed form of KL(N(m, s²) ‖ N(0, 1)); the distance does not depend on the guide."""
    guide = fs.variational.guides.mean_field(model)
    loss = fs.FunctionalELBO(fs.variational.BridgeWasserstein(num_draws=400))
    given = {"auto_loc": LOC, "auto_scale": SD}

    def value(params, loss):
        with numpyro.handlers.block():
            return loss.loss(jax.random.key(0), params, model, guide, X, Y)

    SVI(model, guide, optax.adam(0.1), loss).init(jax.random.key(0), X, Y)
    plain = fs.FunctionalELBO(lambda law, prior, x: 0.0, num_particles=1)
    plain.linearized = False  # the same draws of the likelihood
    found = jax.tree.map(jnp.subtract, jax.grad(value)(given, loss), jax.grad(value)(given, plain))
    np.testing.assert_allclose(found["auto_loc"], LOC, atol=0.1)
    np.testing.assert_allclose(found["auto_scale"], SD - 1.0 / SD, atol=0.15)


@pytest.mark.parametrize("scale, factor", [(0.1, 1.0), (jnp.array(2.0), 1.0), (1.0, 3.0)])
def test_a_bridge_counts_the_weights_once(scale, factor):
    gp = fs.GPPrior(lambda a, b: a @ b.T, nugget=0.1)

    def scaled(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.handlers.scale(scale=factor):
            fs.functional_prior("f", lambda x: w * x[:, 0], gp, POINTS, scale=scale)
        numpyro.sample("y", dist.Normal(w, 1.0), obs=0.0)

    with pytest.raises(ValueError, match=r"BridgeWasserstein includes the KL.*one functional_prior, with scale=1"):
        loss = fs.FunctionalELBO(fs.variational.BridgeWasserstein())
        svi = SVI(scaled, fs.variational.guides.mean_field(scaled), optax.adam(0.1), loss)
        svi.run(jax.random.key(0), 1, X, progress_bar=False)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fs.variational.Wasserstein1(num_draws=5), "num_draws=5 must be even"),
        (lambda: fs.variational.Wasserstein1(num_critic_steps=-1), "num_critic_steps"),
        (lambda: fs.variational.Wasserstein1(variance_weight=-1.0), "variance_weight=-1.0 must not be negative"),
        (lambda: fs.variational.BridgeWasserstein(strength=0.0), "strength"),
        (
            lambda: fs.variational.BridgeWasserstein(distance=2.0),
            "distance must be an object such as fs.variational.Wasserstein1",
        ),
    ],
)
def test_bad_arguments_of_transport(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# ---- what the prior depends on -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prior_with_random_parameters_is_averaged_over_them():
    """Of an amplitude log a ~ N(m, s²) the mean variance is exp(2m + 2s²), and not exp(2m)."""

    def random_amplitude(x, y=None):
        log_a = numpyro.sample("a", dist.Normal(0.3, 1.0))
        gp = fs.GPPrior(jnp.exp(2.0 * log_a) * tinygp.kernels.ExpSquared(0.7), nugget=0.1)
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, gp, POINTS)
        numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)

    guide = fs.variational.guides.mean_field(random_amplitude, init_scale=0.4)

    def loss(divergence):
        svi = SVI(random_amplitude, guide, optax.adam(0.01), fs.FunctionalELBO(divergence, num_particles=4000))
        state = svi.init(jax.random.key(0), X, Y)
        return svi.evaluate(state, X, Y), svi.get_params(state)

    found, params = loss(lambda law, prior, x: prior.moments(x)[1][0, 0])
    law = guide.get_posterior(params)
    place = list(random_amplitude_sites(guide)).index("a")
    expected = np.exp(2.0 * law.mean[place] + 2.0 * law.variance[place])
    np.testing.assert_allclose(found - loss(lambda law, prior, x: 0.0)[0], expected, rtol=0.05)
    assert expected > 1.3 * np.exp(2.0 * law.mean[place]), "the check has power"


def random_amplitude_sites(guide):
    """Names of the flat position's entries."""
    return [name for name, value in sorted(guide._init_locs.items()) for _ in range(value.size)]


@pytest.mark.slow
def test_a_prior_that_says_nothing_of_outputs_gets_what_the_function_returns():
    class White:
        def log_prob(self, x, f):
            return dist.Normal(x[:, 0], 1.0).log_prob(f).sum()

        def sample(self, key, x, sample_shape=()):
            return x[:, 0] + jax.random.normal(key, (*sample_shape, len(x)))

    class Single(White):
        num_outputs = None

    def loss(prior):
        def line(x, y=None):
            w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
            f = fs.functional_prior("f", lambda x: features(x) @ w, prior, POINTS)
            numpyro.sample("y", dist.Normal(f(x), 0.5), obs=y)

        svi = SVI(
            line,
            fs.variational.guides.mean_field(line),
            optax.adam(0.01),
            fs.FunctionalELBO(fs.variational.SpectralSteinKL()),
        )
        return svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y)

    np.testing.assert_allclose(loss(White()), loss(Single()), rtol=1e-6)
