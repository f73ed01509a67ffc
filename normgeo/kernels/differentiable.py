"""Norms whose forward and backward pass are kernels: what both kinds of kernels have in common.

What is kept for the backward pass is the input and one number a row: half of what torch's arithmetic keeps in float32,
and a quarter in half precision. Gradients of gradients are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgeo.kernels.plain import is_plain, modes

__all__ = ["Kernels", "norm"]


class Kernels(NamedTuple):
    """A norm and its gradients. Tensors are contiguous, and `kind` is one of `norm_ops.KINDS`.

    Attributes:
        forward: (x, weight, bias, eps, offset, kind) to the norm of x, and what each row was multiplied by, float32.
        backward: (x, weight, bias, scales, dz, offset, kind, wanted) to the gradients of x, weight and bias, the last
            two where `wanted` has them, else None. Of bias it gets the dtype, or None.
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
        z, scales = (_watched if modes() else kernels.forward)(x, weight, bias, eps, offset, kind)
        ctx.save_for_backward(x, weight, scales)
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.eps, ctx.offset, ctx.kind = kernels, eps, offset, kind
        ctx.weight, ctx.bias = (None if p is None else p.dtype for p in (weight, bias))
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        dz, needed = grads[0], ctx.needs_input_grad[1:4]
        if dz is None:
            return (None,) * 7
        # where tensors are kept meanwhile, and in what dtype and layout, is others' to say
        given = dz.contiguous(), x.to(dz.dtype).contiguous(), scales.to(torch.float32).contiguous()
        gamma = None if weight is None else weight.to(ctx.weight).contiguous()
        if torch.is_grad_enabled() or not _fit(*given, gamma):  # as gradients of these gradients, or many at once
            found = _in_torch(ctx, x, weight, dz, needed, create_graph=torch.is_grad_enabled())
        else:
            dz, x, scales = given
            dx, *others = ctx.kernels.backward(x, gamma, ctx.bias, scales, dz, ctx.offset, ctx.kind, needed[1:])
            found = dx if needed[0] else None, *others
        return None, *found, None, None, None


def _fit(dz: Tensor, x: Tensor, scales: Tensor, gamma: Tensor | None) -> bool:
    """Whether kernels can read these: that they could in the forward pass does not tell."""
    if not all(map(is_plain, (dz, x, scales))) or x.shape != dz.shape or scales.shape != (x.shape[:-1].numel(),):
        return False
    return gamma is None or (is_plain(gamma) and gamma.shape == x.shape[-1:])


def _scaled(x: Tensor, eps: float, kind: int) -> tuple[Tensor, Tensor]:
    """What is scaled of x [..., d], in float32, and what each row is multiplied by [..., 1]."""
    v = x.float()
    if kind == 0:
        v = v - v.mean(-1, keepdim=True)
    square = v.square().sum(-1, keepdim=True)
    if kind >= 2:
        square = square + v.sum(-1, keepdim=True).square()
    return v, torch.rsqrt(square / (x.shape[-1] + (kind == 2)) + eps)


def _watched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int
) -> tuple[Tensor, Tensor]:
    """What `Kernels.forward` gives, in torch's arithmetic, for modes that see every operation."""
    v, scale = _scaled(x, eps, kind)
    z = v * scale
    if weight is not None:
        z = z * (weight.float() + offset)
    return (z if bias is None else z + bias.float()).to(x.dtype), scale.flatten()


@torch.enable_grad()
def _in_torch(
    ctx: Any, x: Tensor, weight: Tensor | None, dz: Tensor, needed: tuple[bool, ...], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x, gamma and beta in torch's arithmetic, which has gradients itself."""
    # gradients are asked of names for them, behind which nothing is: x may come from this gamma by way of another norm
    x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)
    v, scale = _scaled(x, ctx.eps, ctx.kind)
    z = v * scale
    if weight is not None:
        z = z * (weight.float() + ctx.offset)
    wanted = [t for t, is_needed in ((x, needed[0]), (weight, needed[1])) if is_needed and t is not None]
    found = iter(torch.autograd.grad(z, wanted, dz.float(), create_graph=create_graph) if wanted else ())
    dx, dweight = (next(found) if is_needed else None for is_needed in needed[:2])
    dbias = dz.float().sum_to_size(x.shape[-1]).to(ctx.bias) if needed[2] else None
    return dx, dweight, dbias


def norm(
    kernels: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: int
) -> Tensor:
    """The norm of contiguous x [..., d], whose gradients are the kernels'."""
    return _Norm.apply(kernels, x, weight, bias, eps, offset, kind)  # pyright: ignore
