"""Scalars of every token from a store: those that a run of the model keeps, to the last bit."""

import json
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
from forked import NORMGEO, Forked
from stores import captured, config, local_cluster

from analyses import masks, uncertainty
from normgeo import HiddenStateStore
from normgeo.angles import cost
from normgeo.angles.runs import start_run
from normgeo.angles.scalars import ScalarStore
from normgeo.errors import RunError, StoreError
from normgeo.store import scan
from normgeo.store.scan import angles_from_store, run_from_store


def files(folder):
    """Every file below, whole."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def of_a_run(home, out, **changes):
    start_run(config(home, **changes).run, out, progress=False)
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"batch": 16}, {"context": 7, "phases": ("pre", "post")}, {"model": "qwen3", "qk": True, "n": 533},
        {"sites": "mlp,final"},
    ],
    ids=["pre", "large batches", "both phases", "heads", "some sites"],
)  # fmt: skip
def test_they_are_those_of_a_run_to_the_last_bit(home, tmp_path, threads, monkeypatch, changes):
    monkeypatch.setattr("normgeo.angles.job.BLOCK_TOKENS", 100)  # chunks that no task ends with
    monkeypatch.setattr(scan, "BATCHES_A_TASK", 2)
    path = captured(home, tmp_path / "s", **changes)
    run = of_a_run(home, tmp_path / "run", **changes)
    table, where = run_from_store(path, tmp_path / "out", progress=False)
    assert len(files(run / "scalars.zarr")) > 20
    assert files(where / "scalars.zarr") == files(run / "scalars.zarr")
    pd.testing.assert_frame_equal(table.frame, pd.read_parquet(run / "angles.parquet"))


def test_a_run_of_a_store_has_masks_and_uncertainty(home, tmp_path):
    run_from_store(captured(home, tmp_path / "s"), tmp_path / "out", progress=False)
    of_a_run(home, tmp_path / "run")
    for analysis in (masks, uncertainty):
        frame = analysis.compute(tmp_path / "out")
        assert len(frame) >= 30
        pd.testing.assert_frame_equal(frame, analysis.compute(tmp_path / "run"))


def test_some_sites_in_any_cut(store, tmp_path, threads, monkeypatch):
    """Tasks of some rows and some sites, whose tokens begin and end within chunks."""
    whole = tmp_path / "whole"
    angles_from_store(store, null=0, scalars=whole, progress=False)
    monkeypatch.setattr(scan, "TASKS_A_WORKER", 1000)
    angles_from_store(store, null=0, sites="mlp", scalars=tmp_path / "some", progress=False)
    some, every = ScalarStore(tmp_path / "some"), ScalarStore(whole)
    assert some.sites == [site for site in every.sites if "ln_2" in site]
    np.testing.assert_array_equal(some.id, every.id)
    np.testing.assert_array_equal(some.document, every.document)
    for site in some.sites:
        for phase in ("pre", "standardized", "post"):
            np.testing.assert_array_equal(some.norms(site, phase), every.norms(site, phase))
            for direction in ("uniform", "random_a", "random_b"):
                angles = some.angles(site, phase, direction)
                np.testing.assert_array_equal(angles, every.angles(site, phase, direction))
                assert np.isfinite(angles).all()


def test_a_cluster_gives_the_same(store, tmp_path):
    angles_from_store(store, null=4, scalars=tmp_path / "threads", progress=False)
    with local_cluster() as address:
        angles_from_store(store, null=4, scalars=tmp_path / "cluster", scheduler=address, progress=False)
    assert files(tmp_path / "cluster") == files(tmp_path / "threads")


def test_they_are_kept_as_a_run_keeps_them(store, tmp_path, monkeypatch, normgeo):
    def kept(name, *options):
        status, _, err = normgeo("angles", "--store", store, *options, "--out", tmp_path / name)
        assert status == 0, err
        record = json.loads((tmp_path / name / "run.json").read_text())
        return record["config"]["keep"], (tmp_path / name / "scalars.zarr").is_dir()

    assert kept("few") == (None, True)
    assert kept("none", "--keep", "none") == ("none", False)
    monkeypatch.setattr("normgeo.angles.job.KEEP_SCALARS_UP_TO", HiddenStateStore(store).n_tokens - 1)
    assert kept("many") == (None, False)
    assert kept("wanted", "--keep", "scalars") == ("scalars", True)
    status, _, err = normgeo("angles", "--store", store, "--keep", "some", "--out", tmp_path / "odd")
    assert (status, err) == (1, "error: --keep takes scalars or none, received 'some'")
    assert not (tmp_path / "odd").exists()


def test_what_does_not_fit_or_is_damaged_leaves_nothing(store, copy, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cost.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(RunError, match=r"the scalars need .* free; give --keep none"):
            run_from_store(store, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    with pytest.raises(RunError, match="precious exists already; choose another directory"):
        angles_from_store(store, scalars=str(tmp_path / "precious"), progress=False)
    assert (tmp_path / "precious" / "file").read_text() == "mine"
    last = sorted((copy / "hidden.zarr").rglob("pre/c.*.0"))[-1]
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.raises(StoreError, match="damaged"):
        run_from_store(copy, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(copy)


WAITS = """
from forked import wait_before
from normgeo.angles.scalars import ScalarWriter
wait_before(ScalarWriter, "_write", lambda writer, *_: any(writer.path.rglob("c/0/0")))
""" + NORMGEO  # fmt: skip


def test_a_scan_that_is_killed_leaves_nothing_in_the_way(store, tmp_path):
    """Its scalars are where nobody takes them for whole ones, and go when the same is asked for again."""
    run_from_store(store, tmp_path / "whole", progress=False)
    out = tmp_path / "out"
    words = ("angles", "--store", store, "--out", out)
    process = Forked(WAITS, *words)
    process.until(lambda: any(out.rglob("c/0/0")))
    process.kill()
    assert process.ended().returncode == -signal.SIGKILL
    assert not any(path.parent == out for path in out.rglob("*") if path.name in ("scalars.zarr", "run.json"))
    run_from_store(store, out, progress=False)
    assert files(out / "scalars.zarr") == files(tmp_path / "whole" / "scalars.zarr")
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
