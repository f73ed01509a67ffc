"""What scale-and-shift cannot give back: against a fit of every component, and where the answer is known."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from analyses import irreversibility
from normgeo import find_sites, load_model, load_tokenizer, load_tokens, observe
from normgeo.errors import DataError


class Kept:
    """The hidden states before one norm."""

    def __init__(self, index):
        self.index, self.parts = index, []

    def begin(self, batch): ...

    def end(self): ...

    def take(self, site, phase, hidden):
        if (site, phase) == (self.index, "pre"):
            self.parts.append(hidden.double().numpy().copy())


def lost(x, y):
    """The share of x's variance that a least-squares line through each component leaves."""
    left = 0.0
    for i in range(x.shape[1]):
        design = np.stack([y[:, i], np.ones(len(y))], 1)
        left += ((design @ np.linalg.lstsq(design, x[:, i], rcond=None)[0] - x[:, i]) ** 2).sum()
    return left / ((x - x.mean(0)) ** 2).sum()


@pytest.fixture(scope="module")
def frame():
    return irreversibility.compute(n_tokens=1500)


@pytest.mark.parametrize(
    ("name", "index"), [("embedded-layernorm", 0), ("embedded-layernorm", 7), ("embedded-rmsnorm", 12)]
)
def test_what_is_lost_is_what_a_fit_of_every_component_leaves(frame, name, index):
    model = load_model(name)
    sites, kept = find_sites(model), Kept(index)
    observe(model, load_tokens("sample", load_tokenizer(name), 256), [kept], sites=sites, n_tokens=1500)
    x = np.concatenate(kept.parts)
    left = x - x.mean(1, keepdims=True)
    rows = frame[(frame.model == name) & (frame.site == sites[index].key)].set_index("standardization")
    for kind, part in (("layernorm", left), ("rmsnorm", x)):
        expected = lost(x, part / np.sqrt((part**2).mean(1, keepdims=True)))
        assert rows.lost_share[kind] == pytest.approx(expected, rel=1e-9)
    assert set(rows.n_tokens) == {len(x)} == {1500}


def test_mean_subtraction_loses_more_and_both_lose_something(frame):
    assert len(frame) == 2 * 13 * 2
    wide = frame.pivot_table(index=["model", "site"], columns="standardization", values="lost_share")
    assert (wide.layernorm > wide.rmsnorm).all()
    assert (wide.rmsnorm > 0.001).all()


def test_hidden_states_that_a_norm_only_scales_lose_nothing(tiny):
    sites = find_sites(tiny("gpt2"))[:1]
    x = torch.randn(50, sites[0].d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    on_sphere = 3 * torch.nn.functional.normalize(x, dim=1)
    centered = 3 * torch.nn.functional.normalize(x - x.mean(1, keepdim=True), dim=1)
    for states, kinds in ((on_sphere, ["rmsnorm"]), (centered, ["rmsnorm", "layernorm"])):
        moments = irreversibility._Moments(sites)
        moments.take(0, "pre", states[:20])
        moments.take(0, "post", 7 * states)
        moments.take(0, "pre", torch.cat([states[20:], 0 * states[:0]]))
        found = [kind for kind in irreversibility.NORMS if abs(moments.lost(0, kind)) < 1e-12]
        assert sorted(found) == sorted(kinds)


def exactly_lost(x, centered):
    """The same share with more digits."""
    x = x.numpy().astype(np.longdouble)
    y = x - x.mean(1, keepdims=True) if centered else x
    length = np.sqrt((y**2).sum(1, keepdims=True))
    y = np.divide(y, length, out=np.zeros_like(y), where=length > 0)
    x, y = x - x.mean(0), y - y.mean(0)
    slope = (x * y).sum(0) / np.maximum((y * y).sum(0), np.finfo(np.longdouble).tiny)
    return float(((x - slope * y) ** 2).sum() / (x**2).sum())


@pytest.mark.parametrize(("scale", "constant"), [(1, 1e4), (1, 1e8), (1e-14, 0), (1e-30, 0), (1e30, 0)])
def test_what_is_lost_keeps_its_digits(tiny, scale, constant):
    """A massive activation hardly varies, tiny vectors are standardized like any others, a zero vector to zero."""
    moments = irreversibility._Moments(sites := find_sites(tiny("gpt2"))[:1])
    x = scale * torch.randn(90, sites[0].d, generator=torch.Generator().manual_seed(0))
    x[7] = 0
    if constant:
        x[:, 3] = constant
    for batch in (x[:20], x[20:21], x[21:]):
        moments.take(0, "pre", batch)
    for kind in irreversibility.NORMS:
        found = moments.lost(0, kind)
        assert found >= 0
        assert found == pytest.approx(exactly_lost(x, kind == "layernorm"), rel=1e-7, abs=1e-14)


def test_tokens_that_are_not_finite_are_left_out(ids):
    model, some = zoo.tiny("gpt2"), np.where(ids == 5, 6, ids)
    whole = irreversibility.compute([model], some[1:])
    some[0] = 5
    model.get_input_embeddings().weight.data[5] = torch.inf
    pd.testing.assert_frame_equal(irreversibility.compute([model], some), whole)
    assert set(whole.n_tokens) == {some[1:].size}


def test_of_fewer_than_two_hidden_states_there_is_no_variance(ids):
    model = zoo.tiny("gpt2")
    with pytest.raises(DataError, match=r"takes 2 finite hidden states, received 1 before \S+ of \w+; give"):
        irreversibility.compute([model], ids, n_tokens=1)
    model.get_input_embeddings().weight.data[:] = torch.nan
    with pytest.raises(DataError, match="received 0 before"):
        irreversibility.compute([model], ids)


def test_every_share_is_drawn(frame):
    figure = irreversibility.plot(frame)
    for axes, model in zip(figure.axes, frame.model.unique(), strict=True):
        for line in axes.lines[1:]:
            kind = {label: kind for kind, label in irreversibility.NORMS.items()}[line.get_label()]
            rows = frame[(frame.model == model) & (frame.standardization == kind)]
            assert line.get_ydata() == pytest.approx(100 * rows.lost_share.to_numpy())
