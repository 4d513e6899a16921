"""Checkpoints: a run that is stopped anywhere ends as the undisturbed one, and nothing on disk is ever lost."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
import zlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas
import pytest
from flax import linen as nn
from models import POINTS, X, Y, linear, random_points
from numpyro.infer import NUTS, init_to_value
from support.tiers import some

import numpyro_fspace as fs
from numpyro_fspace.mcmc.checkpoint_writer import Checkpoint, _write_state
from numpyro_fspace.mcmc.loop import Loop
from numpyro_fspace.mcmc.run_description import _code_of, describe
from numpyro_fspace.model.checks.arguments import arguments_of
from numpyro_fspace.posterior.storage.checkpoint_files import _difference, flat
from numpyro_fspace.posterior.storage.checkpoint_integrity import sealed
from numpyro_fspace.posterior.storage.fingerprint import leaves_as_text, other_arguments

pytestmark = pytest.mark.filterwarnings("ignore:The kinetic temperature:RuntimeWarning", "ignore::UserWarning")

KEY = jax.random.key(3)
KERNEL = fs.fSGHMC(linear(random_points(), batch=4), num_steps=3)
PROGRAMS = {}


def driver(folder, *, kernel=KERNEL, num_chains=2, **settings):
    given = {"num_warmup": 25, "num_samples": 34, "checkpoint_every": 10, "chain_method": "vectorized"} | settings
    mcmc = fs.MCMC(kernel, num_chains=num_chains, progress_bar=False, checkpoint=folder, **given)
    if kernel is KERNEL:
        mcmc._loops = PROGRAMS  # compiled once for all tests; the killed processes compile their own
    return mcmc


def run(mcmc):
    mcmc.run(KEY, X, Y, extra_fields=("potential_energy",))
    return mcmc


def finished(folder, **settings):
    return run(driver(folder, **settings))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("runs") / "undisturbed")


@pytest.fixture
def folder(tmp_path, undisturbed):
    """A copy of what the undisturbed run has written."""
    return shutil.copytree(undisturbed.checkpoint, tmp_path / "run")


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a._states), jax.tree.leaves(b._states), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a.last_state), jax.tree.leaves(b.last_state), strict=True):
        np.testing.assert_array_equal(plain(x), plain(y))


# ---- the same run --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 3])
def test_draws_are_those_of_a_run_without_checkpoint(tmp_path, num_chains):
    written, plain = finished(tmp_path, num_chains=num_chains), finished(None, num_chains=num_chains)
    assert all(isinstance(a, np.ndarray) and not a.flags.writeable for a in jax.tree.leaves(written._states))
    for group in (True, False):
        a, b = (m.get_samples(group_by_chain=group) for m in (written, plain))
        assert set(a) == set(b)
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-4, atol=1e-4)
        a, b = (m.get_extra_fields(group_by_chain=group) for m in (written, plain))
        assert set(a) == set(b)
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-3)
    assert set(fs.predict(written, KEY, X)) == {"f", "y"}


@pytest.mark.slow
def test_thinning(tmp_path):
    """By a number that divides neither the draws nor those between two checkpoints."""
    thin = finished(tmp_path, thinning=7, num_samples=30).get_samples()["w"]
    whole = finished(None, thinning=7, num_samples=30).get_samples()["w"]
    np.testing.assert_allclose(thin, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_nuts_too(tmp_path):
    def nuts(folder):
        return finished(folder, kernel=NUTS(linear(POINTS)))

    assert_same(nuts(tmp_path / "a"), nuts(tmp_path / "a"))
    np.testing.assert_allclose(
        nuts(tmp_path / "a").get_samples()["w"], nuts(None).get_samples()["w"], rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"target_accept_prob": 0.5}, {"max_tree_depth": 2}, {"dense_mass": True}, {"step_size": 0.1}]
)
def test_nuts_with_other_settings_is_another_run(tmp_path, change):
    finished(tmp_path, kernel=NUTS(linear(POINTS)), num_warmup=5, num_samples=5)
    with pytest.raises(ValueError, match=f"settings._{next(iter(change))} was"):
        finished(tmp_path, kernel=NUTS(linear(POINTS), **change), num_warmup=5, num_samples=5)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("after", "moment"),
    [
        (0, "before"),
        pytest.param(2, "after", marks=pytest.mark.slow),
        (3, "between"),
        pytest.param(5, "before", marks=pytest.mark.slow),
        (6, "between"),
    ],
)
def test_a_stopped_run_ends_as_the_undisturbed_one(tmp_path, monkeypatch, undisturbed, after, moment):
    """Stopped at a write of warm-up or of sampling: before it, between draws and state, or after it."""
    writes, save = [], Checkpoint.save

    def stopping(self, num_kept, num_made, state, part=None):
        writes.append(num_made)
        stop = len(writes) > after
        if stop and moment == "before":
            raise Stop
        if stop and moment == "between" and part is not None:
            for name, values in part.items():
                self._put(name, num_kept - values.shape[1], values)
            raise Stop
        save(self, num_kept, num_made, state, part)
        if stop:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Checkpoint, "save", stopping)
        finished(tmp_path)
    assert len(writes) == after + 1
    (tmp_path / ".state.npz-abc").write_bytes(b"half")  # of a write that was killed
    assert_same(finished(tmp_path), undisturbed)
    assert not list(tmp_path.glob(".*-*")), "no half-written file is left"


def test_a_finished_run_is_read(folder, monkeypatch, undisturbed):
    before = contents(folder)
    monkeypatch.setattr(Loop, "__call__", lambda *_, **__: pytest.fail("nothing is left to draw"))
    assert_same(finished(folder), undisturbed)
    assert contents(folder) == before


def test_an_interrupted_run_has_its_draws(tmp_path, monkeypatch, undisturbed):
    """As one without checkpoint has; the folder has them too."""
    call = Loop.__call__

    def interrupted(self, state, draws, start, stop, *rest, **named):
        if stop > 50:
            raise KeyboardInterrupt
        return call(self, state, draws, start, stop, *rest, **named)

    mcmc = driver(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "__call__", interrupted)
        run(mcmc)
    found = fs.Posterior.from_checkpoint(tmp_path, mcmc.sampler.model, X, Y)
    whole = undisturbed.get_samples(group_by_chain=True)["w"]
    np.testing.assert_array_equal(mcmc.get_samples(group_by_chain=True)["w"], whole[:, :20])
    np.testing.assert_array_equal(mcmc.get_samples()["w"], whole[:, :20].reshape(40, 2))
    np.testing.assert_array_equal(found.samples["w"], mcmc.get_samples()["w"])
    assert_same(run(mcmc), undisturbed)


# ---- opened without the run ----------------------------------------------------------------------------------


def test_a_posterior_of_the_folder_is_that_of_the_run(folder, undisturbed):
    found = fs.Posterior.from_checkpoint(folder, undisturbed.sampler.model, X, Y)
    np.testing.assert_array_equal(found.samples["w"], undisturbed.get_samples()["w"])
    a, b = (fs.predict(source, KEY, X[:3], batch_size=7) for source in (found, undisturbed))
    assert set(a) == {"f", "y"}
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    a, b = (fs.to_arviz(source) for source in (found, undisturbed))
    for group, name in (("posterior", "f"), ("posterior", "w"), ("sample_stats", "lp"), ("log_likelihood", "y")):
        np.testing.assert_array_equal(a[group][name].values, b[group][name].values)
        assert a[group][name].values.shape[:2] == (2, 34)


def is_mapped(array):
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


def test_draws_stay_on_disk(folder, undisturbed):
    """In NumPyro's methods, in ours and in ArviZ's object: views of the mapped files, no copies."""
    found = fs.Posterior.from_checkpoint(folder, undisturbed.sampler.model, X, Y)
    assert is_mapped(found.samples["w"]) and is_mapped(found.stats["diverging"])
    assert all(is_mapped(undisturbed.get_samples(group_by_chain=group)["w"]) for group in (True, False))
    assert is_mapped(fs.to_arviz(found, log_lik=False)["posterior"]["w"].values)


@pytest.mark.slow
def test_keys_and_bytes_survive(tmp_path):
    """Fields that are keys, empty, or of a type that NumPy's files do not know."""
    mcmc = driver(tmp_path / "run", kernel=fs.SGLD(linear(POINTS), step_size=0.01))
    mcmc.run(KEY, X, Y, extra_fields=("rng_key", "momentum"))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert fields["momentum"].shape == (2, 34, 0)
    assert mcmc.get_extra_fields()["momentum"].shape == (68, 0)
    assert fs.to_arviz(mcmc)["sample_stats"]["momentum"].shape == (2, 34, 0)
    np.testing.assert_array_equal(fields["rng_key"][:, -1], jax.random.key_data(mcmc.last_state.rng_key))
    half = jax.numpy.arange(12, dtype="bfloat16").reshape(2, 3, 2)
    with Checkpoint(tmp_path / "half", {"arrays": {"z/w": ["bfloat16", [2, 3, 2]]}}) as files:
        files.save(3, 3, half, {"z/w": np.asarray(half)})
    np.testing.assert_array_equal(files.draws()["z"]["w"], half)
    np.testing.assert_array_equal(files.load(half)[2], half)


