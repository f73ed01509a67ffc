"""Norms in one pass over their input, alone or of a stream that is added to: kernels for inference.

On a CPU they are operators of torch's, `torch.ops.normgeo.norm` and `add_norm_`, built from `norms.cpp` on first use;
sums are accumulated in float32. On CUDA they are in Triton, and have gradients. None takes float64, which keeps to the
exact arithmetic of `normgeo.norms`.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normgeo.kernels.compiling import compiled

__all__ = ["KINDS", "Operators", "add_norm_", "loaded", "norm", "takes"]

# looked up once: they are asked for every norm, which may take no longer than looking them up
is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
in_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore

SOURCE = Path(__file__).with_name("norms.cpp")
KINDS = {"layernorm": 0, "rmsnorm": 1, "crmsnorm": 2, "crmsnorm-padded": 3}
"""What there are kernels for; the numbers are those of `norms.cpp`. LayerNorm is there to compare with."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WIDEST = 16384  # numbers a row, on CUDA
LAUNCH = 1 << 16  # numbers under which a launch of Triton's costs more than the norm (an estimate)


class Operators(NamedTuple):
    """The compiled operators, where there are any, and their shared object or why there are none."""

    norm: Any
    add_norm_: Any
    reason: str


@functools.cache
def loaded() -> Operators:
    """Register the operators with torch, building them first if need be. Never raises; a failed build says why once."""
    torch_home = Path(torch.__file__).parent
    flags = (f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", "-ltorch_cpu", f"-DTORCH={torch.__version__}")
    try:
        path = compiled(SOURCE, flags)
        torch.ops.load_library(path)
        ops = torch.ops.normgeo
        _check(ops)
        torch.library.register_fake("normgeo::norm", _like_first)
        torch.library.register_fake("normgeo::add_norm_", _nothing)
    except (OSError, RuntimeError) as error:
        if os.environ.get("NORMGEO_KERNELS") != "0":
            warnings.warn(f"normgeo computes norms in torch, which is slower: {error}", stacklevel=2)
        return Operators(None, None, str(error))
    return Operators(ops.norm.default._op, ops.add_norm_.default._op, str(path))


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    pass


def _check(ops: Any) -> None:
    """One norm with a known result, so that a damaged or foreign file is found out before it is relied on."""
    x = torch.arange(35.0).view(1, 35)
    expected = x / x.square().mean().sqrt() * 2 + 1
    weight, bias = torch.full((35,), 1.5), torch.ones(35)
    if not torch.allclose(ops.norm(x, weight, bias, 0.0, 0.5, KINDS["rmsnorm"]), expected, rtol=1e-5):
        raise RuntimeError("the compiled norms give wrong results; empty the cache they were built in")


@functools.cache
def on_cuda() -> Any:
    """The kernels in Triton, or None where Triton is not installed."""
    try:
        return importlib.import_module("normgeo.kernels.triton_norms")
    except ImportError:
        return None


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for this input as things are: not in float64, nor while it is traced or transformed.

    What is compiled is better off with the plain arithmetic, which the compiler fuses with what is around it. On a CPU
    gradients are torch's, and on CUDA a launch from Python costs more than it gains where there is little to do.
    """
    if x.dtype not in DTYPES or is_compiling() or in_transform() is not None or forward_ad._current_level >= 0:
        return False
    if x.is_cpu:
        return not is_grad_enabled() and loaded().norm is not None
    return x.is_cuda and x.numel() >= LAUNCH and x.shape[-1] <= WIDEST and on_cuda() is not None


def _suit(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    if weight is None or bias is None:
        one = weight if bias is None else bias
        return one is None or one.dtype is x.dtype or one.dtype is torch.float32
    return weight.dtype is bias.dtype and (weight.dtype is x.dtype or weight.dtype is torch.float32)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str) -> Tensor | None:
    """Scale and shift: gamma * y + beta, with y the standardized x [..., d], gamma = weight + offset; None: no kernel.

    Converted checkpoints call this from their own copy of `normgeo.norms`: its arguments stay as they are.
    """
    if not takes(x) or not _suit(x, weight, bias):
        return None
    of = loaded().norm if x.is_cpu else on_cuda().norm
    return of(x.contiguous(), weight, bias, eps, offset, KINDS[kind])


def add_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str,
    over: bool = False,
) -> Tensor | None:  # fmt: skip
    """Add x to the residual stream in place and give the norm of the sum; None, and nothing done, without a kernel.

    The norm is of the stream's dtype. With `over` it is written over a contiguous x, and in x's dtype.
    """
    if x.shape != residual.shape or not residual.is_contiguous():
        return None
    if x.dtype is not residual.dtype and (residual.dtype is not torch.float32 or x.dtype not in DTYPES):
        return None  # as under autocast the stream may be wider than what is added to it, but not narrower
    if is_grad_enabled() or not takes(residual) or not _suit(residual, weight, bias):
        return None
    x = x.contiguous()
    out = x if over else torch.empty_like(residual)
    (loaded() if x.is_cpu else on_cuda()).add_norm_(residual, x, out, weight, bias, eps, offset, KINDS[kind])
    return out
