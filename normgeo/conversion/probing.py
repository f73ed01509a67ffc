"""Looking into a forward pass in float64: outputs, what norms are given, and every tensor that modules hand on."""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers import PreTrainedModel

from normgeo.conversion.copies import around_another
from normgeo.converted import held_by, put, replaced
from normgeo.errors import ModelError, NormGeoError, first_line
from normgeo.functional import watched
from normgeo.models import copied, default_dtype, dtype_name, seeded, uncompiled
from normgeo.norms import LayerNorm
from normgeo.sites import NormSite
from normgeo.trace import is_leaf

__all__ = [
    "INVISIBLE", "HandedOn", "Place", "Use", "float64_copy", "generic_copy", "handed_on",
    "in_float64", "in_mode", "looked_at", "looking_at", "outputs_of", "plain_norms", "same", "site_inputs", "tied",
    "untie", "with_padding",
]  # fmt: skip

M = TypeVar("M", bound=nn.Module)

INVISIBLE = 1e-6
"""Below this ratio a gradient sums to zero: float64 gives 1e-16, models that cast to float32 inside 1e-8 to 1e-7."""


class Place(NamedTuple):
    """An argument of a module (by position or name), or its (first) output."""

    module: str
    side: str
    argument: int | str = 0


class Use(NamedTuple):
    """A tensor at a place. An argument is an alias of what was given: its gradient is of this use alone.

    `leaf` is whether the module has parameters and no modules in it: then it reads what it is given. `edges` are
    where gradients of what was handed on arrive, also of what it is a view of, by which they go where it is written
    over, and `version` tells whether that was since, as by x += y.
    """

    place: Place
    tensor: Tensor
    storage: int
    leaf: bool
    edges: tuple[GradientEdge, ...]
    version: int


@dataclass
class HandedOn:
    """What modules hand on in one forward pass: its tensors, in order, and the gradients with respect to them.

    `blocked` are places where something of another width passed too, for a module may be called more than once; or
    something whose mean was seen before it was written over.
    """

    blocked: set[Place] = field(default_factory=set)
    uses: list[Use] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


def tied(model: nn.Module) -> list[list[str]]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    owners = lambda group: {id(held_by(model, n)[0]) for n in group}  # noqa: E731
    return [group for group in shared if len(owners(group)) > 1]  # several names of one shared module are no tie


