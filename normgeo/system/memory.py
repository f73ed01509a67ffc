"""Memory that is used again: a system clears every page that it gives, which takes as long as a disk takes to fill."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

__all__ = ["PAGE", "memory_kept", "pages"]

PAGE = 4096
LARGE = 1 << 20  # bytes; what is smaller is kept anyway
AT_MOST = 1 << 30  # bytes that wait to be used again

_keeping, _free = 0, defaultdict[int, list[mmap.mmap]](list)  # how many want memory kept; what is, by size
_changing = threading.RLock()  # arrays come to their end anywhere, within what is done here as well


@contextmanager
def memory_kept() -> Iterator[None]:
    """Have `pages` and glibc keep what is used no more, for other threads too, and serve every size from it.

    Otherwise large tensors are mapped and cleared at each use.
    """
    global _keeping
    trim_threshold, mmap_max = -1, -4
    mallopt = _mallopt()
    with _changing:
        _keeping += 1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)
    try:
        yield
    finally:
        with _changing:
            _keeping -= 1
            if not _keeping:
                mallopt(mmap_max, 65536)  # the default, and what the other's adjusts itself to
                mallopt(trim_threshold, 1 << 26)
                _free.clear()


def pages(n: int) -> np.ndarray:
    """Memory for so many bytes, in whole pages, at an address that is a multiple of a page's size.

    While memory is kept, large pages where the system has some, of which a disk's driver takes each for itself.
    """
    whole = -(-n // PAGE) * PAGE
    memory = _mapped(whole) if _keeping and whole >= LARGE else None
    if memory is None:
        found = np.empty(whole + PAGE, np.uint8)
        return found[-found.ctypes.data % PAGE :][:whole]
    held = (ctypes.c_uint8 * whole).from_buffer(memory)
    weakref.finalize(held, _back, whole, memory).atexit = False
    return np.frombuffer(held, np.uint8)  # pyright: ignore


def _mapped(n: int) -> mmap.mmap | None:
    """What is kept of this size, or new; None where there is none."""
    with _changing:
        if free := _free[n]:
            return free.pop()
    try:
        memory = mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork's are its own
    except OSError:
        return None
    with suppress(AttributeError, OSError):  # another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _back(n: int, memory: mmap.mmap) -> None:
    """Called when the last array over the memory is gone."""
    with _changing:
        if not _keeping:
            return
        if n + sum(size * len(free) for size, free in list(_free.items())) > AT_MOST:
            for size in [size for size in _free if size != n]:  # nobody asks for them any more
                del _free[size]
        if n * (len(_free[n]) + 1) <= AT_MOST:
            _free[n].append(memory)


def _mallopt():  # noqa: ANN202
    """Glibc's function, or one that does nothing."""
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return lambda *_: None
