"""Analyses of models and trainings of one's own: from a terminal, and given themselves."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from zoo import tiny

from analyses import (
    angles_in_training,
    branches,
    causal_test,
    irreversibility,
    masks,
    null_ensemble,
    sinks,
    stream_cost,
    twins_loss,
)
from analyses.__main__ import main
from normgeo import AngleTable, measure_angles
from normgeo.angles.runs import RunConfig, start_run
from normgeo.errors import DataError, RunError


@pytest.fixture
def analysis(tmp_path, monkeypatch, capsys):
    """Run one in a directory with two models and some ids; gives its table, or what was wrong."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "llama"):
        tiny(name).save_pretrained(name)
    np.save("ids.npy", np.random.default_rng(0).integers(3, 96, (4, 64)))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["analyses", *map(str, words), "--out", "out"])
        status, err = main(), capsys.readouterr().err
        return err if status else pd.read_parquet(f"out/{words[0]}.parquet")

    return run


def test_models_of_ones_own_by_command(normgeo, analysis):
    """Of token ids no tokenizer is read: a damaged one, which is warned of, is none of their business."""
    Path("gpt2/tokenizer.json").write_text("{")
    assert not normgeo("bench", "stream", "gpt2", "--data", "ids.npy", "--context", 16, "--rounds", 1)[0]
    causal = analysis("causal_test", "--model", "gpt2", "--data", "ids.npy", "--tokens", 100)
    assert set(causal.model) == {"gpt2"}
    assert set(causal.tokens) == {100}
    lost = analysis("irreversibility", "--model", "gpt2", "--model", "llama", "--data", "ids.npy", "--context", 16)
    assert lost.model.unique().tolist() == ["gpt2", "llama"]
    cut = irreversibility.compute(["gpt2"], np.load("ids.npy").reshape(16, 16))
    pd.testing.assert_frame_equal(lost[lost.model == "gpt2"], cut)


def test_models_that_are_given_themselves(ids):
    model = tiny("gpt2")
    assert set(causal_test.compute(model, ids).model) == {type(model).__name__}
    assert len(irreversibility.compute([model, tiny("llama")], ids)) == 2 * (5 + 5)
    assert stream_cost.compute(model, ids, rounds=1, batch=2).ratio.gt(0).all()
    with pytest.raises(DataError, match="has no tokenizer"):
        irreversibility.compute([model])


@pytest.mark.parametrize(
    ("part", "n_tokens", "panels", "said"),
    [
        (lambda model: model.base_model, 100, ["last hidden state, rms error (%)"], "(100 tokens)"),
        (lambda model: model, 1, ["mean KL (nats)", "other token preferred (%)", "logits, rms error (%)"], "(1 token)"),
    ],
)
def test_what_a_model_without_a_head_or_predictions_lacks_is_not_drawn(part, n_tokens, panels, said, ids):
    figure = causal_test.plot(causal_test.compute(part(tiny("gpt2")), ids, n_tokens))
    assert [axes.get_title() for axes in figure.axes] == panels
    assert all(np.isfinite(line.get_xdata()).all() for axes in figure.axes for line in axes.lines)
    assert figure.get_suptitle().endswith(f"without mean subtraction, against itself with it {said}")


def test_a_change_without_bound_is_drawn_at_the_edge(ids):
    """A swap whose logits grow by orders of magnitude: its perplexity is beyond what a number holds."""
    frame = causal_test.compute(tiny("gpt2"), ids, 100)
    for other, shown in ((1.04e-3, "0.001"), (0.0, "0"), (100, "100")):
        axes = causal_test.plot(frame.assign(kl_mean=[0.0, np.inf, other])).axes[1]
        assert {text.get_text() for text in axes.texts} == {"infinite", shown}
        assert next(line.get_xdata()[0] for line in axes.lines) == axes.get_xlim()[1] < np.inf


def test_models_that_are_called_alike_are_not_one(tmp_path):
    for folder in ("a", "b"):
        tiny("gpt2").save_pretrained(tmp_path / folder / "step-10")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (2, 16)))
    for compute in (irreversibility.compute, branches.compute):
        with pytest.raises(DataError, match="two of the models would be called 'step-10'"):
            compute([tmp_path / "a/step-10", tmp_path / "b/step-10"], tmp_path / "ids.npy")


def test_a_model_whose_stream_one_norm_reads_has_no_branches(ids):
    with pytest.raises(DataError, match="no two norms of GPT2LMHeadModel read its residual stream"):
        branches.compute([tiny("gpt2", n_layer=0)], ids)


def test_what_an_analysis_does_not_take_is_said(analysis):
    assert "leave it out" in analysis("twins_loss", "--tokens", 5)
    assert "at least 1" in analysis("irreversibility", "--model", "gpt2", "--data", "ids.npy", "--context", 0)
    assert "causal_test takes one --model; received 2" in analysis("causal_test", "--model", "gpt2", "--model", "llama")
    said = analysis("rotation", "--model", "gpt2")
    assert "rotation does not depend on --model; measure it with `normgeo angles MODEL --out DIR`" in said
    assert "longer than the model's 64" in analysis(
        "irreversibility", "--model", "gpt2", "--data", "ids.npy", "--context", 99
    )
    assert "llama" not in (said := analysis("causal_test", "--model", "llama", "--data", "ids.npy")), said
    assert "has no LayerNorm" in said


