"""The scan of a store: on threads, on a cluster, in the memory of a few rows, and always the same numbers."""

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from stores import CONTEXT, a_chunk, captured, config, content, local_cluster, unfinished

from normgeo import AngleTable, HiddenStateStore, measure_angles
from normgeo.angles.statistics import BINS, AngleStatistics
from normgeo.errors import DataError, NormGeoError, RunError, StoreError
from normgeo.store import scan, workers
from normgeo.store.layout import read_state
from normgeo.store.reader import seen
from normgeo.store.scan import angles_from_store
from normgeo.system import versions


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as address:
        yield address


@pytest.fixture
def scanned(monkeypatch):
    """The statistics that a table is made of."""
    kept, real = [], AngleTable.from_statistics

    def keep(statistics, model):
        kept.append(statistics.state_dict())
        return real(statistics, model)

    monkeypatch.setattr(AngleTable, "from_statistics", keep)
    return kept


def assert_the_captures_own(path, table, state):
    """The table is the capture's, and every sum and every count of the histograms."""
    pd.testing.assert_frame_equal(table.frame, AngleTable.load(path).frame, check_exact=True)
    pd.testing.assert_frame_equal(table.sinks, AngleTable.load(path).sinks, check_exact=True)
    store = HiddenStateStore(path)
    rows = [read_state(store.storage, commit) for commit in store.commit_log]
    for name in ("deviation", "square", "energy", "norm", "null_deviation", "null_square", "null_energy"):
        assert torch.equal(state[name], torch.stack([row[name] for row in rows]).sum(0)), name
    counts = torch.zeros(len(store.sites) * 9 * BINS, dtype=torch.int64)
    for row in rows:
        counts[row["histogram_bins"]] += row["histogram_counts"]
    assert torch.equal(counts.nonzero()[:, 0], state["histogram_bins"])
    assert torch.equal(counts[counts > 0], state["histogram_counts"])


def test_a_record_is_of_the_table_and_not_of_the_capture(home, tmp_path, monkeypatch):
    path = captured(home, tmp_path / "s")
    monkeypatch.setattr("sys.argv", ["/bin/normgeo", "angles", "--store", "my s"])
    table, where = scan.run_from_store(path, tmp_path / "run", null=3, seed=77, sites="final", progress=False)
    record, store = json.loads((where / "run.json").read_text()), HiddenStateStore(path)
    (about,) = record["models"].values()
    assert (record["config"]["null"], record["config"]["seed"], record["config"]["sites"]) == (3, 77, "final")
    assert (record["status"], record["command"], record["store"]) == (
        "complete",
        "normgeo angles --store 'my s'",
        str(path),
    )
    assert [site["name"] for site in about["sites"]] == list(table.frame.site.unique())
    assert about["n_tokens"] == store.n_tokens == table.frame.n_tokens.max()
    assert record["capture"] == store.provenance
    assert record["started"] <= record["finished"]


@pytest.mark.parametrize("changes", [{}, {"batch": 16}, {"context": 7, "phases": ("pre", "post")}])
def test_threads_give_the_captures_own_numbers(home, tmp_path, threads, scanned, changes):
    path = captured(home, tmp_path / "s", **changes)
    scanned.clear()
    table = angles_from_store(path, null=8, progress=False)
    assert_the_captures_own(path, table, scanned[0])
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("tasks", "parts"), [(1, 1), (4, 2), (1000, 5)])
def test_few_rows_are_shared_out_by_sites(store, threads, scanned, monkeypatch, tasks, parts):
    monkeypatch.setattr(scan, "TASKS_A_WORKER", tasks)
    opened, sites = HiddenStateStore(store), range(len(HiddenStateStore(store).sites))
    reader = scan._Reader(scan._Scan("a", str(store), "", 0, None, 8, 16, 0), opened)
    cut = list(scan._tasks(reader, 8, 3))
    done = [(row, site) for task in cut for row in range(task.first, task.stop) for site in task.sites]
    assert sorted(done) == [(row, site) for row in range(len(opened.commit_log)) for site in sites]
    assert len({task.sites for task in cut}) == parts
    assert sum(task.n_tokens for task in cut) == opened.n_tokens
    table = angles_from_store(store, null=8, progress=False)
    assert_the_captures_own(store, table, scanned[-1])


