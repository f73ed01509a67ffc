"""Whichever part of an optimized model is called, and whoever looks on: values are right, or it refuses."""

import copy
import functools
import gc
import os
import warnings
import weakref

import pytest
import torch
import zoo
from torch import Tensor
from torch.nn.modules import module as global_hooks
from torch.nn.utils import prune

from normgeo import convert, optimize
from normgeo.conversion.optimize import fused_norms
from normgeo.conversion.probing import outputs_of
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs

CASES = {
    "gpt2": ("gpt2", {}, "h", ()),
    "gpt_neox": ("gpt_neox", {}, "layers", ()),
    "sequential": ("gpt_neox", {"use_parallel_residual": False}, "layers", ()),
    "opt": ("opt", {}, "decoder.layers", ("decoder",)),
    "vit": ("vit", {}, "layers", ()),
}  # architecture, its options, where in the base model its blocks are, and other modules around them
KEPT = {}


@pytest.fixture(params=CASES)
def case(request):
    """(converted, optimized, inputs, path to the blocks, modules around them)"""
    name, options, blocks, around = CASES[request.param]
    if request.param not in KEPT:
        KEPT[request.param] = convert(zoo.tiny(name, **options)).model
    plain = copy.deepcopy(KEPT[request.param])
    return plain, optimize(copy.deepcopy(plain)), example_inputs(plain, time=11, seed=4), blocks, around


