"""Blocks written in other ways than those of transformers: fused where that is right, found out where it is not."""

import copy
import functools
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch._dynamo
import zoo
from blocks import Block as Plain
from blocks import Model
from test_optimizing import relative
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from normgeo import convert, optimize, wrap
from normgeo.conversion.optimize import fused_norms
from normgeo.conversion.probing import outputs_of
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops


class Block(nn.Module):
    """GPT-2's, in other words."""

    def __init__(self, block, kept):
        super().__init__()
        self.attn, self.mlp, self.ln_1, self.ln_2, self.kept = block.attn, block.mlp, block.ln_1, block.ln_2, kept

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        x += self.mlp(self.ln_2(x))
        return x


class Stepped(nn.Linear):
    """What rounding changes of its input becomes thousands of times as large, as by quantized activations."""

    def forward(self, x):
        return super().forward(x + 0.01 * (x * 2**18).frac())


class Nested(Block):
    """The same in one expression."""

    def forward(self, x, *_, **__):
        return self.mlp(self.ln_2(total := x + self.attn(self.ln_1(x))[0])) + total


class Called(Block):
    """A block that adds by torch's function and method, and calls what is named so and adds nothing."""

    def forward(self, x, *_, **__):
        x, seen = torch.add(x, self.attn(self.ln_1(x))[0]), set()
        seen.add(x)
        return x.add(self.mlp(self.ln_2(x)))


class Remembering(Block):
    """A block that also reads what the block before it was given, when its own sums have been added to that."""

    def forward(self, x, *_, **__):
        before, self.kept[:] = self.kept[-1] if self.kept else x, [x]
        branch = self.attn(self.ln_1(x))[0].add(before, alpha=0.1)
        x = x + branch
        return x + self.mlp(self.ln_2(x))


class Rereading(Block):
    """A block that reads a branch again, when a norm has been written over it."""

    def forward(self, x, *_, **__):
        branch = self.attn(self.ln_1(x))[0]
        x = x + branch
        return x + self.mlp(self.ln_2(x)).add(branch, alpha=0.1)


class Tabled(Block):
    """A block that adds a parameter, which is nobody's to write over."""

    def __init__(self, block, kept):
        super().__init__(block, kept)
        table = torch.randn(1, 5, 32)
        self.table = nn.Parameter(table - table.mean(-1, keepdim=True))

    def forward(self, x, *_, **__):
        branch = self.attn(self.ln_1(x))[0]
        x = x + self.table[:]
        return x + self.mlp(self.ln_2(x)).add(branch)


class Viewing(Block):
    """A block that adds in place to views of its stream and of a branch, and to what has another name, or none."""

    calls = 0

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        start = x[:, :1]
        start += 0.1 * start
        branch = self.mlp(self.ln_2(x))
        latest, more = branch[:, -1:], (branches := [branch])
        latest += latest
        more += [0.1 * branch]
        self.calls += 1
        branch[:, :1] += 0.1
        return x + sum(branches[1:], start=branches[0])


class First(Block):
    """A block whose second norm reads the first token alone, where the sum of all begins in memory."""

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        return x + self.mlp(self.ln_2(x[:, :1]))


class Spread(Block):
    """A block that adds one vector to all tokens."""

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0].mean(1, keepdim=True)
        return x + self.mlp(self.ln_2(x))


class Private(Block):
    """A block with a name of its own, as Python changes it within a class."""

    def __twice(self, x):
        return x + x

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        return x + self.__twice(self.mlp(self.ln_2(x)))


class Inheriting(Block):
    """A block whose code needs what Python closes over in a class."""

    def forward(self, x, *_, **__):
        return super().forward(x) + 0.1 * x


SCALE = 1.0


class Defaulting(Block):
    """A block whose source, read again, is other code than what runs."""

    def forward(self, x, *_, scale=SCALE, **__):
        x = x + self.attn(self.ln_1(x))[0]
        return x + scale * self.mlp(self.ln_2(x))


