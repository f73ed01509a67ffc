"""Angles of any choice of tokens, from a run's scalars: first positions left out (*Geometry* fig. 3).

`scalars.zarr` holds the norm and the angles of every token at every norm, before and after it, so a mask
needs no model. A mask is a function of the store: an array of bool over tokens from its `id`, `document`, `position`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

Mask = Callable[[ScalarStore], np.ndarray]
MASKS: dict[str, Mask] = {
    "all tokens": lambda store: np.ones(len(store.position), bool),
    "first position only": lambda store: store.position == 0,
    "without the first position": lambda store: store.position > 0,
}


def compute(
    run: Path | None = None, n_tokens: int | None = None, masks: Mapping[str, Mask] | None = None
) -> pd.DataFrame:
    """Angles over the tokens of each mask, per model, site, phase and direction.

    Raises:
        RunError: the run kept no scalars.
        DataError: there is no finished run; a mask leaves no token, or a run is asked for a number of tokens.
    """
    with _source.scalars(run, n_tokens) as (sites, stores):
        return pd.DataFrame(_rows(sites, stores, masks or MASKS))


def _rows(sites: pd.DataFrame, stores: _source.ScalarStores, masks: Mapping[str, Mask]) -> Iterator[dict[str, Any]]:
    for model, part in sites.groupby("model", sort=False):
        store = stores[str(model)]
        chosen = {name: np.asarray(mask(store), bool) for name, mask in masks.items()}
        for name, keep in chosen.items():
            if not keep.any():
                raise DataError(f"the mask {name!r} leaves none of the {len(keep):,} tokens of {model}")
        for site in part.to_dict("records"):
            for phase in ("pre", "post"):
                norms = store.norms(site["site"], phase)
                for direction in NAMES:
                    degrees = store.angles(site["site"], phase, direction)
                    for name, keep in chosen.items():
                        kept = np.repeat(keep, len(degrees) // len(keep))  # a norm on heads has several a token
                        kept &= ~np.isnan(degrees)
                        theta, length = (pd.Series(of[kept], dtype=float) for of in (degrees, norms))  # NaN of none
                        yield {str(k): v for k, v in site.items()} | {
                            "phase": phase, "direction": direction, "mask": name,
                            "mean_deg": theta.mean(), "std_deg": theta.std(ddof=0), "median_deg": theta.median(),
                            "mean_norm": length.mean(), "n_tokens": len(theta),
                        }  # fmt: skip


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Angle to the uniform vector along the depth of the residual stream for each mask, a column per model or stack."""
    frame, masks = on_stream(frame[frame.direction == "uniform"]), list(frame["mask"].unique())
    stacks = _source.stacks(frame)
    ylabels = ["before the norm (degrees)", "after the norm (degrees)"]
    figure, grid = _axes.grid(ylabels, list(stacks), xlabel=_axes.DEPTH)
    for row, phase in zip(grid, ("pre", "post"), strict=True):
        for axes, rows in zip(row, stacks.values(), strict=True):
            figures.right_angle(axes)
            for k, mask in enumerate(masks):
                part = rows[(rows.phase == phase) & (rows["mask"] == mask)].sort_values("depth")
                axes.errorbar(
                    part.depth + 0.1 * (k - (len(masks) - 1) / 2), part.mean_deg, part.std_deg, markersize=3,
                    fmt=f"{'osD^v'[k % 5]}-", color=figures.PALETTE[k % 10], linewidth=1, elinewidth=0.8, capsize=1.5,
                    label=mask, zorder=3,
                )  # fmt: skip
    figures.legend(figure)
    figure.suptitle("Angle to the uniform vector for chosen tokens (mean ± standard deviation over tokens)", fontsize=9)
    return figure
