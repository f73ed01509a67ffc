"""The generated list of architectures: large, small once built, generic in every parameter; a fast part converts."""

import dataclasses
import math

import pytest
import torch
import transformers

from analyses import coverage
from normgeo import architectures as module
from normgeo.architectures import Architecture, architectures, perturb, tiny
from normgeo.conversion.certify import TOLERANCE_FLOAT32, TOLERANCE_FLOAT64
from normgeo.errors import ModelError
from normgeo.examples import example_inputs
from normgeo.shrinking import EXCEPTIONS, tiny_config

ALL = {a.model_type: a for a in architectures()}

# one of each kind: causal, masked, seq2seq, vision, video, speech, series, parallel, experts, patches, two towers
FAST = [
    "audio-spectrogram-transformer", "biogpt", "blenderbot", "bloom", "clip_text_model", "codegen",
    "decision_transformer", "deit", "dinov2", "dinov2_with_registers", "esm", "gpt2", "gpt_bigcode", "gpt_neox",
    "ijepa", "kimi_k25_vision", "m2m_100", "mbart", "megatron-bert", "mpt", "nllb-moe", "olmo", "opt",
    "pegasus", "persimmon", "phi", "phimoe", "qwen2_audio_encoder", "roberta-prelayernorm", "rwkv", "segformer",
    "speech_to_text", "stablelm", "starcoder2", "vit", "vit_msn", "vivit",
    "whisper", "xglm",
]  # fmt: skip


CAST = {"olmo"}  # computes its norms in float32, also when it is given float64


def test_the_list_is_generated_and_large():
    assert len(ALL) > 400
    assert len({a.cls for a in ALL.values()}) == len(ALL)
    tasks = {a.task for a in ALL.values()}
    assert {"causal", "masked", "seq2seq", "vision", "speech", "base"} <= tasks
    assert ALL["gpt2"] == Architecture("gpt2", "causal", "GPT2LMHeadModel", "GPT2Config")
    assert ALL["bert"].cls == "BertForMaskedLM"
    assert ALL["bart"].task == "seq2seq"
    assert len(EXCEPTIONS) <= 10


@pytest.mark.parametrize(
    "name", ["gpt2", "swin", "whisper", "clip_text_model", "qwen3_next", "pvt_v2", "esm", "jamba", "dory"]
)
def test_architectures_become_small(name):
    model = tiny(ALL[name])
    assert model.dtype == torch.float32
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    with torch.no_grad():
        assert len(model(**example_inputs(model))) > 0


def test_no_parameter_is_at_a_special_value():
    for name in ("gpt2", "vit", "whisper", "t5"):
        for key, parameter in tiny(ALL[name]).named_parameters():
            if parameter.numel() > 1:
                assert parameter.std() > 1e-3, (name, key)
                assert not torch.isin(parameter, torch.tensor([0.0, 1.0])).all(), (name, key)
    assert torch.equal(tiny(ALL["gpt2"], 3).transformer.ln_f.weight, tiny(ALL["gpt2"], 3).transformer.ln_f.weight)
    assert not torch.equal(tiny(ALL["gpt2"], 3).transformer.wte.weight, tiny(ALL["gpt2"], 4).transformer.wte.weight)
    empty = torch.nn.ParameterList([torch.zeros(0), torch.ones(2, 3), torch.randn(2, 3)])
    before = empty[2].clone()
    perturb(empty)
    assert empty[1].unique().numel() == 6
    assert torch.equal(empty[2], before)


def test_configurations_are_shrunk_by_what_their_names_mean():
    config = tiny_config(transformers.GPT2Config(n_layer=48, n_embd=1600, n_head=25))
    assert (config.n_layer, config.n_embd, config.n_head, config.vocab_size) == (2, 64, 4, 160)
    assert (config.layer_norm_epsilon, config.eos_token_id) == (1e-5, 2)
    config = tiny_config(transformers.SwinConfig())
    assert (config.embed_dim, list(config.depths), list(config.num_heads)) == (16, [2, 2, 2, 2], [4, 4, 4, 4])
    config = tiny_config(transformers.Qwen3NextConfig())
    assert sorted(config.layer_types) == ["full_attention", "linear_attention"]
    config = tiny_config(transformers.CLIPConfig())
    assert config.vision_config.image_size == 64
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    config = tiny_config(transformers.PvtV2Config())
    assert list(config.hidden_sizes) == [16, 32, 64, 128]


def test_what_cannot_be_built_says_why(monkeypatch):
    with pytest.raises(ModelError, match="has no Nonsense"):
        tiny(Architecture("nonsense", "base", "NonsenseModel", "NonsenseConfig"))
    monkeypatch.setattr(module, "MAX_PARAMETERS", 1000)
    with pytest.raises(ModelError, match="stays large"):
        tiny(ALL["gpt2"])


@pytest.mark.parametrize("name", sorted(set(FAST)))
def test_pre_ln_architectures_convert_completely(name):
    row = coverage.cover(ALL[name])
    assert row.family in ("pre-ln", "mixed"), row
    assert row.verdict == "complete", row
    assert row.error_rel < (TOLERANCE_FLOAT32 if name in CAST else TOLERANCE_FLOAT64), row
    assert row.replaced + row.untouched <= row.sites


@pytest.mark.parametrize(
    ("name", "family", "verdict"),
    [("llama", "rmsnorm", "none"), ("bert", "post-ln", "complete"), ("openai-gpt", "post-ln", "refused"),
     ("clip", "pre-ln", "partial"), ("resnet", "none", "none"), ("bark", "not built", "none")],
)  # fmt: skip
def test_the_others_say_why_not(name, family, verdict):
    row = coverage.cover(ALL[name])
    assert (row.family, row.verdict) == (family, verdict), row
    assert row.reason or verdict == "complete"


def test_a_wrong_conversion_and_a_crash_are_told(monkeypatch):
    real = coverage._converted
    monkeypatch.setattr(coverage, "_converted", lambda model: (real(model)[0], 0.1))
    assert coverage.cover(ALL["gpt2"]).verdict == "wrong"
    monkeypatch.setattr(coverage, "_converted", lambda model: (real(model)[0], math.nan))
    assert coverage.cover(ALL["gpt2"]).verdict == "wrong"

    def broken(model):
        raise KeyError("what")

    monkeypatch.setattr(coverage, "_converted", broken)
    row = coverage.cover(ALL["gpt2"])
    assert (row.verdict, row.reason) == ("crash", "KeyError: 'what'")


def test_the_page_and_the_figure_name_every_architecture(tmp_path, rendered):
    frame = coverage.compute(["gpt2", "bert", "llama", "resnet", "bark", "clip"])
    assert list(frame.columns) == [f.name for f in dataclasses.fields(coverage.Row)]
    page = coverage.markdown(frame)
    for name in frame.model_type:
        assert name in page
    coverage.plot(frame).savefig(tmp_path / "figure.png")
