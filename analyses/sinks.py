"""Attention sinks apart: angle and norm of first positions, BOS and all other tokens (*Geometry* fig. 3, eq. 17).

The first token of a context draws attention and may grow a norm far above the rest, which an average over tokens hides.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.angles.verdict import GROUP_LABELS
from normgeo.errors import DataError
from normgeo.rows import on_stream


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Angles to the uniform vector and norms before every norm, by group of tokens.

    Raises:
        DataError: the run kept no groups.
    """
    table = _source.table(run, n_tokens)
    sinks, read = table.sinks, pd.MultiIndex.from_frame(on_stream(table.frame)[["model", "site"]])
    if sinks.empty:
        raise DataError("the run reports no groups of tokens; measure again with `normgeo angles`")
    sinks = sinks.assign(on_stream=pd.MultiIndex.from_frame(sinks[["model", "site"]]).isin(read))
    keep = (sinks.phase == "pre") & (sinks.direction == "uniform")
    if not sinks.on_stream[keep].any():
        raise DataError("the groups of tokens in sinks.parquet are of other norms than angles.parquet; measure again")
    columns = ["model", "site", "layer", "role", "kind", "stack", "tokens", "mean_deg", "std_deg", "mean_norm",
               "energy_share", "n_tokens", "on_stream"]  # fmt: skip
    return sinks.loc[keep, columns].reset_index(drop=True)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Angle and norm along the depth of the residual stream, a column per model, and of several stacks per stack."""
    frame = frame[frame.on_stream]
    stacks = _source.stacks(frame)
    figure, grid = _axes.grid(["angle to uniform (degrees)", "mean norm"], list(stacks), xlabel=_axes.DEPTH)
    for column, rows in enumerate(stacks.values()):
        angle, norm = grid[:, column]
        figures.right_angle(angle)
        norm.set_yscale("log")
        for k, (group, label) in enumerate(GROUP_LABELS.items()):
            part = rows[rows.tokens == group].sort_values("depth")
            if len(part):
                style = {"color": figures.PALETTE[k], "markersize": 3, "linewidth": 1, "label": label, "zorder": 3}
                x = part.depth + 0.08 * (k - 1)
                angle.errorbar(x, part.mean_deg, part.std_deg, fmt=f"{'osD'[k]}-", elinewidth=0.8, capsize=1.5, **style)
                norm.plot(part.depth, part.mean_norm, f"{'osD'[k]}-", **style)
    figures.legend(figure)
    figure.suptitle("Attention sinks apart, before each norm (mean ± standard deviation over tokens)", fontsize=9)
    return figure
