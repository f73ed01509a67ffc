"""The same kernels in torch: for every device, and where nothing can be compiled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BINS", "ENERGY_UNIT", "UNIT", "Histogram", "Sums", "gather", "moments", "project", "tally"]

BINS = 18000  # of a hundredth of a degree
UNIT = 2.0**20  # parts of a degree, of a squared degree and of a norm that sums are exact in
ENERGY_UNIT = 2.0**32

ELEMENTS = 1 << 17  # that are float64 at a time on the CPU, so that they stay in its caches


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
    step = max(1, ELEMENTS // x.shape[1]) if x.device.type == "cpu" else max(1, len(x))
    for i in range(0, len(x), step):
        wide, part = x[i : i + step].to(out.dtype), out[:, i : i + step]
        part[0] = torch.linalg.vector_norm(wide, dim=1)
        part[1:4] = units @ wide.T
        if centered:
            part[4] = torch.linalg.vector_norm(wide - wide.mean(1, keepdim=True), dim=1)


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
    """Fill `out` and add to the histogram. Sums of whole numbers are exact in any order."""
    counts = (norms[:, 0] > 0) & torch.isfinite(norms[:, 0] + degrees.sum(1))
    units = degrees.to(torch.float64) * UNIT
    phases = range(norms.shape[1])
    bins = ((90.0 - degrees.to(torch.float64)) * 100.0).nan_to_num_().clamp_(0, BINS - 1).to(torch.int64)
    bins += (histogram.sites[:, None, None] * 9 + torch.arange(3, device=bins.device)[:, None]) * BINS
    flat = bins[counts[:, None].expand_as(bins)]
    for p in phases:
        histogram.counts.view(-1)[(histogram.phase + p) * 3 * BINS :].index_add_(0, flat, torch.ones_like(flat))
    values = torch.cat([
        units, (units * units * (1 / UNIT)).round_(), (sines * sines * ENERGY_UNIT).round_(), units[:, :1].abs(),
        (norms.to(torch.float64) * UNIT).round_(),
    ], 1).masked_fill_(~counts[:, None], 0.0)  # fmt: skip
    for g in range(3):
        inside = (group == g) & counts
        out.sums[:, g, 0], out.sums[:, g, 1] = inside.sum(1), (group == g).sum() - inside.sum(1)
        out.sums[:, g, 2:] = (values * (group == g)).sum(-1)
        out.least[:, g] = units.masked_fill(~inside[:, None], torch.inf).amin(-1)
        out.most[:, g] = units.masked_fill(~inside[:, None], -torch.inf).amax(-1)
