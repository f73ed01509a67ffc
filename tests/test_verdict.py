"""The rules of the verdict and of the summary, on a table whose numbers are all different."""

import pandas as pd
import pytest
from torch import nn

from normgeo import AngleTable, measure_angles, wrap
from normgeo.angles.verdict import answers, scenario, summary, verdict
from normgeo.errors import DataError
from normgeo.rows import on_stream


@pytest.fixture
def frame():
    """Four sites."""
    about = {
        "model": "m",
        "role": "mlp",
        "kind": "layernorm",
        "stack": "",
        "d": 64,
        "heads": 1,
        "dtype": "float32",
        "n_excluded": 0,
    }
    pre = {
        "mean_deg": [60.0, 80.0, 90.0, 97.0], "null_percentile": [0.5, 2.5, 50.0, 99.0],
        "null_z": [-9.0, -2.0, 0.5, 4.0], "energy_percentile": [100.0, 95.0, 94.9, 5.0],
        "energy_share": [0.5, 0.01, 0.002, 0.06],
    }  # fmt: skip
    rows = []
    for i in range(4):
        site = about | {"site": f"s{i}"}
        uniform, null = (site | {"direction": name, "n_tokens": n} for name, n in (("uniform", 100), ("null", 40 - i)))
        null |= {"energy_share": 0.01 * (i + 1), "energy_q95": 0.3, "n_directions": 39}
        rows += [
            uniform | {"phase": "pre", "std_deg": 3.0} | {name: values[i] for name, values in pre.items()},
            uniform
            | {"phase": "post", "std_deg": 5.0, "mean_deg": 85.0 + i}
            | {"energy_share": [0.04, 0.03, 0.02, 0.01][i], "energy_percentile": 99.0},
            null | {"phase": "pre", "mean_deg": 90.0},
            null | {"phase": "post", "mean_deg": 70.0},
        ]
    return pd.DataFrame(rows)


def test_every_number_of_a_scenario_is_of_the_column_it_is_named_for(frame):
    expected = {
        "sites": 4, "mean_deg": 85.0, "least_deg": 60.0, "most_deg": 97.0, "post_deg": 86.5, "post_energy": 0.025,
        "outside": 2, "z": 3.0,
        "special": 2, "empty": 1, "large": 1, "gone": 1, "energy": 0.035, "top_energy": 0.5, "top_site": "s0",
        "null_energy": 0.025, "null_tokens": 37, "null_directions": 39, "tested": True, "holds": False,
    }  # fmt: skip
    found = scenario(frame)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name


@pytest.mark.parametrize(("large", "holds"), [(2, False), (3, True)])
def test_a_scenario_holds_where_most_sites_have_a_large_component(frame, large, holds):
    pre = (frame.direction == "uniform") & (frame.phase == "pre")
    frame.loc[pre, "energy_percentile"], frame.loc[pre, "energy_share"] = 99.0, [0.06] * large + [0.04] * (4 - large)
    assert scenario(frame)["holds"] is holds


@pytest.mark.parametrize(("kind", "holds"), [("layernorm", False), ("rmsnorm", True)])
def test_scenario_1_asks_that_the_component_is_gone_behind_the_norm(frame, kind, holds):
    """What gamma and beta put back was not removed; scenario 2 does not ask for it."""
    uniform = frame.direction == "uniform"
    frame.loc[uniform, "energy_percentile"], frame.loc[uniform, "energy_share"] = 99.0, 0.06
    frame.loc[uniform & (frame.phase == "post") & frame.site.isin(["s0", "s1"]), "energy_share"] = 0.04
    found = scenario(frame.assign(kind=kind))
    assert (found["large"], found["gone"], found["holds"]) == (4, 2, holds)
    said = verdict(frame.assign(kind=kind), pd.DataFrame())
    assert ("does not hold** for m: the component is large, but gamma and beta put it back." in said) is not holds
    assert "with the gamma and beta that it has, 5.000% lies along the uniform vector" in said
    assert ("as it is at 2 of these" in said) is not holds
    assert f"**Scenario {1 if kind == 'layernorm' else 2}** (" in said
    assert "left out" not in said  # no vector was


