"""``save``: a posterior in one file, and the way back.

The file is NumPy's ``.npz``: arrays alone, without pickle, of which nothing is executed. Its entry ``header`` is JSON:
what the posterior is, with a number in the place of each array, and a SHA-256 of all arrays. A second entry holds a
SHA-256 of the header.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace.posterior.posterior import Posterior, as_posterior, functions_run
from numpyro_fspace.posterior.run_files import plain

__all__ = ["read", "save"]

FORMAT = 1


def save(source: NumPyroMCMC | Posterior, path: str | Path, *, arguments: bool = True) -> None:
    """Write a posterior to one file, which ``fs.Posterior.load(path, model)`` reads, in another process too.

    The file holds the draws, their fields such as ``diverging``, and the arguments that the model was fitted to, but
    not the model, which is code, nor the state of a sampler (``fs.MCMC(..., checkpoint=folder)`` keeps that). It is
    written as a whole or not at all. One that ``save`` has written before is replaced; another one is not.

    Args:
        source: an ``MCMC`` object that has run, or a ``fs.Posterior``.
        path: of the file, ``.npz`` by custom.
        arguments: whether to keep the arguments. These may be arrays, numbers, strings, None, keys, and tuples, lists
            and dicts of them. Without them give them to ``load``.

    Raises:
        TypeError: for other sources, and for an argument that cannot be kept.
        ValueError: if ``source`` has no draws; for a posterior of ``fs.FVIMC``; for a path that is no file.
        FileExistsError: the file is another one than ``save`` makes.
        OSError: it cannot be written.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, pathlib, tempfile
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> posterior = fs.Posterior(model, {"slope": jax.numpy.ones(5)}, args=(jax.numpy.ones(3),))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.npz"
        >>> fs.save(posterior, path)
        >>> fs.predict(fs.Posterior.load(path, model), jax.random.key(0), jax.numpy.ones(4))["y"].shape
        (5, 4)
    """
    if not isinstance(source, NumPyroMCMC | Posterior):
        cure = " Make one of them: fs.Posterior(model, draws, args=(x, y))." if isinstance(source, dict) else ""
        raise TypeError(f"save needs an MCMC object that has run or a fs.Posterior, got {type(source).__name__}.{cure}")
    found = functions_run(source) if getattr(source, "functions_at", None) is not None else as_posterior(source)
    if found.fit is None:
        raise ValueError(
            "save: the functions of this posterior (of fs.FVIMC) are transformed by networks that a file does not "
            "hold. Save draws of its functions, fs.predict(...), with numpy.savez."
        )
    arrays: list = []
    header = {
        "made_by": "numpyro_fspace",
        "format": FORMAT,
        "num_chains": found.num_chains,
        "samples": _encode(found.samples, "samples", arrays),
        "stats": _encode(found.stats, "stats", arrays),
        "fit": _encode(found.fit, "fit", arrays),
        "functions_at": _encode(found.functions_at, "functions_at", arrays),
        "has_arguments": arguments,
        "args": _encode(list(found.args) if arguments else [], "argument", arrays),
        "kwargs": _encode(found.kwargs if arguments else {}, "argument", arrays),
    }
    header["sha256"] = _digest(arrays)
    text = json.dumps(header).encode()
    entries = {f"array_{i}": a for i, a in enumerate(arrays)}
    entries |= {"header": np.frombuffer(text, np.uint8), "header_sha256": np.array(hashlib.sha256(text).hexdigest())}
    _write(_checked_path(path), entries)


def read(path: str | Path, model, args: tuple, kwargs: dict) -> Posterior:
    """``fs.Posterior.load``."""
    from numpyro import handlers

    from numpyro_fspace.model.linearized import linearize

    if not callable(model):
        raise TypeError(f"load needs the model of the posterior, a function, got {type(model).__name__}.")
    header, arrays = _read(Path(path).expanduser())
    values = {k: _decode(header[k], arrays) for k in ("samples", "stats", "fit", "functions_at", "args", "kwargs")}
    if args or kwargs:
        values |= {"args": args, "kwargs": kwargs}
    fit = values["fit"]
    if fit.get("params"):
        model = handlers.substitute(model, data=fit["params"])
    if "center" in fit:
        model = linearize(model, fit["center"])
    return Posterior(model, num_chains=header["num_chains"], **values | {"args": tuple(values["args"])})


# ---- values as JSON with arrays --------------------------------------------------------------------


def _encode(value, name: str, arrays: list) -> Any:
    """``value`` for JSON: [kind, what it holds]."""
    if value is None or isinstance(value, bool | int | float | str):
        if type(value) in (type(None), bool, int, float, str):
            return ["value", value]
    elif type(value) in (tuple, list):
        return [type(value).__name__, [_encode(v, f"{name} {i}", arrays) for i, v in enumerate(value)]]
    elif isinstance(value, dict) and all(type(k) is str for k in value):
        return ["dict", {k: _encode(v, f"{name} {k!r}", arrays) for k, v in value.items()}]
    elif isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer):
        array = plain(value)
        is_kept = array.dtype.kind not in "OV" or jnp.issubdtype(array.dtype, np.number)
        if is_kept and not np.ma.is_masked(value):
            is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            kind = "jax" if isinstance(value, jax.Array) else "numpy" if isinstance(value, np.ndarray) else "number"
            arrays.append(array)
            key = str(jax.random.key_impl(jnp.asarray(value))) if is_key else None
            return ["array", [len(arrays) - 1, kind, str(array.dtype), key]]
    raise TypeError(
        f"save: {name} is of type {type(value).__name__}{_dtype(value)}, which a file of arrays does not hold. Pass "
        "arguments=False, and give load the arguments: fs.Posterior.load(path, model, x, y)."
    )


def _dtype(value) -> str:
    return f" and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""


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
        raise ValueError(f"save: {str(path)!r} is no file; give the name of one.")
    try:
        with open(found, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            is_ours = json.loads(file["header"].tobytes())["made_by"] == "numpyro_fspace"
    except Exception:  # whatever NumPy, zipfile and JSON make of another file
        is_ours = False
    if not is_ours:
        raise FileExistsError(f"save: {str(path)!r} exists and is no file of save; give another name, or remove it.")
    return found


def _write(path: Path, entries: dict):
    """The whole file or none of it."""
    path = path.resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Make it first.")
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "xb") as file:
            np.savez(file, **entries)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
        raise ValueError(f"load: {str(path)!r} is damaged, or no file of fs.save ({error}).") from error
    if made_by != "numpyro_fspace" or (number != FORMAT and is_intact):
        raise ValueError(
            f"load: {str(path)!r} has format {number}, this version reads {FORMAT}: read it with the version that "
            "wrote it, or update numpyro_fspace."
        )
    arrays = [entries.get(f"array_{i}") for i in range(len(entries))]
    if not is_intact or any(a is None for a in arrays) or _digest(arrays) != header["sha256"]:
        raise ValueError(f"load: {str(path)!r} is damaged: its checksum is another one.")
    return header, arrays
