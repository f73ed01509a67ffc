"""Models that are converted and saved like others, though a setting, a table or a cache of theirs is unusual."""

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
import zoo

from normgeo import compare, convert, decompress, find_gauge, find_sites, load_model, measure_angles, observe, optimize
from normgeo.conversion.checkpoint import save
from normgeo.conversion.checks import check_inputs
from normgeo.conversion.probing import float64_copy, outputs_of, tied
from normgeo.conversion.runs import convert_checkpoint
from normgeo.conversion.trainable import bake
from normgeo.converted import recenter_at
from normgeo.errors import ConversionError, DataError, ModelError
from normgeo.examples import example_inputs

CTRL = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4}
GPT_NEO = {
    "vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
    "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
    "max_position_embeddings": 64, "word_embed_proj_dim": 16,
}  # fmt: skip
HEADED = {
    hf.GPTJConfig: {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    hf.PhiConfig: zoo.SMALL | {"num_key_value_heads": 4, "num_labels": 3, "pad_token_id": 0},
}
NLLB_MOE = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_experts": 4,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64, "max_position_embeddings": 128,
    "decoder_start_token_id": 1,
}  # fmt: skip


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits.double()


def test_a_setting_that_another_class_would_lose_is_kept(tmp_path):
    """Clipped keys show only on inputs with large ones, as a first token's are."""
    model = zoo.tiny("olmo", clip_qkv=8.0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    inputs = {"input_ids": torch.tensor([[1, 5, 9, 30, 31, 77]])}
    with torch.no_grad():
        row = model.get_input_embeddings().weight[1]
        row -= row.mean()
        row *= 3 / row.std()
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight += 3 * row / row.norm()
    before = logits(model, inputs)
    model.config.clip_qkv = None
    assert (logits(model, inputs) - before).abs().max() > 1e-3 * before.abs().max()
    model.config.clip_qkv = 8.0
    save(convert(model), tmp_path / "out")
    torch.testing.assert_close(logits(load_model(tmp_path / "out"), inputs), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "config"),
    [(hf.CTRLLMHeadModel, hf.CTRLConfig(**CTRL)), (hf.GPTNeoForCausalLM, hf.GPTNeoConfig(**GPT_NEO))],
)
def test_what_is_loaded_again_is_equal(cls, config, tmp_path):
    """CTRL's positions are a buffer that says of itself it is not kept; GPT-Neo's sizes are none that Llama takes."""
    torch.manual_seed(0)
    model = zoo.perturb(cls(config).eval())
    save(convert(model), tmp_path / "out")
    inputs = example_inputs(model)
    torch.testing.assert_close(
        logits(load_model(tmp_path / "out"), inputs), logits(model, inputs), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("cls", "auto"),
    [
        (hf.GPTJForQuestionAnswering, hf.AutoModelForQuestionAnswering),
        (hf.PhiForSequenceClassification, hf.AutoModelForSequenceClassification),
    ],
)
def test_heads_that_are_put_on_what_a_configuration_names_are_loaded_again(cls, auto, tmp_path):
    """They look up by the configuration's class what that is, which of a converted model transformers does not know."""
    torch.manual_seed(0)
    model = zoo.perturb(cls(cls.config_class(**HEADED[cls.config_class])).eval())
    save(convert(model), tmp_path / "out")
    inputs = example_inputs(model)
    plain = auto.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(plain.config).model_type == f"normgeo_{model.config.model_type}"
    (expected, *_) = outputs_of(model, inputs)
    for loaded in (plain, load_model(tmp_path / "out")):
        torch.testing.assert_close(outputs_of(loaded, inputs)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_cache_that_is_a_list_is_no_output():
    assert convert(zoo.perturb(zoo.by_type("rwkv"))).certificate.passed


def test_weights_that_are_scaled_to_infer_are_saved_as_they_are_trained(tmp_path):
    """RWKV divides them by powers of two in its first pass, and where it is loaded again."""
    config = hf.RwkvConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4, context_length=32, rescale_every=1)
    rwkv = zoo.perturb(hf.RwkvForCausalLM(config).eval())
    conversion, ids = convert(rwkv), torch.randint(50, (2, 9))
    assert conversion.model.rwkv.layers_are_rescaled
    save(conversion, tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    expected = logits(rwkv, {"input_ids": ids})
    torch.testing.assert_close(logits(loaded, {"input_ids": ids}), expected, rtol=1e-4, atol=1e-5)
    assert conversion.model.rwkv.layers_are_rescaled


def test_a_norm_of_a_table_is_no_site():
    """DeBERTa's of its relative positions sees as many vectors as there are, whatever the text."""
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
    model = hf.DebertaV2Model(
        hf.DebertaV2Config(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, position_buckets=8, share_att_key=True,
            position_biased_input=False, type_vocab_size=0, **relative,
        )
    ).eval()  # fmt: skip
    tables = [measure_angles(model, torch.arange(n).remainder(50).view(-1, n)) for n in (16, 12)]
    for table in tables:
        assert set(table.frame.role) == {"embedding", "post_attention", "post_mlp"}
        assert "encoder.LayerNorm" not in set(table.frame.site)


def test_a_router_in_single_precision_is_converted():
    torch.manual_seed(0)
    model = zoo.perturb(hf.NllbMoeForConditionalGeneration(hf.NllbMoeConfig(**NLLB_MOE)).eval())
    assert convert(model).certificate.passed


def test_a_tie_inside_a_compressed_model_decompresses():
    torch.manual_seed(0)
    model = zoo.perturb(hf.OPTForCausalLM(hf.OPTConfig(**OPT)).eval())
    back = decompress(convert(model, "crmsnorm").model).model
    inputs = example_inputs(model)
    torch.testing.assert_close(logits(back, inputs), logits(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"trainable": True}, {"to": "crmsnorm"}], ids=str)
