"""Capturing: a model's hidden states into a store while the statistics run, by one process or by many."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from normgeo.angles.cost import cost
from normgeo.angles.job import SAME, Job, RunConfig, check_same, empty_statistics, prepare
from normgeo.angles.measure import AngleTable
from normgeo.angles.runs import new_record, now, write_results
from normgeo.angles.statistics import PHASES
from normgeo.errors import NormGeoError, StoreError
from normgeo.models import dtype_name, on_cpu
from normgeo.store.check import check_free, interrupted, length_problems, metadata_problems
from normgeo.store.layout import CHUNK_BYTES, Commit, Layout, create, put_back, read_state
from normgeo.store.objects import storage_at
from normgeo.store.reader import HiddenStateStore
from normgeo.store.rebuild import Rebuild, find_rebuild
from normgeo.store.records import write_record
from normgeo.store.storage import Storage
from normgeo.store.writer import StoreWriter
from normgeo.stream import stream
from normgeo.system.files import disk_explained
from normgeo.system.progress import progress_bar
from normgeo.system.ranks import Ranks
from normgeo.tokens import TokenBatch, TokenStream

__all__ = ["CaptureConfig", "resume_capture", "start_capture"]

DISK_BLOCK = 4096  # bytes that files are rounded up to on a disk
PROBED = 64  # tokens on which the arithmetic of a norm is found out
REBUILT_WITHIN = 0.01  # of the largest output: beyond this a norm does something that no recipe knows


@dataclass(frozen=True)
class CaptureConfig:
    """What to capture.

    Attributes:
        run: of one model, what is measured and how.
        phases: which vectors are kept: some of `pre` (a norm's input), `standardized` and `post` (its output).
        chunk_bytes: how large a chunk may be.

    Raises:
        NormGeoError: there are several models, or phases or bytes out of range.
    """

    run: RunConfig
    phases: tuple[str, ...] = ("pre",)
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if isinstance(self.phases, str):
            object.__setattr__(self, "phases", (self.phases,))
        if not self.phases or set(self.phases) - set(PHASES) or len(set(self.phases)) < len(self.phases):
            raise NormGeoError(f"--phases takes some of {', '.join(PHASES)}, received {','.join(self.phases)!r}")
        if len(self.run.models) != 1:
            raise NormGeoError("one model is captured at a time")
        if self.chunk_bytes < 1:
            raise NormGeoError(f"--chunk-mib must be at least 1, received {self.chunk_bytes >> 20}")


@dataclass(frozen=True)
class _Plan:
    """What a store will be like; `overhead` is what a row takes at most besides its chunks' numbers, in bytes."""

    layout: Layout
    rebuilds: list[Rebuild]
    classes: list[str]
    overhead: int

    def nbytes(self, rows: int) -> int:
        """Bytes on a disk that so many rows take at most."""
        return rows * (self.layout.row_bytes + self.overhead)

    @property
    def described(self) -> dict[str, Any]:
        """The layout as JSON holds it."""
        return asdict(self.layout) | {"arrays": [asdict(spec) for spec in self.layout.arrays]}


def start_capture(
    config: CaptureConfig, path: str | Path, *, ranks: Ranks | None = None,
    announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable | None:  # fmt: skip
    """Capture into a new store, by as many processes as there are: each computes and commits its share of the rows.

    Args:
        config: what to capture.
        path: the store: a directory on a file system that all the processes share, or a URL (s3://, gs://).
        ranks: this process among them; those that `torchrun` started, unless said.
        announce: gets lines of text, in the first process.
        progress: show a bar, of the first process's share.

    Returns:
        The table, in the first process; None in the others.

    Raises:
        StoreError: the place holds something else, is in use, or cannot hold what is asked for.
        NormGeoError: whatever is wrong with the model, the data or the hidden states.

    >>> start_capture(CaptureConfig(RunConfig("openai-community/gpt2", tokens=100_000)), "store")   # doctest: +SKIP
    """
    config = replace(config, run=config.run.absolute())
    ranks = ranks or Ranks.from_environment()
    storage = storage_at(path)
    ranks.first("free", lambda: check_free(storage, config.chunk_bytes))
    return _capture(config, storage, None, ranks, announce, progress)


def resume_capture(
    path: str | Path, *, trust_remote_code: bool = False, ranks: Ranks | None = None,
    announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable | None:  # fmt: skip
    """Finish an interrupted capture with the configuration it was started with, to the same bytes.

    By any number of processes, whatever the number of those that began it; see `start_capture` for the arguments.

    Raises:
        StoreError: there is no store, it is complete, in use or damaged, or model, tokenizer or data are others.
        RunError: it runs a repository's code, and `trust_remote_code` does not say so now.
    """
    ranks = ranks or Ranks.from_environment()
    storage = storage_at(path)
    record = ranks.first("interrupted", lambda: interrupted(storage))
    stored = record["capture"]
    run = RunConfig.recorded(stored["run"], where := f"the record of {path}").consented(trust_remote_code, where)
    config = CaptureConfig(run, tuple(stored["phases"]), stored["chunk_bytes"])
    return _capture(config, storage, record, ranks, announce, progress)


@on_cpu
def _capture(
    config: CaptureConfig, storage: Storage, record: dict[str, Any] | None, ranks: Ranks,
    announce: Callable[[str], None], progress: bool,
) -> AngleTable | None:  # fmt: skip
    with ranks.heard():
        ranks.take_gpu(config.run.device, config.run.device_map)
        before = record and record["provenance"]["identity"]["about"]
        job = prepare(config.run, config.run.models[0], before=before, first=ranks.first)
        return _Capture(config, job, storage).run(record, ranks, announce, progress)


class _Capture:
    """One capture of one process: what is captured, where, and what the store will be like."""

    def __init__(self, config: CaptureConfig, job: Job, storage: Storage) -> None:
        self.config, self.job, self.storage = config, job, storage
        self.plan = _planned(config, job)

    def run(
        self, record: dict[str, Any] | None, ranks: Ranks, announce: Callable[[str], None], progress: bool
    ) -> AngleTable | None:
        """Compute and commit this process's share of the rows that are missing; the first puts the results beside."""
        where, mine = str(self.storage), self.identity
        if not self.storage.can_grow(chunks := len(self.plan.layout.arrays)):
            raise StoreError(
                f"{chunks:,} files of {where} grow at once, more than the system lets a process have open; raise that "
                "limit (ulimit -Hn), or give fewer --phases or some --sites"
            )
        with ExitStack() as held, disk_explained(where), ranks.told_to_end():
            about = record or ranks.first("record", lambda: self.new_record(announce))
            identity = about["provenance"]["identity"]  # of the first process
            check_same(identity["about"], self.job.about, where, (*SAME, "context", "bos"))
            check_same(identity, mine, where, [key for key in mine if key != "about"])
            check_same({"layout": about["layout"]}, {"layout": self.plan.described}, where, ("layout",))
            begin = lambda: self.begin(record, about, held, shared=ranks.size > 1)  # noqa: E731
            run, store, exact, missing = ranks.first("begun", begin)
            if ranks.rank:
                held.enter_context(self.storage.writing(run))
            try:
                self.write(store, exact, ranks.share(missing), progress and not ranks.rank)
                ranks.done("written")
                return None if ranks.rank else self.finish(about)
            except NormGeoError:
                if record is None and ranks.size == 1 and not self.storage.names("commits"):
                    with suppress(OSError, StoreError):  # why it failed is what is to be said
                        self.storage.discard()  # nothing was captured: leave nothing behind
                raise

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a store."""
        run = self.config.run
        return {"about": self.job.about, "phases": list(self.config.phases), "batch": run.batch, "null": run.null,
                "null_every": run.null_every, "seed": run.seed, "label": self.job.label}  # fmt: skip

    def new_record(self, announce: Callable[[str], None]) -> dict[str, Any]:
        """What `store.json` says of a store that is begun."""
        announce(self.check_space())
        provenance = new_record(self.config.run) | {"identity": self.identity}
        provenance = {k: v for k, v in provenance.items() if k not in ("status", "models")}
        layout = self.plan.described
        return {"status": "running", "capture": asdict(self.config), "provenance": provenance, "layout": layout}

    def begin(
        self, before: dict[str, Any] | None, record: dict[str, Any], held: ExitStack, *, shared: bool
    ) -> tuple[str, str, list[int], list[int]]:
        """Make the store, or what is left of it, ready to be written.

        Gives the name of the run, and what all of its processes write by: the store's identity, the sites whose outputs
        are rebuilt to the last bit, as who began the store found, and the rows to write.

        Whoever holds the lock looks again: while the model was loaded another run may have been here.
        """
        run = held.enter_context(self.storage.writing(shared=shared))
        if before is None:
            check_free(self.storage, self.config.chunk_bytes, held=True)
        elif interrupted(self.storage) != before:
            raise StoreError(f"{self.storage} was written by another run meanwhile; give --resume {self.storage} again")
        begun = bool(self.storage.names("commits"))
        if begun and (problems := metadata_problems(self.storage)):
            raise StoreError(f"{problems[0]}; what is committed stays as it is: restore that file, from a copy say")
        write_record(self.storage.put, "store.json", record, indent=2)  # it was complete where records are lost
        if not begun:
            plan = self.plan
            create(self.storage, plan.layout, self.job.sites, plan.rebuilds, plan.classes, record["provenance"])
        store = HiddenStateStore(self.storage)
        for row, problem in length_problems(self.storage, self.plan.layout, store.committed):
            raise StoreError(f"{problem}, and is committed; {put_back(self.storage, row)}")
        for _ in _states(self.storage, store.committed.values()):
            pass
        _check_tokens(store, self.job.tokens)
        missing = [row for row in range(self.plan.layout.rows) if row not in store.committed]
        left, free = self.plan.nbytes(len(missing)), self.storage.free()
        if free is not None and left > free:
            raise StoreError(
                f"the rest needs up to {left:,} bytes and the disk of {self.storage} has {free:,} free; make space and "
                f"give --resume {self.storage}"
            )
        exact = [i for i, site in enumerate(self.job.sites) if store.rebuild(site).bit_equal]
        return run, store.store_id, exact, missing

    def finish(self, record: dict[str, Any]) -> AngleTable:
        """Put the rows' statistics together and the results beside them."""
        store, statistics = HiddenStateStore(self.storage), empty_statistics(self.config.run, self.job)
        if not store.complete:
            raise StoreError(f"{self.storage}: the stream ended before its last row was committed")
        for state in _states(self.storage, store.commit_log):
            statistics.add_state_dict(state)
        table = AngleTable.from_statistics(statistics, self.job.label)
        with self.storage.results() as folder:
            files = write_results(table, folder, [self.job.about])
            sums = {
                file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
            }
        ended = {"status": "complete", "finished": now(), "results": sums}
        write_record(self.storage.put, "store.json", record | ended, indent=2)
        return table

    def check_space(self) -> str:
        """Refuse what cannot fit; else one line on what will be captured, and its cost."""
        job, plan, storage = self.job, self.plan, self.storage
        layout, free, most = plan.layout, storage.free(), plan.nbytes(plan.layout.rows)
        if free is not None and most > free:
            raise StoreError(
                f"the hidden states need {layout.nbytes:,} bytes, with statistics and records up to {most:,}, and the "
                f"disk of {storage} has {free:,} free; give fewer --tokens, --phases pre, some --sites or another "
                "--store"
            )
        room = "an object store says nothing of free space" if free is None else f"{free / 1e9:.1f} GB free"
        rate, what = storage.rate(), "the disk" if free is not None else "one upload after the other"
        forward = cost(job.model, job.n_tokens, job.tokens.context, self.config.run.batch, layout.nbytes)
        inexact = sum(not rebuild.bit_equal for rebuild in plan.rebuilds)
        how = f"to rounding only at {inexact} sites" if inexact else "to the last bit"
        phases = self.config.phases
        rebuilt = "" if "post" in phases else f"; post is rebuilt from pre, {how}"
        if "pre" not in phases:
            rebuilt = "; without pre, which is left out, no angles can be computed from the store"
        return (
            f"{job.label}: {len(job.sites)} norms, {', '.join(phases)}, {job.n_tokens:,} tokens of "
            f"{job.tokens.source}: exactly {layout.nbytes:,} bytes of hidden states, with statistics and records up to "
            f"{most:,} ({room}), in rows of {layout.chunk:,} tokens; forward "
            f"pass {forward}; {what} takes {rate / 1e6:.0f} MB/s: {layout.nbytes / rate:.0f} s{rebuilt}"
        )

    def write(self, store: str, exact: Collection[int], rows: Sequence[int], progress: bool) -> None:
        """Compute and commit rows.

        Batches are the same whoever computes them, since matrix products of other shapes have other last bits: one that
        has tokens of the rows of two processes goes through the model in both, and each keeps its part.
        """
        if not rows:
            return
        job, layout, at_once = self.job, self.plan.layout, self.config.run.batch
        statistics, mine = empty_statistics(self.config.run, job), set(rows)
        start = job.tokens.batch_start(layout.start(min(mine)), at_once)
        batches = _with_tokens_of(mine, layout, job.tokens.batches(job.n_tokens, at_once, start))
        total = sum(layout.stop(row) - layout.start(row) for row in rows)
        with (
            progress_bar(job.label, job.n_tokens, done=job.n_tokens - total, enabled=progress) as advance,
            StoreWriter(self.storage, store, layout, job.sites, statistics, rows=rows, exact=exact) as writer,
        ):
            for batch in stream(job.model, job.sites, batches, [writer, statistics]):
                writer.finish(batch)
                advance(_tokens_of(mine, layout, batch))


class _Probe:
    """A sink that keeps the vectors of a few tokens at every site."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, str], Tensor] = {}

    def begin(self, batch: TokenBatch) -> None:
        self._n_tokens = batch.n_tokens

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Tensor) -> None:
        few = PROBED * len(hidden) // self._n_tokens  # with several heads each token has several
        self.kept.setdefault((site, phase), hidden[:few].cpu().clone())

    def end(self) -> None: ...


def _planned(config: CaptureConfig, job: Job) -> _Plan:
    """What the hidden states are like, seen on a few tokens, in whole contexts: some models fill up shorter ones."""
    probe, context = _Probe(), job.tokens.context
    few = job.tokens.batches(min(job.n_tokens, max(PROBED, context)), max(1, PROBED // context))
    for _ in stream(job.model, job.sites, few, [probe]):
        pass
    modules, rebuilds, dtypes = [site.module_of(job.model) for site in job.sites], [], []
    for i, site in enumerate(job.sites):
        pre, post = probe.kept[i, "pre"], probe.kept[i, "post"]
        rebuild = find_rebuild(modules[i], site, pre, post)
        if pre.dtype != post.dtype:
            raise StoreError(f"{site.key} turns {pre.dtype} into {post.dtype}; give --dtype float32")
        if "post" not in config.phases and rebuild.error > REBUILT_WITHIN:
            raise StoreError(f"the output of {site.key} cannot be rebuilt from its input; give --phases pre,post")
        rebuilds.append(rebuild)
        dtypes.append(dtype_name(pre.dtype))
    layout = Layout.of(job.sites, dtypes, config.phases, job.n_tokens, config.chunk_bytes)
    return _Plan(layout, rebuilds, [type(module).__name__ for module in modules], _overhead(config, job, layout))


def _overhead(config: CaptureConfig, job: Job, layout: Layout) -> int:
    """Bytes that a row takes on a disk beside its chunks' numbers, at most: statistics, records, the ends of files."""
    tokens = min(layout.n_tokens, layout.chunk + config.run.batch * job.tokens.context)  # of batches that begin in it
    state = empty_statistics(config.run, job).state_bytes(tokens)
    record = 1024 + sum(len(spec.name) + 64 for spec in layout.arrays) + sum(len(site.key) + 32 for site in job.sites)
    return state + record + DISK_BLOCK * (len(layout.arrays) + 2)


def _with_tokens_of(rows: Set[int], layout: Layout, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
    last = max(rows)
    for batch in batches:
        if layout.row_of(batch.start) > last:
            return
        if _tokens_of(rows, layout, batch):
            yield batch


def _tokens_of(rows: Set[int], layout: Layout, batch: TokenBatch) -> int:
    """How many of a batch's tokens are in these rows."""
    start, stop = batch.start, batch.start + batch.n_tokens
    touched = (row for row in range(layout.row_of(start), layout.row_of(stop - 1) + 1) if row in rows)
    return sum(min(stop, layout.stop(row)) - max(start, layout.start(row)) for row in touched)


def _states(storage: Storage, rows: Iterable[Commit]) -> Iterable[dict[str, Tensor]]:
    """The statistics of rows, some of which are read ahead."""
    return storage.each(functools.partial(read_state, storage), rows)


def _check_tokens(store: HiddenStateStore, tokens: TokenStream) -> None:
    """Refuse tokens that are not those already stored: in the first row that is, and in the last.

    Not in every one, for which all text before the last would be tokenized again: with one more token or one fewer
    anywhere, the last has others; and data and tokenizers of other bytes are refused for that.
    """
    rows, ids = store.committed.keys(), store.layout.arrays[0]
    for row in sorted({min(rows), max(rows)}) if rows else ():
        start, stop = store.layout.start(row), store.layout.stop(row)
        batches = tokens.batches(stop, 1, tokens.batch_start(start, 1))
        some = [batch for batch in batches if batch.start + batch.n_tokens > start]
        now = np.concatenate([batch.ids.ravel() for batch in some])[start - some[0].start :]
        if not np.array_equal(now, store.reader(ids, row).read(stop - start)):
            raise StoreError(f"{store.storage} holds other tokens in row {row}: another tokenizer or other data")
