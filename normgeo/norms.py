r"""LayerNorm, RMSNorm and CRMSNorm as drop-in modules.

Equations are those of Jiang et al., "Pre-RMSNorm and Pre-CRMSNorm Transformers" (*Pre-RMSNorm* below). All three keep
the dtype of their input; half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["CRMSNorm", "LayerNorm", "RMSNorm"]


class _Norm(nn.Module):
    """What the three norms share: the affine parameters, eps, and the arithmetic's precision."""

    def __init__(
        self,
        d: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.d, self.eps, self.offset = d, eps, offset
        gamma = nn.Parameter(torch.full((d,), 1.0 - offset, dtype=dtype, device=device)) if affine else None
        beta = nn.Parameter(torch.zeros(d, dtype=dtype, device=device)) if affine and bias else None
        self.register_parameter("weight", gamma)
        self.register_parameter("bias", beta)

    def standardized(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Scale and shift the standardized y: z = gamma * y + beta with gamma = weight + offset."""
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        z = self.standardized(wide)
        if self.weight is not None:
            z = z * (self.weight + self.offset if self.offset else self.weight)
        if self.bias is not None:
            z = z + self.bias
        return z.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"


class LayerNorm(_Norm):
    r"""y = (x - mu 1) / sqrt(|x|^2 / d - mu^2 + eps), mu = 1.x / d (*Pre-RMSNorm* eq. 1)."""

    def standardized(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The standardized input, before scale-and-shift."""
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RMSNorm(_Norm):
    r"""y = x / sqrt(|x|^2 / d + eps) (*Pre-RMSNorm* eq. 2)."""

    def standardized(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The standardized input, before scale-and-shift."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class CRMSNorm(_Norm):
    r"""y = x / sqrt((sum x_i^2 + (sum x_i)^2) / (n + 1) + eps) for x in R^n (*Pre-RMSNorm* eq. 5).

    x stands for the zero-mean vector (x, -sum x_i) of R^(n+1), of which it keeps the first n numbers; y is the first n
    numbers of that vector's RMSNorm. `d` is n, the width of what goes in and comes out.
    """

    def standardized(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The standardized input, before scale-and-shift."""
        square = x.pow(2).sum(-1, keepdim=True) + x.sum(-1, keepdim=True).pow(2)
        return x * torch.rsqrt(square / (x.shape[-1] + 1) + self.eps)
