"""What capturing costs: the disk alone, the store, and the forward pass without it and with it."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from normgeo.angles import new_statistics
from normgeo.geometry import Directions
from normgeo.runs import Job, RunConfig, prepare
from normgeo.sites import NormSite
from normgeo.statistics import AngleStatistics
from normgeo.storage import Disk
from normgeo.store_layout import Layout, create
from normgeo.store_writer import StoreWriter
from normgeo.stream import stream
from normgeo.tokens import TokenBatch

__all__ = ["bench_store", "store_rate"]


def store_rate(folder: Path, *, sites: int = 8, d: int = 4096, n_tokens: int = 8192, batch: int = 2048) -> float:
    """Bytes a second at which a store takes bfloat16 vectors that are there already, checksums and fsync included.

    Args:
        folder: on the disk to measure.
        sites: how many arrays.
        d: width of the vectors.
        n_tokens: tokens, in whole batches.
        batch: tokens at once.
    """
    places = [NormSite(f"norm{i}", "rmsnorm", "attention", i, "layers", d, 1e-5) for i in range(sites)]
    statistics = AngleStatistics(places, {d: Directions.seeded(d, 0)})
    layout = Layout.of(places, ["bfloat16"] * sites, ("pre", "post"), n_tokens)
    hidden, ids = torch.randn(batch, d).bfloat16(), np.zeros((1, batch), np.int64)
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
    rounds: int = 3,
) -> pd.DataFrame:  # fmt: skip
    """Measure, once a round each: the disk, the store, and a forward pass alone, with statistics, and captured.

    Returns:
        One row a variant, medians of the rounds: `seconds`, `mb_per_s` of what is written and `tokens_per_s`.

    Raises:
        NormGeoError: whatever is wrong with the model or the data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = prepare(RunConfig((model,), data, n_tokens, context, batch, keep="none"), model)
    dtype = str(job.model.dtype).removeprefix("torch.")
    layout = Layout.of(job.sites, [dtype] * len(job.sites), ("pre",), n_tokens)
    seconds: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        rates["disk, one file, fsync"].append(Disk(folder).rate(512 << 20))
        rates["store, fsync and checksums"].append(store_rate(folder))
        for name, sites, store in (("forward", [], None), ("statistics", job.sites, None),
                                   ("statistics and capture", job.sites, folder)):  # fmt: skip
            seconds[name].append(_pass(job, sites, layout, store, batch))
    rows = [{"variant": name, "mb_per_s": float(np.median(found)) / 1e6} for name, found in rates.items()]
    for name, found in seconds.items():
        took = float(np.median(found))
        written = layout.nbytes / took / 1e6 if "capture" in name else np.nan
        rows.append({"variant": name, "seconds": took, "tokens_per_s": n_tokens / took, "mb_per_s": written})
    return pd.DataFrame(rows)


def _pass(job: Job, sites: Sequence[NormSite], layout: Layout, folder: Path | None, batch: int) -> float:
    """Seconds that all tokens take, from the first batch until the last byte is safe."""
    statistics = new_statistics(job.model, job.sites, null=0, seed=0, null_every=16, bos=job.bos)
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
