"""Runs of several models of which some cannot be measured: the others are, and what failed is tried again."""

import json
import shutil

import numpy as np
import pytest
import torch
from zoo import tiny

from normgeo import AngleTable, load_model, load_tokenizer
from normgeo.angles import job, runs
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.angles.scalars import ScalarStore
from normgeo.errors import RunError


def test_what_was_measured_before_a_model_that_cannot_be_is_written(tmp_path):
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


def test_models_behind_one_that_cannot_be_measured_are(tmp_path):
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


def test_models_are_measured_on_one_text(tmp_path):
    """A file that is another one when the next model is loaded gives no table that compares the two."""
    for name in ("gpt2", "llama"):
        tiny(name).save_pretrained(tmp_path / name)
    data, out = tmp_path / "ids.npy", tmp_path / "run"
    texts = [np.random.default_rng(seed).integers(3, 96, (8, 16)) for seed in (0, 1)]
    np.save(data, texts[0])
    models = (str(tmp_path / "gpt2"), str(tmp_path / "llama"))
    config = RunConfig(models, str(data), null=4, batch=2, device="cpu")

    def replaced(_):
        np.save(tmp_path / "new.npy", texts[1])
        (tmp_path / "new.npy").replace(data)

    with pytest.raises(RunError, match=r"llama: .* another data sha256: .*; the results of gpt2 are in .*--resume"):
        start_run(config, out, announce=replaced, progress=False)
    np.save(data, texts[0])
    table = resume_run(out, progress=False)
    assert table.frame.model.unique().tolist() == ["gpt2", "llama"]


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run with scalars that was ended behind the second of four blocks."""
    monkeypatch.setattr(job, "BLOCK_TOKENS", 64)
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (16, 16)))
    streamed = runs.stream

    def stopping(*given):
        for number, batch in enumerate(streamed(*given)):
            if number == 10:
                raise KeyboardInterrupt
            yield batch

    config = RunConfig((str(tmp_path / "gpt2"),), str(tmp_path / "ids.npy"), null=4, batch=1, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "stream", stopping)
        with pytest.raises(KeyboardInterrupt):
            start_run(config, tmp_path / "run", progress=False)
    return tmp_path / "run"


def test_scalars_of_which_some_are_gone_are_not_gone_on_with(stopped, monkeypatch):
    """That is said before anything is measured."""
    folder = stopped / "scalars.zarr/gpt2"
    for gone in ("", "sites/transformer.h.1.ln_1/pre", "sites/transformer.h.0.ln_2/post/c/1/0", "tokens/id/c/0"):
        kept = (folder / gone).rename(stopped.parent / "kept")
        with monkeypatch.context() as patch:
            patch.setattr(runs, "stream", lambda *_: pytest.fail("something was measured"))
            with pytest.raises(RunError, match=r"/gpt2/.* is missing, of 128 tokens that were measured; put it back, "):
                resume_run(stopped, progress=False)
        kept.rename(folder / gone)
    resume_run(stopped, progress=False)
    assert json.loads((stopped / "run.json").read_text())["status"] == "complete"


def test_scalars_that_are_gone_of_a_model_that_is_done_are_said(stopped, monkeypatch):
    """As of one whose process was killed before it wrote the tables."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_results", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resume_run(stopped, progress=False)
    kept = (stopped / "scalars.zarr/gpt2/sites/transformer.h.0.ln_2/post/c/3/0").rename(stopped.parent / "kept")
    with pytest.raises(RunError, match=r"post/c/3/0 is missing, of 256 tokens that were measured; put it back, "):
        resume_run(stopped, progress=False)
    kept.rename(stopped / "scalars.zarr/gpt2/sites/transformer.h.0.ln_2/post/c/3/0")
    resume_run(stopped, progress=False)


def test_scalars_that_are_cut_or_whose_metadata_is_damaged_are_not_gone_on_with_either(stopped, monkeypatch):
    folder = stopped / "scalars.zarr/gpt2"
    monkeypatch.setattr(runs, "stream", lambda *_: pytest.fail("something was measured"))
    for name in ("tokens/id/c/1", "sites/transformer.h.0.ln_2/post/c/0/0"):
        kept = (folder / name).read_bytes()
        for content in (kept[:-1], b""):
            (folder / name).write_bytes(content)
            found = f"{name} is damaged: it has {len(content):,} bytes instead of {len(kept):,}; put it back, or start"
            with pytest.raises(RunError, match=found):
                resume_run(stopped, progress=False)
        (folder / name).write_bytes(kept)
    for name in ("", "tokens/id/", "sites/transformer.h.1.ln_1/pre/"):
        file = folder / f"{name}zarr.json"
        kept = file.read_bytes()
        for content in (kept[:100], b"", b"[" * 100_000, kept.replace(b'"node_type"', b'"mode_type"')):
            file.write_bytes(content)
            with pytest.raises(RunError, match=r"/gpt2.* is damaged .*; put it back, or start again"):
                resume_run(stopped, progress=False)
            with pytest.raises(RunError, match=r"/gpt2"):
                ScalarStore(folder).norms("transformer.h.1.ln_1")
        file.write_bytes(kept)


@pytest.mark.parametrize("state", ["flipped", "another model's", "of fewer tokens"])
def test_statistics_that_are_not_those_that_were_committed_are_not_gone_on_with(stopped, state):
    file = stopped / "state/gpt2.safetensors"
    saved = bytearray(file.read_bytes())
    if state == "flipped":
        saved[-9] ^= 1
        file.write_bytes(saved)
    elif state == "of fewer tokens":
        file.write_bytes(saved.replace(b'"tokens_done":"[[0, 128]]"', b'"tokens_done":"[[0, 64]] "'))
    else:
        tiny("gpt2", seed=1).save_pretrained(stopped.parent / "other/gpt2")
        ids = str(stopped.parent / "ids.npy")
        other = RunConfig((str(stopped.parent / "other/gpt2"),), ids, null=4, batch=1, device="cpu")
        start_run(other, stopped.parent / "another", progress=False)
        (stopped.parent / "another/state/gpt2.safetensors").rename(file)
    with pytest.raises(RunError, match=r"gpt2\.safetensors is damaged, or was written by another version .*checksum"):
        resume_run(stopped, progress=False)


@pytest.mark.parametrize("later", [(), ("gpt2",)])
def test_a_directory_that_was_removed_meanwhile_is_not_complete(tmp_path, monkeypatch, later):
    """It is made again for what is still to be written, without what was; also when other models are to come."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (4, 16)))
    for name in ("first", *later):
        tiny("gpt2").save_pretrained(tmp_path / name)
    seen, removed = runs.check_seen, iter([lambda: shutil.rmtree(tmp_path / "run")])
    monkeypatch.setattr(runs, "check_seen", lambda found: (next(removed, int)(), seen(found)))
    names = tuple(str(tmp_path / name) for name in ("first", *later))
    config = RunConfig(names, data=str(tmp_path / "ids.npy"), tokens=64, null=2, device="cpu", keep="none")
    with pytest.raises(RunError, match="run was removed while it was written"):
        start_run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run/run.json").exists()
