"""CRMSNorm and folding: equal outputs in fewer numbers, and back."""

import copy
import functools

import pytest
import torch
import transformers as hf
from test_convert import PRE_LN, SINGLE_INSIDE, Scale, worst_error
from zoo import fresh, perturb, tiny

from normgeo import convert, decompress, load_model, optimize
from normgeo.conversion import compression, runs
from normgeo.conversion.checkpoint import save
from normgeo.conversion.probing import outputs_of, tied
from normgeo.converted import TiedHead
from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs
from normgeo.norms import CRMSNorm, RMSNorm


def rounding(name):
    return 3e-6 if name in SINGLE_INSIDE else 3e-15


def converted(name, **options):
    model = tiny(name).double()
    return model, convert(model, **options)


@functools.cache
def compressed(name, padded):
    """A model and its conversion, which tests leave as they are."""
    return converted(name, to="crmsnorm", padded=padded)


def test_how_many_numbers_a_conversion_has_is_said():
    """A tied head comes loose; what is compressed is smaller than the model with a head of its own."""
    model = tiny("gpt2")
    before, head = (sum(p.numel() for p in part.parameters()) for part in (model, model.lm_head))
    loose = f"the head is no longer tied to the embedding: {before + head:,} parameters; --keep-tie keeps {before:,}"
    assert runs._sizes(model, convert(model).model) == [loose]
    small = convert(model, to="crmsnorm").model
    after = sum(p.numel() for p in small.parameters())
    assert after < before + head
    said = f"streams of 31 numbers for 32: {after:,} parameters, for {before + head:,} before"
    assert runs._sizes(model, small) == [loose, said]
    assert runs._sizes(model, convert(model, to="crmsnorm", padded=True).model) == [loose]
    assert runs._sizes(model, convert(model, keep_tie=True).model) == []


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", PRE_LN)
def test_crmsnorm_gives_equal_outputs(name, padded):
    model, conversion = compressed(name, padded)
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < rounding(name)
    norms = [m for m in conversion.model.modules() if isinstance(m, (RMSNorm, CRMSNorm))]
    assert norms
    assert all(isinstance(m, CRMSNorm) for m in norms)
    assert {m.d for m in norms} == {32 if padded else 31}
    streams = []
    hooks = [m.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for m in norms]
    conversion.model(**example_inputs(model))
    assert all(h.remove() is None for h in hooks)
    if padded:
        assert all((x[..., -1] == 0).all() for x in streams)
    assert all(x.shape[-1] == (32 if padded else 31) for x in streams)


def test_crmsnorm_needs_fewer_parameters():
    _, conversion = converted("opt", to="crmsnorm")
    small = conversion.model
    assert small.model.decoder.layers[0].fc1.weight.shape == (64, 31)
    assert small.model.decoder.layers[0].fc2.weight.shape == (31, 64)
    assert small.model.decoder.layers[0].self_attn.q_proj.weight.shape == (32, 31)
    assert small.model.decoder.embed_tokens.weight.shape == (96, 31)
    assert small.lm_head.weight.shape == (96, 31)
    assert small.lm_head.in_features == 31


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_in_half_precision_writers_keep_the_sums_that_stand_for_what_was_dropped(axis, dtype):
    table = (0.02 * torch.randn(3000, 1024, generator=torch.Generator().manual_seed(0))).to(dtype).double()
    table[5] = 0.0
    exact = table - table.mean(1, keepdim=True)
    exact[:, -1] = 0.0  # as where streams are padded
    exact = exact.movedim(1, axis)
    kept = compression.rounded(exact, axis, dtype)
    assert kept.dtype == dtype
    assert kept.shape == exact.shape
    step = torch.finfo(dtype).eps * exact.abs().max()  # of the largest number
    assert ((kept.double() - exact).sum(axis)).abs().max() <= step / 2
    assert ((exact.to(dtype).double() - exact).sum(axis)).abs().max() > 30 * step  # what rounding alone does
    assert (kept.double() - exact).abs().max() <= step
    squares = [(found.double() - exact).square().mean() for found in (kept, exact.to(dtype))]
    assert squares[0] < 1.3 * squares[1]  # 1.14 where those nearest the middle go to the other side, else 2.1
    assert not kept.movedim(axis, 1)[:, -1].any()
    assert not kept.movedim(axis, 1)[5].any()


