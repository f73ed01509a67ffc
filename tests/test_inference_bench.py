"""The benchmark of inference: its formulas against hand numbers, its checks against sabotage; no times are judged."""

import collections
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner
from zoo import tiny

from analyses import efficiency
from normgeo.bench import inference as inference_bench
from normgeo.bench import inference_models
from normgeo.bench.inference import bench_inference, check_names, summary
from normgeo.bench.inference_models import SIZES, VARIANTS, available, bases, build, derived, in_dtype, main_sites
from normgeo.bench.norm_timer import NormTimer
from normgeo.cli import main as cli
from normgeo.errors import DataError, ModelError, NormGeoError
from normgeo.system.timing import Stopwatch, interleaved

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def raw():
    return bench_inference(
        tiny("gpt2"), "tiny", dtypes=("float32", "autocast"), batches=(1, 3), lengths=(8,),
        phases=("forward", "decode"), rounds=3,
    )  # fmt: skip


def test_every_variant_is_timed_in_every_round_of_every_case(raw):
    cases = raw.groupby(["dtype", "batch", "length", "phase", "mode"])
    assert set(cases.groups) == {
        (dtype, batch, 8, phase, "eager")
        for dtype in ("float32", "autocast") for batch in (1, 3) for phase in ("forward", "decode")
    }  # fmt: skip
    sites = main_sites(tiny("gpt2"))
    for _, part in cases:
        times = part.pivot(index="round", columns="variant", values="seconds")
        assert list(times.index) == [0, 1, 2]
        assert set(times.columns) == set(available(tiny("gpt2"), sites))
        assert (times > 0).all(axis=None)
        inside = part.pivot(index="round", columns="variant", values="norm_seconds")
        assert (inside > 0).all(axis=None)
    assert {"device", "threads", "torch", "transformers", "normgeo", "commit", "parameters", "norms", "d"} <= {*raw}
    assert (raw.d == 32).all()
    assert (raw.norms == 5).all()


def test_outputs_are_the_originals(raw):
    equal = raw[raw.variant != "no-norm"]
    assert (equal[equal.dtype == "float32"].error < 1e-5).all()
    assert (equal[equal.dtype == "autocast"].error > 1e-4).all()
    assert (raw[raw.variant == "no-norm"].error > 0.05).all()


def test_a_frame_that_was_measured_is_drawn_and_tabled(raw, tmp_path):
    path = tmp_path / "raw.parquet"
    raw.to_parquet(path)
    frame = efficiency.compute(path)
    assert len(frame) == raw.groupby(["dtype", "batch", "phase", "variant"]).ngroups
    assert len(efficiency.plot(frame).axes) == 2 * 3  # a row for each dtype of passes, one for decoding
    lines = efficiency.markdown(frame).splitlines()
    rows = [line for line in lines if line.startswith("| float32, decode, eager")]
    assert len(rows) == 2
    means = frame[(frame.dtype == "float32") & (frame.phase == "decode")].groupby("variant").ratio.mean()
    assert f"{means['no-norm']:.4f}" in rows[0]
    two = efficiency.markdown(pd.concat([frame.assign(model=name) for name in ("vit-tiny", "vit-base", "gpt-small")]))
    kinds = [line.split(" | ")[1:3] for line in two.splitlines() if line.startswith("| float32, decode, eager")]
    assert kinds == 2 * [["ViT", "4"], ["GPT-3", "2"]]
    wrong = {"bench inference": pd.DataFrame({"a": [1]}), "than one time of the same": pd.concat([raw, raw]),
             "without those of the original": raw[raw.variant == "fused"]}  # fmt: skip
    for says, table in wrong.items():
        table.to_parquet(path)
        with pytest.raises(DataError, match=says):
            efficiency.compute(path)


# --- formulas ---------------------------------------------------------------------------------------------------------


