"""Benchmarks of models that lack something: a conversion, a decoder's cache, a norm whose parameters nobody reads."""

import numpy as np
import pandas as pd
import pytest
from blocks import Model, Named
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import perturb, tiny

from analyses import efficiency
from normgeo import convert, wrap
from normgeo.architectures import architectures
from normgeo.architectures import tiny as tiny_architecture
from normgeo.bench import inference
from normgeo.bench.inference import bench_inference, summary
from normgeo.bench.inference_models import VARIANTS
from normgeo.bench.stream import VARIANTS as WAYS
from normgeo.bench.stream import bench_stream
from normgeo.bench.training import task_of
from normgeo.cli import bench as bench_command
from normgeo.errors import ModelError, NormGeoError
from normgeo.tokens import TokenStream

ARCHITECTURES = {a.model_type: a for a in architectures()}
FEW = {"rounds": 3, "seconds": 0.0, "lengths": (8,)}


def test_norms_whose_parameters_a_block_reads_can_be_left_out():
    """Mamba's blocks read their norm's dtype."""
    frame = bench_inference(tiny_architecture(ARCHITECTURES["mamba"]), variants=["no-norm", "pre-rmsnorm"], **FEW)
    assert set(frame.variant) == {"original", "no-norm", "pre-rmsnorm"}
    assert frame[frame.variant == "no-norm"].error.gt(0.01).all()


def test_what_cannot_be_fused_in_one_dtype_is_left_out_of_that(monkeypatch):
    """Mamba's stream is of float32 whatever its norms are."""
    said, model = [], tiny_architecture(ARCHITECTURES["mamba"])
    monkeypatch.setattr(inference, "available", lambda *_: ["original", "fused"])
    frame = bench_inference(model, dtypes=("bfloat16", "float32"), announce=said.append, **FEW)
    assert frame.groupby("dtype").variant.unique().map(set).to_dict() == {
        "bfloat16": {"original"}, "float32": {"original", "fused"}
    }  # fmt: skip
    assert [line.partition(": ")[0] for line in said if line.startswith("without")] == ["without fused in bfloat16"]


def test_norms_may_be_given_what_they_read_by_name():
    frame = bench_inference(wrap(perturb(Model(Named)), context=64), **FEW)
    assert set(frame.variant) >= {"original", "pre-rmsnorm", "pre-rmsnorm-torch", "no-norm"}
    assert frame.norm_seconds.gt(0).all()


def test_rmsnorms_of_an_odd_width_have_the_gains_that_they_had():
    config = {
        "hidden_size": 33, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1, "head_dim": 16,
        "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    frame = bench_inference(perturb(LlamaForCausalLM(LlamaConfig(**config))), variants=["pre-rmsnorm"], **FEW)
    assert frame.error.lt(1e-5).all()


def test_a_norm_behind_which_a_mean_is_removed_is_torchs_with_that():
    """BLOOM's norm of embeddings writes into its stream."""
    frame = bench_inference(tiny("bloom"), variants=["pre-rmsnorm-torch"], **FEW)
    assert frame.error.lt(1e-5).all()


def test_a_converted_model_keeps_its_betas_and_what_recenters_it():
    """Its RMSNorms have both, where those of other models have gains alone."""
    frame = bench_inference(convert(tiny("bloom")).model, variants=["pre-rmsnorm", "pre-rmsnorm-torch"], **FEW)
    assert set(frame.variant) == {"original", "pre-rmsnorm", "pre-rmsnorm-torch"}
    assert frame.error.lt(1e-5).all()


def test_cases_are_measured_once():
    """However often they are given: two of the same name could not be told apart."""
    model, twice = tiny("gpt2"), {"dtypes": ("float32",) * 2, "batches": (1, 1), "modes": ("eager",) * 2}
    frame = bench_inference(model, variants=["no-norm"], **twice, **FEW | {"lengths": (8, 8)})
    assert len(frame) == 2 * 3
    assert len(summary(frame)) == 2


def test_without_a_floor_there_is_no_gap_to_speak_of(capsys):
    frame = bench_inference(tiny("gpt2"), variants=["pre-rmsnorm"], **FEW)
    bench_command._inference(summary(frame))
    assert "no clear gap" not in capsys.readouterr().out


def test_a_size_is_one_whatever_lies_here(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert task_of("tiny", batch=1, context=8, vocabulary=64).about["context"] == 8
    with pytest.raises(ModelError, match="the directory has no config"):
        task_of("./tiny")


def test_a_conversion_that_there_is_not_leaves_the_others():
    said = []
    frame = bench_inference(tiny_architecture(ARCHITECTURES["bart"]), announce=said.append, **FEW)
    without = {line.split()[1].rstrip(":") for line in said if line.startswith("without")}
    assert {"pre-crmsnorm", "pre-crmsnorm-padded"} <= without
    assert {"original", "pre-rmsnorm", "no-norm"} <= set(frame.variant) <= set(VARIANTS) - without
    with pytest.raises(NormGeoError, match="CRMSNorm needs every stream to be zero-mean"):
        bench_inference(tiny_architecture(ARCHITECTURES["bart"]), variants=["pre-crmsnorm"], **FEW)


def test_what_does_not_decode_is_said(monkeypatch):
    said = []
    frame = bench_inference(
        tiny("bert"), variants=["no-norm"], phases=("forward", "decode"), announce=said.append, **FEW
    )
    assert set(frame.phase) == {"forward"}
    assert any("without decoding: BertForMaskedLM generates no text" in line for line in said), said
    with pytest.raises(ModelError, match=r"64 positions, of which decoding takes one: give a --length up to 63, rec"):
        bench_inference(tiny("gpt2"), variants=["no-norm"], phases=("decode",), **FEW | {"lengths": (64,)})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rwkv", "RwkvForCausalLM keeps no cache of tokens before"),
        ("cpmant", "CpmAntForCausalLM fails on a token behind those in its cache: RuntimeError: The size of tensor"),
    ],
)
def test_of_a_model_that_generates_but_not_from_a_cache_the_rest_is_measured(name, why):
    said, model = [], tiny_architecture(ARCHITECTURES[name])
    frame = bench_inference(
        model, variants=["no-norm"], phases=("forward", "decode"), announce=said.append, **FEW | {"lengths": (4,)}
    )
    assert set(frame.phase) == {"forward"}
    assert any(line.startswith(f"without decoding: {why}") for line in said), said
    with pytest.raises(ModelError, match=f"nothing to measure: {why}"):
        bench_inference(model, variants=["no-norm"], phases=("decode",), **FEW)


