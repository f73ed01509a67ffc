"""Which of transformers' architectures convert to RMSNorm (*Pre-RMSNorm* section 3.1; *Geometry* table 1, and all).

Every architecture that transformers names is built from a tiny configuration with random weights and given to
`normgeo.convert`; nothing is left out, and what cannot be built is a row that says why. Whether an architecture is
Pre-LN is measured, not listed: with x the input of a LayerNorm in a layer and y its output, the gradient of the outputs
with respect to x is J^T dy, through the norm, plus what reaches x along the residual connection past the norm. Pre-LN
norms have both; through a Post-LN norm, or one at the end of a branch, all of it passes, and the second part is zero.
A Pre-LN norm that reads a permuted copy of its stream looks like the latter, so that its architecture counts as mixed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import matplotlib.figure
import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from analyses import _axes
from normgeo import figures
from normgeo.architectures import Architecture, architectures, tiny
from normgeo.conversion.centering import SIDE
from normgeo.conversion.convert import Conversion, convert
from normgeo.conversion.probing import float64_copy, outputs_of
from normgeo.conversion.reaching import reaching_inputs
from normgeo.errors import NormGeoError
from normgeo.functional import watched
from normgeo.models import default_dtype
from normgeo.sites import NormSite, find_sites

VERDICTS = {
    "complete": figures.PALETTE[0], "partial": figures.PALETTE[1], "refused": figures.PALETTE[3], "none": "0.8",
    "wrong": "0.3", "crash": "0",
}  # fmt: skip
"""What may come of a conversion, and its color."""
FAMILIES = {
    "pre-ln": "Pre-LN: every LayerNorm in a layer has a residual connection past it",
    "mixed": "Mixed: some have, some have not (two towers, norms at the end of branches, query decoders)",
    "post-ln": "Post-LN: the stream passes through every LayerNorm in a layer",
    "other": "Other: LayerNorms before, after or inside the branches only",
    "rmsnorm": "RMSNorm: no LayerNorm on the main branch",
    "none": "No norms that act on a vector of features",
    "not built": "Not built, or not run",
}
PAST = 1e-2
"""A share of the gradient above this goes past the norm: a residual connection; rounding leaves 1e-6."""


@dataclass(frozen=True)
class Row:
    """What became of one architecture.

    Attributes:
        model_type, cls, task: the architecture.
        family: one of `FAMILIES`.
        sites: norms in a forward pass.
        replaced, kept, untouched, recentered: what conversion did, as in `Conversion`.
        unreached: parameters as wide as a stream that no made-up input reached, of which nothing is known.
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
    unreached: int = 0
    error_rel: float = math.nan
    verdict: str = "none"
    reason: str = ""


