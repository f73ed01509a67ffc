import re

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
import zoo

from normgeo.angles.measure import AngleTable, measure_angles
from normgeo.angles.verdict import already_centered, scenario
from normgeo.errors import ActivationError, DataError, ModelError, RunError
from normgeo.geometry import Directions
from normgeo.sites import find_sites, select_sites

pytestmark = pytest.mark.usefixtures("passes")
NULL = 24


def measured(model, ids, **options):
    options = {"null": NULL, "null_every": 1, "progress": False, "batch": len(ids), "name": "m"} | options
    return measure_angles(model, ids, **options)


def check(model, ids, sites=None, tolerance=1e-3):
    """Every column of every row of a table against the oracle."""
    sites = find_sites(model) if sites is None else sites
    frame = measured(model, ids, sites=sites).frame
    directions = {d: Directions.seeded(d, NULL, 0) for d in {s.d for s in sites}}
    expected = oracle.table(model, ids, sites, directions)
    assert {(r.site, r.phase, r.direction) for r in frame.itertuples()} == expected.keys()
    assert len(frame) == len(expected)
    for row in frame.to_dict("records"):
        wanted = expected[row["site"], row["phase"], row["direction"]]
        for column, value in wanted.items():
            where = (row["site"], row["phase"], row["direction"], column)
            if column.startswith("n_"):
                assert row[column] == value, where
            elif column == "mean_norm":
                assert row[column] == pytest.approx(value, rel=1e-4), where
            elif column.startswith("energy_") and column != "energy_percentile":
                assert row[column] == pytest.approx(value, abs=1e-5), where
            elif column in oracle.QUANTILES and row["direction"] != "null":
                assert row[column] == pytest.approx(value, abs=0.02), where
            elif column == "null_z":
                assert row[column] == pytest.approx(value, abs=1e-3, rel=1e-3), where
            else:
                assert row[column] == pytest.approx(value, abs=tolerance), where
    return frame


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "albert", "t5", "olmo", "gemma2"])
def test_every_column_equals_the_float64_oracle(tiny, name, ids):
    check(tiny(name), ids)


def test_norms_on_heads_equal_the_oracle(tiny, ids):
    frame = check(tiny("qwen3"), ids, find_sites(tiny("qwen3"), qk=True))
    assert set(frame[frame.role == "qk"].n_tokens) == {4 * ids.size, 2 * ids.size}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_in_other_dtypes_equal_the_oracle_on_their_own_hidden_states(name, dtype, ids):
    check(zoo.tiny(name).to(dtype), ids)


def test_a_large_eps_shortens_the_standardized_vectors_but_turns_none(ids):
    check(zoo.tiny("gpt2", layer_norm_epsilon=0.5), ids)


def test_columns_about_the_null_ensemble_are_where_they_belong(tiny, ids):
    frame = measured(tiny("gpt2"), ids).frame
    uniform = frame.direction == "uniform"
    for column in ("null_percentile", "null_z", "energy_percentile"):
        assert frame[~uniform][column].isna().all()
    assert frame[uniform & (frame.phase != "standardized")].null_percentile.between(0, 100).all()
    turned = frame.rotation_deg.notna()
    assert (turned == (uniform & (frame.phase == "standardized"))).all()
    assert (frame.within_deg.notna() == (frame.direction == "null")).all()
    standardized = frame[uniform & (frame.phase == "standardized")]
    assert (standardized.mean_deg == 90).all()
    assert (standardized.energy_share == 0).all()
    assert (standardized.energy_percentile == 0).all()


def test_rmsnorm_standardized_angles_are_those_of_its_input_and_turn_nothing(tiny, ids):
    frame = measured(tiny("llama"), ids).frame.set_index(["site", "direction"])
    pre, standardized = (frame[frame.phase == p] for p in ("pre", "standardized"))
    pd.testing.assert_series_equal(pre.mean_deg, standardized.mean_deg)
    assert (standardized.rotation_deg.dropna() == 0).all()


def test_the_null_ensemble_on_every_eighth_token_is_an_estimate_of_that_on_all(tiny):
    ids = torch.randint(3, 96, (40, 50), generator=torch.Generator().manual_seed(0)).numpy()
    some = measured(tiny("gpt2"), ids, null_every=8).frame
    every = measured(tiny("gpt2"), ids).frame
    some, every = (f[f.direction == "null"].reset_index(drop=True) for f in (some, every))
    assert set(every.n_tokens) == {2000}
    assert some.n_tokens.between(200, 300).all()
    assert (some.mean_deg - every.mean_deg).abs().max() < 0.5


