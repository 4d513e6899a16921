"""Function-space variational inference: exact optima, closed forms, linearized models, errors."""

from __future__ import annotations

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tinygp
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_fspace as fs
from numpyro_fspace.variational import divergences
from numpyro_fspace.variational import expected_log_likelihood as likelihood_module
from numpyro_fspace.variational.elbo import GuidedModel
from numpyro_fspace.variational.pushforward import LinearizedPushforward

X = np.array([[-1.0], [-0.4], [0.1], [0.5], [0.9]])
Y = np.array([0.3, -0.7, 0.2, 1.1, 0.6])
POINTS = np.array([[-1.2], [-0.3], [0.4], [1.1], [1.5]])
SIGMA, NUGGET = 0.5, 0.1
PRIOR = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=NUGGET)
KEYS = jax.random.split(jax.random.key(0), 400)


def features(x):
    return jnp.stack([jnp.ones_like(x[:, 0]), x[:, 0], jnp.sin(2.0 * x[:, 0])], 1)


def linear(x, y=None, *, batch=None, scale=1.0, likelihood=lambda f: dist.Normal(f, SIGMA)):
    """f = Φ w under a GP prior at ``POINTS``."""
    w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
    f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS, scale=scale)
    with numpyro.plate("data", len(x), subsample_size=batch):
        xb = numpyro.subsample(x, event_dim=1)
        yb = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", likelihood(f(xb)), obs=yb)


def posterior(scale=1.0):
    """Exact mean and precision of w under the likelihood, the GP prior at the points and no prior of its own.

    With a divergence of weight ``scale``, the optimum of E[log lik] - scale · KL: precision H_lik / scale + H_prior.
    """
    phi, phi_m = np.asarray(features(X)), np.asarray(features(POINTS))
    covariance = np.exp(-0.5 * ((POINTS - POINTS.T) / 0.7) ** 2) + NUGGET * np.eye(len(POINTS))
    precision = phi.T @ phi / SIGMA**2 + scale * phi_m.T @ np.linalg.solve(covariance, phi_m)
    return np.linalg.solve(precision, phi.T @ Y / SIGMA**2), precision / scale


def prepared(model, guide, loss, *args):
    """``params -> loss`` for a key, and the guide's parameters at the start."""
    svi = SVI(model, guide, optax.sgd(0.1), loss)
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    return lambda params, key: loss.loss(key, params, model, guide, *args), params


def gradient_size(model, guide, params, divergence):
    """Largest derivative of the loss at ``params``."""
    loss = fs.FunctionalELBO(divergence)
    evaluate, _ = prepared(model, guide, loss, jnp.asarray(X), jnp.asarray(Y))
    gradient = jax.grad(evaluate)(params, jax.random.key(1))
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))


# ---- exact optima ------------------------------------------------------------------------------------------


def optimum(guide_kind, scale=1.0):
    """Guide and parameters of the best normal law: exact mean; variance 1/H_ii, or H⁻¹ if the guide has full rank."""
    mean, precision = posterior(scale)
    if guide_kind == "mean-field":
        params = {"auto_loc": jnp.asarray(mean), "auto_scale": jnp.asarray(1 / np.sqrt(np.diag(precision)))}
        return fs.variational.guides.mean_field, params
    covariance = np.linalg.inv(precision)
    small = 0.5 * np.linalg.eigvalsh(covariance)[0] * np.ones(3)
    factor = np.linalg.cholesky(covariance - np.diag(small)) / np.sqrt(small)[:, None]
    params = {"auto_loc": mean, "auto_cov_factor": factor, "auto_scale": np.sqrt(small)}
    return lambda model: fs.variational.guides.low_rank(model, 3), {k: jnp.asarray(v) for k, v in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("guide_kind", ["mean-field", "low-rank"])
def test_exact_posterior_is_the_optimum(x64, guide_kind):
    """On linear features the gradient of GFSVI's bound is zero at the exact law; faults move the optimum away."""
    make, params = optimum(guide_kind)
    divergence = fs.variational.RegularizedKL(1e-10)
    assert gradient_size(linear, make(linear), params, divergence) < 1e-4
    _, elsewhere = optimum(guide_kind, scale=2.0)
    assert gradient_size(linear, make(linear), elsewhere, divergence) > 0.1, "another prior's optimum"

    def tempered(x, y=None):
        return linear(x, y, scale=2.0)

    assert gradient_size(tempered, make(tempered), elsewhere, divergence) < 1e-4
    assert gradient_size(tempered, make(tempered), params, divergence) > 0.1, "scale forgotten"


@pytest.mark.slow
def test_broken_divergences_are_noticed(x64, monkeypatch):
    """No log determinant, no trace, no mean: each leaves a gradient at the exact optimum."""
    make, params = optimum("mean-field")
    right = divergences.regularized_kl

    def without_mean(difference, *rest):
        return right(0.0 * difference, *rest)

    def frozen_spread(difference, root, *rest):
        return right(difference, jax.lax.stop_gradient(root), *rest)

    def reverse(difference, root, covariance, jitter):
        spread = jnp.einsum("mkr,nkr->kmn", root, root)
        return right(-difference, jnp.linalg.cholesky(covariance[0])[:, None], spread, jitter)

    for twin in (without_mean, frozen_spread, reverse):
        monkeypatch.setattr(divergences, "regularized_kl", twin)
        assert gradient_size(linear, make(linear), params, fs.variational.RegularizedKL(1e-6)) > 0.1, twin.__name__


def test_svi_reaches_the_exact_mean():
    """End to end in float32, in NumPyro's idiom."""
    mean, precision = posterior()
    guide = fs.variational.guides.mean_field(linear)
    svi = SVI(linear, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), fs.FunctionalELBO())
    result = svi.run(jax.random.key(0), 1500, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    law = guide.get_posterior(result.params)
    np.testing.assert_allclose(law.loc, mean, atol=0.01)
    np.testing.assert_allclose(law.scale, 1 / np.sqrt(np.diag(precision)), rtol=0.02)


def test_a_low_rank_guide_learns_correlations():
    """It reaches the exact covariance, which a factor that starts at 0 would never leave the diagonal for."""
    mean, precision = posterior()
    guide = fs.variational.guides.low_rank(linear, 3)
    svi = SVI(linear, guide, optax.adam(optax.cosine_decay_schedule(0.03, 3000)), fs.FunctionalELBO())
    result = svi.run(jax.random.key(0), 3000, jnp.asarray(X), jnp.asarray(Y), progress_bar=False)
    law = guide.get_posterior(result.params)
    np.testing.assert_allclose(law.loc, mean, atol=0.01)
    np.testing.assert_allclose(law.covariance_matrix, np.linalg.inv(precision), atol=0.005)
    assert np.abs(np.linalg.inv(precision) - np.diag(np.diag(np.linalg.inv(precision)))).max() > 0.02


# ---- divergences -------------------------------------------------------------------------------------------


def test_regularized_kl_is_the_kl_between_normals(x64):
    """Two outputs, each with its own covariance; q correlates them. Against NumPyro's KL of the joint laws."""
    rng = np.random.default_rng(0)
    difference, root = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 7))
    blocks = [a @ a.T + np.eye(3) for a in rng.normal(size=(2, 3, 3))]
    jitter = 0.3
    flat = root.swapaxes(0, 1).reshape(6, 7)
    q = dist.MultivariateNormal(difference.T.ravel(), flat @ flat.T + jitter * np.eye(6))
    p = dist.MultivariateNormal(np.zeros(6), jax.scipy.linalg.block_diag(*blocks) + jitter * np.eye(6))
    value = divergences.regularized_kl(*(jnp.asarray(v) for v in (difference, root, np.stack(blocks))), jitter)
    assert float(value) == pytest.approx(float(dist.kl_divergence(q, p)), rel=1e-10)


