"""Norms in one pass over their input, alone or of a stream that is added to: kernels for inference, and for training.

On a CPU they are built on first use, and sums are accumulated in float32; under autograd there are others
(`norm_gradients`). On CUDA they are in Triton. None takes float64, which keeps to the exact arithmetic of
`normgeo.norms`.

A norm of two hundred tokens takes 12 us, and matrix products leave none of the code that leads to it in the caches: the
way through torch's operators (`torch.ops.normgeo.norm` and `add_norm_`, from `norms.cpp`) then takes 30 us. So the same
kernels are called with Python's tensors themselves (`norms_direct.cpp`) where Python's headers are there to build that.
The same launches what Triton has built: on a GPU's machine a norm is launched in 8 us, where torch's LayerNorm takes 13
and a launch from Python 19.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.autograd.graph import increment_version

from normgeo.kernels import differentiable, launching, norm_gradients
from normgeo.kernels.compiling import compiled, failed
from normgeo.kernels.plain import PLAIN, is_compiling, is_plain, modes, tracing

__all__ = ["KINDS", "Operators", "add_norm_", "by_operators", "launched_always", "loaded", "norm", "takes"]

is_grad_enabled = torch.is_grad_enabled  # looked up once: it is asked for every norm

SOURCE, DIRECT = (Path(__file__).with_name(name) for name in ("norms.cpp", "norms_direct.cpp"))
UNDEFINED = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()  # Python itself has what is missing
KINDS = {"layernorm": 0, "rmsnorm": 1, "crmsnorm": 2, "crmsnorm-padded": 3}
"""What there are kernels for; the numbers are those of `norms.h`. LayerNorm is there to compare with."""
WIDEST, WIDE = 16384, 8192  # numbers a row, on CUDA, and those whose gradients registers hold
LAUNCH, TRAINED = 1 << 21, 1 << 25  # numbers from which a launch from Python saves more than torch's own costs less
FUSED = frozenset({"layernorm", "rmsnorm"})  # torch has a kernel of its own for these
_for_nothing = ContextVar("launches cost nothing", default=False)


class Operators(NamedTuple):
    """The compiled norms, and the way to them or why there are none; they give None for what they do not take.

    On CUDA they take what Triton has built a kernel for.
    """

    norm: Callable[..., Tensor | None]
    add_norm_: Callable[..., Tensor | None]
    compiled: bool
    reason: str


_loaded: Operators | None = None
_loading = threading.Lock()


def _forked() -> None:
    """A thread that loads them while the process forks is not in the child, which would wait for it forever."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


def loaded(instead: str = "computes norms in torch") -> Operators:
    """Register the operators with torch, building them first if need be. A failed build says why once, as a warning."""
    if _loaded is not None:
        return _loaded
    with ThreadPoolExecutor(1) as alone:  # a thread in which nothing is traced, transformed or watched
        new, found = alone.submit(_load_once).result()
    if new and not found.compiled:
        failed(found.reason, instead)
    return found


def _load_once() -> tuple[bool, Operators]:
    """The operators, and whether they are new; kept here, for who waits for them may be interrupted."""
    global _loaded
    with _loading:
        if _loaded is not None:
            return False, _loaded
        _loaded = _load()
        return True, _loaded


