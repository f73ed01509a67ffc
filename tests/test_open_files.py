"""A capture of many arrays, each of which is a file that grows."""

import os
import resource

import pytest
from stores import captured

from normgeo.errors import StoreError
from normgeo.store.reader import HiddenStateStore
from normgeo.system import direct

PHASES = ("pre", "standardized", "post")


@pytest.fixture
def few_files():
    """Have the system allow a few more open files than there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(before[0])) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[12], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_more_files_are_open_at_once_than_are_allowed_unless_asked(home, tmp_path):
    assert HiddenStateStore(captured(home, tmp_path / "store", phases=PHASES)).complete


@pytest.mark.usefixtures("few_files")
def test_files_that_the_system_does_not_allow_are_refused_before_anything_is_written(home, tmp_path, monkeypatch):
    def refused(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(direct.resource, "setrlimit", refused)
    monkeypatch.setattr(direct.resource, "getrlimit", lambda _: (10, 10))
    with pytest.raises(StoreError, match=r"18 files of .* grow at once, more than"):
        captured(home, tmp_path / "store", phases=PHASES)
    monkeypatch.undo()
    assert not (tmp_path / "store").exists()