@pytest.mark.slow
def test_regularized_kl_converges_with_the_points(x64):
    """At points of a midpoint rule it tends to the divergence of the processes, with an error of 1/M or less."""
    prior = fs.GPPrior(tinygp.kernels.ExpSquared(0.7), nugget=1e-12)
    loc, sd = jnp.array([0.3, -0.5, 0.8]), jnp.array([0.4, 0.7, 0.2])
    law = LinearizedPushforward(lambda w, x: (features(x) @ w)[:, None], loc, lambda rows: rows * sd)

    def at(num_points, divergence=None):
        x = (2.0 * (jnp.arange(num_points) + 0.5) / num_points - 1.0)[:, None]
        return float((divergence or fs.variational.RegularizedKL(gamma=1e-2))(law, prior, x))

    sizes = np.array([10, 20, 40, 80])
    errors = np.abs([at(size) - at(800) for size in sizes])
    assert errors[-1] < 1e-3 * at(800)
    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] < -1.0
    fixed = [
        at(size, lambda law, prior, x: fs.variational.RegularizedKL(gamma=1e-2 / len(x))(law, prior, x))
        for size in (80, 800)
    ]
    assert fixed[1] > 1.1 * fixed[0]  # without the factor M on γ it goes on growing


@pytest.mark.slow
def test_pushforward_kl_is_the_kl_of_the_weights(x64):
    """If the Jacobian has full column rank the pushforward loses nothing: KL(q(w) ‖ N(0, σ_p²)) as γ → 0."""
    make, params = optimum("mean-field")
    law = dist.Normal(params["auto_loc"], params["auto_scale"]).to_event(1)
    expected = dist.kl_divergence(law, dist.Normal(jnp.zeros(3), 1.7).to_event(1))
    guide = make(linear)
    bound, _ = prepared(
        linear, guide, fs.FunctionalELBO(fs.variational.PushforwardKL(1.7, gamma=1e-9)), jnp.asarray(X), jnp.asarray(Y)
    )
    none, _ = prepared(linear, guide, fs.FunctionalELBO(lambda law, prior, x: 0.0), jnp.asarray(X), jnp.asarray(Y))
    value = bound(params, KEYS[0]) - none(params, KEYS[0])
    assert float(value) == pytest.approx(float(expected), rel=1e-4)


def test_pushforward_kl_has_no_unit():
    """J and 1000 J have the same divergence, and a finite one, though J J' is singular and its rounding grows."""
    rng = np.random.default_rng(0)
    jacobian = np.repeat(rng.normal(size=(20, 1, 50)), 2, 0).astype(np.float32)
    loc = jnp.asarray(rng.normal(size=50), jnp.float32)

    def value(size):
        scaled = jnp.asarray(size * jacobian)
        law = SimpleNamespace(jacobian=lambda x: scaled, root=lambda x: 0.3 * scaled, loc=loc)
        return float(fs.variational.PushforwardKL()(law, None, np.zeros((40, 1))))

    assert np.isfinite(value(1.0))
    assert value(1000.0) == pytest.approx(value(1.0), rel=1e-2)


# ---- the likelihood's expectation --------------------------------------------------------------------------


def expected_log_likelihood(model, key=KEYS[0], num_particles=1, **changes):
    loss = fs.FunctionalELBO(lambda law, prior, x: 0.0, num_particles=num_particles)
    guide = fs.variational.guides.mean_field(model, init_scale=0.3)
    evaluate, params = prepared(model, guide, loss, jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
    return -evaluate(params | changes, key)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Normal(f, SIGMA),
        lambda f: dist.Normal(jnp.flip(2.0 * f) + 1.0, SIGMA),
        lambda f: dist.Normal(jnp.exp(f), SIGMA),
        lambda f: dist.Normal(f, jnp.exp(0.3 * f)),
        pytest.param(lambda f: dist.StudentT(4.0, f, SIGMA), marks=pytest.mark.slow),
    ],
    ids=["normal", "affine", "non-linear mean", "function in the scale", "not normal"],
)
def test_closed_form_is_the_mean_over_draws(monkeypatch, likelihood):
    def model(x, y=None):
        return linear(x, y, likelihood=likelihood)

    value = expected_log_likelihood(model, num_particles=4000)
    with monkeypatch.context() as patch:
        patch.setattr(likelihood_module, "integrated", lambda guided, key: None)
        drawn = expected_log_likelihood(model, KEYS[1], num_particles=4000)
    assert float(value) == pytest.approx(float(drawn), rel=0.05)


