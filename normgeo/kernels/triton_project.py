"""Passes over hidden states on CUDA, in Triton.

Norms and projections come of one reading, summed in float64; chosen rows become unit vectors in one more. With a first
number far from all others a row's norms lose up to a factor d of float64's precision if its mean is taken away.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare (no_type_check), see there
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from normgeo.kernels.launching import Launcher

__all__ = ["gather", "launch_smallest", "project"]

ROWS, BLOCK, AT_ONCE = 4, 64, 4  # rows a program, numbers of a row at a time, and such blocks under way
FEW, WIDE = 4, 256  # the same of a program that gathers: there are fewer of them


@triton.jit(do_not_specialize=["rows", "plane"])
@no_type_check
def _project(
    x_at, units_at, out_at, rows, plane, d, stride, nothing, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, plane = row < rows, plane.to(tl.int64)
    at = row.to(tl.int64)[:, None] * stride
    shift = tl.zeros((ROWS,), tl.float64)
    if CENTERED:  # moved by its first number, a row's squares are at most 1 + d times what they are without its mean,
        # which can be taken from their sum then, of whatever row: one reading gives it all
        shift = tl.load(x_at + row.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float64)
        shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)
    squares = tl.zeros((ROWS, BLOCK), tl.float64)
    first = tl.zeros((ROWS, BLOCK), tl.float64)
    second = tl.zeros((ROWS, BLOCK), tl.float64)
    third = tl.zeros((ROWS, BLOCK), tl.float64)
    seconds = tl.zeros((BLOCK,), tl.float64)
    thirds = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, d, BLOCK, loop_unroll_factor=AT_ONCE):
        # a warp whose threads take two numbers each has x as it has the units, which it can load in twos alone: else
        # they would change hands, through shared memory
        column = tl.max_contiguous(start + tl.arange(0, BLOCK), 2)
        there = column < d
        v = tl.load(x_at + at + column[None, :], mask=inside[:, None] & there[None, :], other=0.0).to(tl.float64)
        if CENTERED:
            v = tl.where(there[None, :], v - shift[:, None], 0.0)
        squares += v * v
        first += v
        unit = tl.load(units_at + d + column, mask=there, other=0.0)
        second += v * unit[None, :]
        if CENTERED:
            seconds += unit
        unit = tl.load(units_at + 2 * d + column, mask=there, other=0.0)
        third += v * unit[None, :]
        if CENTERED:
            thirds += unit
    square, whole = tl.sum(squares, axis=1), tl.sum(first, axis=1)
    dot, other = tl.sum(second, axis=1), tl.sum(third, axis=1)
    along = (whole + shift * d) * tl.load(units_at)  # the first unit vector is that number everywhere
    length = tl.sqrt(square)
    if CENTERED:
        left = tl.maximum(square - whole * (whole / d), 0.0, propagate_nan=tl.PropagateNan.ALL)
        length = tl.sqrt(tl.where(square < float("inf"), left + along * along, square))  # infinite where a number is
        rest = tl.sqrt(left)
        dot, other = dot + shift * tl.sum(seconds, axis=0), other + shift * tl.sum(thirds, axis=0)
        tl.store(out_at + 4 * plane + row, tl.where(rest <= nothing * length, 0.0, rest), mask=inside)
    tl.store(out_at + row, length, mask=inside)
    tl.store(out_at + plane + row, along, mask=inside)
    tl.store(out_at + 2 * plane + row, dot, mask=inside)
    tl.store(out_at + 3 * plane + row, other, mask=inside)


@triton.jit(do_not_specialize=["rows", "plane"])
@no_type_check
def _gather(
    x_at, index_at, scalars_at, out_at, rows, plane, d, stride, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, plane = row < rows, plane.to(tl.int64)
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


PROJECT, GATHER = Launcher(_project), Launcher(_gather)


def project(x: Tensor, units: Tensor, centered: bool, out: Tensor, nothing: float) -> None:
    """Fill out [quantities, vectors] for x [vectors, d] with adjacent elements; float64 contiguous units, û first.

    Less than a share of `nothing` of a vector's norm is no norm without the mean.
    """
    rows, d = x.shape
    if rows:
        counts, numbers = (rows, out.stride(0)), (d, x.stride(0), nothing)
        PROJECT(-(-rows // ROWS), (x, units, out), counts, numbers, (centered, ROWS, BLOCK, AT_ONCE), 1)


def gather(x: Tensor, index: Tensor, scalars: Tensor, centered: bool, out: Tensor) -> None:
    """Fill the contiguous out [n, d] in float32 with the unit vectors of those rows of x [vectors, d]."""
    rows, d = out.shape
    if rows:
        counts, numbers = (rows, scalars.stride(0)), (d, x.stride(0))
        GATHER(-(-rows // FEW), (x, index, scalars, out), counts, numbers, (centered, FEW, WIDE))


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built, or what was built gives something else when it is launched again."""
    rows, units, out = (torch.ones(shape, dtype=torch.float64, device=device) for shape in ((1, 16), (3, 16), (4, 1)))
    for _ in range(2):
        project(rows, units, False, out.fill_(1.0), 0.0)
        gather(rows, torch.zeros(1, dtype=torch.int64, device=device), out, False, unit := rows.float())
        if not (bool((out[0] == 4.0).all()) and bool((unit == 0.25).all())):
            raise RuntimeError("projections came out wrong")
