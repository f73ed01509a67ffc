"""Files written and read directly are whole where memory is used again, reads are short, and rates are of a disk."""

import os

import numpy as np
import pytest

from normgeo.store.storage import Disk
from normgeo.system import direct
from normgeo.system.memory import pages


@pytest.mark.parametrize("sizes", [(3, 4099, 9), (4096, 5000, 4096), (8191, 1, 8193)])
def test_memory_may_be_used_again_once_its_bytes_were_appended(sizes, tmp_path):
    new, memory, whole = direct.NewFile(tmp_path / "c.0"), pages(max(sizes)), b""
    for number, n in enumerate(sizes):
        memory[:n] = np.random.default_rng(number).integers(0, 256, n, np.uint8)
        whole += memory[:n].tobytes()
        new.append(memory[:n])
        memory[:] = 0
    new.finish()
    assert (tmp_path / "c.0").read_bytes() == whole


def test_a_read_that_gives_less_at_once_goes_on_where_it_ended(tmp_path, monkeypatch):
    whole = np.random.default_rng(0).integers(0, 256, 5 * direct.BLOCK + 7, np.uint8)
    (tmp_path / "c.0").write_bytes(whole.tobytes())
    real = os.preadv

    def short(descriptor, buffers, offset):
        return real(descriptor, [memoryview(buffers[0])[: direct.BLOCK]], offset)

    monkeypatch.setattr(os, "preadv", short)
    for start, n in ((0, len(whole)), (5000, 9000), (4096, 8192), (0, 2 * len(whole))):
        np.testing.assert_array_equal(direct.read_range(tmp_path / "c.0", start, n), whole[start : start + n])


def test_the_rate_of_a_disk_is_of_bytes_that_are_on_it(tmp_path, monkeypatch):
    done, clock, write, sync = [], [0.0], os.write, os.fsync

    def written(descriptor, data):
        done.append(n := write(descriptor, data))
        return n

    def synced(descriptor):
        assert sum(done) == 64 << 20
        clock[0] += 4.0
        sync(descriptor)

    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr("normgeo.store.storage.time.perf_counter", lambda: clock[0])
    assert Disk(tmp_path / "s").rate() == 16 << 20
