"""CalibratedPrior: with the weights' own law as base, the law of f at the points is the prior's wherever it can be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from support.tiers import some

import numpyro_fspace as fs

pytestmark = pytest.mark.usefixtures("x64")

X = np.linspace(-1.0, 1.0, 6)[:, None]
FEATURES = np.random.default_rng(0).normal(size=(6, 9))
SD = 3.0
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.6), nugget=0.05)


class Linear(fs.priors.GaussianProcess):
    """The exact law of f = Φw at X for w ~ N(center, sd²)."""

    def __init__(self, sd=SD, center=0.0, features=FEATURES, num_outputs=None):
        super().__init__(num_outputs, None)
        self.sd, self.center, self.features = sd, center, features

    def mean_function(self, x):
        return jnp.broadcast_to(self.center * self.features.sum(-1)[:, None], (len(x), self.num_outputs or 1))

    def covariance_function(self, x1, x2):
        return self.sd**2 * (self.features @ self.features.T)[None] * jnp.ones((len(x1), len(x2)))


def law_of_f(prior, sd=SD, center=0.0, features=FEATURES):
    """Mean and covariance of f(X) under w ~ N(center, sd²) times exp(log_prob(X, Φw)), which is Gaussian in w."""

    def log_density(w):
        return prior.log_prob(X, features @ w) - 0.5 * jnp.sum((w - center) ** 2) / sd**2

    zero = jnp.zeros(features.shape[1])
    covariance = np.linalg.inv(-jax.hessian(log_density)(zero))
    return features @ covariance @ jax.grad(log_density)(zero), features @ covariance @ features.T


@pytest.mark.slow
def test_wide_weights_give_the_prior_itself():
    """Nine weights, six points: the network can do everything, with more variance than the prior in each direction."""
    prior = fs.priors.CalibratedPrior(GP, Linear())
    mean, covariance = law_of_f(prior)
    wanted = GP.marginal(X)
    assert np.allclose(mean, wanted[0], atol=1e-8)
    assert np.allclose(covariance, wanted[1], atol=1e-8)


@pytest.mark.slow
def test_the_plain_product_does_not():
    assert not np.allclose(law_of_f(GP)[1], GP.marginal(X)[1], rtol=0.02)


@pytest.mark.parametrize("sd", [0.01, 0.2, 0.5, 3.0])
@pytest.mark.parametrize("num_weights", some([3, 9], 1))
def test_law_is_that_of_base_and_ratio_together(sd, num_weights):
    """Also where the network is narrower than the prior, or cannot move at all (three weights, six points)."""
    features = FEATURES[:, :num_weights]
    gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.6), nugget=0.05, mean=0.4)
    prior = fs.priors.CalibratedPrior(gp, Linear(sd, 0.1, features))
    mean, covariance = law_of_f(prior, sd, 0.1, features)
    assert np.allclose(prior.marginal(X)[0], mean, atol=1e-7)
    assert np.allclose(prior.marginal(X)[1], covariance, atol=1e-7)


@pytest.mark.parametrize("sd", [0.2, 3.0])
def test_no_direction_is_wider_than_prior_or_base(sd):
    covariance = fs.priors.CalibratedPrior(GP, Linear(sd)).marginal(X)[1]
    for bound in (GP.marginal(X)[1], Linear(sd).moments(X)[1]):
        assert np.linalg.eigvalsh(bound - covariance).min() > -1e-9


def test_a_narrow_base_is_left_alone():
    prior = fs.priors.CalibratedPrior(GP, Linear(sd=0.01))
    assert float(prior.log_prob(X, jnp.ones(6))) == 0.0


def test_the_ratio_has_mean_one_under_the_base():
    prior, base = fs.priors.CalibratedPrior(GP, Linear(0.6)), Linear(0.6)
    root = np.linalg.cholesky(base.moments(X)[1] + 1e-12 * np.eye(6))
    draws = jax.random.normal(jax.random.key(0), (200_000, 6)) @ root.T
    ratio = np.exp(jax.vmap(lambda f: prior.log_prob(X, f))(draws))
    assert abs(ratio.mean() - 1.0) < 5.0 * ratio.std() / np.sqrt(ratio.size)


def test_correction_is_at_most_as_stiff_as_the_prior():
    prior = fs.priors.CalibratedPrior(GP, Linear(100.0))
    stiffness = -jax.hessian(lambda f: prior.log_prob(X, f))(jnp.zeros(6))
    precision = np.linalg.inv(GP.marginal(X)[1])
    assert np.linalg.eigvalsh(precision - stiffness).min() > -1e-9
    assert np.linalg.eigvalsh(stiffness).min() > -1e-9


def test_traced_points_give_what_fixed_ones_do():
    prior = fs.priors.CalibratedPrior(GP, Linear())
    f = jnp.linspace(-1.0, 1.0, 6)
    assert np.allclose(jax.jit(prior.log_prob)(X, f), prior.log_prob(X, f), rtol=1e-8)


def test_several_outputs():
    kernels = [tinygp.kernels.ExpSquared(0.6), 2.0 * tinygp.kernels.ExpSquared(0.3)]
    prior = fs.priors.CalibratedPrior(fs.GPPrior(kernels, nugget=0.05), Linear(num_outputs=2))
    singles = [fs.priors.CalibratedPrior(fs.GPPrior(k, nugget=0.05), Linear()) for k in kernels]
    f = jax.random.normal(jax.random.key(0), (6, 2))
    assert np.isclose(prior.log_prob(X, f), sum(p.log_prob(X, f[:, i]) for i, p in enumerate(singles)))
    for i, single in enumerate(singles):
        assert np.allclose(prior.marginal(X)[1][i], single.marginal(X)[1])
    assert prior.sample(jax.random.key(1), X, (3,)).shape == (3, 6, 2)


def test_draws_follow_the_law():
    prior = fs.priors.CalibratedPrior(fs.GPPrior(tinygp.kernels.ExpSquared(0.6), nugget=0.05, mean=0.4), Linear(0.3))
    draws = np.asarray(prior.sample(jax.random.key(0), X, (100_000,)))
    mean, covariance = prior.marginal(X)
    assert np.allclose(draws.mean(0), mean, atol=0.02)
    assert np.allclose(np.cov(draws.T), covariance, atol=0.03)


@pytest.mark.slow
def test_base_of_a_network_from_draws():
    """A wide network's law is nearly Gaussian; its base, fitted to draws, brings f(X) to the prior under NUTS."""
    from flax import linen as nn
    from numpyro.infer import MCMC, NUTS

    network = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(1)])
    x, weights = np.array([[-0.7], [0.0], [0.8]]), fs.fan_in(3.0)
    base = fs.priors.NetworkPrior(
        fs.model.random_function(network, input_shape=1, prior=weights), jax.random.key(0), num_draws=5000
    )
    gp = fs.GPPrior(tinygp.kernels.ExpSquared(1.0), nugget=0.02)

    def model(prior):
        f = fs.random_module("net", network, input_shape=1, prior=weights)
        f = fs.functional_prior("f", f, prior, x)
        numpyro.deterministic("fx", f(x)[:, 0])
        numpyro.sample("y", dist.Normal(0.0, 1e6), obs=0.0)

    scatter, calibrated = {}, fs.priors.CalibratedPrior(gp, base)
    for name, prior in {"calibrated": calibrated, "product": gp}.items():
        mcmc = MCMC(NUTS(model, max_tree_depth=6), num_warmup=200, num_samples=1000, progress_bar=False)
        mcmc.run(jax.random.key(1), prior)
        white = np.linalg.solve(np.linalg.cholesky(gp.marginal(x)[1]), mcmc.get_samples()["fx"].T)
        scatter[name] = np.linalg.eigvalsh(np.cov(white))
    assert np.allclose(scatter["calibrated"], 1.0, atol=0.15), scatter
    wide = calibrated._basis(x).variance.ravel()  # of the network, in the prior's own coordinates
    assert wide.min() > 2.0
    assert np.allclose(scatter["product"], wide / (1.0 + wide), atol=0.15), scatter
    assert scatter["product"].min() < 0.92


