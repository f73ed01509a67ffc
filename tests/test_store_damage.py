"""Damage and mixtures are named and refused."""

import random
import shutil

import numpy as np
import pytest
import tokenizers
from stores import a_chunk, captured, unfinished
from transformers import PreTrainedTokenizerFast
from zoo import tiny

from normgeo import HiddenStateStore, capture
from normgeo.capture import resume_capture
from normgeo.errors import RunError, StoreError
from normgeo.models import tokenizer_digest
from normgeo.scan import angles_from_store
from normgeo.storage import Disk
from normgeo.store_check import verify
from normgeo.tokens import load_tokens

pytestmark = pytest.mark.usefixtures("no_figures")


def test_a_flipped_bit_is_named_wherever_it_is(copy):
    metadata = sorted((copy / "hidden.zarr").rglob("zarr.json"))[3]
    for file in (a_chunk(copy), metadata, copy / "commits/00000003.json", next((copy / "state").iterdir())):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        _, problems = verify(copy)
        assert len(problems) == 1
        assert str(file) in problems[0]
        if file == a_chunk(copy):
            with pytest.raises(StoreError, match=rf"{file.name} is damaged"):
                angles_from_store(copy, null=4, progress=False)
            store, given = HiddenStateStore(copy), []
            with pytest.raises(StoreError, match=rf"{file.name} is damaged"):
                given.extend(store.open(file.parent.parent.name).batches(1))
            assert len(given) == store.commit_log[1].stop  # none of the third chunk
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    assert verify(copy)[1] == []


def test_truncated_and_missing_chunks_and_commits_are_named(copy):
    file, commit = a_chunk(copy), copy / "commits/00000004.json"
    file.write_bytes(file.read_bytes()[:-100])
    commit.unlink()
    a_chunk(copy, 1).unlink()
    problems = " ".join(verify(copy)[1])
    assert f"{file} has" in problems
    assert f"{commit} is missing" in problems
    assert "c.1.0 is missing" in problems
    assert HiddenStateStore(copy).n_tokens == HiddenStateStore(copy).commit_log[3].stop


def test_stores_are_never_mixed(home, copy, tmp_path):
    other = captured(home, tmp_path / "other", "other")
    shutil.copy(other / "commits/00000002.json", copy / "commits/00000002.json")
    with pytest.raises(StoreError, match="belongs to another store"):
        HiddenStateStore(copy)
    unfinished(other)
    shutil.copytree(home / "gpt2", home / "other", dirs_exist_ok=True)
    with pytest.raises(RunError, match="another weights sha256"):
        resume_capture(other, progress=False)
    tiny("gpt2", seed=1).save_pretrained(home / "other")


def test_other_tokens_are_refused_on_resume(home, copy):
    found = HiddenStateStore(copy)
    others = load_tokens(np.load(home / "ids.npy") + 1)
    with pytest.raises(StoreError, match="another tokenizer or other data"):
        capture._check_tokens(found, others)


def test_a_second_writer_is_refused(home, tmp_path, copy):
    unfinished(copy)
    with Disk(copy).writing(), pytest.raises(StoreError, match="another process writes"):
        resume_capture(copy, progress=False)


# --- tokenizers -------------------------------------------------------------------------------------------------------

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then"]


def word_tokenizer(words):
    """Words are ids from 3 on, in this order."""
    vocabulary = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2} | {word: i for i, word in enumerate(words, 3)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", bos_token="[BOS]", eos_token="[EOS]")


def test_another_tokenizer_is_refused(home, tmp_path):
    model, text = shutil.copytree(home / "gpt2", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=300)))
    word_tokenizer(WORDS).save_pretrained(model)
    path = captured(home, tmp_path / "s", model, data=str(text), n=200, context=20)
    unfinished(path)
    (path / "commits/00000001.json").unlink()
    word_tokenizer(WORDS[::-1]).save_pretrained(model)  # as many words, with other ids
    with pytest.raises(RunError, match="another tokenizer sha256"):
        resume_capture(path, progress=False)
    word_tokenizer(WORDS).save_pretrained(model)
    resume_capture(path, progress=False)
    assert HiddenStateStore(path).complete


def test_a_tokenizers_hash_is_of_all_that_decides_and_of_nothing_else():
    one, digest = word_tokenizer(WORDS), tokenizer_digest(word_tokenizer(WORDS))
    one("the cat sat", max_length=1, truncation=True)
    assert tokenizer_digest(one) == digest
    one.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    assert tokenizer_digest(one) != digest
    another = word_tokenizer(WORDS)
    another.eos_token = "the"
    assert tokenizer_digest(another) != digest
