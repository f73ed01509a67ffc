"""The compiled norms launch what was built for a GPU: here on a CPU's memory, by a driver that is this file."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_norm_ops import drawn

from normgeo.kernels import launching, norm_ops

pytestmark = pytest.mark.skipif(
    "direct" not in Path(norm_ops.loaded().reason).name, reason="needs a compiler and Python's headers"
)
NAMES = ("x", "more", "weight", "bias", "out", "scale", "rows", "d", "divisor", "eps", "offset")
TYPES = {"rows": ctypes.c_int32, "d": ctypes.c_int32, "divisor": ctypes.c_int32, "eps": ctypes.c_float,
         "offset": ctypes.c_float}  # fmt: skip
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
X, WEIGHT, BIAS = drawn((3, 5, 8), torch.bfloat16), drawn(8, torch.float32, 1), drawn(8, torch.float32, 2)
BEHIND = 4  # arguments that Triton adds


class Driver:
    """Notes what is launched, and says that it went well unless it is told otherwise."""

    def __init__(self):
        self.launches, self.fails, self.no_stream = [], 0, 0
        self.functions = LAUNCH(self.launch), STREAM(self.stream)

    def launch(self, kernel, px, py, pz, tx, ty, tz, shared, stream, arguments, nothing):
        if self.fails:
            return self.fails
        names = self.order
        read = {
            n: ctypes.cast(arguments[i], ctypes.POINTER(TYPES.get(n, ctypes.c_void_p)))[0] for i, n in enumerate(names)
        }
        behind = [ctypes.cast(arguments[len(names) + i], ctypes.POINTER(ctypes.c_void_p))[0] for i in range(BEHIND)]
        assert behind == [None] * BEHIND
        assert (py, pz, ty, tz, nothing) == (1, 1, 1, 1, None)
        self.launches.append(
            SimpleNamespace(kernel=kernel, programs=px, threads=tx, shared=shared, stream=stream, **read)
        )
        return 0

    def stream(self, device, place):
        place[0] = 77 + device
        return self.no_stream


@pytest.fixture
def driver():
    made, ops = Driver(), norm_ops.loaded()
    module = ops.norm.__self__
    made.module, made.norm, made.add_norm_ = module, ops.norm, ops.add_norm_
    module.begin(*(ctypes.cast(f, ctypes.c_void_p).value for f in made.functions), "cpu")

    def keep(
        x=X,
        more=None,
        weight=WEIGHT,
        bias=None,
        out=None,
        eps=1e-5,
        offset=0.0,
        kind=1,
        kernel=1234,
        rows=4,
        order=None,
    ):
        given = {"x": x, "more": more, "weight": weight, "bias": bias}
        present = [n for n in NAMES if given.get(n, 0) is not None and n != "scale"]
        made.order = order or present
        places = bytes(map(NAMES.index, made.order))
        out = x if out is None else out
        return module.keep(x, more, weight, bias, out, eps, offset, kind, kernel, 64, 100, rows, places)

    made.keep = keep
    yield made
    module.begin(0, 0, "cuda")
    launching.begin(module)  # where there is a driver


def norm(driver, x=X, weight=WEIGHT, bias=None, eps=1e-5, offset=0.0, kind=1):
    with torch.no_grad():
        return driver.norm(x, weight, bias, eps, offset, kind)


def test_a_norm_is_launched_with_what_its_kernel_was_built_for(driver):
    assert driver.keep(offset=0.5, kind=2)
    z = norm(driver, offset=0.5, kind=2)
    (launch,) = driver.launches
    assert (launch.kernel, launch.programs, launch.threads, launch.shared, launch.stream) == (1234, 4, 64, 100, 77)
    assert (launch.x, launch.weight, launch.out) == (X.data_ptr(), WEIGHT.data_ptr(), z.data_ptr())
    assert (launch.rows, launch.d, launch.divisor, launch.offset) == (15, 8, 9, 0.5)
    assert launch.eps == pytest.approx(1e-5, rel=1e-6)
    assert (z.shape, z.dtype, z.is_contiguous()) == (X.shape, X.dtype, True)
    assert not hasattr(launch, "bias")


@torch.no_grad()
@pytest.mark.parametrize("over", [True, False])
def test_the_norm_of_a_sum_is_launched_with_both(driver, over):
    stream, x = drawn((3, 5, 8), torch.float32), X.clone()
    assert driver.keep(
        x=stream, more=x, bias=BIAS, out=x if over else stream, order=("more", "x", "bias", "weight", "out")
    )
    before = stream._version, x._version
    z = driver.add_norm_(stream, x, WEIGHT, BIAS, 1e-5, 0.0, 1, over)
    (launch,) = driver.launches
    assert (launch.x, launch.more, launch.out) == (stream.data_ptr(), x.data_ptr(), z.data_ptr())
    assert (launch.weight, launch.bias) == (WEIGHT.data_ptr(), BIAS.data_ptr())
    assert (z is x, z.dtype) == ((True, x.dtype) if over else (False, stream.dtype))
    assert (stream._version, x._version) == (before[0] + 1, before[1] + over)
    assert driver.add_norm_(stream, x, WEIGHT, BIAS, 1e-5, 0.0, 1, not over) is None  # which is of another dtype
    assert len(driver.launches) == 1


OTHERS = {
    "dtype": {"x": X.half()}, "gamma": {"weight": None}, "gamma's dtype": {"weight": WEIGHT.bfloat16()},
    "beta": {"bias": BIAS}, "eps": {"eps": 1e-6}, "offset": {"offset": 1.0}, "kind": {"kind": 3},
    "width": {"x": drawn((3, 5, 16), torch.bfloat16), "weight": drawn(16, torch.float32)},
    "no vectors": {"x": X[:0]}, "odd place": {"x": drawn(123, torch.bfloat16)[3:].view(3, 5, 8)},
    "odd gamma": {"weight": drawn(9, torch.float32)[1:]},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_no_kernel_was_built_for_is_left_to_triton(driver, other):
    driver.keep()
    assert norm(driver, **other) is None
    assert norm(driver) is not None
    assert len(driver.launches) == 1


def test_what_lies_scattered_is_gathered_first(driver):
    driver.keep()
    z = norm(driver, X.transpose(0, 1))
    assert driver.launches[0].x != X.data_ptr()
    assert (z.shape, z.is_contiguous()) == ((5, 3, 8), True)


@torch.no_grad()
def test_a_launch_that_fails_leaves_nothing_behind(driver):
    driver.keep()
    driver.keep(more=X.clone(), kernel=5)
    assert driver.add_norm_(X.clone(), X.clone(), WEIGHT, None, 1e-5, 0.0, 1, True) is not None
    assert [launch.kernel for launch in driver.launches] == [5]
    driver.launches.clear()
    for driver.fails, driver.no_stream in ((201, 0), (0, 1)):
        stream, x = X.clone(), X.clone()
        versions = stream._version, x._version
        assert norm(driver) is None
        assert driver.add_norm_(stream, x, WEIGHT, None, 1e-5, 0.0, 1, True) is None
        assert (stream._version, x._version) == versions
    assert driver.launches == []


@torch.no_grad()
def test_what_adds_something_to_itself_is_no_plain_norm(driver):
    x = X.clone()
    driver.keep(x=x, more=x, kernel=5)
    assert norm(driver) is None
    assert driver.add_norm_(x, x, WEIGHT, None, 1e-5, 0.0, 1, True) is x
    (launch,) = driver.launches
    assert (launch.x, launch.more, launch.out) == (x.data_ptr(),) * 3


def test_the_first_build_that_was_kept_stays(driver):
    driver.keep(kernel=1)
    driver.keep(kernel=2, offset=-0.0)
    norm(driver)
    assert driver.launches[0].kernel == 1


@torch.no_grad()
def test_tensors_of_inference_mode_are_not_written_outside_of_it(driver):
    with torch.inference_mode():
        stream, x = X.clone(), X.clone()
    driver.keep(more=X.clone())
    assert driver.add_norm_(stream, X.clone(), WEIGHT, None, 1e-5, 0.0, 1, True) is None
    assert driver.add_norm_(X.clone(), x, WEIGHT, None, 1e-5, 0.0, 1, True) is None
    assert driver.launches == []
    with torch.inference_mode():
        assert driver.add_norm_(stream, x, WEIGHT, None, 1e-5, 0.0, 1, True) is x


def test_only_what_norms_have_is_kept(driver):
    with pytest.raises(ValueError, match="no kernel"):
        driver.module.keep(X, None, None, None, X, 1e-5, 0.0, 1, 1234, 64, 0, 4, bytes([0, 11]))
    with pytest.raises(ValueError, match="no kernel"):
        driver.keep(rows=0)
    assert not driver.keep(x=X.double())
    assert not driver.keep(x=X.to("meta"))


def test_after_a_norm_that_came_out_wrong_nothing_is_launched(driver, monkeypatch):
    driver.keep()
    monkeypatch.setattr(launching, "_direct", driver.module)
    with pytest.warns(UserWarning, match="launches norms from Python, which is slower: a norm came out wrong"):
        launching.distrust()
    assert launching.direct() is None
    assert norm(driver) is not None  # as on a CPU, where this is
    assert driver.launches == []


def built(**other):
    """A build of Triton's, as its versions 3.6 and later describe one."""
    kinds = {
        "x_at": "*bf16",
        "more_at": "constexpr",
        "weight_at": "*fp32",
        "rows": "i32",
        "eps": "fp32",
        "KIND": "constexpr",
    }
    data = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
            "profile_scratch_size": 0, "num_warps": 2, "shared": 100} | other  # fmt: skip
    source = SimpleNamespace(signature=kinds | other.pop("kinds", {}), fn=SimpleNamespace(arg_names=list(kinds)))
    return SimpleNamespace(metadata=SimpleNamespace(**data), src=source, function=1234)


