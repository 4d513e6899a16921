"""Laplace, ensembles, variational implicit processes and sparse Gaussian processes against exact answers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
import tinygp
from models import Independent
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.baselines import curvature, ensemble, fit_svgp, implicit_process, laplace
from numpyro_fspace.baselines.curvature import CurvedModel
from numpyro_fspace.baselines.linearized_laplace import dual, primal
from numpyro_fspace.model.potential import ModelPotential

KEY = jax.random.key(0)
X = np.array([[-1.0], [-0.4], [0.1], [0.5], [0.9]])
Y = np.array([0.3, -0.7, 0.2, 1.1, 0.6])
POINTS = np.array([[-1.2], [-0.3], [0.4], [1.5]])
GRID = np.linspace(-1.5, 1.5, 7)[:, None]
SIGMA, NUGGET = 0.5, 0.1
PRIOR = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=NUGGET)
PRIOR_SD = np.array([1.0, 2.0, 0.5])


def features(x):
    return jnp.stack([jnp.ones_like(x[:, 0]), x[:, 0], jnp.sin(2.0 * x[:, 0])], 1)


def on_features():
    """The network Φ w, as a pair."""
    return lambda key, shape: {"w": jax.random.normal(key, (3, 1))}, lambda p, x: features(x) @ p["w"]


def tiny(num_outputs=1):
    """A network of three hidden units, as a pair."""

    def init(key, shape):
        k1, k2 = jax.random.split(key)
        w1, w2 = jax.random.normal(k1, (1, 3)), jax.random.normal(k2, (3, num_outputs))
        return {"w1": w1, "b1": jnp.zeros(3), "w2": w2, "b2": jnp.zeros(num_outputs)}

    return init, lambda p, x: jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def weight_prior(path, shape):
    return dist.Normal(0.0, PRIOR_SD[:, None].astype(np.float32))


def linear(x, y=None, *, points=None, batch=None, scale=1.0):
    """f = Φ w, w ~ N(0, diag PRIOR_SD²), Gaussian noise, maybe a GP prior."""
    f = fs.random_module("net", on_features(), input_shape=1, prior=weight_prior)
    if points is not None:
        f = fs.functional_prior("f", f, PRIOR, points, scale=scale)
    with numpyro.plate("data", len(x), subsample_size=batch):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f(xb)[:, 0], SIGMA), obs=yb)


def exact(points=None, scale=1.0, prior=True):
    """Mean and covariance of w."""
    phi = np.asarray(features(X), np.float64)
    precision = phi.T @ phi / SIGMA**2 + prior * np.diag(PRIOR_SD**-2.0)
    if points is not None:
        phi_m = np.asarray(features(points), np.float64)
        covariance = np.exp(-0.5 * ((points - points.T) / 0.7) ** 2) + NUGGET * np.eye(len(points))
        precision += scale * phi_m.T @ np.linalg.solve(covariance, phi_m)
    return np.linalg.solve(precision, phi.T @ Y / SIGMA**2), np.linalg.inv(precision)


def bound(model, **settings):
    return lambda x, y=None: model(x, y, **settings)


def z_scores(draws, mean, covariance):
    """z of the draws' mean, and of their second moments about the exact mean."""
    num, centered = len(draws), draws - mean
    first = centered.mean(0) / np.sqrt(np.diag(covariance) / num)
    second = centered.T @ centered / num - covariance
    variances = np.diag(covariance)
    return np.abs(first).max(), np.abs(second / np.sqrt((np.outer(variances, variances) + covariance**2) / num)).max()


# ---- Laplace -----------------------------------------------------------------------------------------------


def problem(model, x, y, values):
    return CurvedModel(model, (x, y), {}, {k: np.asarray(v, np.float32) for k, v in values.items()})


def precision_of(found):
    """Diagonal of the prior's precision, and the precision without it."""
    rows = np.concatenate(list(found.curvature_rows()))
    return found.prior_precision(), rows.T @ rows


