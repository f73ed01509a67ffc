import contextlib
import io
import os
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest
import torch
from stores import captured
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils
from zoo import tiny

from analyses import stream_cost
from normgeo import find_sites, load_model, models
from normgeo.angles import job
from normgeo.angles.statistics import AngleStatistics
from normgeo.bench import inference, passes
from normgeo.bench import store as store_bench
from normgeo.bench import stream as stream_bench
from normgeo.bench.stream import VARIANTS, bench_stream
from normgeo.errors import DataError
from normgeo.examples import example_inputs
from normgeo.system import memory
from normgeo.tokens import TokenStream


@pytest.fixture(scope="module")
def frame():
    ids = np.random.default_rng(0).integers(3, 96, (4, 16))
    return bench_stream(tiny("gpt2"), TokenStream.from_array(ids), batch=2, rounds=2, null=8, null_every=2)


def test_a_row_for_every_variant(frame):
    assert [*frame.variant] == [*VARIANTS]
    about = {"device", "torch", "dtype", "threads", "batch", "context", "d", "sites"}
    about |= {"ratio", "ratio_q25", "ratio_q75", "seconds"}
    assert about <= set(frame.columns)
    assert (frame.seconds > 0).all()
    assert (frame.ratio_q25 <= frame.ratio).all()
    assert (frame.ratio <= frame.ratio_q75).all()
    base = frame.set_index("variant").loc["base"]
    assert base.ratio == base.ratio_q25 == base.ratio_q75 == 1
    assert (base.batch, base.context, base.d, base.sites) == (2, 16, 32, 5)


def test_a_variant_is_compared_with_the_base_just_before_and_after(monkeypatch):
    """On a machine that gets slower all the time, which changes no ratio."""
    now, calls = [0.0], [0]

    def taking(share):
        def run(chunk):
            calls[0] += 1
            now[0] += share * calls[0]

        return run

    shares = {name: 1.0 + k for k, name in enumerate(VARIANTS)}
    monkeypatch.setattr(stream_bench, "_variants", lambda *_: {name: taking(s) for name, s in shares.items()})
    monkeypatch.setattr("normgeo.system.timing.time.perf_counter", lambda: now[0])
    frame = bench_stream(tiny("gpt2"), TokenStream.from_array(np.full((2, 4), 5)), batch=2, rounds=3, null=4)
    for row in frame.itertuples():
        assert [row.ratio_q25, row.ratio, row.ratio_q75] == pytest.approx([shares[row.variant]] * 3)


def test_the_model_is_left_as_it_was():
    model = tiny("gpt2")
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    bench_stream(model, TokenStream.from_array(np.full((2, 4), 5)), batch=2, rounds=1, null=4)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights


def test_every_variant_does_what_its_name_says(monkeypatch):
    nulls, chunk = [], TokenStream.from_array(np.full((2, 4), 5)).alike(None, 2, 1)[0]
    new_statistics = stream_bench.new_statistics
    monkeypatch.setattr(
        stream_bench, "new_statistics", lambda *args, null, **options: nulls.append(null) or new_statistics(
            *args, null=null, **options)
    )  # fmt: skip
    model = tiny("gpt2")
    runs, asked, flops = stream_bench._variants(model, find_sites(model), 6, 2), {}, {}
    assert nulls == [0, 6]
    forward = type(model.transformer).forward
    for name, run in runs.items():

        def watched(self, *args, name=name, **options):
            asked[name] = options.get("output_hidden_states")
            return forward(self, *args, **options)

        with FlopCounterMode(display=False) as counter, monkeypatch.context() as patch:
            patch.setattr(type(model.transformer), "forward", watched)
            run(chunk)
        flops[name] = counter.get_total_flops()
    assert {name for name, hidden in asked.items() if hidden} == {"output_hidden_states"}
    head = 2 * model.lm_head.weight.numel() * chunk.n_tokens
    assert {name: flops[name] - flops["base"] for name in ("full", "output_hidden_states", "clone_hooks")} == {
        "full": head, "output_hidden_states": 0, "clone_hooks": 0,
    }  # fmt: skip


def test_variants_share_weights_and_nothing_else():
    model = tiny("gpt2")
    twin = models.shared_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert {id(m) for m in model.modules()}.isdisjoint(id(m) for m in twin.modules())
    twin.transformer.h[0].register_forward_hook(lambda *_: None)
    assert not model.transformer.h[0]._forward_hooks


def test_plot(frame):
    figure = stream_cost.plot(frame.assign(model="tiny"))
    assert isinstance(figure, matplotlib.figure.Figure)
    assert "base model" in figure.axes[0].get_xlabel()
    assert "float32" in figure.get_suptitle()


def test_an_empty_stream_is_refused():
    empty = TokenStream(lambda start: iter(()), 4, "nothing", "", "")
    with pytest.raises(DataError, match="no tokens"):
        bench_stream(tiny("gpt2"), empty)


