"""The same numbers on a GPU; these run wherever CUDA is."""

import numpy as np
import pytest
import torch
from zoo import tiny

from normgeo import convert, find_gauge, find_sites, measure_angles

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
