"""The cells of a CSV file as text, and errors that name its first wrong line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from numpyro_fspace.estimators.parse_columns import with_decimal_points


def read_csv(
    path: str | Path, decimal: str = ".", *, numbers: Sequence[str] | None = None, text: Sequence[str] = ()
) -> pd.DataFrame:
    """The table of a CSV file, with ``,``, ``;`` or a tab between the fields; errors name the line and the cure.

    All cells are text, so that what a cell is does not depend on the other rows of its file; missing ones are missing.
    Every line after the first is a row, empty ones too, except at the end of the file.

    Args:
        path: of the file.
        decimal: the decimal point, ``"."`` or ``","``; with ``","`` numbers may have points between thousands. Numbers
            are returned with a point, and without those between thousands.
        numbers: names of the columns that hold numbers, of which ``decimal`` speaks; if None, those of which most cells
            are numbers.
        text: names of columns that are text, whatever they hold.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}): save the table as CSV in UTF-8.") from error
    separator = max(";\t," if decimal == "," else ",;\t", key=header.count)  # the first if the header has none
    names = [name.strip() for name in next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])]
    if not any(names):
        raise ValueError(f"{path} is empty, or its first line is: the first line must name the columns.")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} names the columns {twice} twice: give each column a name of its own.")
    try:
        num_rows = _checked_rows(path, separator, len(names))
        if not num_rows:
            raise ValueError(f"{path} has a first line with names, and no rows.")
        frame = pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            skipinitialspace=True,
            dtype=str,
            index_col=False,
            usecols=range(len(names)),
            skip_blank_lines=False,
        )[:num_rows]
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip()} (fields between {separator!r}).") from error
    frame.columns = [name or f"column {i + 1}" for i, name in enumerate(names)]
    frame = frame.apply(lambda cells: cells.astype("string").str.strip().replace("", pd.NA))
    if decimal == ",":
        for name in frame.columns.difference(text) if numbers is None else frame.columns.intersection(numbers):
            frame[name] = with_decimal_points(frame[name], is_known=numbers is not None)
    return frame


def _checked_rows(path: Path, separator: str, num: int) -> int:
    """The number of rows up to the last line that is not empty.

    A line with more or fewer fields than the first is refused, as its values may be in the wrong columns.
    """
    num_rows = last = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, skipinitialspace=True)
        next(reader, None)
        for fields in reader:
            num_rows += 1
            is_empty = fields in ([], [""]) and (num > 1 or not fields)
            last = last if is_empty else num_rows
            if (not is_empty and len(fields) < num) or any(field.strip() for field in fields[num:]):
                raise ValueError(
                    f"{path}: line {reader.line_num} has {len(fields)} fields between {separator!r}, and the first "
                    f"line names {num} columns: correct it. A missing value is an empty field, and text with "
                    f"{separator!r} in it stands in double quotes."
                )
    return last
