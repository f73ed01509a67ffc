"""What capturing costs: the disk alone, the store, and the forward pass without it and with it."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from normgeo.angles.job import Job, RunConfig, empty_statistics, prepare
from normgeo.angles.statistics import AngleStatistics
from normgeo.errors import StoreError
from normgeo.geometry import Directions
from normgeo.models import dtype_name
from normgeo.numbers import check_number
from normgeo.sites import NormSite
from normgeo.store.capture import CaptureConfig, start_capture
from normgeo.store.layout import Layout, create
from normgeo.store.reader import HiddenStateStore
from normgeo.store.scan import angles_from_store
from normgeo.store.storage import Disk
from normgeo.store.writer import StoreWriter
from normgeo.stream import stream
from normgeo.system.files import check_folder
from normgeo.system.memory import memory_kept
from normgeo.system.timing import circumstances, devices, quartiles, synchronize
from normgeo.tokens import TokenBatch

__all__ = ["bench_store", "store_rate"]


def store_rate(folder: Path, *, sites: int = 4, d: int = 4096, n_tokens: int = 8192, batch: int = 2048) -> float:
    """Bytes a second at which a store takes all phases in float32, as if they were there already, fsync included.

    Args:
        folder: on the disk to measure.
        sites: how many norms.
        d: width of the vectors.
        n_tokens: tokens, in whole batches.
        batch: tokens at once.
    """
    places = [NormSite(f"norm{i}", "rmsnorm", "attention", i, "layers", d, 1e-5) for i in range(sites)]
    statistics = AngleStatistics(places, {d: Directions.seeded(d, 0)})
    layout = Layout.of(places, ["float32"] * sites, ("pre", "standardized", "post"), n_tokens)
    hidden, ids = torch.randn(batch, d), np.zeros((1, batch), np.int64)
    with _new_store(folder, layout) as disk:
        began = time.perf_counter()
        with StoreWriter(disk, "bench", layout, places, statistics) as writer:
            for start in range(0, n_tokens, batch):
                piece = TokenBatch(ids, ids, start)
                writer.begin(piece)
                for i in range(sites):
                    writer.take(i, "pre", hidden)
                    writer.take(i, "post", hidden)
                writer.finish(piece)
        return layout.nbytes / (time.perf_counter() - began)


@contextmanager
def _new_store(folder: Path, layout: Layout) -> Iterator[Disk]:
    """An empty store that is removed at the end."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="normgeo-bench-") as scratch:
        disk = Disk(Path(scratch))
        with disk.writing():
            create(disk, layout, [], [], [], {})
            yield disk


def bench_store(run: RunConfig, folder: Path, *, rounds: int = 3) -> pd.DataFrame:
    """Measure the disk, the store, a forward pass alone and captured, and stores read again, in a random order.

    What is read was dropped from memory before, where the system lets one do so, for a store is larger than memory. A
    scan gives all angles, with the null ensemble; of a store without post-norm vectors it rebuilds them, which reads
    half of the bytes and computes more. Contexts and batches are those of a capture, unless others are given.

    Args:
        run: one model, and the tokens of each measurement.
        folder: on the disk to measure.
        rounds: how often everything is measured.

    Returns:
        One row a variant, medians of the rounds: `seconds`, `mb_per_s` of what is written or read, `tokens_per_s`, and
        `ratio` and its quartiles `ratio_q25`, `ratio_q75`: the seconds that a byte or a token takes, over those of the
        variant named in `baseline` in the same round; and what was measured on what.

    Raises:
        NormGeoError: whatever is wrong with the model, the data or the folder.
    """
    check_number("rounds", rounds, 1)
    check_folder(folder, "--folder")
    if not folder.is_dir():
        raise StoreError(f"there is no directory {folder}; give --folder one on the disk that is to be measured")
    job, seconds = prepare(run, run.models[0]), defaultdict[str, list[float]](list)
    with memory_kept(), tempfile.TemporaryDirectory(dir=folder, prefix="normgeo-bench-") as scratch:
        measures = _measures(run, job, folder, Path(scratch))
        order = random.Random(0)  # a processor that has waited for a disk computes faster for a while
        for _ in range(rounds):
            for name in order.sample(list(measures), len(measures)):
                seconds[name].append(measures[name].run())
    frame = pd.DataFrame([_row(name, measure, seconds, job.n_tokens) for name, measure in measures.items()])
    return frame.assign(
        model=job.label, dtype=job.about["dtype"], tokens=job.n_tokens, context=job.tokens.context, batch=run.batch,
        rounds=rounds, **circumstances(job.model.device),
    )  # fmt: skip


