"""Modules of one's own: what chooses by hidden states, what trains of their norms, and how these are called."""

import copy
from types import MethodType

import pytest
import torch
from blocks import IDS, Block, D, Model, Named, built
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from zoo import perturb, tiny

from normgeo import convert, find_gauge, find_sites, optimize, wrap
from normgeo.conversion.gauge import Shift
from normgeo.conversion.trainable import bake
from normgeo.errors import ConversionError, ModelError


class Choosing(Block):
    """Experts that the largest of a router's numbers chooses, of the stream itself or of what a norm makes of it."""

    raw = True

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        x = x + self.mixed(x)
        y = self.norm2(x)
        chosen, out = self.router(x if self.raw else y).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            out = torch.where((chosen == k)[..., None], expert(y), out)
        return x + out


class ChoosingNormed(Choosing):
    raw = False


@pytest.mark.parametrize("seed", range(6))
def test_what_chooses_by_the_mean_of_hidden_states_is_seen(seed):
    """A choice has no gradient, and changes few outputs: it may be missed by those that are compared."""
    with pytest.raises(ConversionError, match=r"reads the mean of hidden states to choose by.*router\.weight"):
        convert(wrap(built(Choosing, seed)))


def test_what_chooses_by_what_a_norm_gives_is_converted():
    model = built(ChoosingNormed)
    converted = convert(wrap(copy.deepcopy(model))).model
    with torch.no_grad():
        torch.testing.assert_close(converted(IDS)["logits"], model(IDS), rtol=1e-4, atol=1e-5)


class Twice(Block):
    """Its MLP is given what a function normalizes once more."""

    def forward(self, x):
        x = x + self.mixed(x)
        return x + self.mlp(functional.layer_norm(self.norm2(x), (D,)))


def test_what_moves_no_mean_is_no_writer():
    """No output sees a shift of what the function's norm makes of it, nor does any norm of a module."""
    assert Shift("module.blocks.0.mlp.0.weight", 1) not in find_gauge(wrap(built(Twice))).writers


