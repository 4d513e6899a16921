"""Pictures of records with one panel for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["panels", "with_curves"]

#: Panels in a row if there are few, and if there are more than ``MANY``; size of a panel in inches.
NUM_COLUMNS, MANY, NUM_COLUMNS_MANY, PANEL = 3, 9, 4, (4.2, 2.8)


def with_curves(records: Sequence[Mapping]) -> list[Mapping]:
    """The records that have curves.

    Raises:
        ValueError: no record has curves.
    """
    found = [line for line in records if line.get("curves")]
    if not found:
        raise ValueError("no record holds curves to draw; make some with fspace run ... --out FILE.")
    return found


def panels(
    records: Sequence[Mapping], draw: Callable[[Axes, Mapping], None], *, title: Callable[[Mapping], str] | None = None
) -> Figure:
    """A figure with ``draw(axes, curves)`` for each record with curves, and a common legend.

    Args:
        records: records to draw; those without curves are left out.
        draw: draws the curves of one record.
        title: title of a panel; the method by default.

    Raises:
        ValueError: no record has curves.
    """
    import matplotlib.pyplot as plt

    records = with_curves(records)
    num_columns = min(NUM_COLUMNS if len(records) <= MANY else NUM_COLUMNS_MANY, len(records))
    num_rows = -(-len(records) // num_columns)
    size = (PANEL[0] * num_columns, PANEL[1] * num_rows)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for ax, line in zip(axes.flat, records, strict=False):
        draw(ax, {name: np.array(curve) for name, curve in line["curves"].items()})
        ax.locator_params(axis="x", nbins=5)
        ax.set_title(line["method"] if title is None else title(line))
    for ax in axes.flat[len(records) :]:
        ax.set_axis_off()
    labeled = {label: part for ax in axes.flat for part, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if labeled:
        figure.legend(labeled.values(), labeled, loc="outside lower center", ncols=len(labeled))
    return figure
