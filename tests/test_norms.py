import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm

NORMS = (LayerNorm, RMSNorm, CRMSNorm)


def by_definition(cls, x, eps):
    """*Pre-RMSNorm* eq. 1, 2 and 5 as written there, with the eps inside the root."""
    x = np.asarray(x, np.float64)
    n = x.shape[-1]
    if cls is LayerNorm:
        mu = x.sum(-1, keepdims=True) / n
        return (x - mu) / np.sqrt((x**2).sum(-1, keepdims=True) / n - mu**2 + eps)
    if cls is RMSNorm:
        return x / np.sqrt((x**2).sum(-1, keepdims=True) / n + eps)
    return x / np.sqrt(((x**2).sum(-1, keepdims=True) + x.sum(-1, keepdims=True) ** 2) / (n + 1) + eps)


def random_norm(cls, d, eps=1e-5, dtype=torch.float32, **options):
    norm = cls(d, eps, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(d)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1 + torch.randn(d, generator=generator, dtype=torch.float64))
    return norm


@pytest.mark.parametrize("cls", NORMS)
@given(
    seed=st.integers(0, 2**31), d=st.integers(2, 65), eps=st.sampled_from([1e-12, 1e-5, 3e-2]), mean=st.floats(-9, 9)
)
def test_norms_equal_their_definition_in_float64(cls, seed, d, eps, mean):
    x = torch.randn(2, 3, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean
    norm = random_norm(cls, d, eps, torch.float64, bias=True)
    expected = by_definition(cls, x, eps) * norm.weight.detach().numpy() + norm.bias.detach().numpy()
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cls", NORMS)
def test_norms_keep_the_dtype_and_compute_half_precision_in_float32(cls, dtype):
    x = (3 * torch.randn(4, 33, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)
    norm = random_norm(cls, 33, bias=True, dtype=dtype)
    z = norm(x)
    assert z.dtype == dtype
    gained = torch.from_numpy(by_definition(cls, x.double(), 1e-5) * norm.weight.detach().double().numpy())
    expected = gained + norm.bias.detach().double()
    step = torch.finfo(dtype).eps * (gained.abs() + norm.bias.abs()).clamp(min=1)  # what is left of both is as exact
    assert ((z.double() - expected).abs() <= 2 * step).all()


def test_half_precision_does_not_overflow_where_the_squares_would():
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # 300^2 > 65504
    for cls in (RMSNorm, CRMSNorm):
        assert cls(8)(x).isfinite().all()
        assert cls(8)(x).min() > 0.3


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_layernorm_and_rmsnorm_equal_torchs(eps):
    x = 2 * torch.randn(5, 7, 48, generator=torch.Generator().manual_seed(1)) - 1
    ours, theirs = random_norm(LayerNorm, 48, eps, bias=True), nn.LayerNorm(48, eps)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    ours, theirs = random_norm(RMSNorm, 48, eps), nn.RMSNorm(48, eps)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", NORMS)
def test_gradients_of_input_gain_and_bias_are_right(cls):
    norm = random_norm(cls, 6, 1e-3, torch.float64, bias=True)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    values = (x, norm.weight.detach().clone().requires_grad_(), norm.bias.detach().clone().requires_grad_())

    def apply(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(apply, values)


@given(n=st.integers(1, 40), seed=st.integers(0, 2**31), eps=st.sampled_from([0.0, 1e-5, 1e-1]))
def test_crmsnorm_of_all_but_the_last_number_is_rmsnorm_of_a_zero_mean_vector(n, seed, eps):
    x = torch.randn(3, n + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x -= x.mean(-1, keepdim=True)
    short = CRMSNorm(n, eps, affine=False)(x[:, :-1])
    torch.testing.assert_close(short, RMSNorm(n + 1, eps, affine=False)(x)[:, :-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(short, LayerNorm(n + 1, eps, affine=False)(x)[:, :-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@given(n=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_crmsnorm_padded_and_expanded_are_the_same_vector(n, seed, bias):
    """Width n, width n + 1 with a zero, and all n + 1 numbers: three ways to write one zero-mean vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n + 1, dtype=torch.float64, generator=generator)
    x -= x.mean(-1, keepdim=True)
    short, padded = x[:, :-1], torch.nn.functional.pad(x[:, :-1], (0, 1))
    y = by_definition(RMSNorm, x, 1e-5)
    plain = {"affine": False}
    np.testing.assert_allclose(CRMSNorm(n, **plain)(short), y[:, :-1], atol=1e-12)
    np.testing.assert_allclose(CRMSNorm(n + 1, padded=True, **plain)(padded)[:, :-1], y[:, :-1], atol=1e-12)
    assert (CRMSNorm(n + 1, padded=True, **plain)(padded)[:, -1] == 0).all()
    for norm, given_x in (
        (CRMSNorm(n, expand=True, bias=bias, dtype=torch.float64), short),
        (CRMSNorm(n + 1, padded=True, expand=True, bias=bias, dtype=torch.float64), padded),
    ):
        gamma = torch.randn(n + 1, dtype=torch.float64, generator=generator)
        norm.weight.data.copy_(gamma)
        beta = torch.zeros(n + 1, dtype=torch.float64)
        if bias:
            beta = torch.randn(n + 1, dtype=torch.float64, generator=generator)
            norm.bias.data.copy_(beta)
        np.testing.assert_allclose(norm(given_x).detach(), y * gamma.numpy() + beta.numpy(), atol=1e-12)


def test_layernorm_and_rmsnorm_agree_on_zero_mean_input_only():
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(LayerNorm(16)(x), RMSNorm(16)(x - x.mean(-1, keepdim=True)))
    assert not torch.allclose(LayerNorm(16)(x), RMSNorm(16)(x), atol=1e-2)


@pytest.mark.parametrize("cls", NORMS)
@pytest.mark.parametrize(
    ("options", "names"),
    [({"affine": False, "bias": True}, set()), ({}, {"weight"}), ({"bias": True}, {"weight", "bias"})],
)
def test_affine_and_bias_decide_which_parameters_there_are(cls, options, names):
    norm = cls(8, **options)
    assert set(norm.state_dict()) == {name for name, _ in norm.named_parameters()} == names
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(4))
    np.testing.assert_allclose(norm(x).detach().numpy(), by_definition(cls, x.double(), 1e-5), atol=1e-5)
    assert f"affine={bool(names)}, bias={'bias' in names}" in repr(norm)


@pytest.mark.parametrize("cls", NORMS)
def test_a_zero_vector_gives_the_bias_and_no_nan(cls):
    norm = random_norm(cls, 8, bias=True)
    assert torch.equal(norm(torch.zeros(2, 8)), norm.bias.expand(2, 8))
