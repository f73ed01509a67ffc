"""Checkpoints by several processes, each of which measures some: one table, whoever measures, and whoever dies."""

import json
import threading
from dataclasses import replace

import forked
import numpy as np
import pandas as pd
import pytest
from together import by_ranks
from zoo import tiny

from normgeo.angles.runs import RunConfig
from normgeo.errors import NormGeoError, RunError
from normgeo.hub import HubText
from normgeo.system.ranks import Ranks
from normgeo.training import checkpoint_angles
from normgeo.training.checkpoint_angles import resume_checkpoints, start_checkpoints

STEPS = {"gpt2": (1, 2, 10), "llama": (2, 3)}
POINTS = [(model, step) for model, steps in STEPS.items() for step in steps]
NAMES = [f"{model}-{step:08}" for model, step in POINTS]


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(checkpoint_angles, "draw", lambda frame, folder: None)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Checkpoints of two trainings, and ids for them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for model, step in POINTS:
        tiny(model, seed=step).save_pretrained(folder / model / f"step-{step}")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 96, (8, 16)))
    return folder


@pytest.fixture(scope="module")
def config(home):
    return RunConfig((), str(home / "ids.npy"), null=4, null_every=2, sites="mlp,final", device="cpu")


@pytest.fixture(scope="module")
def whole(home, config, tmp_path_factory):
    """The run of one process that nothing interrupted."""
    out = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_angles, "draw", lambda frame, folder: None)
        start_checkpoints(home, config, out, progress=False)
    return out


def assert_same(one, other):
    tables = [pd.read_parquet(out / "angles.parquet") for out in (one, other)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    records = [json.loads((out / "run.json").read_text()) for out in (one, other)]
    assert [*records[0]["models"]] == NAMES
    for key in ("models", "config", "checkpoints", "status"):
        assert records[0][key] == records[1][key]
    assert records[0].keys() == records[1].keys()


@pytest.fixture
def measured(monkeypatch):
    """What each process has measured, by thread; and where one is to fail."""
    seen, real, fails = {}, checkpoint_angles._measured, []

    def measured(point, *given):
        if (point.model, point.step) in fails:
            raise RunError("no more of this")
        seen.setdefault(threading.get_ident(), []).append((point.model, point.step))
        return real(point, *given)

    monkeypatch.setattr(checkpoint_angles, "_measured", measured)
    return seen, fails


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_number_of_processes_does_not_show(home, config, whole, tmp_path, measured, size):
    (seen, _), said, out = measured, [], tmp_path / "run"
    found = by_ranks(
        size, lambda ranks: start_checkpoints(home, config, out, ranks=ranks, announce=said.append, progress=False),
        alike=False,
    )  # fmt: skip
    pd.testing.assert_frame_equal(found[0], pd.read_parquet(whole / "angles.parquet"), check_exact=True)
    assert found[1:] == [None] * (size - 1)
    assert_same(whole, out)
    most = -(-5 // size)
    assert said[0] == f"5 checkpoints are left for {size} processes, at most {most} for each"
    assert said[1:] == [f"{model}, step {step} ({n} of 5)" for n, (model, step) in enumerate(POINTS[:most], 1)]
    assert sorted(point for points in seen.values() for point in points) == sorted(POINTS)
    assert max(map(len, seen.values())) == most
    assert len(seen) == min(size, 5)


@pytest.mark.parametrize(("first", "then", "where"), [(2, 1, 4), (1, 2, 1), (3, 2, 1)])
def test_whoever_dies_any_number_finishes_it(home, config, whole, tmp_path, measured, first, then, where):
    def run(size, do):
        return by_ranks(size, do, alike=False)

    (seen, fails), out = measured, tmp_path / "cut"
    fails.append(POINTS[where])
    found = run(first, lambda ranks: start_checkpoints(home, config, out, ranks=ranks, progress=False))
    assert "no more of this" in {str(error) for error in found}
    assert all(isinstance(error, (NormGeoError, SystemExit, type(None))) for error in found)
    assert not (out / "angles.parquet").exists()
    fails.clear()
    run(then, lambda ranks: resume_checkpoints(out, ranks=ranks, progress=False))
    assert_same(whole, out)
    assert sorted(point for points in seen.values() for point in points) == sorted(POINTS)  # each once


def test_processes_that_are_asked_for_other_things_are_refused(home, config, tmp_path):
    setups = [config, replace(config, seed=5)]
    found = by_ranks(
        2, lambda ranks: start_checkpoints(home, setups[ranks.rank], tmp_path / "run", ranks=ranks, progress=False)
    )
    assert "was started with another config seed: 0, now 5" in str(found[1])
    assert "process 1 of the run failed, and says why itself" in str(found[0])


def test_what_the_first_process_refuses_ends_all_and_leaves_nothing(home, config, tmp_path):
    refused = replace(config, sites="nonsense")
    found = by_ranks(
        2, lambda ranks: start_checkpoints(home, refused, tmp_path / "run", ranks=ranks, progress=False), alike=False
    )
    assert any("no site matches" in str(error) for error in found)
    assert all(isinstance(error, (NormGeoError, SystemExit)) for error in found)
    assert not (tmp_path / "run").exists()


def test_tables_that_the_first_process_does_not_see_or_of_other_text_are_refused(home, config, tmp_path, monkeypatch):
    real, write = checkpoint_angles._of_another, checkpoint_angles.write_whole

    def unseen(point, file, abouts, where):
        file.unlink()
        return real(point, file, abouts, where)

    def run(out):
        def do(ranks):
            return start_checkpoints(home, config, tmp_path / out, ranks=ranks, progress=False)

        return str(by_ranks(2, do, alike=False)[0])

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_angles, "_of_another", unseen)
        assert "llama-00000002.parquet was written by another process and is not there" in run("unseen")

    def otherwise(path, content):
        write(path, content)
        if path.name == "llama-00000003.parquet":
            frame = pd.read_parquet(path)
            frame.attrs["about"]["data_sha256"] = "other"
            frame.to_parquet(path, index=False)

    monkeypatch.setattr(checkpoint_angles, "write_whole", otherwise)
    assert "(llama, step 3) was started with another data sha256" in run("otherwise")
    assert not list(tmp_path.glob("*/angles.parquet"))


COMMAND = """
from normgeo.training import checkpoint_angles
checkpoint_angles.draw = lambda frame, folder: None
from normgeo.cli.main import main
main()
"""


def test_the_command_by_two_processes(home, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"data": home / "ids.npy", "null": 4, "null-every": 2, "device": "cpu", "sites": "mlp,final"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    first, second = forked.ranks(COMMAND, "angles", "--checkpoints", home, *words)
    assert second.done().stdout == second.stderr == ""
    assert first.done().stderr.startswith("5 checkpoints are left for 2 processes, at most 3 for each")
    (out,) = (tmp_path / "runs").iterdir()
    assert_same(whole, out)


@pytest.mark.parametrize(("abouts", "expected"), [({}, "new"), ({"a": {"data_revision": "old"}}, "old")])
def test_a_text_on_the_hub_is_that_of_the_commit_it_was_begun_on(abouts, expected, monkeypatch):
    monkeypatch.setattr(HubText, "pinned", lambda text: replace(text, revision="new"))
    assert checkpoint_angles._revision(RunConfig((), "org/text"), abouts, Ranks()) == expected
