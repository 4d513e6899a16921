"""What the package tells XLA, and spares it, changes the time of a run and not what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from flax import linen as nn
from jax.flatten_util import ravel_pytree

import numpyro_fspace as fs
from numpyro_fspace import _xla as xla

TREE = {"bias": jnp.arange(3.0), "scale": jnp.ones(()), "weights": jnp.arange(6.0).reshape(2, 3) / 7.0}


def energy(unflatten):
    def fn(w):
        tree = unflatten(w)
        return jnp.sum(jnp.sin(tree["weights"]) @ tree["bias"]) * jnp.exp(tree["scale"]) + jnp.sum(tree["bias"] ** 3)

    return fn


@pytest.mark.parametrize(
    "derivative",
    [
        jax.grad,
        lambda fn: jax.vmap(jax.grad(fn), in_axes=None, axis_size=2),
        lambda fn: lambda w: jax.jvp(jax.grad(fn), (w,), (jnp.cos(w),))[1],
        lambda fn: lambda w: jax.vmap(lambda d: jax.jvp(jax.grad(fn), (w,), (d,))[1])(jnp.eye(w.size)),
    ],
    ids=["gradient", "of chains", "Hessian product", "Hessian"],
)
def test_a_gradient_in_pieces_is_the_gradient(monkeypatch, derivative):
    monkeypatch.setattr(xla, "MIN_PIECEWISE", 1)
    w, unflatten = xla.flatten(TREE)
    plain, unravel = ravel_pytree(TREE)
    is_in_pieces = "dynamic_update_slice" in str(jax.make_jaxpr(jax.grad(energy(unflatten)))(w))
    assert is_in_pieces == (jax.default_backend() == "cpu")
    np.testing.assert_array_equal(w, plain)
    jax.tree.map(np.testing.assert_array_equal, unflatten(w), TREE)
    found, expected = (jax.jit(derivative(energy(fn)))(w) for fn in (unflatten, unravel))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


NUM_IN_THE_LARGEST = 225  # of regression: fifteen draws of w, among which its initial value is the median


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1], 5]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([5]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(x @ w) @ v, 0.3), obs=y)


def of_network(x, y):
    f = fs.gp_network("f", nn.Dense(1), fs.GPPrior(tinygp.kernels.ExpSquared(0.5)), np.eye(3), hidden_scale=1.0)
    numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(f(x)[:, 0], 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGLD, fs.SGHMC])
@pytest.mark.parametrize("preconditioner", [fs.preconditioners.rmsprop(), fs.preconditioners.prior_scale()])
def test_a_run_whose_gradients_come_in_pieces_has_the_same_draws(monkeypatch, kernel, preconditioner):
    x = jnp.linspace(-1, 1, 20)[:, None] ** jnp.arange(1, 4)
    draws = []
    for least in (10**6, 1):
        monkeypatch.setattr(xla, "MIN_PIECEWISE", least)
        mcmc = fs.MCMC(
            kernel(regression, preconditioner=preconditioner),
            num_warmup=20,
            num_samples=10,
            num_chains=2,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(0), x, jnp.sin(3 * x[:, 0]))
        draws.append(mcmc.get_samples()["w"])
    np.testing.assert_allclose(*draws, rtol=1e-2, atol=1e-3)


def test_the_largest_array_is_found_in_what_a_program_calls():
    def inner(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.outer(x, x).sum(), lambda x: x.sum(), x)

    def outer(x):
        return jax.lax.scan(lambda total, row: (total + jax.jit(inner)(row), None), 0.0, x)[0]

    assert xla.largest_array(jax.make_jaxpr(outer)(jnp.ones((2, 9))).jaxpr) == 81
    assert xla.largest_array(jax.make_jaxpr(lambda x: x)(1.0).jaxpr) == 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU's threads")
@pytest.mark.parametrize(
    ("num_rows", "num_chains", "is_divided"),
    [(20, 1, False), pytest.param(20, 2000, True, marks=pytest.mark.slow), (20_000, 1, True)],
)
@pytest.mark.filterwarnings("ignore:The Metropolis test accepts")  # the step is none for so many rows
def test_only_large_arrays_are_divided_among_threads(num_rows, num_chains, is_divided):
    settings = {"num_chains": num_chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = fs.MCMC(fs.SGLD(regression, step_size=1e-4, num_steps=2), num_warmup=0, num_samples=1, **settings)
    mcmc.run(jax.random.key(0), jnp.ones((num_rows, 3)), jnp.zeros(num_rows))
    (loop,) = mcmc._loops.values()
    assert (loop.options(factorizes=mcmc.last_state.plan.factorizes) is None) is is_divided


def test_options_that_this_compiler_lacks_are_left_out():
    """XLA refuses a program that is given an option which it does not know."""
    known = xla._known(xla_backend_optimization_level=1, xla_no_such_option=True)
    assert known == {"xla_backend_optimization_level": 1}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU's compiler")
@pytest.mark.filterwarnings("ignore:gp_network:RuntimeWarning")
def test_programs_that_factorize_matrices_are_compiled_quickly(monkeypatch):
    monkeypatch.setattr(xla, "optimizes", lambda: True)
    quick = xla.compiler_options(is_divided=False, is_quick=True)
    assert quick["xla_backend_optimization_level"] == 1
    assert xla.UNDIVIDED.items() <= quick.items()
    assert xla.compiler_options(is_divided=False) == xla.UNDIVIDED
    assert jax.jit(lambda x: 2 * x, compiler_options=quick)(3) == 6
    network = fs.MCMC(fs.SGHMC(of_network, num_steps=2), num_warmup=0, num_samples=1, progress_bar=False)
    plain = fs.MCMC(fs.SGLD(regression, step_size=1e-4, num_steps=2), num_warmup=0, num_samples=1, progress_bar=False)
    for mcmc, expected in ((network, quick), (plain, xla.UNDIVIDED)):
        plan = mcmc.sampler.prepare((jnp.ones((20, 3)), jnp.zeros(20)), {}, 0)
        loop = mcmc._loop(("z",), (None, ()), None, plan.largest_array, 1)
        assert loop.options(factorizes=plan.factorizes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [fs.SGLD, fs.SGHMC])
def test_chains_in_blocks_make_the_draws_of_chains_side_by_side(monkeypatch, kernel):
    x = jnp.linspace(-1, 1, 20)[:, None] ** jnp.arange(1, 4)
    settings = {"num_chains": 6, "chain_method": "vectorized", "progress_bar": False}
    draws, together = [], []
    for most in (6.0, 2.5):
        mcmc = fs.MCMC(kernel(regression, step_size=1e-3, num_steps=4), num_warmup=4, num_samples=5, **settings)
        monkeypatch.setattr(xla, "MAX_TOGETHER", int(most * NUM_IN_THE_LARGEST))
        mcmc.run(jax.random.key(0), x, jnp.sin(3 * x[:, 0]))
        assert mcmc.last_state.plan.largest_array == NUM_IN_THE_LARGEST
        together.append(xla.chains_together(6, NUM_IN_THE_LARGEST))
        draws.append(mcmc.get_samples(group_by_chain=True)["w"])
    assert together == ([6, 2] if jax.default_backend() == "cpu" else [6, 6])
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-4)