def test_an_interrupted_analysis_is_one_word(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("analyses.__main__.run", stopped)
    monkeypatch.setattr(sys, "argv", ["analyses", "stream_cost", "--out", str(tmp_path)])
    assert main() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    start_run(RunConfig(("embedded-layernorm",), tokens=2000, context=128, null=4, keep="scalars"), out, progress=False)
    return out


@pytest.mark.parametrize("damage", ["gone", "cut", "token"])
def test_scalars_that_are_not_whole_are_no_numbers(damage, whole, tmp_path):
    """A chunk that is not there would be read as NaN, or as token ids of zero, without a word."""
    run = shutil.copytree(whole, tmp_path / "run")
    chunks = sorted((run / "scalars.zarr/embedded-layernorm").rglob("*ln_1/post/c/0/0"))
    if damage == "token":
        chunks = sorted((run / "scalars.zarr/embedded-layernorm/tokens").rglob("position/c/0"))
    chunk = chunks[0]
    if damage == "cut":
        chunk.write_bytes(chunk.read_bytes()[:7])
    else:
        chunk.unlink()
    with pytest.raises(RunError, match="is damaged: " if damage == "cut" else "1 of 1 chunks are missing; put it back"):
        masks.compute(run)


DEEP, LONG = f"{'deep/' * 10}and-deeper/angles-of-it", "x" * 70


@pytest.mark.parametrize(
    ("runs", "called"),
    [
        ((f"one/{DEEP}", f"other/{DEEP}"), ("one", "other")),
        ((f"one/a/{DEEP}", f"two/b/{DEEP}", "short"), ("one/a", "two/b", "short")),
        ((f"1{LONG}", f"2{LONG}"), (f"...{LONG[:60]}, run 1", f"...{LONG[:60]}, run 2")),
        ((f"one/{DEEP}", f"other/{DEEP}", f"b/one/{LONG}", f"b/two/{LONG}"),
         ("one, run 1", "other", "one, run 3", "two")),
        (("p/q/r", "p--q/r"), ("p/q/r, run 1", "p--q/r, run 2")),
    ],
)  # fmt: skip
def test_runs_in_long_paths_are_told_apart_by_what_differs(runs, called, analysis, ids):
    """By names of folders, too: the scalars of each are in one."""
    for run in runs:
        measure_angles(tiny("gpt2"), ids, null=0, name="m", progress=False).save(Path(run))
        (Path(run) / "scalars.zarr/m").mkdir(parents=True)
    frame = analysis("sinks", *(word for run in runs for word in ("--run", run)))
    assert list(frame.model.unique()) == [f"m ({label})" for label in called]


def test_a_model_without_random_directions_is_not_left_out_without_a_word(tmp_path, ids):
    measured = {"with": 8, "without": 0, "nor this": 0}
    tables = [
        measure_angles(tiny("gpt2"), ids, null=null, null_every=1, name=name, progress=False)
        for name, null in measured.items()
    ]
    AngleTable.concatenated(tables).save(tmp_path)
    with pytest.raises(DataError, match="no null ensemble of without, nor this; measure again with --null 256"):
        null_ensemble.compute(tmp_path)
    tables[0].save(tmp_path)
    assert set(null_ensemble.compute(tmp_path).model) == {"with"}


def curve(n, every, shift):
    held = [5.0 + shift if every and (k + 1) % every == 0 else np.nan for k in range(n)]
    return pd.DataFrame({
        "step": np.arange(1, n + 1), "train_loss": np.arange(n) + shift, "lr": 0.1, "held_out_loss": held,
    })  # fmt: skip


def trained(folder, **curves):
    for norm, table in curves.items():
        (path := folder / norm / "curve").mkdir(parents=True)
        table.to_parquet(path / "curve.parquet")
    return folder


def test_twins_of_ones_own_are_reported_where_they_were_evaluated(tmp_path):
    run = trained(tmp_path / "run", layernorm=curve(11, 4, 0), rmsnorm=curve(11, 4, 0.5))
    frame = twins_loss.compute(run)
    first = frame[frame.norm == "layernorm"]
    assert first.step.tolist() == [4, 8]
    assert first.train_loss.tolist() == [1.5, 5.5]  # the means of 0 to 3, and of 4 to 7
    _, difference = twins_loss.plot(frame).axes
    (line,) = (line for line in difference.lines if len(line.get_xdata()) == 2 and line.get_marker() == "D")
    assert line.get_label() == "RMSNorm minus LayerNorm"
    np.testing.assert_allclose(line.get_ydata(), 0.5)


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (3, 2), (200, 50)])
def test_a_twin_that_was_never_evaluated_has_its_training_loss(n, rows, tmp_path):
    frame = twins_loss.compute(trained(tmp_path / "run", rmsnorm=curve(n, 0, 0)))
    assert len(frame) == rows
    assert frame.step.iloc[-1] == n
    if n == 200:
        assert frame.train_loss.iloc[-1] == pytest.approx(197.5)
    (axes,) = twins_loss.plot(frame).axes
    assert [line.get_label() for line in axes.lines] == ["RMSNorm, training"]
    assert (axes.lines[0].get_marker() == "o") == (rows == 1)
    with pytest.raises(DataError, match="holds no curve of a training: give the directory"):
        twins_loss.compute(tmp_path)


