"""A norm is one function, whichever way it is computed."""

import copy

import pytest
import torch
from test_norm_ops import ROUNDING, drawn
from test_norms import random_norm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from normgeo import convert
from normgeo.kernels import norm_ops
from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@torch.no_grad()
def test_without_kernels_a_centered_rmsnorm_is_the_same(dtype, affine, monkeypatch):
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    x = drawn((5, 40), torch.float32)
    x = (x - x.mean(-1, keepdim=True)).to(dtype)
    norm = random_norm(RMSNorm, 40, 1e-5, dtype, bias=affine, affine=affine)
    plain, with_a_mean = norm(x), norm(x + 0.1)
    norm.centered = True
    assert not torch.equal(norm(x), plain)  # LayerNorm is at work
    tolerance = 4 * ROUNDING[dtype]
    torch.testing.assert_close(norm(x), plain, rtol=tolerance, atol=tolerance)
    assert torch.equal(norm(x + 0.1), with_a_mean)  # of such inputs it is another function
    assert torch.equal(torch.func.vmap(norm)(x), plain)
    if dtype is torch.float32:
        (_, turned), (_, exact) = (
            torch.func.jvp(of, (x.to(of_dtype),), (x.to(of_dtype) + 1,))
            for of, of_dtype in ((norm, dtype), (copy.deepcopy(norm).double(), torch.float64))
        )
        torch.testing.assert_close(turned.double(), exact, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_small_mean_is_no_rounding(monkeypatch):
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    x = drawn((5, 40), torch.float32)
    x = x - x.mean(-1, keepdim=True) + 5e-4
    plain, centered = RMSNorm(40), RMSNorm(40, centered=True)
    assert torch.equal(centered(x), plain(x))  # LayerNorm is not at work


@pytest.mark.parametrize("norm", [RMSNorm(8), RMSNorm(8, centered=True), CRMSNorm(8, padded=True)], ids=str)
def test_a_trace_and_fake_tensors_are_of_one_arithmetic(norm, monkeypatch):
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    x = drawn((3, 8), torch.float32)
    torch.testing.assert_close(torch.jit.trace(norm, x)(x), norm(x), rtol=1e-6, atol=1e-6)
    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as fake:
        assert norm(fake.from_tensor(x)).shape == (3, 8)


@pytest.mark.parametrize("moved", ["trained", "steered"])
def test_a_converted_model_is_one_function_with_kernels_and_without(moved, tiny, monkeypatch):
    """Also where its stream has no zero mean any more: LayerNorms would be off by 0.1 and by 1.2."""
    model, ids = convert(tiny("gpt2")).model, torch.arange(3, 67).view(4, 16)
    if moved == "trained":
        optimizer = torch.optim.AdamW(model.requires_grad_().parameters(), lr=1e-3)
        for _ in range(10):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        model.transformer.h[0].register_forward_hook(
            lambda module, args, out: (out[0] + 2, *out[1:]) if isinstance(out, tuple) else out + 2
        )
    with torch.no_grad():
        truth, found = copy.deepcopy(model).double()(ids).logits, {"kernels": model(ids).logits}
        monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
        found["none"] = model(ids).logits
    found["gradients"] = model(ids).logits.detach()
    for logits in found.values():
        assert (logits - truth).abs().max() < 1e-5 * truth.abs().max()


@pytest.mark.parametrize(
    "norm",
    [
        *(RMSNorm(8), RMSNorm(8, centered=True), RMSNorm(8, affine=False)),
        *(CRMSNorm(8), CRMSNorm(8, padded=True), CRMSNorm(8, affine=False)),
    ],
    ids=str,
)
@torch.no_grad()
def test_another_width_is_refused(norm, monkeypatch):
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
        for shape in ((4, 1), (4, 7), (4, 9), (), (0,)):
            with pytest.raises(ValueError, match=r"of 8 numbers was given \("):
                norm(torch.ones(shape))


def test_a_gain_of_fewer_digits_is_added_to_its_offset_in_the_inputs():
    norm, x = RMSNorm(6, offset=1.0), torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(1e-6, 1e-3, 6))
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + norm.weight.double())
    torch.testing.assert_close(norm(x), exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"bias": True}, {"affine": False}, {"offset": 1.0}], ids=str)
@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, CRMSNorm])
def test_without_kernels_and_gradients_it_is_the_same(cls, options, dtype, monkeypatch):
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    x, norm = 3 * drawn((5, 40), dtype) + 1, random_norm(cls, 40, 1e-5, dtype, **options)
    exact = copy.deepcopy(norm).double()(x.double())
    with torch.no_grad():
        found, again = norm(x), norm(x)
    assert found.dtype is dtype
    assert torch.equal(found, again)  # nothing was written over that is somebody else's
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    if norm.weight is not None:
        many = {name: torch.stack([p, 2 * p]).detach() for name, p in norm.named_parameters()}
        with torch.no_grad():
            both = torch.func.vmap(lambda gains: torch.func.functional_call(norm, gains, x))(many)
            for gains, z in zip(({n: p[i] for n, p in many.items()} for i in (0, 1)), both, strict=True):
                alone = torch.func.functional_call(norm, gains, x)
                torch.testing.assert_close(z, alone, rtol=tolerance, atol=tolerance)