def frame_of(times, inside=None):
    rows = [
        {"variant": name, "round": k, "seconds": t, "norm_seconds": (inside or times)[name][k], "error": 0.0}
        for name, values in times.items() for k, t in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(model="m", dtype="float32")


def test_ratio_and_share_by_hand():
    """Of a gap of 10 and 100 in rounds of 100 and 1000, half is captured; ratios are of the same round."""
    times = {"original": [100.0, 1000.0, 100.0], "fused": [95.0, 950.0, 99.0], "no-norm": [90.0, 900.0, 90.0]}
    found = summary(frame_of(times)).set_index("variant")
    assert found.seconds["fused"] == 99.0
    assert found.ratio["fused"] == pytest.approx(0.95)
    assert found.ratio_q75["fused"] == pytest.approx(0.97)
    assert found.share["fused"] == pytest.approx(0.5)
    assert found.share["no-norm"] == pytest.approx(1.0)
    assert found.share["original"] == 0
    assert found.gap_clear.all()
    assert found.rounds.tolist() == [3, 3, 3]


def test_a_gap_within_noise_has_no_share():
    times = {"original": [100.0] * 4, "fused": [99.0] * 4, "no-norm": [90.0, 98.0, 101.0, 103.0]}
    inside = {"original": [10.0] * 4, "fused": [4.0] * 4, "no-norm": [2.0] * 4}
    found = summary(frame_of(times, inside)).set_index("variant")
    assert not found.gap_clear.any()
    assert found.share.isna().all()
    assert found.norm_gap_clear.all()
    assert found.norm_share["fused"] == pytest.approx(6 / 8)


def test_without_a_floor_there_is_no_share():
    found = summary(frame_of({"original": [1.0, 1.0], "fused": [0.9, 0.8]}))
    assert found.share.isna().all()
    assert found.ratio.tolist() == pytest.approx([1.0, 0.85])


def test_rounds_are_random_and_end_with_the_time():
    calls = []
    measures = {name: lambda name=name: calls.append(name) for name in "abcdef"}
    found = list(interleaved(measures, rounds=4, seconds=100.0))
    assert calls[:6] == list("abcdef")  # the warm-up
    orders = ["".join(calls[6 * k : 6 * k + 6]) for k in range(1, 5)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len(set(orders)) > 1
    assert [number for number, _, _ in found] == [k for k in range(4) for _ in "abcdef"]
    assert len(list(interleaved(measures, rounds=50, seconds=0.0))) == 3 * 6


# --- the time of norms ------------------------------------------------------------------------------------------------


class Watch(Stopwatch):
    """Notes what is called instead of how long it takes."""

    def __init__(self):
        super().__init__(CPU)
        self.calls = []

    def __call__(self, function, *args, **kwargs):
        self.calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **kwargs)


def timed_inside(model):
    """What is timed of a forward pass, which changes neither its output nor the model's modules."""
    length = 8 if model.main_input_name == "input_ids" else 0
    sites, inputs = main_sites(tiny(model.config.model_type)), inference_bench._inputs(model, 2, length, "forward")
    forwards = [vars(module).get("forward") for module in model.modules()]
    classes = {type(module): type(module).forward for module in model.modules()}
    with torch.inference_mode():
        before = model(**inputs)[0]
        with NormTimer(model, [site.name for site in sites], watch := Watch()):
            inside = model(**inputs)[0]
    assert torch.equal(inside, before)
    assert forwards == [vars(module).get("forward") for module in model.modules()]
    assert all(cls.forward is forward for cls, forward in classes.items())
    return collections.Counter(watch.calls)


@pytest.mark.parametrize("name", ["gpt2", "vit", "llama"])
def test_norms_and_residual_additions_are_what_is_timed(name):
    """Two layers with two norms and two additions each, and a final norm."""
    calls = timed_inside(tiny(name))
    assert calls["forward"] == 5
    assert calls.total() == 5 + 4


@pytest.mark.parametrize("variant", ["pre-rmsnorm", "pre-crmsnorm", "no-norm"])
def test_the_same_is_timed_of_variants(variant):
    model = tiny("gpt2")
    sites = main_sites(model)
    calls = timed_inside(derived(variant, bases(model, sites, [variant]), sites))
    assert (calls["forward"], calls.total()) == (5, 9)


def test_fused_norms_and_additions_are_timed_together():
    """The first norm has no addition before it, and the first addition may not be in place."""
    model = tiny("gpt2")
    sites = main_sites(model)
    calls = timed_inside(derived("fused", bases(model, sites, ["fused"]), sites))
    fused = calls["add_norm_"]
    assert fused == 3
    assert calls["forward"] + fused == 5
    assert calls.total() - calls["forward"] == 4


def test_stopwatch_adds_up_what_it_calls():
    watch = Stopwatch(CPU)
    assert watch(max, 1, 2) == 2
    first = watch.seconds()
    watch(max, 1, 2)
    assert 0 < first < watch.seconds()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_variant_with_wrong_outputs_is_refused(monkeypatch):
    def sabotaged(model, sites):
        model.get_submodule(sites[2].name).eps += 0.01
        return model

    wrong = inference_models.Variant("pre-rmsnorm", "sabotaged", sabotaged)
    monkeypatch.setitem(VARIANTS, "pre-rmsnorm-torch", wrong)
    with pytest.raises(NormGeoError, match="pre-rmsnorm-torch gives other outputs than the original in float32"):
        bench_inference(tiny("gpt2"), variants=("pre-rmsnorm-torch",), lengths=(8,), rounds=1)


def test_a_variant_that_gives_nan_is_refused(monkeypatch):
    def sabotaged(model, _):
        model.lm_head.weight = nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
        return model

    monkeypatch.setitem(VARIANTS, "original-kernel", inference_models.Variant("original", "sabotaged", sabotaged))
    with pytest.raises(NormGeoError, match="relative error nan"):
        bench_inference(tiny("gpt2"), variants=("original-kernel",), lengths=(8,), dtypes=("bfloat16",), rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": ("float8",)}, "no dtype 'float8'; choose float32"),
        ({"variants": ("fast",)}, "no variant fast of GPT2LMHeadModel; it has original"),
        ({"phases": ("training",)}, "no phase 'training'; choose forward, decode"),
        ({"modes": ("jit",)}, "no mode 'jit'; choose eager"),
        ({"modes": ("graph",)}, "CUDA graphs need a CUDA device"),
        ({"lengths": (65,)}, "64 positions: give a --length up to 64, received 65"),
        ({"batches": (0,)}, "a batch is at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(NormGeoError, match=message):
        bench_inference(tiny("gpt2"), **({"lengths": (8,), "variants": ("no-norm",), "rounds": 1} | options))


def test_what_cannot_decode_is_named():
    with pytest.raises(ModelError, match="nothing to measure: ViTForImageClassification generates no text one"):
        bench_inference(tiny("vit"), variants=("no-norm",), phases=("decode",), rounds=1)


def test_crmsnorm_is_no_variant_of_an_rmsnorm_model():
    with pytest.raises(NormGeoError, match="no variant pre-crmsnorm of LlamaForCausalLM"):
        bench_inference(tiny("llama"), variants=("pre-crmsnorm",), lengths=(8,))


# --- models and variants ----------------------------------------------------------------------------------------------


def test_an_rmsnorm_model_is_compared_by_kernel():
    found = bench_inference(tiny("gemma"), lengths=(8,), rounds=3)  # its gain is 1 + w
    assert {"original", "pre-rmsnorm", "pre-rmsnorm-torch", "no-norm"} <= set(found.variant)
    assert (found[found.variant != "no-norm"].error < 1e-5).all()


def test_images_have_their_own_length():
    assert set(bench_inference(tiny("vit"), variants=("no-norm",), rounds=1).length) == {5}


def test_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(options) or model)
    found = bench_inference(
        tiny("vit"), variants=("pre-rmsnorm", "pre-rmsnorm-torch", "no-norm"), modes=("eager", "compiled"), rounds=3
    )
    assert compiled == [{"dynamic": False}] * 3
    found = found[found["mode"] == "compiled"]
    assert set(found.variant) == {"original", "pre-rmsnorm", "no-norm"}
    assert found.norm_seconds.isna().all()
    assert summary(found).norm_share.isna().all()


def test_variants_share_weights_where_these_are_the_same():
    model = tiny("gpt2")
    sites = main_sites(model)
    models = bases(model, sites, list(VARIANTS))
    at = lambda name: derived(name, models, sites).transformer.h[0].mlp.c_fc.weight.data_ptr()  # noqa: E731
    assert at("no-norm") == at("original") == model.transformer.h[0].mlp.c_fc.weight.data_ptr()
    assert at("pre-rmsnorm-torch") == at("pre-rmsnorm") != at("pre-crmsnorm")
    assert derived("pre-crmsnorm", models, sites).transformer.wte.weight.shape[1] == 31


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("vit-tiny", 5.7e6), ("vit-small", 22e6), ("vit-base", 86.6e6), ("vit-large", 304e6), ("vit-huge", 632e6),
     ("vit-giant", 1.84e9), ("gpt-small", 126e6), ("gpt-medium", 356e6), ("gpt-large", 760e6), ("gpt-xl", 1.3e9),
     ("gpt-2.7b", 2.65e9)],
)  # fmt: skip
def test_sizes_are_the_papers(name, parameters):
    """Parameters as published for these ViTs (Dosovitskiy et al., Zhai et al.) and GPT-3s (Brown et al.)."""
    config = SIZES[name]()
    cls = inference_models.ViTForImageClassification if "vit" in name else inference_models.GPT2LMHeadModel
    with torch.device("meta"):
        assert cls(config).num_parameters() == pytest.approx(parameters, rel=0.03)