@pytest.mark.parametrize("batch", some([None, 2], 1))
@pytest.mark.parametrize("points, scale", [(None, 1.0), (POINTS, 1.0), (POINTS, 0.3)])
def test_precision_is_exact_where_the_model_is_linear(points, scale, batch):
    """All data count, whatever the minibatch; the functional prior is a factor."""
    model = bound(linear, points=points, scale=scale, batch=batch)
    found = problem(model, X.astype(np.float32), Y, {"net.w": [[0.1], [0.2], [0.3]]})
    prior, rest = precision_of(found)
    wanted = np.linalg.inv(exact(points, scale)[1])
    np.testing.assert_allclose(np.diag(prior) + rest, wanted, rtol=1e-4, atol=1e-4 * wanted.max())
    assert not np.allclose(rest, wanted, rtol=1e-2), "without the prior's precision"
    assert found.num_values == len(X) + (0 if points is None else len(POINTS))


def test_a_tempered_model():
    """``handlers.scale`` multiplies every term, the prior of the weights too: the precision is a tenth."""
    model = handlers.scale(linear, scale=0.1)
    prior, rest = precision_of(problem(model, X.astype(np.float32), Y, {"net.w": [[0.1], [0.2], [0.3]]}))
    wanted = 0.1 * np.linalg.inv(exact()[1])
    np.testing.assert_allclose(np.diag(prior) + rest, wanted, rtol=1e-4, atol=1e-4 * wanted.max())


@pytest.mark.slow
def test_two_networks_and_two_observations():
    """New observations are latent sites to the second network's hook, and no network needs them."""

    def two(x, y0=None, y1=None):
        for i, y in enumerate((y0, y1)):
            g = fs.random_module(f"net{i}", tiny(), input_shape=1)
            numpyro.sample(f"y{i}", dist.Normal(g(x)[:, 0], SIGMA).to_event(1), obs=y)

    x, y = X.astype(np.float32), Y.astype(np.float32)
    posterior = laplace(two, KEY, x, y, -y, num_updates=20, num_samples=4)
    drawn = fs.predict(posterior, KEY, x)
    assert {k: v.shape for k, v in drawn.items()} == {
        "net0": (4, 5, 1),
        "net1": (4, 5, 1),
        "y0": (4, 5),
        "y1": (4, 5),
    }


def test_any_gaussian_prior_over_functions():
    """Known by its log density only."""

    def model(x, y=None):
        f = fs.random_module("net", on_features(), input_shape=1, prior=weight_prior)
        f = fs.functional_prior("f", f, Columns(), POINTS, scale=2.0)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], SIGMA).to_event(1), obs=y)

    _, rest = precision_of(problem(model, X.astype(np.float32), Y, {"net.w": np.ones((3, 1))}))
    phi, phi_m = (np.asarray(features(x), np.float64) for x in (X, POINTS))
    np.testing.assert_allclose(rest, phi.T @ phi / SIGMA**2 + 2.0 * phi_m.T @ phi_m / 0.25, rtol=1e-4)


class Columns(Independent):
    """``Independent`` of values [M, 1]."""

    def log_prob(self, x, f):
        return super().log_prob(x, f[:, 0])


@pytest.mark.parametrize("points", some([None, POINTS], 1))
def test_draws_of_f_have_the_exact_posterior(points):
    """End to end with minibatches: mean and covariance of f at a grid, and a twin without weight prior is rejected."""
    model = bound(linear, points=points, batch=3)
    schedule = optax.cosine_decay_schedule(0.05, 1500, alpha=1e-4)
    settings = {"num_updates": 1500, "optimizer": optax.adam(schedule), "num_samples": 4000}
    posterior = laplace(model, KEY, X.astype(np.float32), Y.astype(np.float32), **settings)
    phi = np.asarray(features(GRID), np.float64)[[0, 3, 5]]
    found = fs.predict(posterior, KEY, GRID[[0, 3, 5]].astype(np.float32))
    f = found["net"][..., 0]
    np.testing.assert_allclose(found.get("f", found["net"]), found["net"], atol=1e-5)

    def scores(**twin):
        mean, covariance = exact(points, **twin)
        return z_scores(f, phi @ mean, phi @ covariance @ phi.T)

    assert max(scores()) < 5.0
    assert max(scores(prior=False)) > 8.0
    assert set(fs.to_arviz(posterior)["posterior"].data_vars) >= {"net"}


