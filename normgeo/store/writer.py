"""A sink that writes hidden states while the model computes, and commits each row of chunks once it is safe.

The forward pass hands over copies and, on a CPU, their checksums; threads append them to chunks and finish those; one
more syncs those of a row together and writes its record. Outputs that are not stored are checksummed where they are.
What waits to be written is bounded: the forward pass waits where the storage is slower. Writing and checksums are done
outside the interpreter's lock.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from normgeo.angles.statistics import AngleStatistics
from normgeo.errors import StoreError
from normgeo.kernels.checksum import checksum, copied, joined
from normgeo.sites import NormSite
from normgeo.store.layout import (
    ArraySpec,
    Commit,
    Layout,
    state_file,
    write_commit,
)
from normgeo.store.rebuild import standardized
from normgeo.store.storage import NewChunk, Storage
from normgeo.system.memory import pages
from normgeo.tokens import TokenBatch

__all__ = ["StoreWriter"]

WAITING_BYTES = 512 << 20
WAITING_ROWS = 4  # that are computed and not committed yet: each holds its statistics, which may be many megabytes
Cut = tuple[int, int, slice]
"""Part of a batch that belongs to a row of chunks: the row, the token it ends at, its bytes."""


class _Chunks:
    """The chunks of one array, one after the other; without a storage, only their checksums."""

    def __init__(self, spec: ArraySpec, layout: Layout, storage: Storage | None, rows: Collection[int]) -> None:
        self.spec, self.layout, self.storage, self.rows = spec, layout, storage, rows
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._chunk: NewChunk | None = None
        self._crc = self._written = 0

    def cuts(self, start: int, stop: int) -> list[Cut]:
        """The rows that the tokens from `start` to `stop` belong to, as far as they are written here."""
        size, at, found = self.spec.token_bytes, start, []
        while at < stop:
            row = self.layout.row_of(at)
            end = min(stop, self.layout.stop(row))
            if row in self.rows:
                found.append((row, end, slice((at - start) * size, (end - start) * size)))
            at = end
        return found

    def add(self, cuts: list[Cut], raw: np.ndarray | None, crcs: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Append bytes, whose rows' parts have these CRC-32C; gives (row, bytes, crc32c) of each complete row."""
        for (row, end, part), crc in zip(cuts, crcs, strict=True):
            self._append(row, part.stop - part.start, crc, None if raw is None else raw[part])
            if end == self.layout.stop(row):
                yield row, *self._finish(row, end)

    def _append(self, row: int, n: int, crc: int, piece: np.ndarray | None) -> None:
        self._crc = joined(self._crc, crc, n)
        self._written += n
        if self.storage is None or piece is None:
            return
        if self._chunk is None:
            self._chunk = self.storage.chunk(f"hidden.zarr/{self.spec.chunk_file(row)}")
        self._chunk.append(piece)

    def _finish(self, row: int, end: int) -> tuple[int, int]:
        if missing := self.layout.start(row + 1) - end if self.storage is not None else 0:
            values = missing * self.spec.token_bytes // self.spec.stored.itemsize
            fill = np.full(values, self.spec.fill, self.spec.stored).view(np.uint8)
            self._append(row, len(fill), checksum(fill), fill)
        found = self._written, self._crc
        if self._chunk is not None:
            self._chunk.append(np.array([self._crc], "<u4").view(np.uint8))
            self._chunk.finish()
        self._chunk, self._crc, self._written = None, 0, 0
        return found

    def close(self) -> None:
        """Leave an unfinished chunk."""
        if self._chunk is not None:
            self._chunk.abandon()
            self._chunk = None


class _Buffers:
    """Memory for what waits to be written, used again: new memory costs a page fault every few kilobytes.

    `take` blocks while there are too many bytes of it out.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.out, self.open = limit, 0, True
        self._free, self._kept = defaultdict[tuple[int, bool], list[Tensor]](list), 0
        self._changed = threading.Condition()

    @staticmethod
    def _held(n: int, pinned: bool) -> int:
        """Bytes that so many take: of pinned memory torch takes a power of two."""
        return 1 << (n - 1).bit_length() if pinned and n else n

    def take(self, n: int, pinned: bool) -> Tensor:
        """So many bytes, which begin where a disk can write them."""
        held = self._held(n, pinned)
        with self._changed:
            self._changed.wait_for(lambda: not self.open or not self.out or self.out + held <= self.limit)
            self.out += held
            if found := self._free[n, pinned]:
                self._kept -= held
                return found.pop()
            if self.out + self._kept > self.limit:  # those of other sizes are in the way
                self._free.clear()
                self._kept = 0
        if pinned:
            return torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.from_numpy(pages(n)[:n])

    def give(self, buffer: Tensor, pinned: bool) -> None:
        """Have it back."""
        n = buffer.numel()  # a tensor's len() takes long
        held = self._held(n, pinned)
        with self._changed:
            self.out -= held
            self._kept += held
            self._free[n, pinned].append(buffer)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody wait."""
        with self._changed:
            self.open = False
            self._changed.notify_all()


