from collections import Counter
from dataclasses import replace

import accelerate
import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from normgeo import convert, measure_angles, optimize, shrinking
from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs
from normgeo.sites import find_sites

LN, RMS = "layernorm", "rmsnorm"


def stack(name, kind, *roles, layers=2):
    """What a stack should have: these roles once for each layer, those outside of the layers once."""
    once = ("embedding", "final", "head")
    return {(name, role, kind): 1 if role in once else layers for role in roles}


SEQUENTIAL, PARALLEL = ("attention", "mlp", "final"), ("parallel", "final")
POST = ("embedding", "post_attention", "post_mlp", "head")
EXPECTED = {
    "gpt2": stack("transformer.h", LN, *SEQUENTIAL),
    "gpt_neo": stack("transformer.h", LN, *SEQUENTIAL),
    "gptj": stack("transformer.h", LN, *PARALLEL),
    "gpt_neox": stack("gpt_neox.layers", LN, *SEQUENTIAL),
    "opt": stack("model.decoder.layers", LN, *SEQUENTIAL),
    "bloom": stack("transformer.h", LN, "embedding", *SEQUENTIAL),
    "falcon": stack("transformer.h", LN, *PARALLEL),
    "phi": stack("model.layers", LN, *PARALLEL),
    "stablelm": stack("model.layers", LN, *SEQUENTIAL),
    "mpt": stack("transformer.blocks", LN, *SEQUENTIAL),
    "olmo": stack("model.layers", LN, *SEQUENTIAL),
    "cohere": stack("model.layers", LN, *PARALLEL),
    "llama": stack("model.layers", RMS, *SEQUENTIAL),
    "mistral": stack("model.layers", RMS, *SEQUENTIAL),
    "qwen3": stack("model.layers", RMS, *SEQUENTIAL),
    "gemma": stack("model.layers", RMS, *SEQUENTIAL),
    "gemma2": stack("model.layers", RMS, "post_attention", "post_mlp", *SEQUENTIAL),
    "nemotron": stack("model.layers", LN, *SEQUENTIAL),
    "bert": stack("bert.encoder.layer", LN, *POST),
    "albert": stack("albert.encoder.albert_layer_groups", LN, *POST),
    "vit": stack("vit.layers", LN, *SEQUENTIAL),
    "whisper": stack("model.encoder.layers", LN, *SEQUENTIAL)
    | stack("model.decoder.layers", LN, "cross_attention", *SEQUENTIAL),
    "t5": stack("encoder.block", RMS, *SEQUENTIAL) | stack("decoder.block", RMS, "cross_attention", *SEQUENTIAL),
    "olmo2": stack("model.layers", RMS, "post_attention", "post_mlp", "final"),
}
BIAS = {"gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "stablelm", "nemotron", "bert",
        "albert", "vit", "whisper"}  # fmt: skip


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_every_architecture_has_the_sites_its_code_says(tiny, name):
    sites = find_sites(tiny(name))
    assert Counter((s.stack, s.role, s.kind) for s in sites) == EXPECTED[name]
    assert {s.d for s in sites} == {32}
    assert {s.heads for s in sites} == {1}
    assert {s.gain for s in sites} == {name != "olmo"}
    assert {s.bias for s in sites} == {name in BIAS}
    assert len({s.key for s in sites}) == len(sites)
    for site in sites:
        expected = {"embedding": {0}, "final": {2}}.get(site.role, {1, 2} if site.role == "head" else {0, 1})
        assert site.layer in expected
    for where, role in {(s.stack, s.role) for s in sites if s.role not in ("embedding", "final", "head")}:
        assert [s.layer for s in sites if (s.stack, s.role) == (where, role)] == [0, 1]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "whisper", "gemma2"])
def test_names_with_the_roles_that_the_modelling_code_gives_them(tiny, name):
    roles = {s.name: s.role for s in find_sites(tiny(name))}
    expected = {
        "gpt2": {"transformer.h.0.ln_1": "attention", "transformer.h.1.ln_2": "mlp", "transformer.ln_f": "final"},
        "llama": {"model.layers.0.input_layernorm": "attention", "model.layers.1.post_attention_layernorm": "mlp"},
        "bert": {"bert.embeddings.LayerNorm": "embedding", "cls.predictions.transform.LayerNorm": "head",
                 "bert.encoder.layer.0.attention.output.LayerNorm": "post_attention",
                 "bert.encoder.layer.1.output.LayerNorm": "post_mlp"},
        "whisper": {"model.decoder.layers.1.encoder_attn_layer_norm": "cross_attention",
                    "model.encoder.layers.0.final_layer_norm": "mlp", "model.encoder.layer_norm": "final"},
        "gemma2": {"model.layers.0.post_attention_layernorm": "post_attention",
                   "model.layers.0.pre_feedforward_layernorm": "mlp"},
    }[name]  # fmt: skip
    assert {n: roles[n] for n in expected} == expected


