"""The kernels in Triton, if they can be built where they are wanted: that it is installed does not mean that it can."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

__all__ = ["found"]

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
