"""What (C)RMSNorm saves in inference: *Pre-RMSNorm* fig. 3 and 5 and table 3, measured by `normgeo bench inference`.

Times over the original's in the same round, medians and quartiles, of whole forward passes and of the time that norms
and residual additions take inside them. The floor is the model without norms: nothing can save more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analyses import _axes, _source
from normgeo import figures
from normgeo.bench.inference import summary
from normgeo.bench.inference_models import SIZES

LABELS = {
    "original": "Pre-LN", "original-kernel": "Pre-LN, kernel", "pre-rmsnorm": "Pre-RMSNorm",
    "pre-rmsnorm-torch": "Pre-RMSNorm, F.rms_norm", "pre-crmsnorm": "Pre-CRMSNorm, d - 1",
    "pre-crmsnorm-padded": "Pre-CRMSNorm, padded", "fused": "Pre-RMSNorm, fused", "no-norm": "no norm",
}  # fmt: skip
ENDS = {"original": "0.72", "no-norm": "0.25"}
CONDITION = ["dtype", "phase", "mode", "device", "threads"]


def compute(run: Path | None = None) -> pd.DataFrame:
    """Medians and quartiles by case and variant, as `normgeo.bench.inference.summary` gives them.

    Args:
        run: what `normgeo bench inference --out` wrote; None is the kept one.

    Raises:
        DataError: the file is no such table, or several of one device in one, or lacks an original.
    """
    keys, values = {"variant", "round", "model", "batch", "length", *CONDITION}, {"seconds", "norm_seconds", "error"}
    return summary(_source.raw(run, "efficiency.parquet", keys, values, "normgeo bench inference"))


def markdown(frame: pd.DataFrame) -> str:
    """Table 3: means over models of a kind and shapes of each variant's ratio; below, of that inside norms."""
    names = [name for name in LABELS if name in set(frame.variant)]
    frame = frame.assign(models=frame.model.map(_kind))
    by = [*CONDITION, "models"]
    text, original = [], _original(frame)
    for title, column in (("Whole forward pass", "ratio"), ("Norms and residual additions inside it", "norm_ratio")):
        means = frame.groupby([*by, "variant"], sort=False)[column].mean().unstack("variant")
        means = means[means.notna().any(axis=1)]
        if means.empty:
            continue
        cases = frame[frame.variant == "original"].groupby(by, sort=False).size()
        text += [f"{title}, time over that of {original}", ""]
        text += ["| | models | cases | " + " | ".join(_label(n, original) for n in names) + " |"]
        text += ["| --- | --- |" + " ---: |" * (len(names) + 1)]
        for key, row in means.iterrows():
            *condition, models = key  # pyright: ignore
            cells = ["" if np.isnan(value) else f"{value:.4f}" for value in row.reindex(names)]
            text.append(f"| {_words(condition)} | {models} | {cases[key]} | " + " | ".join(cells) + " |")  # pyright: ignore
        text.append("")
    return "\n".join(text)


def _kind(model: str) -> str:
    """Table 3 is of ViTs: what is only true of another kind of model stays out of its means."""
    return {"vit": "ViT", "gpt": "GPT-3"}[model[:3]] if model in SIZES else model


def _words(key: object) -> str:
    dtype, phase, mode, device, threads = key  # pyright: ignore
    return f"{dtype}, {phase}, {mode}; {device}, threads: {threads}"


def _original(frame: pd.DataFrame) -> str:
    """What times are compared with: not every model of one's own is Pre-LN."""
    return "Pre-LN" if set(frame.model) <= set(SIZES) else "the original"


def _label(variant: str, original: str) -> str:
    """What a variant is called, where the original is called so."""
    label = LABELS[variant]
    return label.replace(LABELS["original"], original) if variant.startswith("original") else label


ROOM = 72
"""Letters that fit below the axes of half a figure."""

