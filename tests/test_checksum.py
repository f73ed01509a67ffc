"""Checksums in the pass that copies are CRC-32C, and the copies are whole."""

import itertools

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normgeo.kernels import checksum, cpu

BLOCK = 3 * 256 * 64  # of the kernel
SIZES = (
    st.integers(0, 200)
    | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 9, 7 * BLOCK])
    | st.integers(0, 1 << 20)
)


@pytest.fixture(params=["compiled", "without a compiler"])
def ways(request, monkeypatch):
    if request.param == "compiled":
        assert checksum.loaded() is not None, "needs a C++ compiler and an instruction for CRC-32C"
    else:
        monkeypatch.setattr(checksum, "loaded", lambda: None)


def some(n, seed):
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.usefixtures("ways")
@given(SIZES, st.integers(0, 70), st.integers(0, 70), st.booleans(), st.integers(0, 99))
def test_the_copy_is_whole_and_the_checksum_is_its(n, before, after, parallel, seed):
    source, into = some(before + n, seed)[before:], torch.zeros(after + n + 64, dtype=torch.uint8)
    place = into[after : after + n]
    expected = google_crc32c.value(bytes(source.numpy()))
    assert checksum.copied(source, parallel=parallel) == [expected]
    assert checksum.copied(source, place, parallel=parallel) == [expected]
    assert torch.equal(place, source)
    assert not into[:after].any()
    assert not into[after + n :].any()


@pytest.mark.usefixtures("ways")
@given(st.lists(st.integers(0, 2 * BLOCK + 9), max_size=3), st.integers(0, 99))
def test_parts_are_copied_to_where_they_were(sizes, seed):
    source = some(sum(sizes) + 11, seed)
    into, ends = torch.zeros_like(source), [0, *itertools.accumulate(sizes)]
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    found = checksum.copied(source, into, parts)
    assert found == [google_crc32c.value(bytes(source[part].numpy())) for part in parts]
    assert torch.equal(into[: ends[-1]], source[: ends[-1]])
    assert not into[ends[-1] :].any()


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_checksums_of_parts_are_joined(a, b):
    assert checksum.joined(google_crc32c.value(a), google_crc32c.value(b), len(b)) == google_crc32c.value(a + b)


def test_joining_the_last_part_of_a_large_chunk():
    a, b = bytes(some(100, 0).numpy()), bytes((32 << 20) + 5)
    assert checksum.joined(google_crc32c.value(a), google_crc32c.value(b), len(b)) == google_crc32c.value(a + b)


def test_without_torch_s_threads_the_same(monkeypatch):
    x = some(5 * BLOCK + 3, 1)
    with_threads = checksum.copied(x)
    monkeypatch.setattr(cpu, "parallel_for", lambda: None)
    assert checksum.copied(x) == with_threads
