"""What benchmarks of inference cannot measure is refused in one true line, before a model is loaded or timed."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from zoo import tiny

from normgeo.bench import inference as inference_bench
from normgeo.bench import inference_models
from normgeo.bench import norms as norm_bench
from normgeo.bench.inference import bench_inference, check_compiler
from normgeo.bench.norms import NORMS, bench_norms
from normgeo.bench.stream import VARIANTS, bench_stream
from normgeo.errors import DataError, ModelError
from normgeo.models import memory_explained, usable_device
from normgeo.tokens import TokenStream

NO_COMPILER = "No working C++ compiler found"


@pytest.fixture
def no_compiler(monkeypatch):
    """What torch.compile makes fails where it is called first, as without a compiler."""

    def fails(*_, **__):
        raise TorchDynamoException(f"{NO_COMPILER}\n\nSet TORCHDYNAMO_VERBOSE=1 for more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing is loaded and nothing is timed while inside."""
    monkeypatch.setattr(inference_models, "build", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(norm_bench, "_timed", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("norms", "--shapes", ","), "--shapes takes one or more, comma-separated; received ','"),
        (("norms", "--shapes", ""), "--shapes takes one or more, comma-separated; received ''"),
        (("norms", "--dtype", " , "), "--dtype takes one or more, comma-separated; received ' , '"),
        (
            ("norms", "--device", "meta"),
            "cannot use the device 'meta': Tensor.item() cannot be called on meta tensors;",
        ),
        (("norms", "--seed", -1), "--seed must be at least 0, received -1"),
        (("norms", "--device", "abacus"), "there is no device 'abacus'"),
        (("norms", "--shapes", "1x9x8,1x99999999x99999999"), "the shape 1x99999999x99999999 does not fit into memory;"),
        (("norms", "--shapes", f"1x{10**25}x8"), f"the shape 1x{10**25}x8 does not fit into memory; give smaller"),
        (("norms", "--shapes", "1x2x9,1x2x2,1x2x1"), "less has no LayerNorm to compare with; received 1x2x2, 1x2x1"),
        (
            ("norms", "--shapes", "axb"),
            "a shape is BATCHxTOKENSxWIDTH, whole numbers above 0, as 1x512x768; received",
        ),
        (("norms", "--shapes", "1x2x0"), "as 1x512x768; received '1x2x0'"),
        (("norms", "--seconds", "nan"), "--seconds takes a number from 0 on; received nan"),
        (("norms", "--seconds", "-1"), "--seconds takes a number from 0 on; received -1.0"),
        (("inference", "m", "--seconds", "nan"), "--seconds takes a number from 0 on; received nan"),
        (("inference", "m", "--dtype", ""), "--dtype takes one or more, comma-separated; received ''"),
        (("inference", "m", "--dtype", "int4"), "no dtype 'int4'; choose float32, bfloat16, float16, autocast"),
        (("inference", "m", "--variants", ","), "--variants takes one or more, comma-separated; received ','"),
        (("inference", "m", "--variants", "nope"), "no variant 'nope'; choose original, original-kernel,"),
        (
            ("inference", "m", "--device", "meta"),
            "cannot use the device 'meta': Tensor.item() cannot be called on meta",
        ),
    ],
)
def test_each_mistake_is_one_line_before_anything_is_done(words, message, normgeo, unmeasured):
    status, out, err = normgeo("bench", *words)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--sizes", "tiny, 7m"), "no size '7m'; the sizes are tiny, 70m"),
        (("train", "--sizes", ","), "--sizes takes one or more, comma-separated; received ','"),
        (("train", "--sizes", "tiny", "--vocabulary", 0), "--vocabulary must be at least 1, received 0"),
        (("stream", "--dtype", "half"), "no dtype 'half'; choose auto, float64, float32, bfloat16, float16"),
        (("stream", "--context", 300), "contexts of 300 tokens are longer than the model's 256; give --context 256"),
    ],
)
def test_benchmarks_of_steps_and_streams_refuse_what_they_cannot_run(words, message, normgeo):
    status, out, err = normgeo("bench", *words)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {message}")


def test_a_stream_is_timed_at_least_once(normgeo):
    for option in ("rounds", "batch"):
        says = f"--{option} must be at least 1, received 0"
        assert normgeo("bench", "stream", f"--{option}", 0) == (1, "", f"error: {says}")
        with pytest.raises(DataError, match=says):
            bench_stream(tiny("gpt2"), TokenStream.from_array([[5, 6]]), **{option: 0})
    assert "whole number of at least 1, received 0" in normgeo("bench", "stream", "--context", 0)[2]


