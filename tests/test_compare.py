"""Comparisons against a slow float64 oracle in numpy, and what must be zero, and what must not."""

import copy
import json
import math

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo

from normgeo import compare, convert, load_model, load_tokenizer, load_tokens
from normgeo.comparison import compare as comparison
from normgeo.errors import DataError, ModelError, NormGeoError
from normgeo.tokens import TokenStream
from normgeo.training import train as training

EXACT = ["kl_mean", "kl_max", "error_max", "error_max_rel", "error_rms_rel"]
QUICK = {"null": 4, "rounds": 0, "progress": False}


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle(model, other, ids):
    """Every number from one context and one position at a time, in float64, with nothing shared with the package."""
    kl, same, loss, difference, largest, squares = [], [], [], [], [], [0.0, 0.0]
    for row in ids:
        with torch.no_grad():
            a = model(input_ids=torch.tensor(row)[None]).logits[0].double().numpy()
            b = other(input_ids=torch.tensor(row)[None]).logits[0].double().numpy()
        for t in range(len(row)):
            p, q = softmax(a[t]), softmax(b[t])
            kl.append(sum(p[i] * math.log(p[i] / q[i]) for i in range(len(p))))
            same.append(np.argmax(a[t]) == np.argmax(b[t]))
            difference.append(max(abs(a[t] - b[t])))
            largest.append(max(abs(a[t])))
            squares = [squares[0] + sum((a[t] - b[t]) ** 2), squares[1] + sum(a[t] ** 2)]
            if t + 1 < len(row):
                loss.append(-math.log(q[row[t + 1]]))
    return {
        "kl_mean": np.mean(kl), "kl_max": np.max(kl), "top1": np.mean(same), "error_max": np.max(difference),
        "error_max_rel": np.max(difference) / np.max(largest), "error_rms_rel": math.sqrt(squares[0] / squares[1]),
        "cross_entropy": np.mean(loss), "perplexity": math.exp(np.mean(loss)), "predictions": len(loss),
        "tokens": ids.size,
    }  # fmt: skip


def sharpened(name, seed=0, **changes):
    """A tiny model with logits of a trained model's size: those of a fresh one hardly differ between tokens."""
    model = zoo.tiny(name, seed, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    return model


def sabotaged(model, amount=0.3):
    bad = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in bad.parameters():
            if parameter.ndim == 1:
                parameter += amount * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return bad


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "bloom"])
def test_every_number_is_the_oracles(name, ids):
    a, b = sharpened(name), sabotaged(sharpened(name), 0.03)
    frame = compare({"a": a, "b": b}, ids, batch=3, **QUICK).frame
    expected = [oracle(a, a, ids), oracle(a, b, ids)]
    for row, truth in zip(frame.to_dict("records"), expected, strict=True):
        for column, value in truth.items():
            assert row[column] == pytest.approx(value, rel=2e-5, abs=1e-9), column
    assert 0 < frame.top1[1] < 1
    assert frame.perplexity_difference[1] == pytest.approx(expected[1]["perplexity"] - expected[0]["perplexity"])
    assert frame.predictions.tolist() == [7 * 36] * 2
    assert frame.output.tolist() == ["logits"] * 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_model_is_exactly_itself(name, ids):
    model = zoo.tiny(name)
    result = compare({"a": model, "same": copy.deepcopy(model)}, ids, **QUICK)
    assert (result.frame[EXACT] == 0).all(axis=None)
    assert result.frame.top1.tolist() == [1, 1]
    wide = result.by_site()
    assert (wide.a == wide.same).all()


def test_a_small_sabotage_is_seen(ids):
    model = zoo.tiny("gpt2")
    bad = copy.deepcopy(model)
    with torch.no_grad():
        bad.transformer.h[1].ln_2.weight[3] += 1e-3
    frame = compare({"a": model, "b": bad}, ids, **QUICK).frame
    assert (frame.loc[1, EXACT] > 0).all()
    assert frame.perplexity_difference[1] != 0


