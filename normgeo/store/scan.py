"""The angles from a store, without the model: rows of chunks side by side, on threads or on a cluster of dask's.

A task reads a few rows of the chunks of a few sites and gives their statistics, which are merged in the order of the
tasks. Sums of whole numbers are exact, so that neither the cut into tasks nor who does them shows in the result. There
are never more tasks under way than twice the workers: memory does not depend on the number of tokens, but for the
commit log's sizes and checksums, some 200 bytes a chunk.
"""

from __future__ import annotations

import functools
import itertools
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normgeo.angles.cost import check_space
from normgeo.angles.measure import AngleTable, directions_of
from normgeo.angles.runs import RunConfig, new_record, now, run_name, safe_name, write_results
from normgeo.angles.scalars import Rows, ScalarWriter, bytes_needed, scalar_rows, together
from normgeo.angles.statistics import BINS, AngleStatistics
from normgeo.errors import NormGeoError, StoreError
from normgeo.kernels.checksum import checksum, joined
from normgeo.models import on_cpu
from normgeo.numbers import check_numbers
from normgeo.sites import NormSite, select_sites
from normgeo.store.layout import as_numpy, as_torch
from normgeo.store.reader import HiddenStateStore, seen
from normgeo.store.rebuild import Rebuild
from normgeo.store.workers import cluster, in_order, threads
from normgeo.system.files import check_folder, write_json
from normgeo.system.folders import alone, claimed, whole_directory
from normgeo.system.memory import memory_kept
from normgeo.system.progress import progress_bar
from normgeo.system.versions import code_digest
from normgeo.tokens import TokenBatch

__all__ = ["angles_from_store", "run_from_store"]

BATCHES_A_TASK = 8  # about; a batch across two tasks is read by both
TASKS_A_WORKER = 2  # at least, where the store has as much to share out; of few sites a batch takes longer
AT_ONCE, IN_ALL = 1 << 27, 1 << 32  # bytes that a task, and all workers, hold together; of a site if they are more
COUNTS = 9 * 8 * BINS  # bytes that a site's angles are counted in


@dataclass(frozen=True)
class _Scan:
    """What all tasks have in common.

    `name` is new for every scan, `seen` what the first `rows` of the store are, `keep` whether scalars are wanted.
    """

    name: str
    path: str
    seen: str
    rows: int
    sites: str | None
    null: int
    null_every: int
    seed: int
    keep: bool = False


@dataclass(frozen=True)
class _Task:
    """Rows from `first` up to `stop`, and the batches that begin in them, of some of the sites.

    With the last sites of its rows, `n_tokens` are done.
    """

    first: int
    stop: int
    batches: list[TokenBatch]
    sites: range
    n_tokens: int


@dataclass(frozen=True)
class _Found:
    """Statistics of a task's sites, those whose rebuilt outputs are not the model's to the last bit, and scalars.

    `code` is by what a worker of a cluster found that.
    """

    state: dict[str, Tensor]
    differing: set[str]
    scalars: Rows
    code: str = ""


