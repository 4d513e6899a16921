"""Rows loaded on demand: the draws of data in memory, whatever holds the rows."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from flax import linen as nn
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.model.entry_point import entry_point

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


#: Nothing to calibrate, for tests of what is loaded: programs that call Python are compiled anew in every process.
PLAIN = {"control_variates": False, "step_size": 1e-3, "warmup": fs.Warmup(warm_start=0.0)}


def run(x, y, *, kernel=None, **settings):
    kernel = fs.SGHMC(model, num_steps=4, **(kernel or {}))
    mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=10, progress_bar=False, **settings)
    mcmc.run(jax.random.key(0), x, y)
    return mcmc


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")  # ten draws say little
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


@pytest.mark.parametrize("row", some([2, 3, 40], 1))
def test_errors_of_rows_are_raised_as_they_are_wherever_the_row_is_read(row):
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    x[row] = np.nan

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 0.3), obs=None if y is None else y[i])

    mcmc = fs.MCMC(fs.SGHMC(model, num_steps=3), num_warmup=30, num_samples=10, progress_bar=False)
    with pytest.raises(ValueError, match=r"^OnDemand\(.*holds NaN or infinite values; drop those rows"):
        mcmc.run(jax.random.key(0), fs.OnDemand(x), np.zeros(50, np.float32))


def test_rows_in_any_order_and_number():
    array = np.arange(12.0).reshape(6, 2)
    source = fs.OnDemand(Recorder(array))
    rows = np.array([[5, 0], [3, 3]])
    for load in (source.__getitem__, jax.jit(lambda rows: source[rows]), jax.vmap(lambda rows: source[rows])):
        np.testing.assert_array_equal(load(jnp.asarray(rows)), array[rows])
    np.testing.assert_array_equal(source[1:5:2], array[1:5:2])
    assert source[jnp.array([0])].dtype == jnp.float32  # JAX's default precision
    assert len(source) == 6 and source.ndim == 2 and "Recorder of shape [6, 2]" in repr(source)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
def test_minibatches_of_ten_steps_at_a_time():
    """Without the full gradients of control variates, a call brings the rows of ten gradient steps, and no more."""
    random = np.random.default_rng(0)  # so many rows that ten minibatches hardly share any
    x, y = (Recorder(random.normal(size=shape).astype(np.float32)) for shape in ((50 * NUM, 2), 50 * NUM))
    mcmc = fs.MCMC(fs.SGHMC(model, control_variates=False), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    assert 9 * BATCH < x.most == y.most <= 10 * BATCH


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
def test_a_bar_loads_no_rows(files, monkeypatch):
    """Several chains in a terminal: R-hat of functions, which would need the inputs of all rows, is left out."""
    monkeypatch.setattr("numpyro_fspace.mcmc.run.is_watched", lambda: True)
    x, y = (Recorder(a) for a in files)
    settings = {"num_warmup": 5, "num_samples": 5, "num_chains": 2, "chain_method": "vectorized"}
    fs.MCMC(fs.SGHMC(model, **PLAIN), **settings).run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    assert BATCH < x.most < NUM  # those of ten gradient steps of two chains


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The kinetic temperature")
def test_functions_at_inputs_load_no_rows(files):
    """``to_arviz`` at ``inputs`` takes what was observed, no more; ``report`` takes the data for full gradients too."""
    x, y = (Recorder(a) for a in files)
    mcmc = fs.MCMC(fs.SGHMC(model, **PLAIN), num_warmup=0, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), fs.OnDemand(x), fs.OnDemand(y))
    new = jnp.asarray(files[0][:7])
    report = fs.report(mcmc, inputs=new)
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


def with_value(value, dtype=float):
    array = np.arange(40).astype(dtype)
    array[7] = value
    return array


@pytest.mark.parametrize(
    ("source", "settings", "text"),
    [
        (with_value(2**40, np.int64), {}, "would change int64 values such as 1099511627776 to int32"),
        (with_value(2**31, np.uint64), {"dtype": "int32"}, "would change uint64 values such as 2147483648 to int32"),
        (with_value(300, np.int32), {"dtype": "int8"}, "would change int32 values such as 300 to int8"),
        (with_value(0.5), {"dtype": int}, "would change float64 values such as 0.5 to int32"),
        (with_value(1e300), {}, r"would make float64 values such as 1e\+300 infinite in float32"),
        (with_value(1e300).reshape(20, 2), {}, r"float64 values such as 1e\+300 infinite"),
        (with_value(70_000.0), {"dtype": "float16"}, "float64 values such as 70000 infinite in float16"),
        (with_value(np.nan), {}, "holds NaN or infinite values"),
        (with_value(np.nan), {"dtype": int}, "would change float64 values such as nan to int32"),
        (with_value(-np.inf, np.float32), {}, "holds NaN or infinite values"),
        (with_value(np.nan, np.float16), {}, "holds NaN or infinite values"),
    ],
)
def test_rows_have_the_checks_of_arrays_in_memory(source, settings, text):
    """Where they are loaded, in compiled programs too; other rows are as good as ever."""
    data = fs.OnDemand(source, **settings)
    load = jax.jit(lambda rows: data[rows])
    row = 3 if source.ndim == 2 else 7
    for loaded in (data.__getitem__, entry_point(lambda rows: jax.block_until_ready(load(rows)))):
        with pytest.raises(ValueError, match=text):
            loaded(jnp.array([1, row, 2]))
    np.testing.assert_array_equal(load(jnp.array([9, 8])), source[[9, 8]])


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "<f2", np.longdouble, bool, np.uint8, "bfloat16"])
def test_every_type_of_real_numbers_is_read_right(dtype):
    array = np.arange(6).astype(jnp.dtype(dtype) if dtype == "bfloat16" else dtype).reshape(3, 2)
    found = jax.jit(lambda rows: fs.OnDemand(array)[rows])(jnp.array([2, 0]))
    np.testing.assert_array_equal(np.asarray(found, float), array[[2, 0]].astype(float))


def test_sources_whose_rows_are_others_are_refused():
    for source in (pandas.Series([1.0, 2.0], index=[1, 0]), np.ma.masked_less(np.arange(3.0), 1.0)):
        with pytest.raises(TypeError, match="by label or masked"):
            fs.OnDemand(source)
    for shape in ((0,), (0, 3), (5, 0)):
        with pytest.raises(ValueError, match="source is empty"):
            fs.OnDemand(np.zeros(shape))


class Away(Recorder):
    def __getitem__(self, rows):
        raise ConnectionError("the server is away")


@pytest.mark.slow
def test_errors_of_a_run_are_its_sources_own(files, capfd):
    x, y = files
    for source, kernel, error, text in (
        (Away(x), PLAIN, ConnectionError, "^the server is away$"),
        (np.where(np.arange(NUM)[:, None] == 250, np.nan, x), {}, ValueError, "holds NaN"),
    ):
        with pytest.raises(error, match=text):
            run(fs.OnDemand(source), fs.OnDemand(y), kernel=kernel)
    assert "pure_callback" not in capfd.readouterr().err


@pytest.mark.parametrize("num", [NUM - 1, NUM + 1])
def test_rows_of_a_plate_of_another_size_are_refused(files, num):
    """Too few rows would be missed at random, too many never be seen."""
    x, y = files
    with pytest.raises(ValueError, match=rf"plate 'data' has {NUM} rows and OnDemand\(.* has {num}"):
        run(fs.OnDemand(x), fs.OnDemand(np.resize(y, num)))


@pytest.mark.parametrize("part", [slice(None), slice(5, -5), slice(None, None, -1)])
def test_a_file_that_is_cut_short_is_an_error(tmp_path, part):
    """And not the end of the process; one that grows is none."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(5000.0))
    data = fs.OnDemand(np.load(path, mmap_mode="r")[part])
    with path.open("ab") as file:
        file.write(b"more")
    assert np.isfinite(data[np.array([0, 4000])]).all()
    os.truncate(path, 8000)
    with pytest.raises(OSError, match="truncated: it has 8000 bytes, but 40128 are mapped"):
        data[np.array([0, 4000])]


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


