"""Checkpoints of converted models: loaded in a process where this package cannot be imported."""

import copy
import dataclasses
import errno
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import zoo
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from normgeo import compare, convert, decompress, find_sites, load_model, optimize
from normgeo.cards import EMBEDDED
from normgeo.cli.main import app
from normgeo.conversion import checkpoint
from normgeo.conversion.checkpoint import save
from normgeo.conversion.runs import convert_checkpoint
from normgeo.conversion.trainable import bake
from normgeo.errors import ConversionError, DataError, ModelError, NormGeoError, RunError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops

LOADER = """
import json, os, sys
sys.modules["normgeo"] = None  # importing it raises ImportError
import torch, transformers.models.gpt2.modeling_gpt2
def load(folder, auto, trust):
    options = {"trust_remote_code": True} if trust == "remote" else {}
    model = getattr(transformers, auto).from_pretrained(f"{folder}/out", **options).eval()
    facts = torch.load(f"{folder}/facts.pt", weights_only=True)
    with torch.no_grad():
        logits = model(**facts["inputs"]).logits
    # some matrix libraries round by where in memory their operands lie, which another process chooses anew
    torch.testing.assert_close(logits, facts["logits"], rtol=1e-6, atol=1e-6)
    if "generated" in facts:
        made = model.generate(facts["inputs"]["input_ids"], max_new_tokens=5, do_sample=False)
        assert torch.equal(made, facts["generated"]), made

for case in json.loads(sys.argv[1]):
    if not os.fork():  # one that has loaded no other
        load(*case)
        os._exit(print("the same:", case[0], flush=True) or 0)  # to take down all that is imported takes a second
    os.wait()
"""
CASES = [
    ("gpt2", "AutoModelForCausalLM", {}, "remote"),
    ("gpt2", "AutoModelForCausalLM", {"keep_tie": True}, "remote"),
    ("gpt2", "AutoModelForCausalLM", {"to": "crmsnorm"}, "remote"),
    ("bloom", "AutoModelForCausalLM", {"to": "crmsnorm", "padded": True}, "remote"),
    ("vit", "AutoModelForImageClassification", {"to": "crmsnorm"}, "remote"),
    ("bert", "AutoModelForMaskedLM", {"fold_affine": True}, "remote"),
    ("olmo", "AutoModelForCausalLM", {}, "native"),
]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Each case's model, folder and facts, and what a process said that loaded them without this package."""
    home, cases = tmp_path_factory.mktemp("elsewhere"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_ops, "norm", lambda *_: None)  # where the package is not, its kernels are not
        for number, (name, auto, options, expected) in enumerate(CASES):
            folder, conversion = home / str(number), convert(zoo.tiny(name), **options)
            folder.mkdir()
            assert save(conversion, folder / "out") == expected
            model, inputs = conversion.model, example_inputs(conversion.model, 9)
            for norm in model.modules() if expected == "native" else ():
                norm.centered = False  # a native model's RMSNorm knows nothing of it
            with torch.no_grad():
                facts = {"inputs": inputs, "logits": model(**inputs).logits}
            if auto == "AutoModelForCausalLM":
                facts["generated"] = model.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)
            torch.save(facts, folder / "facts.pt")
            cases.append((model, folder, facts))
    given = json.dumps([[str(case[1]), *CASES[number][1::2]] for number, case in enumerate(cases)])
    alone = os.environ | {"HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADER, given]
    return cases, subprocess.run(command, capture_output=True, text=True, env=alone, cwd=home, timeout=300)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_a_checkpoint_loads_without_this_package(case, elsewhere, monkeypatch):
    (model, folder, facts), loaded = elsewhere[0][case], elsewhere[1]
    assert f"the same: {folder}\n" in loaded.stdout, loaded.stderr[-2000:]
    mine = load_model(folder / "out")  # without running the checkpoint's code
    tolerance = 1e-5 if CASES[case][3] == "native" else 1e-6
    with torch.no_grad():
        here, there = (m(**facts["inputs"]).logits for m in (mine, model))
        torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)
        monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
        torch.testing.assert_close(mine(**facts["inputs"]).logits, facts["logits"], rtol=1e-6, atol=1e-6)