def untie(model: nn.Module, *, always: bool = False) -> None:
    """Give every module its own copy of parameters that several modules share, and let the configuration say so.

    Args:
        model: it is changed.
        always: change the configuration also when nothing is shared any more.
    """
    groups = tied(model)
    seen: set[int] = set()
    for group in groups:
        for name in group:
            module, last = held_by(model, name)
            parameter = getattr(module, last)
            if id(parameter) in seen:
                setattr(module, last, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            seen.add(id(getattr(module, last)))
    if (groups or always) and isinstance(model, PreTrainedModel):
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False
        if hasattr(model, "all_tied_weights_keys"):
            model.all_tied_weights_keys = {}  # saving would leave the copies out


def float64_copy(model: PreTrainedModel, *, tied: bool = False) -> PreTrainedModel:
    """A copy in float64, in evaluation mode, without a cache, and untied unless asked for."""
    probe = copied(model)
    if not tied:
        untie(probe)
    for config in (probe.config, probe.config.get_text_config()):
        config.use_cache = False  # caches are written in place, which gradients do not pass
    if any(parameter.ndim > 2 for parameter in probe.parameters()):
        with contextlib.suppress(Exception):  # models without experts refuse, each in its own way
            probe.set_experts_implementation("eager")  # the fused one has no float64
    return in_float64(probe).eval()


def in_float64(module: M) -> M:
    """A module cast to float64 in place, with what hooks or earlier passes have left in it and is no buffer."""
    for part in module.modules():
        kept = [(k, v) for k, v in vars(part).items() if isinstance(v, Tensor) and v.is_floating_point()]
        for name, value in kept:
            setattr(part, name, value.double())
    return module.double()


@torch.no_grad()
def generic_copy(model: PreTrainedModel, inputs: dict[str, Tensor], *, tied: bool = False) -> PreTrainedModel:
    """A copy as `float64_copy` gives it, with every value moved a little, unless some must be what they are to run."""
    probe = float64_copy(model, tied=tied)
    generators = {device: torch.Generator(device).manual_seed(0) for device in {p.device for p in probe.parameters()}}
    for parameter in probe.parameters():
        size, device = max(float(parameter.abs().mean()), 0.02), parameter.device
        # where it is, and in float32: on a CPU billions of float64 would take minutes
        noise = torch.randn(parameter.shape, generator=generators[device], dtype=torch.float32, device=device)
        parameter.add_(noise, alpha=(0.3 if parameter.ndim == 1 else 0.03) * size)
    try:
        outputs_of(probe, inputs)
    except ModelError:
        return float64_copy(model, tied=tied)
    return probe


def in_mode(probe: PreTrainedModel, training: bool) -> PreTrainedModel:
    """The probe in training or evaluation mode. Norms over the batch always evaluate: in training they hide means."""
    for module in probe.train(training).modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    return probe


def with_padding(probe: nn.Module) -> None:
    """Give the rows that tables have for padding gradients too, in place: a kind of token may have the id of one.

    These are matrices like all others: sparse ones, which tables may ask for, cannot be summed along any axis.
    """
    for module in probe.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
        if type(module) is nn.Embedding:  # others may ask for the id, to count tokens by
            module.padding_idx = None


def plain_norms(probe: PreTrainedModel, sites: tuple[NormSite, ...]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The probe with LayerNorms that have random gains and no beta; the gains by the norm's name."""
    generator = torch.Generator().manual_seed(2)
    norms = dict[str, nn.Module]()
    with_padding(probe)
    for site in sites:
        if site.kind == "layernorm" and site.name not in norms:
            norm = LayerNorm(site.d, site.eps, dtype=torch.float64, device=probe.device)
            gain = 1 + 0.3 * torch.rand(site.d, generator=generator, dtype=torch.float64)
            norm.weight.data.copy_(gain)  # pyright: ignore
            norms[site.name] = norm
    put(probe, norms)
    return probe.requires_grad_(True), {name: norm.weight.detach() for name, norm in norms.items()}  # pyright: ignore


_looked_at: ContextVar[tuple[str, ...]] = ContextVar("looked_at", default=())


def looked_at() -> tuple[str, ...]:
    """The outputs that `outputs_of` gives; empty for all."""
    return _looked_at.get()


@contextmanager
def looking_at(outputs: Sequence[str]) -> Iterator[None]:
    """While inside, `outputs_of` gives these outputs alone, which may be inside others (`a.b`); all for none."""
    token = _looked_at.set((outputs,) if isinstance(outputs, str) else tuple(outputs))
    try:
        yield
    finally:
        _looked_at.reset(token)


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in an output, in those inside it and in their tuples, which have one name."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _named(part, name)


_seeding = threading.RLock()


@contextmanager
def _seeded(model: nn.Module, wanted: bool) -> Iterator[None]:
    """The same random numbers each time: torch's, and NumPy's and Python's, which masks of sounds are drawn from."""
    if not wanted:
        yield
        return
    # the generators are the process's
    with _seeding, seeded(0, {p.device for p in model.parameters()}):
        others = random.getstate(), np.random.get_state()
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def outputs_of(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Every floating-point tensor that a model returns for these inputs and options, caches aside; see `looking_at`.

    What a model gives without names is its `output`. A model in training mode draws the same random numbers each time.

    Raises:
        ModelError: the model fails, an output is NaN or infinite, there is none, or none of a name that is looked at.
    """
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    name = type(model).__name__
    taken = inspect.signature(model.forward).parameters.values()
    if any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in taken):
        options |= {"return_dict": True}
    try:
        with default_dtype(model.dtype), _seeded(model, model.training), uncompiled():
            result = model(**inputs, **options)
    except NormGeoError:
        raise
    except Exception as error:  # whatever a model raises
        why = f"{name} cannot run in {dtype_name(model.dtype)}: {first_line(error).removesuffix('.')}"
        raise ModelError(why + around_another(model)) from error
    if is_dataclass(result) and not isinstance(result, Mapping):  # of the model's own code
        result = {part.name: getattr(result, part.name) for part in fields(result)}
    named = result if isinstance(result, Mapping) else {"output": result}
    found = [pair for key, value in named.items() if key != "state" for pair in _named(value, key)]  # RWKV's cache
    for wanted in looked_at():
        if not any(_is_of(key, wanted) for key, _ in found):
            there = ", ".join(dict.fromkeys(key for key, _ in found))
            raise ModelError(f"{name} has no output {wanted!r} for {', '.join(inputs)}; it gives {there}")
    tensors = [t for key, t in found if not looked_at() or any(_is_of(key, wanted) for wanted in looked_at())]
    if not tensors:
        raise ModelError(f"{name} returned no tensor to compare")
    if not all(torch.isfinite(t).all() for t in tensors):
        raise ModelError(f"{name} returns NaN or infinite outputs; nothing can be said of it")
    return tensors


def _is_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def same(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> bool:
    """Whether outputs agree, relative to the largest value of each."""
    if [x.shape for x in a] != [y.shape for y in b]:
        return False
    return all(float((x - y).abs().max()) <= tolerance * float(x.abs().max()) for x, y in zip(a, b, strict=True))


@contextmanager
def site_inputs(model: nn.Module, sites: Sequence[NormSite]) -> Iterator[dict[str, list[Tensor]]]:
    """While inside, collects what each site is given, by the site's name, a tensor a call.

    These are copies, for code may add in place to what a norm has read: x += f(norm(x)).
    """
    taken: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def keep(name: str) -> Callable[[Tensor], None]:
        return lambda x: taken[name].append(x.clone())

    with watched(model, {name: (keep(name), lambda _: None) for name in taken}):
        yield taken


@contextmanager
def handed_on(model: nn.Module, widths: set[int]) -> Iterator[HandedOn]:
    """While inside, notes every argument and result of every module whose vectors have one of these widths."""
    handed = HandedOn()

    def hold(place: Place, x: Tensor, source: Tensor, leaf: bool) -> None:
        whole = (t for t in (x, x._base) if t is not None and t.shape == x.shape)
        edges = tuple(get_gradient_edge(t) for t in whole if t.grad_fn is not None)  # others are not written over
        handed.uses.append(Use(place, x, source.untyped_storage().data_ptr(), leaf, edges, x._version))

    def wanted(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.shape[-1] in widths

    def note_other(x: Any, place: Place) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            handed.blocked.add(place)

    def alias(x: Any, place: Place, leaf: bool) -> Any:
        if not wanted(x):
            note_other(x, place)
            return x
        # a tensor cut off from the graph (a table read under no_grad) starts a graph of its own
        view = x.view_as(x) if x.requires_grad else x.detach().requires_grad_().clone()
        source = x if place.side == "input" else view
        hold(place, view, source, leaf)
        return view

    def before(name: str, leaf: bool) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = tuple(alias(v, Place(name, "input", i), leaf) for i, v in enumerate(args))
            return args, {k: alias(v, Place(name, "input", k), leaf) for k, v in kwargs.items()}

        return hook

    def after(name: str, leaf: bool) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            several = isinstance(output, (tuple, list))
            first: Any = next(iter(output), None) if several else output
            if not wanted(first):
                note_other(first, Place(name, "output"))
                return None
            if not first.requires_grad:
                first = alias(first, Place(name, "output"), leaf)
                return replaced(output, 0, first) if several else first
            hold(Place(name, "output"), first, first, leaf)
            return None

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                leaf = is_leaf(module) and any(True for _ in module.parameters())
                hooks.enter_context(module.register_forward_pre_hook(before(name, leaf), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after(name, leaf)))
        yield handed
