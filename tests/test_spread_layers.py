"""Layers whose parts the model itself calls: they lie in lists beside each other, or each layer is a list of them."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from zoo import by_type

from normgeo import find_sites, wrap

D, LAYERS = 16, 3


def many(make, n=LAYERS):
    return nn.ModuleList([make() for _ in range(n)])


class Attention(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.qkv, self.o, self.activation = nn.Linear(D, 3 * D), nn.Linear(D, D), activation

    def forward(self, x):
        return self.activation(self.o(scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))))


class Around(nn.Module):
    """A norm whose gain is in a module around it."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(D, elementwise_affine=False), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return self.norm(x) * (self.gain + 1)


class Spread(nn.Module):
    """Norms of both kinds in one list each, the last of which is the final one's, and an activation that all share."""

    def __init__(self, post, whole, norm):
        super().__init__()
        shared = nn.Sequential(nn.GELU())
        self.embedding, self.post, self.whole = nn.Embedding(50, D), post, whole
        self.norms, self.others = many(norm, LAYERS + 1), many(norm)
        if whole:
            self.attns = many(lambda: Attention(shared))
            self.mlps = many(lambda: nn.Sequential(nn.Linear(D, 2 * D), shared, nn.Linear(2 * D, D)))
        else:
            self.q, self.k, self.v, self.o, self.up = (many(lambda: nn.Linear(D, D)) for _ in range(5))

    def attend(self, i, x):
        if self.whole:
            return self.attns[i](x)
        return self.o[i](scaled_dot_product_attention(self.q[i](x), self.k[i](x), self.v[i](x)))

    def widen(self, i, x):
        return self.mlps[i](x) if self.whole else gelu(self.up[i](x))

    def forward(self, ids):
        x = self.embedding(ids)
        for i in range(LAYERS):
            if self.post:
                x = self.norms[i](x + self.attend(i, x))
                x = self.others[i](x + self.widen(i, x))
            else:
                x = x + self.attend(i, self.norms[i](x))
                x = x + self.widen(i, self.others[i](x))
        return self.norms[LAYERS](x)


@pytest.mark.parametrize(
    ("norm", "inside"), [(lambda: nn.LayerNorm(D), ""), (Around, ".norm")], ids=["plain", "around"]
)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("post", [True, False])
def test_what_is_spread_over_lists_makes_layers(post, whole, norm, inside):
    sites = find_sites(wrap(Spread(post, whole, norm)))
    roles = {"norms": "attention", "others": "mlp"}
    expected = [
        (f"module.{name}.{i}{inside}", f"{'post_' * post}{role}", i)
        for i in range(LAYERS)
        for name, role in roles.items()
    ]
    assert [(site.name, site.role, site.layer) for site in sites][:-1] == expected
    assert (sites[-1].name, sites[-1].role, sites[-1].layer) == (f"module.norms.3{inside}", "final", LAYERS)
    assert len({site.stack for site in sites}) == 1


class Towers(nn.Module):
    """Two stacks that lie beside each other and run one after the other, with norms alone in the first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norms = nn.Embedding(50, D), many(lambda: nn.LayerNorm(D))
        self.layers = many(lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)))

    def forward(self, ids):
        x = self.embedding(ids)
        for norm in self.norms:
            x = x + norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_lists_that_run_one_after_the_other_are_stacks_of_their_own():
    assert {site.stack for site in find_sites(wrap(Towers()))} == {"module.norms", "module.layers"}


@pytest.mark.parametrize("name", ["xlm", "flaubert"])
def test_xlm(name):
    sites = find_sites(by_type(name))
    assert [(site.role, site.layer) for site in sites] == [
        ("embedding", 0), ("post_attention", 0), ("post_mlp", 0), ("post_attention", 1), ("post_mlp", 1)
    ]  # fmt: skip


def test_stages_are_no_layers():
    """GLPN's parts of a stage, one of which is a list of layers, run in turns as well."""
    sites = find_sites(by_type("glpn"))
    assert {"encoder.block", "encoder.patch_embeddings", "encoder.layer_norm"} <= {site.stack for site in sites}
    assert {"attention", "mlp"} <= {site.role for site in sites if site.stack == "encoder.block"}


class Adds(nn.Module):
    def forward(self, branch, stream):
        return branch + stream


