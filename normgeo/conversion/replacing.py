r"""LayerNorms replaced by RMSNorms with the same gamma, beta and eps, whatever the old ones call and store them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.converted import rebuild
from normgeo.models import copied
from normgeo.sites import NormSite

__all__ = ["affine_of", "replace_norms", "spec_of", "wide"]


def affine_of(norm: nn.Module, site: NormSite) -> tuple[Tensor, Tensor]:
    """The gamma and beta a norm acts with, whatever it stores: f(0) is beta, and gamma follows from f(x).

    Where eps is 0, f(0) is 0 / 0, and beta is what f(x) and f(-x) have in common.
    """
    like = next(iter(norm.parameters()), torch.zeros(1, dtype=torch.float64))
    x = torch.ones(1, site.d, dtype=like.dtype, device=like.device)
    x[:, 1::2] = -1.0

    def act(v: Tensor) -> Tensor:
        return norm.forward(v).reshape(v.shape)  # without hooks: it may be recentered

    stored: Any = getattr(norm, "weight", None)
    seen = x - x.mean(-1, keepdim=True) if site.kind == "layernorm" else x
    y = seen * torch.rsqrt(seen.pow(2).mean(-1, keepdim=True) + site.eps)
    there, back = act(x)[0], act(-x)[0]
    beta, odd = act(torch.zeros_like(x))[0] if site.eps else (there + back) / 2, (there - back) / 2
    gamma = odd / y[0]  # nowhere zero: the mean of x is 0 or 1 / d
    for candidate in (stored, None if stored is None else stored + 1):
        if (
            candidate is not None
            and candidate.numel() == site.d
            and torch.allclose(candidate.reshape(-1), gamma, 1e-6, 1e-9)
        ):
            return candidate.detach().reshape(-1), beta
    return gamma, beta


def wide(model: PreTrainedModel, site: NormSite) -> nn.Module:
    """A copy of the norm at a site, in float64."""
    return copied(model.get_submodule(site.name)).double()


def spec_of(norm: nn.Module, site: NormSite, centered: bool = True) -> dict[str, Any]:
    """What a recipe says of the RMSNorm in the place of a norm.

    Args:
        norm: the LayerNorm.
        site: where it is.
        centered: whether what it is given has no mean.
    """
    gamma, _ = affine_of(norm, site)
    stored: Any = getattr(norm, "weight", None)
    is_offset = stored is not None and torch.allclose(stored + 1, gamma, rtol=1e-6, atol=1e-9)
    return {
        "kind": "rmsnorm", "d": site.d, "eps": site.eps, "affine": site.gain or site.bias, "bias": site.bias,
        "offset": float(is_offset), "centered": centered,
    }  # fmt: skip


def replace_norms(model: PreTrainedModel, sites: list[NormSite], recipe: dict[str, Any]) -> None:
    """Put an RMSNorm with the same gamma, beta and eps in the place of each LayerNorm."""
    values = {site.name: affine_of(wide(model, site), site) for site in sites}
    rebuild(model, {"norms": recipe["norms"]})
    for name, (gamma, beta) in values.items():
        new: Any = model.get_submodule(name)
        if new.weight is not None:
            new.weight.copy_(gamma - new.offset)
        if new.bias is not None:
            new.bias.copy_(beta)
