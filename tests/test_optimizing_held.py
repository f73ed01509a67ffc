"""Optimized models of which somebody keeps hidden states: what is kept is not written over."""

import copy

import pytest
import torch
from blocks import Block, D
from torch import nn
from zoo import perturb

from normgeo import convert, optimize, wrap
from normgeo.conversion.optimize import fused_norms
from normgeo.kernels import norm_ops

IDS = torch.randint(48, (2, 30), generator=torch.Generator().manual_seed(0))


class Stashing(Block):
    """Its own middle is kept on it."""

    def forward(self, x):
        x = x + self.mixed(x)
        self.middle = x
        return x + self.mlp(self.norm2(x))


class Viewed(Block):
    """A view of its middle is kept, and read where texts are long."""

    def forward(self, x):
        x = x + self.mixed(x)
        last = x[:, -1:] if x.shape[1] > 20 else 0.0
        x = x + self.mlp(self.norm2(x))
        return x + last


class Model(nn.Module):
    def __init__(self, block, listed):
        super().__init__()
        self.tok, self.blocks = nn.Embedding(48, D), nn.ModuleList(block() for _ in range(3))
        self.final, self.head, self.listed = nn.LayerNorm(D), nn.Linear(D, 48), listed

    def forward(self, ids, layers=None, skip=False):
        x = self.tok(ids)
        states, early = [x] if self.listed else [], None
        for place, block in enumerate(self.blocks):
            x = block(x)
            states += [x] * self.listed
            early = x if skip and not place else early
        if layers is not None:
            x = torch.stack([states[k] for k in layers]).mean(0)
        return self.head(self.final(x if early is None else x + early))


def built(block=Block, listed=False):
    torch.manual_seed(0)
    model = perturb(Model(block, listed))
    return convert(wrap(model)).model, optimize(convert(wrap(copy.deepcopy(model))).model)


def agree(converted, optimized, **options):
    with torch.no_grad():
        expected, found = (model(IDS, **options)["logits"] for model in (converted, optimized))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layers": [1, 3]}])
def test_a_list_of_hidden_states_stays_what_it_was(options):
    """An option that the verified pass does not have reads what is kept in every pass."""
    converted, optimized = built(listed=True)
    agree(converted, optimized, **options)


def test_what_is_kept_for_an_option_alone_stays_what_it_was(monkeypatch):
    """Without the option all is fused; with it what is kept is added to elsewhere."""
    converted, optimized = built()
    calls, add_norm = [], norm_ops.add_norm_
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: calls.append(0) or add_norm(*a))
    agree(converted, optimized)
    fused = len(calls)
    assert fused == len(fused_norms(optimized)) - 1  # into the embedding's own memory nothing is added
    agree(converted, optimized, skip=True)
    assert len(calls) - fused == fused - 1


def test_what_a_block_keeps_of_itself_stays_what_it_was():
    converted, optimized = built(Stashing)
    agree(converted, optimized)
    for one, other in zip(converted.module.blocks, optimized.module.blocks, strict=True):
        torch.testing.assert_close(other.middle, one.middle, rtol=1e-4, atol=1e-5)


def test_views_that_are_read_later_stay_what_they_were():
    """On the short inputs that it was verified on there are none."""
    converted, optimized = built(Viewed)
    agree(converted, optimized)
