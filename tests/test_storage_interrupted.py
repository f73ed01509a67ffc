"""What a power cut or a kill may leave of a storage, and which writers are dead."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from forked import Forked

from normgeo.errors import StoreError
from normgeo.store.holder import holder, is_dead, read_holder
from normgeo.store.layout import committed_rows
from normgeo.store.storage import Disk


@pytest.fixture
def disk(tmp_path):
    """A disk that is being written."""
    disk = Disk(tmp_path / "s")
    with disk.writing():
        yield disk


@pytest.mark.parametrize(("way", "name"), [("put", "store.json"), ("create", "commits/00000000.json")])
def test_a_file_is_synced_before_it_has_its_name_and_the_name_after(disk, journal, way, name):
    getattr(disk, way)(name, b"content")
    file = disk.path / name
    assert journal == [file.stat().st_ino, file, file.parent.stat().st_ino]


def test_all_in_a_folder_is_synced_before_it_has_its_name_and_the_name_after(disk, journal):
    disk.publish("hidden.zarr", dict.fromkeys(("zarr.json", "a/zarr.json", "a/b/zarr.json"), b"{}"))
    folder = disk.path / "hidden.zarr"
    inside, renamed = [folder, *folder.rglob("*")], journal.index(folder)
    assert len(inside) == 6
    assert {path.stat().st_ino for path in inside} <= set(journal[:renamed])
    assert journal[renamed + 1 :] == [disk.path.stat().st_ino]


def test_chunks_are_synced_and_then_the_folders_of_their_names(disk, journal):
    (disk.path / "a").mkdir()
    for name in ("a/0", "a/1"):
        chunk = disk.chunk(name)
        chunk.append(np.zeros(3, np.uint8))
        chunk.finish()
    journal.clear()
    disk.sync(["a/0", "a/1"])
    assert journal == [(disk.path / name).stat().st_ino for name in ("a/0", "a/1", "a")]


def test_the_name_of_a_run_is_synced(tmp_path, journal):
    with Disk(tmp_path / "s").writing():
        assert (tmp_path / "s/lock").stat().st_ino in journal


KILLED = """
import os, signal, sys
from pathlib import Path
from normgeo.store.storage import Disk
from normgeo.system.files import check_folder
sys.addaudithook(lambda event, _: event == "os.remove" and os.kill(os.getpid(), signal.SIGKILL))
exec(sys.argv[1], {"place": Path(sys.argv[2]), "check_folder": check_folder, "Disk": Disk})
"""


@pytest.mark.parametrize("trying", ["check_folder(place)", "Disk(place).rate(4096)"])
def test_a_kill_while_it_is_tried_whether_a_place_can_be_written_leaves_it_empty(trying, tmp_path):
    """For what is not empty is refused when the same command is given again."""
    assert Forked(KILLED, trying, tmp_path).ended().returncode in (0, -signal.SIGKILL)
    assert not Disk(tmp_path).occupied()


def test_what_only_begins_as_a_record_is_none(disk):
    disk.put("commits/00000001.json~", b"")
    assert committed_rows(disk) == []


def test_a_chunk_whose_file_is_gone_is_abandoned_all_the_same(disk):
    chunk = disk.chunk("a")
    chunk.append(np.zeros(3, np.uint8))
    for part in (disk.path / "scratch").iterdir():
        part.unlink()
    chunk.abandon()


def test_a_link_is_discarded_and_not_what_it_leads_to(disk, tmp_path):
    (tmp_path / "other").mkdir()
    (disk.path / "link").symlink_to(tmp_path / "other")
    disk.discard()
    assert (tmp_path / "other").is_dir()
    assert not disk.path.exists()


def test_what_a_killed_writer_had_begun_is_discarded_and_what_else_there_was_is_not(tmp_path):
    disk = Disk(tmp_path)
    for name in ("commits", "state", "scratch", "mine"):
        (tmp_path / name).mkdir()
    with disk.writing():
        disk.discard()
    assert os.listdir(tmp_path) == ["mine"]


def test_what_a_killed_writer_left_unfinished_is_in_nothing(tmp_path):
    left, disk = tmp_path / "s/scratch/hidden.zarr.part/sites/another", Disk(tmp_path / "s")
    left.mkdir(parents=True)
    (left / "zarr.json").write_text("{}")
    assert not disk.occupied()
    with disk.writing():
        assert os.listdir(tmp_path / "s/scratch") == []
        for content in (b"{}", b"[]"):
            disk.publish("hidden.zarr", {"zarr.json": content})
            assert disk.read("hidden.zarr/zarr.json") == content
    assert os.listdir(tmp_path / "s/hidden.zarr") == ["zarr.json"]


def test_who_joins_a_run_sweeps_nothing_of_it(disk):
    chunk = disk.chunk("a")
    chunk.append(np.zeros(3, np.uint8))
    with Disk(disk.path).writing(disk.read("lock").decode()):
        pass
    chunk.finish()
    assert disk.size("a") == 3


@pytest.mark.parametrize("anew", [True, False])
def test_a_lock_that_its_holder_has_just_removed_is_none(tmp_path, monkeypatch, anew):
    """It discards all that it wrote, and another run may have begun by then."""

    def remove(*_):
        (tmp_path / "lock").unlink()
        if anew:
            (tmp_path / "lock").touch()

    monkeypatch.setattr("normgeo.store.storage.fcntl.flock", remove)
    with pytest.raises(StoreError, match="another process writes"):
        Disk(tmp_path).writing().__enter__()


@pytest.mark.parametrize(
    ("error", "changes", "dead"),
    [
        (None, {}, False),
        (ProcessLookupError, {}, True),
        (PermissionError, {}, False),  # of another user
        (ProcessLookupError, {"machine": "of another container or boot, on a host of this name"}, False),
    ],
)
def test_only_a_writer_that_would_be_seen_here_is_dead(monkeypatch, error, changes, dead):
    def kill(pid, signal):
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    assert is_dead(read_holder(holder("run")) | changes) is dead


@pytest.mark.parametrize("told", ["boot_id", "pid"])
def test_process_numbers_are_those_of_a_boot_and_a_container(monkeypatch, tmp_path, told):
    lock = read_holder(holder("run"))
    (ended := subprocess.Popen("true")).wait()
    lock["pid"] = ended.pid
    assert is_dead(lock)
    (tmp_path / told).touch()
    monkeypatch.setattr(
        "normgeo.system.processes.Path", lambda path: tmp_path / told if path.endswith(told) else Path(path)
    )
    assert not is_dead(lock)


def test_a_process_that_proc_does_not_show_lives(monkeypatch, tmp_path):
    """What is mounted there may be of other numbers, or hide the processes of other users."""
    lock = read_holder(holder("run")) | {"pid": os.getppid()}
    with monkeypatch.context() as patch:
        patch.setattr("psutil.pid_exists", lambda pid: False)
        assert not is_dead(lock)
    (tmp_path / "self").symlink_to("1")
    shown = {"/proc/self": tmp_path / "self"}
    monkeypatch.setattr("normgeo.system.processes.Path", lambda path: shown.get(path, Path(path)))
    monkeypatch.setattr("psutil.Process.status", lambda process: "zombie")
    assert not is_dead(lock)
