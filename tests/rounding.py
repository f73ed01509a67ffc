"""Norms by kernels, next to exact ones: within the rounding of their dtype."""

import torch

from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm

NAMES = {"layernorm": (LayerNorm, {}), "rmsnorm": (RMSNorm, {}), "crmsnorm": (CRMSNorm, {}),
         "crmsnorm-padded": (CRMSNorm, {"padded": True})}  # fmt: skip
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def drawn(shape, dtype, seed=0, device="cpu"):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(device, dtype)


def close(found, expected, dtype):
    found, expected = found.detach().double(), expected.detach().double()
    scale = float(expected.abs().max()) or 1.0
    assert float((found - expected).abs().max()) <= 8 * ROUNDING[dtype] * scale