def test_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(store_bench.Disk, "rate", lambda disk, n=0: job.BLOCK_TOKENS * 1.0)
    monkeypatch.setattr(store_bench, "store_rate", lambda folder: 1e9)
    met, real = set(), store_bench.stream

    def stream(model, sites, batches, sinks):
        met.update(sink.k for sink in sinks if isinstance(sink, AngleStatistics))
        return real(model, sites, batches, sinks)

    monkeypatch.setattr(store_bench, "stream", stream)
    run = job.RunConfig(("embedded-layernorm",), tokens=1024, context=64, batch=4, null=4)
    frame = store_bench.bench_store(run, tmp_path, rounds=2)
    assert met == {run.null}  # as many random directions as the captures meet
    of = frame.set_index("variant")
    assert len(of) == 11
    assert of.baseline["scan of pre"] == "reading of pre"
    assert all(of.ratio[name] == 1 for name in set(of.baseline))
    assert (of.seconds > 0).all()
    assert (of.ratio_q25 <= of.ratio).all()
    moved = (of.mb_per_s * of.seconds).round().dropna()
    one_phase = 1024 * 192 * 4 * len(find_sites(load_model("embedded-layernorm"))) / 1e6
    assert len(moved) == 9
    for name, found in moved.items():
        assert found == pytest.approx(one_phase * (2 if "and post" in name else 1), rel=0.05), name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direct", [True, False])
def test_all_of_a_stores_chunks_are_read_after_the_system_forgot_them(home, tmp_path, monkeypatch, direct):
    store, read, forgotten, before = captured(home, tmp_path / "s", phases=("pre", "post")), {}, set(), []
    chunks = {f for f in (store / "hidden.zarr/sites").rglob("*") if f.is_file() and f.name != "zarr.json"}
    at = store_bench.Disk.read_range

    def forget(descriptor, start, n, advice):
        forgotten.add(Path(f"/proc/self/fd/{descriptor}").resolve())
        assert (start, n, advice) == (0, 0, os.POSIX_FADV_DONTNEED)

    def past(self, name, start, n):
        before.append(len(forgotten))
        read[store / name] = len(at(self, name, start, n))

    class Through(io.FileIO):
        def readinto(self, into):
            before.append(len(forgotten))
            read[Path(self.name)] = n = super().readinto(into)
            return n

    monkeypatch.setattr(os, "posix_fadvise", forget)
    monkeypatch.setattr(store_bench.Disk, "read_range", past)
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, buffering=-1: Through(self) if not buffering else opened(
            self, *args))  # fmt: skip
        store_bench._read(store, direct)
    assert read == {file: file.stat().st_size for file in chunks}
    assert forgotten == chunks
    assert set(before) == {len(chunks)}
    forgotten.clear()
    monkeypatch.setattr(store_bench, "angles_from_store", lambda *_, **__: before.append(set(forgotten)))
    store_bench._scan(store)
    assert before[-1] >= chunks


def test_passes_of_a_model_are_timed_without_statistics_and_with_them_and_a_store(tmp_path, monkeypatch):
    passes = set()

    def passed(run, job, sites, layout, folder=None, exact=()):
        passes.add((run, len(sites), folder))
        return 1.0

    monkeypatch.setattr(store_bench, "_pass", passed)
    monkeypatch.setattr(store_bench.Disk, "rate", lambda disk, n=0: 1e9)
    monkeypatch.setattr(store_bench, "store_rate", lambda folder: 1e9)
    monkeypatch.setattr(store_bench, "_read", lambda store, direct: 2.0 if direct else 4.0)
    monkeypatch.setattr(store_bench, "_scan", lambda store: 8.0)
    run = job.RunConfig(("embedded-layernorm",), tokens=256, context=64, batch=4)
    frame = store_bench.bench_store(run, tmp_path, rounds=1)
    seconds = frame.set_index("variant").seconds.to_dict()
    for phases in ("pre", "pre and post"):
        assert [seconds[f"{way} of {phases}"] for way in ("reading", "direct reading", "scan")] == [4.0, 2.0, 8.0]
    count = len(find_sites(load_model("embedded-layernorm")))
    assert passes == {(run, 0, None), (run, count, None), (run, count, tmp_path)}


def test_a_measure_of_a_store_is_over_its_baseline_in_the_same_round():
    seconds = {"x": [2.0, 40.0, 6.0, 8.0], "base": [1.0, 10.0, 2.0, 2.0]}
    row = store_bench._row("x", store_bench._Measure(lambda: 0.0, "base", 14_000_000), seconds, 70)
    assert [row["ratio_q25"], row["ratio"], row["ratio_q75"]] == [2.75, 3.5, 4.0]
    assert (row["seconds"], row["mb_per_s"], row["tokens_per_s"]) == (7.0, 2.0, 10.0)