def test_variational_divergences_read_its_law():
    prior = fs.priors.CalibratedPrior(GP, Linear())
    mean, covariance = prior.marginal(X)

    class Same:
        def mean(self, x):
            return jnp.asarray(mean)[:, None]

        def root(self, x):
            return jnp.linalg.cholesky(covariance)[:, None]

    assert abs(float(fs.variational.RegularizedKL()(Same(), prior, X))) < 1e-6
    assert float(fs.variational.RegularizedKL()(Same(), fs.GPPrior(tinygp.kernels.ExpSquared(0.3)), X)) > 0.1


@pytest.mark.parametrize(
    ("prior", "base", "error", "match"),
    [
        (fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(), df=3.0), Linear(), TypeError, "prior must be Gaussian"),
        (GP, 3.0, TypeError, "base must be Gaussian"),
        (GP, Linear(num_outputs=2), ValueError, "num_outputs"),
    ],
)
def test_bad_arguments_are_refused(prior, base, error, match):
    with pytest.raises(error, match=match):
        fs.priors.CalibratedPrior(prior, base)


def test_a_prior_without_a_factor_is_refused():
    prior = fs.priors.CalibratedPrior(fs.GPPrior(tinygp.kernels.ExpSquared(1e3), nugget=1e-30), Linear())
    with pytest.raises(ValueError, match="not positive definite"):
        prior.log_prob(X, jnp.zeros(6))
    with pytest.raises(ValueError, match="f must have shape"):
        fs.priors.CalibratedPrior(GP, Linear()).log_prob(X, jnp.zeros(5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["net", "network"])
def test_its_own_network_is_no_function_of_the_model(name):
    """Linearized at its own weights a model keeps its density: the prior's random networks are not replaced."""
    from flax import linen as nn
    from numpyro import handlers
    from numpyro.infer.util import log_density

    net = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(1)])
    draw = fs.model.random_function(net, input_shape=1, prior=fs.fan_in(3.0))
    prior = fs.priors.CalibratedPrior(GP, fs.priors.NetworkPrior(draw, jax.random.key(0), num_draws=100))

    def model(x):
        f = fs.random_module(name, net, input_shape=1, prior=fs.fan_in(3.0))
        f = fs.functional_prior("f", f, prior, X)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1).to_event(1), obs=jnp.ones(len(x)))

    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X)
    weights = {k: site["value"] for k, site in trace.items() if k.startswith(name + ".")}
    linearized = log_density(fs.variational.linearize(model, weights), (X,), {}, weights)[0]
    np.testing.assert_allclose(linearized, log_density(model, (X,), {}, weights)[0], rtol=1e-8)