def _load() -> Operators:
    home = Path(torch.__file__).parent
    flags = (f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", f"-DTORCH={torch.__version__}")
    try:
        with ThreadPoolExecutor(1) as other:  # each takes a while to be built
            directly = other.submit(_directly, flags)
            path = compiled(SOURCE, flags)
        _load_library(path)
        library.register_fake("normgeo::norm", _like_first)
        library.register_fake("normgeo::add_norm_", _nothing)
        return directly.result() or _checked(by_operators(str(path)))
    except (OSError, RuntimeError) as error:
        return NONE._replace(reason=str(error))


def _load_library(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise OSError(f"{path} cannot be loaded, and is built again once it is deleted ({error})") from error


def _directly(flags: tuple[str, ...]) -> Operators | None:
    """The norms without torch's dispatcher; None where Python's headers, or this torch's, are of no use."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        return None
    try:
        flags = (*flags, "-std=c++2a", f"-I{python}", "-w", "-lc10", "-ltorch_python", *UNDEFINED)  # from torch 2.15 on
        path = str(compiled(DIRECT, flags))
        loader = ExtensionFileLoader("normgeo.kernels.norms_direct", path)
        module: Any = loader.create_module(ModuleSpec(loader.name, loader, origin=path))
        found = _checked(Operators(module.norm, module.add_norm_, True, path))
        launching.begin(module)
        return found
    except (ImportError, OSError, RuntimeError):
        return None


def by_operators(path: str) -> Operators:
    """The norms by torch's operators."""
    ops = torch.ops.normgeo

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Tensor | None:
        suits = x.is_cpu and not is_grad_enabled() and is_plain(x) and _suit(x, weight, bias)
        return ops.norm(x.contiguous(), weight, bias, *options) if suits else None

    def add_norm_(residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> Any:
        *numbers, over = options
        if (
            not residual.is_cpu
            or is_grad_enabled()
            or not (is_plain(residual) and _may_add(residual, x) and _suit(residual, weight, bias))
        ):
            return None
        if not _may_write(residual, x):
            return None
        x = x.contiguous()
        out = x if over else torch.empty_like(residual)
        increment_version([residual, out])
        ops.add_norm_(residual, x, out, weight, bias, *numbers)
        return out

    return Operators(norm, add_norm_, True, path)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    pass


NONE = Operators(_nothing, _nothing, False, "not loaded yet")


@torch.no_grad()
def _checked(ops: Operators) -> Operators:
    """The same, if a norm comes out as known: a damaged or foreign file is found out before it is relied on."""
    x = torch.arange(35, dtype=torch.float32, device="cpu").view(1, 35)
    weight, bias = torch.full_like(x[0], 1.5), torch.ones_like(x[0])
    z = ops.norm(x, weight, bias, 0.0, 0.5, KINDS["rmsnorm"])
    if z is None or not torch.allclose(z, x / x.square().mean().sqrt() * 2 + 1, rtol=1e-5):
        raise RuntimeError("the compiled norms give wrong results; empty the cache they were built in")
    return ops


def on_cuda(device: torch.device | None = None) -> Any:
    """The kernels in Triton, or None where there are none; see `launching.found`."""
    return launching.found("normgeo.kernels.triton_norms", device)


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for this input as things are: not in float64, nor while it is traced or transformed.

    What is compiled is better off with the plain arithmetic, which the compiler fuses with what is around it. With
    gradients on a CPU, a mode that sees every operation changes what is computed by, but not what is kept: a checkpoint
    may be recomputed under other modes than it was computed.
    """
    grads = x.is_cpu and is_grad_enabled()
    if not is_plain(x, watched=grads):
        return False
    if x.is_cpu:
        return norm_gradients.loaded() is not None if grads else loaded().compiled
    return x.is_cuda and x.shape[-1] <= WIDEST and on_cuda(x.device) is not None


def _pays(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, kind: str) -> bool:
    """Whether a launch costs less than it saves, by what an H200 was measured to take; by the compiled norms it does.

    From Python one takes longer than torch's. In torch norms that it has no kernel for are seven: CRMSNorms, and norms
    whose gamma is of another dtype or has an offset. RMSNorm's beta is a second one. The same while a graph is recorded
    as before: kernels cannot be loaded then.
    """
    if kind not in FUSED or offset or (weight is not None and weight.dtype is not x.dtype):
        return True
    if not x.dim() or tracing() or modes():  # what is no plain tensor is not asked for its size
        return True
    if is_grad_enabled():
        return x.shape[-1] <= WIDE and (x.numel() >= TRAINED or _for_nothing.get())
    if launching.direct() is not None and not torch.cuda.is_current_stream_capturing():
        return True
    return x.numel() >= LAUNCH or (bias is not None and kind != "layernorm") or _for_nothing.get()


@contextmanager
def launched_always() -> Iterator[None]:
    """While inside, a launch on CUDA costs nothing, as in a graph: kernels are used for however few numbers."""
    before = _for_nothing.set(True)
    try:
        yield
    finally:
        _for_nothing.reset(before)


def _suit(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether gamma and beta are what a kernel reads: d numbers of one dtype, the input's or float32, where x is."""
    d, device, dtype = x.shape[-1], x.device, None
    for p in (weight, bias):  # written out: it is asked for every norm
        if p is None:
            continue
        if type(p) not in PLAIN or p.dim() != 1 or p.shape[0] != d or not p.is_contiguous() or p.device != device:
            return False
        if (p.dtype is not x.dtype and p.dtype is not torch.float32) or (dtype is not None and p.dtype is not dtype):
            return False
        dtype = p.dtype
    return True


def _may_be_kept(*tensors: Tensor | None) -> bool:
    """Whether autograd may keep them: tensors of inference mode it does not."""
    return not any(t is not None and t.is_inference() for t in tensors)


def _may_add(residual: Tensor, x: Tensor) -> bool:
    """As under autocast the stream may be wider than what is added to it, but not narrower."""
    if not is_plain(x) or x.device != residual.device or not residual.is_contiguous():
        return False
    return x.shape == residual.shape and residual.dtype in (x.dtype, torch.float32)


def _may_write(residual: Tensor, x: Tensor) -> bool:
    """Whether both may be written over: tensors of inference mode may not, outside of it."""
    return torch.is_inference_mode_enabled() or not (residual.is_inference() or x.is_inference())


def _loaded_for(x: Tensor) -> Operators:
    """The operators for this input, built once there is one that they take: training does without them."""
    if not is_plain(x) or is_grad_enabled():
        return NONE
    return loaded("launches norms from Python, and computes those on a CPU in torch") if x.is_cuda else loaded()


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str) -> Tensor | None:
    """Scale and shift: gamma * y + beta, with y the standardized x [..., d], gamma = weight + offset; None: no kernel.

    Converted checkpoints call this from their own copy of `normgeo.norms`: its arguments stay as they are.
    """
    if is_compiling():
        return None
    if (x.is_cpu or x.is_cuda) and not is_grad_enabled():
        z = (_loaded or _loaded_for(x)).norm(x, weight, bias, eps, offset, KINDS[kind])
        if z is not None or x.is_cpu:
            return z
    if x.is_cuda and not _pays(x, weight, bias, offset, kind):  # first: what is small has no time for the rest
        return None
    if not takes(x) or not _suit(x, weight, bias) or (is_grad_enabled() and not _may_be_kept(x, weight)):
        return None
    if x.is_cpu:
        kernels = norm_gradients.loaded()
        return kernels and differentiable.norm(kernels, x.contiguous(), weight, bias, eps, offset, KINDS[kind])
    return on_cuda().norm(x.contiguous(), weight, bias, eps, offset, KINDS[kind])


def add_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, kind: str,
    over: bool = False,
) -> Tensor | None:  # fmt: skip
    """Add x to the residual stream in place and give the norm of the sum; None, and nothing done, without a kernel.

    The norm is of the stream's dtype. With `over` it is written over a contiguous x, and in x's dtype. For inference.
    """
    if is_compiling():
        return None
    if residual.is_cpu or residual.is_cuda:
        z = (_loaded or _loaded_for(x)).add_norm_(residual, x, weight, bias, eps, offset, KINDS[kind], over)
        if z is not None or residual.is_cpu:
            return z
    if is_grad_enabled() or not (takes(residual) and _may_add(residual, x)):
        return None
    if not (_suit(residual, weight, bias) and _may_write(residual, x)):
        return None
    x = x.contiguous()
    out = x if over else torch.empty_like(residual)
    increment_version([residual, out])
    on_cuda().add_norm_(residual, x, out, weight, bias, eps, offset, KINDS[kind])
    return out
