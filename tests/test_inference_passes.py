"""What the benchmark of inference runs in every round is the same pass, and its times have columns of their own."""

import contextlib

import pytest
import torch
from zoo import tiny

from normgeo.architectures import architectures
from normgeo.architectures import tiny as tiny_architecture
from normgeo.bench import inference as inference_bench
from normgeo.bench import passes
from normgeo.bench.inference import bench_inference
from normgeo.bench.inference_models import main_sites
from normgeo.bench.norm_timer import NormTimer
from normgeo.bench.passes import Case, Pass
from normgeo.errors import NormGeoError
from normgeo.system.timing import Stopwatch

ARCHITECTURES = {a.model_type: a for a in architectures()}


class Counting(Stopwatch):
    calls = 0

    def __call__(self, function, *args, **kwargs):
        self.calls += 1
        return function(*args, **kwargs)

    def seconds(self):
        return float(self.calls)


def test_every_token_is_decoded_with_the_same_cache():
    """However many were decoded before: what comes in is taken out again."""
    model = tiny("gpt2")
    inputs = inference_bench._inputs(model, 3, 8, "decode")
    run = Pass(model, inputs, Case("float32", 3, 8, "decode"))
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, -1:]], 1)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
    for _ in range(3):
        torch.testing.assert_close(run.output(), expected, rtol=1e-4, atol=1e-5)
        assert min(run.seconds(), run.norm_seconds([site.name for site in main_sites(model)])) > 0
        assert [cache.get_seq_length() for cache in run.cache.values()] == [8]


@pytest.mark.parametrize("name", ["mamba", "gemma3_text", "xlstm"])
def test_caches_that_give_no_token_back_are_decoded_from_too(name):
    """States that are added up, and windows that are full."""
    model = tiny_architecture(ARCHITECTURES[name])
    length = 1 + getattr(model.config, "sliding_window", 4)
    inputs = inference_bench._inputs(model, 1, length, "decode")
    run = Pass(model, inputs, Case("float32", 1, length, "decode"))
    with torch.no_grad():
        expected = model(torch.cat([inputs["input_ids"], inputs["input_ids"][:, -1:]], 1)).logits[:, -1:]
    for _ in range(3):
        torch.testing.assert_close(run.output(), expected, rtol=1e-4, atol=1e-5)


def test_whole_passes_and_norms_have_columns_of_their_own(monkeypatch):
    monkeypatch.setattr(Pass, "seconds", lambda self: 3.0)
    monkeypatch.setattr(Pass, "norm_seconds", lambda self, norms: float(len(norms)) / 4)
    rounds, options = inference_bench.interleaved, []
    monkeypatch.setattr(inference_bench, "interleaved", lambda *a, **o: options.append(o) or rounds(*a, **o))
    found = bench_inference(tiny("gpt2"), variants=("no-norm",), lengths=(8,), rounds=1, seconds=2.0, seed=5)
    assert options == [{"rounds": 1, "seconds": 2.0, "seed": 5}]
    assert found[["seconds", "norm_seconds", "seed"]].drop_duplicates().to_numpy().tolist() == [[3.0, 1.25, 5]]


def test_a_last_digit_is_no_mistake_where_the_original_has_the_right_one(monkeypatch):
    """As of a model of images and texts, which of one pair gives a single number."""
    model, options = tiny("llama"), {"variants": ("pre-rmsnorm",), "lengths": (8,), "rounds": 3, "seconds": 0.0}
    for dtype, last in (("float16", 2.0**-10), ("autocast", 2.0**-7), ("float32", 1e-5)):
        for off, wrong in ((0.9 * last, False), (2 * last + 1e-4, True)):
            errors = iter((0.0, off))
            monkeypatch.setattr(inference_bench, "_error", lambda *_, errors=errors: next(errors))
            with pytest.raises(NormGeoError, match="gives other outputs") if wrong else contextlib.nullcontext():
                bench_inference(model, dtypes=(dtype,), **options)


def test_what_is_added_by_name_is_an_addition_where_both_are_the_streams():
    model, x = tiny("gpt2"), torch.ones(1, 8, 32)
    watch = Counting(torch.device("cpu"))
    with torch.no_grad(), NormTimer(model, ["transformer.ln_f"], watch):
        model.transformer.ln_f(x)
        torch.add(input=x, other=x)
        torch.add(x, other=x)
        torch.add(input=torch.ones(3), other=torch.ones(3))
        torch.add(input=x, other=1.0)
    assert watch.calls == 1 + 2


def test_all_norms_and_additions_of_a_pass_are_timed(monkeypatch):
    monkeypatch.setattr(passes, "Stopwatch", Counting)
    model = tiny("gpt2")
    inputs = inference_bench._inputs(model, 1, 8, "forward")
    run = Pass(model, inputs, Case("float32", 1, 8))
    assert run.seconds() == 1
    assert run.norm_seconds([site.name for site in main_sites(model)]) == 5 + 4
