"""The kernels in Triton: on CUDA where there is a device, else on the CPU in Triton's interpreter."""

import importlib
from functools import partial

import pytest
import rounding
import torch
from rounding import NAMES, ROUNDING, close
from zoo import tiny

from normgeo import convert, kernels, optimize
from normgeo.conversion.probing import outputs_of
from normgeo.examples import example_inputs
from normgeo.geometry import Directions
from normgeo.kernels import fallback, norm_ops
from normgeo.norms import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
drawn = partial(rounding.drawn, device=DEVICE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(norm_ops.on_cuda() is None, reason="needs a CUDA device, or Triton"),
]


@pytest.mark.parametrize("weight", [None, torch.bfloat16], ids=str)
def test_gradients_are_rounded_to_their_own_parameters_alone(weight):
    x, dz = drawn((40, 16), torch.bfloat16), drawn((40, 16), torch.bfloat16, 1)
    weight = None if weight is None else torch.ones(16, dtype=weight, device=DEVICE)
    bias = torch.zeros(16, device=DEVICE, requires_grad=True)
    norm_ops.on_cuda().norm(x, weight, bias, 1e-5, 0.0, norm_ops.KINDS["rmsnorm"]).backward(dz)
    torch.testing.assert_close(bias.grad, dz.float().sum(0))


def test_layouts_hold_their_rows_with_little_room_left_over():
    triton_norms = importlib.import_module("normgeo.kernels.triton_norms")
    for d in (1, 2, 3, 31, 100, 512, 768, 1000, 1536, 2560, 3072, 4097, 5120, 7168, 8191, 12288, 16384):
        plan = triton_norms._plan(d)
        assert d <= plan.parts * plan.block < 2 * d
        assert d < 512 or plan.parts * plan.block <= 1.25 * d
        assert plan.rows * plan.parts * plan.block >= 768
        assert 4 * 32 <= plan.rows * plan.block // plan.warps <= 1024  # numbers a warp, of each part
        for itemsize in (2, 4):
            steps = triton_norms._steps(d, itemsize, 100_000)
            assert d <= steps.block < 2 * d
            assert 2 * steps.rows * steps.block * itemsize * (steps.stages - 1) <= 100_000
            assert steps.rows * steps.block >= 4 * 32 * steps.warps


