"""RMSNorm as its usual modules round it, in one pass: to the last bit what torch gives in steps.

What is rounded once a step is the same wherever it is done; a sum is not, and torch's order of summation depends on how
wide the vectors are that it was built for. Which they are is found by trying; where none fits, torch itself is used.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normgeo.kernels import cpu
from normgeo.kernels.compiling import function
from normgeo.kernels.plain import DTYPES

__all__ = ["loaded", "scaled_by_rms"]

SOURCE = Path(__file__).with_name("rms.cpp")
LANES = (8, 16, 4)
NARROWEST, WIDEST = 16, 1 << 15  # numbers a row; torch sums fewer, and a single row of more, in yet another order
TRIED = (16, 31, 64, 100, 576, 2049, 4096, 20000)


def scaled_by_rms(
    x: Float[Tensor, "rows d"], gamma: Float[Tensor, " d"] | None, eps: float, *, halfway: bool,
    out: Float[Tensor, "rows d"],
) -> bool:  # fmt: skip
    """(x * rsqrt(mean(x^2) + eps)) * gamma, each step in float32.

    Args:
        x: the rows.
        gamma: of the dtype of x, or float32, or None.
        eps: what is added to the mean square.
        halfway: round to the dtype of x before gamma as well.
        out: where to put it, contiguous and of the dtype of x.

    Returns:
        Whether it is done; not without a compiled kernel, for float64, another gamma, very short, long or strided rows,
        nor where gamma or a row's rms is not finite, for there is more than one NaN.
    """
    d = x.shape[1]
    if not x.is_cpu or x.dtype not in DTYPES or x.stride(1) != 1 or not NARROWEST <= d < WIDEST:
        return False
    if gamma is not None:
        suits = gamma.dtype in (x.dtype, torch.float32) and gamma.shape == (d,) and gamma.is_cpu
        if not suits or not bool(gamma.isfinite().all()):
            return False
    return (found := loaded()) is not None and _call(*found, x, gamma, eps, halfway, out)


def _call(kernel: Any, lanes: int, x: Tensor, gamma: Tensor | None, eps: float, halfway: bool, out: Tensor) -> bool:
    gamma = None if gamma is None else gamma.contiguous()
    weight, wide = (gamma.data_ptr(), gamma.dtype is torch.float32) if gamma is not None else (None, False)
    return kernel(
        x.data_ptr(), cpu.DTYPES[x.dtype], *x.shape, x.stride(0), weight, wide, eps, halfway, lanes, out.data_ptr(),
        cpu.parallel_for(),
    )  # fmt: skip


@functools.cache
def loaded() -> tuple[Any, int] | None:
    """The kernel and the width of torch's vectors, or None where there is none that does as torch. Never raises."""
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    types = pointer, *[number] * 4, pointer, number, real, number, number, pointer, pointer
    kernel = function(SOURCE, "normgeo_rms", ctypes.c_bool, *types, flags=("-ffp-contract=off",))
    if kernel is None:
        return None
    return next(((kernel, lanes) for lanes in LANES if all(_as_torch(kernel, lanes, d) for d in TRIED)), None)


def _as_torch(kernel: Any, lanes: int, d: int) -> bool:
    x = torch.randn((5, d), generator=torch.Generator().manual_seed(d), dtype=torch.float32, device="cpu")
    out, eps = torch.empty_like(x), 1e-6
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return _call(kernel, lanes, x, None, eps, False, out) and torch.equal(out, expected)
