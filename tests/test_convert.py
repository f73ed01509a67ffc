"""The mean gauge and the conversion: equal outputs for every architecture."""

import copy
import re

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils.prune import random_unstructured
from zoo import CONFIGS, perturb, tiny

from normgeo import convert, decompress, find_sites, load_model, load_tokenizer, load_tokens, measure_angles, optimize
from normgeo.conversion import convert as module
from normgeo.conversion.gauge import Reader, Shift, center, find_gauge
from normgeo.conversion.probing import float64_copy
from normgeo.conversion.tables import written_by_tables
from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs
from normgeo.tokens import TokenStream
from normgeo.training import train as training

PRE_LN = {
    "gpt2": (10, 5, 0), "gpt_neo": (10, 5, 0), "gptj": (7, 3, 0), "gpt_neox": (9, 5, 0), "opt": (10, 5, 0),
    "bloom": (9, 6, 1), "falcon": (5, 3, 0), "phi": (9, 3, 0), "stablelm": (5, 5, 0), "mpt": (5, 5, 0),
    "olmo": (5, 5, 0), "cohere": (5, 3, 0), "nemotron": (5, 5, 0), "vit": (12, 5, 0), "whisper": (23, 12, 1),
}  # fmt: skip
SINGLE_INSIDE = [
    "gpt_neo", "gpt_neox", "bloom", "falcon", "phi", "stablelm", "mpt", "olmo", "cohere", "nemotron",
]  # fmt: skip
"""Whose attention or norms compute in float32, whatever they are given."""
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
    assert conversion.certificate.single_inside is (name in SINGLE_INSIDE)
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


def test_a_decoder_with_cross_attention_is_equal_when_it_is_given_an_encoders_states():
    model = tiny("gpt2", add_cross_attention=True).double()
    inputs = {"input_ids": torch.arange(3, 15).view(2, 6), "encoder_hidden_states": torch.randn(2, 5, 32).double()}
    conversion = convert(model)
    assert len(conversion.replaced) == 7  # three in each of two layers
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        assert worst_error(model, conversion.model, given) < 1e-13
    assert worst_error(model, optimize(conversion.model), inputs) < 1e-13
    compressed = convert(model, to="crmsnorm").model
    for found in (compressed, decompress(compressed).model):
        assert worst_error(model, found, inputs) < 1e-13
    ids = np.arange(3, 67).reshape(4, 16)
    assert len(measure_angles(model, ids, null=4, progress=False).frame.site.unique()) == 5  # of text


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


def test_what_was_converted_in_part_is_not_converted_again():
    """The second recipe would be all that a checkpoint tells."""
    conversion = convert(tiny("albert"))
    with pytest.raises(ConversionError, match=r"is converted already, .* convert its original again, with --outputs"):
        convert(conversion.model)


def test_the_naive_swap_is_not_equal_and_says_so():
    conversion = convert(tiny("gpt2"), to="naive-rmsnorm")
    assert not conversion.certificate.passed
    assert conversion.certificate.error_rel > 1e-3
    assert len(conversion.replaced) == 5
    centered = tiny("gpt2", tie_word_embeddings=False).double()  # of which it would be equal
    for name, axis in find_gauge(centered).writers:
        center(centered.get_parameter(name), axis)
    certificate = convert(centered, to="naive-rmsnorm").certificate
    assert certificate.error_rel < certificate.tolerance
    assert not certificate.passed


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


class Scale(nn.Module):
    """LayerScale: an elementwise gain on what a branch writes."""

    def __init__(self, d, inner):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.linspace(0.2, 1.7, d))

    def forward(self, x):
        return self.inner(x) * self.gain


