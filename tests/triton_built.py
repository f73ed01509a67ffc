"""Builds the kernels in Triton for GPUs of the given compute capabilities, which need not be there, and prints one line
a kernel: for which, its name, the row's length, and how many bytes of a thread's did not fit its registers.

The kernels are called as the project calls them, on tensors without memory; only the launch is left out. A program of
its own, since Triton's interpreter, which other tests use, replaces the compiler for a whole process.
"""

import re
import subprocess
import sys
import tempfile

import torch
import triton
from jaxtyping import install_import_hook
from triton.backends.compiler import GPUTarget


class Absent:
    """What Triton asks of a GPU's driver before it builds."""

    capability = 0

    def get_current_device(self):
        return self.capability  # what is built for one is not taken for another

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def spilled(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        call = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def only_built(kernel, d):
    def run(*args, grid, warmup, run=kernel.run, **options):
        built = run(*args, grid=grid, warmup=True, **options)
        print(absent.capability, kernel.__name__, d[0], spilled(built))

    kernel.run = run


def build_all():
    """Every kernel, in the ways it is called."""
    for d[0], dtype, kind in [(64, torch.float16, 1), (1000, torch.float32, 2), (4096, torch.bfloat16, 3),
                              (8192, torch.float32, 1), (16384, torch.bfloat16, 1)]:  # fmt: skip
        x = torch.empty(3, 5, d[0], dtype=dtype, requires_grad=True, **on)
        weight = torch.empty(d[0], dtype=dtype, requires_grad=True, **on)
        norms.norm(x, weight, weight, 1e-6, 0.0, kind).sum().backward()
        with torch.no_grad():
            norms.norm(x, None, None, 1e-6, 0.0, kind)
            norms.add_norm_(x, x, x, weight, None, 1e-6, 1.0, kind)
            units = torch.empty(3, d[0], dtype=torch.float64, **on)
            scalars, index = torch.empty(5, 5, dtype=torch.float64, **on), torch.empty(4, dtype=torch.int64, **on)
            projections.project(x[0], units, d[0] > 64, scalars, 1e-12)
            projections.gather(x[0], index, scalars, d[0] > 64, torch.empty(4, d[0], **on))
            if dtype is torch.bfloat16:
                units, shrink = torch.empty(d[0], 256, dtype=dtype, **on), torch.empty(256, **on)
                for gram in (None, shrink):
                    angles.Ensemble(units, shrink, gram, 256, 33).moments(x[0], index, scalars)
            if d[0] > 1000:  # which the sums of angles do not depend on
                continue
            norm, group = torch.empty(2, 1 + (kind == 2), 5, **on), torch.empty(5, dtype=torch.uint8, **on)
            three = torch.empty(2, 3, 5, dtype=torch.float64, **on)
            histogram = fallback.Histogram(torch.empty(2, 3, 3, fallback.BINS, dtype=torch.int64, **on), index[:2], 0)
            sums = torch.empty(2, 3, 13 + (kind == 2), dtype=torch.float64, **on)
            out = fallback.Sums(sums, torch.empty_like(sums[..., :3]), torch.empty_like(sums[..., :3]))
            angles.tally(norm, three.float(), three, group, histogram, out)


if __name__ == "__main__":
    absent = Absent()
    triton.runtime.driver.set_active(absent)
    with install_import_hook("normgeo", "beartype.beartype"):  # as under test, where every function is wrapped
        from normgeo.kernels import fallback
        from normgeo.kernels import triton_angles as angles
        from normgeo.kernels import triton_norms as norms
        from normgeo.kernels import triton_project as projections
    d = [0]
    for kernel in (
        norms._forward,
        norms._backward,
        projections._project,
        projections._gather,
        angles._tally,
        angles._moments,
    ):
        only_built(kernel, d)
    on = {"device": "meta"}
    for absent.capability in map(int, sys.argv[1:]):
        build_all()
