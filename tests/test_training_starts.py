"""What a new training finds: directories that others take meanwhile."""

import pytest
from training_zoo import articles, small

from normgeo.errors import RunError
from normgeo.training import runs
from normgeo.training.runs import TrainConfig, output, start_training


def started(folder, out, norm="rmsnorm", recipe=None, **options):
    """Training on the folder's articles."""
    config = TrainConfig(norm, str(folder / "text.jsonl"), str(folder / "held.jsonl"), vocabulary=300, device="cpu")
    return start_training(config, recipe or small(steps=1), out, progress=False, **options)


def test_a_run_that_came_and_went_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    articles(tmp_path)
    out, real = tmp_path / "run", runs._prepared

    def slowly(*given):
        monkeypatch.setattr(runs, "_prepared", real)
        started(tmp_path, out)
        return real(*given)

    monkeypatch.setattr(runs, "_prepared", slowly)
    with pytest.raises(RunError, match=f"{out} exists already; finish it with --resume {out}, or give another --out"):
        started(tmp_path, out, recipe=small(steps=2))
    assert '"steps": 1,' in (out / "train.json").read_text()
    assert (out / "rmsnorm/checkpoints/step-00000001").is_dir()


def test_starts_without_a_directory_get_one_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with output(None, "tiny", "cpu") as first, output(None, "tiny", "cpu") as second:
        assert second.name == f"{first.name}-2"
        (first / "kept").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [first.name]
