"""What no scale-and-shift gives back of what standardization took, by layer (*Geometry* section 2.3, eq. 10 and 11).

BatchNorm's two statistics a component are the same for all vectors, so that alpha and beta can undo it. Those of
LayerNorm and RMSNorm are each vector's own. The share that is lost whatever alpha and beta are is that of the variance
of x that the best line through each component leaves, with rho_i the correlation over tokens of x_i with y_i:

    min over alpha, beta of E|x - alpha y - beta|^2 / E|x - E[x]|^2 = sum_i Var(x_i) (1 - rho_i^2) / sum_i Var(x_i).

Of the same hidden states, whichever norm the model has: how much more LayerNorm loses than RMSNorm is what its mean
subtraction takes. Lengths weigh most: a few tokens with long hidden states have most of the variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from analyses import _axes, _source
from normgeo import figures
from normgeo.cards import EMBEDDED
from normgeo.geometry import standardize
from normgeo.rows import on_stream
from normgeo.sites import NormSite, find_sites
from normgeo.stream import observe
from normgeo.tokens import TokenBatch

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


class _Moments:
    """Sums over tokens of every component before each norm, standardized in either way: a sink."""

    def __init__(self, sites: Sequence[NormSite]) -> None:
        self.sums = [{kind: torch.zeros(5, site.d, dtype=torch.float64) for kind in NORMS} for site in sites]
        self.tokens = [0] * len(sites)

    def begin(self, batch: TokenBatch) -> None: ...

    def end(self) -> None: ...

    def take(self, site: int, phase: str, hidden: Tensor) -> None:
        if phase != "pre":
            return
        x = hidden.double().cpu()
        self.tokens[site] += len(x)
        for kind, y in (("layernorm", standardize(x)), ("rmsnorm", math.sqrt(x.shape[-1]) * normalize(x, dim=-1))):
            self.sums[site][kind] += torch.stack([x.sum(0), y.sum(0), (x * x).sum(0), (y * y).sum(0), (x * y).sum(0)])

    def lost(self, site: int, kind: str) -> float:
        """The share of a site's variance that no alpha and beta give back."""
        x, y, xx, yy, xy = self.sums[site][kind] / self.tokens[site]
        of_x, of_y, both = xx - x * x, yy - y * y, xy - x * y
        told = torch.where(of_y > 0, both * both / of_y, 0.0)
        return float((of_x - told).sum() / of_x.sum())


def compute(
    models: Sequence[_source.Named] = tuple(EMBEDDED),
    data: Any = "sample",
    n_tokens: int | None = None,
    context: int | None = None,
) -> pd.DataFrame:
    """`lost_share` of every norm's inputs: one row for LayerNorm's standardization of them, one for RMSNorm's.

    Args:
        models: hub ids or directories, of any number of models; None is the embedded pair.
        data: what `normgeo angles` takes, or token ids; None is sample.
        n_tokens: how many; None is all there are.
        context: tokens that a model sees together; None is up to 256.
    """
    rows = []
    for name, model, tokens in _source.each_opened(models, data, context):
        moments = _Moments(sites := find_sites(model))
        n = observe(model, tokens, [moments], sites=sites, n_tokens=n_tokens)
        rows += [
            {"model": name, "site": site.key, "layer": site.layer, "role": site.role,
             "stack": site.stack, "kind": site.kind, "standardization": kind, "lost_share": moments.lost(i, kind),
             "n_tokens": n}
            for i, site in enumerate(sites) for kind in NORMS
        ]  # fmt: skip
    return pd.DataFrame(rows)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The share that is lost along the depth of every model, for either standardization of the same hidden states."""
    frame = on_stream(frame)
    frame = frame.assign(depth=_source.depth(frame))
    models = list(frame.model.unique())
    figure, grid = _axes.grid(["variance lost (%)"], models, height=2.2, xlabel=_axes.DEPTH)
    for axes, model in zip(grid[0], models, strict=True):
        axes.axhline(0, color="0.4", linewidth=1, linestyle="--", label="BatchNorm (eq. 10 and 11)")
        for k, (kind, label) in enumerate(NORMS.items()):
            part = frame[(frame.model == model) & (frame.standardization == kind)].sort_values("depth")
            axes.plot(
                part.depth, 100 * part.lost_share, f"{'os'[k]}-", color=figures.PALETTE[k], markersize=3, linewidth=1,
                label=label,
            )  # fmt: skip
    figures.legend(figure)
    figure.suptitle("What no scale-and-shift gives back of a norm's input", fontsize=9)
    return figure
