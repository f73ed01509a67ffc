"""Captures that are interrupted, killed, or without a place to write: nothing is lost, and the rest is the same."""

import functools
import itertools
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from forked import Forked
from stores import CONTEXT, N, captured, content, unfinished

from normgeo import HiddenStateStore, stream
from normgeo.angles.job import RunConfig
from normgeo.errors import RunError, StoreError
from normgeo.store import capture, storage
from normgeo.store.capture import resume_capture
from normgeo.store.check import verify
from normgeo.store.layout import commit_file, state_file
from normgeo.store.storage import Disk
from normgeo.store.writer import StoreWriter, _Buffers
from normgeo.system.direct import BLOCK


@pytest.mark.parametrize("changes", [{}, {"context": 7}, {"batch": 16}])
def test_an_interrupted_capture_is_resumed_bit_identically(home, tmp_path, monkeypatch, changes):
    whole = content(captured(home, tmp_path / "whole", **changes))
    for after in (1, 2, 1):

        def dying(*args, after=after):
            for n, batch in enumerate(stream.stream(*args), 1):
                if n == after and any(isinstance(sink, StoreWriter) for sink in args[3]):
                    raise KeyboardInterrupt
                yield batch

        begun = (tmp_path / "cut").exists()
        go = resume_capture if begun else lambda path, progress: captured(home, path, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(capture, "stream", dying)
            with pytest.raises(KeyboardInterrupt):
                go(tmp_path / "cut", progress=False)
        assert HiddenStateStore(tmp_path / "cut").n_tokens < N
    resume_capture(tmp_path / "cut", progress=False)
    assert content(tmp_path / "cut") == whole


def test_a_stream_that_ends_early_makes_no_complete_store(home, tmp_path, monkeypatch, store):
    def ending(*args):
        writes = any(isinstance(sink, StoreWriter) for sink in args[3])
        return itertools.islice(stream.stream(*args), 2 if writes else None)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "stream", ending)
        with pytest.raises(StoreError, match="the stream ended before its last row was committed"):
            captured(home, tmp_path / "s")
    resume_capture(tmp_path / "s", progress=False)
    assert content(tmp_path / "s") == content(store)


CODE = """
import sys
from pathlib import Path
from forked import wait_before
from normgeo.store import capture, writer
from normgeo.angles import runs
from normgeo.angles.runs import RunConfig
runs._draw = lambda table, folder: None
home, out, never = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
wait_before(writer, "write_commit", lambda storage, commit: commit.row == never)
run = RunConfig((str(home / "gpt2"),), str(home / "many.npy"), batch=3, null=8, device="cpu")
config = capture.CaptureConfig(run, ("pre", "post"), 256 * 32 * 4)
go = capture.resume_capture if (out / "store.json").exists() else lambda o, **k: capture.start_capture(config, o, **k)
go(out, progress=False)
"""


def kill_at_work(home, out, until, moment, last):
    """Kill a capture `moment` seconds after `until` of its rows are complete, and before the last is."""
    process = Forked(CODE, home, out, last)
    process.until(lambda: len(list((out / "commits").glob("*.json"))) >= until)
    time.sleep(moment)
    process.kill()
    assert process.ended().returncode == -signal.SIGKILL


