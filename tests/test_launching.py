"""What Triton built for arguments is launched again for arguments that are alike, and for no others."""

import contextlib

import pytest
import torch

from normgeo.kernels import launching
from normgeo.kernels.launching import Launcher


class OnDevice(torch.Tensor):
    """A tensor that says it is on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, place = True, 0

    def get_device(self):
        return self.place


class Kernel:
    """A kernel of Triton's that notes what it was launched with, from its own front end and as it was built."""

    def __init__(self):
        self.fresh, self.again = [], []

    def __getitem__(self, grid):
        def launch(*given, num_warps):
            self.fresh.append((grid, given, num_warps))
            return self.Built(self.again, number=len(self.fresh))

        return launch

    class Built:
        def __init__(self, launches, number):
            self.launches, self.number = launches, number

        def __getitem__(self, grid):
            return lambda *given, stream: self.launches.append((self.number, grid, given, stream))


def tensor(n=8, dtype=torch.float32, offset=0, place=0):
    x = torch.zeros(n + offset, dtype=dtype)[offset:].as_subclass(OnDevice)
    x.place = place
    return x


GIVEN = {"tensors": (tensor(), None), "counts": (5, 5), "numbers": (8, 1e-6), "constants": (True, 4), "num_warps": 2}


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(launching.torch.cuda, "device", device)
    current = [0]
    return Kernel()


def test_a_build_is_kept_for_other_tensors_and_counts(kernel):
    launch, first, second = Launcher(kernel), (tensor(), None), (tensor(), None)
    launch(3, first, (5,), (8, 1e-6), (True, 4), 2)
    launch(4, second, (7,), (8, 1e-6), (True, 4), 2)
    assert kernel.fresh == [((3,), (*first, 5, 8, 1e-6, True, 4), 2)]
    ((number, grid, given, stream),) = kernel.again
    assert (number, grid, stream) == (1, (4, 1, 1), 100)
    assert given[0] is second[0]
    assert given[1:] == (None, 7, 8, 1e-6, True, 4)


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (tensor(dtype=torch.bfloat16), None)}, {"tensors": (tensor(), tensor())},
        {"tensors": (tensor(place=1), None)}, {"numbers": (16, 1e-6)}, {"numbers": (8, 1e-5)},
        {"constants": (False, 4)}, {"num_warps": 4},
    ],
    ids=["dtype", "presence", "device", "width", "eps", "constant", "warps"],
)  # fmt: skip
def test_what_is_not_alike_is_built_anew(kernel, other):
    launch = Launcher(kernel)
    for options in (GIVEN, GIVEN | other, GIVEN, GIVEN | other):
        launch(3, **options)
    assert len(kernel.fresh) == 2
    assert [number for number, *_ in kernel.again] == [1, 2]
    stream = 101 if other.get("tensors", GIVEN["tensors"])[0].place else 100
    assert [stream for *_, stream in kernel.again] == [100, stream]


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (tensor(offset=1), None)}, {"tensors": (tensor(), tensor(offset=2))}, {"counts": (1 << 31, 5)},
        {"counts": (5, 1 << 31)}, {},
    ],
    ids=["alignment", "another's alignment", "64-bit", "64-bit of others", "other makes"],
)  # fmt: skip
def test_about_what_is_rare_triton_is_asked_each_time(kernel, other, monkeypatch):
    monkeypatch.setattr(launching, "HIP", not other)
    launch = Launcher(kernel)
    for _ in range(2):
        launch(3, **(GIVEN | other))
    assert len(kernel.fresh) == 2
    assert not kernel.again
