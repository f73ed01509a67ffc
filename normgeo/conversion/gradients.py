"""What a gradient tells of shifts along the uniform vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from normgeo.conversion.probing import INVISIBLE

__all__ = ["aligned", "inverted", "match", "ratio", "reached", "vanishes"]


@torch.no_grad()
def ratio(gradient: Tensor, axis: int, weights: Tensor | None = None) -> Tensor:
    """How much is left of a sum along an axis: |sum_a w_a g_a| / sqrt(sum_a |w_a g_a|^2), for each row w of `weights`.

    About 1 for unrelated summands, sqrt(d) for equal ones, and rounding when the sum vanishes.
    """
    g = gradient.double()  # some routers turn their parameters to float32 themselves
    g = g.movedim(axis, 0).flatten(1) if g.ndim > 1 else g[:, None]
    w = torch.ones(1, len(g), dtype=g.dtype, device=g.device) if weights is None else weights.double()
    scale = (w.square() @ g.square().sum(1)).sqrt()
    return torch.where(scale > 0, (w @ g).norm(dim=1) / scale, torch.inf)


def reached(gradient: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a gradient that is not zero."""
    return gradient is not None and bool(gradient.norm() > 0)


def aligned(gradient: Tensor | None) -> float:
    """1 for a gradient along the uniform vector everywhere, about 1/sqrt(d) for any other, 0 for none."""
    if not reached(gradient):
        return 0.0
    return float(ratio(gradient, -1)) / math.sqrt(gradient.shape[-1])


def vanishes(gradient: Tensor | None, axis: int = -1) -> bool:
    """Whether there is one whose sum along an axis is rounding: nothing sees a shift along the uniform vector."""
    return reached(gradient) and float(ratio(gradient, axis)) < INVISIBLE


def inverted(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """1/v of those of these vectors v that have no zero."""
    return {name: 1 / v.detach() for name, v in vectors.items() if bool((v != 0).all())}


def match(gradient: Tensor, axis: int, inverses: Mapping[str, Tensor]) -> str | None:
    """The one vector v for which the gradient, weighted by 1/v, sums to zero along the axis."""
    if not inverses:
        return None
    ratios = ratio(gradient, axis, torch.stack(list(inverses.values())))
    best = int(ratios.argmin())
    return list(inverses)[best] if float(ratios[best]) < INVISIBLE else None
