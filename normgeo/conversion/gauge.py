r"""The mean gauge: what can be shifted along the uniform vector without any output of a model noticing.

LayerNorm ignores the component of its input along **1**, so whatever writes into a stream that only LayerNorms read can
be shifted along **1** freely (*Pre-RMSNorm* section 3.1). Nothing here knows an architecture. With s = sum(outputs *
random) and P a parameter, adding a constant along an axis a of P is invisible exactly when

    sum over a of ds/dP = 0    for all the other indices,

which one backward pass in float64 decides: the ratio |sum_a ds/dP| / (|ds/dP| sqrt(d)) is about 1e-16 for a gauge
direction and of order 1 otherwise. Three tests of the same gradient give the rest. Weighted by 1/v, for a vector v of
the model, the sum vanishes when v scales what P writes (LayerScale) before it reaches the stream; weighted by 1/gamma,
for a norm's gain gamma (beta set to zero), when P reads that norm: W (gamma * y) does not see r (1/gamma)^T added to W,
because y has no mean. And on the arguments and results of modules it tells where a mean that no parameter carries may
be removed, and who reads a stream's mean.

The gauge belongs to the architecture: values are made generic on the copy that is probed, so that no zero bias and no
gain of ones hides or invents a direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from transformers import PreTrainedModel

from normgeo.conversion.checks import check_weights
from normgeo.conversion.copies import independent
from normgeo.conversion.gradients import inverted, match, ratio, reached, vanishes
from normgeo.conversion.probing import (
    INVISIBLE,
    HandedOn,
    Place,
    float64_copy,
    generic_copy,
    handed_on,
    in_mode,
    outputs_of,
    plain_norms,
    same,
    site_inputs,
    tied,
)
from normgeo.conversion.raw import raw_readers
from normgeo.conversion.reaching import beside, reaching_inputs, shows_shifts, without_effect
from normgeo.conversion.tables import written_by_tables
from normgeo.converted import held_by
from normgeo.errors import ConversionError, ModelError, first_line
from normgeo.models import on_cpu
from normgeo.sites import NormSite, find_sites

__all__ = ["Gauge", "Reader", "Shift", "center", "find_gauge", "ratio"]


class Shift(NamedTuple):
    """Adding a constant to `parameter` along `axis` changes no output."""

    parameter: str
    axis: int


class Reader(NamedTuple):
    """`parameter` multiplies, along `axis`, what the norm at the site `norm` gives."""

    parameter: str
    axis: int
    norm: str


@dataclass(frozen=True)
class Gauge:
    """The mean gauge of a model.

    Attributes:
        writers: shifts that move the mean of what some LayerNorm is given.
        scaled: writers of another kind: what they write is multiplied by this vector parameter before it is added.
        tables: buffers, and their axes, that write as well.
        readers: parameters that multiply what a LayerNorm gives.
        invisible: where a mean may be removed without any output noticing, in the order of the pass.
        raw: for a LayerNorm whose input is read by something else too: who reads it.
        sites: the model's norms that are modules.
        functions: LayerNorms that are not.
        idle: LayerNorms that no output depended on, as in a pooling head that a task leaves unread.
        unreached: parameters as wide as a stream that no output depended on, for the inputs that were given. Whether
            they write is not known; experts that no token was routed to are taken to do what those beside them do.
    """

    writers: tuple[Shift, ...]
    scaled: dict[Shift, str] = field(default_factory=dict)
    tables: tuple[Shift, ...] = ()
    readers: tuple[Reader, ...] = ()
    invisible: tuple[Place, ...] = ()
    raw: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sites: tuple[NormSite, ...] = ()
    functions: tuple[NormSite, ...] = ()
    idle: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()

    @property
    def layernorms(self) -> list[NormSite]:
        """The sites that subtract a mean."""
        return [site for site in self.sites if site.kind == "layernorm"]


@torch.no_grad()
def center(parameter: Tensor, axis: int) -> None:
    """Remove the mean along an axis in place, computed in float64 and cast once (*Pre-RMSNorm* lemma 3.1)."""
    exact = parameter.double()
    parameter.copy_(exact - exact.mean(axis, keepdim=True))


@torch.enable_grad()
@on_cpu
def find_gauge(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, *, training: bool = False) -> Gauge:
    """Find the mean gauge of any model by gradients, in float64, from one forward pass on a small input.

    Args:
        model: any transformers model; it is not changed.
        inputs: a small input that reaches all that writes; `reaching_inputs` when None.
        training: the gauge while the model trains. Dropout multiplies a mean by its mask, so that what writes before it
            is not free then; what comes out of it is.

    Raises:
        ConversionError: its weights are no plain numbers, as where they are quantized.
        ModelError: it is no model of transformers; the outputs or their gradients are NaN, or random (two passes
            differ); a copy reads its weights; or gradients are not to be had, under `torch.inference_mode`.

    >>> from normgeo import find_gauge, load_model
    >>> find_gauge(load_model("embedded-layernorm")).writers[0].parameter
    'transformer.wte.weight'
    """
    check_weights(model)
    if torch.is_inference_mode_enabled():
        raise ModelError("a gauge is found by gradients, which torch.inference_mode forbids: leave it first")
    inputs = reaching_inputs(model) if inputs is None else inputs
    found = find_sites(model, inputs, qk=True)
    sites = tuple(site for site in found if not site.is_function)
    functions = tuple(site for site in found if site.is_function and site.kind == "layernorm")
    with torch.no_grad(), independent(exact := float64_copy(model).train(training), model):
        tolerance = 0.0 if model.device.type == "cpu" else 1e-12  # a GPU adds up in whatever order
        if not same(outputs_of(exact, inputs), outputs_of(exact, inputs), tolerance):
            mode = "with one seed in training" if training else "also in evaluation"
            others = ", and let no other thread draw random numbers meanwhile" if training else ""
            raise ModelError(
                f"{type(model).__name__} gives other outputs each time, {mode} mode; fix what is random{others}"
            )
    if not any(site.kind == "layernorm" for site in sites):
        return Gauge((), sites=sites, functions=functions)
    del exact  # as large as the model, in float64
    probe, gains = plain_norms(in_mode(generic_copy(model, inputs), training), sites)
    known = dict(probe.named_parameters()).keys()  # of a module that has several names one is
    shared = {name: known & set(group) for group in tied(model) for name in group}  # the probe is untied
    return replace(_Probe(probe, sites, gains, inputs, shared).gauge(), functions=functions)


class _Probe:
    """One forward pass of a generic copy, and the gradients of what came out."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: tuple[NormSite, ...],
        gains: dict[str, Tensor],
        inputs: dict[str, Tensor],
        shared: Mapping[str, set[str]],
    ) -> None:
        self.model, self.sites, self.gains, self.inputs, self.shared = model, sites, gains, inputs, shared
        self.widths = {site.d for site in sites if site.kind == "layernorm"}
        self.generator = torch.Generator().manual_seed(1)
        self.norms = {site.name for site in sites}

    def gauge(self) -> Gauge:
        named = dict(self.model.named_parameters())
        with self._pass() as (outputs, by_site, handed):
            moving = self._moving(named, self._gradient(list(by_site.values()), list(named.values())))
            visible = self._gradients(outputs, handed, list(named.values()))
        found = dict(zip(named, visible, strict=True))
        self._check(found)
        writers, scaled, readers = self._sorted(found, moving)
        unseen = self._unseen(found)
        idle = tuple(s.key for s in self.sites if s.name in self.gains and not reached(found[f"{s.name}.weight"]))
        writers, readers = self._by_analogy(unseen, writers, readers)
        writers += self._tied_tables(found, writers)
        del visible, found  # as large as the model, in float64
        seen = {u.place for u, g in zip(handed.uses, handed.gradients, strict=True) if not vanishes(g)}
        places = [u.place for u in handed.uses if u.place.module not in self.norms or u.place.side == "output"]
        invisible = tuple(place for place in dict.fromkeys(places) if place not in seen | handed.blocked)
        tables = tuple(Shift(*table) for table in written_by_tables(self.model, self.sites, self.inputs))
        unreached = without_effect(self.model, unseen, [self.inputs])
        if (chosen := [n for n in unseen if n not in unreached]) and shows_shifts(self.model, writers, self.inputs):
            raise ConversionError(
                f"{type(self.model).__name__} reads the mean of hidden states to choose by, as argmax does, which no "
                f"gradient shows (maybe by {chosen[0]}): nothing can be centered"
            )
        raw = self._raw_readers(writers)
        return Gauge(writers, scaled, tables, readers, invisible, raw, self.sites, (), idle, unreached)

    def _check(self, gradients: Mapping[str, Tensor | None]) -> None:
        for parameter, gradient in gradients.items():
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                raise ModelError(
                    f"{type(self.model).__name__} has NaN or infinite gradients ({parameter}), as padding gives: pass "
                    "inputs=... that need none"
                )

    def _unseen(self, gradients: Mapping[str, Tensor | None]) -> list[str]:
        """Parameters as wide as a stream that have no gradient, under any of their names."""
        dark = {name for name, g in gradients.items() if not reached(g)}
        shapes = {name: self.model.get_parameter(name).shape for name in dark}
        wide = {name for name, shape in shapes.items() if self.widths.intersection(shape) and shape.numel()}
        own = {f"{name}.{part}" for name in self.norms for part in ("weight", "bias")}
        return [n for n in gradients if n in wide - own and self.shared.get(n, {n}) <= dark]

    @contextmanager
    def _pass(self) -> Iterator[tuple[list[Tensor], dict[str, Tensor], HandedOn]]:
        """The outputs, a random sum of the means of what each LayerNorm is given, and what modules handed on.

        While inside, parts that keep no activations (checkpointing) run again for their gradients as they have run.
        """
        with site_inputs(self.model, self.sites) as given, handed_on(self.model, self.widths) as handed:
            outputs = outputs_of(self.model, self.inputs)
            layernorms = [site for site in self.sites if site.kind == "layernorm"]
            if idle := [site.name for site in layernorms if site.call >= len(given[site.name])]:
                raise ModelError(f"a copy of {type(self.model).__name__} does not run its {idle[0]}")
            means = {s.key: self._noise(given[s.name][s.call].mean(-1)) for s in layernorms}
            yield outputs, means, HandedOn(set(handed.blocked), [*handed.uses])

    def _gradients(self, outputs: list[Tensor], handed: HandedOn, parameters: list[Tensor]) -> list[Tensor | None]:
        """The gradients of a random sum of the outputs, for these parameters, and for what is handed on.

        A tensor that was written over has the gradient of what it became, which does not show who read it before.
        """
        over = [(u.place, edge) for u in handed.uses if u.tensor._version != u.version for edge in u.edges]
        wanted = [*parameters, *(use.tensor for use in handed.uses), *(edge for _, edge in over)]
        parts = iter(self._gradient([self._noise(o) for o in outputs], wanted))
        found, handed.gradients, before = ([*islice(parts, len(some))] for some in (parameters, handed.uses, over))
        seen = (place for (place, _), g in zip(over, before, strict=True) if reached(g) and not vanishes(g))
        handed.blocked.update(seen)
        return found

    def _gradient(self, summands: list[Tensor], wanted: Sequence[Tensor | GradientEdge]) -> list[Tensor | None]:
        """The gradient of the sum of those summands that have one, with respect to those tensors that can have one.

        Raises:
            ModelError: the model cannot be differentiated.
        """
        known = [s for s in summands if s.requires_grad]
        reached: Any = [t for t in wanted if _differentiable(t)]
        if not known or not reached:
            return [None] * len(wanted)
        try:
            found = iter(torch.autograd.grad(torch.stack(known).sum(), reached, retain_graph=True, allow_unused=True))
        except Exception as error:  # whatever a model's own backward raises
            raise ModelError(f"{type(self.model).__name__} cannot be differentiated: {first_line(error)}") from error
        return [next(found) if _differentiable(t) else None for t in wanted]

    def _raw_readers(self, writers: tuple[Shift, ...]) -> dict[str, tuple[str, ...]]:
        """For each LayerNorm, who else reads what is added into its input: once no branch brings a mean."""
        for name, axis in writers:
            center(self.model.get_parameter(name), axis)
        with self._pass() as (outputs, by_site, handed):
            self._gradients(outputs, handed, [])
            moving = {key: mean for key, mean in by_site.items() if mean.requires_grad}
            return raw_readers(moving, handed, outputs, self._gradient, self._noise)

    def _noise(self, x: Tensor) -> Tensor:
        return (x * torch.randn(x.shape, generator=self.generator, dtype=x.dtype).to(x.device)).sum()

    def _moving(self, named: Mapping[str, Tensor], moved: list[Tensor | None]) -> set[Shift]:
        """Which shifts move the mean of what some LayerNorm is given."""
        return {
            Shift(name, axis)
            for name, g in zip(named, moved, strict=True) if reached(g)
            for axis, size in enumerate(g.shape) if size in self.widths and float(ratio(g, axis)) > INVISIBLE
        }  # fmt: skip

    def _sorted(
        self, visible: dict[str, Tensor | None], moving: set[Shift]
    ) -> tuple[tuple[Shift, ...], dict[Shift, str], tuple[Reader, ...]]:
        """Sort the shifts of parameters that nothing sees into writers and readers."""
        writers, scaled, readers = [], {}, []
        named = dict(self.model.named_parameters())
        own = {f"{name}.weight" for name in self.gains}
        gains = {size: inverted({k: v for k, v in self.gains.items() if len(v) == size}) for size in self.widths}
        vectors = {k: v for k, v in named.items() if v.ndim == 1 and k not in own}
        scales = {size: inverted({k: v for k, v in vectors.items() if len(v) == size}) for size in self.widths}
        for name, gradient in visible.items():
            if gradient is None or name in own:
                continue
            for axis, size in enumerate(gradient.shape):
                if size not in self.widths:
                    continue
                moves = Shift(name, axis) in moving
                if vanishes(gradient, axis):
                    if moves:
                        writers.append(Shift(name, axis))
                    continue
                if (norm := match(gradient, axis, gains[size])) is not None:
                    readers.append(Reader(name, axis, norm))
                elif moves:
                    others = {k: v for k, v in scales[size].items() if k != name}
                    if (scale := match(gradient, axis, others)) is not None:
                        scaled[Shift(name, axis)] = scale
        whole = {v for v in set(scaled.values()) if self._scales_no_more(v, scaled, visible)}
        return tuple(writers), {k: v for k, v in scaled.items() if v in whole}, tuple(readers)

    def _by_analogy(
        self, unseen: list[str], writers: tuple[Shift, ...], readers: tuple[Reader, ...]
    ) -> tuple[tuple[Shift, ...], tuple[Reader, ...]]:
        """And what nothing reached writes and reads, where all that is beside it in a list of modules agrees."""
        for name in unseen:
            home, rest, others = beside(self.model, name)
            peers = [(other, f"{other}.{rest}") for other in others if f"{other}.{rest}" not in unseen]
            said = {
                (
                    frozenset(shift.axis for shift in writers if shift.parameter == peer),
                    frozenset(
                        (r.axis, r.norm.replace(f"{other}.", f"{home}.")) for r in readers if r.parameter == peer
                    ),
                )
                for other, peer in peers
            }
            axes, reads = said.pop() if len(said) == 1 else ((), ())
            writers += tuple(Shift(name, axis) for axis in axes)
            readers += tuple(Reader(name, axis, norm) for axis, norm in reads if norm in self.gains)
        return writers, readers

    def _tied_tables(self, visible: Mapping[str, Tensor | None], writers: tuple[Shift, ...]) -> tuple[Shift, ...]:
        """And embeddings that no output depends on, as those they are tied to: resizing puts them in their place."""
        found, axes = list[Shift](), {shift.parameter: shift.axis for shift in writers}
        for name, group in self.shared.items():
            tables = [n for n in group if isinstance(held_by(self.model, n)[0], nn.Embedding)]
            said = {axes.get(peer, -1) for peer in tables if reached(visible[peer])}
            if name in tables and not reached(visible[name]) and len(said) == 1 and said != {-1}:
                found.append(Shift(name, *said))
        return tuple(found)

    @torch.no_grad()
    def _scales_no_more(self, scale: str, scaled: Mapping[Shift, str], visible: Mapping[str, Tensor | None]) -> bool:
        """Whether v can be folded: whether v (W x + b) has no part whose mean something sees.

        Then v ds/dv is the sum of W ds/dW and b ds/db along their other axes, over those parameters alone.
        """

        def own(name: str, axis: int) -> Tensor:
            product = self.model.get_parameter(name) * cast(Tensor, visible[name])
            return product.movedim(axis, 0).flatten(1).sum(1) if product.ndim > 1 else product

        wanted = own(scale, 0)
        found = torch.stack([own(*shift) for shift, v in scaled.items() if v == scale]).sum(0)
        return float((found - wanted).norm()) <= 1e-3 * float(wanted.norm())


def _differentiable(x: Tensor | GradientEdge) -> bool:
    return not isinstance(x, Tensor) or x.requires_grad
