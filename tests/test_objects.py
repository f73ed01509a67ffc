"""Stores in an object store are those on a disk, file by file, whoever killed what."""

import contextlib
import hashlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from bucket import LOST, served
from forked import Forked
from obstore.store import from_url
from stores import CONTEXT, captured, config, content, unfinished
from test_ranks import by_ranks

from normgeo import AngleTable, HiddenStateStore
from normgeo.errors import NormGeoError, StoreError
from normgeo.store import writer as store_writer
from normgeo.store.capture import resume_capture, start_capture
from normgeo.store.check import verify
from normgeo.store.objects import Objects, storage_at
from normgeo.store.scan import angles_from_store


@pytest.fixture(scope="module")
def server():
    with served() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


@pytest.fixture(scope="module")
def remote(server, home):
    """A store in the bucket that tests only read."""
    return captured(home, "s3://bucket/a/store")


@pytest.fixture
def url(server, tmp_path):
    return f"s3://bucket/{tmp_path.name}/store"


def files(url):
    """All that is there."""
    storage = storage_at(url)
    pages = storage._ob.list(storage._objects)
    return {found["path"]: storage.read(found["path"]) for page in pages for found in page}


def remote_content(url):
    """What `content` gives of a store on a disk."""
    return {
        name: hashlib.sha256(raw).hexdigest()
        for name, raw in sorted(files(url).items())
        if name.split("/")[0] in ("hidden.zarr", "commits", "state") and name != "hidden.zarr/zarr.json"
    }


# --- the same store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_it_is_the_store_on_a_disk_file_by_file(home, server, tmp_path, scheme):
    lines, setup = [], config(home, "llama", ("pre", "standardized", "post"), n=300, dtype="bfloat16")
    url = f"{scheme}://bucket/{tmp_path.name}"
    start_capture(setup, url, announce=lines.append, progress=False)
    start_capture(setup, tmp_path / "s", progress=False)
    assert remote_content(url) == content(tmp_path / "s")
    there, here = files(url), {p.relative_to(tmp_path / "s").as_posix(): p for p in (tmp_path / "s").rglob("*")}
    assert set(there) == {name for name, path in here.items() if path.is_file()} - {"lock"}
    for name in ("angles.parquet", "sinks.parquet", "verdict.md", "report.html"):
        assert there[name] == here[name].read_bytes()
    record, local = json.loads(there["store.json"]), json.loads(here["store.json"].read_text())
    assert (record["layout"], record["status"]) == (local["layout"], "complete")
    chunks = sum(
        len(raw) for name, raw in there.items() if "/c." in name and name.split("/")[-2] not in ("gain", "bias")
    )
    assert f"exactly {chunks:,} bytes of hidden states" in lines[0]
    assert "(an object store says nothing of free space)" in lines[0]
    assert verify(url) == verify(tmp_path / "s")


