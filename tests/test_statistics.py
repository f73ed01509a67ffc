from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normgeo.angles.ensemble import NullEnsemble
from normgeo.angles.measure import AngleTable
from normgeo.angles.statistics import GROUPS, PHASES, AngleStatistics, standardized_norm
from normgeo.errors import ModelError
from normgeo.geometry import NAMES, Directions
from normgeo.sites import NormSite, select_sites
from normgeo.tokens import TokenBatch

pytestmark = pytest.mark.usefixtures("passes")
EPS = 1e-5


def site(d, kind="layernorm", **about):
    return NormSite("norm", kind, "attention", 0, "layers", d, EPS, **about)


def fed(pre, post=None, *, kind="layernorm", ids=None, start=0, bos=None, k=8, heads=1, every=1, rows=1):
    """Statistics of one site that has seen these vectors in one batch."""
    d, n = pre.shape[1], len(pre) // heads
    statistics = AngleStatistics([site(d, kind, heads=heads)], {d: Directions.seeded(d, k)}, bos=bos, null_every=every)
    feed(statistics, pre, pre if post is None else post, np.full((rows, n // rows), 5) if ids is None else ids, start)
    return statistics


def feed(statistics, pre, post, ids, start):
    statistics.begin(TokenBatch(ids, np.zeros_like(ids), start))
    statistics.take(0, "pre", pre)
    statistics.take(0, "post", post)
    statistics.end()


def noise(*shape, seed=0, mean=0.0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean).to(dtype)


def equal(a, b, null_tolerance=None):
    """State dicts equal bit for bit; the null ensemble's sums within a relative tolerance, if one is given."""
    assert a.keys() == b.keys()
    for name in a:
        if null_tolerance is not None and name.startswith("null_"):
            torch.testing.assert_close(a[name], b[name], rtol=null_tolerance, atol=64.0)
        else:
            assert torch.equal(a[name], b[name]), name


def by_direction(frame):
    """{(phase, direction): row} of one site's table."""
    return {(row["phase"], row["direction"]): row for row in frame.to_dict("records")}


def value(frame, phase, direction, column):
    return frame[(frame.phase == phase) & (frame.direction == direction)][column].item()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("d", "mean"), [(7, 0.0), (33, 2.0), (128, 5.0), (768, -3.0)])
def test_angles_norms_and_energy_equal_the_oracle_within_a_thousandth_of_a_degree(d, mean, dtype, kind):
    pre, post = noise(300, d, mean=mean, dtype=dtype), noise(300, d, seed=1, dtype=dtype)
    rows = by_direction(AngleTable.from_statistics(fed(pre, post, kind=kind), "m").frame)
    directions = Directions.seeded(d, 8)
    states = {"pre": pre, "standardized": oracle.standardized(pre.double().numpy(), kind, EPS), "post": post}
    for phase, x in states.items():
        x = np.asarray(torch.as_tensor(x).double())
        for direction, u in zip(NAMES, directions.named.numpy(), strict=True):
            found, expected = rows[phase, direction], oracle.row(x, u)
            for column in ("mean_deg", "std_deg", "min_deg", "max_deg"):
                assert found[column] == pytest.approx(expected[column], abs=1e-3), column
            assert found["energy_share"] == pytest.approx(expected["energy_share"], abs=1e-5)
            assert found["mean_norm"] == pytest.approx(expected["mean_norm"], rel=1e-4)
            for column in oracle.QUANTILES:
                assert found[column] == pytest.approx(expected[column], abs=0.02), column


def angles(statistics, phase):
    """[3, vectors] angles of the last batch of one site, one by one."""
    return 90 - statistics.scalars[0, phase][1].double().numpy()


def near(d, degrees, direction, n=20, seed=0, length=30.0):
    """Vectors of float32 at these many degrees from one of the named directions."""
    unit = Directions.seeded(d, 8).units[direction]
    across = noise(n, d, seed=seed, dtype=torch.float64)
    across -= (across @ unit)[:, None] * unit
    across /= across.norm(dim=1, keepdim=True)
    theta = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return (length * (theta.cos() * unit + theta.sin() * across)).float()


@pytest.mark.parametrize("degrees", [0.01, 0.03, 0.5, 3.0, 45.0, 90.0, 179.5, 179.99])
@pytest.mark.parametrize("d", [8, 31, 576, 8192])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_every_angle_equals_the_oracle_however_near_to_a_direction(d, degrees, kind):
    directions = Directions.seeded(d, 8).named.numpy()
    for k in range(3):
        pre, post = near(d, degrees, k), near(d, degrees, k, seed=1, length=1e-3)
        statistics = fed(pre, post, kind=kind)
        states = {"pre": pre.double().numpy(), "post": post.double().numpy()}
        if kind == "layernorm":
            states["standardized"] = oracle.standardized(states["pre"], kind, EPS)
        for phase, x in states.items():
            for found, u in zip(angles(statistics, phase), directions, strict=True):
                np.testing.assert_allclose(found, oracle.degrees(x, u), rtol=0, atol=1e-5, err_msg=phase)
        rows = by_direction(AngleTable.from_statistics(statistics, "m").frame)
        for direction, u in zip(NAMES, directions, strict=True):
            found, expected = rows["pre", direction], oracle.row(states["pre"], u)
            for column in ("mean_deg", "std_deg", "min_deg", "max_deg"):
                assert found[column] == pytest.approx(expected[column], abs=1e-3), column


@given(
    st.sampled_from([8, 32, 33, 1000]), st.floats(-6.5, 1), st.floats(0.5, 500), st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_vectors_that_are_nearly_uniform_have_the_oracles_angles_once_standardized(d, spread, mean, seed, dtype):
    x = (mean * (1 + 10**spread * noise(40, d, seed=seed, dtype=torch.float64))).to(dtype)
    statistics, exact = fed(x), x.double().numpy()
    varied = exact.max(1) > exact.min(1)
    for phase, y in (("pre", exact), ("standardized", oracle.standardized(exact, "layernorm", EPS))):
        for found, u in zip(angles(statistics, phase), Directions.seeded(d, 8).named.numpy(), strict=True):
            if phase == "standardized" and (u == 1).all():
                assert (found == 90).all()
            else:
                keep = varied | (phase == "pre")
                np.testing.assert_allclose(found[keep], oracle.degrees(y[keep], u), rtol=0, atol=1e-5)
    assert statistics.state["excluded"][:, 0, 1].sum() == (~varied).sum()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mean", [10.0, 1e3, 1e5])
def test_vectors_almost_parallel_to_the_uniform_vector_are_turned_as_much(mean, sign):
    x = sign * noise(200, 256, mean=mean)  # from six degrees to a two thousandth of one
    frame = AngleTable.from_statistics(fed(x), "m").frame
    expected = oracle.row(x.double().numpy(), np.ones(256))
    assert value(frame, "pre", "uniform", "mean_deg") == pytest.approx(expected["mean_deg"], abs=1e-5)
    turned = 90 - expected["mean_deg"] if sign > 0 else expected["mean_deg"] - 90
    assert value(frame, "standardized", "uniform", "rotation_deg") == pytest.approx(turned, abs=1e-5)
    assert value(frame, "standardized", "uniform", "mean_deg") == 90


@pytest.mark.parametrize("d", [3, 17, 33])
def test_vectors_along_a_direction_have_an_angle(d):
    """Though by rounding their cosine is more than one."""
    x = noise(20, 1, seed=d, dtype=torch.float64).expand(20, d).contiguous()
    assert fed(x, kind="rmsnorm").state["excluded"].sum() == 0


def test_of_nothing_the_standardized_vector_is_nothing_without_eps_too():
    assert standardized_norm(torch.zeros(1), 4, torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_massive_activations_are_standardized_as_others_are(kind):
    statistics = fed(1e30 * noise(20, 9), kind=kind)
    frame = AngleTable.from_statistics(statistics, "m").frame
    assert statistics.state["excluded"].sum() == 0
    assert value(frame, "standardized", "uniform", "mean_norm") == pytest.approx(3)


@pytest.mark.parametrize("mean", [0.3, 100.0, 1e5])
def test_the_null_ensemble_equals_the_oracle(mean):
    pre = noise(150, 24, mean=mean)
    frame = AngleTable.from_statistics(fed(pre, k=30), "m").frame
    null = Directions.seeded(24, 30).null.numpy()
    for phase, x in (
        ("pre", pre.double().numpy()),
        ("standardized", oracle.standardized(pre.double().numpy(), "layernorm", EPS)),
    ):
        for column, expected in oracle.null_row(x, null).items():
            assert value(frame, phase, "null", column) == pytest.approx(expected, abs=1e-3), column


# --- groups, heads, what is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize("lower", ["high", "medium"])
def test_the_null_ensemble_does_not_follow_the_precision_of_the_models_products(lower):
    x = noise(4096, 576)
    exact = fed(x, k=256).state_dict()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(lower)
        equal(fed(x, k=256).state_dict(), exact)
        assert torch.get_float32_matmul_precision() == lower
    finally:
        torch.set_float32_matmul_precision(before)


def test_groups_are_disjoint_and_sum_to_all():
    ids = np.array([[1, 7, 1, 9], [8, 1, 1, 3], [1, 1, 6, 6]])
    x = noise(12, 16, mean=1.0)
    statistics = fed(x, ids=ids, bos=1)
    table = AngleTable.from_statistics(statistics, "m")
    masks = {"first": np.arange(12) % 4 == 0}
    masks["bos"] = (ids.ravel() == 1) & ~masks["first"]
    masks["rest"] = ~masks["first"] & ~masks["bos"]
    assert [masks[g].sum() for g in GROUPS] == [3, 4, 5]
    for group, mask in masks.items():
        expected = oracle.row(x.double().numpy()[mask], np.ones(16))
        rows = table.sinks[table.sinks.tokens == group]
        for column in ("mean_deg", "std_deg", "min_deg", "max_deg", "n_tokens", "mean_norm", "energy_share"):
            assert value(rows, "pre", "uniform", column) == pytest.approx(expected[column], abs=1e-4), (group, column)
    assert value(table.frame, "pre", "uniform", "n_tokens") == 12
    assert value(table.frame, "pre", "uniform", "mean_deg") == pytest.approx(
        oracle.degrees(x.double().numpy(), np.ones(16)).mean(), abs=1e-4
    )


def test_a_stream_without_bos_has_no_such_group():
    table = AngleTable.from_statistics(fed(noise(12, 16), rows=3), "m")
    assert set(table.sinks.tokens) == {"first", "rest"}


def test_norms_on_heads_count_every_head_and_keep_the_tokens_group():
    x = noise(6 * 4, 8, mean=0.5)  # six tokens of four heads each
    table = AngleTable.from_statistics(fed(x, heads=4, rows=2), "m")
    first = table.sinks[table.sinks.tokens == "first"]
    assert value(table.frame, "pre", "uniform", "n_tokens") == 24
    assert value(first, "pre", "uniform", "n_tokens") == 8
    vectors = x.double().numpy().reshape(2, 3, 4, 8)[:, 0].reshape(-1, 8)
    expected = oracle.degrees(vectors, np.ones(8)).mean()
    assert value(first, "pre", "uniform", "mean_deg") == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_zero_and_non_finite_vectors_are_left_out_and_counted(bad, kind):
    x = noise(40, 16, mean=0.4)
    keep = np.arange(40) % 7 != 3
    broken = x.clone()
    broken[~keep] = bad if bad == 0 else broken[~keep].index_fill(1, torch.tensor([2]), bad)
    frame = AngleTable.from_statistics(fed(broken, kind=kind, rows=4), "m").frame
    clean = AngleTable.from_statistics(fed(x[keep], kind=kind), "m").frame
    assert set(frame.n_excluded) == {(~keep).sum()}
    assert set(frame.n_tokens) == {keep.sum()}
    for column in clean.select_dtypes("number").columns.difference(["n_excluded"]):
        np.testing.assert_allclose(frame[column], clean[column], atol=1e-5, rtol=1e-5, err_msg=column)


def test_one_non_finite_element_of_an_otherwise_ordinary_vector_is_enough():
    x = noise(10, 16)
    x[4, 9] = torch.inf
    x[6, 0] = torch.nan
    assert set(AngleTable.from_statistics(fed(x), "m").frame.n_excluded) == {2}


def test_constant_vectors_are_standardized_to_nothing_but_have_an_angle_before():
    x = noise(20, 16, mean=0.5)
    x[3:5] = torch.tensor([[2.0], [-0.1]])
    frame = AngleTable.from_statistics(fed(x), "m").frame
    excluded = frame[frame.direction == "uniform"].set_index("phase").n_excluded
    assert excluded.to_dict() == {"pre": 0, "standardized": 2, "post": 0}
    assert value(frame, "pre", "uniform", "min_deg") == pytest.approx(0, abs=1e-5)
    assert value(frame, "pre", "uniform", "max_deg") == pytest.approx(180, abs=1e-5)
    theta = oracle.degrees(x.double().numpy(), np.ones(16))
    assert value(frame, "standardized", "uniform", "rotation_deg") == pytest.approx(np.abs(90 - theta).mean(), abs=1e-5)
    frame = AngleTable.from_statistics(fed(x, kind="rmsnorm"), "m").frame
    assert set(frame.n_excluded) == {0}


@pytest.mark.parametrize(("heads", "vectors"), [(1, 7), (1, 12), (2, 6), (2, 24)])
def test_another_number_of_vectors_than_the_tokens_have_is_refused(heads, vectors):
    """Twice as many too: of a context that the model pads, say."""
    statistics = AngleStatistics([site(4, heads=heads)], {4: Directions.seeded(4, 2)})
    statistics.begin(TokenBatch(np.ones((2, 3), int), np.zeros((2, 3), int), 0))
    with pytest.raises(ModelError, match=f"saw {vectors} vectors for 6 tokens, not {heads} for each"):
        statistics.take(0, "pre", noise(vectors, 4))


def test_one_angle_has_no_spread_and_is_all_its_quantiles():
    frame = AngleTable.from_statistics(fed(noise(1, 7).repeat(5, 1), k=0), "m").frame
    assert set(frame.std_deg) == {0.0}
    for column in oracle.QUANTILES:
        assert (frame[column] == frame.mean_deg).all(), column


def test_quantiles_are_in_order_and_none_is_beyond_the_extremes():
    frame = AngleTable.from_statistics(fed(noise(30, 7), k=0), "m").frame
    ordered = frame[["min_deg", *oracle.QUANTILES, "max_deg"]].to_numpy()
    assert (ordered[:, 1:] >= ordered[:, :-1]).all()


def test_no_null_ensemble_is_an_option():
    frame = AngleTable.from_statistics(fed(noise(20, 8), k=0), "m").frame
    assert set(frame.direction) == set(NAMES)
    assert frame.null_percentile.isna().all()


@pytest.mark.parametrize("k", [5, 256])
def test_tokens_too_few_for_the_null_ensemble_give_nan_and_not_an_extreme_percentile(k):
    x = noise(3, 8)
    statistics = fed(x, start=1, every=1 << 20, k=k)
    assert statistics.state["null_count"].sum() == 0
    frame = AngleTable.from_statistics(statistics, "m").frame
    assert frame[["null_percentile", "null_z", "energy_percentile"]].isna().all(axis=None)
    assert frame[frame.direction == "null"].mean_deg.isna().all()
    assert set(frame[frame.direction == "null"].n_tokens) == {0}


def test_size_does_not_depend_on_the_number_of_tokens():
    few, many = fed(noise(10, 8)), fed(noise(2000, 8))
    assert {k: v.shape for k, v in few.state.items()} == {k: v.shape for k, v in many.state.items()}


@pytest.mark.parametrize(("heads", "kind"), [(1, "layernorm"), (4, "layernorm"), (4, "rmsnorm")])
def test_what_is_kept_takes_no_more_than_is_said(heads, kind):
    statistics = fed(noise(40 * heads, 8, mean=0.5), heads=heads, kind=kind)
    taken = sum(value.nbytes for value in statistics.state_dict().values())
    assert taken <= statistics.state_bytes(40) < 2 * taken


def test_a_state_says_nothing_of_what_is_not_carried_and_what_is_is_forgotten_too():
    statistics = fed(noise(9, 5))
    assert not [name for name in statistics.state_dict() if name.startswith("carried")]
    for carried in statistics.carried.values():
        carried += 1
    assert [name for name in statistics.state_dict() if name.startswith("carried")]
    statistics.clear()
    assert not any(carried.any() for carried in statistics.carried.values())


def test_sites_keep_their_order_however_they_are_named():
    sites = [replace(site(8), name=f"layers.{i}.norm", layer=i) for i in range(200)]
    assert select_sites(sites, ",".join(s.name for s in sites[::-2])) == sites[1::2]


def test_scalars_are_of_the_last_batch_alone():
    statistics = fed(noise(9, 5))
    assert statistics.scalars
    statistics.begin(TokenBatch(np.full((1, 9), 5), np.zeros((1, 9), int), 9))
    assert not statistics.scalars


def test_phases_are_in_the_order_of_the_state():
    assert PHASES == ("pre", "standardized", "post")
    statistics = fed(noise(8, 4), 100 * noise(8, 4, seed=2))
    assert statistics.state["norm"][:, 0, 2].sum() > 20 * statistics.state["norm"][:, 0, 0].sum()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_default_dtype_changes_nothing(kind):
    pre, post = noise(300, 33, mean=2.0), noise(300, 33, seed=1)
    expected = fed(pre, post, kind=kind).state_dict()
    try:
        torch.set_default_dtype(torch.float64)
        found = fed(pre, post, kind=kind).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    equal(found, expected)


@pytest.mark.parametrize("every", [1, 7, 16])
@pytest.mark.parametrize("context", [233, 256, 377, 610, 1000, 1597, 8192, 65536])
def test_the_tokens_of_the_ensemble_are_of_all_positions_alike(every, context):
    """Contexts of powers of two and of Fibonacci's numbers, too, which multiples of a constant fall into step with."""
    contexts = 30 * every
    ensemble = NullEnsemble([site(8)], {8: Directions.seeded(8, 4)}, torch.device("cpu"), every)
    found = np.zeros(context, int)
    for number in range(contexts):
        ids = np.zeros((1, context), int)
        ensemble.begin(TokenBatch(ids, ids, number * context))
        found[ensemble.rows(context, torch.device("cpu")).numpy()] += 1
    assert found.mean() == pytest.approx(30, rel=0.05)
    assert found.std() < 6  # of independent choices 5.5
    assert found.min() >= 5
    assert found.max() <= 65
