"""The mean gauge and the conversion: equal outputs for every architecture, and every sabotage noticed."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from zoo import CONFIGS, tiny

from normgeo import conversion as module
from normgeo import convert, find_sites, load_model, load_tokenizer, load_tokens, training
from normgeo.certify import certificate_inputs, certify
from normgeo.errors import ConversionError, ModelError
from normgeo.gauge import Reader, Shift, center, find_gauge
from normgeo.models import example_inputs
from normgeo.probing import float64_copy
from normgeo.tokens import TokenStream

PRE_LN = {
    "gpt2": (10, 5, 0), "gpt_neo": (10, 5, 0), "gptj": (7, 3, 0), "gpt_neox": (9, 5, 0), "opt": (10, 5, 0),
    "bloom": (9, 6, 1), "falcon": (5, 3, 0), "phi": (9, 3, 0), "stablelm": (5, 5, 0), "mpt": (5, 5, 0),
    "olmo": (5, 5, 0), "cohere": (5, 3, 0), "nemotron": (5, 5, 0), "vit": (12, 5, 0), "whisper": (23, 12, 1),
}  # fmt: skip
RMS = ["llama", "mistral", "qwen3", "gemma", "gemma2", "t5", "olmo2"]


def worst_error(a, b, inputs):
    """Independent of the certificate: largest difference of any output relative to its largest value, in float64."""
    inputs = {k: v.to(a.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        x, y = a(**inputs), b(**inputs)
    pairs = [(v, y[k]) for k, v in x.items() if isinstance(v, torch.Tensor)]
    return max(((p - q).abs().max() / p.abs().max()).item() for p, q in pairs)


@pytest.mark.parametrize("name", PRE_LN)
def test_pre_ln_models_convert_with_equal_outputs(name):
    model = tiny(name)
    before = copy.deepcopy(model.state_dict())
    writers, replaced, recentered = PRE_LN[name]
    assert len(find_gauge(model).writers) == writers
    conversion = convert(model)
    assert len(conversion.replaced) == replaced
    assert len(conversion.recentered) == recentered
    assert not conversion.kept
    assert conversion.certificate.passed
    assert {s.kind for s in find_sites(conversion.model)} == {"rmsnorm"}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    inputs = example_inputs(model, 11, seed=5)
    error = worst_error(float64_copy(model), copy.deepcopy(conversion.model).double(), inputs)
    assert error < 3e-6  # the converted weights were cast to float32
    own, original = worst_error(conversion.model, model, inputs), conversion.certificate.original_error
    assert own < 10 * original + 1e-6


@pytest.mark.parametrize("name", ["gpt2", "bloom", "vit", "gpt_neox"])
def test_float64_conversions_are_equal_to_rounding(name):
    model = tiny(name).double()
    conversion = convert(model)
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < 1e-14
    assert conversion.certificate.error_rel < 1e-14


@pytest.mark.parametrize("name", RMS)
def test_rmsnorm_models_are_refused_and_have_no_gauge(name):
    model = tiny(name)
    assert find_gauge(model).writers == ()
    with pytest.raises(ConversionError, match="has no LayerNorm"):
        convert(model)


def test_post_ln_models_convert_with_one_explicit_recenter_a_norm():
    conversion = convert(tiny("bert"))
    assert len(conversion.replaced) == 5
    assert not conversion.kept
    assert {(p.side, p.argument) for p in conversion.recentered} == {("input", 1)}  # the residual, appendix B
    assert len(conversion.recentered) == 4
    assert [s.role for s in conversion.untouched] == ["head"]


def test_norms_whose_streams_are_read_raw_are_kept_and_the_reader_is_named():
    conversion = convert(tiny("albert"))
    assert [s.role for s in conversion.replaced] == ["embedding"]
    assert len(conversion.kept) == 4
    assert all(re.search("(query|ffn)( |,).*as well", reason) for reason in conversion.kept.values())


def test_the_naive_swap_is_not_equal_and_says_so():
    conversion = convert(tiny("gpt2"), to="naive-rmsnorm")
    assert not conversion.certificate.passed
    assert conversion.certificate.error_rel > 1e-3
    assert len(conversion.replaced) == 5


def test_odd_eps_gains_and_missing_biases_survive():
    model = tiny("gpt2", layer_norm_epsilon=3e-2)
    conversion = convert(model)
    assert {s.eps for s in conversion.replaced} == {3e-2}
    assert conversion.certificate.error_rel < 1e-13
    assert all(not s.bias for s in convert(tiny("mpt")).replaced)
    assert all(not s.gain for s in convert(tiny("olmo")).replaced)
    assert torch.equal(conversion.model.transformer.ln_f.weight, model.transformer.ln_f.weight)


def test_readers_are_told_from_writers():
    gauge = find_gauge(tiny("olmo"))
    assert Reader("model.layers.0.self_attn.q_proj.weight", 1, "model.layers.0.input_layernorm") in gauge.readers
    assert Shift("model.layers.0.self_attn.o_proj.weight", 0) in gauge.writers
    assert not {r[:2] for r in gauge.readers} & set(gauge.writers)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "vit", "bloom"])
def test_every_writer_is_invisible_and_moves_a_mean(name):
    model = float64_copy(tiny(name))
    inputs = example_inputs(model)
    for shift in find_gauge(model).writers:
        moved = copy.deepcopy(model)
        parameter = dict(moved.named_parameters())[shift.parameter]
        with torch.no_grad():
            parameter += 0.7 * torch.randn_like(parameter.mean(shift.axis, keepdim=True))
        assert worst_error(model, moved, inputs) < 1e-11, shift


def sabotaged(kind):
    """A GPT-2, and a conversion of it with one thing wrong."""
    model = tiny("gpt2")
    conversion = convert(model)
    bad = copy.deepcopy(conversion.model).double()
    with torch.no_grad():
        if kind == "a writer that is not centered":
            bad.transformer.h[0].mlp.c_proj.weight += 0.1
        elif kind == "a wrong eps":
            bad.transformer.h[1].ln_1.eps = 1e-2
        elif kind == "a bias dropped":
            bad.transformer.h[1].ln_2.bias.zero_()
        elif kind == "a head that stayed tied":
            bad.lm_head.weight = bad.transformer.wte.weight
        elif kind == "a gain forgotten":
            bad.transformer.ln_f.weight.fill_(1.0)
    return model, conversion.model, bad


@pytest.mark.parametrize(
    "kind",
    ["a writer that is not centered", "a wrong eps", "a bias dropped", "a head that stayed tied", "a gain forgotten"],
)
def test_the_certificate_fails_on_a_sabotaged_conversion(kind):
    model, converted, bad = sabotaged(kind)
    counts = {"replaced": 5, "kept": 0, "untouched": 0, "recentered": 0}
    args = (model, converted, certificate_inputs(model))
    certificate = certify(float64_copy(model), bad, *args, site_mean=0.0, counts=counts)
    assert not certificate.passed
    good = copy.deepcopy(converted).double()
    assert certify(float64_copy(model), good, *args, site_mean=0.0, counts=counts).error_rel < 1e-6


def test_centering_the_embedding_of_an_rmsnorm_model_changes_it():
    model = float64_copy(tiny("llama"))
    bad = copy.deepcopy(model)
    center(bad.model.embed_tokens.weight, 1)
    assert worst_error(model, bad, example_inputs(model)) > 1e-3


def test_a_conversion_that_is_not_equal_gives_no_model(monkeypatch):
    real = module._replace

    def wrong(model, sites, recipe):
        for spec in recipe["norms"].values():
            spec["eps"] *= 1000
        real(model, sites, recipe)

    monkeypatch.setattr(module, "_replace", wrong)
    with pytest.raises(ConversionError, match="not equal to its original"):
        convert(tiny("gpt2", layer_norm_epsilon=1e-3))


def test_nan_and_random_outputs_are_refused():
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        convert(model)

    class Noisy(nn.Dropout):
        def forward(self, x):
            return x + 0.1 * torch.randn_like(x)

    model = tiny("gpt2")
    model.transformer.drop = Noisy()
    with pytest.raises(ModelError, match="other outputs each time"):
        convert(model)
    with pytest.raises(ConversionError, match="crmsnorm or naive-rmsnorm"):
        convert(tiny("gpt2"), to="batchnorm")


def test_half_precision_is_converted_through_float64():
    model = tiny("gpt2").to(torch.bfloat16)
    conversion = convert(model)
    assert conversion.model.dtype == torch.bfloat16
    assert conversion.certificate.error_rel < 1e-13
    assert conversion.certificate.own_error < 3 * conversion.certificate.original_error + 1e-2


def test_the_embedded_model_keeps_its_loss():
    model, tokenizer = load_model("embedded-layernorm"), load_tokenizer("embedded-layernorm")
    rows = [b.ids for b in load_tokens("sample", tokenizer, 128).batches(20 * 128, 20)]
    tokens = TokenStream.from_array(np.concatenate(rows))
    original = training.evaluate(model, tokens)
    assert abs(training.evaluate(convert(model).model, tokens) - original) < 1e-5
    assert abs(training.evaluate(convert(model, to="naive-rmsnorm").model, tokens) - original) > 1e-5


def test_the_zoo_is_covered():
    assert set(PRE_LN) | set(RMS) | {"bert", "albert"} == set(CONFIGS)
