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
        DataError: the directory has no curve in it, or what is no curve.
    """
    parts = []
    if run is None:
        for name, folder in EMBEDDED.items():
            about = json.loads((folder / "training.json").read_text())
            parts.append(pd.DataFrame(about["curve"]).assign(model=name, norm=about["norm"]))
    else:
        paths = {norm: run / norm / "curve/curve.parquet" for norm in NORMS}
        found = {norm: read_table(path) for norm, path in paths.items() if path.is_file()}
        for norm, curve in found.items():
            if curve.empty or not {"step", "train_loss", "held_out_loss", "lr"} <= set(curve):
                raise DataError(f"{paths[norm]} is no curve of `normgeo train`; give the directory of another run")
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
    """The learning curves, and beside them how much more than the first the others lose, once both have a loss."""
    twins = list(dict.fromkeys(frame.norm))
    loss, said = ("held_out_loss", "held-out") if frame.held_out_loss.notna().any() else ("train_loss", "training")
    wide = frame.pivot_table(index="step", columns="norm", values=loss).reindex(columns=twins)  # of none it has none
    more = {norm: found for norm in twins[1:] if len(found := (wide[norm] - wide[twins[0]]).dropna())}
    columns = ["learning curves", *([f"difference in {said} loss"] if more else [])]
    figure, grid = _axes.grid([""], columns, xlabel="training step", height=2.4, sharey="none")
    for k, norm in enumerate(twins):
        part, label = frame[frame.norm == norm], NAMES.get(norm, norm)
        width = max(0.6, 2.4 - 1.5 * k)  # the curves coincide: the second is drawn within the first
        style = {"color": figures.PALETTE[k], "linewidth": width, "markersize": 3 + 2 * k, "markerfacecolor": "none"}
        if part.held_out_loss.notna().any():
            grid[0, 0].plot(part.step, part.held_out_loss, f"{'osD^'[k]}-", label=f"{label}, held-out", **style)
        dot = "o" if len(part) == 1 else ""  # of one report there is no line
        grid[0, 0].plot(part.step, part.train_loss, f"{dot}--", label=f"{label}, training", **style)
        if norm in more:
            style = {"color": "0.2" if len(twins) == 2 else figures.PALETTE[k], "linewidth": 1, "markersize": 3}
            name = f"{label} minus {NAMES.get(twins[0], twins[0])}"
            grid[0, 1].plot(more[norm].index, more[norm], "D-", label=name, **style)
    grid[0, 0].set_ylabel("loss (nats per token)")
    if more:
        grid[0, 1].axhline(0, color="0.4", linewidth=0.6)
        grid[0, 1].set_ylabel("more than the first (nats)")
    figures.legend(figure)
    figure.suptitle("Twins in training", fontsize=9)
    return figure
