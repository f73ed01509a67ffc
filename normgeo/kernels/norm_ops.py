"""Norms in one pass over their input, alone or of a stream that is added to: kernels for inference.

On a CPU they are operators of torch's, `torch.ops.normgeo.norm` and `add_norm_`, built from `norms.cpp` on first use;
sums are accumulated in float32. On CUDA they are in Triton, and have gradients. None takes float64, which keeps to the
exact arithmetic of `normgeo.norms`.

A norm of two hundred tokens takes 12 us, and matrix products leave none of the code that leads to it in the caches: the
way through torch's operators then takes 30 us. So the same kernels are called with the places of tensors, where
Python's headers are there to build that, and what is asked of the tensors before is as little as can be.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import sysconfig
import warnings
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from normgeo.kernels.compiling import compiled

__all__ = ["KINDS", "Operators", "add_norm_", "at_rest", "loaded", "norm", "takes"]

# looked up once: they are asked for every norm, which may take no longer than looking them up
is_compiling, is_grad_enabled, empty_like = torch.compiler.is_compiling, torch.is_grad_enabled, torch.empty_like
in_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state  # pyright: ignore

SOURCE = Path(__file__).with_name("norms.cpp")
UNDEFINED = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()  # Python itself has what is missing
KINDS = {"layernorm": 0, "rmsnorm": 1, "crmsnorm": 2, "crmsnorm-padded": 3}
"""What there are kernels for; the numbers are those of `norms.cpp`. LayerNorm is there to compare with."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that the kernels take, as `norms.cpp` numbers them."""
PLAIN = frozenset({Tensor, nn.Parameter})  # whose memory is theirs; in subclasses it may be anywhere
WIDEST = 16384  # numbers a row, on CUDA
LAUNCH = 1 << 16  # numbers under which a launch of Triton's costs more than the norm (an estimate)


class Operators(NamedTuple):
    """The compiled operators, if any, with a shorter way to them, and their shared object or why there are none."""

    norm: Any
    add_norm_: Any
    direct: Any
    reason: str


@functools.cache
def loaded() -> Operators:
    """Register the operators with torch, building them first if need be. Never raises; a failed build says why once."""
    try:
        path = _built()
        torch.ops.load_library(path)
        ops = torch.ops.normgeo
        found = Operators(ops.norm.default._op, ops.add_norm_.default._op, _module(path), str(path))
        _check(found)
        torch.library.register_fake("normgeo::norm", _like_first)
        torch.library.register_fake("normgeo::add_norm_", _nothing)
    except (OSError, RuntimeError) as error:
        if os.environ.get("NORMGEO_KERNELS") != "0":
            warnings.warn(f"normgeo computes norms in torch, which is slower: {error}", stacklevel=2)
        return Operators(None, None, None, str(error))
    return found


