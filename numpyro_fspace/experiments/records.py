"""Records of runs: flat JSON objects, one per line of a file."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The keys of every record, in order.
KEYS = (
    "experiment",
    "dataset",
    "method",
    "split",
    "seed",
    "rmse",
    "lpd",
    "rmse_raw",
    "lpd_raw",
    "coverage90",
    "seconds",
    "num_gradients",
    "num_diverging",
    "rhat_max",
    "ess_min",
    "gp_rmse",
    "gp_lpd",
    "w2_gp",
    "version",
)
#: The keys by which a record of an experiment, and one of a benchmark, is known.
KNOWN_BY = ({"experiment", "method"}, {"benchmark"})
#: Significant digits of the numbers of a curve.
CURVE_DIGITS = 4


def record(**values) -> dict:
    """A record with all ``KEYS`` (missing values and NaN are null), followed by any other given values.

    Arrays in the mapping ``curves`` become lists of numbers with four significant digits.
    """
    from numpyro_fspace import __version__

    values["version"] = __version__
    curves = values.pop("curves", None)
    extra = [k for k in values if k not in KEYS]
    line = {k: _plain(values.get(k)) for k in (*KEYS, *extra)}
    if curves is not None:
        line["curves"] = {name: _rounded(np.asarray(curve).tolist()) for name, curve in curves.items()}
    return line


def run_of(line: Mapping) -> tuple:
    """The values that identify the run of a record."""
    named = ("experiment", "dataset", "method", "split", "seed", "version")
    return (*(line.get(k) for k in named), json.dumps(line.get("config"), sort_keys=True))


def distinct(lines: Iterable[Mapping]) -> list:
    """The first record of each run."""
    first: dict[tuple, Mapping] = {}
    for line in lines:
        first.setdefault(run_of(line), line)
    return list(first.values())


def check(path: str | Path):
    """Check that records can be appended to the file ``path``, which is created if it does not exist.

    Raises:
        OSError: it cannot be written, or it is not a regular file.
        ValueError: it contains something other than records; it is not changed.
    """
    with _opened(path) as file:
        _parsed(file.read(), path)


def write(line: Mapping, path: str | Path | None):
    """Print a record, or append it to the file ``path`` and sync the file.

    Processes that append to the same file take turns. An incomplete last line, left by a killed process, is removed.

    Raises:
        OSError, ValueError: as ``check``; the previous content of the file is not changed.
    """
    text = json.dumps(line)
    if path is None:
        print(text, flush=True)
        return
    with _opened(path) as file:
        content = file.read()
        lines, rest = _parsed(content, path)
        end = len(content) - len(rest)
        if rest:
            file.truncate(end)
        start = b"\n" if lines and content[end - 1 : end] != b"\n" else b""
        try:
            size = len(start) + len(text) + 1
            if file.write(start + text.encode() + b"\n") != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def read(path: str | Path) -> list[dict]:
    """The records of a file, without an incomplete last line.

    Raises:
        ValueError: another line is not a record.
    """
    return _parsed(Path(path).read_bytes(), path)[0]


@contextlib.contextmanager
def _opened(path):
    """A file of records, open for reading and appending and locked against other processes."""
    path = Path(path)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise OSError(errno.EINVAL, f"records are kept in a regular file, and this is {kind}", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _parsed(content: bytes, path) -> tuple[list[dict], bytes]:
    """The records in a file, and an incomplete record at its end."""
    *whole, last = content.split(b"\n")
    lines = []
    for number, text in enumerate(whole, 1):
        if (line := _record(text)) is None:
            raise ValueError(f"{path}, line {number} is no record of fspace: {text[:60]!r}.")
        lines.append(line)
    line = _record(last)
    if last and line is None and not _is_incomplete(last, not lines):
        raise ValueError(f"{path}, line {len(whole) + 1} is no record of fspace: {last[:60]!r}.")
    return [*lines, *([] if line is None else [line])], last if line is None else b""


def _is_incomplete(text: bytes, is_first: bool) -> bool:
    """Whether a text is the beginning of a record, as a killed process leaves it; the first one has its whole key."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text)
        return False  # the whole of something else
    for first, others in ((KEYS[0], KEYS[1:]), ("benchmark", ("",))):
        start = f'{{"{first}": '.encode()
        if start.startswith(text) and (text == start or not is_first):
            return True
        value = re.match(rb'("([^"\\]|\\.)*("|\\?$)|null|n?u?l?$)', text.removeprefix(start))
        if text.startswith(start) and value:
            rest, following = text.removeprefix(start)[value.end() :], [f', "{key}'.encode() for key in others]
            if any(one.startswith(rest) or rest.startswith(one) for one in following):
                return True
    return False


def _record(text: bytes) -> dict | None:
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not any(names <= line.keys() for names in KNOWN_BY):
        return None
    kinds = {"method": str, "benchmark": str, "experiment": str | None, "dataset": str | None, "config": dict | None}
    return line if all(isinstance(line[name], kind) for name, kind in kinds.items() if name in line) else None


def _plain(value):
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.{CURVE_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
