"""The store holds the very numbers that the statistics added up."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_statistics import EPS, near, noise

from normgeo.angles import scalars
from normgeo.angles.scalars import ScalarStore, ScalarWriter, bytes_needed
from normgeo.angles.statistics import PHASES, UNIT, AngleStatistics
from normgeo.errors import RunError
from normgeo.geometry import NAMES, Directions
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

D, N, BLOCK = 24, 40, 20


@pytest.fixture(params=["layernorm", "rmsnorm"])
def kept(request, tmp_path):
    """A store of two batches at two sites, one of them on three heads, and the statistics of the same."""
    sites = [NormSite(f"norm{h}", request.param, "attention", 0, "layers", D, EPS, heads=h) for h in (1, 3)]
    directions = {D: Directions.seeded(D, 4)}
    statistics, writer = AngleStatistics(sites, directions), ScalarWriter(tmp_path / "s.zarr/m", sites, N, BLOCK)
    writer.create(directions)
    for start in (0, BLOCK):
        batch = TokenBatch(np.full((4, 5), 5), np.zeros((4, 5), int), start)
        statistics.begin(batch)
        for i, site in enumerate(sites):
            n = BLOCK * site.heads
            pre = torch.cat([noise(n - 12, D, seed=start), near(D, 0.02, 0, 10), torch.zeros(1, D), torch.ones(1, D)])
            statistics.take(i, "pre", pre)
            statistics.take(i, "post", noise(n, D, seed=start + 1))
        statistics.end()
        writer.take(batch, statistics)
        writer.flush()
    return sites, statistics, ScalarStore(tmp_path / "s.zarr/m")


def test_every_angle_is_the_one_that_was_added_up(kept):
    sites, statistics, store = kept
    for i, site in enumerate(sites):
        for p, phase in enumerate(PHASES):
            for k, direction in enumerate(NAMES):
                short_of = 90 - store.angles(site.key, phase, direction)
                short_of = short_of[~np.isnan(short_of)] * UNIT
                assert (short_of == np.rint(short_of)).all()
                assert short_of.sum() == statistics.state["deviation"][:, i, p, k].sum()
                assert short_of.min() == statistics.state["least"][:, i, p, k].min()
                assert len(short_of) == statistics.state["count"][:, i, p].sum()


def test_norms_are_those_that_were_added_up(kept):
    sites, statistics, store = kept
    for i, site in enumerate(sites):
        for p, phase in enumerate(PHASES):
            valid = ~np.isnan(store.angles(site.key, phase, "random_a"))
            found = store.norms(site.key, phase)[valid].astype(np.float64)
            assert np.rint(found * UNIT).sum() == statistics.state["norm"][:, i, p].sum()


def test_the_default_dtype_is_the_callers_affair(kept):
    sites, _, store = kept
    expected = [store.norms(site.key, phase) for site in sites for phase in PHASES]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [store.norms(site.key, phase) for site in sites for phase in PHASES]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_bytes_are_those_that_were_said(kept):
    sites, _, store = kept
    chunks = [file for file in store.path.rglob("c/**/*") if file.is_file()]
    assert sum(file.stat().st_size for file in chunks) == bytes_needed(sites, N, BLOCK)
    assert bytes_needed(sites, N - 1, BLOCK) == bytes_needed(sites, N, BLOCK)


def test_what_a_killed_process_left_half_written_is_removed_by_the_next(kept, monkeypatch):
    class Killed(BaseException): ...

    def killed(*_):
        raise Killed

    sites, _, store = kept
    writer = ScalarWriter(store.path, sites, N, BLOCK)
    writer.put([TokenBatch(np.full((4, 5), 5), np.zeros((4, 5), int), BLOCK)], {})
    before = sorted(store.path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            writer.flush()
    assert len(sorted(store.path.rglob("*"))) == len(before) + 1
    ScalarWriter(store.path, sites, N, BLOCK).check([(0, N)])
    assert sorted(store.path.rglob("*")) == before


@pytest.mark.parametrize("chunk", ["tokens/position/c/1", "sites/norm3/post/c/0/0"])
def test_a_flipped_bit_is_named(kept, chunk):
    path = kept[2].path
    raw = bytearray((path / chunk).read_bytes())
    raw[21] ^= 1
    (path / chunk).write_bytes(raw)
    with pytest.raises(RunError, match=rf"{chunk.split('/c')[0]} is damaged: .*checksum.*; put it back, or measure"):
        ScalarStore(path).norms("norm3", "post")


def test_scalars_without_checksums_of_earlier_versions_are_read_and_gone_on_with(tmp_path, monkeypatch):
    site = NormSite("norm", "layernorm", "mlp", 0, "h", D, EPS)
    batches = [TokenBatch(np.full((4, 5), 5 + n), np.zeros((4, 5), int), n * BLOCK) for n in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(scalars, "CHECKED", None)
        before = ScalarWriter(tmp_path / "m", [site], N, BLOCK)
        before.create({D: Directions.seeded(D, 4)})
        before.put(batches[:1], {})
        before.flush()
    after = ScalarWriter(tmp_path / "m", [site], N, BLOCK)
    after.put(batches[1:], {})
    after.flush()
    assert ScalarStore(tmp_path / "m").id.tolist() == [5] * BLOCK + [6] * BLOCK


def test_sites_are_in_the_order_of_the_pass(tmp_path):
    """Not of their names, where the tenth layer comes before the second."""
    sites = [NormSite(f"h.{i}.ln", "layernorm", "mlp", i, "h", D, EPS) for i in (0, 2, 10)]
    writer = ScalarWriter(tmp_path / "m", sites, 20, BLOCK)
    writer.create({D: Directions.seeded(D, 4)})
    writer.put([TokenBatch(np.full((4, 5), 5), np.zeros((4, 5), int), 0)], {})
    writer.flush()
    assert ScalarStore(tmp_path / "m").sites == ["h.0.ln", "h.2.ln", "h.10.ln"]


def test_the_folder_of_all_models_names_them(kept):
    path = Path(kept[2].root.store.root)
    with pytest.raises(RunError, match=f"holds no model's scalars; give that of a model in it: .*{path.name}"):
        ScalarStore(path.parent)
    with pytest.raises(RunError, match="holds no model's scalars: "):
        ScalarStore(path / "tokens")


@pytest.mark.parametrize(("phase", "direction"), [("before", "uniform"), ("Post", "uniform"), ("pre", "norm"),
                                                  ("pre", "random-a"), ("post", "null")])  # fmt: skip
def test_names_that_are_none_are_refused(kept, phase, direction):
    sites, _, store = kept
    with pytest.raises(RunError, match="no phase" if direction == "uniform" else "no direction"):
        store.angles(sites[0].key, phase, direction)
    if direction == "uniform":
        with pytest.raises(RunError, match="a site has pre, standardized, post"):
            store.norms(sites[0].key, phase)
