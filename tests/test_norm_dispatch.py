"""The compiled norms are used only where they may be, by either way that leads to them."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_norm_ops import ROUNDING, drawn
from test_norms import random_norm
from torch.utils.checkpoint import checkpoint

from normgeo.kernels import norm_ops
from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm

pytestmark = pytest.mark.skipif(not norm_ops.loaded().compiled, reason="needs a compiler")


@pytest.mark.parametrize("gradients", [True, False])
def test_they_leave_float64_and_transforms_to_torch(gradients):
    norm = random_norm(RMSNorm, 8)
    x = drawn((3, 8), torch.float32)
    with torch.set_grad_enabled(gradients):
        assert norm_ops.takes(x)
        assert not norm_ops.takes(x.double())
        assert not norm_ops.takes(x.to("meta"))
        for_each = torch.func.vmap(lambda row: norm.plain(row))(x)
        torch.testing.assert_close(torch.func.vmap(norm)(x), for_each)
        _, pulled = torch.func.vjp(norm, x)
        torch.testing.assert_close(pulled(x)[0], torch.func.vjp(norm.plain, x)[1](x)[0])
        mixed = norm_ops.norm(x.bfloat16(), norm.weight.half(), None, 1e-5, 0.0, "rmsnorm")
        assert mixed is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(2, 3, 77), (400, 1000)], ids=str)
def test_both_ways_to_the_kernels_lead_to_the_same(dtype, affine, shape, monkeypatch):
    x, residual, d = drawn(shape, dtype), drawn(shape, dtype, 1), shape[-1]
    weight = drawn(d, dtype, 2) if affine in ("both", "weight") else None
    bias = drawn(d, dtype, 3) if affine in ("both", "bias") else None

    def both():
        stream = residual.clone()
        z = norm_ops.norm(x, weight, bias, 1e-5, 1.0, "rmsnorm")
        return z, norm_ops.add_norm_(stream, x.clone(), weight, bias, 1e-5, 1.0, "crmsnorm", True), stream

    found = both()
    monkeypatch.setattr(norm_ops, "_loaded", norm_ops.by_operators(""))
    assert all(map(torch.equal, found, both()))


@torch.no_grad()
@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("narrow", ROUNDING, ids=str)
def test_what_lies_scattered_is_not_written_over(narrow, operators, monkeypatch):
    if operators:
        monkeypatch.setattr(norm_ops, "_loaded", norm_ops.by_operators(""))
    stream, x = drawn((3, 5, 8), torch.float32), drawn((3, 8, 5), narrow, 1).transpose(1, 2)
    total, kept = stream + x, x.clone()
    z = norm_ops.add_norm_(stream, x, None, None, 1e-5, 0.0, "rmsnorm", over=True)
    assert torch.equal(z, norm_ops.norm(total, None, None, 1e-5, 0.0, "rmsnorm").to(narrow))
    assert z.dtype is narrow
    assert torch.equal(stream, total)
    assert torch.equal(x, kept)


@torch.no_grad()
@pytest.mark.parametrize("operators", [False, True])
def test_both_ways_refuse_the_same(operators, monkeypatch):
    if operators:
        monkeypatch.setattr(norm_ops, "_loaded", norm_ops.by_operators(""))
    x, wide = drawn((3, 8), torch.float32), drawn((3, 8), torch.float64)
    for wrong in (wide, x.to(torch.int32), x.to("meta"), x.to_sparse(), torch._neg_view(x), torch.zeros(())):
        assert norm_ops.norm(wrong, None, None, 1e-5, 0.0, "rmsnorm") is None
    for stream, added in ((x, x[:2]), (x, x.view(8, 3)), (x, wide), (wide, x), (x.half(), x), (x.half(), x.bfloat16())):
        assert norm_ops.add_norm_(stream, added, None, None, 1e-5, 0.0, "rmsnorm") is None
    with torch.enable_grad():
        assert norm_ops.loaded().norm(x, None, None, 1e-5, 0.0, 1) is None  # which have no gradients
        assert norm_ops.add_norm_(x, x.clone(), None, None, 1e-5, 0.0, "rmsnorm") is None
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert norm_ops.norm(dual, None, None, 1e-5, 0.0, "rmsnorm") is None
        with torch.enable_grad():
            assert norm_ops.norm(dual, None, None, 1e-5, 0.0, "rmsnorm") is None
    assert torch.equal(x, drawn((3, 8), torch.float32))


@torch.no_grad()
@pytest.mark.skipif("direct" not in Path(norm_ops.loaded().reason).name, reason="needs Python's headers")
def test_calls_without_the_dispatcher_do_as_it_does():
    """Wrong arguments are errors, writing in place is noted, inference tensors are kept and profilers see the call."""
    ops, x = norm_ops.loaded(), drawn((3, 8), torch.float32)
    for call in (lambda: ops.norm(x), lambda: ops.norm(x, None, None, "eps", 0.0, 1), lambda: ops.add_norm_(x, x)):
        with pytest.raises(TypeError):
            call()
    assert ops.norm(None, None, None, 1e-5, 0.0, 1) is None
    residual = x.clone()
    versions = residual._version, x._version
    norm_ops.add_norm_(residual, x, None, None, 1e-5, 0.0, "rmsnorm")
    assert (residual._version, x._version) == (versions[0] + 1, versions[1])
    norm_ops.add_norm_(residual, x, None, None, 1e-5, 0.0, "rmsnorm", over=True)
    assert (residual._version, x._version) == (versions[0] + 2, versions[1] + 1)
    with torch.inference_mode():
        made = norm_ops.norm(x, None, None, 1e-5, 0.0, "rmsnorm")
    assert made.is_inference()
    before = made.clone()
    with pytest.raises(RuntimeError, match="inference tensor"):
        norm_ops.add_norm_(made, x, None, None, 1e-5, 0.0, "rmsnorm")
    assert torch.equal(made, before)
    versions = residual._version, residual.clone()
    assert norm_ops.add_norm_(residual, made, None, None, 1e-5, 0.0, "rmsnorm", over=True) is None
    assert residual._version == versions[0]
    assert torch.equal(residual, versions[1])
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as profile:
        norm_ops.norm(x, None, None, 1e-5, 0.0, "rmsnorm")
    assert "normgeo::norm" in {event.name for event in profile.events()}


def test_threads_that_come_at_once_load_them_once(monkeypatch):
    ops, loads = norm_ops.loaded(), []
    monkeypatch.setattr(norm_ops, "_loaded", None)
    monkeypatch.setattr(norm_ops, "_load", lambda: (loads.append(1), time.sleep(0.1), ops)[-1])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: norm_ops.loaded(), range(4))) == [ops] * 4
    assert len(loads) == 1


def test_after_an_error_launches_cost_what_they_did():
    with pytest.raises(ZeroDivisionError), norm_ops.launched_always():
        _ = 1 / 0
    assert not norm_ops._for_nothing.get()


@torch.no_grad()
def test_operators_note_what_they_write_and_keep_inference_tensors(monkeypatch):
    monkeypatch.setattr(norm_ops, "_loaded", norm_ops.by_operators(""))
    stream, x = drawn((3, 8), torch.float32), drawn((3, 8), torch.float32, 1)
    for over in (False, True):
        versions = stream._version, x._version
        norm_ops.add_norm_(stream, x, None, None, 1e-5, 0.0, "rmsnorm", over)
        assert (stream._version, x._version) == (versions[0] + 1, versions[1] + over)
    with torch.inference_mode():
        made = x.clone()
    before = made.clone(), stream.clone()
    assert norm_ops.add_norm_(made, x, None, None, 1e-5, 0.0, "rmsnorm") is None
    assert norm_ops.add_norm_(stream, made, None, None, 1e-5, 0.0, "rmsnorm", over=True) is None
    assert torch.equal(made, before[0])
    assert torch.equal(stream, before[1])


@torch.no_grad()
def test_on_cuda_streams_are_added_to_under_the_same_conditions(monkeypatch):
    """Without gradients, with a note of what is written, and inference tensors kept; on tensors without memory."""
    calls, drawn_there = [], lambda: torch.ones((3, 8), device="meta")
    monkeypatch.setattr(norm_ops, "takes", lambda x: True)
    monkeypatch.setattr(norm_ops, "on_cuda", lambda *_: SimpleNamespace(add_norm_=lambda *a: calls.append(a)))

    def add(residual, x, over=False):
        with norm_ops.launched_always():
            return norm_ops.add_norm_(residual, x, None, None, 1e-5, 0.0, "rmsnorm", over)

    residual, x = drawn_there(), drawn_there()
    assert add(residual, x) is not None
    assert (residual._version, x._version) == (1, 0)
    assert add(residual, x, over=True) is x
    assert (residual._version, x._version) == (2, 1)
    with torch.inference_mode():
        made = drawn_there()
        assert add(made, x) is not None
    calls.clear()
    assert add(made, x) is add(residual, made, over=True) is None
    with torch.enable_grad():
        assert add(residual, x) is None
    assert residual._version == 2
    assert not calls


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes what is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.__dict__.setdefault("names", []).append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_is_traced_or_watched_sees_every_operation():
    from torch.fx.experimental.proxy_tensor import make_fx

    norm, x, other = random_norm(RMSNorm, 8), drawn((3, 8), torch.float32), drawn((3, 8), torch.float32, 1)
    for traced in (torch.jit.trace(norm, (x,)), make_fx(norm)(x)):
        torch.testing.assert_close(traced(other), norm.plain(other))
    with Seen() as seen:
        norm(x)
    assert "aten.rsqrt.default" in seen.names

    class Elsewhere(torch.Tensor):
        """A subclass, whose memory may be anywhere."""

    assert norm_ops.norm(x.as_subclass(Elsewhere), norm.weight, norm.bias, 1e-5, 0.0, "rmsnorm") is None


@pytest.mark.parametrize("cls", [RMSNorm, CRMSNorm])
@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_that_is_watched_once_is_recomputed(first, cls):
    """As where the operations of a forward pass are counted, or of a backward pass, and not of the other."""
    norm, x, seen = random_norm(cls, 8), drawn((3, 8), torch.float32).requires_grad_(), Seen()
    with seen if first else nullcontext():
        z = checkpoint(lambda x: norm(x).square(), x, use_reentrant=False).sum()
    with nullcontext() if first else seen:
        found = torch.autograd.grad(z, [x, *norm.parameters()])
    assert "aten.rsqrt.default" in seen.names
    torch.testing.assert_close(found, torch.autograd.grad(norm.plain(x).square().sum(), [x, *norm.parameters()]))


@torch.no_grad()
def test_no_memory_is_read_but_the_parameters_own():
    """What does not suit is left to torch, which says what is wrong or knows how to read it."""
    x, weight = drawn((3, 8), torch.float32), torch.ones(8)
    for wrong in (
        torch.ones(7),
        torch.ones(1),
        weight.double(),
        weight.bfloat16(),
        torch.ones(16)[::2],
        weight.to("meta"),
    ):
        for pair in ((wrong, None), (None, wrong), (weight, wrong), (wrong, weight)):
            assert norm_ops.norm(x, *pair, 1e-5, 0.0, "rmsnorm") is None
            assert norm_ops.add_norm_(x.clone(), x.clone(), *pair, 1e-5, 0.0, "rmsnorm") is None
    norm = random_norm(RMSNorm, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):  # in place of the parameters of before
        norm.to(dtype)
        torch.testing.assert_close(norm(x.to(dtype)), norm.plain(x.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, CRMSNorm])
def test_forward_mode_derivatives_and_values_are_the_same_without_gradients(cls, dtype):
    """Written over, a tensor with a derivative is changed before torch refuses it."""
    norm, x = random_norm(cls, 8, dtype=dtype, bias=True), drawn((3, 8), dtype)

    def dual():
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(norm(torch.autograd.forward_ad.make_dual(x, x + 1)))

    for derivative in (lambda: torch.func.jvp(norm, (x,), (x + 1,)), dual):
        with torch.no_grad():
            found = derivative()
        for value, expected in zip(found, derivative(), strict=True):
            torch.testing.assert_close(value, expected)
        torch.testing.assert_close(found[0], norm(x))


@torch.no_grad()
def test_shapes_are_known_without_numbers():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.zeros(2, 3, 8))
        assert torch.ops.normgeo.norm(x, None, None, 1e-5, 0.0, 1).shape == (2, 3, 8)
        assert torch.ops.normgeo.add_norm_(x, x, x, None, None, 1e-5, 0.0, 1) is None


@torch.no_grad()
def test_wrong_arguments_are_refused_by_the_operator_itself():
    x, norm, ones = torch.zeros(2, 8), torch.ops.normgeo.norm, torch.ones(8)
    for given_x, weight, bias in (
        (x.double(), None, None), (x.T, None, None), (x, torch.ones(7), None), (x, ones.half(), None),
        (x, torch.ones(16)[::2], None), (x, ones, ones.half()), (x, None, ones[:7]),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"norms take|gamma and beta"):
            norm(given_x, weight, bias, 1e-5, 0.0, 1)
    half = x.bfloat16()
    for residual, added, out in (
        (x, x.clone(), torch.zeros(2, 7)), (x, x.clone(), x.T), (x, x.clone(), half), (half, x.clone(), half.clone()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="norms"):
            torch.ops.normgeo.add_norm_(residual, added, out, None, None, 1e-5, 0.0, 1)


@torch.no_grad()
def test_the_operator_gives_tensors_of_any_number_of_dimensions():
    for dimensions in (1, 2, 8, 9, 60):
        x = drawn((*[1] * (dimensions - 2), 3, 8)[-dimensions:], torch.float32)
        z = torch.ops.normgeo.norm(x, None, None, 1e-5, 0.0, 1)
        assert z.is_contiguous()
        torch.testing.assert_close(z, RMSNorm(8, affine=False).plain(x))
