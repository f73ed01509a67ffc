"""Runs: what they write, that a kill loses nothing, and that they refuse what they should."""

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from forked import Forked
from outcomes import assert_same
from zoo import by_type, tiny

from normgeo import AngleTable, ScalarStore, load_model, load_tokenizer, load_tokens, measure_angles
from normgeo.angles import job, runs, state
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.errors import ActivationError, DataError, ModelError, NormGeoError, RunError

SMALL = {"models": ("embedded-layernorm",), "tokens": 6000, "context": 64, "batch": 4, "null": 16}
SHORT = SMALL | {"tokens": 4000}  # three blocks and the better part of another


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(job, "BLOCK_TOKENS", 1024)


def test_a_run_writes_what_it_promises(tmp_path, rendered):
    out = tmp_path / "run"
    lines = []
    table = start_run(RunConfig(**SMALL), out, progress=False, announce=lines.append)
    for name in ("angles.parquet", "sinks.parquet", "verdict.md", "report.html", "run.json", "scalars.zarr"):
        assert (out / name).exists(), name
    assert (out / "figures/energy.svg").exists()
    assert (out / "figures/angles-embedded-layernorm.png").stat().st_size > 10_000
    record = json.loads((out / "run.json").read_text())
    about = record["models"]["embedded-layernorm"]
    assert record["status"] == "complete"
    assert about["n_tokens"] == 6000
    assert len(about["weights_sha256"]) == len(about["data_sha256"]) == 64
    assert set(record["versions"]) >= {"torch", "transformers", "normgeo"}
    assert "13 norms" in lines[0]
    assert "6,000 tokens" in lines[0]
    uniform = table.frame[table.frame.direction == "uniform"]
    assert (uniform.n_tokens == 6000).all()
    wanted = (
        "model site layer role kind phase direction mean_deg std_deg min_deg max_deg q01 q05 q25 median_deg q75 q95 "
        "q99 n_tokens n_excluded mean_norm energy_share null_percentile null_z"
    )
    assert set(wanted.split()) <= set(pd.read_parquet(out / "angles.parquet").columns)
    assert not list(out.rglob("*.partial"))


def test_scalars_give_back_the_table_and_any_mask(tmp_path):
    table = start_run(RunConfig(**SMALL), tmp_path / "run", progress=False)
    store = ScalarStore(tmp_path / "run/scalars.zarr/embedded-layernorm")
    named = table.frame[table.frame.direction.isin(["uniform", "random_a", "random_b"])]
    assert len(store.sites) == 13
    for row in named.itertuples():
        degrees = store.angles(row.site, row.phase, row.direction)
        assert len(degrees) == 6000
        assert abs(degrees.mean() - row.mean_deg) < 1e-5
        assert abs(degrees.std() - row.std_deg) < 1e-5
    first = store.angles("transformer.ln_f", "pre", "uniform")[store.position == 0]
    sink = table.sinks.query("site == 'transformer.ln_f' and phase == 'pre' and direction == 'uniform'")
    assert abs(first.mean() - sink[sink.tokens == "first"].mean_deg.item()) < 1e-5
    tokens = load_tokens("sample", load_tokenizer("embedded-layernorm"), 64)
    ids, documents = (
        np.concatenate([getattr(b, name).ravel() for b in tokens.batches(6000, 4)]) for name in ("ids", "document")
    )
    assert np.array_equal(store.id, ids)
    assert np.array_equal(store.document, documents)
    assert len(set(documents)) > 1
    assert np.array_equal(store.position, np.arange(6000) % 64)


def test_a_run_equals_the_library_call(tmp_path):
    table = start_run(RunConfig(**SMALL, keep="none"), tmp_path / "run", progress=False)
    model = load_model("embedded-layernorm")
    tokens = load_tokens("sample", load_tokenizer("embedded-layernorm"), 64)
    again = measure_angles(model, tokens, n_tokens=6000, batch=4, null=16, name="embedded-layernorm", progress=False)
    pd.testing.assert_frame_equal(table.frame, again.frame, check_exact=True)
    assert not (tmp_path / "run/scalars.zarr").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BLOCK_TOKENS", 1024)
        start_run(RunConfig(**SHORT), folder, progress=False)
    return folder


