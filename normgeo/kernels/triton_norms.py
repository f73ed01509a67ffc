"""RMSNorm and CRMSNorm on CUDA, forward and backward, and fused with the addition before them, in Triton.

With v the input, s its sum where it is CRMSNorm's and 0 otherwise, and D what the squares are divided by,

    r = ((|v|^2 + s^2) / D + eps)^(-1/2),   z = gamma r v + beta,
    dv = r g - r^3 (g.v) (v + s) / D,       g = gamma dz,
    dgamma = sum over rows of dz r v,       dbeta = sum over rows of dz.

LayerNorm, to compare with, is RMSNorm of v less its mean, and dv is what is left of RMSNorm's without its mean.

A row is read once and stays in registers; sums are in float32. Short rows go several to a program.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare, and checkers of types under
# test leave alone what is marked no_type_check
# pyright: reportMissingImports=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from normgeo.kernels import differentiable

__all__ = ["add_norm_", "launch_smallest", "norm"]

TILE = 4096  # numbers that a program takes on at least, where rows are shorter, and enough to share out
SMALLEST = 1024  # in fewer several threads would have the same number, and read it when one has written over it
PROGRAMS = 4  # a multiprocessor, wanted before programs take on more than they have to
RESIDENT = 16  # warps that a multiprocessor holds in the backward pass, a thread of which takes some 110 registers
WARPS = 16 if torch.version.hip else 32  # at most: 1,024 threads


@triton.jit
@no_type_check
def _forward(
    x_at, more_at, weight_at, bias_at, out_at, scale_at, rows, d, divisor, eps, offset,
    KIND: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < d)[None, :]
    at = row.to(tl.int64)[:, None] * d + column[None, :]
    x = tl.load(x_at + at, mask=there, other=0.0)
    if ADD:
        more = tl.load(more_at + at, mask=there, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(x_at + at, x, mask=there)
    v = x.to(tl.float32)
    if KIND == 0:
        v = tl.where(there, v - (tl.sum(v, axis=1) / d)[:, None], 0.0)
    mean_square = tl.sum(v * v, axis=1)
    if KIND >= 2:
        total = tl.sum(v, axis=1)
        mean_square += total * total
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean_square / divisor + eps))  # once a row; else both are approximate
    if SAVE:
        tl.store(scale_at + row, scale, mask=row < rows)
    z = v * scale[:, None]
    if WEIGHT:
        weight = tl.load(weight_at + column, mask=column < d, other=0.0).to(tl.float32)
        z *= (weight + offset)[None, :]
    if BIAS:
        z += tl.load(bias_at + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    tl.store(out_at + at, z.to(out_at.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _backward(
    x_at, weight_at, scale_at, dz_at, dx_at, dweight_at, dbias_at, rows, d, divisor, offset, steps,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < d
    gamma = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        gamma = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32) + offset
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * d + column[None, :]
        v = tl.load(x_at + at, mask=there, other=0.0).to(tl.float32)
        if KIND == 0:
            v = tl.where(there, v - (tl.sum(v, axis=1) / d)[:, None], 0.0)
        dz = tl.load(dz_at + at, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(scale_at + row, mask=row < rows, other=0.0)[:, None]
        g = dz * gamma[None, :]
        direction = v
        if KIND >= 2:
            direction = v + tl.sum(v, axis=1)[:, None]
        dot = tl.sum(g * v, axis=1)[:, None]
        dv = scale * g - scale * scale * scale * dot / divisor * direction
        if KIND == 0:
            dv -= (tl.sum(dv, axis=1) / d)[:, None]
        tl.store(dx_at + at, dv.to(dx_at.dtype.element_ty), mask=there)
        if DWEIGHT:
            dgamma += tl.sum(dz * v * scale, axis=0)
        if DBIAS:
            dbeta += tl.sum(dz, axis=0)
    if DWEIGHT:
        tl.store(dweight_at + program * d + column, dgamma, mask=inside)
    if DBIAS:
        tl.store(dbias_at + program * d + column, dbeta, mask=inside)


def _plan(x: Tensor, kept: int = 1) -> dict[str, int]:
    """How rows are laid out: their block, how many a program has, and warps to hold `kept` tiles in their registers."""
    block = 1 << (x.shape[-1] - 1).bit_length()
    rows, programs = max(1, TILE // block), PROGRAMS * _multiprocessors(x.device)
    while rows > max(1, SMALLEST // block) and _ceil(_rows(x), rows) < programs:
        rows //= 2
    return {"BLOCK": block, "ROWS": rows, "num_warps": min(WARPS, max(4, kept * rows * block // 1024))}


def _launch(
    x: Tensor, more: Tensor | None, out: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    kind: int, scales: Tensor | None = None,
) -> None:  # fmt: skip
    d, rows = x.shape[-1], _rows(x)
    if not rows:
        return
    plan = _plan(x)
    with _device(x):
        _forward[(_ceil(rows, plan["ROWS"]),)](
            x, more, weight, bias, out, scales, rows, d, d + (kind == 2), eps, offset, KIND=kind, ADD=more is not None,
            WEIGHT=weight is not None, BIAS=bias is not None, SAVE=scales is not None, **plan,
        )  # fmt: skip


def _saving(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int
) -> tuple[Tensor, Tensor]:
    z, scales = torch.empty_like(x), torch.empty(_rows(x), dtype=torch.float32, device=x.device)
    _launch(x, None, z, weight, bias, eps, offset, kind, scales)
    return z, scales


def _gradients(
    x: Tensor, weight: Tensor | None, bias: torch.dtype | None, scales: Tensor, dz: Tensor, offset: float, kind: int,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    rows, d, plan, dx = _rows(x), x.shape[-1], _plan(x, kept=2), torch.empty_like(x)
    blocks = _ceil(rows, plan["ROWS"])
    steps = max(1, _ceil(blocks, _multiprocessors(x.device) * max(1, RESIDENT // plan["num_warps"])))
    programs = _ceil(blocks, steps)  # none for no rows, whose sums are zero
    room = {"size": (programs, d), "dtype": torch.float32, "device": x.device}
    dweight, dbias = (torch.empty(**room) if is_wanted else None for is_wanted in wanted)
    if programs:
        with _device(x):
            _backward[(programs,)](
                x, weight, scales, dz, dx, dweight, dbias, rows, d, d + (kind == 2), offset, steps, KIND=kind,
                WEIGHT=weight is not None, DWEIGHT=dweight is not None, DBIAS=dbias is not None, **plan,
            )  # fmt: skip
    return dx, _total(dweight, weight.dtype if weight is not None else None), _total(dbias, bias)


def _total(sums: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if sums is None or dtype is None else sums.sum(0).to(dtype)


KERNELS = differentiable.Kernels(_saving, _gradients)


def _rows(x: Tensor) -> int:
    """How many vectors there are to norm; those of width 0 have nothing in them to norm."""
    return x.numel() // max(1, x.shape[-1])


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()  # Triton's interpreter takes CPU tensors


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int) -> Tensor:
    """The norm of contiguous x [..., d], with gradients where they are wanted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return differentiable.norm(KERNELS, x, weight, bias, eps, offset, kind)
    z = torch.empty_like(x)
    _launch(x, None, z, weight, bias, eps, offset, kind)
    return z


def add_norm_(
    residual: Tensor, x: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    kind: int,
) -> None:  # fmt: skip
    """Add x to the contiguous residual stream in place, and write the norm of the sum to `out`, which may be x."""
    _launch(residual, x, out, weight, bias, eps, offset, kind)


def launch_smallest(device: torch.device) -> None:
    """Fail where no kernel can be built."""
    with torch.no_grad():
        norm(torch.ones(1, 16, dtype=torch.float32, device=device), None, None, 1e-5, 0.0, 1)