def close(a, b):
    return all(float((x - y).abs().max()) < 1e-5 * float(y.abs().max()) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def test_parts_of_the_model_refuse_what_the_model_refuses(case):
    plain, fused, inputs, blocks, around = case
    for part in (fused, fused.base_model, *map(fused.base_model.get_submodule, around)):
        with pytest.raises(ConversionError, match="hidden states"):
            part(**inputs, output_hidden_states=True)
        block = fused.base_model.get_submodule(blocks)[1]
        with block.register_forward_hook(lambda *_: None), pytest.raises(ConversionError, match="hook on"):
            part(**inputs)
        fused.config.output_hidden_states = True
        with pytest.raises(ConversionError, match="hidden states"):
            part(**inputs)
        fused.config.output_hidden_states = False
    assert close(outputs_of(fused.base_model, inputs), outputs_of(plain.base_model, inputs))
    assert close(outputs_of(fused, inputs), outputs_of(plain, inputs))


@torch.no_grad()
def test_nothing_of_a_pass_is_kept(case):
    _, fused, inputs, *_ = case
    gc.collect()
    gc.freeze()  # what there is already need not be looked through again
    for part in (fused, fused.base_model):
        part(**inputs)
        gc.collect()
        tensors = [value for value in gc.get_objects() if type(value) is Tensor]
        assert not [value for value in tensors if value.ndim == 3 and value.shape[-1] == 32 and not value.requires_grad]


def test_a_process_that_is_forked_during_a_pass_of_another_thread_does_not_wait_for_it():
    turns = optimize(convert(zoo.tiny("gpt2")).model).transformer.ln_f.normgeo_stream.turns
    with turns.lock, warnings.catch_warnings(action="ignore"):  # from Python 3.12 on: there are threads
        turns.thread = -1
        if not (child := os.fork()):
            os._exit(0 if turns.lock.acquire(timeout=5) and turns.thread is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert turns.thread == -1


@torch.no_grad()
def test_blocks_that_are_called_one_by_one_leave_what_they_were_given():
    plain = convert(zoo.tiny("gpt2")).model
    fused, x = optimize(copy.deepcopy(plain)), torch.randn(2, 5, 32)
    x -= x.mean(-1, keepdim=True)
    states = [x]
    for block in fused.transformer.h:
        states.append(block(states[-1]))
    expected = [x]
    for block in plain.transformer.h:
        expected.append(block(expected[-1]))
    assert close(states, expected)
    last = weakref.ref(states[-1])
    del states, block
    gc.collect()
    assert last() is None


@torch.no_grad()
def test_hooks_around_blocks_see_what_stays(case):
    """What goes in and out of modules around the blocks may be looked at, and be kept."""
    plain, fused, inputs, _, around = case
    seen = {}
    for model in (plain, fused):
        to = seen.setdefault(model, [])
        for part in (model.base_model, *map(model.base_model.get_submodule, around)):
            part.register_forward_hook(lambda _, args, out, to=to: to.append(out[0]))
        model(**inputs)
    assert close(seen[fused], seen[plain])


class Stages(torch.nn.Module):
    """Blocks in two stages, which are modules themselves."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, *_, **__):
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_a_stage_in_the_middle_of_the_stream_may_be_looked_at():
    plain = convert(zoo.tiny("gpt2", n_layer=4)).model
    blocks = plain.transformer.h
    plain.transformer.h = torch.nn.ModuleList([Stages(blocks[:2]), Stages(blocks[2:])])
    fused, seen, ids = optimize(copy.deepcopy(plain)), {}, torch.tensor([[1, 2, 3]])
    assert len(fused_norms(fused)) == 8
    for model in (plain, fused):
        to = seen.setdefault(model, [])
        model.transformer.h[0].register_forward_hook(lambda _, args, out, to=to: to.append(out))
        model.transformer.h[1].register_forward_pre_hook(lambda _, args, to=to: to.append(args[0]))
        to.append(model(ids).logits)
    assert close(seen[fused], seen[plain])


@torch.no_grad()
def test_hooks_that_make_weights_are_no_matter_but_on_norms():
    model = convert(zoo.tiny("gpt_neox")).model
    block = model.gpt_neox.layers[1]
    prune.l1_unstructured(block.mlp.dense_4h_to_h, "weight", 0.3)
    fused, inputs = optimize(copy.deepcopy(model)), example_inputs(model)
    for weight in (m.gpt_neox.layers[1].mlp.dense_4h_to_h.weight_orig for m in (model, fused)):
        weight.mul_(2.0)  # which the hook passes on
    assert close(outputs_of(fused, inputs), outputs_of(model, inputs))
    prune.l1_unstructured(block.input_layernorm, "weight", 0.3)
    with pytest.raises(ConversionError, match="RMSNorm has hooks"):
        optimize(model)


# --- hooks that are transformers' own, and everybody's ---------------------------------------------------------------


@torch.no_grad()
def test_that_outputs_were_once_captured_is_no_matter():
    model, ids = convert(zoo.tiny("gpt2")).model, torch.tensor([[1, 2, 3]])
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True, output_hidden_states=True)
    optimize(model)  # which the hooks that transformers has left do not keep from it
    found = model(ids, output_attentions=True)
    assert close([found.logits, *found.attentions], [expected.logits, *expected.attentions])
    assert close([model(ids).logits, model.transformer(ids)[0]], [expected.logits, expected.hidden_states[-1]])
    for part in (model, model.transformer):
        with pytest.raises(ConversionError, match="hidden states"):
            part(ids, output_attentions=True, output_hidden_states=True)
    assert torch.equal(model(ids).logits, found.logits)


@torch.no_grad()
@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_every_module_are_refused(register):
    model, ids = convert(zoo.tiny("gpt2")).model, torch.tensor([[1, 2, 3]])
    with getattr(global_hooks, register)(lambda *_: None), pytest.raises(ConversionError, match="every module"):
        optimize(model)
    optimize(model)
    with getattr(global_hooks, register)(lambda *_: None):
        for part in (model, model.transformer):
            with pytest.raises(ConversionError, match=r"every module .* as FlopCounterMode sets"):
                part(ids)
    assert model(ids).logits.isfinite().all()


class Keeping(torch.nn.Module):
    """Gives the same tensor again and again, as a cache of what a module gave."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.kept = inner, None

    def forward(self, x, *args, **options):
        self.kept = self.inner(x, *args, **options) if self.kept is None else self.kept
        return self.kept


@torch.no_grad()
def test_what_is_put_into_a_block_afterwards_is_not_written_over():
    """Nobody asked it whether what it gives is needed again."""
    plain = convert(zoo.tiny("gpt2")).model
    inputs = example_inputs(plain, time=11, seed=4)

    def put(model):
        model.transformer.h[0].mlp = Keeping(model.transformer.h[0].mlp)

    def around(model):
        model.transformer.h[0] = Keeping(model.transformer.h[0])

    def patch(model):
        mlp = model.transformer.h[1].mlp
        mlp.forward = lambda x, forward=mlp.forward: forward(x)

    for change in (put, around, patch):
        fused = optimize(copy.deepcopy(plain))
        copied = copy.deepcopy(fused)
        change(fused)
        with pytest.raises(ConversionError, match="were put in, or given another forward, after optimize"):
            fused(**inputs)
        assert close(outputs_of(copied, inputs), outputs_of(plain, inputs))
    changed = copy.deepcopy(plain)
    put(changed)  # before, what it gives is seen to be there still
    assert close(outputs_of(optimize(copy.deepcopy(changed), inputs), inputs), outputs_of(changed, inputs))
    changed = copy.deepcopy(plain)
    patch(changed)
    assert close(outputs_of(optimize(copy.deepcopy(changed)), inputs), outputs_of(changed, inputs))


@torch.no_grad()
def test_attentions_that_are_additions_to_the_stream_are_not_written_over():
    """RWKV calls what its blocks add by that name."""
    rwkv = zoo.by_type("rwkv")
    plain = convert(rwkv).model
    inputs = example_inputs(plain, time=11, seed=4)
    fused = optimize(copy.deepcopy(plain))
    with pytest.raises(ConversionError, match="optimized model has no"):
        fused(**inputs, output_hidden_states=True)
    found, truth = (outputs_of(m, inputs, output_attentions=True) for m in (fused, plain))
    assert close(found, truth)
    assert len(truth) > len(outputs_of(plain, inputs))
    assert close(outputs_of(fused, inputs), outputs_of(plain, inputs))
    plain = convert(zoo.tiny("gpt2", attn_implementation="eager")).model
    fused, inputs = optimize(copy.deepcopy(plain)), example_inputs(plain, time=11, seed=4)
    found, truth = (m(**inputs, output_attentions=True).attentions for m in (fused, plain))
    assert len(found) == len(truth) > 0
    assert close(found, truth)


@torch.no_grad()
def test_blocks_that_run_another_forward_are_said_until_their_own_is_put_back():
    model = copy.deepcopy(zoo.converted("gpt2")[1].model)
    for block in model.transformer.h:
        block.forward = functools.partial(type(block).forward, block)
    with pytest.raises(ConversionError, match="GPT2Block runs another forward than its class's"):
        optimize(model)
    for block in model.transformer.h:
        block.forward = block.forward.func.__get__(block)
    inputs = example_inputs(model)
    wanted = outputs_of(model, inputs)
    assert close(outputs_of(fused := optimize(model), inputs), wanted)
    assert fused_norms(fused)
