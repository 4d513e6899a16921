"""The file format of ``save`` and ``Posterior.load``: named values in one file of arrays, with checksums.

The file is NumPy's ``.npz``. It holds arrays alone, without pickle, and nothing in it is executed. Its entry ``header``
is JSON: the values, with a number in the place of each array, and a SHA-256 of all arrays. A second entry holds a
SHA-256 of the header.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.posterior.arrays import is_key, plain
from numpyro_fspace.posterior.storage.checkpoint_integrity import write_whole

FORMAT = 2


def write_archive(path: str | Path, about: dict, values: dict):
    """Write one file, as a whole or not at all.

    Args:
        path: of the file. One that ``write_archive`` has written before is replaced.
        about: entries for JSON, which can be read without this package.
        values: by name, arrays, numbers, strings, None, keys, and tuples, lists and dicts of them.

    Raises:
        TypeError: for a value of another type.
        ValueError: for a path that is not one of a file.
        FileExistsError: the file was not written by ``write_archive``.
        OSError: it cannot be written.
    """
    arrays: list = []
    coded = {name: _encode(value, name, arrays) for name, value in values.items()}
    header = {"made_by": "numpyro_fspace", "format": FORMAT} | about | coded | {"sha256": _digest(arrays)}
    text = json.dumps(header).encode()
    entries = {f"array_{i}": a for i, a in enumerate(arrays)}
    entries |= {"header": np.frombuffer(text, np.uint8), "header_sha256": np.array(hashlib.sha256(text).hexdigest())}
    _write(_checked_path(path), entries)


def read_archive(path: str | Path) -> dict:
    """The entries ``about`` and the ``values`` that ``write_archive`` has written, by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, of another format, or was not written by ``write_archive``.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"load: path must be the name of a file, got {path!r}.")
    header, arrays = _read(Path(path).expanduser())
    return {name: _decode(v, arrays) if isinstance(v, list) else v for name, v in header.items()}


# ---- values as JSON with arrays --------------------------------------------------------------------


def _encode(value, name: str, arrays: list) -> Any:
    """``value`` for JSON: [kind, what it holds]."""
    if type(value) in (type(None), bool, int, float, str):  # a float64 of NumPy, a subclass of float, is an array
        return ["value", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_encode(v, f"{name}[{i}]", arrays) for i, v in enumerate(value)]]
    if isinstance(value, dict) and all(type(k) is str for k in value):
        return ["dict", {k: _encode(v, f"{name}[{k!r}]", arrays) for k, v in value.items()}]
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer):
        array = plain(value)
        is_kept = array.dtype.kind not in "OV" or jnp.issubdtype(array.dtype, np.number)
        if is_kept and not np.ma.is_masked(value):
            kind = "jax" if isinstance(value, jax.Array) else "numpy" if isinstance(value, np.ndarray) else "number"
            arrays.append(array)
            key = str(jax.random.key_impl(jnp.asarray(value))) if is_key(value) else None
            return ["array", [len(arrays) - 1, kind, str(array.dtype), key]]
    dtype = f" and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise TypeError(f"{name} is of type {type(value).__name__}{dtype}, which a file of arrays cannot hold.")


def _decode(coded, arrays: list) -> Any:
    kind, value = coded
    if kind == "value":
        return value
    if kind == "dict":
        return {k: _decode(v, arrays) for k, v in value.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_decode(v, arrays) for v in value)
    number, kind, dtype, key = value
    array = arrays[number]
    array = array if str(array.dtype) == dtype else array.view(jnp.dtype(dtype))
    if key is not None:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=key)
    if kind == "number":
        return array[()]
    is_kept = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype if kind == "jax" else False
    return jnp.asarray(array) if is_kept else array


def _digest(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.itemsize}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# ---- files -----------------------------------------------------------------------------------------


def _checked_path(path) -> Path:
    if not os.fspath(path):
        raise ValueError("save: path is empty; give the name of a file.")
    found = Path(path).expanduser()
    if not found.exists():
        return found
    if not found.is_file():
        raise ValueError(f"save: {str(path)!r} is not a file; give the name of one.")
    try:
        with open(found, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            is_ours = json.loads(file["header"].tobytes())["made_by"] == "numpyro_fspace"
    except Exception:  # whatever NumPy, zipfile and JSON make of another file
        is_ours = False
    if not is_ours:
        raise FileExistsError(
            f"save: {str(path)!r} exists and was not written by fs.save; give another name, or remove it."
        )
    return found


def _write(path: Path, entries: dict):
    path = path.resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Make it first.")
    try:
        write_whole(path, lambda file: np.savez(file, **entries))
    except OSError as error:
        raise OSError(error.errno, f"save: the file cannot be written ({error.strerror})", str(path)) from error


def _read(path: Path) -> tuple[dict, list]:
    if not path.is_file():
        raise FileNotFoundError(f"load: there is no file {str(path)!r}.")
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            entries = {name: file[name] for name in file.files}
        text = entries.pop("header").tobytes()
        header, is_intact = json.loads(text), entries.pop("header_sha256").item() == hashlib.sha256(text).hexdigest()
        made_by, number = header["made_by"], header["format"]
    except Exception as error:  # whatever NumPy, zipfile and JSON make of another file
        raise ValueError(f"load: {str(path)!r} is damaged, or not a file of fs.save ({error}).") from error
    if made_by != "numpyro_fspace" or (number != FORMAT and is_intact):
        raise ValueError(
            f"load: {str(path)!r} has format {number}, this version reads {FORMAT}: read it with the version that "
            "wrote it, or update numpyro_fspace."
        )
    arrays = [entries.get(f"array_{i}") for i in range(len(entries))]
    if not is_intact or any(a is None for a in arrays) or _digest(arrays) != header["sha256"]:
        raise ValueError(f"load: {str(path)!r} is damaged: its content and its checksum differ.")
    return header, arrays
