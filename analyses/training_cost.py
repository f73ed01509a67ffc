"""What a training step costs: norms, recentering, the rest and the optimizer (*Pre-RMSNorm* fig. 4).

Shares of the Pre-LN model's step, for the model without norms, the Pre-LN model and its training forms: the step minus
the step without the part, medians of interleaved rounds. "CRMSNorm, plain" is what the paper draws: a model with
parameters of its own, of which none is recentered, and which does not train as the Pre-LN model does. The times are
those of `normgeo bench train`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses import _axes, _source
from normgeo import figures
from normgeo.bench.training import PARTS, PLAIN, breakdown

NAMES = {
    "no-norm": "no norms", "layernorm": "Pre-LN", "pre-rmsnorm": "Pre-\nRMSNorm", "pre-crmsnorm": "Pre-\nCRMSNorm",
    PLAIN: "CRMSNorm,\nplain",
}  # fmt: skip
LABELS = {
    "rest": "forward and backward, rest", "optimizer": "optimizer", "norms": "norms",
    "linears": "recentered linear layers", "input": "recentered embeddings",
}  # fmt: skip


TASK = ["size", "batch", "context"]


def compute(run: Path | None = None) -> pd.DataFrame:
    """Medians and quartiles of every part by size, tokens and form, as `bench.training.breakdown` gives them.

    Args:
        run: what `normgeo bench train --out` wrote; None is the kept one.

    Raises:
        DataError: the file is no such table, or several in one, or lacks a form's times without one of its parts.
    """
    keys = {"round", "form", "without", "size", "batch", "context"}
    values = {"forward_backward", "optimizer", "precision", "device", "threads"}
    raw = _source.raw(run, "training_cost.parquet", keys, values, "normgeo bench train")
    frame = pd.concat([breakdown(part) for _, part in raw.groupby(TASK, sort=False)], ignore_index=True)
    return frame[[*TASK, *frame.columns.difference(TASK, sort=False)]]


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """A bar per form, of its parts; a mark and quartiles at the whole step; a panel per size and tokens in a step."""
    tasks = dict(list(frame.groupby(TASK, sort=False)))
    names = [f"{size}, {batch} x {context} tokens" for size, batch, context in tasks]  # pyright: ignore
    figure, grid = _axes.grid(["share of Pre-LN's step (%)"], names, xlabel="", height=2.6, sharey="all", across=2)
    for axes, part in zip(grid[0], tasks.values(), strict=True):
        _bars(axes, part)
    figures.legend(figure)
    words = {"no": "float32", "bf16": "mixed precision, bfloat16"}
    abouts = frame[["precision", "threads", "device"]].drop_duplicates().to_numpy()
    about = "\n".join(f"{words[precision]}, threads: {n}, {device}" for precision, n, device in abouts)
    figure.suptitle(f"A training step: {about}", fontsize=9)
    return figure


def _bars(axes: Axes, table: pd.DataFrame) -> None:
    forms = list(dict.fromkeys(table.form))
    place, base, below = np.arange(len(forms)), np.zeros(len(forms)), np.zeros(len(forms))
    cells = table.set_index(["form", "part"])
    for k, part in enumerate(sorted(PARTS, key=list(LABELS).index)):
        high = np.array([100 * float(cells.ratio.get((form, part), 0.0)) for form in forms])
        under = high < 0  # noise: what was taken away did not cost anything that could be seen
        bottom = np.where(under, below, base)
        axes.bar(place, high, 0.7, bottom, color=figures.PALETTE[k], label=LABELS[part], linewidth=0)
        base, below = np.where(under, base, base + high), np.where(under, below + high, below)
    whole = 100 * cells.xs("whole", level="part").loc[forms, ["ratio_q25", "ratio", "ratio_q75"]]
    axes.errorbar(
        place, whole.ratio, _axes.quartiles(whole, "ratio"), fmt="_", color="0.1", markersize=14, elinewidth=0.8,
        capsize=2, label="whole step, with quartiles",
    )  # fmt: skip
    for x, (ratio, edge) in enumerate(zip(whole.ratio, np.maximum(whole.ratio_q75, base), strict=True)):
        axes.annotate(f"{ratio:.1f}", (x, edge), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(place, [NAMES[form] for form in forms], fontsize=7)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.1)