@pytest.mark.parametrize("after", [1, 7, 13])
def test_an_interrupted_run_is_resumed_bit_identically(tmp_path, monkeypatch, whole, after):
    real, seen = runs.stream, []

    def dying(*args):
        for batch in real(*args):
            seen.append(batch)
            if len(seen) == after:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(runs, "stream", dying)
    with pytest.raises(KeyboardInterrupt):
        start_run(RunConfig(**SHORT), tmp_path / "cut", progress=False)
    monkeypatch.setattr(runs, "stream", real)
    resume_run(tmp_path / "cut", progress=False)
    assert_same(whole, tmp_path / "cut")


def test_killed_processes_lose_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from normgeo.angles import job, runs\n"
        "from forked import wait_before\n"
        "job.BLOCK_TOKENS, runs._draw = 512, lambda table, folder: None\n"
        "most = int(sys.argv[2])\n"  # of which it is to be killed
        "wait_before(runs.State, 'save', lambda state, found, done, *_: sum(b - a for a, b in done) >= most)\n"
        "config = runs.RunConfig(('embedded-layernorm',), tokens=4_000, context=64, batch=4, null=8)\n"
        "out = Path(sys.argv[1])\n"
        "go = runs.resume_run if (out / 'run.json').exists() else lambda o, **k: runs.start_run(config, o, **k)\n"
        "go(out, progress=False)\n"
    )
    start_run(RunConfig(**SMALL | {"tokens": 4_000, "null": 8}), tmp_path / "whole", progress=False)
    out, state = tmp_path / "cut", tmp_path / "cut/state/embedded-layernorm.safetensors"
    for most in (2_000, 4_000):
        process, before = Forked(code, out, most), state.stat().st_mtime_ns if state.exists() else 0
        process.until(lambda before=before: state.exists() and state.stat().st_mtime_ns != before)
        time.sleep(0.15)
        process.kill()
        assert process.ended().returncode == -signal.SIGKILL
    assert not (out / "angles.parquet").exists()
    Forked(code, out, 5_000).done()
    assert_same(tmp_path / "whole", out)


def test_a_full_disk_stops_cleanly_and_resumes(tmp_path, full_disk, whole):
    with full_disk(4), pytest.raises(RunError, match=r"disk .* is full.*--resume"):
        start_run(RunConfig(**SHORT), tmp_path / "cut", progress=False)
    assert not list((tmp_path / "cut").rglob("*.partial"))
    resume_run(tmp_path / "cut", progress=False)
    assert_same(whole, tmp_path / "cut")


def test_a_disk_that_is_too_small_is_refused_before_the_run(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(RunError, match="the scalars need"):
        start_run(RunConfig(**SHORT), tmp_path / "run", progress=False)


def test_directories_of_others_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="is no run"):
        start_run(RunConfig(**SHORT), tmp_path / "mine", progress=False)
    start_run(RunConfig(**SMALL, keep="none"), tmp_path / "run", progress=False)
    with pytest.raises(RunError, match="already holds a run"):
        start_run(RunConfig(**SHORT), tmp_path / "run", progress=False)
    with pytest.raises(RunError, match="is complete"):
        resume_run(tmp_path / "run")
    with pytest.raises(RunError, match="nothing to resume"):
        resume_run(tmp_path / "mine")


