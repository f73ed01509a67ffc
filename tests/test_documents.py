"""Texts of compressed files and of saved data sets, and what is said of those that cannot be read."""

import errno
import gzip
import json
import os
import tracemalloc
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normgeo import documents
from normgeo.documents import digest_of, read_documents
from normgeo.errors import DataError
from normgeo.tokens import load_tokens
from normgeo.training.checkpoints import find_checkpoints

TEXTS = ["one fine\nday", "\u00e4nother", "a third"]


@pytest.fixture
def saved(tmp_path):
    rows = datasets.Dataset.from_dict({"n": [1, 2, 3, 4], "text": [*TEXTS, None]})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    return tmp_path / "saved"


def refused(path, match):
    with pytest.raises(DataError, match=match):
        list(read_documents(path))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".txt.gz", ".JSONL.GZ"])
def test_a_compressed_file_has_the_texts_that_it_had(suffix, tmp_path):
    texts = TEXTS[:1] if "txt" in suffix else TEXTS
    content = texts[0] if "txt" in suffix else "\n".join(json.dumps({"text": text}) for text in texts)
    path = tmp_path / f"data{suffix}"
    path.write_bytes(gzip.compress(content.encode()))
    assert list(read_documents(path)) == texts


@pytest.mark.parametrize(
    "content",
    [b"plain", gzip.compress(b"text " * 999)[:-20], gzip.compress(b"x" * 99)[:-4]],
    ids=["none", "cut", "cut at its end"],  # not the bytes, which hold the time: all workers must collect the same
)
def test_a_compressed_file_that_is_damaged_is_named(content, tmp_path):
    (tmp_path / "data.txt.gz").write_bytes(content)
    refused(tmp_path / "data.txt.gz", r"data\.txt\.gz is damaged, or not compressed with gzip")


@pytest.mark.parametrize("name", ["data.txt.gz", "data.jsonl.gz"])
def test_a_compressed_text_that_memory_has_no_room_for_is_named(name, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "' + b" " * 9_000_000 + b'"}\n', 1))
    assert len(list(read_documents(tmp_path / name))) == 1
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000))
    tracemalloc.start()
    refused(tmp_path / name, rf"{name}.* is one text of more than 2,000,000 bytes, .*as the lines of a \.jsonl")
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()


def test_a_line_of_a_compressed_file_is_named(tmp_path):
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n17'))
    refused(tmp_path / "data.jsonl.gz", r"data\.jsonl\.gz, line 2: expected an object")


@pytest.mark.parametrize(("name", "said"), [("data.csv.gz", "'.csv.gz'"), ("data.parquet.gz", "'.parquet.gz'")])
def test_an_unknown_format_is_named(name, said, tmp_path):
    (tmp_path / name).write_bytes(b"")
    refused(tmp_path / name, f"unknown data format {said} of .*{name}; texts are")


