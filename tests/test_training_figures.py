"""What figures by training step show is what the table says, norm by norm and step by step."""

import itertools

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest

from normgeo import figures
from normgeo.errors import DataError
from normgeo.rows import first_of_layers
from normgeo.training import figures as training_figures

STEPS, LAYERS = (0, 10, 20, 30), 12
SITES = [(f"h.{k}.{name}", k, role) for k in range(LAYERS) for name, role in (("norm_b", "attention"), ("a", "mlp"))]
SITES += [("final", LAYERS, "final")]  # neither in the order of the alphabet nor of the layers' numbers as text


@pytest.fixture(scope="module")
def frame():
    rng, rows = np.random.default_rng(0), []
    for model, d in (("layernorm", 64), ("rmsnorm", 16)):
        for step in STEPS:
            for site, layer, role in SITES:
                for phase in ("pre", "post"):
                    for direction in (*figures.COLORS, "null"):
                        mean, low, least, std, share = rng.uniform(80, 100), *rng.uniform(1, 9, 3), rng.uniform(0, 0.1)
                        rows.append({
                            "model": model, "step": step, "site": site, "layer": layer, "role": role, "phase": phase,
                            "direction": direction, "mean_deg": mean, "std_deg": std, "d": d, "energy_share": share,
                            "q05": mean - low, "q95": mean + 2 * low, "min_deg": mean - low - least,
                            "max_deg": mean + 2 * low + least,
                        })  # fmt: skip
    return pd.DataFrame(rows).assign(stack="h")


def of(frame, model, site, direction, phase="pre"):
    here = frame[(frame.model == model) & (frame.site == site) & (frame.direction == direction)]
    return here[here.phase == phase].sort_values("step")


def shown(axes, frame, model, site, direction):
    """Compare one panel's points, bars and bands with the table."""
    rows, null = (of(frame, model, site, which) for which in (direction, "null"))
    (bars,) = axes.containers
    points, _, (segments,) = bars.lines
    assert bars.get_label() == figures.LABELS[direction]
    assert matplotlib.colors.same_color(points.get_color(), figures.COLORS[direction])
    assert points.get_xdata().tolist() == list(STEPS)
    assert points.get_ydata() == pytest.approx(rows.mean_deg.to_numpy())
    assert [(s[1, 1] - s[0, 1]) / 2 for s in segments.get_segments()] == pytest.approx(rows.std_deg.tolist())
    bands = {band.get_label(): band for band in axes.collections}
    wanted = {"means of random directions: all": ("min_deg", "max_deg"), "central 90%": ("q05", "q95")}
    for label, (low, high) in wanted.items():
        box = {tuple(point) for point in bands[label].get_paths()[0].vertices.round(6).tolist()}
        for column in (low, high):
            assert set(zip(null.step, null[column].round(6), strict=True)) <= box
        assert len(box) == 2 * len(STEPS)


def test_one_layer_has_its_first_norm_and_every_direction(frame):
    figure = training_figures.one_layer(frame, 10)
    with pytest.raises(DataError, match="has no norm before which to draw layer 99; middle_layer"):
        training_figures.one_layer(frame, 99)
    panels = [(model, direction) for model in ("layernorm", "rmsnorm") for direction in figures.COLORS]
    for axes, (model, direction) in zip(figure.axes, panels, strict=True):
        shown(axes, frame, model, "h.10.norm_b", direction)
    assert [axes.get_title() for axes in figure.axes[:3]] == list(figures.LABELS.values())


def test_norms_on_heads_and_of_branches_are_not_a_layers_first(frame):
    """What comes first in a layer may be a query's norm; a stack whose stream no norm reads has its branches'."""
    uniform = frame.site == "h.10.norm_b"
    aside = [frame[uniform].assign(site=f"h.10.{role}", role=role) for role in ("qk", "inner", "post_attention")]
    figure = training_figures.one_layer(pd.concat([*aside, frame]), 10)
    for axes, (model, direction) in zip(
        figure.axes, itertools.product(("layernorm", "rmsnorm"), figures.COLORS), strict=True
    ):
        shown(axes, frame, model, "h.10.norm_b", direction)
    found = first_of_layers(pd.concat(aside))
    assert set(found.site) == {"h.10.post_attention"}
    others = [frame[uniform].assign(site=name, **{column: name}) for column, name in (("stack", "d"), ("model", "m"))]
    assert set(first_of_layers(pd.concat([frame[uniform], *others])).site) == {"h.10.norm_b", "d", "m"}  # each its own


@pytest.mark.parametrize("direction", figures.COLORS)
def test_all_layers_are_the_models_norms_in_order(frame, direction):
    panels = [(site, model) for site, _, _ in SITES for model in ("layernorm", "rmsnorm")]
    for axes, (site, model) in zip(training_figures.all_layers(frame, direction).axes, panels, strict=True):
        shown(axes, frame, model, site, direction)