@pytest.mark.parametrize("role", ["post_attention", "qk", "inner"])
def test_norms_that_read_no_residual_stream_answer_no_scenario(frame, role):
    """Here they are most of the sites, and have no large component, as Gemma's norms of what branches give."""
    uniform, aside = frame.direction == "uniform", frame.site.isin(["s1", "s2", "s3"])
    frame.loc[uniform, "energy_percentile"] = 99.0
    frame.loc[aside, "role"] = role
    sinks = frame[uniform].assign(tokens="rest", mean_norm=23970.5)
    assert not scenario(frame)["holds"]
    said = verdict(frame, sinks)
    assert f"Norms that read no residual stream ({role}) are left out of what follows." in said
    assert "Scenario 1" in said and "**holds** for m." in said and "median over 1 sites; 60.00° to 60.00°" in said  # noqa: PT018
    assert "| all other tokens | 100 | 60.00° | 23,970 |" in said
    assert "left out of what follows" not in verdict(frame.assign(role=role), sinks)  # there are no others


@pytest.mark.parametrize("hands_on", [True, False])
def test_norms_behind_additions_are_on_the_stream_where_the_last_hands_it_to_the_final_one(frame, hands_on):
    """Post-LN with a final norm, as torch's own encoders; OLMo-2, whose final norm reads what branches add up to."""
    uniform, final = frame.direction == "uniform", frame.site == "s3"
    frame.loc[~final, "role"], frame.loc[final, "role"] = "post_mlp", "final"
    frame["mean_norm"] = 7.0
    last = uniform & (frame.site == "s2") & (frame.phase == "post")
    given = uniform & final & (frame.phase == "pre")
    frame.loc[last, "mean_deg"] = frame.loc[given, "mean_deg"].item() + (0.0 if hands_on else 1.0)
    assert ("left out of what follows" in verdict(frame, pd.DataFrame())) is not hands_on
    assert set(on_stream(frame).site) == ({"s0", "s1", "s2", "s3"} if hands_on else {"s3"})


def test_a_checkpoint_is_summed_up_by_the_norms_on_the_stream(frame):
    frame.loc[frame.site == "s0", "role"] = "post_mlp"
    (row,) = summary(frame.assign(step=3)).to_dict("records")
    assert row["sites"] == 3
    assert row["before_deg"] == pytest.approx(89.0)


def test_fewer_directions_than_a_central_95_percent_needs_are_no_test(frame):
    assert scenario(frame)["tested"]
    frame.loc[frame.direction == "null", "n_directions"] = 38
    text = verdict(frame, pd.DataFrame())
    assert "**not tested** for m: there are 38 random directions and they met 37 tokens; it takes 39 and 16" in text
    assert "does not hold" not in text
    assert "Null ensemble" not in text
    assert "A random direction holds" not in text


def test_a_model_that_was_centered_answers_no_scenario(frame):
    sites = (frame.direction == "uniform") & (frame.phase == "pre")
    frame.loc[sites, ["mean_deg", "std_deg"]] = 90.0, 1e-5
    text = verdict(frame, pd.DataFrame())
    assert "**Already centered**: at 4 of 4 sites" in text
    assert "**not answered** for m: at 4 of 4 sites its inputs were centered." in text
    assert "hold" not in text.replace("holds 2.500%", "")


@pytest.mark.parametrize(("mean", "std"), [(90.0, 3.0), (60.0, 1e-5)])
def test_inputs_are_centered_where_every_angle_is_right_and_not_their_mean_alone(frame, mean, std):
    sites = (frame.direction == "uniform") & (frame.phase == "pre")
    frame.loc[sites, ["mean_deg", "std_deg"]] = mean, std
    assert "centered" not in verdict(frame, pd.DataFrame())


