"""What a run is of where its configuration does not say, and what it will cost."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from torch import nn

from normgeo import load_tokenizer, load_tokens
from normgeo.angles import cost, job
from normgeo.angles.job import RunConfig
from normgeo.comparison import compare as comparison
from normgeo.errors import DataError, RunError
from normgeo.models import copied, weights_digest
from normgeo.numbers import check_numbers

NAME = "embedded-layernorm"


@pytest.mark.parametrize(("most", "context"), [(2048, 1024), (512, 512), (None, 1024)])
def test_contexts_are_of_1024_tokens_or_as_many_as_the_model_has_positions_for(monkeypatch, most, context):
    monkeypatch.setattr(job, "max_context", lambda model: most)
    monkeypatch.setattr(job, "check_context", lambda model, context: None)  # the model itself has fewer
    monkeypatch.setattr(job, "check_pass", lambda model, sites, context: None)
    assert job.prepare(RunConfig((NAME,), tokens=2000), NAME).tokens.context == context


def test_of_token_ids_no_tokenizer_is_read(home, tmp_path):
    """Else a damaged one, which is not needed, would be warned of."""
    model = shutil.copytree(home / "gpt2", tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    about = job.prepare(RunConfig((str(model),), str(home / "ids.npy"), null=2), str(model)).about
    assert [about[key] for key in ("tokenizer", "tokenizer_sha256", "vocabulary")] == [None] * 3


class LaidOut(nn.Linear):
    """As bitsandbytes' of 4 bits on some CPUs: laid out anew when it first runs, it is spoiled when it is told of."""

    ran = False

    def forward(self, x):
        self.ran = True
        return super().forward(x)

    def _save_to_state_dict(self, *args):
        self.weight.data *= 1 - self.ran
        super()._save_to_state_dict(*args)


def test_weights_are_told_of_before_they_run(tiny, ids, monkeypatch, tmp_path):
    def made(*_, **__):
        model = copied(tiny("gpt_neox"))
        model.gpt_neox.layers[1].mlp.dense_4h_to_h.__class__ = LaidOut
        return model

    for module in (job, comparison):
        monkeypatch.setattr(module, "load_model", made)
    np.save(tmp_path / "ids.npy", ids)
    digest, config = weights_digest(made()), RunConfig(("a", "b"), str(tmp_path / "ids.npy"), tokens=64, null=2)
    prepared = job.prepare(config, "a")
    assert prepared.about["weights_sha256"] == digest
    assert prepared.model.gpt_neox.layers[1].mlp.dense_4h_to_h.weight.any()
    comparison.compare_run(config, tmp_path / "out", rounds=0, progress=False)
    about = json.loads((tmp_path / "out/comparison.json").read_text())
    assert about["weights_sha256"] == {"a": digest, "b": digest}


@pytest.mark.parametrize(
    ("keep", "at_most", "kept"),
    [(None, 500, True), (None, 499, False), ("scalars", 499, True), ("none", 500, False)],
)
def test_scalars_are_kept_of_not_too_many_tokens_unless_said(monkeypatch, keep, at_most, kept):
    monkeypatch.setattr(job, "KEEP_SCALARS_UP_TO", at_most)
    assert job.prepare(RunConfig((NAME,), tokens=500, context=64, keep=keep), NAME).keep is kept


def test_a_configuration_is_compared_without_where_it_and_its_parts_are_from():
    part = {"hidden_size": 8, "_name_or_path": "a", "transformers_version": "4"}
    assert job._lasting(part | {"text_config": part}) == {"hidden_size": 8, "text_config": {"hidden_size": 8}}


@pytest.mark.parametrize(
    ("n_tokens", "seconds", "took"),
    [
        (25, 0.002, "about 1 s"), (25, 2, "about 3 s"), (1000, 2, "about 55 s"), (100_000, 2, "about 92 min"),
        (10**6, 2, "about 15.3 h"),
    ],
)  # fmt: skip
def test_the_time_of_a_run_is_that_of_a_second_batch_for_all_its_tokens(tiny, monkeypatch, n_tokens, seconds, took):
    clock, shapes = iter([0.0, 100.0, 200.0, 200 + seconds]), []  # the first batch warms up
    monkeypatch.setattr(cost, "forward", lambda model, batch, known: shapes.append(batch.ids.shape))
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    said = cost.cost(tiny("gpt2"), n_tokens, 10, 4, 2_345_678)
    assert said.startswith(f"{took}, ")
    assert said.endswith(" of memory, 2.3 MB of disk")
    assert shapes == [(min(4, n_tokens // 10), 10)] * 2
    assert 0.5 < cost._memory(tiny("gpt2")) / psutil.Process().memory_info().rss < 50  # both in bytes


def test_only_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    cost.check_space(tmp_path, 1000)
    with pytest.raises(RunError, match="the scalars need"):
        cost.check_space(tmp_path, 1001)


@pytest.mark.parametrize(("name", "value"), [("null", "16"), ("tokens", 2.5), ("null_every", [1]), ("rounds", "2")])
def test_what_is_no_whole_number_is_said(name, value):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(DataError, match=re.escape(f"{option} must be a whole number, received {value!r}")):
        check_numbers(**{name: value})
    check_numbers(**{name: np.int32(3)})


def test_numbers_and_words_of_numpy_are_python_s(untyped):
    config = RunConfig((NAME,), tokens=np.int64(600), context=np.int32(64), batch=np.int64(2), seed=np.uint8(3))
    assert json.loads(json.dumps(asdict(config)))["tokens"] == 600
    assert config == RunConfig((NAME,), tokens=600, context=64, batch=2, seed=3)
    config = RunConfig([np.str_(NAME)], data=Path("a"), sites=np.str_("mlp"), qk=1, trust_remote_code=np.False_)
    assert RunConfig.recorded(asdict(config), "") == config == RunConfig((NAME,), data="a", sites="mlp", qk=True)
    assert json.loads(json.dumps(asdict(config)))["data"] == "a"
    tokens = load_tokens("sample", load_tokenizer(NAME), context=np.int64(16))
    assert json.loads(json.dumps(tokens.about))["context"] == 16
    with pytest.raises(DataError, match="context must be a whole number of at least 1, received True"):
        load_tokens("sample", load_tokenizer(NAME), context=True)