def compute(names: Iterable[str] | None = None) -> pd.DataFrame:
    """Convert a tiny random model of every architecture: a row for each.

    Args:
        names: only these model types; all when None.
    """
    chosen = None if names is None else set(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about configurations nobody would train
        rows = [cover(a) for a in architectures() if chosen is None or a.model_type in chosen]
    return pd.DataFrame([asdict(row) for row in rows])


def cover(architecture: Architecture) -> Row:
    """Build one architecture, convert it, and compare it with its original."""
    row, layernorms = Row(architecture.model_type, architecture.cls, architecture.task), False
    try:
        model = tiny(architecture)
        inputs = reaching_inputs(model)
        _runs(model, inputs)
        row = replace(row, family="none")
        sites = find_sites(model, inputs, qk=True)
        layernorms = any(site.kind == "layernorm" for site in sites)
        row = replace(row, family=family(model, inputs, sites), sites=len(sites))
        conversion, error = _converted(model)
    except NormGeoError as error:
        return replace(row, verdict="refused" if layernorms else "none", reason=_line(error))
    except Exception as error:
        return replace(row, verdict="crash", reason=f"{type(error).__name__}: {_line(error)}")
    counts = {k: len(getattr(conversion, k)) for k in ("replaced", "kept", "untouched", "recentered")}
    counts["unreached"] = len(conversion.certificate.unreached)
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
    with default_dtype(torch.float64):
        conversion = convert(model)
        inputs = reaching_inputs(model, 9, seed=3)
        with torch.no_grad():
            pairs = zip(outputs_of(model, inputs), outputs_of(conversion.model, inputs), strict=True)
            return conversion, max(((x - y).abs().max() / x.abs().max()).item() for x, y in pairs)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _reasons(conversion: Conversion) -> str:
    """How many norms are kept for which reason, numbers aside; the two most frequent."""
    text = pd.Series(list(conversion.kept.values()), dtype=object).str.replace(r" \([^)]*rms\)", "", regex=True)
    counts = text.value_counts()
    said = [f"{n} {'norm' if n == 1 else 'norms'}: {reason}" for reason, n in counts.items()]
    return "; ".join(said[:2]) + (f"; {len(said) - 2} like these" if len(said) > 2 else "")


def family(model: PreTrainedModel, inputs: dict[str, Tensor], sites: list[NormSite]) -> str:
    """Which family the LayerNorms inside the layers make an architecture part of; see the module."""
    main = [site for site in sites if site.role not in SIDE]
    layernorms = [site for site in main if site.kind == "layernorm"]
    inside = [site for site in layernorms if site.role not in ("embedding", "final")]
    if not layernorms:
        return "rmsnorm" if main else "none"
    if not inside:
        return "other"
    try:
        past = [share > PAST for share in shares_past(model, inputs, inside)]
    except RuntimeError:  # no gradient can be had: by the order of calls then
        past = [not site.role.startswith("post_") for site in inside]
    return "pre-ln" if all(past) else "mixed" if any(past) else "post-ln"


def shares_past(model: PreTrainedModel, inputs: dict[str, Tensor], sites: list[NormSite]) -> list[float]:
    """For each of these norms: the share of its input's gradient that does not come through the norm."""
    given: dict[str, tuple[list[Tensor], list[Tensor]]] = {site.name: ([], []) for site in sites}
    with watched(model, {name: (xs.append, ys.append) for name, (xs, ys) in given.items()}), torch.enable_grad():
        outputs = outputs_of(model.requires_grad_(True), inputs)
    calls = [(site.module_of(model), *(tensors[site.call] for tensors in given[site.name])) for site in sites]
    generator = torch.Generator().manual_seed(0)
    seen = torch.stack([(o * torch.randn(o.shape, generator=generator)).sum() for o in outputs]).sum()
    whole = [_owner(x) for _, x, _ in calls]
    grads = torch.autograd.grad(seen, [*whole, *(y for _, _, y in calls)], allow_unused=True)
    shares = []
    for (norm, x, _), owner, total, dy in zip(calls, whole, grads[: len(calls)], grads[len(calls) :], strict=True):
        if total is None or dy is None or not total.norm() > 0:
            continue
        if owner is not x:
            total = total.contiguous().as_strided(x.shape, x.stride(), x.storage_offset())
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            (through,) = torch.autograd.grad(norm(x), x, dy)
        shares.append(((total - through).norm() / total.norm()).item())
    return shares


def _owner(x: Tensor) -> Tensor:
    """The tensor that this one is another view of: what else reads it reads another view."""
    base = x._base
    return base if base is not None and base.numel() == x.numel() and base.is_contiguous() else x


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Verdicts by family, and the errors of all conversions."""
    titles = ["transformers' architectures by verdict", "every conversion by its error"]
    figure, grid = _axes.grid([""], titles, height=2.8, xlabel="architectures", sharey="none")
    counts = pd.crosstab(frame.family, frame.verdict)
    shown = [f for f in FAMILIES if f in counts.index and f not in ("none", "not built")][::-1]
    left = pd.Series(0, index=shown)
    for verdict in [v for v in VERDICTS if v in counts]:
        part = counts[verdict].reindex(shown, fill_value=0)
        bars = grid[0, 0].barh(shown, part, left=left, color=VERDICTS[verdict], height=0.7, label=verdict)
        grid[0, 0].bar_label(bars, [str(n) if n > 7 else "" for n in part], label_type="center", fontsize=6)
        left += part
    grid[0, 0].grid(visible=False, axis="y")
    errors = frame.error_rel.dropna().clip(lower=1e-17).sort_values().to_numpy()
    grid[0, 1].semilogy(range(1, len(errors) + 1), errors, ".", color="0.3", markersize=3)
    grid[0, 1].set_ylabel("relative error in float64, other inputs")
    figures.legend(figure)
    return figure


def markdown(frame: pd.DataFrame) -> str:
    """The table of all architectures as a page: what has LayerNorms row by row, the rest by name and by reason."""
    counts = pd.crosstab(frame.family, frame.verdict).reindex(
        index=[f for f in FAMILIES if f in set(frame.family)],
        columns=[v for v in VERDICTS if v in set(frame.verdict)],
        fill_value=0,
    )
    lines = [
        "# Coverage",
        "",
        f"Written by `python -m analyses coverage` with transformers {transformers.__version__}: every architecture",
        "that its auto classes name, built tiny with random weights, converted to RMSNorm in float64 and compared with",
        "the original on inputs that conversion did not see. `analyses/coverage.py` says what the columns mean. Every",
        "output counts, also one that is the stream itself; `convert(outputs=...)` leaves out those that nobody needs.",
        "",
        *_head(["family", *counts.columns, "all"]),
        *(_row([family, *numbers, sum(numbers)]) for family, *numbers in counts.reset_index().to_numpy().tolist()),
    ]
    for family, title in FAMILIES.items():
        part = frame[frame.family == family].sort_values(["verdict", "model_type"])
        lines += ["", f"## {title}", ""] if len(part) else []
        if family == "rmsnorm" and len(part):
            lines += [", ".join(part.model_type) + "."]
            part = part[part.verdict.isin(["wrong", "crash"])]
        columns = UNBUILT if family in ("none", "not built") else COLUMNS
        if len(part):
            lines += _head([*columns.values()])
            lines += [_row([_cell(row[c]) for c in columns]) for row in part.to_dict("records")]
    return "\n".join(lines) + "\n"


UNBUILT = {"model_type": "architecture", "cls": "class", "reason": "why"}
COLUMNS = {"model_type": "architecture", "cls": "class", "task": "task", "sites": "norms", "replaced": "replaced",
           "kept": "kept", "untouched": "side", "recentered": "recentered", "unreached": "unreached",
           "error_rel": "error", "verdict": "verdict", "reason": "reason"}  # fmt: skip


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.0e}"
    return str(value)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + " --- |" * len(cells)]
