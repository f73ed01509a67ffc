import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgeo import packing
from normgeo.documents import read_documents
from normgeo.errors import DataError
from normgeo.tokens import TokenStream, load_tokens

TEXTS = [
    "The first document is about rivers.",
    "A second one.",
    "And the third, which is the longest of the three here.",
]


def everything(stream, limit=None, rows=3, start=0):
    batches = list(stream.batches(limit, rows, start))
    return (np.concatenate([b.ids.ravel() for b in batches]) if batches else np.empty(0, int)), batches


# --- arrays and batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 8, 24, 25, 31, 80])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_exactly_as_many_tokens_come_as_are_asked_for(limit, rows):
    ids = np.arange(80).reshape(4, 20)
    stream = TokenStream.from_array(ids, context=8)
    found, batches = everything(stream, limit, rows)
    assert found.tolist() == list(range(limit))
    assert [b.start for b in batches] == np.cumsum([0, *(b.n_tokens for b in batches[:-1])]).tolist()
    assert all(b.ids.shape[0] <= rows and b.ids.shape[1] <= 8 for b in batches)
    assert all(b.ids.shape == b.document.shape == b.position.shape for b in batches)


def test_all_tokens_come_without_a_limit_and_none_is_padding():
    stream = TokenStream.from_array(np.arange(1, 61).reshape(3, 20), context=8)
    found, batches = everything(stream)
    assert found.tolist() == list(range(1, 61))
    assert {b.ids.shape[1] for b in batches} == {8, 4}
    assert stream.n_tokens == 60
    documents = np.concatenate([b.document.ravel() for b in batches])
    assert documents.tolist() == [i for i in range(3) for _ in range(20)]
    assert batches[0].position[0].tolist() == list(range(8))


def test_too_few_tokens_say_how_many_there_are():
    stream = TokenStream.from_array(np.arange(40).reshape(2, 20))
    with pytest.raises(DataError, match="ends after 40 tokens, 41 were asked for"):
        everything(stream, 41)


def test_resuming_gives_the_remaining_batches_as_they_were():
    stream = TokenStream.from_array(np.arange(200).reshape(2, 100), context=10)
    _, whole = everything(stream, 175, rows=4)
    for k, batch in enumerate(whole):
        _, rest = everything(stream, 175, rows=4, start=batch.start)
        assert [(b.start, b.ids.tolist()) for b in rest] == [(b.start, b.ids.tolist()) for b in whole[k:]]
    assert everything(stream, 175, start=180)[1] == []


def test_a_stream_can_be_read_again_and_its_digest_names_its_content():
    a, b = TokenStream.from_array([[1, 2, 3, 4]]), TokenStream.from_array([[1, 2], [3, 4]])
    assert everything(a)[0].tolist() == everything(a)[0].tolist() == [1, 2, 3, 4]
    assert a.digest == TokenStream.from_array(np.array([[1, 2, 3, 4]], np.int16)).digest
    assert a.digest != b.digest


@pytest.mark.parametrize(
    "bad", [[], [[]], [[1.0, 2.0]], [[1, -1]], [["a"]], [[[1, 2]]], [[1, 2], [3]], [True, False], np.array([None])]
)
def test_arrays_that_are_no_ids_are_refused(bad):
    with pytest.raises(DataError, match="integers >= 0"):
        TokenStream.from_array(bad)


# --- text ----------------------------------------------------------------------------------------------------------


def write(folder, suffix, texts=TEXTS):
    path, suffix = folder / f"data{suffix}", suffix.lower()
    if suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps({"text": t, "title": "x"}) for t in texts) + "\n")
    elif suffix == ".parquet":
        pq.write_table(pa.table({"title": ["x"] * len(texts), "text": texts}), path)
    else:
        path.write_text(texts[0])
    return path


