"""What mean subtraction removes: the share of energy along the uniform vector (*Geometry* eq. 5-8, section 3.2).

|mu|^2 / |x|^2 = cos^2(theta), averaged over tokens. Of isotropic vectors every direction holds 1/d on average.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _source
from normgeo import figures


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Energy shares before every norm, along the uniform vector and the null ensemble (mean, 95th percentile)."""
    frame = _source.table(run, n_tokens).frame
    keep = (frame.phase == "pre") & frame.direction.isin(["uniform", "null"])
    columns = ["model", "site", "layer", "role", "kind", "stack", "d", "phase", "direction", "energy_share",
               "energy_q95", "energy_percentile", "n_tokens"]  # fmt: skip
    return frame.loc[keep, columns].reset_index(drop=True)


def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Energy shares by layer, a panel per model."""
    return figures.draw(frame, "energy")
