"""Every analysis computes, draws and saves, from the embedded pair and from a run; `python -m analyses` runs it."""

import importlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, ViTForImageClassification

from analyses import _source
from analyses.__main__ import main, names, shown
from normgeo import figures
from normgeo.angles.measure import AngleTable
from normgeo.angles.runs import RunConfig, start_run
from normgeo.bench.inference_models import SIZES
from normgeo.conversion.gauge import find_gauge
from normgeo.errors import DataError, RunError
from normgeo.rows import with_rest

N_TOKENS = 1500
MEASURED = ["angles_by_layer", "energy_removed", "masks", "norm_growth", "null_ensemble", "rotation", "sinks"]
FIXED = [
    "angles_in_training", "layernorm_steps", "models_table", "training_cost", "twins_loss", "twins_table", "workload",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyses") / "run"
    start_run(RunConfig(tokens=N_TOKENS, null=32, keep="scalars", device="cpu"), folder, progress=False)
    return folder


def module(name):
    return importlib.import_module(f"analyses.{name}")


def call(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["analyses", *map(str, arguments)])
    status = main()
    return status, *capsys.readouterr()


def test_who_reads_the_list_may_stop():
    command = f"{sys.executable} -m analyses | :; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_every_analysis_is_tested():
    assert set(MEASURED + FIXED) <= set(names())


@pytest.mark.parametrize("name", MEASURED)
def test_analysis_of_a_run_saves_table_and_figure(name, run, tmp_path, capsys, monkeypatch):
    status, out, _ = call(capsys, monkeypatch, name, "--run", run, "--out", tmp_path)
    assert status == 0
    assert "embedded-layernorm" in out
    frame = pd.read_parquet(tmp_path / f"{name}.parquet")
    assert set(frame.model) == {"embedded-layernorm", "embedded-rmsnorm"}
    assert frame.groupby("model").site.nunique().tolist() == [13, 13]
    for suffix in ("png", "svg"):
        assert (tmp_path / f"{name}.{suffix}").stat().st_size > 5000


def test_runs_of_several_models_are_drawn_side_by_side(run, tmp_path, capsys, monkeypatch, unrendered):
    table = AngleTable.load(run)
    for name, frame in table.frame.groupby("model"):
        AngleTable(frame, table.sinks[table.sinks.model == name]).save(tmp_path / str(name))
        shutil.copytree(run / "scalars.zarr" / str(name), tmp_path / str(name) / "scalars.zarr" / str(name))
    parts = [option for name in table.frame.model.unique() for option in ("--run", tmp_path / name)]
    for name in ("angles_by_layer", "sinks", "masks"):
        status, *_ = call(capsys, monkeypatch, name, *parts, "--out", tmp_path / "together")
        assert status == 0
        whole = module(name).compute(run)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "together" / f"{name}.parquet"), whole)
    status, _, err = call(capsys, monkeypatch, "angles_by_layer", *parts[:2], *parts[:2])
    assert (status, err.count("\n")) == (1, 1)
    assert f"{parts[1]} is given twice" in err


def test_runs_of_one_model_are_told_apart_by_their_directories(run, tmp_path, capsys, monkeypatch, unrendered):
    """On other data, or other tokens; of the same name in other directories by their paths."""
    table, model = AngleTable.load(run), "embedded-layernorm"
    for more, name in enumerate(("short", "long", "other/long")):
        parts = (part[part.model == model].reset_index(drop=True) for part in (table.frame, table.sinks))
        AngleTable(*(part.assign(mean_deg=part.mean_deg + more) for part in parts)).save(tmp_path / name)
        shutil.copytree(run / "scalars.zarr" / model, tmp_path / name / "scalars.zarr" / model)
    monkeypatch.chdir(tmp_path)
    for name, runs in (("masks", ("short", "long")), ("sinks", ("short", "long", "other/long"))):
        options = [option for run in runs for option in ("--run", run)]
        assert call(capsys, monkeypatch, name, *options, "--out", "out")[0] == 0
        frame = pd.read_parquet(f"out/{name}.parquet")
        assert list(frame.model.unique()) == [f"{model} ({run})" for run in runs]
        for run in runs:
            part = frame[frame.model == f"{model} ({run})"].assign(model=model)
            pd.testing.assert_frame_equal(part.reset_index(drop=True), module(name).compute(tmp_path / run))