def test_the_naive_swap_differs_and_the_exact_conversion_does_not(ids):
    model = sharpened("gpt2")
    models = {"a": model, "naive": convert(model, to="naive-rmsnorm").model, "exact": convert(model).model}
    result = compare(models, ids, **QUICK)
    frame = result.frame.set_index("model")
    assert frame.kl_mean["naive"] > 1e-4
    assert frame.kl_mean["exact"] < 1e-9
    assert frame.error_max_rel["exact"] < 1e-5
    assert abs(frame.perplexity_difference["exact"]) < 1e-3 < abs(frame.perplexity_difference["naive"])
    assert frame.layernorms.tolist() == [5, 0, 0]
    assert frame.rmsnorms.tolist() == [0, 5, 5]
    assert frame.parameters["a"] == frame.parameters["naive"]  # the embedding stays shared with the head
    assert frame["bytes"].tolist() == [m.get_memory_footprint() for m in models.values()]


def test_a_compressed_model_is_compared_with_all_its_numbers(ids):
    """Its norms and angles are those of the model of width d; its size is its own."""
    model = zoo.tiny("gpt2")
    models = {"a": model, "wide": convert(model, fold_affine=True).model, "crms": convert(model, to="crmsnorm").model}
    result = compare(models, ids, **QUICK)
    assert result.frame.rmsnorms.tolist() == [0, 5, 5]
    assert result.frame.kl_mean.max() < 1e-9
    assert result.frame.parameters[2] < result.frame.parameters[1]
    assert set(result.angles.d) == {32}
    angles = result.by_site()
    np.testing.assert_allclose(angles.crms, angles.wide, atol=1e-3)


def test_batches_change_nothing_but_rounding(ids, monkeypatch):
    models = {"a": sharpened("gpt2"), "b": sabotaged(sharpened("gpt2"))}
    frames = [compare(models, ids, n_tokens=200, batch=batch, **QUICK).frame for batch in (1, 2, 7)]
    monkeypatch.setattr("normgeo.agreement.AT_ONCE", 96 * 5)  # five positions at once
    frames.append(compare(models, ids, n_tokens=200, batch=7, **QUICK).frame)
    timed = ["seconds", "time_ratio", "time_ratio_q25", "time_ratio_q75"]
    numbers = frames[0].select_dtypes("number").columns.drop(timed)
    for frame in frames[1:]:
        np.testing.assert_allclose(frame[numbers], frames[0][numbers], rtol=1e-5, atol=1e-12)
    assert frames[0].tokens.tolist() == [200, 200]
    assert frames[0].predictions.tolist() == [200 - 6] * 2  # six contexts, the last one cut


def test_perplexity_is_what_training_evaluates():
    model, tokenizer = load_model("embedded-layernorm"), load_tokenizer("embedded-layernorm")
    rows = [b.ids for b in load_tokens("sample", tokenizer, 64).batches(10 * 64, 10)]
    tokens = TokenStream.from_array(np.concatenate(rows))
    frame = compare({"a": model, "b": load_model("embedded-rmsnorm")}, tokens, **QUICK).frame
    assert frame.cross_entropy[0] == pytest.approx(training.evaluate(model, tokens), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "changes"), [("bert", {"initializer_range": 0.08}), ("t5", {})])
