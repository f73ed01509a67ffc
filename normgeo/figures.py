"""Figures from tidy tables. They know nothing but the columns of an `AngleTable`."""

from __future__ import annotations

import functools
import io
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import AutoLocator, LogFormatter, MaxNLocator

from normgeo.errors import DataError
from normgeo.rows import SINGLE, check_one_step, on_stream, short_names, stack_names, to_uniform
from normgeo.system.files import write_whole

__all__ = [
    "COLORS", "KINDS", "LABELS", "PALETTE", "PHASE_LABELS", "ROLE_LABELS", "WIDTH", "Percent", "draw", "legend",
    "mean_angles", "narrowest", "plain", "right_angle", "role_words", "save", "series", "styled", "styles", "titled",
    "wrapped",
]  # fmt: skip

WIDTH = 6.75
"""A paper's text width in inches: text is readable without scaling."""

STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.linewidth": 0.6, "grid.linewidth": 0.4, "svg.hashsalt": "normgeo",
}  # fmt: skip
PALETTE = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9",
)  # fmt: skip
"""Seaborn's colorblind palette: to load seaborn takes longer than a second, too long for what draws nothing."""

MOST_BARS = 48
"""Bars beside each other of which each can be seen."""

COLORS = dict(zip(("uniform", "random_a", "random_b"), PALETTE[:3], strict=True))
MARKERS = {"uniform": "o", "random_a": "s", "random_b": "^"}
LABELS = {"uniform": "uniform vector", "random_a": "random vector a", "random_b": "random vector b"}
PHASE_LABELS = {"pre": "before the norm", "standardized": "standardized", "post": "after the norm"}
ROLE_LABELS = {
    "attention": "pre-attention", "mlp": "pre-MLP", "parallel": "pre-attention and MLP", "final": "final",
    "embedding": "embedding", "cross_attention": "pre-cross-attention", "post_attention": "post-attention",
    "post_mlp": "post-MLP", "post_cross_attention": "post-cross-attention", "qk": "query/key", "inner": "inner",
    "mixer": "pre-mixer", "post_mixer": "post-mixer", "head": "head",
}  # fmt: skip

_drawing = threading.RLock()
P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """A function that draws in the style of this package, and leaves matplotlib's settings as they were.

    The settings are the process's: of two threads that draw, one waits.
    """

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        import seaborn as sns

        with _drawing, matplotlib.rc_context():
            sns.set_theme(style="whitegrid", palette="colorblind", color_codes=False, rc=STYLE)
            return draw(*args, **kwargs)

    return drawn


def plain(name: str) -> str:
    """A name as matplotlib draws it: between dollars it would read mathematics."""
    return name.replace("$", r"\$")


def wrapped(title: str, across: int) -> str:
    """A title in lines that so many columns have room for beside each other; words are cut if there is no other way.

    >>> wrapped("Pre-RMSNorm of EleutherAI/pythia-160m-deduped", 4).splitlines()
    ['Pre-RMSNorm of EleutherAI', '/pythia-160m-deduped']
    """
    width = 100 // across
    too_long = lambda line: any(len(word) > width for word in line.split())  # noqa: E731
    lines = title.splitlines()
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=too_long(line)) for line in lines)


