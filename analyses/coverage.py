"""Which of transformers' architectures convert to RMSNorm (*Pre-RMSNorm* section 3.1, *Geometry* section 5, over all).

Every architecture that transformers names is built from a tiny configuration with random weights and given to
`normgeo.convert`; nothing is left out, and what cannot be built is a row that says why. Whether an architecture is
Pre-LN is measured, not listed: with x the input of a LayerNorm in a layer and y its output, the gradient of the outputs
with respect to x is J^T dy, through the norm, plus what reaches x along the residual connection past the norm. Pre-LN
norms have both; through a Post-LN norm the whole stream passes, and the second part is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from analyses import _axes
from normgeo.architectures import Architecture, architectures, tiny
from normgeo.centering import SIDE
from normgeo.conversion import Conversion, convert
from normgeo.errors import NormGeoError
from normgeo.probing import float64_copy, outputs_of
from normgeo.models import example_inputs
from normgeo.sites import NormSite, find_sites

TABLE = Path(__file__).with_suffix(".md")
VERDICTS = ("complete", "partial", "refused", "none", "wrong", "crash")
FAMILIES = ("pre-ln", "mixed", "post-ln", "other", "rmsnorm", "none", "not built")
PAST = 1e-2
"""A share of the gradient above this goes past the norm: a residual connection; rounding leaves 1e-6."""


@dataclass(frozen=True)
class Row:
    """What became of one architecture.

    Attributes:
        model_type, cls, task: the architecture.
        family: `pre-ln`; `post-ln`; `mixed` of both; `other`, with LayerNorms outside of the layers only; `rmsnorm`;
            `none` without norms; `not built`.
        sites: norms in a forward pass.
        replaced, kept, untouched, recentered: what conversion did, as in `Conversion`.
        error_rel: largest error of any output, both models in float64, on inputs that conversion did not see.
        verdict: `complete`, no LayerNorm is left on the main branch; `partial`, some are; `refused`; `none`, there was
            nothing to convert; `wrong`, the error is above the certificate's tolerance; `crash`, an unforeseen error.
        reason: why not complete.
    """

    model_type: str
    cls: str
    task: str
    family: str = "not built"
    sites: int = 0
    replaced: int = 0
    kept: int = 0
    untouched: int = 0
    recentered: int = 0
    error_rel: float = math.nan
    verdict: str = "none"
    reason: str = ""


def compute(names: Iterable[str] | None = None) -> pd.DataFrame:
    """Convert a tiny random model of every architecture: a row for each.

    Args:
        names: only these model types; all when None.
    """
    chosen = None if names is None else set(names)
    rows = [cover(a) for a in architectures() if chosen is None or a.model_type in chosen]
    return pd.DataFrame([asdict(row) for row in rows])


def cover(architecture: Architecture) -> Row:
    """Build one architecture, convert it, and compare it with its original."""
    row = Row(architecture.model_type, architecture.cls, architecture.task)
    try:
        model = tiny(architecture)
        inputs = example_inputs(model)
        _runs(model, inputs)
        row = replace(row, family="none")
        sites = find_sites(model, inputs, qk=True)
        row = replace(row, family=family(model, inputs, sites), sites=len(sites))
        conversion, error = _converted(model)
    except NormGeoError as error:
        return replace(row, verdict="refused" if row.sites else "none", reason=_line(error))
    except Exception as error:
        return replace(row, verdict="crash", reason=f"{type(error).__name__}: {_line(error)}")
    counts = {k: len(getattr(conversion, k)) for k in ("replaced", "kept", "untouched", "recentered")}
    wrong = not error <= conversion.certificate.tolerance
    verdict = "wrong" if wrong else "partial" if conversion.kept else "complete"
    return replace(row, verdict=verdict, error_rel=error, reason=_reasons(conversion), **counts)


@torch.no_grad()
def _runs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    try:
        model(**inputs)
    except Exception as error:
        raise NormGeoError(f"it does not run on the inputs made for it: {type(error).__name__}: {error}") from error


def _converted(model: PreTrainedModel) -> tuple[Conversion, float]:
    """The conversion in float64, and its largest relative error on inputs that it did not see."""
    model = float64_copy(model, tied=True)
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # some models make constants in the default dtype
        conversion = convert(model)
        inputs = example_inputs(model, 9, seed=3)
        with torch.no_grad():
            pairs = zip(outputs_of(model, inputs), outputs_of(conversion.model, inputs), strict=True)
            return conversion, max(((x - y).abs().max() / x.abs().max()).item() for x, y in pairs)
    finally:
        torch.set_default_dtype(usual)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _reasons(conversion: Conversion) -> str:
    """How many norms are kept for which reason, numbers aside."""
    reasons = pd.Series([r for r in conversion.kept.values()], dtype=object).str.replace(r" \([^)]*rms\)", "", regex=True)
    return "; ".join(f"{n} {'norm' if n == 1 else 'norms'}: {r}" for r, n in reasons.value_counts().items())


def family(model: PreTrainedModel, inputs: dict[str, Tensor], sites: list[NormSite]) -> str:
    """Which family the LayerNorms inside the layers make an architecture part of; see the module."""
    main = [site for site in sites if site.role not in SIDE]
    layernorms = [site for site in main if site.kind == "layernorm"]
    inside = {site.name for site in layernorms if site.role not in ("embedding", "final")}
    if not layernorms:
        return "rmsnorm" if main else "none"
    if not inside:
        return "other"
    try:
        past = [share > PAST for share in shares_past(model, inputs, inside)]
    except RuntimeError:  # no gradient can be had: by the order of calls then
        past = [not site.role.startswith("post_") for site in layernorms if site.name in inside]
    return "pre-ln" if all(past) else "mixed" if any(past) else "post-ln"


def shares_past(model: PreTrainedModel, inputs: dict[str, Tensor], names: set[str]) -> list[float]:
    """For each call of these norms: the share of its input's gradient that does not come through the norm."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args and isinstance(args[0], Tensor):
            calls.append((module, args[0], output))

    handles = [module.register_forward_hook(after) for name, module in model.named_modules() if name in names]
    try:
        with torch.enable_grad():
            outputs = outputs_of(model.requires_grad_(True), inputs)
    finally:
        for handle in handles:
            handle.remove()
    generator = torch.Generator().manual_seed(0)
    seen = torch.stack([(o * torch.randn(o.shape, generator=generator)).sum() for o in outputs]).sum()
    whole = [_owner(x) for _, x, _ in calls]
    grads = torch.autograd.grad(seen, [*whole, *(y for _, _, y in calls)], allow_unused=True)
    shares = []
    for (module, x, _), owner, total, dy in zip(calls, whole, grads[: len(calls)], grads[len(calls) :], strict=True):
        if total is None or dy is None or not total.norm() > 0:
            continue
        if owner is not x:
            total = total.contiguous().as_strided(x.shape, x.stride(), x.storage_offset())
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            (through,) = torch.autograd.grad(module(x), x, dy)
        shares.append(((total - through).norm() / total.norm()).item())
    return shares


def _owner(x: Tensor) -> Tensor:
    """The tensor that this one is another view of: what else reads it reads another view."""
    base = x._base
    return base if base is not None and base.numel() == x.numel() and base.is_contiguous() else x
