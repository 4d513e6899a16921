"""A run's draws and state on disk, so that a run that was killed goes on where it was.

A directory holds ``run.json``, what the run is; ``draws-00000.npz``, …, the draws of each part; and ``state.npz``, the
state of the chains after the parts that it counts. Every file is written under another name and then moved into place,
the draws of a part before the state that counts them: whenever the run is killed, the state on disk and the parts it
counts belong together. Files are arrays only; nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Checkpoint", "fingerprint"]

FORMAT = 1


class Checkpoint:
    """The files of one run.

    Args:
        directory: where; made if need be.
        run: what the run is, a flat dict for JSON. A directory that holds another run is refused, and left as it is.

    Raises:
        ValueError: the directory holds another run, files of a newer format, or damaged ones.
        OSError: it cannot be written to.
    """

    def __init__(self, directory: str | Path, run: dict):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        path, mine = self.directory / "run.json", {"format": FORMAT} | run
        if not path.exists():
            if any(self.directory.glob("*.npz")):
                raise ValueError(
                    f"checkpoint={str(directory)!r} holds arrays of something else; give another directory."
                )
            self._write(path, lambda file: file.write(json.dumps(mine, indent=1).encode()))
            return
        try:
            found = json.loads(path.read_text())
            number = int(found["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); give another directory, or remove this one.") from error
        if number > FORMAT:
            raise ValueError(
                f"{path} has format {number}, this version reads up to {FORMAT}: update numpyro_fspace, or give "
                "another directory."
            )
        other = {name: (found.get(name), value) for name, value in mine.items() if found.get(name) != value}
        if other:
            text = "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in other.items())
            raise ValueError(f"checkpoint={str(directory)!r} holds another run: {text}. Give another directory.")
        for rest in self.directory.glob(".*.npz-*"):  # of a write that was killed
            rest.unlink()

    def load(self, state):
        """``(number of parts done, draws drawn, state)``; ``state`` gives the structure. None if nothing was saved."""
        path = self.directory / "state.npz"
        if not path.exists():
            return None
        saved, (leaves, tree) = _read(path), jax.tree.flatten(state)
        try:
            arrays = [saved[f"leaf_{i}"] for i in range(len(leaves))]
        except KeyError as error:
            raise ValueError(f"{path} is damaged: {error}; give another directory, or remove this one.") from error
        wrong = [i for i, (a, leaf) in enumerate(zip(arrays, leaves, strict=True)) if a.shape != _plain(leaf).shape]
        if wrong:
            raise ValueError(f"{path} holds the state of another model; give another directory.")
        state = jax.tree.unflatten(tree, [_like(a, leaf) for a, leaf in zip(arrays, leaves, strict=True)])
        return int(saved["num_parts"]), int(saved["num_draws"]), state

    def save(self, num_parts: int, num_draws: int, state, draws: dict | None = None):
        """Write the draws of the last part, if there are any, and then the state that counts them."""
        if draws is not None:
            self._write(self._part(num_parts - 1), lambda file: np.savez(file, **draws))
        arrays: dict[str, Any] = {f"leaf_{i}": _plain(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        arrays |= {"num_parts": num_parts, "num_draws": num_draws}
        self._write(self.directory / "state.npz", lambda file: np.savez(file, **arrays))

    def draws(self, num_parts: int) -> dict:
        """The draws of so many parts, joined along the axis of draws, [C, S, …]."""
        parts = [_read(self._part(i)) for i in range(num_parts)]
        return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}

    def _part(self, number):
        return self.directory / f"draws-{number:05d}.npz"

    def _write(self, path, write):
        """The whole file or none of it."""
        handle, name = tempfile.mkstemp(dir=self.directory, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def fingerprint(arrays) -> str:
    """SHA-256 of a tree of arrays: types, shapes and values."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        value = np.ascontiguousarray(_plain(leaf))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _read(path) -> dict:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); give another directory, or remove this one.") from error


def _is_key(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(array, leaf):
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array, jnp.asarray(leaf).dtype)
