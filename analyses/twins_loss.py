"""Losses of the embedded twins, alike but for their norm, in training (the setting of *Geometry* section 3.3).

Cross-entropy in nats per token by training step: mean since the last report, and on text left out of the training.
"""

from __future__ import annotations

import json

import matplotlib.figure
import pandas as pd

from analyses import _axes
from normgeo import figures
from normgeo.cards import EMBEDDED


def compute() -> pd.DataFrame:
    """One row per model and reported step."""
    parts = []
    for name, folder in EMBEDDED.items():
        about = json.loads((folder / "training.json").read_text())
        parts.append(pd.DataFrame(about["curve"]).assign(model=name, norm=about["norm"]))
    return pd.concat(parts, ignore_index=True)[["model", "norm", "step", "train_loss", "held_out_loss", "lr"]]


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The learning curves, and the difference between the twins in held-out loss."""
    figure, grid = _axes.grid(
        [""], ["learning curves", "difference in held-out loss"], xlabel="training step", height=2.4, sharey="none"
    )
    curves, difference = grid[0]
    for k, (norm, part) in enumerate(frame.groupby("norm", sort=False)):
        label = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[str(norm)]
        width = 2.4 - 1.5 * k  # the curves coincide: the second is drawn within the first
        style = {"color": figures.PALETTE[k], "linewidth": width, "markersize": 3 + 2 * k, "markerfacecolor": "none"}
        curves.plot(part.step, part.held_out_loss, f"{'os'[k]}-", label=f"{label}, held-out", **style)
        curves.plot(part.step, part.train_loss, "--", label=f"{label}, training", **style)
    curves.set_ylabel("loss (nats per token)")
    held_out = frame.pivot_table(index="step", columns="norm", values="held_out_loss")
    difference.axhline(0, color="0.4", linewidth=0.6)
    difference.plot(held_out.index, held_out.rmsnorm - held_out.layernorm, "D-", color="0.2", linewidth=1, markersize=3)
    difference.set_ylabel("RMSNorm minus LayerNorm (nats)")
    figures.legend(figure)
    figure.suptitle("The embedded twins in training", fontsize=9)
    return figure