def test_primal_and_dual_are_one_law(key):
    b = np.asarray(jax.random.normal(key, (4, 6)), np.float64)
    wanted = np.linalg.inv(np.eye(6) + b.T @ b)
    for color, size in (primal([b[:1], b[1:]], 6), dual(b)):
        root = color(np.eye(size))
        np.testing.assert_allclose(root.T @ root, wanted, atol=1e-12)


def classes(x, y=None, *, batch=None):
    f = fs.random_module("net", tiny(3), input_shape=1)
    with numpyro.plate("data", len(x), subsample_size=batch):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Categorical(logits=f(xb)), obs=yb)


def coins(x, y=None):
    f = fs.random_module("net", tiny(), input_shape=1)
    numpyro.sample("y", dist.Bernoulli(logits=f(x)[:, 0]).to_event(1), obs=y)


def two_heads(x, y=None):
    """Mean and log scale by two networks: Λ couples them."""
    f = fs.random_module("net", tiny(), input_shape=1)
    g = fs.random_module("log_scale", tiny(), input_shape=1)
    numpyro.deterministic("curve", f(jnp.ones((3, 1))))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], jnp.exp(2.0 + 0.1 * g(x)[:, 0])).to_event(1), obs=y)


def mode_of(model, x, y):
    sites = handlers.trace(handlers.seed(model, KEY)).get_trace(x, y)
    return {k: np.asarray(s["value"]) for k, s in sites.items() if k.startswith(("net.", "log_scale."))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, y, loss",
    [
        (classes, np.array([0, 2, 1, 0, 2]), lambda f, y: -jax.nn.log_softmax(f["net"])[jnp.arange(5), y].sum()),
        (coins, np.array([0, 1, 1, 0, 1]), lambda f, y: (jax.nn.softplus(f["net"]) - y[:, None] * f["net"]).sum()),
    ],
    ids=["categorical", "bernoulli"],
)
def test_gauss_newton_is_the_dense_one(model, y, loss):
    """Jᵀ ∇² loss J from a dense Jacobian of all outputs and a dense Hessian of the loss in them."""
    x = X.astype(np.float32)
    found = problem(model, x, y, mode_of(model, x, y))
    prior, rest = precision_of(found)

    def outputs(flat):
        p = {k.removeprefix("net."): v for k, v in found.unravel(flat).items()}
        return tiny()[1](p, x)

    value, jacobian = outputs(found.flat), jax.jacrev(outputs)(found.flat).reshape(-1, len(prior))
    hessian = jax.hessian(lambda v: loss({"net": v.reshape(value.shape)}, y))(value.ravel())
    np.testing.assert_allclose(rest, jacobian.T @ hessian @ jacobian, atol=2e-5)
    wanted = {k: np.full(v.shape, 3 if k == "net.w2" else 1) for k, v in found.weights.items()}
    np.testing.assert_allclose(prior, jax.flatten_util.ravel_pytree(wanted)[0], rtol=1e-5)


@pytest.mark.slow
def test_two_functions_and_calls_that_do_not_count():
    """Both networks' weights are inferred together; a deterministic site at other inputs is no obstacle."""
    x, y = X.astype(np.float32), Y.astype(np.float32)
    found = problem(two_heads, x, y, mode_of(two_heads, x, y))
    assert len(found.kept) == 2 and found.num_values == 10 and found._likelihood_roots().shape == (5, 2, 2)
    _, rest = precision_of(found)
    mean = [i for i, k in enumerate(_names(found)) if k.startswith("net.")]
    scale = [i for i, k in enumerate(_names(found)) if k.startswith("log_scale.")]
    assert np.abs(rest[np.ix_(mean, scale)]).max() > 1e-6


def _names(found):
    return [k for k in sorted(found.weights) for _ in range(found.weights[k].size)]


def noisy(x, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.1))
    f = fs.random_module("net", tiny(), input_shape=1)
    numpyro.sample("y", dist.Normal(f(x)[:, 0], noise).to_event(1), obs=y)


