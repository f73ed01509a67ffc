"""What a new training finds: directories and data that others change meanwhile; and what one leaves that fails."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from training_zoo import articles, command, small, stopping
from transformers import PreTrainedTokenizerFast

from normgeo.errors import DataError, RunError
from normgeo.tokens import SAMPLE
from normgeo.training import runs
from normgeo.training.runs import TrainConfig, output, resume_training, start_training
from normgeo.training.state import check_weights, latest_state, load_state, named, save_state, weights_in
from normgeo.training.train import Trainer


def started(folder, out, norm="rmsnorm", recipe=None, **options):
    """Training on the folder's articles."""
    config = TrainConfig(norm, str(folder / "text.jsonl"), str(folder / "held.jsonl"), vocabulary=300, device="cpu")
    return start_training(config, recipe or small(steps=1), out, progress=False, **options)


def test_a_run_that_came_and_went_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    articles(tmp_path)
    out, real = tmp_path / "run", runs._prepared

    def slowly(*given):
        monkeypatch.setattr(runs, "_prepared", real)
        started(tmp_path, out)
        return real(*given)

    monkeypatch.setattr(runs, "_prepared", slowly)
    with pytest.raises(RunError, match=f"{out} exists already; give another --out"):
        started(tmp_path, out, recipe=small(steps=2))
    assert '"steps": 1,' in (out / "train.json").read_text()
    assert (out / "rmsnorm/checkpoints/step-00000001").is_dir()


def test_the_sample_is_left_out_by_its_name(tmp_path, monkeypatch):
    texts = [json.loads(line)["text"] for line in SAMPLE.read_text().splitlines()]
    monkeypatch.setattr("normgeo.tokens.SAMPLE", short := tmp_path / "sample.jsonl")
    monkeypatch.setattr(runs, "SAMPLE", short)
    short.write_text(json.dumps({"text": texts[0][:500]}))
    articles(tmp_path)
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write("\n" + short.read_text())
    config = TrainConfig("rmsnorm", str(tmp_path / "text.jsonl"), "sample", vocabulary=300, device="cpu")
    assert config.absolute().exclude == "sample"
    given = runs._prepared(config, small(), None)
    assert given.excluded == {texts[0][:500]}
    assert given.held_out.source == "sample"


def test_a_tokenizer_may_leave_ids_out(tmp_path):
    articles(tmp_path)
    built = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "dog": 40}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>").save_pretrained(tmp_path / "t")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the dog and the dog " * 99}))
    config = TrainConfig("rmsnorm", str(tmp_path / "text.jsonl"), tokenizer=str(tmp_path / "t"), device="cpu")
    given = runs._prepared(config, small(), None)
    assert given.corpus.largest == 40 == given.vocabulary - 1


def test_starts_without_a_directory_get_one_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with output(None, "tiny", "cpu") as first, output(None, "tiny", "cpu") as second:
        assert second.name == f"{first.name}-2"
        (first / "kept").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [first.name]


def test_twins_have_the_data_that_the_run_began_with(tmp_path):
    articles(tmp_path)
    started(tmp_path, tmp_path / "one", recipe=small(steps=2, evaluate_every=1))

    def lost(norm, row):
        (tmp_path / "text.jsonl").unlink(missing_ok=True)
        (tmp_path / "held.jsonl").write_text('{"text": "Another."}')

    done = started(tmp_path, tmp_path / "both", "both", small(steps=2, evaluate_every=1), report=lost)
    assert json.loads((done["rmsnorm"] / "training.json").read_text())["norm"] == "rmsnorm"
    one, both = (pd.read_parquet(tmp_path / name / "rmsnorm/curve/curve.parquet") for name in ("one", "both"))
    assert one.equals(both)


def test_a_tokenizer_that_is_another_once_it_is_saved_is_that_from_the_start(tmp_path, monkeypatch):
    """So that a resumed run has the same data."""
    articles(tmp_path)
    real, saved = runs.train_tokenizer, runs.train_tokenizer(["Sphinx of black quartz, judge my vow."], 300)
    saved.add_tokens([f"<{i}>" for i in range(300 - len(saved))])

    def learnt(*given):
        tokenizer = real(*given)
        tokenizer.save_pretrained = saved.save_pretrained
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(runs, "train_tokenizer", learnt)
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path, tmp_path / "run", report=stopping(print, at=1))
    resume_training(tmp_path / "run", progress=False)
    saved.save_pretrained(tmp_path / "saved")
    config = TrainConfig("rmsnorm", str(tmp_path / "text.jsonl"), str(tmp_path / "held.jsonl"), str(tmp_path / "saved"))
    start_training(config, small(steps=1), tmp_path / "expected", progress=False)
    found, expected = (pd.read_parquet(tmp_path / n / "rmsnorm/curve/curve.parquet") for n in ("run", "expected"))
    assert found.equals(expected)


