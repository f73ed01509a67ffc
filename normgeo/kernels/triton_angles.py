"""What becomes of projections on CUDA, in Triton: angles added up, and the moments of those to a null ensemble.

Angles are whole numbers of units, whose sums are exact in any order. Rows of bfloat16 are multiplied with the ensemble
where they lie: products of two bfloat16 are exact in float32, in which they are added up.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare (no_type_check), see there
# pyright: reportMissingImports=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

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
ROWS, COLUMNS, DEPTH = 64, 64, 64  # rows and directions of a program, and numbers of both that it multiplies at a time
WARPS = 8  # of a program that multiplies: with fewer its numbers do not fit the registers
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


@triton.jit(do_not_specialize=["rows", "steps"])
@no_type_check
def _moments(
    x_at, index_at, lengths_at, units_at, shrink_at, out_at, rows, steps, d, stride, K: tl.constexpr,
    NARROW: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    part, block = tl.program_id(0) // (K // COLUMNS), tl.program_id(0) % (K // COLUMNS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    shrink = tl.load(shrink_at + column)
    first = tl.zeros((COLUMNS,), tl.float64)
    second = tl.zeros((COLUMNS,), tl.float64)
    third = tl.zeros((COLUMNS,), tl.float64)
    for step in range(steps):
        row = (part * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        index = tl.load(index_at + row, mask=inside, other=0).to(tl.int64)
        length = tl.load(lengths_at + index, mask=inside, other=0.0).to(tl.float32)
        known = inside & (length > 0) & (length < float("inf"))  # not so where it is NaN
        length = tl.where(known, length, 1.0)
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        if tl.min(length, axis=0) < SMALL:  # rows of numbers so small that their products are nothing
            factor = tl.where(length < SMALL, LARGE, 1.0)
            for start in range(0, d, DEPTH):
                k = start + tl.arange(0, DEPTH)
                v = tl.load(
                    x_at + index[:, None] * stride + k[None, :], mask=known[:, None] & (k < d)[None, :], other=0.0
                )
                v = (v.to(tl.float32) * factor[:, None]).to(NARROW)
                unit = tl.load(units_at + k[:, None] * K + column[None, :], mask=(k < d)[:, None], other=0.0)
                dots = tl.dot(v.to(NARROW), unit.to(NARROW), dots)
            length *= factor
        else:
            for start in range(0, d, DEPTH):
                k = start + tl.arange(0, DEPTH)
                v = tl.load(
                    x_at + index[:, None] * stride + k[None, :], mask=known[:, None] & (k < d)[None, :], other=0.0
                )
                unit = tl.load(units_at + k[:, None] * K + column[None, :], mask=(k < d)[:, None], other=0.0)
                dots = tl.dot(v.to(NARROW), unit.to(NARROW), dots)
        cosine = tl.where(known[:, None], dots * (1.0 / length)[:, None] * shrink[None, :], 0.0)
        arc = _arcsine(cosine).to(tl.float64)
        cosine = cosine.to(tl.float64)
        first += tl.sum(arc, axis=0)
        second += tl.sum(arc * arc, axis=0)
        third += tl.sum(cosine * cosine, axis=0)
    out_at += part.to(tl.int64) * 3 * K
    tl.store(out_at + column, first)
    tl.store(out_at + K + column, second)
    tl.store(out_at + 2 * K + column, third)


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
        k: how many vectors.
        parts: how many programs share the rows, however few.
    """

    units: Tensor
    shrink: Tensor
    k: int
    parts: int

    def moments(self, x: Tensor, index: Tensor, lengths: Tensor) -> Tensor:
        """As those of `kernels.ensemble.Ensemble`, of parts of the rows: [parts, 3, k]."""
        x, room = x if x.stride(1) == 1 else x.contiguous(), len(self.shrink)
        out = torch.empty((self.parts, 3, room), dtype=torch.float64, device=x.device)
        steps = -(-len(index) // (ROWS * self.parts))
        narrow = tl.float32 if x.is_cpu else tl.bfloat16  # Triton's interpreter does not multiply those
        MOMENTS(
            self.parts * (room // COLUMNS), (x, index, lengths, self.units, self.shrink, out), (len(index), steps),
            (x.shape[1], x.stride(0)), (room, narrow, SMALL, LARGE, ROWS, COLUMNS, DEPTH), WARPS,
        )  # fmt: skip
        return out[..., : self.k]


def packed(vectors: Tensor, device: torch.device) -> Ensemble:
    """Vectors of bfloat16 [k, d] for the kernel."""
    k, d = vectors.shape
    room = -(-k // COLUMNS) * COLUMNS
    units = torch.zeros((d, room), dtype=torch.bfloat16, device="cpu")
    shrink = torch.zeros(room, dtype=torch.float32, device="cpu")
    units[:, :k] = vectors.T
    shrink[:k] = 1 / torch.linalg.vector_norm(vectors.double(), dim=1)
    return Ensemble(units.to(device), shrink.to(device), k, max(1, multiprocessors(device) // (room // COLUMNS)))


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built, or what was built gives something else when it is launched again."""
    ones = torch.ones((1, 1, 2), dtype=torch.float32, device=device)
    degrees, sines = ones.expand(1, 3, 2).contiguous(), ones.expand(1, 3, 2).double().contiguous()
    group, sites = torch.zeros(2, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.zeros((1, 3, 3, BINS), dtype=torch.int64, device=device)
    rows = torch.ones((2, 16), dtype=torch.bfloat16, device=device)
    ensemble = packed(rows[:1].cpu(), device)
    for number in (1, 2):
        sums = torch.empty((1, 3, 13), dtype=torch.float64, device=device)
        out = Sums(sums, torch.empty_like(sums[..., :3]), torch.empty_like(sums[..., :3]))
        tally(ones, degrees, sines, group, Histogram(counts, sites, 0), out)
        lengths = torch.full((2,), 8.0, dtype=torch.float64, device=device)
        energy = ensemble.moments(rows, torch.arange(2, device=device), lengths)[:, 2].sum()
        if (float(sums[0, 0, 0]), int(counts[0, 0, 0].max()), float(energy)) != (2.0, 2 * number, 0.5):
            raise RuntimeError("angles came out wrong")