def _wait_for(event: Any) -> None:
    torch.cuda.set_device(event.device)  # a thread's own is the first, which may be another process's
    event.synchronize()


class StoreWriter:
    """A sink that writes rows of a store; give it to the stream beside the statistics, `finish` after each batch.

    It is given every batch that has tokens of its rows. A row's statistics are those of the batches that begin in it,
    so that no row's bytes depend on which others are written here.

    Args:
        storage: where the store is.
        store: its identity.
        layout: its arrays.
        sites: the sites, in the order of the stream's indices.
        statistics: committed with every row, and then begun anew.
        rows: to write; None for all.
        exact: sites whose outputs, where they are not stored, are rebuilt to the last bit: checksums of them are kept
            to see that they are. None for all.
        waiting_bytes: at most so many bytes wait to be written.
    """

    def __init__(
        self, storage: Storage, store: str, layout: Layout, sites: Sequence[NormSite], statistics: AngleStatistics, *,
        rows: Collection[int] | None = None, exact: Collection[int] | None = None,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:  # fmt: skip
        self.storage, self.store, self.layout, self.sites = storage, store, layout, list(sites)
        self.statistics, self.rows = statistics, range(layout.rows) if rows is None else frozenset(rows)
        make = lambda spec, where: _Chunks(spec, layout, where, self.rows)  # noqa: E731
        self._chunks = {(spec.site, spec.phase): make(spec, storage) for spec in layout.arrays}
        self._only_checked: set[tuple[int, str]] = set()
        for site, phase in [key for key in self._chunks if key[1] == "pre"]:
            if (site, "post") not in self._chunks and (exact is None or site in exact):
                self._chunks[site, "post"] = make(self._chunks[site, phase].spec, None)
                self._only_checked.add((site, "post"))
        self._done: dict[int, dict[tuple[int, str], tuple[int, int]]] = defaultdict(dict)
        self._changed, self._failure = threading.Condition(), None
        self._buffers = _Buffers(waiting_bytes)
        self._aside: dict[torch.device, torch.cuda.Stream] = {}
        self._jobs = [queue.SimpleQueue[Any]() for _ in range(storage.threads)]
        self._jobs_of = dict(zip(self._chunks, itertools.cycle(self._jobs), strict=False))
        self._commits = queue.Queue[Any](WAITING_ROWS)
        self._threads = [threading.Thread(target=self._guarded, args=(jobs, self._write)) for jobs in self._jobs]
        self._threads += [threading.Thread(target=self._guarded, args=(self._commits, self._commit))]
        for thread in self._threads:
            thread.start()

    # --- the stream's side -------------------------------------------------------------------------------------------

    def begin(self, batch: TokenBatch) -> None:
        """Hand over the tokens."""
        self._check()
        self._start, self._n_tokens = batch.start, batch.n_tokens
        self._cuts: dict[int, list[Cut]] = {}  # by bytes a token
        for name in ("id", "document", "position"):
            self._hand((-1, name), torch.from_numpy(np.array(getattr(batch, name if name != "id" else "ids")).ravel()))

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Float[Tensor, "vectors d"]) -> None:
        """Hand over a copy of the vectors; waits where too much waits already."""
        if phase == "pre" and (site, "standardized") in self._chunks:
            self._hand((site, "standardized"), standardized(hidden, self.sites[site].kind, self.sites[site].eps))
        if (site, phase) in self._chunks:
            self._hand((site, phase), hidden)

    def end(self) -> None:
        """Nothing waits for the batch to end."""

    def finish(self, batch: TokenBatch) -> None:
        """The statistics have the batch: commit the rows that it completed, once they are written.

        Waits where commits are behind, so that memory and what a kill loses stay bounded on any disk.
        """
        first, stop = self.layout.row_of(batch.start), batch.start + batch.n_tokens
        for row in range(first, self.layout.rows):
            if self.layout.stop(row) > stop:
                break
            if row in self.rows:
                state = safetensors.torch.save(self.statistics.state_dict())  # no metadata: their order is random
                self._commits.put((row, state))
            self.statistics.clear()
        self._check()

    def _hand(self, key: tuple[int, str], values: Tensor) -> None:
        chunks = self._chunks[key]
        spec, nbytes = chunks.spec, values.nbytes
        if values.dtype is not chunks.dtype or nbytes != self._n_tokens * spec.token_bytes:
            raise StoreError(
                f"{spec.name} should be {self._n_tokens} tokens of {spec.heads} x {spec.width} {spec.dtype}, and is "
                f"{tuple(values.shape)} {values.dtype}"
            )
        self._check()
        if (cuts := self._cuts.get(spec.token_bytes)) is None:
            cuts = self._cuts[spec.token_bytes] = chunks.cuts(self._start, self._start + self._n_tokens)
        if not cuts:
            return
        if values.device.type != "cpu":
            buffer, arrived = self._fetched(values)
            self._jobs_of[key].put((key, cuts, buffer, None, arrived))
            return
        parts, values = [part for *_, part in cuts], values.contiguous()
        if key in self._only_checked:
            self._add(key, cuts, None, copied(values, None, parts))
            return
        buffer = self._buffers.take(nbytes, pinned=False)
        self._jobs_of[key].put((key, cuts, buffer, copied(values, buffer, parts), None))

    def _fetched(self, values: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
        """A copy on the CPU; from CUDA it is on its way while the model computes on, and there is what waits for it."""
        on_cuda = values.device.type == "cuda"
        buffer = self._buffers.take(values.nbytes, on_cuda)
        room = buffer.view(values.dtype).view(values.shape)
        if not on_cuda:
            room.copy_(values)
            return buffer, None
        mine = values.clone(memory_format=torch.contiguous_format)  # a model may write over its own
        if (aside := self._aside.get(values.device)) is None:
            aside = self._aside[values.device] = torch.cuda.Stream(values.device)
        aside.wait_stream(torch.cuda.current_stream(values.device))
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        with torch.cuda.stream(aside):
            room.copy_(mine, non_blocking=True)
            event.record(aside)
        mine.record_stream(aside)
        return buffer, functools.partial(_wait_for, event)

    # --- the threads -------------------------------------------------------------------------------------------------

    def _guarded(self, jobs: queue.SimpleQueue[Any] | queue.Queue[Any], do: Callable[..., None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                do(*job)
            except BaseException as error:
                self._fail(error)

    def _write(
        self, key: tuple[int, str], cuts: list[Cut], buffer: Tensor, crcs: list[int] | None,
        arrived: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        try:
            if arrived is not None:
                arrived()
            if self._failure is None:
                if crcs is None:
                    crcs = copied(buffer, None, [part for *_, part in cuts], parallel=False)
                self._add(key, cuts, buffer.numpy(), crcs)
        finally:
            self._buffers.give(buffer, arrived is not None)

    def _add(self, key: tuple[int, str], cuts: list[Cut], raw: np.ndarray | None, crcs: list[int]) -> None:
        for row, n, crc in self._chunks[key].add(cuts, raw, crcs):
            with self._changed:
                self._done[row][key] = n, crc
                self._changed.notify_all()

    def _commit(self, row: int, state: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(self._done[row]) == len(self._chunks))
            if self._failure is not None:
                return
            done = self._done.pop(row)
        stored = [key for key in sorted(done) if key not in self._only_checked]
        self.storage.sync(f"hidden.zarr/{self._chunks[key].spec.chunk_file(row)}" for key in stored)
        self.storage.put(state_file(row), state)
        named = {key: self._chunks[key].spec.name for key in done}
        commit = Commit(
            self.store, row, self.layout.start(row), self.layout.stop(row),
            {named[key]: done[key] for key in stored},
            {self.sites[site].key: done[site, p][1] for site, p in sorted(self._only_checked)},
            hashlib.sha256(state).hexdigest(),
        )  # fmt: skip
        write_commit(self.storage, commit)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self._buffers.stop()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait until all is written; after an error leave what is not."""
        if error is not None:
            self._fail(error)
        for jobs in self._jobs:
            jobs.put(None)
        self._commits.put(None)
        for thread in self._threads:
            thread.join()
        for chunks in self._chunks.values():
            chunks.close()
        if error is None:
            self._check()
