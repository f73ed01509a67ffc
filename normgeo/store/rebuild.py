"""A norm's output from its input, to the last bit where the way its module computes it is known.

Norms that are equal on paper round differently: some scale before they go back to half precision and some after, some
store gamma and some gamma - 1. The recipes below are the ways in use; which one a module follows is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from normgeo.behaviour import Kind
from normgeo.kernels import norm_ops
from normgeo.kernels.rms import scaled_by_rms
from normgeo.sites import NormSite
from normgeo.system.memory import pages

__all__ = ["RECIPES", "Rebuild", "find_rebuild", "same_bits", "standardized"]

CACHED = 1 << 18  # numbers: what a recipe's steps make of so many stays in a processor's cache from one to the next

MORE = 1 << 19  # numbers on which recipes are told from each other that agree on those that were seen

Vectors = Float[Tensor, "vectors d"]
Row = Float[Tensor, " d"] | None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _affine(y: Tensor, gamma: Row, beta: Row) -> Tensor:
    y = y if gamma is None else gamma * y
    return y if beta is None else y + beta


def _layer_norm(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def _layer_norm_wide(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return _affine(functional.layer_norm(x.float(), x.shape[-1:], None, None, eps), gamma, beta).to(x.dtype)


def _layer_norm_by_hand(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    wide = _wide(x)
    wide = wide - wide.mean(-1, keepdim=True)
    return _affine(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps), gamma, beta).to(x.dtype)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_gain_last(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return _affine(_rms(x.float(), eps).to(x.dtype), gamma, beta)


def _rms_gain_inside(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return _affine(_rms(x.float(), eps), gamma, beta).to(x.dtype)


def _rms_wide(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return _affine(_rms(_wide(x), eps), gamma, beta).to(x.dtype)


def _rms_norm(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    return _affine(functional.rms_norm(x, x.shape[-1:], gamma, eps), None, beta)


def _rms_scale_wide(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return _affine((x * scale).to(x.dtype), gamma, beta)


def _rms_kernel(x: Tensor, gamma: Row, beta: Row, eps: float) -> Tensor:
    """As the norms of this package give it, or nearly where there is no kernel."""
    z = norm_ops.norm(x, gamma, beta, eps, 0.0, "rmsnorm")
    return _rms_wide(x, gamma, beta, eps) if z is None else z


RECIPES: dict[str, Callable[[Tensor, Row, Row, float], Tensor]] = {
    "layernorm": _layer_norm, "layernorm-wide": _layer_norm_wide, "layernorm-by-hand": _layer_norm_by_hand,
    "rmsnorm-gain-last": _rms_gain_last, "rmsnorm-gain-inside": _rms_gain_inside, "rmsnorm-wide": _rms_wide,
    "rmsnorm": _rms_norm, "rmsnorm-scale-wide": _rms_scale_wide, "rmsnorm-kernel": _rms_kernel,
}  # fmt: skip
"""z from x, gamma, beta and eps, by the name that a store keeps."""


KERNEL = "rmsnorm-kernel"
WIDE_GAINS = {"rmsnorm-gain-inside", KERNEL}
ROUNDED_HALFWAY = {
    "rmsnorm-gain-last": True, "rmsnorm-scale-wide": True, "rmsnorm-gain-inside": False, "rmsnorm-wide": False,
}  # fmt: skip
"""Recipes without a bias that there is a kernel for: whether they round before gamma."""


@dataclass(frozen=True)
class Rebuild:
    """How the output of a norm follows from its input.

    Attributes:
        recipe: a name in `RECIPES`.
        offset: gamma is the stored gain plus this (1 for the 1 + w gains of some models).
        gain, bias: what the module stores, in its own dtype; None where it has none.
        bit_equal: the recipe gave the module's output to the last bit where it was tried.
        error: the largest difference there, as a share of the largest output.
    """

    recipe: str
    offset: float
    gain: Row
    bias: Row
    bit_equal: bool
    error: float

    def __call__(self, x: Vectors, eps: float) -> Vectors:
        """The norm's output [vectors, d] for its input, on the CPU."""
        gamma = self.gain
        if gamma is not None and self.offset and self.recipe in WIDE_GAINS:
            gamma = gamma.float()  # before the offset, which half precision would round
        gamma = gamma + self.offset if gamma is not None and self.offset else gamma
        return _followed(self.recipe, x, gamma, self.bias, eps)


