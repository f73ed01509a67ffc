"""Roles of norms in layers whose attention is no module of its own."""

import pytest
import torch
from torch import nn
from transformers import Lfm2Config, PreTrainedModel

from normgeo.sites import find_sites


class _InlineAttention(nn.Module):
    """A layer whose attention is no module of its own."""

    def __init__(self, d, names):
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(d, d))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        y = self.first(x)
        q, k, v = (getattr(self, name)(y) for name in self.names[:3])
        x = x + getattr(self, self.names[3])(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(self.up(self.second(x)).relu())


class _Inline(PreTrainedModel):
    config_class = Lfm2Config
    names = ("q", "k", "v", "o")

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_InlineAttention(16, self.names) for _ in range(2))

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, **_):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "names",
    [
        ("q", "k", "v", "o"), ("wq", "wk", "wv", "wo"), ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("query", "key", "value", "o_proj"),
    ],
    ids=lambda names: names[0],
)  # fmt: skip
def test_an_attention_that_is_no_module_of_its_own(names, monkeypatch):
    monkeypatch.setattr(_Inline, "names", names)
    model = _Inline(Lfm2Config(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    sites = find_sites(model, {"input_ids": torch.arange(6)[None]})
    assert [(site.role, site.layer) for site in sites] == [
        ("attention", 0), ("mlp", 0), ("attention", 1), ("mlp", 1),
    ]  # fmt: skip
