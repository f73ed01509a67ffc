"""Angles by training step: `normgeo angles --checkpoints`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zoo

import normgeo.angles.job
from normgeo import load_model, load_tokenizer, load_tokens, measure_angles
from normgeo.angles.runs import RunConfig
from normgeo.errors import ModelError, NormGeoError, RunError
from normgeo.packing import Packed
from normgeo.training import checkpoint_angles
from normgeo.training import figures as training_figures
from normgeo.training.checkpoint_angles import measure_checkpoints, resume_checkpoints, start_checkpoints
from normgeo.training.checkpoints import find_checkpoints
from normgeo.training.corpus import Shuffled
from normgeo.training.recipe import recipe_for
from normgeo.training.train import train
from normgeo.training.twins import train_tokenizer

CONFIG = RunConfig((), "sample", 400, null=8, null_every=2, device="cpu")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("twins"), load_tokenizer("embedded-layernorm")
    recipe = recipe_for(
        "tiny", layers=2, d=32, heads=2, context=16, batch=2, steps=4, warmup=1, precision="no", checkpoint_every=2
    )
    for norm in ("layernorm", "rmsnorm"):
        corpus = Shuffled(load_tokens("sample", tokenizer, 16), 16, 0)
        train(norm, recipe, corpus, len(tokenizer), folder / norm, tokenizer=tokenizer, device="cpu")
    return folder


def test_checkpoints_are_found_wherever_they_are(twins, tmp_path):
    points = find_checkpoints(twins)
    assert [(p.model, p.step) for p in points] == [(m, s) for m in ("layernorm", "rmsnorm") for s in (0, 2, 4)]
    assert [p.step for p in find_checkpoints(twins / "rmsnorm/checkpoints")] == [0, 2, 4]
    for name in ("checkpoint-20", "checkpoint-3", ".step-5.partial", ".kept/step-7", "other"):
        (tmp_path / "hf" / name).mkdir(parents=True)
        (tmp_path / "hf" / name / "config.json").write_text("{}")
    assert [(p.model, p.step) for p in find_checkpoints(tmp_path / "hf")] == [("hf", 3), ("hf", 20)]
    with pytest.raises(ModelError, match="no checkpoints in"):
        find_checkpoints(tmp_path / "hf/other")
    (tmp_path / "hf/checkpoint-20/model.safetensors").write_bytes(b"")
    (tmp_path / "hf/checkpoint-20/config.json").rename(tmp_path / "hf/checkpoint-20/trainer_state.json")
    with pytest.warns(UserWarning, match="checkpoint-20 holds weights and no config.json: it is left out"):
        assert [p.step for p in find_checkpoints(tmp_path / "hf")] == [3]
    (tmp_path / "hf/checkpoint-20/adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="holds an adapter that is not merged"):
        find_checkpoints(tmp_path / "hf")


def test_trainings_of_one_name_are_models_of_their_own(twins, tmp_path):
    """Of which one may have been kept at other steps than the other."""
    for home, step in (("a", 2), ("b", 4)):
        shutil.copytree(twins / f"rmsnorm/checkpoints/step-0000000{step}", tmp_path / f"{home}/rmsnorm/step-{step}")
    shutil.copytree(twins / "layernorm/checkpoints", tmp_path / "a/layernorm/checkpoints")
    found = [(p.model, p.step) for p in find_checkpoints(tmp_path)]
    assert found == [("a/rmsnorm", 2), ("b/rmsnorm", 4), ("layernorm", 0), ("layernorm", 2), ("layernorm", 4)]
    shutil.copytree(tmp_path / "b", tmp_path / "a/rmsnorm/old")
    assert [(p.model, p.step) for p in find_checkpoints(tmp_path / "a/rmsnorm")] == [("old/rmsnorm", 4), ("rmsnorm", 2)]
    shutil.rmtree(tmp_path / "a/rmsnorm/old")
    frame = measure_checkpoints(find_checkpoints(tmp_path)[:2], CONFIG, tmp_path / "parts", progress=False)
    assert frame.groupby("model").step.unique().map(list).to_dict() == {"a/rmsnorm": [2], "b/rmsnorm": [4]}


def test_compressed_checkpoints_are_measured_as_what_they_stand_for(twins, tmp_path):
    tokenizer = load_tokenizer("embedded-layernorm")
    recipe = recipe_for(
        "tiny", layers=2, d=32, heads=2, context=16, batch=2, steps=2, warmup=1, precision="no", checkpoint_every=2
    )
    corpus = Shuffled(load_tokens("sample", tokenizer, 16), 16, 0)
    train("pre-crmsnorm", recipe, corpus, len(tokenizer), tmp_path / "all/pre-crmsnorm", tokenizer=tokenizer,
          device="cpu")  # fmt: skip
    shutil.copytree(twins / "layernorm", tmp_path / "all/layernorm")
    frame = start_checkpoints(tmp_path / "all", CONFIG, tmp_path / "out", progress=False)
    part = frame[(frame.model == "pre-crmsnorm") & (frame.direction == "uniform") & (frame.phase == "pre")]
    assert part.step.unique().tolist() == [0, 2]
    assert set(part.d) == {33}
    assert part.energy_share.max() < 1e-10  # along which its streams have nothing
    assert set(frame.model) == {"layernorm", "pre-crmsnorm"}


@pytest.mark.parametrize("record", [{"config": {}}, {"status": "running", "config": {"models": [], "later": 1}}])
def test_records_of_another_version_are_said(record, twins, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(record | {"checkpoints": str(twins)}))
    with pytest.raises(RunError, match=r"run.json is damaged, or was written by another version of normgeo"):
        resume_checkpoints(tmp_path)
    (tmp_path / "run.json").write_text("5")
    assert resume_checkpoints(tmp_path) is None


def test_every_checkpoint_is_measured_and_a_run_is_resumed(twins, tmp_path, monkeypatch, rendered):
    out, real, seen = tmp_path / "run", checkpoint_angles._measured, []

    def measured(point, *given):
        seen.append((point.model, point.step))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(point, *given)

    monkeypatch.setattr(checkpoint_angles, "_measured", measured)
    with pytest.raises(KeyboardInterrupt):
        start_checkpoints(twins, CONFIG, out, progress=False)
    passes, encoded = list[int](), Packed._encoded
    monkeypatch.setattr(Packed, "_encoded", lambda self, first: passes.append(first) or encoded(self, first))
    frame = resume_checkpoints(out, progress=False)
    assert passes == [0]  # the four that are left are of the same text
    assert len(seen) == 7  # the one that was interrupted twice
    assert frame.equals(pd.read_parquet(out / "angles.parquet"))
    assert frame.groupby(["model", "step"]).site.nunique().tolist() == [5] * 6
    alone = measure_angles(
        load_model(twins / "rmsnorm/checkpoints/step-00000002"),
        load_tokens("sample", load_tokenizer(twins / "rmsnorm/checkpoints/step-00000002"), 16),
        n_tokens=400, null=8, null_every=2, progress=False,
    ).frame  # fmt: skip
    same = frame[(frame.model == "rmsnorm") & (frame.step == 2)]
    assert same.mean_deg.tolist() == alone.mean_deg.tolist()
    for name in ("by-step-layer-1", "by-step-uniform", "by-step-random_a", "by-step-random_b", "layers-by-steps"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
    with pytest.raises(RunError, match="is complete"):
        resume_checkpoints(out)
    with pytest.raises(RunError, match=r"exists already; give another --out$"):
        start_checkpoints(twins, CONFIG, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text(json.dumps({"status": "running"}))
    assert resume_checkpoints(tmp_path / "other") is None


def test_the_library_form_keeps_nothing(twins):
    frame = measure_checkpoints(find_checkpoints(twins / "layernorm")[:1], CONFIG, progress=False)
    assert frame.step.unique().tolist() == [0]


@pytest.fixture
def stopped(twins, tmp_path, monkeypatch):
    """A run on copies of the twins and of a text that was interrupted after two of six checkpoints."""
    shutil.copytree(twins, tmp_path / "twins")
    (tmp_path / "text.txt").write_text("One text that is long enough. " * 40)
    config = RunConfig((), str(tmp_path / "text.txt"), 64, null=2, device="cpu")
    real, seen = checkpoint_angles._measured, []

    def measured(*args):
        seen.append(args)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_angles, "_measured", measured)
        with pytest.raises(KeyboardInterrupt):
            start_checkpoints(tmp_path / "twins", config, tmp_path / "run", progress=False)
    return tmp_path


def test_a_run_records_what_an_ordinary_run_records(stopped):
    resume_checkpoints(stopped / "run", progress=False)
    record = json.loads((stopped / "run" / "run.json").read_text())
    assert {"torch", "normgeo", "transformers"} <= record["versions"].keys()
    assert {"started", "finished", "command"} <= record.keys()
    assert record["config"]["tokens"] == 64
    abouts = record["models"]
    assert [*abouts] == [f"{kind}-{step:08}" for kind in ("layernorm", "rmsnorm") for step in (0, 2, 4)]
    assert len({about["weights_sha256"] for about in abouts.values()}) == 6
    for key in ("data_sha256", "tokenizer_sha256", "packing", "context", "n_tokens"):
        assert len({about[key] for about in abouts.values()}) == 1
        assert abouts["layernorm-00000000"][key]
    assert pd.read_parquet(stopped / "run" / "angles.parquet").attrs == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data", "another data sha256"), ("tokenizer", "another tokenizer sha256"),
        ("weights", r"layernorm, step 0\) was started with another weights sha256"),
        ("unrecorded", "another data sha256: None"),
    ],
)  # fmt: skip
def test_a_run_is_not_resumed_on_other_data_or_weights(stopped, change, says):
    first = stopped / "twins/layernorm/checkpoints/step-00000000"
    if change == "data":
        (stopped / "text.txt").write_text("Another text that is long enough. " * 40)
    elif change == "tokenizer":
        content = json.loads((first / "tokenizer.json").read_text())
        content["normalizer"] = {"type": "Lowercase"}
        for path in (stopped / "twins").rglob("tokenizer.json"):
            path.write_text(json.dumps(content))
    elif change == "weights":
        shutil.copy(first.with_name("step-00000004") / "model.safetensors", first)
    else:  # a part that an earlier version wrote
        part = next((stopped / "run/parts").glob("*.parquet"))
        frame = pd.read_parquet(part)
        frame.attrs = {}
        frame.to_parquet(part, index=False)
    before = (stopped / "run/run.json").read_bytes()
    with pytest.raises(RunError, match=says):
        resume_checkpoints(stopped / "run", progress=False)
    assert not (stopped / "run/angles.parquet").exists()
    assert (stopped / "run/run.json").read_bytes() == before


def test_data_that_change_while_a_run_goes_on_are_refused(stopped):
    shutil.rmtree(stopped / "twins/layernorm/checkpoints/step-00000000")  # what was measured is gone but for one
    (stopped / "run/parts/layernorm-00000002.parquet").rename(stopped / "run/parts/rmsnorm-00000004.parquet")
    (stopped / "text.txt").write_text("Another text that is long enough. " * 40)
    with pytest.raises(RunError, match=r"rmsnorm, step 4\) was started with another data"):
        resume_checkpoints(stopped / "run", progress=False)
    assert not (stopped / "run/parts/layernorm-00000002.parquet").exists()


def test_models_may_have_tokenizers_of_their_own_and_one_model_has_one(tmp_path):
    (tmp_path / "text.txt").write_text("Some text that is long enough. " * 40)
    for name, words in (("a/step-1", "some text"), ("b/step-1", "other words"), ("a/step-2", "long enough")):
        zoo.tiny("gpt2", vocab_size=300).save_pretrained(tmp_path / name)
        train_tokenizer([words] * 9, 300).save_pretrained(tmp_path / name)
    (a, other, b), config = find_checkpoints(tmp_path), RunConfig((), str(tmp_path / "text.txt"), null=2, device="cpu")
    assert set(measure_checkpoints([a, b], config, progress=False).model) == {"a", "b"}
    with pytest.raises(RunError, match=r"a, step 2\) was started with another tokenizer sha256"):
        measure_checkpoints([a, other], config, progress=False)


def test_what_was_measured_keeps_its_rows_where_its_checkpoint_is_gone(stopped, monkeypatch):
    """As of a training that keeps its last ones."""
    monkeypatch.setattr(checkpoint_angles, "draw", lambda frame, folder: None)
    shutil.rmtree(stopped / "twins/layernorm/checkpoints/step-00000000")
    kept, said = pd.read_parquet(stopped / "run/parts/layernorm-00000000.parquet"), []
    frame = resume_checkpoints(stopped / "run", announce=said.append, progress=False)
    found = [(model, step) for model, step in frame.groupby(["model", "step"]).groups]
    assert found == [(model, step) for model in ("layernorm", "rmsnorm") for step in (0, 2, 4)]
    assert frame[: len(kept)].equals(kept)
    assert said[0] == "layernorm, step 0 is gone since it was measured, and keeps its rows"


@pytest.mark.parametrize("changed", [{"null": 3}, {"null_every": 1}, {"seed": 1}])
def test_tables_of_other_directions_are_not_taken_for_these(twins, tmp_path, changed):
    point = find_checkpoints(twins / "layernorm")[:1]
    measure_checkpoints(point, CONFIG, tmp_path / "parts", progress=False)
    with pytest.raises(RunError, match=f"was started with another {next(iter(changed)).replace('_', ' ')}"):
        measure_checkpoints(point, replace(CONFIG, **changed), tmp_path / "parts", progress=False)


def test_nothing_is_left_where_nothing_was_measured(twins, tmp_path):
    np.save(tmp_path / "beyond.npy", np.full((4, 8), 10**6))
    for data, sites, says in (
        ("nofile.txt", None, "no such data file"), ("sample", "nonsense", "no site matches"),
        (str(tmp_path / "beyond.npy"), None, "vocabulary"),
    ):  # fmt: skip
        config = RunConfig((), data, 32, null=2, sites=sites, device="cpu")
        with pytest.raises(NormGeoError, match=says):
            start_checkpoints(twins / "rmsnorm", config, tmp_path / "run", progress=False)
        assert not (tmp_path / "run").exists()


def test_norms_of_no_layer_alone_are_drawn_as_a_map(twins, tmp_path):
    config = RunConfig((), "sample", 32, null=2, sites="final", device="cpu")
    assert start_checkpoints(twins / "rmsnorm", config, tmp_path / "run", progress=False).role.unique() == ["final"]
    assert [path.name for path in (tmp_path / "run/figures").glob("*.png")] == ["layers-by-steps.png"]


def test_the_labels_of_a_map_of_one_norm_fit(twins, rendered):
    config = RunConfig((), "sample", 32, null=2, sites="final", device="cpu")
    figure = training_figures.heat_map(measure_checkpoints(find_checkpoints(twins), config, progress=False))
    figure.draw_without_rendering()
    first, second = (axes.yaxis.label.get_window_extent() for axes in figure.axes[-2:])
    assert second.y0 >= 0
    assert second.y1 < first.y0
    assert first.y1 < figure.bbox.height
    assert max(first.x1, second.x1) <= figure.bbox.width


def test_one_step_has_one_tick(twins, rendered):
    config = RunConfig((), "sample", 32, null=2, device="cpu")
    figure = training_figures.one_layer(measure_checkpoints(find_checkpoints(twins)[1:2], config, progress=False), 1)
    figure.draw_without_rendering()
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [2]


def test_what_was_measured_is_kept_where_a_figure_fails(twins, tmp_path, monkeypatch):
    def fails(*_):
        raise IndexError

    config = RunConfig((), "sample", 32, null=2, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_angles, "draw", fails)
        with pytest.raises(IndexError):
            start_checkpoints(twins / "rmsnorm", config, tmp_path / "run", progress=False)
    kept = pd.read_parquet(tmp_path / "run/angles.parquet")
    assert resume_checkpoints(tmp_path / "run", progress=False).equals(kept)
    assert (tmp_path / "run/figures/layers-by-steps.png").exists()


def test_without_a_number_of_tokens_a_million_or_all_are_measured(twins, monkeypatch):
    points = find_checkpoints(twins / "layernorm")[:1]
    monkeypatch.setattr(normgeo.angles.job, "DEFAULT_TOKENS", 96)
    frame = measure_checkpoints(points, RunConfig((), "sample", null=2, device="cpu"), progress=False)
    assert frame.n_tokens.max() == 96


def test_norms_of_queries_and_keys_are_measured_where_they_are_asked_for(tmp_path):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model/step-1")
    np.save(tmp_path / "ids.npy", np.arange(64).reshape(4, 16))
    points = find_checkpoints(tmp_path)
    plain, with_qk = (
        measure_checkpoints(
            points, RunConfig((), str(tmp_path / "ids.npy"), null=2, device="cpu", qk=qk), progress=False
        )
        for qk in (False, True)
    )
    assert with_qk.site.nunique() == plain.site.nunique() + 2


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line: exit status, what it printed."""
    from normgeo.cli import main as cli

    def call(*words):
        monkeypatch.setattr("sys.argv", ["normgeo", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr()

    return call


def test_options_without_effect_beside_checkpoints_are_refused(twins, tmp_path, call):
    status, (_, error) = call("angles", "--checkpoints", twins, "--qk", "--keep", "scalars", "--out", tmp_path / "run")
    assert status == 1
    assert "leave out --keep: beside --checkpoints only" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_command(twins, tmp_path, call):
    words = ("angles", "--checkpoints", twins / "rmsnorm", "--data", "sample", "--tokens", 64, "--null", 4, "--out")
    status, (out, _) = call(*words, tmp_path / "run", "--device", "cpu")
    assert not status
    assert "angles.parquet, figures/, run.json" in out
    for more, says in (
        ((*words, tmp_path / "run"), "exists already"), (("angles", "--resume", tmp_path / "run"), "is complete"),
        (("angles", "a-model", "--checkpoints", twins), "not both"),
        (("angles", "--checkpoints", "--resume", twins), "a hub id, received --resume; --resume goes alone"),
        (("angles", "--checkpoints", tmp_path / "nothing"), "no checkpoints in"),
        ((*words, tmp_path / "run/run.json/below"), "run.json is no directory; give another --out"),
    ):  # fmt: skip
        status, (_, error) = call(*more)
        assert status == 1
        assert says in " ".join(error.split())
    assert issubclass(RunError, NormGeoError)


def test_checkpoints_are_found_through_links_and_once(tmp_path):
    for step in range(9):  # whichever of their names a directory lists first
        (folder := tmp_path / f"kept/a/.cache/step-{step}").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        for name in ("step", "latest"):
            (tmp_path / f"kept/a/{name}-{step}").symlink_to(folder)
    (tmp_path / "kept/a/up").symlink_to(tmp_path / "kept")
    assert [(point.model, point.step) for point in find_checkpoints(tmp_path / "kept")] == [("a", s) for s in range(9)]


def test_checkpoints_are_resumed_from_another_directory(tmp_path, monkeypatch):
    for step in (1, 2):
        zoo.tiny("gpt2", step).save_pretrained(tmp_path / f"ck/step-{step}")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 96, (8, 16)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint_angles, "draw", lambda *_: None)
    with monkeypatch.context() as patch:
        write = interrupted_at("-00000002.parquet", checkpoint_angles.write_whole)
        patch.setattr(checkpoint_angles, "write_whole", write)
        with pytest.raises(KeyboardInterrupt):
            start_checkpoints(Path("ck"), RunConfig((), "ids.npy", null=2, device="cpu"), Path("run"), progress=False)
    monkeypatch.chdir("/")
    assert set(resume_checkpoints(tmp_path / "run", progress=False).step) == {1, 2}


def interrupted_at(part, write):
    def wrapped(path, content):
        if part in str(path):
            raise KeyboardInterrupt
        write(path, content)

    return wrapped