def test_a_norm_that_layers_share_is_replaced_in_all_of_them(options):
    model = zoo.tiny("gpt2")
    first, second = model.transformer.h
    second.ln_1 = first.ln_1
    converted = convert(model, **options).model.eval()
    first, second = converted.transformer.h
    assert second.ln_1 is first.ln_1
    inputs = example_inputs(model)
    torch.testing.assert_close(logits(converted, inputs), logits(model, inputs), rtol=1e-5, atol=1e-6)


def test_a_classifier_without_padding_is_converted_on_what_it_takes():
    """One text at a time, which only a user knows."""
    config = hf.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=3)
    torch.manual_seed(0)
    model = zoo.perturb(hf.GPT2ForSequenceClassification(config).eval())
    with pytest.raises(ModelError, match=r"batch sizes > 1 .*; in Python, pass inputs=\.\.\. that it accepts"):
        convert(model)
    ids = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(0))
    conversion = convert(model, inputs={"input_ids": ids})
    assert conversion.certificate.inputs == ("input_ids (1, 9)",)
    torch.testing.assert_close(logits(conversion.model, {"input_ids": ids}), logits(model, {"input_ids": ids}))


@torch.inference_mode()
def test_gradients_are_needed():
    with pytest.raises(ConversionError, match=r"torch\.inference_mode forbids: leave it first"):
        convert(zoo.tiny("gpt2"))


def test_a_gauge_is_found_where_gradients_are_off():
    model = zoo.tiny("gpt2")
    expected = find_gauge(model)
    with torch.no_grad():
        assert find_gauge(model) == expected
    assert expected.writers
    with torch.inference_mode(), pytest.raises(ModelError, match=r"torch\.inference_mode forbids: leave it first"):
        find_gauge(model)


def test_another_default_device_is_the_models_own_affair(ids):
    """As a script for one GPU sets it; here one on which nothing can be computed."""
    model = zoo.tiny("gpt2")
    conversion = convert(model)
    expected = measure_angles(model, ids, null=4, progress=False).frame
    recorded = []
    with torch.device("meta"):
        found = measure_angles(model, ids, null=4, progress=False).frame
        assert len(find_sites(model)) == len(find_gauge(model).sites)
        again = convert(model)
        assert optimize(copy.deepcopy(again.model)) is not None
        recorded.append(observe(model, ids, []))
        both = compare({"a": model, "b": again.model}, ids, null=4, progress=False)
    pd.testing.assert_frame_equal(found, expected)
    assert recorded == [ids.size]
    assert again.certificate.passed
    assert {p.device.type for p in again.model.parameters()} == {"cpu"}
    assert both is not None
    torch.testing.assert_close(
        again.model(torch.from_numpy(ids)).logits, conversion.model(torch.from_numpy(ids)).logits
    )