SCALE = 3.0


def of_blocks(block, name="gpt2"):
    """A converted model of four layers, in blocks of another class."""
    layers = {"n_layer": 4} if name == "gpt2" else {"num_hidden_layers": 4}
    model, kept = convert(zoo.tiny(name, **layers)).model, []
    blocks = model.transformer.h if name == "gpt2" else model.gpt_neox.layers
    for i, old in enumerate(blocks):
        blocks[i] = block(old, kept).eval()
    model.register_forward_pre_hook(lambda *_: kept.clear())
    return model


@pytest.mark.parametrize("block", [Block, Nested, Called, Remembering, Rereading])
@torch.no_grad()
def test_a_stream_or_branch_that_is_read_after_it_was_added_is_not_written_over(block):
    model = of_blocks(block)
    before = outputs_of(model, example_inputs(model))
    fused = len(fused_norms(optimize(model)))
    assert fused == 8 if block in (Block, Nested, Called) else 0 < fused <= 8
    assert len(model._forward_pre_hooks) == 1
    assert relative(outputs_of(model, example_inputs(model)), before) < 1e-6


@torch.no_grad()
def test_what_is_added_to_in_place_is_seen_by_its_other_names():
    model = of_blocks(Viewing)
    inputs = example_inputs(model)
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(model), inputs), before) < 1e-6
    assert len(fused_norms(model)) == 8


@torch.no_grad()
@pytest.mark.parametrize(("block", "fused"), [(First, 6), (Spread, 7)])
def test_of_sums_with_a_norm_or_branch_of_other_shapes_those_around_them_are_fused(block, fused):
    classes = iter([Block, block, Block, Block])
    model, inputs = of_blocks(lambda *given: next(classes)(*given)), {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(model, inputs), inputs), before) < 1e-6
    assert len(fused_norms(model)) == fused


@torch.no_grad()
@pytest.mark.parametrize(("block", "says"), [
    (Private, "nothing to fuse"), (Inheriting, "nothing to fuse"), (Defaulting, "gives something else"),
])  # fmt: skip
def test_code_that_means_something_else_when_rewritten_is_refused(block, says):
    model = of_blocks(block)
    before = outputs_of(model, example_inputs(model))
    with pytest.raises(ConversionError, match=says):
        optimize(model)
    assert relative(outputs_of(model, example_inputs(model)), before) == 0.0


class Streaming(Block):
    """A block that adds in place to what it is given."""

    def forward(self, x, *_, **__):
        x += self.attn(self.ln_1(x))[0]
        return x + self.mlp(self.ln_2(x))


@torch.no_grad()
def test_embeddings_that_a_model_adds_to_itself_get_no_more_than_that():
    model, found = of_blocks(Streaming), torch.randn(1, 3, 32)
    fused, expected = optimize(copy.deepcopy(model)), found.clone()
    torch.testing.assert_close(fused.transformer.h[0](found), model.transformer.h[0](expected))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_parameters_that_are_added_stay_as_they_are():
    model = of_blocks(Tabled)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    tables, before = [block.table.clone() for block in model.transformer.h], outputs_of(model, inputs)
    optimize(model, inputs)
    assert len(fused_norms(model)) == 8
    for _ in range(2):
        assert relative(outputs_of(model, inputs), before) < 1e-6
    assert all(map(torch.equal, tables, (block.table for block in model.transformer.h)))


class Returning(nn.Module):
    """A block of branches; the last adds what the first was given: the caller's embeddings."""

    def __init__(self, layer, kept):
        super().__init__()
        self.mlp, self.one, self.two, self.kept = layer.mlp, layer.input_layernorm, layer.post_attention_layernorm, kept

    def forward(self, x, *_, **__):
        self.kept.append(x)
        branch = self.mlp(self.one(x))
        x = x + (self.kept[0] if len(self.kept) == 4 else branch)
        return x + self.mlp(self.two(x))


