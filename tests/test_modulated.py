"""Norms whose outputs are scaled and shifted by what a layer is conditioned on: where they sit, and what converts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from normgeo import convert, find_sites, wrap

D = 32
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 96, (3, 10)))

EXPECTED = [("attention", 0), ("mlp", 0), ("attention", 1), ("mlp", 1), ("final", 2)]
MODULATED = {
    "operators": lambda x, shift, scale: x * (1 + scale) + shift,
    "addcmul": lambda x, shift, scale: torch.addcmul(shift, x, 1 + scale),
    "in place": lambda x, shift, scale: x.mul(1 + scale).add_(shift),
    "the other way round": lambda x, shift, scale: shift + (1 + scale) * x,
    "cast": lambda x, shift, scale: (x.double() * (1 + scale.double()) + shift.double()).float(),
}


def norm():
    return nn.LayerNorm(D, elementwise_affine=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Conditioned(nn.Module):
    """A block of a diffusion transformer (adaLN-Zero), conditioned on one vector a text."""

    def __init__(self, modulated, norms):
        super().__init__()
        self.first, self.second = norms(), norms()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.condition, self.modulated = nn.Linear(D, 6 * D), modulated

    def forward(self, x, c):
        a, b, gate, d, e, other = self.condition(functional.silu(c))[:, None].chunk(6, -1)
        x = x + gate * self.attn(self.modulated(self.first(x), a, b))
        return x + other * self.mlp(self.modulated(self.second(x), d, e))


class Gated(nn.Module):
    """Norms of what branches give, gated by the same vector: these are of the branches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.condition = nn.Linear(D, 2 * D)

    def forward(self, x, c):
        gate, other = self.condition(c)[:, None].chunk(2, -1)
        x = x + gate * self.first(self.attn(x))
        return x + other * self.second(self.mlp(x))


class Text(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.table, self.blocks = nn.Embedding(96, D), nn.ModuleList(blocks)
        self.last, self.head = nn.LayerNorm(D), nn.Linear(D, 96)

    def forward(self, ids):
        x = self.table(ids)
        c = x.mean(1)
        for block in self.blocks:
            x = block(x, c)
        return self.head(self.last(x))


def conditioned(how, norms):
    torch.manual_seed(0)
    return wrap(Text(*(Conditioned(MODULATED[how], norms) for _ in range(2))).eval())


def roles(model):
    return [(site.role, site.layer) for site in find_sites(model)]


@pytest.mark.parametrize(
    "norms", [norm, lambda: lambda x: functional.layer_norm(x, (D,))], ids=["modules", "functions"]
)
@pytest.mark.parametrize("how", list(MODULATED))
def test_a_modulated_norm_is_read_by_what_reads_the_modulation(how, norms):
    assert roles(conditioned(how, norms)) == EXPECTED


class Inline(nn.Module):
    """Its attention is no module of its own, and its first norm is of what it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.condition = norm(), norm(), nn.Linear(D, 4 * D)
        self.mix, self.out, self.up, self.down = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 64),
            nn.Linear(64, D),
        )

    def forward(self, x, c):
        a, b, d, e = self.condition(c)[:, None].chunk(4, -1)
        q, k, v = self.mix(self.first(x) * (1 + a) + b).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x) * (1 + d) + e)))


def test_a_norm_of_what_a_layer_is_given_is_not_inside_a_branch():
    assert roles(wrap(Text(Inline(), Inline()).eval())) == EXPECTED


class Heads(nn.Module):
    """Attention with norms on its heads, and no matrix of what it gives."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, D) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)) for part in (self.to_q(x), self.to_k(x), self.to_v(x)))
        q, k, v = (part.transpose(1, 2) for part in (self.norm_q(q), self.norm_k(k), v))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Joined(nn.Module):
    """A single-stream block of Flux: on two streams one behind the other, and on both branches' outputs together."""

    def __init__(self):
        super().__init__()
        self.condition, self.first, self.attn = nn.Linear(D, 3 * D), norm(), Heads()
        self.up, self.out = nn.Linear(D, 64), nn.Linear(D + 64, D)

    def forward(self, x, c):
        x = torch.cat([x[:, :3], x[:, 3:].flip(1)], dim=1)
        a, b, gate = self.condition(functional.silu(c))[:, None].chunk(3, -1)
        y = self.first(torch.cat([c[:, None], x], dim=1)) * (1 + a) + b
        return x + (gate * self.out(torch.cat([self.attn(y), functional.gelu(self.up(y))], dim=2)))[:, 1:]


def test_what_is_joined_is_read_of_all_its_parts():
    expected = [("parallel", 0), ("qk", 0), ("qk", 0), ("parallel", 1), ("qk", 1), ("qk", 1), ("final", 2)]
    model = wrap(Text(Joined(), Joined()).eval())
    assert [(site.role, site.layer) for site in find_sites(model, qk=True)] == expected


def test_a_gated_norm_of_a_branch_is_of_the_branch():
    expected = [("post_attention", 0), ("post_mlp", 0), ("post_attention", 1), ("post_mlp", 1), ("final", 2)]
    assert roles(wrap(Text(Gated(), Gated()).eval())) == expected


@torch.no_grad()
@pytest.mark.parametrize("how", ["operators", "addcmul", "in place"])
def test_they_are_converted_where_a_mean_can_be_removed(how):
    """At the end of a layer: within it a gate makes a mean of what a branch gives."""
    model = conditioned(how, norm)
    conversion = convert(model)
    assert [site.name for site in conversion.replaced] == [
        "module.blocks.0.first",
        "module.blocks.1.first",
        "module.last",
    ]
    assert list(conversion.kept) == ["module.blocks.0.second", "module.blocks.1.second"]
    expected = model(IDS)["logits"]
    assert float((conversion.model(IDS)["logits"] - expected).abs().max() / expected.abs().max()) < 1e-5
