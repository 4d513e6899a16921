"""The version and checksums of a run's files, and how they are read and written whole.

``checkpoint_files.py`` describes their layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets

import jax.numpy as jnp
import numpy as np

FORMAT = 8
#: Bytes that are read at a time where a whole file is checked.
BLOCK = 2**20


def write_whole(path, write):
    """Make or replace a file by what ``write(file)`` writes: the whole file or, if that fails, nothing."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "x+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sealed(run: dict) -> tuple[bytes, str]:
    """The content of ``run.json``, and the checksum in it."""
    checksum = hashlib.sha256(json.dumps(run, indent=1).encode()).hexdigest()
    return json.dumps(run | {"checksum": checksum}, indent=1).encode(), checksum


def read_run(path) -> tuple[dict, str]:
    """What a run is, and the checksum of it.

    Raises:
        ValueError: if it is of another format or damaged: not, byte for byte, what was written.
    """
    try:
        content = path.read_bytes()
        found = json.loads(content)
        number = int(found["format"])
    except Exception as error:  # whatever is made of a damaged file
        raise damaged(path, error) from error
    if number != FORMAT:
        cure = "update numpyro_fspace" if number > FORMAT else "read it with the version that wrote it"
        raise ValueError(f"{path} has format {number}, this version reads {FORMAT}: {cure}, or give another directory.")
    checksum = found.pop("checksum", None)
    if sealed(found) != (content, checksum):
        raise damaged(path, "its content and its checksum differ")
    found.pop("id", None)
    try:
        for dtype, shape in found["arrays"].values():
            if jnp.dtype(dtype).hasobject or len(shape) < 2 or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(f"no array has type {dtype!r} and shape {shape!r}")
        if len({shape[0] for _, shape in found["arrays"].values()}) > 1:
            raise ValueError("its arrays have different numbers of chains")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
    return found, checksum


def read_state(path) -> tuple[dict, str]:
    """The arrays of a state file, and the SHA-256 of it."""
    try:
        with open(path, "rb") as file:
            digest = hash_of(file)
            if file.read() != digest.encode():
                raise ValueError("its content and its checksum differ")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays), digest
    except Exception as error:  # whatever NumPy and zipfile make of a damaged file
        raise damaged(path, error) from error


def hash_of(file) -> str:
    """SHA-256 of a file without its last 64 bytes, at whose start the file's position is then."""
    size, digest = file.seek(0, os.SEEK_END), hashlib.sha256()
    file.seek(0)
    for length in blocks(max(0, size - 64)):
        digest.update(file.read(length))
    return digest.hexdigest()


def blocks(size: int) -> list[int]:
    """Block sizes that sum to ``size``."""
    return [BLOCK] * (size // BLOCK) + [size % BLOCK]


def damaged(path, error) -> ValueError:
    return ValueError(f"{path} is damaged ({error}); give another directory, or remove this one.")
