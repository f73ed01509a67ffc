"""Optimized models of which somebody keeps hidden states: what is kept is not written over."""

import copy

import pytest
import torch
from blocks import Block, D
from torch import nn
from zoo import perturb

from normgeo import convert, optimize, wrap
from normgeo.conversion import fused
from normgeo.conversion.optimize import fused_norms
from normgeo.kernels import norm_ops

IDS = torch.randint(48, (2, 30), generator=torch.Generator().manual_seed(0))


class Stashing(Block):
    """Its own middle is kept on it, as a function gives it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        x = x + self.mixed(x)
        self.middle = self.function(x)
        return x + self.mlp(self.norm2(x))


class Viewed(Block):
    """A view of its middle is kept, and read where texts are long."""

    def forward(self, x):
        x = x + self.mixed(x)
        last = x[:, -1:] if x.shape[1] > 20 else 0.0
        x = x + self.mlp(self.norm2(x))
        return x + last


class Listing(Block):
    """Where texts are long its middle, detached, is put into a list."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        x = x + self.mixed(x)
        if x.shape[1] > 20:
            self.kept.append(x.detach())
        return x + self.mlp(self.norm2(x))


class Handed(Block):
    """Its input, its middle or what it adds is given back by a function, and read where texts are long."""

    def __init__(self, kept, function):
        super().__init__()
        self.kept, self.function = kept, function

    def forward(self, x):
        before = self.function(x) if self.kept == "before" else None
        mixed = self.mixed(x)
        branch = self.function(mixed) if self.kept == "branch" else None
        x = x + mixed
        middle = self.function(x) if self.kept == "middle" else None
        x = x + self.mlp(self.norm2(x))
        if x.shape[1] > 20:
            x = x + next(value for value in (before, branch, middle) if value is not None).view(x.shape)
        return x


class Masking(Block):
    """Where texts are long its sum is written over in place before the norm reads it."""

    def forward(self, x):
        x = x + self.mixed(x)
        if x.shape[1] > 20:
            x.masked_fill_(torch.arange(x.shape[1])[:, None] < 9, 0.5)
        return x + self.mlp(self.norm2(x))


