"""CRC-32C of bytes in the pass that copies them, by all processors where there is a compiler.

A forward pass waits until its hidden states are copied, and then every thread that reads them again takes a processor
from it: what has to be known of the bytes is found out while they pass.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from normgeo.kernels import cpu
from normgeo.kernels.compiling import function

__all__ = ["checksum", "copied", "joined"]

SOURCE = Path(__file__).with_name("checksum.cpp")
POLYNOMIAL, ONE = 0x82F63B78, 1 << 31  # bit 31 is the coefficient of 1, bit 0 that of x^31


@functools.cache
def loaded() -> Any:
    """The kernel, if there is a compiler and an instruction for it, else None. Never raises."""
    pointer = ctypes.c_void_p
    found = function(SOURCE, "normgeo_crc32c", ctypes.c_uint32, pointer, ctypes.c_int64, pointer, pointer)
    return found if found is not None and found(b"123456789", 9, None, None) == 0xE3069283 else None


def copied(
    source: Tensor, into: Tensor | None = None, parts: Sequence[slice] = (slice(None),), *, parallel: bool = True
) -> list[int]:
    """CRC-32C of each part of a tensor's bytes, which are copied meanwhile if there is a place for them.

    Args:
        source: a contiguous tensor on the CPU.
        into: as many bytes, elsewhere.
        parts: which bytes.
        parallel: use torch's threads; not from a thread beside torch's own.
    """
    ends = [part.indices(source.nbytes)[:2] for part in parts]
    if (kernel := loaded()) is None:
        raw = source.view(-1).view(torch.uint8)
        if into is not None:
            for start, stop in ends:
                into[start:stop] = raw[start:stop]
        return [google_crc32c.value(raw[start:stop].numpy()) for start, stop in ends]  # pyright: ignore
    x, place = source.data_ptr(), into.data_ptr() if into is not None else 0
    loop = cpu.parallel_for() if parallel else None
    return [kernel(x + start, stop - start, place + start if place else None, loop) for start, stop in ends]


def checksum(content: np.ndarray) -> int:
    """CRC-32C of contiguous bytes by the thread that asks, outside Python's lock."""
    return copied(torch.from_numpy(content), parallel=False)[0]


def joined(first: int, second: int, n: int) -> int:
    """CRC-32C of bytes and `n` more after them, from that of each: crc(ab) = x^(8n) crc(a) + crc(b) over GF(2)."""
    return _times(_shift(n), first) ^ second


def _times(a: int, b: int) -> int:
    product, bit = 0, ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(64)
def _shift(n: int) -> int:
    """x^(8n)."""
    found, power = ONE, ONE >> 8
    while n:
        if n & 1:
            found = _times(found, power)
        power, n = _times(power, power), n >> 1
    return found
