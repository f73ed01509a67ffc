"""Reading a store of hidden states, and checking every byte of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import zarr
from jaxtyping import Float, Shaped
from torch import Tensor

from normgeo.errors import NormGeoError, StoreError
from normgeo.kernels.checksum import checksum
from normgeo.objects import storage_at
from normgeo.rebuild import Rebuild, standardized
from normgeo.sites import NormSite
from normgeo.storage import Storage
from normgeo.store_layout import (
    TRAILER,
    ArraySpec,
    Commit,
    Layout,
    as_torch,
    committed_rows,
    identity,
    read_commit,
    read_json,
    read_log,
    state_file,
)
from normgeo.tokens import TokenStream

__all__ = ["ChunkReader", "HiddenStateStore", "HiddenStates", "verify"]


class ChunkReader:
    """Reads one array from the beginning of a row on; every chunk is read whole, and checked before any of it is given.

    Args:
        store: the store.
        spec: the array.
        row: where to begin.
        pool: reads what is expected before it is asked for; without one, reading happens when it is asked for.
    """

    def __init__(self, store: HiddenStateStore, spec: ArraySpec, row: int = 0, pool: Executor | None = None) -> None:
        self.store, self.spec, self._pool = store, spec, pool
        self._row, self._given, self._expected = row, row * store.layout.chunk, row * store.layout.chunk
        self._coming: deque[Callable[[], np.ndarray]] = deque()
        self._rest = np.empty(0, np.uint8)

    def expect(self, n: int) -> None:
        """Begin to read the chunks that hold the `n` tokens after those that are expected already."""
        self._expected += n
        while self._row * self.store.layout.chunk < self._expected:
            fetch = functools.partial(self._chunk, self._row)
            self._coming.append(self._pool.submit(fetch).result if self._pool else fetch)
            self._row += 1

    def read(self, n: int) -> Shaped[np.ndarray, ...]:
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
        layout, storage, name = self.store.layout, self.store.storage, f"hidden.zarr/{self.spec.chunk_file(row)}"
        n, crc = self.store.commit_log[row].chunks[self.spec.name]
        try:
            found = storage.read_range(name, 0, n + TRAILER + 1)  # a byte more than there should be
        except OSError as error:
            raise StoreError(f"{storage.at(name)} cannot be read: {error}") from error
        if len(found) != n + TRAILER or checksum(found[:n]) != crc:
            raise StoreError(
                f"{storage.at(name)} is damaged: it is not what was committed; normgeo verify names all that is"
            )
        return found[: (layout.stop(row) - row * layout.chunk) * self.spec.token_bytes]


class HiddenStates:
    """One phase of one site: `[vectors, d]` numbers, of which the committed ones are there.

    As a zarr array (`array`), a dask array (`dask`), one tensor (`torch`) or many (`batches`).

    Attributes:
        array: the zarr array, of the stored numbers, with the vectors that are not committed yet.
        dtype: of the hidden states; bfloat16 is stored as uint16.
        shape: committed vectors and their width.
    """

    def __init__(self, store: HiddenStateStore, spec: ArraySpec) -> None:
        self._store, self.spec = store, spec
        self.array = cast(zarr.Array, store.root[spec.name])
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.shape = (store.n_tokens * spec.heads, spec.width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Stored numbers of a slice of the committed vectors."""
        start, stop, step = rows.indices(len(self))
        try:
            return np.asarray(self.array[start:stop])[::step]
        except ValueError as error:
            raise StoreError(f"{self.spec.name} is damaged: {error}; normgeo verify names the chunk") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def torch(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "vectors d"]:
        """A range of the committed vectors in their own dtype."""
        return as_torch(np.ascontiguousarray(self[start:stop]), self.spec.dtype)

    def dask(self) -> Any:
        """The committed vectors as a dask array, a block a chunk; bfloat16, which numpy has not, as float32.

        Raises:
            NormGeoError: dask is not installed.
        """
        try:
            import dask.array
        except ImportError as error:
            raise NormGeoError("dask arrays need dask: pip install 'normgeo[dask]'") from error
        stored = dask.array.from_zarr(self.array)[: len(self)]  # pyright: ignore
        return stored.map_blocks(_widened, dtype=np.float32) if self.spec.dtype == "bfloat16" else stored

    def batches(self, n_tokens: int) -> Iterator[Float[Tensor, "vectors d"]]:
        """All committed vectors in order, of so many tokens at once; checked against the commit log."""
        reader = ChunkReader(self._store, self.spec)
        for start in range(0, self._store.n_tokens, n_tokens):
            yield as_torch(reader.read(min(n_tokens, self._store.n_tokens - start)), self.spec.dtype)


