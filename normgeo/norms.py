r"""LayerNorm, RMSNorm and CRMSNorm as modules.

Equations are those of Jiang et al., "Pre-RMSNorm and Pre-CRMSNorm Transformers" (*Pre-RMSNorm* below). All three keep
the dtype of their input; half precision is computed in float32, float64 in float64.

Which way a norm is computed does not change what it is. There are kernels that read their input once, and for gradients
twice (`normgeo.kernels`); in float64 and while `torch.compile` traces, the plain arithmetic below is used, which a
compiler fuses better than it could a kernel of ours. Without a kernel, a norm on a CPU whose input should have
zero mean, as that of every converted model, calls torch's LayerNorm, which is faster than RMSNorm in torch, and the
same function where the means that it gives too are rounding: after training, or where something is added to a stream,
they are not, and the plain arithmetic is used.

This module needs torch alone: a converted model's checkpoint carries a copy of it, which finds the kernels where the
package is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    from normgeo.kernels import norm_ops
except ImportError:  # a checkpoint's own copy of this module, where the package is not installed
    norm_ops = None

__all__ = ["CRMSNorm", "LayerNorm", "RMSNorm"]

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled  # looked up once
is_tracing = torch.jit.is_tracing  # pyright: ignore
HIP = torch.version.hip is not None  # where gradients of torch's kernel were wrong at times
in_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Means of a vector, over its spread, that are no more than its numbers' rounding leaves."""


class _Norm(nn.Module):
    """What the three norms share: the affine parameters, eps, and the arithmetic's precision.

    Attributes:
        kernel: name of the kernel that computes this norm; None where there is none.
    """

    kernel: str | None = None

    def __init__(
        self,
        d: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        centered: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.d, self.eps, self.offset, self.centered = d, eps, offset, centered
        width = self.output_width()
        gamma = nn.Parameter(torch.full((width,), 1.0 - offset, dtype=dtype, device=device)) if affine else None
        beta = nn.Parameter(torch.zeros(width, dtype=dtype, device=device)) if affine and bias else None
        self.register_parameter("weight", gamma)
        self.register_parameter("bias", beta)

    def output_width(self) -> int:
        """How many numbers come out for each vector."""
        return self.d

    def standardized(self, x: Tensor, free: bool = False) -> Tensor:
        """The standardized input [..., d], before scale-and-shift; `free`: x may be written over."""
        raise NotImplementedError

    def forward(self, x: Tensor | None = None, *_: Any, **named: Any) -> Tensor:
        """Scale and shift: z = gamma * y + beta, with y the standardized x [..., d]. Other arguments are left aside.

        x may be given by any name, as by that which it had in the norm in whose place this one is.
        """
        if x is None:
            x = next((value for value in named.values() if isinstance(value, Tensor)), None)
            if x is None:
                raise TypeError(f"{type(self).__name__} was given no tensor")
        if norm_ops is not None and self.kernel is not None:
            try:  # found through the module they take as long as a token's norm
                weight, bias = self._parameters["weight"], self._parameters["bias"]
            except KeyError:  # parametrized, or pruned
                weight, bias = self.weight, self.bias
            # without parameters no kernel knows of another width
            if weight is not None or bias is not None or x.shape[-1:] == (self.d,):
                z = norm_ops.norm(x, weight, bias, self.eps, self.offset, self.kernel)
                if z is not None:
                    return z
        return self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        """The same in torch's own arithmetic, for every device and dtype.

        Raises:
            TypeError: the input is not of floating point.
            ValueError: it is of another width.
        """
        if not x.is_floating_point():
            raise TypeError(f"{type(self).__name__} takes floating point, and was given {x.dtype}")
        if not is_tracing() and x.shape[-1:] != (self.d,):
            raise ValueError(f"{type(self).__name__} of {self.d} numbers was given {tuple(x.shape)}")
        x = x.contiguous()  # as torch's own norms give it, which models rely on
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        # torch writes over a tensor with a derivative, and then says that it cannot be done
        free = not (_traced() or _transformed())
        z, weight, bias = self.standardized(wide, free and wide is not x), self.weight, self.bias
        if weight is not None and self.offset:
            weight = weight.to(z.dtype) + self.offset
        if weight is not None and bias is not None:
            z = _onto(z, torch.addcmul, (bias, z, weight), free)
        elif weight is not None or bias is not None:
            z = _onto(z, torch.mul if bias is None else torch.add, (z, weight if bias is None else bias), free)
        return z.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"


def _traced() -> bool:
    """Whether somebody follows the arithmetic: for gradients, to compile it, or to write it down."""
    return is_grad_enabled() or is_compiling() or is_tracing()


def _transformed() -> bool:
    """Whether `torch.func` or forward-mode derivatives are at work, which not all of torch's kernels have rules for."""
    return in_transform() is not None or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0


def _onto(z: Tensor, do: Callable[..., Tensor], given: tuple[Any, ...], free: bool) -> Tensor:
    """What `do` gives, written over z where it is free and tensors of its kind can be."""
    try:
        return do(*given, out=z) if free else do(*given)
    except RuntimeError:
        return do(*given)


def _squared_norm(x: Tensor) -> Tensor:
    """|x|^2 [..., 1]: without gradients in one pass."""
    if _traced() or x.dtype is torch.float64:
        return x.pow(2).sum(-1, keepdim=True)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


class LayerNorm(_Norm):
    r"""y = (x - mu 1) / sqrt(|x|^2 / d - mu^2 + eps), mu = 1.x / d, for x [..., d] (*Pre-RMSNorm* eq. 1).

    It gives gamma * y + beta, with as much of them as there is.

    Args:
        d: width of the input.
        eps: what is added to the mean square.
        affine: whether there is a gamma; `bias`: whether there is a beta too.
        offset: gamma is `weight + offset`: 1 for the (1 + w) gains of some models.
        centered: what comes in should have zero mean, which makes it worth a look.
        dtype: of the parameters.
        device: of the parameters.

    >>> LayerNorm(3, eps=0.0, affine=False)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.2247,  0.0000,  1.2247])
    """

    def standardized(self, x: Tensor, free: bool = False) -> Tensor:
        """The standardized input [..., d], before scale-and-shift; `free`: x may be written over."""
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RMSNorm(_Norm):
    r"""y = x / sqrt(|x|^2 / d + eps), for x [..., d] (*Pre-RMSNorm* eq. 2).

    It gives gamma * y + beta, with as much of them as there is; arguments are those of `LayerNorm`.

    >>> RMSNorm(2, eps=0.0, affine=False)(torch.tensor([1.0, 7.0]))
    tensor([0.2000, 1.4000])
    """

    kernel = "rmsnorm"

    def plain(self, x: Tensor) -> Tensor:
        """The same in torch's own arithmetic: by torch's kernel where it has one, on a CPU without gradients alone."""
        if x.dtype not in ROUNDING or is_compiling() or is_tracing() or _transformed() or x.shape[-1:] != (self.d,):
            return super().plain(x)
        if (x.is_cpu and not self.centered) or (is_grad_enabled() and (not x.is_cuda or HIP)):
            return super().plain(x)
        weight, bias = self.weight, self.bias
        if weight is None and x.is_cpu:  # without affine parameters torch's takes twice the time in float32
            weight = x.new_ones(self.d)
        elif weight is not None and self.offset:
            weight = weight.float() + self.offset
        if any(p is not None and p.dtype is not x.dtype for p in (weight, bias)):
            return super().plain(x)
        if x.is_cpu:
            assert weight is not None
            z = _by_layer_norm(x, weight, bias, self.eps)
            return super().plain(x) if z is None else z
        z = torch.rms_norm(x, (self.d,), weight, self.eps)
        return (z if bias is None else z + bias).to(x.dtype)  # under autocast torch's gives float32

    def standardized(self, x: Tensor, free: bool = False) -> Tensor:
        """The standardized input [..., d], before scale-and-shift; `free`: x may be written over."""
        return _onto(x, torch.mul, (x, torch.rsqrt(_squared_norm(x) / x.shape[-1] + self.eps)), free)


def _by_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor | None:
    """RMSNorm of zero-mean vectors x [..., d] by torch's LayerNorm; None where the means are more than rounding."""
    z, mean, scale = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)
    try:
        zero = not x.numel() or bool(mean.mul_(scale).abs_().max().item() <= ROUNDING[x.dtype])
    except RuntimeError:  # there are no numbers to look at: it is a fake
        return None
    return z.to(x.dtype) if zero else None