def test_panels_of_all_layers_are_alike_and_ask_no_others(frame):
    """Axes that share their limits ask all others at every step of drawing: 96 took four times as long to draw into."""
    frame = frame[frame.site.isin([site for site, _, _ in SITES[:2]])]
    drawn = training_figures.all_layers(frame, "uniform")
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in drawn.axes}) == 1
    assert all(axes.get_shared_y_axes().get_siblings(axes) == [axes] for axes in drawn.axes)
    rows = [axes.get_subplotspec() for axes in drawn.axes]
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in drawn.axes] == [s.is_first_col() for s in rows]
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in drawn.axes] == [s.is_last_row() for s in rows]


def test_norms_without_room_below_the_others_go_on_beside_them(frame, monkeypatch):
    """The layout of 200 norms below each other took most of the time that their figure did."""
    monkeypatch.setattr(training_figures, "MOST_ROWS", 12, raising=False)
    sites, shallow = [site for site, _, _ in SITES], 13
    frame = frame[(frame.model == "layernorm") | frame.site.isin(sites[:shallow])]
    drawn = training_figures.all_layers(frame, "uniform")
    for axes, (row, (first, model)) in zip(
        drawn.axes, itertools.product(range(9), itertools.product((0, 9, 18), ("layernorm", "rmsnorm"))), strict=True
    ):
        if first + row < (len(sites) if model == "layernorm" else shallow):
            shown(axes, frame, model, sites[first + row], "uniform")
            assert axes.get_title() == (training_figures.NAMES[model] if row == 0 else "")
            assert bool(axes.get_ylabel()) == (model == "layernorm" or first > 0)
        else:
            assert not axes.get_visible()


@pytest.mark.parametrize("unknown", [None, STEPS[1]])
def test_a_map_has_a_row_for_every_norm_in_order_and_a_column_for_every_step(frame, unknown):
    frame = frame.assign(mean_deg=frame.mean_deg.mask(frame.step == unknown))
    figure = training_figures.heat_map(frame)
    names = [f"{layer}: {'MLP' if role == 'mlp' else role}" for _, layer, role in SITES[:-1]] + ["final"]
    for column, model in enumerate(("layernorm", "rmsnorm")):
        angles, energies = figure.axes[column], figure.axes[2 + column]
        assert [text.get_text() for text in angles.get_yticklabels()] == (["" for _ in names] if column else names)
        angle, energy = (np.asarray(axes.images[0].get_array()) for axes in (angles, energies))
        for row, (site, _, _) in enumerate(SITES):
            rows = of(frame, model, site, "uniform")
            assert angle[row] == pytest.approx(rows.mean_deg.to_numpy() - 90, nan_ok=True)
            assert energy[row] == pytest.approx(np.log10(rows.energy_share * rows.d).to_numpy())
        ticks = dict(zip(angles.get_xticks(), (text.get_text() for text in angles.get_xticklabels()), strict=True))
        assert ticks == {at: f"{step}" for at, step in enumerate(STEPS)}


def test_a_map_of_many_steps_names_those_that_it_marks(frame):
    many = pd.concat([frame[frame.step == 0].assign(step=step) for step in range(0, 4000, 200)])
    axes = training_figures.heat_map(many).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"{200 * int(at):,}" for at in axes.get_xticks()]
    assert len(axes.get_xticks()) > 5


def test_a_learning_curve_is_the_mean_around_each_step():
    steps = np.arange(1, 501)
    curve = pd.DataFrame({"step": steps, "train_loss": np.random.default_rng(0).uniform(2, 9, 500)})
    curve["held_out_loss"] = np.where(steps % 100 == 0, 3 + steps / 1000, np.nan)
    (axes,) = training_figures.curves({"layernorm": curve}).axes
    every, smooth, held = axes.lines
    assert every.get_ydata() == pytest.approx(curve.train_loss.to_numpy())
    assert smooth.get_label() == "LayerNorm, training (mean of 10 steps)"
    middle = [curve.train_loss[k - 5 : k + 5].mean() for k in range(5, 495)]
    assert smooth.get_ydata()[5:495] == pytest.approx(middle)
    assert held.get_xdata().tolist() == [100, 200, 300, 400, 500]
    assert held.get_ydata() == pytest.approx([3.1, 3.2, 3.3, 3.4, 3.5])


def test_a_learning_curve_of_one_step_is_a_dot():
    """That of a run which failed at its second."""
    curve = pd.DataFrame({"step": [1], "train_loss": [5.7], "held_out_loss": [np.nan]})
    (axes,) = training_figures.curves({"rmsnorm": curve}).axes
    assert axes.lines[1].get_marker() == "."
    assert axes.lines[1].get_label() == "RMSNorm, training"
    assert [tick for tick in axes.get_xticks() if tick == 1] == [1]
    assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.mark.parametrize("of", ["middle_layer", "one_layer", "all_layers", "heat_map"])
def test_a_table_without_a_row_is_said_to_be_empty(of):
    """As one is of which all was left out."""
    empty = pd.DataFrame(columns=["model", "phase", "role", "layer", "stack", "stack_index", "site", "step"])
    more = {"one_layer": (1,), "all_layers": ("uniform",)}
    with pytest.raises(DataError, match="nothing to draw: the table has no row"):
        getattr(training_figures, of)(empty, *more.get(of, ()))
