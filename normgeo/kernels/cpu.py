"""The compiled passes over hidden states, called through ctypes.

A plain C interface needs none of torch's headers: it builds in a second and works with every version of torch. Threads
are torch's own all the same, since its stable C interface has a parallel loop, which is handed over as a pointer.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normgeo.kernels.compiling import compiled
from normgeo.kernels.fallback import Histogram, Sums

__all__ = ["DTYPES", "Library", "loaded", "parallel_for"]

SOURCE = Path(__file__).with_name("project.cpp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@dataclass(frozen=True)
class Library:
    """The kernels, where there are any, and why there are none, where there are not."""

    functions: ctypes.CDLL | None
    reason: str
    parallel: int | None = None

    def project(self, x: Tensor, units: Tensor, centered: bool, out: Tensor) -> None:
        """Fill out [quantities, vectors] for x [vectors, d] with adjacent elements; float64 contiguous units."""
        assert self.functions is not None
        self.functions.normgeo_project(
            x.data_ptr(), DTYPES[x.dtype], *x.shape, x.stride(0), units.data_ptr(), out.data_ptr(), out.stride(0),
            centered, self.parallel,
        )  # fmt: skip

    def gather(self, x: Tensor, index: Tensor, scalars: Tensor, centered: bool, out: Tensor) -> None:
        """Fill out [n, d] with the unit vectors of rows of x; `scalars` are what `project` gave for x."""
        assert self.functions is not None
        self.functions.normgeo_gather(
            x.data_ptr(), DTYPES[x.dtype], len(index), x.shape[1], x.stride(0), index.data_ptr(), scalars.data_ptr(),
            scalars.stride(0), centered, out.data_ptr(), self.parallel,
        )  # fmt: skip

    def moments(self, cosines: Tensor, out: Tensor) -> None:
        """Fill out [slots, 3, k] with the moments of cosines [slots, rows, k], both contiguous."""
        assert self.functions is not None
        self.functions.normgeo_moments(cosines.data_ptr(), *cosines.shape, out.data_ptr(), self.parallel)

    def tally(
        self, norms: Tensor, degrees: Tensor, sines: Tensor, group: Tensor, histogram: Histogram, out: Sums
    ) -> None:
        """Fill `out` and add to the histogram; all contiguous. See `kernels.tally`."""
        assert self.functions is not None
        sites, phases, vectors = norms.shape
        self.functions.normgeo_tally(
            norms.data_ptr(), degrees.data_ptr(), sines.data_ptr(), group.data_ptr(), sites, vectors, phases,
            histogram.sites.data_ptr(), histogram.phase, *(t.data_ptr() for t in out), histogram.counts.data_ptr(),
            self.parallel,
        )  # fmt: skip


@functools.cache
def loaded() -> Library:
    """Load the kernels, and build them if this source, compiler and processor have not met before. Never raises."""
    try:
        path = compiled(SOURCE)
        functions = _declared(ctypes.CDLL(str(path)))
        found = Library(functions, str(path), parallel_for())
        _check(found)
    except (OSError, RuntimeError) as error:
        return Library(None, str(error))
    return found


@functools.cache
def parallel_for() -> int | None:
    """Address of torch's parallel loop; without it the kernels run on one thread."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        loop = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(loop, ctypes.c_void_p).value


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in (
        ("project", [pointer, *[number] * 4, pointer, pointer, number, number, pointer]),
        ("gather", [pointer, *[number] * 4, pointer, pointer, number, number, pointer, pointer]),
        ("moments", [pointer, *[number] * 3, pointer, pointer]),
        ("tally", [*[pointer] * 4, *[number] * 3, pointer, number, *[pointer] * 5]),
    ):
        function = getattr(functions, f"normgeo_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_bool
    return functions


def _check(found: Library) -> None:
    """One small sum with a known result, so that a damaged or foreign file is found out before it is relied on."""
    wide: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever tensors are elsewhere
    x, units = torch.arange(15, dtype=torch.float32, device="cpu").view(1, 15), torch.full((3, 15), 15**-0.5, **wide)
    found.project(x, units, True, out := torch.zeros(5, 1, **wide))
    expected = torch.tensor([1015.0**0.5, *[105 * 15**-0.5] * 3, 280.0**0.5], **wide)
    if not torch.allclose(out[:, 0], expected, rtol=1e-6):
        raise RuntimeError(f"{found.reason} gives wrong results; delete it")