def test_models_that_see_later_tokens_have_no_perplexity(name, changes, dtype, ids, monkeypatch):
    """Nor do those whose class has them generate: a decoder's, of which its configuration makes an encoder."""
    monkeypatch.setattr(transformers.BertForMaskedLM, "can_generate", lambda self: True)
    a = sharpened(name, **changes)
    frame = compare({"a": a.to(dtype), "b": sabotaged(a).to(dtype)}, ids, **QUICK).frame
    assert frame.perplexity.isna().all()
    assert frame.predictions.tolist() == [0, 0]
    assert frame.kl_mean[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_language_models_whose_tokens_hardly_see_each_other_have_none_either(dtype, ids):
    """As those of transformers' own random weights, whose outputs are nearly what their biases are, or are small."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(**shape, vocab_size=96, max_position_embeddings=64)
    model, small = (transformers.BertForMaskedLM(config).to(dtype).eval() for _ in range(2))
    small.load_state_dict(model.state_dict())
    torch.nn.init.constant_(small.cls.predictions.transform.LayerNorm.weight, 2**-10)  # its logits are in proportion
    assert compare({"a": model, "b": small}, ids, **QUICK).frame.perplexity.isna().all()


@pytest.mark.parametrize("name", sorted(set(zoo.CONFIGS) - {"vit", "whisper", "bert", "albert", "t5"}))
def test_causal_models_have_one(name, ids):
    for dtype in (torch.float32, torch.bfloat16):
        models = {label: zoo.tiny(name).to(dtype) for label in "ab"}
        frame = compare(models, ids[:1, :8], **QUICK).frame
        assert frame.perplexity.between(10, 1e4).all()


def test_models_without_a_head_are_compared_by_hidden_states(ids):
    a, b = zoo.tiny("bert").bert, zoo.tiny("bert", seed=1).bert
    result = compare({"a": a, "b": b}, ids, **QUICK)
    frame = result.frame
    assert frame.output.tolist() == ["last_hidden_state"] * 2
    assert frame[["perplexity", "kl_mean", "kl_max", "top1"]].isna().all(axis=None)
    with torch.no_grad():
        x, y = (m(input_ids=torch.tensor(ids)).last_hidden_state.double() for m in (a, b))
    assert frame.error_max[1] == pytest.approx((x - y).abs().max().item(), rel=1e-5)
    assert frame.error_rms_rel[1] == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-5)
    assert "hidden state error" in result.table()
    assert "perplexity" not in result.table()
    assert json.loads(result.to_json())["models"][1]["perplexity"] is None
    assert drawn(result.plot())


def test_one_score_a_context_is_one_position(ids):
    config = zoo.tiny("bert").config
    a, b = (transformers.BertForSequenceClassification(config).eval() for _ in range(2))
    result = compare({"a": a, "b": b}, ids, **QUICK)
    with torch.no_grad():
        x, y = (m(input_ids=torch.tensor(ids)).logits.double() for m in (a, b))
    kl = (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1)
    assert result.frame.kl_mean[1] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert result.frame.perplexity.isna().all()
    assert result.frame.tokens.tolist() == [ids.size] * 2


def test_one_score_a_token_is_no_distribution(ids):
    """ELECTRA's discriminator gives [contexts, time] scores: one of each token, and nothing that sums to one."""
    config = transformers.ElectraConfig(vocab_size=96, embedding_size=16, hidden_size=32, num_hidden_layers=2,
                                        num_attention_heads=4, intermediate_size=64,
                                        max_position_embeddings=ids.shape[1])  # fmt: skip
    a, b = (transformers.ElectraForPreTraining(config).eval() for _ in range(2))
    result = compare({"a": a, "b": b}, ids, **QUICK)
    with torch.no_grad():
        x, y = (m(input_ids=torch.tensor(ids)).logits.double() for m in (a, b))
    assert result.frame.error_max[1] == pytest.approx((x - y).abs().max().item(), rel=1e-4)
    assert result.frame.error_rms_rel[1] == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-4)
    assert result.frame[["kl_mean", "kl_max", "top1", "perplexity"]].isna().all(axis=None)
    assert "KL" not in result.table()
    assert compare({"a": a, "b": b}, ids[:, :1], **QUICK).frame.kl_mean.isna().all()


def test_half_precision_logits_are_compared_in_float64(ids):
    a, b = (m.to(torch.bfloat16) for m in (sharpened("gpt2"), sabotaged(sharpened("gpt2"))))
    frame = compare({"a": a, "b": b}, ids, batch=1, **QUICK).frame
    assert frame.kl_mean[1] == pytest.approx(oracle(a, b, ids)["kl_mean"], rel=1e-6)
    assert frame.perplexity.notna().all()
    assert frame["dtype"].tolist() == ["bfloat16"] * 2


def test_training_mode_is_left_and_restored(ids):
    a, b = sharpened("gpt2").train(), sharpened("gpt2")
    frame = compare({"a": a, "b": b}, ids, **QUICK).frame
    assert frame.error_max[1] == 0
    assert a.training
    assert not b.training


@pytest.mark.usefixtures("untyped")
def test_what_cannot_be_compared_is_said(ids):
    a = zoo.tiny("gpt2")
    broken = copy.deepcopy(a)
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = torch.nan
    for models, error, words in (
        ({"a": a, "b": zoo.tiny("llama", vocab_size=100)}, DataError, "96 wide and those of b 100: their vocab"),
        ({"a": a, "b": a.transformer}, DataError, "a gives logits and b gives last_hidden_state"),
        ({"a": a.transformer, "b": zoo.tiny("gpt2", n_embd=64).transformer}, DataError, "different widths"),
        ({"a": a, "broken": broken}, ModelError, f"broken are NaN or infinite at {ids.size} of {ids.size}"),
        ({"a": a, "b": zoo.tiny("vit")}, ModelError, "not token ids"),
        ({"a": a}, NormGeoError, "two models"),
        ([a, a], NormGeoError, "models by name, as .*, not a list"),
    ):
        with pytest.raises(error, match=words):
            compare(models, ids, **QUICK)
    pair = {"a": a, "b": a}
    for tokens, options, words in (
        (ids + 90, {}, "beyond the model's vocabulary"),
        (np.full((1, 65), 5), {}, "longer than the model's 64"),
        (ids, {"n_tokens": 260}, "ends after 259 tokens"),
        (ids, {"batch": 0}, "--batch must be at least 1"),
        (ids, {"rounds": -1}, "--rounds must be at least 0"),
        (TokenStream(lambda start: iter(()), 4, "nothing", "", ""), {}, "holds no tokens"),
    ):
        with pytest.raises(DataError, match=words):
            compare(pair, tokens, **(QUICK | options))


