"""One run, one record: a flat JSON object, one per line of a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["KEYS", "read", "record", "write"]

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
#: Significant digits of the numbers of a curve.
CURVE_DIGITS = 4


def record(**values) -> dict:
    """A record with exactly ``KEYS`` (missing ones null, NaN null) and then whatever else is given.

    Arrays under ``curves``, a mapping, become lists of four significant digits.
    """
    from numpyro_fspace import __version__

    values["version"] = __version__
    curves = values.pop("curves", None)
    extra = [k for k in values if k not in KEYS]
    line = {k: _plain(values.get(k)) for k in (*KEYS, *extra)}
    if curves is not None:
        line["curves"] = {name: _rounded(np.asarray(curve).tolist()) for name, curve in curves.items()}
    return line


def write(line: Mapping, path: str | Path | None):
    """Print a record, or append it to the file ``path``."""
    text = json.dumps(line)
    if path is None:
        print(text, flush=True)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a+b") as file:
        file.seek(0)
        kept = file.read()
        end = kept.rfind(b"\n") + 1
        if kept[end:]:  # the last writer was killed, or left no end of line
            if _is_record(kept[end:]):
                file.write(b"\n")
            else:
                file.truncate(end)
        file.write(text.encode() + b"\n")


def read(path: str | Path) -> list[dict]:
    """The records of a file; a last line that was cut short is none.

    Raises:
        ValueError: for another line that is no record.
    """
    *whole, last = Path(path).read_text().split("\n")
    for number, text in enumerate(whole, 1):
        if not _is_record(text):
            raise ValueError(f"{path}, line {number} is no record of fspace run: {text[:60]!r}.")
    return [json.loads(text) for text in (*whole, *([last] if _is_record(last) else []))]


def _is_record(text) -> bool:
    try:
        line = json.loads(text)
    except ValueError:
        return False
    return isinstance(line, dict) and "method" in line


def _plain(value):
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.{CURVE_DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value
