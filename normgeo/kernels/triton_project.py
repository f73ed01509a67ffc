"""The pass over hidden states on CUDA, in Triton: norms and projections in one reading, summed in float64."""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare (no_type_check), see there
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch_smallest", "project"]

BLOCK, ROWS, EACH = 256, 8, 4  # numbers of a row at a time, rows a program, and neighbours that one thread adds up


@triton.jit
@no_type_check
def _folded(products, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Sums over neighbours, which one thread has: threads need not meet before the row's end."""
    return tl.sum(products.reshape((ROWS, LANES, EACH)), axis=2)


@triton.jit
@no_type_check
def _project(
    x_at, units_at, out_at, rows, d, stride, plane, CENTERED: tl.constexpr, ROWS: tl.constexpr,
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
    tl.store(out_at + row, tl.sqrt(tl.sum(squares, axis=1)), mask=inside)
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
        tl.store(out_at + 4 * plane + row, tl.sqrt(tl.sum(left, axis=1)), mask=inside)


def project(x: Tensor, units: Tensor, centered: bool, out: Tensor) -> None:
    """Fill out [quantities, vectors] for x [vectors, d] with adjacent elements; float64 contiguous units."""
    rows, d = x.shape
    if not rows:
        return
    _project[(triton.cdiv(rows, ROWS),)](
        x, units, out, rows, d, x.stride(0), out.stride(0), CENTERED=centered, ROWS=ROWS, BLOCK=BLOCK, EACH=EACH
    )


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built."""
    rows, units, out = (torch.ones(shape, dtype=torch.float64, device=device) for shape in ((1, 16), (3, 16), (4, 1)))
    project(rows, units, False, out)