def with_noise(x, y=None):
    sigma = numpyro.sample("sigma", dist.LogNormal(-0.7, 0.5))
    linear(x, y, likelihood=lambda f: dist.Normal(f, sigma))


def with_a_second_network(x, y=None):
    """Its output is the logarithm of the noise."""
    g = fs.random_module("g", nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)]), input_shape=1)
    linear(x, y, likelihood=lambda f: dist.Normal(f, jnp.exp(g(x)[:, 0] - 1.0)))


def with_a_weight_twice(x, y=None):
    w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
    f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x) + w[0], SIGMA).to_event(1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [with_noise, with_a_second_network, with_a_weight_twice])
def test_other_latent_values_in_the_likelihood(monkeypatch, model):
    """In closed form or by draws, and of a correlated guide too, the expectation is that of the linearized model."""
    size = {with_noise: 4, with_a_second_network: 13, with_a_weight_twice: 3}[model]
    covariance = 0.04 * (0.2 * np.eye(size) + 0.8)
    loss = fs.FunctionalELBO(lambda law, prior, x: 0.0, num_particles=20_000)
    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    for make, changes in (
        (fs.variational.guides.mean_field, {}),
        (AutoMultivariateNormal, {"auto_scale_tril": jnp.asarray(np.linalg.cholesky(covariance), jnp.float32)}),
    ):
        guide = make(model)
        evaluate, params = prepared(model, guide, loss, *args)
        value = -float(evaluate(params | changes, KEYS[0]))
        with monkeypatch.context() as patch:
            patch.setattr(likelihood_module, "integrated", lambda guided, key: None)
            drawn = -float(evaluate(params | changes, KEYS[1]))
        assert value == pytest.approx(drawn, rel=0.02), make.__name__


