"""Texts of compressed files and of saved data sets, and what is said of those that cannot be read."""

import gzip
import json

import datasets
import pytest

from normgeo.documents import digest_of, read_documents
from normgeo.errors import DataError
from normgeo.tokens import load_tokens

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


@pytest.mark.parametrize("content", [b"plain", gzip.compress(b"text " * 999)[:-20], gzip.compress(b"x" * 99)[:-4]])
def test_a_compressed_file_that_is_damaged_is_named(content, tmp_path):
    (tmp_path / "data.txt.gz").write_bytes(content)
    refused(tmp_path / "data.txt.gz", r"data\.txt\.gz is damaged, or not compressed with gzip")


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
    refused(saved, "is a directory without a saved data set; texts are .jsonl")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """The system's own; rights are nothing to the system's administrator."""
    for name in ("mem.txt", "mem.jsonl", "mem.txt.gz", "mem.parquet"):
        (tmp_path / name).symlink_to("/proc/self/mem")
        refused(tmp_path / name, f"{name}.*")
    with pytest.raises(DataError, match=r"cannot read .*mem\.txt: Input/output error"):
        digest_of(tmp_path / "mem.txt")
    refused(tmp_path / "mem.jsonl", r"cannot read .*mem\.jsonl: Input/output error")
