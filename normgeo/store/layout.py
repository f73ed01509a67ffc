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

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
import zarr
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from normgeo.errors import StoreError, said
from normgeo.models import dtype_name
from normgeo.sites import NormSite
from normgeo.store.rebuild import Rebuild
from normgeo.store.storage import Storage

__all__ = [
    "CHUNK_BYTES", "TOKENS", "TRAILER", "ArraySpec", "Commit", "Layout", "array_in", "as_numbers", "as_numpy",
    "as_torch", "committed_rows", "create", "identity", "put_back", "read_commit", "read_file", "read_log",
    "read_record", "read_state", "read_store", "state_file", "understood", "unread", "write_commit", "write_record",
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
    """The arrays of a store and how they are cut: every chunk holds `chunk` tokens, a power of two."""

    n_tokens: int
    chunk: int
    arrays: tuple[ArraySpec, ...]

    @classmethod
    def of(
        cls, sites: Sequence[NormSite], dtypes: Sequence[str], phases: Sequence[str], n_tokens: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Layout:  # fmt: skip
        """The layout of these phases of these sites, whose hidden states are of these dtypes."""
        arrays = [ArraySpec(f"tokens/{name}", "int64", 0, 1, -1, name) for name in TOKENS]
        for i, (site, dtype) in enumerate(zip(sites, dtypes, strict=True)):
            arrays += [ArraySpec(f"sites/{site.key}/{p}", dtype, site.d, site.heads, i, p) for p in phases]
        at_most = max(1, chunk_bytes // max(spec.token_bytes for spec in arrays))
        chunk = min(1 << (at_most.bit_length() - 1), 1 << (n_tokens - 1).bit_length())
        return cls(n_tokens, chunk, tuple(arrays))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Layout:
        """What `asdict` made a record of."""
        return cls(record["n_tokens"], record["chunk"], tuple(ArraySpec(**spec) for spec in record["arrays"]))

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
        return sum(self.chunk * spec.token_bytes + TRAILER for spec in self.arrays)

    def row_of(self, token: int) -> int:
        """The row of chunks that a token is in."""
        return token // self.chunk

    def start(self, row: int) -> int:
        """The first token of a row of chunks."""
        return row * self.chunk

    def stop(self, row: int) -> int:
        """The token after the last of a row."""
        return min(self.n_tokens, (row + 1) * self.chunk)


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


# --- records ----------------------------------------------------------------------------------------------------------


def read_record(storage: Storage, name: str) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        StoreError: it is missing, cannot be read, or is damaged.
    """
    try:
        content = json.loads(storage.read(name))
    except OSError as error:
        raise StoreError(unread(storage, name, error)) from error
    except ValueError as error:
        raise StoreError(f"{storage.at(name)} is damaged ({error})") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != identity(content):
        raise StoreError(f"{storage.at(name)} is damaged: its checksum is wrong (or it is of another version's store)")
    return content


def read_store(storage: Storage) -> tuple[dict[str, Any], Layout, str]:
    """What `store.json` says: all of it, the arrays, and the identity that commits name.

    Raises:
        StoreError: there is no store, or its record is damaged.
    """
    if storage.size("store.json") is None:
        raise StoreError(f"{storage} is no store of hidden states: it has no store.json")
    record = read_record(storage, "store.json")
    with understood(storage, "store.json"):
        about = {"provenance": record["provenance"]["identity"], "layout": record["layout"]}
        layout = Layout.from_json(record["layout"])
        _ = layout.nbytes  # which all of it is needed for
    return record, layout, identity(about)


@contextmanager
def understood(storage: Storage, name: str) -> Iterator[None]:
    """While what a record says is read, for checksums do not tell who wrote it: what cannot be is a StoreError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise StoreError(f"{storage.at(name)} is damaged, or of another version's store ({said(error)})") from error


def write_record(
    write: Callable[[str, bytes], None], name: str, content: dict[str, Any], indent: int | None = None
) -> None:
    """Write JSON, and in it the sha256 of what it says, by a storage's `put` or `create`."""
    text = json.dumps(content | {"sha256": identity(content)}, indent=indent, separators=None if indent else (",", ":"))
    write(name, text.encode() + b"\n")


def identity(content: Any) -> str:
    """sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_file(storage: Storage, name: str, sha256: str) -> bytes:
    """What is in a file of which the sha256 is known.

    Raises:
        StoreError: it cannot be read, or holds something else.
    """
    try:
        content = storage.read(name)
    except OSError as error:
        raise StoreError(unread(storage, name, error)) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{storage.at(name)} is damaged: its checksum is wrong")
    return content


def unread(storage: Storage, name: str, error: OSError) -> str:
    """In words, that a file cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    return f"{storage.at(name)} is missing" if missing else f"{storage.at(name)} cannot be read: {error.strerror}"


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


def read_commit(storage: Storage, row: int, store: str) -> Commit:
    """The record of a row.

    Raises:
        StoreError: it is missing, damaged, or of another store.
    """
    file = commit_file(row)
    content = read_record(storage, file)
    with understood(storage, file):
        if content["store"] != store or content["row"] != row:
            raise StoreError(f"{storage.at(file)} belongs to another store, or to another row of it")
        chunks = {sys.intern(name): (int(size), int(crc)) for name, (size, crc) in content["chunks"].items()}
        return Commit(**content | dict[str, Any](chunks=chunks))


def read_log(storage: Storage, store: str) -> dict[int, Commit]:
    """The records that are there, by row. The processes of a run commit theirs apart: while it runs there are gaps.

    Raises:
        StoreError: a record is damaged, or of another store.
    """
    rows = committed_rows(storage)
    return dict(zip(rows, storage.each(lambda row: read_commit(storage, row, store), rows), strict=True))


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