def test_a_stream_of_a_short_text_is_said_to_be_of_its_tokens(normgeo):
    Path("short.txt").write_text("A river.")
    status, out, _ = normgeo("bench", "stream", "--data", "short.txt", "--context", 64, "--rounds", 1)
    assert status == 0
    assert out.startswith("embedded-layernorm, 1 x 4 tokens, float32, rounds: 1")
    assert all(f" {words} " in out for words in VARIANTS.values())


def test_help_names_what_can_be_chosen(normgeo):
    status, out, _ = normgeo("bench", "inference", "--help")
    told = re.findall(r"[\w-]+", out.partition("--variants")[2])
    assert (status, {*inference_models.VARIANTS} - {*told}) == (0, set())


@pytest.mark.parametrize("words", [("stream",), ("train", "--sizes", "tiny")], ids=" ".join)
def test_no_benchmark_takes_a_device_without_numbers(words, normgeo):
    status, out, err = normgeo("bench", *words, "--device", "meta")
    assert (status, out) == (1, "")
    assert err.startswith("error: cannot use the device 'meta'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--length", "16,999"), "256 positions: give a --length up to 256, received 999"),
        (("--length", "16", "--batch", f"1,{10**15}"), f"a batch of {10**15} x 16 tokens does not fit into memory;"),
        (("--length", "16", "--batch", f"1,{10**25}"), f"a batch of {10**25} x 16 tokens does not fit into memory;"),
        (("--length", "16", "--variants", "pre-crmsnorm"), "no variant pre-crmsnorm of TwinLMHeadModel; it has"),
    ],
)
def test_what_a_model_does_not_take_is_refused_before_it_is_converted(words, message, normgeo, monkeypatch):
    monkeypatch.setattr(inference_bench, "bases", lambda *_: pytest.fail("converted"))
    status, out, err = normgeo("bench", "inference", "embedded-rmsnorm", *words)
    assert (status, out) == (1, "")
    assert message in err


@pytest.mark.parametrize("nothing", ["dtypes", "phases", "modes", "batches", "lengths"])
def test_nothing_to_measure_is_called_that(nothing):
    with pytest.raises(ModelError, match=r"was given; choose|give one of each"):
        bench_inference(tiny("gpt2"), **({"lengths": (8,), nothing: ()}))
    for options in ({"shapes": ()}, {"dtypes": ()}):
        with pytest.raises(ModelError, match="give one of each"):
            bench_norms(**options)


def test_a_model_that_decodes_is_not_said_not_to(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(ModelError, match="decoding is measured in mode eager alone"):
        bench_inference(tiny("gpt2"), variants=("no-norm",), lengths=(8,), phases=("decode",), modes=("compiled",))


def test_other_errors_are_not_said_to_be_of_memory():
    with pytest.raises(RuntimeError, match="sizes differ"), memory_explained("it", "give less"):
        raise RuntimeError("sizes differ")
    with pytest.raises(ModelError, match="it does not fit into memory; give less"), memory_explained("it", "give less"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_device_that_computes_is_used():
    assert usable_device("cpu") == "cpu"
    assert usable_device("auto") in ("cpu", "mps")


# --- without a compiler -----------------------------------------------------------------------------------------------


def test_without_a_compiler_norms_are_timed_but_not_the_compiled_one(no_compiler, tmp_path, normgeo):
    out = tmp_path / "raw.parquet"
    status, printed, err = normgeo(
        "bench", "norms", "--shapes", "1x2x16", "--dtype", "float32", "--rounds", 3, "--seconds", 0, "--out", out
    )
    assert (status, err) == (0, "")
    assert "RMSNorm compiled" not in printed
    found = set(pd.read_parquet(out).norm)
    assert "RMSNorm compiled" in NORMS
    assert {"layer_norm", "RMSNorm", "copy"} <= found <= set(NORMS) - {"RMSNorm compiled"}


def test_without_a_compiler_nothing_is_measured_compiled(no_compiler, normgeo, monkeypatch):
    monkeypatch.setattr(inference_models, "build", lambda *_, **__: pytest.fail("loaded"))
    status, out, err = normgeo("bench", "inference", "m", "--compile")
    assert (status, out) == (1, "")
    assert err == (
        f"error: torch.compile cannot compile for cpu: {NO_COMPILER}; install a compiler, or leave out --compile"
    )


def test_a_compiler_that_fails_at_the_model_alone_is_named_too(no_compiler):
    with pytest.raises(ModelError, match=re.escape(f"ViTForImageClassification: {NO_COMPILER}; install")):
        bench_inference(tiny("vit"), variants=("no-norm",), modes=("compiled",))


def test_the_compiler_that_torch_looks_for_is_missing(monkeypatch, tmp_path):
    """With an empty cache, and nothing where torch looks for a compiler."""
    from torch._inductor import config

    torch.compiler.reset()
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(fx_graph_cache=False), pytest.raises(ModelError, match=r"for cpu: .*no-such-compiler"):
        check_compiler("cpu")
