"""The kernels in Triton: whether they can be built where they are wanted, and how they are launched."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher", "found"]

HIP = torch.version.hip is not None
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
    the build is kept for arguments that are alike: in dtypes, alignment, numbers and constants. On AMD's GPUs Triton
    looks at more, and is asked each time.

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
        if not x.is_cuda or HIP:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                self._kernel[(programs,)](*tensors, *counts, *numbers, *constants, num_warps=num_warps)
            return
        if (here := x.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(here):
                self(programs, tensors, counts, numbers, constants, num_warps)
            return
        alike = [None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
        key = here, *(count >> 31 for count in counts), num_warps, numbers, constants, *alike
        built = self._built.get(key)
        if built is None:
            launched = self._kernel[(programs,)](*tensors, *counts, *numbers, *constants, num_warps=num_warps)
            self._built[key] = launched
            return
        stream = torch._C._cuda_getCurrentRawStream(here)
        built[programs, 1, 1](*tensors, *counts, *numbers, *constants, stream=stream)
