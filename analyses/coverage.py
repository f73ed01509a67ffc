"""Which of transformers' architectures convert to RMSNorm (*Pre-RMSNorm* section 3.1, over all of them)."""

from __future__ import annotations

import copy
import traceback
from dataclasses import asdict, dataclass, replace

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo import convert
from normgeo.architectures import Architecture, architectures, tiny
from normgeo.certify import EXACT, SINGLE
from normgeo.errors import NormGeoError
from normgeo.gauge import float64_copy, outputs_of
from normgeo.models import example_inputs
from normgeo.sites import NormSite, find_sites

SIDE = ("qk", "inner", "head")


@dataclass(frozen=True)
class Row:
    model_type: str
    cls: str
    task: str
    family: str = "none"
    sites: int = 0
    replaced: int = 0
    kept: int = 0
    untouched: int = 0
    recentered: int = 0
    error_rel: float = float("nan")
    verdict: str = "none"
    reason: str = ""


def compute() -> pd.DataFrame:
    """Convert a tiny random model of every architecture; a row for each."""
    return pd.DataFrame([asdict(cover(a)) for a in architectures()])


def cover(architecture: Architecture) -> Row:
    row = Row(architecture.model_type, architecture.cls, architecture.task)
    try:
        model = tiny(architecture)
        sites = find_sites(model, qk=True)
    except NormGeoError as error:
        return replace(row, reason=str(error))
    except Exception:
        return replace(row, verdict="crash", reason=traceback.format_exc()[-300:])
    row = replace(row, family=family(sites), sites=len(sites))
    try:
        model = model.double()
        inputs = example_inputs(model, 9, seed=3)
        with torch.no_grad():
            before = outputs_of(model, inputs)
        c = convert(model)
        with torch.no_grad():
            after = outputs_of(c.model, inputs)
        error = max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(before, after, strict=True))
    except NormGeoError as error:
        return replace(row, verdict="refused", reason=str(error))
    except Exception:
        return replace(row, verdict="crash", reason=traceback.format_exc()[-300:])
    verdict = "wrong" if error > c.certificate.tolerance else "partial" if c.kept else "complete"
    return replace(row, verdict=verdict, replaced=len(c.replaced), kept=len(c.kept), untouched=len(c.untouched), recentered=len(c.recentered), error_rel=error, reason="; ".join(f"{k}: {v}" for k,v in c.kept.items()))


def family(sites: list[NormSite]) -> str:
    main = [s for s in sites if s.role not in SIDE and s.kind == "layernorm"]
    if not main:
        return "rmsnorm" if any(s.kind == "rmsnorm" and s.role not in SIDE for s in sites) else "none"
    layers = [s for s in main if s.role not in ("embedding", "final")]
    return "post-ln" if layers and all(s.role.startswith("post_") for s in layers) else "pre-ln"
