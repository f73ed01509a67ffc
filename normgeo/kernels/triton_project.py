"""The pass over hidden states on CUDA, in Triton: norms and projections in one reading, summed in float64."""

# Triton comes with torch for CUDA, and is not there without
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["project"]

BLOCK, ROWS = 512, 4  # numbers of a row at a time, and rows a program


@triton.jit
def _project(
    x_at, units_at, out_at, rows, d, stride, plane, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = row.to(tl.int64) * stride
    square = tl.zeros((ROWS,), tl.float64)
    first = tl.zeros((ROWS,), tl.float64)
    second = tl.zeros((ROWS,), tl.float64)
    third = tl.zeros((ROWS,), tl.float64)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = tl.load(x_at + at[:, None] + column[None, :], mask=inside[:, None] & (column < d)[None, :], other=0.0)
        v = v.to(tl.float64)
        square += tl.sum(v * v, axis=1)
        first += tl.sum(v * tl.load(units_at + column, mask=column < d, other=0.0)[None, :], axis=1)
        second += tl.sum(v * tl.load(units_at + d + column, mask=column < d, other=0.0)[None, :], axis=1)
        third += tl.sum(v * tl.load(units_at + 2 * d + column, mask=column < d, other=0.0)[None, :], axis=1)
    tl.store(out_at + row, tl.sqrt(square), mask=inside)
    tl.store(out_at + plane + row, first, mask=inside)
    tl.store(out_at + 2 * plane + row, second, mask=inside)
    tl.store(out_at + 3 * plane + row, third, mask=inside)
    if CENTERED:  # the rows are in the cache still; the difference of squares would be rounding where little is left
        mean = first / tl.sqrt(tl.full((ROWS,), 0.0, tl.float64) + d)
        left = tl.zeros((ROWS,), tl.float64)
        for start in range(0, d, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = inside[:, None] & (column < d)[None, :]
            v = tl.load(x_at + at[:, None] + column[None, :], mask=there, other=0.0).to(tl.float64)
            v = tl.where(there, v - mean[:, None], 0.0)
            left += tl.sum(v * v, axis=1)
        tl.store(out_at + 4 * plane + row, tl.sqrt(left), mask=inside)


def project(x: Tensor, units: Tensor, centered: bool, out: Tensor) -> None:
    """Fill out [quantities, vectors] for x [vectors, d] with adjacent elements; float64 contiguous units."""
    rows, d = x.shape
    if not rows:
        return
    _project[(triton.cdiv(rows, ROWS),)](
        x, units, out, rows, d, x.stride(0), out.stride(0), CENTERED=centered, ROWS=ROWS, BLOCK=BLOCK
    )
