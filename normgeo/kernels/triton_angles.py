"""What becomes of projections on CUDA, in Triton: angles added up, and the moments of those to a null ensemble.

Angles are whole numbers of units, whose sums are exact in any order. Rows of bfloat16 are multiplied with the ensemble
where they lie: products of two bfloat16 are exact in float32, in which they are added up.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare (no_type_check), see there
# pyright: reportMissingImports=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from normgeo.kernels.fallback import BINS, ENERGY_UNIT, UNIT, Histogram, Sums
from normgeo.kernels.launching import Launcher, multiprocessors

__all__ = ["Ensemble", "launch_smallest", "packed", "tally"]

BLOCK = 256  # vectors a program
EDGES = 6  # least and most of three angles, behind the sums
COLUMNS, DEPTH = 64, 64  # directions of a program, and numbers of them that it multiplies at a time
ROWS = {False: (64, 8), True: (32, 4)}
"""Rows that a program multiplies at a time, and its warps, if they keep or lose their mean: what fits the registers."""

SMALL, LARGE = 2.0**-90, 2.0**100  # lengths of which products would be lost, and what rows of those are multiplied by


@triton.jit
@no_type_check
def _rounded(v):
    """The whole number next to v >= 0, the even one where two are: what has 52 bits before the point is one."""
    magic: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52
    return tl.where(v < 2251799813685248.0, (v + magic) - magic, v)


@triton.jit
@no_type_check
def _sums_to(out_at, inside, value):
    tl.store(out_at, tl.sum(tl.where(inside, value, 0.0), axis=0))


@triton.jit(do_not_specialize=["vectors", "blocks"])
@no_type_check
def _tally(
    norms_at, degrees_at, sines_at, group_at, sites_at, counts_at, out_at, vectors, blocks, UNIT: tl.constexpr,
    ENERGY_UNIT: tl.constexpr, BINS: tl.constexpr, PHASE: tl.constexpr, PHASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    site, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < vectors
    start = site.to(tl.int64) * vectors
    group = tl.load(group_at + at, mask=there, other=3)
    norm = tl.load(norms_at + start * PHASES + at, mask=there, other=0.0)
    first = tl.load(degrees_at + start * 3 + at, mask=there, other=0.0)
    second = tl.load(degrees_at + start * 3 + vectors + at, mask=there, other=0.0)
    third = tl.load(degrees_at + start * 3 + 2 * vectors + at, mask=there, other=0.0)
    whole = norm + (first + second + third)
    known = there & (norm > 0) & (tl.abs(whole) < float("inf"))  # not so where it is NaN
    WIDTH: tl.constexpr = 12 + PHASES + 6
    out_at += tl.program_id(0).to(tl.int64) * 3 * WIDTH
    for g in tl.static_range(3):
        here = there & (group == g)
        counted = here & known
        tl.store(out_at + g * WIDTH, tl.sum(counted.to(tl.int32), axis=0).to(tl.float64))
        tl.store(out_at + g * WIDTH + 1, tl.sum((here & ~known).to(tl.int32), axis=0).to(tl.float64))
        _sums_to(out_at + g * WIDTH + 11, counted, tl.abs(first.to(tl.float64) * UNIT))
        for p in tl.static_range(PHASES):
            length = tl.load(norms_at + (start * PHASES + p * vectors) + at, mask=there, other=0.0)
            _sums_to(out_at + g * WIDTH + 12 + p, counted, _rounded(length.to(tl.float64) * UNIT))
    home = tl.load(sites_at + site).to(tl.int64) * 9 * BINS
    for j in tl.static_range(3):
        degrees = tl.load(degrees_at + start * 3 + j * vectors + at, mask=there, other=0.0).to(tl.float64)
        sine = tl.load(sines_at + start * 3 + j * vectors + at, mask=there, other=0.0)
        units = degrees * UNIT
        square, energy = _rounded(units * units * (1 / UNIT)), _rounded(sine * sine * ENERGY_UNIT)
        for g in tl.static_range(3):
            counted = known & (group == g)
            _sums_to(out_at + g * WIDTH + 2 + j, counted, units)
            _sums_to(out_at + g * WIDTH + 5 + j, counted, square)
            _sums_to(out_at + g * WIDTH + 8 + j, counted, energy)
            tl.store(out_at + (g * WIDTH + 12 + PHASES + j), tl.min(tl.where(counted, units, float("inf")), axis=0))
            tl.store(out_at + (g * WIDTH + 15 + PHASES + j), tl.max(tl.where(counted, units, -float("inf")), axis=0))
        place = tl.minimum(tl.maximum((90.0 - degrees) * 100.0, 0.0), BINS - 1.0)
        place = tl.where(known, place, 0.0).to(tl.int64)
        ones = tl.full((BLOCK,), 1, tl.int64)
        for p in tl.static_range(PHASES):
            tl.atomic_add(counts_at + home + ((PHASE + p) * 3 + j) * BINS + place, ones, mask=known, sem="relaxed")


@triton.jit
@no_type_check
def _arcsine(c):
    """As `arcsine.h` has it (Cephes' asinf)."""
    a = tl.minimum(tl.abs(c), 1.0)
    large = a > 0.5
    z = tl.where(large, 0.5 * (1.0 - a), a * a)
    s = tl.where(large, tl.sqrt(z), a)
    p = 4.2163199048e-2 * z + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    r = s + s * z * p
    r = tl.where(large, 1.57079632679 - 2.0 * r, r)
    return tl.where(c < 0, -r, r)


@triton.jit
@no_type_check
def _dots(
    x_at, index, units_at, column, known, factor, high, low, d, stride, CENTERED: tl.constexpr, SCALED: tl.constexpr,
    K: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows times some of the vectors: as they are, times a factor, or without their mean, which is high + low."""
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, d, DEPTH):
        k = start + tl.arange(0, DEPTH)
        there = known[:, None] & (k < d)[None, :]
        v = tl.load(x_at + index[:, None] * stride + k[None, :], mask=there, other=0.0)
        unit = tl.load(units_at + k[:, None] * K + column[None, :], mask=(k < d)[:, None], other=0.0).to(NARROW)
        if CENTERED:  # what has 24 bits is the sum of three numbers of 8
            rest = tl.where(there, ((v.to(tl.float32) - high[:, None]) - low[:, None]) * factor[:, None], 0.0)
            v = rest.to(tl.bfloat16)
            rest -= v.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            last = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            dots = tl.dot(last.to(NARROW), unit, dots)
            dots = tl.dot(middle.to(NARROW), unit, dots)
        elif SCALED:
            v = (v.to(tl.float32) * factor[:, None]).to(tl.bfloat16)
        dots = tl.dot(v.to(NARROW), unit, dots)
    return dots


@triton.jit
@no_type_check
def _known(length, inside):
    """Which rows have a length in float32, and that, or one."""
    length = length.to(tl.float32)
    known = inside & (length > 0) & (length < float("inf"))  # not so where it is NaN
    return known, tl.where(known, length, 1.0)


@triton.jit
@no_type_check
def _added(cosine, known, first, second, third):
    """The sums of the angles of [rows, vectors], of their squares, and of the squares of the cosines, with these."""
    cosine = tl.where(known[:, None], cosine, 0.0)
    arc = _arcsine(cosine).to(tl.float64)
    cosine = cosine.to(tl.float64)
    return first + tl.sum(arc, axis=0), second + tl.sum(arc * arc, axis=0), third + tl.sum(cosine * cosine, axis=0)


@triton.jit
@no_type_check
def _sums_at(out_at, K: tl.constexpr, first, second, third):
    tl.store(out_at, first)
    tl.store(out_at + K, second)
    tl.store(out_at + 2 * K, third)


@triton.jit(do_not_specialize=["rows", "steps", "plane"])
@no_type_check
def _moments(
    x_at, index_at, scalars_at, units_at, shrink_at, gram_at, out_at, rows, steps, plane, d, stride,
    CENTERED: tl.constexpr, K: tl.constexpr, NARROW: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    part, block = tl.program_id(0) // (K // COLUMNS), tl.program_id(0) % (K // COLUMNS)
    column, plane = block * COLUMNS + tl.arange(0, COLUMNS), plane.to(tl.int64)
    shrink = tl.load(shrink_at + column)
    first = tl.zeros((COLUMNS,), tl.float64)
    second, third, fourth, fifth, sixth = first, first, first, first, first
    for step in range(steps):
        row = (part * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        index = tl.load(index_at + row, mask=inside, other=0).to(tl.int64)
        whole = tl.load(scalars_at + index, mask=inside, other=0.0)
        if CENTERED:
            along = tl.load(scalars_at + plane + index, mask=inside, other=0.0)
            known, length = _known(tl.load(scalars_at + 4 * plane + index, mask=inside, other=0.0), inside)
            mean = tl.where(known, along, 0.0) / tl.sqrt(tl.full((ROWS,), 0.0, tl.float64) + d)
            high = mean.to(tl.float32)
            low = (mean - high.to(tl.float64)).to(tl.float32)
            factor = tl.where(length < SMALL, LARGE, 1.0)
            dots = _dots(
                x_at, index, units_at, column, known, factor, high, low, d, stride, True, True, K, NARROW, ROWS,
                COLUMNS, DEPTH,
            )  # fmt: skip
            dots *= (1.0 / (length * factor))[:, None] * shrink[None, :]
            fourth, fifth, sixth = _added(dots, known, fourth, fifth, sixth)
            some, _ = _known(whole, inside)
            whole = tl.where(some, whole, 1.0)
            share = tl.where(known & some, length.to(tl.float64) / whole, 0.0).to(tl.float32)
            along = tl.where(some, along / whole, 0.0).to(tl.float32)
            dots = dots * share[:, None] + along[:, None] * tl.load(gram_at + column)[None, :]
            first, second, third = _added(dots, some, first, second, third)
        else:
            known, length = _known(whole, inside)
            # of numbers so small that their products are nothing, rows are made larger first
            factor = tl.where(length < SMALL, LARGE, 1.0)
            if tl.min(length, axis=0) < SMALL:
                dots = _dots(
                    x_at, index, units_at, column, known, factor, factor, factor, d, stride, False, True, K, NARROW,
                    ROWS, COLUMNS, DEPTH,
                )  # fmt: skip
            else:
                dots = _dots(
                    x_at, index, units_at, column, known, factor, factor, factor, d, stride, False, False, K, NARROW,
                    ROWS, COLUMNS, DEPTH,
                )  # fmt: skip
            dots *= (1.0 / (length * factor))[:, None] * shrink[None, :]
            first, second, third = _added(dots, known, first, second, third)
    out_at += part.to(tl.int64) * (6 * K if CENTERED else 3 * K) + column
    _sums_at(out_at, K, first, second, third)
    if CENTERED:
        _sums_at(out_at + 3 * K, K, fourth, fifth, sixth)


TALLY, MOMENTS = Launcher(_tally), Launcher(_moments)


def tally(norms: Tensor, degrees: Tensor, sines: Tensor, group: Tensor, histogram: Histogram, out: Sums) -> None:
    """Fill `out` and add to the histogram, for contiguous tensors, its own too; see `kernels.tally`."""
    sites, phases, vectors = norms.shape
    blocks, width = -(-vectors // BLOCK), 12 + phases
    if not sites * vectors:
        return
    parts = torch.empty((sites, blocks, 3, width + EDGES), dtype=torch.float64, device=norms.device)
    tensors = (norms, degrees, sines, group, histogram.sites, histogram.counts, parts)
    constants = UNIT, ENERGY_UNIT, BINS, histogram.phase, phases, BLOCK
    TALLY(sites * blocks, tensors, (vectors, blocks), (), constants)
    torch.sum(parts[..., :width], 1, out=out.sums)
    torch.amin(parts[..., width : width + 3], 1, out=out.least)
    torch.amax(parts[..., width + 3 :], 1, out=out.most)


@dataclass(frozen=True)
class Ensemble:
    """Vectors as the kernel reads them.

    Attributes:
        units: bfloat16 [d, K], K a multiple of what a program has.
        shrink: float32 [K], one over the vectors' lengths; zero for what is none of theirs.
        gram: float32 [K], the vectors' cosines with û, if rows lose their mean first; else None.
        k: how many vectors.
        parts: how many programs share the rows, however few.
    """

    units: Tensor
    shrink: Tensor
    gram: Tensor | None
    k: int
    parts: int

    def moments(self, x: Tensor, index: Tensor, scalars: Tensor) -> Tensor:
        """As those of `kernels.ensemble.Ensemble`, of parts of the rows: [parts, 3 or 6, k]."""
        x, room, centered = x if x.stride(1) == 1 else x.contiguous(), len(self.shrink), self.gram is not None
        out = torch.empty((self.parts, 6 if centered else 3, room), dtype=torch.float64, device=x.device)
        rows, warps = ROWS[centered]
        steps = -(-len(index) // (rows * self.parts))
        narrow = tl.float32 if x.is_cpu else tl.bfloat16  # Triton's interpreter does not multiply those
        MOMENTS(
            self.parts * (room // COLUMNS), (x, index, scalars, self.units, self.shrink, self.gram, out),
            (len(index), steps, scalars.stride(0)), (x.shape[1], x.stride(0)),
            (centered, room, narrow, SMALL, LARGE, rows, COLUMNS, DEPTH), warps,
        )  # fmt: skip
        return out[..., : self.k]


def packed(vectors: Tensor, device: torch.device, centered: bool) -> Ensemble:
    """Vectors of bfloat16 [k, d] for the kernel, and rows that lose their mean first, if they are to."""
    k, d = vectors.shape
    room = -(-k // COLUMNS) * COLUMNS
    units = torch.zeros((d, room), dtype=torch.bfloat16, device="cpu")
    shrink, gram = torch.zeros((2, room), dtype=torch.float32, device="cpu")
    units[:, :k], wide = vectors.T, vectors.double()
    shrink[:k] = 1 / torch.linalg.vector_norm(wide, dim=1)
    gram[:k] = wide.sum(1) / (torch.linalg.vector_norm(wide, dim=1) * math.sqrt(d))
    parts = max(1, multiprocessors(device) // (room // COLUMNS))
    return Ensemble(units.to(device), shrink.to(device), gram.to(device) if centered else None, k, parts)


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built, or what was built gives something else when it is launched again."""
    ones = torch.ones((1, 1, 2), dtype=torch.float32, device=device)
    degrees, sines = ones.expand(1, 3, 2).contiguous(), ones.expand(1, 3, 2).double().contiguous()
    group, sites = torch.zeros(2, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.zeros((1, 3, 3, BINS), dtype=torch.int64, device=device)
    rows = torch.ones((2, 16), dtype=torch.bfloat16, device=device)
    ensembles = [packed(rows[:1].cpu(), device, centered) for centered in (False, True)]
    scalars = torch.tensor([[8.0], [2.0], [0.0], [0.0], [8.0]], dtype=torch.float64, device=device).repeat(1, 2)
    for number in (1, 2):
        sums = torch.empty((1, 3, 13), dtype=torch.float64, device=device)
        out = Sums(sums, torch.empty_like(sums[..., :3]), torch.empty_like(sums[..., :3]))
        tally(ones, degrees, sines, group, Histogram(counts, sites, 0), out)
        moments = [e.moments(rows, torch.arange(2, device=device), scalars).sum((0, 2)).tolist() for e in ensembles]
        found = float(sums[0, 0, 0]), int(counts[0, 0, 0].max()), moments[0][2], *moments[1][2::3]
        if found != (2.0, 2 * number, 0.5, 0.5, 0.125):
            raise RuntimeError("angles came out wrong")