def test_seeds_change_the_random_directions_and_nothing_else(tiny, ids):
    a, b = (measured(tiny("gpt2"), ids, seed=s).frame.set_index(["site", "phase", "direction"]) for s in (0, 1))
    for direction, same in (("uniform", True), ("random_a", False), ("null", False)):
        pair = [f.xs(direction, level="direction").query("phase == 'pre'").mean_deg for f in (a, b)]
        assert np.allclose(*pair) == same


@pytest.mark.parametrize("bos", [2, 0])
def test_exactly_the_asked_number_of_tokens_and_bos_apart(tiny, ids, bos):
    ids = ids.copy()
    ids[:, 5] = bos
    table = measured(tiny("gpt2"), ids, n_tokens=100, bos=bos)
    named = table.frame[table.frame.direction != "null"]
    assert set(named.n_tokens) == {100}
    counts = table.sinks.groupby("tokens").n_tokens.unique()
    assert {k: v.tolist() for k, v in counts.items()} == {"first": [3], "bos": [3], "rest": [94]}


@pytest.mark.parametrize("bos", [[1, 2], "<s>"])
def test_several_ids_for_bos_are_refused(tiny, ids, untyped, bos):
    with pytest.raises(DataError, match=f"bos is one token id, received {re.escape(repr(bos))}"):
        measured(tiny("gpt2"), ids, bos=bos)
    assert set(measured(tiny("gpt2"), ids, bos=np.int64(5)).sinks.tokens) == {"first", "bos", "rest"}


def test_batches_are_reported_as_they_are_done(tiny, ids):
    seen = []
    measured(tiny("gpt2"), ids, batch=3, on_batch=seen.append)
    assert [b.start for b in seen] == [0, 3 * 37, 6 * 37]


def test_the_first_column_names_the_model(tiny, ids, monkeypatch):
    def named(name):
        table = measured(tiny("gpt2"), ids[:1], name=name, null=0)
        assert set(table.frame.model) == set(table.sinks.model)
        return set(table.frame.model)

    assert named("its name") == {"its name"}
    assert named(None) == {"GPT2LMHeadModel"}
    monkeypatch.setattr(tiny("gpt2"), "name_or_path", "where/it is from")
    assert named(None) == {"where/it is from"}
    assert named("its name") == {"its name"}


# --- sites ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, 5),
        ("*ln_1", 2),
        ("mlp", 2),
        ("final", 1),
        ("attention, final", 3),
        ("transformer.h.1.*", 2),
        ("*ln_1,*.1.ln_2", 3),
        ("transformer.h.[0-9].ln_?", 4),
    ],
)
def test_sites_are_selected_by_pattern_or_role(tiny, pattern, expected):
    assert len(select_sites(find_sites(tiny("gpt2")), pattern)) == expected


def test_a_pattern_that_matches_nothing_names_the_roles(tiny, ids):
    with pytest.raises(DataError, match=r"no site matches 'ln_1'; roles are \['attention', 'final', 'mlp'\]"):
        measured(tiny("gpt2"), ids, sites="ln_1")


def test_a_selection_gives_the_same_rows_as_the_whole(tiny, ids):
    whole, part = measured(tiny("gpt2"), ids).frame, measured(tiny("gpt2"), ids, sites="*ln_2").frame
    pd.testing.assert_frame_equal(whole[whole.role == "mlp"].reset_index(drop=True), part)


# --- hidden states without angles ----------------------------------------------------------------------------------


def test_a_model_of_nans_is_refused_with_the_site_and_a_hint(ids):
    model = zoo.tiny("gpt2")
    sites = find_sites(model)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias.fill_(torch.nan)
    with pytest.raises(
        ActivationError, match=r"transformer\.h\.1\.ln_1 \(pre\).*all 259 are zero or not finite.*float32"
    ):
        measured(model, ids, sites=sites)


def test_some_non_finite_vectors_are_counted_and_mentioned(ids):
    model = zoo.tiny("gpt2")
    ids = np.where(ids == 90, 91, ids)
    spoilt = ids.copy()
    spoilt[2] = 90
    sites = find_sites(model)
    expected = measured(model, np.delete(ids, 2, axis=0), sites=sites).frame
    with torch.no_grad():
        model.transformer.wte.weight[90] = torch.inf
    table = measured(model, spoilt, sites=sites)
    assert set(table.frame.n_excluded) == {37}
    assert "Up to 37 vectors at a site were zero or not finite" in table.verdict()
    np.testing.assert_allclose(table.frame.mean_deg, expected.mean_deg, atol=1e-4)