def test_norms_may_be_given_hidden_states_by_name():
    model = built(Named)
    conversion = convert(wrap(copy.deepcopy(model)))
    assert not conversion.kept
    with torch.no_grad():
        for each in (conversion.model, optimize(conversion.model)):
            torch.testing.assert_close(each(IDS)["logits"], model(IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trained", ["all", "betas", "weights", "gammas"])
def test_what_trains_of_norms_is_what_trained_of_their_originals(trained):
    model = tiny("gpt2").train().requires_grad_(True)
    for name, parameter in model.named_parameters():
        norm, beta = ".ln_" in name, name.endswith("bias")
        parameter.requires_grad_(
            {"all": True, "betas": beta, "weights": not beta, "gammas": norm and not beta}[trained]
        )
    before = {name for name, p in model.named_parameters() if p.requires_grad and ".ln_" in name}
    converted = convert(model, trainable=True).model
    assert {name for name, p in converted.named_parameters() if p.requires_grad and ".ln_" in name} == before


class Shaped(nn.Module):
    """A LayerNorm whose parameters are shaped to be multiplied with batches."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        return functional.layer_norm(x, (D,)) * self.weight + self.bias


def test_gains_of_another_shape_are_converted():
    model = built(Block)
    model.blocks[1].norm1 = Shaped()
    conversion = convert(wrap(copy.deepcopy(model)))
    assert len(conversion.replaced) == 5
    with torch.no_grad():
        torch.testing.assert_close(conversion.model(IDS)["logits"], model(IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["retention", "hyena", "gru", "token_mixing", "gla", "mix"])
def test_what_mixes_tokens_by_its_name_is_a_mixer(name):
    class Mixing(Block):
        def __init__(self):
            super().__init__()
            self.add_module(name, self._modules.pop("mix"))

        def forward(self, x):
            x = x + getattr(self, name)(self.norm1(x).cumsum(1) / 20)
            return x + self.mlp(self.norm2(x))

    assert {site.role for site in find_sites(wrap(built(Mixing))) if site.name.endswith("norm1")} == {"mixer"}


class Shifted(nn.Module):
    """A LayerNorm without a gain."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return functional.layer_norm(x, (D,)) + self.beta


def test_norms_that_would_train_other_numbers_are_refused():
    """A gain that the original does not have would be trained."""
    model = built(Block)
    model.blocks[0].norm1 = Shifted()
    wrapped = wrap(model.requires_grad_(True))
    assert len(convert(wrapped).replaced) == 5
    with pytest.raises(ConversionError, match="numbers and its conversion would train"):
        convert(wrapped, trainable=True)


class Doubled(nn.LayerNorm):
    """It acts with twice the gamma that it learns."""

    def forward(self, x):
        return functional.layer_norm(x, (D,), 2 * self.weight, self.bias)


def test_norms_whose_gains_are_made_of_what_they_learn_are_not_trained():
    """An optimizer moves gains otherwise than what they are made of."""
    model, made = built(Block), "learns other numbers than the gamma .*remove"
    prune.random_unstructured(model.blocks[0].norm1, "weight", 0.2)
    assert convert(wrap(model)).certificate.passed
    with pytest.raises(ConversionError, match=rf"blocks\.0\.norm1 {made}"):
        convert(wrap(model), trainable=True)
    prune.remove(model.blocks[0].norm1, "weight")
    model.blocks[1].norm2 = Doubled(D)
    with pytest.raises(ConversionError, match=rf"blocks\.1\.norm2 {made}"):
        convert(wrap(model), trainable=True)


class Offset(nn.Module):
    """Its gain is 1 + gamma; beta is called as gains mostly are."""

    def __init__(self):
        super().__init__()
        self.weight, self.gamma = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        return functional.layer_norm(x, (D,)) * (1 + self.gamma) + self.weight


def test_what_trains_has_the_state_of_the_original_whatever_its_norms_call_theirs():
    model = built(Block)
    model.blocks[1].norm1 = Offset()
    original = wrap(copy.deepcopy(model))
    converted = convert(wrap(model), trainable=True).model
    with torch.no_grad():
        for parameter in converted.parameters():  # as weight decay does
            parameter.mul_(0.9)
        original.load_state_dict(converted.state_dict())
        given = original(IDS)["logits"]
        for other in (converted, bake(converted)):
            torch.testing.assert_close(other(IDS)["logits"], given, rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(converted)
    other.load_state_dict(original.state_dict())
    torch.testing.assert_close(other.state_dict(), original.state_dict(), rtol=0, atol=0)
    assert "module.blocks.1.norm1.bias" in bake(converted).state_dict()


def test_a_decoders_final_norm_is_of_the_decoder():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.final, self.other = nn.Embedding(48, D), nn.LayerNorm(D), nn.LayerNorm(D)
            self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
            self.head = nn.Linear(D, 48)

        def forward(self, ids):
            x = self.tok(ids)
            for block in self.encoder:
                x = block(x)
            y = self.tok(ids) + self.other(x).mean(1, keepdim=True)
            for block in self.decoder:
                y = block(y)
            return self.head(self.final(y))

    sites = {site.name.removeprefix("module."): site for site in find_sites(wrap(perturb(Two()).eval()))}
    assert (sites["final"].role, sites["final"].stack.removeprefix("module.")) == ("final", "decoder")
    assert sites["other"].stack.removeprefix("module.") == "encoder"


class Quantized(nn.Linear):
    """As a library's."""


def test_norms_that_are_compiled_or_quantized_by_themselves_are_one_line(monkeypatch):
    model = tiny("gpt2")
    model.transformer.ln_f = torch.compile(model.transformer.ln_f, backend="eager")
    with pytest.raises(ConversionError, match=r"transformer\.ln_f is compiled by itself: put its _orig_mod there"):
        convert(model)
    quantized = tiny("gpt_neox")
    quantized.gpt_neox.layers[0].mlp.dense_h_to_4h = Quantized(32, 64)
    for library in ("torchao", "optimum.quanto"):
        monkeypatch.setattr(Quantized, "__module__", f"{library}.linear")
        with pytest.raises(ConversionError, match=rf"mlp\.dense_h_to_4h is of {library}\.linear\.Quantized; convert"):
            convert(quantized)


def test_a_model_without_its_weights_is_one_line():
    with pytest.raises(ModelError, match="the weights of GPT2LMHeadModel are not here"):
        find_sites(tiny("gpt2").to("meta"))
    model = tiny("gpt2")
    model.transformer.h[1].to("meta")
    with pytest.raises(ModelError, match=r"its transformer\.h\.1\.ln_1\.weight is on the meta device: load it"):
        find_sites(model)


@pytest.mark.parametrize("options", [{}, {"keep_tie": True}, {"to": "crmsnorm"}], ids=str)
def test_a_table_of_two_names_that_a_head_is_tied_to_is_converted(options):
    module = built(Block)
    module.words, module.head.weight = module.tok, module.tok.weight
    conversion = convert(wrap(module), **options)
    torch.testing.assert_close(conversion.model(IDS)["logits"], module(IDS), rtol=1e-4, atol=1e-5)


def test_what_is_tied_and_no_head_is_named_where_it_cannot_stay_so():
    module = built(Block)
    module.blocks[0].mix.bias = module.blocks[1].norm1.bias  # of which one is centered
    assert convert(wrap(module)).certificate.passed
    with pytest.raises(ConversionError, match=r"mix\.bias, module.*norm1\.bias cannot stay tied: leave out keep_tie"):
        convert(wrap(module), keep_tie=True)


def test_a_table_whose_gradients_are_sparse_is_converted():
    module = built(Block)
    module.tok.sparse = True
    assert convert(wrap(module), to="crmsnorm").certificate.passed
    assert module.tok.sparse
    with pytest.raises(ConversionError, match=r"module\.tok asks for sparse gradients, .* set its \.sparse to False"):
        convert(wrap(module), trainable=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_around_the_model_itself_are_named(dtype):
    """A copy runs them as they are: on the weights, and through the norms, of the model that it is a copy of."""
    module = built(Block).to(dtype)
    before, fewest = module.blocks[1].forward, 1

    def inner(x):
        return before(x)

    def again(x, times=fewest):  # holds itself, and what is no function, besides
        return again(x, times - 1) if times > fewest else inner(x)

    module.blocks[1].forward = again
    with pytest.raises(
        ModelError, match=r"module\.blocks\.1\.forward is a function around the model itself.*MethodType"
    ):
        convert(wrap(module))


@pytest.mark.parametrize("given", [False, True], ids=["gauge found", "gauge given"])
def test_a_function_over_weights_of_a_model_in_float64_is_named(given):
    """A head by the table of the original, which is not centered, would pass for equal, and be in no checkpoint."""
    module = built(Block).double()
    gauge = find_gauge(wrap(module)) if given else None
    del module.head
    module.head = lambda h: functional.linear(h, module.tok.weight)
    with pytest.raises(ModelError, match=r"a copy of Wrapped reads weights of the model.*; module\.head is a function"):
        convert(wrap(module), gauge=gauge)


def test_a_function_over_what_stays_as_it_is_is_none_of_conversions_business():
    module = built(Block).double()
    module.register_buffer("shift", shift := torch.linspace(0, 1, 48, dtype=torch.float64))
    module.forward = MethodType(lambda self, ids: Model.forward(self, ids) + shift, module)
    assert len(convert(wrap(module)).replaced) == 5


def test_what_contains_itself_is_copied():
    module = built(Block)
    module.notes = {"of": [module.tok.weight]}
    module.notes["of"].append(module.notes)
    assert convert(wrap(module)).certificate.passed
