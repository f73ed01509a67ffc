"""What adds up times and shares them out, on a clock that stands still between calls."""

import subprocess

import pytest
import torch

from normgeo.system import timing
from normgeo.system.timing import Stopwatch, interleaved


@pytest.fixture
def takes(monkeypatch):
    """Functions that take so many seconds."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def function(seconds):
        def run(*_, **__):
            now[0] += seconds
            return seconds

        return run

    return function


def test_a_stopwatch_adds_up_calls_and_nothing_between_them(takes):
    watch = Stopwatch(torch.device("cpu"))
    for seconds in (1.0, 4.0):
        assert watch(takes(seconds), 3, name=4) == seconds
        takes(100.0)()
    assert watch.seconds() == watch.seconds() == 5.0


@pytest.mark.parametrize(("kind", "waits"), [("cpu", 0), ("mps", 2), ("xpu", 2)])
def test_other_accelerators_are_waited_for(kind, waits, takes, monkeypatch):
    """They too are given what they do later."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    watch = Stopwatch(torch.device(kind))
    watch(takes(1.0))
    assert watch.seconds() == 1.0
    assert waited == [torch.device(kind)] * waits


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(0.0, 3), (7.9, 3), (8.0, 4), (9.9, 4), (10.0, 5), (13.9, 6), (1000.0, 9)]
)
def test_no_round_is_begun_that_would_not_end_in_time(takes, seconds, rounds):
    """Of two seconds each, the one that warms up aside; nine are wanted."""
    measures = {"a": takes(0.5), "b": takes(1.5)}
    found = list(interleaved(measures, rounds=9, seconds=seconds))
    assert found[-1][0] + 1 == rounds
    assert all(value == {"a": 0.5, "b": 1.5}[name] for _, name, value in found)


def test_the_order_is_a_function_of_the_seed(takes):
    measures = {name: takes(0.0) for name in "abcdef"}
    orders = [[name for _, name, _ in interleaved(measures, rounds=3, seconds=9.0, seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_times_are_of_a_commit_and_say_where_files_were_changed_since(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "__file__", str(tmp_path / "timing.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*words):
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=no")
        done = subprocess.run(["git", "-C", tmp_path, *named, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit():
        return timing.circumstances(torch.device("cpu"))["commit"]

    assert commit() == ""
    (tmp_path / "timing.py").write_text("")
    git("init")
    git("add", "timing.py")
    git("commit", "-m", "a")
    assert commit() == git("rev-parse", "HEAD")[:12]
    (tmp_path / "new.py").write_text("")  # which is no file of the code
    assert commit() == git("rev-parse", "HEAD")[:12]
    (tmp_path / "timing.py").write_text("more")
    assert commit() == git("rev-parse", "HEAD")[:12] + "+"