def test_killed_processes_lose_nothing(home, tmp_path):
    """ROUNDS and ROWS in the environment make it as long as one likes."""
    rounds, texts = int(os.environ.get("ROUNDS", 2)), int(os.environ.get("ROWS", 600))
    np.save(home / "many.npy", np.random.default_rng(1).integers(3, 96, (texts, CONTEXT)))
    Forked(CODE, home, tmp_path / "whole", -1).done()
    rows, rng, complete = HiddenStateStore(tmp_path / "whole").layout.rows, random.Random(rounds), 0
    for _ in range(rounds):
        complete += rng.randint(0, rows // (rounds + 1))  # of the last share of the rows, none
        kill_at_work(home, tmp_path / "cut", complete, rng.uniform(0.0, 0.05), rows - 1)
    assert len(HiddenStateStore(tmp_path / "cut").committed) < rows
    Forked(CODE, home, tmp_path / "cut", -1).done()
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert verify(tmp_path / "cut")[1] == []


def test_a_full_disk_stops_cleanly_and_resumes(home, tmp_path, full_disk, store):
    with full_disk(150), pytest.raises(RunError, match=r"disk .* is full.*--resume"):
        captured(home, tmp_path / "s")
    assert not list((tmp_path / "s").rglob("*.part"))
    resume_capture(tmp_path / "s", progress=False)
    assert content(tmp_path / "s") == content(store)


def test_what_cannot_fit_is_refused_before_anything(home, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StoreError, match="the hidden states need"):
        captured(home, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_what_fits_but_for_statistics_and_records_is_refused_too(home, tmp_path, monkeypatch):
    captured(home, tmp_path / "s")
    chunks = sum(f.stat().st_size for f in (tmp_path / "s/hidden.zarr").rglob("c.*"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": chunks + 1000}))
    with pytest.raises(StoreError, match=rf"need [\d,]+ bytes, with statistics .* up to .* has {chunks + 1000:,} free"):
        captured(home, tmp_path / "t")
    unfinished(tmp_path / "s")
    for commit in (tmp_path / "s/commits").iterdir():
        commit.unlink()
    with pytest.raises(StoreError, match=rf"needs up to [\d,]+ bytes .* has {chunks + 1000:,} free"):
        resume_capture(tmp_path / "s", progress=False)
    assert (tmp_path / "s/store.json").exists()  # what was there before is not removed


def needed(path, monkeypatch):
    """What resuming a store says that the rest needs."""
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
        with pytest.raises(StoreError, match=r"the rest needs up to [\d,]+ bytes and .* has 0 free") as said:
            resume_capture(path, progress=False)
    return int(re.search(r"up to ([\d,]+) bytes", str(said.value))[1].replace(",", ""))


@pytest.mark.parametrize(("model", "chunk", "changes"), [("gpt2", 8, {}), ("qwen3", 32, {"qk": True, "batch": 1})])
def test_a_row_takes_no_more_than_is_said_and_only_rows_that_are_missing_are_counted(
    home, tmp_path, monkeypatch, model, chunk, changes
):
    path = captured(home, tmp_path / "s", model, n=120, chunk=chunk, **changes)
    layout, taken = HiddenStateStore(path).layout, []
    unfinished(path)
    for row in range(layout.rows):
        chunks = [f"hidden.zarr/{spec.chunk_file(row)}" for spec in layout.arrays]
        files = [path / name for name in (*chunks, f"state/{row:08}.safetensors", commit_file(row))]
        taken.append(sum(-(-file.stat().st_size // BLOCK) * BLOCK for file in files))
    (path / commit_file(0)).unlink()
    one = needed(path, monkeypatch)
    (path / commit_file(1)).unlink()
    assert needed(path, monkeypatch) == 2 * one
    assert max(taken) <= one < 2 * max(taken) + 64 * BLOCK
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2 * one}))
    resume_capture(path, progress=False)
    assert HiddenStateStore(path).complete


def test_a_directory_of_ones_own_is_left_as_it_was(home, tmp_path, monkeypatch):
    def failing(*args):
        raise StoreError("the disk is on fire")

    (tmp_path / "mine/empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr("normgeo.store.writer.write_commit", failing)
        with pytest.raises(StoreError, match="on fire"):
            captured(home, ".")
        assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine/empty"]
        with pytest.raises(StoreError, match="on fire"):
            captured(home, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_a_capture_is_resumed_from_another_directory(home, tmp_path, monkeypatch, store):
    monkeypatch.chdir(home)
    run = RunConfig(("gpt2",), "ids.npy", N, batch=3, null=8, device="cpu")
    capture.start_capture(capture.CaptureConfig(run, ("pre",), 64 * 32 * 4), tmp_path / "s", progress=False)
    unfinished(tmp_path / "s")
    (tmp_path / "s/commits/00000004.json").unlink()
    monkeypatch.chdir(tmp_path)
    resume_capture("s", progress=False)
    assert content(tmp_path / "s") == content(store)


def test_a_writer_killed_before_its_record_leaves_a_place_to_begin(home, tmp_path, store):
    with Disk(tmp_path / "s").writing():
        pass
    (tmp_path / "s/scratch").mkdir()
    (tmp_path / "s/scratch/store.json.part").write_text("{")
    captured(home, tmp_path / "s")
    assert content(tmp_path / "s") == content(store)


MUCH = 80_000


def capture_with_a_bound(home, path, monkeypatch, bound, seconds):
    """The most bytes that waited for a disk, counted where they are queued and written.

    A write takes it so many seconds, as long as no more than `MUCH` waited.
    """
    waiting, most, real, counting, much = 0, 0, os.write, threading.Lock(), threading.Event()

    def count(n):
        nonlocal waiting, most
        with counting:
            waiting += n
            most = max(most, waiting)
        if most > MUCH:
            much.set()

    class Counted(StoreWriter):
        def _hand(self, key, values):
            super()._hand(key, values)
            count(0 if key in self._only_checked else values.nbytes)

        def _write(self, key, cuts, values, *rest):
            super()._write(key, cuts, values, *rest)
            count(-values.nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "StoreWriter", functools.partial(Counted, waiting_bytes=bound))
        patch.setattr(os, "write", lambda *args: (waiting and much.wait(seconds), real(*args))[1])
        captured(home, path)
    assert waiting == 0
    return most


def test_memory_for_what_waits_is_used_again_and_bounded():
    buffers, got = _Buffers(10_000), []
    first = buffers.take(4096, pinned=False)
    assert first.data_ptr() % BLOCK == 0
    buffers.give(first, pinned=False)
    again = buffers.take(4096, pinned=False)
    assert again.data_ptr() == first.data_ptr()
    waiting = threading.Thread(target=lambda: got.append(buffers.take(8192, pinned=False)))
    waiting.start()
    waiting.join(0.2)
    assert not got  # 4096 are out, and 8192 more are too many
    buffers.give(again, pinned=False)
    waiting.join(10)
    assert len(got[0]) == 8192
    buffers.give(got[0], pinned=False)
    for n in range(1000, 9000, 500):
        buffers.give(buffers.take(n, pinned=False), pinned=False)
        assert sum(len(buffer) for kept in buffers._free.values() for buffer in kept) == buffers._kept <= 10_000
    large = threading.Thread(target=lambda: got.append(buffers.take(20_000, pinned=False)), daemon=True)
    large.start()  # what is too large alone waits for nobody
    large.join(10)
    assert len(got[1]) == 20_000


def test_pinned_memory_counts_as_what_torch_takes_for_it(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    buffers, got = _Buffers(100_000), []
    first = buffers.take(40_000, pinned=True)
    assert buffers.out == 65_536
    waiting = threading.Thread(target=lambda: got.append(buffers.take(40_000, pinned=True)))
    waiting.start()
    waiting.join(0.2)
    assert not got
    buffers.give(first, pinned=True)
    waiting.join(10)
    assert got[0].data_ptr() == first.data_ptr()
    buffers.give(got[0], pinned=True)
    assert (buffers.out, buffers._kept) == (0, 65_536)


def test_a_row_is_committed_once_its_chunks_are_synced(home, tmp_path, monkeypatch):
    done, real, create, put = [], storage.sync, Disk.create, Disk.put
    monkeypatch.setattr(storage, "sync", lambda path: (real(path), done.append(path)))
    monkeypatch.setattr(Disk, "create", lambda self, name, content: (done.append(name), create(self, name, content)))
    monkeypatch.setattr(Disk, "put", lambda self, name, content: (put(self, name, content), done.append(name)))
    store = HiddenStateStore(captured(home, tmp_path / "s"))
    for commit in store.commit_log:
        at = done.index(commit_file(commit.row))
        files = [tmp_path / "s/hidden.zarr" / spec.chunk_file(commit.row) for spec in store.layout.arrays]
        assert files
        assert state_file(commit.row) in done[:at]
        assert all(file in done[:at] and file.parent in done[done.index(file) : at] for file in files)


def test_a_slow_disk_holds_the_model_back(home, tmp_path, monkeypatch, store):
    bound, piece = MUCH // 2, 3 * CONTEXT * 32 * 4
    freed_and_not_counted_yet = Disk.threads * piece
    assert capture_with_a_bound(home, tmp_path / "s", monkeypatch, bound, 0.02) <= bound + freed_and_not_counted_yet
    assert content(tmp_path / "s") == content(store)
    assert capture_with_a_bound(home, tmp_path / "unbound", monkeypatch, 1 << 30, 60) > MUCH


def test_a_store_that_has_just_begun_is_not_damaged(copy):
    unfinished(copy)
    assert HiddenStateStore(copy).incomplete.startswith(f"{copy} lacks its results; normgeo capture --resume")
    for commit in (copy / "commits").iterdir():
        commit.unlink()
    (copy / "manifest.json").unlink()
    assert verify(copy) == (0, [])
    assert f"0 of {N} tokens are committed" in HiddenStateStore(copy).incomplete.replace(",", "")