def _built() -> Path:
    """The shared object, with the direct way in it where Python's headers are there and of use."""
    torch_home, python = Path(torch.__file__).parent, Path(sysconfig.get_path("include"))
    flags = (f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", "-ltorch_cpu", f"-DTORCH={torch.__version__}")
    if (python / "Python.h").exists():
        with contextlib.suppress(RuntimeError):
            return compiled(SOURCE, (*flags, f"-I{python}", "-DPYTHON", *UNDEFINED))
    return compiled(SOURCE, flags)


def _module(path: Path) -> Any:
    """The function that takes the places of tensors; None where it could not be built."""
    loader = ExtensionFileLoader("normgeo_norms", str(path))
    try:
        return loader.create_module(ModuleSpec("normgeo_norms", loader, origin=str(path))).direct  # pyright: ignore
    except ImportError:
        return None


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    pass


def _check(ops: Operators) -> None:
    """Norms with known results, so that a damaged or foreign file is found out before it is relied on."""
    x, weight, bias, kind = torch.arange(35.0).view(1, 35), torch.full((35,), 1.5), torch.ones(35), KINDS["rmsnorm"]
    found, expected = [ops.norm(x, weight, bias, 0.0, 0.5, kind)], x / x.square().mean().sqrt() * 2 + 1
    if ops.direct is not None:
        found.append(torch.empty_like(x))
        places = [0 if t is None else t.data_ptr() for t in (x, None, found[1], weight, bias)]
        ops.direct(*places, 35, 35, 0.0, 0.5, kind, 0, 0, 0, 0)
    if not all(torch.allclose(z, expected, rtol=1e-5) for z in found):
        raise RuntimeError("the compiled norms give wrong results; empty the cache they were built in")


@functools.cache
def on_cuda() -> Any:
    """The kernels in Triton, or None where Triton is not installed."""
    try:
        return importlib.import_module("normgeo.kernels.triton_norms")
    except ImportError:
        return None


def at_rest() -> bool:
    """Whether what is computed now is neither traced, nor transformed, nor watched by a dispatch mode."""
    if is_compiling() or in_transform() is not None or forward_ad._current_level >= 0:
        return False
    return not modes() and tracing() is None


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for this input as things are: not in float64, nor while it is traced or transformed.

    What is compiled is better off with the plain arithmetic, which the compiler fuses with what is around it. On a CPU
    gradients are torch's, and on CUDA a launch from Python costs more than it gains where there is little to do.
    """
    if x.dtype not in CODES or type(x) not in PLAIN or not at_rest():
        return False
    if x.is_cpu:
        return not is_grad_enabled() and loaded().norm is not None
    return x.is_cuda and x.numel() >= LAUNCH and x.shape[-1] <= WIDEST and on_cuda() is not None


def _suit(weight: Tensor | None, bias: Tensor | None, d: int, dtype: torch.dtype, is_cpu: bool) -> torch.dtype | None:
    """The dtype of gamma and beta, of the input's where there are neither; None where they suit no kernel."""
    if weight is None:
        if bias is None:
            return dtype
        weight, bias = bias, None
    width = weight.dtype
    if (width is not dtype and width is not torch.float32) or weight.numel() != d or weight.is_cpu is not is_cpu:
        return None
    if type(weight) not in PLAIN or not weight.is_contiguous():
        return None
    if bias is None:
        return width
    if bias.dtype is not width or bias.numel() != d or bias.is_cpu is not is_cpu:
        return None
    return width if type(bias) in PLAIN and bias.is_contiguous() else None


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str) -> Tensor | None:
    """Scale and shift: gamma * y + beta, with y the standardized x [..., d], gamma = weight + offset; None: no kernel.

    Converted checkpoints call this from their own copy of `normgeo.norms`: its arguments stay as they are.
    """
    dtype, is_cpu = x.dtype, x.is_cpu
    if is_cpu and (is_grad_enabled() or dtype not in CODES or type(x) not in PLAIN or not at_rest()):
        return None
    if not is_cpu and not takes(x):
        return None
    d = x.shape[-1]
    if (width := _suit(weight, bias, d, dtype, is_cpu)) is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    if not is_cpu:
        return on_cuda().norm(x, weight, bias, eps, offset, KINDS[kind])
    ops = loaded()
    if (direct := ops.direct) is None:
        return None if ops.norm is None else ops.norm(x, weight, bias, eps, offset, KINDS[kind])
    out, code = empty_like(x), CODES[dtype]
    direct(
        x.data_ptr(), 0, out.data_ptr(), 0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), x.numel(), d, eps, offset, KINDS[kind], code, code, code, CODES[width],
    )  # fmt: skip
    return out


def add_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str,
    over: bool = False,
) -> Tensor | None:  # fmt: skip
    """Add x to the residual stream in place and give the norm of the sum; None, and nothing done, without a kernel.

    The norm is of the stream's dtype. With `over` it is written over a contiguous x, and in x's dtype. For inference,
    and for callers that have asked whether `takes` a tensor like theirs: in the same forward pass once is enough.
    """
    shape, dtype, added, is_cpu = residual.shape, residual.dtype, x.dtype, residual.is_cpu
    if x.shape != shape or dtype not in CODES or x.is_cpu is not is_cpu or not residual.is_contiguous():
        return None
    if added is not dtype and (dtype is not torch.float32 or added not in CODES):
        return None  # as under autocast the stream may be wider than what is added to it, but not narrower
    if type(residual) not in PLAIN or type(x) not in PLAIN:
        return None
    if (width := _suit(weight, bias, shape[-1], dtype, is_cpu)) is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    if not is_cpu:
        if not takes(residual):
            return None
        out = x if over else empty_like(residual)
        on_cuda().add_norm_(residual, x, out, weight, bias, eps, offset, KINDS[kind])
        return out
    ops = loaded()
    if ops.norm is None:
        return None
    out = x if over else empty_like(residual)
    if (direct := ops.direct) is None:
        ops.add_norm_(residual, x, out, weight, bias, eps, offset, KINDS[kind])
    else:
        direct(
            residual.data_ptr(), x.data_ptr(), out.data_ptr(), 0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), x.numel(), shape[-1], eps, offset, KINDS[kind],
            CODES[dtype], CODES[added], CODES[out.dtype], CODES[width],
        )  # fmt: skip
    return out
