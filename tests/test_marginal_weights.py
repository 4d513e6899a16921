"""The last layer of any network integrated out, also under Gaussian functional priors, beside the density with it."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from support.compilation import quick_jit
from support.laws import gaussian_p_values

import numpyro_fspace as fs
from numpyro_fspace.model.last_layer.integrable import find_block
from numpyro_fspace.model.last_layer.marginal_potential import MarginalPotential
from numpyro_fspace.model.potential import ModelPotential

X = np.linspace(-1.0, 1.0, 8)[:, None]
Y = np.sin(3.0 * X[:, 0])
POINTS = np.linspace(-1.2, 1.2, 5)[:, None]
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
LAST = ("net.layers_2.bias", "net.layers_2.kernel")


def net(num_outputs=1):
    return nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(num_outputs)])


def network(name="net", prior=None, num_outputs=1):
    return fs.random_module(name, net(num_outputs), input_shape=1, prior=prior or fs.fan_in(1.5))


def observe(mean, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.3))
    numpyro.sample("y", dist.Normal(mean, sigma).to_event(np.ndim(mean) - 1), obs=y)


def of_weights(x, y=None):
    observe(network()(x)[:, 0], y)


def of_a_random_scale(x, y=None):
    observe(network(prior=fs.fan_in(numpyro.sample("scale", dist.LogNormal(0.0, 0.5))))(x)[:, 0], y)


def of_a_location(x, y=None):
    observe(network(prior=dist.Normal(0.3, 0.7))(x)[:, 0], y)


def of_standard_weights(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with handlers.reparam(config={site: LocScaleReparam(0.0) for site in LAST}):
        f = network(prior=lambda path, shape: dist.Normal(0.0, scale).expand(shape).to_event())
    observe(f(x)[:, 0], y)


def under(prior, **settings):
    def model(x, y=None):
        observe(fs.functional_prior("f", network(), prior, POINTS, **settings)(x)[:, 0], y)

    return model


def of_a_random_kernel(x, y=None):
    """Its density has a constant that depends on another site."""
    length = numpyro.sample("length", dist.LogNormal(-1.0, 0.3))
    gp = fs.GPPrior(tinygp.kernels.ExpSquared(length), nugget=0.01, mean=lambda x: x[:, 0])
    observe(fs.functional_prior("f", network(), gp, POINTS)(x)[:, 0], y)


def calibrated():
    draw = fs.model.random_function(net(), input_shape=1, prior=fs.fan_in(3.0))
    return fs.priors.CalibratedPrior(GP, fs.priors.NetworkPrior(draw, jax.random.key(0), num_draws=100))


def of_a_sum(x, y=None):
    f, g = network(), network("more")
    observe(f(x)[:, 0] + x[:, 0] * g(x)[:, 0], y)


def beside_a_gp_network(x, y=None):
    f = fs.gp_network("f", net(), GP, POINTS, input_shape=1, hidden_scale=2.0, tolerance=0.1)
    observe(f(x)[:, 0] + network()(x)[:, 0], y)


def of_two_outputs(x, y=None):
    gp = fs.GPPrior([tinygp.kernels.ExpSquared(0.5), 2.0 * tinygp.kernels.Matern32(0.4)], nugget=0.01, num_outputs=2)
    observe(fs.functional_prior("f", network(num_outputs=2), gp, POINTS)(x), y)


#: Models, and the sites that are integrated out.
MODELS = {
    "weights": (of_weights, LAST),
    "random scale": (of_a_random_scale, LAST),
    "location": (of_a_location, LAST),
    "standard weights": (of_standard_weights, tuple(f"{site}_decentered" for site in LAST)),
    "functional prior": (under(GP), LAST),
    "scaled functional prior": (under(GP, scale=0.7), LAST),
    "calibrated prior": (under(calibrated()), LAST),
    "random kernel": (of_a_random_kernel, LAST),
    "two outputs": (of_two_outputs, LAST),
    "sum": (of_a_sum, (*LAST, "more.layers_2.bias", "more.layers_2.kernel")),
}
SOME = ["weights", "calibrated prior"]


def potentials(model, *args):
    full = ModelPotential(model, args, key=jax.random.key(0))
    block, why = find_block(full)
    assert why is None
    return full, MarginalPotential(model, args, block=block, key=jax.random.key(0))


def integrated(full, z, block):
    """``(-log ∫ exp(-U) dc, mean, covariance)`` of the sites c of the block, in which U is quadratic."""
    zeros, unravel = ravel_pytree({site: jnp.zeros(jnp.shape(full.trace[site]["value"])) for site in block})

    def energy(c):
        return full(z | unravel(c), jax.random.key(0))[0]

    hessian = jax.hessian(energy)(zeros)
    mean = -jnp.linalg.solve(hessian, jax.grad(energy)(zeros))
    log_det = jnp.linalg.slogdet(hessian)[1] - len(zeros) * math.log(2 * math.pi)
    return energy(mean) + 0.5 * log_det, mean, jnp.linalg.inv(hessian)


def moved(potential, seed):
    """A position away from the initial one."""
    values, unravel = ravel_pytree(potential.init_params())
    return unravel(values + 0.4 * jax.random.normal(jax.random.key(seed), values.shape))


@pytest.mark.parametrize("name", [k if k in SOME else pytest.param(k, marks=pytest.mark.slow) for k in MODELS])
@pytest.mark.parametrize("num_rows", [8, pytest.param(3, marks=pytest.mark.slow)])
def test_the_density_is_the_integral_of_that_of_all_sites(name, num_rows, x64):
    model, sites = MODELS[name]
    y = np.stack([Y, Y**2], 1) if name == "two outputs" else Y
    full, marginal = potentials(model, X[:num_rows], y[:num_rows])
    assert set(marginal.block) == set(sites)
    pair = quick_jit(lambda z: (marginal(z, None)[0], integrated(full, z, marginal.block)[0]))
    for seed in (1, 2):
        found, expected = pair(moved(marginal, seed))
        np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gp_network:RuntimeWarning")
@pytest.mark.parametrize("num_rows", [8, 3])
def test_last_layers_of_both_kinds_are_integrated_out_together(num_rows, x64):
    full, marginal = potentials(beside_a_gp_network, X[:num_rows], Y[:num_rows])
    assert set(marginal.block) == {*LAST, "f.last_layer", "f.values", "f.residual"}
    z = moved(marginal, 1)
    found, expected = marginal(z, None)[0], integrated(full, z, marginal.block)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert {k: v.shape for k, v in marginal.completed(z).items()} == {k: v.shape for k, v in full.init_params().items()}


@pytest.mark.parametrize("name", ["weights", pytest.param("calibrated prior", marks=pytest.mark.slow)])
def test_completed_draws_have_the_distribution_given_the_rest(name, x64):
    """4000 positions that differ in the last bits only, by χ² against the Gaussian in closed form."""
    full, marginal = potentials(MODELS[name][0], X, Y)
    z = moved(marginal, 1)
    _, mean, covariance = quick_jit(lambda z: integrated(full, z, marginal.block))(z)
    near = {k: jnp.broadcast_to(v, (4000, *v.shape)) for k, v in z.items()}
    near["sigma"] = near["sigma"] * (1.0 + 1e-7 * jnp.arange(4000))
    complete = quick_jit(jax.vmap(lambda z: ravel_pytree({k: marginal.completed(z)[k] for k in marginal.block})[0]))
    draws = np.asarray(complete(near))
    assert min(gaussian_p_values(draws, mean, covariance).values()) > 1e-4
    assert min(gaussian_p_values(1.05 * draws, mean, covariance).values()) < 1e-4


# ---- where it does not apply -------------------------------------------------------------------


def of_laplace_weights(x, y=None):
    observe(network(prior=dist.Laplace(0.0, 1.0))(x)[:, 0], y)


def of_no_network(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    observe(slope * x[:, 0], y)


def of_one_layer(x, y=None):
    numpyro.sample("y", dist.Normal(fs.random_module("net", nn.Dense(1), input_shape=1)(x)[:, 0], 0.3), obs=y)


def of_a_wide_layer(x, y=None):
    f = fs.random_module("net", nn.Sequential([nn.Dense(600), nn.tanh, nn.Dense(1)]), input_shape=1)
    observe(f(x)[:, 0], y)


def of_squares(x, y=None):
    observe(network()(x)[:, 0] ** 2, y)


def step(x, y=None):
    levels = numpyro.sample("levels", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    observe(jnp.where(network()(x)[:, 0] > 0, levels[0], levels[1]), y)


@jax.custom_jvp
def straight_through(f):
    return jnp.sign(f)


straight_through.defjvp(lambda primals, tangents: (jnp.sign(primals[0]), tangents[0]))


@jax.custom_jvp
def with_half_the_slope(f):
    return 1.0 * f


with_half_the_slope.defjvp(lambda primals, tangents: (primals[0], 0.5 * tangents[0]))


@jax.custom_vjp
def unchanged(f):
    return f


unchanged.defvjp(lambda f: (f, None), lambda _, slope: (slope,))

#: Functions of the network whose derivative is constant where it exists, or cannot be linearized.
NOT_AFFINE = {
    "step": step,
    "sign": lambda x, y=None: observe(jnp.sign(network()(x)[:, 0]), y),
    "phase": lambda x, y=None: observe(network()(x)[:, 0] - 2 * jnp.round(network("b")(x)[:, 0] / 2), y),
    "remainder": lambda x, y=None: observe(jnp.fmod(network()(x)[:, 0], 2.0), y),
    "stopped": lambda x, y=None: observe((f := network()(x)[:, 0]) + jax.lax.stop_gradient(f) ** 2, y),
    "straight through": lambda x, y=None: observe(straight_through(network()(x)[:, 0]), y),
    "other derivative": lambda x, y=None: observe(with_half_the_slope(network()(x)[:, 0]), y),
    "reverse derivative": lambda x, y=None: observe(unchanged(network()(x)[:, 0]), y),
    "choice": lambda x, y=None: observe(jnp.array([0.0, 1.0])[jnp.argmax(network(num_outputs=2)(x), -1)], y),
    "loop": lambda x, y=None: observe(jax.lax.scan(lambda c, f: (c * f, c * f), 1.0, network()(x)[:, 0])[1], y),
}


class Robust(dist.Normal):
    """A normal distribution in name only."""

    def log_prob(self, value):
        return dist.StudentT(3.0, self.loc, self.scale).log_prob(value)


def robust(x, y=None):
    numpyro.sample("y", Robust(network()(x)[:, 0], 0.3), obs=y)


def of_its_own_noise(x, y=None):
    f = network(num_outputs=2)(x)
    numpyro.sample("y", dist.Normal(f[:, 0], jnp.exp(f[:, 1])), obs=y)


STUDENT_T = fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(0.5), df=4.0)
REFUSED = {
    "no weights of a last layer have a normal prior": of_laplace_weights,
    "the model has no network": of_no_network,
    "there is no other site to sample": of_one_layer,
    "601 last-layer parameters and 8 observations are too many": of_a_wide_layer,
    "the mean of an observation is not affine": of_squares,
    "the scale of an observation, or the prior of another site, depends on a function": of_its_own_noise,
    "the functional prior 'f' is not a plain Gaussian process": under(
        fs.priors.StudentTPrior(tinygp.kernels.ExpSquared(0.5), df=4.0)
    ),
    "'y' is not a plain Normal likelihood": robust,
    "minibatches or random numbers": lambda x, y=None: observe(
        fs.functional_prior("f", network(), GP, fs.measurement.uniform(-1.0, 1.0, 4))(x)[:, 0], y
    ),
}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_operations_that_are_not_known_to_be_affine(name):
    """Nothing of a network enters the block but what is added without them: of "phase" the first network."""
    block = fs.SGHMC(NOT_AFFINE[name])._integrated_out((X, Y), {})
    assert set(block) == (set(LAST) if name == "phase" else set())


def test_the_weight_prior_must_be_normal_too():
    def model(x, y=None):
        observe(network(prior=lambda path, shape: Robust(0.0, 1.0).expand(shape).to_event())(x)[:, 0], y)

    assert fs.SGHMC(model)._integrated_out((X, Y), {}) == ()


def under_a_scope(x, y=None):
    f = network()
    sigma = handlers.scope(lambda: numpyro.sample("sigma", dist.HalfNormal(0.3)), prefix="noise")()
    numpyro.sample("y", dist.Normal(f(x)[:, 0], sigma), obs=y)


@pytest.mark.parametrize("model", [under_a_scope, handlers.scope(of_weights, prefix="all")], ids=["inner", "outer"])
def test_constrained_sites_under_a_scope_keep_their_jacobian(model, x64):
    full, marginal = potentials(model, X, Y)
    z = moved(marginal, 1)
    np.testing.assert_allclose(marginal(z, None)[0], integrated(full, z, marginal.block)[0], rtol=1e-8)


def test_networks_of_names_that_begin_alike(x64):
    def model(x, y=None):
        observe(network("net")(x)[:, 0] + network("net.a")(x)[:, 0], y)

    full, marginal = potentials(model, X, Y)
    z = moved(marginal, 1)
    np.testing.assert_allclose(marginal(z, None)[0], integrated(full, z, marginal.block)[0], rtol=1e-8)


def test_targets_far_from_the_initial_noise_do_not_overflow():
    """Squares of 1e6 over the initial noise, of which a chain must come down."""
    _, marginal = potentials(of_weights, X, 1e6 * (1.5 + Y))
    z = marginal.init_params()
    value, slope = jax.value_and_grad(lambda z: marginal(z, None)[0])(z)
    assert np.isfinite(value)
    assert slope["sigma"] < -1e10
    below = {"sigma": jnp.asarray(-60.0)}
    assert marginal(z | below, None)[0] == jnp.inf


def test_what_would_take_most_of_the_time_is_sampled_unless_asked_for():
    """Ten outputs of fifty features are ten times as many columns as their products have."""
    x, y = np.zeros((200, 1), np.float32), np.zeros((200, 10), np.float32)

    def model(x, y=None):
        net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(10)])
        observe(fs.random_module("net", net, input_shape=1)(x), y)

    assert fs.SGHMC(model)._integrated_out((x, y), {}) == ()
    assert fs.SGHMC(model, marginalize=True)._integrated_out((x, y), {}) != ()
    assert fs.SGHMC(of_weights)._integrated_out((X, Y), {}) != ()


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_integrated_out(why):
    kernel = fs.SGHMC(REFUSED[why], marginalize=True)
    with pytest.raises(ValueError, match=f"marginalize=True, but {why}"):
        kernel._model_potential((X, Y), {})
    kernel.marginalize = None
    assert kernel._integrated_out((X, Y), {}) == ()


class Tempered(fs.GPPrior):
    """A density of its own, which the inherited residuals do not have."""

    def log_prob(self, x, f):
        return 0.5 * super().log_prob(x, f)


class TemperedResiduals(fs.GPPrior):
    """The same density with its residuals."""

    def log_prob(self, x, f):
        return 0.5 * super().log_prob(x, f)

    def gaussian_residuals(self, x, f):
        r, constant = super().gaussian_residuals(x, f)
        return math.sqrt(0.5) * r, 0.5 * constant


class WithoutOutputs:
    """A prior with the methods that are documented, and no others."""

    def log_prob(self, x, f):
        return GP.log_prob(x, f)

    def gaussian_residuals(self, x, f):
        return GP.gaussian_residuals(x, f)

    def sample(self, key, x, sample_shape=()):
        return GP.sample(key, x, sample_shape)


def test_residuals_that_do_not_belong_to_the_density_are_not_used(x64):
    kernel = tinygp.kernels.ExpSquared(0.5)
    assert fs.fSGHMC(under(Tempered(kernel, nugget=0.01)))._integrated_out((X, Y), {}) == ()
    for prior in (TemperedResiduals(kernel, nugget=0.01), WithoutOutputs()):
        full, marginal = potentials(under(prior), X, Y)
        z = moved(marginal, 1)
        np.testing.assert_allclose(marginal(z, None)[0], integrated(full, z, marginal.block)[0], rtol=1e-8)


def test_a_masked_functional_prior_is_not_integrated():
    def masked(x, y=None):
        with handlers.mask(mask=jnp.asarray(True)):
            f = fs.functional_prior("f", network(), GP, POINTS)
        observe(f(x)[:, 0], y)

    assert fs.fSGHMC(masked)._integrated_out((X, Y), {}) == ()


def test_on_a_gpu_only_the_last_layer_of_a_gp_network_is_integrated_out_unasked(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fs.SGHMC(of_weights)._integrated_out((X, Y), {}) == ()
    assert set(fs.SGHMC(of_weights, marginalize=True)._integrated_out((X, Y), {})) == set(LAST)
    with pytest.warns(RuntimeWarning, match="gp_network"):
        block = fs.SGHMC(beside_a_gp_network)._integrated_out((X, Y), {})
    assert {site.partition(".")[0] for site in block} == {"f"}


# ---- the decomposition of log densities --------------------------------------------------------


@pytest.mark.parametrize("prior", [GP, calibrated()], ids=["gp", "calibrated"])
def test_residuals_are_affine_and_have_the_log_density(prior, x64):
    f = np.random.default_rng(0).normal(size=(3, 5))
    r, c = zip(*(prior.gaussian_residuals(POINTS, values) for values in f), strict=True)
    for values, residual, constant in zip(f, r, c, strict=True):
        np.testing.assert_allclose(constant - 0.5 * residual @ residual, prior.log_prob(POINTS, values), rtol=1e-9)
    np.testing.assert_allclose(prior.gaussian_residuals(POINTS, f[0] + f[1] - f[2])[0], r[0] + r[1] - r[2], atol=1e-8)
    assert c[0] == c[1]
