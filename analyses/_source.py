"""Where the numbers come from: a finished run, or else the embedded pair on the embedded sample."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from normgeo.angles import AngleTable, measure_angles
from normgeo.errors import DataError
from normgeo.models import EMBEDDED, load_model, load_tokenizer
from normgeo.tokens import load_tokens

CONTEXT = 256
"""The context that the embedded pair was trained with."""


def table(run: Path | None = None, n_tokens: int | None = None) -> AngleTable:
    """The table of a finished run of `normgeo angles`; without one, the embedded pair is measured.

    Args:
        run: the run's directory.
        n_tokens: tokens of the embedded sample to measure; None is all of them. A run has its own number.

    Raises:
        DataError: the directory holds no finished run, or it is asked for a number of tokens.
    """
    if n_tokens is not None and (run is not None or n_tokens < 1):
        raise DataError(f"a number of tokens is at least 1 and goes without a run; received {n_tokens}, run {run}")
    if run is not None:
        return AngleTable.load(run)
    tables = []
    for name in EMBEDDED:
        tokens = load_tokens("sample", load_tokenizer(name), context=CONTEXT)
        tables.append(measure_angles(load_model(name), tokens, n_tokens=n_tokens, name=name, progress=False))
    return AngleTable.concatenated(tables)


def depth(frame: pd.DataFrame) -> pd.Series:
    """A coordinate along the model for each row: its layer, plus a fraction for the sites behind the layer's first.

    With two norms in a layer, the first is at l and the second at l + 1/2. A decoder starts where its encoder ends.
    """
    sites = frame[["model", "stack", "layer", "site"]].drop_duplicates()
    layer = sites.groupby(["model", "stack", "layer"]).site
    sites["depth"] = sites.layer + layer.cumcount() / layer.transform("size")
    length = sites.groupby(["model", "stack"], sort=False).layer.max() + 1
    offset = length.groupby("model").cumsum() - length
    sites["depth"] += offset.loc[list(zip(sites.model, sites["stack"], strict=True))].to_numpy()
    return frame[["model", "site"]].merge(sites, on=["model", "site"], how="left").depth.set_axis(frame.index)
