"""What norms are compared with: a LayerNorm whose kernel is like RMSNorm's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normgeo.kernels import norm_ops

__all__ = ["KernelLayerNorm", "given"]


def given(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The first tensor of a call, which may be given by any name."""
    return next(value for value in (*args, *named.values()) if isinstance(value, Tensor))


class KernelLayerNorm(torch.nn.Module):
    """A LayerNorm by this package's kernel: the control that tells RMSNorm's savings from the kernel's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, False)
        self.eps = eps

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Gamma * (x - mu) / sqrt(var + eps) + beta of x [..., d]; torch's, where no kernel takes x."""
        x = given(args, named)
        z = norm_ops.norm(x, self.weight, self.bias, self.eps, 0.0, "layernorm")
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps) if z is None else z