@pytest.mark.slow
def test_the_noise_stays_and_functions_are_linear():
    x, y = X.astype(np.float32), Y.astype(np.float32)
    posterior = laplace(noisy, KEY, x, y, num_updates=200, num_samples=6)
    draws = posterior.samples
    assert draws["noise"].shape == (6,) and np.ptp(draws["noise"]) == 0.0 and 0.1 < draws["noise"][0] < 1.0
    halved = {k: 0.5 * (v[:1] + v[1:2]) for k, v in draws.items()}
    f = fs.predict(posterior, KEY, x)["net"]
    middle = fs.predict(fs.Posterior(posterior.model, halved), KEY, x)["net"]
    np.testing.assert_allclose(middle[0], 0.5 * (f[0] + f[1]), atol=1e-5)
    curved = fs.predict(fs.Posterior(noisy, draws), KEY, x)["net"]
    assert np.abs(curved - f).max() > 1e-3
    again = fs.predict(laplace(noisy, KEY, x, y, num_updates=200, num_samples=6), KEY, x)["net"]
    np.testing.assert_array_equal(f, again)


#: The first two weights depend on each other, and the third, whose precision is far larger, on neither.
PAIR = jnp.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1e-5]])


class Untouched:
    """An optimizer that must not be reached."""

    def init(self, params):
        raise AssertionError("the model was to be refused before")

    update = init


