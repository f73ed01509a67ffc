"""A long text in pieces has the ids that it has as a whole."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from normgeo import encoding
from normgeo.encoding import Encoder
from normgeo.packing import Packed
from normgeo.tokens import SAMPLE

SPECIAL = ["<unk>", "</s>", "[CLS]", "[SEP]"]
TEXTS = [json.loads(line)["text"] for line in SAMPLE.read_text().splitlines()[:30]]
AROUND = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
KINDS = ["bytes", "words", "first", "likely", "whole"]


def made(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer: BPE of bytes, WordPiece, BPE of words, Unigram, and BPE of a text that is not split."""
    bpe, options = models.BPE(unk_token="<unk>"), {"vocab_size": 900, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "bytes":
        built, how = Tokenizer(bpe), pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    elif kind == "words":
        built, how = Tokenizer(models.WordPiece(unk_token="<unk>")), pre_tokenizers.BertPreTokenizer()
        built.normalizer, trainer = normalizers.BertNormalizer(), trainers.WordPieceTrainer(**options)
    elif kind == "likely":
        built, how = Tokenizer(models.Unigram()), pre_tokenizers.Metaspace()
        built.normalizer, trainer = normalizers.NFKC(), trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        built, how = Tokenizer(bpe), pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(**options)
    built.pre_tokenizer = how
    built.train_from_iterator(TEXTS[:6], trainer)  # Unigram takes five times as long for all
    if kind == "words":
        built.post_processor = AROUND
    if kind == "whole":
        built.pre_tokenizer = pre_tokenizers.Split("\0", "isolated")
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: made(kind) for kind in KINDS}


def cut(monkeypatch, piece=600, reach=200):
    monkeypatch.setattr(encoding, "PIECE", piece)
    monkeypatch.setattr(encoding, "REACH", reach)


