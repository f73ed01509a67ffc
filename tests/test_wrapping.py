"""Modules of one's own as models: written as research code is, without a configuration or a base class."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import zoo
from oracle import degrees
from torch import nn
from torch.nn import functional

from normgeo import compare, convert, find_sites, measure_angles, optimize, wrap
from normgeo.converted import rebuild
from normgeo.errors import ConversionError, ModelError, NormGeoError
from normgeo.wrapping import called

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
        x = self.positions(torch.arange(idx.shape[1])) + self.tokens(idx)
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
    frame = measure_angles(wrapped(gpt), IDS, null=0, progress=False).frame
    assert set(frame.model) == {"GPT"}, "a table calls a model by its class, not by what it is wrapped in"
    assert called(wrap(torch.compile(gpt), "_orig_mod.tokens", context=64)) == "GPT"
    assert wrapped(gpt).name_or_path == ""  # others take it for a path or for a name on the hub
    row = frame[(frame.site == "module.blocks.1.ln_2") & (frame.phase == "pre") & (frame.direction == "uniform")]
    assert float(row.mean_deg.iloc[0]) == pytest.approx(float(expected), abs=1e-4)
    assert frame.role.drop_duplicates().tolist() == ["attention", "mlp", "final"]


@pytest.mark.parametrize("how", [{}, {"to": "crmsnorm", "padded": True}, {"trainable": True}])
def test_it_is_converted_as_any_model(gpt, how):
    conversion = convert(wrapped(gpt), **how)
    assert len(conversion.replaced) == 5
    assert type(conversion.model.module) is GPT
    expected = logits(wrapped(gpt))
    assert float((logits(conversion.model) - expected).abs().max() / expected.abs().max()) < 1e-5
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


class Giving(nn.Module):
    """What research code gives: more than logits, in any order, or hidden states alone."""

    def __init__(self, gpt, what):
        super().__init__()
        self.gpt, self.what = gpt, what

    def forward(self, idx):
        hidden = []
        handle = self.gpt.final.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        logits = self.gpt(idx)[0]
        handle.remove()
        return self.what(logits, hidden[0])


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("what", "names"),
    [
        (lambda logits, x: logits, ["logits"]), (lambda logits, x: (logits.mean(), logits), ["logits", "output_0"]),
        (lambda logits, x: (None, logits), ["logits", "output_0"]), (lambda logits, x: x, ["last_hidden_state"]),
        (lambda logits, x: [logits, x], ["logits", "last_hidden_state"]),
        (lambda logits, x: (logits, logits), ["logits", "output_1"]),
        (lambda logits, x: Output(logits.mean(), logits), ["loss", "logits"]),
    ],
)  # fmt: skip
def test_everything_that_it_gives_is_an_output(gpt, what, names):
    model = wrap(Giving(gpt, what), "gpt.tokens", context=64)
    with torch.no_grad():
        assert list(model(torch.from_numpy(IDS))) == names
    pair = {"one": model, "other": model}
    assert compare(pair, IDS, null=0, rounds=0, progress=False).frame.output.iloc[0] in names[:2]
    if "last_hidden_state" in names:  # whose mean everybody sees
        with pytest.raises(ConversionError, match="is read by"):
            convert(model)
    else:
        assert len(convert(model).replaced) == 5


@pytest.mark.parametrize("training", [True, False])
def test_it_is_used_as_it_is(gpt, training):
    gpt.train(training)
    gpt.blocks[0].eval()
    modes = [module.training for module in gpt.modules()]
    model = wrap(gpt)
    assert [module.training for module in gpt.modules()] == modes
    assert model.training == training
    assert model.get_input_embeddings() is gpt.tokens  # which is not its first table
    assert not [hook for module in gpt.modules() for hook in module._forward_pre_hooks]


class Masked(nn.Module):
    """torch's encoder as it comes: Post-LN, with nested tensors of what is not padding."""

    def __init__(self, norm_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 64, batch_first=True, norm_first=norm_first)
        self.tokens, self.encoder = nn.Embedding(VOCABULARY, D), nn.TransformerEncoder(layer, 2, nn.LayerNorm(D))
        self.head = nn.Linear(D, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.tokens(ids), src_key_padding_mask=ids == 0))


@pytest.mark.filterwarnings("ignore:.*nested.tensor")
@pytest.mark.parametrize(("norm_first", "replaced"), [(True, 5), (False, 1)])
@pytest.mark.parametrize("how", [{}, {"trainable": True}])
def test_an_encoder_that_leaves_out_padding_is_measured_and_converted(norm_first, replaced, how):
    torch.manual_seed(0)
    module = zoo.perturb(Masked(norm_first).eval())
    ids = np.where(np.arange(20) < [[20], [13], [7], [16]], IDS % (VOCABULARY - 1) + 1, 0)
    frame = measure_angles(wrap(module), ids + 0, null=0, progress=False).frame
    assert frame.n_tokens.max() == ids.size
    conversion = convert(wrap(module), **how)
    assert len(conversion.replaced) == replaced
    with torch.no_grad():
        ours, theirs = (m(torch.from_numpy(ids)) for m in (conversion.model.module, module))
    assert float((ours - theirs)[torch.from_numpy(ids > 0)].abs().max()) < 1e-5
    assert torch.backends.mha.get_fastpath_enabled()


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


class OfFeatures(nn.Sequential):
    """A model of transformers in a module that is not given token ids but what a tokenizer gives."""

    def forward(self, features):
        return self[0](features.get("input_ids"))


def test_of_what_takes_no_token_ids_the_model_within_is_named():
    with pytest.raises(ModelError, match=r"OfFeatures failed .*give the model within, its \.get_submodule\('0'\)"):
        find_sites(wrap(OfFeatures(zoo.tiny("gpt2"))))