@pytest.mark.slow
def test_only_affine_normal_means_are_integrated():
    """The closed form does not depend on the key, draws do."""

    def nonlinear(x, y=None):
        return linear(x, y, likelihood=lambda f: dist.Normal(jnp.exp(f), SIGMA))

    def flipped(x, y=None):
        return linear(x, y, likelihood=lambda f: dist.Normal(jnp.flip(2.0 * f) + 1.0, SIGMA))

    for affine in (linear, flipped):  # the latter through a compiled function
        assert expected_log_likelihood(affine) == expected_log_likelihood(affine, KEYS[1])
    assert expected_log_likelihood(nonlinear) != expected_log_likelihood(nonlinear, KEYS[1])


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [None, lambda f: dist.Normal(2.0 * f[::-1] + 1.0, SIGMA)])
def test_large_minibatches_are_estimated_without_bias(monkeypatch, likelihood):
    """Variances from draws of the linearized network: the closed form in the mean, and no longer without the key."""

    def model(x, y=None):
        return linear(x, y) if likelihood is None else linear(x, y, likelihood=likelihood)

    exact = float(expected_log_likelihood(model))
    monkeypatch.setattr(likelihood_module, "MAX_ENTRIES", 1)
    values = [float(expected_log_likelihood(model, key, num_particles=500)) for key in KEYS[:8]]
    assert len(set(values)) > 1
    assert np.mean(values) == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_minibatches_are_unbiased():
    def batched(x, y=None):
        return linear(x, y, batch=2)

    full = expected_log_likelihood(linear)
    guide = fs.variational.guides.mean_field(batched, init_scale=0.3)
    loss = fs.FunctionalELBO(lambda law, prior, x: 0.0)
    evaluate, params = prepared(batched, guide, loss, jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
    values = -np.asarray(jax.jit(jax.vmap(lambda key: evaluate(params, key)))(KEYS))
    assert abs(values.mean() - full) < 5 * values.std() / np.sqrt(len(KEYS))
    assert values.std() > 0.1


@pytest.mark.slow
def test_other_latents_keep_their_prior(x64):
    """With a noise parameter the bound is that of the weights plus KL(q(σ) ‖ p(σ)), from the closed form."""

    def model(x, y=None):
        sigma = numpyro.sample("sigma", dist.LogNormal(-0.5, 0.2))
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.sample("z", dist.Normal(0.0, 1.0), obs=0.0 * sigma)

    guide = fs.variational.guides.mean_field(model, init_scale=0.3)
    loss = fs.FunctionalELBO(lambda law, prior, x: 0.0, num_particles=20_000)
    evaluate, params = prepared(model, guide, loss, jnp.asarray(X))
    place = int(guide._unpack_latent(jnp.arange(4))["sigma"])
    law = guide.get_posterior(params)
    expected = dist.kl_divergence(dist.Normal(law.loc[place], law.scale[place]), dist.Normal(-0.5, 0.2))
    value = evaluate(params, KEYS[0]) - 0.5 * np.log(2 * np.pi)
    assert float(value) == pytest.approx(float(expected), abs=0.03)


@pytest.mark.slow
def test_parameters_of_the_model_are_learned():
    """A lengthscale that is a ``numpyro.param`` gets a gradient from the divergence, a noise from the likelihood."""

    def model(x, y=None):
        scale = numpyro.param("lengthscale", 0.7, constraint=dist.constraints.positive)
        sigma = numpyro.param("sigma", SIGMA, constraint=dist.constraints.positive)
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        prior = fs.GPPrior(tinygp.kernels.ExpSquared(scale), nugget=NUGGET)
        f = fs.functional_prior("f", lambda x: features(x) @ w, prior, POINTS)
        numpyro.sample("y", dist.Normal(f(x), sigma).to_event(1), obs=y)

    evaluate, params = prepared(
        model,
        fs.variational.guides.mean_field(model),
        fs.FunctionalELBO(),
        jnp.asarray(X, float),
        jnp.asarray(Y, float),
    )
    assert {"lengthscale", "sigma"} <= set(params)
    slope = jax.grad(evaluate)(params, KEYS[0])
    for name in ("lengthscale", "sigma"):
        up, down = (evaluate(params | {name: params[name] + step}, KEYS[0]) for step in (1e-2, -1e-2))
        assert abs(float(slope[name])) > 0.1
        assert float(slope[name]) == pytest.approx(float(up - down) / 2e-2, rel=0.05)


# ---- linearized models -------------------------------------------------------------------------------------


def network(x, y=None):
    f = fs.random_module("net", nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(1)]), input_shape=1)
    f = fs.functional_prior("f", f, PRIOR, fs.measurement.uniform(-1.0, 1.0, 6))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f(x).squeeze(-1), SIGMA), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize(
    "guide_kind", [fs.variational.guides.mean_field, lambda model: fs.variational.guides.low_rank(model, 2)]
)
def test_law_of_a_network_is_that_of_the_guides_draws(x64, guide_kind, num_outputs):
    """Every weight with its own spread, though JAX orders a model's arrays by name and a guide by their turn."""
    prior = PRIOR if num_outputs == 1 else fs.GPPrior(PRIOR.kernel, nugget=NUGGET, num_outputs=num_outputs)

    def model(x, y=None):
        f = fs.random_module("net", nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(num_outputs)]), input_shape=1)
        sigma = numpyro.sample("a_name_before_the_networks", dist.LogNormal())
        f = fs.functional_prior("f", f, prior, POINTS)
        numpyro.sample("y", dist.Normal(f(x)[..., 0], sigma).to_event(1), obs=y)

    guide = guide_kind(model)
    _, params = prepared(model, guide, fs.FunctionalELBO(), X, Y)
    size = len(params["auto_loc"])
    spread = params["auto_scale"] * jnp.linspace(0.5, 2.0, size)
    params = params | {"auto_scale": spread}
    problem = GuidedModel(model, guide, params, KEYS[0], args=(X, Y), kwargs={}, needs_normal=True)
    network = fs.variational.linearize(model, problem.center)

    def values(flats):
        """f at the points for each row."""
        drawn = fs.predict(jax.vmap(problem.constrain)(flats), KEYS[1], POINTS, model=network)
        return drawn["f"].reshape(len(flats), -1)

    law = problem.normal
    covariance = np.diag(law.variance) if isinstance(law, dist.Normal) else np.asarray(law.covariance_matrix)
    start, *moved = values(problem.loc + jnp.concatenate([jnp.zeros((1, size)), jnp.eye(size)]))
    jacobian = np.stack(moved, 1) - start[:, None]
    found = problem.linearized_pushforward("f").root(POINTS).reshape(len(start), -1)
    np.testing.assert_allclose(found @ found.T, jacobian @ covariance @ jacobian.T, rtol=1e-6, atol=1e-12)
    assert not np.allclose(found @ found.T, jacobian @ covariance[::-1, ::-1] @ jacobian.T, rtol=1e-2)


@pytest.mark.slow
def test_linearized_function_is_the_first_order_expansion():
    """At the center it is the function; along a line of weights, its tangent."""
    draws = numpyro.infer.Predictive(network, num_samples=2)(jax.random.key(0), X)
    weights = {k: v for k, v in draws.items() if k.startswith("net")}
    center, other = ({k: v[i] for k, v in weights.items()} for i in range(2))

    def at(t, model):
        values = {k: (center[k] + t * (other[k] - center[k]))[None] for k in center}
        return fs.predict(values, jax.random.key(0), X, model=model)["f"][0, :, 0]

    linear_model = fs.variational.linearize(network, center)
    np.testing.assert_allclose(at(0.0, linear_model), at(0.0, network), atol=1e-6)
    slope = (at(1e-2, network) - at(-1e-2, network)) / 2e-2
    np.testing.assert_allclose(at(1.0, linear_model), at(0.0, network) + slope, atol=2e-3)
    assert np.abs(at(1.0, linear_model) - at(1.0, network)).max() > 0.05


@pytest.mark.slow
def test_a_linearized_network_of_two_outputs_has_two():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.tanh(nn.Dense(5)(x))
            return nn.Dense(1)(h)[:, 0], nn.Dense(1)(h)[:, 0]

    def model(x):
        for number, part in enumerate(fs.random_module("net", Two(), input_shape=1)(x)):
            numpyro.deterministic(f"part{number}", part)

    draws = numpyro.infer.Predictive(model, num_samples=2)(jax.random.key(0), X)
    center, other = ({k: v[i] for k, v in draws.items() if k.startswith("net")} for i in range(2))

    def parts(model, values):
        trace = numpyro.handlers.trace(numpyro.handlers.substitute(model, values)).get_trace(X)
        return np.stack([trace[f"part{number}"]["value"] for number in (0, 1)])

    near = {k: center[k] + 1e-3 * (other[k] - center[k]) for k in center}
    linear = parts(fs.variational.linearize(model, center), near)
    np.testing.assert_allclose(linear, parts(model, near), atol=1e-5)
    assert np.abs(linear - parts(model, center)).max(1).min() > 1e-4


