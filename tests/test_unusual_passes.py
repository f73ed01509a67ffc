"""Hidden states are those of a pass as the model makes it, and of no other."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from types import MethodType

import accelerate
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from oracle import degrees
from torch import nn
from transformers import GPT2LMHeadModel
from zoo import by_type, tiny

from normgeo import compare, convert, find_sites, measure_angles, observe, wrap
from normgeo.angles import ensemble
from normgeo.angles.measure import new_statistics
from normgeo.errors import ModelError
from normgeo.stream import check_pass
from normgeo.tokens import TokenBatch
from normgeo.trace import Trace, _hooked

IDS = np.random.default_rng(0).integers(3, 96, (4, 16))


class Louder(GPT2LMHeadModel):
    def forward(self, input_ids=None, **options):
        return super().forward(inputs_embeds=self.transformer.wte(input_ids) * 5, **options)


def louder():
    model = tiny("gpt2")
    model.__class__ = Louder
    return model


def hooked():
    model = tiny("gpt2")
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"input_ids": kwargs["input_ids"].flip(1)}), with_kwargs=True
    )
    return model


def replaced():
    model, forward = tiny("gpt2"), GPT2LMHeadModel.forward
    model.forward = MethodType(lambda self, input_ids=None, **other: forward(self, input_ids.flip(1), **other), model)
    return model


def prepared():
    AcceleratorState._reset_state()  # another test may have asked for another precision
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny("gpt2"))


@torch.no_grad()
@pytest.mark.parametrize("make", [louder, hooked, replaced, prepared])
def test_what_is_around_the_base_counts(make):
    model, seen = make(), []
    with model.transformer.h[1].ln_2.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double())):
        model(input_ids=torch.from_numpy(IDS))
    frame = measure_angles(model, IDS, null=0, batch=4, sites="*h.1.ln_2", name="m", progress=False).frame
    row = frame[(frame.phase == "pre") & (frame.direction == "uniform")]
    expected = degrees(seen[0].flatten(0, 1).numpy(), np.ones(seen[0].shape[-1])).mean()
    assert float(row.mean_deg.iloc[0]) == pytest.approx(float(expected), abs=1e-4)


class Running:
    """A sink that runs the model itself, wherever it can."""

    def __init__(self, model):
        self.model, self.taken = model, []

    def begin(self, batch):
        self.model(torch.from_numpy(batch.ids[:, :5]))

    def take(self, site, phase, hidden):
        self.taken.append((site, phase, hidden.clone()))
        self.model(torch.from_numpy(IDS[:1, :3]))

    def end(self):
        self.model(torch.from_numpy(IDS[:, :7]))


class Quiet(Running):
    def __init__(self):
        super().__init__(lambda _: None)


def test_passes_of_others_hand_on_nothing():
    model = tiny("gpt2")
    loud, quiet = Running(model), Quiet()
    for sink in (loud, quiet):
        observe(model, IDS, [sink], batch=2)
    assert [taken[:2] for taken in loud.taken] == [taken[:2] for taken in quiet.taken]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(loud.taken, quiet.taken, strict=True))
    options = {"null": 8, "batch": 2, "name": "m", "progress": False}
    frame = measure_angles(model, IDS, on_batch=lambda batch: model(torch.as_tensor(batch.ids)), **options).frame
    assert frame.equals(measure_angles(model, IDS, **options).frame)


def test_the_null_ensemble_is_in_float32_under_autocast():
    model, found = tiny("gpt2"), []
    sites = find_sites(model)
    statistics = lambda: new_statistics(model, sites, null=64, seed=0, null_every=1, bos=None)  # noqa: E731
    states = torch.randn(64, sites[0].d)
    for enabled in (False, True):
        sink = statistics()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.inference_mode():
            sink.begin(TokenBatch(IDS, np.zeros_like(IDS), 0))
            for index in range(len(sites)):
                for phase in ("pre", "post"):
                    sink.take(index, phase, states)
            sink.end()
        found.append(sink.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_the_null_ensemble_leaves_the_precision_of_products_as_threads_that_multiply_at_once_met_it():
    setting, inside, seen = torch.backends.mkldnn.matmul, Barrier(2, timeout=60), []

    def multiply(stays):
        with ensemble.WHOLE_FLOAT32:
            inside.wait()  # both are in
            if stays:
                inside.wait()  # the other is out
                seen.append(setting.fp32_precision)
        if not stays:
            inside.wait()

    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(multiply, stays) for stays in (False, True)]:
                done.result()
        assert (seen, setting.fp32_precision) == (["ieee"], "tf32")
    finally:
        setting.fp32_precision = before


class Block(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.up(self.norm(x))


class Headed(nn.Module):
    """Its embedding and its head are lists of modules that are run one after the other, and no layers."""

    def __init__(self, d=32):
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Sequential(nn.Embedding(96, d), nn.LayerNorm(d), nn.Dropout())
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 96))

    def forward(self, ids):
        x = self.begin(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_norm_in_a_head_is_the_final_one():
    model = wrap(Headed().eval(), "begin.0")
    places = [(site.name.removeprefix("module."), site.role, site.layer) for site in find_sites(model)]
    assert places == [
        ("begin.1", "embedding", 0), ("blocks.0.norm", "mlp", 0), ("blocks.1.norm", "mlp", 1), ("head.0", "final", 2),
    ]  # fmt: skip
    assert len(convert(model, to="naive-rmsnorm").replaced) == 4


class Forgiving(Block):
    """It goes on where something in it is refused."""

    def forward(self, x):
        try:
            return super().forward(x)
        except ValueError:
            return x


class Refusing(Quiet):
    def take(self, site, phase, hidden):
        super().take(site, phase, hidden)
        if len(self.taken) == 1:
            raise ValueError("no")


def test_what_a_model_makes_of_a_sinks_error_leaves_the_rest_alone():
    model = wrap(nn.Sequential(nn.Embedding(96, 32), Forgiving(), Forgiving(), nn.LayerNorm(32)).eval(), "0")
    sink = Refusing()
    observe(model, IDS, [sink], batch=4)
    assert [taken[:2] for taken in sink.taken] == [(0, "pre"), (1, "pre"), (1, "post"), (2, "pre"), (2, "post")]


def test_a_model_in_training_mode_is_measured_by_two_threads_at_once():
    """The one that ends first does not put it back into training while the other goes on."""
    model = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    expected = measure_angles(model, IDS, batch=1, progress=False).frame
    one_began, other_began, one_ended = Event(), Event(), Event()

    def one():
        began = lambda _: one_began.set() or other_began.wait(60)  # noqa: E731
        measure_angles(model, IDS[:2], batch=1, progress=False, on_batch=began)
        one_ended.set()

    def other():
        assert one_began.wait(60)
        began = lambda _: other_began.set() or one_ended.wait(60)  # noqa: E731
        return measure_angles(model, IDS, batch=1, progress=False, on_batch=began).frame

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(one), pool.submit(other)
        first.result()
        np.testing.assert_array_equal(second.result().mean_deg, expected.mean_deg)
    assert all(module.training for module in model.modules())


def test_a_hook_that_torch_calls_before_it_knows_of_its_arguments_does_nothing():
    """In a thread that runs a model while another one begins to look at it."""
    model = tiny("gpt2")
    with _hooked(model, Trace()), ThreadPoolExecutor(1) as pool:
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        assert hooks
        assert all(pool.submit(hook, model, ()).result() is None for hook in hooks)


def test_models_that_make_constants_are_measured_in_float64():
    """XGLM fills masks with the smallest number of its dtype, by a tensor of the default one."""
    model = by_type("xglm").double()
    assert measure_angles(model, IDS % 50 + 3, null=0, progress=False).frame.n_tokens.max() > 50


def test_norms_behind_an_attention_that_weighs_by_scores_of_its_own_are_behind_a_branch():
    """XLNet's stands in the module of its attention, which has no linear layers: it is Post-LN all the same."""
    xlnet = by_type("xlnet")
    assert [(site.role, site.layer) for site in find_sites(xlnet)] == [
        (role, layer) for layer in range(2) for role in ("post_attention", "post_mlp")
    ]
    table = measure_angles(xlnet, IDS, null=64, null_every=1, progress=False)
    assert "(median over 4 sites;" in table.verdict()


