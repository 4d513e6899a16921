"""Pictures of records: a panel for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["panels"]

#: Panels in a row, of few panels and of more than ``MANY``; size of a panel in inches.
NUM_COLUMNS, MANY, NUM_COLUMNS_MANY, PANEL = 3, 9, 4, (4.2, 2.8)


def panels(
    records: Sequence[Mapping], draw: Callable[[Axes, Mapping], None], *, title: Callable[[Mapping], str] | None = None
) -> Figure:
    """``draw(axes, record)`` for each record, under the name of its method; what has a label is named below.

    Args:
        records: what to draw; only those with curves are.
        draw: draws one.
        title: of a panel; the method by default.

    Raises:
        ValueError: if no record has curves.
    """
    import matplotlib.pyplot as plt

    records = [line for line in records if line.get("curves")]
    if not records:
        raise ValueError("no record holds curves to draw; make some with fspace run ... --out FILE.")
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
