"""The tables and the figure of a comparison. They know nothing but the columns of its tidy tables."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from normgeo.figures import (
    PALETTE,
    PHASE_LABELS,
    ROLE_LABELS,
    WIDTH,
    legend,
    narrowest,
    plain,
    right_angle,
    role_words,
    styled,
    titled,
)
from normgeo.rows import SINGLE, short_names, stack_names
from normgeo.system import progress

__all__ = ["plot", "table"]


def table(metrics: pd.DataFrame, pre: pd.DataFrame, post: pd.DataFrame, reference: str, width: int) -> str:
    """The metrics with a column a model, and below them the angles by site before and after each norm."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    if reference not in set(metrics.model):
        console.print(f"Against {reference}")
    console.print(_metrics(metrics, reference))
    console.print("Angle to the uniform vector, before → after each norm (degrees, means over tokens)")
    console.print(_angles(pre, post, list(metrics.model)))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _metrics(frame: pd.DataFrame, reference: str) -> Table:
    out = progress.table("", *frame.model)
    rows = frame.to_dict("records")
    first = next((r for r in rows if r["model"] == reference), None)
    words = "logits" if rows[0]["output"] == "logits" else "hidden state"
    lines = {
        "parameters": lambda r: f"{r['parameters']:,}",
        "memory": lambda r: _bytes(r["bytes"]),
        "norms": lambda r: ", ".join(
            f"{r[k]} {name}" for k, name in (("layernorms", "LayerNorm"), ("rmsnorms", "RMSNorm")) if r[k]
        ),
        "perplexity": lambda r: _number(r["perplexity"], ".3f"),
        "  minus the reference's": lambda r: _number(r["perplexity_difference"], "+.3g"),
        "KL, mean (nats)": lambda r: _number(r["kl_mean"], ".3g"),
        "KL, largest (nats)": lambda r: _number(r["kl_max"], ".3g"),
        "top-1 agreement": lambda r: _number(100 * r["top1"], ".2f", "%"),
        f"{words} error, largest": lambda r: f"{r['error_max']:.3g} ({100 * r['error_max_rel']:.3g}%)",
        f"{words} error, rms": lambda r: f"{100 * r['error_rms_rel']:.3g}%",
        "time of a forward pass": lambda r: _time(r, r is first),
    }
    for name, show in lines.items():
        cells = [show(r) if r is not first or name in _OWN else "reference" for r in rows]
        if not all(cell in ("", "reference") for cell in cells):
            out.add_row(name, *cells)
    return out


_OWN = {"parameters", "memory", "norms", "perplexity", "time of a forward pass"}
"""Lines that say something of a model alone; the others compare it with the reference."""


def _number(value: float, form: str, unit: str = "") -> str:
    form = form.replace("f", "g") if abs(value) >= 1e6 else form  # exp of a loss may have 300 digits
    return "" if np.isnan(value) else f"{value:{form}}{unit}"


def _bytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB"


def _time(row: dict, is_first: bool) -> str:
    if np.isnan(row["seconds"]):
        return ""
    if is_first:
        return f"{row['seconds']:.3g} s"
    return f"{row['time_ratio']:.2f} of it ({row['time_ratio_q25']:.2f} to {row['time_ratio_q75']:.2f})"


def _angles(pre: pd.DataFrame, post: pd.DataFrame, models: list[str]) -> Table:
    """A row a norm: of several stacks with the name of its own, of several of one role in a layer with its own name."""
    out = progress.table("norm", "layer", *models)
    theirs = pre[pre.columns[0]].isna()
    several = any(part.index.unique("stack").size > 1 for part in (pre[~theirs], pre[theirs]))
    stacks = stack_names(pre.index.unique("stack")) if several else {}
    labels = [": ".join(role_words(stack, role, stacks)) for _, stack, role, _ in pre.index]
    alike = pd.Series([str(site[0]) for site in pre.index]).groupby([labels, pre.index.get_level_values("layer")])
    names = alike.transform(lambda sites: short_names([*sites]) if len(sites) > 1 else "")
    for site, label, name in zip(pre.index, labels, names, strict=True):
        cells = [
            "" if np.isnan(a) else f"{a:.2f} → {b:.2f}" for a, b in zip(pre.loc[site], post.loc[site], strict=True)
        ]
        out.add_row(f"{label}: {name}" if name else label, str(site[-1]), *cells)
    return out


@styled
def plot(metrics: pd.DataFrame, angles: pd.DataFrame) -> matplotlib.figure.Figure:
    """Mean angle to the uniform vector by layer, before and after the norms, and the metrics below.

    One color and marker a model, one panel a role; bars are one standard deviation over tokens.
    """
    models = list(metrics.model)
    uniform = angles[angles.direction == "uniform"]
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 5.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.6, 1])
    upper, lower = parts
    _angle_panels(upper, uniform, models)
    _metric_panels(lower, metrics)
    legend(figure)
    figure.suptitle("Angles to the uniform vector (mean ± standard deviation over tokens)", fontsize=9)
    return figure


