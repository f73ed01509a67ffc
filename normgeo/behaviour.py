"""What a module does: whether it is a LayerNorm, an RMSNorm or neither, by probing it with random vectors.

*Geometry* eq. 9 and 11; *Pre-RMSNorm* eq. 1 and 2.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgeo.models import copied

__all__ = ["Behaviour", "Kind", "behaviour_of"]

Kind = Literal["layernorm", "rmsnorm"]
TOLERANCE = 1e-4
EPS = re.compile(r"(^|_)eps(ilon)?(_|$)", re.IGNORECASE)  # steps are none


@dataclass(frozen=True)
class Behaviour:
    """What a norm is: its kind, its epsilon, and whether it has a gamma and a beta."""

    kind: Kind
    eps: float
    gain: bool
    bias: bool


def _standardized(x: Tensor, kind: Kind) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


@torch.no_grad()
def behaviour_of(module: nn.Module, shape: torch.Size, given: torch.dtype = torch.float32) -> Behaviour | None:
    """What a module does to random vectors of this shape, or None when it is no norm.

    With f the module, (f(x) + f(-x)) / 2 is beta and (f(x) - f(-x)) / 2 is gamma * y; both are fitted on some random
    vectors and must then predict f on others, whose lengths and means differ widely. A norm remains one with a gain
    that is zero or not finite: those numbers are ones while it is probed.

    Args:
        module: any.
        shape: of what it is given in a forward pass.
        given: dtype of that, on which the eps of torch's RMSNorm depends where none is set.

    Raises:
        ModelError: it cannot be copied.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    module = copied(module, _without_hooks(module, dtype)).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)

    def probe() -> Tensor:
        signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
        x = signs * (0.5 + torch.rand(shape, generator=generator))
        lengths = 0.5 + 1.5 * torch.rand((*shape[:-1], 1), generator=generator)
        return (1e3 * lengths * (x + torch.randn((*shape[:-1], 1), generator=generator))).to(device, dtype)

    fits = [probe() for _ in range(4)]
    try:
        for parameter in module.parameters():
            parameter[~torch.isfinite(parameter)] = 1.0
            if not parameter.any():
                parameter.fill_(1.0)
        odd = torch.stack([(module(x) - module(-x)) / 2 for x in fits])
        beta = torch.stack([(module(x) + module(-x)) / 2 for x in fits]).mean(0)
        fresh = probe()
        truth = module(fresh)
    except Exception:  # whatever a module raises that wants other inputs: then it is no norm
        return None
    if truth.shape != shape or not (torch.isfinite(truth).all() and odd.abs().max() > 0) or _fits_any(module, fresh):
        return None
    for kind in ("layernorm", "rmsnorm"):
        y = _standardized(torch.stack(fits), kind)
        gamma = (odd * y).sum(0) / y.pow(2).sum(0)
        error = truth - (gamma * _standardized(fresh, kind) + beta)
        if error.pow(2).mean().sqrt() < TOLERANCE * truth.pow(2).mean().sqrt():
            eps = _named_eps(module)
            eps = _measured_eps(module, fresh / 1e3, gamma, kind, given) if eps is None else eps
            has_bias = bool(beta.abs().max() > TOLERANCE * gamma.abs().max()) or _has_bias(module)
            return Behaviour(kind, eps, any(True for _ in module.parameters()), has_bias)
    return None


def _without_hooks(module: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """What a copy of a module has instead of its hooks: none, and in this dtype what they made in the last pass.

    Hooks change what a norm gives, as those that recenter, and are not to see random vectors. A weight that one of them
    makes, as of a pruned norm, is no parameter.
    """
    instead: dict[int, Any] = {}
    for part in module.modules():
        instead |= {id(hooks): OrderedDict() for hooks in (part._forward_hooks, part._forward_pre_hooks)}
        made = (value for value in vars(part).values() if isinstance(value, Tensor))
        instead |= {id(value): value.detach().to(dtype) if value.is_floating_point() else value for value in made}
    return instead


def _fits_any(module: nn.Module, x: Tensor) -> bool:
    """Whether a module with parameters takes vectors of another width: its gains belong to another axis (GroupNorm)."""
    try:
        narrow = x[..., :-1]  # of a width of one, gains of two make two again
        return any(True for _ in module.parameters()) and module(narrow).shape == narrow.shape
    except Exception:  # whatever a module raises at a wrong width
        return False


def _has_bias(module: nn.Module) -> bool:
    return len(list(module.parameters())) > 1


def _named_eps(module: nn.Module) -> float | None:
    values = [v for k, v in vars(module).items() if EPS.search(k) and isinstance(v, float)]
    return values[0] if values else None


def _measured_eps(module: nn.Module, x: Tensor, gamma: Tensor, kind: Kind, given: torch.dtype) -> float:
    """Eps from how much short vectors come out shorter: |f(sx)| / |gamma y| = 1 / sqrt(1 + eps / (s^2 v)).

    One that is the rounding of the probe's dtype is that of the dtype in which the module computes.
    """
    y = _standardized(x, kind)
    centered = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    v = centered.pow(2).mean(-1)
    best, off = 0.0, 1.0
    for s in (10.0**-k for k in range(9)):
        out = (module(s * x) - module(-s * x)) / 2
        r = ((out * gamma * y).sum(-1) / (gamma * y).pow(2).sum(-1)).clamp(1e-6, 1.0)
        if (r - 0.5).abs().mean() < off:
            best, off = (s * s * v * (r**-2 - 1)).mean().item(), (r - 0.5).abs().mean().item()
    if math.isclose(best, torch.finfo(x.dtype).eps, rel_tol=1e-3):
        own, wide = torch.finfo(given).eps, torch.finfo(torch.promote_types(given, torch.float32)).eps
        short = (x * (own / v)[..., None].sqrt()).to(given)  # its mean square is as large as its rounding
        out, whole = (abs(module.to(given)(row).double()).sum() for row in (short, short * 64))
        return own if out < 0.9 * whole else wide  # torch takes half precision to float32
    return float(f"{best:.5g}")