@on_cpu
def angles_from_store(
    path: str | Path | HiddenStateStore, *,
    null: int | None = None, null_every: int | None = None, seed: int | None = None,
    sites: str | None = None, batch: int | None = None, scheduler: str | None = None,
    scalars: str | Path | None = None, announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable:  # fmt: skip
    """The table that `normgeo angles` gives for the model, from its store alone; in constant memory.

    Args:
        path: the store; of an incomplete one, the tokens that are committed when it is opened.
        null: number of random directions in the null ensemble; as many as `capture` had, unless said.
        null_every: the null ensemble meets one token in so many; as in `capture`, unless said.
        seed: of the random directions; as in `capture`, unless said.
        sites: only these norms: roles or patterns of names, comma-separated.
        batch: contexts at once; the statistics are equal to the last bit with as many as went through the model.
        scheduler: address of a dask.distributed scheduler, whose workers see the store under the same path; without
            one, as many threads as torch has.
        scalars: a new directory for the scalars of every token, which `ScalarStore` reads; whole or not at all.
        announce: told where rebuilt outputs are not those of the model to the last bit.
        progress: show a progress bar.

    Raises:
        StoreError: the store is damaged, holds nothing, or was captured without its inputs.
        RunError: the scalars' directory is there already, or cannot be written.
        DataError: a number is too small, or `sites` matches none.
        NormGeoError: the scheduler cannot be reached, has no workers, loses them, or they run other code.

    >>> print(angles_from_store("store", null=1024).verdict())                                      # doctest: +SKIP
    """
    check_numbers(null=null, null_every=null_every, seed=seed, batch=batch)
    store = path if isinstance(path, HiddenStateStore) else HiddenStateStore(path)
    if not store.n_tokens:
        raise StoreError(store.incomplete)
    identity = store.provenance["identity"]
    asked = {"null": null, "null_every": null_every, "seed": seed}
    drawn = {name: identity[name] if value is None else value for name, value in asked.items()}
    known = uuid.uuid4().hex, store.storage.absolute, seen(store), len(store.commit_log)
    reader = _Reader(_Scan(*known, sites, **drawn, keep=scalars is not None), store)
    at_once: int = batch or identity["batch"]
    if store.incomplete:
        announce(store.incomplete)
    with memory_kept(), ExitStack() as files:
        folder = None if scalars is None else files.enter_context(whole_directory(Path(scalars)))
        writer = None if folder is None else _writer(reader, folder, at_once)
        statistics, differing = _scanned(reader, at_once, scheduler, progress, writer)
    if differing:
        announce(
            f"rebuilt outputs at {len(differing)} of {len(statistics.sites)} sites are the model's to rounding, not to "
            f"the last bit (first {differing[0]}); capture with --phases pre,post for those"
        )
    return AngleTable.from_statistics(statistics, identity["label"])


def _writer(reader: _Reader, path: Path, batch: int) -> ScalarWriter:
    """A new store of scalars, cut into the chunks of a run that has the model."""
    n_tokens, config = reader.store.n_tokens, RunConfig(batch=batch)
    block = config.block(n_tokens, (tokens := reader.store.stream()).context, tokens.period(batch))
    check_space(path, bytes_needed(reader.sites, n_tokens, block))
    writer = ScalarWriter(path, reader.sites, n_tokens, block)
    writer.create(reader.directions)
    return writer


def run_from_store(
    path: str | Path, out: Path | None, *, keep: str | None = None, **options: Any
) -> tuple[AngleTable, Path]:
    """`angles_from_store`, written to a directory as a run is, with what was captured how in its `run.json`.

    Args:
        path: the store.
        out: the directory; None makes one.
        keep: scalars or none; None keeps the scalars of up to 2M tokens, as a run with the model does.
        **options: of `angles_from_store`.

    Raises:
        StoreError: as for `angles_from_store`.
        RunError: the directory is not empty, or another process writes it.
    """
    store = HiddenStateStore(path)
    with claimed(out, run_name((store.provenance["identity"]["label"],))) as where:
        check_folder(where)
        with alone(where), whole_directory(where) as folder:
            config = _config(store, path, keep=keep, **options)
            record, label = _record(store, path, config), safe_name(store.provenance["identity"]["label"])
            scalars = folder / "scalars.zarr" / label if config.keeps_scalars(store.n_tokens) else None
            table = angles_from_store(store, scalars=scalars, **options)  # which may grow meanwhile
            write_results(table, folder, record["models"].values())
            write_json(folder / "run.json", record | {"status": "complete", "finished": now()})
    return table, where


def _config(
    store: HiddenStateStore, path: str | Path, *, keep: str | None, sites: str | None = None, **options: Any
) -> RunConfig:
    """What was captured, with the options of the scan."""
    asked = {name: options.get(name) for name in ("null", "null_every", "seed", "batch")}
    run = RunConfig.recorded(store.record["capture"]["run"], f"the record of {path}")
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(run, sites=sites, keep=keep, **given)


def _record(store: HiddenStateStore, path: str | Path, config: RunConfig) -> dict[str, Any]:
    """`run.json`: what is computed by which command with which options, from what was captured how."""
    about = store.provenance["identity"]["about"]
    sites = [asdict(site) for site in select_sites(store.sites, config.sites)]
    return new_record(config) | {
        "store": str(path), "models": {about["model"]: about | {"n_tokens": store.n_tokens, "sites": sites}},
        "capture": store.provenance,
    }  # fmt: skip


# --- tasks -----------------------------------------------------------------------------------------------------------


def _tasks(reader: _Reader, batch: int, workers: int) -> Iterator[_Task]:
    """Cut rows and sites into tasks: long enough that little is read twice, short enough that all workers have some."""
    store, sites = reader.store, len(reader.sites)
    chunk, rows, wanted = store.layout.chunk, len(store.commit_log), TASKS_A_WORKER * workers
    tokens = batch * store.provenance["identity"]["about"]["context"]
    at_least = max(1, min(BATCHES_A_TASK * tokens // chunk, rows // wanted))
    whole = reader.token_bytes * max(chunk, tokens) + COUNTS * sites  # of all sites
    parts = min(sites, max(-(-wanted * at_least // rows), -(-whole // min(AT_ONCE, IN_ALL // workers))))
    cuts = [sites * part // parts for part in range(parts + 1)]
    for first, stop, batches in _rows(store, batch, at_least):
        n_tokens = sum(batch.n_tokens for batch in batches)
        for begin, end in itertools.pairwise(cuts):
            yield _Task(first, stop, batches, range(begin, end), n_tokens if end == sites else 0)


def _rows(store: HiddenStateStore, batch: int, at_least: int) -> Iterator[tuple[int, int, list[TokenBatch]]]:
    """Rows, at least so many, and the batches that begin in them."""
    first, begun = 0, list[TokenBatch]()
    for piece in store.stream().batches(store.n_tokens, batch):
        row = store.layout.row_of(piece.start)
        if row - first >= at_least:
            yield first, row, begun
            first, begun = row, []
        begun.append(piece)
    yield first, len(store.commit_log), begun


def _scanned(
    reader: _Reader, batch: int, scheduler: str | None, progress: bool, writer: ScalarWriter | None
) -> tuple[AngleStatistics, list[str]]:
    """The statistics of all committed tokens, and the sites whose rebuilt outputs are not the model's."""
    statistics, differing, store = reader.statistics(reader.sites), set[str](), reader.store
    run = reader.run if scheduler is None else functools.partial(_run, reader.scan)
    with (
        threads() if scheduler is None else cluster(scheduler) as (submit, workers),
        progress_bar(store.provenance["identity"]["label"], store.n_tokens, enabled=progress) as advance,
    ):
        tasks = _tasks(reader, batch, workers)
        for task, found in in_order(tasks, functools.partial(submit, run), 2 * workers):
            if scheduler is not None and found.code != code_digest():
                raise NormGeoError(f"workers of {scheduler} run another version of normgeo; install this one there")
            statistics.add_state_dict(found.state, task.sites)
            differing |= found.differing
            if writer is not None:
                writer.put(task.batches if task.n_tokens else [], found.scalars, task.sites.start)
                if task.n_tokens and writer.is_full:
                    writer.flush()
            advance(task.n_tokens)
    if writer is not None:
        writer.flush()
    return statistics, [site.key for site in statistics.sites if site.key in differing]


def _run(scan: _Scan, task: _Task) -> _Found:
    return replace(_reader(scan).run(task), code=code_digest())


@functools.lru_cache(maxsize=1)
def _reader(scan: _Scan) -> _Reader:
    """Opened once in a worker of a cluster; it may see another file system.

    Raises:
        StoreError: the store is not there, or another one is.
    """
    try:
        store = HiddenStateStore(scan.path)
    except StoreError as error:
        raise StoreError(f"{socket.gethostname()}, a worker, cannot read the store: {error}") from error
    if seen(store, scan.rows) != scan.seen:
        raise StoreError(f"{socket.gethostname()} has another capture at {scan.path} than was asked for")
    return _Reader(scan, store)


class _Reader:
    """What a process needs for its tasks."""

    def __init__(self, scan: _Scan, store: HiddenStateStore) -> None:
        self.scan, self.store, self.sites = scan, store, select_sites(store.sites, scan.sites)
        self.directions = directions_of(self.sites, scan.null, scan.seed)
        stored = {spec.name for spec in store.layout.arrays}
        if absent := [site.key for site in self.sites if f"sites/{site.key}/pre" not in stored]:
            raise StoreError(
                f"{store.storage} was captured without the inputs of {absent[0]}, from which its angles are computed; "
                "capture with --phases pre, or pre,post"
            )
        self._missing = {site.key for site in self.sites if f"sites/{site.key}/post" not in stored}
        self._rebuild = functools.cache(store.rebuild)
        self._pool = ThreadPoolExecutor(torch.get_num_threads() * store.storage.threads, "read")
        self._free = defaultdict[range, list[AngleStatistics]](list)

    @property
    def token_bytes(self) -> int:
        """Bytes that are read for a token of all sites."""
        phases = [(site, phase) for site in self.sites for phase in ("pre", "post")]
        stored = [(site, phase) for site, phase in phases if phase == "pre" or site.key not in self._missing]
        return sum(self.store.spec(site.key, phase).token_bytes for site, phase in stored)

    def statistics(self, sites: Sequence[NormSite]) -> AngleStatistics:
        """Empty ones."""
        bos = self.store.provenance["identity"]["about"]["bos"]
        return AngleStatistics(sites, self.directions, bos=bos, null_every=self.scan.null_every)

    def _replay(self, site: NormSite, row: int) -> _Replay:
        rebuild = self._rebuild(site) if site.key in self._missing else None
        return _Replay(self.store, site, rebuild, row, self._pool)

    def run(self, task: _Task) -> _Found:
        """Read the task's rows to their ends, and on to the end of its last batch."""
        sites, free = self.sites[task.sites.start : task.sites.stop], self._free[task.sites]
        try:
            statistics = free.pop()  # of a task that is done
        except IndexError:
            statistics = self.statistics(sites)
        begun = task.batches[0].start - task.first * self.store.layout.chunk
        with memory_kept(), torch.inference_mode():
            replays = [self._replay(site, task.first) for site in sites]
            for replay in replays:
                replay.expect(begun + task.batches[0].n_tokens)
            for replay in replays if begun else []:
                replay.next(begun)  # of a batch that the task before has; here for the checksums of what is rebuilt
            kept = list[Rows]()
            for batch, after in itertools.zip_longest(task.batches, task.batches[1:]):
                statistics.begin(batch)
                for i, replay in enumerate(replays):
                    pre, post = replay.next(batch.n_tokens)
                    if after is not None:
                        replay.expect(after.n_tokens)
                    statistics.take(i, "pre", pre)
                    statistics.take(i, "post", post)
                statistics.end()
                if self.scan.keep:
                    kept.append(scalar_rows(statistics))
        last = task.batches[-1]
        assert last.start + last.n_tokens >= self.store.layout.stop(task.stop - 1)  # every chunk was read to its end
        differing = {replay.site.key for replay in replays if replay.differs}
        found = _Found(statistics.state_dict(), differing, together(kept) if kept else {})
        statistics.clear()
        free.append(statistics)
        return found


class _Replay:
    """What went into and came out of one norm, from the beginning of a row on."""

    def __init__(
        self, store: HiddenStateStore, site: NormSite, rebuild: Rebuild | None, row: int, pool: Executor
    ) -> None:
        self.store, self.site = store, site
        self.differs = rebuild is not None and not rebuild.bit_equal
        self._pre = store.reader(store.spec(site.key, "pre"), row, pool)
        self._post = store.reader(store.spec(site.key, "post"), row, pool) if rebuild is None else None
        self._rebuild, self._at, self._crc = rebuild, store.layout.start(row), 0

    def expect(self, n: int) -> None:
        """Have the next `n` tokens come while others are computed with."""
        self._pre.expect(n)
        if self._post is not None:
            self._post.expect(n)

    def next(self, n: int) -> tuple[Tensor, Tensor]:
        """The vectors of the next `n` tokens, before and after the norm."""
        spec = self._pre.spec
        pre = as_torch(self._pre.read(n), spec.dtype)
        if self._post is not None:
            return pre, as_torch(self._post.read(n), spec.dtype)
        assert self._rebuild is not None
        post = self._rebuild(pre, self.site.eps)
        if not self.differs:
            self._compare(as_numpy(post).reshape(-1).view(np.uint8), n, spec.token_bytes)
        return pre, post

    def _compare(self, raw: np.ndarray, n: int, size: int) -> None:
        """Compare the checksum of what is rebuilt with that of what the model gave, row by row."""
        while n:
            commit = self.store.commit_log[self.store.layout.row_of(self._at)]
            taken = min(n, commit.stop - self._at)
            self._crc = joined(self._crc, checksum(raw[: taken * size]), taken * size)
            raw, n, self._at = raw[taken * size :], n - taken, self._at + taken
            if self._at == commit.stop:
                self.differs |= self._crc != commit.post.get(self.site.key)
                self._crc = 0