def test_what_is_read_from_it(home, remote, store):
    found, local = HiddenStateStore(remote), HiddenStateStore(store)
    assert found.complete
    assert found.store_id == local.store_id
    assert found.commit_log == local.commit_log
    for site in local.sites:
        np.testing.assert_array_equal(np.asarray(found.open(site.key)), np.asarray(local.open(site.key)))
        for ours, theirs in zip(found.open(site.key).batches(99), local.open(site.key).batches(99), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    ours, theirs = (angles_from_store(place, null=8, progress=False) for place in (remote, store))
    pd.testing.assert_frame_equal(ours.frame, theirs.frame, check_exact=True)
    pd.testing.assert_frame_equal(ours.sinks, theirs.sinks, check_exact=True)


def test_rows_are_read_side_by_side_and_a_few_ahead_alone(home, url, monkeypatch):
    captured(home, url)
    storage, read_at_all, waited, ahead = storage_at(url), [], [], []
    storage.delete("commits/00000001.json")

    def watched(real):
        def read(self, name, *args):
            read_at_all.append(name)
            if threading.current_thread() is threading.main_thread():
                waited.append(name)
            return real(self, name, *args)

        return read

    for name in ("read", "read_range", "size"):
        monkeypatch.setattr(Objects, name, watched(getattr(Objects, name)))
    resume_capture(url, progress=False)
    assert not [name for name in waited if name.startswith("state/")]
    assert read_at_all.count("commits/00000002.json") == 2  # before anything is written, and at the end
    waited.clear()
    angles_from_store(url, null=8, progress=False)
    assert not [name for name in waited if "/tokens/" in name]
    waited.clear()
    assert verify(url, progress=False)[1] == []
    assert not [name for name in waited if name.startswith(("commits/", "state/", "hidden.zarr/sites/"))]
    waited.clear()
    hidden = (found := HiddenStateStore(url)).open(found.sites[0].key)
    whole = np.asarray(hidden)
    assert len(found.tokens("id")) == len(whole)
    for rows in ([*hidden], *(torch.cat([*hidden.batches(n)]) for n in (7, 64, 130, 699, 900))):
        np.testing.assert_array_equal(rows, whole)
    assert not [name for name in waited if "/c." in name]
    read_at_all.clear()
    next(batches := hidden.batches(7))
    batches.close()
    assert len(read_at_all) <= 1 + storage.threads < len(found.commit_log)  # the one that is given, and those ahead
    found = storage.each(lambda n: ahead.append(n) or n, range(1000))
    assert [next(found), next(found)] == [0, 1]
    found.close()
    assert len(ahead) <= 2 * storage.threads + 1


def test_several_processes_write_it(home, url, store):
    found = by_ranks(3, lambda ranks: start_capture(config(home), url, ranks=ranks, progress=False))
    assert [type(each) for each in found] == [AngleTable, type(None), type(None)]
    assert remote_content(url) == content(store)
    assert storage_at(url).size("lock") is None


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dask_arrays_hold_the_numbers(home, url, tmp_path, where, dtype):
    path = captured(home, url if where == "bucket" else tmp_path / "s", "llama", n=300, dtype=dtype)
    store = HiddenStateStore(path)
    states = store.open(store.sites[2].key, "pre")
    found = states.dask()
    assert found.chunks[0][:2] == (store.layout.chunk,) * 2
    np.testing.assert_array_equal(found.compute(scheduler="synchronous"), states.torch().float().numpy())


def test_dask_arrays_need_dask(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.array", None)
    with pytest.raises(NormGeoError, match=r"pip install 'normgeo\[dask\]'"):
        HiddenStateStore(store).open(HiddenStateStore(store).sites[0].key).dask()


def test_damage_is_named(home, url):
    captured(home, url, n=200)
    storage = storage_at(url)
    site = HiddenStateStore(url).sites[1].key
    chunk = f"hidden.zarr/sites/{site}/pre/c.1.0"
    for name in (chunk, f"hidden.zarr/sites/{site}/zarr.json", "commits/00000001.json", "state/00000001.safetensors"):
        whole = storage.read(name)
        raw = bytearray(whole)
        raw[len(raw) // 2] ^= 1
        storage.put(name, bytes(raw))
        _, problems = verify(url)
        assert len(problems) == 1
        assert problems[0].startswith(f"{url}/{name} is damaged")
        if name == chunk:
            with pytest.raises(StoreError, match=r"c\.1\.0 is damaged"):
                angles_from_store(url, null=4, progress=False)
        storage.put(name, whole)
    assert verify(url)[1] == []
    storage.put(chunk, storage.read(chunk)[:-100])
    storage.delete(chunk.replace("c.1.0", "c.0.0"))
    problems = " ".join(verify(url)[1])
    assert f"{url}/{chunk} has" in problems
    assert "c.0.0 is missing" in problems
    with pytest.raises(StoreError, match=r"c\.0\.0 cannot be read"):
        angles_from_store(url, null=4, progress=False)


def test_answers_that_end_early_are_said(home, remote, monkeypatch):
    real = Objects.read_range
    monkeypatch.setattr(Objects, "read_range", lambda self, name, start, n: real(self, name, start, n)[:100])
    problems = verify(remote)[1]
    assert problems
    assert all("cannot be read: 100 bytes came of its" in problem for problem in problems)


# --- interruptions and other writers ----------------------------------------------------------------------------------

CODE = """
import sys
from pathlib import Path
from normgeo.store import capture
from normgeo.angles import runs
from normgeo.store.objects import storage_at
from normgeo.angles.runs import RunConfig
runs._draw = lambda table, folder: None
home, out = Path(sys.argv[1]), sys.argv[2]
run = RunConfig((str(home / "gpt2"),), str(home / "many.npy"), batch=3, null=8, device="cpu")
config = capture.CaptureConfig(run, ("pre", "post"), 256 * 32 * 4)
print("ready", flush=True)
if storage_at(out).size("store.json") is None:
    capture.start_capture(config, out, progress=False)
else:
    capture.resume_capture(out, progress=False)
"""


def test_killed_processes_lose_nothing(home, url, tmp_path):
    """Killed at random moments, one of them for certain among its commits, and one before, as it tried the bucket."""
    np.save(home / "many.npy", np.random.default_rng(1).integers(3, 96, (int(os.environ.get("ROWS", 200)), CONTEXT)))
    Forked(CODE, home, tmp_path / "whole").done()
    rng, storage = random.Random(0), storage_at(url)
    storage.put("scratch/tried", b"")
    for kill in range(int(os.environ.get("ROUNDS", 2))):
        process, had = Forked(CODE, home, url), len(storage.names("commits"))
        process.until(lambda process=process: "ready" in process.stdout)
        if kill == 0:
            process.until(lambda had=had: len(storage.names("commits")) > had)
        else:
            time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        process.ended()
        if storage.size("angles.parquet") is not None:
            break
    if json.loads(storage.read("store.json"))["status"] != "complete":
        Forked(CODE, home, url).done()
    assert remote_content(url) == content(tmp_path / "whole")
    assert verify(url)[1] == []
    assert storage.size("lock") is None
    assert storage.names("scratch") == []


def test_a_second_writer_is_refused(home, url):
    storage = storage_at(url)
    with storage.writing(), pytest.raises(StoreError, match=rf"another process writes {url}: process {os.getpid()} of"):
        captured(home, url)
    captured(home, url, n=450)
    unfinished(url)
    with storage.writing(), pytest.raises(StoreError, match=rf"another process writes {url}"):
        captured(home, url)
    for name in storage.names("commits")[3:]:
        storage.delete(f"commits/{name}")
    before = remote_content(url)
    storage.create("commits/00000005.json", storage.read("commits/00000000.json"))  # by a writer that the lock missed
    with pytest.raises(StoreError, match="belongs to another store, or to another row"):
        resume_capture(url, progress=False)
    storage.delete("commits/00000005.json")
    assert remote_content(url) == before
    resume_capture(url, progress=False)
    assert HiddenStateStore(url).n_tokens == 450


def test_a_bucket_that_is_gone_meanwhile_is_said(url, monkeypatch):
    storage = storage_at(url)
    monkeypatch.setattr(storage, "_client", from_url("s3://gone/store"))
    for do in (storage.read, lambda name: storage.put(name, b""), lambda name: storage.create(name, b"")):
        with pytest.raises(StoreError, match="there is no bucket bucket; create it"):
            do("a")


def test_of_a_folder_the_shallowest_file_is_there_last(url, monkeypatch):
    """A kill in between leaves no group that lacks what is in it."""
    storage, put = storage_at(url), []
    monkeypatch.setattr(type(storage), "put", lambda self, name, content: put.append(name))
    storage.publish("hidden.zarr", dict.fromkeys(("zarr.json", "zz/zarr.json", "zz/b/zarr.json"), b"{}"))
    assert put == [f"hidden.zarr/{name}" for name in ("zz/b/zarr.json", "zz/zarr.json", "zarr.json")]


def test_where_nothing_was_captured_nothing_is_left(home, url, monkeypatch):
    def failing(*args):
        raise StoreError("the disk is on fire")

    monkeypatch.setattr("normgeo.store.writer.write_commit", failing)
    with pytest.raises(StoreError, match="on fire"):
        captured(home, url)
    assert files(url) == {}


def test_a_writer_that_lost_its_lock_removes_nothing_of_another(home, url, monkeypatch):
    """The first hangs before it commits, another takes over and puts chunks, and the first wakes."""
    theirs = []

    def hanging(*args):
        monkeypatch.setattr("normgeo.store.writer.write_commit", written)
        with monkeypatch.context() as patch:
            patch.setattr("normgeo.store.objects.LEASE_SECONDS", -1.0)
            other = storage_at(url)
            while not theirs:  # the first renews meanwhile: when it does in between, one has to try again
                with contextlib.suppress(StoreError):
                    theirs.append(other.writing())
                    theirs[-1].__enter__()
        other.put("hidden.zarr/of-the-other", b"")
        raise StoreError("the disk is on fire")

    written = store_writer.write_commit
    monkeypatch.setattr("normgeo.store.writer.write_commit", hanging)
    with pytest.raises(StoreError, match="on fire"):
        captured(home, url, n=250)
    assert "hidden.zarr/of-the-other" in files(url)
    assert "store.json" in files(url)
    theirs[-1].__exit__(None, None, None)
    resume_capture(url, progress=False)
    assert verify(url)[1] == []


# --- the command line -------------------------------------------------------------------------------------------------


def test_commands(normgeo, home, url, monkeypatch):
    options = ("--data", home / "ids.npy", "--tokens", 100, "--null", 4)
    status, out, err = normgeo("capture", home / "gpt2", "--store", url, *options)
    assert status == 0, err
    assert f"{url}: hidden.zarr, commits/" in out
    assert normgeo("verify", url)[0] == 0
    status, _, err = normgeo("angles", "--store", url, "--null", 4, "--out", "a")
    assert status == 0, err
    assert json.loads(Path("a/run.json").read_text())["store"] == url
    for words, message in (
        (("capture", home / "gpt2", "--store", url, *options), "already holds a store (complete)"),
        (("capture", "--resume", url), "is complete; normgeo angles --store s3://"),
        (("capture", home / "gpt2", "--store", url.removesuffix("/store"), *options), "is no store; give another"),
        (("capture", home / "gpt2", "--store", f"{url}2", *options, "--chunk-mib", 64), "at most 32 MiB"),
        (("verify", f"{url}2"), "is no store of hidden states"),
        (("verify", "s3://missing/x"), "there is no bucket missing"),
        (("angles", "--store", "az://bucket/x"), "s3://bucket/prefix"),
    ):
        status, _, err = normgeo(*words)
        assert status == 1
        assert message in err
        assert "Traceback" not in err
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'normgeo[objects]'" in normgeo("verify", url)[2]


def test_an_answer_that_is_lost_is_no_other_writer(home, url, tmp_path, monkeypatch):
    """The client tries again, and meets the commit, or the lock, that its first try has put."""
    monkeypatch.setattr("normgeo.store.objects.LEASE_SECONDS", 60.0)
    LOST.extend(["store/lock", "commits/00000002.json"])
    try:
        captured(home, url, n=250)
        assert not LOST
        assert remote_content(url) == content(captured(home, tmp_path / "s", n=250))
        storage = storage_at(url)
        with storage.writing():
            LOST.append("store/lock")
            assert storage._renewed()
            assert storage._renewed()
            assert not LOST
            storage.put("later", b"")
            storage._ob.put(storage._objects, "lock", b"{}")  # by another
            assert not storage._renewed()
            with pytest.raises(StoreError, match="another process has taken over"):
                storage.put("later", b"")
        storage = storage_at(url)
        storage.create("made", b"one")
        storage.create("made", b"one")
        with pytest.raises(StoreError, match="is already there: another process writes this store"):
            storage.create("made", b"other")
    finally:
        LOST.clear()


def test_a_lock_that_goes_while_it_is_looked_at_is_one_line(url, monkeypatch):
    storage = storage_at(url)
    storage.put("lock", b"{}")
    monkeypatch.setattr(storage, "_lock", lambda: storage.read("gone"))
    with pytest.raises(StoreError, match="has just begun or ended writing"), storage.writing():
        pass
