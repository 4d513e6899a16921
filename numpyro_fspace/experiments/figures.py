"""Pictures of records with one panel for each method and its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.experiments.tables import labels, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def panels(records: Sequence[Mapping], draw: Callable[[Axes, Mapping], None]) -> Figure:
    """A figure with ``draw(axes, curves)`` for each data set, method and config, and a common legend.

    Of several splits and seeds the first is drawn. A title has the method, the settings if the method is there with
    several or is ``gp_network``, and the data set if there are several.

    Args:
        records: records to draw; those without curves are left out.
        draw: draws the curves of one record.

    Raises:
        ValueError: no record has curves.
    """
    import matplotlib.pyplot as plt

    records = with_curves(records)
    first: dict[tuple[str, str], Mapping] = {}
    for line, label in zip(records, labels(records), strict=True):
        first.setdefault((line["dataset"], label), line)
    num_columns = min(NUM_COLUMNS if len(first) <= MANY else NUM_COLUMNS_MANY, len(first))
    if len(first) == 4:
        num_columns = 2
    num_rows = -(-len(first) // num_columns)
    size = (PANEL[0] * num_columns, PANEL[1] * num_rows)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    num_labels = Counter((line["dataset"], line["method"]) for line in first.values())
    num_datasets = len({dataset for dataset, _ in first})
    for ax, ((dataset, label), line) in zip(axes.flat, first.items(), strict=False):
        draw(ax, {name: np.array(curve) for name, curve in line["curves"].items()})
        ax.locator_params(axis="x", nbins=5)
        is_set_apart = num_labels[dataset, line["method"]] > 1 or "exact=True" in label
        name = readable(label if is_set_apart else line["method"])
        ax.set_title(f"{name}, {dataset}" if num_datasets > 1 else name)
    for ax in axes.flat[len(first) :]:
        ax.set_axis_off()
    labeled = {label: part for ax in axes.flat for part, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if labeled:
        figure.legend(labeled.values(), labeled, loc="outside lower center", ncols=len(labeled))
    return figure