@pytest.mark.slow
def test_weights_where_the_curvature_of_their_prior_vanishes_are_not_coupled():
    """There rounding exceeds a thousandth of next to nothing."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.StudentT(4.0, 0.0, 1.0).expand([20_000]).to_event(1))
        f = fs.functional_prior("f", lambda x: x[:, 0] * w.sum(), PRIOR, POINTS)
        numpyro.sample("y", dist.Normal(f(x), 1.0).to_event(1), obs=y)

    x, y = X.astype(np.float32), Y.astype(np.float32)
    for seed in range(3):
        values = {"w": jax.random.normal(jax.random.key(seed), (20_000,))}
        curved = CurvedModel(model, (x, y), {}, values)
        curved.prior_precision(at_mode=False)


def test_a_call_within_a_program_of_the_model_is_named():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.sample("y", dist.Normal(jax.jit(f)(x), 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"calls a function within a jax\.jit"):
        laplace(model, KEY, X.astype(np.float32), Y.astype(np.float32), num_updates=10)


@pytest.mark.slow
def test_laplace_refuses():
    x, y = X.astype(np.float32), Y.astype(np.float32)
    random = bound(linear, points=fs.measurement.uniform(-1.0, 1.0, 3))

    def direct(prior=None, likelihood=lambda f, w: dist.Normal(f, 1.0).to_event(1), *, gp=PRIOR, declared=True):
        """f = Φ w with any prior of w, likelihood and functional prior."""

        def model(x, y=None):
            w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1) if prior is None else prior)

            def f(x):
                return features(x) @ w

            f = fs.functional_prior("f", f, gp, POINTS) if declared else f
            numpyro.sample("y", likelihood(f(x), w), obs=y)

        return model

    def discrete(x, y=None):
        numpyro.sample("z", dist.Bernoulli(0.5))
        linear(x, y)

    for model, error, match in [
        (random, ValueError, "points of functional_prior.* are random"),
        (direct(declared=False), ValueError, "calls no declared function"),
        (direct(None, lambda f, w: dist.Normal(f + w[0], 1.0).to_event(1)), ValueError, r"weights \['w'\] other than"),
        (
            direct(gp=fs.priors.StudentTPrior(PRIOR.kernel, 5.0, nugget=0.1)),
            TypeError,
            "prior StudentTPrior, which is not Gaussian",
        ),
        (direct(dist.ImproperUniform(dist.constraints.real, (), (3,))), ValueError, "no positive curvature"),
        (direct(dist.MultivariateNormal(jnp.zeros(3), 0.5 + jnp.eye(3))), ValueError, "prior of the weights couples"),
        (direct(dist.MultivariateNormal(jnp.zeros(3), PAIR)), ValueError, "prior of the weights couples"),
        (direct(None, lambda f, w: dist.MultivariateNormal(f, 0.5 + jnp.eye(5))), ValueError, "couples the rows"),
        (direct(dist.LogNormal().expand([3]).to_event(1)), ValueError, "not real-valued"),
        (discrete, ValueError, "'z' is discrete"),
    ]:
        with pytest.raises(error, match=match):
            laplace(model, KEY, x, y, optimizer=Untouched())
    with pytest.raises(ValueError, match="num_samples=0"):
        laplace(linear, KEY, x, y, num_samples=0)
    with pytest.raises(TypeError, match="optax optimizer"):
        laplace(linear, KEY, x, y, optimizer=0.1)
    with pytest.raises(RuntimeError, match="diverged to NaN or infinity"):
        laplace(linear, KEY, x, y, num_updates=200, optimizer=optax.sgd(10.0))


def test_too_many_weights_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(curvature, "MAX_SIDE", 2)
    with pytest.raises(ValueError, match="3 weights and 5 values"):
        laplace(linear, KEY, X.astype(np.float32), Y.astype(np.float32))


# ---- ensembles ---------------------------------------------------------------------------------------------


def curved(x, y=None, *, batch=None):
    f = fs.random_module("net", tiny(), input_shape=1)
    with numpyro.plate("data", len(x), subsample_size=batch):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f(xb)[:, 0], SIGMA), obs=yb)


@pytest.mark.slow
def test_members_are_modes_that_differ():
    x, y = X.astype(np.float32), Y.astype(np.float32)
    members = ensemble(curved, KEY, x, y, num_members=3, num_updates=3000)
    potential = ModelPotential(curved, (x, y), {}, key=KEY)
    for e in range(3):
        z = {k: v[e] for k, v in members.samples.items()}
        gradient = jax.grad(lambda z: potential(z, KEY)[0])(z)
        assert max(float(jnp.abs(g).max()) for g in gradient.values()) < 0.02
    kernels = members.samples["net.w1"].reshape(3, -1)
    assert min(np.abs(kernels[i] - kernels[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1
    assert fs.predict(members, KEY, x)["net"].shape == (3, 5, 1)
    assert fs.to_arviz(members)["posterior"]["net"].shape == (1, 3, 5, 1)


@pytest.mark.slow
def test_a_deterministic_site_may_be_anything():
    def logarithm(x, y=None):
        f = fs.random_module("net", tiny(), input_shape=1)
        numpyro.deterministic("log", jnp.log(f(x)[:, 0]))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], SIGMA), obs=y)

    x, y = X.astype(np.float32), -np.abs(Y).astype(np.float32)
    members = ensemble(logarithm, KEY, x, y, num_members=2, num_updates=200)
    assert np.isnan(members.samples["log"]).any()


@pytest.mark.slow
def test_one_member_is_the_first_of_many():
    """Together or alone, with minibatches redrawn at each update."""
    x, y = X.astype(np.float32), Y.astype(np.float32)
    model = bound(curved, batch=2)
    settings = {"num_updates": 50, "optimizer": optax.sgd(1e-2)}
    many = ensemble(model, KEY, x, y, num_members=3, **settings).samples
    for alone, member in ((ensemble(model, KEY, x, y, num_members=1, **settings).samples, 0),):
        for name, value in alone.items():
            np.testing.assert_allclose(value[0], many[name][member], atol=1e-5)
    full = ensemble(curved, KEY, x, y, num_members=1, **settings).samples
    assert np.abs(full["net.b2"] - many["net.b2"][:1]).max() > 1e-4, "minibatches ignored"


def test_ensemble_refuses():
    x, y = X.astype(np.float32), Y.astype(np.float32)
    for settings, match in [({"num_members": 0}, "num_members=0"), ({"num_updates": 0}, "num_updates=0")]:
        with pytest.raises(ValueError, match=match):
            ensemble(curved, KEY, x, y, **settings)
    with pytest.raises(TypeError, match="optax optimizer"):
        ensemble(curved, KEY, x, y, optimizer="adam")
    with pytest.raises(ValueError, match="no observed site"):
        ensemble(curved, KEY, x)


# ---- implicit processes ------------------------------------------------------------------------------------


def draw(key, x):
    """A cheap process: random sines, [M]."""
    a, b = jax.random.normal(key, (2,))
    return a * jnp.sin(2.0 * x[:, 0] + b)


KEYS = jax.random.split(jax.random.key(7), 6)
VALUES = np.stack([np.asarray(draw(k, X), np.float64) for k in KEYS])


def implicit(x, y=None, *, draw=draw):
    f = implicit_process("f", draw, 6, jax.random.key(7))
    numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)


def test_marginal_law_has_the_moments_of_the_draws():
    """f is affine in a ~ N(0, I): its root at points is f(unit vectors) - f(0)."""
    draws = {"f.coefficients": np.concatenate([np.zeros((1, 6)), np.eye(6)]).astype(np.float32)}
    f = fs.predict(draws, KEY, X.astype(np.float32), model=implicit)["f"]
    mean, root = f[0], f[1:] - f[0]
    np.testing.assert_allclose(mean, VALUES.mean(0), atol=1e-6)
    np.testing.assert_allclose(root.T @ root, np.cov(VALUES.T, bias=True), atol=1e-6)
    site = handlers.trace(handlers.seed(implicit, KEY)).get_trace(X.astype(np.float32), Y)["f.coefficients"]
    assert site["fn"].log_prob(np.zeros(6)) == pytest.approx(-3.0 * np.log(2 * np.pi), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO(), RenyiELBO(alpha=0.5, num_particles=2)], ids=["kl", "alpha"])
def test_the_variational_optimum_is_bayesian_linear_regression(loss):
    """At the exact posterior of the coefficients the bound is the evidence, for every draw; elsewhere it is below."""
    x, y = X.astype(np.float32), Y.astype(np.float32)
    phi = (VALUES - VALUES.mean(0)).T / np.sqrt(6.0)
    precision = np.eye(6) + phi.T @ phi / SIGMA**2
    mean = np.linalg.solve(precision, phi.T @ (Y - VALUES.mean(0)) / SIGMA**2)
    law = scipy.stats.multivariate_normal(VALUES.mean(0), phi @ phi.T + SIGMA**2 * np.eye(5))
    guide = AutoMultivariateNormal(implicit)
    SVI(implicit, guide, optax.sgd(0.1), loss).init(KEY, x, y)

    def bound(loc, covariance, key):
        params = {"auto_loc": loc, "auto_scale_tril": np.linalg.cholesky(covariance)}
        return -float(loss.loss(key, jax.tree.map(jnp.asarray, params), implicit, guide, x, y))

    keys = jax.random.split(KEY, 4)
    exact = [bound(mean, np.linalg.inv(precision), key) for key in keys]
    np.testing.assert_allclose(exact, law.logpdf(Y), atol=1e-4)
    for twin in ((0.0 * mean, np.linalg.inv(precision)), (mean, np.eye(6))):
        assert np.ptp([bound(*twin, key) for key in keys]) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_parameters_of_the_process_are_learned_and_used_in_predictions(inside):
    """A gradient reaches ``numpyro.param`` in ``draw`` or around it; predictions use the learned value."""
    x, y = X.astype(np.float32), 10.0 * Y.astype(np.float32)

    def model(x, y=None):
        size = None if inside else numpyro.param("size", 1.0)

        def scaled(key, x):
            return (numpyro.param("size", 1.0) if inside else size) * draw(key, x)

        implicit(x, y, draw=scaled)

    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    params = svi.run(KEY, 30, x, y, progress_bar=False).params
    assert abs(params["size"] - 1.0) > 0.03
    posterior = fs.svi_posterior(svi, params, KEY, x, y, num_samples=3)
    assert fs.to_arviz(posterior)["posterior"]["f"].shape == (1, 3, 5)
    at_zero = fs.Posterior(posterior.model, {"f.coefficients": np.zeros((1, 6), np.float32)})
    np.testing.assert_allclose(
        fs.predict(at_zero, KEY, x)["f"][0], params["size"] * VALUES.mean(0), rtol=1e-4, atol=1e-5
    )


def test_draws_of_a_network_and_several_outputs():
    network = fs.model.random_function(nn.Dense(2), input_shape=1)

    def model(x):
        numpyro.deterministic("value", implicit_process("f", network, 4, KEY)(x))

    found = handlers.trace(handlers.seed(model, KEY)).get_trace(X.astype(np.float32))
    assert found["value"]["value"].shape == (5, 2) and found["f"]["type"] == "network"
    assert sorted(k for k, s in found.items() if s["type"] == "sample") == ["f.coefficients"]


def test_an_implicit_process_is_predicted_where_the_model_calls_it():
    def model(x):
        numpyro.deterministic("value", implicit_process("f", draw, 6, jax.random.key(7))(x[:, 1:]))

    x = np.stack([np.full(5, np.nan), X[:, 0]], 1).astype(np.float32)
    found = fs.predict({"f.coefficients": np.ones((2, 6), np.float32)}, KEY, x, model=model)
    np.testing.assert_allclose(found["f"], found["value"], rtol=1e-6)


def test_implicit_process_refuses():
    def run(*args):
        return handlers.seed(lambda: implicit_process(*args)(X), KEY)()

    for args, error, match in [
        (("f", draw, 1, KEY), ValueError, "num_functions=1"),
        (("a/b", draw, 4, KEY), ValueError, "name='a/b'"),
        (("f", None, 4, KEY), TypeError, "draw must be a function"),
        (("f", lambda key, x: jnp.zeros(3), 4, KEY), ValueError, r"each of the 5 rows of x; got shape \(3,\)"),
    ]:
        with pytest.raises(error, match=match):
            run(*args)
    with pytest.raises(ValueError, match="outside of plates"), numpyro.plate("data", 5):
        run("f", draw, 4, KEY)


# ---- sparse Gaussian processes -----------------------------------------------------------------------------


def smooth_data(num=40):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (num, 2))
    return x, np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=num)


def exact_gp(fit, x, y, x_new):
    """Mean and variance of f, and the log marginal likelihood, at the fit's parameters."""
    length, variance = fit.params["lengthscale"], fit.params["variance"]

    def k(a, b):
        return variance * np.exp(-0.5 * (((a[:, None] - b) / length) ** 2).sum(-1))

    covariance = k(x, x) + fit.noise_variance * np.eye(len(x))
    gain = np.linalg.solve(covariance, k(x, x_new)).T
    evidence = scipy.stats.multivariate_normal(np.zeros(len(x)), covariance).logpdf(y)
    return gain @ y, variance - np.sum(gain * k(x_new, x), 1), evidence


