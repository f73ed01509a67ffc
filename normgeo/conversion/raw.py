"""Who else reads the streams that LayerNorms read, in a pass in which no branch brings a mean into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from normgeo.conversion.gradients import aligned, reached, vanishes
from normgeo.conversion.probing import INVISIBLE, HandedOn, Use

__all__ = ["raw_readers"]

ROUNDING = 1e-12
"""Gradients below this share of the largest are rounding, in float64."""

Gradient: TypeAlias = Callable[[list[Tensor], Sequence[Tensor]], list[Tensor | None]]
"""The gradient of a sum of what is given first, with respect to each of what is given then."""


def raw_readers(
    means: Mapping[str, Tensor], handed: HandedOn, outputs: list[Tensor], gradient: Gradient,
    noise: Callable[[Tensor], Tensor],
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """For each LayerNorm, who else reads the latest of what is added into its input, if that has a mean that is seen.

    Args:
        means: of each site, a random sum of the means of what it is given.
        handed: what modules hand on in the same pass, and the outputs' gradients with respect to it.
        outputs: the model's.
        gradient: of sums with respect to tensors.
        noise: a random sum of a tensor.
    """
    hidden = [vanishes(g) for g in handed.gradients]  # the same for every site
    # of all means at once first: mostly what is seen moves none, but by rounding, and no site need be asked alone
    moved = gradient(list(means.values()), [use.tensor for use in handed.uses])
    rounding = ROUNDING * max((float(m.norm()) for m in moved if m is not None), default=0.0)
    shown = [
        use for use, h, m in zip(handed.uses, hidden, moved, strict=True)
        if use.place.side == "output" and not h and m is not None and float(m.norm()) > rounding
    ]  # fmt: skip
    added = {key: use for key, mean in means.items() if (use := _latest(mean, shown, gradient))}
    sources = list({id(use): use for use in added.values()}.values())
    readers = _readers(sources, handed, hidden, outputs, gradient, noise)
    who = {id(use): names for use, names in zip(sources, readers, strict=True)}
    return {key: who[id(use)] for key, use in added.items()}


def _latest(mean: Tensor, shown: list[Use], gradient: Gradient) -> Use | None:
    """The latest of these that is added into a site's input.

    Mostly it is near, and a backward pass goes no further than it is asked to: the last few are asked for first.
    """
    end, few = len(shown), 8
    while end > 0:
        some = shown[max(end - few, 0) : end]
        late = zip(reversed(some), reversed(gradient([mean], [use.tensor for use in some])), strict=True)
        if source := next((use for use, m in late if aligned(m) > 1 - INVISIBLE), None):
            return source
        end, few = end - few, 4 * few
    return None


def _readers(
    sources: list[Use], handed: HandedOn, hidden: list[bool], outputs: list[Tensor], gradient: Gradient,
    noise: Callable[[Tensor], Tensor],
) -> list[tuple[str, ...]]:  # fmt: skip
    """For each of these, who reads it, or else what it is added to later on."""
    reading = [
        (use, h) for use, g, h in zip(handed.uses, handed.gradients, hidden, strict=True)
        if use.place.side == "input" and use.leaf and reached(g)
    ]  # fmt: skip

    def sees(use: Use, h: bool, source: Use) -> bool:
        return not (h and use.tensor.shape[-1] == source.tensor.shape[-1])  # a norm of several reads the mean of each

    names = [[u.place.module for u, h in reading if u.storage == s.storage and sees(u, h, s)] for s in sources]
    left = [(source, found) for source, found in zip(sources, names, strict=True) if not found]
    late = [(use.place.module, use.tensor, [sees(use, h, s) for s, _ in left]) for use, h in reading]
    late += [("the model's output", output, [True] * len(left)) for output in outputs]
    for name, tensor, seen in late if left else ():
        # if it has another added into it, its mean follows a shift of that along 1 more than any other
        moved = gradient([noise(tensor.mean(-1))], [source.tensor for source, _ in left])
        for (source, found), s, m in zip(left, seen, moved, strict=True):
            if s and source.tensor is not tensor and aligned(m) > 0.5:
                found.append(name)
    pairs = zip(sources, names, strict=True)
    return [tuple(dict.fromkeys(found)) or (f"the code around {source.place.module}",) for source, found in pairs]
