"""What is missing or damaged in a store of hidden states: by its records and lengths alone, or by every byte of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from normgeo.errors import StoreError
from normgeo.kernels.checksum import checksum
from normgeo.store.layout import (
    TRAILER,
    ArraySpec,
    Commit,
    Layout,
    committed_rows,
    read_commit,
    read_store,
    state_file,
)
from normgeo.store.objects import storage_at
from normgeo.store.records import read_file, read_record, understood, unread
from normgeo.store.storage import Storage
from normgeo.system.progress import progress_bar
from normgeo.system.records import read_as

__all__ = ["check_free", "interrupted", "length_problems", "metadata_problems", "verify"]


def verify(path: str | Path | Storage, *, progress: bool = True) -> tuple[int, list[str]]:
    """Read every byte of a store: (chunks checked, what is wrong, each with the file it is in).

    Args:
        path: the store.
        progress: show a bar: terabytes are read for hours.

    Raises:
        StoreError: there is no store at all, it cannot be reached, or its store.json is damaged.
    """
    storage = storage_at(path)
    record, layout, store = read_store(storage)
    rows = range(layout.rows) if record["status"] == "complete" else committed_rows(storage)
    if not rows:
        return 0, []  # it has just begun, and resuming begins again
    problems, checked = metadata_problems(storage), 0
    for name, sha256 in record.get("results", {}).items():
        problems += _file_problems(storage, name, sha256)
    with progress_bar(
        str(storage), sum(layout.stop(row) - layout.start(row) for row in rows), enabled=progress
    ) as advance:
        for check, found in storage.each(lambda check: (check, check.run()), _checks(storage, layout, rows, store)):
            checked += check.chunks
            problems += found  # in place: there may be as many as chunks
            advance(check.tokens)
    return checked, problems


class _Check(NamedTuple):
    """What tells what is wrong with a file, how many chunks that is, and how many tokens have been seen with it."""

    run: Callable[[], list[str]]
    chunks: int = 0
    tokens: int = 0


def _checks(storage: Storage, layout: Layout, rows: Sequence[int], store: str) -> Iterator[_Check]:
    """Those of all rows, one after the other: of what a record names, or of the record. Some are read ahead."""

    def record(row: int) -> Commit | str:
        try:
            return read_commit(storage, row, layout, store)
        except StoreError as error:
            return str(error)

    for row, commit in zip(rows, storage.each(record, rows), strict=True):
        tokens = layout.stop(row) - layout.start(row)
        if isinstance(commit, str):
            yield _Check(functools.partial(list, [commit]), tokens=tokens)
            continue
        for spec in layout.arrays:
            file, sums = f"hidden.zarr/{spec.chunk_file(row)}", commit.chunks[spec.name]
            yield _Check(functools.partial(_chunk_problems, storage, file, *sums), chunks=1)
        yield _Check(functools.partial(_file_problems, storage, state_file(row), commit.state), tokens=tokens)


def check_free(storage: Storage, chunk_bytes: int, *, held: bool = False) -> None:
    """Refuse a place that a new store cannot be made in.

    Args:
        storage: the place.
        chunk_bytes: how large a chunk may be.
        held: this process writes there already, to the exclusion of others.

    Raises:
        StoreError: it holds something else, another process writes there, or such chunks are too large for it.
    """
    if storage.size("store.json") is not None:
        status = read_record(storage, "store.json")["status"]
        if status != "complete" and not held:
            with suppress(OSError), storage.writing():  # while another process does it cannot be resumed
                pass
        finish = f"finish it with --resume {storage}, or " if status != "complete" else ""
        raise StoreError(f"{storage} already holds a store ({status}); {finish}give another --store")
    if storage.occupied():
        raise StoreError(f"{storage} exists and is no store; give another --store")
    if storage.largest is not None and chunk_bytes > storage.largest:
        raise StoreError(
            f"a chunk at a URL is at most {storage.largest >> 20} MiB, since it waits in memory; --chunk-mib is "
            f"{chunk_bytes >> 20}"
        )


def interrupted(storage: Storage) -> dict[str, Any]:
    """What `store.json` says of a store that lacks something, be it records that it had, or its results alone.

    Raises:
        StoreError: there is no store, it is complete, or its record is damaged.
    """
    if storage.size("store.json") is None:
        raise StoreError(f"{storage} holds no store.json; there is nothing to resume")
    record, layout, _ = read_store(storage)
    if record["status"] == "complete" and len(committed_rows(storage)) == layout.rows:
        raise StoreError(f"the store in {storage} is complete; normgeo angles --store {storage} reads it")
    return {name: value for name, value in record.items() if name not in ("finished", "results")} | {
        "status": "running"
    }


def _file_problems(storage: Storage, name: str, sha256: str) -> list[str]:
    """What is wrong with a file of which the sha256 is known: nothing, or one line."""
    try:
        read_file(storage, name, sha256)
    except StoreError as error:
        return [str(error)]
    return []


def metadata_problems(storage: Storage) -> list[str]:
    """What is wrong with the files that say what a store is, each with its name."""
    try:
        record = read_record(storage, "manifest.json")
        with understood(storage, "manifest.json"):
            sums = read_as(dict[str, str], record["files"], "files")
    except StoreError as error:
        return [str(error)]
    found = storage.each(lambda item: _file_problems(storage, f"hidden.zarr/{item[0]}", item[1]), sums.items())
    return list(itertools.chain.from_iterable(found))


def length_problems(storage: Storage, layout: Layout, committed: Mapping[int, Commit]) -> Iterator[tuple[int, str]]:
    """Rows of which a chunk is missing or not as long as what was committed, each with that; none of them is read."""

    def of_array(spec: ArraySpec) -> list[tuple[int, str]]:
        sizes, found = storage.sizes(f"hidden.zarr/{spec.name}"), list[tuple[int, str]]()
        for row, commit in committed.items():
            name, n = f"hidden.zarr/{spec.chunk_file(row)}", commit.chunks[spec.name][0]
            if (size := sizes.get(Path(name).name)) != n + TRAILER:
                found.append((row, _wrong_length(storage, name, n, size)))
        return found

    return itertools.chain.from_iterable(storage.each(of_array, layout.arrays))


def _wrong_length(storage: Storage, name: str, n: int, size: int | None) -> str:
    where = storage.at(name)
    return f"{where} is missing" if size is None else f"{where} has {size} bytes instead of {n + TRAILER}"


def _chunk_problems(storage: Storage, name: str, n: int, crc: int) -> list[str]:
    try:
        content = storage.read_range(name, 0, n + TRAILER + 1)
    except OSError as error:
        return [unread(storage, name, error)]
    if len(content) != n + TRAILER:
        size = storage.size(name)
        if size == n + TRAILER:
            return [f"{storage.at(name)} cannot be read: {len(content)} bytes came of its {size}"]
        return [_wrong_length(storage, name, n, size)]
    body, trailer = content[:-TRAILER], int(content[-TRAILER:].view("<u4")[0])
    if checksum(body) != crc or trailer != crc:
        return [f"{storage.at(name)} is damaged: its checksum is wrong"]
    return []
