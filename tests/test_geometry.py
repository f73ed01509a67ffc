import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

from normgeo.geometry import (
    Directions,
    angle,
    mean_vector,
    orthogonal_component,
    rotation,
    standardize,
    uniform_vector,
)


@st.composite
def vectors(draw, rows=3):
    """Random float64 vectors of width 2 to 80 with means and lengths of very different sizes."""
    d = draw(st.integers(2, 80))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    return (x + draw(st.floats(-5, 5))) * 10.0 ** draw(st.integers(-6, 6))


def close(a, b, tolerance=1e-9):
    scale = float(b.abs().max()) or 1.0
    torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=tolerance)


@given(vectors())
def test_mean_vector_is_the_projection_onto_the_uniform_unit_vector(x):
    unit = uniform_vector(x.shape[1], torch.float64) / math.sqrt(x.shape[1])
    close(mean_vector(x), (x @ unit)[:, None] * unit)


@given(vectors())
def test_a_vector_is_the_sum_of_mean_vector_and_orthogonal_component_which_are_orthogonal(x):
    mu, rest = mean_vector(x), orthogonal_component(x)
    close(mu + rest, x)
    close((mu * rest).sum(1) / x.pow(2).sum(1), torch.zeros(len(x), dtype=x.dtype))
    close(rest.sum(1) / x.norm(dim=1), torch.zeros(len(x), dtype=x.dtype))
    close(mu.pow(2).sum(1) + rest.pow(2).sum(1), x.pow(2).sum(1))


@given(vectors())
def test_standardized_vectors_have_norm_sqrt_d_mean_0_and_are_parallel_to_the_orthogonal_component(x):
    y, d = standardize(x), x.shape[1]
    close(y.norm(dim=1), torch.full((len(x),), math.sqrt(d), dtype=x.dtype))
    assert y.mean(1).abs().max() < 1e-9
    rest = orthogonal_component(x)
    close((y * rest).sum(1), y.norm(dim=1) * rest.norm(dim=1))


@given(vectors(), st.floats(-10, 10), st.floats(1e-3, 1e3))
def test_standardize_ignores_shift_along_the_uniform_vector_and_positive_scale(x, shift, scale):
    moved = scale * (x + shift * x.abs().max())
    close(standardize(moved), standardize(x), 1e-7)
    close(standardize(-x), -standardize(x))


@given(vectors())
def test_standardize_is_idempotent_and_equals_torch_layer_norm_without_eps(x):
    y = standardize(x)
    close(standardize(y), y)
    close(y, layer_norm(x, x.shape[-1:], eps=0.0), 1e-8)


@given(vectors(), st.integers(0, 2**31))
def test_angle_is_symmetric_scale_invariant_and_the_complement_of_the_opposite_direction(x, seed):
    u = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    theta = angle(x, u)
    close(theta, torch.stack([angle(u, row) for row in x]))
    close(angle(123.0 * x, u / 7), theta)
    close(angle(-x, u), 180 - theta)
    close(angle(x, -u), 180 - theta)
    assert ((theta >= 0) & (theta <= 180)).all()


@given(vectors())
def test_angle_equals_arccos_of_the_normalized_dot_product(x):
    u = torch.linspace(-1, 2, x.shape[1], dtype=x.dtype)
    expected = np.degrees(np.arccos((x @ u / x.norm(dim=1) / u.norm()).numpy().clip(-1, 1)))
    np.testing.assert_allclose(angle(x, u).numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6])
def test_angle_keeps_its_precision_where_arccos_loses_it(dtype, small):
    d = 64
    u = uniform_vector(d, dtype)
    across = torch.tensor([1.0, -1.0] * (d // 2), dtype=torch.float64)
    x = (uniform_vector(d, torch.float64) + math.tan(small) * across).to(dtype)
    tolerance = 0.05 if dtype == torch.float32 and small < 1e-5 else 1e-3
    for sign, expected in ((1, math.degrees(small)), (-1, 180 - math.degrees(small))):
        assert abs(angle(sign * x, u).item() - expected) < max(
            tolerance * math.degrees(small), 2e-5 if sign < 0 and dtype == torch.float32 else 1e-9
        )


def test_exact_angles_in_the_plane():
    x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, -1.0], [-1.0, 0.0], [-2.0, -2.0]])
    torch.testing.assert_close(angle(x, uniform_vector(2)), torch.tensor([0.0, 45.0, 90.0, 135.0, 180.0]))


def test_zero_vectors_have_no_angle_and_constant_vectors_standardize_to_zero():
    x = torch.tensor([[0.0, 0.0, 0.0], [3.0, 3.0, 3.0], [1.0, 2.0, 3.0]])
    assert angle(x, uniform_vector(3)).isnan().tolist() == [True, False, False]
    y = standardize(x)
    assert torch.equal(y[:2], torch.zeros(2, 3))
    assert y.isfinite().all()


