"""How well a mean angle is known: its standard error, by documents (*Geometry* fig. 3 has spreads over tokens alone).

Tokens of a document are alike, so that the mean of N of them is known less well than that of N drawn apart. With t_i
the angles and m their mean, over D documents that were drawn apart,

    se = sqrt(D / (D - 1) * sum over documents of (sum of t_i - m over its tokens)^2) / N,

beside std / sqrt(N), as if every token had been. Of fewer than some ten documents this is too small, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.angles.scalars import ScalarStore
from normgeo.errors import DataError
from normgeo.geometry import NAMES
from normgeo.rows import on_stream

LABELS = {"se_deg": "by documents", "se_tokens_deg": "as if tokens were drawn apart"}


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Mean angles with both standard errors, and mean norms, per model, site, phase and direction.

    Raises:
        RunError: the run kept no scalars.
        DataError: there is no finished run, it has a single document, or is asked for a number of tokens.
    """
    with _source.scalars(run, n_tokens) as (sites, stores):
        return pd.DataFrame(
            site | row for site in sites.to_dict("records") for row in _rows(stores[site["model"]], site["site"])
        )


def _rows(store: ScalarStore, site: str) -> Iterator[dict[str, Any]]:
    for phase in ("pre", "post"):
        norms = store.norms(site, phase).astype(float)
        for direction in NAMES:
            degrees = store.angles(site, phase, direction).astype(float)
            document = np.repeat(store.document, len(degrees) // len(store.document))  # norms on heads have several
            known = ~np.isnan(degrees)
            _, of = np.unique(document[known], return_inverse=True)
            apart = degrees[known] - degrees[known].mean()
            n, n_documents = len(apart), int(of.max()) + 1
            if n_documents < 2:
                raise DataError(
                    f"{len(store.document):,} tokens are of one document, which tells nothing of how documents differ; "
                    "measure more tokens"
                )
            together = np.bincount(of, apart)
            yield {
                "phase": phase, "direction": direction, "mean_deg": degrees[known].mean(),
                "se_deg": np.sqrt(n_documents / (n_documents - 1) * (together**2).sum()) / n,
                "se_tokens_deg": np.sqrt((apart**2).sum() / (n - 1) / n), "n_documents": n_documents, "n_tokens": n,
                "mean_norm": norms[known].mean(),  # which tells, too, whether a norm reads what the one before it gives
            }  # fmt: skip


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Both standard errors of the mean angle to the uniform vector, along the depth of each model or stack."""
    frame = on_stream(frame[frame.direction == "uniform"])
    stacks = _source.stacks(frame)
    ylabels = ["before the norm (degrees)", "after the norm (degrees)"]
    titles = [f"{stack}\n{rows.n_documents.min():,} documents" for stack, rows in stacks.items()]
    figure, grid = _axes.grid(ylabels, titles, xlabel=_axes.DEPTH)
    for row, phase in zip(grid, ("pre", "post"), strict=True):
        for axes, rows in zip(row, stacks.values(), strict=True):
            part = rows[rows.phase == phase].sort_values("depth")
            for k, (column, label) in enumerate(LABELS.items()):
                style = {"color": figures.PALETTE[k], "markersize": 3, "linewidth": 1, "label": label}
                axes.plot(part.depth, part[column], f"{'os'[k]}-", **style)
        row[0].set_yscale("log")
    figures.legend(figure)
    figure.suptitle("Standard error of the mean angle to the uniform vector", fontsize=9)
    return figure