@pytest.mark.parametrize(("dtype", "padded"), [(torch.float16, False), (torch.bfloat16, True)], ids=str)
def test_in_half_precision_crmsnorm_is_off_by_little_more_than_its_original(dtype, padded):
    shape = {"hidden_size": 1024, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = perturb(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**shape, vocab_size=96))).eval().to(dtype)
    certificate = convert(model, to="crmsnorm", padded=padded).certificate
    assert certificate.own_error < 2 * certificate.original_error  # 1.1 to 1.4 times; 2.5 to 4 by rounding alone


@pytest.mark.parametrize("name", [n for n in PRE_LN if n != "whisper"])
def test_gamma_and_beta_fold_into_the_readers(name):
    model, conversion = converted(name, fold_affine=True)
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < rounding(name)
    left = [n for n, m in conversion.model.named_modules() if isinstance(m, RMSNorm) and m.weight is not None]
    assert left == (["transformer.word_embeddings_layernorm"] if name == "bloom" else [])


@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("kept", [set(), {0}, {2, 3}, {4}, {0, 1, 2, 3, 4}], ids=str)
def test_norms_are_folded_together_and_those_that_cannot_be_are_told_apart(kept, at_once, monkeypatch):
    names = [f"transformer.h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)] + ["transformer.ln_f"]
    read, passes, asked = compression._reads_all, [], compression.outputs_of
    monkeypatch.setattr(compression, "PORTIONS", at_once)
    monkeypatch.setattr(compression, "outputs_of", lambda *given: (passes.append(1), asked(*given))[1])
    monkeypatch.setattr(
        compression, "_reads_all",
        lambda exact, norms, *given: read(exact, norms, *given) and not {name for name, _ in norms} & stay,
    )  # fmt: skip
    stay = {names[i] for i in kept}
    model, conversion = converted("gpt2", fold_affine=True)
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < 3e-15
    left = [n for n, m in conversion.model.named_modules() if isinstance(m, RMSNorm) and m.weight is not None]
    assert left == [name for name in names if name in stay]
    if not kept:
        assert len(passes) == (3 if at_once == 1 else 11)


def test_a_norm_that_the_user_reads_keeps_its_gain():
    """The base model gives the final norm's output itself: there is no reader to fold into."""
    base = tiny("gpt_neox").gpt_neox.double()
    conversion = convert(base, to="crmsnorm")
    assert worst_error(base, conversion.model, example_inputs(base, 9, seed=3)) < 1e-14
    assert conversion.model.final_layer_norm.weight is not None
    assert conversion.model.final_layer_norm.expand
    assert conversion.model.layers[0].input_layernorm.weight is None


def test_a_forward_that_relies_on_the_width_is_refused_and_pads():
    base = tiny("gpt2").transformer.double()
    with pytest.raises(ConversionError, match=r"padded=True \(RuntimeError: shape '\["):  # the width, not its float64
        convert(base, to="crmsnorm")
    conversion = convert(base, to="crmsnorm", padded=True)
    assert worst_error(base, conversion.model, example_inputs(base, 9, seed=3)) < 1e-14


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*PRE_LN, "bert"])
def test_decompress_turns_it_back(name, padded):
    model, conversion = compressed(name, padded)
    back = decompress(conversion.model)
    assert worst_error(model, back.model, example_inputs(model, 9, seed=3)) < rounding(name)
    norms = [m for m in back.model.modules() if isinstance(m, (RMSNorm, CRMSNorm))]
    assert norms
    assert all(isinstance(m, RMSNorm) and m.d == 32 for m in norms)
    assert len(back.recentered) == len(conversion.recentered)
    with pytest.raises(ConversionError, match="not compressed"):
        decompress(back.model)


@pytest.mark.parametrize("training", [False, True])
def test_a_decompressed_model_is_used_as_the_compressed_one_was(training):
    model = convert(tiny("gpt2"), to="crmsnorm").model.train(training)
    model.config.use_cache = True
    model.transformer.wpe.weight.requires_grad_(False)
    back = decompress(model)
    assert back.model.training is training
    assert back.model.config.use_cache is True
    assert {p.dtype for p in back.model.parameters()} == {torch.float32}
    assert not back.model.transformer.wpe.weight.requires_grad
    assert back.model.lm_head.weight.requires_grad
    assert not back.certificate.headless  # gamma and beta of the last norm are in the head


