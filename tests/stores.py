"""Small stores: captured from a tiny model and 40 sequences of 20 ids, in rows of 64 tokens or fewer, unless said."""

import contextlib
import hashlib
from pathlib import Path

import forked
import pytest

from normgeo.angles.runs import RunConfig
from normgeo.store.capture import CaptureConfig, start_capture
from normgeo.store.objects import storage_at
from normgeo.store.records import read_record, write_record

N, CONTEXT = 700, 20


def config(home, model="gpt2", phases=("pre",), n=N, chunk=64, **changes):
    options = {"data": str(home / "ids.npy"), "tokens": n, "batch": 3, "null": 8, "device": "cpu"} | changes
    return CaptureConfig(RunConfig((str(home / model),), **options), phases, chunk * 32 * 4)


def captured(home, path, *args, **changes):
    start_capture(config(home, *args, **changes), path, progress=False)
    return path


def content(path):
    """Every byte that counts: all but dates and command lines."""
    found = {}
    for part in ("hidden.zarr", "commits", "state"):
        for file in sorted((path / part).rglob("*")):
            if file.is_file() and file != path / "hidden.zarr/zarr.json":
                found[str(file.relative_to(path))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def unfinished(place):
    """Have a store's record say that it is being written."""
    storage = storage_at(place)
    write = storage.put if "://" in str(place) else lambda name, raw: (Path(place) / name).write_bytes(raw)
    write_record(write, "store.json", read_record(storage, "store.json") | {"status": "running"}, indent=2)


def a_chunk(path, row=2):
    return sorted((path / "hidden.zarr").rglob(f"pre/c.{row}.0"))[1]


@contextlib.contextmanager
def local_cluster():
    """The address of two workers of dask's, forked from the process that others are, with all imports done."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    forked.begin()  # before dask would have it import less
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with (
        dask.config.set({
            "distributed.worker.multiprocessing-method": "forkserver",
            "distributed.worker.profile.enabled": False,  # what it collects would count as the scan's
        }),
        distributed.LocalCluster(**options) as cluster,
    ):  # fmt: skip
        yield cluster.scheduler_address
