"""Figures by training step: of models that have not all layers in common, and of steps far apart."""

from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest
import zoo

from normgeo import figures
from normgeo.angles.runs import RunConfig
from normgeo.training import checkpoint_angles
from normgeo.training import figures as training_figures
from normgeo.training.checkpoint_angles import measure_checkpoints, start_checkpoints
from normgeo.training.checkpoints import find_checkpoints


@pytest.fixture(scope="module")
def depths(tmp_path_factory):
    """Two steps of a model of two layers, `a`, and of one of four, `b`, and what to measure them on."""
    tmp_path = tmp_path_factory.mktemp("depths")
    for name, layers in (("a", 2), ("b", 4)):
        for step in (1, 2):
            zoo.tiny("gpt2", step, n_layer=layers).save_pretrained(tmp_path / f"models/{name}/step-{step}")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (4, 16)))
    return tmp_path, RunConfig((), str(tmp_path / "ids.npy"), null=2, device="cpu")


@pytest.fixture(scope="module")
def measured(depths):
    folder, config = depths
    return measure_checkpoints(find_checkpoints(folder / "models"), config, progress=False)


@pytest.fixture
def at_one(measured):
    """The first step of the model of two layers."""
    return measured[(measured.model == "a") & (measured.step == 1)]


def test_models_of_other_depths_are_drawn_beside_each_other(depths, unrendered):
    folder, config = depths
    frame = start_checkpoints(folder / "models", config, folder / "run", progress=False)
    assert pd.read_parquet(folder / "run/angles.parquet").equals(frame)
    drawn = {path.name for path in (folder / "run/figures").glob("*.png")}
    assert drawn == {"layers-by-steps.png", "by-step-layer-1.png"} | {f"by-step-{d}.png" for d in figures.COLORS}

    middle = training_figures.one_layer(frame, 1)
    for k, model in enumerate("ab"):
        here = frame[(frame.model == model) & (frame.site == "transformer.h.1.ln_1") & (frame.phase == "pre")]
        points = {c.get_label(): c.lines[0].get_ydata().tolist() for c in middle.axes[3 * k].containers}
        assert points == {"uniform vector": here[here.direction == "uniform"].mean_deg.tolist()}
    short, deep = ([f"{k}: {role}" for k in range(n) for role in ("attention", "MLP")] + ["final"] for n in (2, 4))
    by_row = [name for names in zip(short, deep, strict=False) for name in names] + deep[len(short) :]
    lines = [axes for axes in training_figures.all_layers(frame, "uniform").axes if axes.get_visible()]
    assert [axes.get_ylabel() for axes in lines] == by_row
    maps = training_figures.heat_map(frame).axes[:4]
    assert [[text.get_text() for text in axes.get_yticklabels()] for axes in maps] == [short, deep] * 2


def test_models_without_a_common_layer_have_no_figure_of_one(measured, tmp_path, unrendered):
    apart = measured[(measured.model == "b") == (measured.layer >= 2)]
    assert training_figures.middle_layer(apart) is None
    checkpoint_angles.draw(apart, tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"layers-by-steps.png"} | {f"by-step-{direction}.png" for direction in figures.COLORS}


def test_steps_that_double_are_on_a_logarithmic_axis(at_one):
    """On a linear one, 1 to 512 would coincide beside 143,000; evenly spaced steps keep that."""
    for steps, scale in (((0, 1, 2, 4, 512, 1000, 143000), "symlog"), ((0, 1000, 2000, 3000), "linear")):
        several = pd.concat([at_one.assign(step=step) for step in steps])
        axes = training_figures.one_layer(several, 0).axes[0]
        assert axes.get_xscale() == scale
        marks = next(line for line in axes.get_lines() if len(line.get_xdata()) == len(steps))
        at = [axes.transData.transform((step, 90))[0] for step in marks.get_xdata()]
        assert min(b - a for a, b in pairwise(at)) > 0.02 * (at[-1] - at[0])


@pytest.mark.parametrize("models", [1, 8])
def test_labels_of_many_models_and_long_names_lie_beside_each_other(at_one, models):
    names = [f"sweeps/2026-11/gpt2-lr3e-4-warmup500-$seed$-{k}" for k in range(models)]
    several = pd.concat([at_one.assign(step=143_000 * k // 25) for k in range(26)])
    several = pd.concat([several.assign(model=name) for name in names])
    one, every, maps = (
        training_figures.one_layer(several, 0), training_figures.all_layers(several, "uniform"),
        training_figures.heat_map(several),
    )  # fmt: skip
    for figure in (one, every, maps):
        figure.draw_without_rendering()
        ticks = [text for each in maps.axes[:models] for text in each.get_xticklabels()] if figure is maps else []
        labels = [
            text for each in figure.axes for text in (each.title, each.xaxis.label, each.yaxis.label) if text.get_text()
        ]
        for texts in (labels, ticks):
            places = [text.get_window_extent() for text in texts]
            assert not any(a.overlaps(b) for a, b in combinations(places, 2))
            assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in places)
        shown = {"".join(text.get_text().split()).replace("\\$", "$").removesuffix("(degrees)") for text in labels}
        assert set(names) <= shown
