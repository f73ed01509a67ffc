"""Texts in memory: lists and data sets, as tokens."""

import json
import re

import datasets
import numpy as np
import pandas as pd
import pytest
from test_tokens import TEXTS, everything

from normgeo.errors import DataError
from normgeo.tokens import load_tokens


def test_texts_in_memory_are_those_of_a_file(tokenizer, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wanted, _ = everything(load_tokens(tmp_path / "texts.jsonl", tokenizer, 8))
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    digests = set()
    for given in (
        TEXTS,
        tuple(TEXTS),
        np.array(TEXTS),
        pd.Series(TEXTS),
        rows,
        rows["text"],
        rows.to_iterable_dataset(),
    ):
        stream = load_tokens(given, tokenizer, 8)
        for _ in range(2):  # it can be read again
            assert np.array_equal(everything(stream)[0], wanted)
        digests.add(stream.digest)
    assert len(digests) == 1
    assert digests != {load_tokens(TEXTS[:2], tokenizer, 8).digest}
    assert len(everything(load_tokens(TEXTS, tokenizer, 8, exclude=TEXTS[:1]))[0]) < len(wanted)


def test_where_one_text_ends_is_part_of_what_texts_are(tokenizer):
    digests = {load_tokens(texts, tokenizer, 8).digest for texts in (["ab", "c"], ["a", "bc"], ["abc"])}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (iter(TEXTS), "an iterator can be read once"),
        ((text for text in TEXTS), "an iterator can be read once"),
        ({"input_ids": [[1, 2]]}, "received a dict with input_ids; give its token ids alone"),
        (
            datasets.DatasetDict({part: datasets.Dataset.from_dict({"text": TEXTS}) for part in ("train", "test")}),
            "received the parts train, test of a data set; give one, as data['train']",
        ),
        (pd.DataFrame({"text": TEXTS}), "received a DataFrame; give its column of text"),
        ([{"body": "a"}], 'rows with body have no "text"'),
        ([{"text": TEXTS[0]}, {"body": "a"}], "text 1 should be a string"),
        (["", " "], "has no text in it"),
        ([], "must be a non-empty"),
        ({}, "received a dict with"),
    ],
)
def test_what_are_no_texts_is_said(tokenizer, given, said):
    with pytest.raises(DataError, match=re.escape(said)):
        load_tokens(given, tokenizer, 8)


def test_texts_need_a_tokenizer():
    with pytest.raises(DataError, match="the given texts cannot become tokens: the model has no tokenizer"):
        load_tokens(TEXTS)