def test_with_all_points_inducing_it_is_the_exact_process():
    x, y = smooth_data()
    fit = fit_svgp(None, x, y, key=KEY, num_inducing=100, num_steps=150, batch_size=20)
    x_new = np.random.default_rng(1).uniform(-1.5, 1.5, (30, 2))
    mean, variance, evidence = exact_gp(fit, x, y, x_new)
    found_mean, found_variance = fit.predict(x_new)
    np.testing.assert_allclose(found_mean, mean, atol=1e-3)
    np.testing.assert_allclose(found_variance, variance, atol=1e-3)
    assert evidence - 0.5 < fit.bound < evidence
    assert np.isfinite(fit.losses).all() and fit.losses.shape == (150,)


@pytest.mark.slow
def test_few_inducing_points_bound_the_evidence():
    """The bound is below it, learning raises it, and predictions come close to the exact process's."""
    x, y = smooth_data(200)
    fit = fit_svgp(None, x, y, key=KEY, num_inducing=12, num_steps=600, batch_size=64)
    mean, _, evidence = exact_gp(fit, x, y, x)
    start = fit_svgp(None, x, y, key=KEY, num_inducing=12, num_steps=1)
    assert start.bound + 20.0 < fit.bound < evidence
    np.testing.assert_allclose(fit.predict(x)[0], mean, atol=0.1)
    assert 0.005 < fit.noise_variance < 0.03
    assert fit.params["lengthscale"][1] > 2.0 * fit.params["lengthscale"][0], "the second input says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.1])  # the standard deviation of equal numbers may be a rounding error
