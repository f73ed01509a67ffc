"""Reading a store of hidden states: only what is committed, and is still what was committed."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import zarr
from jaxtyping import Float
from torch import Tensor

from normgeo.errors import NormGeoError, StoreError
from normgeo.numbers import check_numbers
from normgeo.packing import Context
from normgeo.sites import NormSite
from normgeo.store.chunks import ChunkReader, reading
from normgeo.store.layout import (
    TOKENS,
    ArraySpec,
    Commit,
    array_in,
    as_numbers,
    as_torch,
    read_log,
    read_store,
)
from normgeo.store.objects import storage_at
from normgeo.store.rebuild import Rebuild, standardized
from normgeo.store.records import identity, read_file, read_record, understood
from normgeo.store.storage import Storage
from normgeo.system.records import read_as
from normgeo.tokens import TokenStream

__all__ = ["HiddenStateStore", "HiddenStates", "seen"]


class HiddenStates:
    """One phase of one site: `[vectors, d]` numbers, of which the committed ones are there.

    As numpy arrays (by index or slice) or a dask array (`dask`), with bfloat16, which numpy has not, as float32; as one
    tensor (`torch`) or many (`batches`) in their own dtype: all compared with the commit log while they are read.
    `array` is what zarr reads, without that comparison: of bfloat16 the bits, as uint16.

    Attributes:
        dtype: of the hidden states.
        shape: committed vectors and their width.
    """

    def __init__(self, store: HiddenStateStore, spec: ArraySpec) -> None:
        self._store, self.spec = store, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.shape = (store.n_tokens * spec.heads, spec.width)

    @property
    def array(self) -> zarr.Array:
        """The zarr array of the stored numbers: also of vectors that are not committed, and fill for missing chunks.

        Raises:
            StoreError: its metadata is missing or damaged.
        """
        return self._store.array(self.spec.name)

    def __repr__(self) -> str:
        return f"HiddenStates({self.spec.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: int | slice) -> np.ndarray:
        """The numbers of one committed vector, or of a slice of them.

        Raises:
            StoreError: a chunk is missing, truncated, or not what was committed.
        """
        if not isinstance(which, slice):
            at = range(len(self))[which]
            return as_numbers(self._between(at, at + 1)[0], self.spec.dtype)
        wanted = range(len(self))[which]
        first, last = (min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1) if wanted else (0, 0)
        return as_numbers(self._between(first, last), self.spec.dtype)[:: wanted.step]

    def __iter__(self) -> Iterator[np.ndarray]:
        for found in self._stored(self._store.layout.chunk):
            yield from as_numbers(found, self.spec.dtype)

    def chunk(self, row: int) -> np.ndarray:
        """The numbers of the committed vectors of a row of chunks."""
        layout = self._store.layout
        start, stop = layout.start(row), layout.stop(row)
        return as_numbers(self._between(start * self.spec.heads, stop * self.spec.heads), self.spec.dtype)

    def _between(self, start: int, stop: int) -> np.ndarray:
        """What is stored of vectors from `start` up to `stop`: their chunks are read whole."""
        heads, chunk = self.spec.heads, self._store.layout.chunk
        row = start // heads // chunk
        before = row * chunk * heads
        with reading(self._store.storage) as pool:
            found = self._store.reader(self.spec, row, pool).read(max(0, -(-stop // heads) - row * chunk))
        return found[start - before : stop - before]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("what is stored is read, which makes a copy: leave out copy=False")
        return np.asarray(self[:], dtype)

    def torch(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "vectors d"]:
        """A range of the committed vectors in their own dtype."""
        wanted = range(len(self))[start:stop] or range(0)
        return as_torch(np.ascontiguousarray(self._between(wanted.start, wanted.stop)), self.spec.dtype)

    def dask(self) -> Any:
        """The committed vectors as a dask array, a block a chunk; bfloat16, which numpy has not, as float32.

        Raises:
            NormGeoError: dask is not installed.
        """
        try:
            import dask.array
        except ImportError as error:
            raise NormGeoError("dask arrays need dask: pip install 'normgeo[dask]'") from error
        store, spec = self._store, self.spec
        block = functools.partial(_block, store.storage.absolute, seen(store), len(store.commit_log), spec)
        rows = tuple((commit.stop - commit.start) * spec.heads for commit in store.commit_log)
        dtype = np.dtype(np.float32) if spec.dtype == "bfloat16" else spec.stored
        if not rows:
            return dask.array.zeros(self.shape, dtype=dtype)  # pyright: ignore
        meta, name = np.empty((0, 0), dtype), f"{spec.name}-{uuid.uuid4().hex}"
        return dask.array.map_blocks(  # pyright: ignore
            lambda block_id: block(block_id[0]), chunks=(rows, (spec.width,)), dtype=dtype, meta=meta, name=name
        )

    def batches(self, n_tokens: int) -> Iterator[Float[Tensor, "vectors d"]]:
        """All committed vectors in order, of so many tokens at once; raises as an index, and DataError below 1."""
        check_numbers(batch=n_tokens)
        return self._batches(n_tokens)

    def _batches(self, n_tokens: int) -> Iterator[Tensor]:
        for found in self._stored(n_tokens):
            yield as_torch(found, self.spec.dtype)

    def _stored(self, n_tokens: int) -> Iterator[np.ndarray]:
        """What is stored of all committed vectors, of so many tokens at once; chunks are read side by side, ahead."""
        threads, end = self._store.storage.threads, self._store.n_tokens
        ahead = min(end, max(n_tokens, threads * self._store.layout.chunk))
        with reading(self._store.storage) as pool:
            reader = self._store.reader(self.spec, pool=pool)
            reader.expect(ahead)
            for start in range(0, end, n_tokens):
                found = reader.read(min(n_tokens, end - start))
                reader.expect(min(n_tokens, max(0, end - ahead - start)))
                yield found


def seen(store: HiddenStateStore, rows: int | None = None) -> str:
    """Identity of a store's first rows: of what was captured from what, and of the statistics of the numbers."""
    return identity([store.store_id, [commit.state for commit in store.commit_log[:rows]]])