@pytest.mark.parametrize("name", ["mbart", "m2m_100", "gpt2"])
def test_a_tie_is_kept_though_one_of_its_tables_is_never_read(name, tmp_path):
    """BART's family ties a table that no input reaches, `model.shared`, to those of encoder, decoder and head."""
    model = zoo.perturb(zoo.by_type(name))
    conversion = convert(model, keep_tie=True)
    assert tied(conversion.model) == tied(model) != []
    save(conversion, tmp_path / "out")
    inputs = example_inputs(model)
    again = load_model(tmp_path / "out")
    torch.testing.assert_close(logits(again, inputs), logits(model, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("to", ["rmsnorm", "crmsnorm"])
@pytest.mark.parametrize("name", ["mbart", "m2m_100", "pegasus"])
def test_a_table_that_is_never_read_may_take_the_place_of_those_it_is_tied_to(name, to):
    """As resizing has it in BART's family, where `model.shared` becomes the encoder's and the decoder's."""
    model = zoo.perturb(zoo.by_type(name))
    converted, known = convert(model, to=to).model, model.get_input_embeddings().num_embeddings
    inputs = example_inputs(model, seed=4)
    mine = converted.get_input_embeddings()(inputs["input_ids"])
    torch.testing.assert_close(mine, converted.get_encoder().embed_tokens(inputs["input_ids"]))
    for one in (model, converted):
        one.resize_token_embeddings(known + 8, mean_resizing=False)
    a, b = (logits(one, inputs)[..., :known] for one in (model, converted))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_a_table_that_longer_sounds_have_made_anew_is_not_folded():
    """The inputs made up are as long as Speech2Text's positions; a user's may be longer."""
    config = hf.Speech2TextConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=96, input_feat_per_channel=8, conv_channels=32,
        max_source_positions=32, max_target_positions=32, pad_token_id=1, decoder_start_token_id=2, init_std=0.2,
    )  # fmt: skip
    model = zoo.perturb(hf.Speech2TextForConditionalGeneration(config).eval())
    converted = convert(model).model
    for frames in (64, 200, 64):  # longer ones change the table for good
        inputs = {"input_features": torch.randn(2, frames, 8), "decoder_input_ids": torch.tensor([[2, 5], [2, 9]])}
        torch.testing.assert_close(logits(converted, inputs), logits(model, inputs), rtol=1e-4, atol=1e-5)


def test_streams_without_a_writer_are_compressed():
    """In PatchTSMixer every mean is removed explicitly."""
    model = zoo.by_type("patchtsmixer")
    conversion = convert(model, "crmsnorm")
    assert conversion.certificate.passed
    assert not conversion.recipe["writers"]


def test_a_width_that_a_kernel_refuses_is_explained():
    model = zoo.by_type("cohere2_moe")
    with pytest.raises(ConversionError, match="compress with padded=True"):
        convert(model, "crmsnorm")
    assert convert(model, "crmsnorm", padded=True).certificate.passed


def test_what_is_optimized_is_not_converted_and_what_reads_its_own_states_is_not_optimized():
    with pytest.raises(ConversionError, match="is optimized, which is for inference"):
        convert(optimize(convert(zoo.tiny("gpt2")).model))
    deberta = zoo.by_type("deberta")
    with pytest.raises(ConversionError, match="reads the hidden states of its own layers"):
        optimize(convert(deberta).model)


def test_batches_to_certify_on():
    model = zoo.tiny("gpt2")
    ids = torch.randint(3, 90, (2, 9))
    with_loss = convert(model, certify_on=[{"input_ids": ids, "labels": ids}]).certificate
    plain = convert(model, certify_on=[{"input_ids": ids}]).certificate
    assert (with_loss.tokens, with_loss.perplexity_original) == (plain.tokens, plain.perplexity_original)
    assert plain.tokens == 16
    for wrong, received in (([ids], "Tensor"), ([{}], r"\{\}"), ([{"input_ids": [1, 2]}], r"\{input_ids\}")):
        with pytest.raises(ConversionError, match=f"dict of tensors by argument name.*received {received}$"):
            check_inputs(wrong)


def test_the_first_id_beyond_a_vocabulary_is_refused(tmp_path):
    np.save(tmp_path / "ids.npy", np.full((2, 8), 96))
    zoo.tiny("gpt2").save_pretrained(tmp_path / "model")
    with pytest.raises(DataError, match="token id 96 is beyond the model's vocabulary of 96"):
        convert_checkpoint(str(tmp_path / "model"), tmp_path / "out", data=str(tmp_path / "ids.npy"), n_tokens=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_mean_is_removed_in_single_precision_at_least(dtype, side):
    x = (100 + torch.randn(7, 33, generator=torch.Generator().manual_seed(0))).to(dtype)
    model = torch.nn.Sequential(torch.nn.Identity())
    recenter_at(model, "0", side)
    exact = (x.double() - x.double().mean(-1, keepdim=True)).to(dtype)
    torch.testing.assert_close(model(x), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_torch_makes_by_default_is_as_before(dtype):
    convert(zoo.tiny("gpt2").to(dtype))
    assert torch.get_default_dtype() is torch.float32


def test_compiled_models_that_recenter_elsewhere_are_not_taken_for_each_other():
    """torch.compile tells modules apart by their types, not by their hooks."""
    model = zoo.tiny("gpt2")
    inputs = {"input_ids": torch.randint(3, 90, (2, 9))}
    plain, trained = convert(model).model, convert(model, trainable=True).model
    for one in (plain, trained, copy.deepcopy(trained), pickle.loads(pickle.dumps(bake(trained))), plain):
        compiled = torch.compile(one, backend="eager")
        torch.testing.assert_close(logits(compiled, inputs), logits(model, inputs), rtol=1e-4, atol=1e-5)
    drop = trained.get_submodule("transformer.drop")
    assert isinstance(drop, torch.nn.Dropout)
    assert type(drop).__name__ == "Dropout"


def test_a_perplexity_is_of_what_follows_in_the_same_text():
    """Of one choice of several, and none where outputs are of other positions than the ids."""
    ids = torch.tensor([[[5, 6, 7, 8], [5, 9, 10, 11]]])
    double = zoo.perturb(hf.GPT2DoubleHeadsModel(zoo.tiny("gpt2").config).eval())
    certificate = convert(double, certify_on=[{"input_ids": ids}]).certificate
    logits = double(input_ids=ids).logits[0, :, :-1].double().log_softmax(-1)
    loss = -logits.gather(-1, ids[0, :, 1:, None]).mean().detach()
    assert certificate.tokens == 6
    assert certificate.perplexity_original == pytest.approx(float(loss.exp()), rel=1e-5)
    certificate = convert(
        zoo.tiny("gpt2"), certify_on=[{"input_ids": ids[0], "logits_to_keep": torch.tensor([2])}]
    ).certificate
    assert certificate.tokens == 0


class Scaled(torch.nn.Module):
    """A LayerNorm that calls its gain and bias otherwise."""

    def __init__(self, norm):
        super().__init__()
        self.scale, self.shift, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale + self.shift


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (33, 3)])
def test_a_gain_of_another_name_is_found_at_every_width(width, heads):
    model = zoo.tiny("gpt2", n_embd=width, n_head=heads)
    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)]:
        model.set_submodule(name, Scaled(norm))
    assert len(convert(model).replaced) == 5