def test_layerscale_is_folded_into_what_it_scales():
    model = tiny("opt")
    for layer in model.model.decoder.layers:
        layer.fc2 = Scale(32, layer.fc2)
    gauge = find_gauge(model)
    assert set(gauge.scaled.values()) == {f"model.decoder.layers.{i}.fc2.gain" for i in range(2)}
    for options in ({}, {"to": "crmsnorm"}):
        conversion = convert(model, **options)
        assert conversion.recentered == ()
        assert not conversion.kept
        assert conversion.certificate.error_rel < 1e-14
        assert (conversion.model.model.decoder.layers[0].fc2.gain == 1).all()
    trained = convert(model, trainable=True)  # there the gain must stay free
    assert not (trained.model.model.decoder.layers[0].fc2.gain == 1).any()
    assert trained.certificate.passed


class ScaleTwice(Scale):
    """A gain that does not only scale what is written: it cannot be folded."""

    def forward(self, x):
        return super().forward(x * self.gain)


def test_a_gain_that_does_something_else_too_is_not_folded():
    model = tiny("opt")
    for layer in model.model.decoder.layers:
        layer.self_attn.out_proj = ScaleTwice(32, layer.self_attn.out_proj)
    assert not find_gauge(model).scaled
    conversion = convert(model)
    assert len(conversion.replaced) == 5
    assert len(conversion.recentered) == 2
    gains = [m.model.decoder.layers[0].self_attn.out_proj.gain for m in (model, conversion.model)]
    assert torch.equal(*gains)


@pytest.mark.parametrize("trainable", [False, True])
def test_gains_are_stored_as_the_original_stores_them(trainable):
    """Nemotron's as w of 1 + w: in training, decay is towards 1."""
    model = tiny("nemotron")
    norm = convert(model, trainable=trainable).model.model.norm
    assert norm.offset == 1.0
    assert torch.equal(norm.weight, model.model.norm.weight)


class Table(nn.Module):
    """Positions from a table in a buffer, cut off from the gradient; made anew for longer inputs, when asked to be."""

    def __init__(self, rows, d, grows):
        super().__init__()
        self.grows = grows
        self.register_buffer("table", self.made(rows, d), persistent=False)

    @staticmethod
    def made(rows, d):
        return torch.sin(torch.arange(rows)[:, None] * torch.linspace(0.1, 2, d)) + 0.5

    @torch.no_grad()
    def forward(self, ids):
        if self.grows and ids.shape[-1] > len(self.table):
            self.table = self.made(ids.shape[-1], self.table.shape[1]).to(self.table)
        return self.table[: ids.shape[-1]].detach()[ids.clamp(max=ids.shape[-1] - 1)]


@pytest.mark.parametrize("grows", [False, True])
def test_tables_are_folded_unless_the_model_makes_them_anew(grows):
    model = tiny("gpt2", n_positions=256)
    model.transformer.wpe = Table(24, 32, grows)
    conversion = convert(model)
    assert len(conversion.recentered) == grows
    assert conversion.recipe["tables"] == ([] if grows else ["transformer.wpe.table"])
    assert conversion.certificate.error_rel < 1e-14
    inputs = {"input_ids": example_inputs(model, 40 if grows else 20, seed=5)["input_ids"]}
    exact = copy.deepcopy(conversion.model).double()
    assert worst_error(float64_copy(model), exact, inputs) < 3e-6  # longer than the table, too


class Noted(Table):
    """One that goes by the longest input that it has noted, however long the table is."""

    longest = 24

    @torch.no_grad()
    def forward(self, ids):
        if ids.shape[-1] > self.longest:
            self.longest = ids.shape[-1]
            self.table = self.made(self.longest, self.table.shape[1]).to(self.table)
        return self.table[: ids.shape[-1]].detach()[ids.clamp(max=ids.shape[-1] - 1)]


class Bounded(Table):
    """One that takes no input that is longer than it was at first."""

    def forward(self, ids):
        if ids.shape[-1] > 24:
            raise ValueError("too long")
        return super().forward(ids)