def test_a_saved_data_set_has_its_texts_and_a_digest_of_its_own(saved, tmp_path, tokenizer):
    assert list(read_documents(saved)) == TEXTS
    (ids, _), *_ = load_tokens(saved, tokenizer, 64).contexts(0)
    assert ids.tolist() == [i for text in TEXTS for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    datasets.load_from_disk(saved).save_to_disk(tmp_path / "again", num_shards=2)
    datasets.Dataset.from_dict({"text": TEXTS[:2]}).save_to_disk(tmp_path / "less")
    assert digest_of(saved) == digest_of(tmp_path / "again") != digest_of(tmp_path / "less")


@pytest.mark.parametrize("kind", ["pandas", "arrow", "torch", "numpy"])
@pytest.mark.parametrize("columns", [None, ["n"]])
def test_the_format_that_a_data_set_was_saved_with_is_not_asked(kind, columns, saved, tmp_path):
    formatted = datasets.load_from_disk(saved).with_format(kind, columns=columns)
    formatted.save_to_disk(tmp_path / "formatted")
    assert list(read_documents(tmp_path / "formatted")) == TEXTS


def test_a_saved_data_set_without_rows_has_no_text(tmp_path, tokenizer):
    datasets.Dataset.from_dict({"text": []}, datasets.Features(text=datasets.Value("string"))).save_to_disk(
        tmp_path / "e"
    )
    with pytest.raises(DataError, match="e has no text in it"):
        load_tokens(tmp_path / "e", tokenizer, 8)


def test_what_is_no_saved_data_set_of_texts_is_refused(saved, tmp_path):
    datasets.DatasetDict({name: datasets.load_from_disk(saved) for name in ("test", "train")}).save_to_disk(
        tmp_path / "parts"
    )
    refused(tmp_path / "parts", r"a data set in parts, test, train; give one, as .*parts/test$")
    assert list(read_documents(tmp_path / "parts" / "test")) == TEXTS
    datasets.Dataset.from_dict({"text": [1, 2]}).save_to_disk(tmp_path / "numbers")
    refused(tmp_path / "numbers", 'the column "text" of .*numbers should hold strings, and holds int64')
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "body")
    refused(tmp_path / "body", r'no column "text"; its columns are \[.body.\]')
    for part in saved.glob("*.arrow"):
        part.write_bytes(b"nothing that arrow knows")
    refused(saved, "saved is no readable data set of datasets' save_to_disk")
    for part in saved.glob("*.arrow"):
        part.unlink()
    refused(saved, "cannot read")
    (saved / "state.json").unlink()
    refused(saved, "saved is a directory with no texts in it; they are .jsonl")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """The system's own; rights are nothing to the system's administrator."""
    for name in ("mem.txt", "mem.jsonl", "mem.txt.gz", "mem.parquet"):
        (tmp_path / name).symlink_to("/proc/self/mem")
        refused(tmp_path / name, f"{name}.*")
    with pytest.raises(DataError, match=r"cannot read .*mem\.txt: Input/output error"):
        digest_of(tmp_path / "mem.txt")
    refused(tmp_path / "mem.jsonl", r"cannot read .*mem\.jsonl: Input/output error")


@pytest.fixture
def rows(tmp_path):
    """The same texts in a column of another name, in every kind of file that has columns."""
    frame = pd.DataFrame({"text": "not this", "page": [{"body": "nor this"}] * 3, "body": TEXTS, "page.body": TEXTS})
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    frame.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    datasets.Dataset.from_pandas(frame).save_to_disk(tmp_path / "rows")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.jsonl.gz", "rows"])
def test_text_may_be_in_a_column_of_another_name(name, rows, tokenizer):
    path = rows / name
    assert list(read_documents(path)) == ["not this"] * 3
    assert list(read_documents(f"{path}:body")) == list(read_documents(rows / f"{name}:body")) == TEXTS
    assert list(read_documents(f"{path}:page.body")) == TEXTS
    streams = [load_tokens(data, tokenizer, 64) for data in (f"{path}:body", path, f"{path}:text")]
    assert len({stream.digest for stream in streams[:2]}) == 2  # for a run is not resumed on the other
    assert streams[1].digest == streams[2].digest
    refused(f"{path}:title", '"title"')
    refused(f"{path}:", '""')
    refused(f"{path}.none:body", r"no such data file: .*\.none; give")


def test_a_column_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "all.txt").write_text(TEXTS[0])
    refused(f"{tmp_path}/all.txt:body", "all.txt is text as a whole, and has no column 'body'; leave out :body")
    np.save(tmp_path / "ids.npy", [[1, 2]])
    with pytest.raises(DataError, match="holds token ids, which have no columns"):
        load_tokens(f"{tmp_path}/ids.npy:body")


def test_a_colon_may_be_in_a_files_name(tmp_path):
    (tmp_path / "a:b.jsonl").write_text('{"text": "one", "body": "two"}')
    assert list(read_documents(tmp_path / "a:b.jsonl")) == ["one"]
    assert list(read_documents(tmp_path / "a:b.jsonl:body")) == ["two"]


