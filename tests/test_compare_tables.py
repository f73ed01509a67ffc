"""What a comparison says in its table, and of itself."""

import itertools
import json
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from test_compare import QUICK
from torch import nn
from torch.utils._pytree import tree_map_only

from normgeo import compare, figures
from normgeo.agreement import Agreement
from normgeo.comparison import compare as comparison
from normgeo.comparison import outputs
from normgeo.errors import ModelError, NormGeoError
from normgeo.models import weights_digest
from normgeo.tokens import TokenStream


@pytest.fixture(scope="module")
def models():
    return {"a": zoo.tiny("gpt2"), "b": zoo.tiny("gpt2", seed=1)}


def test_the_table_has_the_angle_before_the_norm_first(models, ids):
    result = compare(models, ids, **QUICK)
    before, after, table = result.by_site(phase="pre"), result.by_site(phase="post"), result.table()
    for site in before.index:
        assert f"{before.a[site]:.2f} → {after.a[site]:.2f}  " in table
    assert str(result) == table  # what print and a notebook show


def test_models_whose_paths_begin_alike_are_told_apart_in_a_narrow_table(models, ids):
    paths = [f"runs/train-tiny-2026-11-21/{norm}/checkpoints/step-00002400" for norm in ("layernorm", "rmsnorm")]
    result = compare(dict(zip(paths, models.values(), strict=True)), ids, **QUICK)
    head = result.table(90).partition("──")[0].splitlines()
    columns = zip(*(line.split() for line in head if line.strip()), strict=True)
    assert ["".join(column) for column in columns] == paths