def test_an_encoder_and_its_decoder_are_streamed():
    ids = np.random.default_rng(0).integers(3, 96, (4, 16))
    frame = bench_stream(tiny("t5"), TokenStream.from_array(ids), batch=2, rounds=1, null=4)
    assert frame.variant.tolist() == list(WAYS)


@pytest.mark.parametrize("size", ["tiny", "vit-tiny"])
def test_a_step_that_does_not_fit_is_one_line(size):
    with pytest.raises(ModelError, match="does not fit into memory; give a smaller --batch or --context"):
        task_of(size, batch=10**9)


def test_half_precision_may_be_either():
    for dtype in ("bfloat16", "float16"):
        frame = bench_inference(tiny("gpt2"), variants=["pre-rmsnorm"], dtypes=(dtype,), **FEW)
        errors = frame.groupby("variant").error.first()
        assert errors["original"] == pytest.approx({"bfloat16": 4e-3, "float16": 5e-4}[dtype], rel=0.9)
        assert errors["pre-rmsnorm"] < 4 * errors["original"] + 1e-4


def measured(model, variants, shapes):
    """A table as `summary` gives it, of one model."""
    rows = [
        {"model": model, "variant": name, "dtype": dtype, "batch": batch, "length": 8, "phase": "decode",
         "mode": "eager", "device": "a cpu", "threads": 1, "rounds": 3, "error": 0.0} |
        {f"{prefix}{name}{quartile}": 0.5 for prefix in ("", "norm_") for name in ("ratio", "seconds")
         for quartile in ("", "_q25", "_q75")}
        for name in variants for dtype in ("float32", "bfloat16", "autocast") for batch in range(1, shapes + 1)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("model", "original"), [("gpt-small", "Pre-LN"), ("my/llama", "the original")])
def test_the_original_is_called_what_it_is(model, original):
    frame = measured(model, ["original", "no-norm"], 1)
    figure = efficiency.plot(frame)
    assert figure.axes[0].get_ylabel() == f"time / {original}"
    assert original in [text.get_text() for text in figure.legends[0].get_texts()]
    title, _, head, *_ = efficiency.markdown(frame).splitlines()
    assert title.endswith(f"time over that of {original}")
    assert head == f"| | models | cases | {original} | no norm |"


def test_labels_that_do_not_fit_beside_each_other_are_turned():
    for shapes, turned in ((1, False), (2, True)):
        for axes in efficiency.plot(measured("gpt-small", ["original", "no-norm"], shapes)).axes:
            assert all(bool(label.get_rotation()) is turned for label in axes.get_xticklabels())
            assert axes.get_xlim()[0] < 0 < 3 * shapes - 1 < axes.get_xlim()[1]


def test_a_variants_color_does_not_depend_on_which_others_there_are():
    colors = set()
    for variants in (["original", "pre-rmsnorm"], [*VARIANTS]):
        bars = efficiency.plot(measured("gpt-small", variants, 1)).axes[1].containers
        (own,) = (group for group in bars if group.get_label() == "Pre-RMSNorm")
        colors.add(own.patches[0].get_facecolor())
    assert len(colors) == 1
