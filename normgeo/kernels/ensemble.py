"""Moments of the angles between rows of bfloat16 and an ensemble of such vectors, where the processor multiplies those.

On CUDA the kernel is in Triton (`triton_angles`).

Products of two bfloat16 are exact in float32, in which they are added up: as exact as a product in float32.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normgeo import kernels
from normgeo.kernels import cpu
from normgeo.kernels.compiling import function

__all__ = ["Ensemble", "packed"]

SOURCE = Path(__file__).with_name("ensemble.cpp")
PANEL, DEPTH = 64, 32  # of the kernel
TILES = True  # use the processor's unit for products of matrices, where it has one


@dataclass(frozen=True)
class Ensemble:
    """Vectors as the kernel reads them.

    Attributes:
        panels: bfloat16 [panels, pairs of numbers, 64 vectors, 2 numbers], as deep as a multiple of 32.
        shrink: float32, one over the vectors' lengths; zero for what is left of the last panel.
        k: how many vectors.
    """

    panels: Tensor
    shrink: Tensor
    k: int

    def moments(
        self, x: Float[Tensor, "vectors d"], index: Int[Tensor, " n"], scalars: Float[Tensor, "quantities vectors"]
    ) -> Float[Tensor, "parts sums k"]:
        """Sums of arcsin(c), arcsin(c)^2 and c^2, in radians, over rows of x; a row without a length counts as zero.

        Here they are of one part; on CUDA of parts of the rows, to be added up when all sites have theirs. Where rows
        lose their mean, the same three sums follow of what they are then.

        Args:
            x: bfloat16 on the CPU.
            index: the rows.
            scalars: what `kernels.project` gave for all rows, in float64 and contiguous.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((1, 3, len(self.shrink)), dtype=torch.float64, device="cpu")
        loaded()(
            x.data_ptr(), len(index), x.shape[1], x.stride(0), index.data_ptr(), scalars[0].data_ptr(),
            self.panels.data_ptr(), self.shrink.data_ptr(), len(self.panels), TILES, out.data_ptr(),
            cpu.parallel_for(),
        )  # fmt: skip
        return out[..., : self.k]


def packed(vectors: Float[Tensor, "k d"], device: torch.device, *, centered: bool = False) -> Any:
    """Vectors of bfloat16 for the kernel, for rows that lose their mean or keep it; None where there is no such kernel.

    On the CPU there is none that takes means away.
    """
    if device.type == "cuda":
        triton = kernels.angles_on_cuda(device)
        return triton and triton.packed(vectors, device, centered)
    if centered or device.type != "cpu" or loaded() is None:
        return None
    k, d = vectors.shape
    room = torch.zeros((-(-k // PANEL) * PANEL, -(-d // DEPTH) * DEPTH), dtype=torch.bfloat16, device="cpu")
    room[:k, :d] = vectors
    shrink = torch.zeros(len(room), dtype=torch.float32, device="cpu")
    shrink[:k] = 1 / torch.linalg.vector_norm(vectors.double(), dim=1)
    panels = room.view(-1, PANEL, room.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return Ensemble(panels, shrink, k)


@functools.cache
def loaded() -> Any:
    """The kernel, if there is a compiler and a processor that has the instruction, else None. Never raises."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    types = pointer, *[number] * 3, *[pointer] * 4, number, ctypes.c_bool, pointer, pointer
    return function(SOURCE, "normgeo_null_moments", ctypes.c_bool, *types)
