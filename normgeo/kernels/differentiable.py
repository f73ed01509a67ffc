"""Norms whose forward and backward pass are kernels: what both kinds of kernels have in common.

What is kept for the backward pass is the input and one number a row, a third of what torch's arithmetic keeps.
Gradients of gradients are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kernels", "norm"]


class Kernels(NamedTuple):
    """A norm and its gradients. Tensors are contiguous, and `kind` is one of `norm_ops.KINDS`.

    Attributes:
        forward: (x, weight, bias, eps, offset, kind) to the norm of x, and what each row was multiplied by, float32.
        backward: (x, weight, bias, scales, dz, offset, kind, wanted) to the gradients of x, weight and bias, the last
            two where `wanted` has them, else None.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


class _Norm(torch.autograd.Function):
    """The norm as a function that has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
        kind: int,
    ) -> Tensor:  # fmt: skip
        z, scales = kernels.forward(x, weight, bias, eps, offset, kind)
        ctx.save_for_backward(x, weight, bias, scales)
        ctx.kernels, ctx.eps, ctx.offset, ctx.kind = kernels, eps, offset, kind
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, scales = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:4]
        if torch.is_grad_enabled():  # gradients of these gradients are wanted
            found = _in_torch(ctx, x, weight, bias, grads[0], needed)
        else:
            dz = grads[0].contiguous()
            found = ctx.kernels.backward(x, weight, bias, scales, dz, ctx.offset, ctx.kind, needed[1:])
        return None, *found, None, None, None


def _in_torch(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dz: Tensor, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of x, gamma and beta in torch's arithmetic, which has gradients itself."""
    v = x.float()
    if ctx.kind == 0:
        v = v - v.mean(-1, keepdim=True)
    square = v.square().sum(-1, keepdim=True)
    if ctx.kind >= 2:
        square = square + v.sum(-1, keepdim=True).square()
    z = v * torch.rsqrt(square / (x.shape[-1] + (ctx.kind == 2)) + ctx.eps)
    if weight is not None:
        z = z * (weight.float() + ctx.offset)
    if bias is not None:
        z = z + bias.float()
    wanted = [t for t, is_needed in zip((x, weight, bias), needed, strict=True) if t is not None and is_needed]
    found = iter(torch.autograd.grad(z.to(x.dtype), wanted, dz, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


def norm(
    kernels: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int
) -> Tensor:
    """The norm of contiguous x [..., d], whose gradients are the kernels'."""
    return _Norm.apply(kernels, x, weight, bias, eps, offset, kind)  # pyright: ignore
