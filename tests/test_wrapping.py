"""Modules of one's own as models: written as research code is, without a configuration or a base class."""

import json

import numpy as np
import pytest
import torch
import zoo
from oracle import degrees
from torch import nn
from torch.nn import functional

from normgeo import compare, convert, find_sites, measure_angles, optimize, wrap
from normgeo.converted import rebuild
from normgeo.errors import ModelError, NormGeoError

D, VOCABULARY = 32, 96


class Norm(nn.Module):
    """LayerNorm without a bias."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return functional.layer_norm(x, (D,), self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.mix, self.out = Norm(), Norm(), nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.mix(self.ln_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Its head is tied, and its ids have a name of their own."""

    def __init__(self, named=False):
        super().__init__()
        self.positions, self.tokens = nn.Embedding(64, D), nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.final, self.head, self.named = Norm(), nn.Linear(D, VOCABULARY, bias=False), named
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final(x))
        return {"logits": logits} if self.named else (logits, None)


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return zoo.perturb(GPT().eval())


def wrapped(module):
    return wrap(module, "tokens", context=64)


IDS = np.random.default_rng(0).integers(0, VOCABULARY, (4, 20))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.module(torch.from_numpy(ids))[0].double()


def test_its_angles_are_those_of_its_hidden_states(gpt):
    seen = []
    handle = gpt.blocks[1].ln_2.register_forward_pre_hook(lambda _, args: seen.append(args[0].double().flatten(0, 1)))
    with torch.no_grad():
        gpt(torch.from_numpy(IDS))
    handle.remove()
    expected = degrees(seen[0].numpy(), np.ones(D)).mean()
    frame = measure_angles(wrapped(gpt), IDS, null=0, progress=False, name="mine").frame
    row = frame[(frame.site == "module.blocks.1.ln_2") & (frame.phase == "pre") & (frame.direction == "uniform")]
    assert float(row.mean_deg.iloc[0]) == pytest.approx(float(expected), abs=1e-4)
    assert frame.role.drop_duplicates().tolist() == ["attention", "mlp", "final"]


@pytest.mark.parametrize("how", [{}, {"to": "crmsnorm", "padded": True}, {"trainable": True}])
def test_it_is_converted_as_any_model(gpt, how):
    conversion = convert(wrapped(gpt), **how)
    assert len(conversion.replaced) == 5
    assert type(conversion.model.module) is GPT
    error = (logits(conversion.model) - logits(wrapped(gpt))).abs().max()
    assert float(error) < 1e-5
    assert {site.kind for site in find_sites(convert(wrapped(gpt)).model)} == {"rmsnorm"}


def test_it_is_fused_and_compared(gpt):
    model = convert(wrapped(gpt)).model
    truth = logits(model)
    assert float((logits(optimize(model)) - truth).abs().max()) < 1e-5
    pair = {"mine": wrapped(gpt), "converted": convert(wrapped(gpt)).model}
    summary = compare(pair, IDS, null=0, rounds=0, progress=False).frame.groupby("model").first()
    assert summary.loc["converted", "top1"] == 1
    x = logits(pair["mine"])[:, :-1].log_softmax(-1)
    nll = -x.gather(-1, torch.from_numpy(IDS[:, 1:])[..., None]).mean()
    assert summary.perplexity["mine"] == pytest.approx(float(nll.exp()), rel=1e-4)


def test_what_was_converted_is_kept_as_a_state_dict(gpt, tmp_path):
    conversion = convert(wrapped(gpt))
    torch.save(conversion.model.state_dict(), tmp_path / "weights.pt")
    again = wrapped(GPT().eval())
    rebuild(again, json.loads(json.dumps(conversion.recipe)))
    again.load_state_dict(
        torch.load(tmp_path / "weights.pt", weights_only=True), assign=True
    )  # the head is tied no more
    assert torch.equal(logits(again), logits(conversion.model))


def test_outputs_by_name_are_taken_as_they_are(gpt):
    named = GPT(named=True).eval()
    named.load_state_dict(gpt.state_dict())
    pair = {"one": wrapped(named), "other": wrapped(gpt)}
    assert compare(pair, IDS, null=0, rounds=0, progress=False).frame.top1.min() == 1
    assert convert(pair["one"]).certificate.passed


def test_what_cannot_be_wrapped_is_said(gpt):
    with pytest.raises(ModelError, match=r"received a GPT, which is no model .*normgeo\.wrap"):
        measure_angles(gpt, IDS, progress=False)
    with pytest.raises(ModelError, match="wrap takes a torch module of one's own, received a GPT2LMHeadModel"):
        wrap(zoo.tiny("gpt2"))
    with pytest.raises(ModelError, match="has no table of token embeddings other: its tables are positions, tokens"):
        wrap(gpt, "other")
    with pytest.raises(ModelError, match=r"Linear has no table of token embeddings.*it has no nn\.Embedding"):
        wrap(nn.Linear(2, 2))
    with pytest.raises(NormGeoError, match="longer than the model's 64"):
        measure_angles(wrapped(gpt), np.ones((1, 65), int), progress=False)
    assert wrap(gpt.train()).training
