"""Draws and state of a run written to disk, so that a run that was killed can continue.

``posterior/storage/checkpoint_files.py`` defines the files and reads them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import socket
import stat
import uuid
import zipfile
import zlib
from typing import Any

import jax
import numpy as np

from numpyro_fspace._checks import warn
from numpyro_fspace.posterior.arrays import is_key, plain
from numpyro_fspace.posterior.storage.checkpoint_files import RunFiles
from numpyro_fspace.posterior.storage.checkpoint_integrity import hash_of, sealed, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: First bytes of the text that a process writes to the lock file that it holds.
OWNER = b"process "

#: Cures for errors of writing; other errors come from the folder.
CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


class Checkpoint(RunFiles):
    """The files of one run, written inside ``with``, by one process.

    Raises:
        ValueError: the directory holds another run, files of another format, or damaged ones.
        OSError: it cannot be written to, or another process writes to it.
    """

    def __enter__(self):
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = _open_lock(self.directory / ".lock")
        try:
            self._take_lock()
            self._refuse_others()  # another process may have written it meanwhile
            with self._explained():
                self._make_files()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_):
        self._lock.close()  # releases the lock, as the end of the process would

    def save(self, num_kept: int, num_made: int, state, part: dict | None = None):
        """Write the latest draws [C, n, …] by name, if there are any, and then the state that counts them."""
        with self._explained():
            checks = self._checks.copy()
            for row, name in enumerate(self._paths()):
                if part and name in part:
                    values = part[name]
                    self._put(name, num_kept - values.shape[1], values)
                    checks[row] = [zlib.crc32(v.tobytes(), int(c)) for v, c in zip(values, checks[row], strict=True)]
            arrays: dict[str, Any] = {f"leaf_{i}": plain(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
            arrays |= {"num_kept": num_kept, "num_made": num_made, "run": self._mark, "checks": checks}
            digests: list[str] = []
            write_whole(self.directory / "state.npz", lambda file: digests.append(_write_state(file, arrays)))
            self._checks, self._checked = checks, digests[0]

    def _take_lock(self):
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read().decode(errors="replace") or "another process"
            raise BlockingIOError(
                error.errno,
                f"{owner} is writing this run; wait until it ends, or give another directory",
                str(self.directory),
            ) from None
        except OSError:  # a file system without locks
            return
        with self._explained():
            self._lock.truncate(0)
            self._lock.write(OWNER + f"{os.getpid()} on {socket.gethostname()}".encode())

    def _make_files(self):
        for rest in self.directory.glob(".*.np[yz]-*"):  # left by a write that was killed
            rest.unlink()
        if not (self.directory / "run.json").exists():
            content, self._mark = sealed(self.run | {"id": uuid.uuid4().hex})
            write_whole(self.directory / "run.json", lambda file: file.write(content))
        saved = self._saved()
        if saved is not None:
            self._checks = saved["checks"]
            return
        specs = {name: self._spec(name) for name in self._paths()}
        size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in specs.values())
        free = shutil.disk_usage(self.directory).free
        if size > free:
            warn(
                f"The draws will take {size / 1e9:.3g} GB, and the disk of checkpoint={str(self.directory)!r} has "
                f"{free / 1e9:.3g} GB free."
            )
        self._checks = np.zeros((len(specs), self._num_chains()), np.uint32)
        for row, (name, (dtype, shape)) in enumerate(specs.items()):
            header = _header(dtype, shape)
            self._checks[row] = zlib.crc32(header)
            length = len(header) + dtype.itemsize * int(np.prod(shape))
            write_whole(self._paths()[name], lambda file, h=header, n=length: (file.write(h), file.truncate(n)))

    def _put(self, name, start, values):
        """Write the rows of every chain. A mapped file would end the process on a full disk."""
        path, (_, shape), offset = self._paths()[name], self._spec(name), self._map(name)[1]
        row = self._row_size(name)
        with open(path, "r+b") as file:
            for chain, rows in enumerate(values):
                file.seek(offset + (chain * shape[1] + start) * row)
                file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as error:
            cure = CURES.get(error.errno, "give a folder that can be written to")
            raise OSError(
                error.errno,
                f"the checkpoint could not be written ({error.strerror or error}): {cure}. What was written before is "
                "intact, and the same call continues from there",
                str(self.directory),
            ) from error


def plain_fields(states: dict) -> dict:
    """Fields as arrays that a file can hold."""
    bad = [k for k, v in states.items() if not isinstance(v, jax.Array | dict)]
    if bad:
        raise ValueError(f"extra_fields={bad} are not arrays; with a checkpoint, name their parts, as in 'a.b'.")
    return {k: jax.random.key_data(v) if is_key(v) else v for k, v in states.items()}


def _open_lock(path):
    """The lock file, opened to read and write. Another file is refused, because its content would be replaced.

    Raises:
        ValueError: if the name belongs to a link, or to a file that is not a lock.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and the file behind it would be overwritten: remove it.")
    file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    found = os.fstat(file.fileno())
    is_ours = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
    if not is_ours or file.read(len(OWNER)) not in (b"", OWNER):
        file.close()
        raise ValueError(f"{path} is not the lock of a run: move it away.")
    return file


def _header(dtype, shape) -> bytes:
    """The header of a ``.npy`` file of such an array."""
    file = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def _write_state(file, arrays) -> str:
    """Write an ``.npz`` file that ends with the SHA-256 of its content, as a comment; return the hash."""
    np.savez(file, **arrays)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = bytes(64)
    digest = hash_of(file)
    file.write(digest.encode())
    return digest
