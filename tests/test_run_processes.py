"""Runs by several processes: the same numbers to the last bit, whoever measures a token, and whoever dies."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from outcomes import assert_same
from together import by_ranks
from zoo import tiny

from normgeo.angles import job, runs
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.angles.state import joined, missing
from normgeo.cli.main import main
from normgeo.errors import NormGeoError, RunError

N = 700


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(job, "BLOCK_TOKENS", 120)


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """The run of one process that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BLOCK_TOKENS", 120)
        start_run(config(home), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two models and ids for them: 40 sequences of 20."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "llama"):
        tiny(name).save_pretrained(folder / name)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 96, (40, 20)))
    return folder


def config(home, *models, **changes):
    options = {"data": str(home / "ids.npy"), "tokens": N, "batch": 3, "null": 8, "null_every": 2, "device": "cpu"}
    options["sites"] = "mlp,final"
    return RunConfig(tuple(str(home / name) for name in models or ("gpt2",)), **options | changes)


def stopping(monkeypatch, where, after, error=KeyboardInterrupt):
    """Have whoever measures the token `where` end after so many batches of its own."""
    streamed = runs.stream

    def stream(model, sites, batches, sinks):
        batches = list(batches)
        stops = any(batch.start <= where < batch.start + batch.n_tokens for batch in batches)
        for number, batch in enumerate(streamed(model, sites, batches, sinks)):
            if stops and number == after:
                raise error
            yield batch

    monkeypatch.setattr(runs, "stream", stream)


@pytest.mark.parametrize(
    ("size", "models", "changes"),
    [(2, ("gpt2", "llama"), {}), (3, ("gpt2",), {"context": 7}), (9, ("gpt2",), {"sites": "final"})],
    ids=["models", "contexts of several lengths", "more than blocks"],
)  # fmt: skip
def test_the_number_of_processes_does_not_show(home, tmp_path, size, models, changes):
    setup, said = config(home, *models, **changes), []
    alone = start_run(setup, tmp_path / "alone", progress=False)
    found = by_ranks(
        size, lambda ranks: start_run(setup, tmp_path / "all", ranks=ranks, announce=said.append, progress=False)
    )
    pd.testing.assert_frame_equal(found[0].frame, alone.frame, check_exact=True)
    assert found[1:] == [None] * (size - 1)
    assert_same(tmp_path / "alone", tmp_path / "all")
    assert not (tmp_path / "all/state/parts").exists()
    assert len(said) == len(models)
    assert all(f"; by {size} processes, each about " in line for line in said)


def test_each_process_measures_its_share_alone(home, tmp_path, monkeypatch):
    passed, streamed = [], runs.stream

    def stream(*given):
        for batch in streamed(*given):
            passed.append((threading.get_ident(), batch.start))
            yield batch

    monkeypatch.setattr(runs, "stream", stream)
    by_ranks(3, lambda ranks: start_run(config(home), tmp_path / "run", ranks=ranks, progress=False))
    starts = [start for _, start in passed]
    assert sorted(starts) == list(range(0, N, 60))
    assert len({process for process, _ in passed}) == 3


def test_rows_too_long_to_be_whole_blocks_are_measured_by_one(home, tmp_path):
    """Batches of rows that are no whole contexts begin anew with each row; so long ones would be kept in memory."""
    np.save(tmp_path / "long.npy", np.random.default_rng(0).integers(3, 96, (3, 150)))
    setup = config(home, data=str(tmp_path / "long.npy"), tokens=None, context=20)
    start_run(setup, tmp_path / "alone", progress=False)
    by_ranks(2, lambda ranks: start_run(setup, tmp_path / "all", ranks=ranks, progress=False))
    assert_same(tmp_path / "alone", tmp_path / "all")
    assert zarr.open_array(tmp_path / "all/scalars.zarr/gpt2/tokens/id").chunks == (120,)


