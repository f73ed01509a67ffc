"""RMSNorm and CRMSNorm on CUDA, forward and backward, and fused with the addition before them, in Triton.

With v the input, s its sum where it is CRMSNorm's and 0 otherwise, and D what the squares are divided by,

    r = ((|v|^2 + s^2) / D + eps)^(-1/2),   z = gamma r v + beta,
    dv = r g - r^3 (g.v) (v + s) / D,       g = gamma dz,
    dgamma = sum over rows of dz r v,       dbeta = sum over rows of dz.

LayerNorm, to compare with, is RMSNorm of v less its mean, and dv is what is left of RMSNorm's without its mean.

A row is read once and stays in registers, in parts where its width is far from a power of two; sums are in float32.
Short rows go several to a program. The backward pass reads the next rows while it computes.
"""

# Triton comes with torch for CUDA, and is not there without; it wants its functions bare, and checkers of types under
# test leave alone what is marked no_type_check
# pyright: reportMissingImports=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from normgeo.kernels import differentiable, launching
from normgeo.kernels.launching import Launcher, multiprocessors

__all__ = ["add_norm_", "launch_smallest", "norm"]

SMALLEST = 1024  # numbers a program; in fewer several threads would have one, and read it when one has written over it
PART, PARTS = 256, 7  # numbers a part at least, and parts at most
NARROW = 4096  # numbers up to which a row had better be in few parts; wider ones in many
EACH = 512  # numbers of a row that a warp has at least, where there are so many; of rows in parts half of that a part
WARPS = 8  # at most; with more fewer programs fit a multiprocessor
# the same of the backward pass: bytes that a warp has of a row and of a tile, warps a program and a multiprocessor,
# bytes under way there, tiles at least and at most
OF_ROW, OF_TILE, FEWER, RESIDENT, UNDER_WAY, STAGES = 512, 1024, 8, 12, 1 << 16, (3, 4)
MOST = 16 if torch.version.hip else 32  # warps: 1,024 threads


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _forward(
    x_at, more_at, weight_at, bias_at, out_at, scale_at, rows, d, divisor, eps, offset,
    KIND: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * d
    here = (row < rows)[:, None]
    block = tl.arange(0, BLOCK)
    parts = ()
    for i in tl.static_range(PARTS):
        column = i * BLOCK + block
        there = here & (column < d)[None, :]
        x = tl.load(x_at + start + column[None, :], mask=there, other=0.0)
        if ADD:
            more = tl.load(more_at + start + column[None, :], mask=there, other=0.0)
            x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
            tl.store(x_at + start + column[None, :], x, mask=there)
        parts += (x.to(tl.float32),)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if KIND != 1:
        for i in tl.static_range(PARTS):
            sums += parts[i]
    total = tl.sum(sums, axis=1)
    mean = tl.zeros((ROWS,), tl.float32)
    if KIND == 0:
        mean = total / d
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.static_range(PARTS):
        v = tl.where((i * BLOCK + block < d)[None, :], parts[i] - mean[:, None], 0.0)
        squares += v * v
    mean_square = tl.sum(squares, axis=1)
    if KIND >= 2:
        mean_square += total * total
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean_square / divisor + eps))  # once a row; else both are approximate
    if SAVE:
        tl.store(scale_at + row, scale, mask=row < rows)
    for i in tl.static_range(PARTS):
        column = i * BLOCK + block
        z = (parts[i] - mean[:, None]) * scale[:, None]
        if WEIGHT:
            weight = tl.load(weight_at + column, mask=column < d, other=0.0).to(tl.float32)
            z *= (weight + offset)[None, :]
        if BIAS:
            z += tl.load(bias_at + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
        tl.store(out_at + start + column[None, :], z.to(out_at.dtype.element_ty), mask=here & (column < d)[None, :])


@triton.jit(do_not_specialize=["rows", "steps"])
@no_type_check
def _backward(
    x_at, weight_at, scale_at, dz_at, dx_at, dweight_at, dbias_at, rows, steps, d, divisor, offset,
    KIND: tl.constexpr, WEIGHT: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < d
    gamma = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        gamma = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32) + offset
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
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
        dv = scale * g - scale * (scale * (scale * dot / divisor)) * direction  # in this order nothing underflows
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


def _kept(
    built: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:  # fmt: skip
    """Have the compiled norms launch what was built from now on."""
    x, more, weight, bias, out, scales = tensors
    compiled, how = launching.direct(), launching.parts(built)
    if how is not None and scales is None:
        (_, _, eps, offset), (kind, *_, rows, _, _) = numbers, constants
        kernel, threads, shared, order = how
        compiled.keep(x, more, weight, bias, out, eps, offset, kind, kernel, threads, shared, rows, order)


FORWARD, BACKWARD = Launcher(_forward, _kept), Launcher(_backward)


class _Plan(NamedTuple):
    """How rows are laid out in the forward pass: parts of a block each, so many rows a program, and its warps."""

    rows: int
    block: int
    parts: int
    warps: int


class _Steps(NamedTuple):
    """The same in the backward pass: how many programs a multiprocessor has, and how many tiles each has under way."""

    rows: int
    block: int
    warps: int
    programs: int
    stages: int


@cache
def _plan(d: int) -> _Plan:
    """The layout of rows of width d in as many parts as leave the least room over. All numbers are measured ones."""
    counts = (n for n in range(1, PARTS + 1) if n == 1 or _block(d, n) >= PART)
    parts = min(counts, key=lambda n: (n * _block(d, n), n if d <= NARROW else -n))
    block = _block(d, parts)
    warps = min(WARPS, max(1, block // (EACH if parts == 1 else EACH // 2)))
    return _Plan(max(1, SMALLEST // (parts * block)), block, parts, warps)


@cache
def _steps(d: int, itemsize: int, room: int) -> _Steps:
    """How programs share rows of width d, that have `room` bytes of shared memory each."""
    block = _block(d, 1)
    warps = min(max(FEWER, block // EACH), max(1, block * itemsize // OF_ROW), MOST)
    rows, programs = max(1, warps * OF_TILE // (block * itemsize)), max(1, RESIDENT // warps)
    row = 2 * rows * itemsize  # of the input, and of the output's gradient
    stages = min(STAGES[1], max(STAGES[0], 1 + UNDER_WAY // (programs * row * d)))
    return _Steps(rows, block, warps, programs, stages if (stages - 1) * row * block <= room else 1)


def _block(d: int, parts: int) -> int:
    return 1 << (_ceil(d, parts) - 1).bit_length()


def _launch(
    x: Tensor, more: Tensor | None, out: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    kind: int, scales: Tensor | None = None,
) -> None:  # fmt: skip
    d, rows = x.shape[-1], _rows(x)
    if not rows:
        return
    plan = _plan(d)
    given = more is not None, weight is not None, bias is not None, scales is not None
    FORWARD(
        _ceil(rows, plan.rows), (x, more, weight, bias, out, scales), (rows,),
        (d, d + (kind == 2), float(eps), float(offset)),
        (kind, *given, plan.rows, plan.block, plan.parts), plan.warps,
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
    (rows, d), dx = (_rows(x), x.shape[-1]), torch.empty_like(x)
    plan = _steps(max(1, d), x.element_size(), _shared_memory(x.device))
    blocks = _ceil(rows, plan.rows)
    steps = max(1, _ceil(blocks, multiprocessors(x.device) * plan.programs))
    programs = _ceil(blocks, steps)  # none for no rows, whose sums are zero
    room = {"size": (programs, d), "dtype": torch.float32, "device": x.device}
    dweight, dbias = (torch.empty(**room) if is_wanted else None for is_wanted in wanted)
    if programs:
        BACKWARD(
            programs, (x, weight, scales, dz, dx, dweight, dbias), (rows, steps),
            (d, d + (kind == 2), float(offset)),
            (kind, weight is not None, dweight is not None, dbias is not None, plan.rows, plan.block, plan.stages),
            plan.warps,
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


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have, less a kilobyte for what its sums take."""
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block) - 1024


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
    """Fail where no kernel can be built, or what was built gives something else when it is launched again."""
    with torch.no_grad():
        x = torch.full((1, 16), 2.0, dtype=torch.float32, device=device)
        for _ in range(2):
            if not bool((norm(x, None, None, 12.0, 0.0, 1) == 0.5).all()):
                raise RuntimeError("a norm came out wrong")
        if (compiled := launching.direct()) is not None:
            z = compiled.norm(x, None, None, 12.0, 0.0, 1)
            if z is not None and not bool((z == 0.5).all()):
                launching.distrust()
