"""Blocks of one's own that write over what was read, run again for their gradients, keep what they make, or whose
parameters are made of others."""

import pytest
import torch
from blocks import IDS, Block, D, built
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from zoo import perturb, tiny

from normgeo import convert, find_gauge, find_sites, wrap
from normgeo.conversion.trainable import bake
from normgeo.errors import ConversionError


class InPlace(nn.Module):
    """It writes over what its second norm has read."""

    def __init__(self, d=32):
        super().__init__()
        self.one, self.two, self.f, self.g = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        x = x + self.f(self.one(x))
        x += self.g(self.two(x))
        return x


def test_what_is_added_in_place_to_what_a_norm_has_read_is_compressed():
    torch.manual_seed(0)
    module = perturb(nn.Sequential(nn.Embedding(48, D), InPlace(), InPlace(), nn.LayerNorm(D), nn.Linear(D, 48)))
    assert find_gauge(wrap(module)).raw == {}
    conversion = convert(wrap(module), to="crmsnorm")
    assert conversion.certificate.error_rel < 1e-13


class Bent(Block):
    """It reads the stream itself, between additions that are all in place."""

    def forward(self, x):
        x += self.mixed(x)
        x += 0.1 * x.tanh()
        return x


def test_a_mean_that_is_seen_once_a_view_is_written_over_is_not_removed_before():
    conversion = convert(wrap(built(Bent)))
    assert [site.name for site in conversion.replaced] == ["module.final"]
    assert conversion.recentered == (("module.blocks.1", "output", 0),)


class Bypassed(Block):
    """As a Conformer's: what ends a layer is read as it is, and then added to in place, before a norm reads it."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(D, D)

    def forward(self, x):
        x = self.norm1(x + self.mlp(self.norm2(x)))
        x += self.side(self.mix(x.clone()).softmax(-1))
        return x


def test_what_is_read_before_it_is_written_over_keeps_its_mean_until_then():
    """The norm's output has, by the time of gradients, that of what it became, whose mean nothing sees."""
    conversion = convert(wrap(built(Bypassed)))
    assert [place.module for place in conversion.recentered] == ["module.blocks.0", "module.blocks.1"]
    assert len(conversion.replaced) == 5


class Keeping(Block):
    """Keeps in training a loss of its own, and what its layers gave."""

    given: tuple = ()

    def forward(self, x):
        x = super().forward(x)
        if self.training:
            self.loss, self.given = x.pow(2).mean(), [{"x": x}]
        return x


def test_what_is_kept_of_training_is_no_obstacle():
    module = built(Keeping).train()
    module(IDS)
    trained = convert(wrap(module), trainable=True).model
    trained(IDS)
    torch.testing.assert_close(bake(trained).eval()(IDS)["logits"], module.eval()(IDS), rtol=1e-4, atol=1e-5)
    assert convert(wrap(module)).certificate.passed
    assert module.blocks[0].given[0]["x"].grad_fn is not None


class Checkpointed(Block):
    """It keeps no activations, and attends: queries, keys and values of one tensor are multiplied at once."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def mixed(self, x):
        y = self.norm1(x)
        return self.attention(y, y, y, need_weights=False)[0]

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, {"to": "crmsnorm", "padded": True}, {"trainable": True}], ids=str)
def test_what_runs_again_for_its_gradients_is_converted(options):
    module = built(Checkpointed)
    conversion = convert(wrap(module), **options)
    assert len(conversion.replaced) == 5
    torch.testing.assert_close(conversion.model(IDS)["logits"], module(IDS), rtol=1e-4, atol=1e-5)


class Batched(Block):
    """A norm over the batch reads its stream, and hides in training alone what all samples are shifted by."""

    def __init__(self):
        super().__init__()
        self.batch, self.out = nn.BatchNorm1d(D), nn.Linear(D, D)

    def forward(self, x):
        return self.out(self.batch(super().forward(x).flatten(0, 1)).view_as(x))


def test_what_norms_over_a_batch_hide_in_training_is_not_centered():
    model = wrap(built(Batched))
    for trainable in (True, False):
        assert [site.role for site in convert(model, trainable=trainable).replaced] == ["final"]


class PlusOne(nn.Module):
    def forward(self, kept):
        return kept + 1

    def right_inverse(self, value):
        return value - 1


@pytest.mark.parametrize("options", [{"to": "crmsnorm"}, {"trainable": True}], ids=str)
def test_a_module_whose_parameters_are_parametrized_is_one_as_all(options):
    """Also a writer, whose output is recentered then; the one beside it in another block is not."""
    module = built(Block)
    plain, (first, second) = find_sites(wrap(module)), module.blocks
    parts = [(first.norm1, "weight"), (module.final, "weight"), (second.mlp[0], "bias"), (first.mlp[2], "bias")]
    for part, name in parts:
        parametrize.register_parametrization(part, name, PlusOne())
    assert find_sites(wrap(module)) == plain
    conversion = convert(wrap(module), **options)
    assert len(conversion.replaced) == 5
    torch.testing.assert_close(conversion.model(IDS)["logits"], module(IDS), rtol=1e-4, atol=1e-5)


class LessMean(nn.Module):
    """A parameter that is centered where it is read, by the model's own code."""

    def forward(self, value):
        return value - value.mean(0)