def packed(tokenizer, texts):
    return [i for t in texts for i in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt", ".JSONL", ".Parquet", ".TXT"])
def test_text_is_packed_with_a_separator_after_each_document(tmp_path, tokenizer, suffix):
    texts = TEXTS[:1] if suffix.lower() == ".txt" else TEXTS
    path = write(tmp_path, suffix)
    assert list(read_documents(path)) == texts
    stream = load_tokens(str(path), tokenizer, 8)
    expected = packed(tokenizer, texts)
    found, batches = everything(stream)
    assert found.tolist() == expected
    assert all(b.ids.shape[1] == 8 for b in batches[:-1])
    documents = np.concatenate([b.document.ravel() for b in batches])
    assert [(documents == i).sum() for i in range(len(texts))] == [len(tokenizer(t)["input_ids"]) + 1 for t in texts]
    assert f"token {tokenizer.eos_token_id} after each" in stream.packing
    assert (stream.context, stream.source) == (8, str(path))


def test_a_tokenizer_that_adds_special_tokens_separates_documents_itself(tmp_path):
    class Bracketing:
        eos_token_id, sep_token_id = None, 2

        def __call__(self, text, add_special_tokens=True, **_):
            if isinstance(text, list):
                return {"input_ids": [self(t)["input_ids"] for t in text]}
            ids = [10 + len(word) for word in text.split()]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    stream = load_tokens(write(tmp_path, ".jsonl", ["a bb", "ccc"]), Bracketing(), 100)
    assert everything(stream)[0].tolist() == [1, 11, 12, 2, 1, 13, 2]
    assert "special tokens" in stream.packing


def test_documents_can_be_left_out_by_their_text(tmp_path, tokenizer):
    stream = load_tokens(write(tmp_path, ".jsonl"), tokenizer, 8, exclude={TEXTS[1]})
    assert everything(stream)[0].tolist() == packed(tokenizer, [TEXTS[0], TEXTS[2]])
    stream = load_tokens(["a b", " a b\n", "a  b"], tokenizer, 8, exclude={"a b"})  # by the whole of it
    assert everything(stream)[0].tolist() == packed(tokenizer, [" a b\n", "a  b"])


@pytest.mark.parametrize(("suffix", "blank"), [(".jsonl", ["  \n"]), (".parquet", [None, "", "  \n"])])
def test_blank_documents_are_skipped(tmp_path, tokenizer, suffix, blank):
    stream = load_tokens(write(tmp_path, suffix, [TEXTS[0], *blank, TEXTS[1], *blank]), tokenizer, 8)
    assert everything(stream)[0].tolist() == packed(tokenizer, TEXTS[:2])


def test_lines_are_the_same_whatever_ends_them_or_marks_the_order_of_their_bytes(tmp_path, tokenizer):
    found = []
    for end, encoding in (("\n", "utf-8"), ("\r\n", "utf-8"), ("\r", "utf-8"), ("\n", "utf-8-sig")):
        (tmp_path / "data.txt").write_bytes(end.join(TEXTS).encode(encoding))
        found.append(everything(load_tokens(tmp_path / "data.txt", tokenizer, 8))[0].tolist())
    assert found[1:] == found[:1] * 3


def test_text_resumes_where_it_stopped(tmp_path, tokenizer):
    stream = load_tokens(write(tmp_path, ".jsonl", TEXTS * 9), tokenizer, 8)
    _, whole = everything(stream, 150, rows=4)
    _, rest = everything(stream, 150, rows=4, start=whole[2].start)
    assert [b.ids.tolist() for b in rest] == [b.ids.tolist() for b in whole[2:]]
    assert sum(b.n_tokens for b in whole) == 150


@pytest.fixture
def pieces(tmp_path, tokenizer, monkeypatch):
    """Text in many documents of many lengths, with a mark at least every 40 tokens, and all of its contexts of 8."""
    monkeypatch.setattr(packing, "MARK_EVERY", 40)
    texts = ["  ", *(" ".join(TEXTS[i % 3].split()[: i % 7]) * (1 + i % 11) for i in range(60))]
    make = lambda: load_tokens(write(tmp_path, ".jsonl", texts), tokenizer, 8)  # noqa: E731
    return make, [(ids.tolist(), document.tolist()) for ids, document in make().contexts(0)]


def as_lists(contexts):
    return [(ids.tolist(), document.tolist()) for ids, document in contexts]


def test_text_is_entered_anywhere_and_from_the_marks_of_another_pass(pieces):
    make, expected = pieces
    read = make()
    list(read.contexts(0))
    assert len(read.marks) > 10
    for i in range(len(expected) + 2):
        fresh = make()
        assert as_lists(fresh.contexts(8 * i)) == expected[i:]
        fresh.marks[:] = read.marks[: 1 + i % len(read.marks)]
        assert as_lists(fresh.contexts(8 * i)) == as_lists(read.contexts(8 * i)) == expected[i:]


def test_what_comes_before_a_mark_is_not_tokenized_again(pieces, monkeypatch):
    make, expected = pieces
    stream = make()
    list(stream.contexts(0))
    encoded = []
    encode = packing.Packed._encoded
    monkeypatch.setattr(packing.Packed, "_encoded", lambda self, first: encoded.append(first) or encode(self, first))
    last = len(expected) - 1
    assert as_lists(stream.contexts(8 * last)) == expected[last:]
    assert encoded == [stream.marks[-1][1]]
    assert encoded[0] > 45


@pytest.mark.parametrize("kept", [0, 96, 1 << 22])  # of whole contexts, as the real number
@pytest.mark.parametrize("most", [1, 8, 96, 10_000])
def test_counting_changes_nothing_that_comes(pieces, monkeypatch, kept, most):
    make, expected = pieces
    monkeypatch.setattr("normgeo.tokens.KEPT_TOKENS", kept)
    total = sum(len(ids) for ids, _ in expected)
    stream, there = make().counted(most)
    assert there == min(total, most)
    for i in range(len(expected) + 2):
        assert as_lists(stream.contexts(8 * i)) == expected[i:]


def test_a_short_text_is_tokenized_once(pieces, monkeypatch):
    make, expected = pieces
    stream, there = make().counted(10_000)
    monkeypatch.setattr(packing.Packed, "_encoded", None)
    assert as_lists(stream.contexts(0)) == expected
    assert next(batch.start for batch in stream.batches(there, 4, 32)) == 32


def test_batches_from_where_one_begins_are_as_they_were(pieces):
    make, _ = pieces
    for stream in (make(), TokenStream.from_array(np.arange(600).reshape(5, 120), context=8),
                   TokenStream.from_array(np.arange(600).reshape(5, 120), context=50)):  # fmt: skip
        _, whole = everything(stream, 380, rows=3)
        for token in range(380):
            start = stream.batch_start(token, 3)
            _, rest = everything(stream, 380, rows=3, start=start)
            assert start <= token
            assert [(b.start, b.ids.tolist()) for b in rest] == [
                (b.start, b.ids.tolist()) for b in whole if b.start >= start
            ]


def test_ids_in_a_file_are_not_read_whole(tmp_path, peak_memory):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(4_000_000, dtype=np.uint16).reshape(1, -1))
    (some, _), peak = peak_memory(lambda: everything(load_tokens(path, context=1000), 5000))
    assert some.tolist() == list(range(5000))
    assert peak < 20e6
    assert load_tokens(path, context=1000).digest == TokenStream.from_array(np.load(path)).digest