def test_what_a_build_takes_is_known_or_it_is_not_launched():
    assert launching.parts(built()) == (1234, 64, 100, bytes([0, 2, 3, 4]))
    assert launching.parts(built(kinds={"eps": "fp64"})) is None
    assert launching.parts(built(kinds={"rows": "i64"})) is None
    for more in ("num_ctas", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"):
        assert launching.parts(built(**{more: 8})) is None
    other = built()
    del other.metadata.shared
    assert launching.parts(other) is None


needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(launching.direct() is None or not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def of_the_compiled(x, weight, bias, kind, more=None, over=False):
    """What they give on a device, and how they leave what is added to; None where nothing is kept for them."""
    ops, numbers = norm_ops.loaded(), (1e-5, 0.5, norm_ops.KINDS[kind])
    if more is None:
        return ops.norm(x, weight, bias, *numbers)
    stream = x.clone()
    z = ops.add_norm_(stream, more.clone(), weight, bias, *numbers, over)
    return None if z is None else torch.stack([z.float(), stream.float()])


def of_triton(x, weight, bias, kind, more=None, over=False):
    """The same by way of Triton; the compiled norms are told of it."""
    kernels, numbers = norm_ops.on_cuda(), (1e-5, 0.5, norm_ops.KINDS[kind])
    if more is None:
        return kernels.norm(x, weight, bias, *numbers)
    stream, more = x.clone(), more.clone()
    out = more if over else torch.empty_like(stream)
    kernels.add_norm_(stream, more, out, weight, bias, *numbers)
    return torch.stack([out.float(), stream.float()])


class TestOnADevice:
    pytestmark = needs_cuda

    @torch.no_grad()
    @pytest.mark.parametrize("kind", norm_ops.KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_they_give_what_triton_gives(self, dtype, kind):
        assert norm_ops.on_cuda(torch.device("cuda", 0)) is not None
        for d in (1, 100, 768, 5120):
            x, more, weight, bias = (
                drawn((*size, d), dtype, i).cuda() for i, size in enumerate(((3, 50), (3, 50), (), ()))
            )
            for affine in ((weight, bias), (weight.float(), None), (None, None)):
                for added in (None, more) if dtype is not torch.float32 else (None, more, more.bfloat16()):
                    for over in {False, added is not None}:
                        expected = of_triton(x, *affine, kind, added, over)
                        found = of_the_compiled(x, *affine, kind, added, over)
                        assert found is not None, (d, affine, added, over)
                        assert torch.equal(found, expected)

    @torch.no_grad()
    def test_they_are_launched_where_torch_computes(self):
        """On its current stream, in threads that have computed nothing yet, and into a graph."""
        x = drawn((300, 768), torch.bfloat16).cuda()
        expected = of_triton(x, None, None, "rmsnorm")
        norm = partial(of_the_compiled, x, None, None, "rmsnorm")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.mul_(2)  # which RMSNorm does not see, but for eps
            x.div_(2)
            found = norm()
        side.synchronize()
        assert torch.equal(found, expected)
        with ThreadPoolExecutor(1) as pool, torch.inference_mode():
            found = pool.submit(torch.no_grad()(norm)).result()
            assert found is None or torch.equal(found, expected)  # Triton makes the device ready
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = norm()
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
