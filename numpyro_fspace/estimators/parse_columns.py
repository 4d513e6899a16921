"""The cells of a column of a table as numbers, text or dates, and errors that name the first wrong line."""

from __future__ import annotations

import re
import warnings
from datetime import datetime

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

#: A text column of which this share are numbers (or dates) is one of numbers (or dates) with errors.
MOSTLY = 0.5
#: Numbers with a decimal comma or none, perhaps with points between thousands; with a decimal point; with commas
#: between thousands.
WITH_COMMA = r"[+-]?(?:[1-9]\d{0,2}(?:\.\d{3})+(?:,\d*)?|(?:\d+|(?=,\d))(?:,\d*)?(?:[eE][+-]?\d+)?)"
WITH_POINT = r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?"
THOUSANDS = r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?"
#: Formats of dates and of times after them. Month before day comes first.
DATES = (
    *(f.replace("-", s) for s in "-/." for f in ("%Y-%m-%d", "%m-%d-%Y", "%d-%m-%Y", "%m-%d-%y", "%d-%m-%y")),
    *(f.replace("-", s) for s in "-/ " for f in ("%d-%b-%Y", "%d-%B-%Y", "%Y-%b-%d")),
    *("%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y"),
)
CLOCKS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
TIMES = ("", *(f"{s}{clock}{zone}" for s in " T" for clock in CLOCKS for zone in ("", "%z", " %z")))
#: Cells that are tried with every format.
NUM_TRIED = 20


def check_numbers(values, *, cure: str) -> None:
    """Numbers with errors among them are refused, with the first line that holds one."""
    known = values.dropna()
    numbers = as_numbers(known)
    infinite = known[np.isinf(numbers.to_numpy(float, na_value=np.nan))]
    if len(infinite):
        raise ValueError(
            f"column {str(values.name)!r} holds {infinite.iloc[0]} in line {int(infinite.index[0]) + 2} "
            f"({len(infinite)} such rows): correct it, or leave it empty if it is missing."
        )
    bad = known[numbers.isna()]
    if len(bad):
        line, example = int(bad.index[0]) + 2, bad.iloc[0]
        raise ValueError(
            f"column {str(values.name)!r} holds numbers, but line {line} says {example!r} ({len(bad)} such rows): "
            f"{cure}. For commas as decimal points there is --decimal ','; remove commas between thousands."
        )


def check_decimal_commas(values) -> None:
    """Text that is mostly numbers with commas, such as '1,5' or '1,234.5', is refused."""
    known = as_text(values.dropna())
    if not len(known):
        return
    decimal, thousands = (known.str.fullmatch(form).fillna(False) for form in (WITH_COMMA, THOUSANDS))
    decimal &= known.str.contains(",", regex=False)
    name, levels = str(values.name), "If these are levels, say --categorical"
    if (
        thousands.any()
        and (thousands | as_numbers(known).notna()).mean() >= MOSTLY
        and not (decimal & ~thousands).any()
    ):
        raise ValueError(
            f"column {name!r} holds {known[thousands].iloc[0]!r}: remove commas between thousands, or, if these are "
            f"decimal commas, say --decimal ','. {levels} {name!r}, or for a target --classes."
        )
    if decimal.mean() >= MOSTLY:
        raise ValueError(
            f"column {name!r} looks like numbers with decimal commas ({known[decimal].iloc[0]!r}): say --decimal ','. "
            f"{levels} {name!r}, or for a target --classes."
        )


def with_decimal_points(cells, *, is_known: bool):
    """Numbers with decimal commas as numbers with points, in a column of numbers; a decimal point there is refused."""
    is_number = cells.str.fullmatch(WITH_COMMA).fillna(False)
    wrong = cells[cells.str.fullmatch(WITH_POINT).fillna(False) & ~is_number]
    if not is_known and is_number.sum() + len(wrong) < MOSTLY * cells.notna().sum():
        return cells
    if len(wrong):
        raise ValueError(
            f"column {str(cells.name)!r} holds {wrong.iloc[0]!r} in line {int(wrong.index[0]) + 2} ({len(wrong)} such "
            "rows), with a decimal point: correct it, or say --decimal '.'."
        )
    plain = cells.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)
    return cells.where(~is_number, plain)


def as_numbers(values):
    """Values as numbers, missing where they are none."""
    return pd.to_numeric(values, errors="coerce")


def as_finite(values):
    """Values as an array of numbers [N], NaN where they are none or infinite."""
    found = as_numbers(values).to_numpy(float, na_value=np.nan)
    return np.where(np.isfinite(found), found, np.nan)


def as_text(values):
    """Values as text, missing ones left missing; whole numbers without a point, truth values in one spelling."""
    text = values.astype("string").str.strip().str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return text.where(~text.str.fullmatch(r"(?i:true|false)").fillna(False), text.str.capitalize())


def date_format(values) -> tuple[str, str]:
    """The format in which most values are dates, ``""`` for none, and words for where another order fits as well."""
    text = values.astype("string").str.strip()
    if text.str.count(r"\d").ge(3).mean() < MOSTLY:
        return "", ""
    tried = text.dropna().drop_duplicates()[:NUM_TRIED]
    forms = [date + time for date in DATES for time in TIMES if any(_is_date(cell, date + time) for cell in tried)]
    forms += [form for cell in tried for form in _guesses(cell)]
    shares = {form: as_dates(text, form).notna().mean() for form in dict.fromkeys(forms)}
    best = max(shares, key=lambda form: shares[form], default="")
    if not best or shares[best] < MOSTLY:
        return "", ""
    swapped = best.replace("%m", "%_").replace("%d", "%m").replace("%_", "%d")
    is_open = swapped != best and not best.startswith("%Y") and shares.get(swapped) == shares[best]
    return best, ", month first, where all could be read day first too" if is_open else ""


def _is_date(cell: str, form: str) -> bool:
    try:
        datetime.strptime(cell, form)
    except ValueError:
        return False
    return True


def _guesses(cell: str) -> list[str]:
    """The formats of one date as pandas guesses it, month first and day first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the cell has another order
        found = [guess_datetime_format(cell, dayfirst=day_first) for day_first in (False, True)]
    return [form for form in found if form]


def as_dates(values, form: str):
    """Values as dates without time zone; missing where they have another format, but for the time of day."""
    text = values.astype("string").str.strip()
    settings = {"errors": "coerce", "utc": True}
    found, date = pd.to_datetime(text, format=form, **settings), re.split(r"[ T]%[HI]", form)[0]
    for time in TIMES:
        if not len(left := text[text.notna() & found.isna()]):
            break
        found = found.fillna(pd.to_datetime(left, format=date + time, **settings))
    return found.dt.tz_localize(None)


def numerically(text: str):
    """Numbers in their order, before text."""
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
