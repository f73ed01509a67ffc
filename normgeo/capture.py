"""Capturing: a model's hidden states into a store while the statistics run, and the statistics again from the store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from normgeo.angles import AngleTable, new_statistics, select_sites
from normgeo.cost import cost
from normgeo.errors import NormGeoError, RunError, StoreError
from normgeo.geometry import Directions
from normgeo.progress import progress_bar
from normgeo.rebuild import Rebuild, find_rebuild
from normgeo.runs import (
    Job,
    RunConfig,
    check_same,
    default_out,
    full_disk_explained,
    new_record,
    now,
    prepare,
    write_results,
    write_whole,
)  # fmt: skip
from normgeo.sites import NormSite
from normgeo.statistics import AngleStatistics
from normgeo.store import ChunkReader, HiddenStateStore
from normgeo.store_layout import (
    Layout,
    as_numpy,
    as_torch,
    create,
    durable,
    locked,
    read_json,
    read_log,
    sweep,
)  # fmt: skip
from normgeo.store_writer import StoreWriter
from normgeo.stream import stream
from normgeo.tokens import TokenBatch, TokenStream

__all__ = ["CaptureConfig", "angles_from_store", "disk_rate", "resume_capture", "run_from_store", "start_capture"]

PHASES = ("pre", "standardized", "post")
REBUILT_WITHIN = 0.01  # of the largest output: beyond this a norm does something that no recipe knows


@dataclass(frozen=True)
class CaptureConfig:
    """What to capture: one model's run, the phases to keep, and how large a chunk may be in bytes."""

    run: RunConfig
    phases: tuple[str, ...] = ("pre",)
    chunk_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not self.phases or set(self.phases) - set(PHASES) or len(set(self.phases)) < len(self.phases):
            raise NormGeoError(f"--phases takes some of {', '.join(PHASES)}, received {','.join(self.phases)!r}")
        if len(self.run.models) != 1:
            raise NormGeoError("one model is captured at a time")


@dataclass(frozen=True)
class _Plan:
    layout: Layout
    rebuilds: list[Rebuild]
    classes: list[str]


def start_capture(config: CaptureConfig, path: Path, **options: Any) -> AngleTable:
    """Capture into a new store; `announce` gets lines of text, `progress` shows a bar.

    Raises:
        StoreError: the directory holds something else, is in use, or cannot hold what is asked for.
        NormGeoError: whatever is wrong with the model, the data or the hidden states.
    """
    if (path / "store.json").is_file():
        status = read_json(path / "store.json")["status"]
        finish = f"finish it with --resume {path}, or " if status != "complete" else ""
        raise StoreError(f"{path} already holds a store ({status}); {finish}give another --store")
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - {"lock", "scratch"}):
        raise StoreError(f"{path} exists and is no store; give another --store")
    return _capture(config, path, None, **options)


def resume_capture(path: Path, **options: Any) -> AngleTable:
    """Finish an interrupted capture with the configuration it was started with, to the same bytes.

    Raises:
        StoreError: there is no store, it is complete, in use or damaged, or model, tokenizer or data are others.
    """
    if not (path / "store.json").is_file():
        raise StoreError(f"{path} holds no store.json; there is nothing to resume")
    record = read_json(path / "store.json")
    if record["status"] == "complete":
        raise StoreError(f"the store in {path} is complete; normgeo angles --store {path} reads it")
    stored = record["capture"]
    run = RunConfig(**(stored["run"] | {"models": tuple(stored["run"]["models"])}))
    return _capture(CaptureConfig(run, tuple(stored["phases"]), stored["chunk_bytes"]), path, record, **options)


