"""Certificates: how equal two models are, in float64 and in their own dtype."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from normgeo.agreement import Agreement, next_tokens
from normgeo.conversion.copies import independent
from normgeo.conversion.probing import looked_at, looking_at, outputs_of, same
from normgeo.conversion.reaching import reaching_inputs, without_effect
from normgeo.errors import ModelError
from normgeo.examples import several_inputs
from normgeo.models import dtype_name, loaded_dtype, weights_digest
from normgeo.trace import evaluating

__all__ = ["TOLERANCE_FLOAT32", "TOLERANCE_FLOAT64", "Certificate", "certificate_inputs", "certify", "listed"]

TOLERANCE_FLOAT64 = 1e-10
TOLERANCE_FLOAT32 = 1e-5


@dataclass(frozen=True)
class Certificate:
    """How equal a converted model is to its original.

    Attributes:
        passed: the float64 outputs agree within `tolerance`, and at least one norm was replaced.
        error_abs, error_rel: worst absolute error of any output in float64, and relative to its largest value.
        tolerance: 1e-10, or 1e-5 for a model that computes in float32 inside, also when it is given float64.
        single_inside: whether it does.
        inputs: shapes of the inputs compared.
        own_dtype: the models' own dtype.
        own_error: worst relative error of the converted model in its own dtype, against the original in float64.
        original_error: the same of the original: what rounding alone does.
        kl: Kullback-Leibler divergence (nats) of the last-axis softmax of the first output, in the own dtype, as a mean
            over positions.
        top1: share of positions where both prefer the same index.
        perplexity_original, perplexity_converted: of the next token, in the own dtype, for a causal model on real text.
        tokens: how many predictions of a next token the perplexities are of; 0 without real text.
        site_mean: largest |mean| / rms of what a replaced norm is given, in float64.
        replaced, kept, untouched, recentered: how many.
        unreached: parameters as wide as a stream on which no output depends, for any of the inputs compared. Whether
            they write into a stream is not known: for inputs that reach them the certificate says nothing.
        outputs: the outputs that are compared; empty for all. The others need not be equal.
        headless: whether the model without its head (`base_model`), which AutoModel loads, gives the same as well, in
            all outputs; of a model that has none, it itself.
        weights_sha256: the converted model's weights, in their own dtype, that were compared; empty by shard, where
            those of a few layers were.
    """

    passed: bool
    error_abs: float
    error_rel: float
    tolerance: float
    single_inside: bool
    inputs: tuple[str, ...]
    own_dtype: str
    own_error: float
    original_error: float
    kl: float
    top1: float
    perplexity_original: float | None
    perplexity_converted: float | None
    tokens: int
    site_mean: float
    replaced: int
    kept: int
    untouched: int
    recentered: int
    unreached: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    headless: bool = False
    weights_sha256: str = ""

    def to_json(self) -> str:
        """The fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> str:
        """What they say, in lines a person reads."""
        inside = ", for it computes in single precision inside" if self.single_inside else ""
        before, after = self.perplexity_original, self.perplexity_converted
        norms = f"{self.replaced} norms replaced, {self.kept} kept, {self.untouched} untouched"
        partly = ", on what its inputs reach" if self.unreached else ""
        rows = {
            "certificate": f"passed{partly}" if self.passed else "NOT passed",
            "what was done": f"{norms}, {self.recentered} explicit recenters",
            "error in float64": f"{self.error_rel:.2g} of an output's largest; allowed {self.tolerance:g}{inside}",
            f"error in {self.own_dtype}": f"{self.own_error:.3g}, and {self.original_error:.3g} of the original's own",
            "first output": f"KL {self.kl:.2g} nats, the same preferred at {100 * self.top1:.5g}% of positions",
            "perplexity": f"{before:.6f} before, {after:.6f} after, on {self.tokens:,} tokens" if self.tokens else "",
            "means left at norms": f"{self.site_mean:.2g} of the rms of what they are given",
            "compared on": "; ".join(self.inputs),
            "compared are": f"{', '.join(self.outputs)} alone" if self.outputs else "",
            "unreached": listed(self.unreached),
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {says}" for name, says in rows.items() if says)


def listed(names: Sequence[str]) -> str:
    """How many names there are, and the first three."""
    return f"{len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


class _SingleInside(TorchDispatchMode):
    """Notices whether anything is computed in a narrower floating-point type than float64."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.found = True
        return out


@torch.no_grad()
def certificate_inputs(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Inputs to compare on, each with its own random content: several lengths, and one that reaches all it can.

    Those that the model cannot run are left out: all where only a user can make what it takes, or those of lengths that
    mean something else to it, as the second of three dimensions that choices are (`...ForMultipleChoice`).
    """
    try:
        found = [*several_inputs(model), reaching_inputs(model, seed=1)]
        with evaluating(model):
            outputs_of(model, found[0])
            return [found[0], *(batch for batch in found[1:] if _runs(model, batch))]
    except ModelError:
        return []


def _runs(model: PreTrainedModel, batch: dict[str, Tensor]) -> bool:
    """Whether a model runs with these inputs, be what it gives NaN, which is said where it is compared."""
    try:
        outputs_of(model, batch)
    except ModelError as error:
        return error.__cause__ is None  # of what the model itself raised it is that
    return True


def _worst(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float]:
    absolute = relative = 0.0
    for x, y in zip(a, b, strict=True):
        difference = (x.double() - y.double()).abs().max().item()
        absolute = max(absolute, difference)
        relative = max(relative, difference / max(x.double().abs().max().item(), 1e-300))
    return absolute, relative


def _seen(batch: dict[str, Tensor], outputs: Tensor) -> Tensor:
    """Which positions of outputs are no padding: all, where no mask is of their shape."""
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != outputs.shape[:-1]:
        return torch.ones(outputs.shape[:-1], dtype=torch.bool, device=outputs.device)
    return mask.to(outputs.device, torch.bool)


class _OwnDtype:
    """What two models give in their own dtype, batch by batch."""

    def __init__(self, original: PreTrainedModel, converted: PreTrainedModel) -> None:
        self.models, self.agreement = (original, converted), (Agreement(), Agreement())
        self.base = self.own = 0.0
        self.causal = original.can_generate() and not original.config.is_encoder_decoder

    def add(self, batch: dict[str, Tensor], truth: list[Tensor], *, real: bool) -> None:
        with evaluating(self.models[0]), evaluating(self.models[1]):
            first, second = (outputs_of(model, batch) for model in self.models)
        self.base, self.own = max(self.base, _worst(truth, first)[1]), max(self.own, _worst(truth, second)[1])
        which = next((i for i, x in enumerate(first) if x.ndim), None)  # a loss comes before the logits
        if which is None:
            return
        seen, following = _seen(batch, first[which]), None
        if real and self.causal and (ids := batch.get("input_ids")) is not None and ids.shape == seen.shape:
            following = next_tokens(ids.to(seen.device).where(seen, -1))[seen]  # of padding nothing, which is -1
        reference = first[which][seen]
        for agreement, outputs in zip(self.agreement, (reference, second[which][seen]), strict=True):
            agreement.add(reference, outputs, following)

    def metrics(self) -> tuple[float, float, float | None, float | None, int]:
        """KL, top-1 agreement, the perplexity of both, and how many tokens these are of."""
        (own, both), predictions = self.agreement, self.agreement[0].predictions
        before, after = (a.metrics()["perplexity"] if predictions else None for a in (own, both))
        found = both.metrics() if both.positions else {"kl_mean": 0.0, "top1": 0.0}
        return found["kl_mean"], found["top1"], before, after, predictions


@torch.no_grad()
def certify(
    original64: PreTrainedModel,
    converted64: PreTrainedModel,
    original: PreTrainedModel,
    converted: PreTrainedModel,
    inputs: Sequence[dict[str, Tensor]],
    *,
    site_mean: float,
    counts: dict[str, int],
    real: Sequence[dict[str, Tensor]] = (),
    unreached: Sequence[str] = (),
) -> Certificate:
    """Compare a conversion with its original, both in float64 and in their own dtype.

    Args:
        original64: the original in float64.
        converted64: the conversion in float64.
        original: the original in its own dtype.
        converted: the conversion in the same dtype.
        inputs: made-up inputs of several lengths.
        site_mean: largest mean share at a replaced norm.
        counts: how many norms were replaced, kept, untouched, and places recentered.
        real: batches of real text (`input_ids`), which are compared as well, and give the perplexity.
        unreached: parameters that the inputs before these did not reach.

    Raises:
        ModelError: an output is NaN or infinite, or the float64 copy reads the original's own weights.
    """
    absolute = relative = 0.0
    own, watch = _OwnDtype(original, converted), _SingleInside()
    for number, batch in enumerate([*inputs, *real]):
        # images of another size may be what positions are interpolated for in single precision
        with independent(original64, original), watch:
            truth = outputs_of(original64, batch)
        a, r = _worst(truth, outputs_of(converted64, batch))
        absolute, relative = max(absolute, a), max(relative, r)
        with torch.autocast(original.device.type, enabled=False):  # the caller's would be another dtype
            own.add(batch, truth, real=number >= len(inputs))
    tolerance = TOLERANCE_FLOAT32 if watch.found else TOLERANCE_FLOAT64
    shapes = [", ".join(f"{k} {tuple(v.shape)}" for k, v in batch.items()) for batch in [*inputs, *real]]
    return Certificate(
        relative <= tolerance and counts["replaced"] > 0, absolute, relative, tolerance, watch.found,
        tuple(dict.fromkeys(shapes)), dtype_name(loaded_dtype(original)), own.own, own.base,
        *own.metrics(), site_mean, **counts,
        unreached=without_effect(original64, unreached, [*inputs, *real]) if unreached else (),
        outputs=looked_at(), headless=_headless(original64, converted64, inputs[0], tolerance),
        weights_sha256=weights_digest(converted),
    )  # fmt: skip


def _headless(a: PreTrainedModel, b: PreTrainedModel, inputs: dict[str, Tensor], tolerance: float) -> bool:
    """Whether what is within two models, without their heads, gives the same."""
    if not isinstance(a.base_model, PreTrainedModel):  # but a module of the model's own code
        return False
    try:
        with looking_at(()):
            return same(*(outputs_of(model.base_model, inputs) for model in (a, b)), tolerance)  # pyright: ignore
    except ModelError:  # it takes other inputs than with its head
        return False
