"""`normgeo compare` as it is typed, and the causal test."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from test_compare import EXACT, drawn, sharpened
from transformers import CLIPModel

from analyses import causal_test
from normgeo.cli import main as cli
from normgeo.comparison import compare as comparison
from normgeo.errors import ConversionError
from normgeo.training import twins

QUICK = {"null": 4, "rounds": 0, "progress": False}


@pytest.fixture
def normgeo(monkeypatch, capsys, tmp_path):
    """Run `normgeo compare` in a scratch directory; gives (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.random.default_rng(0).integers(3, 96, (8, 16)))
    zoo.tiny("gpt2").save_pretrained("gpt2")
    zoo.tiny("llama").save_pretrained("llama")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["normgeo", "compare", *map(str, words)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return run


def test_a_model_is_compared_with_its_naive_swap_alone(normgeo, tmp_path):
    words = ("gpt2", "--data", "ids.npy", "--null", 4, "--rounds", 0)
    status, out, _ = normgeo(*words, "--naive")
    assert status == 0
    assert "runs/compare-gpt2-2" in out
    (out,) = (tmp_path / "runs").iterdir()
    alone = pd.read_parquet(out / "comparison.parquet")
    assert normgeo("gpt2", "llama", *words[1:], "--naive", "--out", "three")[0] == 0
    beside = pd.read_parquet(tmp_path / "three/comparison.parquet").drop(index=1).reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, beside[alone.columns])
    status, _, err = normgeo(*words)
    assert status == 1
    assert "there is nothing to compare gpt2 with: give another model, or --naive" in " ".join(err.split())


def test_command_on_saved_models(normgeo, tmp_path, rendered):
    words = ("gpt2", "llama", "--data", "ids.npy", "--naive", "--null", 4, "--rounds", 1)
    status, out, said = normgeo(*words, "--out", "new/here")
    assert status == 0
    assert "128 tokens of ids.npy" in said
    assert "128 tokens of ids.npy" not in out  # which may be piped on
    for line in ("gpt2, naive RMSNorm", "KL, mean (nats)", "new/here: comparison.json"):
        assert line in out
    frame = pd.read_parquet(tmp_path / "new/here/comparison.parquet")
    assert frame.model.tolist() == ["gpt2", "llama", "gpt2, naive RMSNorm"]
    assert set(pd.read_parquet(tmp_path / "new/here/angles.parquet").model) == set(frame.model)
    assert len(json.loads((tmp_path / "new/here/comparison.json").read_text())["weights_sha256"]) == 3
    assert (tmp_path / "new/here/figures/comparison.svg").stat().st_size > 1000
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["here"]
    status, _, err = normgeo(*words, "--out", "new/here")
    assert status == 1
    assert "exists and is not an empty directory" in " ".join(err.split())


def test_command_on_the_embedded_pair(normgeo, tmp_path):
    words = ("embedded-layernorm", "embedded-rmsnorm", "--tokens", 600, "--context", 100, "--null", 4, "--rounds", 0)
    status, _, said = normgeo(*words)
    assert status == 0
    assert "600 tokens of sample in contexts of 100" in said
    (written,) = (tmp_path / "runs").iterdir()
    assert written.name.startswith("compare-embedded-layernorm-embedded-rmsnorm-")
    assert written.name.startswith(comparison.comparison_name(words[:2]))


