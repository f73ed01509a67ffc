"""How a store of hidden states lies in its storage, and its commit log.

store.json          what was captured from what: configuration, model and data by hash, versions, layout
                    and, once it is complete, sha256 of the results beside it
manifest.json       sha256 of every file of `hidden.zarr` that is no chunk of hidden states
hidden.zarr/        zarr v3, opened by zarr, xarray and dask alike
    tokens/id, tokens/document, tokens/position             [token], int64
    sites/<key>/pre, .../standardized, .../post             [vector, channel], the model's dtype
    sites/<key>/gain, .../bias                              [channel], what the norm stores
commits/<row>.json  one record for every complete row of chunks: its tokens, and size and checksum of every chunk
state/              the statistics of every row: of the batches that begin in it
scratch/, lock      what is being written, and who writes

Records (store.json, manifest.json and those of rows) carry the sha256 of what they say.

Every array is cut along its tokens into rows of chunks, each a plain file of numbers and their crc32c, and a row counts
once its record is there. bfloat16, which zarr does not know, lies as uint16 with an attribute that says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
import safetensors.torch
import torch
import zarr
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from normgeo.angles.job import About
from normgeo.errors import StoreError
from normgeo.models import dtype_name
from normgeo.sites import NormSite
from normgeo.store.rebuild import Rebuild
from normgeo.store.records import identity, read_record, understood, unread, write_record
from normgeo.store.storage import Storage
from normgeo.system.records import read_as

__all__ = [
    "CHUNK_BYTES", "TOKENS", "TRAILER", "ArraySpec", "Commit", "Layout", "array_in", "as_numbers", "as_numpy",
    "as_torch", "commit_file", "committed_rows", "create", "put_back", "read_commit", "read_log", "read_state",
    "read_store", "state_file", "write_commit",
]  # fmt: skip

CHUNK_BYTES = 16 << 20
TRAILER = 4  # bytes of a chunk's crc32c
TOKENS = ("id", "document", "position")
STORED_AS = {"bfloat16": "uint16"}
FILL = {"bfloat16": 0x7FC0, "int64": -1}  # NaN for all others


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store.

    Attributes:
        name: its path in `hidden.zarr`.
        dtype: of the values, as torch names it.
        width: numbers a vector; 0 for one number a token.
        heads: vectors a token.
        site: index of the site, -1 for tokens.
        phase: pre, standardized or post; id, document or position.
    """

    name: str
    dtype: str
    width: int
    heads: int
    site: int
    phase: str

    @property
    def stored(self) -> np.dtype:
        """The dtype on disk, little-endian."""
        return _stored_as(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes a token."""
        return self.heads * max(1, self.width) * self.stored.itemsize

    @property
    def fill(self) -> float | int:
        """What stands behind the last token of the last chunk."""
        return FILL.get(self.dtype, float("nan"))

    def chunk_file(self, row: int) -> str:
        """Name of a chunk's file below `hidden.zarr`."""
        return f"{self.name}/c.{row}.0" if self.width else f"{self.name}/c.{row}"


@dataclass(frozen=True)
class Layout:
    """The arrays of a store and how they are cut: every chunk holds `chunk` tokens, a power of two.

    Raises:
        ValueError: numbers that no layout has, or arrays that are not first those of tokens.
    """

    n_tokens: int
    chunk: int
    arrays: tuple[ArraySpec, ...]

    def __post_init__(self) -> None:
        if min(self.n_tokens, self.chunk, *(spec.heads for spec in self.arrays)) < 1:
            raise ValueError("tokens, chunks and heads are at least 1")
        if tuple(spec.name for spec in self.arrays[: len(TOKENS)]) != tuple(f"tokens/{name}" for name in TOKENS):
            raise ValueError(f"its first arrays are not {', '.join(TOKENS)}")

    @classmethod
    def of(
        cls, sites: Sequence[NormSite], dtypes: Sequence[str], phases: Sequence[str], n_tokens: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Layout:  # fmt: skip
        """The layout of these phases of these sites, whose hidden states are of these dtypes."""
        arrays = [ArraySpec(f"tokens/{name}", "int64", 0, 1, -1, name) for name in TOKENS]
        for i, (site, dtype) in enumerate(zip(sites, dtypes, strict=True)):
            arrays += [_spec(site, dtype, phase, i) for phase in phases]
        at_most = max(1, chunk_bytes // max(spec.token_bytes for spec in arrays))
        chunk = min(1 << (at_most.bit_length() - 1), 1 << (n_tokens - 1).bit_length())
        return cls(n_tokens, chunk, tuple(arrays))

    @property
    def rows(self) -> int:
        """Number of rows of chunks."""
        return -(-self.n_tokens // self.chunk)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, checksums included."""
        return self.row_bytes * self.rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of chunks."""
        return sum(n + TRAILER for n in self.chunk_bytes.values())

    @functools.cached_property
    def chunk_bytes(self) -> dict[str, int]:
        """Bytes of the numbers in a chunk of every array, by its name."""
        return {spec.name: self.chunk * spec.token_bytes for spec in self.arrays}

    def row_of(self, token: int) -> int:
        """The row of chunks that a token is in."""
        return token // self.chunk

    def start(self, row: int) -> int:
        """The first token of a row of chunks."""
        return row * self.chunk

    def stop(self, row: int) -> int:
        """The token after the last of a row."""
        return min(self.n_tokens, (row + 1) * self.chunk)


def _spec(site: NormSite, dtype: str, phase: str, index: int) -> ArraySpec:
    """The array of a phase of a site."""
    return ArraySpec(f"sites/{site.key}/{phase}", dtype, site.d, site.heads, index, phase)


def as_numpy(x: Tensor) -> np.ndarray:
    """A CPU tensor in the dtype it is stored in, without a copy."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def _stored_as(dtype: str) -> np.dtype:
    """What numpy calls the stored numbers of a dtype."""
    return np.dtype(STORED_AS.get(dtype, dtype)).newbyteorder("<")


def as_torch(x: np.ndarray, dtype: str) -> Tensor:
    """Stored numbers as the tensor they are, without a copy."""
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)


def as_numbers(x: np.ndarray, dtype: str) -> np.ndarray:
    """Stored numbers as the numbers they are: bfloat16, which numpy has not, as float32, which is exact."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else x


def array_in(files: Mapping[str, bytes], name: str) -> Tensor | None:
    """An array of one chunk, of its files; None if it is not there. By zarr this would take milliseconds."""
    if (about := files.get(f"{name}/zarr.json")) is None:
        return None
    dtype = json.loads(about)["attributes"]["dtype"]
    return as_torch(np.frombuffer(bytearray(files[f"{name}/c.0"][:-TRAILER]), _stored_as(dtype)), dtype)


# --- what store.json says --------------------------------------------------------------------------------------------


class _Identity(TypedDict):
    about: About
    label: str
    batch: int
    null: int
    null_every: int
    seed: int


class _Provenance(TypedDict):
    identity: _Identity


class _Capture(TypedDict):
    phases: list[str]
    chunk_bytes: int


class _OnceComplete(TypedDict, total=False):
    results: dict[str, str]


class _Record(_OnceComplete):
    """What is read again of `store.json`."""

    status: str
    capture: _Capture
    provenance: _Provenance
    layout: Layout


def read_store(storage: Storage) -> tuple[dict[str, Any], Layout, str]:
    """What `store.json` says: all of it, the arrays, and the identity that commits name.

    Raises:
        StoreError: there is no store, or its record is damaged.
    """
    if storage.size("store.json") is None:
        raise StoreError(f"{storage} is no store of hidden states: it has no store.json")
    record = read_record(storage, "store.json")
    with understood(storage, "store.json"):
        found: _Record = read_as(_Record, record, "its record")
        layout, of = found["layout"], found["provenance"]["identity"]
        _ = layout.nbytes  # which all of it is needed for
        for spec in layout.arrays[len(TOKENS) :]:
            site = of["about"]["sites"][spec.site]
            if spec.site < 0 or spec != _spec(site, spec.dtype, spec.phase, spec.site):
                raise ValueError(f"{spec.name} is not of the site that it says")
        about = {"provenance": record["provenance"]["identity"], "layout": record["layout"]}
    return record, layout, identity(about)


# --- the commit log --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """One row of chunks that is complete.

    Attributes:
        store: identity of the store it belongs to.
        row: which row.
        start, stop: its tokens.
        chunks: size in bytes and crc32c of every chunk's numbers, by array.
        post: crc32c of what came out of each norm, by site, where that is not stored but rebuilt to the last bit.
        state: sha256 of its statistics.
    """

    store: str
    row: int
    start: int
    stop: int
    chunks: dict[str, tuple[int, int]]
    post: dict[str, int]
    state: str


def commit_file(row: int) -> str:
    """The record of a row."""
    return f"commits/{row:08}.json"


def write_commit(storage: Storage, commit: Commit) -> None:
    """Add a record to the log.

    Raises:
        StoreError: the row is committed already.
    """
    write_record(storage.create, commit_file(commit.row), asdict(commit))


def read_commit(storage: Storage, row: int, layout: Layout, store: str) -> Commit:
    """The record of a row.

    Raises:
        StoreError: it is missing, damaged, or of another store.
    """
    file = commit_file(row)
    content = read_record(storage, file)
    with understood(storage, file):
        if content["store"] != store or content["row"] != row:
            raise StoreError(f"{storage.at(file)} belongs to another store, or to another row of it")
        # what `read_as` would take far longer for: a large store has millions of chunks
        chunks = {sys.intern(name): (size, int(crc)) for name, (size, crc) in content["chunks"].items()}
        commit = Commit(**content | {"chunks": chunks, "post": {k: int(crc) for k, crc in content["post"].items()}})
        whole = (commit.start, commit.stop) == (layout.start(row), layout.stop(row))
        if not whole or {name: size for name, (size, _) in chunks.items()} != layout.chunk_bytes:
            raise ValueError("it is not of the tokens, or not of the chunks, that a row of the store has")
        return commit


def read_log(storage: Storage, layout: Layout, store: str) -> dict[int, Commit]:
    """The records that are there, by row. The processes of a run commit theirs apart: while it runs there are gaps.

    Raises:
        StoreError: a record is damaged, or of another store.
    """
    rows = committed_rows(storage)
    return dict(zip(rows, storage.each(lambda row: read_commit(storage, row, layout, store), rows), strict=True))


def committed_rows(storage: Storage) -> list[int]:
    """The rows that have a record, in order."""
    return [int(name[:8]) for name in storage.names("commits") if re.fullmatch(r"\d{8}\.json", name)]


def state_file(row: int) -> str:
    """The statistics of a row."""
    return f"state/{row:08}.safetensors"


def read_state(storage: Storage, commit: Commit) -> dict[str, Tensor]:
    """The statistics of a row.

    Raises:
        StoreError: they are missing or damaged.
    """
    file = state_file(commit.row)
    try:
        content = storage.read(file)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise StoreError(unread(storage, file, error)) from error
    if hashlib.sha256(content).hexdigest() != commit.state:
        raise StoreError(f"{storage.at(file)} is damaged or missing; {put_back(storage, commit.row)}")
    return safetensors.torch.load(content)


def put_back(storage: Storage, row: int) -> str:
    """In words, what to do where a committed row is not whole: without its record it is captured again."""
    return f"put it back, or remove {storage.at(commit_file(row))}, and --resume {storage} captures that row again"


# --- making the arrays -----------------------------------------------------------------------------------------------


def create(
    storage: Storage, layout: Layout, sites: Sequence[NormSite], rebuilds: Sequence[Rebuild], classes: Sequence[str],
    provenance: dict[str, Any],
) -> None:  # fmt: skip
    """Make `hidden.zarr` without any chunk, and the manifest of it."""
    made: dict[str, Any] = {}
    root = zarr.create_group(MemoryStore(made), attributes=provenance)
    for spec in layout.arrays:
        shape = (layout.n_tokens * spec.heads, spec.width) if spec.width else (layout.n_tokens,)
        chunks = (layout.chunk * spec.heads, spec.width) if spec.width else (layout.chunk,)
        names = ("vector", "channel") if spec.width else ("token",)
        _array(root, spec.name, spec.dtype, shape, chunks, names)
    for site, rebuild, kind in zip(sites, rebuilds, classes, strict=True):
        group = root.require_group(f"sites/{site.key}")
        group.update_attributes(  # at once: `attrs` writes each on its own
            asdict(site) | {
                "class": kind, "recipe": rebuild.recipe, "gamma": f"gain + {rebuild.offset:g}", "beta": "bias",
                "offset": rebuild.offset, "bit_equal": rebuild.bit_equal, "error": rebuild.error,
            }
        )  # fmt: skip
        for name, values in (("gain", rebuild.gain), ("bias", rebuild.bias)):
            if values is not None:
                dtype = dtype_name(values.dtype)
                array = _array(root, f"sites/{site.key}/{name}", dtype, (site.d,), (site.d,), ("channel",))
                array[:] = as_numpy(values)
    files = {name: made[name].to_bytes() for name in sorted(made)}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    write_record(storage.put, "manifest.json", {"files": sums})
    storage.publish("hidden.zarr", files)


def _array(
    root: zarr.Group, name: str, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], axes: tuple[str, ...]
) -> zarr.Array:
    about = {"bfloat16": "view as bfloat16"} if dtype == "bfloat16" else {}
    with zarr.config.set({"array.write_empty_chunks": True}):
        return root.create_array(
            name, shape=shape, chunks=chunks, dtype=STORED_AS.get(dtype, dtype), compressors=[Crc32cCodec()],
            fill_value=FILL.get(dtype, float("nan")), dimension_names=axes,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes={"dtype": dtype, **about},
        )  # fmt: skip