def test_contexts_of_one_token_predict_nothing(ids):
    frame = compare({"a": zoo.tiny("gpt2"), "b": zoo.tiny("gpt2", seed=1)}, ids.reshape(-1, 1), **QUICK).frame
    assert frame.perplexity.isna().all()
    assert frame.kl_mean[1] > 0


def test_sites_match_by_name_and_else_by_place(ids):
    gpt2, llama, deep = zoo.tiny("gpt2"), zoo.tiny("llama"), zoo.tiny("gpt2", n_layer=3)
    angles = compare({"gpt2": gpt2, "llama": llama, "deep": deep}, ids, **QUICK).angles
    pairs = angles.drop_duplicates(["model", "site"]).set_index(["model", "site"]).reference_site
    assert pairs["llama"].to_dict() == {
        "model.layers.0.input_layernorm": "transformer.h.0.ln_1",
        "model.layers.0.post_attention_layernorm": "transformer.h.0.ln_2",
        "model.layers.1.input_layernorm": "transformer.h.1.ln_1",
        "model.layers.1.post_attention_layernorm": "transformer.h.1.ln_2",
        "model.norm": "transformer.ln_f",
    }
    assert pairs["deep"]["transformer.ln_f"] == "transformer.ln_f"
    assert pairs["deep"].isna().sum() == 2  # the third layer
    result = comparison.Comparison(pd.DataFrame({"model": ["gpt2", "llama", "deep"]}), angles)
    wide = result.by_site()
    assert wide.index.get_level_values("site").tolist()[:5] == pairs["gpt2"].tolist()
    assert wide[["gpt2", "llama"]].isna().sum().tolist() == [2, 2]
    assert wide.deep.notna().all()


def test_a_namesake_of_another_role_is_another_norm(ids):
    """Gemma's post_attention_layernorm is before the MLP, Gemma 2's behind the attention."""
    result = compare({"gemma": zoo.tiny("gemma"), "gemma2": zoo.tiny("gemma2")}, ids, **QUICK)
    pairs = result.angles.drop_duplicates(["model", "site"]).set_index(["model", "site"]).reference_site["gemma2"]
    assert pairs["model.layers.0.pre_feedforward_layernorm"] == "model.layers.0.post_attention_layernorm"
    assert pd.isna(pairs["model.layers.0.post_attention_layernorm"])
    wide, angles = result.by_site(), result.angles
    own = angles[(angles.model == "gemma2") & (angles.phase == "pre") & (angles.direction == "uniform")]
    means = own.set_index("site").mean_deg
    assert wide.index.is_unique
    place = "model.layers.0.post_attention_layernorm", "model.layers"
    assert wide.gemma2[(*place, "mlp", 0)] == means["model.layers.0.pre_feedforward_layernorm"]
    assert wide.gemma2[(*place, "post_attention", 0)] == means["model.layers.0.post_attention_layernorm"]
    assert pd.isna(wide.gemma[(*place, "post_attention", 0)])
    with pytest.raises(DataError, match="no 'mean_deg' of phase 'pre' and direction 'nowhere'"):
        result.by_site(direction="nowhere")


def test_final_norms_match_whatever_the_depth_and_no_site_is_matched_twice():
    def sites(*rows):
        return pd.DataFrame(rows, columns=["site", "stack", "layer", "role"])

    first = sites(("h.0.a", "h", 0, "attention"), ("h.1.a", "h", 1, "attention"), ("norm", "", 2, "final"))
    deep = sites(*[(f"x.{i}.b", "x", i, "attention") for i in range(3)], ("last", "", 3, "final"))
    swapped = sites(("h.1.a", "h", 0, "attention"), ("h.2.a", "h", 1, "attention"), ("h.1.b", "h", 1, "mlp"))
    found = comparison._matched({"first": first, "deep": deep, "swapped": swapped}).reference_site.fillna("")
    assert found.tolist()[3:7] == ["h.0.a", "h.1.a", "", "norm"]
    assert found.tolist()[7:] == ["h.1.a", "", ""]  # h.1.a has its namesake already


