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
from normgeo.errors import DataError
from normgeo.geometry import standardize
from normgeo.sites import NormSite, find_sites
from normgeo.stream import observe
from normgeo.tokens import TokenBatch

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def _rms_standardized(x: Tensor) -> Tensor:
    """RMSNorm's standardization sqrt(d) x / |x|, zero of the zero vector: of any length, as `standardize` is."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return math.sqrt(x.shape[-1]) * normalize(x / largest, dim=-1)  # by a length of 1 or more: its floor is 1e-12


def _products(pair: Tensor) -> Tensor:
    x, y = pair
    return torch.stack([x * x, y * y, x * y])


class _Moments:
    """Means and (co)variances over tokens of every component before each norm, standardized in either way: a sink.

    Batches are merged by their means (Chan et al., 1983): with sums of squares a component that is large and hardly
    varies, as a massive activation is, would lose its variance in rounding.
    """

    def __init__(self, sites: Sequence[NormSite]) -> None:
        self.means = [{kind: torch.zeros(2, site.d, dtype=torch.float64) for kind in NORMS} for site in sites]
        self.squares = [{kind: torch.zeros(3, site.d, dtype=torch.float64) for kind in NORMS} for site in sites]
        self.tokens = [0] * len(sites)

    def begin(self, batch: TokenBatch) -> None: ...

    def end(self) -> None: ...

    def take(self, site: int, phase: str, hidden: Tensor) -> None:
        if phase != "pre":
            return
        x = hidden.double().cpu()
        x = x[torch.isfinite(x).all(-1)]
        if not (new := len(x)):
            return
        before, self.tokens[site] = self.tokens[site], self.tokens[site] + new
        for kind, y in (("layernorm", standardize(x)), ("rmsnorm", _rms_standardized(x))):
            pair = torch.stack([x, y])
            mean = pair.mean(1)
            apart = mean - self.means[site][kind]
            self.means[site][kind] += apart * (new / self.tokens[site])
            self.squares[site][kind] += _products(pair - mean[:, None]).sum(1)
            self.squares[site][kind] += _products(apart) * (before * new / self.tokens[site])

    def lost(self, site: int, kind: str) -> float:
        """The share of a site's variance that no alpha and beta give back."""
        of_x, of_y, both = self.squares[site][kind]
        told = torch.where(of_y > 0, both * both / of_y, 0.0)
        return float((of_x - told).clamp(min=0).sum() / of_x.sum())  # negative only by rounding


def compute(
    models: Sequence[_source.Named] = tuple(EMBEDDED),
    data: Any = "sample",
    n_tokens: int | None = None,
    context: int | None = None,
) -> pd.DataFrame:
    """`lost_share` of every norm's inputs: one row for LayerNorm's standardization of them, one for RMSNorm's.

    Tokens whose hidden states are not finite are left out: `n_tokens` counts the others. Where all hidden states are
    the same, there is no share (NaN).

    Args:
        models: hub ids or directories, of any number of models; None is the embedded pair.
        data: what `normgeo angles` takes, or token ids; None is sample.
        n_tokens: how many; None is all there are.
        context: tokens that a model sees together; None is up to 256.

    Raises:
        DataError: a norm with fewer than two finite hidden states before it.
    """
    rows = []
    for name, model, tokens in _source.each_opened(models, data, context):
        moments, on = _Moments(sites := find_sites(model)), _source.on_stream(model, tokens, sites)
        observe(model, tokens, [moments], sites=sites, n_tokens=n_tokens)
        for site, n in zip(sites, moments.tokens, strict=True):
            if n < 2:
                raise DataError(
                    f"a variance takes 2 finite hidden states, received {n} before {site.key} of {name}; give more "
                    "tokens, or a model whose numbers are finite"
                )
        rows += [
            {"model": name, "site": site.key, "layer": site.layer, "role": site.role,
             "stack": site.stack, "kind": site.kind, "standardization": kind, "lost_share": moments.lost(i, kind),
             "on_stream": site.key in on, "n_tokens": moments.tokens[i]}
            for i, site in enumerate(sites) for kind in NORMS
        ]  # fmt: skip
    return pd.DataFrame(rows)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The share that is lost along the depth of each model or stack, for either standardization of the same states."""
    frame = frame[frame.on_stream]
    stacks = _source.stacks(frame)
    figure, grid = _axes.grid(["variance lost (%)"], list(stacks), height=2.2, xlabel=_axes.DEPTH)
    for axes, rows in zip(grid[0], stacks.values(), strict=True):
        axes.axhline(0, color="0.4", linewidth=1, linestyle="--", label="BatchNorm (eq. 10 and 11)")
        for k, (kind, label) in enumerate(NORMS.items()):
            part = rows[rows.standardization == kind].sort_values("depth")
            axes.plot(
                part.depth, 100 * part.lost_share, f"{'os'[k]}-", color=figures.PALETTE[k], markersize=3, linewidth=1,
                label=label,
            )  # fmt: skip
    figures.legend(figure)
    figure.suptitle("What no scale-and-shift gives back of a norm's input", fontsize=9)
    return figure