def test_a_directory_has_the_texts_of_its_files_in_order(tmp_path, tokenizer):
    folder = tmp_path / ".of/texts"  # what is above them may be hidden
    (folder / "b").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "c.jsonl").write_text(json.dumps({"text": TEXTS[2]}))
    pd.DataFrame({"text": TEXTS[:1]}).to_parquet(folder / "a.parquet")
    (folder / "b/b.txt").write_text(TEXTS[1])
    for name in (".cache/d.jsonl", ".hidden.txt", "README.md", "b/b.json"):
        (folder / name).write_text("no text of this")
    assert list(read_documents(folder)) == TEXTS
    stream = load_tokens(folder, tokenizer, 64)
    before = stream.digest
    assert sum(len(ids) for ids, _ in stream.contexts(0)) == sum(len(tokenizer(t)["input_ids"]) + 1 for t in TEXTS)
    (folder / "c.jsonl").write_text(json.dumps({"text": "another"}))
    assert load_tokens(folder, tokenizer, 64).digest != before
    refused(f"{folder}:body", r'a\.parquet has no column "body"')
    for name, to in (("again", folder / "b"), ("d", tmp_path / "elsewhere"), ("up", folder)):  # each once
        (folder / name).symlink_to(to)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/d.txt").write_text("on another disk")
    assert list(read_documents(folder)) == [*TEXTS[:2], "another", "on another disk"]
    (folder / "b/gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")  # which is not to be left out without a word
    refused(folder, r"cannot read .*gone\.jsonl: No such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty is a directory with no texts in it; they are .jsonl")


def test_a_directory_that_may_not_be_read_is_not_left_out_without_a_word(tmp_path, monkeypatch):
    """The system's administrator may read all."""
    for name in ("run/step-1", "run/private/step-2"):
        (tmp_path / name).mkdir(parents=True)
        for file in ("a.txt", "config.json"):
            (tmp_path / name / file).write_text("{}")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(tmp_path, r"cannot read .*private: Permission denied")
    with pytest.raises(DataError, match=r"cannot read .*private: Permission denied"):
        digest_of(tmp_path)
    with pytest.warns(UserWarning, match=r"cannot read .*private: Permission denied; it is left out"):
        assert [point.step for point in find_checkpoints(tmp_path)] == [1]


def test_nothing_in_a_directory_is_left_out_without_a_word(tmp_path, saved):
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    (folder / "b").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "a.txt").write_text("first")
    (elsewhere / "linked.txt").write_text("last")
    (folder / "c").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder)  # which has no end, and nothing else
    before = digest_of(folder)
    assert list(read_documents(folder)) == ["first", "last"]
    saved.rename(folder / "b/saved")
    assert list(read_documents(folder)) == ["first", *TEXTS, "last"]
    assert digest_of(folder) != before


def test_a_file_is_read_once_before_its_tokens_are_asked_for(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text("The first text.")
    read, decoded = [], documents._decoded
    monkeypatch.setattr(documents, "_decoded", lambda content, where: read.append(where) or decoded(content, where))
    stream = load_tokens(tmp_path / "a.txt", tokenizer)
    assert read == [tmp_path / "a.txt"]
    assert stream.digest == digest_of(tmp_path / "a.txt")


def test_what_readers_trip_over_is_said(tmp_path):
    (tmp_path / "long.jsonl").write_text('{"text": "a", "id": ' + "9" * 5_000 + "}")
    assert list(read_documents(tmp_path / "long.jsonl")) == ["a"]
    (tmp_path / "deep.jsonl").write_text('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    refused(tmp_path / "deep.jsonl", match=r"deep.jsonl, line 1: expected an object with a \"text\"")
    data = pa.py_buffer(b"\xffb")
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32).tobytes()), data])
    pq.write_table(pa.table({"text": text}), tmp_path / "latin.parquet")
    refused(tmp_path / "latin.parquet", match="latin.parquet is not a readable parquet file: 'utf-8' codec")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    refused(tmp_path / "twice.parquet", match='has more than one column "text"')
