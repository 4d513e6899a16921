"""One run, one record: a flat JSON object, one per line of a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

__all__ = ["KEYS", "record", "write"]

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


def record(**values) -> dict:
    """A record with exactly ``KEYS`` (missing ones null, NaN null) and then whatever else is given."""
    from numpyro_fspace import __version__

    values["version"] = __version__
    extra = [k for k in values if k not in KEYS]
    return {k: _plain(values.get(k)) for k in (*KEYS, *extra)}


def write(line: dict, path: str | Path | None):
    """Print a record, or append it to the file ``path``."""
    text = json.dumps(line)
    if path is None:
        print(text, flush=True)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        file.write(text + "\n")


def _plain(value):
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value
