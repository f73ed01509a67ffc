"""Benchmarks of models that lack something: a conversion, a decoder's cache, a norm whose parameters nobody reads."""

import numpy as np
import pandas as pd
import pytest
from zoo import tiny

from analyses import efficiency
from normgeo.architectures import architectures
from normgeo.architectures import tiny as tiny_architecture
from normgeo.bench.inference import bench_inference
from normgeo.bench.inference_models import VARIANTS
from normgeo.bench.stream import VARIANTS as WAYS
from normgeo.bench.stream import bench_stream
from normgeo.bench.training import task_of
from normgeo.errors import ModelError, NormGeoError
from normgeo.tokens import TokenStream

ARCHITECTURES = {a.model_type: a for a in architectures()}
FEW = {"rounds": 3, "seconds": 0.0, "lengths": (8,)}


def test_norms_whose_parameters_a_block_reads_can_be_left_out():
    """Mamba's blocks read their norm's dtype."""
    frame = bench_inference(tiny_architecture(ARCHITECTURES["mamba"]), variants=["no-norm", "pre-rmsnorm"], **FEW)
    assert set(frame.variant) == {"original", "no-norm", "pre-rmsnorm"}
    assert frame[frame.variant == "no-norm"].error.gt(0.01).all()


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
    assert f"time over that of {original}" in efficiency.markdown(frame)


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
