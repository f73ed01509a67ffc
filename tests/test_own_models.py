"""Sites of models that somebody wrote: shared norms, attention by any name, and an eps that nobody set."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Lfm2Config, PreTrainedModel

from normgeo.sites import find_sites

D = 16


class Inline(nn.Module):
    """A layer whose attention is no module of its own."""

    def __init__(self, names):
        super().__init__()
        self.first, self.second, self.names = nn.LayerNorm(D), nn.LayerNorm(D), names
        for name in names:
            self.add_module(name, nn.Linear(D, D))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x, *_):
        y = self.first(x)
        q, k, v = (getattr(self, name)(y) for name in self.names[:3])
        x = x + getattr(self, self.names[3])(scaled_dot_product_attention(q, k, v))
        return x + self.down(self.up(self.second(x)).relu())


class Fused(nn.Module):
    """torch's attention."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(scaled_dot_product_attention(*self.a(x).chunk(3, -1)))


class Scores(nn.Module):
    """Attention whose core, without weights, is a module inside."""

    class Core(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    def __init__(self):
        super().__init__()
        self.a, self.b, self.core = nn.Linear(D, 3 * D), nn.Linear(D, D), self.Core()

    def forward(self, x):
        return self.b(self.core(*self.a(x).chunk(3, -1)))


class Torchs(nn.MultiheadAttention):
    """torch's own module, which multiplies with its matrices itself."""

    def __init__(self):
        super().__init__(D, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x)[0]


class Experts(nn.Module):
    """An MLP of six experts, as many as there are tokens: its softmax is square too."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 6), nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x):
        weights = self.router(x.flatten(0, 1)).softmax(-1)
        return torch.stack([e(x.flatten(0, 1)) for e in self.experts], -1).mul(weights[:, None]).sum(-1).view_as(x)


class Layer(nn.Module):
    """A layer of two branches; either norm may be another's."""

    def __init__(self, mixing, first=None, second=None):
        super().__init__()
        self.first, self.second = first or nn.LayerNorm(D), second or nn.LayerNorm(D)
        self.tokens, self.channels = mixing(), Experts()

    def forward(self, x, *_):
        x = x + self.tokens(self.first(x))
        return x + self.channels(self.second(x))


class Lent(Layer):
    """A layer that is given its first norm when it is called."""

    def __init__(self):
        super().__init__(Fused)
        del self.first

    def forward(self, x, norm):
        x = x + self.tokens(norm(x))
        return x + self.channels(self.second(x))


class Sums(nn.Module):
    """A layer with two of torch's attentions and norms behind its sums, as in DETR's decoder."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.channels = Torchs(), Torchs(), Experts()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))

    def forward(self, x, *_):
        x = self.norms[0](x + self.one(x))
        x = self.norms[1](x + self.other(x))
        return self.norms[2](x + self.channels(x))


class Own(PreTrainedModel):
    config_class = Lfm2Config

    def __init__(self, *layers, norm=None):
        super().__init__(Lfm2Config(vocab_size=64, hidden_size=D, num_hidden_layers=2, num_attention_heads=2))
        self.embedding, self.norm = nn.Embedding(64, D), norm or nn.LayerNorm(D)
        self.layers = nn.ModuleList(layers)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, **_):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, self.norm)
        return self.norm(x)


def places(model):
    return [(site.role, site.layer) for site in find_sites(model, {"input_ids": torch.arange(6)[None]}, qk=True)]


SEQUENTIAL = [("attention", 0), ("mlp", 0), ("attention", 1), ("mlp", 1), ("final", 2)]


@pytest.mark.parametrize(
    "names",
    [
        ("q", "k", "v", "o"), ("wq", "wk", "wv", "wo"), ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("query", "key", "value", "o_proj"),
    ],
    ids=lambda names: names[0],
)  # fmt: skip
def test_an_attention_that_is_no_module_of_its_own(names):
    assert places(Own(Inline(names), Inline(names))) == SEQUENTIAL


@pytest.mark.parametrize("mixing", [Fused, Scores, Torchs])
def test_an_attention_is_known_by_what_it_does(mixing):
    assert places(Own(Layer(mixing), Layer(mixing))) == SEQUENTIAL


def test_norms_behind_attentions_are_not_within_one():
    of_one = ["post_attention", "post_attention", "post_mlp"]
    assert places(Own(Sums(), Sums())) == [(role, layer) for layer in (0, 1) for role in of_one] + [("final", 2)]


def test_a_softmax_over_experts_is_no_attention():
    assert places(Own(Layer(Experts), Layer(Experts))) == [
        ("mlp", 0), ("mlp", 0), ("mlp", 1), ("mlp", 1), ("final", 2)
    ]  # fmt: skip


def test_a_norm_in_every_layer_and_behind_them_has_its_place_in_each():
    norm = nn.LayerNorm(D)
    assert places(Own(Layer(Fused, norm, norm), Layer(Fused, norm, norm), norm=norm)) == SEQUENTIAL


def test_a_norm_that_layers_share_is_not_theirs_that_it_is_named_by():
    norm = nn.LayerNorm(D)
    assert places(Own(Layer(Fused, norm), Layer(Fused, norm))) == SEQUENTIAL
    assert places(Own(Layer(Fused, None, norm), Layer(Fused, None, norm))) == SEQUENTIAL


def test_a_norm_of_the_models_that_layers_are_given_is_in_them():
    assert places(Own(Lent(), Lent())) == SEQUENTIAL


def test_branches_that_layers_share_are_attention_and_mlp_in_each():
    first = Layer(Fused)
    second = Layer(Fused)
    second.tokens, second.channels = first.tokens, first.channels
    assert places(Own(first, second)) == SEQUENTIAL


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.float64, 2.0**-52), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-23), (torch.float16, 2.0**-23)],
)
def test_an_eps_that_nobody_set_is_that_of_the_arithmetic(dtype, eps):
    """torch's RMSNorm takes half precision to float32."""
    model = Own(Layer(Fused), norm=nn.RMSNorm(D)).to(dtype)
    final = find_sites(model, {"input_ids": torch.arange(6)[None]})[-1]
    assert (final.kind, final.eps) == ("rmsnorm", eps)
    c = 2.0**-11  # a row whose mean square is as small as the eps of float32
    z = model.norm(torch.full((1, D), c, dtype=dtype)).double()
    torch.testing.assert_close(z, torch.full_like(z, c / math.sqrt(c * c + eps)), rtol=2.0**-7, atol=0)