def test_parallel_blocks_and_encoder_decoders_are_drawn(ids, tiny):
    for names in (("gpt2", "gptj"), ("t5", "t5"), ("gemma2", "llama")):
        result = compare({"a": tiny(names[0]), "b": tiny(names[1])}, ids[:2, :9], **QUICK)
        assert drawn(result.plot())
        assert result.table(100)


def drawn(figure):
    assert isinstance(figure, matplotlib.figure.Figure)
    return all(axes.lines or axes.patches for axes in figure.axes) and len(figure.axes) >= 4


def test_speed_is_relative_to_the_reference_in_the_same_round(ids, tiny, monkeypatch):
    models, calls = {"a": tiny("gpt2"), "b": tiny("llama")}, []

    def timed(model, chunk):
        calls.append((model, chunk.start))
        return (1.0 if model is models["a"] else 3.0) * 2.0 ** ((len(calls) - 1) // 2)

    monkeypatch.setattr(comparison, "_timed", timed)
    frame = compare(models, ids, batch=2, null=0, rounds=8, progress=False).frame
    assert frame[["time_ratio", "time_ratio_q25", "time_ratio_q75"]].to_numpy().tolist() == [[1, 1, 1], [3, 3, 3]]
    assert frame.seconds.tolist() == pytest.approx([24, 72])  # the median of 2, 4, ..., 256, and of three times that
    rounds = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert len(rounds) == 9  # one warms up
    assert all({id(model) for model, _ in pair} == {id(m) for m in models.values()} for pair in rounds)
    assert all(pair[0][1] == pair[1][1] for pair in rounds)  # on the same batch
    assert len({id(pair[0][0]) for pair in rounds}) == 2  # in random order


def test_speed_is_measured(ids, tiny):
    frame = compare({"a": tiny("gpt2"), "b": tiny("llama")}, ids, null=0, rounds=3, progress=False).frame
    assert (frame[["seconds", "time_ratio", "time_ratio_q25", "time_ratio_q75"]] > 0).all(axis=None)
    assert frame.loc[0, ["time_ratio", "time_ratio_q25", "time_ratio_q75"]].tolist() == [1, 1, 1]
    assert frame.time_ratio_q25[1] <= frame.time_ratio[1] <= frame.time_ratio_q75[1]


def test_passes_are_timed_on_batches_of_the_size_asked_for(ids, tiny, monkeypatch):
    shapes = []
    monkeypatch.setattr(comparison, "_timed", lambda model, chunk: shapes.append(chunk.ids.shape) or 1.0)
    compare({"a": tiny("gpt2"), "b": tiny("llama")}, ids, batch=3, null=0, rounds=2, progress=False)
    assert set(shapes) == {(3, 37)}


def test_what_is_written_can_be_read(ids, tmp_path):
    result = compare({"a": zoo.tiny("gpt2"), "b": zoo.tiny("llama")}, ids, **QUICK)
    result.save(tmp_path / "here")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "here/comparison.parquet"), result.frame)
    assert len(pd.read_parquet(tmp_path / "here/angles.parquet")) == len(result.angles)
    stored = json.loads((tmp_path / "here/comparison.json").read_text())
    assert stored["reference"] == "a"
    assert stored["models"][1]["kl_mean"] == result.frame.kl_mean[1]
    assert stored["models"][1]["time_ratio"] is None
    assert (tmp_path / "here/figures/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "here/figures/comparison.svg").read_bytes()
    table = result.table()
    for words in ("parameters", "5 LayerNorm", "5 RMSNorm", "top-1 agreement", "pre-attention", "final"):
        assert words in table
    assert max(map(len, table.splitlines())) <= 120


def test_a_batch_that_does_not_fit_into_memory_says_so(tiny, monkeypatch):
    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    model = tiny("gpt2")
    monkeypatch.setattr(type(model), "forward", full)
    with pytest.raises(ModelError, match=r"does not fit into memory; give a smaller"):
        compare({"a": model, "b": model}, np.random.default_rng(0).integers(3, 96, (4, 16)), rounds=0, null=0)
