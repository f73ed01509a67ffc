"""Where a store lies, seen as names and bytes: below a directory here, below a URL in `objects`.

A store's safety rests on what both promise. What was put is there whole or not at all, after a kill and after a power
cut, and a chunk that was synced is there whole; `create` never replaces what is there; and whoever holds the lock
writes alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from normgeo.errors import StoreError
from normgeo.system import direct
from normgeo.system.files import check_folder, sync, write_synced
from normgeo.system.memory import pages

__all__ = ["Disk", "NewChunk", "Storage"]

T = TypeVar("T")
R = TypeVar("R")


class NewChunk(ABC):
    """A chunk while it grows; there under its name only once it is finished, and safe once it is synced."""

    @abstractmethod
    def append(self, piece: np.ndarray) -> None:
        """Add bytes."""

    @abstractmethod
    def finish(self) -> None:
        """Have it under its name."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave nothing of it."""


class Storage(ABC):
    """Files below one place, by names with slashes.

    Attributes:
        address: the directory or URL, as it was given.
        absolute: the same for a process that works in another directory.
        threads: chunks to write, or to read, at once.
        largest: bytes of a chunk at most; None for any number.
    """

    address: str
    absolute: str
    threads: int
    largest: int | None

    def __str__(self) -> str:
        return self.address

    @abstractmethod
    def at(self, name: str) -> str:
        """A file's own address, for messages."""

    @abstractmethod
    def occupied(self) -> bool:
        """Whether anything is there that is no trace of a writer."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files right below a folder, by their names without its own, in order."""

    def names(self, folder: str) -> list[str]:
        """The files right below a folder, in order, without its name."""
        return list(self.sizes(folder))

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All of a file.

        Raises:
            FileNotFoundError: it is missing.
        """

    @abstractmethod
    def read_range(self, name: str, start: int, n: int) -> np.ndarray:
        """Bytes `start` to `start + n` of a file, or up to its end, in an array of their own.

        Raises:
            OSError: it cannot be read.
        """

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a file, in place of another that may be there."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write a file that is not there yet.

        Raises:
            StoreError: it is there.
        """

    @abstractmethod
    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write a folder of files; the shallowest of them is there last."""

    @abstractmethod
    def chunk(self, name: str) -> NewChunk:
        """Begin a chunk."""

    def can_grow(self, chunks: int) -> bool:
        """Whether so many chunks can grow at once."""
        return True

    @abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Make finished chunks safe: there whole after a power cut."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def discard(self) -> None:
        """Remove everything that this run wrote, while it holds the lock; nothing if it has lost it."""

    @abstractmethod
    def writing(self, run: str | None = None, *, shared: bool = False) -> AbstractContextManager[str]:
        """Keep all others from writing; gives the name of the run, with which its other processes join it.

        A run begins alone, and removes what a killed writer left unfinished. `shared`: others will join it.

        Raises:
            StoreError: another run writes, or the run that is to be joined writes something else.
        """

    @abstractmethod
    def results(self) -> AbstractContextManager[Path]:
        """A directory whose files are part of the place, at the end at the latest."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that still fit; None where nobody knows."""

    @abstractmethod
    def rate(self) -> float:
        """Bytes a second that are written, one chunk after the other, tried."""

    @abstractmethod
    def zarr(self, folder: str) -> Any:
        """What zarr opens to read a folder."""

    def each(self, do: Callable[[T], R], of: Iterable[T]) -> Iterable[R]:
        """What `do` gives for each, in order; side by side, a few ahead, where that is faster."""
        return map(do, of)


OURS = {"lock", "scratch", "commits", "state"}  # which a writer makes before all else


