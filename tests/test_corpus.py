"""Training data: the seed's order, streams that resume, and what is left out."""

import copy
import json

import datasets
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from training_zoo import text_like

from normgeo.errors import DataError
from normgeo.tokens import TokenStream, load_tokens
from normgeo.training import runs
from normgeo.training.corpus import Shuffled, Streamed, open_corpus
from normgeo.training.runs import TrainConfig


def test_ids_come_in_an_order_that_is_a_function_of_the_seed():
    first_corpus, again = Shuffled(text_like(), 16, 0), Shuffled(text_like(), 16, 0)
    first = first_corpus.take(300)  # more than one pass
    assert not torch.equal(first, Shuffled(text_like(), 16, 1).take(300))
    again.seek({"next": 250})
    assert torch.equal(again.take(50), first[250:])
    assert again.position() == first_corpus.position() == {"next": 300}
    again.seek()
    assert torch.equal(again.take(300), first)
    with pytest.raises(DataError, match="training needs more than 16 tokens"):
        Shuffled(text_like(16), 16, 0)


def test_the_largest_id_may_come_first():
    assert Shuffled(TokenStream.from_array([90] + [1] * 5000, context=8), 8, 0).largest == 90


def test_ids_are_in_memory_once(peak_memory):
    n = 200_000
    tokens = TokenStream.from_array(np.arange(n) % 48, context=16)
    corpus, most = peak_memory(lambda: Shuffled(tokens, 16, 0))
    assert 4 * n < most < 6 * n
    assert corpus.take(1).shape == (1, 16)


def with_a_beginning(tokenizer):
    """One that puts a token of its own before every text."""
    again = copy.deepcopy(tokenizer)
    again.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", again.eos_token_id)]
    )
    return again