def test_many_workers_hold_no_more_together(store, monkeypatch):
    opened = HiddenStateStore(store)
    reader = scan._Reader(scan._Scan("a", str(store), "", 0, None, 8, 16, 0), opened)
    monkeypatch.setattr(scan, "TASKS_A_WORKER", 1)
    together = reader.token_bytes * max(opened.layout.chunk, 8 * CONTEXT)  # what is read, and where it is counted
    together += reader.statistics(reader.sites).state["histogram"].nbytes
    for bound, several in (("AT_ONCE", 1), ("IN_ALL", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(scan, bound, several * together // 4)
            most = max(len(task.sites) for task in scan._tasks(reader, 8, several))
        assert most == -(-len(reader.sites) // 4)


def test_a_cluster_gives_the_captures_own_numbers(store, copy, cluster, scanned):
    table = angles_from_store(store, null=8, scheduler=cluster, progress=False)
    assert_the_captures_own(store, table, scanned[0])
    a_chunk(copy).write_bytes(a_chunk(copy).read_bytes()[:-9])
    with pytest.raises(StoreError, match=rf"{a_chunk(copy).name} is damaged"):
        angles_from_store(copy, null=8, scheduler=cluster, progress=False)


def test_both_phases_count_where_both_are_read(home, tmp_path):
    opened = HiddenStateStore(captured(home, tmp_path / "s", phases=("pre", "post"), n=100))
    known = scan._Scan("both", str(tmp_path / "s"), seen(opened), len(opened.commit_log), None, 8, 16, 0)
    assert scan._reader(known).token_bytes == 5 * 2 * 32 * 4


def test_a_worker_that_sees_another_store_is_refused(store, copy):
    opened = HiddenStateStore(store)
    known = scan._Scan("mine", str(store), seen(opened), len(opened.commit_log), None, 8, 16, 0)
    assert scan._reader(known).sites == opened.sites
    with pytest.raises(StoreError, match=f"has another capture at {copy} than was asked for"):
        scan._reader(replace(known, path=str(copy), seen=known.seen[::-1]))


def test_a_worker_may_see_more_of_a_store_that_grows(store):
    opened = HiddenStateStore(store)
    known = scan._Scan("grows", str(store), seen(opened, 3), 3, None, 8, 16, 0)
    assert len(scan._reader(known).store.commit_log) == len(opened.commit_log) > 3


class Cluster:
    """One that gives nothing for a while, and then what it is asked for."""

    scheduler = SimpleNamespace(address="tcp://here")

    def __init__(self, *workers, status="pending"):
        self.workers, self.status = list(workers), status

    def nthreads(self):
        return {"a": 1} if self.workers.pop(0) else {}

    def done(self):
        return self.status != "pending"

    def result(self, timeout):
        if self.workers:
            raise TimeoutError("of a task" if self.status == "error" else "")
        return 7


def test_a_worker_that_does_not_see_the_store_says_that_it_is_one(store, cluster, tmp_path):
    opened = HiddenStateStore(store)
    opened.storage.absolute = str(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r", a worker, cannot read the store: .*elsewhere is no store"):
        angles_from_store(opened, null=4, scheduler=cluster, progress=False)


def test_workers_that_run_other_code_are_refused(store, cluster, monkeypatch):
    """What they found would be merged with numbers that mean something else."""
    monkeypatch.setattr(scan, "code_digest", lambda: "of this process")
    with pytest.raises(NormGeoError, match=r"workers of tcp://.* run another version of normgeo; install this one"):
        angles_from_store(store, null=4, scheduler=cluster, progress=False)


def test_code_is_what_is_built_and_run(tmp_path, monkeypatch):
    for name in ("a.py", "kernels/b.h", "kernels/c.cpp", ".ipynb_checkpoints/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "system" / "versions.py"))
    found, digest = {}, versions.code_digest.__wrapped__
    for path in sorted(path for path in tmp_path.rglob("*.*") if path.is_file()):
        before = digest()
        path.write_text("2")
        found[path.name] = digest() != before
    assert found == {"a.py": True, "b.h": True, "c.cpp": True, "d.py": False, "e.txt": False}


def test_a_cluster_without_workers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 2 * workers.CONNECT_SECONDS)
    for some in ((), (1,), (0,), (0, 1, 0, 1)):
        cluster = Cluster(*some)
        assert workers._Awaited(cluster, cluster).result() == 7
    cluster = Cluster(1, 0, 0, 1)
    with pytest.raises(NormGeoError, match="cluster at tcp://here lost its workers, and no others came"):
        workers._Awaited(cluster, cluster).result()
    cluster = Cluster(1, status="finished")  # what it gave was about to come when the time was up
    assert workers._Awaited(cluster, cluster).result() == 7
    cluster = Cluster(1, status="error")
    with pytest.raises(TimeoutError, match="of a task"):
        workers._Awaited(cluster, cluster).result()


def test_a_record_is_of_what_was_read_while_a_store_grows(copy, tmp_path, monkeypatch):
    unfinished(copy)
    last = sorted((copy / "commits").iterdir())[-1]
    committed, real = last.read_bytes(), scan._record
    last.unlink()

    def grown(*args, **options):
        last.write_bytes(committed)
        return real(*args, **options)

    monkeypatch.setattr(scan, "_record", grown)
    table, where = scan.run_from_store(copy, tmp_path / "out", progress=False)
    (about,) = json.loads((where / "run.json").read_text())["models"].values()
    assert about["n_tokens"] == table.frame.n_tokens.max() < HiddenStateStore(copy).n_tokens


@pytest.mark.parametrize("at", [2, 4])  # the table of sinks, and run.json
def test_a_disk_that_is_full_leaves_nothing_to_resume(at, store, tmp_path, full_disk):
    out, before = tmp_path / "out", content(store)
    with full_disk(at), pytest.raises(RunError, match=r"the disk is full; nothing was left behind"):
        scan.run_from_store(store, out, null=4, progress=False)
    assert not out.exists()
    scan.run_from_store(store, out, null=4, progress=False)
    assert json.loads((out / "run.json").read_text())["status"] == "complete"
    assert content(store) == before


def test_another_phase_does_not_follow_from_inputs(store):
    opened = HiddenStateStore(store)
    with pytest.raises(StoreError, match="follow from inputs, received 'pre'"):
        opened.derived(opened.sites[0].key, "pre", torch.ones(1, opened.sites[0].d))


def test_what_is_behind_a_gap_is_not_called_read(copy):
    unfinished(copy)
    (copy / "commits/00000002.json").unlink()
    opened = HiddenStateStore(copy)
    assert f"of which the first {opened.n_tokens} are read, up to the first gap" in opened.incomplete
    said = []
    angles_from_store(copy, null=4, announce=said.append, progress=False)
    assert said == [opened.incomplete]
    (copy / "commits/00000000.json").unlink()
    with pytest.raises(StoreError, match="of which the first 0 are read"):
        angles_from_store(copy, progress=False)


def test_a_damaged_chunk_ends_a_scan_on_threads(copy, threads):
    a_chunk(copy).unlink()
    with pytest.raises(StoreError, match=rf"{a_chunk(copy, 1).parent}.* cannot be read"):
        angles_from_store(copy, null=8, progress=False)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("null", -1, "--null must be at least 0, received -1"),
        ("null_every", 0, "--null-every must be at least 1, received 0"),
        ("seed", -1, "--seed must be at least 0, received -1"),
        ("batch", 0, "--batch must be at least 1, received 0"),
    ],
)
def test_numbers_are_refused_as_they_are_of_a_model(home, store, tiny, ids, name, value, says):
    number = {name: value}
    for refusing in (
        lambda: config(home, **number),
        lambda: measure_angles(tiny("gpt2"), ids, progress=False, **number),
        lambda: angles_from_store(store, progress=False, **number),
    ):
        with pytest.raises(DataError, match=f"^{says}$"):
            refusing()


def test_a_cluster_of_this_process_is_one_too(store):
    """Its address, inproc://..., has no port."""
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with pytest.importorskip("distributed").LocalCluster(**options) as cluster:
        found = angles_from_store(store, null=4, scheduler=cluster.scheduler_address, progress=False)
    pd.testing.assert_frame_equal(found.frame, angles_from_store(store, null=4, progress=False).frame)


def test_a_wrong_scheduler_is_one_line(normgeo, store, monkeypatch):
    monkeypatch.setattr(workers, "CONNECT_SECONDS", 1)
    for address, message in (
        ("tcp://127.0.0.1:1", "no dask scheduler answers"),
        ("here", "no dask scheduler answers"),
        ("", "no dask scheduler answers"),
        ("tls://127.0.0.1:1", "no dask scheduler answers"),
    ):
        status, _, err = normgeo("angles", "--store", store, "--scheduler", address, "--out", "a")
        assert status == 1
        assert message in err
    assert "--scheduler goes with --store" in normgeo("angles", "--scheduler", "tcp://127.0.0.1:1")[2]


def test_without_dask_the_extra_is_named(store, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(NormGeoError, match=r"pip install 'normgeo\[dask\]'"):
        angles_from_store(store, scheduler="tcp://127.0.0.1:1", progress=False)


def most_at_once(path, monkeypatch):
    """(most tasks under way or waiting to be merged, all tasks, most that anything still holds) of a scan."""
    alive, most, begun, cut, merge = 0, 0, 0, scan._tasks, AngleStatistics.add_state_dict
    tasks, held = [], 0

    def counting(*args):
        nonlocal alive, most, begun, held
        for task in cut(*args):
            alive, begun = alive + 1, begun + 1
            most = max(most, alive)
            tasks.append(weakref.ref(task))
            held = max(held, sum(task() is not None for task in tasks))
            yield task

    def merging(self, *args):
        nonlocal alive
        alive -= 1
        merge(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(scan, "_tasks", counting)
        patch.setattr(AngleStatistics, "add_state_dict", merging)
        angles_from_store(path, null=8, progress=False)
    return most, begun, held


def test_memory_does_not_depend_on_the_number_of_tokens(home, tmp_path, threads, monkeypatch, peak_memory):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(3, 96, (800, CONTEXT)))
    monkeypatch.setattr(scan, "BATCHES_A_TASK", 1)
    monkeypatch.setattr(workers, "WORKERS_A_THREAD", 1)
    changes = {"data": str(tmp_path / "ids.npy"), "sites": "final", "batch": 16, "chunk": 256}
    paths = [captured(home, tmp_path / str(n), n=n, **changes) for n in (4096, 16_000)]
    ((few, n, _), small), ((many, more, held), large) = (
        peak_memory(lambda path=path: most_at_once(path, monkeypatch)) for path in paths
    )
    assert more > 3 * n > 6 * few
    assert few == many <= 6
    assert held <= 9 < n  # one is merged, and threads may not have let go of theirs
    assert large - small < (16_000 - 4096) * 32 * 4 / 4  # of the bytes that it reads more a quarter would be much
    window = scan.in_order
    monkeypatch.setattr(scan, "in_order", lambda tasks, begin, at_most: window(tasks, begin, 10**9))
    assert most_at_once(paths[1], monkeypatch)[0] == more
