"""Rotation by standardization: the angle between a norm's input and its standardized output (*Geometry* eq. 9).

LayerNorm removes mu, which turns x by arcsin(|mu| / |x|) = |90 - theta| degrees, and scales; RMSNorm only scales.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _source
from normgeo import figures


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Rotation at every norm, mean and standard deviation over tokens, in degrees."""
    frame = _source.table(run, n_tokens).frame
    keep = (frame.phase == "standardized") & (frame.direction == "uniform")
    columns = ["model", "site", "layer", "role", "kind", "stack", "phase", "direction", "rotation_deg",
               "rotation_std_deg", "n_tokens"]  # fmt: skip
    return frame.loc[keep, columns].reset_index(drop=True)


def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Rotations by layer, a panel per model."""
    return figures.draw(frame, "rotation")
