"""A norm that is called several times in a pass, not always on hidden states: which of its calls is measured."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from oracle import degrees
from torch import nn
from torch.nn import functional

from normgeo import convert, find_sites, measure_angles, observe, wrap
from normgeo.errors import ConversionError, ModelError

D, VOCABULARY = 32, 40
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (4, 8))


class Tables(nn.Module):
    """What is normalized first is a table of weights, of as many rows as there are tokens."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(VOCABULARY, D), norm(), nn.Linear(D, 9)
        self.table, self.seen = nn.Parameter(torch.randn(IDS.size, D) + 5), None

    def forward(self, ids):
        x = self.embedding(ids) + self.norm(self.table).mean()
        self.seen = x.detach()
        return self.head(self.norm(x))


class Sums(Tables):
    """What is normalized first is a sum that the norm makes itself."""

    def forward(self, ids):
        x = self.embedding(ids)
        x = self.norm(x, x.roll(1, 0))
        self.seen = x = x + 3
        return self.head(self.norm(x))


class Adding(nn.LayerNorm):
    def forward(self, x, residual=None):
        return super().forward(x if residual is None else x + residual)


NORMS = {
    "module": (Tables, lambda: nn.LayerNorm(D), ["module.norm@1"]),
    "function": (Tables, lambda: lambda x: functional.layer_norm(x, (D,)), ["module.layer_norm()@1"]),
    "sum": (Sums, lambda: Adding(D), ["module.norm.layer_norm()", "module.norm@1"]),
}


@pytest.fixture(params=list(NORMS))
def model(request):
    cls, norm, keys = NORMS[request.param]
    made = wrap(cls(norm).eval(), "embedding")
    return made, keys


@torch.no_grad()
def test_the_call_on_hidden_states_is_measured(model):
    model, keys = model
    assert [site.key for site in find_sites(model)] == keys
    frame = measure_angles(model, IDS, null=0, batch=4, progress=False, name="m").frame
    frame = frame[frame.site == keys[-1]]
    row = frame[(frame.phase == "pre") & (frame.direction == "uniform")]
    expected = degrees(model.module.seen.double().flatten(0, 1).numpy(), np.ones(D)).mean()
    assert float(row.mean_deg.iloc[0]) == pytest.approx(float(expected), abs=1e-4)


class Sizes:
    def __init__(self):
        self.found = []

    def begin(self, batch): ...

    def take(self, site, phase, hidden):
        self.found.append((phase, len(hidden)))

    def end(self): ...


def test_sinks_are_given_hidden_states_alone(model):
    sink = Sizes()
    observe(model[0], IDS[:1, :5], [sink])
    assert sink.found == [("pre", 5), ("post", 5)] * len(model[1])


class Sometimes(nn.Module):
    """What is normalized first is so in long texts alone."""

    def __init__(self, norm):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(VOCABULARY, D), norm(), nn.Linear(D, 9)

    def forward(self, ids):
        x = self.embedding(ids)
        if ids.shape[1] > 7:
            x = self.norm(x + 3)
        return self.head(self.norm(x.cumsum(1)))


@pytest.mark.parametrize("how", ["module", "function"])
def test_another_number_of_calls_is_refused(how):
    model = wrap(Sometimes(NORMS[how][1]).eval(), "embedding")
    (site,) = find_sites(model)
    for measure in (
        lambda: measure_angles(model, IDS, null=0, progress=False), lambda: observe(model, IDS, [Sizes()]),
        lambda: observe(model, IDS, [Sizes()], sites=[site]),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=rf"calls {re.escape(site.name)} 2 times in this pass, and 1 times where"):
            measure()
    assert observe(model, IDS[:, :6], [Sizes()], sites=[site]) == 24
    both = find_sites(model, {"input_ids": torch.from_numpy(IDS)})
    assert [site.call for site in both] == [0, 1]
    assert observe(model, IDS, [Sizes()], sites=both) == 32


class Again(transformers.GPT2LMHeadModel):
    """Its head normalizes what the model without it gives once more."""

    def forward(self, input_ids=None, **_):
        return {"logits": self.lm_head(self.transformer.ln_f(self.transformer(input_ids)[0] + 3))}


def test_a_norm_that_a_head_calls_again_is_measured_there_too():
    config = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": D, "n_layer": 1, "n_head": 2}
    model = Again(transformers.GPT2Config(**config)).eval()
    frame = measure_angles(model, IDS, null=0, sites="*ln_f*", name="m", progress=False).frame
    rows = frame[(frame.phase == "pre") & (frame.direction == "uniform")]
    assert [*rows.site] == ["transformer.ln_f", "transformer.ln_f@1"]
    base = measure_angles(model.transformer, IDS, null=0, sites="ln_f", name="m", progress=False).frame
    assert rows.mean_deg.iloc[0] == base[(base.phase == "pre") & (base.direction == "uniform")].mean_deg.iloc[0]
    assert rows.mean_deg.iloc[1] < 60 < rows.mean_deg.iloc[0]


def test_sites_that_do_not_say_how_many_calls_there_were_are_taken():
    """As those of older stores."""
    model = wrap(Sums(lambda: Adding(D)).eval(), "embedding")
    site = find_sites(model)[-1]
    old = replace(site, calls=0)
    found = [measure_angles(model, IDS, null=0, sites=[s], name="m", progress=False).frame for s in (site, old)]
    assert found[0].equals(found[1])


def test_conversion_looks_at_that_call():
    with pytest.raises(ConversionError, match=r"module\.norm@1: the mean of its input \(1"):
        convert(wrap(Tables(lambda: nn.LayerNorm(D)).eval(), "embedding"))
