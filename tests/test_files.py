"""What cannot be written is found out before anything is measured for it; what is written is there whole."""

import errno
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from analyses import __main__ as analyses
from analyses import efficiency
from normgeo.bench import inference as inference_bench
from normgeo.bench import norms as norm_bench
from normgeo.bench import store as store_bench
from normgeo.bench import stream as bench
from normgeo.bench import training as training_bench
from normgeo.errors import RunError
from normgeo.system import folders
from normgeo.system.files import (
    check_file,
    check_folder,
    disk_explained,
    is_full,
    write_table,
    write_whole,
)
from normgeo.system.folders import LOCK, _held, alone, claimed, whole_directory

FRAME = pd.DataFrame({"a": [1, 2]})
BENCHMARKS = {
    ("stream",): (bench, "bench_stream"),
    ("store",): (store_bench, "bench_store"),
    ("train",): (training_bench, "bench_training"),
    ("norms",): (norm_bench, "bench_norms"),
    ("inference", "embedded-rmsnorm"): (inference_bench, "bench_inference"),
}


@pytest.fixture
def places(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    return tmp_path


WRONG = [
    ("folder", "is no file; give the name of one"),
    ("missing/raw.parquet", "there is no directory .*missing to write raw.parquet in; make it first"),
    ("file/raw.parquet", "there is no directory .*file to write"),
    ("n" * 250, "File name too long; give another --out"),
    ("raw.csv", "tables are written as .parquet, not .csv; give --out .*raw.parquet$"),
    ("/proc/raw.parquet", "cannot write /proc/raw.parquet: .*; give another --out"),
]


@pytest.mark.parametrize(("out", "message"), WRONG)
def test_a_file_that_cannot_be_written_is_refused(places, out, message):
    if out.startswith("/proc") and not os.path.isdir("/proc"):
        pytest.skip("needs a directory in which nobody can write")
    with pytest.raises(RunError, match=message):
        check_file(places / out)


def test_looking_leaves_nothing_behind_and_changes_nothing(places):
    check_file(None)
    for out in ("new.parquet", "file", "n" * 247):
        check_file(places / out)
        write_whole(places / out, (places / "file").read_bytes())  # what is found writable is
        assert (places / out).read_text() == "kept"
    check_folder(places / "not" / "yet")
    assert {path.name for path in places.iterdir()} == {"folder", "file", "new.parquet", "n" * 247}


@pytest.mark.parametrize("words", BENCHMARKS, ids=lambda words: words[0])
def test_every_benchmark_refuses_it_before_it_measures(words, normgeo, monkeypatch, tmp_path):
    module, name = BENCHMARKS[words]
    monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("measured"))
    status, out, err = normgeo("bench", *words, "--out", tmp_path)
    assert (status, out) == (1, "")
    assert err == f"error: cannot write a table to {tmp_path}, which is no file; give the name of one as --out"


def test_a_table_is_printed_even_where_it_cannot_be_written_any_more(normgeo, monkeypatch, tmp_path):
    """The directory was there when the measurement began."""

    def gone(path, _):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr("normgeo.system.files.write_whole", gone)
    monkeypatch.setattr("torch.compile", lambda module, **_: module)
    status, out, err = normgeo(
        "bench", "norms", "--shapes", "1x2x16", "--dtype", "float32", "--rounds", 3, "--seconds", 0, "--out", "raw"
    )
    assert status == 1
    assert "1x2x16, float32; rounds: 3" in out
    assert err == "error: cannot write raw: No such file or directory; give another --out"


def test_a_full_disk_leaves_the_table_that_was_there(tmp_path, full_disk):
    out = tmp_path / "raw.parquet"
    write_table(FRAME, out)
    with full_disk(1), pytest.raises(RunError, match="No space left on device; give another --out"):
        write_table(FRAME * 2, out)
    pd.testing.assert_frame_equal(pd.read_parquet(out), FRAME)
    assert list(tmp_path.iterdir()) == [out]


def test_the_file_behind_a_link_is_written(tmp_path):
    link, file = tmp_path / "raw.parquet", tmp_path / "elsewhere" / "kept.parquet"
    file.parent.mkdir()
    link.symlink_to(file)
    for frame in (FRAME, FRAME * 2):  # one that is not there yet, and one that is
        write_table(frame, link)
        pd.testing.assert_frame_equal(pd.read_parquet(file), frame)
    assert link.is_symlink()


# --- analyses ---------------------------------------------------------------------------------------------------------


