"""What models of one's own are made of in the tests: a block in torch alone, whose stream is D wide."""

import torch
from torch import nn
from zoo import perturb

D = 32
IDS = torch.randint(48, (4, 20), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """Pre-LN: what mixes tokens, which is the mean of those so far, and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mix, self.mlp = nn.Linear(D, D), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def mixed(self, x):
        return self.mix(self.norm1(x).cumsum(1) / 20)

    def forward(self, x):
        x = x + self.mixed(x)
        return x + self.mlp(self.norm2(x))


class Named(Block):
    """Its norms are given what they normalize by its name."""

    def forward(self, x):
        x = x + self.mix(self.norm1(input=x).cumsum(1) / 20)
        return x + self.mlp(self.norm2(input=x))


class Model(nn.Module):
    """A causal model of words, of two such blocks or more."""

    def __init__(self, block, n=2):
        super().__init__()
        self.tok, self.blocks = nn.Embedding(48, D), nn.ModuleList(block() for _ in range(n))
        self.final, self.head = nn.LayerNorm(D), nn.Linear(D, 48)

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def built(block, seed=0):
    """A model of such blocks, with every gain and bias perturbed."""
    torch.manual_seed(seed)
    return perturb(Model(block), seed).eval()
