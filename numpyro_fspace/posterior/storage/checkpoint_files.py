"""The files of a run: draws, which need not fit into memory, and the state of the chains. This module reads them.

A directory holds ``run.json``, what the run is; ``draws-001-z.w.npy``, …, an array [C, S, …] for each field of the
draws, of full size from the start; and ``state.npz``, the state of the chains and the number of draws it counts. The
draws of a part are written before the state that counts them replaces the last one. So whenever the run is killed, the
draws that the state counts are complete, and those after it are made again, with the same values. Chains lie one after
another, so that the arrays can be mapped without joining or loading them. Files hold arrays only; nothing in them is
executed. ``mcmc/checkpoint_writer.py`` writes them; ``checkpoint_integrity.py`` has their versions and checksums.

All damage is found. ``run.json`` and ``state.npz`` end with a SHA-256 of the rest. The state names the ``run.json``
that it belongs to, and holds a CRC-32 of every field's file, chain by chain, as far as it counts draws: a part that is
written continues it, and it is compared with the draws once when the folder is opened.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.posterior.arrays import like, plain
from numpyro_fspace.posterior.storage.checkpoint_integrity import FORMAT, blocks, damaged, read_run, read_state
from numpyro_fspace.posterior.storage.fingerprint import HASHED
from numpyro_fspace.posterior.storage.model_check import PRIOR_DRAW

#: What a state file holds beside the leaves of the state.
COUNTS = ("num_kept", "num_made", "run", "checks")


class RunFiles:
    """The files of one run, to read.

    Args:
        directory: where they are, or will be.
        run: what the run is, a dict for JSON. Its entry ``"arrays"`` has the type and shape of each field of the draws
            by name, ``{"z/w": ["float32", [C, S, 2]]}``; the part before a slash is the field of the state. A
            directory where one of these entries differs is refused, and not changed.

    Raises:
        ValueError: the directory holds another run, files of another format, or damaged ones.
    """

    def __init__(self, directory: str | Path, run: dict):
        self.directory = folder_of(directory)
        self.run = {"format": FORMAT} | run
        self._checks: Any = None  # CRC-32 of each field and chain, [F, C]
        self._checked: str | None = None  # the state whose draws were found whole
        self._refuse_others()

    @classmethod
    def open(cls, directory: str | Path) -> RunFiles:
        """The run that a directory holds, whichever it is."""
        path = folder_of(directory) / "run.json"
        if not path.exists():
            raise ValueError(f"{str(directory)!r} is not the checkpoint of a run: it holds no run.json.")
        return cls(directory, read_run(path)[0])

    def load(self, *states):
        """``(draws kept, draws made, state)``, in the structure of one of ``states``. None if nothing was saved."""
        saved = self._saved()
        if saved is None:
            return None
        for leaves, tree in map(jax.tree.flatten, states):
            names = [f"leaf_{i}" for i in range(len(leaves))]
            shapes = [plain(leaf).shape for leaf in leaves]
            if saved.keys() == {*names, *COUNTS} and [saved[name].shape for name in names] == shapes:
                arrays = [like(saved[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
                return int(saved["num_kept"]), int(saved["num_made"]), jax.tree.unflatten(tree, arrays)
        path = self.directory / "state.npz"
        raise ValueError(f"{path} holds the state of another model; give another directory.")

    def draws(self) -> dict:
        """The draws that the state counts, by field of the state, [C, S, …]: read-only arrays that lie on disk."""
        saved = self._saved()
        if saved is None:
            raise ValueError(f"checkpoint={str(self.directory)!r} holds no draws yet.")
        states: dict[str, Any] = {}
        for name in self._paths():
            field, _, site = name.partition("/")
            array = self._map(name)[0][:, : int(saved["num_kept"])]
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
        (run, self._mark), mine = read_run(path), flat(json.loads(json.dumps(self.run)), ".")
        found = flat({name: value for name, value in run.items() if name in self.run}, ".")
        names = [name for name in {**mine, **found} if found.get(name) != mine.get(name)]
        # Other arguments change the model's density too.
        names = [k for k in names if not k.startswith(f"inputs.{PRIOR_DRAW}")] or names
        if names:
            text = "; ".join(_difference(name, found.get(name), mine.get(name)) for name in names[:4])
            raise ValueError(f"checkpoint={str(self.directory)!r} holds another run: {text}. Give another directory.")
        known = {path.name for path in self._paths(run["arrays"]).values()}
        others = sorted(path.name for path in self.directory.glob("draws-*.npy") if path.name not in known)
        if others:
            raise ValueError(f"{self.directory / others[0]} is no file of this run; move it away.")

    def _saved(self) -> dict | None:
        """What the state file holds, with the draws that it counts found whole; None if nothing was saved."""
        path = self.directory / "state.npz"
        if not path.exists():
            return None
        saved, digest = read_state(path)
        try:
            num_kept, _ = int(saved["num_kept"]), int(saved["num_made"])
            mark, checks = str(saved["run"]), saved["checks"].astype(np.uint32)
            if checks.shape != (len(self._paths()), self._num_chains()):
                raise ValueError(f"it has checksums of shape {list(checks.shape)}")
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, error) from error
        if mark != read_run(self.directory / "run.json")[1]:
            raise ValueError(f"{path} and run.json beside it are of two runs; put the right one back.")
        if digest != self._checked:
            for row, name in enumerate(self._paths()):
                self._check_complete(name, num_kept, checks[row])
            self._checked = digest
        return saved

    def _check_complete(self, name, num_kept, checks):
        """By reading: of a mapped file that is cut short meanwhile, the system would end the process."""
        path, (_, shape), offset = self._paths()[name], self._spec(name), self._map(name)[1]
        row = self._row_size(name)
        with open(path, "rb") as file:
            start = zlib.crc32(file.read(offset))
            for chain, check in enumerate(checks):
                file.seek(offset + chain * shape[1] * row)
                found = start
                for size in blocks(num_kept * row):
                    found = zlib.crc32(file.read(size), found)
                if found != check:
                    raise damaged(
                        path,
                        f"the first {num_kept} draws of chain {chain} are not those that were written: another run's, "
                        "or a copy made while the run went on",
                    )

    def _paths(self, arrays=None) -> dict:
        # Numbered: names may differ in what a file's name cannot hold.
        names = enumerate(sorted(self.run["arrays"] if arrays is None else arrays))
        clean = re.compile(r"[^\w.-]", re.ASCII)
        return {name: self.directory / f"draws-{i:03d}-{clean.sub('.', name)[:80]}.npy" for i, name in names}

    def _spec(self, name):
        dtype, shape = self.run["arrays"][name]
        return jnp.dtype(dtype), tuple(shape)

    def _num_chains(self) -> int:
        return next((shape[0] for _, shape in self.run["arrays"].values()), 0)

    def _row_size(self, name) -> int:
        dtype, shape = self._spec(name)
        return dtype.itemsize * int(np.prod(shape[2:]))

    def _map(self, name):
        """The array of a field, and the place in its file at which it begins."""
        path, (dtype, shape) = self._paths()[name], self._spec(name)
        if not path.exists():
            raise ValueError(f"{path} is missing; put it back, or give another directory.")
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            if (mapped.shape, mapped.dtype.itemsize) != (shape, dtype.itemsize):
                raise ValueError(f"it has {mapped.dtype}{list(mapped.shape)}, not {dtype}{list(shape)}")
            if path.stat().st_size != mapped.offset + mapped.nbytes:
                raise ValueError("it has bytes that are no draws'")
            return np.asarray(mapped).view(dtype), mapped.offset
        except Exception as error:  # whatever NumPy makes of a damaged file
            raise damaged(path, error) from error


def folder_of(checkpoint) -> Path:
    """The folder that ``checkpoint=`` names.

    Raises:
        TypeError, ValueError: if it names none.
    """
    if not isinstance(checkpoint, str | os.PathLike) or isinstance(os.fspath(checkpoint), bytes):
        raise TypeError(f"checkpoint must be the path of a folder, got {checkpoint!r}.")
    if not os.fspath(checkpoint).strip() or "\0" in os.fspath(checkpoint):
        raise ValueError(f"checkpoint={str(checkpoint)!r} names no folder.")
    try:
        return Path(checkpoint).expanduser()
    except RuntimeError as error:
        raise ValueError(f"checkpoint={str(checkpoint)!r} names no folder: {error}") from None


def _difference(name, old, new) -> str:
    """What differs between two runs; hashes, which say nothing, are left out."""

    def said(value):
        kind, is_hashed, _ = str(value).partition(HASHED)
        return "not given" if value is None else kind if is_hashed else repr(value)

    name, old, new = name.removeprefix("inputs."), said(old), said(new)
    return f"{name} has other values" if old == new else f"{name} was {old} and is {new}"


def flat(values: dict, between: str = "/", before: str = "") -> dict:
    """``{"a": {"b": 1}}`` as ``{"a/b": 1}``, for another ``between`` with that."""
    found: dict = {}
    for k, v in values.items():
        found |= flat(v, between, f"{before}{k}{between}") if isinstance(v, dict) else {f"{before}{k}": v}
    return found
