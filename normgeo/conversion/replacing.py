r"""LayerNorms replaced by RMSNorms with the same gamma, beta and eps, whatever the old ones call and store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.conversion.probing import in_float64
from normgeo.converted import rebuild
from normgeo.errors import ConversionError
from normgeo.models import copied
from normgeo.sites import NormSite

__all__ = ["Learned", "affine_of", "learned_of", "replace_norms", "spec_of", "wide"]


class Learned(NamedTuple):
    """What a norm learns.

    Attributes:
        names: of the parameter that is its gamma and of that which is its beta, where it has them.
        shapes: of these.
        offset: what is added to the former: 1 where the gain is 1 + w.
    """

    names: dict[str, str]
    shapes: dict[str, torch.Size]
    offset: float


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
    for candidate in () if stored is None else (stored, stored + 1):
        if candidate.numel() == site.d and torch.allclose(candidate.reshape(-1), gamma, 1e-6, 1e-9):
            return candidate.detach().reshape(-1), beta
    return gamma, beta


def wide(model: PreTrainedModel, site: NormSite) -> nn.Module:
    """A copy of the norm at a site, in float64."""
    return in_float64(copied(model.get_submodule(site.name)))


def learned_of(norm: nn.Module, site: NormSite) -> Learned:
    """Which parameters of a norm are the gamma and beta that it acts with, whatever their values.

    Args:
        norm: a copy of the norm in float64, whose parameters get other values.
        site: where it is.

    Raises:
        ConversionError: they are made of its parameters in another way, so that an optimizer moves them otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter))
    gamma, beta = affine_of(norm, site)
    acts = {"weight": (gamma, (0.0, 1.0)), "bias": (beta, (0.0,))}
    whole = {name: parameter for name, parameter in norm.named_parameters() if parameter.numel() == site.d}
    found = {
        part: (name, parameter.shape, offset)
        for name, parameter in whole.items()
        for part, (value, offsets) in acts.items()
        for offset in offsets if torch.allclose(parameter.reshape(-1) + offset, value, rtol=1e-5, atol=1e-6)
    }  # fmt: skip
    if len(found) < len(whole):
        raise ConversionError(
            f"{site.name} learns other numbers than the gamma and beta that it acts with, as a pruned norm or one that "
            "scales them: its conversion would be trained otherwise; make them plain (prune.remove), or leave out "
            "trainable"
        )
    names, shapes = {part: name for part, (name, *_) in found.items()}, {k: shape for k, (_, shape, _) in found.items()}
    return Learned(names, shapes, found["weight"][2] if "weight" in found else 0.0)


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


def replace_norms(model: PreTrainedModel, sites: Sequence[NormSite], norms: dict[str, Any]) -> None:
    """Put an RMSNorm with the same gamma, beta and eps in the place of each LayerNorm; `norms` are by `spec_of`."""
    values = {site.name: affine_of(wide(model, site), site) for site in sites}
    rebuild(model, {"norms": norms})
    for name, (gamma, beta) in values.items():
        new: Any = model.get_submodule(name)
        if new.weight is not None:
            new.weight.copy_(gamma - new.offset)
        if new.bias is not None:
            new.bias.copy_(beta)
