"""Passes over hidden states: compiled on a CPU with a compiler, in Triton or torch elsewhere, with the same results.

Sums are accumulated in float64 whatever the dtype, which the compiled kernel does at the speed of memory. The results
of both ways agree to float64 rounding. `status()` says which is used; the environment variable NORMGEO_KERNELS=0 turns
the compiled one off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int, Shaped
from torch import Tensor

from normgeo.kernels import cpu, fallback, launching
from normgeo.kernels.fallback import BINS, ENERGY_UNIT, UNIT, Histogram, Sums

__all__ = [
    "BINS", "ENERGY_UNIT", "UNIT", "Histogram", "Status", "Sums", "angles_on_cuda", "gather", "moments", "on_cuda",
    "precise", "project", "status", "tally",
]  # fmt: skip

NOTHING = 1e-12
"""Share of a vector's norm under which what is left without its mean is rounding: the mean of float32 is exact to
1e-15, and vectors of float32 that are not all equal have more than 1e-10 left."""


@dataclass(frozen=True)
class Status:
    """How hidden states on the CPU are passed over.

    Attributes:
        compiled: the compiled kernels are used.
        reason: the shared object's path, or why there is none.
    """

    compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"compiled: {self.reason}" if self.compiled else f"torch: {self.reason}"


def status() -> Status:
    """Which kernels are used on the CPU, and why; builds them if they have not been."""
    found = cpu.loaded()
    return Status(found.functions is not None, found.reason)


def precise(device: torch.device) -> torch.dtype:
    """The dtype that sums are accumulated in: float64 wherever there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def on_cuda(device: torch.device | None = None) -> Any:
    """The pass in Triton, or None where there is none; see `launching.found`."""
    return launching.found("normgeo.kernels.triton_project", device)


def angles_on_cuda(device: torch.device | None = None) -> Any:
    """What becomes of projections in Triton, or None where there is none; see `launching.found`."""
    return launching.found("normgeo.kernels.triton_angles", device)


def _compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in cpu.DTYPES and cpu.loaded().functions is not None


def _in_triton(x: Tensor) -> Any:
    return on_cuda(x.device) if x.device.type == "cuda" else None


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def project(
    x: Float[Tensor, "vectors d"],
    units: Float[Tensor, "three d"],
    *,
    centered: bool = False,
    out: Float[Tensor, "quantities vectors"] | None = None,
) -> Float[Tensor, "quantities vectors"]:
    """|x|, the dot products of x with three unit vectors and, if wanted, |x - mean(x)|.

    Args:
        x: vectors in any floating dtype.
        units: three unit vectors, the first along **1**, in the device's precise dtype.
        centered: add the norm that is left without the component along **1**; zero where that is rounding.
        out: where to put it, in the device's precise dtype.
    """
    if out is None:
        out = torch.empty((4 + centered, len(x)), dtype=precise(x.device), device=x.device)
    if _compiled(x):
        cpu.loaded().project(_by_rows(x), units.contiguous(), centered, out)
    elif (triton := _in_triton(x)) is not None:
        triton.project(_by_rows(x), units.contiguous(), centered, out, NOTHING)
        return out
    else:
        fallback.project(x, units, centered, out)
    if centered:
        out[4].masked_fill_(out[4] <= NOTHING * out[0], 0.0)
    return out


def gather(
    x: Float[Tensor, "vectors d"],
    index: Int[Tensor, " n"],
    scalars: Float[Tensor, "quantities vectors"],
    *,
    centered: bool,
    out: Float[Tensor, "n d"],
) -> None:
    """Rows of x over their norm, or what they are without their mean over its norm; zeros where that is no vector."""
    if _compiled(x):
        cpu.loaded().gather(_by_rows(x), index, scalars, centered, out)
    elif (triton := _in_triton(x)) is not None:
        triton.gather(_by_rows(x), index, scalars, centered, out)
    else:
        fallback.gather(x, index, scalars, centered, out)


def moments(cosines: Float[Tensor, "slots rows k"]) -> Float[Tensor, "slots three k"]:
    """Sums over rows of arcsin(c), arcsin(c)^2 and c^2, in radians."""
    slots, _, k = cosines.shape
    out = torch.empty((slots, 3, k), dtype=precise(cosines.device), device=cosines.device)
    if _compiled(cosines) and cosines.dtype == torch.float32:
        cpu.loaded().moments(cosines.contiguous(), out)
    else:
        fallback.moments(cosines, out)
    return out


def tally(
    norms: Float32[Tensor, "sites phases vectors"],
    degrees: Float32[Tensor, "sites three vectors"],
    sines: Float64[Tensor, "sites three vectors"],
    group: Shaped[Tensor, " vectors"],
    histogram: Histogram,
) -> Sums:
    """Add up angles over the vectors of each of three groups; a vector of no angle or length is only counted.

    Args:
        norms: the vectors' lengths in each phase that has these angles, float32.
        degrees: 90 - theta in whole 2^-20 of a degree, float32.
        sines: cos(theta), in float64.
        group: 0, 1 or 2, uint8.
        histogram: where to count the angles as well.
    """
    sites, phases, _ = norms.shape
    sums = torch.zeros((sites, 3, 12 + phases), dtype=torch.float64, device=norms.device)
    out = Sums(sums, torch.full_like(sums[..., :3], torch.inf), torch.full_like(sums[..., :3], -torch.inf))
    if _compiled(norms):
        tallied = cpu.loaded().tally
    elif norms.device.type == "cuda" and (triton := angles_on_cuda(norms.device)) is not None:
        tallied = triton.tally
    else:
        fallback.tally(norms, degrees, sines, group, histogram, out)
        return out
    tallied(norms.contiguous(), degrees.contiguous(), sines.contiguous(), group, histogram, out)
    return out
