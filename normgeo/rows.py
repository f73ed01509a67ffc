"""Which rows of a table are of what: norms on the residual stream, the first of each layer, tokens without sinks."""

from __future__ import annotations

import numpy as np
import pandas as pd

__all__ = ["SINGLE", "first_of_layers", "on_stream", "with_rest"]

SINGLE = ("embedding", "final", "head")
"""Roles of norms that no layer has."""


def on_stream(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of norms that read the residual stream: not those of branches, of heads, or of what a branch gives.

    Norms behind a branch (`post_*`) read the stream in Post-LN stacks, which have no others; a final norm is given
    there what the last of them gives, and not what branches were added to. All rows of a model that was measured
    nowhere else.
    """

    def reads(rows: pd.DataFrame) -> pd.Series:
        post, final = rows.role.str.startswith("post_"), rows.role.eq("final")
        pre = rows.role.isin(["attention", "cross_attention", "mixer", "mlp", "parallel"])
        on = ~rows.role.isin(["qk", "inner", "head"])
        return on & ~post if pre.any() or (final.any() and not _hands_on(rows[post], rows[final])) else on

    kept = [frame[:0]]
    for _, rows in frame.groupby("model", sort=False):
        on = pd.concat([part[reads(part)] for _, part in rows.groupby("stack", sort=False)])
        kept.append(on if len(on) else rows)
    return pd.concat(kept).sort_index()


def _hands_on(post: pd.DataFrame, final: pd.DataFrame) -> bool:
    """Whether what the last of these norms gives is what the final one is given, as far as both were measured."""
    if not {"phase", "direction", "mean_deg", "mean_norm"} <= set(post) or not len(post):
        return False
    gives = post[(post.phase == "post") & (post.direction == "uniform") & (post.site == post.site.iloc[-1])]
    given = final[(final.phase == "pre") & (final.direction == "uniform")]
    if not len(gives) or not len(given):
        return False
    numbers = ["mean_deg", "mean_norm"]
    return bool(np.allclose(gives[numbers].iloc[0].astype(float), given[numbers].iloc[0].astype(float), rtol=1e-6))


def first_of_layers(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first norm of each layer: on the stream, or of what a branch gives where there is none on it."""
    inner = on_stream(frame[~frame.role.isin(SINGLE)])
    return inner[inner.site == inner.groupby(["model", "stack", "layer"]).site.transform("first")]


def with_rest(frame: pd.DataFrame, sinks: pd.DataFrame) -> pd.DataFrame:
    """A table with a column `rest_norm`, where its `sinks` tell: `mean_norm` without first positions and BOS."""
    if sinks.empty:
        return frame
    keys = ["model", "site", "phase", "direction"]
    return frame.join(sinks[sinks.tokens == "rest"].set_index(keys).mean_norm.rename("rest_norm"), on=keys)
