"""Statistics of parts, merged in any order and grouping, are those of the whole, to the last bit."""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_statistics import equal, fed, feed, noise, site

from normgeo.angles.measure import AngleTable
from normgeo.angles.statistics import CARRY, AngleStatistics, settle
from normgeo.geometry import Directions
from normgeo.tokens import TokenBatch

pytestmark = pytest.mark.usefixtures("passes")


def dyadic(n, d, seed):
    """Vectors of small whole numbers: dot products with the uniform vector are exact in any order of summation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (n, d), generator=generator).float()


@st.composite
def splits(draw):
    """Batches of (start, vectors): cuts of 60 tokens, in a drawn order."""
    cuts = sorted(draw(st.sets(st.integers(1, 59), max_size=5)))
    edges = [0, *cuts, 60]
    return draw(st.permutations(list(itertools.pairwise(edges))))


@given(st.integers(-(2**52), 2**52), st.integers(-9, 9))
def test_what_is_over_is_carried_in_one_way(low, carried):
    pair = torch.tensor([float(low)], dtype=torch.float64), torch.tensor([float(carried)], dtype=torch.float64)
    settle(*pair)
    assert int(pair[0]) + int(CARRY) * int(pair[1]) == low + int(CARRY) * carried
    assert -CARRY / 2 <= pair[0] < CARRY / 2


def whole_numbers(saved):
    """The sums that a state holds, as Python's whole numbers."""
    out = {}
    for name in saved:
        if name.startswith(("histogram", "carried", "least", "most")):
            continue
        high = saved.get(f"carried_{name}", torch.zeros_like(saved[name]))
        pairs = zip(saved[name].flatten().tolist(), high.flatten().tolist(), strict=True)
        out[name] = [int(low) + int(CARRY) * int(over) for low, over in pairs]
    return out


@pytest.mark.parametrize("seed", range(3))
def test_sums_stay_exact_where_float64_does_not_hold_them(seed):
    """Of terabytes of tokens: sums of up to 2^50 each, whose totals have more digits than float64."""
    random, saved = Random(seed), []
    for part in range(4):
        state = fed(noise(9, 5, seed=part, mean=0.5), every=1).state_dict()
        for name, value in state.items():
            if name.endswith(("norm", "deviation", "square", "energy", "rotation")):
                value.mul_(2.0**15).add_(random.randint(-50, 50))  # whole numbers of up to 2^49
        saved.append(state)
    expected = {name: [0] * len(numbers) for name, numbers in whole_numbers(saved[0]).items()}
    for state in saved:
        for name, numbers in whole_numbers(state).items():
            expected[name] = [a + 40 * b for a, b in zip(expected[name], numbers, strict=True)]
    results = []
    for _ in range(2):
        order = saved * 40
        random.shuffle(order)
        groups = []
        while order:
            group = fed(noise(9, 5), every=1)
            group.clear()
            for state in [order.pop() for _ in range(min(len(order), random.randint(1, 60)))]:
                group.add_state_dict(state)
            groups.append(group)
        for other in groups[1:]:
            groups[0].merge(other)
        results.append(groups[0].state_dict())
    equal(*results)
    assert whole_numbers(results[0]) == expected
    assert any(name.startswith("carried") for name in results[0])
    totals = groups[0].totals()
    for name, numbers in expected.items():
        assert totals[name].flatten().tolist() == pytest.approx(numbers, rel=1e-15)
    frame = AngleTable.from_statistics(groups[0], "m").frame
    assert np.isfinite(frame.mean_deg).all()


@settings(max_examples=8)
@given(splits(), st.integers(0, 1000), st.sampled_from(["layernorm", "rmsnorm"]), st.sampled_from([1, 3]))
def test_any_order_and_grouping_of_merges_gives_the_same_bits(parts, seed, kind, every):
    x = noise(60, 10, seed=seed, mean=0.5)

    def of(a, b):
        return fed(x[a:b], kind=kind, start=a, every=every)

    one, other = of(*parts[0]), of(*parts[-1])
    for a, b in parts[1:]:
        one.merge(of(a, b))
    for a, b in parts[-2::-1]:
        other.merge(of(a, b))
    equal(one.state_dict(), other.state_dict())
    tree = [of(a, b) for a, b in sorted(parts)]
    while len(tree) > 1:
        tree[0].merge(tree.pop())
    equal(one.state_dict(), tree[0].state_dict())


