"""Norms alone, measured by `normgeo bench norms`: time over torch's LayerNorm, and how much of it is the kernel.

The residual addition is counted where a norm is fused with it. A kernel of the same style for LayerNorm tells what
RMSNorm itself saves from what a better kernel does; a copy is what memory allows.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.bench.norms import norm_summary

SHOWN = {
    "rms_norm": "F.rms_norm, beta added", "LayerNorm kernel": "LayerNorm, our kernel", "RMSNorm": "RMSNorm",
    "CRMSNorm padded": "CRMSNorm, padded", "add + RMSNorm": "residual add + RMSNorm (over add + LayerNorm)",
    "copy": "a copy of its input",
}  # fmt: skip

TOP = 1.6  # of the axes; what is beyond is written on its bar


def compute(run: Path | None = None) -> pd.DataFrame:
    """Medians and quartiles by shape, dtype and norm, as `bench.norms.norm_summary` gives them.

    Args:
        run: what `normgeo bench norms --out` wrote; None is the kept one.

    Raises:
        DataError: the file is no such table, or several in one, or lacks torch's LayerNorm or a copy.
    """
    keys, values = {"norm", "round", "shape", "dtype"}, {"seconds", "bytes", "passes", "device", "threads"}
    return norm_summary(_source.raw(run, "norm_kernels.parquet", keys, values, "normgeo bench norms"))


def markdown(frame: pd.DataFrame) -> str:
    """Median ratios to torch's LayerNorm, or to addition and LayerNorm; a column for each shape and dtype."""
    wide = frame.pivot_table("ratio", "norm", ["dtype", "shape"], sort=False)
    head = " | ".join(f"{dtype}, {shape}" for dtype, shape in wide.columns)  # pyright: ignore
    lines = [f"| | {head} |", "| --- |" + " ---: |" * wide.shape[1]]
    lines += [f"| {name} | " + " | ".join(f"{v:.2f}" for v in row) + " |" for name, row in wide.iterrows()]
    return "\n".join(lines) + "\n"


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Bars for each shape, an axis for each dtype, with quartiles."""
    parts = list(frame.groupby("dtype", sort=False))
    figure = matplotlib.figure.Figure(figsize=(figures.WIDTH, 0.9 + 1.9 * len(parts)), layout="constrained")
    shown = [name for name in SHOWN if name in set(frame.norm)]
    for axes, (dtype, part) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        shapes, wide = list(part["shape"].unique()), 0.84 / len(shown)
        for k, name in enumerate(shown):
            rows = part[part.norm == name].set_index("shape").reindex(shapes)
            places = np.arange(len(shapes)) + wide * (k - (len(shown) - 1) / 2)
            axes.bar(
                places, rows.ratio, wide, yerr=_axes.quartiles(rows, "ratio"),
                label=SHOWN[name], color="0.72" if name == "copy" else figures.PALETTE[k], linewidth=0,
                error_kw={"elinewidth": 0.7, "capsize": 1.2, "capthick": 0.6},
            )  # fmt: skip
            for place, value in zip(places, rows.ratio, strict=True):
                if value > TOP:
                    axes.text(place, 0.97 * TOP, f"{value:.1f}", ha="center", va="top", color="white", fontsize=6)
        axes.axhline(1, color="0.3", linewidth=0.6)
        axes.set_ylim(0, TOP)
        axes.set_xticks(np.arange(len(shapes)), [s.replace("x", " x ") for s in shapes])
        axes.set_title(dtype)
        axes.set_ylabel("time / torch's LayerNorm")
        axes.grid(visible=False, axis="x")
    figures.legend(figure)
    devices = ", ".join(f"{d}, threads: {t}" for d, t in frame[["device", "threads"]].drop_duplicates().to_numpy())
    passes = frame.passes.iloc[0]
    figure.suptitle(f"Norms alone, {passes}, their input in the cache where it fits\n{devices}", fontsize=9)
    return figure
