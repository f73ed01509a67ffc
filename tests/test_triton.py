"""The kernels in Triton: on CUDA where there is a device, else on the CPU in Triton's interpreter."""

import copy
import importlib

import pytest
import torch
from test_norms import random_norm
from zoo import tiny

from normgeo import convert, kernels, optimize
from normgeo.conversion.probing import outputs_of
from normgeo.examples import example_inputs
from normgeo.geometry import Directions
from normgeo.kernels import fallback, norm_ops
from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {"layernorm": (LayerNorm, {}), "rmsnorm": (RMSNorm, {}), "crmsnorm": (CRMSNorm, {}),
         "crmsnorm-padded": (CRMSNorm, {"padded": True})}  # fmt: skip
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(norm_ops.on_cuda() is None, reason="needs a CUDA device, or Triton"),
]


def drawn(shape, dtype, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(DEVICE, dtype)


def close(found, expected, dtype):
    found, expected = found.detach().double(), expected.detach().double()
    scale = float(expected.abs().max()) or 1.0
    assert float((found - expected).abs().max()) <= 8 * ROUNDING[dtype] * scale


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [2, 7, 64, 100, 1000])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_values_and_gradients_are_those_of_float64(name, dtype, d, affine):
    cls, options = NAMES[name]
    norm = random_norm(cls, d, dtype=dtype, bias=affine == "both", affine=affine != "none", **options).to(DEVICE)
    exact = copy.deepcopy(norm).double()
    x, dz = drawn((3, 7, d), dtype), drawn((3, 7, d), dtype, 1)
    if name == "crmsnorm-padded":
        x[..., -1] = 0
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    z = norm_ops.on_cuda().norm(a, norm.weight, norm.bias, norm.eps, 0.0, norm_ops.KINDS[name])
    z.backward(dz)
    expected = exact.plain(b)
    expected.backward(dz.double())
    close(z, expected, dtype)
    close(a.grad, b.grad, dtype)
    for found, truth in zip(norm.parameters(), exact.parameters(), strict=True):
        close(found.grad, truth.grad, dtype)


@pytest.mark.parametrize("weight", [None, torch.bfloat16], ids=str)
def test_gradients_are_rounded_to_their_own_parameters_alone(weight):
    x, dz = drawn((40, 16), torch.bfloat16), drawn((40, 16), torch.bfloat16, 1)
    weight = None if weight is None else torch.ones(16, dtype=weight, device=DEVICE)
    bias = torch.zeros(16, device=DEVICE, requires_grad=True)
    norm_ops.on_cuda().norm(x, weight, bias, 1e-5, 0.0, norm_ops.KINDS["rmsnorm"]).backward(dz)
    torch.testing.assert_close(bias.grad, dz.float().sum(0))


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "x"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    def gradients(wanted):
        x, dz = drawn((40, 16), torch.float32), drawn((40, 16), torch.float32, 1)
        given = {"x": x, "weight": drawn(16, torch.float32, 2), "bias": drawn(16, torch.float32, 3)}
        for name, tensor in given.items():
            tensor.requires_grad_(name in wanted)
        norm_ops.on_cuda().norm(*given.values(), 1e-5, 0.5, norm_ops.KINDS["rmsnorm"]).backward(dz)
        return {name: tensor.grad for name, tensor in given.items()}

    whole = gradients({"x", "weight", "bias"})
    wanted = whole.keys() - ({"weight", "bias"} if frozen == "both" else {frozen})
    for name, gradient in gradients(wanted).items():
        assert torch.equal(gradient, whole[name]) if name in wanted else gradient is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_gradients_are_those_of_float64(name, affine, dtype):
    """As penalties of gradients need them, and products with a Hessian."""
    cls, options = NAMES[name]
    norm = random_norm(cls, 20, dtype=dtype, bias=affine == "both", affine=affine != "none", **options).to(DEVICE)
    exact = copy.deepcopy(norm).double()
    x, dz, direction = (drawn((3, 7, 20), dtype, seed) for seed in range(3))
    if name == "crmsnorm-padded":
        x[..., -1] = 0

    def second(x, apply, parameters):
        x.requires_grad_()
        (first,) = torch.autograd.grad(apply(x), x, dz.to(x.dtype), create_graph=True)
        asked = [x, *(p for p in parameters if p.shape == (20,))]
        return first, torch.autograd.grad((first * direction.to(x.dtype)).sum(), asked, allow_unused=True)

    def launched(x):
        return norm_ops.on_cuda().norm(x, norm.weight, norm.bias, norm.eps, 0.0, norm_ops.KINDS[name])

    first, found = second(x.clone(), launched, list(norm.parameters()))
    expected_first, expected = second(x.double(), exact.plain, list(exact.parameters()))
    close(first, expected_first, dtype)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, dtype)


