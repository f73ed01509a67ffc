"""Reading a store of hidden states, and checking every byte of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
import torch
import zarr
from jaxtyping import Float, Shaped
from torch import Tensor

from normgeo.errors import StoreError
from normgeo.rebuild import Rebuild, standardized
from normgeo.sites import NormSite
from normgeo.store_layout import (
    TRAILER,
    ArraySpec,
    Commit,
    Layout,
    as_torch,
    identity,
    read_commit,
    read_json,
    read_log,
)
from normgeo.tokens import TokenStream

__all__ = ["ChunkReader", "HiddenStateStore", "HiddenStates", "verify"]


class ChunkReader:
    """Reads one array from its first token on, piece by piece, and checks every chunk against the commit log."""

    def __init__(self, store: HiddenStateStore, spec: ArraySpec) -> None:
        self.store, self.spec, self._at, self._crc = store, spec, 0, 0

    def read(self, n: int) -> Shaped[np.ndarray, ...]:
        """The next `n` tokens as they are stored: [vectors, d], or [tokens].

        Raises:
            StoreError: a chunk is missing, truncated, or not what was committed.
        """
        spec, chunk = self.spec, self.store.layout.chunk
        out, filled = np.empty(n * spec.token_bytes, np.uint8), 0
        while filled < len(out):
            row = self._at // chunk
            end = min(self._at + (len(out) - filled) // spec.token_bytes, self.store.layout.stop(row))
            part = out[filled : filled + (end - self._at) * spec.token_bytes]
            self._fill(row, part, end)
            filled, self._at = filled + len(part), end
        values = out.view(spec.stored)
        return values.reshape(-1, spec.width) if spec.width else values

    def _fill(self, row: int, part: np.ndarray, end: int) -> None:
        path = self.store.path / "hidden.zarr" / self.spec.chunk_file(row)
        n, crc = self.store.commit_log[row].chunks[self.spec.name]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek((self._at - row * self.store.layout.chunk) * self.spec.token_bytes)
                whole = file.readinto(part.data) == len(part)
                last = end == self.store.layout.stop(row)
                tail = np.frombuffer(file.read() if last else b"", np.uint8)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        self._crc = google_crc32c.extend(self._crc, part)  # pyright: ignore
        if last:
            self._crc = google_crc32c.extend(self._crc, tail[:-TRAILER])  # pyright: ignore
            whole = whole and path.stat().st_size == n + TRAILER
        if not whole or (last and self._crc != crc):
            raise StoreError(f"{path} is damaged: it is not what was committed; normgeo verify names all that is")
        self._crc = 0 if last else self._crc


class HiddenStates:
    """One phase of one site: `[vectors, d]` numbers, of which the committed ones are there.

    Attributes:
        array: the zarr array.
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

    def batches(self, n_tokens: int) -> Iterator[Float[Tensor, "vectors d"]]:
        """All committed vectors in order, of so many tokens at once; checked against the commit log."""
        reader = ChunkReader(self._store, self.spec)
        for start in range(0, self._store.n_tokens, n_tokens):
            yield as_torch(reader.read(min(n_tokens, self._store.n_tokens - start)), self.spec.dtype)


class HiddenStateStore:
    """A store that `normgeo capture` wrote, complete or not; only what is committed is read.

    Attributes:
        provenance: what was captured from what.
        layout: the arrays.
        sites: the sites, in the order of the forward pass.
        commit_log: the complete rows of chunks.
        n_tokens: tokens in those.

    Raises:
        StoreError: there is no store, or its commit log is damaged.

    >>> store = HiddenStateStore(path)                                              # doctest: +SKIP
    >>> store.open("transformer.h.0.ln_1", "pre").torch(0, 1000).norm(dim=1)        # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "store.json").is_file():
            raise StoreError(f"{path} is no store of hidden states: it has no store.json")
        self.record = read_json(self.path / "store.json")
        self.provenance: dict[str, Any] = self.record["provenance"]
        self.layout = Layout.from_json(self.record["layout"])
        self.store_id = identity({"provenance": self.provenance["identity"], "layout": self.record["layout"]})
        self.commit_log: list[Commit] = read_log(self.path, self.store_id)
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
            return zarr.open_group(self.path / "hidden.zarr", mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{self.path / 'hidden.zarr'} cannot be opened: {error}") from error

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
            self._contexts, about["context"], str(self.path), about["data_sha256"], about["packing"], self.n_tokens
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


def verify(path: str | Path) -> tuple[int, list[str]]:
    """Read every byte of a store: (chunks checked, what is wrong, each with the file it is in).

    Raises:
        StoreError: there is no store at all.
    """
    path = Path(path)
    if not (path / "store.json").is_file():
        raise StoreError(f"{path} is no store of hidden states: it has no store.json")
    record = read_json(path / "store.json")
    layout = Layout.from_json(record["layout"])
    store = identity({"provenance": record["provenance"]["identity"], "layout": record["layout"]})
    problems, checked = _metadata_problems(path), 0
    there = sorted(int(file.stem) for file in (path / "commits").glob("*.json"))
    expected = range(layout.rows if record["status"] == "complete" else (there[-1] + 1 if there else 0))
    for row in expected:
        try:
            commit = read_commit(path, row, store)
        except (StoreError, KeyError, TypeError) as error:
            problems.append(str(error))
            continue
        for spec in layout.arrays:
            checked += 1
            problems += _chunk_problems(path / "hidden.zarr" / spec.chunk_file(row), *commit.chunks[spec.name])
        if row == expected[-1]:
            problems += _file_problems(path / "state" / f"{row:08}.safetensors", commit.state)
    return checked, problems


def _metadata_problems(path: Path) -> list[str]:
    try:
        sums = read_json(path / "manifest.json")
    except StoreError as error:
        return [str(error)]
    return [line for name, sha in sums.items() for line in _file_problems(path / "hidden.zarr" / name, sha)]


def _file_problems(file: Path, sha256: str) -> list[str]:
    if not file.is_file():
        return [f"{file} is missing"]
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    return [] if found == sha256 else [f"{file} is damaged: its checksum is wrong"]


def _chunk_problems(file: Path, n: int, crc: int) -> list[str]:
    if not file.is_file():
        return [f"{file} is missing"]
    content = np.fromfile(file, np.uint8)
    if len(content) != n + TRAILER:
        return [f"{file} is truncated: {len(content)} bytes of {n + TRAILER}"]
    body, trailer = content[:-TRAILER], int(content[-TRAILER:].view("<u4")[0])
    if google_crc32c.value(body) != crc or trailer != crc:  # pyright: ignore
        return [f"{file} is damaged: its checksum is wrong"]
    return []