def _capture(
    config: CaptureConfig,
    path: Path,
    record: dict[str, Any] | None,
    *,
    announce: Callable[[str], None] = lambda line: None,
    progress: bool = True,
) -> AngleTable:
    job = prepare(config.run, config.run.models[0])
    plan = _planned(config, job)
    layout = asdict(plan.layout) | {"arrays": [asdict(spec) for spec in plan.layout.arrays]}
    if record is None:
        announce(_check_space(config, job, plan, path))
        about = {"about": job.about, "phases": config.phases, "batch": config.run.batch, "null": config.run.null,
                 "null_every": config.run.null_every, "seed": config.run.seed, "label": job.label}  # fmt: skip
        provenance = new_record(config.run) | {"identity": about}
        provenance = {k: v for k, v in provenance.items() if k not in ("status", "models")}
        record = {"status": "running", "capture": asdict(config), "provenance": provenance, "layout": layout}
    check_same(record["provenance"]["identity"]["about"], job.about, path)
    check_same({"layout": record["layout"]}, {"layout": layout}, path, ("layout",))
    path.mkdir(parents=True, exist_ok=True)
    with locked(path), full_disk_explained(path):
        sweep(path)
        durable(path / "store.json", _text(record), path / "scratch")
        if not (path / "hidden.zarr").is_dir():
            create(path, plan.layout, job.sites, plan.rebuilds, plan.classes, record["provenance"])
        try:
            statistics = _write(config, job, plan.layout, path, progress)
            table = AngleTable.from_statistics(statistics, job.label)
        except NormGeoError:
            if not any((path / "commits").iterdir()):
                shutil.rmtree(path)  # nothing was captured: leave nothing behind
            raise
        write_results(table, path)
        record |= {"status": "complete", "finished": now()}
        durable(path / "store.json", _text(record), path / "scratch")
        (path / "scratch").rmdir()
    return table


