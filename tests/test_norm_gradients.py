"""Norms with gradients by kernels, in Triton and compiled for a CPU, against torch in float64."""

import copy
import importlib
from itertools import cycle, product

import pytest
import torch
from rounding import NAMES, ROUNDING, close, drawn
from test_norms import random_norm
from torch.utils.checkpoint import checkpoint
from zoo import tiny

from normgeo import convert
from normgeo.examples import example_inputs
from normgeo.kernels import compiling, cpu, differentiable, norm_gradients, norm_ops
from normgeo.kernels.norm_ops import KINDS


class Run:
    """The norm by some kernels, on their device."""

    def __init__(self, kernels, device):
        self.kernels, self.device = kernels, device

    def __call__(self, x, weight, bias, eps, offset, kind):
        return differentiable.norm(self.kernels, x, weight, bias, eps, offset, kind)

    def drawn(self, shape, dtype, seed=0):
        return drawn(shape, dtype, seed, self.device)


compiled = pytest.param(
    "compiled", marks=pytest.mark.skipif(norm_gradients.loaded() is None, reason="needs a compiler")
)
in_triton = pytest.param(
    "triton",
    marks=[pytest.mark.gpu, pytest.mark.skipif(norm_ops.on_cuda() is None, reason="needs a CUDA device, or Triton")],
)


@pytest.fixture(params=[compiled, in_triton])
def run(request):
    if request.param == "compiled":
        return Run(norm_gradients.loaded(), "cpu")
    kernels = importlib.import_module("normgeo.kernels.triton_norms").KERNELS
    return Run(kernels, "cuda" if torch.cuda.is_available() else "cpu")


WIDTHS, AFFINES = (2, 7, 64, 100, 1000), ("both", "weight", "wide", "none")


def shapes(run):
    """Every width with every kind of parameters; in the interpreter, which is slow, with one of them."""
    slow = run is in_triton and not torch.cuda.is_available()
    cases = zip(WIDTHS, cycle(AFFINES), strict=False) if slow else product(WIDTHS, AFFINES)
    return [pytest.param(*run.values, d, affine, marks=run.marks) for d, affine in cases]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("run", "d", "affine"), [*shapes(compiled), *shapes(in_triton)], indirect=["run"])
def test_values_and_gradients_are_those_of_float64(run, name, dtype, d, affine):
    cls, options = NAMES[name]
    of = torch.float32 if affine == "wide" else dtype
    norm = random_norm(cls, d, dtype=of, bias=affine in ("both", "wide"), affine=affine != "none", **options).to(
        run.device
    )
    norm.offset = 0.0 if affine == "both" else 0.5
    exact = copy.deepcopy(norm).double()
    x, dz = run.drawn((3, 7, d), dtype), run.drawn((3, 7, d), dtype, 1)
    if name == "crmsnorm-padded":
        x[..., -1] = 0
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    z = run(a, norm.weight, norm.bias, norm.eps, norm.offset, KINDS[name])
    z.backward(dz)
    expected = exact.plain(b)
    expected.backward(dz.double())
    close(z, expected, dtype)
    close(a.grad, b.grad, dtype)
    for found, truth in zip(norm.parameters(), exact.parameters(), strict=True):
        close(found.grad, truth.grad, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-12, 1e15])
def test_gradients_of_rows_of_any_size_are_those_of_float64(run, name, size):
    cls, options = NAMES[name]
    norm = random_norm(cls, 64, bias=True, **options).to(run.device)
    exact, x, dz = copy.deepcopy(norm).double(), run.drawn((5, 64), torch.float32), run.drawn((5, 64), torch.float32, 1)
    if name == "crmsnorm-padded":
        x[..., -1] = 0
    x *= size
    exact.eps = norm.eps = min(norm.eps, 1e-4 * size**2)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    run(a, norm.weight, norm.bias, norm.eps, norm.offset, KINDS[name]).backward(dz)
    exact.plain(b).backward(dz.double())
    close(a.grad, b.grad, torch.float32)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "x"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(run, frozen):
    def gradients(wanted):
        x, dz = run.drawn((40, 16), torch.float32), run.drawn((40, 16), torch.float32, 1)
        given = {"x": x, "weight": run.drawn(16, torch.float32, 2), "bias": run.drawn(16, torch.float32, 3)}
        for name, tensor in given.items():
            tensor.requires_grad_(name in wanted)
        run(*given.values(), 1e-5, 0.5, KINDS["rmsnorm"]).backward(dz)
        return {name: tensor.grad for name, tensor in given.items()}

    whole = gradients({"x", "weight", "bias"})
    wanted = whole.keys() - ({"weight", "bias"} if frozen == "both" else {frozen})
    for name, gradient in gradients(wanted).items():
        assert torch.equal(gradient, whole[name]) if name in wanted else gradient is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_gradients_are_those_of_float64(run, name, affine, dtype):
    """As penalties of gradients need them, and products with a Hessian."""
    cls, options = NAMES[name]
    norm = random_norm(cls, 20, dtype=dtype, bias=affine == "both", affine=affine != "none", **options).to(run.device)
    norm.offset = 0.0 if affine == "both" else 0.5
    exact = copy.deepcopy(norm).double()
    x, dz, direction = (run.drawn((3, 7, 20), dtype, seed) for seed in range(3))
    if name == "crmsnorm-padded":
        x[..., -1] = 0

    def second(x, apply, parameters):
        x.requires_grad_()
        (first,) = torch.autograd.grad(apply(x), x, dz.to(x.dtype), create_graph=True)
        asked = [x, *(p for p in parameters if p.shape == (20,))]
        return first, torch.autograd.grad((first * direction.to(x.dtype)).sum(), asked, allow_unused=True)

    def launched(x):
        return run(x, norm.weight, norm.bias, norm.eps, norm.offset, KINDS[name])

    first, found = second(x.clone(), launched, list(norm.parameters()))
    expected_first, expected = second(x.double(), exact.plain, list(exact.parameters()))
    close(first, expected_first, dtype)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, dtype)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 5), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_of_nothing_they_are_nothing_and_gain_and_bias_have_gradients_of_zero(run, kind, affine, shape):
    x, d = run.drawn(shape, torch.float32).requires_grad_(), shape[-1]
    weight = torch.ones(d, dtype=torch.bfloat16, device=run.device, requires_grad=True) if affine != "none" else None
    bias = torch.ones_like(weight).requires_grad_() if affine == "both" else None
    z = run(x, weight, bias, 1e-6, 0.0, kind)
    z.sum().backward()
    assert z.shape == x.grad.shape == shape
    for parameter in (p for p in (weight, bias) if p is not None):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


