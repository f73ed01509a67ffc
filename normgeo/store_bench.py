"""What capturing costs: the disk alone, the store, and the forward pass without it and with it."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from normgeo.angles import new_statistics
from normgeo.capture import CaptureConfig, start_capture
from normgeo.geometry import Directions
from normgeo.runs import Job, RunConfig, prepare
from normgeo.scan import angles_from_store
from normgeo.sites import NormSite
from normgeo.statistics import AngleStatistics
from normgeo.storage import Disk
from normgeo.store_layout import Layout, create
from normgeo.store_writer import StoreWriter
from normgeo.stream import stream
from normgeo.tokens import TokenBatch

__all__ = ["bench_store", "store_rate"]

DISK, STORE = "disk, one file, fsync", "store, all phases in float32"
FORWARD, STATISTICS, CAPTURE = "forward", "forward, statistics", "forward, statistics, capture of pre"


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


def bench_store(
    model: str, folder: Path, *, data: str = "sample", context: int = 256, batch: int = 8, n_tokens: int = 32_768,
    dtype: str | None = None, rounds: int = 3,
) -> pd.DataFrame:  # fmt: skip
    """Measure the disk, the store, a forward pass alone and captured, and stores read again, in a random order.

    What is read was dropped from memory before, where the system lets one do so, for a store is larger than memory. A
    scan gives all angles, with the null ensemble; of a store without post-norm vectors it rebuilds them, which reads
    half of the bytes and computes more.

    Returns:
        One row a variant, medians of the rounds: `seconds`, `mb_per_s` of what is written or read, `tokens_per_s`, and
        `ratio` and its quartiles `ratio_q25`, `ratio_q75`: the seconds that a byte or a token takes, over those of the
        variant named in `baseline` in the same round.

    Raises:
        NormGeoError: whatever is wrong with the model or the data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = RunConfig((model,), data, n_tokens, context, batch, dtype, keep="none")
    job, seconds = prepare(run, model), defaultdict[str, list[float]](list)
    stored = str(job.model.dtype).removeprefix("torch.")
    layouts = {p: Layout.of(job.sites, [stored] * len(job.sites), p, n_tokens) for p in (("pre",), ("pre", "post"))}
    layout = layouts["pre",]
    nbytes: dict[str, int] = dict.fromkeys((DISK, STORE, CAPTURE), layout.nbytes)
    with tempfile.TemporaryDirectory(dir=folder, prefix="normgeo-bench-") as scratch:
        for phases in layouts:
            start_capture(CaptureConfig(run, phases), Path(scratch) / " ".join(phases), progress=False)
        measures: dict[str, Callable[[], float]] = {
            DISK: lambda: layout.nbytes / Disk(folder).rate(512 << 20),
            STORE: lambda: layout.nbytes / store_rate(folder),
            FORWARD: lambda: _pass(job, [], layout, None, batch),
            STATISTICS: lambda: _pass(job, job.sites, layout, None, batch),
            CAPTURE: lambda: _pass(job, job.sites, layout, folder, batch),
        }
        for phases, found in layouts.items():
            where, of = Path(scratch) / " ".join(phases), f"of {' and '.join(phases)}"
            measures |= {f"reading {of}": partial(_read, where), f"scan {of}": partial(_scan, where)}
            nbytes |= {f"reading {of}": found.nbytes, f"scan {of}": found.nbytes}
        order = random.Random(0)  # a processor that has waited for a disk computes faster for a while
        for _ in range(rounds):
            for name in order.sample(list(measures), len(measures)):
                seconds[name].append(measures[name]())
    return pd.DataFrame([_row(name, seconds, nbytes.get(name), n_tokens) for name in measures])


def _row(name: str, seconds: dict[str, list[float]], nbytes: int | None, n_tokens: int) -> dict[str, str | float]:
    first, _, rest = name.partition(" ")
    baseline = {"disk,": DISK, "store,": DISK, "scan": f"reading {rest}", "reading": name}.get(first, FORWARD)
    ratios = np.array(seconds[name]) / np.array(seconds[baseline])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    took = float(np.median(seconds[name]))
    return {
        "variant": name, "seconds": took, "mb_per_s": nbytes / took / 1e6 if nbytes else np.nan,
        "tokens_per_s": n_tokens / took, "baseline": baseline, "ratio": middle, "ratio_q25": low, "ratio_q75": high,
    }  # fmt: skip


def _forget(files: Iterable[Path]) -> None:
    """Have the system drop what it keeps of files in memory."""
    for file in files if hasattr(os, "posix_fadvise") else []:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(store: Path) -> float:
    """Seconds that the bytes of a store's chunks take, read side by side by as many threads as a scan has."""
    files = sorted((store / "hidden.zarr/sites").rglob("c.*"))
    _forget(files)
    buffers = threading.local()

    def read(file: Path) -> None:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            if getattr(buffers, "size", -1) < size:
                buffers.bytes, buffers.size = np.empty(size, np.uint8), size
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


def _pass(job: Job, sites: Sequence[NormSite], layout: Layout, folder: Path | None, batch: int) -> float:
    """Seconds that all tokens take, from the first batch until the last byte is safe."""
    statistics = new_statistics(job.model, job.sites, null=256, seed=0, null_every=16, bos=job.bos)
    sinks = [statistics] if sites else []
    with _new_store(folder, layout) if folder else nullcontext() as disk:
        began = time.perf_counter()
        writing = StoreWriter(disk, "bench", layout, sites, statistics) if disk else nullcontext()
        with writing as writer:
            for piece in stream(job.model, sites, job.tokens.batches(job.n_tokens, batch), [writer, *sinks]
                                if writer else sinks):  # fmt: skip
                if writer is not None:
                    writer.finish(piece)
        return time.perf_counter() - began
