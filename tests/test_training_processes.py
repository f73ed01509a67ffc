"""A training by several processes: they train one model of one text, or say in one line why they do not."""

import json
import shutil
from types import SimpleNamespace

import accelerate
import numpy as np
import pandas as pd
import pytest
from forked import NORMGEO, Forked, ranks
from torch.distributed import HashStore
from training_zoo import articles, command, small, trained

from normgeo.angles.runs import RunConfig
from normgeo.errors import NormGeoError, RunError
from normgeo.system.folders import alone
from normgeo.system.ranks import Ranks
from normgeo.training import accelerators
from normgeo.training.checkpoint_angles import start_checkpoints

APART = "import os; os.chdir(os.path.join(os.environ['PLACES'], os.environ['RANK']))\n" + NORMGEO
"""Each process in a directory of its own, as on machines that share none."""

WORDS = ("--norm", "rmsnorm", "--dropout", "0.0")


def curve(folder):
    return pd.read_parquet(folder / "rmsnorm/curve/curve.parquet")


def without(words, option):
    at = words.index(option)
    return words[:at] + words[at + 2 :]


def test_without_a_gpu_they_are_one_training_too(tmp_path):
    articles(tmp_path)
    words = without(command(tmp_path, "two", *WORDS, "--steps", 4), "--device")
    for process in ranks(NORMGEO, *words, CUDA_VISIBLE_DEVICES=""):
        process.done()
    Forked(NORMGEO, *command(tmp_path, "one", *WORDS, "--steps", 4)).done()
    pd.testing.assert_frame_equal(curve(tmp_path / "one"), curve(tmp_path / "two"), rtol=1e-3)
    assert json.loads(next((tmp_path / "two/rmsnorm").glob("state-*/state.json")).read_text())["processes"] == 2


CUT = """
import contextlib, sys
from pathlib import Path
from training_zoo import small, stopping, trained
from normgeo.training.train import Trainer
whole, cut = map(Path, sys.argv[1:])
recipe, step = small(steps=4, save_every=2, batch=6), Trainer.take_step
trained("rmsnorm", recipe, whole)
Trainer.take_step = stopping(step, at=3)
with contextlib.suppress(KeyboardInterrupt):
    trained("rmsnorm", recipe, cut)
Trainer.take_step = step
trained("rmsnorm", recipe, cut)
"""


def test_three_processes_go_on_as_if_they_had_not_been_interrupted(tmp_path):
    """Of three numbers the sum depends on their order, as that of two does not."""
    for process in ranks(CUT, tmp_path / "whole", tmp_path / "cut", n=3):
        process.done()
    last = "checkpoints/step-00000004/model.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "cut" / last).read_bytes()


def test_those_that_know_nothing_of_each_other_are_refused(monkeypatch):
    alone_here = SimpleNamespace(num_processes=1, device="cuda:0")
    monkeypatch.setattr(accelerate, "PartialState", lambda cpu: alone_here)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert accelerators.processes("cpu") is alone_here  # of another launcher's environment
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(NormGeoError, match="2 processes were launched, and each would train for itself on cuda:0"):
        accelerators.processes("auto")


def relative(words, folder):
    return [word.replace(f"{folder}/", "") for word in words]


