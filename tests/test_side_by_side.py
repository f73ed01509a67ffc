"""What others do at the same time, in threads of the same process, changes nothing, and nothing is changed for them."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import numpy as np
import pytest
import torch
from test_function_gains import Config, Model
from torch import nn
from zoo import tiny

from normgeo import convert, find_sites, measure_angles, optimize
from normgeo.figures import styled
from normgeo.kernels import norm_ops
from normgeo.store.workers import threads

IDS = np.random.default_rng(0).integers(3, 90, (4, 16))


def elsewhere(do):
    """What it gives in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


@pytest.mark.parametrize(
    "make", [lambda: tiny("gpt2").base_model, lambda: Model(Config())], ids=["modules", "functions"]
)
def test_a_model_is_measured_while_another_thread_runs_it(make):
    """In the middle of every pass of this thread, another one runs the whole model on other tokens."""
    model, here, served = make().eval(), threading.get_ident(), []
    other = torch.full((2, 5), 7)

    def run():
        with torch.no_grad():
            return model(other)["last_hidden_state"]

    def serve(*_):
        if threading.get_ident() == here:
            served.append(elsewhere(run))

    sites = find_sites(model)
    quiet = measure_angles(model, IDS, null=8, batch=2, name="m", progress=False)
    alone = run()
    with model.get_input_embeddings().register_forward_hook(serve):
        assert find_sites(model) == sites
        loud = measure_angles(model, IDS, null=8, batch=2, name="m", progress=False)
    assert len(served) > 3
    assert all(torch.equal(states, alone) for states in served)
    assert loud.frame.equals(quiet.frame)


def test_scans_at_once_leave_torch_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first, second = threads(), threads()
        _, workers = first.__enter__()
        _, others = elsewhere(second.__enter__)
        first.__exit__(None, None, None)
        elsewhere(lambda: second.__exit__(None, None, None))
        assert (workers, others) == (6, 6)
        assert elsewhere(torch.get_num_threads) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_two_threads_that_draw_leave_matplotlib_its_settings():
    began, ended, both = threading.Event(), threading.Event(), threading.Event()

    @styled
    def first():
        began.set()
        both.wait(1)  # the other is in too, if it can be

    @styled
    def second():
        both.set()
        ended.wait(1)

    def draw():
        began.wait()
        second()

    before = dict(matplotlib.rcParams)
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(draw)
        first()
        ended.set()
        drawn.result()
    assert dict(matplotlib.rcParams) == before


def test_passes_of_an_optimized_model_take_turns(monkeypatch):
    """Each thread finds the stream as its own pass left it, and a copy of the model waits for nobody."""
    model = optimize(convert(tiny("gpt2")).model)
    inputs = [torch.full((2, n), n) for n in (5, 9)]
    with torch.inference_mode():
        alone = [model(ids).logits.clone() for ids in inputs]
    calls, add_norm_, both = [], norm_ops.add_norm_, threading.Barrier(2, timeout=60)

    def slow(*given):
        calls.append(threading.get_ident())
        time.sleep(0.01)  # as long as the other needs to begin
        return add_norm_(*given)

    def run(ids):
        both.wait()  # else one thread may do all, before there is another
        with torch.inference_mode():
            return [model(ids).logits for _ in range(3)]

    monkeypatch.setattr(norm_ops, "add_norm_", slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, inputs))
    assert all(torch.equal(logits, truth) for own, truth in zip(found, alone, strict=True) for logits in own)
    passes = np.array(calls).reshape(6, -1)
    assert len(set(calls)) == 2
    assert (passes == passes[:, :1]).all()
    with model._modules["transformer"].normgeo_stream.turns.lock, torch.inference_mode():
        assert torch.equal(copy.deepcopy(model)(inputs[0]).logits, alone[0])


class Refusing(nn.Dropout):
    def train(self, mode=True):
        if not mode:
            raise RuntimeError("stays in training")
        return super().train(mode)


def test_a_module_that_refuses_to_be_evaluated_leaves_all_others_in_training():
    model = tiny("gpt2").train()
    model.transformer.h[1].mlp.dropout = Refusing(0.1)
    with pytest.raises(Exception, match="stays in training"):
        find_sites(model)
    assert all(module.training for module in model.modules())
