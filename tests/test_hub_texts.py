"""Text in any data set on the hub, through its own clients: its parts, its columns and its commits."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import hub
import huggingface_hub
import pandas as pd
import pytest
import zoo
from training_zoo import small

from normgeo.angles.job import prepare
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.documents import located, read_documents
from normgeo.errors import DataError, RunError
from normgeo.hub import HubText
from normgeo.loading import load_tokenizer
from normgeo.tokens import SAMPLE, absolute, load_tokens, on_hub
from normgeo.training.runs import TrainConfig, resume_training, start_training

TEXTS = list(read_documents(SAMPLE))[:12]
CARD = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: other
  data_files: data/other-*
---
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny models with a tokenizer: of which, where texts are what is tested, does not matter."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer("embedded-layernorm")
    for seed, name in enumerate(("one", "other")):
        model = zoo.tiny("gpt_neox", seed)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        for part in (model, tokenizer):
            part.save_pretrained(folder / name)
    return str(folder / "one"), str(folder / "other")


@pytest.fixture
def repository(tmp_path):
    """A data set with two configurations, of which one has a split `test` whose text is in another column."""
    folder = tmp_path / "repository/data"
    folder.mkdir(parents=True)
    for i in range(2):
        frame = pd.DataFrame({"text": [*TEXTS[4 * i : 4 * i + 4], None], "body": "not this"})
        frame.to_parquet(folder / f"train-{i}.parquet", index=False)
    pd.DataFrame({"text": "not this", "body": TEXTS[8:10]}).to_parquet(folder / "test-0.parquet", index=False)
    pd.DataFrame({"text": TEXTS[10:]}).to_parquet(folder / "other-0.parquet", index=False)
    (tmp_path / "repository/README.md").write_text(CARD)
    return tmp_path / "repository"


def test_text_of_any_data_set_on_the_hub(models, repository, tmp_path):
    """The same numbers as from its texts in a file, and its commit in the record; what it lacks is one line."""
    wanted = {
        "org/texts@small": TEXTS[:8], "org/texts@small@test:body": TEXTS[8:10], "org/texts@other": TEXTS[10:],
    }  # fmt: skip
    for i, texts in enumerate(wanted.values()):
        pd.DataFrame({"text": texts}).to_json(tmp_path / f"{i}.jsonl", orient="records", lines=True)
    few = "--tokens 150 --null 4 --context 64 --device cpu"
    wrong = {
        "org/texts": "Config name is missing.",
        "org/texts@small@dev": "Bad split: dev. Available splits: ['train', 'test']",
        "org/texts@small:title": "no column 'title'; its columns are text, body: give --data org/texts@small:COLUMN",
        "org/none": "there is no file 'org/none', and the hub has no data set org/none",
    }  # fmt: skip
    train = "--norm rmsnorm --tokenizer tokenizer --steps 2 --batch 2 --context 16 --device cpu"
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path / "tokenizer")
    with hub.served({"datasets/org/texts": {"main": repository}}, tmp_path / "home") as environment:
        statuses, said = hub.asked(
            environment, tmp_path,
            *(f"angles {models[0]} --data {data} {few} --out hub{i}" for i, data in enumerate(wanted)),
            *(f"angles {models[0]} --data {i}.jsonl {few} --out file{i}" for i in range(len(wanted))),
            f"train --data org/texts@small {train} --out twins",
            f"convert {models[0]} converted --data org/texts@small --tokens 150 --context 64",
            *(f"angles {models[0]} --data {data} {few} --out wrong" for data in wrong),
        )  # fmt: skip
    assert statuses == [0] * 8 + [1] * 4, "\n".join(said)
    for error, (data, why) in zip(said[8:], wrong.items(), strict=True):
        assert why in error, (data, error)
    assert not (tmp_path / "wrong").exists()
    commit = hub.commit_of("datasets/org/texts", "main")
    for i, data in enumerate(wanted):
        there, here = (pd.read_parquet(tmp_path / f"{name}{i}/angles.parquet") for name in ("hub", "file"))
        pd.testing.assert_frame_equal(there, here)
        (about,) = json.loads((tmp_path / f"hub{i}/run.json").read_text())["models"].values()
        assert (about["data"], about["data_sha256"], about["data_revision"]) == (data, data, commit)
    assert json.loads((tmp_path / "twins/train.json").read_text())["data_revision"] == commit
    text = json.loads((tmp_path / "converted/conversion.json").read_text())["text"]
    assert (text["data"], text["data_revision"], text["context"], text["tokens"]) == (
        "org/texts@small",
        commit,
        64,
        150,
    )


class Moving:
    """A data set on the hub, at a new commit whenever it is asked for one; its connection is lost once."""

    def __init__(self, monkeypatch, after):
        self.commits, self.read, self.asked, self.after = iter("abcdefghij"), [], 0, after
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", self.info)
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def info(self, repository, *, revision, timeout):
        self.asked += 1
        return SimpleNamespace(sha=revision or next(self.commits))

    def load(self, repository, *, split, revision, streaming):
        self.read.append(revision)
        return datasets.IterableDataset.from_generator(self.rows, gen_kwargs={"revision": revision})

    def rows(self, revision):
        for text in TEXTS:
            self.after -= 1
            if self.after == 0:
                raise ConnectionError("no route to host")
            yield {"text": f"{revision} {text[:1000]}"}


@pytest.mark.parametrize("after", [5, 9])
def test_a_run_is_finished_on_the_commit_that_it_was_begun_on(after, models, tmp_path, monkeypatch):
    config = RunConfig(models[:1], "org/texts", 3000, context=64, null=4, batch=2)
    whole = Moving(monkeypatch, 0)
    start_run(config, tmp_path / "whole", progress=False)
    monkeypatch.setattr("normgeo.angles.job.BLOCK_TOKENS", 256)
    moving = Moving(monkeypatch, after)
    with pytest.raises((DataError, RunError), match="no route to host"):
        start_run(config, tmp_path / "broken", progress=False)
    resume_run(tmp_path / "broken", progress=False)
    assert set(whole.read) == set(moving.read) == {"a"}
    frames = [pd.read_parquet(tmp_path / name / "angles.parquet") for name in ("whole", "broken")]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize("after", [0, 7])
def test_all_models_of_a_run_are_given_one_commit(after, models, tmp_path, monkeypatch):
    """The second too, where the run is interrupted before it."""
    config = RunConfig(models, "org/texts", 600, context=64, null=4, batch=2)
    moving = Moving(monkeypatch, after)
    if after:
        with pytest.raises((DataError, RunError), match="no route to host"):
            start_run(config, tmp_path / "run", progress=False)
        resume_run(tmp_path / "run", progress=False)
    else:
        start_run(config, tmp_path / "run", progress=False)
        assert moving.asked == 2  # for each model, whether it can be reached
    assert set(moving.read) == {"a"}
    models = json.loads((tmp_path / "run/run.json").read_text())["models"]
    assert [about["data_revision"] for about in models.values()] == ["a", "a"]


def test_processes_agree_on_a_commit(monkeypatch):
    """What the first of them was told is what all read."""
    Moving(monkeypatch, 0)
    told = {}

    def first(name, do):
        told[name] = do()
        return "first's" if name == "revision" else told[name]

    job = prepare(RunConfig(("embedded-layernorm",), "org/texts", 300, context=64), "embedded-layernorm", first=first)
    assert told["revision"] == "a"
    assert job.about["data_revision"] == "first's"


def test_no_name_is_no_directory():
    """An unset variable of a shell is not the current directory; a dot is."""
    with pytest.raises(DataError, match="the name of the data is empty"):
        load_tokens("", load_tokenizer("embedded-layernorm"))
    assert located(".") == (Path(), "text")


def test_a_training_is_finished_on_the_commit_that_it_was_begun_on(tmp_path, monkeypatch):
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path / "tokenizer")
    recipe = small(steps=40, save_every=1)
    config = TrainConfig("rmsnorm", "org/texts", tokenizer=str(tmp_path / "tokenizer"), device="cpu")
    moving = Moving(monkeypatch, 4)
    with pytest.raises(DataError, match="no route to host"):
        start_training(config, recipe, tmp_path / "broken", progress=False)
    resume_training(tmp_path / "broken", progress=False)
    assert set(moving.read) == {"a"}
    assert len(pd.read_parquet(tmp_path / "broken/rmsnorm/curve/curve.parquet")) == 40


def test_what_is_a_path_is_none_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert on_hub("texts/some") == HubText("texts/some")
    assert on_hub("texts/some@en:body") == HubText("texts/some", "en", column="body")
    for name in (
        "texts/some.jsonl",
        "texts/some.parquet:body",
        "texts/ids.npy",
        "a/b/c",
        "/texts",
        "some",
        "./a",
        "../a",
    ):
        assert on_hub(name) is None
    (tmp_path / "texts").mkdir()
    shutil.copy(SAMPLE, tmp_path / "texts/some")
    assert on_hub("texts/some") is on_hub("texts/some:body") is None
    assert on_hub("wikipedia") == HubText("wikimedia/wikipedia", "20231101.en")
    (tmp_path / "a.jsonl").touch()
    for name in ("a.jsonl", "a.jsonl:body", "texts/some:body"):
        assert absolute(name) == str(tmp_path / name)
    for name in ("sample", "wikipedia", "texts/other@en", "nowhere"):
        assert absolute(name) == name
    with pytest.raises(DataError, match="no such data file: nowhere; give the path of one, or sample, openwebtext"):
        load_tokens("nowhere", None)
