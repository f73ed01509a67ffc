"""What a measurement will cost, said before it starts: time, memory and disk."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from normgeo.errors import RunError
from normgeo.models import base_model
from normgeo.stream import forward
from normgeo.system.timing import devices, synchronize
from normgeo.tokens import TokenBatch

__all__ = ["check_space", "cost"]


def check_space(folder: Path, needed: int) -> None:
    """Refuse what cannot fit.

    Raises:
        RunError: the folder's disk has fewer than `needed` bytes free.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"the scalars need {decimal(needed)} of disk, of which {decimal(free)} are free; give --keep none, fewer "
            "--tokens or another --out"
        )


def _memory(model: PreTrainedModel) -> int:
    """Bytes needed at most so far; what a measurement needs does not grow with the number of tokens."""
    if model.device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices(model) if device.type == "cuda")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@torch.no_grad()
def cost(model: PreTrainedModel, n_tokens: int, context: int, batch: int, disk: int) -> str:
    """Time (from the second of two batches), memory (of the process so far) and disk (bytes), in words."""
    ids = np.full((max(1, min(batch, n_tokens // context)), context), 1)
    probe, base, seconds = TokenBatch(ids, np.zeros_like(ids), 0), base_model(model), 0.0
    for _ in range(2):
        began = time.perf_counter()
        forward(base, probe, int(ids.max()) + 1)
        synchronize(*devices(model))
        seconds = time.perf_counter() - began
    total = max(1.0, 1.1 * seconds * n_tokens / probe.n_tokens)
    took = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} min" if total < 7200 else f"{total / 3600:.1f} h"
    return f"about {took}, {decimal(_memory(model))} of memory, {decimal(disk)} of disk"
