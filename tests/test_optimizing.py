"""The fused inference mode gives what the converted model gives, or refuses."""

import copy
import functools
import inspect
import io
import pickle
import threading

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
    monkeypatch.setattr(norm_ops, "add_norm_", lambda *a: calls.append(0) or add_norm(*a))
    model = optimize(converted("gpt2"))
    calls.clear()
    model(torch.tensor([[1, 2, 3]]))
    assert len(calls) == 3  # the first sum of a forward pass is a new tensor


@pytest.mark.skipif(not norm_ops.loaded().compiled, reason="needs a compiler")
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


def test_it_is_compared_under_no_precision_of_the_callers(converted):
    model, seen = converted("gpt2").double(), set()
    model.lm_head.register_forward_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        optimize(model)
    assert seen == {False}


class Wide(nn.Module):
    """It does not run under autocast."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("in single precision alone")
        return self.inner(x)


def test_a_model_that_does_not_run_under_autocast_is_fused_too(converted):
    model = converted("gpt2")
    model.transformer.h[0].mlp = Wide(model.transformer.h[0].mlp)
    assert len(fused_norms(optimize(model))) == FUSED["gpt2"]


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


def patched(module, *args, **options):
    return type(module).forward(module, *args, **options)


def test_a_forward_that_was_put_in_before_is_pickled_with_it(converted):
    model = converted("gpt2")
    model.transformer.forward = functools.partial(patched, model.transformer)
    assert vars(pickle.loads(pickle.dumps(optimize(model))).transformer)["forward"].func is patched


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


def test_a_pass_waits_for_that_of_another_thread(converted):
    model, done = optimize(converted("gpt2")), threading.Event()

    def run():
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))
        done.set()

    thread = threading.Thread(target=run)
    with model.transformer.ln_f.normgeo_stream.turns.lock:
        thread.start()
        assert not done.wait(0.2)
    thread.join(60)
    assert done.is_set()


def test_under_autograd_it_refuses(converted):
    model = optimize(converted("gpt2"))
    for part in (model, model.transformer):
        with pytest.raises(ConversionError, match="no_grad"):
            part(torch.tensor([[1, 2]]))
    for part in (model.transformer.h[0], model.transformer.ln_f):
        with pytest.raises(ConversionError, match="no_grad"):
            part(torch.ones(1, 2, 32))
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
    lambda model, ids: torch.compile(model, backend="eager", fullgraph=True)(ids),
], ids=["export", "strict", "trace", "compile"])  # fmt: skip
def test_to_be_compiled_exported_or_traced_whole_it_refuses(write, converted):
    model, ids = converted("gpt2"), torch.tensor([[1, 2, 3]])
    model.compile(backend="eager", fullgraph=True)  # which is undone
    optimize(model).config.use_cache = False
    torch._dynamo.reset()  # which remembers what it could not compile
    with pytest.raises(Exception, match="trace the converted one"):
        write(model, ids)
    assert torch.equal(torch.compile(model, backend="eager")(ids).logits, model(ids).logits)  # it is left as it is


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


def test_weights_that_are_elsewhere_are_one_line(converted):
    model = converted("gpt2")
    model.transformer.wpe.to("meta")
    with pytest.raises(ConversionError, match="some weights are on the disk"):
        optimize(model)


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


def test_interrupted_it_leaves_the_model_as_it_was(converted, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    model = converted("gpt2")
    monkeypatch.setattr(norm_ops, "add_norm_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimize(model)
    assert unchanged(model)


@torch.no_grad()
def test_the_kernels_of_large_inputs_are_compared_on_small_ones(converted, monkeypatch):
    paid, add_norm = [], norm_ops.add_norm_

    def noted(residual, x, weight, bias, eps, offset, kind, over):
        paid.append(norm_ops._pays(residual, weight, bias, offset, kind))
        return add_norm(residual, x, weight, bias, eps, offset, kind, over)

    monkeypatch.setattr(norm_ops, "add_norm_", noted)
    optimize(converted("gpt2"))
    assert set(paid) == {True}


def test_small_inputs_are_torchs_where_that_has_one_kernel():
    """A launch from Python costs more than one of torch's. A beta makes two, and where gamma is of another dtype, or
    has an offset, there are seven. Gradients pay later, and never in rows that no registers hold.
    """
    small, gamma = torch.ones(2, 8), torch.ones(8)
    large, huge, wide = (
        torch.empty(1).expand(*shape) for shape in ((1 << 11, 1 << 10), (1 << 15, 1 << 10), (2048, 16384))
    )
    for x, weight, bias, offset, kind, pays, trained in (
        (small, gamma, None, 0.0, "rmsnorm", False, False), (small, None, None, 0.0, "rmsnorm", False, False),
        (small, gamma, gamma, 0.0, "layernorm", False, False), (small, gamma, gamma, 0.0, "rmsnorm", True, False),
        (small, gamma, None, 1.0, "rmsnorm", True, True), (small, gamma.bfloat16(), None, 0.0, "rmsnorm", True, True),
        (small, gamma, None, 0.0, "crmsnorm", True, True), (large, gamma, None, 0.0, "rmsnorm", True, False),
        (huge, gamma, None, 0.0, "rmsnorm", True, True), (wide, gamma, None, 0.0, "rmsnorm", True, False),
    ):  # fmt: skip
        for grad, expected in ((False, pays), (True, trained)):
            with torch.set_grad_enabled(grad):
                assert norm_ops._pays(x, weight, bias, offset, kind) is expected, (x.shape, offset, kind, grad)
                assert norm_ops._pays(torch.tensor(1.0), None, None, 0.0, "rmsnorm")  # `takes` refuses it, and says so