def _widened(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


class HiddenStateStore:
    """A store that `normgeo capture` wrote, complete or not; only what is committed is read.

    Args:
        path: its directory, or its URL (s3://bucket/prefix, gs://bucket/prefix).

    Attributes:
        provenance: what was captured from what.
        layout: the arrays.
        sites: the sites, in the order of the forward pass.
        committed: the complete rows of chunks, by number; a capture by several processes leaves gaps until it ends.
        commit_log: those from the first on, up to the first gap.
        n_tokens: tokens in the log.

    Raises:
        StoreError: there is no store, it cannot be reached, or its commit log is damaged.

    >>> store = HiddenStateStore(path)                                              # doctest: +SKIP
    >>> store.open("transformer.h.0.ln_1", "pre").torch(0, 1000).norm(dim=1)        # doctest: +SKIP
    """

    def __init__(self, path: str | Path | Storage) -> None:
        self.storage = storage_at(path)
        self.record = _record(self.storage)
        self.provenance: dict[str, Any] = self.record["provenance"]
        self.layout = Layout.from_json(self.record["layout"])
        self.store_id = identity({"provenance": self.provenance["identity"], "layout": self.record["layout"]})
        self.committed: dict[int, Commit] = read_log(self.storage, self.store_id)
        rows = itertools.takewhile(lambda row: row in self.committed, itertools.count())
        self.commit_log: list[Commit] = [self.committed[row] for row in rows]
        self.n_tokens = self.commit_log[-1].stop if self.commit_log else 0
        self.sites = [NormSite(**site) for site in self.provenance["identity"]["about"]["sites"]]

    @property
    def complete(self) -> bool:
        """Whether all tokens are there."""
        return self.n_tokens == self.layout.n_tokens

    @functools.cached_property
    def root(self) -> zarr.Group:
        """The zarr group."""
        try:
            return zarr.open_group(self.storage.zarr("hidden.zarr"), mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{self.storage.at('hidden.zarr')} cannot be opened: {error}") from error

    def spec(self, site: str, phase: str) -> ArraySpec:
        """The array of a site's phase.

        Raises:
            StoreError: it is not in the store.
        """
        name = f"sites/{site}/{phase}"
        for spec in self.layout.arrays:
            if spec.name == name:
                return spec
        phases = sorted({s.phase for s in self.layout.arrays if s.site >= 0})
        keys = [s.key for s in self.sites]
        raise StoreError(f"{name} is not stored; sites are {', '.join(keys)}, phases {', '.join(phases)}")

    def open(self, site: str, phase: str = "pre") -> HiddenStates:
        """The hidden states of a site before (`pre`) or after its norm, as far as they are stored."""
        return HiddenStates(self, self.spec(site, phase))

    def tokens(self, name: str) -> np.ndarray:
        """Id, document or position of every committed token."""
        return np.asarray(cast(zarr.Array, self.root[f"tokens/{name}"])[: self.n_tokens])

    def rebuild(self, site: NormSite) -> Rebuild:
        """How a site's output follows from its input."""
        group = self.root[f"sites/{site.key}"]
        about: Any = group.attrs
        stored = lambda n: as_torch(np.asarray(group[n][:]), str(group[n].attrs["dtype"]))  # pyright: ignore  # noqa: E731
        gain, bias = (stored(name) if name in group else None for name in ("gain", "bias"))  # pyright: ignore
        return Rebuild(about["recipe"], about["offset"], gain, bias, about["bit_equal"], about["error"])

    def derived(self, site: NormSite, phase: str, pre: Float[Tensor, "vectors d"]) -> Float[Tensor, "vectors d"]:
        """The standardized or the post-norm vectors of inputs of a site."""
        return standardized(pre, site.kind, site.eps) if phase == "standardized" else self.rebuild(site)(pre, site.eps)

    def stream(self) -> TokenStream:
        """The committed tokens, in the contexts that the model saw."""
        about = self.provenance["identity"]["about"]
        return TokenStream(
            self._contexts, about["context"], str(self.storage), about["data_sha256"], about["packing"], self.n_tokens
        )

    def _contexts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        readers = [ChunkReader(self, spec) for spec in self.layout.arrays[:3]]
        ids, owner, position = (np.empty(0, np.int64) for _ in readers)
        for commit in self.commit_log:
            n = commit.stop - commit.start
            ids, owner, position = (
                np.concatenate([old, reader.read(n)])
                for old, reader in zip((ids, owner, position), readers, strict=True)
            )
            starts = [*np.flatnonzero(position == 0).tolist()]
            for start, stop in itertools.pairwise(starts):
                yield ids[start:stop], owner[start:stop]
            rest = starts[-1] if starts else 0
            ids, owner, position = ids[rest:], owner[rest:], position[rest:]
        if len(ids):
            yield ids, owner


def _record(storage: Storage) -> dict[str, Any]:
    if storage.size("store.json") is None:
        raise StoreError(f"{storage} is no store of hidden states: it has no store.json")
    return read_json(storage, "store.json")


def verify(path: str | Path | Storage) -> tuple[int, list[str]]:
    """Read every byte of a store: (chunks checked, what is wrong, each with the file it is in).

    Raises:
        StoreError: there is no store at all, or it cannot be reached.
    """
    storage = storage_at(path)
    record = _record(storage)
    layout = Layout.from_json(record["layout"])
    store = identity({"provenance": record["provenance"]["identity"], "layout": record["layout"]})
    problems, checked = _metadata_problems(storage), 0
    for row in range(layout.rows) if record["status"] == "complete" else committed_rows(storage):
        try:
            commit = read_commit(storage, row, store)
        except (StoreError, KeyError, TypeError) as error:
            problems.append(str(error))
            continue
        sums = {f"hidden.zarr/{spec.chunk_file(row)}": commit.chunks[spec.name] for spec in layout.arrays}
        checked += len(sums)
        for found in storage.each(lambda item: _chunk_problems(storage, item[0], *item[1]), sums.items()):
            problems += found
        problems += _file_problems(storage, state_file(row), commit.state)
    return checked, problems


def _metadata_problems(storage: Storage) -> list[str]:
    try:
        sums = read_json(storage, "manifest.json")
    except StoreError as error:
        return [str(error)]
    found = storage.each(lambda item: _file_problems(storage, f"hidden.zarr/{item[0]}", item[1]), sums.items())
    return list(itertools.chain.from_iterable(found))


def _file_problems(storage: Storage, name: str, sha256: str) -> list[str]:
    try:
        found = hashlib.sha256(storage.read(name)).hexdigest()
    except FileNotFoundError:
        return [f"{storage.at(name)} is missing"]
    return [] if found == sha256 else [f"{storage.at(name)} is damaged: its checksum is wrong"]


def _chunk_problems(storage: Storage, name: str, n: int, crc: int) -> list[str]:
    try:
        content = storage.read_range(name, 0, n + TRAILER + 1)
    except FileNotFoundError:
        return [f"{storage.at(name)} is missing"]
    if len(content) != n + TRAILER:
        size = storage.size(name)
        return [f"{storage.at(name)} has {size} bytes instead of {n + TRAILER}"]
    body, trailer = content[:-TRAILER], int(content[-TRAILER:].view("<u4")[0])
    if checksum(body) != crc or trailer != crc:
        return [f"{storage.at(name)} is damaged: its checksum is wrong"]
    return []
