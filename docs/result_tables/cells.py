"""Tables of records: rows and columns choose runs, and a cell shows some figure of those that both choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_fspace.experiments.catalog import find
from numpyro_fspace.experiments.records import distinct

#: Conditions on these keys of a record; all others are on its config.
KEYS = ("experiment", "dataset", "method", "split", "seed")
#: Settings by which pages tell runs apart: those that no condition names have the defaults of the experiment.
SETTINGS = ("exact", "kernel", "train_share", "varying_noise", "weight_sd", "weight_scale")


class Runs(NamedTuple):
    """The runs of a cell: records, and conditions on them."""

    records: Sequence[Mapping]
    where: Mapping[str, object]

    def lines(self) -> list[Mapping]:
        """The records that fulfil the conditions.

        Raises:
            ValueError: a run has several, of other versions or settings.
        """
        config = find(str(self.where["experiment"])).config
        defaults = {name: getattr(config, name, None) for name in (*SETTINGS, *self.where) if name not in KEYS}
        found: dict[tuple, Mapping] = {}
        for line in self.records:
            known = {name: line.get(name) for name in KEYS} | defaults | (line.get("config") or {})
            if any(known[name] != value for name, value in {**defaults, **self.where}.items()):
                continue
            run = tuple(line.get(name) for name in KEYS)
            if run in found:
                raise ValueError(f"{run} has several records, of other versions or settings.")
            found[run] = line
        return list(found.values())

    def values(self, key: Key) -> list[float]:
        """The figures of the runs that have them."""
        found = [line.get(key) if isinstance(key, str) else key(line) for line in self.lines()]
        return [value for value in found if value is not None]


#: A figure of a record; what a cell shows; decimals or format of a number, or its decimals by its size.
Key = str | Callable[[Mapping], float | None]
Cell = Callable[[Runs], str]
Digits = int | str | Callable[[float], int]


class Row(NamedTuple):
    """A row: its first cells, conditions on its runs, and cells, by heading, that are not as the column says."""

    labels: Sequence[str]
    where: Mapping[str, object]
    cells: Mapping[str, str | Cell] = {}


class Column(NamedTuple):
    """A column: its heading, what its cells show, and conditions on its runs."""

    heading: str
    cell: Cell
    where: Mapping[str, object] = {}


class Table(NamedTuple):
    """A table of an experiment's records; ``labels`` are the headings of the rows' first cells."""

    experiment: str
    labels: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Row]
    records: str = ""  # the name of their file, if it is not the page's

    def rows_of(self, records: Sequence[Mapping]) -> list[str]:
        """The table in Markdown."""
        headings = [*self.labels, *(column.heading for column in self.columns)]
        records, texts = distinct(records), [headings, ["---"] * len(headings)]
        for labels, where, cells in self.rows:
            texts.append([*labels])
            for heading, cell, of_column in self.columns:
                cell = cells.get(heading, cell)
                runs = Runs(records, {"experiment": self.experiment, **where, **of_column})
                texts[-1].append(cell if isinstance(cell, str) else cell(runs))
        return ["| " + " | ".join(text) + " |" for text in texts]


def number(value: float, digits: Digits) -> str:
    """A number with a minus sign, and a space before the thousands of whole numbers with five digits or more."""
    value = float(f"{value:.12g}")  # 5.5, and not 5.499999999999999
    digits = digits(value) if callable(digits) else digits
    text = format(value, f"z.{digits}f" if isinstance(digits, int) else digits).removesuffix(".")
    if text.lstrip("-").isdigit() and abs(int(text)) >= 10_000:
        text = f"{int(text):,}".replace(",", " ")
    return text.replace("-", "−")


def one(key: Key, digits: Digits = 3, summary: Callable[[list[float]], float] = np.mean) -> Cell:
    """One number of all runs: the figure's mean, or another summary."""
    return lambda runs: number(summary(values), digits) if (values := runs.values(key)) else ""


def mean(key: Key, digits: Digits | None = 3) -> Cell:
    """Mean ± standard error; the mean alone of a single run, or if all are equal.

    Args:
        key: the figure.
        digits: decimals; None shows one digit of the error.
    """

    def cell(runs: Runs) -> str:
        values = runs.values(key)
        if len(set(values)) < 2:
            return one(key, "#.3g" if digits is None else digits)(runs)
        center, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
        places = digits(center) if callable(digits) else digits
        if places is None:
            places = max(0, -int(f"{error:.0e}".partition("e")[2]))
        return f"{number(center, places)} ± {number(error, places)}"

    return cell


def joined(by: str, *cells: Cell) -> Cell:
    """The texts of several cells; nothing if one is empty."""
    return lambda runs: by.join(texts) if all(texts := [cell(runs) for cell in cells]) else ""


def of(cell: Cell, **where: object) -> Cell:
    """What a cell shows of other runs."""
    return lambda runs: cell(runs._replace(where={**runs.where, **where}))


def published(key: str) -> Cell:
    """The published figure of the data set and the method, if there is one."""

    def cell(runs: Runs) -> str:
        experiment, dataset, method = (str(runs.where[name]) for name in ("experiment", "dataset", "method"))
        figure = find(experiment).published.get((dataset, method), {}).get(key)
        return "" if figure is None else number(figure, "g")

    return cell


def count(runs: Runs) -> str:
    """The number of runs."""
    return str(len(runs.lines()) or "")


def less(first: str | None, second: str) -> Key:
    """A figure less another; without the first one, the second with the other sign."""

    def key(line: Mapping) -> float | None:
        start, taken = 0.0 if first is None else line.get(first), line.get(second)
        return None if start is None or taken is None else start - taken

    return key