def _text(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


class _Probe:
    """A sink that keeps a few vectors of every site."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], Tensor] = {}

    def begin(self, batch: TokenBatch) -> None: ...

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Tensor) -> None:
        self.kept[site, phase] = hidden.cpu().clone()

    def end(self) -> None: ...


def _planned(config: CaptureConfig, job: Job) -> _Plan:
    """What the hidden states are like, seen on a few tokens."""
    probe = _Probe()
    few = job.tokens.batches(min(job.n_tokens, job.tokens.context, 64), 1)
    for _ in stream(job.model, job.sites, few, [probe]):
        pass
    modules, rebuilds, dtypes = dict(job.model.named_modules()), [], []
    for i, site in enumerate(job.sites):
        pre, post = probe.kept[i, "pre"], probe.kept[i, "post"]
        rebuild = find_rebuild(modules[site.name], site, pre, post)
        if "post" not in config.phases and (rebuild.error > REBUILT_WITHIN or pre.dtype != post.dtype):
            raise StoreError(f"the output of {site.key} cannot be rebuilt from its input; give --phases pre,post")
        if pre.dtype != post.dtype:
            raise StoreError(f"{site.key} turns {pre.dtype} into {post.dtype}; give --dtype float32")
        rebuilds.append(rebuild)
        dtypes.append(str(pre.dtype).removeprefix("torch."))
    layout = Layout.of(job.sites, dtypes, config.phases, job.n_tokens, config.chunk_bytes)
    return _Plan(layout, rebuilds, [type(modules[site.name]).__name__ for site in job.sites])


def disk_rate(folder: Path, nbytes: int = 64 << 20) -> float:
    """Bytes a second that a sequential write to a folder's disk takes, fsync included."""
    block, file = np.random.default_rng(0).bytes(min(nbytes, 16 << 20)), folder / f".normgeo-rate-{os.getpid()}"
    try:
        began = time.perf_counter()
        with file.open("wb", buffering=0) as out:
            for _ in range(max(1, nbytes // len(block))):
                out.write(block)
            os.fsync(out.fileno())
        return max(1, nbytes // len(block)) * len(block) / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def _check_space(config: CaptureConfig, job: Job, plan: _Plan, path: Path) -> str:
    """Refuse what cannot fit; else one line on what will be captured, and its cost."""
    layout, folder = plan.layout, next(p for p in path.resolve().parents if p.is_dir())
    free = shutil.disk_usage(folder).free
    if layout.nbytes > free:
        raise StoreError(
            f"the hidden states need {layout.nbytes:,} bytes and {folder} has {free:,} free; give fewer --tokens, "
            "--phases pre, some --sites or another --store"
        )
    rate = disk_rate(folder)
    forward = cost(job.model, job.n_tokens, job.tokens.context, config.run.batch, layout.nbytes)
    inexact = sum(not rebuild.bit_equal for rebuild in plan.rebuilds)
    rebuilt = "" if "post" in config.phases else (
        "; post is rebuilt from pre" + (f", to rounding only at {inexact} sites" if inexact else ", to the last bit")
    )  # fmt: skip
    return (
        f"{job.label}: {len(job.sites)} norms, {', '.join(config.phases)}, {job.n_tokens:,} tokens of "
        f"{job.tokens.source}: exactly {layout.nbytes:,} bytes ({free / 1e9:.1f} GB free) in rows of {layout.chunk:,} "
        f"tokens; forward pass {forward}; the disk takes {rate / 1e6:.0f} MB/s: {layout.nbytes / rate:.0f} s{rebuilt}"
    )


def _write(config: CaptureConfig, job: Job, layout: Layout, path: Path, progress: bool) -> AngleStatistics:
    run = config.run
    statistics = new_statistics(
        job.model, job.sites, null=run.null, seed=run.seed, null_every=run.null_every, bos=job.bos
    )
    store = HiddenStateStore(path)
    done = 0
    if store.commit_log:
        _check_tokens(store, job.tokens)
        last = store.commit_log[-1]
        state = path / "state" / f"{last.row:08}.safetensors"
        if not state.is_file() or hashlib.sha256(state.read_bytes()).hexdigest() != last.state:
            raise StoreError(f"{state} is damaged or missing; this store cannot be finished: capture into another")
        statistics.load_state_dict(safetensors.torch.load(state.read_bytes()))
        done = last.resume_at
    left = (layout.rows - len(store.commit_log)) * layout.row_bytes
    if left > shutil.disk_usage(path).free:
        raise StoreError(f"the rest needs {left:,} bytes, more than the disk of {path} has free; make space and resume")
    with progress_bar(job.label, job.n_tokens, done=done, enabled=progress) as advance:
        if done >= job.n_tokens:
            return statistics
        with StoreWriter(path, store.store_id, layout, job.sites, statistics) as writer:
            batches = job.tokens.batches(job.n_tokens, run.batch, done)
            for batch in stream(job.model, job.sites, batches, [writer, statistics]):
                writer.finish(batch)
                advance(batch.n_tokens)
    if len(read_log(path, store.store_id)) < layout.rows:
        raise StoreError(f"{path}: the stream ended before its last row was committed")
    return statistics


def _check_tokens(store: HiddenStateStore, tokens: TokenStream) -> None:
    """Refuse tokens that are not those already stored."""
    ids, done = store.tokens("id"), 0
    for context, _ in tokens.contexts():
        n = min(len(context), len(ids) - done)
        if not np.array_equal(context[:n], ids[done : done + n]):
            raise StoreError(f"{store.path} holds other tokens from token {done:,} on: another tokenizer or other data")
        done += n
        if done == len(ids):
            return


# --- the statistics from a store -------------------------------------------------------------------------------------


def angles_from_store(
    path: str | Path, *, null: int = 256, null_every: int = 16, seed: int = 0, sites: str | None = None,
    batch: int | None = None, announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable:  # fmt: skip
    """The table that `normgeo angles` gives for the model, from its store alone; in constant memory.

    Args:
        path: the store; of an incomplete one, the committed tokens.
        null: number of random directions in the null ensemble.
        null_every: the null ensemble meets one token in so many.
        seed: of the random directions.
        sites: a pattern for `select_sites`.
        batch: contexts at once; the statistics are equal to the last bit with as many as went through the model.
        announce: told where rebuilt outputs are not those of the model to the last bit.
        progress: show a progress bar.

    Raises:
        StoreError: the store is damaged, holds nothing, or was captured without its inputs.
    """
    store = HiddenStateStore(path)
    if not store.n_tokens:
        raise StoreError(f"{path} holds no committed tokens yet")
    if not store.complete:
        announce(f"{path} is incomplete: {store.n_tokens:,} of {store.layout.n_tokens:,} tokens")
    identity_ = store.provenance["identity"]
    chosen = select_sites(store.sites, sites)
    replays = [_Replay(store, site) for site in chosen]
    directions = {d: Directions.seeded(d, null, seed) for d in sorted({site.d for site in chosen})}
    statistics = AngleStatistics(chosen, directions, bos=identity_["about"]["bos"], null_every=null_every)
    batches = store.stream().batches(store.n_tokens, batch or identity_["batch"])
    with progress_bar(identity_["label"], store.n_tokens, enabled=progress) as advance, torch.inference_mode():
        for piece in batches:
            statistics.begin(piece)
            for i, replay in enumerate(replays):
                pre, post = replay.next(piece.n_tokens)
                statistics.take(i, "pre", pre)
                statistics.take(i, "post", post)
            statistics.end()
            advance(piece.n_tokens)
    differing = [replay.site.key for replay in replays if replay.differs]
    if differing:
        announce(
            f"rebuilt outputs at {len(differing)} of {len(chosen)} sites are the model's to rounding, not to the last "
            f"bit (first {differing[0]}); capture with --phases pre,post for those"
        )
    return AngleTable.from_statistics(statistics, identity_["label"])


def run_from_store(path: Path, out: Path | None, **options: Any) -> tuple[AngleTable, Path]:
    """`angles_from_store`, written to a directory as a run is, with the store's provenance in its `run.json`.

    Raises:
        StoreError: as for `angles_from_store`.
        RunError: the directory is not empty.
    """
    store = HiddenStateStore(path)
    where = out or default_out((store.provenance["identity"]["label"],))
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise RunError(f"{where} is not empty; give another --out")
    table = angles_from_store(path, **options)
    where.mkdir(parents=True, exist_ok=True)
    with full_disk_explained(where):
        write_results(table, where)
        about = store.provenance["identity"]["about"]
        record = store.provenance | {"status": "complete", "store": str(path), "models": {about["model"]: about}}
        write_whole(where / "run.json", _text(record))
    return table, where


class _Replay:
    """What went into and came out of one norm, from the store."""

    def __init__(self, store: HiddenStateStore, site: NormSite) -> None:
        self.store, self.site, self.differs = store, site, False
        self._pre = ChunkReader(store, store.spec(site.key, "pre"))
        stored = any(spec.name == f"sites/{site.key}/post" for spec in store.layout.arrays)
        self._post = ChunkReader(store, store.spec(site.key, "post")) if stored else None
        self._rebuild = None if stored else store.rebuild(site)
        self._at = self._crc = 0

    def next(self, n: int) -> tuple[Tensor, Tensor]:
        """The vectors of the next `n` tokens, before and after the norm."""
        spec = self._pre.spec
        pre = as_torch(self._pre.read(n), spec.dtype)
        if self._post is not None:
            return pre, as_torch(self._post.read(n), spec.dtype)
        assert self._rebuild is not None
        post = self._rebuild(pre, self.site.eps)
        self._compare(as_numpy(post).reshape(-1).view(np.uint8), n, spec.token_bytes)
        return pre, post

    def _compare(self, raw: np.ndarray, n: int, size: int) -> None:
        """Compare the checksum of what is rebuilt with that of what the model gave, row by row."""
        while n:
            commit = self.store.commit_log[self._at // self.store.layout.chunk]
            taken = min(n, commit.stop - self._at)
            self._crc = google_crc32c.extend(self._crc, raw[: taken * size])  # pyright: ignore
            raw, n, self._at = raw[taken * size :], n - taken, self._at + taken
            if self._at == commit.stop:
                self.differs |= self._crc != commit.post[self.site.key]
                self._crc = 0