MANY = 7
"""Cases of other than plain forward passes that have a row together, whatever their dtypes."""


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Fig. 3 and 5: a row for each dtype of plain forward passes; of what is decoded, compiled or a graph, one if few.

    Whole passes are on the left, norms and additions on the right, where they were measured.
    """
    conditions = [part for _, part in frame.groupby([_rows(frame), "device", "threads"], sort=False)]
    figure = matplotlib.figure.Figure(figsize=(figures.WIDTH, 0.8 + 1.9 * len(conditions)), layout="constrained")
    grid = figure.add_gridspec(len(conditions), 2)
    names = [name for name in LABELS if name in set(frame.variant)]
    original = _original(frame)
    for row, part in enumerate(conditions):
        inside = bool(part.norm_ratio.notna().any())
        whole = figure.add_subplot(grid[row, 0] if inside else grid[row, :])
        _compared(whole, part, names, original, "")
        whole.set_title(_title(part), fontsize=8)
        whole.set_ylabel(f"time / {original}")
        if inside:
            _compared(figure.add_subplot(grid[row, 1]), part, names, original, "norm_")
    figures.legend(figure)
    devices = ", ".join(f"{d}, threads: {t}" for d, t in frame[["device", "threads"]].drop_duplicates().to_numpy())
    figure.suptitle(f"Inference without mean subtraction: medians and quartiles of rounds\n{devices}", fontsize=9)
    return figure


def _title(part: pd.DataFrame) -> str:
    """What all cases of a row have in common; their labels say the rest."""
    same = [str(part[name].iloc[0]) for name in ("dtype", "phase", "mode") if part[name].nunique() == 1]
    shapes = part[["batch", "length"]].drop_duplicates()
    return ", ".join(same + ([f"{shapes.batch.iloc[0]} x {shapes.length.iloc[0]}"] if len(shapes) == 1 else []))


def _rows(frame: pd.DataFrame) -> pd.Series:
    """Which row of the figure each case is in, by its title."""
    plain = (frame.phase == "forward") & (frame["mode"] == "eager")
    cases = frame.groupby(["phase", "mode"])["variant"].transform(lambda names: (names == "original").sum())
    dtypes = frame.dtype.str.removesuffix("-dynamic").where(plain | (cases > MANY), "all dtypes")
    return dtypes + ", " + frame.phase + ", " + frame["mode"]


def _compared(axes: Axes, part: pd.DataFrame, names: list[str], original: str, prefix: str) -> None:
    """A group for each model and shape: points for whole passes, around 1, and bars from 0 for what is inside."""
    cases = part[["dtype", "model", "batch", "length"]].drop_duplicates()
    value = f"{prefix}ratio"
    wide = 0.84 / len(names)
    lows, highs, middles = [], [], []
    for k, name in enumerate(names):
        rows = cases.merge(part[part.variant == name], how="left")
        if rows[value].isna().all():
            continue
        error = _axes.quartiles(rows, value)
        at, color = (
            np.arange(len(rows)) + wide * (k - (len(names) - 1) / 2),
            ENDS.get(name, figures.PALETTE[list(LABELS).index(name) % 7]),
        )
        label = _label(name, original)
        ticks: Any = {"capsize": 1.2, "capthick": 0.6, "elinewidth": 0.7}
        if prefix:
            axes.bar(at, rows[value], wide, yerr=error, label=label, color=color, linewidth=0, error_kw=ticks)
        else:
            axes.errorbar(at, rows[value], error, label=label, color=color, fmt="o", markersize=2.5, **ticks)
        lows.append(float(rows[f"{value}_q25"].min()))
        highs.append(float(rows[f"{value}_q75"].max()))
        middles.append(float(rows[value].max()))
    if not lows:
        axes.set_axis_off()
        return
    if prefix:
        axes.set_title("norms and residual additions inside", fontsize=8)
    axes.axhline(1, color="0.3", linewidth=0.6)
    top = max(1.0, min(max(highs), 1.5 * max(middles)))  # of few rounds one may take several times as long
    room = 0.05 * (top if prefix else top - min(lows))
    axes.set_ylim(0 if prefix else min(lows) - room, top + room)
    shapes, dtypes = len(cases[["batch", "length"]].drop_duplicates()) > 1, cases.dtype.nunique() > 1
    labels = []
    for dtype, model, batch, length in cases.itertuples(index=False):
        told = [word for word, differs in ((f"{batch} x {length}", shapes), (dtype, dtypes)) if differs]
        labels.append(f"{model}\n{', '.join(told)}")
    axes.set_xlim(-0.55, len(cases) - 0.45)
    longest = max(len(line) for label in labels for line in label.split("\n"))
    if len(cases) * longest < (ROOM if prefix or part.norm_ratio.notna().any() else 2 * ROOM):
        axes.set_xticks(np.arange(len(cases)), labels, fontsize=6)
    else:
        in_line = [" ".join(label.split("\n")) for label in labels]
        axes.set_xticks(np.arange(len(cases)), in_line, fontsize=5.5, rotation=30, ha="right", rotation_mode="anchor")
    axes.grid(visible=False, axis="x")
