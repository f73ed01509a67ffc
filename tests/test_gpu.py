"""The same numbers on a GPU; these run wherever CUDA is."""

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from zoo import tiny

from normgeo import convert, find_gauge, find_sites, measure_angles
from normgeo.capture import CaptureConfig, start_capture
from normgeo.runs import RunConfig
from normgeo.scan import angles_from_store
from normgeo.store import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = np.random.default_rng(0).integers(3, 96, (12, 32))


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "qwen3"])
def test_angles_on_cuda_are_those_of_the_cpu(name):
    cpu = measure_angles(tiny(name), IDS, null=16, null_every=1, name="m", progress=False).frame
    gpu = measure_angles(tiny(name).cuda(), IDS, null=16, null_every=1, name="m", progress=False).frame
    for column in ("mean_deg", "std_deg", "mean_norm", "energy_share", "median_deg"):
        np.testing.assert_allclose(gpu[column], cpu[column], rtol=1e-4, atol=0.02, err_msg=column)
    assert (gpu.n_tokens == cpu.n_tokens).all()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sites_are_found_on_cuda_in_half_precision(name):
    assert find_sites(tiny(name).cuda().bfloat16()) == find_sites(tiny(name))


@pytest.mark.parametrize("name", ["gpt2", "bloom", "whisper", "vit"])
def test_the_gauge_on_cuda_is_that_of_the_cpu(name):
    cpu, gpu = find_gauge(tiny(name)), find_gauge(tiny(name).cuda())
    assert (gpu.writers, gpu.readers, gpu.invisible) == (cpu.writers, cpu.readers, cpu.invisible)


@pytest.mark.parametrize("options", [{}, {"to": "crmsnorm"}, {"keep_tie": True}, {"trainable": True}])
def test_conversion_on_cuda(options):
    conversion = convert(tiny("gpt2").cuda(), **options)
    assert conversion.certificate.error_rel < 1e-12
    assert conversion.model.device.type == "cuda"


def test_a_model_on_two_devices_is_captured(tmp_path, monkeypatch):
    """As a device map has it: the first layers here, the others there, and hidden states from both."""
    monkeypatch.setattr("normgeo.runs._draw", lambda table, folder: None)
    tiny("llama").save_pretrained(tmp_path / "m")
    np.save(tmp_path / "ids.npy", IDS)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0, "model.layers.1": "cpu",
              "model.norm": "cpu", "lm_head": "cpu"}  # fmt: skip

    def spread(name, **options):
        model = tiny("llama").eval().requires_grad_(False)
        for place, device in places.items():
            module = model.get_submodule(place).to(device)
            add_hook_to_module(module, AlignDevicesHook(execution_device=device, io_same_device=False))
        return model

    monkeypatch.setattr("normgeo.runs.load_model", spread)
    run = RunConfig((str(tmp_path / "m"),), str(tmp_path / "ids.npy"), batch=3, null=8)
    during = start_capture(CaptureConfig(run, ("pre", "post"), 64 * 32 * 4), tmp_path / "s", progress=False).frame
    assert verify(tmp_path / "s")[1] == []
    after = angles_from_store(tmp_path / "s", null=8, progress=False).frame
    alone = measure_angles(tiny("llama"), IDS, null=8, name="m", progress=False).frame
    for found in (after, alone):
        for column in ("mean_deg", "std_deg", "mean_norm", "energy_share"):
            np.testing.assert_allclose(during[column], found[column], rtol=1e-4, atol=0.02, err_msg=column)
