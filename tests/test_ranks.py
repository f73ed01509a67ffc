"""Captures by several processes: the same bytes whoever computes a row, and whoever dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pandas as pd
import pytest
from forked import NORMGEO, Forked
from stores import CONTEXT, captured, config, content, unfinished
from together import by_ranks
from torch.distributed import HashStore

from normgeo import AngleTable, HiddenStateStore, packing, tokens
from normgeo.angles import job
from normgeo.angles.runs import RunConfig
from normgeo.documents import read_documents
from normgeo.errors import NormGeoError, StoreError
from normgeo.store import capture
from normgeo.store.capture import CaptureConfig, resume_capture, start_capture
from normgeo.store.check import verify
from normgeo.store.storage import Disk
from normgeo.system import ranks
from normgeo.system.ranks import Ranks

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("size", "model", "phases", "changes"),
    [(2, "gpt2", ("pre",), {}), (3, "llama", ("pre", "post"), {"dtype": "bfloat16", "batch": 16}),
     (5, "gpt2", ("pre",), {"context": 7}), (13, "gpt2", ("pre",), {})],
)  # fmt: skip
def test_the_number_of_processes_does_not_show(home, tmp_path, size, model, phases, changes):
    alone = captured(home, tmp_path / "alone", model, phases, **changes)
    setup, path = config(home, model, phases, **changes), tmp_path / "together"
    tables = by_ranks(size, lambda ranks: start_capture(setup, path, ranks=ranks, progress=False))
    assert tables[1:] == [None] * (size - 1)
    assert content(path) == content(alone)
    pd.testing.assert_frame_equal(tables[0].frame, AngleTable.load(alone).frame, check_exact=True)
    pd.testing.assert_frame_equal(AngleTable.load(path).sinks, AngleTable.load(alone).sinks, check_exact=True)


def test_each_process_tokenizes_its_own_part_of_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MARK_EVERY", 200)
    monkeypatch.setattr(tokens, "KEPT_TOKENS", 0)
    began, encoded = [], packing.Packed._encoded
    monkeypatch.setattr(packing.Packed, "_encoded", lambda self, first: began.append(first) or encoded(self, first))
    words = next(read_documents(tokens.SAMPLE)).split()
    texts = (" ".join(words[i : i + 40]) for i in range(0, len(words), 40))
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = {"context": 50, "batch": 4, "null": 4, "device": "cpu", "sites": "final"}
    run = RunConfig(("embedded-layernorm",), str(tmp_path / "d.jsonl"), 4900, **options)
    setup = CaptureConfig(run, ("pre",), 512 * 192 * 4)
    start_capture(setup, tmp_path / "alone", progress=False)
    whole = content(tmp_path / "alone")
    began.clear()
    by_ranks(3, lambda ranks: start_capture(setup, tmp_path / "s", ranks=ranks, progress=False))
    assert content(tmp_path / "s") == whole
    seen, begun = sorted(began), began.count(0)
    assert begun == 3 + 1 + 1, "each sees a few tokens; the first counts, and begins"
    assert len(seen) == begun + 2
    assert seen[-2] > 15
    assert seen[-1] > 30
    rows = HiddenStateStore(tmp_path / "s").layout.rows
    for row in range(rows - 2, rows):
        (tmp_path / f"s/commits/{row:08}.json").unlink()
    unfinished(tmp_path / "s")
    began.clear()
    resume_capture(tmp_path / "s", progress=False)
    assert content(tmp_path / "s") == whole
    assert len(began) == 4, "a few tokens, the first row is as it was, and the last, and what is left"
    assert began[:2] == [0, 0]
    assert min(began[2:]) > 40


def test_batches_of_other_shapes_would_show(home, tmp_path, store):
    """The comparison sees a batch cut at a row's end: that null ensembles and states are equal is no accident."""
    other = content(captured(home, tmp_path / "s", batch=2))
    assert {name for name, sha in content(store).items() if other[name] != sha} > {"state/00000001.safetensors"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_that_are_missing_anywhere_are_computed_by_any_number(copy, store, size):
    for row in (0, 3, 4, 9):
        (copy / f"commits/{row:08}.json").unlink()
        for file in (copy / "hidden.zarr").rglob(f"c.{row}*"):
            if file.parent.name in ("pre", "id", "document", "position"):
                file.unlink()
    unfinished(copy)
    assert HiddenStateStore(copy).n_tokens == 0
    assert verify(copy)[1] == []
    if size == 1:
        resume_capture(copy, progress=False)
    else:
        by_ranks(size, lambda ranks: resume_capture(copy, ranks=ranks, progress=False))
    assert content(copy) == content(store)


def test_what_the_first_process_refuses_ends_all(home, copy):
    found = by_ranks(3, lambda ranks: start_capture(config(home), copy, ranks=ranks, progress=False))
    assert "already holds a store" in str(found[0])
    assert [type(error) for error in found[1:]] == [SystemExit] * 2


@pytest.mark.parametrize(
    "changes", [{"batch": 5}, {"null_every": 4}, {"seed": 5}, {"null": 16}, {"context": 10}, {"chunk": 32}], ids=str
)
def test_processes_that_are_asked_for_other_things_are_refused(home, tmp_path, changes):
    """As where every host has options of its own: numbers of both would be added up."""
    setups, path = [config(home), config(home, **changes)], tmp_path / "together"
    found = by_ranks(2, lambda ranks: start_capture(setups[ranks.rank], path, ranks=ranks, progress=False))
    assert all(isinstance(error, NormGeoError) for error in found)
    of = "layout chunk" if "chunk" in changes else next(iter(changes)).replace("_", " ")
    assert f"was started with another {of}" in str(found[1])
    assert not (path / "angles.parquet").exists()


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_process_that_resumes_with_other_data_ends_the_run(wrong, home, copy, monkeypatch):
    """It asks the others for no count, which they do not make; and none waits for what it does not say."""
    unfinished(copy)
    load, mine = job.load_tokens, threading.local()

    def loaded(*given, **options):
        stream = load(*given, **options)
        return replace(stream, digest="0" * 64) if mine.rank == wrong else stream

    def resumed(ranks):
        mine.rank = ranks.rank
        resume_capture(copy, ranks=ranks, progress=False)

    monkeypatch.setattr(job, "load_tokens", loaded)
    found = by_ranks(2, resumed)
    assert "another data" in str(found[wrong])
    if wrong:
        assert "process 1 of the run failed" in str(found[0])
    else:
        assert isinstance(found[1], SystemExit)


def test_a_process_that_fails_ends_the_first_without_a_launcher(home, tmp_path, store, monkeypatch):
    write = capture._Capture.write

    def all_but_the_last(self, known, exact, rows, progress):
        if self.plan.layout.rows - 1 in rows:
            raise StoreError("no more of this")
        write(self, known, exact, rows, progress)

    path = tmp_path / "together"
    with monkeypatch.context() as patch:
        patch.setattr(capture._Capture, "write", all_but_the_last)
        found = by_ranks(2, lambda ranks: start_capture(config(home), path, ranks=ranks, progress=False))
    assert str(found[1]) == "no more of this"
    assert str(found[0]).startswith("process 1 of the run failed, and says why itself; what is committed is safe")
    by_ranks(2, lambda ranks: resume_capture(path, ranks=ranks, progress=False))
    assert content(path) == content(store)


SILENT = """
import os, sys, time
from normgeo.system import ranks
from normgeo.errors import NormGeoError
ranks.BEAT_SECONDS, ranks.SILENCE_SECONDS = 0.1, 2.0
if os.environ.get("APART"):
    ranks.machine = lambda: "another"
mine = ranks.Ranks.from_environment()
with mine.heard():
    if mine.rank:
        mine.done("begun")
        time.sleep(100)
    mine.done("begun")
    print("begun", flush=True)
    try:
        mine.done("written")
    except NormGeoError as error:
        sys.exit(str(error))
"""


@pytest.mark.parametrize("apart", ["", "on another machine"])
def test_a_killed_process_is_missed_without_a_launcher(monkeypatch, apart):
    monkeypatch.setenv("APART", apart)
    first, second = forked.ranks(SILENT)
    first.until(lambda: first.stdout == "begun\n")
    time.sleep(3)  # longer than one may be silent
    assert first.returncode is None
    second.kill()
    assert first.ended(60).returncode == 1
    known = "was not heard of for 2 s" if apart else "has ended without a word"
    assert first.stderr.startswith(f"process 1 of the run {known}; what is committed is safe")


def test_others_at_the_meeting_place_are_not_waited_for(monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "MEETING_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes what is said, and says nothing
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        with pytest.raises(NormGeoError, match=r"the first one did not answer at 127\.0\.0\.1:\d+ for 1 s"):
            Ranks.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(NormGeoError, match="WORLD_SIZE is abc, and the other processes cannot be met"):
        Ranks.from_environment()


def test_one_run_at_a_time(home, copy):
    unfinished(copy)
    with Disk(copy).writing() as run:
        with Disk(copy).writing(run), pytest.raises(StoreError, match="another process writes"):
            resume_capture(copy, progress=False)
        with pytest.raises(StoreError, match="one file system"), Disk(copy).writing("another run"):
            pass


def test_the_lock_is_held_until_the_last_process_has_ended(copy):
    joined, leave = threading.Event(), threading.Event()

    def stay(run):
        with Disk(copy).writing(run):
            joined.set()
            leave.wait(60)

    with Disk(copy).writing() as run:
        other = threading.Thread(target=stay, args=(run,))
        other.start()
        assert joined.wait(60)
    with pytest.raises(StoreError, match="another process writes"), Disk(copy).writing():
        pass
    leave.set()
    other.join()
    with Disk(copy).writing():
        pass


def test_a_launchers_signal_is_an_interruption_inside_a_run_alone():
    before = signal.getsignal(signal.SIGTERM)
    with Ranks(0, 2).told_to_end(), pytest.raises(KeyboardInterrupt):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_model_over_all_gpus_needs_a_machine_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(NormGeoError, match="one process on each machine"):
        Ranks(1, 2, 1, HashStore()).take_gpu("auto", "auto")


@pytest.mark.parametrize("there", [1, 2])
def test_every_process_has_a_gpu_of_its_own(there, monkeypatch):
    """Under torchrun all processes see all GPUs of a machine, under srun each may see its own alone."""
    taken, gpus = [], [f"GPU-{n}" for n in range(there)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda n: SimpleNamespace(uuid=gpus[n]))
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    store = HashStore()
    for local in range(there):
        Ranks(local, there + 1, local, store).take_gpu("auto", None)
    assert taken == list(range(there))
    last = Ranks(there, there + 1, there, store)
    with pytest.raises(NormGeoError, match=f"process {there} of this machine has no GPU of its own: it sees {there};"):
        last.take_gpu("cuda", None)
    last.take_gpu("cpu", None)
    gpus[:] = ["GPU-other"]
    last.take_gpu("auto", None)
    assert taken == [*range(there), 0]


# --- real processes ---------------------------------------------------------------------------------------------------


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )


COMMAND = f"""
from normgeo.angles import runs
runs._draw = lambda table, folder: None
{NORMGEO}
"""


def test_the_command_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setattr("normgeo.angles.runs._draw", lambda table, folder: None)  # as in the command
    words = ("--tokens", 2900, "--context", 100, "--null", 8, "--chunk-mib", 1, "--device", "cpu")
    (tmp_path / "command.py").write_text(COMMAND)
    process = torchrun(tmp_path / "command.py", "capture", "embedded-layernorm", "--store", tmp_path / "two", *words)
    run = RunConfig(("embedded-layernorm",), tokens=2900, context=100, null=8, device="cpu", keep="none")
    start_capture(CaptureConfig(run, chunk_bytes=1 << 20), tmp_path / "one", progress=False)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("exactly") == out.count("store.json") == 1
    assert HiddenStateStore(tmp_path / "two").layout.rows == 3
    assert content(tmp_path / "two") == content(tmp_path / "one")
    for name in ("angles.parquet", "sinks.parquet", "verdict.md", "report.html"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


LAUNCHER = """
import dataclasses, multiprocessing, runpy, sys
from torch.distributed import run
multiprocessing.current_process()._config["daemon"] = False  # which may have no children

def work(_, script, *words):
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")

def forking(args, read=run.config_from_args):
    config, _, words = read(args)
    return dataclasses.replace(config, start_method="fork"), work, words

run.config_from_args = forking
run.main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])
"""  # torchrun, but for where its processes come from: two new ones would import for eight seconds each
SCRIPT = """
import os, sys
from pathlib import Path
from forked import wait_before
Path(sys.argv[3] + os.environ["RANK"]).write_text(str(os.getpid()))
from normgeo.angles import runs
from normgeo.store import writer
from normgeo.store.capture import CaptureConfig, start_capture
wait_before(writer, "write_commit", lambda storage, commit: commit.row == int(sys.argv[4]))
runs._draw = lambda table, folder: None
run = runs.RunConfig((sys.argv[1],), sys.argv[2], batch=3, null=8, device="cpu")
start_capture(CaptureConfig(run, ("pre",), 64 * 32 * 4), Path(sys.argv[3]), progress=False)
"""


def test_a_killed_process_ends_the_run_and_any_number_finishes_it(home, tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(3, 96, (160, CONTEXT)))
    (tmp_path / "script.py").write_text(SCRIPT)
    run = RunConfig((str(home / "gpt2"),), str(tmp_path / "ids.npy"), batch=3, null=8, device="cpu")
    start_capture(CaptureConfig(run, ("pre",), 64 * 32 * 4), tmp_path / "whole", progress=False)
    rows = HiddenStateStore(tmp_path / "whole").layout.rows
    mine = tmp_path / f"cut/commits/{rows // 2:08}.json"  # the first of the second process's
    process = Forked(LAUNCHER, tmp_path / "script.py", home / "gpt2", tmp_path / "ids.npy", tmp_path / "cut", rows - 1)
    process.until(mine.exists)
    os.kill(int((tmp_path / "cut1").read_text()), signal.SIGKILL)
    assert process.ended(100).returncode != 0
    assert "SIGKILL" in process.stderr
    committed = set(HiddenStateStore(tmp_path / "cut").committed)
    assert rows // 2 in committed
    assert len(committed) < rows
    assert not (tmp_path / "cut/angles.parquet").exists()
    by_ranks(3, lambda ranks: resume_capture(tmp_path / "cut", ranks=ranks, progress=False))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert AngleTable.load(tmp_path / "cut").frame.equals(AngleTable.load(tmp_path / "whole").frame)