@pytest.mark.parametrize("change", [lambda same: same, with_a_beginning])
def test_what_is_streamed_is_packed_as_what_is_in_files(change, tokenizer):
    tokenizer, texts = change(tokenizer), ["A river.", " ", "A fox is quick.", "A dog."]
    rows = datasets.Dataset.from_list([{"text": text} for text in texts])
    ids = np.concatenate([ids for ids, _ in load_tokens(texts, tokenizer, 4).contexts(0)])
    streamed = Streamed(rows.to_iterable_dataset, tokenizer, 4, "x").take(len(ids) // 4)
    assert streamed.flatten().tolist() == ids[: len(ids) // 4 * 4].tolist()


def test_every_pass_cuts_the_text_at_another_place():
    """So that in time every token is predicted from every length of what is before it."""
    corpus = Shuffled(TokenStream.from_array(np.arange(31), context=8), 8, 0)
    passes = [sorted(corpus.take(3)[:, 0].tolist()) for _ in range(40)]
    assert all(rest == [first + 8, first + 16] for first, *rest in passes)
    assert {first for first, *_ in passes} == set(range(7))


def test_rows_of_an_array_stay_sequences_of_their_own():
    rows = np.repeat(np.arange(50)[:, None], 40, axis=1)
    corpus = Shuffled(TokenStream.from_array(rows, context=16), 16, 0)
    assert corpus.packing == "each row is a sequence, cut into whole contexts"
    first = corpus.take(100)  # one pass
    assert (first == first[:, :1]).all()
    assert sorted(first[:, 0].tolist()) == sorted([*range(50), *range(50)])
    assert not torch.equal(corpus.take(100), first)
    assert Shuffled(text_like(), 16, 0).packing == "each row is a sequence"  # there is one, which is text
    with pytest.raises(DataError, match="rows of at least 64 tokens, one context; array has 2,000 in 50 rows; give"):
        Shuffled(TokenStream.from_array(rows, context=64), 64, 0)


def test_a_stream_that_was_not_read_since_it_was_sent_somewhere_is_still_there(tokenizer):
    """A long document is enough for several steps, and a run may be interrupted twice within it."""
    documents = [{"text": f"Number {i}. " + "A fox and a dog. " * 40} for i in range(9)]
    opened = lambda: datasets.Dataset.from_list(documents).to_iterable_dataset()  # noqa: E731
    whole, parts = Streamed(opened, tokenizer, 16, "x"), Streamed(opened, tokenizer, 16, "x")
    expected = whole.take(150)
    found = [parts.take(1)]
    for rows in (1, 1, 1, 60, 1, 1, 84):
        position = json.loads(json.dumps(parts.position()))
        parts = Streamed(opened, tokenizer, 16, "x")
        parts.seek(position)
        found.append(parts.take(rows))
    assert torch.equal(torch.cat(found), expected)


def test_a_stream_resumes_where_it_was(tmp_path, tokenizer):
    lines = [json.dumps({"text": f"Number {i}. " + "A fox and a dog. " * (i % 5)}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))

    def dataset():
        return datasets.load_dataset(
            "json", data_files=str(tmp_path / "text.jsonl"), split="train", streaming=True, cache_dir=str(tmp_path)
        )

    stream = Streamed(dataset, tokenizer, 16, "test", {"Number 0. "})
    stream.take(7)
    position = json.loads(json.dumps(stream.position()))
    after = stream.take(200)  # into the next pass
    resumed = Streamed(dataset, tokenizer, 16, "test", {"Number 0. "})
    resumed.seek(position)
    assert torch.equal(resumed.take(200), after)
    assert (after == tokenizer.eos_token_id).sum() > 20
    with pytest.raises(DataError, match=r"could not stream .*--data a file"):
        open_corpus("openwebtext", tokenizer, 16, 0)

    def lost():
        yield {"text": "A fox."}
        raise ConnectionError("the line is down")

    with pytest.raises(DataError, match=r"could not stream test: .*the line is down"):
        Streamed(lost, tokenizer, 16, "test").take(1)


def test_a_stream_resumes_after_any_context_also_at_the_end_of_a_pass(tokenizer):
    documents = [{"text": f"Number {i}. " + "A fox and a dog. " * 5 * i} for i in range(3)]
    opened = lambda: datasets.Dataset.from_list(documents).to_iterable_dataset()  # noqa: E731
    expected = Streamed(opened, tokenizer, 16, "x").take(40)
    for rows in range(1, 20):
        stopped, resumed = Streamed(opened, tokenizer, 16, "x"), Streamed(opened, tokenizer, 16, "x")
        stopped.take(rows)
        resumed.seek(json.loads(json.dumps(stopped.position())))
        assert torch.equal(resumed.take(20), expected[rows : rows + 20])
        for corpus in (stopped, resumed):
            corpus.seek()
            assert torch.equal(corpus.take(40), expected)


def test_a_stream_of_which_nothing_is_left_is_refused(tokenizer):
    documents = [{"text": "A fox."}, {"text": "  "}]
    opened = lambda: datasets.Dataset.from_list(documents).to_iterable_dataset()  # noqa: E731
    with pytest.raises(DataError, match="has no text in it, beside what is excluded"):
        Streamed(opened, tokenizer, 16, "x", {"A fox."}).take(1)
    with pytest.raises(DataError, match="has no text in it"):
        Streamed(lambda: datasets.Dataset.from_list(documents[1:]).to_iterable_dataset(), tokenizer, 16, "x").take(1)
    assert Streamed(opened, tokenizer, 16, "x").take(3).shape == (3, 16)  # of many passes


def test_a_tokenizer_is_not_learnt_from_text_that_is_left_out(tmp_path):
    texts = [f"{word} " * 50 for word in ("alpha", "bravo", "heldouthere")]
    for name, part in (("all", texts), ("some", texts[:2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))

    def learnt(name, excluded):
        config = TrainConfig(data=str(tmp_path / f"{name}.jsonl"), vocabulary=280)
        return runs._tokenizer(config, None, excluded).get_vocab()

    assert learnt("all", {texts[2]}) == learnt("some", set()) != learnt("all", set())