def test_the_embedded_sample_is_real_text(tokenizer):
    stream = load_tokens("sample", tokenizer, 64)
    found, _ = everything(stream, 1000)
    assert len(found) == 1000
    assert len(set(found.tolist())) > 100
    assert stream.source == "sample"
    assert len(stream.digest) == 64


@pytest.mark.parametrize(("dtype", "suffix"), [(np.int64, ".npy"), (np.int32, ".npy"), (np.uint16, ".NPY")])
def test_ids_come_from_npy_without_a_tokenizer(tmp_path, dtype, suffix):
    np.save(tmp_path / "ids.npy", np.arange(40, dtype=dtype).reshape(2, 20))
    path = (tmp_path / "ids.npy").rename(tmp_path / f"ids{suffix}")
    stream = load_tokens(path, context=15)
    found, batches = everything(stream)
    assert found.tolist() == list(range(40))
    assert found.dtype == np.int64
    assert stream.source == str(path)
    assert batches[0].ids.shape == (1, 15)


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(path, tokenizer, match):
    with pytest.raises(DataError, match=match):
        everything(load_tokens(path, tokenizer, 8))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt", ".npy"])
def test_a_missing_file_is_named(tmp_path, tokenizer, suffix):
    refused(tmp_path / f"nowhere{suffix}", tokenizer, f"nowhere{suffix}")


@pytest.mark.parametrize("line", ["{not json", "17", "null", '["text"]', '{"title": "x"}', '{"text": 5}'])
def test_a_bad_line_is_named_with_its_number(tmp_path, tokenizer, line):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": TEXTS[0]}) + "\n" + line + "\n")
    refused(path, tokenizer, r'data\.jsonl, line 2: .*"text"')


def test_half_a_character_is_named_with_its_line(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "hello \\ud800 world"}\n')
    refused(path, tokenizer, r"data\.jsonl, line 2: '.ud800' is half a character")


LATIN = {".jsonl": b'{"text": "good"}\n{"text": "caf\xe9 au lait"}\n', ".txt": b"caf\xe9 au lait"}