@pytest.mark.parametrize(
    ("d", "multiprocessors", "n"),
    [(2, 132, 210), (100, 1, 210), (768, 132, 45), (1000, 1, 45), (1500, 1, 45), (2560, 28, 45)],
)
def test_rows_are_shared_out_to_few_processors_and_to_many(d, multiprocessors, n, monkeypatch):
    """A block of rows a program, or many, of which the last has fewer; the interpreter takes its time for each."""
    triton_norms = importlib.import_module("normgeo.kernels.triton_norms")
    monkeypatch.setattr(triton_norms, "multiprocessors", lambda device: multiprocessors)
    x = drawn((3, n // 3, d), torch.float32)
    z = norm_ops.on_cuda().norm(x.requires_grad_(), None, None, 1e-6, 0.0, norm_ops.KINDS["rmsnorm"])
    z.sum().backward()
    truth = x.detach().double().requires_grad_()
    expected = truth * torch.rsqrt(truth.square().mean(-1, keepdim=True) + 1e-6)
    expected.sum().backward()
    close(z, expected, torch.float32)
    close(x.grad, truth.grad, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_parts_are_normed_as_whole(name, dtype):
    cls, options = NAMES[name]
    for d in (1500, 2560):  # in three and in five
        norm, x = cls(d, 1e-5, bias=True, dtype=dtype, device=DEVICE, **options), drawn((2, 3, d), dtype, 7)
        norm.weight.copy_(drawn(d, dtype, 8))
        norm.bias.copy_(drawn(d, dtype, 9))
        found = norm_ops.on_cuda().norm(x, norm.weight, norm.bias, 1e-5, 0.0, norm_ops.KINDS[name])
        close(found, norm.double().plain(x.double()), dtype)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 5), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("kind", norm_ops.KINDS.values(), ids=norm_ops.KINDS)
def test_added_to_nothing_they_are_nothing(kind, shape):
    ops, x, weight = norm_ops.on_cuda(), drawn(shape, torch.float32), torch.ones(shape[-1], device=DEVICE)
    found = torch.empty_like(x)
    ops.add_norm_(x.clone(), x, found, weight, None, 1e-6, 0.0, kind)
    assert found.shape == ops.norm(x, weight, None, 1e-6, 0.0, kind).shape == shape


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("stream", [None, torch.float32], ids=str)
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_added_to_in_place_they_are_the_sum_and_its_norm(name, over, stream, dtype):
    for d, n in ((5, 3), (130, 3), (768, 1)):  # where a program has several rows, and where each has one of its own
        residual, x = drawn((2, n, d), stream or dtype, 2), drawn((2, n, d), dtype, 3)
        weight, total = drawn(d, torch.float32, 4), residual + x
        ops, kind = norm_ops.on_cuda(), norm_ops.KINDS[name]
        expected = ops.norm(total, weight, None, 1e-6, 1.0, kind)
        found = x if over else torch.empty_like(residual)
        ops.add_norm_(residual, x, found, weight, None, 1e-6, 1.0, kind)
        close(residual, total, residual.dtype)
        close(found, expected, found.dtype)


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float64], ids=str)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("rows", "d"), [(0, 8), (1, 5), (9, 512), (6, 1300)])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
def test_the_pass_over_hidden_states_is_that_of_torch_in_float64(dtype, centered, rows, d):
    x, units = drawn((rows, d), dtype, 5), Directions.seeded(d, 0).units.to(DEVICE, torch.float64).contiguous()
    if rows > 1:
        x[0] = 3.0  # uniform: nothing is left without the mean
        x[1] += 500  # of which little is
        x[2, 0], x[3, d // 2] = 1e4, -1e4  # one number is nearly all
    found, expected = (torch.zeros((4 + centered, rows), dtype=torch.float64, device=DEVICE) for _ in range(2))
    kernels.on_cuda().project(x, units, centered, found, 1e-9)
    fallback.project(x, units, centered, expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    if centered and rows > 1:
        assert found[4, 0] == 0
    if rows > 1:  # with an infinity, wherever it is, a row is infinitely long, and with a NaN none
        x[0, 0], x[1, 3], x[2, 0], x[3, 1] = torch.inf, -torch.inf, torch.nan, torch.nan
        kernels.on_cuda().project(x, units, centered, found, 1e-9)
        assert found[0, :2].tolist() == [torch.inf] * 2
        assert found[0, 2:4].isnan().all()


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float64], ids=str)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("d", [5, 512, 1300])
def test_chosen_rows_become_the_unit_vectors_that_float64_gives(dtype, centered, d):
    x = drawn((19, 2 * d), dtype, 6)[:, :d]  # rows that lie apart
    x[3], x[4, 1], x[7, 2], x[8] = 0.0, torch.inf, torch.nan, 3.0
    units = Directions.seeded(d, 0).units.to(DEVICE, torch.float64)
    scalars = kernels.project(x, units, centered=centered)
    index = torch.tensor([0, 3, 4, 7, 8, 18, 11, 0, 12], device=DEVICE)
    found = torch.full((10, d), 7.0, device=DEVICE)
    kernels.on_cuda().gather(x, index, scalars, centered, found[:9])
    wide = x[index].double()
    wide -= wide.mean(1, keepdim=True) if centered else 0.0
    expected = torch.nn.functional.normalize(wide, dim=1).float()
    expected[[1, 2, 3]] = 0.0
    if centered:
        expected[4] = 0.0
    torch.testing.assert_close(found[:9], expected, rtol=2e-7, atol=1e-9)
    assert (found[9] == 7.0).all()
    kernels.on_cuda().gather(x, index[:0], scalars, centered, found[:0])


@pytest.mark.parametrize(("phases", "phase", "vectors"), [(1, 0, 400), (2, 0, 256), (1, 2, 3), (2, 1, 700)])
def test_angles_are_added_up_to_the_last_bit(phases, phase, vectors):
    generator = torch.Generator().manual_seed(1)
    norms = torch.rand((3, phases, vectors), generator=generator) * 10.0 ** torch.randint(
        -9, 9, (vectors,), generator=generator
    )
    sines = torch.rand((3, 3, vectors), generator=generator, dtype=torch.float64) * 2 - 1
    sines[0, 0, :2], sines[2, 1, 2] = torch.tensor([1.0, -1.0]), torch.nan
    norms[0, 0, 0], norms[1, 0, 1], norms[1, 0, 2], norms[0, -1, 2] = 0, torch.inf, torch.nan, torch.inf
    degrees = (sines.asin().rad2deg() * 2**20).round().mul(2.0**-20).float()
    group, sites = torch.randint(0, 3, (vectors,), generator=generator, dtype=torch.uint8), torch.tensor([4, 0, 2])
    found = []
    for tally, device in ((kernels.angles_on_cuda().tally, DEVICE), (fallback.tally, "cpu")):
        tensors = [t.to(device) for t in (norms, degrees, sines, group)]
        counts = torch.zeros((5, 3, 3, fallback.BINS), dtype=torch.int64, device=device)
        sums = torch.zeros((3, 3, 12 + phases), dtype=torch.float64, device=device)
        out = fallback.Sums(sums, *(torch.full_like(sums[..., :3], edge) for edge in (torch.inf, -torch.inf)))
        tally(*tensors, fallback.Histogram(counts, sites.to(device), phase), out)
        found.append([t.cpu() for t in (*out, counts)])
    assert all(map(torch.equal, *found))
    assert found[0][-1].sum() > 0