def test_norms_on_heads_come_only_when_asked_for(tiny):
    found = [s for s in find_sites(tiny("qwen3"), qk=True) if s.role == "qk"]
    assert [(s.name.split(".")[-1], s.layer, s.heads, s.d) for s in found] == [
        ("q_norm", 0, 4, 8), ("k_norm", 0, 2, 8), ("q_norm", 1, 4, 8), ("k_norm", 1, 2, 8)]  # fmt: skip
    whole = [s for s in find_sites(tiny("olmo2"), qk=True) if s.role == "qk"]
    assert [(s.heads, s.d) for s in whole] == [(1, 32)] * 4


def test_a_norm_shared_by_layers_is_a_site_for_each_call(tiny):
    sites = [s for s in find_sites(tiny("albert")) if s.role == "post_mlp"]
    assert len({s.name for s in sites}) == 1
    assert [(s.call, s.layer) for s in sites] == [(0, 0), (1, 1)]
    assert sites[1].key == sites[0].name + "@1"


def test_post_norm_opt_is_told_from_pre_norm_opt(tiny):
    post = zoo.tiny("opt", do_layer_norm_before=False)
    assert {s.role for s in find_sites(post)} == {"post_attention", "post_mlp"}


def test_parallel_residual_of_neox_with_two_norms_reads_apart():
    sites = find_sites(zoo.tiny("gpt_neox", use_parallel_residual=True))
    assert [s.role for s in sites[:2]] == ["attention", "mlp"]


EPS_NAMES = {"gpt2": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps", "llama": "rms_norm_eps",
             "gemma2": "rms_norm_eps", "t5": "layer_norm_epsilon", "bert": "layer_norm_eps",
             "nemotron": "norm_eps", "cohere": "layer_norm_eps"}  # fmt: skip


@pytest.mark.parametrize("name", EPS_NAMES)
def test_eps_is_the_configurations(name):
    assert {s.eps for s in find_sites(zoo.tiny(name, **{EPS_NAMES[name]: 3e-3}))} == {3e-3}


def test_eps_is_measured_where_no_attribute_names_it(tiny):
    for site in find_sites(tiny("olmo")):
        assert site.eps == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 3e-3, 0.2])
@pytest.mark.parametrize("kind", [LN, RMS])
def test_eps_of_a_nameless_norm_is_measured(kind, eps):
    class Quiet(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.linspace(0.5, 2, 32))

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True) if kind == LN else x
            return self.gamma * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    model = zoo.tiny("gpt2")
    model.transformer.h[0].ln_1 = Quiet()
    site = find_sites(model)[0]
    assert (site.name, site.kind, site.gain, site.bias) == ("transformer.h.0.ln_1", kind, True, False)
    assert site.eps == pytest.approx(eps, rel=1e-2)


# --- behaviour, not names ------------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """Named like a LayerNorm; divides by the mean absolute value instead of the root mean square."""

    def __init__(self, d):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / x.abs().mean(-1, keepdim=True) + self.bias


class Foo(nn.Module):
    """A LayerNorm by another name, with a gain stored as an offset from one."""

    def __init__(self, d, epsilon=2e-4):
        super().__init__()
        self.a, self.b, self.epsilon = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.ones(d)), epsilon

    def forward(self, x):
        return (1 + self.a) * nn.functional.layer_norm(x, x.shape[-1:], eps=self.epsilon) + self.b


class Tanh(LayerNorm):
    def forward(self, x):
        return torch.tanh(self.weight * x) + self.bias


class Identity(LayerNorm):
    def forward(self, x):
        return self.weight * x + self.bias


@pytest.mark.parametrize("impostor", [LayerNorm, Tanh, Identity])
def test_a_module_that_only_looks_like_a_layernorm_is_not_found(impostor):
    model = zoo.tiny("gpt2")
    model.transformer.h[1].ln_2 = zoo.perturb(impostor(32))
    assert "transformer.h.1.ln_2" not in {s.name for s in find_sites(model)}
    assert len(find_sites(model)) == 4