def test_the_store_alone(tmp_path):
    assert store_bench.store_rate(tmp_path, sites=1, d=64, n_tokens=256, batch=128) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_rate_of_a_store_is_of_all_its_bytes(tmp_path, monkeypatch):
    made, clock = [], iter([10.0, 12.0])

    @contextlib.contextmanager
    def kept(folder, layout):
        disk = store_bench.Disk(tmp_path / "kept")
        with disk.writing():
            store_bench.create(disk, layout, [], [], [], {})
            made.append(layout)
            yield disk

    monkeypatch.setattr(store_bench, "_new_store", kept)
    monkeypatch.setattr(store_bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    rate = store_bench.store_rate(tmp_path, sites=2, d=64, n_tokens=512, batch=128)
    chunks = [file for file in (tmp_path / "kept/hidden.zarr").rglob("c.*") if file.is_file()]
    assert sum(file.stat().st_size for file in chunks) == made[0].nbytes == 2 * rate
    assert made[0].nbytes > 2 * 3 * 512 * 64 * 4


def test_memory_is_kept_until_nobody_wants_it_kept(monkeypatch):
    set_to = {}
    library = SimpleNamespace(mallopt=lambda option, value: set_to.update({option: value}))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    with memory.memory_kept():
        with memory.memory_kept():
            pass
        assert set_to == {-4: 0, -1: -1}
    assert set_to == {-4: 65536, -1: 1 << 26}


@pytest.mark.parametrize("n", [1, memory.PAGE, memory.LARGE - 1, memory.LARGE, memory.LARGE + 1])
def test_pages_are_whole_and_those_in_use_are_never_given_twice(n):
    with memory.memory_kept():
        held = [memory.pages(n) for _ in range(3)]
        for i, found in enumerate(held):
            assert n <= len(found) < n + memory.PAGE
            assert found.ctypes.data % memory.PAGE == 0
            found[:] = i
        part = torch.from_numpy(held.pop(0)[:n])  # as long as anything looks at them
        more = [memory.pages(n) for _ in range(3)]
        for found in more:
            found[:] = 9
        assert [part.unique().tolist(), *(np.unique(found).tolist() for found in held)] == [[0], [1], [2]]


def test_large_pages_that_nobody_looks_at_are_given_again_until_memory_is_kept_no_longer():
    with memory.memory_kept():
        first = memory.pages(memory.LARGE)
        where, view = first.ctypes.data, first[10:20]
        del first
        second = memory.pages(memory.LARGE)
        assert second.ctypes.data != where
        del view
        assert memory.pages(memory.LARGE).ctypes.data == where
        assert sum(map(len, memory._free.values())) == 1
    assert not memory._free
    del second
    assert not memory._free


def test_what_waits_to_be_used_again_is_bounded_and_gives_way_to_other_sizes(monkeypatch):
    n = memory.LARGE
    monkeypatch.setattr(memory, "AT_MOST", 3 * n)
    waiting = lambda: {size: len(free) for size, free in memory._free.items() if free}  # noqa: E731
    with memory.memory_kept():
        held = [memory.pages(n) for _ in range(5)]
        del held
        assert waiting() == {n: 3}
        del (other := [memory.pages(2 * n)])[:]
        assert other == []
        assert waiting() == {2 * n: 1}
        del (other := [memory.pages(4 * n)])[:]
        assert waiting() == {}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forks_memory_is_its_own():
    with memory.memory_kept():
        mine, kept = memory.pages(memory.LARGE), memory.pages(memory.LARGE)
        mine[:], kept[:] = 1, 2
        where = kept.ctypes.data
        del kept
        if not (child := os.fork()):
            mine[:] = 3
            memory.pages(memory.LARGE)[:] = 4
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        kept = memory.pages(memory.LARGE)
        assert kept.ctypes.data == where
        assert (mine == 1).all()
        assert (kept == 2).all()


def test_without_memory_for_more_there_is_the_usual_error(monkeypatch):
    monkeypatch.setattr(memory.mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    with memory.memory_kept():
        assert len(memory.pages(memory.LARGE)) == memory.LARGE
        with pytest.raises(MemoryError):
            memory.pages(1 << 60)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "without", "masked"),
    [("gpt2", contextlib.nullcontext, True), ("gpt2", passes.unmasked, False), ("vit", passes.unmasked, False)],
)
def test_a_recorded_pass_attends_without_a_mask_as_an_eager_one_does(name, without, masked, monkeypatch):
    """As a stream that records a graph, `is_tracing` says that the device cannot be asked."""
    masks, real = [], functional.scaled_dot_product_attention

    def attention(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    options = {"use_cache": False} if name == "gpt2" else {}
    with without():
        tiny(name)(**example_inputs(tiny(name)), **options)
    assert [mask is not None for mask in masks] == [masked, masked]


def test_a_compiler_does_not_make_models_mask_nothing(monkeypatch):
    monkeypatch.setattr(masking_utils, "is_tracing", lambda _=None: True)  # as while it traces
    asked = []

    def compiled(model, **_):
        return lambda **inputs: asked.append(masking_utils.is_tracing()) or model(**inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    inference.bench_inference(tiny("vit"), variants=("no-norm",), modes=("compiled",), rounds=3)
    assert asked
    assert not any(asked)
    assert masking_utils.is_tracing()