def test_a_constant_column_has_no_say_in_the_sparse_process(value):
    x, y = smooth_data(30)
    with_constant = np.c_[x, np.full(30, value)]
    one, other = (fit_svgp(None, inputs, y, key=KEY, num_inducing=10, num_steps=20) for inputs in (x, with_constant))
    np.testing.assert_allclose(other.params["lengthscale"][:2], one.params["lengthscale"], rtol=1e-6)
    np.testing.assert_allclose(other.bound, one.bound, rtol=1e-6)


def test_several_outputs_and_kernels_of_the_user():
    x, y = smooth_data(30)
    kernel = tinygp.kernels.Matern52(1.0, distance=tinygp.kernels.distance.L2Distance())
    fit = fit_svgp(kernel, x, np.stack([y, -2.0 * y], 1), key=KEY, num_inducing=10, num_steps=20)
    mean, variance = fit.predict(x[:7])
    assert mean.shape == variance.shape == (7, 2) and np.all(variance >= 0.0)
    np.testing.assert_allclose(mean[:, 1], -2.0 * mean[:, 0], atol=1e-6)


def test_svgp_refuses():
    x, y = smooth_data(10)
    for settings, error, match in [
        ({"num_inducing": 0}, ValueError, "num_inducing=0"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"num_steps": 1.5}, TypeError, "num_steps"),
        ({"noise_variance": -1.0}, ValueError, "noise_variance"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"),
    ]:
        with pytest.raises(error, match=match):
            fit_svgp(None, x, y, key=KEY, **settings)
    with pytest.raises(ValueError, match="y must have shape"):
        fit_svgp(None, x, y[:5], key=KEY)
    with pytest.raises(TypeError, match="must be, or return, a tinygp kernel, got function"):
        fit_svgp(lambda params: lambda a, b: params["v"] * (a @ b.T), x, y, key=KEY, params={"v": 1.0})
    with pytest.raises(ValueError, match="x has 1 columns"):
        fit_svgp(None, x, y, key=KEY, num_steps=1).predict(x[:, :1])


