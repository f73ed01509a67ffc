"""Reading one array of a store of hidden states: chunks that are whole, and are still what was committed."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from jaxtyping import Shaped

from normgeo.errors import StoreError
from normgeo.kernels.checksum import checksum
from normgeo.store.layout import TRAILER, ArraySpec, Commit, Layout
from normgeo.store.storage import Disk, Storage

__all__ = ["ChunkReader", "reading"]


@contextmanager
def reading(storage: Storage) -> Iterator[Executor | None]:
    """Threads that read chunks ahead, where they are waited for: none on a disk.

    Of the chunks that are still to be read when it ends, as by an error, none is.
    """
    if isinstance(storage, Disk):
        yield None
        return
    pool = ThreadPoolExecutor(storage.threads, "read")
    try:
        yield pool
    finally:
        if not sys.is_finalizing():  # an iterator that a script has left behind
            pool.shutdown(cancel_futures=True)


class ChunkReader:
    """Reads one array from the beginning of a row on; every chunk is read whole, and checked before any of it is given.

    Args:
        storage: where the store lies.
        layout: what it consists of.
        committed: its complete rows of chunks, by number.
        spec: the array.
        row: where to begin.
        pool: reads what is expected before it is asked for; without one, reading happens when it is asked for.
    """

    def __init__(
        self, storage: Storage, layout: Layout, committed: Mapping[int, Commit], spec: ArraySpec, row: int = 0,
        pool: Executor | None = None,
    ) -> None:  # fmt: skip
        self.storage, self.layout, self.committed, self.spec, self._pool = storage, layout, committed, spec, pool
        self._row, self._given, self._expected = row, layout.start(row), layout.start(row)
        self._coming: deque[Callable[[], np.ndarray]] = deque()
        self._rest = np.empty(0, np.uint8)

    def expect(self, n: int) -> None:
        """Begin to read the chunks that hold the `n` tokens after those that are expected already."""
        self._expected += n
        while self._row * self.layout.chunk < self._expected:
            fetch = functools.partial(self._chunk, self._row)
            self._coming.append(self._pool.submit(fetch).result if self._pool else fetch)
            self._row += 1

    def read(self, n: int) -> Shaped[np.ndarray, "rows ..."]:
        """The next `n` tokens as they are stored: [vectors, d], or [tokens].

        Raises:
            StoreError: a chunk is missing, truncated, or not what was committed.
        """
        self._given += n
        self.expect(max(0, self._given - self._expected))
        left, pieces = n * self.spec.token_bytes, list[np.ndarray]()
        while left:
            if not len(self._rest):
                self._rest = self._coming.popleft()()
            pieces.append(self._rest[:left])
            left, self._rest = left - len(pieces[-1]), self._rest[left:]
        out = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])
        values = out.view(self.spec.stored)
        return values.reshape(-1, self.spec.width) if self.spec.width else values

    def _chunk(self, row: int) -> np.ndarray:
        """The bytes of a chunk's committed tokens."""
        layout, storage, name = self.layout, self.storage, f"hidden.zarr/{self.spec.chunk_file(row)}"
        n, crc = self.committed[row].chunks[self.spec.name]
        try:
            found = storage.read_range(name, 0, n + TRAILER + 1)  # a byte more than there should be
        except OSError as error:
            raise StoreError(f"{storage.at(name)} cannot be read: {error}") from error
        if len(found) != n + TRAILER or checksum(found[:n]) != crc:
            raise StoreError(
                f"{storage.at(name)} is damaged: it is not what was committed; normgeo verify names all that is"
            )
        return found[: (layout.stop(row) - layout.start(row)) * self.spec.token_bytes]
