"""Norms in the code of a module that cannot be measured: they are said to be there, and nothing else is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from normgeo import find_sites, wrap

D = 32


def mean_square(x):
    return x.square().mean(-1, keepdim=True)


WRITTEN = {
    "layer_norm": lambda x, gain: functional.layer_norm(x, (D,), 1 + gain),
    "layer_norm, shifted": lambda x, gain: functional.layer_norm(x, (D,), bias=2 * gain),
    "native_layer_norm": lambda x, gain: torch.native_layer_norm(x, (D,), gain, None, 1e-6)[0],
    "native_layer_norm of torch's own": lambda x, gain: torch.ops.aten.native_layer_norm(x, (D,), gain, None, 1e-6)[0],
    "rms_norm": lambda x, gain: torch.rms_norm(x, (D,), 1 + gain, 1e-6),
    "rsqrt": lambda x, gain: gain * (x * torch.rsqrt(mean_square(x) + 1e-6)),
    "sqrt": lambda x, gain: x / torch.sqrt(mean_square(x)) * gain,
    "1 / sqrt": lambda x, gain: x * (1 / mean_square(x).sqrt()),
    "** -0.5": lambda x, gain: x * mean_square(x) ** -0.5,
    "std": lambda x, gain: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * gain,
    "norm": lambda x, gain: x / x.norm(dim=-1, keepdim=True),
    "flat": lambda x, gain: (x.flatten(0, 1) * mean_square(x.flatten(0, 1)).rsqrt()).view_as(x),
    "normalize": lambda x, gain: functional.normalize(x, dim=-1) * gain,
    "group_norm": lambda x, gain: functional.group_norm(x.flatten(0, 1), 1).view_as(x),
}


def uneven(x):
    return x * torch.logspace(0, 3, x.shape[-2])[:, None]


OTHERS = {
    "a gate": lambda x, gain: x * torch.rsqrt(1 + x[..., :1].square()),
    "a scale": lambda x, gain: x * 3 + gain,
    "a softmax": lambda x, gain: x.softmax(-1) * gain,
    "heads": lambda x, gain: functional.normalize(x.unflatten(-1, (4, -1)), dim=-1).flatten(2),
    "quantized": lambda x, gain: uneven(x) / uneven(x).abs().amax(-1, keepdim=True),
    "quantized from the least": lambda x, gain: uneven(x) / (uneven(x).amax(-1, True) - uneven(x).amin(-1, True)),
    "what was level": lambda x, gain: functional.one_hot(x.argmax(-1), D) * x.new_tensor(2.0),
}


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.gain, self.up, self.function = nn.Parameter(torch.ones(D)), nn.Linear(D, D), function

    def forward(self, x):
        return x + self.up(self.function(x, self.gain))


class Matrices(nn.Module):
    """A block without a module inside."""

    def __init__(self, function):
        super().__init__()
        self.gain, self.matrix, self.function = nn.Parameter(torch.ones(D)), nn.Parameter(torch.randn(D, D)), function

    def forward(self, x):
        return x + self.function(x, self.gain) @ self.matrix


class Own(nn.Module):
    """A norm that is a module, written out."""

    def forward(self, x):
        return x * torch.rsqrt(mean_square(x) + 1e-6)


def model(*layers, norm=nn.LayerNorm):
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Embedding(96, D), *layers, norm(D)).eval())


@pytest.mark.parametrize("block", [Block, Matrices])
@pytest.mark.parametrize("how", list(WRITTEN))
def test_what_cannot_be_measured_is_said(how, block):
    made = model(block(WRITTEN[how]), block(WRITTEN[how]))
    with pytest.warns(UserWarning, match=r"to normalize in the code of module\.1, module\.2, which is not") as caught:
        assert [site.name for site in find_sites(made)] == ["module.3"]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("block", [Block, Matrices])
@pytest.mark.parametrize("how", list(OTHERS))
def test_what_is_no_norm_is_not_said_to_be_one(how, block):
    assert [site.name for site in find_sites(model(block(OTHERS[how])))] == ["module.2"]


class Rounded(nn.Linear):
    """It computes with activations of 8 bits a number."""

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / step).round() * step)


def test_what_is_quantized_and_back_behind_a_norm_is_not_said_to_be_one():
    """It is of one length again."""
    made = model(nn.LayerNorm(D), Rounded(D, D))
    assert [site.name for site in find_sites(made)] == ["module.1", "module.3"]


@pytest.mark.parametrize("how", ["rsqrt", "std"])
def test_a_norm_of_what_has_its_length_already_is_said(how):
    """As behind another norm: it changes little, but does not round."""
    made = model(nn.LayerNorm(D), Block(WRITTEN[how]))
    with torch.no_grad():
        made.module[1].weight += 0.1 * torch.randn(D)
    with pytest.warns(UserWarning, match=r"to normalize in the code of module\.2, which is not"):
        find_sites(made)


class Pooled(nn.Module):
    """One vector a text, of length one, as what CLIP gives."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return functional.normalize(self.up(self.norm(x).mean(1)), dim=-1)


def test_what_is_of_whole_texts_is_not_said():
    made = wrap(nn.Sequential(nn.Embedding(96, D), Pooled()).eval())
    assert [site.name for site in find_sites(made)] == ["module.1.norm"]


def test_norms_that_are_modules_are_not_said_to_be_none():
    made = model(*(nn.Sequential(Own(), nn.Linear(D, D)) for _ in range(2)), norm=nn.RMSNorm)
    assert [site.name for site in find_sites(made)] == ["module.1.0", "module.2.0", "module.3"]
