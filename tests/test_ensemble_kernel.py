"""Moments of the angles to an ensemble, of bfloat16 rows, are those of float64.

By the processor's unit for matrices and by its instruction, where it has them, and in torch.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normgeo import kernels
from normgeo.angles.statistics import AngleStatistics
from normgeo.geometry import Directions
from normgeo.kernels import ensemble
from normgeo.kernels.compiling import compiled
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch


@pytest.fixture(autouse=True, params=[True, False], ids=["tiles", "no tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(ensemble, "TILES", request.param)


def moments(x, index, directions):
    """As they are computed on this machine, with the instruction or without."""
    units = directions.null
    scalars = kernels.project(x, units[:1].expand(3, -1).contiguous())
    if (packed := ensemble.packed(directions.ensemble, x.device)) is not None:
        return packed.moments(x, index, scalars)[0]
    rows = torch.empty(len(index), x.shape[1])
    kernels.gather(x, index, scalars, centered=False, out=rows)
    return kernels.moments((rows @ units.T.float())[None])[0]


def expected(x, index, directions):
    rows = x[index].double().numpy()
    length = np.linalg.norm(rows, axis=1)
    some = (length > 0) & np.isfinite(length.astype(np.float32))
    cosines = np.clip(rows[some] @ directions.null.numpy().T / length[some, None], -1, 1)
    angles = np.arcsin(cosines)
    return np.stack([angles.sum(0), (angles**2).sum(0), (cosines**2).sum(0)])


@given(
    st.sampled_from([1, 2, 3, 31, 64, 576, 577]), st.sampled_from([1, 5, 63, 64, 65, 256]), st.integers(0, 300),
    st.integers(0, 99),
)  # fmt: skip
def test_moments_are_those_of_float64(d, k, n, seed):
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randn((n + 3, d), generator=rng) * 10.0 ** torch.randint(-3, 5, (n + 3, 1), generator=rng)).bfloat16()
    index = torch.randint(0, n + 3, (n,), generator=rng)
    directions = Directions.seeded(d, k, seed)
    found = moments(x, index, directions).numpy()
    assert found.shape == (3, k)
    loose = 5e-3 if d < 31 else 2e-6  # an arcsine near one is as good as the square root of its cosine
    np.testing.assert_allclose(found, expected(x, index, directions), rtol=loose, atol=loose * max(1, n) ** 0.5)


def test_rows_without_a_length_count_as_zero_and_tiny_ones_do_not():
    directions, x = Directions.seeded(40, 70), torch.randn(130, 40).bfloat16()
    x[5], x[17, 3], x[18, 4], x[19, 0] = 0, torch.nan, torch.inf, -torch.inf
    x[100] *= 1e-39 / 4  # numbers that are not normal, of few digits
    x[101] *= 1e-30
    assert 0 < x[100].double().norm() < 1e-37
    index = torch.arange(130)
    found, wanted = moments(x, index, directions).numpy(), expected(x, index, directions)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    only = torch.tensor([100, 101])
    np.testing.assert_allclose(moments(x, only, directions).numpy(), expected(x, only, directions), atol=1e-5)


def test_rows_may_lie_apart_and_in_any_order_and_threads_do_not_matter():
    directions, wide = Directions.seeded(33, 100), torch.randn(500, 90).bfloat16()
    x, index = wide[:, 20:53], torch.randperm(500)[:333]
    found = moments(x, index, directions)
    np.testing.assert_allclose(found.numpy(), expected(x, index, directions), atol=1e-4)
    assert torch.equal(moments(x.contiguous(), index, directions), found)
    assert torch.equal(moments(x.T.contiguous().T, index, directions), found)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(moments(x, index, directions), found)
    finally:
        torch.set_num_threads(before)


FOUND = """
#include <immintrin.h>
#include <cstdint>
#include <cstring>
extern "C" {
void shape(const void* config) { _tile_loadconfig(config); }
void shaped(void* config) { __asm__ volatile("sttilecfg\t(%0)" : : "r"(config) : "memory"); }
void leave() { _tile_release(); }
}
"""


def has_tiles():
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text() and ensemble.loaded() is not None


def test_tiles_are_used_where_there_are_some():
    """They add up in another order than the instruction, so that there is a difference in the last bits."""
    directions, x = Directions.seeded(576, 64), torch.randn(500, 576).bfloat16()
    found = moments(x, torch.arange(500), directions)
    ensemble.TILES = not ensemble.TILES
    assert torch.equal(found, moments(x, torch.arange(500), directions)) == (not has_tiles())


def test_others_find_the_tiles_as_they_left_them(tmp_path):
    if not has_tiles():
        return
    (tmp_path / "found.cpp").write_text(FOUND)
    library = ctypes.CDLL(str(compiled(tmp_path / "found.cpp")))
    mine = bytes([1, 0, *[0] * 14, *[32, 0] * 8, *[0] * 16, *[7] * 8, *[0] * 8])
    after, directions, x = ctypes.create_string_buffer(64), Directions.seeded(96, 64), torch.randn(64, 96).bfloat16()
    moments(x, torch.arange(50), directions)  # asks for the tiles
    for before in (mine, bytes(64)):
        library.shape(before) if any(before) else library.leave()
        moments(x, torch.arange(20), directions)  # in this thread
        library.shaped(after)
        assert after.raw == before
    library.leave()


def test_what_torch_makes_by_default_does_not_matter():
    directions, x = Directions.seeded(40, 70), torch.randn(30, 40).bfloat16()
    units = kernels.project(x, directions.units)
    expected = (packed := ensemble.packed(directions.ensemble, x.device)) and packed.moments(x, torch.arange(30), units)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            again = (packed := ensemble.packed(directions.ensemble, x.device)) and packed.moments(
                x, torch.arange(30), units
            )
        finally:
            torch.set_default_dtype(torch.float32)
        assert again is None if expected is None else torch.equal(again, expected)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_with_the_instruction_and_without_the_statistics_agree(kind, monkeypatch):
    site = NormSite("norm", kind, "attention", 0, "layers", 48, 1e-5)
    batch = TokenBatch(np.zeros((4, 50), np.int64), np.zeros((4, 50), np.int64), 0)

    def state():
        statistics = AngleStatistics([site], {48: Directions.seeded(48, 65)}, null_every=2)
        statistics.begin(batch)
        for phase in ("pre", "post"):
            statistics.take(0, phase, torch.randn(200, 48, generator=torch.Generator().manual_seed(3)).bfloat16())
        statistics.end()
        return statistics.state_dict()

    found = state()
    monkeypatch.setattr(ensemble, "loaded", lambda: None)
    without = state()
    assert found["null_count"].sum() > 200
    for name in ("null_count", "null_deviation", "null_square", "null_energy"):
        torch.testing.assert_close(found[name], without[name], rtol=2e-5, atol=2e-5 * float(without[name].abs().max()))
