r"""Conversion of any Pre-LN transformer to an equivalent Pre-RMSNorm or Pre-CRMSNorm one (*Pre-RMSNorm* section 3).

1. Center every writer of the gauge in float64 (lemma 3.1), scales like LayerScale folded into it first.
2. Where a stream still has a mean that no parameter carries (an embedding LayerNorm's gamma * y, a Post-LN block's
   residual), recenter the earliest activation whose mean no output of the model sees.
3. Replace every LayerNorm whose input then has zero mean by RMSNorm with the same gamma, beta and eps.
4. For CRMSNorm, or when asked, fold gamma and beta into the readers; for CRMSNorm drop what is redundant (section 3.2).
5. Certify the result; a conversion that is not equal is an error and gives no model.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.conversion.centering import SIDE, center_all
from normgeo.conversion.certify import Certificate, certificate_inputs, certify, listed
from normgeo.conversion.checks import check_convertible, check_inputs, check_options, check_trainable, check_unconverted
from normgeo.conversion.compression import compress, expand, fold, rounded
from normgeo.conversion.gauge import Gauge, find_gauge
from normgeo.conversion.probing import (
    INVISIBLE,
    Place,
    float64_copy,
    looked_at,
    looking_at,
    outputs_of,
    same,
    tied,
    untie,
)
from normgeo.conversion.reaching import reaching_inputs
from normgeo.conversion.replacing import learned_of, replace_norms, spec_of, wide
from normgeo.conversion.shallow import gauge_of
from normgeo.conversion.trainable import parametrized, trains_as
from normgeo.converted import held_by, rebuild
from normgeo.errors import ConversionError, ModelError
from normgeo.loading import saved_elsewhere
from normgeo.models import copied, on_cpu
from normgeo.sites import NormSite, find_sites

__all__ = ["Conversion", "convert", "decompress"]

LARGE = 1_000_000_000
"""Above so many parameters the gauge is found on a copy of the architecture with few layers."""


@dataclass(frozen=True)
class Conversion:
    """A converted model and what was done to it.

    Attributes:
        model: the converted copy, in the original's dtype.
        certificate: how equal it is.
        replaced: sites that are RMSNorm or CRMSNorm now.
        kept: sites of the main branch that stay LayerNorm, and why.
        untouched: norms off the main branch (q/k norms, a head's own norm, what no output depends on) that stay as they
            are.
        recentered: places that are recentered explicitly; each costs what mean subtraction cost in one LayerNorm.
        recipe: the structure of the converted model, as `converted.rebuild` takes it.
        inputs: what both models were compared on, real text aside.
    """

    model: PreTrainedModel
    certificate: Certificate
    replaced: tuple[NormSite, ...]
    kept: dict[str, str]
    untouched: tuple[NormSite, ...]
    recentered: tuple[Place, ...]
    recipe: dict[str, Any]
    inputs: tuple[dict[str, Tensor], ...]

    def __repr__(self) -> str:
        return f"Conversion of a {type(self.model).__name__} to {self.recipe['to']}\n{self.certificate.table()}"


@torch.no_grad()
@on_cpu
def convert(
    model: PreTrainedModel,
    to: str = "rmsnorm",
    inputs: dict[str, Tensor] | None = None,
    *,
    keep_tie: bool = False,
    fold_affine: bool = False,
    padded: bool = False,
    trainable: bool = False,
    outputs: Sequence[str] = (),
    gauge: Gauge | None = None,
    certify_on: Sequence[dict[str, Tensor]] = (),
) -> Conversion:
    """Convert the LayerNorms of a model to RMSNorms or CRMSNorms without changing its outputs.

    Args:
        model: any transformers model; it is never changed.
        to: `rmsnorm`; `crmsnorm`: streams of width d - 1; or `naive-rmsnorm`: swap the norms and recenter nothing. The
            naive swap is not equal and is not certified as such; it is there for comparison.
        inputs: a small input that reaches all that writes; made from the configuration when None.
        keep_tie: keep a head tied to a centered embedding, through a correction of rank one; else it is untied.
        fold_affine: fold gamma and beta into what reads the norm, where that is possible (always so for CRMSNorm).
        padded: for CRMSNorm keep width d, the last number zero: for devices that are slow at odd widths.
        trainable: give a model that trains as the original does: writers are parametrized as center(V), or recentered
            behind dropout and scales. `trainable.bake` makes plain weights of it for inference.
        outputs: what must not change, by name, `a.b` for b inside a; all when empty. An output that is the stream
            itself (`vision_model_output.last_hidden_state` of CLIP) keeps the norms before it from being replaced.
        gauge: the model's gauge, where it is known already.
        certify_on: batches of real text (`input_ids`) for the certificate, beside made-up inputs of several lengths.

    Raises:
        ConversionError: there is no LayerNorm, none could be replaced, the weights are not plain numbers, or the
            certificate failed.
        ModelError: outputs are NaN, or random, or there is none of a name in `outputs`.

    >>> from normgeo import convert, load_model
    >>> conversion = convert(load_model("embedded-layernorm"))
    >>> len(conversion.replaced), conversion.recentered, conversion.certificate.passed
    (13, (), True)
    """
    check_options(to, keep_tie=keep_tie, padded=padded, trainable=trainable, fold_affine=fold_affine)
    check_convertible(model)
    if trainable:
        check_trainable(model)
    check_inputs([*([] if inputs is None else [inputs]), *(certify_on := list(certify_on))])
    with looking_at(outputs):
        inputs = reaching_inputs(model) if inputs is None else inputs
        if gauge is None:
            gauge = _gauge(model, inputs, trainable)
        if not gauge.layernorms:
            functions = _listed(_functions(gauge))
            why = f" that is a module: {functions}" if functions else ": all its norms are RMSNorm already"
            raise ConversionError(f"{type(model).__name__} has no LayerNorm{why}")
        check_unconverted(model)
        if trainable:
            return _trainable(model, gauge, inputs, certify_on)
        return _converted(
            model, to, gauge, inputs, certify_on, keep_tie=keep_tie, fold_affine=fold_affine, padded=padded
        )


def _converted(
    model: PreTrainedModel, to: str, gauge: Gauge, inputs: dict[str, Tensor], certify_on: Sequence[dict[str, Tensor]],
    *, keep_tie: bool, fold_affine: bool, padded: bool,
) -> Conversion:  # fmt: skip
    exact = float64_copy(model)
    recipe: dict[str, Any] = {"to": to, "norms": {}, "recenter": [], "outputs": list(looked_at())}
    means = center_all(exact, gauge, inputs, recipe, structure=to == "crmsnorm") if to != "naive-rmsnorm" else {}
    chosen, kept, untouched = _sorted(gauge, means, to)
    recipe["norms"] = {s.name: spec_of(exact.get_submodule(s.name), s, to != "naive-rmsnorm") for s in chosen}
    replace_norms(exact, chosen, recipe["norms"])
    if to == "crmsnorm" or fold_affine:
        fold(exact, gauge, [site.name for site in chosen], inputs, recipe)
    functions = _functions(gauge)  # which may read another stream than what is compressed: the outputs tell
    if to == "crmsnorm":
        if modules := {key: why for key, why in kept.items() if key not in functions}:
            raise ConversionError("CRMSNorm needs every stream to be zero-mean; kept: " + _listed(modules))
        with _narrower_explained(functions, padded):
            compress(exact, gauge, inputs, recipe, padded=padded)
    converted = _in_dtype(model, exact, recipe, keep_tie)
    as_saved = _in_dtype(float64_copy(model, tied=True), exact, recipe, keep_tie)
    recentered = tuple(Place(*place[:3]) for place in recipe["recenter"])
    counts = {"replaced": len(chosen), "kept": len(kept), "untouched": len(untouched), "recentered": len(recentered)}
    compared = inputs, *certificate_inputs(model)
    with _narrower_explained(functions, padded) if to == "crmsnorm" else contextlib.nullcontext():
        certificate = certify(
            float64_copy(model), as_saved, model, converted, compared,
            site_mean=max(means.get(site.name, 0.0) for site in chosen), counts=counts,
            real=certify_on, unreached=gauge.unreached,
        )  # fmt: skip
    if to == "naive-rmsnorm":
        certificate = replace(certificate, passed=False)
        if kept:
            warnings.warn(f"the naive swap still subtracts a mean at {_listed(kept)}", stacklevel=3)
    elif not certificate.passed:
        hint = f"; inputs= did not reach {listed(gauge.unreached)}" if gauge.unreached else ""
        hint += f"; kept: {_listed(functions)}" if functions else ""
        raise ConversionError(
            f"the conversion is not equal to its original: relative error {certificate.error_rel:.1e} in float64, "
            f"allowed {certificate.tolerance:.0e}; nothing was converted{hint}"
        )
    return Conversion(converted, certificate, tuple(chosen), kept, tuple(untouched), recentered, recipe, compared)


@torch.no_grad()
@on_cpu
def decompress(model: PreTrainedModel) -> Conversion:
    """Turn a Pre-CRMSNorm model back into the Pre-RMSNorm one of width d, in which gamma and beta stay folded.

    Args:
        model: a model that `convert(..., to="crmsnorm")` made; it is not changed.

    Raises:
        ConversionError: it is no such model, or not of plain numbers, its recipe is damaged, or the certificate failed.
        ModelError: it is no model of transformers.

    >>> from normgeo import convert, decompress, load_model
    >>> compressed = convert(load_model("embedded-layernorm"), to="crmsnorm")
    >>> decompress(compressed.model).certificate.passed
    True
    """
    check_convertible(model, by_gradients=False)
    recipe = copy.deepcopy(getattr(model.config, "normgeo", {}))
    if recipe.get("to") != "crmsnorm":
        raise ConversionError(f"{type(model).__name__} is not compressed: decompress takes a Pre-CRMSNorm model")
    exact = float64_copy(model)
    try:
        expand(exact, recipe)
        places = tuple(Place(*place[:3]) for place in recipe["recenter"])
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(
            f"what its configuration says of the conversion ('normgeo') does not fit {type(model).__name__}: "
            f"{type(error).__name__}: {error}; take the checkpoint as it was saved"
        ) from error
    recipe["shapes"] = {}
    _note(exact, recipe)
    result = copied(exact)
    for own, given in zip(*((m.config, m.config.get_text_config()) for m in (result, model)), strict=True):
        vars(own).pop("use_cache", None)  # of a copy to look into
        vars(own).update({name: value for name, value in vars(given).items() if name == "use_cache"})
    dtypes = {k: v.dtype for k, v in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    for name, value in [*result.named_parameters(), *result.named_buffers()]:
        value.data = value.to(dtypes[name])
    with looking_at(recipe.get("outputs", ())):  # others may be streams, which are wider now
        inputs = reaching_inputs(exact)
        sites = [site for site in find_sites(exact, inputs, qk=True) if site.name in recipe["norms"]]
        counts = {"replaced": len(sites), "kept": 0, "untouched": 0, "recentered": len(recipe["recenter"])}
        compared = inputs, *certificate_inputs(model)
        certificate = certify(float64_copy(model), exact, model, result, compared, site_mean=0.0, counts=counts)
    certificate = replace(certificate, headless=False)  # what norms were folded into may be the head
    if not certificate.passed:
        raise ConversionError(f"the model is not equal to the compressed one: {certificate.error_rel:.1e} in float64")
    return Conversion(result.train(model.training), certificate, tuple(sites), {}, (), places, recipe, compared)


@contextlib.contextmanager
def _narrower_explained(functions: dict[str, str], padded: bool) -> Iterator[None]:
    """Why a model may fail once its stream is narrower."""
    try:
        yield
    except (ModelError, ConversionError) as error:
        if functions:
            raise ConversionError(f"{error}; kept: {_listed(functions)}") from error
        if padded or isinstance(error, ConversionError):
            raise
        # kernels that need aligned rows, which float64 does without
        raise ConversionError(f"{error}; the width may be why: compress with padded=True") from error


def _gauge(model: PreTrainedModel, inputs: dict[str, Tensor], training: bool) -> Gauge:
    large = sum(p.numel() for p in model.parameters()) > LARGE
    return (gauge_of if large else find_gauge)(model, inputs, training=training)


def _trainable(
    model: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor], certify_on: Sequence[dict[str, Tensor]]
) -> Conversion:
    converted, places, means = parametrized(model, gauge, inputs)
    chosen, kept, untouched = _sorted(gauge, means, "rmsnorm")
    learned = {site.name: learned_of(wide(model, site), site) for site in chosen}
    norms = {s.name: spec_of(wide(model, s), s) | {"offset": learned[s.name].offset} for s in chosen}
    recipe = {"to": "rmsnorm", "norms": norms, "recenter": [[*place, "keep"] for place in places]}
    replace_norms(converted, chosen, norms)
    before, after = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, converted))
    if before != after:
        raise ConversionError(
            f"{type(model).__name__} trains {before:,} numbers and its conversion would train {after:,}: gains or "
            "shifts of a norm are fewer than one a component, or not all are trained alike; leave out trainable"
        )
    trains_as(model, converted, learned)
    converted.config.normgeo = recipe  # its parameters are the Pre-LN model's: save_pretrained writes that one, equal
    counts = {"replaced": len(chosen), "kept": len(kept), "untouched": len(untouched), "recentered": len(places)}
    original64, converted64 = float64_copy(model, tied=True), float64_copy(converted, tied=True)
    compared = inputs, *certificate_inputs(model)
    certificate = certify(
        original64, converted64, model, converted, compared,
        site_mean=max(means[site.name] for site in chosen), counts=counts, real=certify_on, unreached=gauge.unreached,
    )  # fmt: skip
    a, b = (outputs_of(m.train(), inputs) for m in (original64, converted64))
    if not (certificate.passed and same(a, b, certificate.tolerance)):
        mode = "training" if certificate.passed else "evaluation"
        raise ConversionError(f"the trainable model is not equal to its original in {mode}; nothing was converted")
    return Conversion(converted, certificate, tuple(chosen), kept, tuple(untouched), tuple(places), recipe, compared)


def _listed(kept: dict[str, str]) -> str:
    lines = [f"{name}: {why}" for name, why in kept.items()]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


# --- 3: the norms -----------------------------------------------------------------------------------------------------


def _sorted(gauge: Gauge, means: dict[str, float], to: str) -> tuple[list[NormSite], dict[str, str], list[NormSite]]:
    """(replaced, kept with the reason, untouched): by the mean that is left where each norm is."""
    if to == "naive-rmsnorm":
        chosen = [site for site in gauge.layernorms if site.role not in SIDE]
    else:
        chosen = [site for site in gauge.layernorms if means[site.name] < INVISIBLE]
    others = [site for site in gauge.layernorms if site not in chosen]
    untouched = [site for site in others if _beside(site, gauge, to)]
    kept = {site.key: _reason(site, means, gauge) for site in others if site not in untouched}
    kept |= _functions(gauge)
    if not chosen:
        why = _listed(kept) or "they are all off the main branch: on heads, inside branches or in a head"
        raise ConversionError(f"no LayerNorm can be replaced: {why}")
    return chosen, kept, untouched


def _functions(gauge: Gauge) -> dict[str, str]:
    """LayerNorms of the main branch that stay because nothing can be put in their place."""
    return {site.key: "a function, not a module" for site in gauge.functions if site.role not in SIDE}


def _beside(site: NormSite, gauge: Gauge, to: str) -> bool:
    """Whether a norm is off the main branch; so is an idle one, unless a compressed stream has to fit it as well."""
    return site.role in SIDE or (site.key in gauge.idle and to != "crmsnorm")


def _reason(site: NormSite, means: dict[str, float], gauge: Gauge) -> str:
    share = f"the mean of its input ({means.get(site.name, 0.0):.1e} of its rms)"
    if site.key in gauge.idle:
        return "no output depends on it, so that nothing tells how it would have to change"
    if who := gauge.raw.get(site.key):
        return f"{share} is read by {', '.join(who[:3])}{' and others' if len(who) > 3 else ''} as well"
    return f"{share} is seen by an output, or is carried by no parameter and crosses no module's boundary"


# --- the converted model ----------------------------------------------------------------------------------------------


def _in_dtype(
    model: PreTrainedModel, exact: PreTrainedModel, recipe: dict[str, Any], keep_tie: bool
) -> PreTrainedModel:
    """The converted model in the original's own dtype: one cast of every changed parameter."""
    converted = copied(model)
    if any(not _equal(exact, group) for group in tied(converted)):
        if keep_tie and (heads := _tied_heads(converted, exact, recipe)):
            recipe["heads"] = heads
        else:
            untie(converted)
    state = _values(exact, recipe)
    recipe["shapes"] = {  # of the axes that change: a vocabulary may be resized afterwards
        name: [None if a == b else b for a, b in zip(value.shape, state[name].shape, strict=True)]
        for name, value in _values(converted, recipe, tied_too=True).items()
        if name in state and state[name].shape != value.shape and name.rpartition(".")[0] not in recipe["norms"]
    }  # fmt: skip
    rebuild(converted, recipe)
    writers = dict(recipe.get("writers", ()))  # of a compressed model
    named = reversed(_values(converted, recipe, tied_too=True).items())  # what is tied goes by the first of its names
    first = {value: name for name, value in named if name.removesuffix(".weight") not in recipe.get("heads", ())}
    for value, name in first.items():
        if name in state:
            value.copy_(rounded(state[name], writers[name], value.dtype) if name in writers else state[name])
    for head in recipe.get("heads", ()):
        converted.get_parameter(f"{head}.mean").copy_(exact.get_parameter(f"{head}.weight").mean(1))
    _note(converted, recipe)
    return converted


def _note(model: PreTrainedModel, recipe: dict[str, Any]) -> None:
    """Let a model say what its structure is, which a native model's files do not."""
    model.config.normgeo = recipe
    saved_elsewhere(model)


def _values(model: nn.Module, recipe: dict[str, Any], tied_too: bool = False) -> dict[str, Tensor]:
    tables = {name: model.get_buffer(name) for name in recipe.get("tables", ())}
    return dict(model.named_parameters(remove_duplicate=not tied_too)) | tables


def _equal(exact: PreTrainedModel, group: list[str]) -> bool:
    first, *others = [exact.get_parameter(name) for name in group]
    return all(first.shape == other.shape and torch.equal(first, other) for other in others)


def _tied_heads(converted: PreTrainedModel, exact: PreTrainedModel, recipe: dict[str, Any]) -> list[str]:
    """Heads that can stay tied, by name: linear, and tied to weights centered along the axis that the head reads.

    Raises:
        ConversionError: something else is tied, which no correction of the head helps.
    """
    heads: list[str] = []
    for group in (group for group in tied(converted) if not _equal(exact, group)):
        values = {name: exact.get_parameter(name) for name in group}
        matrices = [n for n in group if values[n].ndim == 2]  # biases may be tied, too
        linear = [n for n in matrices if isinstance(held_by(converted, n)[0], nn.Linear)]
        plain = [values[n] - values[n].mean(1, keepdim=True) for n in linear]
        pairs = [(p, values[n]) for p in plain for n in group if n not in linear]
        if not (pairs and all(torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in pairs)):
            option = "fold_affine" if "folded" in recipe else "keep_tie"
            raise ConversionError(f"{', '.join(group)} cannot stay tied: leave out {option}")
        heads += [name.rpartition(".")[0] for name in linear]
    return heads