@pytest.mark.parametrize("table", [Noted, Bounded])
def test_tables_that_are_made_anew_are_left_as_they_are_found(table):
    model = tiny("gpt2", n_positions=256)
    model.transformer.wpe = table(24, 32, True)
    model = float64_copy(model)
    inputs, before = example_inputs(model), model.transformer.wpe.table
    kept = before.clone()
    assert written_by_tables(model, find_sites(model, inputs), inputs) == []
    assert model.transformer.wpe.table is before
    assert torch.equal(before, kept)


def test_a_module_called_twice_is_no_place_to_recenter():
    """What is invisible in one of its calls and not in the other must stay as it is."""
    model = tiny("gpt2")
    shared = nn.Dropout(0.1).eval()
    for block in model.transformer.h:
        block.mlp.act = nn.Sequential(block.mlp.act, shared)
        block.mlp.dropout = shared
    conversion = convert(model, trainable=True)
    assert conversion.certificate.passed
    assert not any("mlp.dropout" in p.module or ".act" in p.module for p in conversion.recentered)


def test_a_conversion_that_is_not_equal_gives_no_model(monkeypatch):
    real = module.replace_norms

    def wrong(model, sites, norms):
        for spec in norms.values():
            spec["eps"] *= 1000
        real(model, sites, norms)

    monkeypatch.setattr(module, "replace_norms", wrong)
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


def test_norms_without_eps_are_converted():
    """Which give 0 / 0 for zeros."""
    model, ids = tiny("gpt2", layer_norm_epsilon=0.0), torch.arange(3, 17).view(2, 7)
    conversion = convert(model)
    assert {site.eps for site in conversion.replaced} == {0.0}
    assert worst_error(float64_copy(model), float64_copy(conversion.model), {"input_ids": ids}) < 1e-6


def test_hooks_on_norms_are_on_those_in_their_places():
    model, seen = tiny("gpt2"), []
    norm = model.transformer.h[0].ln_1
    norm.register_forward_hook(lambda module, given, out: seen.append("plain"))
    norm.register_forward_hook(lambda module, given, named, out: seen.append("named"), with_kwargs=True)
    norm.register_forward_pre_hook(lambda module, given: seen.append("before"))
    random_unstructured(norm, "weight", 0.3)  # a hook too, of a norm with other parameters
    converted, ids = convert(model).model, torch.arange(3, 9).view(1, 6)
    seen.clear()
    found = converted(ids).logits
    assert seen == ["before", "plain", "named"]
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["XLMRoberta", "Camembert", "Roberta"])
def test_a_head_that_comes_before_its_table_can_stay_tied(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(hf, f"{name}Config")(vocab_size=96, max_position_embeddings=64, pad_token_id=1, **sizes)
    model = perturb(getattr(hf, f"{name}ForMaskedLM")(config).eval())
    conversion = convert(model, keep_tie=True)
    assert conversion.recipe["heads"]
    ids = torch.arange(3, 17).view(2, 7)
    assert worst_error(float64_copy(model), float64_copy(conversion.model, tied=True), {"input_ids": ids}) < 1e-6
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = (m(input_ids=ids).logits for m in (conversion.model, model))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # which looks at the dtype, too


def test_what_keeps_a_head_from_staying_tied_is_named():
    """A folded gamma is in the head alone, and not in the embedding that it is tied to."""
    with pytest.raises(ConversionError, match="cannot stay tied: leave out fold_affine"):
        convert(tiny("gpt2"), keep_tie=True, fold_affine=True)


def test_a_certificate_is_of_text_from_anywhere_and_of_no_precision_of_the_callers():
    model, batches = tiny("gpt2"), [{"input_ids": torch.arange(3, 17).view(2, 7)}]
    expected = convert(model, certify_on=batches).certificate
    assert convert(model, certify_on=iter(batches)).certificate == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert convert(model, certify_on=batches).certificate == expected


def test_the_zoo_is_covered():
    assert set(PRE_LN) | set(RMS) | {"bert", "albert"} == set(CONFIGS)