of_the_cpu = pytest.mark.skipif(norm_gradients.loaded() is None, reason="needs a compiler")


@of_the_cpu
@pytest.mark.parametrize("rows", [1, 31, 33, 4500], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sums_over_rows_are_the_same_to_the_last_bit_for_any_number_of_threads(name, rows):
    run = Run(norm_gradients.loaded(), "cpu")
    x, dz, d = run.drawn((rows, 21), torch.float32), run.drawn((rows, 21), torch.float32, 1), 21
    weight, bias = run.drawn(d, torch.float32, 2), run.drawn(d, torch.float32, 3)

    def gradients(dtype=torch.float32):
        given = [v.to(dtype).requires_grad_() for v in (x.clone(), weight.clone(), bias.clone())]
        cls, options = NAMES[name]
        z = run(*given, 1e-5, 0.0, KINDS[name]) if dtype == torch.float32 else None
        if z is None:
            exact = cls(d, bias=True, dtype=dtype, **options)
            z = torch.func.functional_call(exact, {"weight": given[1], "bias": given[2]}, given[0])
        return torch.autograd.grad(z, given, dz.to(dtype))

    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(gradients())
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(found[0], more, strict=True))
    for a, b in zip(found[0], gradients(torch.float64), strict=True):
        close(a, b, torch.float32)


@of_the_cpu
@pytest.mark.parametrize("to", ["rmsnorm", "crmsnorm", "naive-rmsnorm"])
def test_models_train_with_them_as_they_would_in_torch(to, monkeypatch):
    """Through strided inputs, expanded gradients, shared and checkpointed norms."""
    model = convert(tiny("gpt2"), to=to).model.train()
    inputs = example_inputs(model)

    def gradients():
        torch.manual_seed(0)  # of dropout
        model.zero_grad()
        out = checkpoint(lambda **given: model(**given).logits, use_reentrant=False, **inputs)
        out.transpose(0, 1).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    calls, norm = [], differentiable.norm
    monkeypatch.setattr(differentiable, "norm", lambda *a: calls.append(a) or norm(*a))
    found = gradients()
    assert len(calls) > 0
    monkeypatch.setattr(norm_gradients, "loaded", lambda: None)
    before = len(calls)
    expected = gradients()
    assert len(calls) == before
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1e-3))


@of_the_cpu
def test_what_is_not_a_number_stays_that_and_in_its_row():
    run = Run(norm_gradients.loaded(), "cpu")
    for bad in (torch.nan, torch.inf):
        x, weight = run.drawn((9, 20), torch.float32), torch.ones(20, requires_grad=True)
        x[4, 3] = bad
        z = run(x.requires_grad_(), weight, None, 1e-5, 0.0, 1)
        z.sum().backward()
        good = torch.arange(9) != 4
        assert not z[4].isfinite().all()
        assert z[good].isfinite().all()
        assert x.grad[good].isfinite().all()
        assert x.grad[4].isnan().any()


@of_the_cpu
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("scale * total(dots)", "total(dots)"), ("fused<N>(scaled, v, weight)", "fused<N>(scaled, scaled, weight)")],
)
def test_a_library_of_other_gradients_is_not_used_and_said_once(right, wrong, monkeypatch, tmp_path):
    source = norm_gradients.SOURCE.read_text()
    assert right in source
    (tmp_path / "other.cpp").write_text(source.replace(right, wrong))
    monkeypatch.setattr(norm_gradients, "SOURCE", tmp_path / "other.cpp")
    monkeypatch.setattr(compiling, "_said", set())
    monkeypatch.setattr(norm_gradients, "_loaded", norm_gradients._loaded.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="slower: the compiled norms give wrong gradients"):
        assert norm_gradients.loaded() is None


@of_the_cpu
def test_memory_of_other_types_and_widths_is_left_to_torch():
    x, weight = torch.ones(3, 8), torch.ones(8)
    for wrong in (torch.ones(7), weight.double(), weight.bfloat16(), torch.ones(16)[::2], weight.to("meta")):
        for pair in ((wrong, None), (None, wrong), (weight, wrong), (wrong, weight)):
            assert norm_ops.norm(x, *pair, 1e-5, 0.0, "rmsnorm") is None
    assert cpu.DTYPES[torch.float16] == 2  # as the source has them
