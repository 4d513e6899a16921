"""Rows loaded on demand: the draws of data in memory, whatever holds the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen as nn

import numpyro_fspace as fs
from numpyro_fspace.infer import mcmc as driver

NUM, BATCH = 300, 20


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM, 2)).astype(np.float32)
    y = (x[:, 0] - x[:, 1] ** 2).astype(np.float32)
    for name, a in (("x", x), ("y", y)):
        np.save(tmp_path / f"{name}.npy", a)
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))


def model(x, y=None):
    f = fs.random_module("f", nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(1)]), input_shape=2)
    with numpyro.plate("data", len(x), subsample_size=BATCH) as rows:
        numpyro.sample("y", dist.Normal(f(x[rows])[:, 0], 0.3), obs=None if y is None else y[rows])


def run(x, y, **settings):
    mcmc = fs.MCMC(fs.SGHMC(model, num_steps=4), num_warmup=20, num_samples=10, progress_bar=False, **settings)
    mcmc.run(jax.random.key(0), x, y)
    return mcmc


@pytest.mark.filterwarnings("ignore:The chain runs hot")  # ten draws say little
@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.nightly), {"num_chains": 2, "chain_method": "vectorized"}]
)
def test_the_draws_are_those_of_data_in_memory(files, settings):
    """Control variates and their full gradients included."""
    in_memory = run(*(jnp.asarray(a) for a in files), **settings)
    on_disk = run(*(fs.OnDemand(a) for a in files), **settings)
    for one, two in zip(*(jax.tree.leaves(m.get_samples()) for m in (in_memory, on_disk)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    new = np.asarray(files[0][:7])
    f = [fs.predict(m, jax.random.key(1), new, inputs=new)["f"] for m in (in_memory, on_disk)]
    np.testing.assert_allclose(*f, rtol=1e-3, atol=1e-4)


class Recorder:
    """A source that only takes what an HDF5 file does, increasing distinct row numbers, and remembers how many."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.most = array, array.shape, array.dtype, 0

    def __getitem__(self, rows):
        assert (np.diff(rows) > 0).all()
        self.most = max(self.most, len(rows))
        return self.array[rows]


def test_rows_in_any_order_and_number():
    array = np.arange(12.0).reshape(6, 2)
    source = fs.OnDemand(Recorder(array))
    rows = np.array([[5, 0], [3, 3]])
    for load in (source.__getitem__, jax.jit(lambda rows: source[rows]), jax.vmap(lambda rows: source[rows])):
        np.testing.assert_array_equal(load(jnp.asarray(rows)), array[rows])
    np.testing.assert_array_equal(source[1:5:2], array[1:5:2])
    assert source[jnp.array([0])].dtype == jnp.float32  # JAX's default precision
    assert len(source) == 6 and source.ndim == 2 and "Recorder of shape [6, 2]" in repr(source)


@pytest.mark.filterwarnings("ignore:The chain runs hot")
def test_minibatches_of_ten_steps_at_a_time():
    """Without the full gradients of control variates, a call brings the rows of ten gradient steps, and no more."""
    random = np.random.default_rng(0)  # so many rows that ten minibatches hardly share any
    x, y = (Recorder(random.normal(size=shape).astype(np.float32)) for shape in ((50 * NUM, 2), 50 * NUM))
    mcmc = fs.MCMC(fs.SGHMC(model, control_variates=False), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    assert 9 * BATCH < x.most == y.most <= 10 * BATCH


@pytest.mark.filterwarnings("ignore:The chain runs hot")
def test_a_bar_loads_no_rows(files, monkeypatch):
    """Several chains in a terminal: R-hat of functions, which would need the inputs of all rows, is left out."""
    monkeypatch.setattr(driver, "is_watched", lambda: True)
    x, y = (Recorder(a) for a in files)
    settings = {"num_warmup": 5, "num_samples": 5, "num_chains": 2, "chain_method": "vectorized"}
    fs.MCMC(fs.SGHMC(model, control_variates=False), **settings).run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    assert BATCH < x.most < NUM  # those of ten gradient steps of two chains


@pytest.mark.filterwarnings("ignore:The chain runs hot")
def test_functions_at_inputs_load_no_rows(files):
    """``report`` and ``to_arviz`` at ``inputs`` take the rows of minibatches and what was observed, no more."""
    x, y = (Recorder(a) for a in files)
    mcmc = fs.MCMC(fs.SGHMC(model, control_variates=False), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    new = jnp.asarray(files[0][:7])
    report = fs.report(mcmc, inputs=new)
    assert x.most <= 10 * BATCH
    x.most = 0
    arviz = fs.to_arviz(mcmc, inputs=new, log_lik=False)
    assert x.most == 0
    np.testing.assert_array_equal(arviz["observed_data"]["y"], files[1])
    f = arviz["posterior"]["f"].values
    assert f.shape[:3] == (1, 20, 7)
    np.testing.assert_array_equal(f[0], fs.predict(mcmc, jax.random.key(1), new)["f"])
    assert report.functions


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="got generator without shape"):
        fs.OnDemand(i for i in range(3))
    with pytest.raises(TypeError, match="of a single number"):
        fs.OnDemand(np.zeros(()))
    with pytest.raises(TypeError, match="source must be of real numbers, got dtype <U1"):
        fs.OnDemand(np.array(["a", "b"]))
    with pytest.raises(TypeError, match="dtype must be of real numbers, got dtype complex64"):
        fs.OnDemand(np.zeros(3), dtype=complex)
    with pytest.raises(IndexError, match="rows 2 to 9 are not all among the 3"):
        fs.OnDemand(np.zeros((3, 1)))[np.array([2, 9])]


def test_rows_and_columns():
    array = np.arange(24.0).reshape(6, 2, 2)
    source, rows = fs.OnDemand(array), jnp.array([4, 1])
    np.testing.assert_array_equal(source[rows, 0], array[[4, 1], 0])
    np.testing.assert_array_equal(jax.jit(lambda rows: source[rows, 1, 0])(rows), array[[4, 1], 1, 0])
    np.testing.assert_array_equal(source[1:3, 1], array[1:3, 1])


def test_a_mask_of_rows():
    data = fs.OnDemand(np.arange(5.0, dtype=np.float32))
    np.testing.assert_array_equal(data[np.array([False, False, True, True, False])], [2.0, 3.0])
    np.testing.assert_array_equal(data[[True, False, False, False, True]], [0.0, 4.0])
    for mask in (np.array([True, False]), np.array(True)):
        with pytest.raises(IndexError, match=r"mask of all its rows \[5\].*np.flatnonzero"):
            data[mask]
    with pytest.raises(IndexError, match="outside of compiled programs"):
        jax.jit(lambda mask: data[mask])(jnp.ones(5, bool))
