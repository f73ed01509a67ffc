"""Inputs that reach what writes into a stream, and certificates that name what none reached."""

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import nn
from transformers.pytorch_utils import Conv1D

from normgeo import convert, find_gauge
from normgeo.conversion import shallow
from normgeo.conversion.probing import float64_copy, outputs_of
from normgeo.conversion.reaching import reaching_inputs, shows_shifts, without_effect
from normgeo.errors import ConversionError, ModelError, NormGeoError
from normgeo.examples import example_inputs


def test_a_kind_of_token_that_has_the_id_of_padding_writes_as_others_do():
    """The inputs have tokens of kind 0 alone, to whose row torch gives no gradient."""
    layers = dict.fromkeys(("l_layers", "x_layers", "r_layers"), 1)
    small = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = hf.LxmertConfig(**small, **layers, visual_feat_dim=8, max_position_embeddings=32)
    model = zoo.perturb(hf.LxmertModel(config).eval()).double()
    seen = {"visual_feats": torch.randn(1, 4, 8).double(), "visual_pos": torch.rand(1, 4, 4).double()}
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert (
        worst(convert(model), model, {"input_ids": torch.randint(1, 50, (1, 6)), "token_type_ids": kinds} | seen)
        < 1e-12
    )


def worst(conversion, model, inputs):
    """The largest relative error of the conversion in float64, the models' own code aside."""
    with torch.no_grad():
        pairs = zip(outputs_of(model, inputs), outputs_of(conversion.model, inputs), strict=True)
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "main"),
    [
        ("aya_vision", "pixel_values"), ("cohere2_vision", "pixel_values"), ("fuyu", "pixel_values"),
        ("llava", "pixel_values"), ("qwen2_vl", "image_grid_thw"), ("audioflamingo3", "input_features"),
        ("dinov3_vit", "bool_masked_pos"), ("musicgen", "encoder_hidden_states"),
        ("musicgen_melody", "encoder_hidden_states"), ("internvl", "pixel_values"), ("gemma3", "pixel_values"),
        ("llava_next", "image_sizes"), ("aria", "pixel_values"), ("colqwen2", "image_grid_thw"),
        ("deepseek_vl_hybrid", "high_res_pixel_values"), ("video_llava", "pixel_values_videos"),
        ("qwen2_5_omni_thinker", "feature_attention_mask"), ("voxtral", "input_features"),
        ("qwen3_omni_moe_thinker", "feature_attention_mask"), ("qwen3_asr", "input_features_mask"),
        ("qwen2_audio", "input_features"), ("minicpmv4_6", "target_sizes"),
    ],
)  # fmt: skip
def test_what_reads_more_than_its_main_input_is_equal_there_too(name, main):
    model: Any = float64_copy(zoo.perturb(zoo.by_type(name)), tied=True)
    assert main not in example_inputs(model)
    inputs = reaching_inputs(model, seed=5)  # other values than the conversion saw
    assert main in inputs
    conversion = convert(model)
    assert any(main in shapes for shapes in conversion.certificate.inputs)
    assert worst(conversion, model, inputs) <= conversion.certificate.tolerance


