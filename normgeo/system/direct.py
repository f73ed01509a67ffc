"""Files read and written past the system's memory: a store is larger than that, and its bytes are needed once.

Copies through memory are made by the processors that the model computes on: on a virtual machine of two, reading 4 GB
took 4 to 11 seconds of their time, and 0.2 seconds directly.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np

from normgeo.system.memory import PAGE as BLOCK  # disks take whole ones, at addresses that are multiples of as many
from normgeo.system.memory import pages

__all__ = ["BLOCK", "NewFile", "allow_open", "read_range"]

DIRECT = getattr(os, "O_DIRECT", 0)
OTHERS = 256  # files that the rest of a process may have open


def read_range(path: Path, start: int, n: int) -> np.ndarray:
    """Bytes `start` to `start + n` of a file, or up to its end.

    Raises:
        OSError: it cannot be read.
    """
    before = start % BLOCK
    into, found = pages(before + n), 0
    descriptor = _opened(path, os.O_RDONLY)
    try:
        while found < len(into) and not found % BLOCK:
            try:
                more = os.preadv(descriptor, [into[found:].data], start - before + found)
            except OSError as error:
                _through_memory(descriptor, error)
                continue
            if not more:
                break
            found += more
    finally:
        os.close(descriptor)
    return into[before : min(found, before + n)]


class NewFile:
    """A file that grows at its end.

    Args:
        path: where; what is there is replaced.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._rest, self._size = np.empty(0, np.uint8), 0
        self._descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def append(self, piece: np.ndarray) -> None:
        """Add bytes; those that fill no block wait for the next. Where pieces are whole blocks nothing is copied."""
        self._size += len(piece)
        if len(self._rest) or piece.ctypes.data % BLOCK:
            n = len(self._rest) + len(piece)
            piece = np.concatenate([self._rest, piece], out=pages(n)[:n])
        whole = len(piece) // BLOCK * BLOCK
        self._rest = piece[whole:].copy()
        self._write(piece[:whole])

    def _write(self, blocks: np.ndarray) -> None:
        while len(blocks):
            try:
                blocks = blocks[os.write(self._descriptor, blocks.data) :]
            except OSError as error:
                _through_memory(self._descriptor, error)

    def finish(self) -> None:
        """Write what is left; `sync` has it survive a power cut."""
        if len(self._rest):
            last = pages(BLOCK)
            last[: len(self._rest)], last[len(self._rest) :] = self._rest, 0
            self._write(last)
            os.ftruncate(self._descriptor, self._size)
        self.close()

    def sync(self) -> None:
        """Make the blocks written so far survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Leave it as it is; once is enough."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def allow_open(files: int) -> bool:
    """Whether so many files can be open at once, for which the system is asked: few are allowed (1024, say) until then.

    Where it allows just a few more, it is left to be seen whether these are enough for all else.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == resource.RLIM_INFINITY or files + OTHERS <= before:
        return True
    wanted = files + OTHERS if most == resource.RLIM_INFINITY else min(most, files + OTHERS)
    with suppress(ValueError, OSError):  # another limit of the system's is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return files < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not DIRECT:
            raise
        return os.open(path, flags, 0o666)


def _through_memory(descriptor: int, error: OSError) -> None:
    """Go on as all file systems can, if this one cannot read or write directly; else raise the error."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & DIRECT:
        raise error
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