def test_models_of_one_name_are_refused_before_they_are_measured(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "model").mkdir(parents=True)
    models = tuple(str(tmp_path / folder / "model") for folder in ("a", "b"))
    with pytest.raises(RunError, match="two models of the run would be called 'model'; rename the directory of one"):
        start_run(RunConfig(**SMALL | {"models": models}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="no model to measure"):
        start_run(RunConfig(**SMALL | {"models": ()}), tmp_path / "run", progress=False)


def test_a_run_that_dies_as_a_block_is_committed_says_what_is_left_and_loses_nothing(tmp_path, monkeypatch, whole):
    real, said = state.write_whole, []

    def dying(path, content):
        real(path, content)
        if path.suffix == ".safetensors":
            raise KeyboardInterrupt

    monkeypatch.setattr(state, "write_whole", dying)
    with pytest.raises(KeyboardInterrupt):
        start_run(RunConfig(**SHORT), tmp_path / "run", progress=False, announce=said.append)
    monkeypatch.setattr(state, "write_whole", real)
    resume_run(tmp_path / "run", progress=False, announce=said.append)
    assert "of which" not in said[0]
    assert re.search(r"tokens, of which [\d,]+ are done, of sample in contexts .*; about .*, 0 bytes of disk", said[1])
    assert_same(whole, tmp_path / "run")


def test_a_damaged_table_is_one_error(tmp_path):
    for name in ("angles", "sinks"):
        (tmp_path / f"{name}.parquet").write_bytes(b"PAR1xx")
    with pytest.raises(RunError, match=r"angles\.parquet cannot be read as a table \("):
        AngleTable.load(tmp_path)


def test_two_runs_do_not_write_one_directory(tmp_path, monkeypatch):
    """Whoever came second took the first one's statistics for its own, where it did not see that run begin."""
    prepare, seen = runs.prepare, []

    def slowly(config, name, **options):
        monkeypatch.setattr(runs, "prepare", prepare)
        for go in (lambda: start_run(replace(config, seed=5), out, progress=False), lambda: resume_run(out)):
            with pytest.raises(RunError, match=r"another process writes|nothing to resume"):
                go()
            seen.append(go)
        return prepare(config, name, **options)

    out = tmp_path / "run"
    monkeypatch.setattr(runs, "prepare", slowly)
    start_run(RunConfig(**SMALL, keep="none"), out, progress=False)
    assert len(seen) == 2
    assert json.loads((out / "run.json").read_text())["config"]["seed"] == 0
    assert not (out / ".lock").exists()


def test_a_run_is_resumed_from_another_directory(tmp_path, monkeypatch):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (64, 32)))
    monkeypatch.chdir(tmp_path)
    config = RunConfig(("model",), "ids.npy", batch=4, null=4)
    whole = start_run(config, runs.Path("whole"), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(runs.AngleTable, "from_statistics", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start_run(config, runs.Path("cut"), progress=False)
    monkeypatch.chdir("/")
    pd.testing.assert_frame_equal(resume_run(tmp_path / "cut", progress=False).frame, whole.frame)


@pytest.mark.parametrize(
    ("name", "number", "error", "says"),
    [
        ("batch", 10**20, DataError, "--batch must be at most"),
        ("null_every", 10**20, DataError, "--null-every must be at most"),
        (
            "null",
            10**10,
            ModelError,
            "10,000,000,000 random directions does not fit into memory; give a smaller --null",
        ),
    ],
)
def test_numbers_beyond_the_machine_are_refused(name, number, error, says, tmp_path):
    with pytest.raises(error, match=says):
        start_run(RunConfig(**SMALL | {name: number}), tmp_path / "run", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["data", "sites", "device", "revision"])
def test_what_is_no_text_is_refused(name, untyped):
    """Several roles are one text, as those of the command line."""
    with pytest.raises(NormGeoError, match=rf"--{name} must be text, received \['mlp', 'final'\]"):
        RunConfig(("m",), **{name: ["mlp", "final"]})
    assert RunConfig(Path("m"), sites="mlp,final").models == (Path("m"),)


def test_a_record_without_models_is_none(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "config": {"models": ["m"]}}))
    with pytest.raises(RunError, match=r"run\.json is no record of a run"):
        resume_run(tmp_path)


@pytest.mark.parametrize(("models", "names", "says"), [
    ([], ["m"], r"run\.json is damaged, .*models is \[\], no dict"),
    ({"m": None}, ["m"], r"run\.json is damaged, .*models\.m is None, no dict"), ({}, [], "there is no model"),
])  # fmt: skip
def test_a_record_of_no_models_is_one_error(models, names, says, tmp_path):
    record = {"status": "running", "models": models, "config": {"models": names}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=says):
        resume_run(tmp_path, progress=False)


@pytest.mark.parametrize(
    "config", [{}, [], {"models": ["m"], "later": 1}, {"models": ["m"], "batch": "8"}, {"models": ["m"], "sites": 3}]
)
def test_a_configuration_of_another_version_is_said(config, tmp_path, untyped):
    record = {"status": "running", "models": {}, "config": config}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"run\.json is damaged, or was written by another version of normgeo"):
        resume_run(tmp_path)


