"""The kernels in Triton: whether they can be built where they are wanted, and how they are launched."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher", "found"]

HIP = torch.version.hip is not None
ALIGNED = 16  # bytes, at multiples of which Triton wants tensors to begin
_tried: dict[str, Any] = {}


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
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
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
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
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
        key = here, num_warps, numbers, constants, *[None if t is None else t.dtype for t in tensors]
        if (built := self._built.get(key)) is None:
            self._built[key] = self._ask(programs, tensors, counts, numbers, constants, num_warps)
            return
        stream = torch._C._cuda_getCurrentRawStream(here)
        built[programs, 1, 1](*tensors, *counts, *numbers, *constants, stream=stream)

    def _ask(
        self, programs: int, tensors: Sequence[Tensor | None], counts: tuple[int, ...],
        numbers: tuple[int | float, ...], constants: tuple[Any, ...], num_warps: int,
    ) -> Any:  # fmt: skip
        return self._kernel[(programs,)](*tensors, *counts, *numbers, *constants, num_warps=num_warps)