def test_names_of_sites_may_be_anything(tmp_path):
    names = ["z/a/b", "z/a.b", "z/A.b", "z/" + "é" * 300, "z/.."]
    with Checkpoint(tmp_path, {"arrays": {name: ["float32", [1, 2, 1]] for name in names}}) as files:
        files.save(2, 2, {}, {name: np.full((1, 2, 1), i, np.float32) for i, name in enumerate(names)})
    found = Checkpoint.open(tmp_path).draws()["z"]
    assert [found[name[2:]].tolist() for name in names] == [[[[i], [i]]] for i in range(5)]


# ---- what is refused, and left as it is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_samples": 40}, "num_samples was 34 and is 40"),
        ({"checkpoint_every": 5}, "checkpoint_every was 10 and is 5"),
        ({"num_chains": 1}, "num_chains was 2 and is 1"),
        ({"kernel": fs.SGHMC(linear(POINTS))}, "kernel was 'fSGHMC' and is 'SGHMC'"),
        ({"kernel": fs.fSGHMC(linear(random_points(), batch=4), num_steps=4)}, "settings.num_steps was '3' and is '4'"),
        (
            {"kernel": fs.fSGHMC(linear(random_points(), batch=4), num_steps=3, warmup=fs.Warmup(0.1))},
            "settings.warmup was",
        ),
    ],
)
def test_another_run_is_refused(folder, change, text):
    before = contents(folder)
    with pytest.raises(ValueError, match=text):
        finished(folder, **change)
    assert contents(folder) == before


def scaled(x, y=None, noise=1.0):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w * x[:, 0], noise), obs=y)


