"""Norms under autograd on a CPU, called through ctypes: what torch does in a dozen passes takes one there and two back.

A plain C interface builds in seconds, and Python's way to autograd takes longer than the call.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normgeo.kernels import cpu, differentiable
from normgeo.kernels.compiling import compiled, failed

__all__ = ["loaded"]

SOURCE = Path(__file__).with_name("norm_gradients.cpp")


def loaded() -> differentiable.Kernels | None:
    """The kernels, built if need be; None where they cannot be, which is said once, as a warning."""
    kernels, reason = _loaded()
    if kernels is None:
        failed(reason)
    return kernels


@functools.cache
def _loaded() -> tuple[differentiable.Kernels | None, str]:
    try:
        library = _declared(ctypes.CDLL(str(compiled(SOURCE))))
        with ThreadPoolExecutor(1) as alone:  # a thread in which nothing is watched
            return alone.submit(_checked, library).result(), ""
    except (OSError, RuntimeError) as error:
        return None, str(error)


def _declared(library: Any) -> differentiable.Kernels:
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    start = [pointer, number, number, number, pointer]  # x, its dtype and shape, weight
    library.normgeo_norm.argtypes = [*start, pointer, number, real, real, number, pointer, pointer, pointer]
    library.normgeo_norm_gradients.argtypes = [*start, number, real, number, *[pointer] * 6]
    library.normgeo_norm.restype, library.normgeo_norm_gradients.restype = None, ctypes.c_bool
    return differentiable.Kernels(functools.partial(_forward, library), functools.partial(_backward, library))


@torch.no_grad()
def _checked(kernels: differentiable.Kernels) -> differentiable.Kernels:
    """The same, if a norm and its gradients come out as known: a foreign file is found out before it is relied on."""
    x, dz, ones = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]], [[1.0, 1.0]]], dtype=torch.float32, device="cpu")
    z, scales = kernels.forward(x, ones[0], None, 0.0, 0.0, 1)
    dx, dweight, _ = kernels.backward(x, ones[0], None, scales, dz, 0.0, 1, (True, False))
    r, known = 12.5**-0.5, torch.tensor([[3.0, 4.0], [0.64, -0.48], [3.0, 0.0]], dtype=torch.float32, device="cpu")
    if dweight is None or not torch.allclose(torch.cat([z, dx, dweight[None]]), r * known, rtol=1e-5):
        raise RuntimeError("the compiled norms give wrong gradients; empty the cache they were built in")
    return kernels


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(x: Tensor) -> tuple[int, int, int]:
    """The number of its dtype, and how many vectors of how many numbers there are."""
    return cpu.DTYPES[x.dtype], x.numel() // max(1, x.shape[-1]), x.shape[-1]


def _type(x: Tensor, *parameters: torch.dtype | None) -> int:
    """The number of the parameters' dtype."""
    return cpu.DTYPES[next((dtype for dtype in parameters if dtype is not None), x.dtype)]


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _forward(
    library: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int
) -> tuple[Tensor, Tensor]:
    dtype, rows, d = _rows(x)
    z, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    library.normgeo_norm(
        x.data_ptr(), dtype, rows, d, _at(weight), _at(bias), _type(x, _dtype(weight), _dtype(bias)), eps, offset, kind,
        z.data_ptr(), scales.data_ptr(), cpu.parallel_for(),
    )  # fmt: skip
    return z, scales


def _backward(
    library: Any, x: Tensor, weight: Tensor | None, bias: torch.dtype | None, scales: Tensor, dz: Tensor, offset: float,
    kind: int, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    dx, dtypes = torch.empty_like(x), (_dtype(weight), bias)
    dweight, dbias = (
        torch.empty(x.shape[-1], dtype=dtype, device=x.device) if is_wanted and dtype is not None else None
        for dtype, is_wanted in zip(dtypes, wanted, strict=True)
    )
    done = library.normgeo_norm_gradients(
        x.data_ptr(), *_rows(x), _at(weight), _type(x, *dtypes), offset, kind, scales.data_ptr(), dz.data_ptr(),
        dx.data_ptr(), _at(dweight), _at(dbias), cpu.parallel_for(),
    )  # fmt: skip
    if not done:
        raise RuntimeError(f"no memory for the gradients of a norm of {tuple(x.shape)}")
    return dx, dweight, dbias
