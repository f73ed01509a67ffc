"""*Geometry*'s two scenarios (section 3.2), put to the test in plain words and with the numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import torch

from normgeo.errors import DataError
from normgeo.rows import check_one_step, on_stream, to_uniform

__all__ = [
    "CENTERED_DEG",
    "CENTERED_ROUNDINGS",
    "GROUP_LABELS",
    "LEAST_DIRECTIONS",
    "LEAST_TOKENS",
    "already_centered",
    "answers",
    "length",
    "scenario",
    "summary",
    "verdict",
]

CENTERED_DEG = 1e-3
"""A pre-norm spread below this many degrees, around 90, is rounding: the hidden states were centered."""

CENTERED_ROUNDINGS = 1.5
"""So is one below this many eps / sqrt(d) of the hidden states' dtype: rounding their components leaves 0.3 of it along
the uniform vector at the first layer and 1.1 after 24, in bfloat16 as in float16."""

LEAST_TOKENS = 16
"""Over fewer tokens, the first of them, an attention sink, has too much weight in a mean angle."""

LEAST_DIRECTIONS = 39
"""One more direction like K random ones lies outside all of them in 2 / (K + 1) of cases. With fewer than this, that is
more than 5%, and none of them could be said to lie outside the central 95%."""

GROUP_LABELS = {"first": "first position of a context", "bos": "BOS elsewhere", "rest": "all other tokens"}
CLAIMS = {
    "layernorm": (
        1, "hidden states have a large component along the uniform vector before LayerNorm, which LayerNorm removes",
    ),
    "rmsnorm": (
        2, "hidden states of an RMSNorm model, trained without mean subtraction, keep a large component along the "
        "uniform vector",
    ),
}  # fmt: skip
EXPECTED_OUTSIDE = 0.05
LARGE_ENERGY = 0.05


def _literal(name: str) -> str:
    """A name as Markdown that shows it: else `__a__` would be a bold a, and `![a](b)` a picture that is fetched."""
    return re.sub(r"[\\`*\[\]<&~#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", name)


def length(norm: float) -> str:
    """A norm as tables show it: 1,234 and 23,970 are read beside 150.9, 2.397e+04 is not."""
    return f"{norm:,.0f}" if 1e3 <= norm < 1e9 else f"{norm:.4g}"


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """The angles to the uniform vector in short: a row per model, role and kind of norm, or per model and step.

    A step's are of the norms on the residual stream.

    `before_deg` and `after_deg` are means over `sites` of the mean angle over tokens, `before_std_deg` and
    `after_std_deg` of its standard deviation; `energy_share` is the mean of cos^2 before the norm, and
    `null_percentile` the median place of the mean angle before it among those of the random directions, NaN where
    these met too few tokens to tell.
    """
    by = ["model", "step"] if "step" in frame else ["model", "role", "kind"]
    if "step" in frame:
        frame = on_stream(frame)
    pre, post = (to_uniform(frame, phase).groupby(by, sort=False) for phase in ("pre", "post"))
    columns = {
        "sites": pre.size(), "before_deg": pre.mean_deg.mean(), "before_std_deg": pre.std_deg.mean(),
        "after_deg": post.mean_deg.mean(), "after_std_deg": post.std_deg.mean(),
        "energy_share": pre.energy_share.mean(), "null_percentile": pre.null_percentile.median(),
    }  # fmt: skip
    met = frame[(frame.direction == "null") & (frame.phase == "pre")].groupby(by, sort=False).n_tokens.min()
    short = pd.DataFrame(columns)
    short["null_percentile"] = short.null_percentile.where(met.reindex(short.index) >= LEAST_TOKENS)
    return short.reset_index()


def already_centered(frame: pd.DataFrame) -> pd.DataFrame:
    """The sites whose inputs have no component along the uniform vector beyond rounding, as after a conversion.

    Or as behind a LayerNorm whose gamma and beta are 1 and 0, or not there.
    """
    pre = to_uniform(frame, "pre")
    eps = np.array([torch.finfo(getattr(torch, name)).eps for name in pre["dtype"]])
    limit = np.maximum(CENTERED_DEG, np.degrees(CENTERED_ROUNDINGS * eps / np.sqrt(pre.d)))
    return pre[(pre.std_deg < limit) & ((pre.mean_deg - 90).abs() < limit)]


def scenario(frame: pd.DataFrame) -> dict[str, Any]:
    """The test of one kind of norm of one model, on the sites that are given: those on its residual stream.

    The uniform vector is special at a site when more of the hidden states' energy lies along it than along 95% of the
    random directions, and large when it is more than 5% of the energy as well. Scenario 2 holds when most sites have
    a large component before the norm; scenario 1 when at most sites it is large before LayerNorm and not behind it,
    where gamma and beta may have put back what was subtracted.
    """
    pre, post = to_uniform(frame, "pre").set_index("site"), to_uniform(frame, "post").set_index("site")
    special, large = _special(pre), _large(pre)
    gone = large & ~_large(post).reindex(large.index, fill_value=False)
    removes = frame.kind.eq("layernorm").all()
    outside = (pre.null_percentile < 2.5) | (pre.null_percentile > 97.5)
    top = pre.sort_values("energy_share").iloc[-1]
    null = frame[(frame.direction == "null") & (frame.phase == "pre")]
    met = int(null.n_tokens.min()) if len(null) else 0
    directions = int(null.n_directions.min()) if len(null) else 0
    return {
        "sites": len(pre),
        "mean_deg": pre.mean_deg.median(),
        "least_deg": pre.mean_deg.min(),
        "most_deg": pre.mean_deg.max(),
        "post_deg": post.mean_deg.median(),
        "post_energy": post.energy_share.median(),
        "outside": int(outside.sum()),
        "z": pre.null_z.abs().median(),
        "special": int(special.sum()),
        "empty": int((pre.energy_percentile <= 5).sum()),
        "large": int(large.sum()),
        "gone": int(gone.sum()),
        "energy": pre.energy_share.median(),
        "top_energy": top.energy_share,
        "top_site": str(top.name),
        "null_energy": null.energy_share.median(),
        "null_tokens": met,
        "null_directions": directions,
        "tested": directions >= LEAST_DIRECTIONS and met >= LEAST_TOKENS,
        "holds": bool((gone if removes else large).mean() > 0.5),
    }


def _special(uniform: pd.DataFrame) -> pd.Series:
    return uniform.energy_percentile >= 95


def _large(uniform: pd.DataFrame) -> pd.Series:
    return _special(uniform) & (uniform.energy_share > LARGE_ENERGY)


def _answer(model: str, kind: str, s: dict, centered: int) -> str:
    """Which scenario a kind of norm is tested for, and what came of it, in Markdown."""
    answer = f"**{'holds' if s['holds'] else 'does not hold'}** for {model}."
    if 2 * s["large"] > s["sites"] and not s["holds"]:
        answer = f"**does not hold** for {model}: the component is large, but gamma and beta put it back."
    if not s["tested"]:
        answer = (
            f"**not tested** for {model}: there are {s['null_directions']} random directions and they met "
            f"{s['null_tokens']} tokens; it takes {LEAST_DIRECTIONS} and {LEAST_TOKENS} (--null, --null-every, "
            "--tokens)."
        )
    if 2 * centered > s["sites"]:
        answer = f"**not answered** for {model}: at {centered} of {s['sites']} sites its inputs were centered."
    number, claim = CLAIMS[kind]
    return f"**Scenario {number}** ({claim}): {answer}"


def _paragraphs(model: str, kind: str, s: dict, centered: int) -> list[str]:
    layernorm = kind == "layernorm"
    act = "mean subtraction removes" if layernorm else "mean subtraction, had the model had it, would remove"
    null = f" A random direction holds {100 * s['null_energy']:.3f}%." if s["tested"] else ""
    behind = (
        f", and that it is gone behind the norm, as it is at {s['gone']} of these" if layernorm and s["large"] else ""
    )
    lines = [
        _answer(model, kind, s, centered),
        "",
        f"- Angle to the uniform vector before the norm: {s['mean_deg']:.2f}° (median over {s['sites']} sites; "
        f"{s['least_deg']:.2f}° to {s['most_deg']:.2f}°); after it, {s['post_deg']:.2f}°.",
        f"- Energy: {act} {100 * s['energy']:.3f}% of the squared norm at the median site, at most "
        f"{100 * s['top_energy']:.3f}% ({_literal(s['top_site'])}).{null} Of the norm's output, with the gamma "
        f"and beta that it has, {100 * s['post_energy']:.3f}% lies along the uniform vector.",
    ]
    if s["tested"]:
        lines += [
            f"- Null ensemble: the uniform vector's mean angle lies outside the central 95% of random directions at "
            f"{s['outside']} of {s['sites']} sites (chance: {EXPECTED_OUTSIDE * s['sites']:.1f} on average, but sites "
            f"that share a stream stray together); median |z| {s['z']:.2f}. More energy lies along it than "
            f"along 95% of random directions at {s['special']} of {s['sites']} sites; at {s['large']} that is "
            f"also more than {100 * LARGE_ENERGY:.0f}% of the energy, which the scenario asks for at most "
            f"sites{behind}. At {s['empty']} sites less energy lies along it than along 95% of random directions.",
        ]
    return lines


def _tokens(rows: pd.DataFrame) -> int:
    """How many tokens these rows are of: norms on heads take several vectors of each."""
    return int(((rows.n_tokens + rows.n_excluded) // rows.heads).min())


def _sinks(sinks: pd.DataFrame, stream: set[str]) -> list[str]:
    if sinks.empty:
        return []
    keep = to_uniform(sinks, "pre")
    keep = keep[keep.role.ne("embedding") & keep.site.isin(stream)]
    if keep.empty:
        return []
    others = ", those of embeddings left out" if sinks.role.eq("embedding").any() else ""
    lines = ["", f"Attention sinks apart (before the norm, median over sites{others}; above are all tokens):", "",
             "| tokens | count | angle to uniform | norm |", "| --- | --- | --- | --- |"]  # fmt: skip
    for group, name in GROUP_LABELS.items():
        part = keep[keep.tokens == group]
        if len(part):
            norm = length(part.mean_norm.median())
            lines.append(f"| {name} | {_tokens(part):,} | {part.mean_deg.median():.2f}° | {norm} |")
    return lines


def answers(frame: pd.DataFrame) -> list[str]:
    """The verdict in short, in plain text: a sentence for each model and kind of norm on its residual stream."""
    sentences = []
    for model, part in frame.groupby("model", sort=False):
        centered = already_centered(part)
        for kind, group in on_stream(part).groupby("kind", sort=False):
            of_kind = int(centered.site.isin(group.site).sum())
            answer = _answer("{}", str(kind), scenario(group), of_kind)
            sentences.append(answer.replace("**", "").format(model))  # whose name may have marks in it
    return sentences


def verdict(frame: pd.DataFrame, sinks: pd.DataFrame) -> str:
    """The verdict on every model in a table, in Markdown.

    Raises:
        DataError: the table has several steps of training, or a model no angles to the uniform vector before or after
            its norms.
    """
    check_one_step(frame)
    lines = ["# Verdict", ""]
    for model, part in frame.groupby("model", sort=False):
        if absent := [phase for phase in ("pre", "post") if to_uniform(part, phase).empty]:
            raise DataError(
                f"the verdict is of rows of phase {absent[0]!r} and direction 'uniform' too; the table has none of "
                f"{model}"
            )
        n = _tokens(part[part.direction == "uniform"])
        lines += [f"## {_literal(str(model))}", "", f"{n:,} tokens."]
        if (excluded := int(part[part.direction == "uniform"].n_excluded.max())) > 0:
            lines += ["", f"Up to {excluded:,} vectors at a site were zero or not finite and are left out."]
        if len(centered := already_centered(part)):
            lines += [
                "",
                f"**Already centered**: at {len(centered)} of {part.site.nunique()} sites the inputs have no component "
                "along the uniform vector beyond rounding. Someone subtracted the mean from the weights that write "
                "there (a converted model, or a loader that centers), or a LayerNorm writes there whose gamma and beta "
                "leave its output centered. Angles of 90° say nothing about training here.",
            ]
        stream = on_stream(part)
        if aside := sorted({*part.role[~part.site.isin(stream.site)]}):
            lines += ["", f"Norms that read no residual stream ({', '.join(aside)}) are left out of what follows."]
        for kind, group in stream.groupby("kind", sort=False):
            of_kind = int(centered.site.isin(group.site).sum())
            lines += ["", *_paragraphs(_literal(str(model)), str(kind), scenario(group), of_kind)]
        lines += _sinks(sinks[sinks.model == model] if len(sinks) else sinks, {*stream.site})
        lines.append("")
    return "\n".join(lines)