def test_a_norm_is_found_whatever_its_class_is_called():
    model = zoo.tiny("llama")
    model.model.layers[1].input_layernorm = zoo.perturb(Foo(32))
    (site,) = [s for s in find_sites(model) if s.name == "model.layers.1.input_layernorm"]
    assert (site.kind, site.role, site.layer, site.eps) == (LN, "attention", 1, 2e-4)
    assert site.gain
    assert site.bias


def test_a_model_without_norms_is_refused():
    model = zoo.tiny("gpt2")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            model.set_submodule(name, LayerNorm(32))
    with pytest.raises(ModelError, match="no LayerNorm and no RMSNorm"):
        find_sites(model)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", torch.float16), ("llama", torch.bfloat16), ("olmo", torch.bfloat16)]
)
def test_half_precision_models_have_the_same_sites(name, dtype):
    model = zoo.tiny(name)
    before = [replace(site, dtype=str(dtype).removeprefix("torch.")) for site in find_sites(model)]
    assert find_sites(model.to(dtype)) == before


# --- what it leaves behind -----------------------------------------------------------------------------------------


def hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_no_hook_no_gradient_and_no_changed_weight_stays_behind():
    model = zoo.tiny("qwen3")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    find_sites(model, qk=True)
    assert hooks(model) == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_failing_forward_says_so_and_leaves_no_hook_behind():
    model = zoo.tiny("gpt2").train()
    model.transformer.h[1].mlp.c_fc = nn.Linear(7, 7)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel failed on the inputs .*pass inputs="):
        find_sites(model)
    assert hooks(model) == 0
    assert model.training


def test_offloaded_norms_are_refused_and_not_left_out():
    model = zoo.tiny("llama")
    accelerate.cpu_offload(model.model.layers[1], torch.device("cpu"))
    with pytest.raises(ModelError, match=r"layers.1.input_layernorm was left on the CPU or the disk.* more of them"):
        find_sites(model)


def test_training_mode_of_every_module_is_restored():
    model = zoo.tiny("gpt2").train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    find_sites(model)
    assert [m.training for m in model.modules()] == modes


def test_inputs_can_be_given(tiny):
    model = tiny("vit")
    assert find_sites(model, example_inputs(model, seed=3)) == find_sites(model)
    with pytest.raises(ModelError, match="pass inputs="):
        find_sites(model, {"pixel_values": torch.zeros(1, 3, 5, 5)})


# --- which layer ---------------------------------------------------------------------------------------------------


def test_a_norm_called_twice_in_a_layer_is_of_that_layer():
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, **ids,
    )  # fmt: skip
    found = [s for s in find_sites(Llama4ForCausalLM(config), qk=True) if s.role == "qk"]
    assert [(s.call, s.layer, s.heads) for s in found if s.layer] == [(0, 1, 4), (1, 1, 2), (0, 2, 4), (1, 2, 2)]


def test_a_norm_that_two_layers_share_is_of_the_layer_that_calls_it():
    model = zoo.tiny("llama", num_hidden_layers=3)
    model.model.layers[2].input_layernorm = model.model.layers[0].input_layernorm
    found = [s for s in find_sites(model) if s.name == "model.layers.0.input_layernorm"]
    assert [(s.call, s.layer) for s in found] == [(0, 0), (1, 2)]


def test_layers_in_groups_are_counted_as_they_run():
    model = zoo.tiny("albert", num_hidden_layers=4, num_hidden_groups=2)
    assert [s.layer for s in find_sites(model) if s.role == "post_mlp"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "roles"),
    [
        (RecurrentGemmaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, lru_width=32,
                              num_attention_heads=4, num_key_value_heads=1), {"mixer", "attention", "mlp", "final"}),
        (Lfm2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=0, bos_token_id=1,
                    eos_token_id=2), {"mixer", "attention", "mlp", "final"}),
    ],
)  # fmt: skip
def test_branches_that_mix_tokens_without_attention(config, roles):
    assert {s.role for s in find_sites(AutoModelForCausalLM.from_config(config))} == roles