@functools.lru_cache(4)
def _opened(path: str, before: str, rows: int) -> HiddenStateStore:
    """A store, opened once in a process that computes with its blocks; its first rows are the same as `before`."""
    store = HiddenStateStore(path)
    if seen(store, rows) != before:
        raise StoreError(f"{path} holds another capture than when this dask array was made; make it again")
    return store


def _no_site(site: str, keys: Iterable[str]) -> str:
    """That there is no such site, and which are called most alike: of a large model all are too many to read."""
    near = difflib.get_close_matches(str(site), keys := [*keys], 3, 0)
    return f"no site {site!r} in the store; of its {len(keys)} sites the nearest are {', '.join(near) or 'none'}"


def _block(path: str, before: str, rows: int, spec: ArraySpec, row: int) -> np.ndarray:
    """The numbers of a row of chunks."""
    return HiddenStates(_opened(path, before, rows), spec).chunk(row)


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
        StoreError: there is no store, it cannot be reached, or its records are damaged.

    >>> store = HiddenStateStore(path)                                              # doctest: +SKIP
    >>> store.open("transformer.h.0.ln_1", "pre").torch(0, 1000).norm(dim=1)        # doctest: +SKIP
    """

    def __init__(self, path: str | Path | Storage) -> None:
        self.storage = storage_at(path)
        self.record, self.layout, self.store_id = read_store(self.storage)
        self._specs = {spec.name: spec for spec in self.layout.arrays}
        self.provenance: dict[str, Any] = self.record["provenance"]
        self.committed: dict[int, Commit] = read_log(self.storage, self.layout, self.store_id)
        if self.record["status"] == "complete" and len(self.committed) < self.layout.rows:
            raise StoreError(f"{self.storage} lacks records of rows; normgeo capture --resume {self.storage} mends it")
        rows = itertools.takewhile(lambda row: row in self.committed, itertools.count())
        self.commit_log: list[Commit] = [self.committed[row] for row in rows]
        self.n_tokens = self.commit_log[-1].stop if self.commit_log else 0
        self.sites = [NormSite(**site) for site in self.provenance["identity"]["about"]["sites"]]

    def __repr__(self) -> str:
        tokens = f"{self.n_tokens:,} of {self.layout.n_tokens:,} tokens"
        return f"HiddenStateStore({str(self.storage)!r}: {tokens}, {len(self.sites)} sites)"

    @property
    def complete(self) -> bool:
        """Whether all tokens are there."""
        return self.n_tokens == self.layout.n_tokens

    @property
    def incomplete(self) -> str:
        """In words, how much of the store is there, where it is incomplete; else nothing."""
        if self.complete and self.record["status"] != "complete":
            return f"{self.storage} lacks its results; normgeo capture --resume {self.storage} writes them"
        there = sum(commit.stop - commit.start for commit in self.committed.values())
        found = f"{self.storage} is incomplete: {there:,} of {self.layout.n_tokens:,} tokens are committed"
        gap = f", of which the first {self.n_tokens:,} are read, up to the first gap" if there > self.n_tokens else ""
        return "" if self.complete else f"{found}{gap}; normgeo capture --resume {self.storage} goes on"

    @functools.cached_property
    def root(self) -> zarr.Group:
        """The zarr group."""
        try:
            return zarr.open_group(self.storage.zarr("hidden.zarr"), mode="r", zarr_format=3)
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{self.storage.at('hidden.zarr')} cannot be opened: {error}") from error

    def array(self, name: str) -> zarr.Array:
        """An array as zarr sees it.

        Raises:
            StoreError: its metadata is missing or damaged.
        """
        with self._named(name):
            return cast(zarr.Array, self.root[name])

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """What zarr raises, with the place of it."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = self.storage.at(f"hidden.zarr/{name}")
            raise StoreError(f"{where} is missing or damaged; normgeo verify names all that is ({error!r})") from error

    def spec(self, site: str, phase: str) -> ArraySpec:
        """The array of a phase of the site with this key.

        Raises:
            StoreError: it is not in the store.
        """
        name = f"sites/{site}/{phase}"
        if name in self._specs:
            return self._specs[name]
        if site not in (keys := [s.key for s in self.sites]):
            raise StoreError(_no_site(site, keys))
        phases = sorted({s.phase for s in self.layout.arrays if s.site >= 0})
        if phase in ("standardized", "post") and "pre" in phases:
            raise StoreError(f"{name} is not stored; it follows from inputs: derived(site, {phase!r}, inputs)")
        raise StoreError(f"{name} is not stored; phases are {', '.join(phases)}")

    def reader(self, spec: ArraySpec, row: int = 0, pool: Executor | None = None) -> ChunkReader:
        """What reads an array from the beginning of a row on."""
        return ChunkReader(self.storage, self.layout, self.committed, spec, row, pool)

    def open(self, site: str, phase: str = "pre") -> HiddenStates:
        """The hidden states of the site with this key before (`pre`) or after its norm, as far as they are stored."""
        return HiddenStates(self, self.spec(site, phase))

    def tokens(self, name: str) -> np.ndarray:
        """Id, document or position of every committed token.

        Raises:
            StoreError: there is no such array, or a chunk is missing or not what was committed.
        """
        if name not in TOKENS:
            raise StoreError(f"tokens have {', '.join(TOKENS)}, received {name!r}")
        with reading(self.storage) as pool:
            return self.reader(self.layout.arrays[TOKENS.index(name)], pool=pool).read(self.n_tokens)

    def rebuild(self, site: NormSite) -> Rebuild:
        """How a site's output follows from its input.

        Raises:
            StoreError: what is stored of the norm is missing or damaged.
        """
        sums, folder = self._sums_of_norms.get(site.key, {}), f"hidden.zarr/sites/{site.key}"
        try:
            read = self.storage.each(lambda x: read_file(self.storage, f"{folder}/{x[0]}", x[1]), sums.items())
            files = dict(zip(sums, read, strict=True))  # here, for they are read one after the other
        except StoreError as error:
            raise StoreError(f"{error}; normgeo verify names all that is") from error
        with self._named(f"sites/{site.key}"):
            about = json.loads(files["zarr.json"])["attributes"]
            norm = {name: about[name] for name in ("recipe", "offset", "bit_equal", "error")}
            return Rebuild(gain=array_in(files, "gain"), bias=array_in(files, "bias"), **norm)

    @functools.cached_property
    def _sums_of_norms(self) -> dict[str, dict[str, str]]:
        """sha256, as the manifest has them, of the files that say what a norm does, by its key and their names."""
        found: dict[str, dict[str, str]] = {}
        record = read_record(self.storage, "manifest.json")
        with understood(self.storage, "manifest.json"):
            files = read_as(dict[str, str], record["files"], "files")
        for name, sha256 in files.items():
            if of_norm := re.fullmatch(r"sites/(.+?)/(zarr\.json|gain/.+|bias/.+)", name):
                found.setdefault(of_norm[1], {})[of_norm[2]] = sha256
        return found

    def derived(self, site: str, phase: str, pre: Float[Tensor, "vectors d"]) -> Float[Tensor, "vectors d"]:
        """The standardized or the post-norm vectors of inputs of the site with this key.

        Raises:
            StoreError: it is another phase, there is no such site, inputs are not like its own, or the norm is damaged.
        """
        if phase not in ("standardized", "post"):
            raise StoreError(f"standardized and post vectors follow from inputs, received {phase!r}")
        if site not in (norms := {norm.key: norm for norm in self.sites}):
            raise StoreError(_no_site(site, norms))
        norm, own = norms[site], next(s.dtype for s in self.layout.arrays if s.name.startswith(f"sites/{site}/"))
        if pre.shape[1:] != (norm.d,) or str(pre.dtype) != f"torch.{own}":  # of others a norm gives other outputs
            said = f"{type(pre).__name__} {tuple(pre.shape)} in {pre.dtype}"
            raise StoreError(f"inputs of {site} are a Tensor (vectors, {norm.d}) in torch.{own}, received a {said}")
        return standardized(pre, norm.kind, norm.eps) if phase == "standardized" else self.rebuild(norm)(pre, norm.eps)

    def stream(self) -> TokenStream:
        """The committed tokens, in the contexts that the model saw."""
        about = self.provenance["identity"]["about"]
        known = str(self.storage), about["data_sha256"], about["packing"], self.n_tokens
        return TokenStream(self._contexts, about["context"], *known, row=about.get("row"))

    def _contexts(self, start: int = 0) -> Iterator[Context]:
        def tokens_of(commit: Commit) -> np.ndarray:
            readers = [self.reader(spec, commit.row) for spec in self.layout.arrays[: len(TOKENS)]]
            return np.stack([reader.read(commit.stop - commit.start) for reader in readers])

        rest, done = np.empty((len(TOKENS), 0), np.int64), 0  # how a context begins, and tokens before it
        for read in self.storage.each(tokens_of, self.commit_log):
            ids, owner, position = found = np.concatenate([rest, read], axis=1)
            starts: list[int] = np.flatnonzero(position == 0).tolist()
            for begin, stop in itertools.pairwise(starts):
                if done + begin >= start:
                    yield ids[begin:stop], owner[begin:stop]
            last = starts[-1] if starts else 0
            rest, done = found[:, last:], done + last
        if rest.size and done >= start:
            yield rest[0], rest[1]