@pytest.mark.slow
def test_supports_that_depend_on_other_sites_are_those_of_the_guide():
    """The bound constrains flat values as the guide does, whatever the guide's first trace had."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0], fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), X)
        top = numpyro.sample("top", dist.LogNormal(0.0, 1.0))
        s = numpyro.sample("s", dist.Uniform(0.0, top))
        numpyro.sample("y", dist.Normal(f(x), s), obs=y)

    guide = fs.variational.guides.mean_field(model)
    svi = SVI(model, guide, optax.adam(0.01), fs.FunctionalELBO())
    state = svi.init(jax.random.key(0), X, X[:, 0])
    settings = {"args": (X, X[:, 0]), "kwargs": {}, "needs_normal": True}
    guided = GuidedModel(model, guide, svi.get_params(state), jax.random.key(1), **settings)
    flat = guided.loc + jnp.arange(4.0) - 1.5
    by_guide = guide._postprocess_fn(guide._unpack_latent(flat))
    for name, value in guided.constrain(flat).items():
        np.testing.assert_allclose(value, by_guide[name], rtol=1e-6)


@pytest.mark.slow
def test_a_network_with_random_points_is_fitted():
    """The posterior of f is near the exact one of its prior, as near as twenty units bring it."""
    x = np.linspace(-0.5, 0.5, 20)[:, None].astype(np.float32)
    y = np.sin(4 * x[:, 0])

    def model(x, y=None):
        f = fs.random_module("net", nn.Sequential([nn.Dense(20), nn.tanh, nn.Dense(1)]), input_shape=1)
        f = fs.functional_prior("f", f, fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=1e-3), points)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)

    points = fs.measurement.uniform(-1.0, 1.0, 20)
    guide = fs.variational.guides.mean_field(model)
    svi = SVI(model, guide, optax.adam(0.01), fs.FunctionalELBO())
    result = svi.run(jax.random.key(0), 1500, x, y, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(200,))
    linear_model = fs.variational.linearize(model, guide.median(result.params))
    new = np.array([[-1.0], [0.0], [1.0]], np.float32)
    f = fs.predict(draws, jax.random.key(2), new, model=linear_model)["f"][..., 0]
    assert np.isfinite(result.losses).all()
    mean, covariance = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=1e-3).condition(x, y, 0.01).moments(new)
    sd = np.sqrt(np.diag(covariance))  # .61, .04, .61
    np.testing.assert_allclose(f.std(0), sd, rtol=0.4)
    assert (np.abs(f.mean(0) - mean) < 0.75 * sd).all()
    assert f[:, [0, 2]].std(0).min() > 3 * f[:, 1].std()
    assert abs(f[:, 1].mean()) < 0.1


# ---- errors ------------------------------------------------------------------------------------------------


def run_one_step(model, guide, loss):
    return SVI(model, guide, optax.adam(0.1), loss).run(
        jax.random.key(0), 1, jnp.asarray(X), jnp.asarray(Y), progress_bar=False
    )


def without_prior(x, y=None):
    w = numpyro.sample("w", dist.Normal())
    numpyro.sample("y", dist.Normal(w * x[:, 0], SIGMA).to_event(1), obs=y)


def constrained(x, y=None):
    w = numpyro.sample("w", dist.HalfNormal())
    f = fs.functional_prior("f", lambda x: w * x[:, 0], PRIOR, POINTS)
    numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)


def student(x, y=None):
    w = numpyro.sample("w", dist.Normal())
    f = fs.functional_prior(
        "f", lambda x: w * x[:, 0], fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(), df=4.0), POINTS
    )
    numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)


@pytest.mark.parametrize(
    "model, guide, error, message",
    [
        (without_prior, fs.variational.guides.mean_field, ValueError, "no functional_prior"),
        (constrained, fs.variational.guides.mean_field, ValueError, r"\['w'\]"),
        pytest.param(
            student, fs.variational.guides.mean_field, TypeError, "needs a Gaussian prior", marks=pytest.mark.slow
        ),
        pytest.param(linear, AutoDelta, TypeError, "fs.variational.guides.mean_field", marks=pytest.mark.slow),
        pytest.param(
            linear, AutoLaplaceApproximation, TypeError, "fs.variational.guides.mean_field", marks=pytest.mark.slow
        ),
    ],
)
def test_models_and_guides_that_cannot_be_used(model, guide, error, message):
    with pytest.raises(error, match=message):
        run_one_step(model, guide(model), fs.FunctionalELBO())


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan"), "small"])
def test_gamma_must_be_positive(gamma):
    with pytest.raises((ValueError, TypeError), match="gamma"):
        fs.variational.RegularizedKL(gamma)
    with pytest.raises((ValueError, TypeError), match="gamma"):
        fs.variational.PushforwardKL(gamma=gamma)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="prior_scale"):
        fs.variational.PushforwardKL(0.0)
    with pytest.raises(TypeError, match="divergence"):
        fs.FunctionalELBO(fs.variational.RegularizedKL)
    with pytest.raises(ValueError, match="num_particles"):
        fs.FunctionalELBO(num_particles=0)
    with pytest.raises(ValueError, match="rank"):
        fs.variational.guides.low_rank(linear, 0)
    with pytest.raises(ValueError, match="init_scale"):
        fs.variational.guides.mean_field(linear, init_scale=0.0)
    with pytest.raises(KeyError, match="center"):
        fs.predict({"w": jnp.zeros((1, 3))}, KEYS[0], X, model=fs.variational.linearize(linear, {}))


def test_numpyros_own_bound_still_reads_the_model():
    """``Trace_ELBO`` sees the functional prior as a factor, as before."""
    result = run_one_step(linear, fs.variational.guides.mean_field(linear), Trace_ELBO())
    assert np.isfinite(result.losses).all()


def scoped(inner):
    """Two networks, of which one has the name that the other has in its scope."""
    names = ("net", "net") if inner else ("net", "other")

    def model(x, y=None):
        pair = ((lambda key, x: {"w": jnp.ones(1)}), (lambda w, x: jnp.sinh(w["w"] * x[:, 0])))
        f = fs.random_module(names[0], pair, input_shape=1, prior=dist.Normal(0.0, 1.0))
        with numpyro.handlers.scope(prefix="a", divider="."):
            g = fs.random_module(names[1], pair, input_shape=1, prior=dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(f(x) + 2.0 * g(x), 0.1).to_event(1), obs=y)

    return model, [names[0], f"a.{names[1]}"]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
def test_functions_go_by_their_names_in_scopes(inner):
    """Each function is linearized by itself, and Laplace's law is the same under other names."""
    model, (first, second) = scoped(inner)
    center = {f"{first}.w": jnp.array([0.5]), f"{second}.w": jnp.array([-1.0])}
    draws = {k: v[None] for k, v in center.items()}
    values = fs.predict(draws, jax.random.key(0), X, model=fs.variational.linearize(model, center), inputs=X)
    np.testing.assert_allclose(values[first][0], np.sinh(0.5 * X[:, 0]), rtol=1e-5)
    np.testing.assert_allclose(values[second][0], np.sinh(-X[:, 0]), rtol=1e-5)
    found = fs.baselines.laplace(model, jax.random.key(0), X, Y, num_samples=200).samples
    assert min(float(jnp.std(found[k])) for k in center) > 0.01