class Blind(torch.nn.Sequential):
    def forward(self, ids):
        raise ValueError(self.said)


def test_a_model_that_fails_in_half_precision_is_to_be_tried_in_single():
    """Loading leaves some of XLNet's weights as wide as they are made, whatever is asked for, and it fails at them."""
    model = by_type("xlnet")
    model.transformer.word_embedding.bfloat16()
    for measured in (find_sites, lambda model: check_pass(model, [], 4)):
        with pytest.raises(ModelError, match=r"failed on .*; try --dtype float32 \(dtype=\), or "):
            measured(model)
    blind = wrap(Blind(torch.nn.Embedding(48, 8), torch.nn.LayerNorm(8)).bfloat16())
    for said, then in (("there is no image", "give"), ("Unsupported dtype BFloat16", "try --dtype float32")):
        blind.module.said = said
        with pytest.raises(ModelError, match=f"failed on .* {said}; {then}"):
            check_pass(blind, [], 4)  # all of it is as wide


class Turning(nn.Module):
    """It keeps what it has computed for the longest sequence so far, as code for rotary positions does."""

    def __init__(self):
        super().__init__()
        self.kept, self.norm, self.head = torch.ones(0, 1), nn.LayerNorm(8), nn.Linear(8, 48)
        self.table = nn.Embedding(48, 8)

    def forward(self, ids):
        if ids.shape[1] > len(self.kept):
            self.kept = torch.arange(float(ids.shape[1]))[:, None].cos()
        return self.head(self.norm(self.table(ids) * self.kept[: ids.shape[1]]))


def test_what_a_pass_leaves_in_a_model_is_trained_on():
    """Of tensors made in inference mode there are no gradients."""
    ids, models = torch.from_numpy(IDS) % 48, {name: wrap(Turning()) for name in "ab"}
    measure_angles(models["a"], ids[:, :12], null=0, progress=False)
    models["a"](ids[:, :12])["logits"].sum().backward()
    compare(models, ids, null=0, rounds=1, progress=False)
    for model in models.values():
        model(ids)["logits"].sum().backward()
