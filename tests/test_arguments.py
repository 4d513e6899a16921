"""Model arguments: NumPy's arrays will do, also where a model takes the rows of a plate from them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen as nn
from numpyro.infer import SVI
from tinygp.kernels import ExpSquared

import numpyro_fspace as fs
from numpyro_fspace.model.data.arguments import split_arrays, with_rows
from numpyro_fspace.model.programs.cache import cached_program

X = np.linspace(-1.0, 1.0, 20, dtype=np.float32)[:, None]
Y = np.sin(3.0 * X[:, 0])


def model(x, y=None):
    network = fs.random_module("net", nn.Sequential([nn.Dense(3), nn.tanh, nn.Dense(1)]), input_shape=1)
    f = fs.functional_prior("f", network, fs.GPPrior(ExpSquared(1.0), nugget=0.01), X[:4])
    with numpyro.plate("rows", len(x), subsample_size=5) as rows:
        numpyro.sample("y", dist.Normal(f(x[rows])[:, 0], 0.1), obs=None if y is None else y[rows])


def sampled():
    mcmc = fs.MCMC(fs.fSGHMC(model, num_steps=2), num_warmup=8, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    assert fs.report(mcmc, X, Y, key=jax.random.key(2)).num_diverging == 0
    assert fs.to_arviz(mcmc)["posterior"]["f"].shape == (1, 4, 20, 1)
    return mcmc


def optimized():
    svi = SVI(model, fs.variational.guides.mean_field(model), optax.adam(0.01), fs.FunctionalELBO())
    params = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).params
    return fs.svi_posterior(svi, params, jax.random.key(1), X, Y, num_samples=4)


def ensemble():
    return fs.baselines.ensemble(model, jax.random.key(0), X, Y, num_members=2, num_updates=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
@pytest.mark.parametrize("fit", [sampled, optimized, ensemble])
def test_rows_of_numpy_s_arrays(fit):
    assert np.isfinite(fs.predict(fit(), jax.random.key(3), X)["f"]).all()


def test_rows_by_numbers_known_and_unknown():
    on_disk, text = fs.OnDemand(X), "text"
    found = with_rows({"x": X, "other": (on_disk, text, None, 2)})
    assert found["other"] == (on_disk, text, None, 2)
    x, rows = found["x"], jnp.array([3, 1])
    np.testing.assert_array_equal(x[np.array([3, 1])], X[[3, 1]])
    np.testing.assert_array_equal(jax.jit(lambda rows: x[rows])(rows), X[[3, 1]])
    np.testing.assert_array_equal(jax.jit(lambda rows: x[rows, 0])(rows), X[[3, 1], 0])
    np.testing.assert_array_equal(jax.vmap(lambda row: x[row])(rows), X[[3, 1]])
    assert isinstance(jax.jit(lambda: x[:, None].size)(), jax.Array)  # known: nothing is traced
    np.testing.assert_allclose(jax.jit(lambda w: x @ w + jnp.tanh(x))(jnp.ones((1, 1))), X + np.tanh(X), rtol=1e-6)


def test_a_callable_object_that_may_change_is_not_remembered():
    class Scale:
        def __call__(self, x):
            return x

    for leaf, is_remembered in ((Scale(), False), (jnp.tanh, True), (jax.nn.relu, True), (lambda x: x, True)):
        programs: dict = {}
        static = split_arrays(((leaf,), {}))[1]
        first, second = (cached_program(programs, static, (), object()) for _ in range(2))
        assert (first is second) is is_remembered
