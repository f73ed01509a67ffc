"""Passes over hidden states on CUDA, in Triton.

Norms and projections come of one reading, summed in float64; chosen rows become unit vectors in one more.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare (no_type_check), see there
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather", "launch_smallest", "project"]

BLOCK, ROWS, EACH = 256, 8, 4  # numbers of a row at a time, rows a program, and neighbours that one thread adds up
FEW = 4  # rows a program that gathers: there are fewer of them


@triton.jit
@no_type_check
def _folded(products, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Sums over neighbours, which one thread has: threads need not meet before the row's end."""
    return tl.sum(products.reshape((ROWS, LANES, EACH)), axis=2)


@triton.jit
@no_type_check
def _project(
    x_at, units_at, out_at, rows, d, stride, plane, nothing, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = BLOCK // EACH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = row.to(tl.int64)[:, None] * stride
    squares = tl.zeros((ROWS, LANES), tl.float64)
    first = tl.zeros((ROWS, LANES), tl.float64)
    second = tl.zeros((ROWS, LANES), tl.float64)
    third = tl.zeros((ROWS, LANES), tl.float64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < d
        v = tl.load(x_at + at + column[None, :], mask=inside[:, None] & there[None, :], other=0.0).to(tl.float64)
        squares += _folded(v * v, ROWS, LANES, EACH)
        unit = tl.load(units_at + column, mask=there, other=0.0)
        first += _folded(v * unit[None, :], ROWS, LANES, EACH)
        unit = tl.load(units_at + d + column, mask=there, other=0.0)
        second += _folded(v * unit[None, :], ROWS, LANES, EACH)
        unit = tl.load(units_at + 2 * d + column, mask=there, other=0.0)
        third += _folded(v * unit[None, :], ROWS, LANES, EACH)
    along = tl.sum(first, axis=1)
    length = tl.sqrt(tl.sum(squares, axis=1))
    tl.store(out_at + row, length, mask=inside)
    tl.store(out_at + plane + row, along, mask=inside)
    tl.store(out_at + 2 * plane + row, tl.sum(second, axis=1), mask=inside)
    tl.store(out_at + 3 * plane + row, tl.sum(third, axis=1), mask=inside)
    if CENTERED:  # the rows are in the cache still; the difference of squares would be rounding where little is left
        mean = along / tl.sqrt(tl.full((ROWS,), 0.0, tl.float64) + d)
        left = tl.zeros((ROWS, LANES), tl.float64)
        for start in range(0, d, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = inside[:, None] & (column < d)[None, :]
            v = tl.load(x_at + at + column[None, :], mask=there, other=0.0).to(tl.float64)
            v = tl.where(there, v - mean[:, None], 0.0)
            left += _folded(v * v, ROWS, LANES, EACH)
        rest = tl.sqrt(tl.sum(left, axis=1))
        tl.store(out_at + 4 * plane + row, tl.where(rest <= nothing * length, 0.0, rest), mask=inside)


@triton.jit
@no_type_check
def _gather(
    x_at, index_at, scalars_at, out_at, rows, d, stride, plane, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    index = tl.load(index_at + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(scalars_at + (4 * plane if CENTERED else 0) + index, mask=inside, other=0.0)
    short = length.to(tl.float32)
    known = inside & (short > 0) & (short < float("inf"))  # not so where it is NaN: zeros then
    length = tl.where(known, length, 1.0)
    mean = tl.zeros((ROWS,), tl.float64)
    if CENTERED:
        mean = tl.load(scalars_at + plane + index, mask=known, other=0.0) / tl.sqrt(mean + d)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = (column < d)[None, :]
        v = tl.load(x_at + index[:, None] * stride + column[None, :], mask=known[:, None] & there, other=0.0)
        unit = (v.to(tl.float64) - mean[:, None]) / length[:, None]
        at = row.to(tl.int64)[:, None] * d + column[None, :]
        tl.store(out_at + at, unit.to(tl.float32), mask=inside[:, None] & there)


def project(x: Tensor, units: Tensor, centered: bool, out: Tensor, nothing: float) -> None:
    """Fill out [quantities, vectors] for x [vectors, d] with adjacent elements; float64 contiguous units.

    Less than a share of `nothing` of a vector's norm is no norm without the mean.
    """
    rows, d = x.shape
    if not rows:
        return
    _project[(triton.cdiv(rows, ROWS),)](
        x, units, out, rows, d, x.stride(0), out.stride(0), nothing, CENTERED=centered, ROWS=ROWS, BLOCK=BLOCK,
        EACH=EACH,
    )  # fmt: skip


def gather(x: Tensor, index: Tensor, scalars: Tensor, centered: bool, out: Tensor) -> None:
    """Fill the contiguous out [n, d] in float32 with the unit vectors of those rows of x [vectors, d]."""
    rows, d = out.shape
    if not rows:
        return
    _gather[(triton.cdiv(rows, FEW),)](
        x, index, scalars, out, rows, d, x.stride(0), scalars.stride(0), CENTERED=centered, ROWS=FEW, BLOCK=BLOCK
    )


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built."""
    rows, units, out = (torch.ones(shape, dtype=torch.float64, device=device) for shape in ((1, 16), (3, 16), (4, 1)))
    project(rows, units, False, out, 0.0)
    gather(rows, torch.zeros(1, dtype=torch.int64, device=device), out, False, rows.float())