# --- keeping -------------------------------------------------------------------------------------------------------


def test_save_and_load_give_the_same_table(tiny, ids, tmp_path):
    table = measured(tiny("t5"), ids)
    table.save(tmp_path)
    loaded = AngleTable.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.frame, table.frame)
    pd.testing.assert_frame_equal(loaded.sinks, table.sinks)
    assert loaded.verdict() == table.verdict()
    with pytest.raises(DataError, match="there is no directory"):
        AngleTable.load(tmp_path / "elsewhere")


def test_tables_are_put_one_after_the_other(tiny, ids):
    tables = [measured(tiny(name), ids, name=name) for name in ("gpt2", "llama")]
    both = AngleTable.concatenated(tables)
    assert list(both.frame.model.unique()) == ["gpt2", "llama"]
    assert len(both.frame) == sum(len(t.frame) for t in tables)
    assert len(both.sinks) == sum(len(t.sinks) for t in tables)
    text = both.verdict()
    assert "## gpt2" in text
    assert "**Scenario 1**" in text
    assert "## llama" in text
    assert "**Scenario 2**" in text


def test_sinks_say_which_norms_they_are_of(ids, tiny):
    assert "median over sites; above are all tokens" in measured(tiny("gpt2"), ids).verdict()
    text = measured(tiny("bert"), ids).verdict()
    assert "median over sites, those of embeddings left out; above are all tokens" in text


# --- the verdict ---------------------------------------------------------------------------------------------------


def centered(model):
    """Subtract the mean along d from everything that writes to a GPT-2's residual stream."""
    with torch.no_grad():
        core = model.transformer
        writers = [core.wte.weight, core.wpe.weight]
        for block in core.h:
            writers += [p for m in (block.attn.c_proj, block.mlp.c_proj) for p in (m.weight, m.bias)]
        for p in writers:
            p -= p.mean(-1, keepdim=True)
    return model


def shifted(model, by):
    """Give every residual stream of a GPT-2 a constant component along the uniform vector."""
    with torch.no_grad():
        model.transformer.wte.weight += by
    return model


