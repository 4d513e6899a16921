"""Rows and columns that many tables have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from numpyro_fspace.experiments.tables import METHOD_NAMES
from result_tables.cells import Cell, Column, Digits, Row

#: What the pages call methods, and two ways to run one of them.
LABELS = METHOD_NAMES | {"gp_network": "fSGHMC, `gp_network`", "calibrated": "fSGHMC, calibrated"}
WAYS = {"gp_network": {"method": "fsghmc", "exact": True}, "calibrated": {"method": "fsghmc"}}


def rows(names: str, cells: Mapping[str, str | Cell] | None = None, **where: object) -> list[Row]:
    """A row for each method."""
    return [
        Row((LABELS.get(name, name),), WAYS.get(name, {"method": name}) | where, cells or {}) for name in names.split()
    ]


def across(cell: Cell, names: str) -> list[Column]:
    """A column for each method."""
    return [Column(LABELS[name], cell, WAYS.get(name, {"method": name})) for name in names.split()]


def columns(cell: Callable[..., Cell], digits: Digits | None, headings: Mapping[str, str]) -> list[Column]:
    """Columns of one kind, by heading and key."""
    return [Column(heading, cell(key, digits)) for heading, key in headings.items()]


def sets(names: str) -> list[Row]:
    """A row for each data set."""
    return [Row((name,), {"dataset": name}) for name in names.split()]


def grouped(groups: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Rows with another first cell: the label of their group, in its first row."""
    return [
        row._replace(labels=("" if i else label, *row.labels))
        for label, group in groups.items()
        for i, row in enumerate(group)
    ]
