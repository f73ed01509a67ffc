"""What autograd may be asked for, of norms by compiled kernels: always what torch's own arithmetic gives."""

import copy
import warnings

import pytest
import torch
from test_norm_gradients import Run, of_the_cpu
from test_norms import random_norm
from torch.nn.utils import prune

from normgeo.kernels import norm_gradients
from normgeo.norms import RMSNorm


def norm_and_input(d=8):
    norm = random_norm(RMSNorm, d)
    return norm, torch.randn((4, d), generator=torch.Generator().manual_seed(0))


def by_both(norm, what):
    """What is computed by the kernels, and in torch's arithmetic."""
    return what(norm), what(norm.plain)


@of_the_cpu
def test_gradients_of_gradients_where_one_gain_is_used_again_and_behind_itself():
    norm, x = norm_and_input()

    def of(run):
        given = [x.clone().requires_grad_(), norm.weight]
        out = run(torch.tanh(run(given[0]) + norm.weight))
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]

    torch.testing.assert_close(*by_both(norm, of), rtol=1e-4, atol=1e-4)


def many_at_once(z, x):
    dz = torch.randn((5, *z.shape), generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(z, x, dz, is_grads_batched=True)[0]


def by_vmap(z, x):
    dz = torch.randn((5, *z.shape), generator=torch.Generator().manual_seed(1))
    return torch.func.vmap(lambda one: torch.autograd.grad(z, x, one, retain_graph=True)[0])(dz)


def forward_over_reverse(z, x):
    with torch.autograd.forward_ad.dual_level():
        dz = torch.autograd.forward_ad.make_dual(torch.ones_like(z), 1 + torch.arange(z.numel()).view_as(z) / 7)
        (dx,) = torch.autograd.grad(z, x, dz)
        return torch.autograd.forward_ad.unpack_dual(dx).tangent


ASKED = {
    "many at once": many_at_once,
    "many by vmap": by_vmap,
    "forward over reverse": forward_over_reverse,
    "negative bit": lambda z, x: torch.autograd.grad(z, x, torch._neg_view(torch.ones_like(z)))[0],
    "zeros without memory": lambda z, x: torch.autograd.grad(z, x, torch._efficientzerotensor(z.shape))[0],
    "expanded": lambda z, x: torch.autograd.grad(z.sum(), x)[0],
}


@of_the_cpu
@pytest.mark.parametrize("asked", ASKED)
def test_gradients_that_are_no_plain_tensors_are_torchs(asked):
    norm, x = norm_and_input()
    x.requires_grad_()
    torch.testing.assert_close(*by_both(norm, lambda run: ASKED[asked](run(x), x) + 0))


KEEPING = {
    "in half precision": (lambda t: t.bfloat16(), lambda t: t.float()),
    "in half precision, as it is": (lambda t: t.bfloat16(), lambda t: t),
    "in float64": (lambda t: t.double(), lambda t: t),
    "transposed": (lambda t: t.clone(), lambda t: t.t().contiguous().t() if t.ndim == 2 else t),
}


@of_the_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeping", KEEPING)
def test_what_is_saved_may_be_kept_elsewhere_and_in_another_dtype(keeping, dtype):
    norm, x = norm_and_input(64)
    norm, x = norm.to(dtype), x.to(dtype).requires_grad_()

    def of(run):
        with torch.autograd.graph.saved_tensors_hooks(*KEEPING[keeping]):
            z = run(x)
        return torch.autograd.grad(z.float().square().sum(), [x, norm.weight])

    for found, expected in zip(*by_both(norm, of), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@of_the_cpu
def test_what_plain_arithmetic_bears_is_borne():
    """Inputs of inference mode, zeros without memory, a beta that changes before the backward pass, and no gradient."""
    norm, x = random_norm(RMSNorm, 8, bias=True), norm_and_input()[1]
    with torch.inference_mode():
        made = x.clone()
    for given in (made, torch._efficientzerotensor((4, 8))):
        torch.testing.assert_close(
            *by_both(norm, lambda run, given=given: torch.autograd.grad(run(given).sum(), norm.bias)[0])
        )
    z = norm(x)
    with torch.no_grad():
        norm.bias.add_(1)
    z.sum().backward()

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dz):
            return None

    norm.zero_grad()
    Nothing.apply(norm(x)).sum().backward()
    assert norm.weight.grad is norm.bias.grad is None


@of_the_cpu
def test_sums_over_very_many_rows_keep_their_digits():
    x, bias = torch.ones(400_000, 4), torch.zeros(4, requires_grad=True)
    run = Run(norm_gradients.loaded(), "cpu")
    run(x, None, bias, 1e-5, 0.0, 1).backward(torch.full_like(x, 0.1))
    assert ((bias.grad.double() / (400_000 * torch.tensor(0.1).double()) - 1).abs() < 2e-6).all()


class Wrapper(torch.Tensor):
    """A tensor whose memory is another's, as those of distributed collectives; it gives no address of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = torch.utils._pytree.tree_map(lambda a: a.inner if isinstance(a, Wrapper) else a, args)
        return func(*args, **(kwargs or {}))


@of_the_cpu
def test_gradients_of_another_class_are_not_read():
    class Into(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dz):
            return Wrapper(2 * dz)

    norm, x = norm_and_input()
    x.requires_grad_()
    torch.testing.assert_close(
        *by_both(norm, lambda run: torch.autograd.grad(Into.apply(run(x)).square().sum(), x)[0] + 0)
    )


@of_the_cpu
def test_hooks_of_what_is_normed_run_once_and_retained_gradients_are_whole():
    norm, x = norm_and_input()

    def of(run):
        start = x.clone().requires_grad_()
        h, calls = start * 1.0, []
        h.retain_grad()
        h.register_hook(lambda g: calls.append(1))
        handle = norm.weight.register_hook(lambda g: 2 * g)
        (gain,) = torch.autograd.grad(run(h).square().sum(), norm.weight, create_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle of references, which the next line ends
            run(h).square().sum().backward(create_graph=True)
        handle.remove()
        found = [gain.detach(), h.grad.detach(), start.grad.detach(), torch.tensor(float(len(calls)))]
        norm.zero_grad()
        start.grad = h.grad = None
        return found

    torch.testing.assert_close(*by_both(norm, of))


@of_the_cpu
def test_parameters_that_change_between_both_passes_are_looked_at_again():
    """Offloading swaps them, and models are cast: nothing is read or written beyond what is there."""
    for change in (torch.Tensor.double, lambda w: w.repeat_interleave(2)[::2], lambda w: w[:1].expand(8) + 0):
        norm, x = norm_and_input()
        x.requires_grad_()
        z = norm(x)
        norm.weight.data = change(norm.weight.data)
        z.sum().backward()
        exact, y = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
        exact.zero_grad()
        exact.plain(y).sum().backward()
        for found, expected in ((x.grad, y.grad), (norm.weight.grad, exact.weight.grad)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    norm, x = norm_and_input()
    z = norm(x)
    norm.weight.data = norm.weight.data[:3].clone()
    with pytest.raises(RuntimeError):
        z.sum().backward()


@of_the_cpu
def test_frozen_inputs_get_no_gradient_and_no_graph_is_kept():
    norm, x = norm_and_input()
    norm(x).sum().backward()
    assert x.grad is None
    dz = torch._neg_view(torch.ones(4, 8))
    (found,) = torch.autograd.grad(norm(x), norm.weight, dz)
    assert not found.requires_grad


def test_pruned_norms_are_what_is_left_of_them():
    norm, x = norm_and_input()
    prune.l1_unstructured(norm, "weight", amount=3)
    assert (norm.weight == 0).sum() == 3
    with torch.no_grad():
        torch.testing.assert_close(norm(x), norm.plain(x))
    torch.testing.assert_close(norm(x), norm.plain(x))