@pytest.mark.parametrize("centered", [False, True], ids=["whole", "centered"])
@pytest.mark.parametrize("multiprocessors", [1, 5])
@pytest.mark.parametrize(("n", "d", "k"), [(0, 8, 5), (1, 7, 64), (150, 100, 70), (65, 576, 256)])
def test_moments_of_angles_to_an_ensemble_are_those_of_float64(n, d, k, multiprocessors, centered, monkeypatch):
    angles = kernels.angles_on_cuda()
    monkeypatch.setattr(angles, "multiprocessors", lambda device: multiprocessors)
    generator = torch.Generator().manual_seed(n)
    x = torch.randn((n + 9, d), generator=generator) * 10.0 ** torch.randint(-3, 5, (n + 9, 1), generator=generator)
    x[::2] += 40 * x[::2].square().mean(1, keepdim=True).sqrt()  # of which a fortieth is left without the mean
    x[3], x[4, 0], x[5, 0], x[6], x[8] = 0, torch.inf, torch.nan, x[7].sign() * 1e-30, 3.0
    x, index = x.bfloat16(), torch.randint(0, n + 9, (n,), generator=generator)
    index[: min(n, 9)] = torch.arange(min(n, 9))
    directions = Directions.seeded(d, k, 3)
    scalars = kernels.project(x.to(DEVICE), directions.units.to(DEVICE), centered=centered)
    torch.set_default_dtype(torch.float16)
    try:
        packed = angles.packed(directions.ensemble, torch.device(DEVICE), centered)
    finally:
        torch.set_default_dtype(torch.float32)
    found = packed.moments(x.to(DEVICE), index.to(DEVICE), scalars).sum(0).cpu()
    rows = x[index][x[index].isfinite().all(1)].double()
    expected = []
    for vectors in (rows, rows - rows.mean(1, keepdim=True))[: 1 + centered]:
        arcs = (torch.nn.functional.normalize(vectors, dim=1, eps=1e-300) @ directions.null.T).asin()
        expected += [arcs.sum(0), arcs.square().sum(0), arcs.sin().square().sum(0)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [1, 1 << 25], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_norm_trains_as_in_float64_whichever_way_pays(dtype, trained, monkeypatch):
    monkeypatch.setattr(norm_ops, "TRAINED", trained)
    norm, exact = (RMSNorm(768, 1e-5, bias=True, dtype=t, device=DEVICE) for t in (dtype, torch.float64))
    x, dz = drawn((3, 5, 768), dtype, 10).requires_grad_(), drawn((3, 5, 768), dtype, 11)
    for parameter, other in zip(norm.parameters(), exact.parameters(), strict=True):
        parameter.data.copy_(drawn(768, dtype, 12))
        other.data.copy_(parameter.data)
    wide = x.detach().double().requires_grad_()
    exact(wide).backward(dz.double())
    norm(x).backward(dz)
    close(x.grad, wide.grad, dtype)
    for parameter, other in zip(norm.parameters(), exact.parameters(), strict=True):
        close(parameter.grad, other.grad, dtype)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "vit"])
def test_optimized_models_on_cuda_give_what_they_gave(name, dtype, monkeypatch):
    monkeypatch.setattr(norm_ops, "LAUNCH", 0)
    model = convert(tiny(name).to(DEVICE)).model.to(dtype)
    inputs = example_inputs(model, seed=2)
    before = outputs_of(model, inputs)
    for found, expected in zip(outputs_of(optimize(model), inputs), before, strict=True):
        close(found, expected, dtype)


@pytest.mark.parametrize("ops", ["triton_norms", "triton_project", "triton_angles"])
def test_the_smallest_launch_is_one(ops):
    importlib.import_module(f"normgeo.kernels.{ops}").launch_smallest(torch.device(DEVICE))