def analyse(monkeypatch, capsys, out):
    monkeypatch.setattr(sys, "argv", ["analyses", "efficiency", "--out", str(out)])
    status = analyses.main()
    return status, *capsys.readouterr()


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_analysis_refuses_a_directory_that_is_a_file_before_it_computes(places, out, monkeypatch, capsys):
    monkeypatch.setattr(efficiency, "compute", lambda run=None: pytest.fail("computed"))
    status, printed, err = analyse(monkeypatch, capsys, places / out)
    assert (status, printed) == (1, "")
    assert err == f"error: cannot write to {places / out}: {places / 'file'} is no directory; give another --out\n"


@pytest.mark.parametrize("part", ["plot", "markdown"])
def test_an_analysis_writes_all_its_files_or_none(part, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    status, *_ = analyse(monkeypatch, capsys, out)
    assert status == 0
    suffixes = (".md", ".parquet", ".png", ".svg")
    assert sorted(path.name for path in out.iterdir()) == [f"efficiency{suffix}" for suffix in suffixes]
    for path in out.iterdir():
        path.write_text("the last one's")

    def full(frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(efficiency, part, full)
    status, printed, err = analyse(monkeypatch, capsys, out)
    assert status == 1
    assert err == f"error: cannot write {out / 'efficiency'}.*: No space left on device; give another --out\n"
    assert "rows;" not in printed
    assert "vit-small" in printed  # what was computed is told all the same
    assert {path.read_text() for path in out.iterdir()} == {"the last one's"}
    assert len(list(out.iterdir())) == len(suffixes)


def test_new_directories_are_no_other_processes_and_go_where_they_stay_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claimed(None, "m") as first, claimed(None, "m") as second, claimed(Path("mine"), "m") as asked:
        assert first.parent == Path("runs")
        assert re.fullmatch(r"m-\d{4}-\d\d-\d\d", first.name)
        assert (second, asked) == (first.with_name(f"{first.name}-2"), Path("mine"))
        (second / "table").write_text("kept")
    assert list(Path("runs").iterdir()) == [second]
    with claimed(None, "m") as again:
        assert again == first
    (second / "table").unlink()
    second.rmdir()
    Path("runs").rmdir()
    with pytest.raises(KeyError), claimed(None, "m"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    Path("runs").write_text("kept")
    with pytest.raises(RunError, match=r"cannot write to runs: runs is no directory; give another --out"):
        claimed(None, "m").__enter__()


def test_where_another_process_removes_its_empty_directory_a_new_one_is_made_all_the_same(tmp_path, monkeypatch):
    def removed(stem):
        stem.parent.rmdir()
        yield stem

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "numbered", removed)
    with claimed(None, "m") as new:
        assert new.is_dir()


def test_one_process_writes_a_directory_until_it_ends(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from normgeo.system.folders import alone; "
        "guard = alone(Path('run')); guard.__enter__(); print('in', flush=True); sys.stdin.read(1); os._exit(9)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    assert other.stdout.readline() == b"in\n"
    with pytest.raises(RunError, match=r"another process writes .*run; wait for it to end, or stop it first"):
        alone(tmp_path / "run").__enter__()
    other.communicate(b"x")
    with alone(tmp_path / "run"):  # what it left is nobody's
        (tmp_path / "run/table").write_text("kept")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["table"]
    with alone(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_lock_that_its_holder_has_just_removed_holds_nothing(tmp_path):
    lock = tmp_path / LOCK
    with lock.open("a") as mine:
        assert _held(mine.fileno(), lock)
        lock.unlink()
        assert not _held(mine.fileno(), lock)
        with lock.open("a") as another:
            assert _held(another.fileno(), lock)
            assert not _held(mine.fileno(), lock)


@pytest.mark.parametrize("below", ["", "new/run"])
def test_a_link_to_nothing_is_refused_before_the_work(tmp_path, below):
    (tmp_path / "out").symlink_to("elsewhere")
    with pytest.raises(RunError, match=r"(it|/out) is a link to elsewhere, and nothing is there; make that first"):
        check_folder(tmp_path / "out" / below)
    (tmp_path / "elsewhere").mkdir()
    check_folder(tmp_path / "out" / below)


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
    """Two that write to one place: the second finds the first's."""

    def write():
        with whole_directory(tmp_path / "out") as scratch:
            (scratch / "mine").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()

    with pytest.raises(RunError, match="nothing was left behind"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_what_is_to_be_replaced_stays_until_all_is_written(tmp_path):
    def write(fails):
        with whole_directory(tmp_path / "out", replace=True) as scratch:
            (scratch / "new").write_text("new")
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(RunError, match="what was there before is intact"):
        write(True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]
    write(False)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_what_a_umask_withholds_is_not_given_away(tmp_path):
    before = os.umask(0o077)
    try:
        with whole_directory(tmp_path / "out") as scratch:
            (scratch / "file").touch()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "out", tmp_path / "out/file")] == [0o700, 0o600]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    def write():
        with whole_directory(tmp_path / "out"):
            (tmp_path / "missing").read_bytes()

    with pytest.raises(RunError, match="missing'; nothing was left behind"):
        write()


def test_what_a_killed_process_left_is_no_obstacle(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").touch()
    with whole_directory(tmp_path / "out") as scratch:
        (scratch / "table").write_text("whole")
    assert (tmp_path / "out/table").read_text() == "whole"


WRITES = """
import sys, time
from contextlib import suppress
from pathlib import Path
from normgeo.system.folders import whole_directory
with whole_directory(Path(sys.argv[1])) as scratch:
    (scratch / "half").write_text("half")
    print(scratch, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("there", [True, False])
def test_what_a_killed_process_had_written_is_removed_by_the_next_and_what_a_living_one_writes_is_not(tmp_path, there):
    out = tmp_path / "o*t"
    if there:
        out.mkdir()
    with subprocess.Popen([sys.executable, "-c", WRITES, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        scratch = Path(process.stdout.readline().strip())
        with suppress(RunError), whole_directory(out, keep=False):
            pass
        assert (scratch / "half").exists()
        process.kill()
    with whole_directory(out) as mine:
        (mine / "table").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["o*t", "table"]


def test_what_was_made_on_the_way_is_removed_where_nothing_came_of_it(tmp_path):
    with whole_directory(tmp_path / "a/b/c", keep=False) as scratch:
        (scratch / "file").write_text("a trial")
    with pytest.raises(KeyError), whole_directory(tmp_path / "a/b/c"):
        raise KeyError
    with alone(tmp_path / "d/e"):
        pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyError), whole_directory(tmp_path / "a/b/c"):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


@pytest.mark.parametrize("there", [True, False])
def test_files_are_synced_before_they_are_in_a_directory_and_the_one_that_makes_it_load_is_last(
    tmp_path, journal, there
):
    """A power cut, or a kill between two files, leaves nothing that loads and is not whole."""
    out, names = tmp_path / "out", {"config.json", "model.safetensors", "tokenizer.json"}
    if there:
        out.mkdir()
    with whole_directory(out) as scratch:
        for name in names:
            (scratch / name).write_text("{}")
    named = [step for step in journal if isinstance(step, Path)]
    assert {(out / name).stat().st_ino for name in names} <= set(journal[: journal.index(named[0])])
    assert set(named) == ({out / name for name in names} if there else {out})
    assert named[-1] == (out / "config.json" if there else out)


def test_a_full_disk_is_known_behind_what_a_library_raises(tmp_path):
    def write():
        with whole_directory(tmp_path / "out"):
            try:
                raise OSError(errno.ENOSPC, "full")
            except OSError as error:
                raise ValueError("could not write a chunk") from error

    with pytest.raises(RunError, match=r"cannot write .*: the disk is full"):
        write()
    assert not is_full(ValueError("could not write a chunk"))


@pytest.mark.parametrize("where", [None, "runs/a", "runs/a/state/b", "runs"])
def test_what_refuses_a_directory_or_what_is_in_it_or_around_it_is_said_of_it(tmp_path, where):
    path = where and str(tmp_path / where)
    with pytest.raises(RunError, match="a cannot be written: Permission denied"), disk_explained(tmp_path / "runs/a"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


@pytest.mark.parametrize("name", ["angles.parquet", "figures"])
def test_what_is_in_the_way_is_named(tmp_path, name):
    there = tmp_path / name
    there.mkdir() if name != "figures" else there.write_text("")
    with pytest.raises(RunError, match=f"{there} is in the way .*; move it and give"), disk_explained(tmp_path):
        write_whole(there, b"") if name != "figures" else there.mkdir(exist_ok=True)


@pytest.mark.parametrize("out", ["{}/runs/a", "a"])
@pytest.mark.parametrize("where", ["model", "runs/another/ids.npy"])
def test_what_is_refused_elsewhere_is_not_said_of_a_directory(tmp_path, out, where):
    with pytest.raises(PermissionError, match=where), disk_explained(Path(out.format(tmp_path))):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / where))


@pytest.mark.parametrize("out", ["s3://bucket/x", "{}/out"])
def test_what_is_not_there_elsewhere_is_not_said_of_a_directory(tmp_path, out):
    with pytest.raises(FileNotFoundError, match="passing"), disk_explained(out.format(tmp_path)):
        (tmp_path / "passing/file").touch()


def test_a_directory_that_is_removed_meanwhile_is_said_to_be_gone(tmp_path):
    with pytest.raises(RunError, match="out is gone: it was removed"), disk_explained(tmp_path / "out"):
        (tmp_path / "out/table").touch()
