"""Angles between hidden states and the uniform vector by layer (*Geometry* fig. 3 and 6; of one model, fig. 7-13).

theta = arccos(x.1 / (|x| |1|)) in degrees, before (h) and after (f) each norm, mean and standard deviation over tokens.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.rows import first_of_layers


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
    first = first_of_layers(frame)
    stacks = _source.stacks(first if len(first) else frame)
    figure, grid = _axes.grid([f"{figures.PHASE_LABELS[phase]} (degrees)" for phase in ("pre", "post")], list(stacks))
    for row, phase in zip(grid, ("pre", "post"), strict=True):
        for axes, inner in zip(row, stacks.values(), strict=True):
            figures.mean_angles(axes, inner[inner.phase == phase], "layer", apart=0.15)
    figures.legend(figure)
    figure.suptitle("Angles at the first norm of each layer (mean ± standard deviation over tokens)", fontsize=9)
    return figure
