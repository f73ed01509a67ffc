"""Angles between hidden states and the uniform vector by layer (*Geometry* fig. 3 and 6; of one model, fig. 7-13).

theta = arccos(x.1 / (|x| |1|)) in degrees, before (h) and after (f) each norm, mean and standard deviation over tokens.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _axes, _source
from normgeo import figures


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """The angles to the named directions and the null ensemble, before and after every norm."""
    frame = _source.table(run, n_tokens).frame
    return frame[frame.phase.isin(["pre", "post"])].reset_index(drop=True)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Of several models, fig. 3: the first norm of each layer, a column per stack; of one model, fig. 7: every norm."""
    models = list(frame.model.unique())
    if len(models) == 1:
        return figures.draw(frame, "angles", models[0])
    first = figures.first_of_layers(frame)
    stacks = _source.stacks(first if len(first) else frame)
    figure, grid = _axes.grid([f"{figures.PHASE_LABELS[phase]} (degrees)" for phase in ("pre", "post")], list(stacks))
    for row, phase in zip(grid, ("pre", "post"), strict=True):
        for axes, inner in zip(row, stacks.values(), strict=True):
            axes.axhline(90, color="0.4", linewidth=0.6, zorder=1)
            here = inner[inner.phase == phase].sort_values("layer")
            null = figures.widened(here[here.direction == "null"])
            axes.fill_between(
                null.layer,
                null.q05,
                null.q95,
                color="0.8",
                linewidth=0,
                label="random directions' means: central 90%",
            )
            for k, (name, color) in enumerate(figures.COLORS.items()):
                part = here[here.direction == name]
                axes.errorbar(
                    part.layer + 0.15 * (k - 1), part.mean_deg, part.std_deg, fmt=figures.MARKERS[name], color=color,
                    markersize=3, elinewidth=0.8, capsize=1.5, label=figures.LABELS[name], zorder=3,
                )  # fmt: skip
    figures.legend(figure)
    figure.suptitle("Angles at the first norm of each layer (mean ± standard deviation over tokens)", fontsize=9)
    return figure