class Parts(nn.Module):
    """Layers of one branch each, as [[its norm, the one behind it], branch, residual], or of two."""

    def __init__(self, norm, sandwich, pairs):
        super().__init__()
        self.sandwich, self.embedding, parts = sandwich, nn.Embedding(50, D), []
        for _ in range(2):
            for branch in (Attention(nn.GELU()), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))):
                parts.append(nn.ModuleList([nn.ModuleList([norm(), norm()]), branch, Adds()]))
        self.layers = nn.ModuleList([nn.ModuleList(parts[i : i + 2]) for i in (0, 2)] if pairs else parts)
        self.__dict__["parts"], self.final = parts, nn.LayerNorm(D)

    def forward(self, ids):
        x = self.embedding(ids)
        for (before, behind), branch, adds in self.parts:
            out = branch(before(x))
            x = adds(behind(out) if self.sandwich else out, x)
        return self.final(x)


@pytest.mark.parametrize("norm", [Around, lambda: nn.LayerNorm(D)], ids=["around", "plain"])
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_layer_may_be_a_list_of_parts(norm, sandwich, pairs):
    """As x-transformers has it: a norm in a module of its own was its own layer, and within a branch."""
    sites = find_sites(wrap(Parts(norm, sandwich, pairs).eval()))
    roles = [f"{where}{branch}" for branch in ("attention", "mlp") for where in ("", "post_")[: 1 + sandwich]]
    assert [site.role for site in sites] == [*roles * 2, "final"]
    assert [site.layer for site in sites][:-1] == [i // (1 + sandwich) // (1 + pairs) for i in range(len(sites) - 1)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.mix = nn.LayerNorm(D), nn.LayerNorm(D), Attention(gelu)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x):
        x = x + self.mix(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attributes(nn.Module):
    """Modules that are called one after the other, and are in no list."""

    def __init__(self, modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


@pytest.mark.parametrize(
    ("stem", "stack"),
    [("encoder_layer_", nn.Sequential), ("block", nn.Sequential), ("", nn.Sequential), ("block", Attributes)],
)
def test_layers_that_are_called_by_name_and_number(stem, stack):
    """As torchvision's ViT has in a list, and as many have attributes; `fc_1`, which has no parts, is no layer."""
    layers = stack(OrderedDict((f"{stem}{i}", Layer()) for i in range(LAYERS)))
    head = nn.Sequential(OrderedDict(fc_1=nn.Linear(D, D), norm_1=nn.LayerNorm(D), fc_2=nn.Linear(D, 50)))
    model = wrap(nn.Sequential(OrderedDict(tokens=nn.Embedding(50, D), stack=layers, head=head)))
    found = [(site.name.removeprefix("module."), site.role, site.layer) for site in find_sites(model)]
    norms = [(f"stack.{stem}{i}.{norm}", role, i) for i in range(LAYERS)
             for norm, role in (("ln_1", "attention"), ("ln_2", "mlp"))]  # fmt: skip
    assert found == [*norms, ("head.norm_1", "final", LAYERS)]


def test_stages_and_heads_by_name_and_number_are_no_layers():
    """The layers are in the lists of the stages."""
    stages = {f"stage{i}": Attributes({"layers": nn.Sequential(Layer(), Layer())}) for i in range(2)}
    heads = {f"head{i}": Attributes({"norm": nn.LayerNorm(D), "out": nn.Linear(D, D)}) for i in range(2)}
    found = find_sites(wrap(Attributes({"tokens": nn.Embedding(50, D)} | stages | heads)))
    assert [site.layer for site in found] == [0, 0, 1, 1] * 2 + [2, 2]
    assert [site.role for site in found] == ["attention", "mlp"] * 4 + ["final"] * 2


def test_numbered_parts_beside_layers_in_a_list_and_around_others_are_no_layers():
    """A stem's, and towers, whose layers are attributes too."""
    stem = Attributes({f"conv{i}": nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)) for i in range(2)})
    listed = {"norm": nn.LayerNorm(D), "layers": nn.Sequential(Layer(), Layer())}
    found = find_sites(wrap(Attributes({"tokens": nn.Embedding(50, D), "stem": stem, **listed})))
    assert [(site.role, site.layer) for site in found] == [
        *[("embedding", 0)] * 3, *((role, i) for i in range(2) for role in ("attention", "mlp"))
    ]  # fmt: skip
    towers = {f"tower{i}": Attributes({f"block{j}": Layer() for j in range(2)}) for i in range(2)}
    found = find_sites(wrap(Attributes({"tokens": nn.Embedding(50, D)} | towers)))
    assert [(site.role, site.layer) for site in found] == [
        ("attention", 0),
        ("mlp", 0),
        ("attention", 1),
        ("mlp", 1),
    ] * 2