def test_runs_of_any_name_are_drawn_and_one_without_scalars_is_named(run, tmp_path, capsys, monkeypatch, unrendered):
    table, model = AngleTable.load(run), "embedded-layernorm"
    frame, sinks = (part[part.model == model] for part in (table.frame, table.sinks))
    names = ["a$\\frac$", "b $5 and $6", "é" * 120, "plain"]
    for name in names:
        AngleTable(frame, sinks).save(tmp_path / name)
        if name != "plain":
            shutil.copytree(run / "scalars.zarr" / model, tmp_path / name / "scalars.zarr" / model)
    options = [option for name in names for option in ("--run", tmp_path / name)]
    for analysis in ("angles_by_layer", "sinks", "masks"):
        assert call(capsys, monkeypatch, analysis, *options[:6], "--out", tmp_path / "out")[0] == 0
    status, _, err = call(capsys, monkeypatch, "masks", *options, "--out", tmp_path / "out")
    assert (status, err.count("\n"), "embedded-layernorm (plain) kept no scalars" in err) == (1, 1, True)
    monkeypatch.chdir(tmp_path / "plain")
    _, out, _ = call(capsys, monkeypatch, "sinks", "--run", ".", "--run", "../" + names[0], "--out", "out")
    assert "embedded-layernorm (plain)" in out


