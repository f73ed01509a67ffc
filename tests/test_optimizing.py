"""The fused inference mode gives what the converted model gives, or refuses."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import transformers
import zoo
from torch import nn
from torch.nn.utils import parametrize

from normgeo import convert, optimize
from normgeo.conversion.optimize import fused_norms
from normgeo.conversion.probing import float64_copy, outputs_of
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops
from normgeo.norms import RMSNorm

FUSED = {  # how many of a two-layer model's norms read a sum of its blocks
    "gpt2": 4, "gpt_neo": 4, "gpt_neox": 2, "gptj": 2, "opt": 4, "phi": 2, "stablelm": 4, "nemotron": 4, "vit": 4,
    "mpt": 2, "whisper": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def converted(tiny):
    kept = {}

    def get(name, **options):
        key = name, *sorted(options.items())
        if key not in kept:
            kept[key] = convert(tiny(name), **({"to": "rmsnorm"} | options)).model
        return copy.deepcopy(kept[key])

    return get


def relative(a, b):
    return max(float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in zip(a, b, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", FUSED)
def test_outputs_are_those_of_the_converted_model(name, converted):
    model = converted(name)
    inputs = example_inputs(model, time=9, seed=4)
    exact = outputs_of(float64_copy(model), inputs)
    before = outputs_of(model, inputs)
    fused = optimize(model)
    assert len(fused_norms(fused)) == FUSED[name]
    assert relative(outputs_of(fused, inputs), exact) <= 2 * relative(before, exact) + torch.finfo().eps


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "vit"])
@pytest.mark.parametrize("options", [{"to": "crmsnorm"}, {"to": "crmsnorm", "padded": True}, {"fold_affine": True}])
def test_compressed_and_folded_models_are_fused_too(name, options, converted):
    model = converted(name, **options)
    inputs = example_inputs(model, seed=4)
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(model), inputs), before) < 1e-6
    assert len(fused_norms(model)) == FUSED[name]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_dtype(dtype, converted):
    model = converted("gpt2").to(dtype)
    inputs = example_inputs(model, seed=4)
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(model), inputs), before) < (1e-12 if dtype == torch.float64 else 0.02)


@torch.no_grad()
def test_the_kernel_is_what_computes_them(converted, monkeypatch):
    calls, add_norm = [], norm_ops.add_norm_
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: calls.append(a) or add_norm(*a))
    model = optimize(converted("gpt2"))
    calls.clear()
    model(torch.tensor([[1, 2, 3]]))
    assert len(calls) == 3  # the first sum of a forward pass is a new tensor


@torch.no_grad()
def test_under_autocast_the_stream_is_wider_than_what_is_added_and_fused_all_the_same(converted, monkeypatch):
    model, ids = converted("gpt2"), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        before = model(ids).logits
        optimize(model)
        calls, add_norm = [], norm_ops.add_norm_
        monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: calls.append(add_norm(*a)) or calls[-1])
        assert relative([model(ids).logits], [before]) < 0.02
    # what a block reads is rounded in any case; what the model returns stays as it was
    assert [z.dtype for z in calls] == [torch.bfloat16, torch.bfloat16, torch.float32]


@torch.no_grad()
def test_generate_gives_the_same_tokens(converted):
    model, ids = converted("gpt2"), torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    assert torch.equal(optimize(model).generate(ids, **options), expected)


@torch.no_grad()
def test_embeddings_that_are_given_stay_as_they_are(converted):
    model = optimize(converted("gpt_neox"))
    embedded = model.get_input_embeddings()(torch.tensor([[3, 4, 5]])).clone()
    kept = embedded.clone()
    first, second = model(inputs_embeds=embedded).logits, model(inputs_embeds=embedded).logits
    assert torch.equal(embedded, kept)
    assert torch.equal(first, second)


@torch.no_grad()
def test_a_copy_is_its_own_and_saving_is_as_before(converted, tmp_path):
    model = optimize(converted("vit"))
    inputs = example_inputs(model, seed=1)
    other = copy.deepcopy(model)
    assert torch.equal(other(**inputs).logits, model(**inputs).logits)
    other.vit.layernorm.weight.add_(1.0)
    assert not torch.equal(other(**inputs).logits, model(**inputs).logits)
    assert model.state_dict().keys() == converted("vit").state_dict().keys()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_pickled_it_is_the_converted_model_that_it_was(name, converted):
    model = converted(name)
    inputs = example_inputs(model, seed=1)
    before = outputs_of(model, inputs)
    optimize(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert relative(outputs_of(other, inputs), before) == 0.0
        assert other(**inputs, output_hidden_states=True).hidden_states  # it has some to give
        assert relative(outputs_of(optimize(other), inputs), before) < 1e-6
        assert len(fused_norms(other)) == FUSED[name]
    assert len(fused_norms(copy.deepcopy(model))) == FUSED[name]
    assert relative(outputs_of(model, inputs), before) < 1e-6


class Doubled(nn.Module):
    """A parametrization that is not the identity."""

    def forward(self, weight):
        return weight * 2


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_norms_may_be_parametrized(when, converted):
    model = converted("gpt2")
    fused = copy.deepcopy(model)
    if when == "after":
        optimize(fused)
    for each in (model, fused):
        for block in each.transformer.h:
            parametrize.register_parametrization(block.ln_1, "weight", Doubled())
            parametrize.register_parametrization(block.ln_2, "bias", Doubled())
    inputs = example_inputs(model, seed=1)
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(fused), inputs), before) < 1e-6
    assert len(fused_norms(fused)) == FUSED["gpt2"]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_every_module_stays_in_its_mode(name, converted):
    """Also where the model is refused: nothing of bert can be fused."""
    model = converted(name).train()
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).eval()
    before = [module.training for module in model.modules()]
    try:
        optimize(model)
    except ConversionError:
        assert name == "bert"
    assert [module.training for module in model.modules()] == before


def test_twice_is_once(converted):
    model = optimize(converted("gpt2"))
    assert optimize(model) is model


def test_under_autograd_it_refuses(converted):
    model = optimize(converted("gpt2"))
    for part in (model, model.transformer):
        with pytest.raises(ConversionError, match="no_grad"):
            part(torch.tensor([[1, 2]]))
    with torch.no_grad():
        assert model(torch.tensor([[1, 2]])).logits.isfinite().all()


@torch.no_grad()
def test_hidden_states_and_hooks_are_refused(converted):
    model, ids = optimize(converted("gpt2")), torch.tensor([[1, 2]])
    with pytest.raises(ConversionError, match="hidden states"):
        model(ids, output_hidden_states=True)
    handle = model.transformer.h[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ConversionError, match="hook on GPT2Block"):
        model(ids)
    handle.remove()
    handle = model.transformer.h[0].mlp.c_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ConversionError, match="hook on Conv1D"):  # the next norm is written over what it gives
        model(ids)
    handle.remove()
    model(ids)
    hooked = converted("gpt2")
    handle = hooked.transformer.h[0].ln_1.register_forward_hook(lambda *_: None)
    with pytest.raises(ConversionError, match="RMSNorm has hooks"):
        optimize(hooked)
    handle.remove()
    optimize(hooked)


@torch.no_grad()
@pytest.mark.parametrize("write", [
    lambda model, ids: torch.export.export(model, (ids,), strict=False),
    lambda model, ids: torch.export.export(model, (ids,), strict=True),
    torch.jit.trace,
], ids=["export", "strict", "trace"])  # fmt: skip
def test_to_be_exported_or_traced_it_refuses(write, converted):
    model, ids = optimize(converted("gpt2")), torch.tensor([[1, 2, 3]])
    model.config.use_cache = False
    with pytest.raises(Exception, match="trace the converted one"):
        write(model, ids)
    assert model(ids).logits.isfinite().all()


def unchanged(model):
    return not any({"forward", "normgeo_stream"} & m.__dict__.keys() or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["bloom", "bert"])
def test_where_there_is_nothing_to_fuse_the_model_is_as_it_was(name, converted):
    model = converted(name)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(ConversionError, match="nothing to fuse"):
        optimize(model)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_model_that_is_not_converted_is_refused(tiny):
    with pytest.raises(ConversionError, match="convert it first"):
        optimize(tiny("gpt2"))
    with pytest.raises(ConversionError, match="no LayerNorm to convert"):  # where convert would refuse it too
        optimize(tiny("llama"))


def test_where_no_norm_of_a_block_was_replaced_there_is_nothing_to_fuse():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPVisionConfig(num_hidden_layers=2, **shape)
    model = convert(zoo.perturb(transformers.CLIPVisionModel(config).eval())).model
    with pytest.raises(ConversionError, match="nothing to fuse"):
        optimize(model)
    assert unchanged(model)


def test_what_is_no_model_is_named(tiny):
    unchecked = inspect.unwrap(optimize)  # in tests alone every type is checked
    with pytest.raises(ConversionError, match=r"not a Conversion: give it its \.model"):
        unchecked(convert(tiny("gpt2")))
    with pytest.raises(ConversionError, match="not a Linear"):
        unchecked(nn.Linear(2, 2))


class Block(nn.Module):
    """GPT-2's, in other words."""

    def __init__(self, block, kept):
        super().__init__()
        self.attn, self.mlp, self.ln_1, self.ln_2, self.kept = block.attn, block.mlp, block.ln_1, block.ln_2, kept

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        x += self.mlp(self.ln_2(x))
        return x


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
    """A block that adds in place to a view of a branch, and to a list that has another name."""

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        branch = self.mlp(self.ln_2(x))
        latest, more = branch[:, -1:], (branches := [branch])
        latest += latest
        more += [0.1 * branch]
        return x + sum(branches[1:], start=branches[0])


