"""Losses of twins, alike but for their norm, in training (the setting of *Geometry* section 3.3).

Cross-entropy in nats per token by training step: mean since the last report, and on text left out of the training.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd

from analyses import _axes
from normgeo import figures
from normgeo.cards import EMBEDDED
from normgeo.errors import DataError
from normgeo.system.files import read_table
from normgeo.training.figures import NAMES
from normgeo.training.recipe import NORMS

REPORTS = 50
"""How many rows a curve gets that was never evaluated on held-out text."""


def compute(run: Path | None = None) -> pd.DataFrame:
    """One row per twin and report.

    Args:
        run: a directory of `normgeo train`; None is the embedded twins.

    Raises:
        DataError: the directory has no curve in it.
    """
    parts = []
    if run is None:
        for name, folder in EMBEDDED.items():
            about = json.loads((folder / "training.json").read_text())
            parts.append(pd.DataFrame(about["curve"]).assign(model=name, norm=about["norm"]))
    else:
        paths = {norm: run / norm / "curve/curve.parquet" for norm in NORMS}
        found = {norm: read_table(path) for norm, path in paths.items() if path.is_file()}
        parts = [_reports(curve).assign(model=norm, norm=norm) for norm, curve in found.items()]
    if not parts:
        raise DataError(f"{run} holds no curve of a training: give the directory of `normgeo train`")
    return pd.concat(parts, ignore_index=True)[["model", "norm", "step", "train_loss", "held_out_loss", "lr"]]


def _reports(curve: pd.DataFrame) -> pd.DataFrame:
    """Where a curve of every step was evaluated, or else some of its steps, each with the mean loss since the last."""
    evaluated = np.flatnonzero(curve.held_out_loss.notna())
    ends = (
        evaluated if len(evaluated) else np.unique(np.linspace(0, len(curve) - 1, REPORTS + 1).round().astype(int))[1:]
    )
    ends = ends if len(ends) else np.array([len(curve) - 1])
    since = curve.train_loss.groupby(np.searchsorted(ends, np.arange(len(curve)))).mean()
    return curve.iloc[ends].assign(train_loss=since.to_numpy()[: len(ends)])


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The learning curves, and beside them how much more than the first the others lose, where there are several."""
    twins = list(dict.fromkeys(frame.norm))
    loss, said = ("held_out_loss", "held-out") if frame.held_out_loss.notna().any() else ("train_loss", "training")
    columns = ["learning curves", f"difference in {said} loss"][: len(twins)]
    figure, grid = _axes.grid([""], columns, xlabel="training step", height=2.4, sharey="none")
    wide = frame.pivot_table(index="step", columns="norm", values=loss)
    for k, norm in enumerate(twins):
        part, label = frame[frame.norm == norm], NAMES.get(norm, norm)
        width = max(0.6, 2.4 - 1.5 * k)  # the curves coincide: the second is drawn within the first
        style = {"color": figures.PALETTE[k], "linewidth": width, "markersize": 3 + 2 * k, "markerfacecolor": "none"}
        if loss == "held_out_loss":
            grid[0, 0].plot(part.step, part.held_out_loss, f"{'osD^'[k]}-", label=f"{label}, held-out", **style)
        grid[0, 0].plot(part.step, part.train_loss, "--", label=f"{label}, training", **style)
        if k:
            more = (wide[norm] - wide[twins[0]]).dropna()
            style = {"color": "0.2" if len(twins) == 2 else figures.PALETTE[k], "linewidth": 1, "markersize": 3}
            grid[0, 1].plot(more.index, more, "D-", label=f"{label} minus {NAMES.get(twins[0], twins[0])}", **style)
    grid[0, 0].set_ylabel("loss (nats per token)")
    if len(twins) > 1:
        grid[0, 1].axhline(0, color="0.4", linewidth=0.6)
        grid[0, 1].set_ylabel("more than the first (nats)")
    figures.legend(figure)
    figure.suptitle("Twins in training", fontsize=9)
    return figure