def test_an_image_that_a_model_is_always_given_has_a_place_in_the_text():
    """BLIP-2 takes text with an image and without one: what an image becomes writes into the stream of its OPT."""
    inner = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {"model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
    config = hf.Blip2Config(
        vision_config=inner | {"image_size": 16, "patch_size": 8}, qformer_config=inner | {"encoder_hidden_size": 32},
        text_config=text | inner | {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        num_query_tokens=4, image_token_index=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = float64_copy(zoo.perturb(hf.Blip2ForConditionalGeneration(config).eval()), tied=True)
    conversion = convert(model)
    assert conversion.certificate.unreached == ()
    ids = torch.tensor([[5, 5, 5, 5, 9, 10, 11]])
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert worst(conversion, model, {"input_ids": ids, "pixel_values": image}) <= conversion.certificate.tolerance


def test_a_norm_that_no_output_depends_on_stays_and_counts_as_beside_the_model():
    """SigLIP's pooling head runs and is not read when images are classified; compressed, its width would not fit."""
    config = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    model: Any = zoo.perturb(hf.SiglipForImageClassification(hf.SiglipConfig(vision_config=config)).eval())
    conversion = convert(model)
    assert [site.name for site in conversion.untouched] == ["vision_model.head.layernorm"]
    assert (len(conversion.replaced), conversion.kept) == (5, {})
    assert "vision_model.head.probe" in conversion.certificate.unreached
    pixels = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(conversion.model(pixels).logits, model(pixels).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConversionError, match=r"head\.layernorm: no output depends on it"):
        convert(model, to="crmsnorm")
    assert find_gauge(model.vision_model).idle == ()  # there its output is the model's


def test_mask_tokens_and_images_are_converted_with_the_rest():
    """Made by hand, as a user would: nothing here comes from the code that is tested."""
    torch.manual_seed(0)
    config = hf.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14)
    model: Any = zoo.perturb(hf.Dinov2Model(config).eval())
    conversion = convert(model)
    pixels, masked = torch.randn(2, 3, 28, 28), torch.tensor([[True, False, False, True]] * 2)
    with torch.no_grad():
        a = model(pixels, bool_masked_pos=masked).last_hidden_state
        b = conversion.model(pixels, bool_masked_pos=masked).last_hidden_state
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not conversion.certificate.unreached


def test_what_no_input_reaches_is_named():
    """wav2vec2 replaces masked frames by a vector while it trains: for those the certificate says nothing."""
    conversion = convert(zoo.by_type("wav2vec2"))
    assert conversion.certificate.passed
    assert conversion.certificate.unreached == ("wav2vec2.masked_spec_embed",)
    assert "passed, on what its inputs reach\n" in conversion.certificate.table()
    assert "unreached" in conversion.certificate.table()
    assert "1: wav2vec2.masked_spec_embed" in conversion.certificate.table()
    assert "unreached" not in convert(zoo.by_type("gpt2")).certificate.table()


def test_inputs_that_reach_less_are_not_certified_for_more():
    model = zoo.by_type("fuyu")
    text = example_inputs(model)
    writers = ("model.vision_embed_tokens.weight", "model.vision_embed_tokens.bias")
    assert find_gauge(model, text).unreached == writers
    assert find_gauge(model).unreached == ()
    # the certificate compares an image as well
    with pytest.raises(ConversionError, match=r"inputs= did not reach 2: model\.vision_embed_tokens\.weight"):
        convert(model, inputs=text)


def test_a_tied_copy_is_reached_through_its_twin():
    assert find_gauge(zoo.by_type("bart")).unreached == ()  # model.shared is the encoder's and the decoder's table


def test_gradients_of_padding_are_refused_and_not_misread():
    model = zoo.by_type("longformer")
    short = {"input_ids": torch.randint(3, 90, (2, 7))}
    with pytest.raises(ModelError, match="NaN or infinite gradients"):
        find_gauge(model, short)
    conversion = convert(model)  # a whole window needs no padding
    assert not conversion.kept
    assert worst(conversion, model, short) < 1e-4


def test_a_model_in_training_mode_is_compared_as_it_is_used_and_left_as_it_was():
    torch.manual_seed(0)
    model: Any = zoo.tiny("gpt2").train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    certificate = convert(model).certificate
    assert certificate.own_error < 1e-4
    assert certificate.original_error < 1e-4
    assert [module.training for module in model.modules()] == modes


class Routed(hf.PreTrainedModel):
    """One layer of experts; the token's id says which it goes to."""

    config_class = hf.GPT2Config
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.table, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.norm, self.final = nn.LayerNorm(32), nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(48))

    def forward(self, input_ids, return_dict=True):
        x = self.table(input_ids)
        y, out = self.norm(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (mine := input_ids % 48 == i).any():
                out[mine] = expert(y[mine])
        return {"logits": self.head(self.final(x + out))}


@pytest.mark.parametrize("to", ["rmsnorm", "crmsnorm"])
def test_experts_that_no_token_reached_are_converted_as_those_beside_them(to):
    torch.manual_seed(0)
    model = zoo.perturb(Routed(hf.GPT2Config(vocab_size=96)).double().eval())
    conversion = convert(model, to)
    unreached = {name.split(".")[1] for name in conversion.certificate.unreached}
    assert 1 < len(unreached) < 48
    ids = {"input_ids": torch.tensor([[int(i) for i in sorted(unreached)]])}
    assert worst(conversion, model, ids) < 1e-14


@pytest.mark.parametrize("padded", [True, False])
def test_experts_that_only_made_up_weights_route_to_are_compressed_as_those_beside_them(padded):
    """A gauge is found with moved weights, or with other ones, by which routers choose others."""
    model = zoo.perturb(Routed(hf.GPT2Config(vocab_size=96)).double().eval())
    ids = torch.arange(96).view(4, 24)
    gauge = find_gauge(model, {"input_ids": ids})
    assert not gauge.unreached
    conversion = convert(model, "crmsnorm", inputs={"input_ids": ids[:, :6]}, padded=padded, gauge=gauge)
    assert worst(conversion, model, {"input_ids": ids}) < 1e-14


def test_experts_beside_which_others_do_different_things_are_left_alone():
    model = Routed(hf.GPT2Config(vocab_size=96))
    for expert in model.experts[1::2]:
        expert[2] = Conv1D(32, 48)  # whose weight has its axes the other way round
    gauge = find_gauge(zoo.perturb(model.double().eval()))
    unreached = {name for name in gauge.unreached if name.endswith("2.weight")}
    assert unreached
    assert not unreached & {shift.parameter for shift in gauge.writers}


class Two(hf.PreTrainedModel):
    config_class = hf.GPT2Config

    def __init__(self, config):
        super().__init__(config)
        self.used, self.idle, self.gated = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, input_ids, return_dict=True):
        return {
            "logits": self.used * input_ids[..., None].to(self.used.dtype) + self.gated * (input_ids > 50)[..., None]
        }


def test_effects_are_found_one_by_one_and_values_put_back():
    model = Two(hf.GPT2Config()).double()
    before = {name: p.clone() for name, p in model.named_parameters()}
    small, large = {"input_ids": torch.tensor([[1, 2]])}, {"input_ids": torch.tensor([[60, 2]])}
    assert without_effect(model, ["used", "idle", "gated"], [small]) == ("idle", "gated")
    assert without_effect(model, ["used", "idle", "gated"], [small, large]) == ("idle",)
    assert without_effect(model, [], [small]) == ()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_shifts_are_put_back_though_they_are_two_of_one_matrix():
    model = float64_copy(zoo.tiny("gpt2"))
    before, name = {name: p.clone() for name, p in model.named_parameters()}, "transformer.h.0.attn.c_proj.weight"
    shows_shifts(model, [(name, 0), (name, 1)], example_inputs(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_inputs_of_a_large_model_are_those_that_are_given(monkeypatch):
    monkeypatch.setattr("normgeo.conversion.convert.LARGE", 0)
    given, find = [], shallow.find_gauge
    monkeypatch.setattr(
        shallow, "find_gauge", lambda model, inputs=None, **k: given.append(inputs) or find(model, inputs)
    )
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert convert(zoo.tiny("gpt2"), inputs={"input_ids": ids}).certificate.passed
    assert [list(inputs) for inputs in given] == [["input_ids"]]
    assert torch.equal(given[0]["input_ids"], ids)
    with pytest.raises(NormGeoError, match="no_such_input"):
        shallow.gauge_of(zoo.tiny("gpt2"), {"no_such_input": torch.ones(1)})


class Shifted(nn.RMSNorm):
    """An RMSNorm whose parameters have the names and sizes of a LayerNorm's."""

    def __init__(self):
        super().__init__(32, 1e-5)
        self.bias = nn.Parameter(torch.full((32,), 0.1))

    def forward(self, x):
        return super().forward(x) + self.bias


@pytest.mark.parametrize("change", ["cut", "rmsnorm"])
def test_a_large_model_that_was_changed_is_looked_at_itself(change, monkeypatch):
    model = zoo.tiny("gpt2")
    if change == "cut":
        model.transformer.h = model.transformer.h[:1]
    else:
        model.transformer.h[1].ln_2 = Shifted()
    expected = convert(model)
    monkeypatch.setattr("normgeo.conversion.convert.LARGE", 0)
    found = convert(model)
    assert found.certificate.passed
    assert found.replaced == expected.replaced
