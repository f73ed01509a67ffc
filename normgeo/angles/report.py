"""One page of a run: verdict, figures, numbers and what was measured, in a file that needs no other."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt

from normgeo.angles.measure import AngleTable
from normgeo.angles.verdict import length, summary
from normgeo.figures import ROLE_LABELS

__all__ = ["in_short", "page"]

CAPTIONS = {
    "angles": "Angles to the uniform vector and to two random vectors, before and after every norm: means over tokens, "
    "bars of one standard deviation (<i>Geometry</i> fig. 3). Grey: where the mean angles of random directions lie.",
    "energy": "The share of squared norm along the uniform vector, which mean subtraction removes, or would remove.",
    "norms": "The residual stream's growth (<i>Geometry</i> eq. 17).",
    "rotation": "The angle between what enters a norm and what it makes of it, before gamma and beta.",
}
IN_SHORT = (
    "Means over sites of mean ± standard deviation over tokens. Null percentile: the place of the mean angle before "
    "the norm among those of random directions, 50 in their middle, 0 below and 100 above them all (median over sites)."
)
LEFT_OUT = ("config", "sites", "marks")  # long, and in run.json
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; overflow-wrap: anywhere }
figure { margin: 1.5rem 0 } figure img { width: 100% } figcaption, small { color: #555 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { text-align: right; padding: .2rem .4rem; border-bottom: 1px solid #ddd; white-space: nowrap }
th { border-bottom-color: #888 } td:first-child, th:first-child { text-align: left }
.wide td:nth-child(-n + 3), .wide th:nth-child(-n + 3) { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: 13px }
dt { color: #555 } dd { margin: 0; overflow-wrap: anywhere } summary { cursor: pointer }
@media print {
@page { size: landscape } table { font-size: 10px } tr { break-inside: avoid }
.wide td:nth-child(-n + 2) { white-space: normal; overflow-wrap: anywhere }
details::details-content { content-visibility: visible } summary { display: none }
}
"""
"""On paper nothing can be scrolled to or unfolded: there wide tables are smaller, long names are broken, and nothing is
folded."""


def page(table: AngleTable, verdict: str, drawn: Path, about: Iterable[Mapping[str, Any]]) -> str:
    """The page as HTML, with its figures in it: no script, and nothing is fetched.

    Args:
        table: what was measured.
        verdict: what it says of it, in Markdown.
        drawn: where its figures lie, as .svg.
        about: what each model's measurement is of, as `run.json` has it.
    """
    models = [str(name) for name in table.frame.model.unique()]
    marks = MarkdownIt("js-default")  # which takes no HTML from the names of models
    said = marks.render(verdict.replace("# Verdict\n", "", 1))
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Angles of {html.escape(', '.join(models))}</title><style>{STYLE}</style></head><body>",
        "<h1>Is mean subtraction doing anything?</h1>",
        "<p>Angles between the hidden states and the uniform vector, before and after every norm, by normgeo.</p>",
        said,
        f"<h2>In short</h2><p><small>{IN_SHORT}</small></p>",
        _table(in_short(table.frame)),
        "<h2>Figures</h2>", *(_figure(path) for path in sorted(drawn.glob("*.svg"))),
        "<h2>Every norm</h2><details><summary>Before and after each of them</summary>", _table(_sites(table)),
        "</details>", "<h2>What was measured</h2>", *(_about(each) for each in about), "</body></html>", "",
    ])  # fmt: skip


def _table(frame: pd.DataFrame) -> str:
    return f'<div class="wide">{frame.to_html(index=False, border=0, na_rep="-")}</div>'


def in_short(frame: pd.DataFrame) -> pd.DataFrame:
    """What `verdict.summary` says of a table's frame, in words; - where it is not known."""
    rows = summary(frame)
    about = [column for column in ("model", "step", "role", "kind") if column in rows]
    if "step" in rows:
        rows["step"] = rows.step.map("{:,}".format)
    return pd.DataFrame({
        **{"norm" if column == "kind" else column: rows[column] for column in about}, "sites": rows.sites.map(str),
        "before": _spread(rows.before_deg, rows.before_std_deg), "after": _spread(rows.after_deg, rows.after_std_deg),
        "energy along 1": _known(100 * rows.energy_share, "{:.3f}%"),
        "null percentile": _known(rows.null_percentile, "{:.0f}"),
    })  # fmt: skip


def _sites(table: AngleTable) -> pd.DataFrame:
    uniform = table.frame[table.frame.direction == "uniform"]
    keys = ["model", "site"]
    rows, post = (uniform[uniform.phase == phase].set_index(keys) for phase in ("pre", "post"))
    turned = uniform[uniform.phase == "standardized"].set_index(keys).rotation_deg
    found = pd.DataFrame({
        "role": [ROLE_LABELS.get(role, role) for role in rows.role.astype(str)], "layer": rows.layer,
        "before": _spread(rows.mean_deg, rows.std_deg), "after": _spread(post.mean_deg, post.std_deg),
        "energy along 1": _known(100 * rows.energy_share, "{:.3f}%"),
        "null percentile": _known(rows.null_percentile, "{:.0f}"),
        "z": _known(rows.null_z, "{:.2f}"), "mean norm": rows.mean_norm.map(length),
        "rotation": turned.map("{:.2f}°".format),
    }, index=rows.index)  # fmt: skip
    return found.reset_index()


def _spread(mean: pd.Series, deviation: pd.Series) -> pd.Series:
    return mean.map("{:.2f}".format) + deviation.map(" ± {:.2f}°".format)


def _known(values: pd.Series, form: str) -> pd.Series:
    return values.map(form.format).where(values.notna(), "-")


def _figure(path: Path) -> str:
    kind, _, model = path.stem.partition("-")
    data = base64.b64encode(path.read_bytes()).decode()
    shown = html.escape(f"{kind} {model}".strip())
    caption = CAPTIONS.get(kind, "")
    return (
        f'<figure><img alt="{shown}" src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _about(about: Mapping[str, Any]) -> str:
    rows = [
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(f'{value:,}' if type(value) is int else str(value))}</dd>"
        for name, value in about.items() if name not in LEFT_OUT and value is not None
    ]  # fmt: skip
    return f"<dl>{''.join(rows)}</dl>"
