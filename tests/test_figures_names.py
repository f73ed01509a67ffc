"""Norms and stacks in figures and tables: no two are called alike, and no name is longer than that takes."""

import pytest

from normgeo import AngleTable, measure_angles
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


@pytest.mark.parametrize("kind", ["energy", "rotation"])
def test_lists_of_layers_in_one_module_are_told_apart(frame, kind):
    rows = frame[frame.role == "mlp"]
    table = AngleTable(rows.assign(stack=rows.layer.map({0: "model.prelude", 1: "model.coda"}), layer=0))
    found, looks = labels(table.plot(kind))
    assert found == ["prelude: pre-MLP", "coda: pre-MLP"]
    assert len(looks) == 2


def test_names_are_as_long_as_it_takes():
    assert short_names(["h.0.ln_1"]) == ["ln_1"]
    assert short_names(["h.norms.0.a", "h.norms.1.a"]) == ["0.a", "1.a"]
    assert short_names(["norm", "h.norm"]) == ["norm", "h.norm"]
    assert short_names(["h.norm", "h.norm@1"]) == ["h.norm", "h.norm@1"]
    assert short_names(["h.rms_norm()", "h.rms_norm()@1"]) == ["rms_norm()", "rms_norm()@1"]
    assert list(stack_names(["encoder.layers", "decoder.layers"]).values()) == ["encoder", "decoder"]
    assert list(stack_names(["a.x.layers", "b.x.layers"]).values()) == ["a.x.layers", "b.x.layers"]
    assert list(stack_names(["", "h"]).values()) == ["", "h"]