@torch.no_grad()
def _followed(recipe: str, x: Vectors, gamma: Row, beta: Row, eps: float) -> Vectors:
    """A recipe, by the kernel where it is one that there is a kernel for, or else a few rows at a time."""
    out = _room(x)
    rows = max(16, CACHED // x.shape[-1]) if x.is_cpu else max(1, len(x))
    halfway = ROUNDED_HALFWAY.get(recipe) if beta is None else None
    if halfway is not None and scaled_by_rms(x, gamma, eps, halfway=halfway, out=out):
        return out
    for start in range(0, len(x), rows):
        out[start : start + rows] = RECIPES[recipe](x[start : start + rows], gamma, beta, eps)
    return out


def _room(x: Vectors) -> Vectors:
    """Room for as many vectors, on a CPU in memory that is used again: threads' own malloc gives it back each time."""
    if not x.is_cpu:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    n = x.numel() * x.element_size()
    return torch.from_numpy(pages(n)[:n]).view(x.dtype).view(x.shape)


def standardized(x: Vectors, kind: Kind, eps: float) -> Vectors:
    """What a norm makes of vectors before gamma and beta, computed in float32 at least, in the vectors' own dtype."""
    return _followed("layernorm-by-hand" if kind == "layernorm" else "rmsnorm-wide", x, None, None, eps)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape and equal to the last bit, NaNs included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@torch.no_grad()
def find_rebuild(module: nn.Module, site: NormSite, pre: Vectors, post: Vectors) -> Rebuild:
    """The recipe that gives a module's outputs, to the last bit or, where none does, most nearly.

    Args:
        module: the norm.
        site: its site.
        pre: some of its inputs, on the CPU.
        post: its outputs for them.
    """
    gain, bias = (_row(getattr(module, name, None), site.d) for name in ("weight", "bias"))
    found: list[Rebuild] = []
    for offset in (0.0, 1.0) if gain is not None else (0.0,):
        for recipe in _to_try(module, site.kind):
            rebuild = Rebuild(recipe, offset, gain, bias, False, float("inf"))
            found.append(_tried(rebuild, site.eps, pre, post, nearly=not any(other.bit_equal for other in found)))
    equal = [rebuild for rebuild in found if rebuild.bit_equal]
    if len(equal) > 1 and (more := _more(module, pre)) is not None:
        differ = [int((rebuild(more[0], site.eps) != more[1]).any(1).sum()) for rebuild in equal]
        return equal[differ.index(min(differ))]
    return equal[0] if equal else min(found, key=lambda rebuild: rebuild.error)


def _more(module: nn.Module, pre: Vectors) -> tuple[Tensor, Tensor] | None:
    """More inputs than were seen, of their sizes, and what the module makes of them: on a few, recipes agree by chance.

    None where it takes more than vectors.
    """
    generator = torch.Generator().manual_seed(0)
    good = pre[torch.isfinite(pre).all(1)]
    if not len(good):
        return None
    rows = torch.randint(len(good), (max(64, MORE // pre.shape[1]),), generator=generator)
    x = (good[rows].float() * (1 + torch.randn(len(rows), pre.shape[1], generator=generator) / 4)).to(pre.dtype)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    try:
        z = module(x.to(device)).cpu()
    except Exception:  # whatever a module raises that is given too little
        return None
    return (x, z) if z.shape == x.shape and z.dtype is x.dtype else None


def _to_try(module: nn.Module, kind: Kind) -> list[str]:
    """The recipes, first that of this package's own norms for those: by chance others agree on a few vectors too."""
    names = [name for name in RECIPES if name.startswith(kind)]
    return sorted(names, key=lambda name: name != KERNEL) if getattr(module, "kernel", None) == "rmsnorm" else names


def _tried(rebuild: Rebuild, eps: float, pre: Tensor, post: Tensor, *, nearly: bool) -> Rebuild:
    """What a recipe gave; how far off it is only where that is of interest too."""
    try:
        found = rebuild(pre, eps)
    except RuntimeError:  # gains of another dtype than a fused norm takes
        return rebuild
    if same_bits(found, post):
        return replace(rebuild, bit_equal=True, error=0.0)
    if not nearly:
        return rebuild
    good = torch.isfinite(post)
    largest = post[good].double().abs().max().item() if bool(good.any()) else 1.0
    error = (found.double() - post.double())[good].abs().max().item() / (largest or 1.0) if bool(good.any()) else 0.0
    return replace(rebuild, error=error)


def _row(value: object, d: int) -> Row:
    return value.detach().cpu().clone() if isinstance(value, Tensor) and value.shape == (d,) else None