def whole(tokenizer, text):
    ids = tokenizer(text, verbose=False)["input_ids"]
    return ids if ids[0] == 2 else [*ids, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_real_text_are_joined_to_the_whole(tokenizers, kind, monkeypatch):
    cut(monkeypatch)
    tokenizer, texts = tokenizers[kind], ["\n\n".join(TEXTS[:9]), TEXTS[9][:50], "".join(TEXTS[10:14])]
    found = list(Encoder(tokenizer)(texts))
    assert [number for number, _ in found if number != 1] == [
        number for number in (0, 2) for _ in range(len(texts[number]) // 600)
    ]  # joined at every seam, not given up
    for number, text in enumerate(texts):
        assert np.concatenate([ids for i, ids in found if i == number]).tolist() == whole(tokenizer, text)


WILD = st.lists(
    st.sampled_from([" ", "\n", "\n\n", " " * 90, "the ", "a" * 40, "é", "e\u0301", "😀", "ﬃ", "漢字", "</s>", "17"])
    | st.text(max_size=5),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_text_are_joined_to_the_whole(tokenizers, kind):
    """Also where few tokens are alike, and where text is that of special tokens."""

    @settings(max_examples=25, deadline=None)
    @given(WILD.map("".join), st.integers(0, 1000))
    def check(text, shift):
        with pytest.MonkeyPatch.context() as patch:
            cut(patch, 150, 60)
            text = TEXTS[0][:shift] + text + TEXTS[1][:1000]
            found = list(Encoder(tokenizers[kind])([text]))
            assert np.concatenate([ids for _, ids in found]).tolist() == whole(tokenizers[kind], text)

    check()


def merging(merges: list[tuple[str, str]], split, special=()) -> PreTrainedTokenizerFast:
    pieces = dict.fromkeys(["<unk>", *"0123456789ab ", *(a + b for a, b in merges)])
    built = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    built.pre_tokenizer = split
    built.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def likely_alike() -> PreTrainedTokenizerFast:
    """Unigram by which three letters alike are split in two ways that are equally likely."""
    rng = random.Random(0)
    scores = [("<unk>", 0.0), ("▁", -2.0), *((c * n, -2 - n - rng.random()) for c in "abcdefgh" for n in (1, 2))]
    built = Tokenizer(models.Unigram(scores, unk_id=0))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")


def test_what_is_before_decides_between_equal_splits():
    """By how the sum of all before is rounded, so that pieces are not joined within a word."""
    rng, tokenizer = random.Random(0), likely_alike()
    runs = [rng.choice("abcdefgh") * rng.choice([1, 3, 5, 3]) for _ in range(130_000)]
    for text in ("".join(runs), "".join(run + " " * (rng.random() < 0.2) for run in runs)):
        found = [ids for _, ids in Encoder(tokenizer)([text])]
        assert np.concatenate(found).tolist() == tokenizer(text)["input_ids"]
        assert len(found) == (len(text) // encoding.PIECE if " " in text else 1)


@pytest.mark.parametrize(
    ("split", "characters", "merges"),
    [
        (pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), "0123456789", [("1", "2"), ("4", "7")]),
        (pre_tokenizers.FixedLength(6), "0123", [("0", "1"), ("2", "3")]),
    ],
)
def test_words_that_are_counted_from_the_beginning_are_not_shifted(split, characters, merges, monkeypatch):
    cut(monkeypatch)
    rng, tokenizer = random.Random(1), merging(merges, split)
    text = "".join(rng.choice(characters) for _ in range(30_000))
    assert np.concatenate([ids for _, ids in Encoder(tokenizer)([text])]).tolist() == tokenizer(text)["input_ids"]


def test_white_space_goes_with_a_token_behind_it_however_far(monkeypatch):
    cut(monkeypatch)
    mask = AddedToken("<mask>", lstrip=True)
    tokenizer = merging([("a", "b")], pre_tokenizers.Split("\0", "isolated"), [mask])
    for before, behind in ((700, "<mask>"), (700, ""), (825, "<mask>")):  # the last where one piece sees letters
        text = "ab" * before + " " * 3000 + behind + "ab" * 400
        assert np.concatenate([ids for _, ids in Encoder(tokenizer)([text])]).tolist() == tokenizer(text)["input_ids"]


def test_a_text_that_cannot_be_joined_is_taken_as_a_whole(tokenizers, monkeypatch):
    """As where ids depend on how long the text is, from some place on."""
    cut(monkeypatch)
    inner, text = tokenizers["bytes"], "".join(TEXTS)

    class Turning:
        eos_token_id, sep_token_id, seen = 1, None, 0

        def __call__(self, given, **options):
            self.seen += sum(map(len, given)) if isinstance(given, list) else 0
            found = inner(given, **options)
            if "offset_mapping" not in found:
                return found
            for i, one in enumerate(given):
                at = text.index(one)
                if at > 2000:
                    found["input_ids"][i] = [(id + at) % 900 for id in found["input_ids"][i]]
            return found

    turning = Turning()
    found = [ids for _, ids in Encoder(turning)([text])]
    assert 1 < len(found) < len(text) // 600
    assert turning.seen < encoding.PIECES_AT_ONCE * 1000 < len(text) // 2  # no more pieces once it is known
    assert np.concatenate(found).tolist() == whole(inner, text)


def test_what_does_not_say_where_its_tokens_are_is_given_the_whole(tokenizers, monkeypatch):
    cut(monkeypatch)
    inner, text, seen = tokenizers["bytes"], "".join(TEXTS[:3]), []

    class Slow:
        eos_token_id, sep_token_id = 1, None

        def __call__(self, given, **options):
            if "return_offsets_mapping" in options:
                raise NotImplementedError("where tokens are is not known")
            seen.append(given)
            return inner(given, **options)

    ((number, ids),) = Encoder(Slow())([text])
    assert (number, ids.tolist()) == (0, whole(inner, text))
    assert seen[-1] == [text]


def test_of_a_long_text_no_more_is_tokenized_than_is_asked_for(tokenizers, monkeypatch):
    cut(monkeypatch)
    inner, seen = tokenizers["words"], []

    class Counting:
        eos_token_id, sep_token_id = None, 3

        def __call__(self, given, **options):
            seen.extend(given)
            return inner(given, **options)

    contexts = Packed(lambda: ["".join(TEXTS)], Counting(), 8)()
    seen.clear()
    assert next(contexts)[0].tolist() == whole(inner, "".join(TEXTS))[:8]
    assert sum(map(len, seen)) < 4000 < len("".join(TEXTS)) // 4


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_long_text_is_entered_at_marks_within_it(tokenizers, kind, monkeypatch):
    cut(monkeypatch)
    monkeypatch.setattr("normgeo.packing.MARK_EVERY", 300)
    texts = [TEXTS[0][:900], "".join(TEXTS[1:9])[:12_000], TEXTS[9][:900]]
    make = lambda: Packed(lambda: texts, tokenizers[kind], 16)  # noqa: E731
    read = make()
    expected = [(ids.tolist(), owner.tolist()) for ids, owner in read()]
    ids = [i for context, _ in expected for i in context]
    assert ids == [i for text in texts for i in whole(tokenizers[kind], text)]
    assert [owner for _, of in expected for owner in of] == [
        number for number, text in enumerate(texts) for _ in whole(tokenizers[kind], text)
    ]
    assert sum(document == 1 for _, document, _ in read.marks) > 3
    for start in range(0, len(expected), len(expected) // 9):
        fresh = make()
        fresh.marks[:] = read.marks
        assert [(ids.tolist(), owner.tolist()) for ids, owner in fresh(16 * start)] == expected[start:]


def test_a_tokenizer_is_given_little_at_once(tokenizers, monkeypatch):
    """What it keeps for each character is a hundred times as large."""
    cut(monkeypatch)
    inner, most = tokenizers["bytes"], []

    class Counting:
        eos_token_id, sep_token_id = 1, None

        def __call__(self, given, **options):
            most.append(sum(map(len, given)))
            return inner(given, **options)

    assert sum(len(ids) for _, ids in Encoder(Counting())(["".join(TEXTS), TEXTS[0] * 9])) > 20_000
    assert max(most) <= encoding.PIECES_AT_ONCE * (600 + 2 * 200) + 599  # the last has what is left over
