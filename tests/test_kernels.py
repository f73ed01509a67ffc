"""The compiled kernels and torch's give the same numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normgeo import kernels
from normgeo.geometry import Directions
from normgeo.kernels import BINS, Histogram, cpu, fallback

pytestmark = pytest.mark.usefixtures("passes")
LOADED = cpu.loaded  # of which the fixture may have put another in place
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def vectors(n, d, dtype=torch.float32, seed=0, mean=0.5):
    x = torch.randn((n, d), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean
    return x.to(dtype)


def expected(x, units):
    x = x.double().numpy()
    left = x - x.mean(1, keepdims=True)
    return np.stack([np.linalg.norm(x, axis=1), *(x @ units.numpy().T).T, np.linalg.norm(left, axis=1)])


@given(
    st.sampled_from(DTYPES), st.integers(1, 40), st.sampled_from([1, 2, 7, 8, 9, 63, 64, 576, 4099]),
    st.sampled_from([0.0, 1.0, -300.0]), st.integers(0, 99),
)  # fmt: skip
def test_projections_are_those_of_float64(dtype, n, d, mean, seed):
    x, units = vectors(n, d, dtype, seed, mean), Directions.seeded(d, 0, seed).units
    found, wanted = kernels.project(x, units, centered=True), expected(x, units)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found[:4], wanted[:4], rtol=1e-13, atol=1e-13 * wanted[0].max())
    left = wanted[4] > 1e-10 * wanted[0]
    np.testing.assert_allclose(found[4][left], wanted[4][left], rtol=1e-9)
    assert (found[4][~left] == 0).all()
    assert torch.equal(kernels.project(x, units), found[:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_a_dtype_is_read_as_it_is(dtype):
    if dtype.itemsize == 2:
        x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)[:, None]
    else:
        about = torch.finfo(dtype)
        edges = [
            0.0,
            -0.0,
            about.tiny,
            about.smallest_normal / 8,
            about.max,
            about.eps,
            torch.inf,
            -torch.inf,
            torch.nan,
        ]
        x = torch.tensor(edges, dtype=dtype)[:, None]
    found = kernels.project(x, torch.ones(3, 1).double())
    wanted = x[:, 0].double()
    assert torch.equal(found[1].nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9))


@pytest.mark.parametrize("mean", [1e3, 1e5])
@pytest.mark.parametrize("d", [3, 8, 100, 1027])
def test_what_is_left_without_a_large_mean_is_no_difference_of_squares(mean, d):
    x = vectors(9, d, torch.float64, mean=mean)
    found, wanted = kernels.project(x, Directions.seeded(d, 0).units, centered=True)[4], expected(x, x[:3])[4]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e9])
def test_what_is_left_without_the_mean_is_nothing_as_a_share_of_the_vector(size):
    x = vectors(6, 100, torch.float64) * size
    x[2], x[4] = size / 3, -size / 7
    found = kernels.project(x, Directions.seeded(100, 0).units, centered=True)[4]
    assert (found == 0).tolist() == [False, False, True, False, True, False]
    np.testing.assert_allclose(found, np.where(found == 0, 0, expected(x, x[:3])[4]), rtol=1e-9)


def test_a_row_is_summed_alike_wherever_it_lies_and_its_neighbours_do_not_matter():
    x, units = vectors(37, 100), Directions.seeded(100, 0).units
    whole = kernels.project(x, units, centered=True)
    wide = torch.full((37, 300), torch.nan)
    wide[:, 100:200] = x
    torch.testing.assert_close(kernels.project(wide[:, 100:200], units, centered=True), whole, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(kernels.project(x.T.contiguous().T, units, centered=True), whole, rtol=1e-14, atol=1e-14)
    x[3], x[11, 5] = torch.nan, torch.inf
    found = kernels.project(x, units, centered=True)
    assert not torch.isfinite(found[:, [3, 11]]).any()
    others = [i for i in range(37) if i not in (3, 11)]
    torch.testing.assert_close(found[:, others], whole[:, others], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("d", [5, 64, 130])
def test_gathered_rows_are_unit_vectors(d, centered, dtype):
    x = vectors(50, d, dtype, mean=3.0)
    x[7], x[8, 1], x[9] = 0, torch.inf, 2
    index = torch.tensor([3, 7, 8, 9, 49])
    out = torch.full((5, d), torch.nan)
    scalars = kernels.project(x, Directions.seeded(d, 0).units, centered=centered)
    kernels.gather(x, index, scalars, centered=centered, out=out)
    rows = x[index].double()
    rows = (rows - rows.mean(1, keepdim=True)) if centered else rows
    wanted = (rows / rows.norm(dim=1, keepdim=True)).float()
    wanted[[1, 2, 3] if centered else [1, 2]] = 0
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("centered", [False, True])
def test_gathered_rows_may_lie_in_any_layout(centered):
    x, index = vectors(50, 20, mean=3.0), torch.tensor([3, 9, 49])
    scalars, found = kernels.project(x, Directions.seeded(20, 0).units, centered=True), []
    for layout in (x, x.T.contiguous().T, torch.cat([x, -x], 1)[:, :20]):
        found.append(torch.full((3, 20), torch.nan))
        kernels.gather(layout, index, scalars, centered=centered, out=found[-1])
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1e38), (torch.float32, 1e38), (torch.float64, 1e-60)])
@pytest.mark.parametrize("centered", [False, True])
def test_a_row_whose_length_is_no_float32_is_gathered_as_zeros(dtype, size, centered):
    x = vectors(3, 20).to(dtype)
    x[1] = size * torch.tensor([1.0, -1.0]).repeat(10).to(dtype)
    scalars, out = kernels.project(x, Directions.seeded(20, 0).units, centered=True), torch.full((3, 20), torch.nan)
    kernels.gather(x, torch.arange(3), scalars, centered=centered, out=out)
    assert out.norm(dim=1).round(decimals=3).tolist() == [1, 0, 1]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (2, 40, 64), (4, 33, 257), (2, 0, 8)])
def test_moments_are_those_of_float64(shape):
    c = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    if c.numel() > 10:
        c.view(-1)[:6] = torch.tensor([1.0, -1.0, 1.0 + 2e-7, 0.0, 0.5, -0.5])
    found, arcs = kernels.moments(c), c.double().clamp(-1, 1).asin()
    wanted = torch.stack([arcs.sum(1), arcs.square().sum(1), c.double().square().sum(1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("at_once", [1 << 17, 2000], ids=["all sites at once", "one site at a time"])
@pytest.mark.parametrize(("phases", "phase"), [(1, 0), (2, 0), (1, 2), (2, 1)])
def test_both_tallies_are_equal_to_the_last_bit(phases, phase, at_once, monkeypatch):
    monkeypatch.setattr(fallback, "ELEMENTS", at_once)
    generator = torch.Generator().manual_seed(1)
    norms = torch.rand((3, phases, 400), generator=generator) * 30
    sines = torch.rand((3, 3, 400), generator=generator, dtype=torch.float64) * 2 - 1
    sines[0, 0, :2], sines[2, [0, 1, 2], [8, 9, 10]] = torch.tensor([1.0, -1.0]), torch.nan
    norms[0, 0, 4], norms[1, 0, 5], norms[1, 0, 6] = 0, torch.inf, torch.nan
    norms[2, 1:, 7] = torch.inf  # of a vector that counts
    degrees = (sines.asin().rad2deg() * 2**20).round().mul(2.0**-20).float()
    group = torch.randint(0, 3, (400,), generator=generator, dtype=torch.uint8)
    sites, found = torch.tensor([4, 0, 2]), []
    for library in (LOADED(), cpu.Library(None, "")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "loaded", lambda library=library: library)
            counts = torch.zeros((5, 3, 3, BINS), dtype=torch.int64)
            found.append((*kernels.tally(norms, degrees, sines, group, Histogram(counts, sites, phase)), counts))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    sums, least, most, counts = found[0]
    assert sums[:, :, :2].sum() == 3 * 400
    assert sums[:, :, 1].sum(1).tolist() == [1, 2, 3]
    met, known = counts.sum((2, 3)), torch.tensor([3 * 399, 3 * 398, 3 * 397])
    assert torch.equal(met[sites, phase : phase + phases], known[:, None].expand(-1, phases))
    assert met.sum() == phases * known.sum()
    assert least.min() == -90 * 2**20
    assert most.max() == 90 * 2**20


def test_what_is_tallied_may_lie_in_any_layout():
    rng = torch.Generator().manual_seed(2)
    given = [torch.rand((70, 2, n), generator=rng, dtype=dtype).permute(1, 2, 0)
             for n, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.float64))]  # fmt: skip
    group, found = torch.randint(0, 3, (70,), generator=rng, dtype=torch.uint8), []
    for tensors in (given, [tensor.contiguous() for tensor in given]):
        counts = torch.zeros((2, 3, 3, BINS), dtype=torch.int64)
        found.append((*kernels.tally(*tensors, group, Histogram(counts, torch.arange(2), 0)), counts))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads):
    x, units = vectors(300, 200), Directions.seeded(200, 0).units
    one = kernels.project(x, units, centered=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(kernels.project(x, units, centered=True), one)
    finally:
        torch.set_num_threads(before)


def test_directions_and_cosines_may_lie_in_any_layout():
    generator = torch.Generator().manual_seed(0)
    x, cosines = torch.randn(7, 24, generator=generator), torch.rand(2, 5, 3, generator=generator)
    units = torch.nn.functional.normalize(torch.randn(3, 24, dtype=torch.float64, generator=generator))
    units[0] = 24**-0.5
    spread = torch.empty(24, 3, dtype=torch.float64).T.copy_(units)
    found, expected = (kernels.project(x, given, centered=True) for given in (spread, units))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # products in torch differ in their last bits
    turned = torch.empty(3, 5, 2).permute(2, 1, 0).copy_(cosines)
    assert torch.equal(kernels.moments(turned), kernels.moments(cosines))
