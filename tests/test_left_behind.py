"""What calls leave behind in a process: random numbers, modes, hooks, settings and other threads are as they were."""

import copy
import threading

import matplotlib
import numpy as np
import pytest
import torch
import zoo
from torch.nn.utils import prune
from training_zoo import small
from transformers import GPT2Config, GPT2Model

from analyses import models_table
from normgeo import convert, find_gauge, find_sites, load_model
from normgeo.angles.measure import new_statistics
from normgeo.behaviour import behaviour_of
from normgeo.conversion import optimize as optimizing
from normgeo.conversion import tables
from normgeo.conversion.optimize import fused_norms, optimize
from normgeo.conversion.shallow import shallow_model
from normgeo.conversion.tables import written_by_tables
from normgeo.errors import ModelError, NormGeoError
from normgeo.tokens import TokenBatch, TokenStream
from normgeo.training.corpus import Shuffled
from normgeo.training.train import Trainer
from normgeo.training.twins import build_twin, evaluate


def test_probing_a_norm_runs_nobodys_hooks(tiny):
    model, given = tiny("gpt2"), []
    hook = model.transformer.h[0].ln_1.register_forward_hook(lambda _, args, out: given.append(args[0].dtype))
    sites = find_sites(model)
    hook.remove()
    assert len(sites) == 5
    assert given == [torch.float32]  # the pass that finds them


@pytest.mark.parametrize("grad", [False, True])
def test_a_norm_whose_weight_a_hook_makes_is_found(grad):
    model = zoo.tiny("gpt2")
    names = [site.name for site in find_sites(model)]
    with torch.set_grad_enabled(grad):
        prune.random_unstructured(model.transformer.h[0].ln_1, "weight", amount=0.3)
        model(torch.tensor([[5, 6, 7]]))
    assert [site.name for site in find_sites(model)] == names
    assert behaviour_of(model.transformer.h[0].ln_1, torch.Size((2, 5, 32))).kind == "layernorm"
    conversion = convert(model)
    assert conversion.certificate.passed
    assert [site.name for site in conversion.replaced] == names


def test_a_norm_that_is_recentered_stays_a_norm(tiny):
    original = tiny("bloom")
    conversion = convert(original)
    assert any(place.side == "output" for place in conversion.recentered)
    names = [site.name for site in find_sites(conversion.model)]
    assert names == [site.name for site in find_sites(original)]


@pytest.mark.parametrize("do", [
    lambda: build_twin("layernorm", small(), 48), lambda: build_twin("rmsnorm", small(), 48),
    lambda: build_twin("pre-crmsnorm", small(), 48), lambda: zoo.by_type("gpt2"),
    lambda: find_gauge(zoo.by_type("m2m_100")), lambda: convert(zoo.by_type("gpt2")),
    lambda: shallow_model(GPT2Model, GPT2Config(n_embd=32, n_head=4, n_layer=5)),
])  # fmt: skip
def test_no_random_numbers_are_taken(do):
    torch.manual_seed(5)
    do()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_a_table_is_put_back_where_a_pass_fails(monkeypatch):
    model = zoo.by_type("m2m_100").double()
    sites, inputs = (
        find_sites(model),
        {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[5, 6]])},
    )
    before, passes = {name: buffer.clone() for name, buffer in model.named_buffers()}, iter(range(2))
    run = tables.outputs_of

    def fails(*given):
        if next(passes, None) is None:
            raise ModelError("no")
        return run(*given)

    monkeypatch.setattr(tables, "outputs_of", fails)
    with pytest.raises(ModelError, match="no"):
        written_by_tables(model, sites, inputs)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_every_module_is_in_its_mode_after_an_evaluation_that_failed():
    model = build_twin("layernorm", small(), 16).train()
    model.transformer.drop.eval()
    with pytest.raises(IndexError, match="index out of range"):
        evaluate(model, TokenStream.from_array([[3] * 17]))
    assert model.training
    assert not model.transformer.drop.training


def test_a_step_that_failed_leaves_no_gradients_to_the_next():
    recipe = small(steps=3)

    def trainer():
        ids = list(range(16)) * 60
        return Trainer("rmsnorm", recipe, Shuffled(TokenStream.from_array(ids), recipe.context, 0), 16, device="cpu")

    plain, broken = trainer(), trainer()
    finite = broken._finite
    broken._finite = lambda what, value: finite(what, float("nan"))
    with pytest.raises(NormGeoError, match="nan"):
        broken.take_step()
    assert any(parameter.grad is not None for parameter in broken.model.parameters())
    broken._finite = finite
    plain.corpus.take(recipe.batch)  # what the failed step was given
    assert broken.take_step() == plain.take_step()


def test_statistics_forget_a_batch_that_was_broken_off():
    model = load_model("embedded-layernorm")
    sites = find_sites(model)[:1]

    def fed(*hidden):
        statistics = new_statistics(model, sites, null=4, seed=0, null_every=1, bos=None)
        for last, x in zip([False] * (len(hidden) - 1) + [True], hidden, strict=True):
            ids = np.arange(len(x))[None]
            statistics.begin(TokenBatch(ids, ids * 0, 0))
            statistics.take(0, "pre", x)
            if last:
                statistics.take(0, "post", x)
                statistics.end()
        return statistics.state_dict()

    x, y = torch.randn(2, 64, sites[0].d)
    alone, after = fed(x[:32]), fed(y, x[:32])
    assert all(torch.equal(alone[name], after[name]) for name in alone)


def test_an_analysis_leaves_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams)
    models_table.plot(models_table.compute())
    assert before == dict(matplotlib.rcParams)


def test_models_are_optimized_by_two_threads_at_once(tiny, monkeypatch):
    models = [copy.deepcopy(convert(tiny("gpt2")).model) for _ in range(2)]
    first_in, second_in, run, failed = threading.Event(), threading.Event(), optimizing.outputs_of, []

    def interleaved(model, *given, **options):
        """The first thread's passes wait until the second one's have begun, and these until the first is done."""
        if model is models[0] and not first_in.is_set():
            first_in.set()
            second_in.wait(60)
        if model is models[1] and not second_in.is_set():
            second_in.set()
            threads[0].join(60)
        return run(model, *given, **options)

    def work(model, begin):
        begin.wait(60)
        try:
            optimize(model)
        except Exception as error:
            failed.append(error)

    monkeypatch.setattr(optimizing, "outputs_of", interleaved)
    at_once = threading.Event()
    at_once.set()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, (at_once, first_in), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert all(len(fused_norms(model)) == 4 for model in models)
    norms = [module for model in models for module in model.modules() if hasattr(module, "standardized")]
    assert {module.kernel for module in norms} == {"rmsnorm"}
