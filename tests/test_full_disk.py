"""What is said of a full disk is so, at whatever moment it is full: it can be resumed, or nothing was left behind."""

import errno
import json
from pathlib import Path

import pytest
from training_zoo import articles, small

from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.errors import RunError
from normgeo.system.folders import nothing_left, whole_directory
from normgeo.training import checkpoint_angles
from normgeo.training.checkpoint_angles import resume_checkpoints, start_checkpoints
from normgeo.training.runs import TrainConfig, resume_training, start_training


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(checkpoint_angles, "draw", lambda *_: None)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    articles(folder)
    recipe = small(steps=2, checkpoint_every=2)
    start_training(TrainConfig("rmsnorm", str(folder / "text.jsonl"), vocabulary=300), recipe, folder / "run")
    return folder


def start(what, twin, home, out):
    if what == "train":
        config = TrainConfig("rmsnorm", str(twin / "text.jsonl"), vocabulary=300, device="cpu")
        start_training(config, small(steps=2), out, progress=False)
    elif what == "checkpoints":
        config = RunConfig((), str(twin / "text.jsonl"), 100, null=0, device="cpu", keep="none")
        start_checkpoints(twin / "run", config, out, progress=False)
    else:
        config = RunConfig((str(home / "llama"),), str(home / "ids.npy"), 100, null=0, device="cpu", keep="none")
        start_run(config, out, progress=False)


RESUME = {"train": resume_training, "checkpoints": resume_checkpoints, "angles": resume_run}
RECORD = {"train": "train.json", "checkpoints": "run.json", "angles": "run.json"}


@pytest.mark.parametrize("what", ["angles", "checkpoints", "train"])
def test_what_is_said_is_so(what, twin, home, tmp_path, full_disk):
    said = []
    for n in range(1, 99):
        out = tmp_path / str(n)
        try:
            with full_disk(n), pytest.raises(RunError, match="is full") as raised:
                start(what, twin, home, out)
        except (AssertionError, pytest.fail.Exception):
            break  # it was done before
        resumes = "resume" in str(raised.value)
        said.append(resumes)
        if resumes:
            RESUME[what](out, progress=False)
        else:
            assert "nothing was left behind" in str(raised.value)
            assert not out.exists()
            start(what, twin, home, out)
        assert json.loads((out / RECORD[what]).read_text())["status"] == "complete"
    assert n < 99
    assert set(said) == {True, False}


@pytest.mark.parametrize(
    "inside", [lambda out: nothing_left(out, lambda _: False), lambda out: whole_directory(out / "new")]
)
def test_what_cannot_be_removed_does_not_hide_why_it_should_be(inside, tmp_path, monkeypatch):
    """As on a disk that can no longer be written."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    def fails():
        with inside(tmp_path):
            (tmp_path / "file").write_text("begun")
            for name in ("unlink", "rmdir"):
                monkeypatch.setattr(Path, name, refused)
            raise RunError("the reason")

    with pytest.raises(RunError, match="the reason"):
        fails()