@pytest.mark.slow
def test_a_scoped_functional_prior_is_fitted():
    plain = fs.FunctionalELBO()
    inside = numpyro.handlers.scope(linear, prefix="a", divider=".")
    losses = []
    for model in (linear, inside):
        svi = SVI(model, fs.variational.guides.mean_field(model), optax.adam(0.05), loss=plain)
        losses.append(float(svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def masked(mask):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        for name, part in (("f", mask), ("g", True)):
            with numpyro.handlers.mask(mask=part):
                f = fs.functional_prior(name, lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize("off", [False, jnp.array(False)])
def test_a_mask_silences_a_functional_prior(off):
    """In every engine, and a static mask as one that is traced: what is left is the other prior alone."""

    def alone(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("g", lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)

    def loss(model):
        svi = SVI(model, fs.variational.guides.mean_field(model), optax.adam(0.05), loss=fs.FunctionalELBO())
        return float(svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y))

    def spread(model):
        return fs.baselines.laplace(model, jax.random.key(0), X, Y, num_samples=2000).samples["w"].std(0)

    assert loss(masked(off)) == pytest.approx(loss(alone), rel=0.02)
    assert loss(masked(True)) > 1.1 * loss(alone)
    np.testing.assert_allclose(spread(masked(off)), spread(alone), rtol=0.1)
    assert np.any(np.abs(spread(masked(True)) / spread(alone) - 1.0) > 0.15)
    mcmc = fs.MCMC(fs.fSGHMC(masked(off), step_size=0.01), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.asarray(X), jnp.asarray(Y))


@pytest.mark.filterwarnings("ignore:Missing a plate statement")  # NumPyro's, who goes on
def test_observations_that_broadcast_are_refused():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x)[:, None], SIGMA), obs=y)

    svi = SVI(model, fs.variational.guides.mean_field(model), optax.adam(0.05), loss=fs.FunctionalELBO())
    with pytest.raises(ValueError, match=r"observation 'y' has shape \(5,\) but its likelihood has shape \(5, 5\)"):
        svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y)


def test_what_is_no_fit_is_refused():
    def model(y):
        w = numpyro.sample("w", dist.Normal())
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    svi = SVI(model, numpyro.infer.autoguide.AutoNormal(model), optax.adam(0.1), loss=Trace_ELBO())
    key, y = jax.random.key(0), np.ones(3)
    with pytest.raises(ValueError, match="The guide does not know the model"):
        fs.svi_posterior(svi, {}, key, y)
    state = svi.init(key, y)
    params = svi.get_params(state)
    with pytest.raises(TypeError, match=r"params must be the parameters of a fit: result\.params"):
        fs.svi_posterior(svi, state, key, y)
    with pytest.raises(TypeError, match=r"svi must be a numpyro\.infer\.SVI"):
        fs.svi_posterior(key, svi, params, y)
    with pytest.raises(ValueError, match="params holds NaN or infinite values: the fit has diverged"):
        fs.svi_posterior(svi, jax.tree.map(lambda a: a * np.nan, params), key, y)
    assert fs.svi_posterior(svi, params, key, y, num_samples=3).samples["w"].shape == (3,)


# ---- several measurements, latent values below functions, arguments of SVI ------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["columns", "events"])
def test_repeated_measurements_count_each(x64, kind):
    """A likelihood that broadcasts to [N, R] targets has the bound of one whose mean is repeated R times."""
    y = Y[:, None] + np.array([0.0, 0.2, -0.4])

    def model(x, y=None, *, repeated=False):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)(x)
        if repeated:
            numpyro.sample("y", dist.Normal(jnp.repeat(f[:, None], 3, 1), SIGMA), obs=y)
        elif kind == "columns":
            numpyro.sample("y", dist.Normal(f[:, None], SIGMA), obs=y)
        else:
            numpyro.sample("y", dist.Normal(f, SIGMA).to_event(1), obs=y.T)

    guide, loss = fs.variational.guides.mean_field(model, init_scale=0.5), fs.FunctionalELBO()
    svi = SVI(model, guide, optax.sgd(0.1), loss)
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    seen, right = (loss.loss(KEYS[0], params, model, guide, X, y, repeated=r) for r in (False, True))
    np.testing.assert_allclose(seen, right, rtol=1e-9)


