"""Tables of records in Markdown, with published figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np

from numpyro_fspace.experiments.catalog import Experiment, find
from numpyro_fspace.experiments.records import distinct

#: Settings by which the rows of a data set are chosen. Published figures are of their defaults.
PROTOCOL = ("train_share", "num_train", "num_test")
#: What tables of pages and pictures call methods.
METHOD_NAMES = {
    "gp": "exact GP",
    "fsghmc": "fSGHMC",
    "fsgld": "fSGLD",
    "sghmc": "SGHMC",
    "sgld": "SGLD",
    "mclmc": "MCLMC",
    "fmclmc": "fMCLMC",
    "nuts": "NUTS",
    "gfsvi": "GFSVI",
    "tfsvi": "TFSVI",
    "fvimc": "FVIMC, Wasserstein",
    "fvimc_kl": "FVIMC, KL",
    "svgp": "sparse GP",
    "gwi": "GWI",
    "fvi": "fVI",
    "fbnn": "FBNN",
    "ifbnn": "IFBNN",
    "laplace": "Laplace",
    "ensemble": "ensemble",
    "vip": "implicit process (VIP)",
    "bbb": "mean field (BBB)",
}


def table(experiment: Experiment, records: Sequence[Mapping]) -> str:
    """Means ± standard errors over splits and seeds: a row for each data set, method and config.

    The label of a row names settings that differ between records and from the defaults, and package versions that
    differ; a note names those that all records share. Published figures stand beside runs on the published splits
    alone. If some runs of a row lack a figure (a chain that never moved has no R-hat), the number of runs that have it
    is shown. A column with published figures is followed by a column of them. Duplicate records of a run count once.

    Raises:
        ValueError: there are no records, one has no method or no dataset, or a figure is not a number.
    """
    if not records:
        raise ValueError("there are no records; make some with fspace run ... --out FILE.")
    records = distinct(records)
    for line in records:
        _check(line, experiment)
    varied, num_versions = _varied(records), len({line.get("version") for line in records})
    groups: dict[tuple, list[Mapping]] = {}
    for line in records:
        settings = _settings(line, varied, experiment)
        if num_versions > 1:
            settings += (f"version={line.get('version')}",)
        groups.setdefault((line["dataset"], line["method"], settings), []).append(line)
    known = {key for figures in experiment.published.values() for key in figures}
    keys = [key for key in experiment.columns if any(line.get(key) is not None for line in records)]
    headings = ["data set", "method", "runs"]
    for key in keys:
        headings += [experiment.columns[key], *(["published"] if key in known else [])]
    rows = []
    for (dataset, method, settings), lines in groups.items():
        is_comparable = not _settings(lines[0], PROTOCOL, experiment)
        published = experiment.published.get((dataset, method), {}) if is_comparable else {}
        row = [dataset, ", ".join((method, *settings)), str(len(lines))]
        for key in keys:
            values = [line[key] for line in lines if line.get(key) is not None]
            missing = f" ({len(values)} of {len(lines)})" if 0 < len(values) < len(lines) else ""
            row.append(_summary(values) + missing)
            if key in known:
                row.append(f"{published[key]:g}" if key in published else "")
        rows.append(row)
    text = [headings, ["---"] * len(headings), *rows]
    note = f"\n\nPublished: {experiment.source}." if known else ""
    known_settings = {item.name for item in dataclasses.fields(experiment.config)} - {*varied}
    shared = [name for name in records[0].get("config") or {} if name in known_settings]
    if settings := _settings(records[0], shared, experiment):
        note += f"\n\nAll runs: {', '.join(settings)}."
    return "\n".join("| " + " | ".join(row) + " |" for row in text) + note


def _check(line, experiment: Experiment):
    for key in ("method", "dataset"):
        if not isinstance(line.get(key), str):
            raise ValueError(f"a record has no {key}: {str(dict(line))[:60]!r}.")
    for key in experiment.columns:
        if not isinstance(line.get(key), Real | None):
            raise ValueError(f"{key} of a record is {line[key]!r}, which is not a number.")


def _varied(records):
    """Names of the settings that differ between records."""
    configs = [line.get("config") or {} for line in records]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if any(config.get(name) != configs[0].get(name) for config in configs)]


def _settings(line, names, experiment: Experiment) -> tuple[str, ...]:
    """The settings of these names that are not the defaults, which are those of a setting that is missing."""
    config = line.get("config") or {}
    defaults = json.loads(json.dumps(dataclasses.asdict(experiment.config)))
    return tuple(f"{name}={config[name]}" for name in names if name in config and config[name] != defaults.get(name))


def labels(records: Sequence[Mapping]) -> list[str]:
    """Labels of an experiment's records: the method, and settings that differ between records and from the defaults."""
    experiment, varied = find(records[0]["experiment"]), _varied(records)
    return [", ".join([line["method"], *_settings(line, varied, experiment)]) for line in records]


def readable(label: str) -> str:
    """A label for a picture: ``"fsghmc, exact=True"`` is ``"fSGHMC, gp_network"``."""
    method, *settings = label.split(", ")
    settings = ["gp_network" if setting == "exact=True" else setting for setting in settings]
    return ", ".join([METHOD_NAMES.get(method, method), *settings])


def _summary(values) -> str:
    """Mean ± standard error, rounded according to the error."""
    if not values:
        return ""
    mean = float(np.mean(values))
    if len(values) == 1:
        return _three_digits(mean)
    error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    if not error > 1e-9 * abs(mean) or not np.isfinite(error):  # equal values, to rounding
        return _three_digits(mean)
    digits = max(0, 1 - int(np.floor(np.log10(error))))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _three_digits(value: float) -> str:
    """Three significant digits, and all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
