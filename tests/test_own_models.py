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


class Wrapped(nn.Module):
    """Attention in a module that does nothing else."""

    def __init__(self, mixing=Fused):
        super().__init__()
        self.inner = mixing()

    def forward(self, x):
        return self.inner(x)


class Raw(nn.Module):
    """Attention that multiplies with matrices of its own, and has a module beside them."""

    def __init__(self):
        super().__init__()
        self.w, self.drop = nn.Parameter(torch.randn(4, D, D)), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v, _ = (x @ w for w in self.w)
        return self.drop(scaled_dot_product_attention(q, k, v)) @ self.w[3]


class Normed(nn.Module):
    """Attention with norms of queries and keys, and of what it gives."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.a, self.b, self.c = (nn.LayerNorm(D) for _ in range(3))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(self.c(scaled_dot_product_attention(self.a(q), self.b(k), v)) * self.gate(x).sigmoid())


class Routed(Experts):
    """The same, whose router takes contexts apart."""

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return torch.stack([e(x) for e in self.experts], -1).mul(weights[:, :, None]).sum(-1)


class Falling(nn.Module):
    """An attention that is tried first, and fails."""

    class Fast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, x):
            self.a(x)
            raise RuntimeError("not here")

    def __init__(self):
        super().__init__()
        self.fast, self.slow = self.Fast(), Fused()

    def forward(self, x):
        try:
            return self.fast(x)
        except RuntimeError:
            return self.slow(x)


class Listed(nn.Module):
    """A branch with its norm, as an element of a list, and what is added to is added outside."""

    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), inner
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.qn, self.kn = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, *_):
        y = self.norm(x)
        if self.inner is not None:
            return x + self.inner(y)
        return x + self.o(scaled_dot_product_attention(self.qn(self.q(y)), self.kn(self.k(y)), self.v(y)))


class Behind(nn.Module):
    """A layer whose attention's output is normalized, and the attention's input not."""

    def __init__(self, mixing):
        super().__init__()
        self.first, self.second, self.tokens, self.channels = nn.LayerNorm(D), nn.LayerNorm(D), mixing(), Experts()

    def forward(self, x, *_):
        x = self.first(x + self.tokens(x))
        return self.second(x + self.channels(x))


class Cast(Layer):
    """A layer whose norms are computed in float32."""

    def forward(self, x, *_):
        x = x + self.tokens(self.first(x.float()).to(x.dtype))
        return x + self.channels(self.second(x.float()).to(x.dtype))


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
    assert places(Own(*map(torch.compile, (Inline(names), Inline(names))))) == SEQUENTIAL  # wrapped one by one


@pytest.mark.parametrize("mixing", [Fused, Scores, Torchs, Wrapped, lambda: Wrapped(Torchs), Raw, Falling])
def test_an_attention_is_known_by_what_it_does(mixing):
    assert places(Own(Layer(mixing), Layer(mixing))) == SEQUENTIAL


def test_norms_behind_attentions_are_not_within_one():
    of_one = ["post_attention", "post_attention", "post_mlp"]
    assert places(Own(Sums(), Sums())) == [(role, layer) for layer in (0, 1) for role in of_one] + [("final", 2)]


def test_norms_on_queries_are_and_one_on_what_attention_gives_is_not():
    roles = [role for role, _ in places(Own(Layer(Normed)))]
    assert roles == ["attention", "qk", "qk", "inner", "mlp", "final"]


def test_an_element_of_a_list_may_be_the_attention():
    assert [role for role, _ in places(Own(Listed(None), Listed(Experts())))] == [
        "attention", "qk", "qk", "mlp", "final",
    ]  # fmt: skip


@pytest.mark.parametrize("mixing", [Fused, Torchs, Raw, Wrapped])
def test_norms_behind_sums_are_of_what_is_before_them(mixing):
    assert [role for role, _ in places(Own(Behind(mixing), Behind(mixing)))] == [
        "post_attention", "post_mlp", "post_attention", "post_mlp", "final",
    ]  # fmt: skip


def test_a_cast_hands_a_norm_on():
    model = Own(Cast(Fused), Cast(Fused)).to(torch.bfloat16)
    for layer in model.layers:
        layer.first.float()
        layer.second.float()
    assert places(model) == SEQUENTIAL


def test_layers_that_run_again_are_counted_as_they_run():
    layer = Layer(Fused)
    assert places(Own(layer, layer, layer)) == [(role, i) for i in range(3) for role in ("attention", "mlp")] + [
        ("final", 3)
    ]


def test_a_layers_norm_behind_the_layers_is_final_and_before_them_an_embeddings():
    norm = nn.LayerNorm(D)
    model = Own(Layer(Fused, norm, norm), Layer(Fused, norm, norm))
    model.norm = norm  # registered behind the layers, by which it is named
    assert places(model) == SEQUENTIAL
    plain, embedding = Own(Layer(Fused), Layer(Fused)), nn.Embedding(64, D)
    embedding.register_forward_hook(lambda module, args, out: plain.layers[0].first(out))
    plain.embedding = embedding
    assert places(plain) == [("embedding", 0), *SEQUENTIAL]


def test_a_norm_that_ends_a_sequence_of_layers_is_final():
    model = Own(norm=nn.Identity())
    model.layers = nn.Sequential(Layer(Fused), Layer(Fused), nn.LayerNorm(D))
    model.forward = lambda input_ids, **_: model.layers(model.embedding(input_ids))
    assert places(model) == SEQUENTIAL


def test_layers_may_be_in_a_dictionary():
    model = Own()
    model.layers = layers = nn.ModuleDict({"0": Layer(Fused), "1": Layer(Fused)})
    model.forward = lambda input_ids, **_: model.norm(layers["1"](layers["0"](model.embedding(input_ids))))
    assert places(model) == SEQUENTIAL


def test_a_scripted_module_is_no_obstacle():
    """It takes no hooks, so that what is in it is not seen."""
    model = Own(Layer(Fused))
    model.head = torch.jit.script(nn.Linear(D, D))
    inner = model.forward
    model.forward = lambda **inputs: model.head(inner(**inputs))
    assert places(model) == [("attention", 0), ("mlp", 0), ("final", 1)]


def test_steps_are_no_eps():
    norm = nn.RMSNorm(D, 1e-3)
    norm.decay_steps = 1000.0
    assert find_sites(Own(Layer(Fused), norm=norm))[-1].eps == 1e-3


def test_an_eps_of_the_dtypes_own_rounding_is_measured():
    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, True) + torch.finfo(x.dtype).eps) * self.weight

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = Own(Layer(Fused), norm=Rounding()).to(dtype)
        assert find_sites(model, {"input_ids": torch.arange(6)[None]})[-1].eps == torch.finfo(dtype).eps


@pytest.mark.parametrize("experts", [Experts, Routed])
def test_a_softmax_over_experts_is_no_attention(experts):
    assert places(Own(Layer(experts), Layer(experts))) == [
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
