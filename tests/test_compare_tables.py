"""What a comparison says in its table, and of itself."""

import re

import pandas as pd
import pytest
import torch
import zoo
from test_compare import QUICK

from normgeo import compare
from normgeo.comparison import compare as comparison
from normgeo.tokens import TokenStream


@pytest.fixture(scope="module")
def models():
    return {"a": zoo.tiny("gpt2"), "b": zoo.tiny("gpt2", seed=1)}


def test_the_table_has_the_angle_before_the_norm_first(models, ids):
    result = compare(models, ids, **QUICK)
    before, after, table = result.by_site(phase="pre"), result.by_site(phase="post"), result.table()
    for site in before.index:
        assert f"{before.a[site]:.2f} → {after.a[site]:.2f}  " in table


def test_the_table_has_the_lower_quartile_of_times_first(models, ids, monkeypatch):
    slow = iter([2.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # the first warms up
    monkeypatch.setattr(comparison, "_timed", lambda model, _: 1.0 if model is models["a"] else next(slow))
    assert "4.00 of it (3.00 to 5.00)" in compare(models, ids, null=0, rounds=5, progress=False).table()


def test_a_comparison_says_what_it_was_measured_on(models, ids):
    tokens = TokenStream.from_array(ids)
    about = compare(models, tokens, batch=3, seed=5, n_tokens=100, **QUICK).about
    wanted = {
        "data_sha256": tokens.digest, "packing": tokens.packing, "context": 37, "tokens": 100, "batch": 3, "null": 4,
        "rounds": 0, "seed": 5, "torch": torch.__version__,
    }  # fmt: skip
    assert {name: about[name] for name in wanted} == wanted


@pytest.fixture(scope="module")
def alike():
    """Two models that agree on some tokens."""
    models = {name: zoo.tiny("gpt2") for name in "ab"}
    with torch.no_grad():
        for parameter in models["b"].parameters():
            parameter += 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return models


def test_the_table_has_the_metrics_in_their_units(alike, ids):
    result = compare(alike, ids, **QUICK)
    second = result.frame.iloc[1]
    assert 0.1 < second.top1 < 0.99
    lines = [[cell for cell in re.split(r"\s{2,}", line.strip()) if cell] for line in result.table(160).splitlines()]
    cells = {line[0]: line[-1] for line in lines if len(line) == 3}
    wanted = {
        "parameters": f"{second.parameters:,}", "memory": f"{second.bytes / 1e6:.2f} MB", "norms": "5 LayerNorm",
        "perplexity": f"{second.perplexity:.3f}", "minus the reference's": f"{second.perplexity_difference:+.3g}",
        "KL, mean (nats)": f"{second.kl_mean:.3g}", "KL, largest (nats)": f"{second.kl_max:.3g}",
        "top-1 agreement": f"{100 * second.top1:.2f}%", "logits error, rms": f"{100 * second.error_rms_rel:.3g}%",
        "logits error, largest": f"{second.error_max:.3g} ({100 * second.error_max_rel:.3g}%)",
    }  # fmt: skip
    assert {name: cells[name] for name in wanted} == wanted


def test_the_figure_has_the_angles_and_metrics_of_the_table(alike, ids, monkeypatch):
    monkeypatch.setattr(comparison, "_timed", lambda model, _: 1.0 if model is alike["a"] else 3.0)
    result = compare(alike, ids, null=4, rounds=3, progress=False)
    figure, frame = result.plot(), result.angles
    roles = ("attention", "mlp", "final")
    for axes, (phase, role) in zip(figure.axes, [(p, r) for p in ("pre", "post") for r in roles], strict=False):
        bars = {bar.get_label(): bar for bar in axes.containers}
        for model in "ab":
            here = frame[(frame.model == model) & (frame.role == role) & (frame.phase == phase)]
            rows, (points, _, (segments,)) = here[here.direction == "uniform"].sort_values("layer"), bars[model].lines
            assert points.get_ydata() == pytest.approx(rows.mean_deg.to_numpy()), (phase, role, model)
            assert [(s[1, 1] - s[0, 1]) / 2 for s in segments.get_segments()] == pytest.approx(rows.std_deg.tolist())
    metrics = {
        "perplexity": result.frame.perplexity, "mean KL to reference (nats)": result.frame.kl_mean,
        "top-1 agreement (%)": 100 * result.frame.top1, "time / reference": pd.Series([1.0, 3.0]),
    }  # fmt: skip
    panels = {axes.get_title(): [bar.get_width() for bar in axes.patches] for axes in figure.axes[6:]}
    assert panels.keys() == metrics.keys()
    for title, values in metrics.items():
        assert panels[title] == pytest.approx(values.fillna(0).tolist()), title
