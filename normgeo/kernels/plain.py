"""What kernels are for: plain tensors, which nobody traces, transforms or watches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["DTYPES", "PLAIN", "is_compiling", "is_plain", "modes", "tracing"]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
PLAIN = frozenset({Tensor, nn.Parameter})  # whose memory is theirs; in subclasses it may be anywhere

is_compiling = torch.compiler.is_compiling  # looked up once: it is asked for every norm
in_transform, in_batch = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore
modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state  # pyright: ignore


def is_plain(x: Tensor, watched: bool = False) -> bool:
    """Whether a tensor has numbers of a dtype of the kernels where it says, and is neither traced nor transformed.

    `watched`: modes that see every operation may be at work.
    """
    if x.dtype not in DTYPES or type(x) not in PLAIN or x.layout is not torch.strided or not x.dim():
        return False
    if x.is_neg() or x._is_zerotensor() or in_batch(x):
        return False
    if is_compiling() or in_transform() is not None or forward_ad._current_level >= 0 or tracing():
        return False
    return watched or not modes()
