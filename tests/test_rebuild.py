"""Outputs rebuilt from inputs are those of the recipe to the last bit, whichever way they are computed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from test_writer import SITE, D
from torch import nn

from normgeo import kernels
from normgeo.kernels import rms
from normgeo.store.rebuild import RECIPES, ROUNDED_HALFWAY, WIDE_GAINS, Rebuild, find_rebuild, same_bits


@pytest.fixture(scope="module", params=["compiled", "torch"], autouse=True)
def way(request):
    """By the kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(rms, "loaded", lambda: None)
        elif not kernels.status().compiled:
            pytest.skip("needs a compiler")
        yield request.param


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = 1e-5


def drawn(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(2.0**seed).to(dtype)


@torch.no_grad()
def plainly(recipe, x, gamma, beta):
    return RECIPES[recipe](x.contiguous(), gamma, beta, EPS).to(x.dtype)


@given(
    st.sampled_from([name for name in RECIPES if name.startswith("rms")]), st.sampled_from(DTYPES),
    st.sampled_from(["own", "wide", None]), st.booleans(), st.sampled_from([0.0, 1.0]),
    st.sampled_from([(1, 1), (3, 15), (40, 16), (600, 33), (7, 576), (9, 8191), (1, 32_768), (2, 32_767)]),
    st.integers(-8, 4),
)  # fmt: skip
def test_every_recipe_is_followed_to_the_last_bit(recipe, dtype, kind, biased, offset, shape, seed):
    own = torch.float32 if kind == "wide" else dtype
    if recipe == "rmsnorm" and own is not dtype:
        return  # torch's own takes no wider gain
    gain = None if kind is None else drawn(shape[1], dtype=own, seed=seed % 3)
    bias = drawn(shape[1], dtype=own, seed=1) if biased else None
    x = drawn(shape[0], shape[1] + 3, dtype=dtype, seed=seed)[:, : shape[1]]
    gamma = gain.float() if gain is not None and offset and recipe in WIDE_GAINS else gain
    gamma = gamma if gamma is None else gamma + offset
    found = Rebuild(recipe, offset if gain is not None else 0.0, gain, bias, True, 0.0)(x, EPS)
    assert found.dtype is dtype
    assert same_bits(found, plainly(recipe, x, gamma, bias))


@pytest.mark.parametrize("recipe", ROUNDED_HALFWAY)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_few_numbers_keep_their_bits_and_other_layouts_their_values(recipe, dtype):
    """Which torch sums in orders of their own."""
    for d in range(1, 33):
        x, rebuild = drawn(40, d, dtype=dtype, seed=0), Rebuild(recipe, 0.0, None, None, True, 0.0)
        wanted = plainly(recipe, x, None, None)
        assert same_bits(rebuild(x, EPS), wanted), d
        for layout in (x.T.contiguous().T, torch.stack([x, -x], 2)[..., 0]):
            torch.testing.assert_close(rebuild(layout, EPS), wanted)


@pytest.mark.parametrize("recipe", ROUNDED_HALFWAY)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_row_without_a_length_keeps_its_own_bits(recipe, dtype, value):
    x, gamma = drawn(9, 40, dtype=dtype, seed=0), drawn(40, dtype=dtype, seed=1)
    x[4, 3 if value else slice(None)] = value
    found = Rebuild(recipe, 0.0, gamma, None, True, 0.0)(x, EPS if value else 0.0)
    wanted = RECIPES[recipe](x, gamma, None, EPS if value else 0.0)
    whole = torch.uint8
    assert torch.equal(found.view(whole), wanted.to(dtype).view(whole))


@pytest.mark.parametrize("recipe", ROUNDED_HALFWAY)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_the_smallest_numbers_and_gains_that_are_not_finite_keep_their_bits(recipe, dtype):
    x, tiny = drawn(64, 40, dtype=dtype, seed=0), torch.finfo(dtype).smallest_normal
    for gamma in (torch.linspace(-2, 2, 40).mul(tiny).to(dtype), torch.full((40,), torch.nan).to(dtype), None):
        x[1, 1:] *= tiny
        wanted = RECIPES[recipe](x, gamma, None, EPS).to(dtype)
        assert same_bits(Rebuild(recipe, 0.0, gamma, None, True, 0.0)(x, EPS), wanted)


def test_a_gain_of_another_width_is_refused_as_torch_does():
    x, gamma = drawn(9, 40, dtype=torch.float32, seed=0), torch.ones(39)
    with pytest.raises((RuntimeError, TypeCheckError), match="39"):
        Rebuild("rmsnorm-wide", 0.0, gamma, None, True, 0.0)(x, EPS)


def test_what_torch_makes_by_default_does_not_matter():
    x, gamma = drawn(9, 40, dtype=torch.bfloat16, seed=0), drawn(40, dtype=torch.bfloat16, seed=1)
    rebuild = Rebuild("rmsnorm-gain-last", 0.0, gamma, None, True, 0.0)
    wanted = rebuild(x, EPS)
    torch.set_default_dtype(torch.float64)
    getattr(rms.loaded, "cache_clear", int)()
    try:
        assert torch.equal(rebuild(x, EPS), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_kernel_is_used_where_there_is_one_and_says_where_it_is_not(way):
    x, out = drawn(4, 64, dtype=torch.bfloat16, seed=0), torch.empty(4, 64, dtype=torch.bfloat16)
    assert rms.scaled_by_rms(x, None, EPS, halfway=False, out=out) == (way == "compiled")
    assert not rms.scaled_by_rms(x.double(), None, EPS, halfway=False, out=out.double())
    assert not rms.scaled_by_rms(x, torch.ones(64).half(), EPS, halfway=False, out=out)


class Fewer(nn.LayerNorm):
    """It gives fewer vectors of many than it is given."""

    def forward(self, x):
        return super().forward(x)[: 9 if len(x) < 50 else 3]


def test_a_recipe_is_found_by_what_was_seen_where_a_norm_gives_other_shapes():
    x, norm = torch.randn(9, D), Fewer(D)
    with torch.no_grad():
        assert find_rebuild(norm, SITE, x, norm(x)).bit_equal


def test_bits_of_another_dtype_are_others():
    assert not same_bits(torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16))


class InFloat64(nn.Module):
    """An RMSNorm whose gain is one more than it stores, and which no recipe is to the last bit."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(drawn(D, dtype=torch.float32, seed=-1))

    def forward(self, x):
        wide = x.double()
        return ((1 + self.weight) * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + SITE.eps)).float()


@torch.no_grad()
def test_where_no_recipe_is_exact_it_is_the_nearest():
    norm, x = InFloat64(), drawn(500, D, dtype=torch.float32, seed=0)
    z = norm(x)
    found = find_rebuild(norm, replace(SITE, kind="rmsnorm"), x, z)
    assert (found.offset, found.bit_equal) == (1.0, False)
    assert found.error == ((found(x, SITE.eps).double() - z.double()).abs().max() / z.abs().max()).item() < 1e-6