@settings(max_examples=8)
@given(splits(), st.integers(0, 1000), st.sampled_from([1, 3]))
def test_any_split_into_batches_gives_the_same_bits_where_dot_products_are_exact(parts, seed, every):
    """With 64 dims û = 1/8, and so û, â and b̂ all hold the same few bits: sums are exact whatever the order."""
    d = 64
    x, ids = dyadic(60, d, seed), np.full((1, 60), 5)
    named = torch.stack([torch.ones(d), (-1.0) ** torch.arange(d), torch.ones(d).index_fill(0, torch.arange(32), -1)])
    directions = {d: Directions(named.double(), Directions.seeded(d, 6).ensemble)}
    # rows of one token each, so that every token is the first of its context in every split
    whole, split = (AngleStatistics([site(d)], directions, null_every=every) for _ in range(2))
    feed(whole, x, x.neg(), ids.T, 0)
    for a, b in parts:
        part = AngleStatistics([site(d)], directions, null_every=every)
        feed(part, x[a:b], x[a:b].neg(), ids.T[a:b], a)
        split.merge(part)
    equal(whole.state_dict(), split.state_dict(), null_tolerance=1e-6)


@settings(max_examples=8)
@given(splits(), st.integers(0, 1000), st.sampled_from(["layernorm", "rmsnorm"]))
def test_any_split_into_batches_gives_the_same_table_to_float32_rounding(parts, seed, kind):
    x, ids = noise(60, 24, seed=seed, mean=0.5), np.full((60, 1), 5)
    whole = AngleTable.from_statistics(fed(x, kind=kind, ids=ids), "m").frame
    split = AngleStatistics([site(24, kind)], {24: Directions.seeded(24, 8)}, null_every=1)
    for a, b in parts:
        feed(split, x[a:b], x[a:b], ids[a:b], a)
    frame = AngleTable.from_statistics(split, "m").frame
    for column in (
        "mean_deg",
        "std_deg",
        "min_deg",
        "max_deg",
        "mean_norm",
        "energy_share",
        "n_tokens",
        "rotation_deg",
    ):
        np.testing.assert_allclose(frame[column], whole[column], rtol=1e-6, atol=3e-5, err_msg=column)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("k", [1, 2, 5, 7, 9, 13, 16])
def test_what_else_is_collected_does_not_show_however_few_directions_there_are(k, kind):
    """A run has all its sites, and a task of a scan has some."""
    ids, directions, sites = np.full((1, 11), 5), {32: Directions.seeded(32, k)}, [site(32, kind)] * 5
    together = AngleStatistics(sites, directions, null_every=1)
    together.begin(TokenBatch(ids, np.zeros_like(ids), 0))
    for i in range(5):
        for phase in ("pre", "post"):
            together.take(i, phase, noise(11, 32, seed=i, mean=0.3))
    together.end()
    for i in range(5):
        alone = fed(noise(11, 32, seed=i, mean=0.3), kind=kind, k=k)
        for name, value in alone.state.items():
            if name.startswith("null_"):
                assert torch.equal(value[0], together.state[name][i]), (name, i)


def test_which_tokens_meet_the_null_ensemble_depends_on_their_index_alone():
    x = noise(4000, 4)
    whole = fed(x, every=8)
    parts = [fed(x[a : a + 500], start=a, every=8) for a in range(0, 4000, 500)]
    counts = whole.state["null_count"]
    assert torch.equal(counts, sum(p.state["null_count"] for p in parts))
    assert counts.unique().numel() == 1
    assert 400 < counts[0, 0] < 600


def test_state_dict_round_trip_continues_where_it_stopped():
    x = noise(64, 12, mean=0.7)
    through = fed(x[:32], start=0)
    saved = {k: v.clone() for k, v in through.state_dict().items()}
    resumed = AngleStatistics([site(12)], {12: Directions.seeded(12, 8)}, null_every=1)
    resumed.add_state_dict(saved)
    equal(resumed.state_dict(), saved)
    for statistics in (through, resumed):
        feed(statistics, x[32:], x[32:], np.full((1, 32), 5), 32)
    equal(resumed.state_dict(), through.state_dict())
    assert not torch.equal(resumed.state_dict()["count"], saved["count"])


def test_state_dict_is_a_copy():
    statistics = fed(noise(8, 4))
    saved = statistics.state_dict()
    before = {k: v.clone() for k, v in saved.items()}
    feed(statistics, noise(8, 4), noise(8, 4), np.full((1, 8), 5), 8)
    equal(saved, before)
