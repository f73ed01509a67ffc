"""Figures of training: learning curves, and angles by training step (*Geometry* fig. 4 and 14-37)."""

from __future__ import annotations

import math
import textwrap
from typing import Any, Literal

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator

from normgeo.errors import DataError
from normgeo.figures import COLORS, LABELS, PALETTE, ROLE_LABELS, WIDTH, legend, mean_angles, plain, styled, wrapped
from normgeo.rows import SINGLE, first_of_layers, to_uniform

__all__ = ["NAMES", "all_layers", "curves", "heat_map", "middle_layer", "one_layer"]

NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "pre-rmsnorm": "Pre-RMSNorm", "pre-crmsnorm": "Pre-CRMSNorm"}
Direction = Literal["uniform", "random_a", "random_b"]

MOST_ROWS = 65
"""Norms below each other: those of 32 layers. To lay out rows takes time as the square of their number."""


def _named(model: str) -> str:
    return NAMES.get(model, model)


def _figure(height: float, columns: int = 1) -> matplotlib.figure.Figure:
    """A figure of the width of a text, or wider where a column for each model would be too narrow to be labelled."""
    return matplotlib.figure.Figure(figsize=(max(WIDTH, 1.9 * columns), height), layout="constrained")


def _title(model: str, columns: int) -> str:
    """What a model is called above its column: of more than four columns each is as wide as of four."""
    return plain(wrapped(_named(model), min(columns + 1, 5)))


def _models(frame: pd.DataFrame) -> list[str]:
    """In the order of the twins, others behind them.

    Raises:
        DataError: there are none.
    """
    if frame.empty:
        raise DataError("nothing to draw: the table has no row; give one of measure_checkpoints, or a part with some")
    names = [str(name) for name in frame.model.unique()]
    return sorted(names, key=lambda name: list(NAMES).index(name) if name in NAMES else len(NAMES))


@styled
def curves(by_norm: dict[str, pd.DataFrame]) -> matplotlib.figure.Figure:
    """Loss by step: every step faintly, the mean around it, and the held-out loss where it was evaluated.

    Twins whose curves coincide are drawn ever thinner, so that each is seen.
    """
    figure = _figure(3.0)
    axes: Axes = figure.subplots()
    for k, (norm, curve) in enumerate(by_norm.items()):
        color, window = PALETTE[k % 10], max(1, len(curve) // 50)
        axes.plot(curve.step, curve.train_loss, color=color, linewidth=0.4, alpha=0.3)
        smooth = curve.train_loss.rolling(window, min_periods=1, center=True).mean()
        width = max(0.8, 3.0 - 1.1 * k)
        label = f"{_named(norm)}, training" + (f" (mean of {window} steps)" if window > 1 else "")
        dot = "." if len(curve) == 1 else ""  # one step is no line: that of a run that failed at its second
        axes.plot(curve.step, smooth, color=color, linewidth=width, marker=dot, label=label)
        held = curve[np.isfinite(curve.held_out_loss)]
        if len(held):
            marker = "os^D"[k % 4]
            label = f"{_named(norm)}, held-out"
            style = {"color": color, "markersize": max(2.5, 6.0 - 1.5 * k), "markerfacecolor": "none"}
            axes.plot(held.step, held.held_out_loss, marker, label=label, **style)
    axes.set(xlabel="training step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    axes.legend(frameon=False)
    return figure


def _by_step(axes: Axes, here: pd.DataFrame, directions: dict[str, str], steps: np.ndarray) -> None:
    """Mean angle and one standard deviation over tokens by step, before the null band of the same steps.

    `steps` are those of all axes beside each other, which have one scale.
    """
    mean_angles(axes, here, "step", directions)
    if np.median(steps) < steps[-1] / 10:  # 1, 2, 4, ..., 512, 1,000, 10,000: on a linear axis most would coincide
        axes.set_xscale("symlog", linthresh=steps[steps > 0][0])
        axes.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=steps[steps > 0][0]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))


def _alike(panels: list[Axes]) -> None:
    """Limits that hold what is in any of these; sharing them has each ask all others, at every step of drawing."""
    for given, put in ((Axes.get_xlim, Axes.set_xlim), (Axes.get_ylim, Axes.set_ylim)):
        low, high = np.transpose([given(axes) for axes in panels])
        for axes in panels:
            put(axes, low.min(), high.max())