class Disk(Storage):
    """Files below a directory: written beside their names and renamed."""

    threads = 4
    largest = None

    def __init__(self, path: Path) -> None:
        self.path, self.address, self.absolute = path.absolute(), str(path), str(path.resolve())
        self._made, self._before = False, set[str]()

    def at(self, name: str) -> str:
        """A file's path."""
        return str(Path(self.address) / name)

    def occupied(self) -> bool:
        """Whether there is a file, or a directory with more in it than a lock and empty directories.

        Raises:
            RunError: there is none, and none could be made.
        """
        if os.path.lexists(self.path) and not self.path.is_dir():
            return True
        check_folder(Path(self.address), "--store")
        if not self.path.is_dir():
            return False
        empty = lambda path: path.is_dir() and not any(path.iterdir())  # noqa: E731  (of a writer killed as it began)
        return not all(path.name in ("lock", "scratch") or empty(path) for path in self.path.iterdir())

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        file = self.path / name
        return file.stat().st_size if file.is_file() else None

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files right below a folder."""
        found = dict[str, int]()
        for entry in self._files(folder):
            with suppress(FileNotFoundError):  # a writer has renamed or removed it since
                found[entry.name] = entry.stat().st_size
        return found

    def names(self, folder: str) -> list[str]:
        """The files right below a folder, which are not looked at: there may be millions."""
        return [entry.name for entry in self._files(folder)]

    def _files(self, folder: str) -> list[os.DirEntry[str]]:
        if not (place := self.path / folder).is_dir():
            return []
        with os.scandir(place) as entries:
            return sorted((entry for entry in entries if entry.is_file()), key=lambda entry: entry.name)

    def read(self, name: str) -> bytes:
        """All of a file."""
        return (self.path / name).read_bytes()

    def read_range(self, name: str, start: int, n: int) -> np.ndarray:
        """Bytes of a file."""
        return direct.read_range(self.path / name, start, n)

    def put(self, name: str, content: bytes) -> None:
        """Write a file."""
        with self._part(name, content) as part:
            os.replace(part, self.path / name)
        sync((self.path / name).parent)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        try:
            with self._part(name, content) as part:
                os.link(part, self.path / name)
        except FileExistsError as error:
            raise StoreError(f"{self.at(name)} is already there: another process writes this store") from error
        sync((self.path / name).parent)

    @contextmanager
    def _part(self, name: str, content: bytes) -> Iterator[Path]:
        part = self._unfinished(name)
        try:
            write_synced(part, content)
            yield part
        finally:
            part.unlink(missing_ok=True)

    def _unfinished(self, name: str) -> Path:
        return self.path / "scratch" / (name.replace("/", "--") + ".part")

    def publish(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write all files elsewhere, then rename the folder."""
        part = self._unfinished(folder)
        for name, content in files.items():
            file = part / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_synced(file, content)
        for inside in {parent for name in files for parent in (part / name).parents if parent.is_relative_to(part)}:
            sync(inside)
        shutil.rmtree(self.path / folder, ignore_errors=True)
        os.replace(part, self.path / folder)
        sync((self.path / folder).parent)

    def chunk(self, name: str) -> NewChunk:
        """A file that grows beside its name."""
        return _ChunkFile(self._unfinished(name), self.path / name)

    def can_grow(self, chunks: int) -> bool:
        """Whether so many files can be open at once, which the system is asked for."""
        return direct.allow_open(chunks)

    def sync(self, names: Iterable[str]) -> None:
        """Sync the files, then their folders: of many at once the first takes the others along in the journal."""
        files = [self.path / name for name in names]
        for path in (*files, *dict.fromkeys(file.parent for file in files)):
            sync(path)

    def delete(self, name: str) -> None:
        """Remove a file."""
        (self.path / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all that was not in the directory before this run, and the directory where this run made it."""
        for path in self.path.iterdir():
            if path.name not in self._before:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self._made:
            self.path.rmdir()

    @contextmanager
    def writing(self, run: str | None = None, *, shared: bool = False) -> Iterator[str]:
        """Hold the system's lock on a file: alone to put the run's name into it, then shared with those who know it.

        It is free again when the last of them has ended, however it ended.
        """
        self._made = not self.path.exists()
        self._before = {p.name for p in self.path.iterdir()} - OURS if self.path.is_dir() else set()
        self.path.mkdir(parents=True, exist_ok=True)
        for own in (self.path / "lock", self.path / "scratch"):
            if own.is_symlink():  # no writer made it, and what it leads to would be written
                own.unlink(missing_ok=True)
        with (self.path / "lock").open("a+") as file:
            begins = run is None
            try:
                if run is None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    run = uuid.uuid4().hex
                    file.truncate(0)
                    file.write(run)
                    file.flush()
                    os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), (self.path / "lock").stat()):
                    raise BlockingIOError  # its holder has just removed it, and another made a new one
            except (BlockingIOError, FileNotFoundError) as error:
                raise StoreError(
                    f"another process writes {self}; wait for it to end, or give another --store"
                ) from error
            file.seek(0)
            if file.read() != run:  # between the two locks another run may have begun
                raise StoreError(
                    f"{self} is not the store that this run's first process writes; all of them need one file system"
                )
            if begins:
                shutil.rmtree(self.path / "scratch", ignore_errors=True)
                for folder in ("scratch", "commits", "state"):
                    (self.path / folder).mkdir(exist_ok=True)
            try:
                yield run
            finally:
                if begins:
                    with suppress(OSError):  # what is unfinished in it is swept by the next who begins
                        (self.path / "scratch").rmdir()

    @contextmanager
    def results(self) -> Iterator[Path]:
        """The directory itself."""
        yield self.path

    def free(self) -> int | None:
        """Free bytes of the disk."""
        return shutil.disk_usage(self._folder()).free

    def rate(self, nbytes: int = 64 << 20) -> float:
        """Bytes a second of a sequential write, as chunks are written, fsync included."""
        nbytes = min(nbytes, shutil.disk_usage(self._folder()).free // 2)  # a store may need most of it
        block = pages(max(4096, min(16 << 20, nbytes) // 4096 * 4096))
        block[:] = np.random.default_rng(0).integers(0, 256, len(block), np.uint8)
        blocks = max(1, nbytes // len(block))
        try:
            with tempfile.TemporaryFile(dir=self._folder()) as unnamed:  # of which a kill leaves nothing
                began = time.perf_counter()
                file = direct.NewFile(Path(f"/dev/fd/{unnamed.fileno()}"))
                try:
                    for _ in range(blocks):
                        file.append(block)
                    file.sync()
                finally:
                    file.close()
                return blocks * len(block) / (time.perf_counter() - began)
        except OSError as error:
            raise StoreError(f"{self} cannot be written: {error.strerror}; give another place") from error

    def _folder(self) -> Path:
        """The directory, or the nearest above it that is there."""
        path = self.path.resolve()
        return next(p for p in (path, *path.parents) if p.is_dir())

    def zarr(self, folder: str) -> Path:
        """The folder."""
        return self.path / folder


class _ChunkFile(NewChunk):
    def __init__(self, part: Path, path: Path) -> None:
        self._part, self._path, self._file = part, path, direct.NewFile(part)

    def append(self, piece: np.ndarray) -> None:
        self._file.append(piece)

    def finish(self) -> None:
        self._file.finish()
        os.replace(self._part, self._path)

    def abandon(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            self._part.unlink()