@pytest.mark.parametrize(("first", "then", "where"), [(2, 1, 0), (2, 3, N - 1), (1, 2, 0), (3, 2, N - 1)])
def test_whoever_dies_any_number_finishes_it(home, whole, tmp_path, monkeypatch, first, then, where):
    def run(size, do):
        return by_ranks(size, do) if size > 1 else [do(None)]

    with monkeypatch.context() as patch:
        stopping(patch, where, 3, RunError("no more of this"))
        try:
            found = run(first, lambda ranks: start_run(config(home), tmp_path / "cut", ranks=ranks, progress=False))
        except RunError as error:
            found = [error]
    assert "no more of this" in {str(error) for error in found}
    assert all(isinstance(error, (RunError, NormGeoError, SystemExit, type(None))) for error in found)
    assert not (tmp_path / "cut/angles.parquet").exists()
    assert list((tmp_path / "cut/state").rglob("*.safetensors"))
    run(then, lambda ranks: resume_run(tmp_path / "cut", ranks=ranks, progress=False))
    assert_same(whole, tmp_path / "cut")
    assert json.loads((tmp_path / "cut/run.json").read_text())["status"] == "complete"


@pytest.fixture
def stopped(home, tmp_path, monkeypatch):
    """A run by several processes that ended with the parts of two on the disk, and one half-written."""
    with monkeypatch.context() as patch:
        stopping(patch, N - 1, 4, RunError("no more of this"))
        by_ranks(2, lambda ranks: start_run(config(home), tmp_path / "run", ranks=ranks, progress=False))
    assert (tmp_path / "run/state/gpt2.safetensors").is_file()
    assert (tmp_path / "run/state/parts/gpt2/1.safetensors").is_file()
    (tmp_path / "run/state/parts/gpt2/2.safetensors.partial").touch()
    return tmp_path / "run"


def test_a_kill_while_parts_are_put_together_counts_none_twice(whole, stopped, monkeypatch):
    unlink = Path.unlink

    def killed(path, **options):
        if path.name == "1.safetensors":
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            resume_run(stopped, progress=False)
    assert (stopped / "state/parts/gpt2/1.safetensors").is_file()
    resume_run(stopped, progress=False)
    assert_same(whole, stopped)
    assert not (stopped / "state/parts").exists()


def test_a_damaged_part_is_named_and_what_it_is_of_can_be_measured_again(whole, stopped):
    part = stopped / "state/parts/gpt2/1.safetensors"
    content = bytearray(part.read_bytes())
    content[-9] ^= 1
    part.write_bytes(content)
    with pytest.raises(RunError, match=r"parts/gpt2/1\.safetensors is damaged.*or remove it: what it is of"):
        resume_run(stopped, progress=False)
    part.unlink()
    resume_run(stopped, progress=False)
    assert_same(whole, stopped)


def test_tokens_that_were_measured_twice_are_refused(stopped):
    part = stopped / "state/parts/gpt2/1.safetensors"
    setup = runs.RunConfig.recorded(json.loads((stopped / "run.json").read_text())["config"], stopped)
    prepared = job.prepare(setup, setup.models[0])
    state = runs.State(stopped / "state", "gpt2", runs._measured_what(setup, prepared))
    statistics = job.empty_statistics(setup, prepared)
    state.save(statistics, [(60, 660)], 1)
    assert part.is_file()
    with pytest.raises(RunError, match=r"1\.safetensors is damaged.*some of its tokens were measured elsewhere too"):
        resume_run(stopped, progress=False)


def test_parts_that_the_first_process_does_not_see_are_missed(home, tmp_path, monkeypatch):
    """As on machines of which each has a disk of its own."""
    monkeypatch.setattr("normgeo.angles.state.State.gathered", lambda self, statistics, done: list(done))
    found = by_ranks(2, lambda ranks: start_run(config(home), tmp_path / "run", ranks=ranks, progress=False))
    assert "tokens 360 to 700 were measured and are not there; do all processes see one file system?" in str(found[0])
    assert not (tmp_path / "run/angles.parquet").exists()


