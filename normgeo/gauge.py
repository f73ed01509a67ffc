r"""The mean gauge: what can be shifted along the uniform vector without any output of a model noticing.

LayerNorm ignores the component of its input along **1**, so whatever writes into a stream that only LayerNorms read can
be shifted along **1** freely (*Pre-RMSNorm* section 3.1). Nothing here knows an architecture. With s = sum(outputs *
random) and P a parameter, adding a constant along an axis a of P is invisible exactly when

    sum over a of ds/dP = 0    for all the other indices,

which one backward pass in float64 decides: the ratio |sum_a ds/dP| / (|ds/dP| sqrt(d)) is about 1e-16 for a gauge
direction and of order 1 otherwise. A second backward pass, of the means of what the norms are given, tells those that
move a stream's mean (writers) from those that read a zero-mean vector (readers). The same test on the activations of
modules says where a mean that no parameter carries may be removed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.errors import ModelError
from normgeo.models import example_inputs
from normgeo.sites import NormSite, find_sites

__all__ = ["Gauge", "Shift", "center", "find_gauge", "float64_copy", "outputs_of", "site_inputs", "untie"]

INVISIBLE = 1e-6
"""Below this ratio a gradient sums to zero: float64 gives 1e-16, models that cast to float32 inside 1e-8 to 1e-7."""


Place = tuple[str, Literal["input", "output"]]
"""The first input or output of a module, by the module's dotted name."""


@dataclass(frozen=True, order=True)
class Shift:
    """Adding a constant to `parameter` along `axis` changes no output."""

    parameter: str
    axis: int


@dataclass(frozen=True)
class Gauge:
    """The mean gauge of a model.

    Attributes:
        writers: shifts that move the mean of what some LayerNorm is given.
        readers: shifts that move no mean: they multiply a vector whose mean is zero already.
        invisible: modules of whose (first) input or output no model output sees the mean, in the order of the pass.
        sites: the model's norms.
    """

    writers: tuple[Shift, ...]
    readers: tuple[Shift, ...]
    invisible: tuple[Place, ...]
    sites: tuple[NormSite, ...]


def untie(model: nn.Module) -> list[str]:
    """Give every module its own copy of parameters that several modules share; the names that got a copy."""
    seen: set[int] = set()
    copied = []
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                copied.append(f"{prefix}.{name}".lstrip("."))
            seen.add(id(parameter))
    if copied and hasattr(model, "config"):
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():  # pyright: ignore
            config.tie_word_embeddings = False  # pyright: ignore
    return copied


def float64_copy(model: PreTrainedModel) -> PreTrainedModel:
    """An untied copy in float64, in evaluation mode."""
    probe = copy.deepcopy(model)
    untie(probe)
    return probe.double().eval()  # pyright: ignore


def outputs_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Every floating-point tensor that a model returns for these inputs, caches aside.

    Raises:
        ModelError: an output is NaN or infinite, or there is none.
    """
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    result = model(**inputs, return_dict=True)
    tensors = [v for v in result.values() if isinstance(v, Tensor) and v.is_floating_point()]
    if not tensors:
        raise ModelError(f"{type(model).__name__} returned no tensor to compare")
    if not all(torch.isfinite(t).all() for t in tensors):
        raise ModelError(f"{type(model).__name__} returns NaN or infinite outputs; nothing can be said of it")
    return tensors


@contextmanager
def site_inputs(model: nn.Module, sites: tuple[NormSite, ...] | list[NormSite]) -> Iterator[dict[str, list[Tensor]]]:
    """While inside, collects what each site is given, by the site's name, a tensor a call."""
    taken: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    modules, handles = dict(model.named_modules()), []

    def hook(name: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken[name].append(args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor)))

        return before

    try:
        for name in taken:
            handles.append(modules[name].register_forward_pre_hook(hook(name), with_kwargs=True))
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _ratio(gradient: Tensor, axis: int) -> float:
    norm = gradient.norm()
    total = gradient.sum(axis).norm() / (norm * math.sqrt(gradient.shape[axis]))
    return float(total) if norm > 0 else math.inf


@contextmanager
def _activations_kept(model: nn.Module, width: set[int], norms: set[str]) -> Iterator[list[tuple[Place, Tensor]]]:
    """Keeps the gradient of what goes into and comes out of every module, in order, where the width is one of these.

    What goes into a norm is left out: recentering there is what LayerNorm does itself.
    """
    kept: list[tuple[Place, Tensor]] = []
    handles = []

    def keep(place: Place, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, Tensor) and first.requires_grad and first.ndim > 1 and first.shape[-1] in width:
            first.retain_grad()
            kept.append((place, first))

    def before(name: str) -> Any:
        return lambda _, args: keep((name, "input"), args)

    def after(name: str) -> Any:
        return lambda _, args, output: keep((name, "output"), output)

    try:
        for name, module in model.named_modules():
            if name and name not in norms:
                handles.append(module.register_forward_pre_hook(before(name)))
            if name:
                handles.append(module.register_forward_hook(after(name)))
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def find_gauge(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None) -> Gauge:
    """Find the mean gauge of any model with one forward and two backward passes in float64.

    Args:
        model: any transformers model; it is not changed.
        inputs: a small input; made from the configuration when None.

    Raises:
        ModelError: the outputs are NaN, or random (two passes differ).
    """
    inputs = example_inputs(model) if inputs is None else inputs
    sites = tuple(find_sites(model, inputs, qk=True))
    probe = float64_copy(model).requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    widths = {site.d for site in sites if site.kind == "layernorm"}
    with torch.no_grad():
        _check_repeatable(outputs_of(probe, inputs), outputs_of(probe, inputs), type(model).__name__)
    with site_inputs(probe, sites) as given, _activations_kept(probe, widths, {s.name for s in sites}) as kept:
        outputs = outputs_of(probe, inputs)
    noise = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in outputs]
    seen = torch.stack([(o * r).sum() for o, r in zip(outputs, noise, strict=True)]).sum()
    means = torch.stack(
        [(x.mean(-1) * torch.randn(x.shape[:-1], generator=generator, dtype=x.dtype).to(x.device)).sum()
         for site in sites if site.kind == "layernorm" for x in given[site.name]]
    ).sum() if widths else seen * 0  # fmt: skip
    named = dict(probe.named_parameters())
    by_mean = torch.autograd.grad(means, list(named.values()), retain_graph=True, allow_unused=True)
    for _, tensor in kept:
        tensor.grad = None  # the first pass left its own there
    seen.backward()
    writers, readers = [], []
    for (name, parameter), moved in zip(named.items(), by_mean, strict=True):
        if parameter.grad is None:
            continue
        for axis, size in enumerate(parameter.shape):
            if size in widths and _ratio(parameter.grad, axis) < INVISIBLE:
                is_writer = moved is not None and _ratio(moved, axis) > INVISIBLE and moved.norm() > 0
                (writers if is_writer else readers).append(Shift(name, axis))
    invisible = tuple(n for n, t in kept if t.grad is not None and t.grad.norm() > 0 and _ratio(t.grad, -1) < INVISIBLE)
    return Gauge(tuple(writers), tuple(readers), invisible, sites)


def _check_repeatable(a: list[Tensor], b: list[Tensor], name: str) -> None:
    if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
        raise ModelError(f"{name} gives other outputs each time, also in evaluation mode; seed or fix what is random")


@torch.no_grad()
def center(parameter: Tensor, axis: int) -> None:
    """Remove the mean along an axis in place, computed in float64 and cast once (*Pre-RMSNorm* lemma 3.1)."""
    exact = parameter.double()
    parameter.copy_(exact - exact.mean(axis, keepdim=True))
