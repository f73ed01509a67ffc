"""Figures of training: learning curves, and angles by training step (*Geometry* fig. 4 and 14-37)."""

from __future__ import annotations

import matplotlib.figure
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from normgeo.figures import STYLE, WIDTH

__all__ = ["curves"]

NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "pre-rmsnorm": "Pre-RMSNorm", "pre-crmsnorm": "Pre-CRMSNorm"}


def _styled() -> list:
    sns.set_theme(style="whitegrid", palette="colorblind", rc=STYLE)
    return sns.color_palette("colorblind")


def curves(by_norm: dict[str, pd.DataFrame]) -> matplotlib.figure.Figure:
    """Loss by step: every step faintly, its running mean, and the held-out loss where it was evaluated."""
    palette = _styled()
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 3.0), layout="constrained")
    axes: Axes = figure.subplots()
    for k, (norm, curve) in enumerate(by_norm.items()):
        name, color = NAMES.get(norm, norm), palette[k % 10]
        window = max(1, len(curve) // 50)
        axes.plot(curve.step, curve.train_loss, color=color, linewidth=0.4, alpha=0.35)
        smooth = curve.train_loss.rolling(window, min_periods=1).mean()
        axes.plot(curve.step, smooth, color=color, linewidth=1, label=f"{name}, training (mean of {window} steps)")
        held = curve[np.isfinite(curve.held_out_loss)]
        if len(held):
            axes.plot(
                held.step, held.held_out_loss, "os^D"[k % 4], color=color, markersize=3, label=f"{name}, held-out"
            )
    axes.set(xlabel="training step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    return figure
