"""What a module does: whether it is a LayerNorm, an RMSNorm or neither, by probing it with random vectors.

*Geometry* eq. 9 and 11; *Pre-RMSNorm* eq. 1 and 2.
"""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgeo.errors import ModelError
from normgeo.models import copied, whole

__all__ = ["Behaviour", "Kind", "behaviour_of"]

Kind = Literal["layernorm", "rmsnorm"]
TOLERANCE = 1e-4
EPS = re.compile(r"(^|_)eps(ilon)?(_|$)", re.IGNORECASE)  # steps are none


@dataclass(frozen=True)
class Behaviour:
    """What a norm is: its kind, its epsilon, and whether it has a gamma and a beta, as parameters or otherwise."""

    kind: Kind
    eps: float
    gain: bool
    bias: bool


def _centered(x: Tensor, kind: Kind) -> Tensor:
    """What a norm of this kind scales: LayerNorm its input without the mean, RMSNorm all of it."""
    return x - x.mean(-1, keepdim=True) if kind == "layernorm" else x


def _standardized(x: Tensor, kind: Kind) -> Tensor:
    x = _centered(x, kind)
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
        ModelError: it cannot be copied, and may be a norm by the sizes of its parameters.
    """
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    for dtype in dict.fromkeys((torch.float64, torch.promote_types(own, torch.float32))):
        try:
            return _Probe.of(module, shape, dtype).behaviour(given)
        except ModelError:
            sizes = [parameter.numel() for parameter in module.parameters()]
            if sizes and max(sizes) <= shape[-1]:
                raise
            return None
        except Exception:  # whatever a module raises that wants other inputs, or casts them to a dtype of its own
            continue
    return None


@dataclass
class _Probe:
    """A copy of a module, and random vectors for it of which each has its own length and mean.

    Attributes:
        module: the copy.
        shape: of what it is given.
        device, dtype: of the vectors.
    """

    module: nn.Module
    shape: torch.Size
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @classmethod
    def of(cls, module: nn.Module, shape: torch.Size, dtype: torch.dtype) -> _Probe:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        dtype = torch.float32 if device.type == "mps" else dtype
        whole = copied(module, _without_hooks(module, dtype)).to(dtype).eval()
        probe = cls(whole, shape, device, dtype)
        for name, parameter in probe.module.named_parameters():
            parameter[~torch.isfinite(parameter)] = 1.0
            if not parameter.any() and not EPS.search(name.rpartition(".")[2]):
                parameter.fill_(1.0)
        return probe

    def vectors(self) -> Tensor:
        signs = torch.randint(0, 2, self.shape, generator=self.generator) * 2.0 - 1
        x = signs * (0.5 + torch.rand(self.shape, generator=self.generator))
        lengths = 0.5 + 1.5 * torch.rand((*self.shape[:-1], 1), generator=self.generator)
        moved = x + torch.randn((*self.shape[:-1], 1), generator=self.generator)
        return (1e3 * lengths * moved).to(self.device, self.dtype)

    def behaviour(self, given: torch.dtype) -> Behaviour | None:
        """What it does; raises whatever the module raises."""
        module, fits = self.module, [self.vectors() for _ in range(4)]
        there, back = (torch.stack([module(sign * x) for x in fits]) for sign in (1, -1))
        odd, beta = (there - back) / 2, ((there + back) / 2).mean(0)
        fresh = self.vectors()
        truth = module(fresh)
        if truth.shape != self.shape or not (torch.isfinite(truth).all() and odd.abs().max() > 0):
            return None
        for kind in ("layernorm", "rmsnorm"):
            y = _standardized(torch.stack(fits), kind)
            gamma = (odd * y).sum(0) / y.pow(2).sum(0)
            error = truth - (gamma * _standardized(fresh, kind) + beta)
            if error.pow(2).mean().sqrt() < TOLERANCE * truth.pow(2).mean().sqrt():
                if _fits_any(module, fresh) and not self._gains_last(kind):
                    return None
                short = fresh / 1e3
                named = [eps for eps in _named_eps(module) if _is_its_eps(eps, module, short, gamma, kind)]
                eps = named[0] if named else _measured_eps(module, short, gamma, kind, given)
                # two numbers without their mean are one and its negative, of which all that saturates makes a sign
                if kind == "layernorm" and truth.shape[-1] == 2 and not _is_its_eps(eps, module, short, gamma, kind):
                    return None
                # what is no parameter, as a buffer or a number in the code, is seen by what it does
                own = len(list(module.parameters()))
                gain = own > 0 or bool((gamma - 1).abs().max() > TOLERANCE)
                bias = own > 1 or bool(beta.abs().max() > TOLERANCE * gamma.abs().max())
                return Behaviour(kind, eps, gain, bias)
        return None

    def _gains_last(self, kind: Kind) -> bool:
        """Whether gains are the same for all vectors, whatever they are: else they belong to another axis."""
        module, x = copy.deepcopy(self.module), self.vectors()
        for parameter in module.parameters():
            noise = torch.rand(parameter.shape, generator=self.generator, dtype=torch.float32)
            parameter.copy_(0.5 + noise.to(parameter))
        gamma = ((module(x) - module(-x)) / 2 / _standardized(x, kind)).flatten(0, -2)
        off = ((gamma - gamma[0]) / gamma[0]).abs().median(1).values  # of single numbers rounding may be all
        return bool((off < 1e-3).all())


def _without_hooks(module: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """What a copy of a module has instead of its hooks: none, and in this dtype what they made in the last pass.

    Hooks change what a norm gives, as those that recenter, and are not to see random vectors. A weight that one of them
    makes, as of a pruned norm, is no parameter. Parameters that are spread over processes are whole in the copy.
    """
    instead: dict[int, Any] = {}
    for part in module.modules():
        instead |= {id(hooks): OrderedDict() for hooks in (part._forward_hooks, part._forward_pre_hooks)}
        made = (value for value in vars(part).values() if isinstance(value, Tensor))
        instead |= {id(value): value.detach().to(dtype) if value.is_floating_point() else value for value in made}
    spread = [p for p in module.parameters() if hasattr(p, "full_tensor")]
    return instead | {id(p): nn.Parameter(whole(p.detach()), requires_grad=False) for p in spread}


def _fits_any(module: nn.Module, x: Tensor) -> bool:
    """Whether a module with gains takes vectors of another width: they may belong to another axis (GroupNorm)."""
    try:
        narrow = x[..., :-1]  # of a width of one, gains of two make two again
        return any(p.numel() > 1 for p in module.parameters()) and module(narrow).shape == narrow.shape
    except Exception:  # whatever a module raises at a wrong width
        return False


def _is_its_eps(eps: float, module: nn.Module, x: Tensor, gamma: Tensor, kind: Kind) -> bool:
    """Whether vectors whose mean square is eps / 3 and 3 eps come out 1/2 and sqrt(3)/2 as long.

    Those of norms that add it to a deviation do not, nor those of softmax, whatever the eps that would fit it at one.
    """
    y, v = _standardized(x, kind), _centered(x, kind).pow(2).mean(-1, keepdim=True)
    lengths = ((_length(module, x * (eps * share / v).sqrt(), gamma, y), share) for share in (1 / 3, 3))
    return eps == 0 or all(bool((r - (1 + 1 / share) ** -0.5).abs().max() < 0.01) for r, share in lengths)


def _length(module: nn.Module, x: Tensor, gamma: Tensor, y: Tensor) -> Tensor:
    """How long vectors x come out, beta aside, as a share of gamma * y, which they would be were eps zero."""
    out = (module(x) - module(-x)) / 2
    return (out * gamma * y).sum(-1) / (gamma * y).pow(2).sum(-1)


def _named_eps(module: nn.Module) -> list[float]:
    """What may be its eps, by what it is called; 0 last, which is seen by nothing."""
    values = [v for k, v in vars(module).items() if EPS.search(k) and isinstance(v, float)]
    return sorted(values, key=lambda value: value == 0)


def _measured_eps(module: nn.Module, x: Tensor, gamma: Tensor, kind: Kind, given: torch.dtype) -> float:
    """Eps from how much short vectors come out shorter: |f(sx)| / |gamma y| = 1 / sqrt(1 + eps / (s^2 v)).

    One that is the rounding of the probe's dtype is that of the dtype in which the module computes.
    """
    y, v = _standardized(x, kind), _centered(x, kind).pow(2).mean(-1)
    best, off = 0.0, 1.0
    for s in (10.0**-k for k in range(9)):
        r = _length(module, s * x, gamma, y).clamp(1e-6, 1.0)
        if (r - 0.5).abs().mean() < off:
            best, off = (s * s * v * (r**-2 - 1)).mean().item(), (r - 0.5).abs().mean().item()
    if math.isclose(best, torch.finfo(x.dtype).eps, rel_tol=1e-3):
        own, wide = torch.finfo(given).eps, torch.finfo(torch.promote_types(given, torch.float32)).eps
        short = (x * (own / v)[..., None].sqrt()).to(given)  # its mean square is as large as its rounding
        out, whole = (abs(module.to(given)(row).double()).sum() for row in (short, short * 64))
        return own if out < 0.9 * whole else wide  # torch takes half precision to float32
    return float(f"{best:.5g}")