class Single:
    """Of which there is one."""

    def __deepcopy__(self, memo):
        raise ValueError("cannot pickle it")


@pytest.mark.parametrize(
    ("where", "do", "held"),
    [
        ("final_layer_norm", find_sites, threading.Lock()), ("final_layer_norm", convert, threading.Lock()),
        ("layers.0", find_gauge, Single()), ("layers.0", convert, threading.Lock()),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_copied_is_one_error(where, do, held):
    model = zoo.tiny("gpt_neox")
    model.gpt_neox.get_submodule(where).held = held
    with pytest.raises(ModelError, match=r"(LayerNorm|ForCausalLM) cannot be copied, which this takes: cannot pickle"):
        do(model)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_stream_of_two_numbers_has_norms(name):
    narrow = {"n_embd": 2, "n_head": 1} if name == "gpt2" else {"hidden_size": 2, "num_attention_heads": 1}
    assert len(find_sites(zoo.tiny(name, **narrow))) == 5


def test_what_a_model_keeps_from_an_earlier_run_has_the_copy_s_precision():
    """Mimi's codebooks are computed in the first run and are no buffers."""
    mimi: Any = zoo.by_type("mimi")
    inputs = example_inputs(mimi)
    codes = mimi(**inputs).audio_codes
    assert len(codes.unique()) > 8
    kept = mimi.quantizer.semantic_residual_vector_quantizer.layers[0].codebook
    wide: Any = float64_copy(mimi)
    assert kept.embed.dtype is torch.float32
    assert wide(**{k: v.double() for k, v in inputs.items()}).audio_values.dtype is torch.float64
