"""No more of a text is tokenized than is asked for, and ids of a file are those that were in it when it was opened."""

import os

import numpy as np
import pytest
from test_tokens import TEXTS, everything

from normgeo import packing
from normgeo.errors import DataError
from normgeo.tokens import load_tokens


@pytest.mark.parametrize("counted", [False, True])
def test_what_is_behind_the_last_token_is_not_tokenized(tokenizer, counted):
    """It may be a book, and where a text is one document, it is all of it."""
    texts, asked = [TEXTS[0], TEXTS[2] * 9], []

    class Asked:
        eos_token_id = sep_token_id = None

        def __call__(self, given, **options):
            asked.extend([given] if isinstance(given, str) else given)
            return tokenizer(given, **options)

    n_tokens = len(tokenizer(TEXTS[0])["input_ids"])
    stream = load_tokens(texts, Asked(), context=n_tokens)
    assert TEXTS[0] not in asked
    if counted:
        stream, found = stream.counted(n_tokens)
        assert found == n_tokens
    for limit in (n_tokens, 3):
        assert len(everything(stream, limit)[0]) == limit
    assert texts[1] not in asked
    assert asked.count(TEXTS[0]) == (1 if counted else 2)


def test_a_text_of_which_no_tokens_are_made_is_refused():
    class Nothing:
        eos_token_id = sep_token_id = None

        def __call__(self, given, **_):
            return {"input_ids": [] if isinstance(given, str) else [[] for _ in given]}

    for limit, says in ((None, "holds no tokens"), (4, "ends after 0 tokens, 4 were asked for")):
        with pytest.raises(DataError, match=says):
            everything(load_tokens(TEXTS, Nothing(), context=8), limit)


def test_a_context_of_many_documents_is_joined_once(tokenizer, monkeypatch):
    """Joined anew with each, a context of 131,072 tokens would be copied some ten thousand times."""
    joined, concatenate = [], np.concatenate
    monkeypatch.setattr(packing.np, "concatenate", lambda parts: joined.append(len(parts)) or concatenate(parts))
    texts = [TEXTS[0]] * 300
    n_tokens = len(tokenizer(TEXTS[0])["input_ids"]) * 300
    stream = load_tokens(texts, tokenizer, context=n_tokens)
    ids, owner = next(stream.contexts(0))
    assert owner.tolist() == sorted(owner.tolist())
    assert len(ids) == n_tokens
    assert len(joined) < 30


@pytest.mark.parametrize("most", [0, 2, 9])
def test_contexts_of_which_some_are_kept_come_as_they_were_from_any_beginning(most):
    """Also where a pass begins behind all that are kept, as the share of another process does."""
    made = []
    contexts = lambda start: (made.append(i) or i for i in range(start // 3, 5))  # noqa: E731
    again = packing.remembered(contexts, 3, most)
    for start in (3, 0, 1, 6, 0):
        assert list(again(3 * start)) == [0, 1, 2, 3, 4][start:]
    assert made == [3, 4, *range(5)] + ([] if most > 5 else [*range(max(1, most), 5), *range(most, 5)])


def test_ids_that_were_others_as_they_were_copied_are_copied_again(tmp_path):
    path, ids = tmp_path / "ids.npy", np.arange(40).reshape(4, 10)
    np.save(path, ids)
    os.utime(path, (0, 0))
    found, late = np.load(path, mmap_mode="r"), []

    def contexts(start=0):
        for i in range(start // 10, 4):
            if once := i == 2 and not late:
                np.save(path, ids + 1)
                late.append(i)
            copy = np.array(found[i])
            if once:
                np.save(path, ids)
            yield copy, np.zeros(10, np.int64)

    again = packing.watched(path)(contexts, lambda: bool((found == ids).all()))(10)
    np.testing.assert_array_equal([context for context, _ in again], ids[1:])
    assert late == [2]


def test_ids_in_a_file_that_is_written_to_are_refused_and_one_of_its_name_does_not_matter(tmp_path):
    """They would be measured under the digest of those that were there. The same ids, written again, are these."""
    data, ids = tmp_path / "ids.npy", np.arange(40).reshape(4, 10)
    np.save(data, ids)
    for write, new, expected in ((data, ids, ids[1]), (tmp_path / "new.npy", ids + 1, ids[1]), (data, ids, None)):
        os.utime(data, (0, 0))  # it is old: what is written within one tick of a file system's clock has the same time
        batches = load_tokens(data).batches(None, 1)
        next(batches)
        np.save(write, new)
        write.replace(data)
        if expected is not None:
            np.testing.assert_array_equal(next(batches).ids[0], expected)
            continue
        with pytest.raises(DataError, match=r"ids.npy was written to while it was read"):
            next(batches)