def test_built_models_are_perturbed_and_random_by_seed(monkeypatch):
    monkeypatch.setitem(SIZES, "small", lambda: inference_models._gpt(32, 2, 4))
    torch.manual_seed(3)
    a, b, c = build("small"), build("small"), build("small", seed=1)
    assert torch.equal(a.transformer.wte.weight, b.transformer.wte.weight)
    assert not torch.equal(a.transformer.wte.weight, c.transformer.wte.weight)
    assert a.transformer.h[1].ln_1.weight.std() > 0.05
    assert a.transformer.h[1].ln_1.bias.std() > 0.05
    with pytest.raises(ModelError, match="cannot load the model 'vit-colossal'"):
        build("vit-colossal")


# --- int8 -------------------------------------------------------------------------------------------------------------


def test_int8_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelError, match=r"pip install 'normgeo\[int8\]'"):
        in_dtype(tiny("gpt2"), "int8")
    with pytest.raises(ModelError, match="int8 needs torchao"):  # before anything is measured, or loaded
        check_names(("float32", "int8"))


def test_int8_quantizes_every_matrix_of_a_gpt2(monkeypatch):
    """With a quantizer of the test's own: a row's weights are 127 steps either way."""

    def quantize(model, config):
        assert config == {"version": 2}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                step = module.weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127  # padded rows are zero
                module.weight.data = (module.weight / step).round() * step

    torchao = types.ModuleType("torchao.quantization")
    torchao.quantize_ = quantize
    torchao.Int8WeightOnlyConfig = dict
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    model = tiny("gpt2")
    quantized = in_dtype(model, "int8")
    assert sum(isinstance(module, nn.Linear) for module in quantized.modules()) == 2 * 4 + 1
    found = bench_inference(model, dtypes=("int8",), lengths=(8,), rounds=1)
    errors = found.drop_duplicates("variant").set_index("variant").error
    assert 1e-3 < errors["original"] < 0.05
    assert 1e-3 < errors["pre-rmsnorm"] < 4 * errors["original"] + 1e-4


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_on_cuda(dtype):
    found = bench_inference(
        tiny("gpt2").cuda(), lengths=(16,), dtypes=(dtype,), modes=("eager", "graph"), phases=("forward", "decode"),
        rounds=3,
    )  # fmt: skip
    assert set(zip(found["mode"], found.phase, strict=True)) == {
        ("eager", "forward"), ("graph", "forward"), ("eager", "decode"),
    }  # fmt: skip
    assert (found.seconds > 0).all()
    assert (found[found["mode"] == "eager"].norm_seconds > 0).all()
    assert found.device.str.contains("NVIDIA|AMD").all()


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "inference", *map(str, arguments)])


def test_command(tmp_path):
    out = tmp_path / "raw.parquet"
    done = run(*["embedded-rmsnorm"] * 2, "--length", "8", "--rounds", "3", "--decode", "--out", out)
    assert done.exit_code == 0, done.output
    assert "embedded-rmsnorm, float32, 1 x 8, decode, eager; rounds: 3" in done.output
    assert "norms share" in done.output
    frame = pd.read_parquet(out)
    assert set(frame.phase) == {"forward", "decode"}
    np.testing.assert_array_equal(frame.groupby(["phase", "variant"]).size(), 3)  # of a model that is given twice too
    assert [p.name for p in tmp_path.iterdir()] == ["raw.parquet"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model",), "cannot load the model 'no-such-model'"),
        (("embedded-rmsnorm", "--batch", "1,x"), "--batch takes whole numbers"),
        (("embedded-rmsnorm", "--out", "nowhere/raw.parquet"), "no directory nowhere"),
    ],
)
def test_command_says_what_is_wrong(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, NormGeoError)
    assert message in str(done.exception)
