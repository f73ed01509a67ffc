"""Axes in the style of `normgeo.figures`: one column for each model, one row for each quantity."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.figure
import numpy as np
from matplotlib.ticker import MaxNLocator

from normgeo.figures import WIDTH

DEPTH = "layer (norms of a layer in order)"


def grid(
    rows: int, columns: Sequence[str], *, height: float = 2.0, xlabel: str = "layer", sharey: str = "row"
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    """A figure of the width of a text, and its axes [row, column]; columns carry titles, the last row the x label."""
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 0.6 + height * rows), layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False, sharex="col", sharey=sharey)  # pyright: ignore
    for column, title in enumerate(columns):
        axes[0, column].set_title(title)
        axes[-1, column].set_xlabel(xlabel)
        axes[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, axes