def test_a_run_is_not_resumed_with_other_weights_or_damage(tmp_path, monkeypatch):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (64, 32)))
    config = RunConfig((str(tmp_path / "model"),), str(tmp_path / "ids.npy"), batch=4, null=4)
    with monkeypatch.context() as patch:
        patch.setattr(runs.AngleTable, "from_statistics", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start_run(config, tmp_path / "run", progress=False)
    tiny("gpt2", seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match="another weights sha256"):
        resume_run(tmp_path / "run", progress=False)
    tiny("gpt2").save_pretrained(tmp_path / "model")
    state = next((tmp_path / "run/state").iterdir())
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(RunError, match="is damaged"):
        resume_run(tmp_path / "run", progress=False)


def test_hidden_states_without_an_angle_are_an_error_and_some_are_counted(tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (8, 16)))
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[5] = torch.nan
    model.save_pretrained(tmp_path / "some")
    with torch.no_grad():
        model.transformer.wpe.weight[:] = torch.nan
    model.save_pretrained(tmp_path / "all")
    data = str(tmp_path / "ids.npy")
    table = start_run(RunConfig((str(tmp_path / "some"),), data, null=4), tmp_path / "a", progress=False)
    uniform = table.frame[table.frame.direction == "uniform"]
    assert (uniform.n_excluded > 0).all()
    assert (uniform.n_excluded + uniform.n_tokens == 128).all()
    assert np.isfinite(uniform.mean_deg).all()
    with pytest.raises(ActivationError, match="zero or not finite"):
        start_run(RunConfig((str(tmp_path / "all"),), data, null=4), tmp_path / "b", progress=False)


def test_a_site_without_any_angle_is_said_after_a_block(tmp_path, monkeypatch):
    """Not after a million tokens."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (64, 16)))
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[3] = torch.nan
    model.save_pretrained(tmp_path / "late")
    config = RunConfig((str(tmp_path / "late"),), str(tmp_path / "ids.npy"), null=4, batch=2)
    monkeypatch.setattr(job, "BLOCK_TOKENS", 64)
    with pytest.raises(ActivationError, match=r"ln_f \(pre\) has an angle: all 64 are zero"):
        start_run(config, tmp_path / "run", progress=False)


def test_ids_are_ids_in_a_file_of_either_case(tmp_path):
    np.save(tmp_path / "ids.npy", np.full((4, 9), 5))
    path = (tmp_path / "ids.npy").rename(tmp_path / "IDS.NPY")
    about = job.prepare(RunConfig(data=str(path)), "embedded-layernorm").about
    assert (about["tokenizer"], about["context"], about["n_tokens"]) == (None, 9, 36)


def test_too_few_tokens_are_an_error_only_when_asked_for(tmp_path):
    with pytest.raises(DataError, match="ends after 99,309 tokens"):
        start_run(RunConfig(**SMALL | {"tokens": 100_000, "context": 256}), tmp_path / "run", progress=False)


def test_a_last_context_that_the_model_pads_is_refused_before_the_run(tmp_path):
    """Longformer pads to whole windows of 32 tokens: 70 tokens would end the run at its last 6."""
    by_type("longformer").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 90, (6, 32)))
    config = RunConfig((str(tmp_path / "model"),), str(tmp_path / "ids.npy"), tokens=70, batch=2, null=4)
    with pytest.raises(ModelError, match="sees 32 vectors when LongformerForMaskedLM is given 6 token ids alone"):
        start_run(config, tmp_path / "run", progress=False)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    start_run(replace(config, tokens=64), tmp_path / "whole", progress=False)
    assert set(AngleTable.load(tmp_path / "whole").frame.query("direction != 'null'").n_tokens) == {64}


@pytest.mark.parametrize("made", [True, False])
def test_a_failed_start_leaves_what_was_there(made, tmp_path, monkeypatch):
    """The directory too where somebody had made it, and works in it."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run" if made else tmp_path)
    out = runs.Path("." if made else "new")
    np.save(tmp_path / "ids.npy", np.full((4, 64), 10**6))  # beyond the vocabulary: found when it is measured
    with pytest.raises(DataError, match="beyond the model's vocabulary"):
        start_run(RunConfig(**SMALL | {"tokens": 200}, data=str(tmp_path / "ids.npy")), out, progress=False)
    (tmp_path / "ids.npy").unlink()
    assert not [path for path in tmp_path.rglob("*") if path.name != "run"]
    assert (tmp_path / "run").is_dir()