@given(vectors())
def test_rotation_is_the_angle_between_a_vector_and_its_standardization(x):
    expected = torch.stack([angle(a, b) for a, b in zip(x, standardize(x), strict=True)])
    close(rotation(x), expected, 1e-7)


def test_shapes_and_dtypes_pass_through():
    for shape in ((5,), (2, 5), (2, 3, 5)):
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(shape, dtype=dtype)
            assert standardize(x).shape == mean_vector(x).shape == orthogonal_component(x).shape == x.shape
            assert standardize(x).dtype == angle(x, uniform_vector(5)).dtype == dtype
            assert angle(x, uniform_vector(5)).shape == shape[:-1]


# --- directions --------------------------------------------------------------------------------------------------


def test_directions_are_reproducible_and_depend_on_seed_and_width():
    a, b = Directions.seeded(16, 5, 3), Directions.seeded(16, 5, 3)
    assert torch.equal(a.named, b.named)
    assert torch.equal(a.null, b.null)
    other = Directions.seeded(16, 5, 4)
    assert not torch.allclose(a.named[1:], other.named[1:])
    assert not torch.allclose(a.null, other.null)
    assert not torch.allclose(Directions.seeded(17, 5, 3).null[:, :16], a.null)


def test_random_directions_come_from_pcg64_whose_stream_numpy_promises_to_keep():
    directions = Directions.seeded(4, 1, 0)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 4, 0])))
    first = rng.standard_normal(4)
    np.testing.assert_allclose(directions.named[1].numpy(), 2 * first / np.linalg.norm(first))


@given(st.integers(1, 40), st.integers(2, 60), st.integers(0, 1000))
def test_a_smaller_null_ensemble_is_a_prefix_of_a_larger_one_with_the_same_named_directions(k, d, seed):
    few, many = Directions.seeded(d, k, seed), Directions.seeded(d, k + 7, seed)
    assert torch.equal(few.named, many.named)
    assert torch.equal(few.ensemble, many.ensemble[:k])


@given(st.integers(2, 200), st.integers(0, 1000))
def test_norms_of_the_directions_are_as_in_the_paper(d, seed):
    directions = Directions.seeded(d, 8, seed)
    norms = directions.named.norm(dim=1) / math.sqrt(d)
    assert torch.equal(directions.named[0], torch.ones(d, dtype=torch.float64))
    assert norms[1] == pytest.approx(1)
    assert 0.5 <= norms[2] <= 2
    assert abs(norms[2] - 1) > 1e-9
    torch.testing.assert_close(directions.null.norm(dim=1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(directions.units.norm(dim=1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(
        angle(directions.named[1:], directions.units[1]), angle(directions.units[1:], directions.units[1])
    )


def test_null_directions_are_isotropic():
    """Squared components along any fixed vector have mean 1/d and the angles to it centre on 90 degrees."""
    d, k = 64, 4000
    null = Directions.seeded(d, k, 1).null
    for u in (torch.ones(d, dtype=torch.float64) / 8, torch.eye(d, dtype=torch.float64)[3]):
        along = null @ u
        assert along.mean().abs() < 4 / math.sqrt(d * k)
        assert d * along.square().mean() == pytest.approx(1, abs=4 * math.sqrt(2 / k))


# --- edges: sizes, constants, half precision, what is not finite ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 7, 48, 192, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, 7.7, 1 / 3, -2.0, 1e30, 1e-30])
def test_nothing_is_left_of_equal_components(value, d, dtype):
    """Their mean is rounded, and what that leaves must not be scaled to sqrt(d)."""
    assert (standardize(torch.full((d,), value, dtype=dtype)) == 0).all()


@pytest.mark.parametrize("size", [1e20, 1e37, 1e-25, 1e-37])
def test_no_size_of_a_vector_changes_its_direction(size):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    u = uniform_vector(64)
    wanted = angle(x.double(), u)
    for v in (u, u * size):
        torch.testing.assert_close(angle(x * size, v).double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(standardize(x * size).double(), standardize(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    torch.testing.assert_close(
        angle(x, uniform_vector(64)).double(), angle(x.double(), uniform_vector(64)), rtol=0, atol=2e-5
    )
    assert float(angle(torch.full((4096,), 2000.0, dtype=dtype), uniform_vector(4096))) == 0
    assert standardize(x).dtype == dtype


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(wrong):
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    x[0, 3] = wrong
    assert standardize(x).isfinite().all(-1).tolist() == [False, True]
    assert angle(x, uniform_vector(16)).isfinite().tolist() == [False, True]


def test_angles_keep_their_precision_under_autocast():
    x = torch.randn(5, 768, generator=torch.Generator().manual_seed(0))
    expected = angle(x, uniform_vector(768)), rotation(x + 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = angle(x, uniform_vector(768)), rotation(x + 3)
        assert float(angle(uniform_vector(768) * 3, uniform_vector(768))) < 1e-3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