def test_other_data_in_one_of_them_are_refused(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
        articles(tmp_path / rank)
    text = tmp_path / "1/text.jsonl"
    text.write_text(text.read_text().replace("lazy", "quick"))
    words = relative(command(tmp_path, "out", *WORDS, "--steps", 4), tmp_path)
    words[words.index("--out") + 1] = str(tmp_path / "out")
    for process in ranks(APART, *words, PLACES=str(tmp_path)):
        assert process.ended().returncode == 1
        assert "the processes of this training have another data_sha256: " in " ".join(process.stderr.split())
        assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()


def test_directories_that_only_look_alike_are_refused(tmp_path):
    """One process has an earlier state than the other: gradients of two models would be added."""
    articles(tmp_path)
    (tmp_path / "0").mkdir()
    whole = tmp_path / "0/out"
    words = command(tmp_path, "0/out", *WORDS, "--steps", 6)
    Forked(NORMGEO, *words).done()
    record = json.loads((whole / "train.json").read_text())
    (whole / "train.json").write_text(json.dumps(record | {"status": "running"}))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    state = next((tmp_path / "1/out/rmsnorm").glob("state-*"))
    state.rename(state.with_name("state-00000002"))
    for process in ranks(APART, "train", "--resume", "out", PLACES=str(tmp_path)):
        assert process.ended().returncode == 1
        assert "have another out: " in " ".join(process.stderr.split())


def test_another_norm_in_one_of_them_is_refused(tmp_path):
    """Its parameters may be as many and as large, and its gradients are another model's."""
    articles(tmp_path)
    by_rank = "import os, sys; sys.argv[sys.argv.index('layernorm')] = os.environ['N' + os.environ['RANK']]\n" + NORMGEO
    words = command(tmp_path, "out", "--norm", "layernorm", "--steps", 4)
    for process in ranks(by_rank, *words, N0="layernorm", N1="pre-rmsnorm"):
        assert process.ended().returncode == 1
        assert "have another norm: layernorm and pre-rmsnorm; give" in " ".join(process.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("theirs", [None, "state-00000002 (1)"])
def test_another_state_in_one_of_them_is_refused(theirs, monkeypatch, tmp_path):
    trained("rmsnorm", small(steps=4, save_every=2), tmp_path)
    monkeypatch.setattr(accelerators, "gather_object", lambda told: [*told, told[0] | {"state": theirs}])
    with pytest.raises(
        NormGeoError, match=r"another state: state-00000004 .* has to be one directory that all of them"
    ):
        trained("rmsnorm", small(steps=6, save_every=2), tmp_path)


def test_what_the_first_cannot_do_ends_the_others_without_a_word(tmp_path):
    articles(tmp_path)
    (tmp_path / "two").mkdir()
    with alone(tmp_path / "two"):
        first, other = ranks(NORMGEO, *command(tmp_path, "two", *WORDS, "--steps", 4))
        assert first.ended().returncode == other.ended().returncode == 1
    assert "another process writes" in first.stderr
    assert "Traceback" not in other.stderr + first.stderr
    assert "error" not in other.stderr


DIES = """
import os, signal
from normgeo.training.train import Trainer
take_step = Trainer.take_step
def dies(trainer):
    if trainer.step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(trainer)
Trainer.take_step = dies
""" + NORMGEO  # fmt: skip


def test_of_one_that_was_killed_the_others_say_so_in_a_line(tmp_path):
    """Where no launcher ends them first."""
    articles(tmp_path)
    first, _ = ranks(DIES, *command(tmp_path, "two", *WORDS, "--steps", 4))
    assert first.ended().returncode == 1
    assert "another process of this training has ended; what was saved is safe" in " ".join(first.stderr.split())
    assert "Traceback" not in first.stderr
    Forked(NORMGEO, "train", "--resume", tmp_path / "two").done()


def test_a_launcher_that_starts_all_again_is_another_meeting(monkeypatch):
    shared = HashStore()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("normgeo.system.ranks._met", lambda: (shared, 0, 2))
    for again in ("0", "1"):
        monkeypatch.setattr("normgeo.system.ranks._meetings", iter([0]))  # a new process each time
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", again)
        ranked = Ranks.from_environment()
        assert ranked.store is not None
        assert not ranked.store.check(["said"])
        assert ranked.first("said", lambda: 3) == 3


class Gone(HashStore):
    def set(self, name, value):
        raise RuntimeError("Broken pipe\nstack")


def test_a_launcher_that_is_gone_hides_no_error():
    ranked = Ranks(0, 2, 0, Gone())
    with pytest.raises(KeyError, match="mine"):
        ranked.first("said", lambda: {}["mine"])
    with pytest.raises(NormGeoError, match=r"or what launched it, has ended: Broken pipe$"):
        ranked.first("said", lambda: 3)


def test_a_state_of_another_step_is_refused(tmp_path):
    recipe = small(steps=4, save_every=2)
    trained("rmsnorm", recipe, tmp_path)
    path = tmp_path / "state-00000004/state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 3}))
    with pytest.raises(RunError, match=r"state-00000004 is damaged.*it is of step 3 and has a curve of 4 steps"):
        trained("rmsnorm", recipe, tmp_path)


def test_a_state_without_its_record_is_refused(tmp_path):
    trained("rmsnorm", small(steps=4, save_every=2), tmp_path)
    (tmp_path / "state-00000004/state.json").unlink()
    with pytest.raises(RunError, match=r"state-00000004 is damaged, .* remove it, and the run starts"):
        trained("rmsnorm", small(steps=4, save_every=2), tmp_path)


def test_weights_that_are_not_those_that_were_written_are_not_measured(tmp_path):
    trained("rmsnorm", small(steps=4, checkpoint_every=2), tmp_path / "rmsnorm")
    path = tmp_path / "rmsnorm/checkpoints/step-00000004/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 48, (20, 16)))
    config = RunConfig((), str(ids), tokens=160, null=4, device="cpu")
    with pytest.raises(RunError, match=r"step-00000004 is damaged: its weights are not those that were written"):
        start_checkpoints(tmp_path, config, tmp_path / "angles", progress=False)
    measured = sorted(path.name for path in (tmp_path / "angles/parts").iterdir())
    assert measured == ["rmsnorm-00000000.parquet", "rmsnorm-00000002.parquet"]


@pytest.mark.parametrize("words", [("compare", "a", "b"), ("bench", "stream")], ids=" ".join)
def test_what_one_process_does_is_not_done_by_all(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, other = ranks(NORMGEO, *words)
    assert first.ended().returncode == other.ended().returncode == 1
    assert f"{words[0]} is done by one process, and 2 were launched" in " ".join(first.stderr.split())
    assert other.stderr == ""
    assert not list(tmp_path.iterdir())