def scaled_run(folder, noise=0.5, **options):
    options = {
        "step_size": optax.constant_schedule(1e-2),
        "preconditioner": fs.preconditioners.diagonal(1.0),
        "init_strategy": init_to_value(values={"v": np.zeros((1, 2000))}),
    } | options
    mcmc = driver(folder, kernel=fs.SGHMC(scaled, num_steps=2, **options))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "init_to_value", RuntimeWarning)  # of v, which the model does not have
        mcmc.run(KEY, X, Y, noise=noise)
    return np.asarray(mcmc.get_samples()["w"])


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A finished run of ``scaled``: its folder and draws."""
    folder = tmp_path_factory.mktemp("runs") / "scaled"
    return folder, scaled_run(folder)


def test_from_checkpoint_warns_of_other_arguments_however_they_are_given(first_run):
    """Also of a change that no density shows in three digits, and not of another type or of y by name."""
    folder, _ = first_run
    wrong = X.copy()
    wrong[0] += 0.001
    noise, wrong_y = {"noise": 0.5001}, {"y": Y + 1e-3}
    for args, kwargs, name in (((wrong, Y), {}, "x"), ((X,), wrong_y, "y"), ((X, Y), noise, "noise")):
        with pytest.warns(RuntimeWarning, match=f"differ from those of the checkpoint's run: argument '{name}'"):
            fs.Posterior.from_checkpoint(folder, scaled, *args, **({"noise": 0.5} | kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fs.Posterior.from_checkpoint(folder, scaled, X, y=jax.numpy.asarray(Y), noise=0.5)
        fs.Posterior.from_checkpoint(folder, scaled, X.astype(np.float64), Y, np.float64(0.5))


def test_only_what_is_certainly_another_argument_is_named():
    def model(x, *others, noise=1.0):
        pass

    x, key = np.linspace(0.0, 1.0, 5), jax.random.key(0)
    run = {"a": x, "b": [np.arange(3), 2.0]}
    inputs = {
        name + place: text
        for name, value in arguments_of((run, x, key), {"noise": 1}).items()
        for place, text in leaves_as_text(value).items()
    }

    def others(*args, **kwargs):
        return other_arguments(inputs, model, args, kwargs)

    single = x.astype(np.float32)  # which of the float64 values it was cannot be known
    for same in (run, {"a": single, "b": [np.arange(3), 2]}, {"a": pandas.Series(x), "b": None}, {}):
        assert others(same, x, key, noise=1.0) == others(same, single, jax.random.key(1), noise=1) == []
    assert others({"a": x + 1e-9, "b": [np.arange(3), 2.0]}) == ["argument 'x'"]
    assert others({"a": x, "b": [np.arange(3), 2.5]}, noise=True) == ["argument 'x'"]
    for number in (float("nan"), 2**53 + 1, 10**400):
        assert other_arguments({"argument 'noise'": repr(number)}, model, (), {"noise": number}) == []
    assert others(run, x[:4], key, noise=2) == ["positional argument 1", "argument 'noise'"]
    assert other_arguments(inputs, dict, (), {"noise": 2}) == ["argument 'noise'"]  # its signature is not known


def add_one(values):
    return {"w": values["w"] + 1.0}


@pytest.mark.slow
def test_another_postprocess_fn_is_refused(tmp_path):
    settings = {"num_warmup": 5, "num_samples": 4, "num_chains": 1, "kernel": fs.SGHMC(scaled, num_steps=2)}

    def draws(postprocess_fn):
        mcmc = driver(tmp_path / "run", postprocess_fn=postprocess_fn, **settings)
        mcmc.run(KEY, X, Y)
        return np.asarray(mcmc.get_samples()["w"])

    first = draws(add_one)
    np.testing.assert_array_equal(draws(add_one), first)
    for other in (None, lambda values: {"w": values["w"] + 1000.0}):
        with pytest.raises(ValueError, match="postprocess_fn"):
            draws(other)


def test_the_code_of_a_function_is_known_by_all_of_its_parts():
    def scaled_by(scale):
        return lambda v: {k: scale * v[k] for k in v if k in {"w", "b"}}

    def shifted_by(default):
        return lambda v, shift=default: v + shift

    def empty():
        return lambda v: later(v)
        later = None

    functions = [
        *(scaled_by(1.0), scaled_by(2.0), shifted_by(1.0), shifted_by(2.0), empty(), None, add_one, np.exp),
        *(lambda v: {"w": jax.numpy.exp(v["w"])}, lambda v: {"w": jax.numpy.log(v["w"])}),
        *(lambda v: {k: v[k] for k in v if k in {"w"}}, lambda v: {k: v[k] for k in v if k in {"c", "b"}}),
        *(partial(add_one, names={"w", "b"}), partial(add_one, names={"w"}), jax.jit(add_one)),
    ]
    texts = [_code_of(fn) for fn in functions]
    assert len(set(texts)) == len(functions) - 1 and texts[-1] == texts[6]  # a compiled function is the same
    assert texts[:2] == [_code_of(scaled_by(1.0)), _code_of(scaled_by(2.0))]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise": 50.0}, r"argument 'noise' was '0\.5' and is '50.0'"),
        ({"noise": np.array(50.0)}, r"argument 'noise' was '0.5' and is float64\[\]"),
        ({"preconditioner": fs.preconditioners.diagonal(0.1)}, "settings.preconditioner"),
        ({"preconditioner": fs.preconditioners.dense()}, "settings.preconditioner"),
        ({"step_size": optax.constant_schedule(1e-3)}, "settings.step_size"),
        ({"step_size": optax.piecewise_constant_schedule(1e-2, {57: 0.1})}, "settings.step_size"),
        ({"init_strategy": init_to_value(values={"v": np.eye(1, 2000, 999)})}, "init_strategy"),
    ],
)
def test_what_is_no_array_tells_runs_apart_too(first_run, changes, text):
    folder, _ = first_run
    before = contents(folder)
    with pytest.raises(ValueError, match=text):
        scaled_run(folder, **changes)
    assert contents(folder) == before


def test_schedules_and_settings_that_are_the_same_go_on(first_run):
    folder, draws = first_run
    np.testing.assert_array_equal(scaled_run(folder), draws)


@pytest.mark.slow
def test_functions_in_place_of_weights_are_no_posterior(tmp_path):
    def model(x, y=None):
        f = fs.random_module("f", nn.Dense(1), input_shape=x.shape[-1])
        numpyro.sample("y", dist.Normal(f(x)[:, 0], 1.0), obs=y)

    mcmc = driver(tmp_path, kernel=fs.SGHMC(model, step_size=1e-2), functions_at=X)
    mcmc.run(KEY, X, Y)
    with pytest.raises(ValueError, match="functions in place of weights"):
        fs.Posterior.from_checkpoint(tmp_path, model, X, Y)


def test_the_input_that_differs_is_named(folder):
    """Whatever its kind, and no other."""
    changes = {
        "positional argument 1 has other values": {"y": Y + 1.0},
        r"positional argument 0 was float32\[8, 1\] and is float32\[8, 2\]": {"x": np.tile(X, 2)},
        "rng_key has other values": {"key": jax.random.key(4)},
        r"init_params\['w'\] was not given and is float32\[2, 2\]; init_params \(its": {
            "init_params": {"w": np.zeros((2, 2), np.float32)}
        },
    }
    before, names = contents(folder), r"holds another run: {}[^;]*\. Give another directory"
    for text, change in changes.items():
        given = {"key": KEY, "x": np.asarray(X), "y": Y} | change
        key, x, y = given.pop("key"), given.pop("x"), given.pop("y")
        match = text if "init" in text else names.format(text)
        with pytest.raises(ValueError, match=match):
            driver(folder).run(key, x, y, extra_fields=("potential_energy",), **given)
    assert contents(folder) == before


def inputs(mcmc, args, kwargs):
    """The inputs of a run as a checkpoint describes them."""
    return describe(mcmc, KEY, (), None, args=args, kwargs=kwargs)["inputs"]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (({"a": np.ones(3), "b": np.zeros(2)},), {}, r"positional argument 0\['b'\] has other values"),
        (({"a": np.ones(3)},), {}, r"positional argument 0\['b'\] was float64\[2\] and is not given"),
        (({"a": np.ones(3), "b": np.ones(2)}, None), {}, "positional argument 1 was not given and is 'None'"),
        (({"a": np.ones(3), "b": np.ones(2)},), {"z": np.ones(2)}, "argument 'z' was not given and is float64"),
        (({"a": np.ones(3), "b": [np.ones(2)]},), {}, r"positional argument 0 \(its structure\) was"),
    ],
)
def test_nested_and_missing_arguments_are_named(args, kwargs, text):
    mcmc = driver(None)
    given = {"a": np.ones(3), "b": np.ones(2)}
    one, other = (inputs(mcmc, *each) for each in (((given,), {}), (args, kwargs)))
    assert re.search(text, "; ".join(_difference(k, one.get(k), other.get(k)) for k in {**one, **other}))
    assert one == inputs(mcmc, ({k: v.copy() for k, v in given.items()},), {})


@pytest.mark.parametrize(
    "make", [fs.measurement.fixed, lambda x: fs.measurement.union(x, fs.measurement.uniform(0.0, 1.0, 2))]
)
def test_points_of_other_places_are_other_arguments(make):
    """Their text says how many there are, not where."""
    x = np.linspace(0.0, 1.0, 9)[:, None]
    one, same, other = (inputs(driver(None), (make(a),), {}) for a in (x, x.copy(), x + 1.0))
    assert one == same and one != other


@pytest.mark.parametrize("kind", some(["table", "on demand"], 1))
def test_other_data_behind_the_same_words_are_refused(tmp_path, kind):
    """What says of itself only its shape, or its first and last rows."""

    def model(y):
        w = numpyro.sample("w", dist.Normal())
        if kind == "table":
            y = y["y"].to_numpy()
        with numpyro.plate("data", len(y), subsample_size=5 if kind == "on demand" else None) as rows:
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y[rows] if kind == "on demand" else y)

    def run_on(values):
        mcmc = fs.MCMC(fs.SGLD(model, step_size=0.01), num_warmup=0, num_samples=2, checkpoint=tmp_path)
        mcmc.run(KEY, fs.OnDemand(values) if kind == "on demand" else pandas.DataFrame({"y": values}))

    values = np.zeros(200, np.float32)
    run_on(values)
    run_on(values.copy())
    values[100] = 1.0
    with pytest.raises(ValueError, match="positional argument 0 has other values"):
        run_on(values)


def npz(change):
    """What ``change`` makes of the arrays in a file."""

    def spoil(data):
        file = io.BytesIO()
        np.savez(file, **change(dict(np.load(io.BytesIO(data)))))
        return file.getvalue()

    return spoil


def resealed(change):
    """The same, with the right checksum."""

    def spoil(data):
        file = io.BytesIO()
        _write_state(file, change(dict(np.load(io.BytesIO(data)))))
        return file.getvalue()

    return spoil


def described(run):
    """A whole ``run.json`` of a run that cannot be."""
    return lambda data: sealed({"format": json.loads(data)["format"]} | run)[0]


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


W = "draws-002-z.w.npy"


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("state.npz", lambda data: b"", "state.npz is damaged"),
        ("state.npz", lambda data: npy(np.ones(3)), "state.npz is damaged"),
        ("state.npz", npz(lambda a: a), "state.npz is damaged.*checksum"),
        ("state.npz", resealed(lambda a: {k: v for k, v in a.items() if k != "leaf_0"}), "state of another model"),
        ("state.npz", resealed(lambda a: a | {"leaf_99": a["leaf_0"]}), "state of another model"),
        ("state.npz", resealed(lambda a: a | {"leaf_2": np.ones(7)}), "state of another model"),
        ("state.npz", resealed(lambda a: a | {"run": "0" * 64}), "state.npz and run.json beside it are of two runs"),
        (
            "state.npz",
            resealed(lambda a: {k: v for k, v in a.items() if k != "checks"}),
            "state.npz is damaged.*checks",
        ),
        (W, lambda data: b"", f"{W} is damaged"),
        (W, lambda data: npy(np.ones((2, 34, 3), np.float32)), r"it has float32\[2, 34, 3\], not float32\[2, 34, 2\]"),
        (W, lambda data: npy(np.array([{}])), f"{W} is damaged"),
        (W, None, f"{W} is missing"),
        ("run.json", lambda data: b"", "run.json is damaged"),
        ("run.json", lambda data: b"[]", "run.json is damaged"),
        ("run.json", lambda data: b"[" * 100_000, "run.json is damaged"),
        ("run.json", lambda data: data + b"\n", "run.json is damaged"),
        ("run.json", lambda data: json.dumps(json.loads(data)).encode(), "run.json is damaged.*checksum"),
        ("run.json", described({}), "run.json is damaged.*arrays"),
        ("run.json", described({"arrays": {"z/w": ["object", [2, 34, 2]]}}), "run.json is damaged.*object"),
        ("run.json", described({"arrays": {"z/w": ["float32", [2, -34, 2]]}}), "run.json is damaged.*-34"),
        ("run.json", described({"arrays": {"z/w": ["float33", [2, 34, 2]]}}), "run.json is damaged.*float33"),
        ("run.json", described({"arrays": [1]}), "run.json is damaged"),
        ("run.json", lambda data: json.dumps(json.loads(data) | {"format": 99}).encode(), "has format 99.*update"),
        ("run.json", lambda data: json.dumps(json.loads(data) | {"format": 1}).encode(), "has format 1.*that wrote it"),
        ("run.json", None, "holds arrays of something else"),
    ],
)
def test_damaged_and_newer_files_are_refused(folder, undisturbed, name, spoil, text):
    described, path = Checkpoint.open(folder).run, folder / name
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    before = contents(folder)
    with pytest.raises(ValueError, match=text), Checkpoint(folder, described) as files:
        files.load(undisturbed.last_state)
    if "another model" not in text:
        with pytest.raises(ValueError, match=text if spoil or name == W else "no run"):
            fs.Posterior.from_checkpoint(folder, undisturbed.sampler.model, X, Y)
    assert contents(folder).keys() - {".lock"} == before.keys() - {".lock"}
    assert all(contents(folder)[k] == before[k] for k in before if k != ".lock")


def test_a_damaged_checkpoint_ends_the_call(folder):
    (folder / "state.npz").write_bytes((folder / "state.npz").read_bytes()[:1000])
    before = contents(folder)
    with pytest.raises(ValueError, match=r"state\.npz is damaged"):
        finished(folder)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_file_cut_anywhere_is_refused(folder, undisturbed):
    """At some 100 lengths of every file but its own."""
    state, described = undisturbed.last_state, Checkpoint.open(folder).run
    for path in sorted(folder.glob("[!.]*")):
        whole = path.read_bytes()
        for size in [*range(0, len(whole), 1 + len(whole) // 100), len(whole) - 1]:
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=f"{path.name} is damaged"):
                Checkpoint(folder, described).load(state)
        path.write_bytes(whole)
    assert Checkpoint(folder, described).load(state)[:2] == (34, 59)


def flipped(path, place, random):
    """The content of a file with another byte at one place."""
    content = bytearray(path.read_bytes())
    content[place] ^= random.integers(1, 256)
    return bytes(content)


@pytest.mark.slow
def test_no_flipped_byte_goes_unseen(folder, undisturbed):
    """In every file at 60 random places, and in all of the heads: by a run that reads, and by one that opens."""
    state, about, random = undisturbed.last_state, Checkpoint.open(folder).run, np.random.default_rng(5)
    for path in sorted(folder.glob("[!.]*")):
        whole, seen = path.read_bytes(), 0
        places = {*random.integers(0, len(whole), 60).tolist(), *range(0, 128, 1 if path.name == W else 17)}
        for place in places:
            path.write_bytes(flipped(path, place, random))
            for opened in (lambda: Checkpoint(folder, about).load(state), lambda: Checkpoint.open(folder).draws()):
                with pytest.raises(ValueError, match=r"is damaged|has format|another run|two runs|no file of this run"):
                    opened()
                seen += 1
            path.write_bytes(whole)
        assert seen == 2 * len(places)
    assert Checkpoint(folder, about).load(state)[:2] == (34, 59)


ARRAYS = {"a": ["float32", [2, 9, 3]], "b/c": ["bool", [2, 9]]}
DRAWS = {"a": np.arange(1.0, 55.0, dtype=np.float32).reshape(2, 9, 3), "b/c": np.ones((2, 9), bool)}


def write(folder, *stops, start=0):
    """Parts of ``DRAWS`` up to these numbers of draws; what the folder held after each."""
    found = []
    with Checkpoint(folder, {"arrays": ARRAYS}) as files:
        for stop in stops:
            files.save(stop, stop, np.float32(stop), {k: v[:, start:stop] for k, v in DRAWS.items()})
            found, start = [*found, contents(files.directory)], stop
    return found


@pytest.mark.parametrize("late", [[], ["draws-000-a.npy"], ["draws-001-b.c.npy"], ["state.npz"]])
def test_a_copy_made_while_the_run_went_on(tmp_path, late):
    """One that holds no draws for some that the state counts is refused; one that holds more is whole."""
    early, then = write(tmp_path / "run", 4, 6)
    (tmp_path / "copy").mkdir()
    for name, content in (early | {name: then[name] for name in late}).items():
        (tmp_path / "copy" / name).write_bytes(content)
    if late == ["state.npz"]:
        with pytest.raises(
            ValueError, match=r"draws-000-a.npy is damaged .*first 6 draws.*copy made while the run went"
        ):
            Checkpoint.open(tmp_path / "copy").draws()
    else:
        np.testing.assert_array_equal(Checkpoint.open(tmp_path / "copy").draws()["a"], DRAWS["a"][:, :4])


def test_checksums_go_on_where_they_were(tmp_path, monkeypatch):
    """What is not yet counted may be anything; of what is counted, only the new part is read again."""
    write(tmp_path, 2, 5)
    path = tmp_path / "draws-000-a.npy"
    content = bytearray(path.read_bytes())
    content[-1] = 7  # in the last draw, of a part whose write was stopped
    path.write_bytes(content)
    read, crc32 = [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data, *start: (read.append(len(data)), crc32(data, *start))[1])
    write(tmp_path, 9, start=5)
    monkeypatch.undo()
    assert sum(n for n in read[-4:]) == 2 * 4 * (3 * 4 + 1)  # the last part of both fields and chains
    for field, values in flat(Checkpoint.open(tmp_path).draws()).items():
        np.testing.assert_array_equal(values, DRAWS[field])


@pytest.mark.parametrize("name", ["draws-000-a.npy", "state.npz", "run.json"])
def test_a_file_of_another_run_is_found(tmp_path, name):
    """Of the same shapes, and of a run of the same description."""
    write(tmp_path / "one", 9)
    values = {k: v[:, ::-1] for k, v in DRAWS.items()}
    with Checkpoint(tmp_path / "other", {"arrays": ARRAYS}) as files:
        files.save(9, 9, np.float32(9), values)
    shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
    for opened in (Checkpoint.open, lambda folder: Checkpoint(folder, {"arrays": ARRAYS})):
        with pytest.raises(ValueError, match="first 9 draws of chain 0" if "draws" in name else "are of two runs"):
            opened(tmp_path / "one").draws()
    shutil.copy(tmp_path / "other" / "draws-000-a.npy", tmp_path / "one" / "draws-002-a.npy")
    with pytest.raises(ValueError, match=r"draws-002-a\.npy is no file of this run"):
        Checkpoint.open(tmp_path / "one")


def test_draws_longer_than_they_should_be_are_damaged(tmp_path):
    write(tmp_path, 9)
    with open(tmp_path / "draws-000-a.npy", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"draws-000-a\.npy is damaged"):
        Checkpoint.open(tmp_path).draws()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without links and pipes")
@pytest.mark.parametrize("kind", ["link", "hard link", "dangling link", "text", "pipe"])
def test_a_lock_that_is_none_is_left_alone(tmp_path, kind):
    mine, lock = tmp_path / "mine.txt", tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    mine.write_text("my thesis")
    if kind == "text":
        lock.write_text("my thesis")
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "hard link":
        lock.hardlink_to(mine)
    else:
        lock.symlink_to(tmp_path / "absent" if "dangling" in kind else mine)
    with pytest.raises(ValueError, match="remove it" if kind in ("link", "dangling link") else "move it away"):
        write(lock.parent, 9)
    assert mine.read_text() == "my thesis" and not (tmp_path / "absent").exists()
    assert kind == "pipe" or "dangling" in kind or lock.read_text() == "my thesis"


def test_what_is_no_checkpoint_is_not_touched(tmp_path, undisturbed):
    np.savez(tmp_path / "mine.npz", a=np.ones(3))
    with pytest.raises(ValueError, match="something else"):
        finished(tmp_path)
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        fs.Posterior.from_checkpoint(tmp_path, undisturbed.sampler.model, X, Y)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"]


def test_files_hold_no_objects(folder):
    paths = list(folder.glob("*.np[yz]"))
    assert len(paths) == 4
    for path in paths:
        found = np.load(path, allow_pickle=False)
        arrays = [found] if path.suffix == ".npy" else [found[name] for name in found.files]
        assert all(array.dtype != object for array in arrays)


@pytest.mark.parametrize("name", ["", " ", "a\0b", b"run", 3, True])
def test_what_names_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for opened in (driver, lambda name: fs.Posterior.from_checkpoint(name, linear(POINTS))):
        with pytest.raises((TypeError, ValueError), match=r"names no folder|must be the path of a folder"):
            opened(name)
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write("~/runs/a", 9)
    assert (tmp_path / "runs" / "a" / "state.npz").exists()
    np.testing.assert_array_equal(Checkpoint.open(Path("~/runs/a")).draws()["a"], DRAWS["a"])


@pytest.mark.slow
def test_no_more_slots_than_draws(tmp_path, monkeypatch):
    """``checkpoint_every`` may be as large as it likes: memory holds what is drawn."""
    asked, slots = [], Loop.slots
    monkeypatch.setattr(Loop, "slots", lambda self, num, *rest: (asked.append(num), slots(self, num, *rest))[1])
    finished(tmp_path, checkpoint_every=10**9, num_samples=8, num_warmup=5, thinning=2)
    assert asked == [4]


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="chain_method='sequential' has no checkpoint: set"):
        driver(tmp_path, chain_method="sequential")
    with pytest.raises(ValueError, match="checkpoint_every"):
        driver(tmp_path, checkpoint_every=0)
    mcmc = driver(tmp_path)
    with pytest.raises(ValueError, match="are not arrays"):
        mcmc.run(KEY, X, Y, extra_fields=("warmup",))
    with pytest.raises(ValueError, match=r"leave out warmup\(\)"):
        mcmc.warmup(KEY, X, Y)


# ---- disks that fail -----------------------------------------------------------------------------------------

FULL = r"could not be written \(No space left on device\): free some space. What was written before is intact"
PUT = Checkpoint._put


def failing(real, calls, *, first):
    """``first(...)`` and then no space left, from call number ``calls`` on."""
    made = []

    def fails(*args, **kwargs):
        made.append(1)
        if len(made) < calls:
            return real(*args, **kwargs)
        first(*args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fails


@pytest.mark.parametrize(
    ("where", "name", "calls", "first"),
    [
        (np, "savez", 5, lambda file, **_: file.write(b"some bytes")),  # within the file of the state
        (Checkpoint, "_put", 5, lambda files, name, start, values: PUT(files, name, start, values[:1])),  # of draws
        pytest.param(os, "fsync", 1, lambda *_: None, marks=pytest.mark.slow),  # the first file
        pytest.param(os, "fsync", 3, lambda *_: None, marks=pytest.mark.slow),  # files of draws, still empty
        pytest.param(os, "fsync", 12, lambda *_: None, marks=pytest.mark.slow),
        pytest.param(os, "replace", 2, lambda *_: None, marks=pytest.mark.slow),
        pytest.param(os, "replace", 8, lambda *_: None, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch, undisturbed, where, name, calls, first):
    mcmc = driver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(getattr(where, name), calls, first=first))
        with pytest.raises(OSError, match=FULL) as raised:
            run(mcmc)
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(tmp_path)
    assert (mcmc.last_state is not None) == (tmp_path / "state.npz").exists()
    assert not list(tmp_path.glob(".*-*")), "no half-written file is left"
    assert_same(run(mcmc), undisturbed)


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 64 KiB for 78 kB of draws, which then grows."""
    small, settings = tmp_path / "disk", {"num_samples": 3000, "checkpoint_every": 10}
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        mcmc = driver(small, **settings)
        with pytest.raises(OSError, match=FULL), pytest.warns(RuntimeWarning, match="will take 7.8e-05 GB.* GB free"):
            run(mcmc)
        num = len(mcmc.get_samples()["w"]) // 2
        assert 0 < num < 3000 and num % 10 == 0 and int(mcmc.last_state.i[0]) == 25 + num + 10
        with pytest.raises(OSError, match=FULL):
            run(mcmc)
        subprocess.run(["mount", "-o", "remount,size=1m", small], check=True)
        assert_same(run(mcmc), finished(tmp_path / "other", **settings))
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_limit_on_the_size_of_files(tmp_path, undisturbed):
    resource = pytest.importorskip("resource", reason="limits of a process are those of Unix")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    described = Checkpoint.open(undisturbed.checkpoint).run | {"arrays": {"z/w": ["float32", [2, 34, 2000]]}}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with (
            pytest.raises(OSError, match=r"File too large\): raise the limit .*ulimit -f"),
            Checkpoint(tmp_path / "a", described),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Checkpoint(tmp_path / "a", described):
        pass
    assert (tmp_path / "a" / "draws-000-z.w.npy").stat().st_size > 544_000


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    mcmc = driver(None)
    for path in (tmp_path / "file", tmp_path / "file" / "folder", Path("/proc/folder")):
        mcmc.checkpoint = path
        with pytest.raises(OSError, match=r"could not be written .*: give a folder that can be written to") as raised:
            run(mcmc)
        assert raised.value.filename == str(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights are those of Unix")
def test_a_read_only_folder(undisturbed):
    """A finished run is read from it; for an unfinished one the error says what is wrong. As nobody, if we are root."""
    described, is_root = Checkpoint.open(undisturbed.checkpoint).run, os.geteuid() == 0
    with tempfile.TemporaryDirectory() as place:
        done, empty = shutil.copytree(undisturbed.checkpoint, Path(place) / "done"), Path(place) / "empty"
        empty.mkdir()
        for path in (place, done, empty):
            os.chmod(path, 0o555)
        for path in done.iterdir():
            os.chmod(path, 0o444)
        try:
            if is_root:
                os.seteuid(65534)
            saved = Checkpoint(done, described).load(undisturbed.last_state)
            with (
                pytest.raises(PermissionError, match="give a folder that can be written to"),
                Checkpoint(empty, described),
            ):
                pass
        finally:
            if is_root:
                os.seteuid(0)
            for path in (place, done, empty):
                os.chmod(path, 0o755)
    assert saved[:2] == (34, 59)


# ---- two at once ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_at_once(tmp_path, monkeypatch, undisturbed):
    """The second is refused while the first writes, and may read; when the first has ended it goes on."""
    save, second, texts = Checkpoint.save, driver(tmp_path), []

    def meanwhile(self, num_kept, *rest):
        save(self, num_kept, *rest)
        assert Checkpoint.open(tmp_path).draws()["z"]["w"].shape[1] == num_kept
        if num_kept == 20:
            with pytest.raises(BlockingIOError) as raised:
                run(second)
            texts.append(str(raised.value))

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", meanwhile)
        finished(tmp_path)
    assert len(texts) == 1 and f"process {os.getpid()} on" in texts[0] and str(tmp_path) in texts[0]
    assert_same(run(second), undisturbed)


# ---- larger than memory --------------------------------------------------------------------------------------

LARGE = """
import shutil, sys, threading, warnings
sys.path.insert(0, {tests!r})
from models import POINTS, Independent
import jax, numpy as np, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
warnings.simplefilter("ignore")

def model(x, y=None):  # 400 kB a draw
    w = numpyro.sample("w", dist.Normal().expand([100_000]).to_event(1))
    f = fs.functional_prior("f", lambda x: x[:, 0] * w.mean(), Independent(), POINTS)
    numpyro.sample("y", dist.Normal(f(x), 1.0), obs=y)

x, y = np.ones((5, 1), np.float32), np.ones(5, np.float32)
kernel = fs.SGLD(model, step_size=1e-3, num_steps=1)
settings = dict(num_warmup=0, num_chains=2, chain_method="vectorized", progress_bar=False, checkpoint_every=5)

def run(parts):
    shutil.rmtree(f"{{sys.argv[1]}}/{{parts}}", ignore_errors=True)
    mcmc = fs.MCMC(kernel, num_samples=5 * parts, checkpoint=f"{{sys.argv[1]}}/{{parts}}", **settings)
    mcmc.run(jax.random.key(0), x, y)

def opened(parts):
    return fs.Posterior.from_checkpoint(f"{{sys.argv[1]}}/{{parts}}", model, x, y)

def look(parts):
    f = fs.predict(opened(parts), jax.random.key(1), x)["f"]
    data = fs.to_arviz(opened(parts))
    np.testing.assert_allclose(np.asarray(data["posterior"]["f"].values).reshape(f.shape), f, rtol=1e-5)
    assert data["posterior"]["w"].shape == (2, 5 * parts, 100_000)
    np.testing.assert_allclose(f[:, 0], opened(parts).samples["w"].mean(1), atol=1e-5)

def load(parts):
    return np.array(opened(parts).samples["w"])

def anonymous():  # memory that is no file's, in bytes
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

def peak(fn, parts):
    seen, stop = [], threading.Event()
    def watch():
        while not stop.wait(0.001):
            seen.append(anonymous())
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    result = fn(parts)
    stop.set()
    thread.join()
    return max([*seen, anonymous()])

for fn in (run, look, load):
    fn(40)  # compiles
    print(fn.__name__, -peak(fn, 40) + peak(fn, 80))  # both are long enough to be judged
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_does_not_grow_with_the_draws(tmp_path):
    """320 MB of draws in 80 parts: the run, predictions and ArviZ's object take at most 60 MB more than with 40 parts.

    An array of all draws takes 160 MB more, and is seen.
    """
    script = LARGE.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in (tmp_path / "80").iterdir()) > 320e6
    grown = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    print(grown)
    assert grown["run"] < 60e6 and grown["look"] < 60e6 and grown["load"] > 100e6, grown


# ---- killed for real -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, jax, numpy as np
sys.path.insert(0, {tests!r})
from models import X, Y, linear, random_points
import numpyro_fspace as fs
import warnings; warnings.simplefilter("ignore")
kernel = {kernel}(linear(random_points(), batch=4), num_steps=20)
mcmc = fs.MCMC(
    kernel, num_warmup=100, num_samples={draws}, num_chains={chains}, chain_method="vectorized", progress_bar=False,
    checkpoint=sys.argv[1], checkpoint_every=20,
)
print("ready", flush=True)
mcmc.run(jax.random.key(0), X, Y)
state = mcmc.last_state._replace(rng_key=jax.random.key_data(mcmc.last_state.rng_key))
np.savez(sys.argv[2], *jax.tree.leaves(state), w=mcmc.get_samples(group_by_chain=True)["w"])
"""


def start(script, folder, out):
    return subprocess.Popen([sys.executable, "-c", script, str(folder), str(out)], stdout=subprocess.PIPE)


def whole(script, folder, out):
    with start(script, folder, out) as process:
        assert process.wait(timeout=300) == 0
    with np.load(out) as found:
        return dict(found)


def last_write(folder):
    path = folder / "state.npz"
    return path.stat().st_mtime_ns if path.exists() else 0


def kill(script, folder, out, writes, wait):
    """Start the run and kill it ``wait`` seconds after so many writes (or after its start)."""
    last = last_write(folder)
    with start(script, folder, out) as process:
        try:
            process.stdout.readline()
            for _ in range(writes):
                while process.poll() is None and last_write(folder) == last:
                    time.sleep(0.001)
                last = last_write(folder)
            time.sleep(wait)
            assert process.poll() is None, "the run ended before it was killed: make it longer"
            if writes:
                with pytest.raises(BlockingIOError, match=f"process {process.pid} on"), Checkpoint.open(folder):
                    pass
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def check_kills(tmp_path, kernel, chains, moments, draws):
    """After every kill the folder has the first draws of the whole run, and never fewer; in the end it has all."""
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), kernel=kernel, chains=chains, draws=draws)
    expected, folder, counts = whole(script, tmp_path / "whole", tmp_path / "whole.npz"), tmp_path / "killed", [0]
    assert expected["w"].shape[:2] == (chains, draws)
    for writes, wait in moments:
        kill(script, folder, tmp_path / "killed.npz", writes, wait)
        if last_write(folder):
            found = Checkpoint.open(folder).draws()["z"]["w"]
            np.testing.assert_array_equal(found, expected["w"][:, : found.shape[1]])
            counts.append(found.shape[1])
    assert counts == sorted(counts) and counts[-1] < draws
    resumed = whole(script, folder, tmp_path / "killed.npz")
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(resumed[name], value)
    print(f"{kernel}, {chains} chains: {len(moments)} kills, at draws {counts[1:]}, then all {draws}, bit for bit")


@pytest.mark.slow
def test_a_killed_process(tmp_path):
    check_kills(tmp_path, "fs.fSGHMC", 2, [(7, 0.02)], draws=3000)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernel", "chains", "kills"), [("fs.SGLD", 1, 7), ("fs.SGLD", 4, 7), ("fs.fSGHMC", 1, 8), ("fs.fSGHMC", 4, 8)]
)
def test_thirty_kills(tmp_path, kernel, chains, kills):
    """Thirty in all, at random moments: of each kind one within three seconds of the start, others between writes.

    The run is long, so that it does not end before the last kill where the machine is quick.
    """
    random = np.random.default_rng(kills + chains)
    moments = [(0, random.uniform(0.0, 3.0))]
    moments += [(int(random.integers(1, 12)), random.uniform(0.0, 0.05)) for _ in range(kills - 1)]
    check_kills(tmp_path, kernel, chains, moments, draws=15_000)
