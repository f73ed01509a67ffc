"""Attention to what a layer is given beside its stream, by whatever name, and to what it makes of the stream itself."""

import pytest
import torch
from test_own_models import SEQUENTIAL, D, Layer, Own, Torchs, places
from torch import nn


class Decoder(nn.TransformerDecoderLayer):
    """Whose second attention is called as any attention might be."""

    def __init__(self):
        super().__init__(D, 2, 8, norm_first=True, batch_first=True)

    def forward(self, x, memory):
        return super().forward(x, memory)


class WithMemory(nn.Module):
    """A layer that hands on what comes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Decoder()])

    def forward(self, x, memory):
        return self.inner[0](x, memory)


class Outside(Own):
    def forward(self, input_ids, **_):
        x = self.embedding(input_ids)
        memory = x[:, :3] + 1
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


CROSS = [("attention", 0), ("cross_attention", 0), ("mlp", 0), ("attention", 1), ("cross_attention", 1), ("mlp", 1)]


@pytest.mark.parametrize("layer", [Decoder, WithMemory])
def test_attention_to_others_is_cross_attention(layer):
    assert places(Outside(layer(), layer()))[:6] == CROSS


@pytest.mark.parametrize(
    ("keys", "norms"),
    [
        ("y + p, y", 0), ("y.clone(), y", 0), ("cat([p, y], 1), cat([p, y], 1)", 0),
        ("norm(y, (D,)), norm(y, (D,))", 2), ("y, y + p", 0),
    ],
)  # fmt: skip
def test_attention_to_what_is_made_of_oneself_is_not(keys, norms):
    class Made(Torchs):
        def forward(self, y):
            names = {"y": y, "p": torch.ones(1, 1, D), "cat": torch.cat, "norm": nn.functional.layer_norm, "D": D}
            return nn.MultiheadAttention.forward(self, y, *eval(keys, names))[0]

    expected = [place for place in SEQUENTIAL for _ in range(1 + norms * (place[0] == "attention"))]
    assert places(Own(Layer(Made), Layer(Made))) == expected
