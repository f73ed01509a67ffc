"""Is the uniform vector special? Its mean angle against K random directions (*Geometry* fig. 4 has K = 2).

z = (m_1 - mean_k m_k) / std_k m_k, where m_u is the mean angle to u over the same tokens; the percentile is the share
of random directions with a smaller mean angle. A direction like any other has |z| < 1.96 in 95% of cases, but the sites
of a model share their residual stream: they stray together, and are no independent trials.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure
import pandas as pd

from analyses import _axes, _source
from normgeo import figures
from normgeo.angles.verdict import LEAST_DIRECTIONS, LEAST_TOKENS
from normgeo.errors import DataError
from normgeo.figures import series

COLUMNS = ["model", "site", "layer", "role", "stack", "kind", "phase", "mean_deg", "null_mean_deg", "null_std_deg",
           "null_z", "null_percentile", "energy_percentile", "n_directions"]  # fmt: skip


def compute(run: Path | None = None, n_tokens: int | None = None) -> pd.DataFrame:
    """Where the uniform vector lies among the random directions, before and after every norm.

    Raises:
        DataError: a model was measured without random directions, or these met too few tokens.
    """
    frame = _source.table(run, n_tokens).frame
    frame = frame[frame.phase.isin(["pre", "post"])]
    keys = ["model", "site", "phase"]
    null = frame[frame.direction == "null"]
    if without := [str(model) for model in frame.model.unique() if model not in set(null.model)]:
        raise DataError(f"there is no null ensemble of {', '.join(without)}; measure again with --null 256")
    if (met := int(null.n_tokens.min())) < LEAST_TOKENS:
        raise DataError(
            f"the random directions met {met} tokens, which tells nothing; measure more, or all with --null-every 1"
        )
    null = null[[*keys, "mean_deg", "std_deg", "n_directions"]].rename(
        columns={"mean_deg": "null_mean_deg", "std_deg": "null_std_deg"}
    )
    uniform = frame[frame.direction == "uniform"].drop(columns="n_directions")
    return uniform.merge(null, on=keys)[COLUMNS]


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Z and percentile of the uniform vector by layer, with the central 95% of random directions marked."""
    many = frame.groupby("model", sort=False).n_directions.max()
    models, alike = list(map(str, many.index)), many.nunique() == 1
    titles = models if alike else [f"{model}\n{n:.0f} directions" for model, n in many.items()]
    figure, grid = _axes.grid(["z of the uniform vector", "percentile of its mean angle"], titles)
    looks = figures.styles(frame[frame.phase == "pre"])
    for row, value, bound in zip(grid, ("null_z", "null_percentile"), (1.96, None), strict=True):
        for axes, model in zip(row, models, strict=True):
            low, high = (-bound, bound) if bound else (2.5, 97.5)
            if bound or many[model] >= LEAST_DIRECTIONS:  # of fewer, a direction is easily beyond all
                axes.axhspan(low, high, color="0.93", zorder=0, label="expected in 95% of cases")
                for y in (low, high):
                    axes.axhline(y, color="0.4", linewidth=0.6, linestyle="--", zorder=1)
            if bound:
                axes.axhline(0, color="0.4", linewidth=0.6, zorder=1)
            else:
                axes.set(
                    ylim=(-3, 103), yticks=(ticks := [2.5, 25, 50, 75, 97.5]), yticklabels=[f"{t:g}" for t in ticks]
                )
            part = frame[frame.model == model]
            after = part[part.phase == "post"].set_index("site")
            for name, pre in series(part[part.phase == "pre"]):
                style = looks[name] | {"markersize": 3.5, "zorder": 3}
                post = after.reindex(pre.site)  # of a part of a table there may be none
                axes.plot(pre.layer, pre[value], label=name, **style)
                axes.plot(post.layer, post[value], ":", markerfacecolor="white", **style)
    grid[0, 0].plot([], [], "o:", color="0.4", markerfacecolor="white", markersize=3.5, label="open: after the norm")
    figures.legend(figure)
    n = f"{many.iloc[0]:.0f} " if alike else ""
    figure.suptitle(f"Mean angle to the uniform vector among those to {n}random directions", fontsize=9)
    return figure
