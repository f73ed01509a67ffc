"""Norms and stacks in figures and tables: no two are called alike, and no name is longer than that takes."""

import itertools

import pandas as pd
import pytest

from normgeo import AngleTable, measure_angles
from normgeo.comparison import figures as comparison_figures
from normgeo.rows import short_names, stack_names


@pytest.fixture(scope="module")
def frame(tiny, ids):
    return measure_angles(tiny("gpt2"), ids, name="gpt2", null=0, progress=False).frame


def labels(figure):
    """What lines are called, each as often as there are such, and those that look alike."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() not in ("None", "")]
    return [line.get_label() for line in lines], {(line.get_color(), line.get_marker()) for line in lines}


@pytest.mark.parametrize("kind", ["energy", "norms", "rotation"])
def test_norms_of_one_role_and_name_in_a_layer_are_told_apart(frame, kind):
    """Two MLPs in each, as in a Macaron block: their norms are called alike, and what they are in is not."""
    inner = frame.role.isin(["attention", "mlp"])
    names = frame.site.str.replace("ln_1", "ff1.norm").str.replace("ln_2", "ff2.norm")
    table = AngleTable(frame[inner].assign(role="mlp", site=names[inner]))
    found, looks = labels(table.plot(kind))
    assert found == ["pre-MLP: ff1.norm", "pre-MLP: ff2.norm"]
    assert len(looks) == 2
    titles = [axes.get_title() for axes in table.plot("angles").axes[:2]]
    assert titles == ["pre-MLP\nff1.norm", "pre-MLP\nff2.norm"]


def test_a_rotation_says_from_what_to_what(frame):
    figure = AngleTable(frame).plot("rotation")
    assert figure.get_suptitle() == "Rotation from input to standardized output"
    assert figure.axes[0].get_ylabel() == "angle (degrees)"  # not of x to y, which the paper calls them


@pytest.mark.parametrize("kind", ["energy", "rotation"])
def test_lists_of_layers_in_one_module_are_told_apart(frame, kind):
    rows = frame[frame.role == "mlp"]
    table = AngleTable(rows.assign(stack=rows.layer.map({0: "model.prelude", 1: "model.coda"}), layer=0))
    found, looks = labels(table.plot(kind))
    assert found == ["prelude: pre-MLP", "coda: pre-MLP"]
    assert len(looks) == 2


def test_titles_and_layers_of_many_axes_lie_beside_each_other(frame):
    """Of an encoder-decoder with norms before and behind its branches, of 26 layers each."""
    names = ["attention", "post_attention", "cross_attention", "post_cross_attention", "mlp", "post_mlp"]
    one, places = frame[frame.site == frame.site[0]], itertools.product(range(2), names, range(26))
    rows = pd.concat([
        one.assign(stack=f"{'ed'[s]}ncoder.layers", stack_index=s, role=role, layer=layer, site=f"{s}.{layer}.{role}")
        for s, role, layer in places
    ])  # fmt: skip
    metrics = pd.DataFrame({"model": ["gpt2"], "perplexity": 1.0, "kl_mean": 1.0, "top1": 1.0, "time_ratio": 1.0})
    for figure in (AngleTable(rows).plot("angles"), comparison_figures.plot(metrics.assign(error_rms_rel=0), rows)):
        figure.set_dpi(300)  # as it is saved
        figure.draw_without_rendering()
        shown = [[axes.title for axes in figure.axes[:12]]]
        for axes in figure.axes[12:24]:
            ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            shown += [[text for at, text in ticks if axes.viewLim.x0 <= at <= axes.viewLim.x1]]
            assert len(shown[-1]) > 1
        for texts in shown:
            boxes = [text.get_window_extent() for text in texts]
            assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert boxes[-1].x1 <= figure.bbox.width


def test_names_are_as_long_as_it_takes():
    assert short_names(["h.0.ln_1"]) == ["ln_1"]
    assert short_names(["h.norms.0.a", "h.norms.1.a"]) == ["0.a", "1.a"]
    assert short_names(["norm", "h.norm"]) == ["norm", "h.norm"]
    assert short_names(["h.norm", "h.norm@1"]) == ["h.norm", "h.norm@1"]
    assert short_names(["h.rms_norm()", "h.rms_norm()@1"]) == ["rms_norm()", "rms_norm()@1"]
    assert list(stack_names(["encoder.layers", "decoder.layers"]).values()) == ["encoder", "decoder"]
    assert list(stack_names(["a.x.layers", "b.x.layers"]).values()) == ["a.x.layers", "b.x.layers"]
    assert list(stack_names(["", "h"]).values()) == ["", "h"]