class Private(Block):
    """A block with a name of its own, as Python changes it within a class."""

    def __twice(self, x):
        return x + x

    def forward(self, x, *_, **__):
        x = x + self.attn(self.ln_1(x))[0]
        return x + self.__twice(self.mlp(self.ln_2(x)))


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


@pytest.mark.parametrize("block", [Block, Remembering, Rereading])
def test_a_stream_or_branch_that_is_read_after_it_was_added_is_found_out(block):
    model = of_blocks(block)
    with torch.no_grad():
        before = outputs_of(model, example_inputs(model))
        if block is not Block:
            with pytest.raises(ConversionError, match="read after"):
                optimize(model)
            assert len(model._forward_pre_hooks) == 1
        else:
            assert len(fused_norms(optimize(model))) == 8
        assert relative(outputs_of(model, example_inputs(model)), before) < 1e-6


@torch.no_grad()
def test_what_is_added_to_in_place_is_seen_by_its_other_names():
    model = of_blocks(Viewing)
    inputs = example_inputs(model)
    before = outputs_of(model, inputs)
    assert relative(outputs_of(optimize(model), inputs), before) < 1e-6
    assert len(fused_norms(model)) == 8


@torch.no_grad()
@pytest.mark.parametrize(("block", "says"), [(Private, "nothing to fuse"), (Defaulting, "gives something else")])
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
    assert len(fused_norms(optimize(model))) == 8
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


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["sum", "norm"])
def test_a_kernel_that_computes_something_else_is_found_out(wrong, converted, monkeypatch):
    def bad(residual, x, weight, bias, eps, offset, kind, over):
        residual.add_(x, alpha=2 if wrong == "sum" else 1)
        return RMSNorm(residual.shape[-1]).plain(residual)

    model = converted("gpt2")
    monkeypatch.setattr(norm_ops, "add_norm_", bad)
    with pytest.raises(ConversionError, match="not equal"):
        optimize(model)
    assert unchanged(model)


@torch.no_grad()
def test_the_kernels_of_large_inputs_are_compared_on_small_ones(converted, monkeypatch):
    limits, before, add_norm = [], norm_ops.LAUNCH, norm_ops.add_norm_
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: limits.append(norm_ops.LAUNCH) or add_norm(*a))
    optimize(converted("gpt2"))
    assert set(limits) == {0}
    assert norm_ops.LAUNCH == before > 0