def test_no_column_of_a_table_is_left_out(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    frame = module("angles_by_layer").compute(run)
    text = shown(frame)
    assert max(map(len, text.splitlines())) <= 102  # pandas ends a part of a table with a backslash
    assert all(column in text for column in frame if frame[column].notna().any())
    assert "d 192" in text.partition("model")[0]
    assert "In all rows" not in shown(frame.head(1))
    alike = shown(pd.DataFrame({"a": [np.nan] * 2, "b": [8117789] * 2}))
    assert [line.split() for line in alike.splitlines()][1:] == [["a", "b"], ["NaN", "8,117,789"], ["NaN", "8,117,789"]]


def test_help_is_about_the_analysis(capsys, monkeypatch):
    def told(*arguments):
        monkeypatch.setattr(sys, "argv", ["analyses", *arguments, "--help"])
        with pytest.raises(SystemExit):
            main()
        return " ".join(capsys.readouterr().out.split())

    assert "--tokens" in told()
    for name in names():
        parameters = inspect.signature(module(name).compute).parameters
        text = told(name)
        assert ("[--run PATH]" in text) == ("run" in parameters)
        assert ("[--tokens N]" in text) == ("n_tokens" in parameters)
    assert "what `normgeo bench train --out` wrote [default: the kept one]" in told("training_cost")


@pytest.mark.parametrize(
    ("name", "phases", "directions"),
    [
        ("angles_by_layer", ["pre", "post"], None), ("energy_removed", ["pre"], ["uniform", "null"]),
        ("norm_growth", ["pre"], ["uniform"]), ("rotation", ["standardized"], ["uniform"]),
        ("sinks", ["pre"], ["uniform"]),
    ],
)  # fmt: skip
def test_an_analysis_is_of_its_phases_and_directions(name, phases, directions, run):
    table, frame = AngleTable.load(run), module(name).compute(run)
    rows = table.sinks if name == "sinks" else with_rest(table.frame, table.sinks)
    rows = rows[rows.phase.isin(phases) & (rows.direction.isin(directions or set(rows.direction)))]
    there = frame.columns.intersection(rows.columns)
    pd.testing.assert_frame_equal(frame[there], rows[there].reset_index(drop=True))
    assert len(rows) > 2 * 13 - 1
    assert ("rest_norm" in frame) == (name == "norm_growth")


def test_the_uniform_vectors_place_is_among_the_random_directions(run):
    frame, table = module("null_ensemble").compute(run), AngleTable.load(run).frame
    keys = ["model", "site", "phase"]
    uniform, null = (table[table.direction == name].set_index(keys) for name in ("uniform", "null"))
    assert len(frame) == 2 * 13 * 2
    for row in frame.to_dict("records"):
        at = tuple(row[key] for key in keys)
        own, random = uniform.loc[at], null.loc[at]
        assert (row["mean_deg"], row["null_percentile"]) == (own.mean_deg, own.null_percentile)
        assert (row["null_mean_deg"], row["null_std_deg"]) == (random.mean_deg, random.std_deg)
        assert row["n_directions"] == 32


@pytest.mark.parametrize("name", FIXED)
def test_analysis_without_a_run(name, tmp_path):
    figure = module(name).plot(module(name).compute())
    figures.save(figure, tmp_path / name)
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    labels = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
    assert {text.get_text() for legend in figure.legends for text in legend.texts} == labels


def test_the_steps_of_layernorm_are_those_of_its_formula():
    x, gamma, beta = np.array([0.3, -1.2, 2.0, 0.5]), np.array([1.0, 2.0, 0.5, 1.5]), np.array([0.1, 0.0, -0.2, 0.3])
    frame = module("layernorm_steps").compute(tuple(x), tuple(gamma), tuple(beta)).set_index("vector")
    found = frame[["x1", "x2", "x3", "x4"]]
    np.testing.assert_allclose(found.loc["along 1"] + found.loc["left"], x)
    np.testing.assert_allclose(found.loc["scaled and shifted"], gamma * (x - x.mean()) / x.std() + beta)
    np.testing.assert_allclose(frame.length[["of length 1", "of length sqrt(d)"]], [1, 2])
    np.testing.assert_allclose(
        frame.angle_deg[["along 1", "left", "of length 1", "of length sqrt(d)"]], [0, 90, 90, 90], atol=1e-9
    )
    np.testing.assert_allclose(frame.angle_deg["x"], np.degrees(np.arccos(x.sum() / 2 / np.linalg.norm(x))))


@pytest.mark.parametrize("size", ["vit-tiny", "vit-giant", "gpt-medium"])
def test_the_workload_counts_what_a_pass_multiplies(size):
    config = SIZES[size]()
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        if size.startswith("vit"):
            ViTForImageClassification(config).eval()(torch.zeros(1, 3, config.image_size, config.image_size))
        else:
            GPT2LMHeadModel(config).eval()(torch.zeros(1, 512, dtype=torch.long))
    assert module("workload").compute([size]).products[0] == counter.get_total_flops()


def test_the_workload_centers_what_the_gauge_centers_but_embeddings(monkeypatch):
    config = GPT2Config(n_embd=12, n_layer=3, n_head=2, n_positions=512, vocab_size=40)
    monkeypatch.setitem(SIZES, "small", lambda: config)
    model = GPT2LMHeadModel(config).eval()
    written = sum(model.get_parameter(w.parameter).numel() for w in find_gauge(model).writers if ".h." in w.parameter)
    row = module("workload").compute(["small"], sequences=5).iloc[0]
    assert row.step_linear == 2 * 2 * written  # sums and differences, of parameters and of their gradients
    assert row.step_recenter == 2 * 2 * 5 * 512 * 12
    assert row.step_rmsnorm == 3 * 5 * (2 * 3 + 1) * 512 * 12 * 3


def test_the_table_of_twins_has_the_numbers_of_the_paper():
    frame = module("twins_table").compute().set_index("size")
    columns = ["layers", "d", "heads", "lr", "steps", "checkpoints"]
    assert frame.loc["1b", columns].tolist() == [16, 2048, 8, 3e-4, 50_000, 14]
    assert (frame.parameters["160m"], frame.parameters_untied["160m"]) == (124_439_808, 163_037_184)  # GPT-2 small's
    assert frame.tokens["1b"] == 50_000 * 64 * 1024


@pytest.mark.parametrize("n_tokens", [-1, 0])
def test_no_tokens_are_not_trained_on(n_tokens, tmp_path, capsys, monkeypatch):
    status, out, err = call(capsys, monkeypatch, "training_forms", "--tokens", n_tokens, "--out", tmp_path)
    assert (status, out) == (1, "")
    assert err == f"error: a number of tokens is at least 1; received {n_tokens}\n"


def test_without_a_run_the_embedded_pair_is_measured(run):
    measured, loaded = _source.table(None, N_TOKENS).frame, AngleTable.load(run).frame
    keep = ["model", "site", "phase", "direction"]
    both = measured.merge(loaded, on=keep, suffixes=("", "_run"))
    both = both[both.direction != "null"]
    assert len(both) == 2 * 13 * 3 * 3
    np.testing.assert_allclose(both.mean_deg, both.mean_deg_run, atol=1e-4)
    np.testing.assert_array_equal(both.n_tokens, N_TOKENS)


def test_one_model_is_drawn_with_all_its_norms(run):
    frame = module("angles_by_layer").compute(run)
    figure = module("angles_by_layer").plot(frame[frame.model == "embedded-rmsnorm"])
    assert [axes.get_title() for axes in figure.axes][:3] == ["pre-attention", "pre-MLP", "final"]


def test_masks_agree_with_the_table_and_its_groups(run):
    table, frame = AngleTable.load(run), module("masks").compute(run)
    keys = ["model", "site", "phase", "direction"]
    for mask, expected in (
        ("all tokens", table.frame),
        ("first position only", table.sinks[table.sinks.tokens == "first"]),
        ("without the first position", table.sinks[table.sinks.tokens == "rest"]),
    ):
        both = frame[frame["mask"] == mask].merge(expected, on=keys, suffixes=("", "_table"))
        assert len(both) == 2 * 13 * 2 * 3
        np.testing.assert_array_equal(both.n_tokens, both.n_tokens_table)
        np.testing.assert_allclose(both.mean_deg, both.mean_deg_table, atol=1e-4)
        np.testing.assert_allclose(both.std_deg, both.std_deg_table, atol=1e-3)
        np.testing.assert_allclose(both.mean_norm, both.mean_norm_table, rtol=1e-4)


def test_any_mask(run):
    frame = module("masks").compute(run, masks={"late": lambda store: store.position >= 128})
    contexts, rest = divmod(N_TOKENS, _source.CONTEXT)
    assert set(frame.n_tokens) == {contexts * 128 + max(0, rest - 128)}
    with pytest.raises(DataError, match="leaves none"):
        module("masks").compute(run, masks={"none": lambda store: store.position < 0})


def test_masks_need_scalars(run, tmp_path):
    AngleTable.load(run).save(tmp_path)
    with pytest.raises(RunError, match=r"kept no scalars"):
        module("masks").compute(tmp_path)


def test_null_ensemble_needs_random_directions(run, tmp_path):
    table = AngleTable.load(run)
    AngleTable(table.frame[table.frame.direction != "null"], table.sinks).save(tmp_path)
    with pytest.raises(DataError, match="--null"):
        module("null_ensemble").compute(tmp_path)


def test_rotation_is_the_angle_off_90(run):
    """Of LayerNorm |90 - theta| over the tokens, hence at least |90 - mean theta|; of RMSNorm nothing."""
    frame = module("rotation").compute(run).set_index("site")
    pre = AngleTable.load(run).frame.query("phase == 'pre' and direction == 'uniform'").set_index("site")
    for kind, part in frame.groupby("kind"):
        rotation, theta = part.rotation_deg, pre[pre.kind == kind].loc[part.index]
        if kind == "rmsnorm":
            assert rotation.max() < 0.05
        else:
            squares = rotation**2 + part.rotation_std_deg**2
            np.testing.assert_allclose(squares, (90 - theta.mean_deg) ** 2 + theta.std_deg**2, rtol=1e-3)


def test_depth_orders_sites_and_stacks():
    frame = pd.DataFrame(
        [("m", "e", 0, "e.0.a"), ("m", "e", 0, "e.0.b"), ("m", "e", 1, "e.1.a"), ("m", "d", 0, "d.0.a")] * 2,
        columns=["model", "stack", "layer", "site"],
        index=range(3, 11),
    )
    assert _source.depth(frame).tolist() == [0, 0.5, 1, 0] * 2  # of each stack from its beginning
    assert _source.depth(frame).index.tolist() == frame.index.tolist()


def test_models_table_is_table_1():
    frame = module("models_table").compute()
    assert frame.d.tolist() == [1600, 2048, 2048, 4096, 4096, 4096, 4096]
    assert frame.layers.tolist() == [48, 24, 24, 28, 32, 32, 32]
    assert frame.norm.tolist() == ["LayerNorm"] * 5 + ["RMSNorm"] * 2
    np.testing.assert_allclose(frame.memory_gb, 2 * frame.parameters / 1e9)
    assert module("models_table").plot(frame).axes[0].texts[1].get_text() == "d = 2048, 24 layers"


def test_twins_saw_the_same_steps():
    frame = module("twins_loss").compute()
    steps = frame.groupby("norm").step.apply(list)
    assert steps["layernorm"] == steps["rmsnorm"]
    losses = frame.groupby("norm").held_out_loss.min()
    assert abs(losses["layernorm"] - losses["rmsnorm"]) < 0.1


def test_angles_in_training_are_drawn_for_a_layer_that_all_models_have(tmp_path, capsys, monkeypatch):
    frame = module("angles_in_training").compute()
    first = frame.model.iloc[0]
    short = frame[(frame.model != first) | (frame.layer < 2)]
    assert "of layer 1 in training" in module("angles_in_training").plot(short).get_suptitle()
    frame[frame.role == "final"].to_parquet(tmp_path / "angles.parquet")
    status, _, err = call(capsys, monkeypatch, "angles_in_training", "--run", tmp_path, "--out", tmp_path / "out")
    assert (status, err.count("\n")) == (1, 1)
    assert "no layer whose norms were measured in all models" in err
    assert not list((tmp_path / "out").iterdir())


def test_list(capsys, monkeypatch):
    _, out, _ = call(capsys, monkeypatch)
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert list(lines) == names()
    assert all("*Geometry*" in lines[name] or "*Pre-RMSNorm*" in lines[name] for name in MEASURED + FIXED)


def test_unknown_name_is_one_line_and_status_1():
    command, root = [sys.executable, "-m", "analyses", "nonsense"], Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no analysis 'nonsense'; there are angles_by_layer")


def test_options_that_do_not_apply_and_missing_runs(tmp_path, capsys, monkeypatch):
    status, _, err = call(capsys, monkeypatch, "models_table", "--tokens", "5")
    assert (status, err.count("\n")) == (1, 1)
    assert "--tokens" in err
    status, _, err = call(capsys, monkeypatch, "sinks", "--run", tmp_path)
    assert (status, err.count("\n")) == (1, 1)
    assert "angles.parquet" in err
    for arguments in (("sinks", "--tokens", "0"), ("masks", "--tokens", "0"), ("masks", "--run", "x", "--tokens", "9")):
        status, _, err = call(capsys, monkeypatch, *arguments)
        assert (status, err.count("\n")) == (1, 1)
        assert "tokens" in err


@pytest.mark.parametrize("name", ["sinks", "masks", "angles_by_layer", "irreversibility"])
def test_encoder_and_decoder_are_drawn_apart(name, tmp_path):
    frame = pd.DataFrame([
        {"model": model, "stack": stack, "site": f"{stack}.{layer}.norm", "layer": layer, "role": "attention",
         "kind": "rmsnorm", "phase": phase, "direction": "uniform", "tokens": "rest", "mask": "all tokens",
         "mean_deg": 80.0 + layer, "std_deg": 1.0, "mean_norm": 1.0, "q05": 0.0, "q95": 0.0, "on_stream": True,
         "standardization": "rmsnorm", "lost_share": 0.5}
        for model, stack in (("one", "layers"), ("two", "encoder"), ("two", "decoder")) for layer in range(3)
        for phase in ("pre", "post")
    ])  # fmt: skip
    frame = frame[frame.phase == "pre"] if name in ("sinks", "irreversibility") else frame
    axes = (figure := module(name).plot(frame)).axes
    assert [each.get_title() for each in axes[:3]] == ["one", "two\nencoder", "two\ndecoder"]
    assert figure.legends
    for each in axes[:3]:
        line = next(line for line in each.get_lines() if len(line.get_xdata()) == 3)
        np.testing.assert_allclose(np.asarray(line.get_xdata(), float), np.arange(3), atol=0.2)


def test_an_ensemble_that_met_hardly_a_token_is_not_drawn(tmp_path):
    out = tmp_path / "run"
    start_run(RunConfig(tokens=30, null=8, keep="none", device="cpu"), out, progress=False)
    with pytest.raises(DataError, match=r"the random directions met \d tokens, which tells nothing"):
        module("null_ensemble").compute(out)
