"""Growth of the residual stream: the mean norm before each norm, by layer (*Geometry* eq. 17).

h^l = h^0 + sum_i a^i + sum_i m^i: every layer adds to the stream, so its norm grows with depth. The mean is over all
tokens, attention sinks among them: SmolLM2's first positions, 1 token in 256 and 24,000 long where others are 153,
make a step of it at layer 12 that other tokens do not have. `python -m analyses sinks` has them apart.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _source
from normgeo import figures


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Mean norms of the inputs of every norm; drawn are those of the residual stream."""
    frame = _source.table(run, n_tokens).frame
    keep = (frame.phase == "pre") & (frame.direction == "uniform")
    columns = ["model", "site", "layer", "role", "kind", "stack", "phase", "direction", "mean_norm", "n_tokens"]
    return frame.loc[keep, columns].reset_index(drop=True)


def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Mean norms by layer, a panel per model."""
    return figures.draw(frame, "norms")