@pytest.mark.slow
def test_minibatches_of_numpy_data_are_indexed():
    def model(x, y=None):
        f = fs.random_module("net", on_features(), input_shape=1, prior=dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x), subsample_size=3) as rows:
            numpyro.sample("y", dist.Normal(f(x[rows])[:, 0], SIGMA), obs=None if y is None else y[rows])

    pairs = (X, Y), (jnp.asarray(X), jnp.asarray(Y))
    found, same = (laplace(model, KEY, x, y, num_samples=5) for x, y in pairs)
    for name, values in found.samples.items():
        np.testing.assert_allclose(values, same.samples[name], rtol=1e-4)


@pytest.mark.slow
def test_a_density_that_is_never_finite_is_named():
    """Adam divides by the root of the squared gradient, which overflows: nothing would move, without a word."""
    x = np.linspace(-1.0, 1.0, 8, dtype=np.float32)[:, None]

    def model(x, y=None):
        f = fs.random_module("f", nn.Dense(1), input_shape=1)
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.2), obs=y)

    y = 1e30 * x[:, 0]
    for fit, settings in ((ensemble, {"num_members": 2}), (laplace, {"num_samples": 2})):
        with pytest.raises(RuntimeError, match=r"The log density is -inf where .* optimizations end: that of 'y'"):
            fit(model, jax.random.key(0), x, y, num_updates=20, **settings)


@pytest.mark.slow
def test_laplace_refuses_data_that_reach_a_function_by_latent_values():
    """Their part of the curvature would be left out. Latent values without data below them stay at the mode."""

    def model(x, y=None, *, has_data):
        f = fs.random_module("f", on_features(), input_shape=1, prior=weight_prior)
        u = numpyro.sample("u", dist.Normal(f(x)[:, 0], 0.1).to_event(1))
        numpyro.sample("y", dist.Normal(f(x)[:, 0], SIGMA).to_event(1), obs=y)
        if has_data:
            numpyro.sample("z", dist.Normal(u, 0.1).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"the priors of \['u'\] depend on the functions, and the likelihood"):
        laplace(model, KEY, X, Y, has_data=True, num_updates=0)
    assert laplace(model, KEY, X, Y, has_data=False, num_updates=0, num_samples=3).samples["u"].shape == (3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("has_scope", [False, True])
def test_parameters_of_an_implicit_process_are_learned_in_a_scope_too(has_scope):
    def model(x, y=None):
        def draw(key, x):
            scale = numpyro.param("scale", 1.0)
            return scale * jax.random.normal(key) * x[:, 0]

        f = implicit_process("f", draw, 5, jax.random.key(0))
        numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)

    name = "scale"
    if has_scope:
        model, name = handlers.scope(model, prefix="a", divider="_"), "a_scale"
    svi = SVI(model, AutoMultivariateNormal(model), optax.adam(0.1), Trace_ELBO())
    assert svi.run(KEY, 50, X, 10.0 * X[:, 0], progress_bar=False).params[name] > 1.5