@torch.no_grad()
def test_embeddings_that_are_added_again_stay_as_they_are():
    model = of_blocks(Returning, "gpt_neox")
    assert 0 < len(fused_norms(optimize(model))) < 8  # what the blocks keep is not added to
    embedded = torch.randn(1, 3, model.config.hidden_size)
    kept = embedded.clone()
    model(inputs_embeds=embedded)
    assert torch.equal(embedded, kept)


class Computing(Block):
    """A block that computes with what its norms give, in their own precision."""

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x) * 1.1)[0]
        return x + self.mlp(self.ln_2(x) * 1.1)


@torch.no_grad()
@pytest.mark.parametrize("block", [Block, Computing])
def test_norms_are_narrower_than_the_stream_only_where_that_changes_nothing(block, monkeypatch):
    model, dtypes, add_norm = of_blocks(block), [], norm_ops.add_norm_
    with torch.autocast("cpu", torch.bfloat16):
        optimize(model)
        monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: dtypes.append(a[-1]) or add_norm(*a))
        narrow = model(torch.tensor([[1, 2, 3]])).logits
        monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: add_norm(*a[:-1], False))
        assert torch.equal(narrow, model(torch.tensor([[1, 2, 3]])).logits)
    assert dtypes == [block is Block] * 6 + [False]  # the last norm is not a block's


@contextmanager
def listening():
    """While inside, torch.compile evaluates frames in some thread, so that calls hold their arguments once more."""
    begun, ended = threading.Event(), threading.Event()

    def listen():
        before = set_eval_frame(False)
        begun.set()
        ended.wait()
        set_eval_frame(before)

    thread = threading.Thread(target=listen)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_what_is_free_to_be_written_over_is_so_whether_torch_compile_listens_or_not(when, monkeypatch):
    model, over, add_norm = of_blocks(Block), [], norm_ops.add_norm_
    with listening() if when == "before" else nullcontext():
        optimize(model)
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: over.append(a[-1]) or add_norm(*a))
    with listening() if when == "after" else nullcontext():
        model(torch.tensor([[1, 2, 3]]))
    assert over == [True] * 7


def local_block():
    """A block whose source does not run elsewhere: its default and its decorator have names here alone."""

    def plainly(forward):
        @functools.wraps(forward)
        def called(*args, **options):
            return forward(*args, **options)

        return called

    class Block(GPT2Block):
        SCALE = 1.0

        @plainly
        def forward(self, hidden_states, *args, scale=SCALE, **options):
            total = self.attn(self.ln_1(hidden_states))[0] + hidden_states
            return self.mlp(self.ln_2(total)) * scale + total

    return Block


def test_blocks_whose_source_does_not_run_elsewhere_are_refused():
    model, inputs = convert(zoo.tiny("gpt2")).model, {"input_ids": torch.arange(9)[None]}
    for block in model.transformer.h:
        block.__class__ = local_block()
    truth = outputs_of(model, inputs)
    with pytest.raises(ConversionError, match="nothing to fuse"):
        optimize(model)
    assert all(map(torch.equal, outputs_of(model, inputs), truth))


class Bent(nn.Module):
    """A model all of whose norms are read by what no gain folds into."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(96, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, ids):
        return self.up(self.norm(self.table(ids)).tanh())


def test_norms_that_give_back_wider_vectors_are_not_said_to_be_none():
    compressed = convert(wrap(zoo.perturb(Bent())), to="crmsnorm").model
    with pytest.raises(ConversionError, match=r"all norms of Wrapped give back wider vectors .* nothing to fuse"):
        optimize(compressed)


def test_what_makes_much_of_rounding_is_held_to_the_kernels_unfused():
    torch.manual_seed(0)
    model = convert(wrap(zoo.perturb(Model(Plain)).eval())).model
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Stepped
    ids = torch.randint(48, (2, 9))
    with torch.no_grad():
        before = model(ids)["logits"]
        assert relative(before, optimize(model)(ids)["logits"]) < 1e-4
