"""Runs of several models of which some cannot be measured: the others are, and what failed is tried again."""

import json
import shutil

import pytest
import torch
from zoo import tiny

from normgeo import AngleTable, load_model, load_tokenizer
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.errors import RunError


def test_what_was_measured_before_a_model_that_cannot_be_is_written(tmp_path, no_figures):
    """And is a run that analyses take; the other model may be mended meanwhile."""
    tiny("vit").save_pretrained(tmp_path / "other")
    config = RunConfig(("embedded-rmsnorm", str(tmp_path / "other")), "sample", 300, null=4, context=64, device="cpu")
    out = tmp_path / "run"
    with pytest.raises(RunError, match=r"other: .* pixel_values.*; the results of embedded-rmsnorm are in .*--resume"):
        start_run(config, out, progress=False)
    assert AngleTable.load(out).frame.model.unique().tolist() == ["embedded-rmsnorm"]
    assert "embedded-rmsnorm" in (out / "report.html").read_text()
    shutil.rmtree(tmp_path / "other")
    load_model("embedded-layernorm").save_pretrained(tmp_path / "other")
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path / "other")
    table = resume_run(out, progress=False)  # with another model of that name: of the first nothing was measured
    assert table.frame.model.unique().tolist() == ["embedded-rmsnorm", "other"]
    assert json.loads((out / "run.json").read_text())["status"] == "complete"


def test_models_behind_one_that_cannot_be_measured_are(tmp_path, no_figures):
    model = load_model("embedded-layernorm")
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path / "bad")
    with torch.no_grad():
        model.transformer.h[2].ln_1.weight.fill_(torch.nan)
    model.save_pretrained(tmp_path / "bad")
    names = ("embedded-rmsnorm", str(tmp_path / "bad"), "embedded-layernorm")
    out, config = tmp_path / "run", RunConfig(names, "sample", 300, null=4, context=64, device="cpu")
    for go in (lambda: start_run(config, out, progress=False), lambda: resume_run(out, progress=False)):
        with pytest.raises(RunError, match=r"bad: .*; the results of embedded-rmsnorm, embedded-layernorm are in"):
            go()
        assert AngleTable.load(out).frame.model.unique().tolist() == ["embedded-rmsnorm", "embedded-layernorm"]
    load_model("embedded-layernorm").save_pretrained(tmp_path / "bad")
    table = resume_run(out, progress=False)
    assert table.frame.model.unique().tolist() == ["embedded-rmsnorm", "bad", "embedded-layernorm"]