def test_functions_of_jax_are_refused_and_those_of_numpy_read_all_rows():
    array = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    data = fs.OnDemand(array)
    for use in (jnp.asarray, jnp.sin, lambda x: jnp.take(x, 0, axis=0), lambda x: x + jnp.ones(2), jax.jit(jnp.sum)):
        with pytest.raises(ValueError, match=r"is on disk: a model takes rows of it, by minibatches.*x\[rows\]"):
            use(data)
    np.testing.assert_array_equal(np.asarray(data), array)
    np.testing.assert_array_equal(data[:], array)
    assert jnp.shape(data) == np.shape(data) == (6, 2) and jnp.ndim(data) == 2


def test_two_arrays_of_numbers_are_refused():
    """NumPy would take an entry of each row; an entry for each pair would be other data."""
    data = fs.OnDemand(np.arange(12.0, dtype=np.float32).reshape(4, 3))
    rows, columns = np.array([0, 2]), np.array([1, 2])
    with pytest.raises(IndexError, match=r"take_along_axis"):
        data[rows, columns]
    with pytest.raises(IndexError, match=r"take_along_axis"):
        jax.jit(lambda rows: data[rows, columns])(rows)
    np.testing.assert_array_equal(data[:, columns], data.source[:, columns])
    np.testing.assert_array_equal(data[1, columns], data.source[1, columns])
    np.testing.assert_array_equal(data[rows, 1:], data.source[rows, 1:])