def test_vectors_that_are_left_out_are_counted_where_most_of_them_are(frame):
    frame.loc[frame.direction == "uniform", "n_excluded"] = [0, 1234, 0, 7, 0, 0, 5, 0]
    frame.loc[frame.direction == "null", "n_excluded"] = 9999
    assert "Up to 1,234 vectors at a site were zero or not finite and are left out." in verdict(frame, pd.DataFrame())


@pytest.mark.parametrize("affine", [True, False])
def test_what_a_layernorm_without_gain_or_bias_wrote_may_be_centered_by_nobody(ids, affine):
    """A fresh Post-LN encoder: its final norm reads the output of one whose gamma is 1 and beta 0, or not there."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    if not affine:
        layer.norm2 = nn.LayerNorm(32, elementwise_affine=False)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))
    model = wrap(nn.Sequential(nn.Embedding(int(ids.max()) + 1, 32), encoder))
    said = measure_angles(model, ids, null=4, progress=False, name="m").verdict()
    found = said.partition("**Already centered**: at ")[2].partition("\n")[0]
    assert found.startswith("1 of 5 sites")
    assert "or a LayerNorm writes there whose gamma and beta leave its output centered." in found


def test_a_verdict_says_the_numbers_of_a_scenario_and_of_sinks(frame):
    sinks = frame[frame.direction == "uniform"].assign(tokens="first", mean_norm=[8.0 + i for i in range(8)])
    sinks = sinks.assign(heads=2, n_tokens=150, n_excluded=51)
    other, table = sinks.assign(model="another", mean_deg=1.0), sinks.assign(role="embedding", mean_deg=2.0)
    text = verdict(frame, pd.concat([sinks, other, table]))
    for said in (
        "before the norm: 85.00° (median over 4 sites; 60.00° to 97.00°); after it, 86.50°.",
        "removes 3.500% of the squared norm at the median site, at most 50.000% (s0). A random direction holds 2.500%.",
        "at 2 of 4 sites (chance: 0.2 on average, but sites that share a stream stray together); median |z| 3.00.",
        "95% of random directions at 2 of 4 sites; at 1 that is also more than 5% of the energy",
        "At 1 sites less energy lies along it",
        "| first position of a context | 100 | 85.00° | 11 |",
    ):
        assert said in text


@pytest.mark.parametrize(("kept", "says"), [("phase == 'pre'", "'post'"), ("phase == 'post'", "'pre'"),
                                            ("direction == 'null'", "'pre'")])  # fmt: skip
def test_a_verdict_on_a_part_of_a_table_says_what_it_lacks(frame, kept, says):
    with pytest.raises(DataError, match=f"rows of phase {says} and direction 'uniform' too; the table has none of m"):
        AngleTable(frame.query(kept)).verdict()


@pytest.mark.parametrize("use", [AngleTable.verdict, AngleTable.plot])
def test_steps_of_training_are_not_taken_for_sites_of_one_model(frame, use):
    steps = pd.concat([frame.assign(step=step) for step in (10, 20)])
    with pytest.raises(DataError, match=r"2 steps of training; choose one, as .*frame.step == 20"):
        use(AngleTable(steps))
    if use is AngleTable.verdict:
        assert use(AngleTable(steps[steps.step == 20])) == use(AngleTable(frame))


def test_a_summary_is_of_before_and_after_the_norm(frame):
    (row,) = summary(frame).to_dict("records")
    expected = {
        "sites": 4, "before_deg": 81.75, "before_std_deg": 3.0, "after_deg": 86.5, "after_std_deg": 5.0,
        "energy_share": 0.143, "null_percentile": 26.25,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_answer_in_short_has_no_marks_but_those_of_a_name(frame):
    (answer,) = answers(frame.assign(model="a**b{}"))
    assert answer.startswith("Scenario 1 (")
    assert answer.endswith(": does not hold for a**b{}.")
