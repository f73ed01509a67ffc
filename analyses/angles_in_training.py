"""Angles to the uniform and two random vectors by training step of the twins (*Geometry* fig. 4; all layers, 14-37).

The table is that of `normgeo angles --checkpoints`: theta = arccos(x.1 / (|x| |1|)) in degrees before and after every
norm, mean and standard deviation over tokens, and the means of 256 random directions. Without a run, the stored one of
the embedded pair's training: 2400 steps on Wikipedia, a checkpoint every 100, 20,000 tokens of the sample.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _source
from normgeo.errors import DataError
from normgeo.system.files import read_table
from normgeo.training import figures as training_figures

COLUMNS = {"step", "model", "site", "layer", "role", "stack", "phase", "direction", "mean_deg", "std_deg", "min_deg",
           "max_deg", "q05", "q95"}  # fmt: skip
"""What is drawn."""


def compute(run: Path | None = None) -> pd.DataFrame:
    """The angles before and after every norm of every checkpoint, with a column `step`.

    Args:
        run: a finished run of `normgeo angles --checkpoints`; None is that of the embedded pair's training.

    Raises:
        DataError: the directory holds no finished run of `normgeo angles --checkpoints`.
        RunError: its table is damaged.
    """
    path = _source.KEPT / "angles_in_training.parquet" if run is None else run / "angles.parquet"
    frame = read_table(path) if path.is_file() else pd.DataFrame()
    if not set(frame) >= COLUMNS:
        raise DataError(f"{path} is no table of `normgeo angles --checkpoints`")
    return frame[frame.phase.isin(["pre", "post"])].reset_index(drop=True)


def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The middle layer, LayerNorm above RMSNorm: fig. 4.

    Raises:
        DataError: the models have no layer in common.
    """
    layer = training_figures.middle_layer(frame)
    if layer is None:
        raise DataError("there is no layer whose norms were measured in all models: nothing to draw; leave out --sites")
    return training_figures.one_layer(frame, layer)
