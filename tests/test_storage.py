"""A disk and an object store keep the same promises; object stores that cannot be used say why, and soon."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from bucket import served

from normgeo.errors import StoreError
from normgeo.store import objects
from normgeo.store.holder import holder
from normgeo.store.objects import storage_at
from normgeo.store.storage import Disk
from normgeo.system import direct


@pytest.fixture(scope="module")
def server():
    with served() as environment:
        yield environment


@pytest.fixture
def environment(server, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(params=["disk", "s3", "gs"])
def place(request, tmp_path, environment):
    """An empty storage that is being written."""
    storage = storage_at(tmp_path / "s" if request.param == "disk" else f"{request.param}://bucket/{tmp_path.name}/s/")
    assert not storage.occupied()
    with storage.writing():
        yield storage


def raw(n, start=0):
    return (np.arange(start, start + n) % 251).astype(np.uint8)


def test_files(place):
    assert place.size("store.json") is None
    assert place.names("commits") == []
    place.put("store.json", b"one")
    place.put("store.json", b"three")
    assert (place.read("store.json"), place.size("store.json")) == (b"three", 5)
    assert place.occupied()
    with pytest.raises(FileNotFoundError):
        place.read("nothing")
    place.create("commits/1.json", b"first")
    place.create("commits/0.json", b"")
    with pytest.raises(StoreError, match=r"commits/1\.json is already there: another process"):
        place.create("commits/1.json", b"second")
    assert place.read("commits/1.json") == b"first"
    assert list(place.sizes("commits").items()) == [("0.json", 0), ("1.json", 5)]
    place.delete("commits/0.json")
    place.delete("commits/0.json")
    assert place.names("commits") == ["1.json"]
    assert place.at("a/b") == f"{place}/a/b"
    with storage_at(str(place)).results() as folder:
        (folder / "figures").mkdir()
        (folder / "figures/a.png").write_bytes(b"png")
    assert place.read("figures/a.png") == b"png"
    assert place.rate() > 0
    assert (place.free() is None) == ("://" in str(place))


def test_the_rate_is_tried_on_no_more_than_half_of_what_is_free(tmp_path, monkeypatch):
    sizes, append = [], direct.NewFile.append

    def seen(self, block):
        sizes.append(len(block))
        append(self, block)

    monkeypatch.setattr(direct.NewFile, "append", seen)
    clock = SimpleNamespace(perf_counter=iter(range(6)).__next__)  # every try takes a second
    monkeypatch.setattr("normgeo.store.storage.time", clock)
    for free, most in ((10_000, 4096), (20 << 20, 10 << 20), (1 << 40, 64 << 20)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert (Disk(tmp_path / "s").rate(), sum(sizes)) == (most, most)
        sizes.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def refused(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(direct.NewFile, "__init__", refused)
    with pytest.raises(StoreError, match=r"s cannot be written: Read-only file system; give another place"):
        Disk(tmp_path / "s").rate()


def test_a_link_to_nothing_is_something(tmp_path):
    (tmp_path / "s").symlink_to(tmp_path / "gone/s")
    assert Disk(tmp_path / "s").occupied()


def test_a_file_that_a_writer_removes_while_a_reader_looks_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "b").write_text("xyz")
    (gone := tmp_path / "a.partial").touch()
    disk, files, looked, stat = Disk(tmp_path), Disk._files, list[Path](), Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: looked.append(path) or stat(path, **how))
    monkeypatch.setattr(disk, "_files", lambda folder: (files(disk, folder), gone.unlink())[0])
    assert (disk.sizes("."), looked) == ({"b": 3}, [tmp_path])  # of many files none is looked at twice


def test_chunks_and_ranges(place):
    place.publish("hidden.zarr", {"zarr.json": b"{}", "a/zarr.json": b"{}"})
    chunk = place.chunk("hidden.zarr/a/c.0")
    for start in range(0, 1000, 100):
        chunk.append(raw(100, start))
    assert place.size("hidden.zarr/a/c.0") is None
    chunk.finish()
    place.sync(["hidden.zarr/a/c.0"])
    assert place.size("hidden.zarr/a/c.0") == 1000
    for start, n in ((0, 1000), (10, 5), (10, 25), (990, 25), (1000, 5), (2000, 5), (0, 5000)):
        found = place.read_range("hidden.zarr/a/c.0", start, n)
        np.testing.assert_array_equal(found, raw(1000)[start : start + n])
        found[:] = 0  # it is the reader's own
    with pytest.raises(FileNotFoundError):
        place.read_range("hidden.zarr/a/c.1", 0, 3)
    left = place.chunk("hidden.zarr/a/c.1")
    left.append(raw(10))
    left.abandon()
    assert place.names("hidden.zarr/a") == ["c.0", "zarr.json"]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="all files go through memory")
@pytest.mark.parametrize("refuses", ["open", "preadv", "write", None])
@pytest.mark.parametrize("sizes", [(0,), (1, 4095, 4096), (4096, 8192, 3), (5000, 7, 20_000)])
def test_files_are_what_was_appended_whatever_the_file_system_can(refuses, sizes, tmp_path, monkeypatch):
    refused, real = [], getattr(os, refuses or "open")

    def called(*args):
        flags = args[1] if refuses == "open" else fcntl.fcntl(args[0], fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(args)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*args)

    if refuses:
        monkeypatch.setattr(os, refuses, called)
    new, pieces = direct.NewFile(tmp_path / "c.0"), [raw(n, 7 * n) for n in sizes]
    for piece in pieces:
        new.append(piece)
    new.finish()
    new.close()  # again
    whole = np.concatenate(pieces)
    assert (tmp_path / "c.0").read_bytes() == whole.tobytes()
    for start, n in ((0, len(whole)), (5000, 6000), (4096, 4096), (len(whole), 1)):
        np.testing.assert_array_equal(direct.read_range(tmp_path / "c.0", start, n), whole[start : start + n])
    assert bool(refused) == bool(refuses and (len(whole) or refuses != "write"))


def test_what_zarr_reads_and_what_is_discarded(place):
    made = {}
    zarr.create_group(zarr.storage.MemoryStore(made)).create_array("x", data=np.arange(6))
    place.publish("hidden.zarr", {name: content.to_bytes() for name, content in made.items()})
    root = zarr.open_group(place.zarr("hidden.zarr"), mode="r")
    np.testing.assert_array_equal(root["x"][:], np.arange(6))
    if "://" in str(place):
        place.discard()
        assert not place.occupied()


@pytest.mark.parametrize("place", ["disk", "s3"], indirect=True)
def test_a_kill_while_the_speed_is_tried_leaves_a_free_place(place, monkeypatch):
    def killed(*args):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(direct.NewFile, "append", killed)
        patch.setattr(type(place), "delete", killed)  # what is to be removed is not
        with pytest.raises(SystemExit):
            place.rate()
    assert not place.occupied()
    if "://" not in str(place):
        assert not list(place.path.glob(".rate*"))


# --- who writes -------------------------------------------------------------------------------------------------------


def test_one_run_writes_and_its_processes_join_it(tmp_path, environment):
    for address in (str(tmp_path / "s"), "s3://bucket/lock"):
        with storage_at(address).writing() as run:
            with pytest.raises(StoreError, match="another process writes"), storage_at(address).writing():
                pass
            with storage_at(address).writing(run) as joined:
                assert joined == run
            with pytest.raises(StoreError, match="is not the store that"), storage_at(address).writing("another"):
                pass
        with storage_at(address).writing() as later:
            assert later != run


def put_lock(**changes):
    storage = storage_at("s3://bucket/lease")
    storage.put("lock", json.dumps(json.loads(holder("run")) | changes).encode())
    return storage


def test_a_dead_writer_is_known_on_its_machine_only(environment):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with put_lock(pid=process.pid).writing():
        pass
    storage = put_lock(pid=process.pid, machine="another", host="elsewhere")
    with pytest.raises(StoreError, match=r"process \d+ of elsewhere, last heard of \d+ s ago.*takes over 60 s after"):
        storage.writing().__enter__()
    storage.delete("lock")


def test_a_silent_writer_loses_the_lock_and_writes_no_more(environment, monkeypatch):
    monkeypatch.setattr(objects, "LEASE_SECONDS", 0.4)
    first, other = storage_at("s3://bucket/silent"), storage_at("s3://bucket/silent")
    now, later = other._now, datetime.timedelta(hours=1)
    with first.writing():
        until = time.monotonic() + 30
        while json.loads(first.read("lock"))["renewed"] < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        first.put("a", b"")
        monkeypatch.setattr(other, "_now", lambda: now() - later)
        with pytest.raises(StoreError, match="another process writes"):
            other.writing().__enter__()
        monkeypatch.setattr(other, "_now", lambda: now() + later)  # to the other, it is long silent
        with contextlib.ExitStack() as stack:
            while True:  # when the first renews in between, one has to try again
                assert time.monotonic() < until
                with contextlib.suppress(StoreError):
                    stack.enter_context(other.writing())
                    break
            assert first._lost.wait(60)
            for write in (first.put, first.create):
                with pytest.raises(StoreError, match="another process has taken over"):
                    write("b", b"")
        assert first.size("b") is None


def test_a_runs_other_processes_end_before_its_lock_is_taken_over(environment, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    storage = put_lock(pid=process.pid, shared=True)
    with pytest.raises(StoreError, match=r"last heard of .*takes over 60 s after"):
        storage.writing().__enter__()  # the others may be alive
    storage.delete("lock")
    monkeypatch.setattr(objects, "LEASE_SECONDS", 4.0)
    for ends in (lambda first: first.delete("lock"), lambda first: first._lost.set()):
        first, other = storage_at("s3://bucket/joined"), storage_at("s3://bucket/joined")
        with first.writing(shared=True) as run, other.writing(run):
            other.put("a", b"")
            ends(first)
            assert other._lost.wait(30)
            with pytest.raises(StoreError, match=r"has taken over .* or will"):
                other.create("b", b"")
            first._lost.set()
        first.delete("lock")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_lock_that_cannot_be_read_is_waited_for(environment, monkeypatch, content):
    storage = storage_at("s3://bucket/strange")
    storage.put("lock", content)
    with pytest.raises(StoreError, match=r"process unknown of an unknown host, last heard of .*takes over 60 s after"):
        storage.writing().__enter__()
    with pytest.raises(StoreError, match="is not the store that"):
        storage.writing("run").__enter__()
    monkeypatch.setattr(objects, "LEASE_SECONDS", -1.0)
    with storage.writing():
        pass


def test_an_endpoint_without_a_scheme_is_one_line(environment, monkeypatch):
    for value in ("localhost:9000", "nonsense", "http://"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", value)
        with pytest.raises(StoreError, match=r"AWS_ENDPOINT_URL must begin with http:// or https://"):
            storage_at("s3://bucket/x")


def test_objects_go_to_other_processes_but_not_by_fork(environment, monkeypatch):
    storage = storage_at("s3://bucket/sent")
    storage.put("a", b"1")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"1"
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StoreError, match=r"before this process was forked.*spawn"):
        storage.read("a")


def test_what_a_writer_is_told_when_nobody_answers_for_minutes(environment, monkeypatch):
    storage = storage_at("s3://bucket/back")
    with storage.writing():
        with monkeypatch.context() as patch:
            patch.setattr(storage._ob, "put", unreachable)
            with pytest.raises(StoreError, match=r"cannot be reached.*what is committed is safe, and --resume s3://"):
                storage.put("a", b"1")
        storage.put("a", b"1")
    assert objects.PATIENT["retry_timeout"].total_seconds() == 180
    assert sum(min(15, 0.1 * 2**n) for n in range(20)) > 180  # what as many tries take at least


def unreachable(*_, **__):
    from obstore.exceptions import GenericError

    raise GenericError("error sending request")


def test_two_that_take_over_at_once(environment, monkeypatch):
    """The lock is replaced only as it was seen."""
    storage = put_lock(machine="another")

    def dead(holder):
        storage_at("s3://bucket/lease").put("lock", b"{}")
        return True

    monkeypatch.setattr(objects, "is_dead", dead)
    with pytest.raises(StoreError, match="has just begun or ended"):
        storage.writing().__enter__()
    storage.delete("lock")


# --- what cannot be used ----------------------------------------------------------------------------------------------


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [Path(name).mkdir() for name in ("ab:", "s3:")]  # the second as a tool leaves it that takes URLs for paths
    assert all(storage_at(here).absolute == str(Path(here).absolute()) for here in (tmp_path, "here", "ab:/here"))
    for address, message in (
        ("az://container/x", "s3://bucket/prefix or at gs://bucket/prefix"),
        *((f"s3://bucket{end}", "no place inside a bucket") for end in ("", "/")),
        *((lost, "give it as a string") for lost in (Path("s3://bucket/x"), "s3:/bucket/x")),
        *((f"s3://bucket/{path}", "another place") for path in ("a?1", "a#1", "a%20b", "a b", "x/../y", "x//y")),
    ):
        with pytest.raises(StoreError, match=message):
            storage_at(address)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"pip install 'normgeo\[objects\]'"):
        storage_at("s3://bucket/x")


def refused(address="s3://bucket/x"):
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        storage_at(address)
    assert time.monotonic() - began < 15
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_buckets_that_cannot_be_used(environment, monkeypatch):
    assert "there is no bucket missing; create it" in refused("s3://missing/x")
    assert "there is no bucket missing; create it" in refused("gs://missing/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "s3://bucket/x cannot be reached" in refused()
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    assert "AWS_ALLOW_HTTP=true" in refused()


def checked_credentials(url, after):
    """Let moto check credentials after so many more requests."""
    request = urllib.request.Request(f"{url}/moto-api/reset-auth", str(after).encode(), {"Content-Type": "text/plain"})
    urllib.request.urlopen(request).close()


def test_wrong_credentials(environment):
    storage = storage_at("s3://bucket/x")
    checked_credentials(environment["AWS_ENDPOINT_URL"], 0)
    try:
        assert "the credentials are refused (InvalidAccessKeyId" in refused()
        with pytest.raises(StoreError, match="credentials are refused"):  # that expire while it runs
            storage.put("a", b"")
    finally:
        checked_credentials(environment["AWS_ENDPOINT_URL"], "inf")


def test_a_disk_leaves_what_was_there_when_it_fails(tmp_path, full_disk):
    disk = Disk(tmp_path / "s")
    with disk.writing():
        disk.put("a", b"old")
        with full_disk(1), pytest.raises(OSError, match="No space"):
            disk.put("a", b"new")
        assert disk.read("a") == b"old"
        assert os.listdir(tmp_path / "s/scratch") == []
