"""Records say who wrote them and what they are of, and may say it in a way that nobody can read: that is one line."""

import json
from dataclasses import asdict

import pytest
from stores import unfinished

from normgeo import HiddenStateStore
from normgeo.angles.job import RunConfig
from normgeo.angles.runs import resume_run
from normgeo.errors import RunError, StoreError
from normgeo.sites import NormSite
from normgeo.store.capture import resume_capture
from normgeo.store.check import verify
from normgeo.store.records import read_record, write_record
from normgeo.store.scan import angles_from_store
from normgeo.store.storage import Disk
from normgeo.system.records import read_as
from normgeo.training.checkpoint_angles import is_of_checkpoints
from normgeo.training.recipe import recipe_for
from normgeo.training.runs import TrainConfig, resume_training
from normgeo.training.state import load_state


def test_what_json_made_of_dataclasses_is_read_as_they_were():
    site = NormSite("a", "layernorm", "mlp", 0, "", 8, 1e-5)
    for one in (site, RunConfig(("a", "b"), tokens=3), recipe_for("tiny"), TrainConfig()):
        assert read_as(type(one), json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize(
    ("key", "value"), [("kind", "batchnorm"), ("d", True), ("d", 8.0), ("eps", "1"), ("name", None), ("more", 1)]
)
def test_what_is_of_another_type_is_named(key, value):
    record = asdict(NormSite("a", "layernorm", "mlp", 0, "", 8, 1e-5))
    with pytest.raises(TypeError, match=key):
        read_as(list[NormSite], [record, record | {key: value}])


def changed(record, keys, value):
    *path, last = keys
    for key in path:
        record = record[key]
    if value is KeyError:
        del record[last]
    else:
        record[last] = value


SITE = ("provenance", "identity", "about", "sites", 0)
DAMAGES = [
    ("store.json", ("layout", "n_tokens"), float("nan")), ("store.json", ("layout", "chunk"), -64),
    ("store.json", ("layout", "arrays", 1), "tokens/id"), ("store.json", ("layout", "arrays", 0, "name"), "tokens"),
    ("store.json", ("layout", "arrays", 3, "site"), 1), ("store.json", ("layout", "arrays", 4, "width"), 16),
    ("store.json", (*SITE, "eps"), None), ("store.json", (*SITE, "heads"), "1"), ("store.json", (*SITE, "d"), KeyError),
    ("store.json", ("provenance", "identity", "null"), "8"), ("store.json", ("provenance", "identity", "about"), []),
    ("store.json", ("results",), []), ("store.json", ("capture",), True), ("store.json", ("capture", "phases"), [1]),
    ("commits/00000001.json", ("start",), "64"), ("commits/00000001.json", ("start",), 0),
    ("commits/00000001.json", ("stop",), 10**30), ("commits/00000001.json", ("post",), None),
    ("commits/00000001.json", ("post", "transformer.ln_f"), {}), ("commits/00000001.json", ("chunks",), {}),
    ("commits/00000001.json", ("chunks", "tokens/id"), [10**30, 5]),
    ("commits/00000001.json", ("chunks", "tokens/id"), KeyError),
]  # fmt: skip


def verified(path):
    """`verify` goes on to what else is damaged."""
    if found := verify(path, progress=False)[1]:
        raise StoreError(found[0])


def test_signed_records_of_a_store_that_say_what_none_does_are_refused(copy):
    unfinished(copy)
    for file, keys, value in DAMAGES:
        before = (copy / file).read_bytes()
        changed(record := read_record(Disk(copy), file), keys, value)
        write_record(lambda name, raw: (copy / name).write_bytes(raw), file, record)
        for use in (verified, HiddenStateStore, angles_from_store, resume_capture):
            with pytest.raises(StoreError, match=rf"{file} is damaged, or of another version's store \("):
                use(copy)
        (copy / file).write_bytes(before)


RUN = {"status": "running", "config": asdict(RunConfig()), "models": {}}
MODEL = {"model": "m", "data_sha256": "", "packing": "", "context": 1, "n_tokens": 3, "sites": [], "marks": []}
DEEP = "[" * 100_000
"""More than Python reads."""


def test_a_record_that_is_nested_too_deeply_is_refused(copy, tmp_path):
    for name, use in (("run.json", resume_run), ("train.json", resume_training), ("state.json", load_state)):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(RunError, match=r" is damaged, or was written .*nested too deeply"):
            use(tmp_path)
        assert not is_of_checkpoints(tmp_path)
    (copy / "store.json").write_text(DEEP)
    with pytest.raises(StoreError, match=r"store\.json is damaged \(it is nested too deeply\)"):
        HiddenStateStore(copy)


TRAINING = {"status": "running", "config": asdict(TrainConfig()), "recipe": asdict(recipe_for("tiny"))}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("config", "models"), [None]), (("config", "models"), [["gpt2"]]), (("config", "device"), None),
        (("models", "m", "n_tokens"), [1]), (("models", "m", "marks"), "marks"), (("models", "m"), None),
        (("status",), 1),
    ],
)  # fmt: skip
def test_a_run_whose_record_says_what_none_does_is_not_resumed(tmp_path, keys, value):
    record = json.loads(json.dumps(RUN | {"models": {"m": MODEL}}))
    changed(record, keys, value)
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=rf"run\.json is damaged, or was written by another .*{keys[-1]}.*directory$"):
        resume_run(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("keys", "value"), [(("config", "data"), 5), (("recipe", "tied"), "no"), (("recipe", "steps"), None)]
)
def test_a_training_whose_record_says_what_none_does_is_not_resumed(tmp_path, keys, value):
    changed(record := json.loads(json.dumps(TRAINING)), keys, value)
    (tmp_path / "train.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=rf"train\.json is damaged, or was written by another .*{keys[-1]}.*directory$"):
        resume_training(tmp_path, progress=False)
