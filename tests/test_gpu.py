"""The same numbers on a GPU; where there is none, on one that is pretended."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pretended import pretended_cuda
from stores import config
from zoo import tiny

from normgeo import HiddenStateStore, convert, find_gauge, find_sites, measure_angles
from normgeo.angles import ensemble, job
from normgeo.angles.runs import RunConfig, start_run
from normgeo.angles.scalars import ScalarStore
from normgeo.angles.statistics import ENERGY_UNIT, UNIT, AngleStatistics
from normgeo.bench.store import bench_store
from normgeo.bench.stream import bench_stream
from normgeo.comparison.compare import compare
from normgeo.geometry import Directions
from normgeo.sites import NormSite
from normgeo.store.capture import CaptureConfig, start_capture
from normgeo.store.check import verify
from normgeo.store.rebuild import same_bits, standardized
from normgeo.store.scan import angles_from_store
from normgeo.store.writer import StoreWriter
from normgeo.stream import stream
from normgeo.tokens import TokenBatch, TokenStream

pytestmark = pytest.mark.gpu
real = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")  # for gradients


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    with nullcontext() if torch.cuda.is_available() else pretended_cuda(monkeypatch):
        yield


IDS = np.random.default_rng(0).integers(3, 96, (12, 32))


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "qwen3"])
def test_angles_on_cuda_are_those_of_the_cpu(name):
    cpu = measure_angles(tiny(name), IDS, null=16, null_every=1, name="m", progress=False).frame
    gpu = measure_angles(tiny(name).to("cuda:0"), IDS, null=16, null_every=1, name="m", progress=False).frame
    for column in ("mean_deg", "std_deg", "mean_norm", "energy_share", "median_deg"):
        np.testing.assert_allclose(gpu[column], cpu[column], rtol=1e-4, atol=0.02, err_msg=column)
    assert (gpu.n_tokens == cpu.n_tokens).all()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_bfloat16_meets_the_null_ensemble_on_every_device_as_on_the_cpu(kind, monkeypatch):
    """Sites of one batch on several devices, which may be of several kinds, and more sites than are kept waiting."""
    monkeypatch.setattr(ensemble, "FOUND", 3)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    sites = [NormSite(f"norm{i}", kind, "mlp", i, "layers", 16, 1e-6) for i in range(5)]
    directions = {16: Directions.seeded(16, 40, 0)}
    rows = torch.randn((5, 60, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for home, places in (("cpu", ["cpu"]), (devices[0], devices)):
        statistics = AngleStatistics(sites, directions, device=home, null_every=2)
        statistics.begin(TokenBatch(IDS[:2, :30], IDS[:2, :30], 0))
        for i, x in enumerate(rows):
            for phase in ("pre", "post"):
                statistics.take(i, phase, x.to(places[i % len(places)]))
        statistics.end()
        found.append(statistics.totals("null_count", "null_deviation", "null_square", "null_energy"))
    for name, expected in found[0].items():
        unit = UNIT if name != "null_energy" else ENERGY_UNIT
        torch.testing.assert_close(found[1][name] / unit, expected / unit, rtol=1e-5, atol=1e-3, msg=name)
    assert found[0]["null_energy"][..., 1:].all(-1).sum() == 5 * 3  # û has none where it is taken away


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sites_are_found_on_cuda_in_half_precision(name):
    half = [replace(site, dtype="bfloat16") for site in find_sites(tiny(name))]
    assert find_sites(tiny(name).to("cuda:0").bfloat16()) == half


@real
@pytest.mark.parametrize("name", ["gpt2", "bloom", "whisper", "vit"])
def test_the_gauge_on_cuda_is_that_of_the_cpu(name):
    cpu, gpu = find_gauge(tiny(name)), find_gauge(tiny(name).to("cuda:0"))
    assert (gpu.writers, gpu.readers, gpu.invisible) == (cpu.writers, cpu.readers, cpu.invisible)


@real
@pytest.mark.parametrize("options", [{}, {"to": "crmsnorm"}, {"keep_tie": True}, {"trainable": True}])
def test_conversion_on_cuda(options):
    conversion = convert(tiny("gpt2").to("cuda:0"), **options)
    assert conversion.certificate.error_rel < 1e-12
    assert conversion.model.device.type == "cuda"


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_model_on_two_devices_is_captured(tmp_path, monkeypatch, other):
    """As a device map has it: the first layers here, the others there, and hidden states from both."""
    if other == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device more")
    monkeypatch.setattr("normgeo.angles.runs._draw", lambda table, folder: None)
    tiny("llama").save_pretrained(tmp_path / "m")
    np.save(tmp_path / "ids.npy", IDS)
    places = {"model.embed_tokens": "cuda:0", "model.layers.0": "cuda:0", "model.rotary_emb": "cuda:0",
              "model.layers.1": other, "model.norm": other, "lm_head": other}  # fmt: skip

    def spread(name, **options):
        model = tiny("llama").eval().requires_grad_(False)
        for place, device in places.items():
            module = model.get_submodule(place).to(device)
            add_hook_to_module(module, AlignDevicesHook(execution_device=device, io_same_device=False))
        return model

    monkeypatch.setattr("normgeo.angles.job.load_model", spread)
    run = RunConfig((str(tmp_path / "m"),), str(tmp_path / "ids.npy"), batch=3, null=8)
    during = start_capture(CaptureConfig(run, ("pre", "post"), 64 * 32 * 4), tmp_path / "s", progress=False).frame
    assert verify(tmp_path / "s")[1] == []
    after = angles_from_store(tmp_path / "s", null=8, progress=False).frame
    alone = measure_angles(tiny("llama"), IDS, null=8, name="m", progress=False).frame
    for found in (after, alone):
        for column in ("mean_deg", "std_deg", "mean_norm", "energy_share"):
            np.testing.assert_allclose(during[column], found[column], rtol=1e-4, atol=0.02, err_msg=column)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("qwen3", "float16"), ("gpt2", "float32")])
def test_a_store_has_what_the_model_gave_however_late_it_is_fetched(home, tmp_path, monkeypatch, name, dtype):
    """With room for little that waits, and a model that writes over hidden states as soon as its norms have them."""
    monkeypatch.setattr("normgeo.store.capture.StoreWriter", partial(StoreWriter, waiting_bytes=20000))
    load = job.load_model

    def overwrite(module, args, output):
        args[0].mul_(0.5)

    def overwriting(path, **options):
        model = load(path, **options)
        for site in find_sites(model, qk=True):
            model.get_submodule(site.name).register_forward_hook(overwrite)
        return model

    monkeypatch.setattr("normgeo.angles.job.load_model", overwriting)
    phases = ("pre", "standardized", "post")
    setup = config(home, name, phases, n=400, device="cuda:0", dtype=dtype, qk=True, batch=5)
    start_capture(setup, tmp_path / "s", progress=False)
    assert verify(tmp_path / "s")[1] == []
    model, store = (
        overwriting(home / name, dtype=getattr(torch, dtype), device="cuda:0"),
        HiddenStateStore(tmp_path / "s"),
    )
    seen = {(site.key, phase): [] for site in store.sites for phase in phases}

    class Kept:
        def begin(self, batch): ...

        def take(self, site, phase, hidden):
            seen[store.sites[site].key, phase].append(hidden.cpu().clone())

        def end(self): ...

    batches = TokenStream.from_array(np.load(home / "ids.npy")).batches(400, 5)
    for _ in stream(model, store.sites, batches, [Kept()]):
        pass
    for site in store.sites:
        for phase in ("pre", "post"):
            assert same_bits(store.open(site.key, phase).torch(), torch.cat(seen[site.key, phase])), (site.key, phase)
        y = standardized(torch.cat(seen[site.key, "pre"]).double(), site.kind, site.eps)
        found = store.open(site.key, "standardized").torch().double()
        torch.testing.assert_close(found, y, rtol=1e-5 if dtype == "float32" else 0.01, atol=0.01)


def test_a_run_on_cuda_keeps_the_scalars_of_one_on_the_cpu(home, tmp_path):
    for device in ("cpu", "cuda:0"):
        start_run(config(home, device=device, keep="scalars").run, tmp_path / device, progress=False)
    cpu, gpu = (ScalarStore(tmp_path / device / "scalars.zarr/gpt2") for device in ("cpu", "cuda:0"))
    for site in find_sites(tiny("gpt2")):
        for phase in ("pre", "standardized", "post"):
            np.testing.assert_allclose(gpu.norms(site.key, phase), cpu.norms(site.key, phase), rtol=1e-4)
            angles = (found.angles(site.key, phase, "random_a") for found in (gpu, cpu))
            np.testing.assert_allclose(*angles, rtol=0, atol=1e-3)


def test_models_are_compared_on_cuda_as_on_the_cpu():
    tokens = TokenStream.from_array(IDS)
    frames = [
        compare({"a": tiny("gpt2").to(where), "b": tiny("gpt2", seed=1).to(where)}, tokens, null=4, rounds=1,
                progress=False).frame.set_index("model")
        for where in ("cpu", "cuda:0")
    ]  # fmt: skip
    for column in ("perplexity", "kl_mean", "kl_max", "error_rms_rel"):
        np.testing.assert_allclose(frames[1][column], frames[0][column], rtol=1e-3, atol=1e-6, err_msg=column)


def test_what_measuring_and_capturing_cost_is_measured_on_cuda(home, tmp_path):
    run = bench_stream(tiny("gpt2").to("cuda:0"), TokenStream.from_array(IDS), batch=4, rounds=1, null=4)
    store = bench_store(RunConfig((str(home / "gpt2"),), str(home / "ids.npy"), 400, batch=5), tmp_path, rounds=1)
    assert (run.seconds > 0).all()
    assert (store.seconds > 0).all()
    assert not list(tmp_path.iterdir())