def test_the_table_has_the_lower_quartile_of_times_first(models, ids, monkeypatch):
    slow = iter([2.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # the first warms up
    monkeypatch.setattr(comparison, "_timed", lambda model, _: 1.0 if model is models["a"] else next(slow))
    assert "4.00 of it (3.00 to 5.00)" in compare(models, ids, null=0, rounds=5, progress=False).table()


def test_a_comparison_says_what_it_was_measured_on(models, ids):
    tokens = TokenStream.from_array(ids)
    about = compare(models, tokens, batch=3, seed=5, n_tokens=100, **QUICK).about
    wanted = {
        "data_sha256": tokens.digest, "packing": tokens.packing, "context": 37, "tokens": 100, "batch": 3, "null": 4,
        "rounds": 0, "seed": 5, "torch": torch.__version__,
    }  # fmt: skip
    assert {name: about[name] for name in wanted} == wanted


def test_the_reference_stays_it_whichever_rows_are_left_and_in_whatever_order(models, ids):
    result = compare(models, ids, **QUICK)
    first, other = result.frame.model.eq("a"), result.frame.model.eq("b")
    assert replace(result, frame=result.frame[::-1]).table().partition("Angle")[0].count("reference ") == 0
    for frame, named in ((result.frame[::-1], 6), (result.frame[first], 0), (result.frame[other], 0)):
        part = replace(result, frame=frame)
        assert json.loads(part.to_json())["reference"] == part.reference == "a"
        assert part.table().partition("Angle")[0].split().count("reference") == named
    assert part.table().startswith("Against a\n")
    assert f"{result.frame.kl_mean[1]:.3g}" in part.table()


@pytest.fixture(scope="module")
def alike():
    """Two models that agree on some tokens."""
    models = {name: zoo.tiny("gpt2") for name in "ab"}
    with torch.no_grad():
        for parameter in models["b"].parameters():
            parameter += 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return models


def test_the_table_has_the_metrics_in_their_units(alike, ids):
    result = compare(alike, ids, **QUICK)
    second = result.frame.iloc[1]
    assert 0.1 < second.top1 < 0.99
    lines = [[cell for cell in re.split(r"\s{2,}", line.strip()) if cell] for line in result.table(160).splitlines()]
    cells = {line[0]: line[-1] for line in lines if len(line) == 3}
    wanted = {
        "parameters": f"{second.parameters:,}", "memory": f"{second.bytes / 1e6:.2f} MB", "norms": "5 LayerNorm",
        "perplexity": f"{second.perplexity:.3f}", "minus the reference's": f"{second.perplexity_difference:+.3g}",
        "KL, mean (nats)": f"{second.kl_mean:.3g}", "KL, largest (nats)": f"{second.kl_max:.3g}",
        "top-1 agreement": f"{100 * second.top1:.2f}%", "logits error, rms": f"{100 * second.error_rms_rel:.3g}%",
        "logits error, largest": f"{second.error_max:.3g} ({100 * second.error_max_rel:.3g}%)",
    }  # fmt: skip
    assert {name: cells[name] for name in wanted} == wanted


def test_the_figure_has_the_angles_and_metrics_of_the_table(alike, ids, monkeypatch):
    monkeypatch.setattr(comparison, "_timed", lambda model, _: 1.0 if model is alike["a"] else 3.0)
    result = compare(alike, ids, null=4, rounds=3, progress=False)
    figure, frame = result.plot(), result.angles
    roles = ("attention", "mlp", "final")
    for axes, (phase, role) in zip(figure.axes, [(p, r) for p in ("pre", "post") for r in roles], strict=False):
        bars = {bar.get_label(): bar for bar in axes.containers}
        for model in "ab":
            here = frame[(frame.model == model) & (frame.role == role) & (frame.phase == phase)]
            rows, (points, _, (segments,)) = here[here.direction == "uniform"].sort_values("layer"), bars[model].lines
            assert points.get_ydata() == pytest.approx(rows.mean_deg.to_numpy()), (phase, role, model)
            assert [(s[1, 1] - s[0, 1]) / 2 for s in segments.get_segments()] == pytest.approx(rows.std_deg.tolist())
    metrics = {
        "perplexity": result.frame.perplexity, "mean KL to reference (nats)": result.frame.kl_mean,
        "top-1 agreement (%)": 100 * result.frame.top1, "time / reference": pd.Series([1.0, 3.0]),
    }  # fmt: skip
    panels = {axes.get_title(): [bar.get_width() for bar in axes.patches] for axes in figure.axes[6:]}
    assert panels.keys() == metrics.keys()
    for title, values in metrics.items():
        assert panels[title] == pytest.approx(values.fillna(0).tolist()), title


@pytest.mark.filterwarnings("error:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(("worse", "text"), [(np.inf, "∞"), (1.234e300, "1.2e+300")])
def test_a_perplexity_beyond_all_numbers_leaves_room_for_the_others(alike, ids, worse, text):
    result = compare(alike, ids, **QUICK)
    rows = result.frame.assign(perplexity=[12.0, worse], perplexity_difference=[0.0, worse])
    result = replace(result, frame=rows)
    (axes,) = (axes for axes in result.plot().axes if axes.get_title() == "perplexity")
    assert [bar.get_width() for bar in axes.patches] == [12.0, 0.0 if np.isinf(worse) else worse]
    assert [note.get_text() for note in axes.texts] == ["12.00", text]
    axes.figure.figure.draw_without_rendering()
    for note in axes.texts:
        box, room = note.get_window_extent(), axes.get_window_extent()
        assert room.x0 <= box.x0 < box.x1 <= room.x1
    assert max(map(len, result.table(120).splitlines())) <= 120
    assert ("inf" if np.isinf(worse) else "1.23e+300") in result.table(120)


def test_any_number_of_models_is_drawn_beside_their_layer(ids):
    models = {f"m{i}": zoo.tiny("gpt2", seed=i, n_layer=3 if i < 7 else 2) for i in range(8)}
    figure = compare(models, ids[:1, :8], **QUICK).plot()
    panels = [axes for axes in figure.axes if axes.containers and axes.lines]
    assert len(panels) == 6
    for axes in panels:
        low, high = axes.get_xlim()
        drawn = [np.asarray(bars.lines[0].get_xdata(), float) for bars in axes.containers]
        assert len(drawn) == 8
        for x in drawn:
            assert (abs(x - np.arange(len(x))) < 0.5).all()
            assert ((low < x) & (x < high)).all()


def test_norms_of_one_role_in_a_layer_are_told_apart(ids):
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, first_k_dense_replace=2, **sizes,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    result = compare({"a": model, "b": model}, ids[:1, :8], **QUICK)
    titles = [axes.get_title() for axes in result.plot().axes]
    assert {"inner\nq_a_layernorm", "inner\nkv_a_layernorm"} <= set(titles)
    table = result.table()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        assert len(re.findall(rf"inner: {name} +[01] ", table)) == 2
    assert len(re.findall(r"pre-MLP +[01] ", table)) == 2


def test_stacks_are_told_apart_and_a_model_may_be_called_as_a_column_is(ids):
    result = compare({"stack": zoo.tiny("t5"), "layer": zoo.tiny("t5", num_layers=3)}, ids[:1, :8], **QUICK)
    rows = [line.split()[:3] for line in result.table().splitlines() if "pre-attention" in line]
    places = "encoder: 0", "encoder: 1", "decoder: 0", "decoder: 1", "encoder: 2", "decoder: 2"
    assert [f"{stack} {layer}" for stack, _, layer in rows] == list(places)
    assert result.plot()


def test_what_it_is_given_by_mistake_is_said(models, ids, tmp_path):
    with pytest.raises(NormGeoError, match="names are words; received 3"):
        compare({3: models["a"], "b": models["b"]}, ids, **QUICK)
    both = transformers.BertForPreTraining(zoo.tiny("bert").config).eval()
    with pytest.raises(ModelError, match="but prediction_logits, seq_relationship_logits; load it as a class that"):
        compare({"a": both, "b": both}, ids, **QUICK)
    compare(models, ids[:1, :8], **QUICK).save(str(tmp_path / "here"))
    assert (tmp_path / "here/comparison.json").is_file()


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "MarianMTModel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_encoder_decoders_have_no_perplexity_in_half_precision_either(name, dtype, ids):
    """Fresh ones hardly look at their encoders."""
    cls = getattr(transformers, name)
    config = cls.config_class(
        vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=1,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = cls(config).to(dtype).eval()
    assert compare({"a": model, "b": model}, ids[:2, :12], **QUICK).frame.perplexity.isna().all()


def test_as_many_tokens_as_classes_change_nothing(ids):
    config = zoo.tiny("bert").config
    a, b = (transformers.BertForSequenceClassification(config).eval() for _ in range(2))
    tokens = TokenStream.from_array(ids[:3, :12])
    frames = [compare({"a": a, "b": b}, tokens, n_tokens=n, **QUICK).frame for n in (24, 26)]  # 26: the last has two
    assert all(frame.kl_mean[1] > 0 and frame.top1.notna().all() for frame in frames)


def test_norms_on_heads_are_norms_and_a_head_wider_than_the_vocabulary_predicts(ids):
    wide = zoo.tiny("llama")
    wide.config.vocab_size -= 3  # tables are padded to sizes that are computed faster
    frame = compare({"a": zoo.tiny("qwen3"), "b": wide}, ids[:1, :8], **QUICK).frame
    assert frame.rmsnorms.tolist() == [2 * 4 + 1, 2 * 2 + 1]
    assert frame.predictions.tolist() == [7, 7]


def test_logits_that_a_model_rules_out_are_in_no_error():
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    y = (x + 0.1).bfloat16()
    plain, masked = Agreement(), Agreement()
    plain.add(x[:, 2:], y[:, 2:])
    x[:, :2], y[:, :2] = torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min
    masked.add(x, y)
    for name, value in plain.metrics().items():
        assert masked.metrics()[name] == pytest.approx(value, rel=1e-9, nan_ok=True), name
    y[0, 0] = 0.0  # what one of them allows is a difference
    masked.add(x, y)
    assert masked.error_max > 1e38


@pytest.mark.parametrize("perplexity", [[51234.56, 987654.32, 2.0], [111892.63, 111892.66, 82838.71]])
def test_numbers_of_bars_stay_within_their_axes_and_off_each_other(models, ids, perplexity):
    result = compare(models | {"c": models["a"]}, ids[:1, :8], **QUICK)
    long = result.frame.assign(perplexity=perplexity, kl_mean=[0.0, 1.2e-12, 3.4e-5], time_ratio=1.0)
    figure = replace(result, frame=long).plot()
    figures.styled(figure.draw_without_rendering)()  # as it is saved: ticks are chosen by the size of letters
    bars = [axes for axes in figure.axes if axes.patches]
    assert len(bars) == 4
    for axes in bars:
        edge = axes.get_window_extent().x1
        assert all(text.get_window_extent().x1 <= edge for text in axes.texts), axes.get_title()
        assert max(bar.get_width() for bar in axes.patches) > 0.3 * axes.get_xlim()[1]
        shown = [tick.label1 for tick in axes.xaxis.get_major_ticks() if axes.get_xlim()[1] >= tick.get_loc()]
        boxes = [label.get_window_extent() for label in shown]
        assert len(boxes) > 1
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes)), axes.get_title()


class Packed(torch.Tensor):
    """A matrix of bytes and a scale that says it is of float32, as torchao's are."""

    def __new__(cls, matrix):
        return torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype)

    def __init__(self, matrix):
        self.scale = matrix.abs().max() / 127
        self.data_ = (matrix / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(tensors, *_):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        assert func not in (torch.ops.aten.view.default, torch.ops.aten.view.dtype), "of no other shape"
        return func(*tree_map_only(cls, lambda x: x.data_ * x.scale, args), **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*deprecated:Warning")  # torch's own of its quantization
def test_the_memory_of_quantized_weights_is_what_they_take(ids):
    """Be they tensors that say what they stand for, or objects of a kernel's, which are no parameters."""
    linear = (packed := zoo.tiny("gpt_neox")).gpt_neox.layers[0].mlp.dense_h_to_4h
    whole, linears = packed.get_memory_footprint(), [m for m in packed.modules() if isinstance(m, nn.Linear)]
    quantization = pytest.importorskip("torch.ao.quantization")
    dynamic = quantization.quantize_dynamic(packed, {nn.Linear}, torch.qint8)
    linear.weight = nn.Parameter(Packed(linear.weight.detach()), requires_grad=False)
    result = compare({"a": zoo.tiny("gpt_neox"), "packed": packed, "dynamic": dynamic}, ids[:1, :8], **QUICK)
    saved = [0, 3 * 32 * 64 - 4, 3 * sum(module.weight.numel() for module in linears)]
    assert result.frame["bytes"].tolist() == [whole - less for less in saved]
    linear.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)  # as bitsandbytes'
    state = SimpleNamespace(scale=torch.ones(64), nested=[{"scale": torch.ones(2)}], same=linear.weight.data)
    linear.weight.quant_state, state.again, linear.weight.module = state, state, linear
    linear.weight.other = next(p for p in packed.parameters() if p is not linear.weight)  # a weight, counted as such
    assert comparison._memory(packed) == whole - 3 * 32 * 64 + 4 * (64 + 2)
    linear.weight = nn.Parameter(Packed(torch.randn(64, 32)), requires_grad=False)
    before = weights_digest(packed)
    linear.weight.scale.mul_(2)  # whose bytes are told apart, not what they stand for
    assert weights_digest(packed) != before
    lstm = quantization.quantize_dynamic(nn.Sequential(nn.LSTM(64, 64)), {nn.LSTM}, torch.qint8)
    assert 2 * 64 * 256 <= comparison._memory(lstm) < 3 * 64 * 256  # whose packed weights are held by what is packed


def test_of_each_batch_two_outputs_are_in_memory_at_once(models, ids, monkeypatch):
    made, others, output = [], [], outputs._output

    def watched(name, model, batch):
        if len(batch.ids) == 1:  # to see whether it predicts
            return output(name, model, batch)
        others.append(sum(one() is not None for one in made))
        kind, value = output(name, model, batch)
        made.append(weakref.ref(value))
        return kind, value

    monkeypatch.setattr(outputs, "_output", watched)
    compare(models | {"c": models["b"]}, ids, batch=2, **QUICK)
    assert others == [0, 1, 1] * (len(ids) // 2)
