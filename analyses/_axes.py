"""Axes in the style of `normgeo.figures`: one column for each model, one row for each quantity."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from normgeo.figures import WIDTH, plain, wrapped

DEPTH = "layer (norms of a layer in order)"


def grid(
    ylabels: Sequence[str],
    columns: Sequence[str],
    *,
    height: float = 2.0,
    xlabel: str = "layer",
    sharey: str = "row",
    across: int = 3,
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """A figure of the width of a text, and its axes [row, column].

    Columns carry titles and continue below where there are more than fit beside each other.

    Args:
        ylabels: of the quantity in each row.
        columns: what is in each.
        height: of a row, in inches.
        xlabel: of all axes.
        sharey: whether the axes of a `row`, `all` or `none` have one scale; those of a column have one along x.
        across: how many columns fit beside each other.
    """
    rows, bands = len(ylabels), math.ceil(len(columns) / across)
    across = math.ceil(len(columns) / bands)
    size = (WIDTH, 0.6 + (height if bands == 1 else 0.8 * height) * rows * bands)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows * bands, across, squeeze=False)
    axes = np.empty((rows, len(columns)), dtype=object)
    for column, title in enumerate(columns):
        band, place = divmod(column, across)
        axes[:, column] = cells[band * rows : (band + 1) * rows, place]
        axes[0, column].set_title(plain(wrapped(title, across)))
        for row, label in enumerate(ylabels):
            _share(axes, row, column, sharey, first=place == 0)
            if place == 0:
                axes[row, column].set_ylabel(label if bands == 1 else textwrap.fill(label, 22))
        axes[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if column + across >= len(columns):  # nothing is below
            axes[-1, column].set_xlabel(xlabel)
    for unused in cells.flat:
        if not any(unused is used for used in axes.flat):
            unused.remove()
    return figure, axes


def _share(axes: np.ndarray, row: int, column: int, sharey: str, first: bool) -> None:
    """Give an axes the scales it shares, and numbers only where no axes beside or below it has the same."""
    here: Axes = axes[row, column]
    if row:
        here.sharex(axes[0, column])
    here.tick_params(labelbottom=row == len(axes) - 1)
    if sharey != "none":
        if (other := axes[0, 0] if sharey == "all" else axes[row, 0]) is not here:
            here.sharey(other)
        here.tick_params(labelleft=first)


def quartiles(rows: pd.DataFrame, name: str) -> np.ndarray:
    """How far the quartiles of a column are from its medians: below and above, as error bars take them."""
    return np.abs(rows[[f"{name}_q25", f"{name}_q75"]].to_numpy().T - rows[name].to_numpy())