def test_a_tied_head_is_saved_once_where_a_model_without_it_finds_it(tmp_path):
    original = zoo.tiny("gpt2")
    save(convert(original, keep_tie=True), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {"lm_head.weight", "transformer.wte.weight"} & set(file.keys()) == {"transformer.wte.weight"}
    model = load_model(tmp_path / "out")
    assert model.lm_head.weight is model.transformer.wte.weight
    base, info = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        found, expected = (m.eval()(ids).last_hidden_state for m in (base, original.transformer))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "how"), [("gpt2", "remote"), ("olmo", "native")])
def test_how_a_model_generates_is_saved_with_it(name, how, tmp_path):
    model = zoo.tiny(name)
    model.generation_config.max_new_tokens = 7
    assert save(convert(model), tmp_path / "out") == how
    assert load_model(tmp_path / "out").generation_config.max_new_tokens == 7


def test_nothing_loads_it_as_the_native_model_by_mistake(tmp_path):
    save(convert(zoo.tiny("gpt2")), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], "_name_or_path" in config) == ("normgeo_gpt2", False)  # nor where the original lay
    assert set(config["auto_map"]) >= {"AutoConfig", "AutoModelForCausalLM"}
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["certificate"]["passed"] is True


@pytest.mark.parametrize(
    "options", [{}, {"to": "crmsnorm"}, {"to": "crmsnorm", "padded": True}, {"trainable": True}], ids=str
)
def test_save_pretrained_writes_nothing_that_loads_as_another_model(options, tmp_path):
    """A native model's files lack the structure of a converted one: logits would be 19% off, and nobody told."""
    conversion = convert(zoo.tiny("gpt2"), **options)
    if options.get("trainable"):
        conversion = dataclasses.replace(conversion, model=bake(conversion.model))
    models = [conversion.model, copy.deepcopy(conversion.model), pickle.loads(pickle.dumps(conversion.model))]
    if not options.get("trainable"):
        models.append(optimize(copy.deepcopy(conversion.model)))
    save(conversion, tmp_path / "out")
    models.append(load_model(tmp_path / "out"))
    for part in [part for model in models for part in (model, model.base_model)]:
        with pytest.raises(ConversionError, match=r"call save\(conversion, folder\) of normgeo\.conversion"):
            part.save_pretrained(tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    inputs = example_inputs(conversion.model, 9)
    with torch.no_grad():
        a, b = conversion.model(**inputs).logits, load_model(tmp_path / "out")(**inputs).logits
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "bert", "nemotron"])
def test_a_model_in_training_is_saved_as_the_pre_ln_model_that_it_trains_as(name, tmp_path):
    """By whatever trains it: checkpoints are written by save_pretrained, and read again by load_state_dict."""
    original = zoo.tiny(name)
    model = copy.deepcopy(convert(original, trainable=True).model)  # GPT-2 is recentered, the others parametrized
    inputs = example_inputs(model, 9)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter += 0.1 * torch.randn_like(parameter)
    model.eval().save_pretrained(tmp_path)
    plain, again = type(original).from_pretrained(tmp_path), convert(original, trainable=True).model.eval()
    assert again.load_state_dict(model.state_dict()) == ([], [])
    resumed = convert(original, trainable=True).model.eval()
    assert resumed.load_state_dict(plain.state_dict(), strict=False).unexpected_keys == []
    with torch.no_grad():
        expected = model(**inputs).logits
        for found in (plain, again, resumed):
            torch.testing.assert_close(found(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_transformers_saves_again_what_it_loaded(tmp_path):
    conversion = convert(zoo.tiny("gpt2"), to="crmsnorm", padded=True)
    save(conversion, tmp_path / "out")
    auto, inputs = AutoModelForCausalLM, example_inputs(conversion.model, 9)
    auto.from_pretrained(tmp_path / "out", trust_remote_code=True).save_pretrained(tmp_path / "again")
    with torch.no_grad():
        a = conversion.model(**inputs).logits
        for model in (auto.from_pretrained(tmp_path / "again", trust_remote_code=True), load_model(tmp_path / "again")):
            torch.testing.assert_close(model(**inputs).logits, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("to", ["rmsnorm", "crmsnorm"])
def test_a_new_model_of_a_saved_structure_is_initialized_as_the_original_is(to, tmp_path):
    save(convert(zoo.tiny("gpt2"), to), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.manual_seed(0)
    block = AutoModelForCausalLM.from_config(config, trust_remote_code=True).transformer.h[1]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert not block.mlp.c_proj.bias.any()
    assert to == "crmsnorm" or (block.ln_1.weight == 1).all()  # its readers have taken the gains of the other


def test_olmo_becomes_a_plain_llama(tmp_path):
    model = zoo.tiny("olmo")
    assert save(convert(model), tmp_path / "out") == "native"
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    inputs = example_inputs(model, 11)
    with torch.no_grad():
        expected, found = model(**inputs).logits, llama(**inputs).logits
    assert (expected - found).abs().max() < 1e-5 * expected.abs().max()


def test_a_loaded_compressed_model_decompresses(tmp_path):
    conversion = convert(zoo.tiny("gpt_neox"), to="crmsnorm")
    save(conversion, tmp_path / "small")
    save(decompress(load_model(tmp_path / "small")), tmp_path / "wide")
    inputs = example_inputs(conversion.model, 9)
    with torch.no_grad():
        a, b = conversion.model(**inputs).logits, load_model(tmp_path / "wide")(**inputs).logits
    assert (a - b).abs().max() < 1e-5 * a.abs().max()


# --- mistakes and accidents -------------------------------------------------------------------------------------------


def test_what_is_not_certified_is_not_saved(tmp_path):
    with pytest.raises(ConversionError, match="did not pass"):
        save(convert(zoo.tiny("gpt2"), to="naive-rmsnorm"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    conversion = convert(zoo.tiny("gpt2"))
    monkeypatch.setattr(checkpoint, "save_torch_state_dict", full)
    with pytest.raises(RunError, match="the disk is full; nothing was left behind"):
        save(conversion, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(RunError, match="exists already"):
        convert_checkpoint("embedded-layernorm", tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]


def test_a_model_with_its_own_code_is_not_saved(tmp_path):
    cls = type(zoo.tiny("gpt2"))
    conversion = convert(zoo.tiny("gpt2"))
    conversion.model.__class__ = type("Own", (cls,), {"__module__": "transformers_modules.own"})
    with pytest.raises(ConversionError, match=r"its own code.* recipe"):
        save(conversion, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def quantized():
    model = zoo.tiny("gpt2")
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


def packed():
    model = zoo.tiny("gpt2")
    weight = model.transformer.h[0].mlp.c_proj.weight
    model.transformer.h[0].mlp.c_proj.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    return model


def adapted():
    model = zoo.tiny("gpt2")
    model.transformer.h[0].mlp.lora_A = torch.nn.Linear(32, 4)
    return model


@pytest.mark.parametrize(
    ("make", "says"), [(quantized, "load it without quantization"), (packed, "int8; load it unpacked"),
                       (adapted, "merge_and_unload"), (lambda: zoo.tiny("gpt2").to("meta"), "no weights")],
)  # fmt: skip
def test_weights_that_are_no_plain_numbers_are_refused(make, says):
    with pytest.raises(ConversionError, match=says):
        convert(make())


# --- the command ------------------------------------------------------------------------------------------------------


def run(*args):
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["convert", *map(str, args)])
    return result, result.exception


def test_the_command_converts_certifies_and_saves(tmp_path):
    result, error = run("embedded-layernorm", tmp_path / "out", "--tokens", 512, "--to", "crmsnorm")
    assert error is None
    assert "13 norms replaced, 0 kept" in result.stdout
    assert "perplexity" in result.stdout
    certificate = json.loads((tmp_path / "out" / "conversion.json").read_text())["certificate"]
    assert certificate["tokens"] == 510  # the first of each of two contexts has nothing before it
    assert abs(certificate["perplexity_original"] - certificate["perplexity_converted"]) < 1e-3
    text = AutoTokenizer.from_pretrained(tmp_path / "out")("A river in", return_tensors="pt")
    assert load_model(tmp_path / "out")(**text).logits.shape[-1] == 4096


def test_the_command_decompresses_what_cannot_be_measured(tmp_path):
    run("embedded-layernorm", tmp_path / "small", "--to", "crmsnorm", "--tokens", 512)
    small = load_model(tmp_path / "small")
    with pytest.raises(ModelError, match="convert --to rmsnorm"):
        find_sites(small)
    assert run(tmp_path / "small", tmp_path / "wide")[1] is None
    assert len(find_sites(load_model(tmp_path / "wide"))) == 13
    ids = np.random.default_rng(0).integers(3, 4096, (4, 32))
    models = {"original": load_model("embedded-layernorm"), "small": small}
    result = compare(models, ids, null=4, rounds=0, progress=False)
    assert result.frame.kl_mean[1] < 1e-10
    assert result.frame.rmsnorms[1] == 13
    assert (result.angles.model == "small").any()


def test_a_failed_certificate_exits_with_1_and_writes_nothing(tmp_path, monkeypatch):
    from normgeo.conversion import convert as conversion

    real = conversion.replace_norms

    def wrong(model, sites, norms):
        real(model, sites, norms)
        model.get_submodule(sites[0].name).bias.zero_()

    monkeypatch.setattr(conversion, "replace_norms", wrong)
    result, error = run("embedded-layernorm", tmp_path / "out")
    assert isinstance(error, ConversionError)
    assert "not equal to its original" in str(error)
    assert result.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_half_precision_is_kept(tmp_path):
    zoo.tiny("gpt2").to(torch.bfloat16).save_pretrained(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "out")
    assert load_model(tmp_path / "out").dtype == torch.bfloat16


def test_a_model_that_was_cast_is_loaded_as_it_was_saved(tmp_path):
    """Whatever dtype the checkpoint has that it came from."""
    zoo.tiny("gpt2").save_pretrained(tmp_path / "in")
    save(convert(load_model(tmp_path / "in").to(torch.bfloat16)), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(tmp_path / "out").dtype == torch.bfloat16


def test_mistakes_get_one_clear_error_and_leave_nothing(tmp_path):
    zoo.tiny("llama").save_pretrained(tmp_path / "llama")
    zoo.tiny("vit").save_pretrained(tmp_path / "vit")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for args, kind, says in (
        ((tmp_path / "llama",), ConversionError, "all its norms are RMSNorm already"),
        ((tmp_path / "empty",), ModelError, "cannot load"),
        ((tmp_path / "adapter",), ConversionError, "merge_and_unload"),
        ((tmp_path / "vit", "--data", "sample"), DataError, "not text"),
        ((EMBEDDED["embedded-layernorm"], "--to", "naive-rmsnorm"), ConversionError, "not saved"),
        ((EMBEDDED["embedded-layernorm"], "--data", tmp_path / "missing.txt"), DataError, "missing.txt"),
        ((EMBEDDED["embedded-layernorm"], "--tokens", "0"), DataError, "--tokens must be at least 1, received 0"),
    ):
        result, error = run(args[0], tmp_path / "out", *args[1:])
        assert isinstance(error, kind), (args, error)
        assert isinstance(error, NormGeoError)
        assert says in str(error)
        assert result.exit_code != 0
        assert not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "empty", "llama", "vit"]


@pytest.mark.parametrize(
    "options", [{"to": "rmsnorm"}, {"to": "crmsnorm"}, {"to": "crmsnorm", "padded": True}], ids=str
)
def test_the_vocabulary_of_a_converted_model_may_be_resized(options, tmp_path):
    conversion = convert(zoo.tiny("gpt2"), **options)
    conversion.model.resize_token_embeddings(100, mean_resizing=False)
    save(conversion, tmp_path / "out")
    inputs = {"input_ids": torch.tensor([[3, 99, 7, 98]])}
    with torch.no_grad():
        a, b = conversion.model(**inputs).logits, load_model(tmp_path / "out")(**inputs).logits
    assert a.shape[-1] == 100
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_head_that_stays_tied_refuses_another_vocabulary(tmp_path):
    conversion = convert(zoo.tiny("gpt2"), keep_tie=True)
    conversion.model.resize_token_embeddings(100, mean_resizing=False)
    with pytest.raises(ValueError, match="vocabulary of 96 tokens was resized to 100"):
        conversion.model(torch.tensor([[3, 99]]))
    with pytest.raises(ConversionError, match=r"lm_head\.mean"):
        save(conversion, tmp_path / "out")


@pytest.mark.parametrize("options", [{"to": "crmsnorm"}, {"keep_tie": True}], ids=str)
def test_a_frozen_model_stays_frozen(options):
    model = convert(zoo.tiny("gpt2").requires_grad_(False), **options).model
    assert not any(parameter.requires_grad for parameter in model.parameters())