@pytest.mark.parametrize("d", [2, 100, 768, 1000])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_few_rows_are_shared_out_to_many_processors(d, multiprocessors, monkeypatch):
    triton_norms = importlib.import_module("normgeo.kernels.triton_norms")
    monkeypatch.setattr(triton_norms, "_multiprocessors", lambda device: multiprocessors)
    x = drawn((3, 70, d), torch.float32)
    plan = triton_norms._plan(x)
    assert plan["ROWS"] * plan["BLOCK"] >= 1024
    assert multiprocessors == 1 or plan["ROWS"] == max(1, 1024 // plan["BLOCK"])
    z = norm_ops.on_cuda().norm(x.requires_grad_(), None, None, 1e-6, 0.0, norm_ops.KINDS["rmsnorm"])
    z.sum().backward()
    truth = x.detach().double().requires_grad_()
    expected = truth * torch.rsqrt(truth.square().mean(-1, keepdim=True) + 1e-6)
    expected.sum().backward()
    close(z, expected, torch.float32)
    close(x.grad, truth.grad, torch.float32)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 5), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("kind", norm_ops.KINDS.values(), ids=norm_ops.KINDS)
def test_of_nothing_they_are_nothing_and_gain_and_bias_have_gradients_of_zero(kind, affine, shape):
    ops, d = norm_ops.on_cuda(), shape[-1]
    x = drawn(shape, torch.float32).requires_grad_()
    weight = torch.ones(d, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) if affine != "none" else None
    bias = torch.ones_like(weight).requires_grad_() if affine == "both" else None
    z = ops.norm(x, weight, bias, 1e-6, 0.0, kind)
    z.sum().backward()
    assert z.shape == x.grad.shape == shape
    for parameter in (p for p in (weight, bias) if p is not None):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    with torch.no_grad():
        found = torch.empty_like(x)
        ops.add_norm_(x.clone(), x, found, weight, bias, 1e-6, 0.0, kind)
        assert found.shape == ops.norm(x, weight, bias, 1e-6, 0.0, kind).shape == shape


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("stream", [None, torch.float32], ids=str)
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_added_to_in_place_they_are_the_sum_and_its_norm(name, over, stream, dtype):
    for d in (5, 130, 768):
        residual, x = drawn((2, 9, d), stream or dtype, 2), drawn((2, 9, d), dtype, 3)
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
def test_the_pass_over_hidden_states_is_that_of_torch_in_float64(dtype, centered, rows, d):
    x, units = drawn((rows, d), dtype, 5), Directions.seeded(d, 0).units.to(DEVICE, torch.float64).contiguous()
    if rows > 1:
        x[0] = 3.0  # uniform: nothing is left without the mean
    found, expected = (torch.zeros((4 + centered, rows), dtype=torch.float64, device=DEVICE) for _ in range(2))
    kernels.on_cuda().project(x, units, centered, found, 1e-9)
    fallback.project(x, units, centered, expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    if centered and rows > 1:
        assert found[4, 0] == 0


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


@pytest.mark.parametrize("ops", ["triton_norms", "triton_project"])
def test_the_smallest_launch_is_one(ops):
    importlib.import_module(f"normgeo.kernels.{ops}").launch_smallest(torch.device(DEVICE))