def test_what_is_centered_by_the_model_itself_is_not_compressed():
    """Its last number is made of the others: nothing that could be left out of its parameter."""
    model = built(Block)
    parametrize.register_parametrization(model.blocks[0].mix, "bias", LessMean())
    with pytest.raises(ConversionError, match=r"blocks\.0\.norm2 is given what is not of plain parameters alone"):
        convert(wrap(model), to="crmsnorm")


class Packed(nn.Linear):
    """It makes real numbers of its weight in every pass, as libraries that quantize do."""

    def forward(self, x):
        return x @ self.weight.T.to(x.dtype) / 64


def test_weights_that_have_no_gradients_have_no_gauge():
    module = nn.Sequential(nn.Embedding(48, D), nn.LayerNorm(D), Packed(D, 48))
    module[2].weight = nn.Parameter(torch.arange(48 * D).reshape(48, D).to(torch.int8), requires_grad=False)
    assert len(find_sites(wrap(module))) == 1
    with pytest.raises(ConversionError, match=r"2\.weight is torch\.int8; load it unpacked"):
        find_gauge(wrap(module))


class Adapted(nn.Module):
    """A matrix with a smaller one beside it that is called as a user likes, as by peft."""

    def __init__(self, linear, name):
        super().__init__()
        self.base, self.lora_A = linear, nn.ModuleDict({name: nn.Linear(linear.in_features, linear.out_features)})

    def forward(self, x):
        return self.base(x) + next(iter(self.lora_A.values()))(x)


@pytest.mark.parametrize("name", ["attn", "cross_attention", "mix", "temporal-qa"])
def test_roles_are_not_read_off_the_names_of_adapters(name):
    model = tiny("gpt_neox")
    for layer in model.gpt_neox.layers:
        layer.mlp.dense_h_to_4h = Adapted(layer.mlp.dense_h_to_4h, name)
        layer.attention.query_key_value = Adapted(layer.attention.query_key_value, name)
    roles = [site.role for site in find_sites(model)]
    assert roles == [*["attention", "mlp"] * len(model.gpt_neox.layers), "final"]


class Keyed(nn.Module):
    """A layer whose parts are in a dictionary of its own."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleDict({"first": nn.LayerNorm(D), "second": nn.LayerNorm(D)})
        self.parts = nn.ModuleDict({"mixer": nn.Conv1d(D, D, 1), "mlp": nn.Linear(D, D)})

    def forward(self, x):
        x = x + self.parts["mixer"](self.norms["first"](x).mT).mT
        return x + self.parts["mlp"](self.norms["second"](x)).relu()


def test_roles_are_read_off_the_keys_of_a_layers_own_dictionary():
    assert [site.role for site in find_sites(wrap(built(Keyed)))] == [*["mixer", "mlp"] * 2, "final"]


class Long(Block):
    """Of many layers that are as wide as the stream, in each of which rounding may look like a mean that is seen."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(*(nn.Linear(D, D) for _ in range(12)))


@pytest.mark.parametrize(("block", "n", "ends"), [(Long, 12, (nn.LayerNorm(D), nn.Linear(D, 48))), (Block, 8, ())])
def test_backward_passes_are_not_multiplied_by_norms(block, n, ends, monkeypatch):
    """Where nothing reads the stream but norms none need be asked for alone, and else each place once."""
    torch.manual_seed(0)
    model, passes = wrap(nn.Sequential(nn.Embedding(48, D), *(block() for _ in range(n)), *ends)), []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given, **options: passes.append(1) or grad(*given, **options))
    raw = find_gauge(model, {"input_ids": IDS[:1, :1]}).raw  # of one vector chance shows most
    assert raw == (
        {} if ends else {f"module.{i + 1}.norm{j}": ("the model's output",) for i in range(n) for j in (1, 2)}
    )
    assert len(passes) < (10 if ends else 12 * n)


class Times(nn.Module):
    def forward(self, x):
        return x * 1e7


def test_a_reader_is_named_beside_gradients_that_are_much_larger():
    """Those of a norm of what is made much larger, as queries are."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.mlp = nn.Sequential(nn.Linear(D, D), Times(), nn.LayerNorm(D), nn.Linear(D, D))
    raw = find_gauge(wrap(nn.Sequential(nn.Embedding(48, D), *blocks)), {"input_ids": IDS}).raw
    assert raw == {f"module.{i + 1}.norm{j}": ("the model's output",) for i in range(3) for j in (1, 2)}
