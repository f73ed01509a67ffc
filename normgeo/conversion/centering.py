r"""Centering: writers once and for all, and explicit recenters where a mean comes from no parameter.

What writes into a stream is centered in float64 (*Pre-RMSNorm* lemma 3.1). A mean that is left (gamma * y of an
embedding LayerNorm, a convolution's GELU, the residual of a Post-LN block) is removed from the earliest activation of
which no output of the model sees the mean.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from normgeo.conversion.gauge import Gauge, center
from normgeo.conversion.probing import INVISIBLE, Place, generic_copy, outputs_of, site_inputs
from normgeo.converted import recenter_at
from normgeo.sites import NormSite

__all__ = ["SIDE", "center_all", "center_writers", "mean_share", "recenter_sources", "site_means"]

SIDE = ("qk", "inner", "head")
"""Roles of norms off the main branch."""


def center_all(
    exact: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor], recipe: dict[str, Any], *, structure: bool = False
) -> dict[str, float]:
    """Center all that writes; the mean that is left at each LayerNorm.

    Args:
        exact: the model in float64, which is changed.
        gauge: its gauge.
        inputs: what reaches all that writes.
        recipe: it gets the tables that were centered, and where activations are recentered.
        structure: recenter them also where the present values have no mean, as those of a new model's norms: for what
            must hold of all values.
    """
    tables = {name: exact.get_buffer(name) for name, _ in gauge.tables}
    center_writers(dict(exact.named_parameters()) | tables, gauge)
    recipe["tables"] = list(tables)
    if structure:
        probe = generic_copy(exact, inputs)
        center_writers(dict(probe.named_parameters()), gauge)
        places = recenter_sources(probe, gauge, inputs)
        for place in places:
            recenter_at(exact, *place)
    else:
        places = recenter_sources(exact, gauge, inputs)
    recipe["recenter"] = [[*place, "keep"] for place in places]
    return site_means(exact, gauge.layernorms, inputs)


@torch.no_grad()
def center_writers(parameters: dict[str, Tensor], gauge: Gauge) -> None:
    """Center writers and tables among these in place; where v scales what W writes, W becomes v W - mean(v W)."""
    for shift in (*gauge.writers, *gauge.tables):
        if shift.parameter in parameters:
            center(parameters[shift.parameter], shift.axis)
    for shift, scale in gauge.scaled.items():
        if shift.parameter in parameters:
            parameter = parameters[shift.parameter]
            shape = [-1 if axis == shift.axis else 1 for axis in range(parameter.ndim)]
            exact = parameter.double() * parameters[scale].double().view(shape)
            parameter.copy_(exact - exact.mean(shift.axis, keepdim=True))
    for scale in set(gauge.scaled.values()) & set(parameters):
        parameters[scale].fill_(1.0)


def mean_share(x: Tensor) -> float:
    """Largest |mean| of a vector relative to the rms of all."""
    x = x.double()
    scale = x.pow(2).mean().sqrt().item()
    return x.mean(-1).abs().max().item() / scale if scale > 0 else 0.0


def site_means(exact: PreTrainedModel, sites: list[NormSite], inputs: dict[str, Tensor]) -> dict[str, float]:
    """The largest mean share of what each site is given."""
    with site_inputs(exact, sites) as given:
        outputs_of(exact, inputs)
    return {name: max(map(mean_share, tensors), default=0.0) for name, tensors in given.items()}


def recenter_sources(exact: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor]) -> list[Place]:
    """Recenter activations, earliest first, until no mean that nothing sees reaches a norm; where that was.

    Two branches may bring a mean to one norm, and the larger may hide the other, so every place is kept that changes a
    mean at all. Those that freed no norm of its mean are tried again at the end: later ones may make them superfluous.
    """
    main = [site for site in gauge.layernorms if site.role not in SIDE]
    done: dict[Place, RemovableHandle] = {}
    doubtful: list[Place] = []
    waiting = list(gauge.invisible)
    means, sources = _looked(exact, main, waiting, inputs)
    while (left := _with_means(means)) and sources:
        source = sources.pop(0)
        waiting.remove(source)
        handle = recenter_at(exact, *source)
        after, later = _looked(exact, main, waiting, inputs)
        if not any(abs(after[name] - means[name]) > 1e-3 * means[name] for name in left):
            handle.remove()
            continue
        done[source] = handle
        if _with_means(after) == left:
            doubtful.append(source)
        means, sources = after, later
    for source in doubtful:
        done.pop(source).remove()
        if _with_means(site_means(exact, main, inputs)) != left:
            done[source] = recenter_at(exact, *source)
    return list(done)


def _with_means(means: dict[str, float]) -> set[str]:
    return {name for name, mean in means.items() if mean >= INVISIBLE}


def _looked(
    exact: PreTrainedModel, sites: list[NormSite], places: list[Place], inputs: dict[str, Tensor]
) -> tuple[dict[str, float], list[Place]]:
    """`site_means`, and those of the places where there is a mean, in the order of the pass: of one pass."""
    found: list[Place] = []

    def look(place: Place, value: Any) -> None:
        if isinstance(value, Tensor) and mean_share(value) >= INVISIBLE:
            found.append(place)

    def watch(place: Place, module: nn.Module) -> RemovableHandle:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            at = place.argument
            look(place, kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            look(place, output[0] if isinstance(output, (tuple, list)) else output)

        if place.side == "input":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    with ExitStack() as hooks:
        for place in places:
            hooks.enter_context(watch(place, exact.get_submodule(place.module)))
        means = site_means(exact, sites, inputs)
    return means, list(dict.fromkeys(found))