@pytest.mark.parametrize("table", [curve(0, 0, 0), curve(9, 3, 0).drop(columns="held_out_loss")])
def test_what_is_no_table_of_a_training_is_named(table, tmp_path):
    with pytest.raises(DataError, match=r"rmsnorm/curve/curve\.parquet is no curve of `normgeo train`; give"):
        twins_loss.compute(trained(tmp_path, layernorm=curve(9, 3, 0), rmsnorm=table))
    table.to_parquet(tmp_path / "angles.parquet")
    with pytest.raises(DataError, match=r"angles\.parquet is no table of `normgeo angles --checkpoints`"):
        angles_in_training.compute(tmp_path)


@pytest.mark.parametrize("evaluated", ["layernorm", "rmsnorm"])
def test_twins_are_drawn_while_one_of_them_was_not_yet_evaluated(evaluated, tmp_path):
    both = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    run = trained(tmp_path, **{norm: curve(11, 4 if norm == evaluated else 0, 0) for norm in both})
    (axes,) = twins_loss.plot(twins_loss.compute(run)).axes  # nothing to subtract
    wanted = [f"{label}, training" for label in both.values()] + [f"{both[evaluated]}, held-out"]
    assert sorted(line.get_label() for line in axes.lines) == sorted(wanted)
    assert all(len(line.get_xdata()) for line in axes.lines)


@pytest.mark.parametrize("name", ["x$_$y", "a-model-that-somebody-tuned-on-many-things-" * 3])
def test_the_name_of_any_model_is_in_a_title(name):
    about = {"model": name, "ratio": 1.0, "ratio_q25": 1.0, "ratio_q75": 1.0, "seconds": 1.0, "rounds": 1, "batch": 1,
             "context": 8, "d": 4, "sites": 5, "dtype": "float32", "device": "cpu"}  # fmt: skip
    cost = pd.DataFrame([about | {"variant": variant} for variant in ("base", "statistics")])
    metrics = {"perplexity": 5.0, "kl_mean": 0.1, "top1": 0.9, "error_rms_rel": 0.1, "output": "logits", "tokens": 9}
    worth = pd.DataFrame([{"model": name, "conversion": kind} | metrics for kind in causal_test.KINDS])
    for figure in (stream_cost.plot(cost), causal_test.plot(worth)):
        figure.draw_without_rendering()
        title = figure.findobj(lambda it: getattr(it, "get_text", str)().startswith(name[:1]))[0].get_window_extent()
        assert 0 < title.x0 < title.x1 < figure.bbox.width


@pytest.mark.parametrize("left", ["no row", "null"])
@pytest.mark.parametrize("name", ["angles_by_layer", "null_ensemble", "sinks", "masks"])
def test_a_table_without_angles_to_the_uniform_vector_is_refused(name, left, ids, tmp_path):
    table = measure_angles(tiny("gpt2"), ids[:1], null=2, progress=False)
    rows = {"no row": table.frame[:0], "null": table.frame[table.frame.direction == "null"]}
    AngleTable(rows[left], table.sinks).save(tmp_path / "run")
    module = importlib.import_module(f"analyses.{name}")
    with pytest.raises(DataError, match=r"angles\.parquet has no angles to the uniform vector; give the directory"):
        module.compute(tmp_path / "run")


def test_a_table_without_what_analyses_read_is_refused_by_its_columns(ids, tmp_path):
    table = measure_angles(tiny("gpt2"), ids[:1], null=2, null_every=1, progress=False)
    for frame, groups, said in (
        (table.frame.drop(columns=["stack", "q05"]), table.sinks, r"angles\.parquet has no column stack, q05; give"),
        (table.frame, table.sinks.drop(columns="tokens"), r"sinks\.parquet has no column tokens; give the directory"),
        (table.frame.assign(d="many"), table.sinks, r"angles\.parquet holds no numbers in d; give the directory"),
        (pd.concat([table.frame] * 2), table.sinks, r"angles\.parquet holds more than one row of a site, phase"),
        (table.frame, pd.concat([table.sinks] * 2), r"sinks\.parquet holds more than one row of a site, phase"),
        (table.frame, table.sinks.assign(site="x" + table.sinks.site), r"sinks\.parquet are of other norms than"),
    ):
        AngleTable(frame, groups).save(tmp_path)
        with pytest.raises(DataError, match=said):
            sinks.compute(tmp_path)
    AngleTable(table.frame[table.frame.phase == "pre"], table.sinks).save(tmp_path)
    assert len(null_ensemble.plot(null_ensemble.compute(tmp_path)).axes) == 2
