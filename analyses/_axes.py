"""Axes in the style of `normgeo.figures`: one column for each model, one row for each quantity."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.figure
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from normgeo.figures import STYLE, WIDTH

PALETTE = sns.color_palette("colorblind")
DEPTH = "layer (norms of a layer in order)"


def grid(
    rows: int, columns: Sequence[str], *, height: float = 2.0, xlabel: str = "layer", sharey: str = "row"
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """A figure of the width of a text, and its axes [row, column]; columns carry titles, the last row the x label."""
    sns.set_theme(style="whitegrid", palette="colorblind", rc=STYLE)
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 0.6 + height * rows), layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False, sharex="col", sharey=sharey)  # pyright: ignore
    for column, title in enumerate(columns):
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel(xlabel)
        axes[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, axes


def legend(figure: matplotlib.figure.Figure, *, columns: int = 4) -> None:
    """One legend for all axes, below them."""
    entries: dict[str, object] = {}
    for axes in figure.axes:
        assert isinstance(axes, Axes)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
        if axes.get_legend():
            axes.get_legend().remove()  # pyright: ignore
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False)  # pyright: ignore