def test_a_model_against_itself_by_name(normgeo, tmp_path):
    status, out, _ = normgeo("gpt2", "gpt2", "--data", "ids.npy", "--null", 4, "--rounds", 0, "--out", "same")
    assert status == 0
    assert "gpt2 (again)" in out
    assert (pd.read_parquet(tmp_path / "same/comparison.parquet")[EXACT] == 0).all(axis=None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt2", "nowhere/model", "--data", "ids.npy"], "cannot load the model 'nowhere/model'"),
        (["gpt2", "wide", "--data", "ids.npy"], "96 wide and those of wide 100: their vocabularies differ"),
        (["embedded-layernorm", "other", "--data", "sample"], "have different vocabularies (4,096 and 270 tokens)"),
        (["embedded-layernorm", "other", "--data", "IDS.NPY"], "cannot read token ids from IDS.NPY"),
        (["embedded-layernorm", "embedded-rmsnorm", "--data", "empty.txt"], "has no text in it"),
        (["gpt2", "llama", "--data", "text.doc"], "no such data file"),
        (["gpt2", "llama", "--data", "ids.npy", "--tokens", "129"], "ends after 128 tokens"),
        (["gpt2", "llama", "--data", "ids.npy", "--tokens", "0"], "--tokens must be at least 1"),
        (["gpt2", "llama", "--data", "ids.npy", "--context", "0"], "--context must be at least 1"),
        (["gpt2", "llama", "--data", "ids.npy", "--rounds", "-1"], "--rounds must be at least 0"),
        (["gpt2", "llama", "--data", "ids.npy", "--dtype", "int8"], "no dtype 'int8'"),
        (["gpt2", "llama", "--data", "ids.npy", "--device", "cuda:99"], "cuda:99"),
        (["llama", "gpt2", "--data", "ids.npy", "--naive"], "has no LayerNorm"),
        (["gpt2", "vit", "--data", "ids.npy"], "ViTForImageClassification takes pixel_values, not token ids"),
        (["gpt2", "clip", "--data", "ids.npy"], "CLIPModel has no table of token embeddings"),
        (["vit", "gpt2"], "ViTForImageClassification takes pixel_values, not token ids"),
        (["gpt2", "nan", "--data", "ids.npy"], "the logits of nan are NaN or infinite"),
        (["gpt2", "llama", "--data", "ids.npy", "--out", "gpt2"], "exists and is not an empty directory"),
        (["gpt2", "llama", "--data", "ids.npy", "--out", "ids.npy"], "exists and is not an empty directory"),
        (["gpt2", "llama", "--data", "ids.npy", "--out", "ids.npy/x"], "ids.npy is no directory"),
    ],
)
def test_each_mistake_is_one_clear_line_and_writes_nothing(normgeo, tmp_path, words, says):
    if "wide" in words:
        zoo.tiny("gpt2", vocab_size=100).save_pretrained("wide")
    if "vit" in words:
        zoo.tiny("vit").save_pretrained("vit")
    if "clip" in words:
        CLIPModel(zoo.by_type("clip").config).save_pretrained("clip")
    if "other" in words:
        zoo.tiny("gpt2", vocab_size=300).save_pretrained("other")
        twins.train_tokenizer(["some other words"] * 9, 300).save_pretrained("other")
    if "nan" in words:
        model = zoo.tiny("gpt2")
        with torch.no_grad():
            model.transformer.ln_f.bias[0] = torch.nan
        model.save_pretrained("nan")
    (tmp_path / "empty.txt").write_text("  \n ")
    before = set(tmp_path.rglob("*"))
    status, _, err = normgeo(*words)
    assert status == 1
    assert err.count("error: ") == 1
    assert says in " ".join(err.split())
    assert "Traceback" not in err
    assert ("contexts of" in err) == (not {"wide", "nan"}.isdisjoint(words))  # the outputs tell, and nothing else
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "names", [["bare", "embedded-layernorm"], ["embedded-layernorm", "bare"], ["embedded-layernorm"]]
)
def test_the_tokenizer_is_that_of_the_model_that_has_one(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zoo.tiny("gpt2").save_pretrained("bare")
    found = comparison._shared_tokenizer(names, [None] * len(names), False)
    assert len(found) == 4096


@pytest.mark.parametrize(("other", "of"), [("org/other", "v1"), ("gpt2", None)])
def test_a_revision_is_that_of_every_model_on_the_hub(normgeo, monkeypatch, other, of):
    asked, model = {}, zoo.tiny("gpt2")
    monkeypatch.setattr(
        comparison, "load_model", lambda name, *, revision, **_: asked.update({name: revision}) or model
    )
    words = ("org/one", other, "--data", "ids.npy", "--revision", "v1", "--null", 4, "--rounds", 0, "--out", "out")
    assert normgeo(*words)[0] == 0
    assert asked == {"org/one": "v1", other: of}


def test_too_few_tokens_are_said_before_any_model_runs(normgeo, monkeypatch):
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: pytest.fail("compared"))
    status, _, err = normgeo("embedded-layernorm", "embedded-rmsnorm", "--tokens", 500_000)
    assert status == 1
    assert "sample ends after 99,309 tokens, 500,000 were asked for" in " ".join(err.split())


@pytest.mark.parametrize(("dtype", "hint"), [("float32", "Look for such values"), ("bfloat16", "Try --dtype float32")])
def test_a_wider_dtype_is_advised_only_where_it_is_wider(normgeo, dtype, hint):
    model = zoo.tiny("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = torch.nan
    model.save_pretrained("nan")
    status, _, err = normgeo("gpt2", "nan", "--data", "ids.npy", "--dtype", dtype)
    assert status == 1
    assert f"nothing can be said of it. {hint}" in " ".join(err.split())


def test_a_failure_while_writing_leaves_nothing(normgeo, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normgeo.comparison.compare.figures.save", full)
    status, _, err = normgeo("gpt2", "llama", "--data", "ids.npy", "--null", 4, "--rounds", 0, "--out", "here")
    assert status == 1
    assert "cannot write here: the disk is full; nothing was left behind" in " ".join(err.split())
    assert not list(tmp_path.glob("here*"))


def test_the_causal_test_finds_the_swap_and_not_the_conversion(tmp_path, ids):
    for name in ("gpt2", "llama"):
        sharpened(name).save_pretrained(tmp_path / name)
    np.save(tmp_path / "ids.npy", ids)
    frame = causal_test.compute(tmp_path / "gpt2", tmp_path / "ids.npy")
    assert frame.conversion.tolist() == ["original", "naive swap", "exact conversion"]
    original, naive, exact = frame.to_dict("records")
    assert original["kl_mean"] == 0
    assert exact["kl_mean"] < 1e-9 < 1e-4 < naive["kl_mean"]
    assert abs(exact["perplexity_difference"]) < 1e-3 < abs(naive["perplexity_difference"])
    assert exact["top1"] == 1  # drawn as nothing at all, on a logarithmic axis
    figure = causal_test.plot(frame)
    assert drawn(figure)
    assert len(figure.axes) == 4
    assert frame.perplexity_difference.tolist() == (frame.perplexity - original["perplexity"]).tolist()
    panels = {axes.get_title(): axes.lines[0].get_xdata()[0] for axes in figure.axes}
    change = abs(naive["perplexity"] / original["perplexity"] - 1)
    assert panels == pytest.approx({
        "|perplexity change| (%)": 100 * change, "mean KL (nats)": naive["kl_mean"],
        "other token preferred (%)": 100 * (1 - naive["top1"]), "logits, rms error (%)": 100 * naive["error_rms_rel"],
    })  # fmt: skip
    with pytest.raises(ConversionError, match="has no LayerNorm"):
        causal_test.compute(tmp_path / "llama", tmp_path / "ids.npy")