@dataclass(frozen=True)
class _Measure:
    """Something that takes `run()` seconds, to be compared with `baseline`; `nbytes` are written or read."""

    run: Callable[[], float]
    baseline: str
    nbytes: int | None = None


def _measures(run: RunConfig, job: Job, folder: Path, scratch: Path) -> dict[str, _Measure]:
    stored = [dtype_name(job.model.dtype)] * len(job.sites)
    layouts = {phases: Layout.of(job.sites, stored, phases, job.n_tokens) for phases in (("pre",), ("pre", "post"))}
    folders = {phases: scratch / "-".join(phases) for phases in layouts}
    for phases, where in folders.items():
        start_capture(CaptureConfig(run, phases), where, progress=False)
    captured, layout = HiddenStateStore(folders["pre",]), layouts["pre",]
    some, exact = layout.nbytes, {i for i, site in enumerate(job.sites) if captured.rebuild(site).bit_equal}
    measures = {
        "disk, one file, fsync": _Measure(lambda: some / Disk(folder).rate(512 << 20), "disk, one file, fsync", some),
        "store, all phases in float32": _Measure(lambda: some / store_rate(folder), "disk, one file, fsync", some),
        "forward": _Measure(lambda: _pass(run, job, [], layout), "forward"),
        "forward, statistics": _Measure(lambda: _pass(run, job, job.sites, layout), "forward"),
        "forward, statistics, capture of pre":
            _Measure(lambda: _pass(run, job, job.sites, layout, folder, exact), "forward", some),
    }  # fmt: skip
    for phases, found in layouts.items():
        where, of = folders[phases], " and ".join(phases)
        through, past = partial(_read, where, direct=False), partial(_read, where, direct=True)
        for name, measure in (("reading", through), ("direct reading", past), ("scan", partial(_scan, where))):
            measures[f"{name} of {of}"] = _Measure(measure, f"reading of {of}", found.nbytes)
    return measures


def _row(name: str, measure: _Measure, seconds: dict[str, list[float]], n_tokens: int) -> dict[str, str | float]:
    median = float(np.median(seconds[name]))
    return {
        "variant": name, "seconds": median, "mb_per_s": measure.nbytes / median / 1e6 if measure.nbytes else np.nan,
        "tokens_per_s": n_tokens / median, "baseline": measure.baseline,
        **quartiles("ratio", np.array(seconds[name]) / np.array(seconds[measure.baseline])),
    }  # fmt: skip


def _forget(files: Iterable[Path]) -> None:
    """Have the system drop what it keeps of files in memory."""
    for file in files if hasattr(os, "posix_fadvise") else []:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(store: Path, direct: bool) -> float:
    """Seconds that the bytes of a store's chunks take, read whole by as many threads as torch has.

    Args:
        store: the store.
        direct: past the system's memory, as a scan does, or through it, as programs do.
    """
    files = sorted((store / "hidden.zarr/sites").rglob("c.*"))
    _forget(files)
    buffers, disk = threading.local(), Disk(store)

    def read(file: Path) -> None:
        size = file.stat().st_size
        if direct:
            disk.read_range(str(file.relative_to(store)), 0, size)
            return
        if getattr(buffers, "size", -1) < size:
            buffers.bytes, buffers.size = np.empty(size, np.uint8), size
        with file.open("rb", buffering=0) as opened:
            opened.readinto(buffers.bytes[:size].data)

    began = time.perf_counter()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - began


def _scan(store: Path) -> float:
    """Seconds that all angles take from a store, those to the null ensemble included."""
    _forget((store / "hidden.zarr").rglob("c.*"))
    began = time.perf_counter()
    angles_from_store(store, progress=False)
    return time.perf_counter() - began


def _pass(
    run: RunConfig, job: Job, sites: Sequence[NormSite], layout: Layout, folder: Path | None = None,
    exact: Collection[int] = (),
) -> float:  # fmt: skip
    """Seconds that all tokens take, from the first batch until the last byte is safe."""
    synchronize(*(places := devices(job.model)))
    statistics = empty_statistics(run, job)
    with _new_store(folder, layout) if folder else nullcontext() as disk:
        began = time.perf_counter()
        writing = StoreWriter(disk, "bench", layout, sites, statistics, exact=exact) if disk else nullcontext()
        with writing as writer:
            sinks = [sink for sink in (writer, statistics if sites else None) if sink is not None]
            for piece in stream(job.model, sites, job.tokens.batches(job.n_tokens, run.batch), sinks):
                if writer is not None:
                    writer.finish(piece)
        synchronize(*places)
        return time.perf_counter() - began
