"""Checkpoints: a run that is stopped anywhere ends as the undisturbed one, and nothing on disk is ever lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from models import POINTS, X, Y, linear, random_points
from numpyro.infer import NUTS

import numpyro_fspace as fs
from numpyro_fspace.infer.checkpoint import Checkpoint
from numpyro_fspace.infer.loop import Loop

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")

KEY = jax.random.key(3)


def driver(folder, *, kernel=None, num_chains=2, **settings):
    kernel = fs.fSGHMC(linear(random_points(), batch=4), num_steps=3) if kernel is None else kernel
    given = {"num_warmup": 25, "num_samples": 34, "checkpoint_every": 10, "chain_method": "vectorized"} | settings
    return fs.MCMC(kernel, num_chains=num_chains, progress_bar=False, checkpoint=folder, **given)


def finished(folder, **settings):
    mcmc = driver(folder, **settings)
    mcmc.run(KEY, X, Y, extra_fields=("potential_energy",))
    return mcmc


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("undisturbed"))


def plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a._states), jax.tree.leaves(b._states), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a.last_state), jax.tree.leaves(b.last_state), strict=True):
        np.testing.assert_array_equal(plain(x), plain(y))


# ---- the same run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_chains", [1, 3])
def test_draws_are_those_of_a_run_without_checkpoint(tmp_path, num_chains):
    written, plain = finished(tmp_path, num_chains=num_chains), finished(None, num_chains=num_chains)
    for group in (True, False):
        a, b = (m.get_samples(group_by_chain=group) for m in (written, plain))
        assert set(a) == set(b)
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-4, atol=1e-4)
        a, b = (m.get_extra_fields(group_by_chain=group) for m in (written, plain))
        assert set(a) == set(b) and all(a[k].shape == b[k].shape for k in a)
    assert set(fs.predict(written, KEY, X)) == {"f", "y"}


def test_thinning(tmp_path):
    thin = finished(tmp_path, thinning=2, num_samples=30)
    np.testing.assert_allclose(
        thin.get_samples()["w"], finished(None, thinning=2, num_samples=30).get_samples()["w"], rtol=1e-4, atol=1e-4
    )


def test_nuts_too(tmp_path):
    def nuts(folder):
        return finished(folder, kernel=NUTS(linear(POINTS)))

    assert_same(nuts(tmp_path / "a"), nuts(tmp_path / "a"))
    np.testing.assert_allclose(
        nuts(tmp_path / "a").get_samples()["w"], nuts(None).get_samples()["w"], rtol=1e-3, atol=1e-3
    )


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0, 2, 3, 6])
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_stopped_run_ends_as_the_undisturbed_one(tmp_path, monkeypatch, undisturbed, after, moment):
    """Stopped at every write: before it, between draws and state, and after it."""
    writes, save = [], Checkpoint.save

    def stopping(self, num_parts, num_draws, state, draws=None):
        writes.append(num_draws)
        stop = len(writes) > after
        if stop and moment == "before":
            raise Stop
        if stop and moment == "between" and draws is not None:
            self._write(self._part(num_parts - 1), lambda file: np.savez(file, **draws))
            raise Stop
        save(self, num_parts, num_draws, state, draws)
        if stop:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stopping)
        with pytest.raises(Stop):
            finished(tmp_path)
    assert len(writes) == after + 1
    assert_same(finished(tmp_path), undisturbed)
    assert not list(tmp_path.glob(".*")), "no half-written file is left"


def test_what_a_killed_write_left_is_removed(tmp_path, undisturbed):
    finished(tmp_path)
    (tmp_path / ".state.npz-abc").write_bytes(b"half")
    assert_same(finished(tmp_path), undisturbed)
    assert not list(tmp_path.glob(".*"))


def test_a_finished_run_is_read(tmp_path, monkeypatch, undisturbed):
    finished(tmp_path)
    monkeypatch.setattr(Loop, "__call__", lambda *_, **__: pytest.fail("nothing is left to draw"))
    assert_same(finished(tmp_path), undisturbed)


# ---- what is refused, and left as it is ----------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_samples": 40}, "num_samples was 34 and is 40"),
        ({"checkpoint_every": 5}, "checkpoint_every was 10 and is 5"),
        ({"num_chains": 1}, "num_chains was 2 and is 1"),
        ({"kernel": fs.SGHMC(linear(POINTS))}, "kernel was 'fSGHMC' and is 'SGHMC'"),
        ({"kernel": fs.fSGHMC(linear(random_points(), batch=4), num_steps=4)}, "settings was"),
        ({"kernel": fs.fSGHMC(linear(random_points(), batch=4), num_steps=3, warmup=fs.Warmup(0.1))}, "settings was"),
    ],
)
def test_another_run_is_refused(tmp_path, change, text):
    finished(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=text):
        finished(tmp_path, **change)
    assert contents(tmp_path) == before


def test_other_data_and_another_key_are_refused(tmp_path):
    finished(tmp_path)
    for key, y in ((KEY, Y + 1.0), (jax.random.key(4), Y)):
        with pytest.raises(ValueError, match="inputs was"):
            driver(tmp_path).run(key, X, y, extra_fields=("potential_energy",))


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("state.npz", lambda data: data[: len(data) // 2], "state.npz is damaged"),
        ("state.npz", lambda data: b"", "state.npz is damaged"),
        ("draws-00001.npz", lambda data: data[:100], "draws-00001.npz is damaged"),
        ("run.json", lambda data: b"{", "run.json is damaged"),
        ("run.json", lambda data: json.dumps(json.loads(data) | {"format": 99}).encode(), "has format 99"),
    ],
)
def test_damaged_and_newer_files_are_refused(tmp_path, name, spoil, text):
    finished(tmp_path)
    path = tmp_path / name
    path.write_bytes(spoil(path.read_bytes()))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=text):
        finished(tmp_path)
    assert contents(tmp_path) == before


def test_arrays_of_something_else_are_not_touched(tmp_path):
    np.savez(tmp_path / "mine.npz", a=np.ones(3))
    with pytest.raises(ValueError, match="something else"):
        finished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npz"]


def test_files_hold_no_objects(tmp_path):
    finished(tmp_path)
    for path in tmp_path.glob("*.npz"):
        with np.load(path, allow_pickle=False) as file:
            assert all(file[name].dtype != object for name in file)


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch, undisturbed):
    savez, calls = np.savez, []

    def full(file, **arrays):
        calls.append(1)
        if len(calls) > 6:
            file.write(b"some bytes")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(file, **arrays)

    mcmc = driver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match=r"could not be written \(No space left on device\); what was written before"):
            mcmc.run(KEY, X, Y, extra_fields=("potential_energy",))
    assert mcmc.last_state is not None
    assert_same(finished(tmp_path), undisturbed)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="chain_method='sequential' has no checkpoints"):
        driver(tmp_path, chain_method="sequential")
    with pytest.raises(ValueError, match="checkpoint_every"):
        driver(tmp_path, checkpoint_every=0)
    mcmc = driver(tmp_path)
    with pytest.raises(ValueError, match="are no arrays"):
        mcmc.run(KEY, X, Y, extra_fields=("warmup",))


# ---- killed for real -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, jax, numpy as np
sys.path.insert(0, {tests!r})
from models import X, Y, linear, random_points
import numpyro_fspace as fs
import warnings; warnings.simplefilter("ignore")
kernel = {kernel}(linear(random_points(), batch=4), num_steps=20)
mcmc = fs.MCMC(
    kernel, num_warmup=500, num_samples={draws}, num_chains={chains}, chain_method="vectorized", progress_bar=False,
    checkpoint=sys.argv[1], checkpoint_every=20,
)
print("ready", flush=True)
mcmc.run(jax.random.key(0), X, Y)
np.save(sys.argv[2], mcmc.get_samples()["w"])
"""


