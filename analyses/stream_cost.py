"""What measuring costs: each way to look at hidden states against the base model's own forward pass."""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib.figure
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.bench.stream import VARIANTS, bench_stream


def compute(
    model: _source.Named = "embedded-layernorm",
    data: Any = "sample",
    context: int | None = None,
    batch: int = 8,
    rounds: int = 7,
    device: str | None = None,
) -> pd.DataFrame:
    """Times of every variant and their ratios to the base model's, in float32.

    Args:
        model: a hub id or directory; None is embedded-layernorm.
        data: what `normgeo angles` takes, or token ids; None is sample.
        context: tokens that the model sees together; None is up to 256.
        batch: contexts that go through it together.
        rounds: how often every variant is timed.
        device: where; None is the CPU.
    """
    name, loaded, tokens = _source.opened(model, data, context)
    loaded = loaded.to(device or "cpu").float()  # pyright: ignore[reportArgumentType]
    frame = bench_stream(loaded, tokens, batch=batch, rounds=rounds)
    frame.insert(0, "model", name)
    return frame


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Median ratios with quartiles, a bar a variant; normgeo's own in another color."""
    figure = matplotlib.figure.Figure(figsize=(figures.WIDTH, 2.4), layout="constrained")
    axes = figure.subplots()
    bars = [figures.PALETTE[1] if name.startswith("statistics") else figures.PALETTE[0] for name in frame.variant]
    axes.barh(
        [VARIANTS[name] for name in frame.variant], frame.ratio, color=bars, height=0.7,
        xerr=_axes.quartiles(frame, "ratio"), error_kw={"elinewidth": 0.8, "capsize": 1.5},
    )  # fmt: skip
    for row, (ratio, edge) in enumerate(zip(frame.ratio, frame.ratio_q75, strict=True)):
        axes.annotate(f"{ratio:.2f}", (edge, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1, color="0.4", linewidth=0.6)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    first = frame.iloc[0]
    axes.set_xlabel(
        f"time / time of the base model ({first.seconds:.3g} s a batch); quartiles of {first.rounds} rounds"
    )
    title = (
        f"{first.model}: {first.batch} x {first.context} tokens, d = {first.d}, {first.sites} norms, {first['dtype']}, "
        f"{first.device}"
    )
    figure.suptitle(figures.plain(textwrap.fill(title, 84)), fontsize=9)
    return figure
