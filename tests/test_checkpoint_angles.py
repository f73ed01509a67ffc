"""Angles by training step: `normgeo angles --checkpoints`."""

import json

import pandas as pd
import pytest

from normgeo import checkpoint_angles, load_model, load_tokens, measure_angles
from normgeo.checkpoint_angles import find_checkpoints, measure_checkpoints, resume_checkpoints, start_checkpoints
from normgeo.corpus import Shuffled
from normgeo.errors import ModelError, NormGeoError, RunError
from normgeo.recipe import recipe_for
from normgeo.runs import RunConfig
from normgeo.training import train

CONFIG = RunConfig((), "sample", 400, null=8, null_every=2, device="cpu")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    from normgeo import load_tokenizer

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
    for name in ("checkpoint-20", "checkpoint-3", ".step-5.partial", "other"):
        (tmp_path / "hf" / name).mkdir(parents=True)
        (tmp_path / "hf" / name / "config.json").write_text("{}")
    assert [(p.model, p.step) for p in find_checkpoints(tmp_path / "hf")] == [("hf", 3), ("hf", 20)]
    with pytest.raises(ModelError, match="no checkpoints in"):
        find_checkpoints(tmp_path / "hf/other")


def test_every_checkpoint_is_measured_and_a_run_is_resumed(twins, tmp_path, monkeypatch):
    out, real, seen = tmp_path / "run", checkpoint_angles._measured, []

    def measured(point, config, progress):
        seen.append((point.model, point.step))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(point, config, progress)

    monkeypatch.setattr(checkpoint_angles, "_measured", measured)
    with pytest.raises(KeyboardInterrupt):
        start_checkpoints(twins, CONFIG, out, progress=False)
    frame = resume_checkpoints(out, progress=False)
    assert len(seen) == 7  # the one that was interrupted twice
    assert frame.equals(pd.read_parquet(out / "angles.parquet"))
    assert frame.groupby(["model", "step"]).site.nunique().tolist() == [5] * 6
    alone = measure_angles(
        load_model(twins / "rmsnorm/checkpoints/step-00000002"),
        load_tokens("sample", checkpoint_angles.load_tokenizer(twins / "rmsnorm/checkpoints/step-00000002"), 16),
        n_tokens=400, null=8, null_every=2, progress=False,
    ).frame  # fmt: skip
    same = frame[(frame.model == "rmsnorm") & (frame.step == 2)]
    assert same.mean_deg.tolist() == alone.mean_deg.tolist()
    for name in ("by-step-layer-1", "by-step-uniform", "by-step-random_a", "by-step-random_b", "layers-by-steps"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
    with pytest.raises(RunError, match="is complete"):
        resume_checkpoints(out)
    with pytest.raises(RunError, match="exists already"):
        start_checkpoints(twins, CONFIG, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").write_text(json.dumps({"status": "running"}))
    assert resume_checkpoints(tmp_path / "other") is None


def test_the_library_form_keeps_nothing(twins):
    frame = measure_checkpoints(find_checkpoints(twins / "layernorm")[:1], CONFIG, progress=False)
    assert frame.step.unique().tolist() == [0]


def test_the_command(twins, tmp_path, monkeypatch, capsys):
    from normgeo import cli

    def call(*words):
        monkeypatch.setattr("sys.argv", ["normgeo", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr()

    words = ("angles", "--checkpoints", twins / "rmsnorm", "--data", "sample", "--tokens", 64, "--null", 4, "--out")
    status, (out, _) = call(*words, tmp_path / "run", "--device", "cpu")
    assert not status
    assert "angles.parquet, figures/, run.json" in out
    for more, says in (
        ((*words, tmp_path / "run"), "exists already"), (("angles", "--resume", tmp_path / "run"), "is complete"),
        (("angles", "a-model", "--checkpoints", twins), "not both"),
        (("angles", "--checkpoints", tmp_path / "nothing"), "no checkpoints in"),
    ):  # fmt: skip
        status, (_, error) = call(*more)
        assert status == 1
        assert says in " ".join(error.split())
    assert issubclass(RunError, NormGeoError)
