"""The models of *Geometry* table 1: width, layers, kind of norm and size."""

from __future__ import annotations

from dataclasses import asdict

import matplotlib.figure
import pandas as pd

from analyses import _axes
from normgeo import figures
from normgeo.cards import TABLE_1


def compute() -> pd.DataFrame:
    """One row per model, in the order of the table, with its pinned revision and its memory in 16-bit precision."""
    return pd.DataFrame([asdict(card) | {"memory_gb": card.memory_gb} for card in TABLE_1])


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Memory of the weights by model, colored by the kind of norm."""
    figure, grid = _axes.grid([""], ["Models of Geometry table 1"], xlabel="weights in 16-bit precision (GB)")
    axes = grid[0, 0]
    for k, (norm, part) in enumerate(frame.groupby("norm", sort=False)):
        bars = axes.barh(part.name, part.memory_gb, color=figures.PALETTE[k], height=0.7, label=str(norm))
        axes.bar_label(
            bars, [f"d = {d}, {n} layers" for d, n in zip(part.d, part.layers, strict=True)], padding=3, fontsize=7
        )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.25)
    figures.legend(figure)
    return figure