class CRMSNorm(_Norm):
    r"""y = x / sqrt((sum x_i^2 + (sum x_i)^2) / (n + 1) + eps) for x in R^n (*Pre-RMSNorm* eq. 5).

    x stands for the zero-mean vector (x, -sum x_i) of R^(n+1), of which it keeps the first n numbers; y is the first n
    numbers of that vector's RMSNorm.

    Args:
        d: width of what goes in: n, or n + 1 where it is padded.
        eps: what is added to the mean square.
        padded: x has n + 1 numbers, the last of which is zero and stays zero.
        expand: give all n + 1 numbers of the vector that y stands for, for readers that are not compressed.
        **options: those of `LayerNorm`; gamma and beta are as wide as what comes out.

    The numbers 3, 1 stand for 3, 1, -4:

    >>> CRMSNorm(2, eps=0.0, affine=False)(torch.tensor([3.0, 1.0])) * (26 / 3) ** 0.5
    tensor([3.0000, 1.0000])
    """

    padded: bool
    expand: bool

    def __init__(
        self, d: int, eps: float = 1e-5, *, padded: bool = False, expand: bool = False, **options: Any
    ) -> None:
        kernel = None if expand else "crmsnorm-padded" if padded else "crmsnorm"
        self.__dict__.update(padded=padded, expand=expand, kernel=kernel)  # before the parameters, whose width they set
        super().__init__(d, eps, **options)

    def output_width(self) -> int:
        """How many numbers come out for each vector."""
        return self.d + (self.expand and not self.padded)

    def standardized(self, x: Tensor, free: bool = False) -> Tensor:
        """The standardized input, before scale-and-shift: [..., d], or [..., n + 1] where it is expanded."""
        square = _squared_norm(x) + x.sum(-1, keepdim=True).pow(2)
        y = _onto(x, torch.mul, (x, torch.rsqrt(square / (x.shape[-1] + int(not self.padded)) + self.eps)), free)
        if not self.expand:
            return y
        last = -y.sum(-1, keepdim=True)
        return torch.cat([y[..., :-1] if self.padded else y, last], -1)
