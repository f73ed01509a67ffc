r"""Conversion of any Pre-LN transformer to an equivalent Pre-RMSNorm one (*Pre-RMSNorm* section 3.1).

1. Center every writer of the gauge in float64 (lemma 3.1).
2. Where a stream still has a mean that no parameter carries (an embedding LayerNorm's gamma * y, a table in a buffer),
   recenter the earliest activation whose mean no output of the model sees.
3. Replace every LayerNorm whose input then has zero mean by RMSNorm with the same gamma, beta and eps.
4. Certify the result; a conversion that is not equal is an error and gives no model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from normgeo.certify import Certificate, certificate_inputs, certify
from normgeo.errors import ConversionError
from normgeo.gauge import INVISIBLE, Gauge, Place, center, find_gauge, float64_copy, outputs_of, site_inputs, untie
from normgeo.models import example_inputs
from normgeo.norms import RMSNorm
from normgeo.sites import NormSite

__all__ = ["Conversion", "convert"]

SIDE = ("qk", "inner", "head")


@dataclass(frozen=True)
class Conversion:
    """A converted model and what was done to it.

    Attributes:
        model: the converted copy, in the original's dtype.
        certificate: how equal it is.
        replaced: sites that are RMSNorm now.
        kept: sites of the main branch that stay LayerNorm, and why.
        untouched: norms off the main branch (q/k norms, a head's own norm) that stay as they are.
        recentered: places that are recentered explicitly: a module's name, and whether its input or output.
    """

    model: PreTrainedModel
    certificate: Certificate
    replaced: tuple[NormSite, ...]
    kept: dict[str, str]
    untouched: tuple[NormSite, ...]
    recentered: tuple[Place, ...]


def _recentered(value: Any) -> Any:
    """Recenter(x) = x - mu(x) 1 of a tensor, or of the first of several (*Pre-RMSNorm* section 3.1)."""
    if isinstance(value, tuple):
        return (_recentered(value[0]), *value[1:])
    wide = value if value.dtype == torch.float64 else value.float()
    return (wide - wide.mean(-1, keepdim=True)).to(value.dtype)


def _recenter_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _recentered(output)


def _recenter_input(_: nn.Module, args: tuple[Any, ...]) -> Any:
    return _recentered(args)


def _recenter_at(model: nn.Module, place: Place) -> RemovableHandle:
    module = model.get_submodule(place[0])
    if place[1] == "input":
        return module.register_forward_pre_hook(_recenter_input)
    return module.register_forward_hook(_recenter_output)


@torch.no_grad()
def convert(
    model: PreTrainedModel,
    to: str = "rmsnorm",
    inputs: dict[str, Tensor] | None = None,
) -> Conversion:
    """Convert the LayerNorms of a model to RMSNorms without changing its outputs.

    Args:
        model: any transformers model; it is never changed.
        to: `rmsnorm`, or `naive-rmsnorm`: swap the norms and recenter nothing. The naive swap is not equal and is not
            certified as such; it is there for comparison.
        inputs: a small input; made from the configuration when None.

    Raises:
        ConversionError: there is no LayerNorm, none could be replaced, or the certificate failed.
        ModelError: outputs are NaN, or random.

    >>> from normgeo import convert, load_model
    >>> conversion = convert(load_model("embedded-layernorm"))
    >>> len(conversion.replaced), conversion.recentered, conversion.certificate.passed
    (13, (), True)
    """
    if to not in ("rmsnorm", "naive-rmsnorm"):
        raise ConversionError(f"convert to rmsnorm or naive-rmsnorm, not {to!r}")
    inputs = example_inputs(model) if inputs is None else inputs
    with torch.enable_grad():
        gauge = find_gauge(model, inputs)
    layernorms = [site for site in gauge.sites if site.kind == "layernorm"]
    if not layernorms:
        raise ConversionError(f"{type(model).__name__} has no LayerNorm: all its norms are RMSNorm already")
    exact = float64_copy(model)
    recentered: list[Place] = []
    if to == "rmsnorm":
        _center_writers(exact, gauge)
        recentered = _recenter_sources(exact, gauge, layernorms, inputs)
        means = _site_means(exact, layernorms, inputs)
    else:
        means = {site.name: 0.0 for site in layernorms}
    main = layernorms if to == "rmsnorm" else [site for site in layernorms if site.role not in SIDE]
    chosen = [site for site in main if means[site.name] < INVISIBLE]
    others = [site for site in layernorms if site not in chosen]
    untouched = tuple(site for site in others if site.role in SIDE)
    kept = {site.key: _reason(site, means) for site in others if site.role not in SIDE}
    if not chosen:
        raise ConversionError("no LayerNorm can be replaced: " + "; ".join(f"{k}: {v}" for k, v in kept.items()))
    for site in {site.name: site for site in chosen}.values():
        _replace(exact, site)
    converted = _in_dtype(model, exact, chosen, recentered)
    counts = {"replaced": len(chosen), "kept": len(kept), "untouched": len(untouched), "recentered": len(recentered)}
    certificate = certify(
        float64_copy(model), exact, model, converted, [inputs, *_more(model)],
        site_mean=max(means[site.name] for site in chosen), counts=counts,
    )  # fmt: skip
    if to == "naive-rmsnorm":
        certificate = replace(certificate, passed=False)
    elif not certificate.passed:
        raise ConversionError(
            f"the conversion is not equal to its original: relative error {certificate.error_rel:.1e} in float64, "
            f"allowed {certificate.tolerance:.0e}; nothing was converted"
        )
    return Conversion(converted, certificate, tuple(chosen), kept, untouched, tuple(recentered))


def _more(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    try:
        return certificate_inputs(model)
    except Exception:  # a model that takes inputs only its user can make: the user's are what there is
        return []


def _reason(site: NormSite, means: dict[str, float]) -> str:
    return (
        f"the mean of its input ({means[site.name]:.1e} of its rms) is seen by another reader than a LayerNorm, so "
        "that it cannot be removed"
    )


def _center_writers(exact: PreTrainedModel, gauge: Gauge) -> None:
    parameters = dict(exact.named_parameters())
    for shift in gauge.writers:
        center(parameters[shift.parameter], shift.axis)


def _mean_share(x: Tensor) -> float:
    """Largest |mean| of a vector relative to the rms of all."""
    x = x.double()
    scale = x.pow(2).mean().sqrt().item()
    return x.mean(-1).abs().max().item() / scale if scale > 0 else 0.0


def _site_means(exact: PreTrainedModel, sites: list[NormSite], inputs: dict[str, Tensor]) -> dict[str, float]:
    with site_inputs(exact, sites) as given:
        outputs_of(exact, inputs)
    return {name: max(map(_mean_share, tensors), default=0.0) for name, tensors in given.items()}


def _recenter_sources(
    exact: PreTrainedModel, gauge: Gauge, sites: list[NormSite], inputs: dict[str, Tensor]
) -> list[Place]:
    """Recenter activations, earliest first, until no invisible mean reaches a norm; the names that needed it."""
    main = [site for site in sites if site.role not in SIDE]
    done: list[Place] = []
    tried: set[Place] = set()
    while True:
        means = _site_means(exact, main, inputs)
        left = {name for name, mean in means.items() if mean >= INVISIBLE}
        if not left:
            return done
        source = _first_source(exact, {p for p in gauge.invisible if p not in tried}, inputs)
        if source is None:
            return done
        tried.add(source)
        handle = _recenter_at(exact, source)
        after = _site_means(exact, main, inputs)
        if any(after[name] < 0.9 * means[name] for name in left):
            done.append(source)
        else:
            handle.remove()


def _look_at_input(place: Place, look: Any, _: nn.Module, args: tuple[Any, ...]) -> None:
    look(place, args)


def _look_at_output(place: Place, look: Any, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    look(place, output)


def _first_source(exact: PreTrainedModel, places: set[Place], inputs: dict[str, Tensor]) -> Place | None:
    """The first of these places, in the order of the pass, where there is a mean."""
    found: list[Place] = []
    handles = []

    def look(place: Place, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) else value
        if _mean_share(first) >= INVISIBLE:
            found.append(place)

    try:
        for place in places:
            module = exact.get_submodule(place[0])
            if place[1] == "input":
                handles.append(module.register_forward_pre_hook(partial(_look_at_input, place, look)))
            else:
                handles.append(module.register_forward_hook(partial(_look_at_output, place, look)))
        outputs_of(exact, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _replace(model: nn.Module, site: NormSite) -> None:
    """Put an RMSNorm with the same gamma, beta and eps in the place of a LayerNorm."""
    old = model.get_submodule(site.name)
    gamma, beta = _affine(old, site)
    like = next(model.parameters())
    new = RMSNorm(site.d, site.eps, affine=site.gain, bias=site.bias, dtype=like.dtype, device=like.device)
    if new.weight is not None:
        new.weight.copy_(gamma)
    if new.bias is not None:
        new.bias.copy_(beta)
    parent, _, name = site.name.rpartition(".")
    new._forward_hooks.update(old._forward_hooks)  # it may be recentered too
    setattr(model.get_submodule(parent), name, new.requires_grad_(False))


def _affine(norm: nn.Module, site: NormSite) -> tuple[Tensor, Tensor]:
    """The gamma and beta a LayerNorm acts with, whatever it stores: f(0) is beta, and gamma follows from f(x)."""
    like = next(iter(norm.parameters()), torch.zeros(1, dtype=torch.float64))
    x = torch.ones(1, site.d, dtype=like.dtype, device=like.device)
    x[:, 1::2] = -1.0
    x[:, : site.d % 2] = 0.0 if site.d % 2 else 1.0
    act = norm.forward  # without hooks: it may be recentered
    beta = act(torch.zeros_like(x))[0]
    stored = getattr(norm, "weight", None)
    centered = x - x.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + site.eps)
    odd = (act(x) - act(-x))[0] / 2
    gamma = torch.where(y[0] != 0, odd / y[0], torch.zeros_like(odd))
    for candidate in (stored, None if stored is None else stored + 1):
        known = y[0] != 0
        if candidate is not None and torch.allclose(candidate[known], gamma[known], rtol=1e-6, atol=1e-9):
            return candidate.detach(), beta
    return gamma, beta


def _in_dtype(
    model: PreTrainedModel, exact: PreTrainedModel, chosen: list[NormSite], recentered: list[Place]
) -> PreTrainedModel:
    """The converted model in the original's own dtype: one cast of every changed parameter."""
    converted = copy.deepcopy(model)
    untie(converted)
    for site in {site.name: site for site in chosen}.values():
        _replace(converted, site)
    target, source = dict(converted.named_parameters()), dict(exact.named_parameters())
    for name, parameter in target.items():
        parameter.copy_(source[name])
    for place in recentered:
        _recenter_at(converted, place)
    return converted
