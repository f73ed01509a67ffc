"""Moments of the angles between rows of bfloat16 and an ensemble of unit vectors, where the processor multiplies those.

The vectors are split into two bfloat16 each, which is exact to 2^-17 of every number: an ensemble that is as random as
the one it stands for, and angles that differ by some 10^-5 of what they are short of a right angle, which for random
directions is little.
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

from normgeo.kernels import cpu
from normgeo.kernels.compiling import function

__all__ = ["Ensemble", "packed"]

SOURCE = Path(__file__).with_name("ensemble.cpp")
PANEL = 64  # of the kernel


@dataclass(frozen=True)
class Ensemble:
    """Unit vectors as the kernel reads them.

    Attributes:
        panels: bfloat16 [panels, pairs of numbers, 2 parts, 64 vectors, 2 numbers].
        k: how many vectors; what is left of the last panel is zero.
    """

    panels: Tensor
    k: int

    def moments(
        self, x: Float[Tensor, "vectors d"], index: Int[Tensor, " n"], lengths: Float[Tensor, " vectors"]
    ) -> Float[Tensor, "three k"]:
        """Sums of arcsin(c), arcsin(c)^2 and c^2, in radians, over rows of x; a row without a length counts as zero.

        Args:
            x: bfloat16 on the CPU.
            index: the rows.
            lengths: of all rows, float64 and contiguous.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((3, len(self.panels) * PANEL), dtype=torch.float64)
        loaded()(
            x.data_ptr(), len(index), x.shape[1], x.stride(0), index.data_ptr(), lengths.data_ptr(),
            self.panels.data_ptr(), len(self.panels), out.data_ptr(), cpu.parallel_for(),
        )  # fmt: skip
        return out[:, : self.k]


def packed(units: Float[Tensor, "k d"]) -> Ensemble | None:
    """Unit vectors, in float64, for the kernel; None where there is none for this processor."""
    if loaded() is None:
        return None
    k, d = units.shape
    high = units.bfloat16()
    parts = torch.stack([high, (units - high.double()).bfloat16()])
    room = torch.zeros((2, -(-k // PANEL) * PANEL, d + d % 2), dtype=torch.bfloat16)
    room[:, :k, :d] = parts
    panels = room.view(2, -1, PANEL, room.shape[2] // 2, 2).permute(1, 3, 0, 2, 4).contiguous()
    return Ensemble(panels, k)


@functools.cache
def loaded() -> Any:
    """The kernel, if there is a compiler and a processor that has the instruction, else None. Never raises."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    types = pointer, *[number] * 3, pointer, pointer, pointer, number, pointer, pointer
    return function(SOURCE, "normgeo_null_moments", ctypes.c_bool, *types)