@pytest.mark.parametrize("name", ["bamba", "jamba", "recurrent_gemma", "xlstm"])
def test_models_whose_caches_know_no_length_are_run_without_one(monkeypatch, name):
    """A cache of layers without attention cannot say how long it is."""
    giving_attention = ("attn_layer_indices", "attn_layer_period", "attn_layer_offset", "block_types", "qk_dim_factor")
    monkeypatch.setattr(shrinking, "RULES", [r for r in shrinking.RULES if r[0] not in giving_attention])
    sites = find_sites(zoo.by_type(name))
    assert [s.layer for s in sites if s.role == "mixer"] == [0, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma4_text", {"input_layernorm": "attention", "post_attention_layernorm": "post_attention",
                         "pre_feedforward_layernorm": "mlp", "post_feedforward_layernorm": "post_mlp",
                         "post_per_layer_input_norm": "post_mlp", "q_norm": "qk"}),
        ("gemma3n_text", {"input_layernorm": "parallel", "post_feedforward_layernorm": "post_mlp"}),
        ("modernbert", {"attn_norm": "attention", "mlp_norm": "mlp"}),
        ("t5gemma", {"pre_self_attn_layernorm": "attention", "post_self_attn_layernorm": "post_attention",
                     "pre_cross_attn_layernorm": "cross_attention", "pre_feedforward_layernorm": "mlp",
                     "post_cross_attn_layernorm": "post_cross_attention", "post_feedforward_layernorm": "post_mlp"}),
        ("encoder-decoder", {"transform.LayerNorm": "head", "embeddings.LayerNorm": "embedding",
                             "crossattention.output.LayerNorm": "post_cross_attention"}),
        ("swinv2", {"layernorm_before": "post_attention", "layernorm_after": "post_mlp"}),
        ("zamba2", {"shared_transformer.input_layernorm": "attention", "pre_ff_layernorm": "mlp",
                    "mamba_decoder.input_layernorm": "mixer"}),
        ("deepseek_v3", {"q_a_layernorm": "inner", "kv_a_layernorm": "inner", "input_layernorm": "attention",
                         "post_attention_layernorm": "mlp"}),
        ("jamba", {"dt_layernorm": "inner", "b_layernorm": "inner", "c_layernorm": "inner"}),
    ],
)  # fmt: skip
def test_roles_where_layers_have_more_than_two_branches_or_dropout_or_no_first_norm(name, expected):
    """Gemma's layers have a branch behind the MLP, T5Gemma's sums follow dropout, ModernBERT's first norm is none."""
    model = zoo.by_type(name)
    sites = find_sites(model, qk=True)
    for norm, role in expected.items():
        assert {site.role for site in sites if f".{site.name}".endswith(f".{norm}")} == {role}


# --- broken gains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("name", "norm"), [("gpt2", "transformer.h.1.ln_2"), ("gemma", "model.layers.1.input_layernorm")]
)
def test_a_norm_stays_one_with_a_gain_that_is_zero_or_not_finite(name, norm, value):
    model = zoo.tiny(name)
    whole = find_sites(model)
    for parameter in model.get_submodule(norm).parameters():
        nn.init.constant_(parameter, value)
    assert find_sites(model) == whole
    for parameter in model.get_submodule(norm).parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, value), equal_nan=True, rtol=0, atol=0)


def test_blocks_that_are_compiled_have_norms_too():
    """A compiled module is truthless: it has no length, and says so."""
    model, ids = zoo.tiny("gpt2"), np.random.default_rng(0).integers(3, 96, (4, 9))
    plain = measure_angles(model, ids, null=4, progress=False).frame
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    found = measure_angles(model, ids, null=4, progress=False).frame
    assert (found.site == "transformer.h.0._orig_mod.ln_1").any()
    pd.testing.assert_frame_equal(found.drop(columns="site"), plain.drop(columns="site"))
    assert len(convert(model).replaced) == 5


def test_a_list_of_embeddings_is_no_stack_of_layers():
    """Of MusicGen's codebooks there may be more than layers."""
    config = MusicgenDecoderConfig(
        vocab_size=32, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2, num_codebooks=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = MusicgenForCausalLM(config).eval()
    final = find_sites(model)[-1]
    assert (final.role, final.stack) == ("final", "model.decoder.layers")
    assert final.layer == len(model.model.decoder.layers)


def test_an_optimized_model_says_that_it_is(tiny):
    with pytest.raises(ConversionError, match="optimized"):
        find_sites(optimize(convert(tiny("gpt2")).model))
