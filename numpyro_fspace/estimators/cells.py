"""The cells of a column of a table as numbers, text or dates, and errors that name the first wrong line."""

from __future__ import annotations

import warnings

__all__ = ["MOSTLY", "as_dates", "as_numbers", "as_text", "check_decimal_commas", "check_numbers", "numerically"]

#: A text column of which this share are numbers (or dates) is one of numbers (or dates) with errors.
MOSTLY = 0.5
#: Two numbers with a separator of dates between them.
SOME_DATE = r"\d[-/. ]\w{1,9}[-/. ,]*\d"


def check_numbers(values) -> None:
    """Numbers with errors among them are refused, with the first line that holds one."""
    import numpy as np

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
            "correct it, leave it empty if it is missing, or say --categorical or --drop. For commas as decimal points "
            "there is --decimal ','."
        )


def check_decimal_commas(values) -> None:
    """Text that is mostly numbers with decimal commas, such as '1,5', is refused."""
    known = as_text(values.dropna())
    looks = known.str.fullmatch(r"[+-]?\d*,\d+", na=False)
    if len(known) and looks.mean() >= MOSTLY:
        raise ValueError(
            f"column {str(values.name)!r} looks like numbers with decimal commas ({known[looks].iloc[0]!r}): say "
            f"--decimal ','. If these are levels, say --categorical {str(values.name)!r}, or for a target --classes."
        )


def as_numbers(values):
    """Values as numbers, missing where they are none."""
    import pandas as pd

    return pd.to_numeric(values, errors="coerce")


def as_text(values):
    """Values as text, missing ones left missing; whole numbers without a decimal point."""
    import pandas as pd

    if pd.api.types.is_float_dtype(values) and (values.dropna() % 1 == 0).all():
        values = values.astype("Int64")
    return values.astype("string").str.strip()


def as_dates(values, day_first: bool = False):
    """Values as dates without time zone, in the format of the first one; missing where they are none."""
    import pandas as pd

    text = values.astype("string").str.strip()
    text = text.where(text.str.contains(SOME_DATE, na=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a format is not consistent with the order of day and month
        found = pd.to_datetime(text, errors="coerce", utc=True, dayfirst=day_first)
    return found.dt.tz_localize(None)


def numerically(text: str):
    """Numbers in their order, before text."""
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
