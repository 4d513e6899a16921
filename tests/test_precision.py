"""Priors and dynamics compute in full precision on every device; a network in half precision keeps its law."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from jax.extend.core import subjaxprs
from support.tiers import some

import numpyro_fspace as fs

X = jnp.linspace(-1.0, 1.0, 20)[:, None]
Y = jnp.sin(3.0 * X[:, 0])


def draws(dtype):
    """Draws of f [S, 20] of a network that computes in ``dtype``."""
    net = nn.Sequential([nn.Dense(20, dtype=dtype), nn.tanh, nn.Dense(1, dtype=dtype)])
    prior, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), fs.measurement.uniform(-1.0, 1.0, 10)

    def model(x, y=None):
        f = fs.functional_prior("f", fs.random_module("net", net, input_shape=(1,)), prior, points)
        numpyro.sample("y", dist.Normal(f(x)[:, 0].astype(jnp.float32), 0.2), obs=y)

    kernel = fs.fSGHMC(model)
    mcmc = fs.MCMC(kernel, num_warmup=200, num_samples=400, num_chains=8, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert {leaf.dtype for leaf in jax.tree.leaves(mcmc.last_state)} & {jnp.dtype("bfloat16")} == set()
    return np.asarray(fs.predict(mcmc, jax.random.key(1), X)["f"], np.float32)[..., 0]


@pytest.mark.slow
def test_half_precision_moves_functions_by_little_of_their_spread():
    """Means to a sixth of an sd, sds to a seventh: what Monte Carlo leaves of two equal laws is half as much."""
    exact, half = draws(jnp.float32), draws(jnp.bfloat16)
    assert half.dtype == np.float32
    sd = exact.std(0)
    assert np.max(np.abs(half.mean(0) - exact.mean(0)) / sd) < 1 / 6
    assert np.max(np.abs(half.std(0) / sd - 1.0)) < 1 / 7


def reduced(fn, *args):
    """The products of matrices in a program whose precision a GPU would reduce."""

    def products(program):
        for equation in program.eqns:
            if equation.primitive.name in ("dot_general", "conv_general_dilated"):
                yield equation.params["precision"]
        for inner in subjaxprs(program):
            yield from products(inner)

    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    found = list(products(jax.make_jaxpr(fn)(*args).jaxpr))
    return [precision for precision in found if precision != highest], len(found)


LINE = jnp.linspace(-1.0, 1.0, 6)[:, None]
PLANE = jnp.stack([LINE[:, 0], LINE[::-1, 0] ** 2], 1)
GP = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
PRIORS = {
    "gp": (GP, LINE),
    "products within a kernel": (fs.GPPrior(tinygp.kernels.DotProduct() + 0.1), PLANE),
    "transformed inputs": (
        fs.GPPrior(tinygp.transforms.Linear(jnp.array([[1.0, 0.5], [0.0, 1.0]]), tinygp.kernels.Matern32())),
        PLANE,
    ),
    "student": (fs.priors.StudentTPrior(tinygp.kernels.Matern52(0.5), df=5.0), LINE),
    "posterior": (
        fs.GPPrior(tinygp.kernels.ExpSquared(0.5)).condition(LINE, LINE[:, 0], noise_variance=0.1),
        LINE + 0.1,
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_priors_multiply_in_full_precision(name):
    """On a GPU JAX's default would round each factor to 10 bits, and a GP's density to several units."""
    prior, x = PRIORS[name]
    f = jnp.zeros((len(x), 1))
    wrong, num = reduced(jax.value_and_grad(lambda f, x: jnp.sum(prior.log_prob(x, f))), f, x)
    assert not wrong
    assert num > 0 or name in ("gp", "student")  # whose solves are no products from jaxlib 0.11.2 on


@pytest.mark.parametrize("preconditioner", [fs.preconditioners.dense, fs.preconditioners.rmsprop])
@pytest.mark.parametrize("batch_size", some([None, 5], 1))
def test_dynamics_multiply_in_full_precision(preconditioner, batch_size):
    """The model has no product of its own, so that all are those of warm-up, of the sampler and of its prior."""
    prior, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), fs.measurement.uniform(-1.0, 1.0, 4)
    net = (lambda key, x: jnp.ones(3), lambda w, x: w[0] * x + w[1] * jnp.tanh(x) + w[2])

    def model(x, y):
        f = fs.functional_prior("f", fs.random_module("net", net, input_shape=(1,)), prior, points)
        with numpyro.plate("data", len(x), subsample_size=batch_size):
            rows, targets = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(rows)[:, 0], 0.2), obs=targets)

    kernel = fs.fSGHMC(model, preconditioner=preconditioner())
    state = kernel.init(jax.random.key(0), 20, None, (X, Y), {})
    wrong, num = reduced(lambda state: kernel.sample(state, (X, Y), {}), state)
    assert not wrong and num > 5


@pytest.mark.filterwarnings("ignore:gp_network.*between the points:RuntimeWarning")  # six points in six dimensions
@pytest.mark.slow
@pytest.mark.parametrize("convolution", [fs.model.conv_general_dilated, jax.lax.conv_general_dilated])
def test_networks_with_an_exact_prior_multiply_in_full_precision(convolution):
    """Their last layers can be so large that rounded features would move the values at the points."""

    def init(key, x):
        return {"convolution": jnp.ones((3, 1, 4)), "kernel": jnp.ones((24, 2)), "bias": jnp.ones(2)}

    def apply(w, x):
        rows = convolution(x[..., None], w["convolution"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
        return jnp.tanh(rows).reshape(len(x), -1) @ w["kernel"] + w["bias"]

    prior, points = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), num_outputs=2), jnp.eye(6)

    def model(x, y):
        f = fs.gp_network("f", (init, apply), prior, points)
        numpyro.sample("y", dist.Normal(f(x), 0.2).to_event(), obs=y)

    kernel = fs.fSGHMC(model)
    data = points + 0.1, jnp.zeros((6, 2))
    state = kernel.init(jax.random.key(0), 20, None, data, {})
    wrong, num = reduced(lambda state: kernel.sample(state, data, {}), state)
    assert not wrong and num > 5
