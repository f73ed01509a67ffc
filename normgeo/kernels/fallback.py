"""The passes over hidden states (`cpu`, `triton_project`) in torch: for other devices, and without a compiler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BINS", "ENERGY_UNIT", "UNIT", "Histogram", "Sums", "gather", "moments", "project", "tally"]

BINS = 18000  # of a hundredth of a degree
UNIT = 2.0**20  # parts of a degree, of a squared degree and of a norm that sums are exact in
ENERGY_UNIT = 2.0**32

ELEMENTS = 1 << 17  # that are float64 at a time on the CPU, so that they stay in its caches
ON_A_DEVICE = 1 << 24  # and elsewhere, where a batch's angles at all sites may be more than the model leaves room for


class Histogram(NamedTuple):
    """Where to count angles: counts [all sites, 3 phases, 3 directions, BINS], of these sites, from this phase on."""

    counts: Tensor
    sites: Tensor
    phase: int


class Sums(NamedTuple):
    """What `tally` gives.

    Attributes:
        sums: [sites, 3 groups, 12 + phases], in whole units: how many vectors count and how many do not, their three
            angles, the squares, the sines squared, the absolute value of the first angle, the norms in every phase.
        least: [sites, 3 groups, 3] smallest angles in units, infinite where no vector counts.
        most: the largest.
    """

    sums: Tensor
    least: Tensor
    most: Tensor


def project(x: Tensor, units: Tensor, centered: bool, out: Tensor) -> None:
    """Norms, projections and, if wanted, norms without the mean, in the dtype of `out`."""
    on_cpu = x.device.type == "cpu"
    step = min(len(x), max(1, (ELEMENTS if on_cpu else ON_A_DEVICE) // x.shape[1]))
    room = torch.empty((step, x.shape[1]), dtype=out.dtype, device=x.device)
    for i in range(0, len(x), max(1, step)):
        wide, part = room[: len(x) - i].copy_(x[i : i + step]), out[:, i : i + step]
        torch.linalg.vector_norm(wide, dim=1, out=part[0])
        torch.mm(units, wide.T, out=part[1:4])
        if not centered:
            continue
        if not on_cpu:
            torch.linalg.vector_norm(wide - wide.mean(1, keepdim=True), dim=1, out=part[4])
            continue
        whole = part[0].square()
        left = whole - part[1].square()
        torch.sqrt(left, out=part[4])
        few = (left <= 1e-4 * whole).nonzero()[:, 0]  # there the difference is rounding: take the mean away first
        if len(few):
            wide = wide[few]
            part[4, few] = torch.linalg.vector_norm(wide - wide.mean(1, keepdim=True), dim=1)


def gather(x: Tensor, index: Tensor, scalars: Tensor, centered: bool, out: Tensor) -> None:
    """Unit vectors of rows of x, or of x less its mean; zero where there is no such vector."""
    rows = x.index_select(0, index).to(scalars.dtype)
    length = scalars[4 if centered else 0].index_select(0, index)[:, None]
    short = length.to(out.dtype)
    if centered:
        rows -= rows.mean(1, keepdim=True)
    out.copy_((rows / length).masked_fill_(~((short > 0) & torch.isfinite(short)), 0.0))


def moments(cosines: Tensor, out: Tensor) -> None:
    """Sums over rows of arcsin(c), its square and c^2."""
    wide = out.dtype
    arcs = cosines.clamp(-1.0, 1.0).asin_()
    torch.sum(arcs, 1, dtype=wide, out=out[:, 0])
    torch.sum(arcs.square_(), 1, dtype=wide, out=out[:, 1])
    torch.sum(cosines.square(), 1, dtype=wide, out=out[:, 2])


def tally(norms: Tensor, degrees: Tensor, sines: Tensor, group: Tensor, histogram: Histogram, out: Sums) -> None:
    """Fill `out` and add to the histogram. Sums of whole numbers are exact in any order.

    Nothing here depends on how many vectors count: who asks a device for that waits for all that it was given to do.
    """
    inside = torch.stack([group == g for g in range(3)], 1)
    step = max(1, (ELEMENTS if degrees.device.type == "cpu" else ON_A_DEVICE) // max(1, degrees[0].numel()))
    for i in range(0, len(degrees), step):
        some = slice(i, i + step)
        here = Histogram(histogram.counts, histogram.sites[some], histogram.phase)
        _tally(norms[some], degrees[some], sines[some], inside, here, Sums(*(t[some] for t in out)))


def _tally(norms: Tensor, degrees: Tensor, sines: Tensor, inside: Tensor, histogram: Histogram, out: Sums) -> None:
    """The same for a few sites; `inside` says which vectors are in each group, [vectors, 3]."""
    counts = (norms[:, 0] > 0) & torch.isfinite(norms[:, 0] + degrees.sum(1))
    wide = degrees.double()
    units = wide * UNIT
    bins = wide.neg_().add_(90.0).mul_(100.0).nan_to_num_().clamp_(0, BINS - 1).to(torch.int64)
    bins += (histogram.sites[:, None, None] * 9 + torch.arange(3, device=bins.device)[:, None]) * BINS
    flat, ones = bins.flatten(), counts[:, None].expand_as(bins).flatten().to(torch.int64)
    for p in range(histogram.phase, histogram.phase + norms.shape[1]):
        histogram.counts.view(-1)[p * 3 * BINS :].index_add_(0, flat, ones)
    values = torch.cat([
        counts[:, None], ~counts[:, None], units, (units * units).mul_(1 / UNIT).round_(),
        (sines * sines).mul_(ENERGY_UNIT).round_(), units[:, :1].abs(), (norms.double() * UNIT).round_(),
    ], 1)  # fmt: skip
    values[:, 2:].masked_fill_(~counts[:, None], 0.0)
    for g in range(3):
        torch.sum(values.masked_fill(~inside[:, g], 0.0), -1, out=out.sums[:, g])
        outside = ~(counts & inside[:, g])[:, None]
        out.least[:, g] = units.masked_fill(outside, torch.inf).amin(-1)
        out.most[:, g] = units.masked_fill(outside, -torch.inf).amax(-1)
