"""Who holds the lock of a store: of an object store over networks that fail for a while."""

import datetime
import fcntl
from types import SimpleNamespace

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from normgeo.errors import RunError, StoreError
from normgeo.store import objects
from normgeo.store.holder import holder
from normgeo.store.objects import LEASE_SECONDS, Objects
from normgeo.store.storage import Disk
from normgeo.system.files import write_whole


@pytest.fixture
def storage(monkeypatch):
    """Objects in this process's memory."""
    kept = MemoryStore()
    monkeypatch.setattr(Objects, "_open", lambda self, *_, **__: kept)
    return Objects("s3://bucket/x")


def unreachable(*_, **__):
    raise GenericError("error sending request")


def removed():
    raise FileNotFoundError


def test_who_has_lost_the_lock_leaves_it_to_another(storage):
    with storage.writing():
        storage._ob.put(storage._objects, "lock", holder("another"))
        assert not storage._renewed()
    assert b"another" in storage.read("lock")


def test_a_network_that_fails_for_a_while_is_no_loss_of_the_lock(storage, monkeypatch):
    with storage.writing():
        with monkeypatch.context() as patch:
            patch.setattr(storage._ob, "put", unreachable)
            assert not storage._renewed()
        storage.put("a", b"1")
        assert storage._renewed()


@pytest.mark.parametrize(("fails", "there"), [("put", False), ("head", True)])
def test_a_service_that_fails_while_the_lock_is_taken_is_one_line(storage, monkeypatch, fails, there):
    """As it does where credentials may list and read, and not write."""
    if there:
        storage.put("lock", holder("another"))
    monkeypatch.setattr(storage._ob, fails, unreachable)
    with pytest.raises(StoreError, match=r"^s3://bucket/x/lock cannot be reached"), storage.writing():
        pass


def test_a_lock_is_renewed_before_the_runs_other_processes_miss_it(storage):
    waited = []
    with storage.writing():
        before = storage._held.times
        storage._renew(SimpleNamespace(wait=lambda seconds: waited.append(seconds) or len(waited) > 3))
        assert storage._held.times == before + 3
    assert max(waited) + LEASE_SECONDS / 8 < LEASE_SECONDS / 2  # when they look, and when they give up


@pytest.mark.parametrize("ahead", [-1000, 1000])
def test_the_time_is_that_of_the_service_whatever_the_clock_here(storage, monkeypatch, ahead):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds=ahead)

    monkeypatch.setattr(datetime, "datetime", Clock)
    storage.put("lock", holder("another", shared=True))
    with pytest.raises(StoreError, match=r"last heard of \d s ago"), storage.writing():
        pass
    assert [found["path"] for page in storage._ob.list(storage._objects) for found in page] == ["lock"]


def test_what_is_discarded_is_all_but_the_lock(storage):
    with storage.writing():
        storage.put("a", b"1")
        storage.discard()
        assert (storage.size("a"), storage.names("")) == (None, ["lock"])


def test_where_results_wait_until_they_are_put_may_be_full(storage, full_disk):
    """Which says nothing of the bucket."""
    full = pytest.raises(RunError, match=r"files wait until they are put, is full: .* TMPDIR, and resume")
    with full_disk(1), full, storage.results() as folder:
        write_whole(folder / "verdict.md", b"one")
    assert storage.names("") == []


FOUND = {  # what is in the lock after so many seconds, and when it is lost: others take it over after `LEASE_SECONDS`
    "renewed": (lambda seconds: ("mine", seconds // 15), None),
    "silent": (lambda seconds: ("mine", min(seconds, 100) // 15), (90, 90 + LEASE_SECONDS)),
    "gone for a while": (lambda seconds: unreachable() if 100 < seconds < 120 else ("mine", seconds // 15), None),
    "gone": (lambda seconds: unreachable() if seconds > 100 else ("mine", seconds // 15), (90, 90 + LEASE_SECONDS)),
    "removed": (lambda seconds: removed() if seconds > 100 else ("mine", seconds // 15), (100, 115)),
    "another's": (lambda seconds: ("mine" if seconds < 100 else "another", seconds), (100, 115)),
}


@pytest.mark.parametrize(("found", "lost"), FOUND.values(), ids=FOUND)
def test_a_runs_other_processes_miss_its_lock_before_others_may_take_it_over(storage, monkeypatch, found, lost):
    clock = [0.0]

    def wait(seconds):
        clock[0] += seconds
        return clock[0] > 300

    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(storage, "_lock", lambda: ({}, dict(zip(("run", "renewed"), found(clock[0]), strict=True))))
    storage._follow("mine", SimpleNamespace(wait=wait))
    assert storage._lost.is_set() == (lost is not None)
    if lost is not None:
        assert lost[0] < clock[0] < lost[1]


def test_a_lock_that_its_holder_has_just_removed_is_none(tmp_path, monkeypatch):
    place, lock = Disk(tmp_path / "s"), fcntl.flock

    def late(file, how):
        (tmp_path / "s/lock").unlink(missing_ok=True)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(StoreError, match="another process writes"), place.writing():
        pass
