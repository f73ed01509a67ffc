"""Records of a store: JSON that carries the sha256 of what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from normgeo.errors import StoreError, said
from normgeo.store.storage import Storage
from normgeo.system.records import parsed

__all__ = ["identity", "read_file", "read_record", "understood", "unread", "write_record"]


def read_record(storage: Storage, name: str) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        StoreError: it is missing, cannot be read, or is damaged.
    """
    try:
        content = parsed(storage.read(name))
    except OSError as error:
        raise StoreError(unread(storage, name, error)) from error
    except ValueError as error:
        raise StoreError(f"{storage.at(name)} is damaged ({error})") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != identity(content):
        raise StoreError(f"{storage.at(name)} is damaged: its checksum is wrong (or it is of another version's store)")
    return content


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
