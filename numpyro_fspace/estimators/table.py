"""A user's table of text as numbers, with a list of all that was changed on the way."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from numpyro_fspace.estimators.parse_columns import (
    MOSTLY,
    as_dates,
    as_finite,
    as_numbers,
    as_text,
    check_decimal_commas,
    check_numbers,
    date_format,
    numerically,
)

#: Most levels of a text column that is one-hot, and least rows that a fit needs.
MAX_LEVELS, MIN_ROWS = 20, 20
#: Names of a first column that may be the number of the row.
INDEX_NAMES = {"index", "id", "row", "rownames", "row_id", "unnamed: 0", "no", "nr", "#"}


@dataclass(frozen=True)
class Column:
    """An input of the table.

    Attributes:
        name: of the column.
        kind: ``"number"``, ``"date"`` (days since ``start``), or ``"levels"`` (one-hot).
        levels: of a categorical column, as text.
        start: the first date, in ISO format.
        date_format: the format of its dates, as of ``strftime``.
    """

    name: str
    _: KW_ONLY
    kind: str
    levels: tuple[str, ...] = ()
    start: str = ""
    date_format: str = ""

    @property
    def labels(self) -> list[str]:
        """The names of its numbers; two levels are one number."""
        if self.kind != "levels":
            return [self.name]
        return [f"{self.name}={level}" for level in self.levels[len(self.levels) == 2 :]]

    def numbers(self, values: pd.Series) -> np.ndarray:
        """Its numbers [N, ...]; NaN where a value is missing, or is a level that is not known."""
        if self.kind == "levels":
            text = as_text(values)
            hot = np.stack([(text == level).fillna(False).to_numpy(bool) for level in self.levels], -1).astype(float)
            return np.where(hot.any(-1, keepdims=True), hot, np.nan)[:, len(self.levels) == 2 :]
        if self.kind == "date":
            days = (as_dates(values, self.date_format) - pd.Timestamp(self.start)) / pd.Timedelta(days=1)
            return days.to_numpy(float, na_value=np.nan)[:, None]
        return as_finite(values)[:, None]


@dataclass(frozen=True)
class Design:
    """How the rows of a table become inputs.

    Attributes:
        target: name of the target's column.
        columns: the inputs.
        is_classes: whether the target is a class.
        said: what was changed on the way, one sentence each.
    """

    target: str
    columns: tuple[Column, ...]
    is_classes: bool
    said: list[str] = field(default_factory=list, compare=False)

    @property
    def numbers(self) -> list[str]:
        """The names of the columns that hold numbers."""
        target = [] if self.is_classes else [self.target]
        return [column.name for column in self.columns if column.kind == "number"] + target

    def inputs(self, frame: pd.DataFrame) -> np.ndarray:
        """Inputs [N, D] of a table; NaN in rows with missing values."""
        missing = [column.name for column in self.columns if column.name not in frame]
        if missing:
            raise ValueError(f"the table lacks the columns {missing}; it has {list(frame.columns)}.")
        for column in self.columns:
            if column.kind == "number":
                check_numbers(frame[column.name], cure="correct it, or leave it empty")
        return np.concatenate([column.numbers(frame[column.name]) for column in self.columns], 1)

    def targets(self, frame: pd.DataFrame) -> np.ndarray:
        """Targets [N] of a table: numbers (NaN where missing), or text (None where missing)."""
        values = frame[self.target]
        if not self.is_classes:
            return as_finite(values)
        return as_text(values).to_numpy(object, na_value=None)

    def to_dict(self) -> dict[str, Any]:
        """The design as numbers, strings and lists."""
        return {k: v for k, v in asdict(self).items() if k != "said"}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Design:
        """The design of ``to_dict``."""
        columns = [Column(**{**column, "levels": tuple(column["levels"])}) for column in settings["columns"]]
        return cls(settings["target"], tuple(columns), settings["is_classes"])


def read_design(
    frame: pd.DataFrame, target: str, *, categorical=(), drop=(), classes: bool | None = None
) -> tuple[Design, np.ndarray, np.ndarray, np.ndarray]:
    """Find out what the columns are.

    Args:
        frame: the table, of text (``read_csv``).
        target: name of the target's column.
        categorical: names of columns that are one-hot although they hold numbers.
        drop: names of columns to leave out.
        classes: whether the target is a class; None is so for text, for truth values and for two numbers.

    Returns:
        The design, inputs [N, D] and targets [N] of the complete rows, and the numbers of these rows from 1, [N].

    Raises:
        ValueError: naming a column, what is wrong with it, and the cure.
    """
    for option, names in (("--target", [target]), ("--categorical", categorical), ("--drop", drop)):
        unknown = [name for name in names if name not in frame]
        if unknown:
            raise ValueError(f"{option}: the table has no column {unknown}; it has {list(frame.columns)}.")
        if option != "--target" and target in names:
            raise ValueError(f"{option}: {target!r} is the target and cannot be an input.")
    said: list[str] = []
    if classes is None:
        check_decimal_commas(frame[target])
    is_classes = _is_classes(frame[target], classes)
    if not is_classes:
        check_numbers(frame[target], cure="correct it, leave it empty if it is missing, or say --classes")
    columns, index = [], _row_numbers(frame)
    if index is not None and index not in (target, *drop, *categorical):
        said.append(f"{index!r} numbers the rows and is left out; as an input it needs another name.")
        drop = (*drop, index)
    for name in frame.columns:
        if name != target and name not in drop:
            column = _column(frame[name], name in categorical, said)
            columns += [] if column is None else [column]
    if not columns:
        raise ValueError("the table has no inputs beside the target.")
    design = Design(target, tuple(columns), is_classes, said)
    x, y = design.inputs(frame), design.targets(frame)
    known = np.array([v is not None and v == v for v in y])
    if not known.all():
        said.append(f"{np.sum(~known)} rows lack the target and are left out.")
    complete = known & ~np.isnan(x).any(1)
    if (known & ~complete).any():
        gaps = {c.name: int(np.isnan(c.numbers(frame[c.name])[known]).any(1).sum()) for c in design.columns}
        worst = ", ".join(f"{k} ({v})" for k, v in sorted(gaps.items(), key=lambda item: -item[1])[:3] if v)
        said.append(f"{np.sum(known & ~complete)} rows with missing inputs are left out; most are missing in {worst}.")
    if complete.sum() < MIN_ROWS:
        raise ValueError(
            f"{complete.sum()} complete rows are left of {len(frame)}, and at least {MIN_ROWS} are needed. "
            + " ".join(said)
            + " Leave columns out with --drop, or fill them."
        )
    return design, x[complete], y[complete], np.flatnonzero(complete) + 1


def _row_numbers(frame) -> str | None:
    """The name of the first column if it numbers the rows: it has no name, or one in ``INDEX_NAMES``."""
    name, values = frame.columns[0], frame.iloc[:, 0]
    if name != "column 1" and name.lower() not in INDEX_NAMES:
        return None
    numbers = as_finite(values[frame.notna().any(axis=1)])  # empty lines are no rows of their own
    counts_up = len(numbers) > 1 and (np.diff(numbers) == 1).all() and numbers[0] % 1 == 0
    return name if counts_up else None


def _is_classes(values, classes: bool | None) -> bool:
    """Whether a target is a class."""
    if classes is not None:
        return classes
    known = values.dropna()
    numbers = as_numbers(known)
    is_text = numbers.notna().mean() < MOSTLY if len(known) else False
    different = numbers if numbers.notna().all() else as_text(known)
    return bool(is_text or different.nunique() == 2)


def _column(values, is_categorical: bool, said: list[str]) -> Column | None:
    """What an input is; None if it says nothing."""
    name, known = str(values.name), values.dropna()
    if not len(known):
        said.append(f"{name!r} is empty and is left out.")
        return None
    levels, numbers = tuple(sorted(as_text(known).unique(), key=numerically)), as_numbers(known)
    if len(levels) == 1 or (numbers.notna().all() and numbers.nunique() == 1):
        said.append(f"{name!r} is the same in all rows and is left out.")
        return None
    if not is_categorical:
        check_decimal_commas(values)
        if numbers.notna().mean() >= MOSTLY:
            check_numbers(values, cure="correct it, leave it empty if it is missing, or say --categorical or --drop")
            return Column(name, kind="number")
        form, order = date_format(known)
        if form:
            dates = as_dates(known, form)
            if dates.isna().any():
                line = int(dates.index[dates.isna()][0]) + 2
                raise ValueError(
                    f"column {name!r} holds dates ({form}), but line {line} says {known[line - 2]!r}: correct it."
                )
            said.append(f"{name!r} holds dates ({form}{order}): it is turned into days since {dates.min():%Y-%m-%d}.")
            return Column(name, kind="date", start=dates.min().isoformat(), date_format=form)
    if len(levels) > MAX_LEVELS:
        raise ValueError(
            f"column {name!r} is text with {len(levels)} different values ({', '.join(map(repr, levels[:3]))}, ...), "
            f"and at most {MAX_LEVELS} can be levels: leave it out with --drop {name!r}, or join its values to a few. "
            "(Dates need one format in all rows, such as 2020-01-31.)"
        )
    said.append(
        f"{name!r} is categorical: {len(levels)} levels, {'one input' if len(levels) == 2 else 'one input each'}."
    )
    return Column(name, kind="levels", levels=levels)