def start(script, folder, out):
    return subprocess.Popen([sys.executable, "-c", script, str(folder), str(out)], stdout=subprocess.PIPE)


def killed_until_done(script, folder, out, seconds):
    """Kill the run after each of ``seconds`` beyond its first write, then let it end; how often it was killed."""
    kills = 0
    for wait in seconds:
        process = start(script, folder, out)
        seen = (folder / "state.npz").stat().st_mtime_ns if (folder / "state.npz").exists() else 0
        while process.poll() is None:
            state = folder / "state.npz"
            if state.exists() and state.stat().st_mtime_ns != seen:
                break
            time.sleep(0.01)
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        process.stdout.close()
    assert start(script, folder, out).wait(timeout=300) == 0
    return kills


def check_kills(tmp_path, kernel, chains, seconds, draws=2000):
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), kernel=kernel, chains=chains, draws=draws)
    (tmp_path / "killed").mkdir()
    assert start(script, tmp_path / "whole", tmp_path / "whole.npy").wait(timeout=300) == 0
    kills = killed_until_done(script, tmp_path / "killed", tmp_path / "killed.npy", seconds)
    np.testing.assert_array_equal(np.load(tmp_path / "killed.npy"), np.load(tmp_path / "whole.npy"))
    return kills


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_process(tmp_path):
    assert check_kills(tmp_path, "fs.fSGHMC", 2, [0.05]) == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("kernel", "chains"), [("fs.SGLD", 1), ("fs.fSGHMC", 1), ("fs.fSGHMC", 4)])
def test_thirty_kills(tmp_path, kernel, chains):
    """Ten kills at random moments of each kind of run (fewer where a run ends before)."""
    seconds = np.random.default_rng(chains).uniform(0.0, 0.1, 10)
    assert check_kills(tmp_path, kernel, chains, seconds, draws=8000) >= 3