def titled(axes: Axes, title: str, across: int) -> None:
    """Title one of so many axes beside each other and number its layers, in lines, letters and ticks that have room."""
    size = 8 if across < 6 else 7 if across < 10 else 6
    axes.set_title(plain(wrapped(title, round(across * size / 9))), fontsize=size)
    axes.xaxis.set_major_locator(MaxNLocator(max(1, min(10, 30 // across)), integer=True, min_n_ticks=1))


def narrowest(across: int) -> float:
    """How wide axes of a single layer are beside others, so that their title has room, where there are so many."""
    return 0.28 if across < 6 else 0.55 if across < 10 else 0.75


def legend(figure: matplotlib.figure.Figure) -> None:
    """One legend below all axes of what is in any of them, in as few lines as there is room for, filled alike."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
        if made := axes.get_legend():
            made.remove()
    for lines in range(1, len(entries) + 1):
        columns = -(-len(entries) // lines)
        made = figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False, borderpad=0
        )
        if columns == 1 or made.get_window_extent().width <= figure.bbox.width:
            return
        made.remove()


def _panels(part: pd.DataFrame) -> list[tuple[str, str]]:
    """(stack, role) in the order of the model, single points last."""
    keys = part[["stack", "role"]].drop_duplicates().itertuples(index=False, name=None)
    return sorted(keys, key=lambda k: k[1] in SINGLE)


def role_words(stack: str, role: str, stacks: Mapping[str, str]) -> list[str]:
    """What a role is called, and before it its stack, where that has a name."""
    return [*filter(None, [stacks.get(stack)]), ROLE_LABELS.get(role, role)]


def _stacks(part: pd.DataFrame) -> dict[str, str]:
    """What the stacks of a model are called, where there are several."""
    stacks = part["stack"].unique()
    return stack_names(stacks) if len(stacks) > 1 else {}


@styled
def angles(frame: pd.DataFrame, model: str) -> matplotlib.figure.Figure:
    """Mean angle with error bars (one standard deviation over tokens) by layer: *Geometry* fig. 3 and 6-13.

    Behind them the null ensemble: where the mean angles of the random directions lie (all of them, and the central
    90%), on the same tokens. One column of axes per site role (`series`), one row before and one after the norm.
    """
    frame = frame[frame.model == model]
    panels = list(series(to_uniform(frame, "pre")))
    ratios = [min(1.0, max(narrowest(len(panels)), norms.layer.nunique() / 6)) for _, norms in panels]
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 4.0), layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False, sharex="col", sharey="row", width_ratios=ratios)
    for row, phase in enumerate(("pre", "post")):
        for column, (label, norms) in enumerate(panels):
            axes = grid[row, column]
            here = frame[frame.site.isin(norms.site) & (frame.phase == phase)]
            mean_angles(axes, here, "layer", apart=0.18)
            axes.margins(x=0.08)
            if row == 0:
                titled(axes, label.replace(": ", "\n"), len(panels))
            if column == 0:
                axes.set_ylabel(f"{phase}-norm (degrees)")
            if here.layer.nunique() == 1:
                axes.set_xticks([here.layer.iloc[0]])
            elif row == 1:
                axes.set_xlabel("layer")
    legend(figure)
    title = f"{model}: angles of hidden states (mean ± standard deviation over tokens)"
    figure.suptitle(plain(textwrap.fill(title, 84)), fontsize=9)
    return figure


class _Degrees(AutoLocator):
    """Ticks of angles over `least` degrees or more: what differs by less may be rounding, and would fill the axis."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def nonsingular(self, v0: float, v1: float) -> tuple[float, float]:
        low = max(v0 - max(0.0, self.least - (v1 - v0)) / 2, min(v0, 0.0))
        return super().nonsingular(low, max(v1, low + self.least))


def right_angle(axes: Axes) -> None:
    """A line where vectors are orthogonal, on an axis of degrees."""
    axes.axhline(90, color="0.4", linewidth=0.6, zorder=1)
    axes.yaxis.set_major_locator(_Degrees(1.0))


def mean_angles(
    axes: Axes, rows: pd.DataFrame, by: str, directions: Mapping[Any, str] = COLORS, apart: float = 0.0
) -> None:
    """Mean angles to directions by a column, with one standard deviation over tokens as error bars.

    Of more than `MOST_BARS` these would be one area: then dashed lines are as far away. Behind them the null ensemble,
    where the table has it: between which angles the means of random directions lie.

    Args:
        axes: where.
        rows: of a table, one for each direction and value of `by`.
        by: the column along x.
        directions: with the color of each.
        apart: how far from each other they are drawn along x.
    """
    right_angle(axes)
    null = _widened(rows[rows.direction == "null"], by)
    if len(null):
        label = "means of random directions: all"
        axes.fill_between(null[by], null.min_deg, null.max_deg, color="0.9", linewidth=0, label=label)
        axes.fill_between(null[by], null.q05, null.q95, color="0.78", linewidth=0, label="central 90%")
    for k, (name, color) in enumerate(directions.items()):
        here = rows[rows.direction == name].sort_values(by)
        looks: dict[str, Any] = {"color": color, "markersize": 2.5, "label": LABELS[name], "zorder": 3}
        if len(here) > MOST_BARS and here[by].is_unique:
            axes.plot(here[by], here.mean_deg, f"{MARKERS[name]}-", markevery=len(here) // 12, linewidth=1.0, **looks)
            for side in (-1, 1):
                axes.plot(here[by], here.mean_deg + side * here.std_deg, "--", color=color, linewidth=0.6, zorder=3)
        elif len(here):
            axes.errorbar(
                here[by] + apart * (k - 1), here.mean_deg, here.std_deg, fmt=MARKERS[name], elinewidth=0.8,
                capsize=1.2, capthick=0.6, **looks,
            )  # fmt: skip


def _widened(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Rows for a band: that of a single place has an end on either side, else it would have no width."""
    rows = rows.sort_values(by)
    return rows if len(rows) != 1 else pd.concat([rows.assign(**{by: rows[by] + side}) for side in (-0.3, 0.3)])


def _by_layer(
    frame: pd.DataFrame, title: str, ylabel: str, log: bool
) -> tuple[matplotlib.figure.Figure, list[tuple[Axes, str, pd.DataFrame]]]:
    """Axes for one quantity by layer, a panel per model."""
    models = list(frame.model.unique())
    columns = min(3 if len(models) == 3 else 2, len(models))
    rows = -(-len(models) // columns)
    figure = matplotlib.figure.Figure(figsize=(WIDTH, 0.5 + 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    panels = [(axes, model, frame[frame.model == model]) for axes, model in zip(grid.flat, models, strict=False)]
    for axes, model, _ in panels:
        titled(axes, model, columns)
        axes.set(xlabel="layer", yscale="log" if log else "linear")
    for axes in list(grid.flat)[len(models) :]:
        axes.remove()
    for row in grid:
        row[0].set_ylabel(ylabel)
    figure.suptitle(title, fontsize=9)
    return figure, panels


def series(part: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """What is a line each: a role, or of several norms of one role in a layer, as of queries and of keys, each.

    Of a table with one row for each site.
    """
    stacks = _stacks(part)
    for stack, role in _panels(part):
        rows = part[(part["stack"] == stack) & (part.role == role)].sort_values("layer", kind="stable")
        label, place = ": ".join(role_words(stack, role, stacks)), rows.groupby("layer").cumcount()
        names = short_names(list(rows.site[rows.layer == rows.layer.mode()[0]]))  # of a layer that has the most
        for number, name in enumerate(names):
            yield (f"{label}: {name}" if len(names) > 1 else label), rows[place == number]


def styles(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """What the line of each role looks like: the same in every model, of which some have roles that others lack."""
    markers = "os^Dv<>pPX*h"
    parts = (part for _, part in rows.groupby("model", sort=False))
    labels = dict.fromkeys(label for part in parts for label, _ in series(part))
    return {
        label: {"marker": markers[k % 12], "linewidth": 1, "color": PALETTE[k % 10]} for k, label in enumerate(labels)
    }


def _role_lines(
    axes: Axes, part: pd.DataFrame, looks: dict[str, dict[str, Any]], value: str, other: str | None = None
) -> None:
    """A line for each role; broken ones of `other`, where it is known."""
    for label, rows in series(part):
        every = max(1, len(rows) // MOST_BARS)  # all marks of many layers would hide the lines behind them
        axes.plot(rows.layer, rows[value], markersize=3, markevery=every, label=plain(label), zorder=3, **looks[label])
        if other in rows:
            axes.plot(rows.layer, rows[other], markersize=2, markevery=every, linestyle="--", **looks[label])


class Percent(LogFormatter):
    """Shares along a logarithmic axis: powers of ten, and as many between them as have room."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        """A share, as 0.02%; of those without room nothing."""
        return f"{100 * value:g}%" if super().__call__(value, pos) else ""


@styled
def energy(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The share of squared norm along the uniform vector, which mean subtraction removes, by layer."""
    pre = frame[frame.phase == "pre"]
    looks, greys = styles(pre[pre.direction == "uniform"]), dict[str, str]()
    figure, panels = _by_layer(pre, "What mean subtraction removes, or would remove", "share of energy along 1", True)
    if (pre.energy_share == 0).any():  # as of a centered model; a logarithmic axis would not show it
        share = max(min(pre.energy_share[pre.energy_share > 0], default=1e-3), 1e-9)  # less is rounding
        least = 10 ** np.floor(np.log10(share))
        panels[0][0].set_yscale("symlog", linthresh=least, subs=range(2, 10))
        panels[0][0].update_datalim([(0, least)], updatex=False)
    for axes, model, part in panels:
        stacks, widths = _stacks(part), part.d.nunique() > 1
        null, stream = part[part.direction == "null"], on_stream(frame[frame.model == model]).site
        for (stack, d, on), rows in null.groupby(["stack", "d", null.site.isin(stream)], sort=False):
            label = ": ".join(role_words(str(stack), "random directions", stacks))  # which have 1/d of the energy
            label += f" of width {d}" * widths + ", off the stream" * (not on)  # hidden states of another spread
            grey = greys.setdefault(label, ("0.5", "0.7", "0.3", "0.6", "0.4", "0.8")[len(greys) % 6])
            of = rows.groupby("layer")[["energy_share", "energy_q95"]].mean().reset_index()
            mark = "_" if len(of) == 1 else ""
            for column, what, line in (("energy_share", "mean", "-"), ("energy_q95", "95th percentile", ":")):
                axes.plot(of.layer, of[column], mark + line, color=grey, linewidth=1, label=f"{label}: {what}")
        _role_lines(axes, part[part.direction == "uniform"], looks, "energy_share")
        axes.yaxis.set_major_formatter(Percent())
        axes.yaxis.set_minor_formatter(Percent())
    legend(figure)
    return figure


@styled
def norms(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Mean norm of the hidden states before each norm of the residual stream: its growth (*Geometry* eq. 17).

    Over all tokens and, where `with_rest` has it, without first positions and BOS, which may be far longer than others.
    """
    pre = on_stream(to_uniform(frame, "pre"))
    looks, roots = styles(pre), pre.mean_norm[pre.mean_norm > 0] ** 0.5
    figure, panels = _by_layer(pre, "Growth of the residual stream", "mean norm before the site", True)
    wide = [(0, factor * roots.min() * roots.max()) for factor in (0.5, 2)]  # on less ticks have many digits
    panels[0][0].update_datalim(wide, updatex=False)
    for axes, _, part in panels:
        _role_lines(axes, part, looks, "mean_norm", "rest_norm")
        if "rest_norm" in part:
            axes.plot([], [], "--", color="0.3", linewidth=1, label="the same without first positions and BOS")
    legend(figure)
    return figure


@styled
def rotation(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The angle between a site's input and its standardized output: how far mean subtraction turns a vector."""
    rows = to_uniform(frame, "standardized")
    looks = styles(rows)
    figure, panels = _by_layer(rows, "Rotation from input to standardized output", "angle (degrees)", False)
    for axes, _, part in panels:
        _role_lines(axes, part, looks, "rotation_deg")
        axes.yaxis.set_major_locator(_Degrees(0.01))
    legend(figure)
    return figure


KINDS: dict[str, Callable[..., matplotlib.figure.Figure]] = {
    "angles": angles, "energy": energy, "norms": norms, "rotation": rotation,
}  # fmt: skip


def draw(frame: pd.DataFrame, kind: str, model: str | None = None) -> matplotlib.figure.Figure:
    """A figure by name.

    Raises:
        DataError: there is no such figure or model, nothing to draw it of, or it is of one model or step of several.
    """
    check_one_step(frame)
    if kind not in KINDS:
        raise DataError(f"no figure {kind!r}; there are {', '.join(KINDS)}")
    models = list(frame.model.unique())
    if kind == "angles" and model is None and len(models) > 1:
        raise DataError(f"name one of the models {models} to draw its angles")
    if model is not None and model not in models:
        raise DataError(f"no model {model!r} in the table; there are {', '.join(models)}")
    part = frame if model is None else frame[frame.model == model]
    phase = "standardized" if kind == "rotation" else "pre"
    if to_uniform(part, phase).empty:
        raise DataError(f"{kind} is drawn of rows of phase {phase!r} and direction 'uniform'; the table has none")
    return KINDS[kind](part, *([model or models[0]] if kind == "angles" else []))


@styled
def save(figure: matplotlib.figure.Figure, stem: Path) -> None:
    """Write a figure as .png (300 dpi) and .svg."""
    _write(figure, stem, "png", dpi=300)
    engine = figure.get_layout_engine()
    # it is laid out by now, and to do so again it would be drawn once more; None is what the settings say
    with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)
        try:
            _write(figure, stem, "svg", metadata={"Date": None})
        finally:
            figure.set_layout_engine(engine)


def _write(figure: matplotlib.figure.Figure, stem: Path, kind: str, **options: Any) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=kind, **options)
    write_whole(stem.with_name(f"{stem.name}.{kind}"), content.getvalue())
