"""What mean subtraction is worth: a model, its naive swap to RMSNorm, its exact conversion (*Geometry*, *Pre-RMSNorm*).

The naive swap leaves out mean subtraction and changes nothing else; the exact conversion leaves it out after centering
whatever writes into the residual stream. Perplexity, KL and agreement with the original are of the same tokens.
"""

from __future__ import annotations

import textwrap
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from analyses import _axes, _source
from normgeo import figures
from normgeo.comparison.outputs import agreements
from normgeo.conversion.convert import convert

KINDS = ("original", "naive swap", "exact conversion")


def compute(
    model: _source.Named = "embedded-layernorm",
    data: Any = "sample",
    n_tokens: int | None = None,
    context: int | None = None,
) -> pd.DataFrame:
    """One row for the model, its naive swap and its exact conversion, with what `Comparison.frame` says of outputs.

    Args:
        model: one with LayerNorms, its hub id or directory; None is embedded-layernorm.
        data: what `normgeo angles` takes, or token ids; None is sample.
        n_tokens: how many; None is all there are.
        context: tokens that the model sees together; None is up to 256.
    """
    called, original, tokens = _source.opened(model, data, context)
    models = {
        KINDS[0]: original,
        KINDS[1]: convert(original, to="naive-rmsnorm").model,
        KINDS[2]: convert(original).model,
    }
    found = agreements(models, tokens, n_tokens, batch=8)
    frame = pd.DataFrame([{"model": called, "conversion": name} | metrics for name, metrics in found.items()])
    frame["perplexity_difference"] = frame.perplexity - frame.perplexity.iloc[0]
    first = ["model", "conversion", "perplexity", "perplexity_difference", "kl_mean", "kl_max", "top1"]
    return frame[first + [c for c in frame if c not in first]]


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """What either conversion changes, on logarithmic axes; no change at all is an open marker at the edge.

    Of hidden states there is no perplexity, KL and preferred token, and of tokens that nothing follows no perplexity.
    """
    first = frame.iloc[0]
    panels = {
        "|perplexity change| (%)": 100 * (frame.perplexity / first.perplexity - 1).abs(),
        "mean KL (nats)": frame.kl_mean,
        "other token preferred (%)": 100 * (1 - frame.top1),
        f"{first.output.replace('_', ' ')}, rms error (%)": 100 * frame.error_rms_rel,
    }
    panels = {title: values for title, values in panels.items() if values.notna().all()}
    figure, grid = _axes.grid([""], list(panels), height=1.0, xlabel="", across=4)
    labels = list(frame.conversion[1:])
    for axes, values in zip(grid[0], panels.values(), strict=True):
        _changes(axes, values.to_numpy(float)[1:])
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.7)
    perplexity = "" if np.isnan(first.perplexity) else f"perplexity {first.perplexity:.2f}, "
    tokens = f"{first.tokens:,} token{'s' if first.tokens > 1 else ''}"
    title = f"{first.model} without mean subtraction, against itself with it ({perplexity}{tokens})"
    figure.suptitle(figures.plain(textwrap.fill(title, 84)), fontsize=9)
    return figure


def _changes(axes: Axes, values: np.ndarray) -> None:
    """Dots on a logarithmic axis, each with its number; a zero is at the left edge, what is infinite at the right."""
    finite = values[np.isfinite(values)]
    largest = finite.max(initial=0.0) or 1.0
    low, high = min(finite[finite > 0].min(initial=largest), 1e-3 * largest) / 30, 30 * largest
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for row, value in enumerate(values):
        x, color = np.clip(value, low, high), figures.PALETTE[row]
        axes.hlines(row, low, x, color=color, linewidth=1.2)
        axes.plot(x, row, ">" if np.isinf(value) else "os"[row % 2], color=color, markersize=5, clip_on=False, zorder=5,
                  markerfacecolor=color if value > 0 else "white")  # fmt: skip
        place = {"ha": "left", "xytext": (0, 5)} if x < (low * high) ** 0.5 else {"ha": "right", "xytext": (4, 5)}
        number = "infinite" if np.isinf(value) else f"{float(f'{value:.2g}'):g}"  # 100%, not 1e+02
        axes.annotate(number, (x, row), textcoords="offset points", fontsize=7, **place)  # pyright: ignore
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="y")
