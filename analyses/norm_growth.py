"""Growth of the residual stream: the mean norm before each norm, by layer (*Geometry* eq. 17).

h^l = h^0 + sum_i a^i + sum_i m^i: every layer adds to the stream, so its norm grows with depth. Over all tokens, and
without first positions and BOS: of SmolLM2's tokens 1 in 256 is 24,000 long where others are 153, which is a step of
the mean at layer 12 that those do not have. `python -m analyses sinks` has the groups apart.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _source
from normgeo import figures
from normgeo.rows import with_rest


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Mean norms of the inputs of every norm; drawn are those of the residual stream."""
    table = _source.table(run, n_tokens)
    frame = with_rest(table.frame, table.sinks)
    keep = (frame.phase == "pre") & (frame.direction == "uniform")
    columns = ["model", "site", "layer", "role", "kind", "stack", "phase", "direction", "mean_norm", "n_tokens"]
    columns += ["rest_norm"] if "rest_norm" in frame else []
    return frame.loc[keep, columns].reset_index(drop=True)


def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Mean norms by layer, a panel per model."""
    return figures.draw(frame, "norms")
