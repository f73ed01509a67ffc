"""The page of a run: everything is in it, nothing is fetched, and its numbers are the table's."""

import base64
import html
import json
import re

import pytest

from normgeo import AngleTable, measure_angles
from normgeo.angles.report import CAPTIONS, page
from normgeo.angles.runs import RunConfig, start_run, write_results

NAME = '<script>alert("1")</script> & $x$'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    table = start_run(RunConfig(tokens=3000, context=64, null=40), out, progress=False)
    return table, out


def rows_of(text):
    """The cells of every row of every table."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.DOTALL)
    return [[html.unescape(cell).strip() for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_every_figure_of_a_run_is_in_its_page_and_nothing_is_fetched(run):
    _, out = run
    text = (out / "report.html").read_text()
    shown = [base64.b64decode(data) for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)]
    assert shown == [path.read_bytes() for path in sorted((out / "figures").glob("*.svg"))]
    assert len(shown) == 5
    assert all(caption in text for caption in CAPTIONS.values())
    assert not re.search(r"<script|<link|<iframe|https?:|url\(|@import", text)


def test_every_number_of_a_site_is_the_tables(run):
    table, out = run
    uniform = table.frame[table.frame.direction == "uniform"].set_index(["model", "site", "phase"])
    rows = [row for row in rows_of((out / "report.html").read_text()) if len(row) == 11 and row[0] != "model"]
    assert len(rows) == 26
    for model, site, _, layer, before, after, energy, place, z, norm, turned in rows:
        pre, standardized, post = (uniform.loc[model, site, phase] for phase in ("pre", "standardized", "post"))
        assert int(layer) == pre.layer
        assert before == f"{pre.mean_deg:.2f} ± {pre.std_deg:.2f}°"
        assert after == f"{post.mean_deg:.2f} ± {post.std_deg:.2f}°"
        assert (float(energy[:-1]), int(place)) == pytest.approx(
            (100 * pre.energy_share, pre.null_percentile), abs=0.51
        )
        assert energy == f"{100 * pre.energy_share:.3f}%"
        assert float(z) == pytest.approx(pre.null_z, abs=0.0051)
        assert float(norm) == pytest.approx(pre.mean_norm, rel=1e-3)
        assert float(turned[:-1]) == pytest.approx(standardized.rotation_deg, abs=0.0051)


def test_a_page_has_the_verdict_the_summary_and_what_was_measured(run):
    table, out = run
    text = (out / "report.html").read_text()
    plain = html.unescape(re.sub(r"<[^>]*>", "", text))
    for line in (out / "verdict.md").read_text().splitlines():
        if line and not line.startswith(("|", "# Verdict")):
            assert line.replace("**", "").lstrip("#- ") in plain
    short = [row for row in rows_of(text) if len(row) == 8]
    assert [row[:4] for row in short[1:]] == table.summary()[["model", "role", "kind", "sites"]].astype(
        str
    ).values.tolist()
    for model in table.frame.model.unique():
        assert f"<dt>model</dt><dd>{model}</dd>" in text
    assert len(re.findall(r"<dt>weights_sha256</dt><dd>[0-9a-f]{64}</dd>", text)) == 2
    assert "<dt>n_tokens</dt><dd>3,000</dd>" in text
    assert "<dt>sites</dt>" not in text
    assert "Null percentile: the place of the mean angle before the norm among those of random directions" in plain
    on_paper = text.partition("@media print {")[2]  # where no table may be cut off
    assert "size: landscape" in on_paper and "white-space: normal" in on_paper  # noqa: PT018


def test_names_are_text_in_a_page(tiny, ids, tmp_path):
    table = measure_angles(tiny("gpt2"), ids, null=0, name=NAME, progress=False)
    (tmp_path / "figures").mkdir()
    text = page(table, table.verdict(), tmp_path / "figures", [{"model": NAME, "data": "<b>"}])
    assert "<script" not in text
    assert "<b>" not in text
    assert f"<title>Angles of {html.escape(NAME)}</title>" in text
    assert html.unescape(text).count(NAME) > 10
    assert {row[7] for row in rows_of(text) if len(row) == 11} == {"null percentile", "-"}


@pytest.mark.parametrize(
    "name", ["gpt *best* `c` #", "__init__", "![i](x)", "~~a~~ <http://b>", r"a\*b &amp;", "_a", "rms_norm()@1"]
)
def test_names_are_no_markdown(run, name, tmp_path):
    """Neither a model's nor a site's."""
    table, _ = run
    frame = table.frame[table.frame.model == "embedded-layernorm"].assign(model=name)
    renamed = AngleTable(frame.assign(site=frame.site + name), table.sinks[:0])
    said = page(renamed, renamed.verdict(), tmp_path, []).partition("<h2>In short")[0]
    assert not re.search(r"<(em|code|s|img|a)\b", said)
    assert f"<h2>{html.escape(name)}</h2>" in said
    assert said.count(html.escape(name)) == 4  # with the title, the answer and the site of most energy


def test_a_page_is_the_same_every_time(run, tmp_path):
    _, out = run
    about = json.loads((out / "run.json").read_text())["models"].values()
    write_results(AngleTable.load(out), tmp_path / "again", about)
    assert (tmp_path / "again/report.html").read_bytes() == (out / "report.html").read_bytes()