def test_a_run_that_diverges_before_its_first_state_leaves_its_curve(tmp_path, normgeo):
    articles(tmp_path)
    words = ("--norm", "rmsnorm", "--save-every", 100, "--lr", 1e30, "--warmup", 0, "--tensorboard")
    status, _, error = normgeo(*command(tmp_path, "run", *words))
    says = "the loss of the rmsnorm twin became nan at step 2; lower the learning rate (--lr, now 1e+30) in a new run"
    assert (status, says in " ".join(error.split())) == (1, True)
    assert len(pd.read_parquet(tmp_path / "run/rmsnorm/curve/curve.parquet")) == 1
    assert list((tmp_path / "run/rmsnorm/tensorboard").iterdir())
    status, _, error = normgeo(*command(tmp_path, "run"))
    says = f"error: {tmp_path}/run exists already; finish it with --resume {tmp_path}/run, or give another --out"
    assert (status, " ".join(error.split())) == (1, says)


def test_a_run_with_a_state_is_kept_whether_or_not_its_curve_is_there(tmp_path, monkeypatch):
    def lost(norm, row):
        raise DataError("the connection was lost")

    articles(tmp_path)
    monkeypatch.setattr(Trainer, "_draw", lambda self: None)
    with pytest.raises(DataError, match="the connection was lost"):
        started(tmp_path, tmp_path / "run", recipe=small(steps=3, save_every=1, evaluate_every=2), report=lost)
    assert [path.name for path in (tmp_path / "run/rmsnorm").glob("state-*")] == ["state-00000001"]


def test_one_state_stays_and_is_told_from_another_of_its_name(tmp_path):
    for name in ("one", "other"):
        for step in (5, 3):
            save_state(tmp_path / name, step, {"a": torch.zeros(1)}, {"of": name})
        (tmp_path / name / "state-00000004.kept").mkdir()  # which is none
        assert {path.name for path in (tmp_path / name).iterdir()} == {"state-00000003", "state-00000004.kept"}
    one, other = (latest_state(tmp_path / name) for name in ("one", "other"))
    assert one.name == other.name == "state-00000003"
    assert named(one) != named(other)
    (one / "state.json").unlink()
    with pytest.raises(RunError, match="state-00000003 is damaged"):
        named(one)


def test_of_several_states_that_a_kill_left_the_last_is_gone_on_from(tmp_path):
    for step in (2, 9, 7, 5):
        (tmp_path / f"state-{step:08}").mkdir()
    assert latest_state(tmp_path).name == "state-00000009"


@pytest.mark.parametrize("content", [None, "", "[1]", "{}"])
def test_records_that_are_none(tmp_path, content):
    """A state's is one line, and a checkpoint's that of another training, which says nothing of weights."""
    save_state(tmp_path, 1, {"a": torch.zeros(1)}, {})
    state = latest_state(tmp_path)
    for record in (state / "state.json", tmp_path / "training.json"):
        record.unlink(missing_ok=True) if content is None else record.write_text(content)
    with pytest.raises(RunError, match="state-00000001 is damaged, or was written by another version"):
        load_state(state)
    check_weights(tmp_path)


def test_weights_in_several_files_are_told_by_all_of_them(tmp_path, monkeypatch):
    paths = [tmp_path / f"{name}.safetensors" for name in "cab"]
    for path in paths:
        path.write_text(path.stem)
    monkeypatch.setattr(Path, "glob", lambda *_: (path for path in paths if path.exists()))  # in any order, as disks do
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in "abc"]
    assert weights_in(tmp_path) == hashlib.sha256("".join(digests).encode()).hexdigest()
    for name in "ab":
        (tmp_path / f"{name}.safetensors").unlink()
    assert weights_in(tmp_path) == digests[-1]


def test_a_disk_that_is_full_for_the_log_is_said(tmp_path, monkeypatch):
    articles(tmp_path)

    class Full:
        def __init__(self, folder, purge_step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter", Full)
    with pytest.raises(RunError, match=f"^the disk of {tmp_path / 'run'} is full; .*give --resume {tmp_path / 'run'}$"):
        started(tmp_path, tmp_path / "run", board=True)
    monkeypatch.undo()
    resume_training(tmp_path / "run", progress=False, board=True)
