"""What users give in Python: all that can be meant is taken, and all else is refused in one line."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from normgeo import (
    AngleTable,
    CRMSNorm,
    Directions,
    LayerNorm,
    RMSNorm,
    find_sites,
    load_model,
    load_tokenizer,
    load_tokens,
    measure_angles,
    observe,
    standardize,
)  # fmt: skip
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.bench.inference import bench_inference
from normgeo.bench.inference_models import build
from normgeo.bench.norms import bench_norms
from normgeo.bench.store import bench_store
from normgeo.bench.stream import bench_stream
from normgeo.errors import DataError, ModelError, NormGeoError, RunError
from normgeo.models import usable_device
from normgeo.store.capture import CaptureConfig
from normgeo.system.files import read_table
from normgeo.tokens import TokenStream

IDS = np.arange(3, 63).reshape(6, 10)


class Counting:
    """A sink."""

    def __init__(self):
        self.sites = set()

    def begin(self, batch): ...

    def take(self, site, phase, hidden):
        self.sites.add(site)

    def end(self): ...


def test_what_is_observed_is_chosen_as_what_is_measured():
    model, found = zoo.tiny("qwen3"), []
    for asked in ({}, {"sites": "mlp"}, {"qk": True}, {"sites": find_sites(model)[1:2]}):
        sink = Counting()
        assert observe(model, IDS, [sink], **asked) == IDS.size
        found.append(len(sink.sites))
    assert found == [5, 2, 9, 1]


def test_sinks_may_be_an_iterator(untyped):
    sink = Counting()
    observe(zoo.tiny("gpt2"), IDS, iter([sink]))
    assert len(sink.sites) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_tokens": True}, "--tokens must be a whole number, received True"),
        ({"sites": "nothing"}, "no site matches 'nothing'"), ({"n_tokens": 1.5}, "--tokens must be a whole number"),
        ({"batch": 0}, "--batch must be at least 1"), ({"sinks": Counting()}, "sinks are a list of objects with begin"),
        ({"sinks": [3]}, "received int"),
    ],
)  # fmt: skip
def test_what_cannot_be_observed_is_said(given, message):
    with pytest.raises(DataError, match=message):
        observe(zoo.tiny("gpt2"), IDS, **{"sinks": [Counting()]} | given)


@pytest.mark.parametrize("grad", [False, True])
def test_ids_may_be_tensors(grad):
    expected = TokenStream.from_array(IDS)
    assert TokenStream.from_array(torch.from_numpy(IDS)).digest == expected.digest
    for tensor in (torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=grad)):
        with pytest.raises(DataError, match="array: token ids must be"):
            TokenStream.from_array(tensor)


def test_a_missing_text_is_none_wherever_it_is_missing(tmp_path, tokenizer):
    texts = [None, "A river.", None, "A fox."]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "t.parquet")
    pd.DataFrame({"text": texts}).to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    given = [tmp_path / "t.parquet", tmp_path / "t.jsonl", texts, [{"text": text} for text in texts], texts[1::2]]
    found = [[ids.tolist() for ids, _ in load_tokens(data, tokenizer, 4).contexts(0)] for data in given]
    assert found == found[:1] * 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["a\ud800b"],), "text 0: '.ud800' is half a character"),
        (("sample", {"revision": "main"}), "only a data set on the hub has revisions"),
        ((["A fox."], {"revision": "main"}), "only a data set on the hub has revisions; leave 'main' out"),
        (("ids.npy", {"exclude": {"A fox."}}), "the data is token ids, of which no texts can be left out"),
        ((IDS, {"exclude": {"A fox."}}), "the data is token ids, of which no texts can be left out"),
    ],
)  # fmt: skip
def test_what_no_tokens_come_of_is_said(given, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", IDS)
    data, options = given[0], dict(*given[1:])
    with pytest.raises(DataError, match=message):
        load_tokens(data, tokenizer, 4, **options)


def test_one_is_not_its_letters(untyped):
    assert RunConfig("gpt2").models == ("gpt2",)
    assert CaptureConfig(RunConfig("gpt2"), "post").phases == ("post",)


def test_paths_may_be_strings(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig((str(home / "gpt2"),), str(home / "ids.npy"), 80, null=4)
    start_run(config, "run", progress=False)
    with pytest.raises(RunError, match="the run in run is complete"):
        resume_run("run")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "float32"), ({"dtype": None}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"),
        ({"device": "auto"}, "float32"), ({"dtype": torch.float64, "device": torch.device("cpu")}, "float64"),
    ],
)  # fmt: skip
def test_models_are_loaded_as_everywhere(given, dtype):
    assert str(load_model("embedded-layernorm", **given).dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("given", [{"dtype": "float8"}, {"device": "gpu"}, {"device": "meta"}])
def test_what_a_model_cannot_be_loaded_as_is_said(given):
    with pytest.raises(ModelError, match=r"no dtype 'float8'|there is no device 'gpu'|cannot use the device 'meta'"):
        load_model("embedded-layernorm", **given)


def test_a_device_of_another_torch_is_one_sentence():
    """Which torch ends with a list of all that it has, of 1,400 characters."""
    with pytest.raises(
        ModelError, match=r"^cannot use the device 'xla': .{,120}; give one that this machine has, as cpu$"
    ):
        usable_device("xla")


def test_no_rounds_are_no_benchmark(tmp_path):
    tokens = load_tokens("sample", load_tokenizer("embedded-layernorm"), 16)
    for bench in (
        lambda: bench_norms([(1, 4, 64)], rounds=0), lambda: bench_store(RunConfig(), tmp_path, rounds=0),
        lambda: bench_stream(load_model("embedded-layernorm"), tokens, rounds=0),
        lambda: bench_inference(build("vit-tiny"), rounds=0),
    ):  # fmt: skip
        with pytest.raises(NormGeoError, match="--rounds must be at least 1, received 0"):
            bench()


def test_a_damaged_table_is_said(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RunError, match=r"t\.parquet cannot be read as a table \("):
        read_table(tmp_path / "t.parquet")


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm, lambda d: CRMSNorm(d + 1)])
def test_norms_of_whole_numbers_are_refused(norm):
    """They were truncated."""
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=r"floating point|Long"):
        norm(3)(torch.tensor([[1, 2, 3]]))
    with pytest.raises(TypeError, match="was given no tensor"):
        norm(3)()


def test_whole_numbers_are_standardized_as_floats(untyped):
    found, truth = standardize(torch.tensor([1, 2, 3])), standardize(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(found, truth)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda path: load_tokens("sample", "embedded-layernorm"), DataError, "load_tokenizer gives.*received str"),
        (lambda path: load_tokens("sample", context="128"), DataError, "whole number of at least 1, received '128'"),
        (lambda path: AngleTable.concatenated([]), DataError, "no tables"),
        (lambda path: measure_angles(zoo.tiny("gpt2"), IDS, name=5), DataError, "a string; received 5"),
        (lambda path: Directions.seeded(4, seed=-1), DataError, "--seed must be at least 0"),
        (lambda path: Directions.seeded(0), DataError, "--d must be at least 1"),
        (lambda path: load_tokenizer("embedded-layernrom"), ModelError, "did you mean embedded-layernorm"),
        (lambda path: load_model("embedded-layernorm", device_map="balanced"), ModelError, "takes auto"),
        (lambda path: RunConfig(device="cpu", device_map="auto"), NormGeoError, "is one device, and --device-map auto"),
    ],
)
def test_other_mistakes_are_said(untyped, tmp_path, call, error, says):
    with pytest.raises(error, match=says):
        call(tmp_path)
