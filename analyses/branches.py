"""What attention and MLPs add to the residual stream: a^l and m^l of *Geometry* eq. 13 to 17, and how they point.

h^l = h^0 + sum_i a^i + sum_i m^i. A branch's output is the difference of the stream where two norms in a row read it:
what is added, whatever a model does to it before. Where norms stand behind the additions (Post-LN) the stream is their
output. Norms that read one value of the stream have their branches' sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import pandas as pd
import torch
from torch import Tensor

from analyses import _axes, _source
from normgeo import figures
from normgeo.cards import EMBEDDED
from normgeo.errors import DataError
from normgeo.sites import NormSite, find_sites
from normgeo.stream import observe
from normgeo.tokens import TokenBatch

SUMS = ("norm", "relative_norm", "energy_share", "cosine")
BRANCHES = {
    "attention": "attention", "mlp": "MLP", "parallel": "attention and MLP", "cross_attention": "cross-attention",
    "mixer": "mixer",
}  # fmt: skip


class _Added:
    """Sums over tokens of what is added to the stream between two norms: a sink."""

    def __init__(self, sites: Sequence[NormSite], on: set[str]) -> None:
        read = {i: site for i, site in enumerate(sites) if site.key in on}
        behind = {site.stack for site in read.values() if site.role.startswith("post_")}
        self.behind = {site.stack: site.stack in behind for site in sites}
        self.sites = sites  # before the first layer there is no stream yet, but where norms stand behind additions
        self.on = {i for i, site in read.items() if site.role != "embedding" or site.stack in behind}
        self.sums: dict[tuple[int, ...], Tensor] = {}
        self.tokens: dict[tuple[int, ...], int] = {}

    def begin(self, batch: TokenBatch) -> None:
        self.stream: dict[str, Tensor] = {}
        self.reading: dict[str, tuple[int, ...]] = {}

    def end(self) -> None: ...

    def take(self, site: int, phase: str, hidden: Tensor) -> None:
        stack = self.sites[site].stack
        if site not in self.on or (phase == "post" and not self.behind[stack]):
            return
        before, x = self.stream.get(stack), hidden.to("cpu", torch.float64)
        if phase == "pre" and before is not None and before.shape == x.shape:
            if torch.equal(before, x):  # read again, as by a final norm behind the last of a Post-LN stack
                self.reading[stack] += (site,)
                return
            self._add((site,) if self.behind[stack] else self.reading[stack], before, x)
        if phase == "post" or not self.behind[stack]:
            self.stream[stack], self.reading[stack] = x.clone(), (site,)

    def _add(self, group: tuple[int, ...], before: Tensor, after: Tensor) -> None:
        added = after - before
        norm, stream = (torch.linalg.vector_norm(v, dim=1) for v in (added, before))
        along = added.sum(1).square() / (added.shape[1] * norm.square())
        cosine = (added * before).sum(1) / (norm * stream)
        found = torch.stack([norm, norm / stream, along, cosine])
        whole = found[:, torch.isfinite(found).all(0)]
        self.sums[group] = self.sums.get(group, torch.zeros(len(SUMS), dtype=torch.float64)) + whole.sum(1)
        self.tokens[group] = self.tokens.get(group, 0) + whole.shape[1]

    def rows(self) -> list[dict[str, Any]]:
        """Means over tokens, a row for each addition."""
        found = []
        for group, total in self.sums.items():
            site = self.sites[group[0]]
            role = site.role.removeprefix("post_") if len(group) == 1 else "parallel"
            about = {"site": site.key, "layer": site.layer, "role": role, "stack": site.stack, "d": site.d}
            means = dict(zip(SUMS, (total / max(1, self.tokens[group])).tolist(), strict=True))
            found.append(about | means | {"n_tokens": self.tokens[group]})
        return found


def compute(
    models: Sequence[_source.Named] = tuple(EMBEDDED),
    data: Any = "sample",
    n_tokens: int | None = None,
    context: int | None = None,
) -> pd.DataFrame:
    """One row for what is added to the stream behind each norm, or before it in a Post-LN model; means over tokens.

    `norm` is |a|, `relative_norm` |a| / |h| with h what it is added to, `energy_share` (a.1)^2 / (d |a|^2), and
    `cosine` that of a and h. Tokens to which nothing is added, or to nothing, are left out.

    Args:
        models: hub ids or directories, of any number of models; None is the embedded pair.
        data: what `normgeo angles` takes, or token ids; None is sample.
        n_tokens: how many; None is all there are.
        context: tokens that a model sees together; None is up to 256.
    """
    rows = []
    for name, model, tokens in _source.each_opened(models, data, context):
        sites = find_sites(model)
        sink = _Added(sites, _source.on_stream(model, tokens, sites))
        observe(model, tokens, [sink], sites=sites, n_tokens=n_tokens)
        if not (found := sink.rows()):
            raise DataError(
                f"no two norms of {name} read its residual stream one after the other: nothing can be told apart"
            )
        rows += [{"model": name} | row for row in found]
    return pd.DataFrame(rows)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Sizes, energies along the uniform vector and directions along the depth, a column per model or stack."""
    stacks = _source.stacks(frame)
    quantities = {
        "relative_norm": "norm / the stream's", "energy_share": "share of energy along 1",
        "cosine": "cosine with the stream",
    }  # fmt: skip
    figure, grid = _axes.grid(list(quantities.values()), list(stacks))
    for row, quantity in zip(grid, quantities, strict=True):
        for axes, part in zip(row, stacks.values(), strict=True):
            for k, (role, label) in enumerate(BRANCHES.items()):
                here = part[part.role == role].sort_values("layer")
                axes.plot(
                    here.layer, here[quantity], f"{'os^Dv'[k]}-", color=figures.PALETTE[k], markersize=3, linewidth=1,
                    label=label if len(here) else "_",
                )  # fmt: skip
            if quantity == "cosine":
                axes.axhline(0, color="0.4", linewidth=0.6)
            else:
                axes.set_yscale("log")
            if quantity == "energy_share":
                axes.axhline(1 / part.d.iloc[0], color="0.4", linewidth=0.8, linestyle="--", label="1/d")
                axes.yaxis.set_major_formatter(figures.Percent())  # between powers of ten is most of it
                axes.yaxis.set_minor_formatter(figures.Percent())
    figures.legend(figure)
    figure.suptitle("What branches add to the residual stream (means over tokens)", fontsize=9)
    return figure