def test_what_layerscale_scales_decompresses():
    model = tiny("opt").double()
    for layer in model.model.decoder.layers:
        layer.fc2 = Scale(32, layer.fc2).double()
    small = convert(model, to="crmsnorm").model
    assert small.model.decoder.layers[0].fc2.gain.shape == (31,)
    assert worst_error(model, decompress(small).model, example_inputs(model, 9, seed=3)) < 1e-14


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"), [("cohere", {"use_qk_norm": True}), ("phi", {"qk_layernorm": True})], ids=["cohere", "phi"]
)
def test_norms_on_heads_read_all_numbers_of_queries_and_keys(name, settings, padded):
    """They stay LayerNorms, and what writes queries writes into no stream that is compressed."""
    model = tiny(name, **settings)
    conversion = convert(model, to="crmsnorm", padded=padded)
    assert len(conversion.replaced) == 3
    assert conversion.untouched
    assert worst_error(model, decompress(conversion.model).model, example_inputs(model, 9, seed=3)) < 1e-6


def test_norms_on_heads_decompress_where_no_others_were_replaced():
    """OLMo-2's, over all heads together: here LayerNorms in a model whose other norms are RMSNorms."""
    model = fresh("olmo2", num_hidden_layers=1).double()
    attention = model.model.layers[0].self_attn
    attention.q_norm, attention.k_norm = (torch.nn.LayerNorm(32, dtype=torch.float64) for _ in range(2))
    conversion = convert(perturb(model), to="crmsnorm")
    assert {site.role for site in conversion.replaced} == {"qk"}
    back = decompress(conversion.model)
    assert [site.key for site in back.replaced] == [site.key for site in conversion.replaced]
    assert worst_error(model, back.model, example_inputs(model, 9, seed=3)) < 1e-6  # OLMo-2's other norms are float32


def test_what_has_no_plain_numbers_is_not_decompressed():
    _, conversion = converted("gpt2", to="crmsnorm")
    for change, says in (optimize, "is optimized"), (lambda model: model.to("meta"), "has no weights: transformer.wte"):
        with pytest.raises(ConversionError, match=says):
            decompress(change(copy.deepcopy(conversion.model)))


def test_what_gives_no_numbers_is_not_decompressed():
    _, conversion = converted("gpt2", to="crmsnorm")
    model = copy.deepcopy(conversion.model)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        decompress(model)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "opt", "mpt", "falcon", "bloom", "whisper"])
def test_a_tied_head_can_stay_tied(name):
    model, conversion = converted(name, keep_tie=True)
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < 1e-14
    head, embedding = conversion.model.get_output_embeddings(), conversion.model.get_input_embeddings()
    assert head.weight is embedding.weight
    extra = sum(p.numel() for p in conversion.model.parameters()) - sum(p.numel() for p in model.parameters())
    assert extra == 96  # one number a token


def test_a_certificate_is_of_the_model_that_is_given_and_not_of_what_it_was_made_of(monkeypatch):
    monkeypatch.setattr(TiedHead, "forward", torch.nn.Linear.forward)  # without the correction that keeps the tie
    with pytest.raises(ConversionError, match="not equal to its original"):
        convert(tiny("gpt2"), keep_tie=True)


def test_what_cannot_be_asked_together_is_refused():
    for options in ({"to": "crmsnorm", "keep_tie": True}, {"padded": True}):
        with pytest.raises(ConversionError, match=r"compressed|padded"):
            convert(tiny("gpt2"), **options)
    with pytest.raises(ConversionError, match="zero-mean; kept"):
        convert(tiny("albert"), to="crmsnorm")


def test_post_ln_models_compress_where_the_residual_is_recentered():
    model, conversion = converted("bert", to="crmsnorm")
    assert worst_error(model, conversion.model, example_inputs(model, 9, seed=3)) < 1e-14
    assert len(conversion.recentered) == 4


@pytest.mark.parametrize("name", ["bert", "bloom"])
def test_a_new_model_is_compressed(name):
    """Its gains of one and biases of zero give no mean yet."""
    assert convert(fresh(name), to="crmsnorm").certificate.passed


@pytest.mark.parametrize("padded", [False, True])
def test_tables_that_are_tied_stay_so_when_they_are_cut(padded, tmp_path):
    """Without a head nothing unties MBart's embeddings, which have three names."""
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = hf.MBartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
                            decoder_ffn_dim=24, **heads)  # fmt: skip
    model = perturb(hf.MBartModel(config).eval())
    conversion = convert(model, "crmsnorm", padded=padded)
    assert tied(conversion.model) == tied(model) != []
    save(conversion, tmp_path / "out")
    loaded, inputs = load_model(tmp_path / "out"), example_inputs(model)
    assert tied(loaded) == tied(model)
    torch.testing.assert_close(outputs_of(loaded, inputs)[0], outputs_of(model, inputs)[0], rtol=1e-4, atol=1e-5)
