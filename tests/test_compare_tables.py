"""What a comparison says in its table, and of itself."""

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