def middle_layer(frame: pd.DataFrame) -> int | None:
    """The middle one of the layers that all models have; None where there is no such layer, as with --sites final."""
    first = first_of_layers(frame)
    common = sorted(set.intersection(*(set(first[first.model == model].layer) for model in _models(frame))))
    return int(common[len(common) // 2]) if common else None


@styled
def one_layer(frame: pd.DataFrame, layer: int) -> matplotlib.figure.Figure:
    """Angles before the first norm of one layer by training step: *Geometry* fig. 4.

    A row per model (LayerNorm above RMSNorm), a column for the uniform vector and each of the two random vectors.

    Raises:
        DataError: there is nothing to draw, or a model has no such layer.
    """
    models, first = _models(frame), first_of_layers(frame[frame.phase == "pre"])
    figure = _figure(0.7 + 1.6 * len(models))
    grid = figure.subplots(len(models), len(COLORS), squeeze=False, sharex=True, sharey="row")
    for row, model in zip(grid, models, strict=True):
        here = first[(first.model == model) & (first.layer == layer)]
        if here.empty:
            raise DataError(f"{model} has no norm before which to draw layer {layer}; middle_layer(frame) gives one")
        here = here[here.site == here.site.iloc[0]]  # of the first stack of layers
        row[0].set_ylabel(plain(textwrap.fill(f"{_named(model)} (degrees)", 22)))
        for axes, (name, color) in zip(row, COLORS.items(), strict=True):
            _by_step(axes, here, {name: color}, np.unique(frame.step))
    for axes, name in zip(grid[0], COLORS, strict=True):
        axes.set_title(LABELS[name])
    for axes in grid[-1]:
        axes.set_xlabel("training step")
    legend(figure)
    figure.suptitle(
        f"Angles before the first norm of layer {layer} in training (mean ± standard deviation)", fontsize=9
    )
    return figure


@styled
def all_layers(frame: pd.DataFrame, direction: Direction) -> matplotlib.figure.Figure:
    """Angles to one direction before every norm by training step: *Geometry* fig. 14-37.

    A row per norm, in the order of the model, a column per model: LayerNorm and RMSNorm side by side. Norms of which
    there are more than `MOST_ROWS` go on beside the first ones.
    """
    models = _models(frame)
    pre = frame[frame.phase == "pre"]
    norms = {model: [here for _, here in pre[pre.model == model].groupby("site", sort=False)] for model in models}
    most = max(map(len, norms.values()))
    rows = math.ceil(most / math.ceil(most / MOST_ROWS))
    columns = [(model, norms[model][first : first + rows]) for first in range(0, most, rows) for model in models]
    names = [list(map(_short, column)) for _, column in columns]
    figure = _figure(0.8 + 0.95 * rows, len(columns))
    grid, steps, drawn = figure.subplots(rows, len(columns), squeeze=False), np.unique(frame.step), list[Axes]()
    for axes in grid.flat:
        axes.label_outer()
    for column, (model, part) in enumerate(columns):
        own, rest = np.split(grid[:, column], [len(part)])
        for axes, here, name in zip(own, part, names[column], strict=True):
            _by_step(axes, here, {direction: COLORS[direction]}, steps)
            drawn.append(axes)
            if column == 0 or names[column] != names[column - 1]:  # models of other depths have other rows
                axes.set_ylabel(name)
                axes.tick_params(labelleft=True)
        if part:  # a model of fewer layers than others has nothing more beside them
            own[0].set_title(_title(model, len(columns)))
            own[-1].set_xlabel("training step")
            own[-1].tick_params(labelbottom=True)
        for axes in rest:
            axes.set_visible(False)
    _alike(drawn)
    legend(figure)
    figure.suptitle(f"Angles to the {LABELS[direction]} before every norm in training (degrees)", fontsize=9)
    return figure


def _short(here: pd.DataFrame) -> str:
    role, layer = here.role.iloc[0], here.layer.iloc[0]
    return str(role) if role in SINGLE else f"{layer}: {str(ROLE_LABELS.get(role, role)).removeprefix('pre-')}"


@styled
def heat_map(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Norms by training steps: the mean angle to the uniform vector, and the energy along it times d.

    The energy share of a random direction is 1/d: below 1 there is less along the uniform vector than by chance.
    """
    models = _models(frame)
    uniform = to_uniform(frame, "pre")
    tables = [_tables(uniform[uniform.model == model]) for model in models]
    far = max(0.5, *(float(np.nanmax(np.abs(angle - 90))) for angle, _, _ in tables))
    energies = np.log10(np.concatenate([energy.ravel() for _, energy, _ in tables]).clip(1e-6))
    much = min(2.0, max(0.3, float(np.nanmax(np.abs(energies)))))  # recentered models have none of it
    beyond = "both" if np.nanmax(np.abs(energies)) > much else "neither"
    height = max(3.0, 0.6 + 2 * (0.5 + 0.13 * max(len(names) for _, _, names in tables)))
    figure = _figure(height, len(models))
    grid = figure.subplots(2, len(models), squeeze=False)
    width = 0.7 * figure.get_figwidth() / len(models)  # the rest are the norms' names and the colors' scale
    for column, (model, (angle, energy, names)) in enumerate(zip(models, tables, strict=True)):
        steps = sorted(int(step) for step in uniform[uniform.model == model].step.unique())
        drawn = ((angle - 90, far), (np.log10(energy.clip(1e-6)), much))
        images = [_map(axes, v, m, names, steps, width) for axes, (v, m) in zip(grid[:, column], drawn, strict=True)]
        grid[0, column].set_title(_title(model, len(models)))
        grid[1, column].set_xlabel("training step")
        if column == len(models) - 1:
            figure.colorbar(images[0], ax=grid[0].tolist(), label="mean angle to 1,\nminus 90°")
            figure.colorbar(images[1], ax=grid[1].tolist(), label="log10 of d times the\nenergy along 1", extend=beyond)
        if column and names == tables[column - 1][2]:
            for axes in grid[:, column]:
                axes.set_yticklabels([])
    figure.suptitle("The uniform vector before every norm in training", fontsize=9)
    return figure


def _tables(part: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, list[str]]:
    order = list(part.site.unique())
    angle = part.pivot(index="site", columns="step", values="mean_deg").loc[order].to_numpy()
    scaled = part.assign(energy=part.energy_share * part.d)
    energy = scaled.pivot(index="site", columns="step", values="energy").loc[order].to_numpy()
    return angle, energy, [_short(part[part.site == site]) for site in order]


def _map(axes: Axes, values: np.ndarray, most: float, names: list[str], steps: list[int], width: float) -> Any:
    """A map of one model; `width` is the inches that the steps have room in."""
    image = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
    axes.grid(False)
    axes.set_yticks(range(len(names)), names)
    labels = [f"{step:,}" for step in steps]
    wide = 0.06 * max(map(len, labels)) + 0.04
    every = max(1, len(steps) // 6, math.ceil(len(steps) * wide / width))
    axes.set_xticks(range(0, len(steps), every), labels[::every])
    return image