def _panels(uniform: pd.DataFrame) -> dict[tuple[int, str, int], pd.DataFrame]:
    """What has axes of its own: a role of a stack, and of several norms of one role in a layer each; singles last."""
    number = uniform.groupby(["model", "phase", "stack_index", "role", "layer"]).cumcount()
    parts = dict(list(uniform.assign(number=number).groupby(["stack_index", "role", "number"], sort=False)))
    return {key: parts[key] for key in sorted(parts, key=lambda k: k[1] in SINGLE)}  # pyright: ignore


def _title(key: tuple[int, str, int], panels: dict[tuple[int, str, int], pd.DataFrame]) -> str:
    stack, role, _ = key
    lines = [ROLE_LABELS.get(role, role)]
    alike = [panel for panel in panels if panel[:2] == key[:2]]
    if len(alike) > 1:
        lines.append(short_names([panels[panel].site.iloc[0] for panel in alike])[alike.index(key)])
    if len({stack for stack, _, _ in panels}) > 1:
        lines.append(f"stack {stack + 1}")
    return "\n".join(lines)


def _angle_panels(figure: matplotlib.figure.SubFigure, uniform: pd.DataFrame, models: list[str]) -> np.ndarray:
    panels = _panels(uniform)
    ratios = [narrowest(len(panels)) if role in SINGLE else 1.0 for _, role, _ in panels]
    grid = figure.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row", width_ratios=ratios)
    for row, phase in enumerate(("pre", "post")):
        grid[row, 0].set_ylabel(f"{PHASE_LABELS[phase]} (°)")
        for axes, (key, part) in zip(grid[row], panels.items(), strict=True):
            if row == 0:
                titled(axes, _title(key, panels), len(panels))
            _lines(axes, part[part.phase == phase], models, single=key[1] in SINGLE)
            if row and key[1] not in SINGLE:
                axes.set_xlabel("layer")
    return grid


def _lines(axes: Axes, here: pd.DataFrame, models: list[str], *, single: bool) -> None:
    right_angle(axes)
    step = min(0.2, 0.8 / len(models))  # a layer's models stay with it
    for k, model in enumerate(models):
        rows = here[here.model == model].sort_values("layer", kind="stable")
        shift = step * (k - (len(models) - 1) / 2)
        x = np.full(len(rows), shift) if single else rows.layer + shift
        label = plain(textwrap.fill(model, 90))  # a long path is longer than a line
        axes.errorbar(
            x, rows.mean_deg, rows.std_deg, marker=MARKERS[k % len(MARKERS)], color=PALETTE[k % len(PALETTE)],
            markersize=3, linewidth=0.8, elinewidth=0.7, capsize=1.2, capthick=0.6, label=label, zorder=3,
        )  # fmt: skip
    first, last = (0, 0) if single else (here.layer.min(), here.layer.max())
    axes.set_xlim(first - 0.5, last + 0.5)
    if single:
        axes.set_xticks([])


MARKERS = "os^Dv<>P"


def _metric_panels(figure: matplotlib.figure.SubFigure, metrics: pd.DataFrame) -> None:
    """Bars: what there is of perplexity, KL (else the error), top-1 agreement and time, a bar a model in its color.

    What is infinite, as exp of a large loss, has no bar.
    """
    wanted = {
        "perplexity": ("perplexity", 1.0, ".2f"), "kl_mean": ("mean KL to reference (nats)", 1.0, ".2g"),
        "top1": ("top-1 agreement (%)", 100.0, ".2f"), "error_rms_rel": ("rms error (%)", 100.0, ".3g"),
        "time_ratio": ("time / reference", 1.0, ".2f"),
    }  # fmt: skip
    shown = {column: words for column, words in wanted.items() if metrics[column].notna().any()}
    if "kl_mean" in shown:
        shown.pop("error_rms_rel")
    grid = figure.subplots(1, len(shown), squeeze=False)
    for axes, (column, (title, scale, form)) in zip(grid[0], shown.items(), strict=True):
        values = scale * metrics[column].to_numpy(float)
        colors = [PALETTE[k % len(PALETTE)] for k in range(len(values))]
        lengths = np.where(np.isfinite(values), values, 0.0)
        axes.barh(np.arange(len(values)), lengths, color=colors, height=0.7)
        texts = ["∞" if np.isinf(value) else _number(value, form) or "none" for value in values]
        for k, text in enumerate(texts):
            axes.annotate(text, (lengths[k], k), (2, 0), textcoords="offset points", va="center", fontsize=7)
        across = 72 * WIDTH / len(shown) - 24  # points along an axes: what is around it takes some
        room = np.array([min((5 * len(text) + 6) / across, 0.8) for text in texts])  # for the numbers behind the bars
        axes.set_xlim(0, max(lengths / (1 - room)) or 1.0)
        axes.locator_params(axis="x", nbins=2)  # a number of six digits takes a third of an axes
        axes.set_title(title)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.grid(visible=False)