@pytest.mark.parametrize(
    ("suffix", "where"), [(".jsonl", r"latin\.jsonl, line 2 .*byte 13 "), (".txt", r"latin\.txt .*byte 3 ")]
)
def test_text_of_another_encoding_is_refused(tmp_path, tokenizer, suffix, where):
    (tmp_path / f"latin{suffix}").write_bytes(LATIN[suffix])
    refused(tmp_path / f"latin{suffix}", tokenizer, where + r"is 0xe9\).*iconv")


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_mark_of_the_byte_order_is_no_text(tmp_path, tokenizer, suffix):
    plain = write(tmp_path, suffix)
    marked = tmp_path / f"marked{suffix}"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    found, expected = (everything(load_tokens(path, tokenizer, 8))[0].tolist() for path in (marked, plain))
    assert found == expected


def test_what_pandas_calls_categories_are_texts_too(tmp_path, tokenizer):
    path = write(tmp_path, ".parquet")
    plain, _ = everything(load_tokens(path, tokenizer, 8))
    pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), path)
    assert np.array_equal(everything(load_tokens(path, tokenizer, 8))[0], plain)


def test_parquet_without_text_or_of_another_type_or_format_is_refused(tmp_path, tokenizer):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"body": TEXTS}), path)
    refused(path, tokenizer, r"no column \"text\".*body")
    pq.write_table(pa.table({"text": [1, 2, 3]}), path)
    refused(path, tokenizer, "text")
    pq.write_table(pa.table({"text": pa.nulls(0)}), path)
    refused(path, tokenizer, "no text in it")
    path.write_bytes(b"certainly not parquet")
    refused(path, tokenizer, "not a readable parquet file")


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize("content", ["", " \n \n"])
def test_a_file_without_text_is_refused(tmp_path, tokenizer, suffix, content):
    path = tmp_path / f"data{suffix}"
    path.write_text(content)
    refused(path, tokenizer, "no text in it")


@pytest.mark.parametrize("name", ["data.csv", "data", "data.json"])
def test_an_unknown_suffix_names_the_known_ones(tmp_path, tokenizer, name):
    (tmp_path / name).write_text("x")
    refused(tmp_path / name, tokenizer, r"unknown data format .*; texts are \.jsonl or \.txt")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (np.ones((2, 3)), "float64"),
        (np.array([[1, -2]]), r"integers >= 0; received shape \(1, 2\), dtype int64, from -2 to 1$"),
        (np.array([{"a": 1}], dtype=object), "cannot read token ids"),
        (np.zeros((2, 2, 2), int), r"shape \(2, 2, 2\)"),
        (np.zeros((0,), int), "non-empty"),
    ],
)
def test_npy_files_that_hold_no_ids_are_refused(tmp_path, content, match):
    np.save(tmp_path / "ids.npy", content, allow_pickle=True)
    refused(tmp_path / "ids.npy", None, match)


@pytest.mark.parametrize("context", [0, -1])
def test_contexts_without_a_token_are_refused(tokenizer, context):
    for data, usual in (("sample", "1,024"), ([[5, 6, 7]], "3")):
        says = f"^context must be a whole number of at least 1, received {context}; {usual} is usual$"
        with pytest.raises(DataError, match=says):
            load_tokens(data, tokenizer, context)


def with_header(said):
    return b"\x93NUMPY\x01\x00" + len(said).to_bytes(2, "little") + said


IDS = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%b, 2)}"


@pytest.mark.parametrize(
    "content",
    [b"", b"not numpy", with_header(b"")[:8], *map(with_header, (b"(", IDS % b"True", IDS % (b"9" * 30), IDS % b"-1"))],
)
def test_damaged_npy_files_are_refused(tmp_path, content):
    (tmp_path / "ids.npy").write_bytes(content)
    refused(tmp_path / "ids.npy", None, r"cannot read token ids from .*ids\.npy: (?!.*pickle).*; give whole numbers")


def test_a_missing_npy_file_is_missing(tmp_path):
    refused(tmp_path / "ids.npy", None, r"No such file or directory: '.*ids\.npy'$")


def test_text_without_a_tokenizer_is_refused(tmp_path):
    refused(write(tmp_path, ".txt"), None, "no tokenizer")
    refused("wikipedia", None, "no tokenizer")


@given(rows=st.integers(1, 4), width=st.integers(1, 12), context=st.integers(1, 13), limit=st.integers(1, 48))
def test_the_lengths_of_contexts_are_known_before_they_are_read(rows, width, context, limit):
    stream = TokenStream.from_array(np.ones((rows, width), int), context=context)
    limit = min(limit, rows * width)
    read = {batch.ids.shape[1] for batch in stream.batches(limit, 1)}
    assert stream.lengths(limit) == read
    assert stream.lengths(None) == {batch.ids.shape[1] for batch in stream.batches(None, 1)}
