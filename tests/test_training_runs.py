"""`normgeo train`: the command, killed and resumed, on one process and on two."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
import transformers
from forked import NORMGEO, Forked, ranks
from training_zoo import articles, command, small, stopping

from normgeo import load_model, load_tokenizer, load_tokens
from normgeo.errors import NormGeoError
from normgeo.system.folders import alone
from normgeo.training import log as training_log
from normgeo.training import train as training
from normgeo.training.recipe import SIZES
from normgeo.training.runs import TrainConfig, resume_training, start_training
from normgeo.training.state import latest_state
from normgeo.training.twins import evaluate, train_tokenizer

HERE = Path(__file__).parent


WAITS = """
from forked import wait_before
from normgeo.training.train import Trainer
wait_before(Trainer, "take_step", lambda trainer: trainer.step == 10)
""" + NORMGEO  # fmt: skip


def test_a_killed_command_is_resumed(tmp_path):
    articles(tmp_path)
    steps = ("--norm", "rmsnorm", "--steps", 12)
    killed = Forked(WAITS, *command(tmp_path, "killed", *steps))
    killed.until(lambda: list(tmp_path.glob("killed/rmsnorm/state-*")))
    killed.kill()
    assert killed.ended().returncode == -signal.SIGKILL
    done = int(latest_state(tmp_path / "killed/rmsnorm").name.removeprefix("state-"))
    assert done < 12
    Forked(NORMGEO, "train", "--resume", tmp_path / "killed").done()
    Forked(NORMGEO, *command(tmp_path, "whole", *steps)).done()
    curves = [pd.read_parquet(tmp_path / name / "rmsnorm/curve/curve.parquet") for name in ("killed", "whole")]
    assert len(curves[0]) == 12
    assert curves[0].equals(curves[1])
    last = "rmsnorm/checkpoints/step-00000012/model.safetensors"
    assert (tmp_path / "killed" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_the_command_trains_saves_reloads_and_measures(tmp_path, normgeo, monkeypatch):
    articles(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", small(steps=8))
    words = command(tmp_path, "twins")
    status, out, _ = normgeo(*words)
    assert not status
    assert "rmsnorm: " in out.replace("\n", "")
    curves = []
    for norm in ("layernorm", "rmsnorm"):
        last = tmp_path / "twins" / norm / "checkpoints/step-00000008"
        note = json.loads((last / "training.json").read_text())
        assert note["norm"] == norm
        assert "after each" in note["packing"]
        tokenizer = load_tokenizer(last)
        assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"
        loss = evaluate(load_model(last), load_tokens(tmp_path / "held.jsonl", tokenizer, 16))
        assert abs(loss - note["curve"][-1]["held_out_loss"]) < 1e-4
        curves.append(pd.read_parquet(tmp_path / "twins" / norm / "curve/curve.parquet"))
    assert curves[0].lr.equals(curves[1].lr)
    assert json.loads((tmp_path / "twins/train.json").read_text())["command"].startswith("normgeo train")
    for again, says in (
        (words, "twins exists already; give another --out"), (["train", "--resume", tmp_path / "twins"], "is complete"),
        (["train", "--resume", tmp_path], "holds no train.json"), (["train", "--norm", "x"], "no norm 'x'"),
        (["train", "--data", "nothing.txt", "--out", tmp_path / "new"], "no such data file"),
        (["train", "--device", "tpu", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "new"], "not 'tpu'"),
    ):  # fmt: skip
        status, _, error = normgeo(*again)
        assert status == 1
        assert says in " ".join(error.split())


def test_another_text_is_not_resumed(tmp_path, normgeo):
    articles(tmp_path)
    (tmp_path / "held-out.jsonl").write_text('{"text": "Some words of an article that is left out, and is long."}\n')
    words = ("--norm", "rmsnorm", "--steps", 2, "--exclude", tmp_path / "held-out.jsonl")
    assert not normgeo(*command(tmp_path, "twins", *words))[0]
    record = json.loads((tmp_path / "twins/train.json").read_text())
    (tmp_path / "twins/train.json").write_text(json.dumps(record | {"status": "running"}))
    for name, key in (("held-out", "exclude_sha256"), ("text", "data_sha256")):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('\n{"text": "more"}')
        status, _, error = normgeo("train", "--resume", tmp_path / "twins")
        assert status == 1
        assert f"another {key}" in error


# --- what is not resumed ----------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, normgeo, monkeypatch):
    """A run with a state that was stopped before its end."""
    articles(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_state", stopping(training.save_state, at=2))
        assert normgeo(*command(tmp_path, "run", "--norm", "rmsnorm", "--steps", 4))[0] == 130
    return tmp_path / "run"


def test_another_tokenizer_of_the_same_size_is_not_resumed(stopped, normgeo):
    record, folder = json.loads((stopped / "train.json").read_text()), stopped / "tokenizer"
    folder.rename(stopped.parent / "kept")
    status, _, error = normgeo("train", "--resume", stopped)
    assert (status, error.startswith(f"error: {folder}, the tokenizer of the run, is missing;")) == (1, True)
    other = train_tokenizer(["Sphinx of black quartz, judge my vow, and again, and again."] * 9, 300)
    other.add_tokens([f"<{i}>" for i in range(record["vocabulary"] - len(other))])
    other.save_pretrained(folder)
    status, _, error = normgeo("train", "--resume", stopped)
    assert status == 1
    assert f"another tokenizer_sha256: {record['tokenizer_sha256']}, now" in error
    shutil.rmtree(folder)
    (stopped.parent / "kept").rename(folder)
    assert not normgeo("train", "--resume", stopped)[0]


def test_one_process_at_a_time_trains_in_a_directory(stopped, normgeo, tmp_path):
    other = Forked(
        "import sys, time; from pathlib import Path; from normgeo.system.folders import alone\n"
        "with alone(Path(sys.argv[1])): print('in', flush=True); time.sleep(300)",
        stopped,
    )
    other.until(lambda: other.stdout)
    before = sorted(stopped.rglob("*"))
    status, _, error = normgeo("train", "--resume", stopped)
    assert status == 1
    assert error == f"error: another process writes {stopped}; wait for it to end, or stop it first"
    assert sorted(stopped.rglob("*")) == before
    other.kill()
    other.ended()
    assert not normgeo("train", "--resume", stopped)[0]


def test_a_start_holds_its_directory(tmp_path):
    articles(tmp_path)

    def look(*_):
        with pytest.raises(NormGeoError, match="another process writes"), alone(tmp_path / "run"):
            pass

    config = TrainConfig("rmsnorm", str(tmp_path / "text.jsonl"), vocabulary=300, device="cpu")
    start_training(config, small(steps=1), tmp_path / "run", report=look, progress=False)


def test_a_directory_that_cannot_be_written_is_one_line(stopped, normgeo, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("normgeo.system.files._try", denied)
    status, _, error = normgeo("train", "--resume", stopped)
    assert (status, error) == (1, f"error: cannot write {stopped}: Permission denied; make it writable")


@pytest.mark.parametrize("part", ["nothing", "list", "recipe", "config", "state", "data"])
def test_records_of_another_version_are_one_line(part, stopped, normgeo):
    file = next(stopped.glob("rmsnorm/state-*/state.json")) if part in ("state", "data") else stopped / "train.json"
    record = json.loads(file.read_text())
    if part in record:
        changed = record | {part: {} if part == "data" else record[part] | {"later": 1}}
    else:
        changed = [] if part == "list" else {}
    file.write_text(json.dumps(changed))
    status, _, error = normgeo("train", "--resume", stopped)
    assert status == 1
    name = file if file.name == "train.json" else file.parent
    assert error.startswith(f"error: {name} is damaged, or was written by another version of normgeo (")
    assert "; resume with that version, or " in error


def test_relative_data_are_found_from_another_directory(tmp_path, normgeo, monkeypatch):
    articles(tmp_path)
    words = command(Path(), "run", "--norm", "rmsnorm", "--steps", 4)
    assert "text.jsonl" in words
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_state", stopping(training.save_state, at=2))
        assert normgeo(*words)[0] == 130
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not normgeo("train", "--resume", tmp_path / "run")[0]
    assert TrainConfig(data="sample").absolute() == TrainConfig(data="sample")


# --- what is not started ----------------------------------------------------------------------------------------------


def test_a_start_that_fails_leaves_the_directory_that_was_there(tmp_path, normgeo, monkeypatch):
    articles(tmp_path)
    (tmp_path / "mine").mkdir()
    words = command(tmp_path, "mine", "--batch", 2**31 - 1)
    words[words.index(str(tmp_path / "mine"))] = "."
    monkeypatch.chdir(tmp_path / "mine")
    status, _, error = normgeo(*words)
    assert status == 1
    assert "do not fit into memory; give a smaller --batch" in " ".join(error.split())
    assert list((tmp_path / "mine").iterdir()) == []


def test_small_rates_are_shown(tmp_path, normgeo):
    articles(tmp_path)
    words = command(tmp_path, "run", "--norm", "rmsnorm", "--steps", 2, "--lr", 3e-6)
    assert "lr 3e-06" in normgeo(*words, "--warmup", 1, "--evaluate-every", 1)[2]
    assert "the rate never comes to" not in normgeo(*command(tmp_path, "long", "--steps", 2))[2]
    said = normgeo(*command(tmp_path, "short", "--steps", 1))[2]
    assert "the warm-up takes 2 steps and the training 1" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--accumulate", 3), "give --batch a multiple of 3"),
        (("--context", 1), "--context must be at least 2"),
        (("--steps", 10**12), "--steps must be at most 2147483647, received 1000000000000"),
        (("--vocabulary", 10**20), "--vocabulary must be at most 2147483647"),
        (("--batch", 2**31 - 1), "do not fit into memory; give a smaller --batch"),
        (("--precision", "fp16"), "cannot train in fp16 on a CPU"),
    ],
)
def test_a_start_that_fails_leaves_nothing(words, says, tmp_path, normgeo):
    articles(tmp_path)
    status, _, error = normgeo(*command(tmp_path, "twins", "--save-every", 100, *words))
    assert status == 1
    assert says in " ".join(error.split())
    assert not (tmp_path / "twins").exists()


def test_text_that_was_cut_in_another_way_is_not_resumed(stopped, normgeo):
    """As another version of this package may have."""
    record = json.loads((stopped / "train.json").read_text())
    (stopped / "train.json").write_text(json.dumps(record | {"packing": "in another way"}))
    status, _, error = normgeo("train", "--resume", stopped)
    assert status == 1
    assert "was started with another packing: in another way, now" in " ".join(error.split())


def test_ids_beyond_every_vocabulary_are_not_taken_for_others(tmp_path, normgeo):
    ids = np.random.default_rng(0).integers(0, 300, 3000)
    np.save(tmp_path / "ids.npy", ids + (np.arange(3000) % 2) * 2**32)
    words = ("train", "--size", "tiny", "--data", tmp_path / "ids.npy", "--vocabulary", 300, "--out", tmp_path / "run")
    status, _, error = normgeo(*words)
    assert status == 1
    assert "beyond a vocabulary of 300" in " ".join(error.split())
    assert str(2**32 + 100)[:3] in error


def test_a_corpus_that_is_left_out_as_a_whole_is_named(tmp_path, normgeo):
    articles(tmp_path)
    words = ("train", "--data", tmp_path / "text.jsonl", "--exclude", tmp_path / "text.jsonl", "--size", "tiny")
    status, _, error = normgeo(*words, "--out", tmp_path / "run")
    assert status == 1
    assert "beside what is left out" in " ".join(error.split())


def test_a_resumed_runs_checkpoints_are_those_of_one_in_one_piece(tmp_path):
    articles(tmp_path)
    config = TrainConfig("pre-crmsnorm", str(tmp_path / "text.jsonl"), device="cpu")
    start_training(config, small(steps=2), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        start_training(config, small(steps=2), tmp_path / "run", report=stopping(print, at=1), progress=False)
    resume_training(tmp_path / "run", progress=False)
    last = "pre-crmsnorm/checkpoints/step-00000002"
    names = sorted(path.name for path in (tmp_path / "whole" / last).iterdir())
    assert "tokenizer_config.json" in names
    for name in names:
        assert (tmp_path / "run" / last / name).read_bytes() == (tmp_path / "whole" / last / name).read_bytes(), name


def test_a_tokenizer_in_python_is_resumed(tmp_path):
    articles(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    config = TrainConfig("rmsnorm", str(tmp_path / "text.jsonl"), None, str(tmp_path / "bytes"), device="cpu")
    start_training(config, small(steps=2), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        start_training(config, small(steps=2), tmp_path / "run", report=stopping(print, at=1), progress=False)
    done = resume_training(tmp_path / "run", progress=False)
    last = "rmsnorm/checkpoints/step-00000002/model.safetensors"
    assert done["rmsnorm"] == (tmp_path / "run" / last).parent
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--data", "text.jsonl", "--vocabulary", 256), "--vocabulary must be at least 257, received 256"),
        (("--data", "ids.npy", "--vocabulary", 0), "--vocabulary must be at least 1, received 0"),
        (("--data", "ids.npy", "--tokenizer", "t"), "ids.npy holds token ids, which need no tokenizer"),
        (("--data", "IDS.NPY", "--tokenizer", "t"), "IDS.NPY holds token ids, which need no tokenizer"),
        (("--data", "ids.npy", "--exclude", "held.jsonl"), "ids.npy holds token ids, which have no documents to leave"),
        (
            ("--data", "text.jsonl", "--exclude", "ids.npy"),
            "--exclude takes documents (.jsonl or .txt",
        ),
        (("--data", "text.jsonl", "--exclude", "wikipedia"), "documents to leave out: wikipedia; give one (.jsonl or"),
        (("--data", "text.jsonl", "--tokenizer", "t", "--vocabulary", 300), "the tokenizer t has a vocabulary of its"),
        (
            ("--data", "text.jsonl", "--tokenizer", "nope"),
            "cannot load the tokenizer 'nope'; give --tokenizer a directory",
        ),
        (("--vocabulary", 300), "the tokenizer openai-community/gpt2 has a vocabulary of its own: leave out"),
    ],
)
def test_what_would_be_ignored_is_refused(words, says, tmp_path, normgeo):
    status, _, error = normgeo("train", *words, "--out", tmp_path / "twins")
    assert status == 1
    assert says in " ".join(error.split())
    assert not (tmp_path / "twins").exists()


def test_two_processes_train_one_model(tmp_path):
    articles(tmp_path)
    words = command(tmp_path, "two", "--norm", "pre-rmsnorm", "--steps", 4, "--dropout", "0.0", "--accumulate", 2)
    for process in ranks(NORMGEO, *words):
        process.done()
    Forked(NORMGEO, *command(tmp_path, "one", "--norm", "pre-rmsnorm", "--steps", 4, "--dropout", "0.0")).done()
    a, b = (pd.read_parquet(tmp_path / name / "pre-rmsnorm/curve/curve.parquet") for name in ("one", "two"))
    np.testing.assert_allclose(a.train_loss, b.train_loss, rtol=1e-5)
    np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=1e-3)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_two_processes_share_a_models_parameters(norm, tmp_path, normgeo, monkeypatch):
    articles(tmp_path)
    options = ("--norm", norm, "--steps", 6, "--dropout", "0.0", "--evaluate-every", 3)
    one, two = (command(tmp_path, name, *options) for name in ("one", "two"))
    with monkeypatch.context() as patch:  # what one process began, two finish
        patch.setattr(training, "save_state", stopping(training.save_state, at=2))
        assert normgeo(*two)[0] == 130
    for process in ranks(HERE / "shards.py", "train", "--resume", tmp_path / "two"):
        process.done()
    assert not normgeo(*one)[0]
    a, b = (pd.read_parquet(tmp_path / name / norm / "curve/curve.parquet") for name in ("one", "two"))
    for column in a:
        np.testing.assert_allclose(a[column], b[column], rtol=1e-4)
    last = f"{norm}/checkpoints/step-00000006"
    whole, shared = (load_model(tmp_path / name / last) for name in ("one", "two"))
    assert type(whole) is type(shared)
    for x, y in zip(whole.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
    files = (latest_state(tmp_path / name / norm) / "training.safetensors" for name in ("one", "two"))
    a, b = map(safetensors.torch.load_file, files)
    assert a.keys() == b.keys()  # with the moments of all parameters, behind an evaluation too, which leaves some whole


@pytest.mark.parametrize(("norm", "version", "says"), [("rmsnorm", "1", "FSDP 2"), ("pre-rmsnorm", "2", "torchrun")])
def test_what_cannot_be_shared_is_refused(norm, version, says, tmp_path):
    articles(tmp_path)
    words = command(tmp_path, "two", "--norm", norm, "--steps", 2)
    for process in ranks(HERE / "shards.py", *words, VERSION=version):
        assert process.ended().returncode
        assert says in " ".join(process.stderr.split())
    assert not list(tmp_path.glob("two/*/state-*"))


def test_tensorboard_has_every_step_once(tmp_path, normgeo, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard.writer import SummaryWriter

    closed, close = [], SummaryWriter.close
    monkeypatch.setattr(SummaryWriter, "close", lambda self: closed.append(close(self)))
    articles(tmp_path)
    words = command(tmp_path, "twins", "--norm", "rmsnorm", "--steps", 6, "--tensorboard")
    with monkeypatch.context() as patch:
        patch.setattr(training, "save_state", stopping(training.save_state, at=3))
        assert normgeo(*words)[0] == 130  # at step 6, which is logged and not saved
    assert not normgeo("train", "--resume", tmp_path / "twins", "--tensorboard")[0]
    assert len(closed) == 2  # the last steps are in a queue until then
    curve = pd.read_parquet(tmp_path / "twins/rmsnorm/curve/curve.parquet")
    log = EventAccumulator(str(tmp_path / "twins/rmsnorm/tensorboard")).Reload()
    for name in ("train_loss", "gradient_norm", "lr"):
        points = log.Scalars(name)
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose([point.value for point in points], curve[name], rtol=1e-6)
    assert [point.step for point in log.Scalars("held_out_loss")] == [6]
    monkeypatch.setattr(training_log.importlib.util, "find_spec", lambda name: None)
    status, _, error = normgeo(*[str(w).replace("twins", "other") for w in words])
    assert status == 1
    assert "pip install 'normgeo[tensorboard]'" in " ".join(error.split())
    assert not (tmp_path / "other").exists()


def test_without_the_option_nothing_is_logged(tmp_path, normgeo):
    articles(tmp_path)
    assert not normgeo(*command(tmp_path, "twins", "--norm", "rmsnorm", "--steps", 2))[0]
    assert not (tmp_path / "twins/rmsnorm/tensorboard").exists()
