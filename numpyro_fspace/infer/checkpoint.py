"""A run's draws and state on disk: a run that was killed goes on where it was, and draws may exceed the memory.

A directory holds ``run.json``, what the run is; ``draws-000-z.w.npy``, …, an array [C, S, …] for each field of the
draws, of full size from the start; and ``state.npz``, the state of the chains and the number of draws it counts. The
draws of a part are written into their places before the state that counts them is moved into its own: whenever the run
is killed, the draws that the state counts are whole, and those after it are made and written again, the same. Chains
lie one after another, so the arrays need no joining and no loading: they are mapped. Files are arrays only; nothing in
them is executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "flat", "join_chains", "plain", "plain_fields"]

FORMAT = 5

#: What helps against an error of writing; anything else is the folder's fault.
CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


class Checkpoint:
    """The files of one run. What is on disk is read at any time, and written inside ``with``, by one process.

    Args:
        directory: where; made if need be, by ``with``.
        run: what the run is, a dict for JSON. Its entry ``"arrays"`` has the type and shape of each field of the draws
            by name, ``{"z/w": ["float32", [C, S, 2]]}``; the part before a slash is the field of the state, see
            ``flat``. A directory where one of these entries is another one is refused, and left as it is.

    Raises:
        ValueError: the directory holds another run, files of another format, or damaged ones.
        OSError: inside ``with``: it cannot be written to, or another process writes to it.
    """

    def __init__(self, directory: str | Path, run: dict):
        self.directory = Path(directory)
        self._run = {"format": FORMAT} | run
        self._refuse_others()

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """The run that a directory holds, whichever it is."""
        path = Path(directory) / "run.json"
        if not path.exists():
            raise ValueError(f"{str(directory)!r} is not the checkpoint of a run: it holds no run.json.")
        return cls(directory, _read_run(path))

    @property
    def run(self) -> dict:
        """What the run is."""
        return self._run

    def __enter__(self):
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.directory / ".lock", "a+")
        try:
            self._take_lock()
            self._refuse_others()  # written since by another process
            with self._explained():
                self._make_files()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_):
        self._lock.close()  # and with it the lock is given back, as it is when the process dies

    def load(self, state):
        """``(draws kept, draws made, state)``; ``state`` gives the structure. None if nothing was saved."""
        path = self.directory / "state.npz"
        if not path.exists():
            return None
        saved, (leaves, tree) = _read(path), jax.tree.flatten(state)
        try:
            num_kept, num_made = int(saved["num_kept"]), int(saved["num_made"])
            arrays = [_like(saved[f"leaf_{i}"], leaf) for i, leaf in enumerate(leaves)]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, error) from error
        wrong = [a for a, leaf in zip(arrays, leaves, strict=True) if jnp.shape(a) != jnp.shape(leaf)]
        if wrong or len(saved) != 2 + len(leaves):
            raise ValueError(f"{path} holds the state of another model; give another directory.")
        self._mapped(num_kept)  # refuses damaged ones
        return num_kept, num_made, jax.tree.unflatten(tree, arrays)

    def save(self, num_kept: int, num_made: int, state, part: dict | None = None):
        """Write the last draws [C, n, …] by name, if there are any, and then the state that counts them."""
        with self._explained():
            for name, values in (part or {}).items():
                self._put(name, num_kept - values.shape[1], values)
            arrays: dict[str, Any] = {f"leaf_{i}": plain(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
            arrays |= {"num_kept": num_kept, "num_made": num_made}
            self._write("state.npz", lambda file: np.savez(file, **arrays))

    def draws(self) -> dict:
        """The draws that the state counts, by field of the state, [C, S, …]: read-only arrays that lie on disk."""
        path = self.directory / "state.npz"
        if not path.exists():
            raise ValueError(f"checkpoint={str(self.directory)!r} holds no draws yet.")
        states: dict[str, Any] = {}
        for name, array in self._mapped(int(_read(path, "num_kept")["num_kept"])).items():
            field, _, site = name.partition("/")
            if site:
                states.setdefault(field, {})[site] = array
            else:
                states[field] = array
        return states

    # ---- parts ---------------------------------------------------------------------------------

    def _refuse_others(self):
        path = self.directory / "run.json"
        if not path.exists():
            if any(self.directory.glob("*.np[yz]")):
                raise ValueError(
                    f"checkpoint={str(self.directory)!r} holds arrays of something else; give another directory."
                )
            return
        found, mine = _read_run(path), _flat_json(json.loads(json.dumps(self._run)))
        found = _flat_json({name: value for name, value in found.items() if name in self._run})
        names = [name for name in {**mine, **found} if found.get(name) != mine.get(name)]
        if names:
            text = "; ".join(f"{name} was {found.get(name)!r} and is {mine.get(name)!r}" for name in names[:4])
            raise ValueError(f"checkpoint={str(self.directory)!r} holds another run: {text}. Give another directory.")

    def _take_lock(self):
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read() or "another process"
            raise BlockingIOError(
                error.errno,
                f"{owner} is writing this run; wait until it ends, or give another directory",
                str(self.directory),
            ) from None
        except OSError:  # a file system without locks
            return
        with self._explained():
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()

    def _make_files(self):
        for rest in self.directory.glob(".*.np[yz]-*"):  # of a write that was killed
            rest.unlink()
        if not (self.directory / "run.json").exists():
            self._write("run.json", lambda file: file.write(json.dumps(self._run, indent=1).encode()))
        if (self.directory / "state.npz").exists():
            return
        new = [(path, *self._spec(name)) for name, path in self._paths().items() if not path.exists()]
        size = sum(dtype.itemsize * int(np.prod(shape)) for _, dtype, shape in new)
        free = shutil.disk_usage(self.directory).free
        if size > free:
            warnings.warn(
                f"The draws will take {size / 1e9:.3g} GB, and the disk of checkpoint={str(self.directory)!r} has "
                f"{free / 1e9:.3g} GB free.",
                RuntimeWarning,
                stacklevel=5,
            )
        for path, dtype, shape in new:
            self._write(path.name, lambda file, d=dtype, s=shape: _write_empty(file, d, s))
        self._mapped(0)  # refuses damaged ones

    def _paths(self) -> dict:
        names = enumerate(sorted(self._run["arrays"]))  # numbered: names may differ in what a file's name cannot hold
        clean = re.compile(r"[^\w.-]", re.ASCII)
        return {name: self.directory / f"draws-{i:03d}-{clean.sub('.', name)[:80]}.npy" for i, name in names}

    def _spec(self, name):
        dtype, shape = self._run["arrays"][name]
        return jnp.dtype(dtype), tuple(shape)

    def _mapped(self, num_kept: int) -> dict:
        return {name: self._map(name)[:, :num_kept] for name in self._paths()}

    def _map(self, name):
        path, (dtype, shape) = self._paths()[name], self._spec(name)
        if not path.exists():
            raise ValueError(f"{path} is missing; put it back, or give another directory.")
        try:
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            if (array.shape, array.dtype.itemsize) != (shape, dtype.itemsize):
                raise ValueError(f"it has {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
            return array.view(dtype)
        except Exception as error:  # whatever NumPy makes of a damaged file
            raise _damaged(path, error) from error

    def _put(self, name, start, values):
        """Rows of every chain into their places. By writing: on a full disk, a mapped file would end the process."""
        path, (dtype, shape) = self._paths()[name], self._spec(name)
        row, header = dtype.itemsize * int(np.prod(shape[2:])), np.load(path, mmap_mode="r").offset
        with open(path, "r+b") as file:
            for chain, rows in enumerate(values):
                file.seek(header + (chain * shape[1] + start) * row)
                file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _write(self, name, write):
        """The whole file or none of it."""
        handle, part = tempfile.mkstemp(dir=self.directory, prefix=f".{name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.directory / name)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as error:
            cure = CURES.get(error.errno, "give a folder that can be written to")
            raise OSError(
                error.errno,
                f"the checkpoint could not be written ({error.strerror or error}): {cure}. What was written before is "
                "intact, and the same call goes on from there",
                str(self.directory),
            ) from error


def flat(states: dict) -> dict:
    """Fields of a state by name; a field that is a dict has the names of its sites after a slash."""
    parts = {
        k: {f"{k}/{site}": a for site, a in v.items()} if isinstance(v, dict) else {k: v} for k, v in states.items()
    }
    return {name: value for part in parts.values() for name, value in part.items()}


def plain_fields(states: dict) -> dict:
    """Fields that a file can hold."""
    bad = [k for k, v in states.items() if not isinstance(v, jax.Array | dict)]
    if bad:
        raise ValueError(f"extra_fields={bad} are no arrays; with a checkpoint name their parts, as 'a.b'.")
    return {k: jax.random.key_data(v) if _is_key(v) else v for k, v in states.items()}


def join_chains(array):
    """[C, S, …] as [C · S, …]: without a copy, if the draws lie on disk and the run is finished."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _write_empty(file, dtype, shape):
    """An array of zeros that takes no room on the disk before it is written to."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.truncate(file.tell() + dtype.itemsize * int(np.prod(shape)))


def _read_run(path) -> dict:
    try:
        found = json.loads(path.read_text())
        number = int(found["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if number != FORMAT:
        cure = "update numpyro_fspace" if number > FORMAT else "read it with the version that wrote it"
        raise ValueError(f"{path} has format {number}, this version reads {FORMAT}: {cure}, or give another directory.")
    return found


def _read(path, *names) -> dict:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except Exception as error:  # whatever NumPy and zipfile make of a damaged file
        raise _damaged(path, error) from error


def _damaged(path, error) -> ValueError:
    return ValueError(f"{path} is damaged ({error}); give another directory, or remove this one.")


def _flat_json(values: dict, prefix: str = "") -> dict:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    parts = (_flat_json(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v} for k, v in values.items())
    return {name: value for part in parts for name, value in part.items()}


def _is_key(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(array, leaf):
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    dtype = jnp.asarray(leaf).dtype
    return jnp.asarray(array.view(dtype) if array.dtype.kind == "V" else array, dtype)  # NumPy saves bfloat16 as bytes