@pytest.mark.parametrize("changes", [{"batch": 5}, {"seed": 5}, {"null": 16}], ids=str)
def test_processes_that_are_asked_for_other_things_are_refused(home, tmp_path, changes):
    setups, out = [config(home), config(home, **changes)], tmp_path / "run"
    found = by_ranks(2, lambda ranks: start_run(setups[ranks.rank], out, ranks=ranks, progress=False))
    assert f"was started with another config {next(iter(changes))}" in str(found[1])
    assert str(found[0]).startswith("process 1 of the run failed, and says why itself")
    assert not (out / "angles.parquet").exists()


def test_what_the_first_process_refuses_ends_all(home, tmp_path):
    missing_one = replace(config(home), models=(str(home / "nope"),))
    for setup, why in ((missing_one, "nope"), (replace(config(home), models=()), "there is no model to measure")):
        found = by_ranks(2, lambda ranks, setup=setup: start_run(setup, tmp_path / "run", ranks=ranks))
        assert why in str(found[0])
        assert isinstance(found[1], SystemExit)  # silently
        assert not (tmp_path / "run").exists()


def test_what_one_process_does_is_refused_to_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["normgeo", "angles", "--store", "s"])
    with pytest.raises(SystemExit):
        main()
    assert "is done by one process, and 2 were launched" in capsys.readouterr().err


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20))), st.integers(1, 80), st.integers(1, 30))
def test_spans_are_of_the_tokens_that_they_are_of(given, n_tokens, block):
    spans = [(start, min(start + length, n_tokens)) for start, length in given if start < n_tokens]
    done = {token for span in spans for token in range(*span)}
    assert [token for span in joined(spans) for token in range(*span)] == sorted(done)
    assert all(stop < start for (_, stop), (start, _) in zip(joined(spans), joined(spans)[1:], strict=False))
    left = missing(spans, n_tokens, block)
    assert [token for span in left for token in range(*span)] == [n for n in range(n_tokens) if n not in done]
    assert all(start // block == (stop - 1) // block for start, stop in left)


COMMAND = """
import sys
from normgeo.angles import job, runs
job.BLOCK_TOKENS, runs._draw = 120, lambda table, folder: None
from normgeo.cli.main import main
main()
"""


def test_the_command_by_two_processes(home, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"data": home / "ids.npy", "tokens": N, "batch": 3, "null": 8, "null-every": 2, "sites": "mlp,final"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    first, second = forked.ranks(COMMAND, "angles", home / "gpt2", *words, "--device", "cpu")
    assert second.done().stdout == ""
    assert first.done().stderr.count("; by 2 processes, each about") == first.stdout.count("run.json") == 1
    (out,) = (tmp_path / "runs").iterdir()
    assert_same(whole, out)


def test_a_killed_process_ends_the_run_and_any_number_finishes_it(home, whole, tmp_path):
    words = ("angles", home / "gpt2", "--data", home / "ids.npy", "--tokens", N, "--batch", 3, "--null", 8)
    words += ("--null-every", 2, "--sites", "mlp,final", "--device", "cpu", "--out", tmp_path / "run")
    waits = "from forked import wait_before; from normgeo.angles.state import State\n"
    waits += "wait_before(State, 'save', lambda state, *given: (state.parts / f'{given[-1]}.safetensors').exists())\n"
    first, second = forked.ranks(waits + COMMAND, *words)
    second.until((tmp_path / "run/state/parts/gpt2/1.safetensors").exists)
    second.kill()
    assert first.ended(100).returncode == 1
    assert "process 1 of the run has ended without a word; what is committed is safe: give --resume" in first.stderr
    assert not (tmp_path / "run/angles.parquet").exists()
    by_ranks(3, lambda ranks: resume_run(tmp_path / "run", ranks=ranks, progress=False))
    assert_same(whole, tmp_path / "run")
