"""The kernels in Triton: whether they can be built where they are wanted, and how they are launched."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normgeo.errors import first_line

__all__ = ["Launcher", "begin", "direct", "distrust", "found", "multiprocessors", "parts"]

HIP = torch.version.hip is not None
WARP = 32  # threads
ALIGNED = 16  # bytes, at multiples of which Triton wants tensors to begin
_tried: dict[str, Any] = {}
_direct: Any = None


def begin(compiled: Any) -> None:
    """Have compiled norms (`norms_direct.cpp`) launch kernels themselves, where torch is built for CUDA."""
    global _direct
    if torch.version.cuda is None:
        return
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        stream = ctypes.CDLL(
            str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")
        ).aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError):  # no driver, or another torch: they go on being launched from Python
        return
    compiled.begin(*(ctypes.cast(f, ctypes.c_void_p).value for f in (launch, stream)), "cuda")
    _direct = compiled


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; one in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def direct() -> Any:
    """The compiled norms that launch what Triton has built for them; None where there are none."""
    return _direct


def distrust() -> None:
    """Launch from Python again: what the compiled norms launched came out wrong."""
    global _direct
    _direct, wrong = None, _direct
    wrong.begin(0, 0, "cuda")
    warnings.warn("normgeo launches norms from Python, which is slower: a norm came out wrong", stacklevel=2)


def parts(built: Any) -> tuple[int, int, int, bytes] | None:
    """What it takes to launch a build; None where it takes more.

    The driver's handle of the kernel, threads, bytes of shared memory, and which of its parameters are arguments.
    """
    try:
        data, source = built.metadata, built.src
        more = data.num_ctas - 1, data.launch_cooperative_grid, data.launch_pdl, data.global_scratch_size
        if any(more) or getattr(data, "profile_scratch_size", 0):
            return None
        kinds = [source.signature[name] for name in source.fn.arg_names]
        given = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        if any(kinds[i] not in ("i32", "fp32") and not kinds[i].startswith("*") for i in given):
            return None
        return built.function, WARP * data.num_warps, data.shared, bytes(given)
    except (AttributeError, KeyError):  # of another version of Triton
        return None


def found(module: str, device: torch.device | None = None) -> Any:
    """A module of kernels in Triton, or None where Triton is not installed, or builds nothing on this CUDA device.

    Whether it does is found out once, by the module's smallest launch, and not before a device is named. While a graph
    is recorded nothing can be built: what was not tried before is not there.
    """
    if module in _tried:
        return _tried[module]
    try:
        kernels: Any = importlib.import_module(module)
    except ImportError:
        return _tried.setdefault(module)
    if device is None:
        return kernels
    if torch.cuda.is_current_stream_capturing():
        return None
    try:
        with torch.cuda.device(device):
            kernels.launch_smallest(device)
    except torch.OutOfMemoryError:
        raise  # of a device that is full, which says nothing of Triton
    except Exception as error:  # whatever its compilers, Python's headers or the driver lack
        _tried[module] = kernels = None  # before the warning, which may be an error
        why = first_line(error)
        warnings.warn(f"normgeo computes in torch on CUDA, which is slower: Triton fails ({why})", stacklevel=2)
    return _tried.setdefault(module, kernels)


class Launcher:
    """Launches a kernel of Triton's on the first tensor's device, or in Triton's interpreter.

    Triton finds out for each launch which of its builds suits the arguments, which takes as long as all the rest. Here
    the build is kept for arguments that are alike: in dtypes, numbers and constants. Triton is asked each time about
    what is rare, tensors that begin at odd places and counts of 64 bits, and on AMD's GPUs, where it looks at more.

    Args:
        kernel: its parameters are tensors, counts, numbers and constants, in this order; it is not specialized on
            counts. A number is an int or a float always.
        kept: is told what is kept: a build, and the tensors, numbers and constants it was built for.
    """

    def __init__(self, kernel: Any, kept: Callable[..., None] | None = None) -> None:
        self._kernel, self._kept = kernel, kept
        self._built: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, tensors: Sequence[Tensor | None], counts: tuple[int, ...],
        numbers: tuple[int | float, ...], constants: tuple[Any, ...], num_warps: int = 4,
    ) -> None:  # fmt: skip
        """Launch so many programs."""
        x = tensors[0]
        assert x is not None
        if not x.is_cuda:
            self._ask(programs, tensors, counts, numbers, constants, num_warps)
            return
        if (here := x.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(here):
                self(programs, tensors, counts, numbers, constants, num_warps)
            return
        addresses = 0
        for t in tensors:
            if t is not None:
                addresses |= t.data_ptr()
        if addresses % ALIGNED or max(counts) >> 31 or HIP:
            self._ask(programs, tensors, counts, numbers, constants, num_warps)
            return
        told = self._kept is not None and _direct is not None  # what was built before it is told of anew
        key = here, num_warps, told, numbers, constants, *[None if t is None else t.dtype for t in tensors]
        if (built := self._built.get(key)) is None:
            built = self._built[key] = self._ask(programs, tensors, counts, numbers, constants, num_warps)
            if told and self._kept is not None:
                self._kept(built, tensors, numbers, constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(here)
        built[programs, 1, 1](*tensors, *counts, *numbers, *constants, stream=stream)

    def _ask(
        self, programs: int, tensors: Sequence[Tensor | None], counts: tuple[int, ...],
        numbers: tuple[int | float, ...], constants: tuple[Any, ...], num_warps: int,
    ) -> Any:  # fmt: skip
        return self._kernel[(programs,)](*tensors, *counts, *numbers, *constants, num_warps=num_warps)