def below(x, y=None, *, sigma=SIGMA):
    """Latent values around a function, and data around them."""
    w = numpyro.sample("w", dist.Normal())
    f = fs.functional_prior("f", lambda x: jnp.exp(w) * x[:, 0], PRIOR, POINTS)
    numpyro.deterministic("mean", f(x))
    with numpyro.plate("data", len(x)):
        u = numpyro.sample("u", dist.Normal(f(x), 0.5))
        numpyro.sample("y", dist.Normal(u, sigma), obs=y)


@pytest.mark.slow
def test_latent_values_below_a_linearized_function_follow_it(x64):
    """E log p(u | f_L) of a normal guide in closed form: (J² Var w + Var u + (f - m_u)²) / 2σ² and a constant."""
    guide = fs.variational.guides.mean_field(below, init_scale=0.7)
    svi = SVI(below, guide, optax.sgd(0.1), fs.FunctionalELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    guided = GuidedModel(below, guide, params, KEYS[0], args=(X, Y), kwargs={}, needs_normal=True)
    keys = jax.random.split(jax.random.key(1), 20_000)
    seen = jax.vmap(guided.rest_given_draw)(keys)
    center = guide.median(params)
    f = np.exp(center["w"]) * X[:, 0]  # which is its slope too
    squares = (f**2 + 1) * 0.7**2 + (f - np.asarray(center["u"])) ** 2
    right = -0.5 * np.sum(squares / 0.25 + np.log(2 * np.pi * 0.25))
    assert abs(np.mean(seen) - right) < 5 * np.std(seen) / np.sqrt(len(keys))


@pytest.mark.slow
def test_draws_have_the_deterministic_sites_of_the_linearized_model():
    """And the static arguments of SVI are those of the posterior."""
    guide = fs.variational.guides.mean_field(below, init_scale=0.7)
    svi = SVI(below, guide, optax.sgd(0.1), fs.FunctionalELBO(), sigma=0.25)
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    posterior = fs.svi_posterior(svi, params, jax.random.key(1), X, Y, num_samples=50)
    center, w = float(guide.median(params)["w"]), np.asarray(posterior.samples["w"])
    right = np.exp(center) * (1 + w - center)[:, None] * X[:, 0]
    np.testing.assert_allclose(posterior.samples["mean"], right, rtol=1e-4, atol=1e-5)
    assert posterior.kwargs == {"sigma": 0.25}
    pointwise = fs.to_arviz(posterior)["log_likelihood"]["y"].values[0]
    expected = dist.Normal(posterior.samples["u"], 0.25).log_prob(Y)
    np.testing.assert_allclose(pointwise, expected, rtol=1e-4, atol=1e-4)


def fitted(model, guide, *args, loss=None, num_steps=1):
    """An SVI object and the parameters of a short fit."""
    svi = SVI(model, guide, optax.adam(0.05), loss or Trace_ELBO())
    return svi, svi.run(jax.random.key(0), num_steps, *args, progress_bar=False).params


@pytest.mark.slow
def test_deterministic_sites_follow_parameters_and_have_all_rows():
    """Guides compute them with the parameters and the minibatch at their start."""

    def model(x, y=None):
        a, shift = numpyro.sample("a", dist.Normal()), numpyro.param("shift", 5.0)
        with numpyro.plate("data", len(x), subsample_size=2):
            mean = numpyro.deterministic("mean", a + shift + numpyro.subsample(x, event_dim=1)[:, 0])
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(mean, SIGMA), obs=yb)

    svi, params = fitted(model, AutoNormal(model), X, Y)
    posterior = fs.svi_posterior(svi, params | {"shift": jnp.array(-1.0)}, KEYS[0], X, Y, num_samples=7)
    right = posterior.samples["a"][:, None] - 1.0 + X[:, 0]
    np.testing.assert_allclose(posterior.samples["mean"], right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_draws_have_the_supports_of_their_data():
    """One guide for several data sets, under the bound that maps its values by the data of the step."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal())
        f = fs.functional_prior("f", lambda x: w * x[:, 0], PRIOR, POINTS)
        sigma = numpyro.sample("sigma", dist.Uniform(0.0, jnp.std(y)))
        numpyro.sample("y", dist.Normal(f(x), sigma).to_event(1), obs=y)

    guide = fs.variational.guides.mean_field(model)
    fitted(model, guide, X, Y, loss=fs.FunctionalELBO())
    svi, params = fitted(model, guide, X, 100.0 * Y, loss=fs.FunctionalELBO())
    draws = fs.svi_posterior(svi, params, KEYS[0], X, 100.0 * Y, num_samples=400).samples["sigma"]
    assert 0.3 < np.mean(draws) / np.std(100.0 * Y) < 0.7 and np.max(draws) > 0.5 * np.std(100.0 * Y)


def test_parts_of_a_list_of_guides_are_independent():
    def model(x, y):
        a, b = numpyro.sample("a", dist.Normal()), numpyro.sample("b", dist.Normal())
        numpyro.sample("y", dist.Normal(a + b * x[:, 0], SIGMA).to_event(1), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["b"]), prefix="first"))
    guide.append(AutoNormal(handlers.block(model, hide=["a"]), prefix="second"))
    svi, params = fitted(model, guide, X, Y)
    draws = fs.svi_posterior(svi, params, KEYS[0], X, Y, num_samples=2000).samples
    assert set(draws) == {"a", "b"} and abs(np.corrcoef(draws["a"], draws["b"])[0, 1]) < 0.12


@pytest.mark.slow
def test_a_list_of_guides_has_all_rows_of_a_minibatch():
    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("N", len(x), subsample_size=2):
            z = numpyro.sample("z", dist.Normal())
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(a + z, SIGMA), obs=yb)

    plates = {"create_plates": lambda x, y=None: numpyro.plate("N", len(x), subsample_size=2)}
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["z"]), prefix="first"))
    guide.append(AutoNormal(handlers.block(model, hide=["a"]), prefix="second", **plates))
    svi, params = fitted(model, guide, X, Y)
    assert fs.svi_posterior(svi, params, KEYS[0], X, Y, num_samples=7).samples["z"].shape == (7, 5)


def test_a_posterior_without_its_targets():
    """Nothing is computed where there is nothing to compute."""

    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, jnp.std(y)))
        numpyro.sample("y", dist.Normal(a * x[:, 0], SIGMA).to_event(1), obs=y)

    svi, params = fitted(model, AutoNormal(model), X, Y)
    assert fs.svi_posterior(svi, params, KEYS[0], X, num_samples=3).samples["a"].shape == (3,)


def test_a_point_guide_of_a_model_with_deterministic_sites():
    def model(x, y):
        a = numpyro.sample("a", dist.Normal())
        numpyro.sample("y", dist.Normal(numpyro.deterministic("mean", a * x[:, 0]), SIGMA).to_event(1), obs=y)

    svi, params = fitted(model, AutoDelta(model), X, Y)
    draws = fs.svi_posterior(svi, params, KEYS[0], X, Y, num_samples=3).samples
    np.testing.assert_allclose(draws["mean"], draws["a"][:, None] * X[:, 0], rtol=1e-5)


@pytest.mark.parametrize("how", ["param", "condition"])
def test_linearized_functions_see_what_outer_handlers_give(how):
    """What is substituted or conditioned on outside, as what is inside."""

    def model(x):
        w, v = numpyro.sample("w", dist.Normal()), numpyro.sample("v", dist.Normal())
        a = numpyro.param("a", 1.0)
        f = fs.functional_prior("f", lambda x: a * jnp.tanh(w * x[:, 0]) + v, PRIOR, POINTS)
        numpyro.deterministic("values", f(x))

    center, draw = {"w": jnp.array(0.5), "v": jnp.array(0.1)}, {"w": jnp.array(1.5), "v": jnp.array(0.7)}
    linear_model = fs.variational.linearize(model, center)
    if how == "param":
        linear_model = handlers.substitute(linear_model, data={"a": jnp.array(3.0)} | draw)
    else:
        linear_model = handlers.condition(handlers.substitute(linear_model, data={"w": draw["w"]}), {"v": draw["v"]})
    values = handlers.trace(handlers.seed(linear_model, 0)).get_trace(X)["values"]["value"]
    a, x, tanh = 3.0 if how == "param" else 1.0, X[:, 0], np.tanh(0.5 * X[:, 0])
    np.testing.assert_allclose(values, a * (tanh + (1 - tanh**2) * x) + 0.7, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_network_of_the_noise_is_linearized_everywhere(monkeypatch):
    """In closed form and by draws the likelihood is that of the linearized model, from which predictions are made."""

    def model(x, y=None):
        g = fs.random_module("g", nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)]), input_shape=1)
        linear(x, y, likelihood=lambda f: dist.Normal(f, 0.5 + nn.softplus(g(x)[:, 0])))

    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    loss = fs.FunctionalELBO(lambda law, prior, x: 0.0, num_particles=20_000)
    guide = fs.variational.guides.mean_field(model, init_scale=1.0)
    evaluate, params = prepared(model, guide, loss, *args)
    value = -float(evaluate(params, KEYS[0]))
    with monkeypatch.context() as patch:
        patch.setattr(likelihood_module, "integrated", lambda guided, key: None)
        drawn = -float(evaluate(params, KEYS[1]))
    assert value == pytest.approx(drawn, rel=0.02)


@pytest.mark.slow
def test_what_no_observation_depends_on_leaves_the_closed_form():
    """Further calls of the function and masks; a call within a program of the model's own is averaged by draws."""

    def with_a_curve(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.deterministic("curve", f(POINTS))
        with handlers.mask(mask=jnp.arange(5) < 3):
            numpyro.sample("y", dist.Normal(f(x), SIGMA), obs=y)

    def of_three(x, y=None):
        return linear(x[:3], None if y is None else y[:3])

    first = expected_log_likelihood(with_a_curve)
    assert first == expected_log_likelihood(with_a_curve, KEYS[1])
    assert first == pytest.approx(float(expected_log_likelihood(of_three)), rel=1e-5)

    def compiled(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
        f = fs.functional_prior("f", lambda x: features(x) @ w, PRIOR, POINTS)
        numpyro.sample("y", dist.Normal(jax.jit(f)(x), SIGMA).to_event(1), obs=y)

    svi = SVI(compiled, fs.variational.guides.mean_field(compiled), optax.adam(0.05), fs.FunctionalELBO())
    assert np.isfinite(svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()
    by_draws = expected_log_likelihood(compiled, KEYS[1], num_particles=20_000)
    assert float(by_draws) == pytest.approx(float(expected_log_likelihood(linear)), rel=0.05)


@pytest.mark.slow
def test_a_fit_without_data_is_refused():
    svi = SVI(linear, fs.variational.guides.mean_field(linear), optax.adam(0.05), fs.FunctionalELBO())
    with pytest.raises(ValueError, match="no observed site"):
        svi.run(jax.random.key(0), 10, X, progress_bar=False)


@pytest.mark.slow
def test_deterministic_sites_that_new_arguments_lack_are_left_out():
    """The residuals, which are those of data; without arguments all."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal())
        f = fs.functional_prior("f", lambda x: w * x[:, 0], PRIOR, POINTS)
        numpyro.deterministic("double", 2.0 * w)
        if y is not None:
            numpyro.deterministic("residual", y - f(x))
        numpyro.sample("y", dist.Normal(f(x), SIGMA).to_event(1), obs=y)

    svi = SVI(model, fs.variational.guides.mean_field(model), optax.sgd(0.1), fs.FunctionalELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    draws = [fs.svi_posterior(svi, params, KEYS[0], *args, num_samples=5).samples for args in ((X, Y), (X,), ())]
    assert [set(found) for found in draws] == [{"w", "double", "residual"}, {"w", "double"}, {"w"}]
