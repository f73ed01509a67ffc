"""What capturing costs: the disk alone, the store, and the forward pass without it and with it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from normgeo.angles import new_statistics
from normgeo.capture import CaptureConfig, disk_rate, start_capture
from normgeo.runs import RunConfig, prepare
from normgeo.sites import NormSite
from normgeo.statistics import AngleStatistics
from normgeo.store_layout import Layout, create, durable, sweep
from normgeo.store_writer import StoreWriter
from normgeo.stream import stream
from normgeo.tokens import TokenBatch

__all__ = ["bench_store", "store_rate"]


def store_rate(folder: Path, *, sites: int = 8, d: int = 4096, n_tokens: int = 8192, batch: int = 2048) -> float:
    """Bytes a second at which a store takes bfloat16 vectors that are there already, checksums and fsync included."""
    import numpy as np

    places = [NormSite(f"norm{i}", "rmsnorm", "attention", i, "layers", d, 1e-5) for i in range(sites)]
    layout = Layout.of(places, ["bfloat16"] * sites, ("pre",), n_tokens)
    hidden = torch.randn(batch, d).bfloat16()
    statistics = AngleStatistics([], {}) if not sites else None
    with tempfile.TemporaryDirectory(dir=folder, prefix=".normgeo-bench-") as scratch:
        path = Path(scratch)
        sweep(path)
        create(path, layout, [], [], [], {})
        began = time.perf_counter()
        with StoreWriter(path, "bench", layout, places, statistics) as writer:
            for start in range(0, n_tokens, batch):
                ids = np.zeros((1, batch), np.int64)
                piece = TokenBatch(ids, ids, start)
                writer.begin(piece)
                for i in range(sites):
                    writer.take(i, "pre", hidden)
                writer.finish(piece)
        return layout.nbytes / (time.perf_counter() - began)


def bench_store(
    model: str, folder: Path, *, context: int = 256, batch: int = 8, n_tokens: int = 32_768, rounds: int = 3
) -> pd.DataFrame:
    """Measure, interleaved: the disk, the store, and a forward pass alone, with statistics, and with both.

    Returns:
        One row a variant, medians of the rounds: `seconds`, `mb_per_s` (of what is written) and `tokens_per_s`.

    Raises:
        NormGeoError: whatever is wrong with the model or the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig((model,), None, n_tokens, context, batch, null=0, keep="none")
    job = prepare(config, model)

    def passes(measured: bool) -> tuple[float, int]:
        statistics = new_statistics(job.model, job.sites, null=0, seed=0, null_every=16, bos=job.bos)
        began = time.perf_counter()
        batches = job.tokens.batches(n_tokens, batch)
        for _ in stream(job.model, job.sites if measured else [], batches, [statistics] if measured else []):
            pass
        return time.perf_counter() - began, 0