def test_a_centered_model_is_reported_as_already_centered(ids):
    table = measured(centered(zoo.tiny("gpt2")), ids)
    assert len(already_centered(table.frame)) == 5
    assert re.search(r"\*\*Already centered\*\*: at 5 of 5 sites", table.verdict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_centered_model_is_reported_in_half_precision_too(ids, dtype):
    assert len(already_centered(measured(centered(zoo.tiny("gpt2")).to(dtype), ids).frame)) == 5
    assert already_centered(measured(zoo.tiny("gpt2").to(dtype), ids).frame).empty


def test_a_narrow_spread_is_not_taken_for_rounding():
    row = {"direction": "uniform", "phase": "pre", "mean_deg": 90.0, "std_deg": 0.05}
    wide, narrow = row | {"d": 384, "dtype": "bfloat16"}, row | {"d": 192, "dtype": "float16"}
    assert already_centered(pd.DataFrame([wide, narrow])).empty
    assert len(already_centered(pd.DataFrame([row | {"d": 128, "dtype": "bfloat16"}]))) == 1
    single = row | {"d": 128, "dtype": "float32", "std_deg": 0.0}  # as of one token, at whatever angle
    assert already_centered(pd.DataFrame([single | {"mean_deg": 60.0}, single | {"mean_deg": 120.0}])).empty
    assert len(already_centered(pd.DataFrame([single]))) == 1


def test_ordinary_models_are_not_reported_as_centered(tiny, ids):
    for name in ("gpt2", "llama", "t5"):
        table = measured(tiny(name), ids)
        assert already_centered(table.frame).empty
        assert "Already centered" not in table.verdict()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scenarios_hold_for_a_stream_along_the_uniform_vector_and_not_for_a_random_one(name, ids):
    model, number = zoo.tiny(name), 1 if name == "gpt2" else 2
    table = measured(model, ids, null=64)
    assert not scenario(table.frame)["holds"]
    assert re.search(rf"\*\*Scenario {number}\*\* .*\*\*does not hold\*\* for m", table.verdict())
    with torch.no_grad():
        model.get_input_embeddings().weight += 3.0
    table = measured(model, ids, null=64)
    found = scenario(table.frame)
    assert found["holds"]
    assert found["large"] == found["sites"] == 5
    assert found["energy"] > 0.5
    assert found["most_deg"] < 60
    assert re.search(rf"\*\*Scenario {number}\*\* .*\*\*holds\*\* for m", table.verdict())


def test_a_component_against_the_uniform_vector_is_as_large_as_one_along_it(ids):
    table = measured(shifted(zoo.tiny("gpt2"), -3.0), ids, null=64)
    assert scenario(table.frame)["holds"]
    assert scenario(table.frame)["least_deg"] > 120


def test_the_verdicts_numbers_are_the_tables(ids, tiny):
    table = measured(tiny("gpt2"), ids)
    pre = table.frame.query("direction == 'uniform' and phase == 'pre'")
    text = table.verdict()
    assert f"{pre.mean_deg.median():.2f}° (median over 5 sites" in text
    assert f"{100 * pre.energy_share.max():.3f}% ({pre.site[pre.energy_share.idxmax()]})" in text
    assert f"{ids.size} tokens." in text
    assert "| first position of a context | 7 |" in text
    assert "nan" not in text


@pytest.mark.parametrize("options", [{"null": 0}, {"null": 1}, {"null": 8, "null_every": 10**6}])
def test_a_verdict_without_a_null_ensemble_claims_no_test(ids, tiny, options):
    text = measured(tiny("gpt2"), ids, **options).verdict()
    assert "**not tested** for m: " in text
    assert "hold" not in text
    assert "Null ensemble" not in text
    assert "nan" not in text


def test_a_verdict_counts_tokens_where_norms_on_heads_take_several_vectors_of_each(ids, tiny):
    model = tiny("qwen3")
    for sites in (find_sites(model, qk=True), [s for s in find_sites(model, qk=True) if s.role == "qk"]):
        text = measured(model, ids, sites=sites).verdict()
        assert f"\n{ids.size} tokens." in text
        assert "| first position of a context | 7 |" in text


def test_one_call_of_a_shared_norm_is_selected_by_its_key(tiny):
    sites = find_sites(tiny("albert"))
    key = next(s.key for s in sites if s.call == 1)
    assert [s.key for s in select_sites(sites, key)] == [key]


def test_a_model_that_token_ids_alone_do_not_run_is_named():
    """Its own error says what it lacks, and not who it is."""
    blip = zoo.by_type("blip")
    with pytest.raises(ModelError, match=r"Blip\w+ failed on token ids alone: "):
        measure_angles(blip, np.full((2, 5), 7), null=2, progress=False)


@pytest.mark.parametrize("times", [1, 3])
def test_one_angle_has_no_spread(tiny, times):
    frame = measured(tiny("gpt2"), np.full((times, 1), 5)).frame
    frame = frame[(frame.phase == "standardized") & (frame.direction == "uniform")]
    assert (frame.rotation_deg > 0).all()
    assert (frame[["std_deg", "rotation_std_deg"]] == 0).all(axis=None)


def test_tables_of_one_name_are_not_put_together(tiny, ids):
    one, two = (measured(tiny(name), ids) for name in ("gpt2", "llama"))
    with pytest.raises(DataError, match="two tables are of a model called 'm'; measure with name="):
        AngleTable.concatenated([one, two])


def test_a_table_says_what_it_is_and_is_saved_where_it_is_told(tiny, ids, tmp_path):
    table = measured(tiny("gpt2"), ids)
    short = table.summary().set_index("role")
    pre = table.frame[(table.frame.phase == "pre") & (table.frame.direction == "uniform")]
    for role, rows in pre.groupby("role"):
        assert short.loc[role, "before_deg"] == pytest.approx(rows.mean_deg.mean())
        assert short.loc[role, "sites"] == len(rows)
    few = AngleTable(table.frame.assign(n_tokens=15), table.sinks)
    assert short.null_percentile.notna().all()
    assert few.summary().null_percentile.isna().all()
    for text in (repr(table), table._repr_html_()):
        assert "layernorm" in text
    table.save(str(tmp_path / "new" / "folder"))
    assert AngleTable.load(tmp_path / "new" / "folder").frame.equals(table.frame)
    (tmp_path / "other" / "angles.parquet").mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*angles\.parquet: Is a directory; give another directory"):
        table.save(tmp_path / "other")


def test_a_table_may_be_indexed_by_columns_of_its_own(tiny, ids):
    table = measured(tiny("gpt2"), ids)
    for index, kept in ((["model", "site"], {}), (["role", "phase"], {"drop": False}), ("direction", {})):
        same = AngleTable(table.frame.set_index(index, **kept), table.sinks.set_index("tokens"))
        assert same.summary().equals(table.summary())
        assert same.verdict() == table.verdict()