def centered(*shape):
    half = torch.randn(*shape, D // 2)
    return torch.cat([half, -half], -1)  # to the last bit


class Constant(nn.Module):
    """Gives what it has kept, as a view that is contiguous where there is one text."""

    def __init__(self):
        super().__init__()
        self.kept = centered(1, 30)

    def forward(self, x):
        return self.kept[:, : x.shape[1]].expand(len(x), -1, -1)


class Unmixed(Block):
    """A block that adds what it has kept."""

    def __init__(self):
        super().__init__()
        self.constant = Constant()

    def forward(self, x):
        x = x + self.constant(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Remembering(nn.Module):
    """A branch that has its answer to texts of three tokens by heart: it, or what it gives a view of."""

    def __init__(self, viewed):
        super().__init__()
        self.linear, self.known, self.viewed = nn.Linear(D, D), None, viewed

    def forward(self, x):
        if x.shape[1] != 3:
            return self.linear(x)
        if self.known is None:
            self.known = centered(*x.shape[:-1])
        return self.known.view(x.shape) if self.viewed else self.known


class Reminded(Unmixed):
    def __init__(self, viewed=False):
        super().__init__()
        self.constant = Remembering(viewed)


class Model(nn.Module):
    def __init__(self, block, listed):
        super().__init__()
        self.tok, self.blocks = nn.Embedding(48, D), nn.ModuleList(block() for _ in range(3))
        self.final, self.head, self.listed = nn.LayerNorm(D), nn.Linear(D, 48), listed

    def forward(self, ids, layers=None, skip=False, steer=False):
        x = self.tok(ids)
        states, early = [x] if self.listed else [], None
        for place, block in enumerate(self.blocks):
            x = block(x)
            if steer:
                x[:, 3:9] *= -2
            states += [x] * self.listed
            early = x if skip and not place else early
        if layers is not None:
            x = torch.stack([states[k] for k in layers]).mean(0)
        return self.head(self.final(x if early is None else x + early))


def built(block=Block, listed=False):
    torch.manual_seed(0)
    model = perturb(Model(block, listed))
    return convert(wrap(model)).model, optimize(convert(wrap(copy.deepcopy(model))).model)


def agree(converted, optimized, ids=IDS, mode=torch.no_grad, **options):
    with mode():
        expected, found = (model(ids, **options)["logits"] for model in (converted, optimized))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layers": [1, 3]}])
def test_a_list_of_hidden_states_stays_what_it_was(options):
    """An option that the verified pass does not have reads what is kept in every pass."""
    converted, optimized = built(listed=True)
    agree(converted, optimized, **options)


def test_what_is_kept_for_an_option_alone_stays_what_it_was(monkeypatch):
    """Without the option all is fused; with it what is kept is added to elsewhere."""
    converted, optimized = built()
    calls, add_norm = [], norm_ops.add_norm_
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: calls.append(0) or add_norm(*a))
    agree(converted, optimized)
    fused = len(calls)
    assert fused == len(fused_norms(optimized)) - 1  # into the embedding's own memory nothing is added
    agree(converted, optimized, skip=True)
    assert len(calls) - fused == fused - 1


@pytest.mark.parametrize("function", [nn.Identity(), torch.detach], ids=["itself", "detached"])
def test_what_a_block_keeps_of_itself_stays_what_it_was(function):
    converted, optimized = built(lambda: Stashing(function))
    agree(converted, optimized)
    for one, other in zip(converted.module.blocks, optimized.module.blocks, strict=True):
        torch.testing.assert_close(other.middle, one.middle, rtol=1e-4, atol=1e-5)


def test_views_that_are_read_later_stay_what_they_were():
    """On the short inputs that it was verified on there are none."""
    converted, optimized = built(Viewed)
    agree(converted, optimized)


@pytest.mark.parametrize("function", [nn.Dropout().eval(), nn.Flatten(0, 1)])
@pytest.mark.parametrize("kept", ["before", "branch", "middle"])
def test_what_a_function_gives_back_under_another_name_stays_what_it_was(kept, function):
    """Dropout's output is its input in evaluation, and nothing but a run tells; on short inputs nobody reads it."""
    agree(*built(lambda: Handed(kept, function)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_stream_that_is_changed_in_place_is_normalized_as_it_is_then(mode):
    """By the model around the blocks, or by a block; neither is in the pass that was verified."""
    agree(*built(), mode=mode, steer=True)
    agree(*built(Masking), mode=mode)


def test_what_a_branch_has_kept_is_not_written_over():
    converted, optimized = built(Unmixed)
    for _ in range(2):
        agree(converted, optimized, IDS[:1])
    assert fused_norms(optimized)
    for one, other in zip(converted.module.blocks, optimized.module.blocks, strict=True):
        assert torch.equal(other.constant.kept, one.constant.kept)


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_branch_keeps_of_other_texts_than_were_verified_is_not_written_over(mode, viewed):
    """What a linear layer gives is a view of what nobody else has, but in inference mode, where it is no view."""
    _, optimized = built(lambda: Reminded(viewed))
    assert fused_norms(optimized)
    with mode():
        first, again = (optimized(IDS[:, :3])["logits"] for _ in range(2))
    assert torch.equal(first, again)


def test_verifying_writes_over_nothing_that_is_kept():
    """Of the example that it is verified on, what its branches have kept is as large."""
    torch.manual_seed(0)
    model = convert(wrap(perturb(Model(Unmixed, False)))).model
    for block in model.module.blocks:
        block.constant.kept = block.constant.kept.repeat(2, 1, 1)
    before = [block.constant.kept.clone() for block in model.module.blocks]
    optimize(model, {"input_ids": IDS})
    for block, kept in zip(model.module.blocks, before, strict=True):
        assert torch.equal(block.constant.kept, kept)


class Given(nn.Module):
    """A model whose blocks add what the caller gives, one after the other, as views of it."""

    def __init__(self):
        super().__init__()
        self.tok, self.blocks = nn.Embedding(48, D), nn.ModuleList(GivenBlock(place) for place in range(3))
        self.final, self.head = nn.LayerNorm(D), nn.Linear(D, 48)

    def forward(self, ids, more):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, more["states"] if isinstance(more, dict) else more)
        return self.head(self.final(x))


class GivenBlock(Block):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x, more):
        branch = self.mixed(x)
        x = x + more.select(0, self.place)
        return x + (self.mlp(self.norm2(x)) + branch)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("example", [torch.float32, torch.float64])
def test_what_the_caller_gives_is_not_written_over(example, within):
    """Wherever in it a view begins, and though the model is verified on a copy in its own dtype."""
    torch.manual_seed(0)
    model = wrap(perturb(Given()))
    more = centered(3, *IDS.shape)
    before = more.clone()
    converted = convert(model, inputs={"input_ids": IDS, "more": more}).model
    optimized = optimize(copy.deepcopy(converted), {"input_ids": IDS, "more": more.to(example)})
    agree(converted, optimized, more={"states": more} if within else more)
    assert fused_norms(optimized)
    assert torch.equal(more, before)


def test_references_are_counted_alike_whatever_the_mode_is_that_the_package_is_imported_in():
    with torch.inference_mode():
        assert fused._alone() == fused.ALONE


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_detached_and_put_into_a_list_stays_what_it_was(mode):
    models = built(Listing)
    agree(*models, mode=mode)
    expected, found = ([block.kept[-1] for block in model.module.blocks] for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
