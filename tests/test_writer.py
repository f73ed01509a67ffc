"""The writer of a store, given hidden states by hand."""

import threading

import numpy as np
import pytest
import torch

from normgeo.angles.statistics import AngleStatistics
from normgeo.errors import StoreError
from normgeo.geometry import Directions
from normgeo.kernels.checksum import checksum
from normgeo.sites import NormSite
from normgeo.store.layout import Layout, as_numbers, read_commit
from normgeo.store.storage import Disk
from normgeo.store.writer import StoreWriter
from normgeo.tokens import TokenBatch

D, N = 8, 12
SITE = NormSite("ln", "layernorm", "final", 0, "", D, 1e-5)


def written(path, pre, post, dtype="float32", chunk=8):
    """The first row's record, when these have come in and out of a norm, of which the first are stored."""
    disk, layout = Disk(path), Layout.of([SITE], [dtype], ("pre",), N, chunk_bytes=chunk * D * pre.element_size())
    batch = TokenBatch(np.arange(N).reshape(2, -1), np.zeros((2, N // 2), np.int64), 0)
    statistics = AngleStatistics([SITE], {D: Directions.seeded(D, 2)})
    for spec in layout.arrays:
        (path / "hidden.zarr" / spec.name).mkdir(parents=True)
    with disk.writing(), StoreWriter(disk, "mine", layout, [SITE], statistics) as writer:
        writer.begin(batch)
        writer.take(0, "pre", pre)
        writer.take(0, "post", post)
        writer.finish(batch)
    return read_commit(disk, 0, layout, "mine")


def test_a_chunk_holds_a_token_at_least():
    assert [Layout.of([SITE], ["float32"], ("pre",), N, bound).chunk for bound in (1, D * 4, 3 * D * 4)] == [1, 1, 2]


def test_vectors_that_lie_apart_are_written_as_they_read(tmp_path):
    """As a part of what a wider layer gives."""
    pre, post = (torch.randn(N, 2 * D)[:, D:] for _ in range(2))
    commit, raw = written(tmp_path, pre, post), pre[:8].contiguous().numpy().tobytes()
    assert (tmp_path / "hidden.zarr/sites/ln/pre/c.0.0").read_bytes()[:-4] == raw
    assert commit.chunks["sites/ln/pre"] == (len(raw), checksum(np.frombuffer(raw, np.uint8).copy()))
    assert commit.post == {"ln": checksum(post[:8].contiguous().numpy().view(np.uint8).ravel())}


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.bfloat16().repeat(1, 2), lambda x: x[1:]])
@pytest.mark.parametrize("phase", ["pre", "post"])
def test_what_is_not_as_it_was_when_the_store_was_planned_is_refused(tmp_path, change, phase):
    both = {"pre": torch.randn(N, D), "post": torch.randn(N, D)}
    with pytest.raises(StoreError, match=rf"sites/ln/pre should be {N} tokens of 1 x {D} float32, and is \("):
        written(tmp_path, **both | {phase: change(both[phase])})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_behind_the_last_token_there_are_no_numbers(tmp_path, dtype):
    pre = torch.randn(N, D).to(getattr(torch, dtype))
    written(tmp_path, pre, pre, dtype)
    raw = (tmp_path / "hidden.zarr/sites/ln/pre/c.1.0").read_bytes()[:-4]
    stored = np.frombuffer(raw, np.uint16 if dtype == "bfloat16" else np.float32).reshape(8, D)
    found = as_numbers(stored, dtype)
    np.testing.assert_array_equal(found[: N - 8], pre[8:].float())
    assert np.isnan(found[N - 8 :]).all()


def test_what_fails_behind_the_last_batch_is_told(tmp_path, monkeypatch):
    finished, finish = threading.Event(), StoreWriter.finish

    def lost(disk, names):
        finished.wait(60)
        raise StoreError("the disk is lost")

    monkeypatch.setattr(StoreWriter, "finish", lambda *given: finish(*given) or finished.set())
    monkeypatch.setattr(Disk, "sync", lost)
    with pytest.raises(StoreError, match="the disk is lost"):
        written(tmp_path, torch.randn(N, D), torch.randn(N, D))


def test_no_more_than_a_few_rows_wait_to_be_committed(tmp_path, monkeypatch):
    """Each holds its statistics: on a disk that syncs slowly memory would grow with the tokens."""
    finished, finish, over = threading.Event(), StoreWriter.finish, list[bool]()
    monkeypatch.setattr(StoreWriter, "finish", lambda *given: finish(*given) or finished.set())
    monkeypatch.setattr(Disk, "sync", lambda disk, names: over.append(finished.wait(0 if over else 0.5)))
    written(tmp_path, torch.randn(N, D), torch.randn(N, D), chunk=1)
    assert len(over) == N
    assert not over[0]
