"""Which rows of a table are of what: norms on the residual stream, the first of each layer, tokens without sinks.

And what norms and stacks are called beside each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd

from normgeo.errors import DataError

__all__ = [
    "SINGLE", "check_one_step", "first_of_layers", "on_stream", "short_names", "stack_names", "to_uniform", "with_rest",
]  # fmt: skip

SINGLE = ("embedding", "final", "head")
"""Roles of norms that no layer has."""


def to_uniform(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """The rows of the angles to the uniform vector in a phase."""
    return frame[(frame.phase == phase) & (frame.direction == "uniform")]


def check_one_step(frame: pd.DataFrame) -> None:
    """Refuse a table of several checkpoints, whose rows would be taken for those of one.

    Raises:
        DataError: it is one.
    """
    if "step" in frame and frame.step.nunique() > 1:
        steps = sorted(frame.step.unique())
        raise DataError(
            f"the table is of {len(steps)} steps of training; choose one, as "
            f"AngleTable(frame[frame.step == {steps[-1]}])"
        )


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
    gives, given = to_uniform(post[post.site == post.site.iloc[-1]], "post"), to_uniform(final, "pre")
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


def short_names(sites: Sequence[str]) -> list[str]:
    """What norms of one layer are called beside each other: as much of the ends of their names as tells them apart.

    Functions with which call they are, for all that a module calls go by its name.

    >>> short_names(["h.0.attn.rms_norm()@1"]), short_names(["albert.layer.0.norm@1"])
    (['rms_norm()@1'], ['norm'])
    >>> short_names(["h.0.attn.q_norm", "h.0.attn.k_norm"]), short_names(["h.0.ff1.norm", "h.0.ff2.norm"])
    (['q_norm', 'k_norm'], ['ff1.norm', 'ff2.norm'])
    """
    halves = (site.partition("@") for site in sites)
    split = [(name.split("."), at + call if name.endswith("()") else "") for name, at, call in halves]
    for n in range(1, max(len(parts) for parts, _ in split) + 1):
        ends = [".".join(parts[-n:]) + call for parts, call in split]
        if len(set(ends)) == len(ends):
            return ends
    return list(sites)


def stack_names(stacks: Collection[str]) -> dict[str, str]:
    """What stacks are called beside each other: by what their lists are in; by these where that is one; or in full.

    >>> stack_names(["model.encoder.layers", "model.decoder.layers"])
    {'model.encoder.layers': 'encoder', 'model.decoder.layers': 'decoder'}
    >>> stack_names(["model.prelude", "model.coda"])
    {'model.prelude': 'prelude', 'model.coda': 'coda'}
    """
    for place in (-2, -1):
        names = {stack: stack.split(".")[place] if "." in stack else stack for stack in stacks}
        if len({*names.values()}) == len(names):
            return names
    return {stack: stack for stack in stacks}
