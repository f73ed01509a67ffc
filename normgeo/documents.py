"""Texts of files: .jsonl and .txt, which gzip may have compressed, .parquet, and data sets that were saved to disk."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from normgeo.errors import DataError
from normgeo.hub import HUB

__all__ = ["KINDS", "digest_of", "read_documents"]

KINDS = ".jsonl or .txt (.gz too), .parquet, or a directory of datasets' save_to_disk"
"""What texts can be in, in words."""


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a file, or of a data set that was saved to a directory.

    That is the "text" of each line of .jsonl, the column "text" of .parquet or of the data set, or all of a .txt.

    Raises:
        DataError: it is missing, damaged, of another format, or without the text it should have.
    """
    if not path.exists():
        raise DataError(f"no such data file: {path}; give the path of one, or sample, {', '.join(HUB)}")
    reader, opened = _reader(path)
    try:
        yield from reader(path, opened)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged, or not compressed with gzip: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def digest_of(path: Path) -> str:
    """sha256 of a file, or over those of the files that a saved data set is in.

    Raises:
        DataError: one cannot be read.
    """
    try:
        if not path.is_dir():
            return _file_digest(path)
        digest = hashlib.sha256()
        for part in json.loads((path / "state.json").read_text())["_data_files"]:
            digest.update(_file_digest(path / part["filename"]).encode())
        return digest.hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {error.filename or path}: {error.strerror or error}")


Opened = Callable[[], Any]
"""Opens a file whose bytes are read."""

Reader = Callable[[Path, Opened], Iterator[str]]


def _reader(path: Path) -> tuple[Reader, Opened]:
    """What reads texts of this kind, and what opens the file for it."""
    if path.is_dir():
        return _saved_texts, lambda: path.open("rb")
    plain = path.with_suffix("") if (packed := path.suffix.lower() == ".gz") else path
    readers: dict[str, Reader] = {".txt": _whole_text, ".jsonl": _lines} | ({} if packed else {".parquet": _parquet})
    if reader := readers.get(plain.suffix.lower()):
        return reader, (lambda: gzip.open(path)) if packed else (lambda: path.open("rb"))
    suffix = "".join(path.suffixes[-2:]) if packed else path.suffix
    raise DataError(f"unknown data format {suffix or '(no suffix)'!r} of {path}; texts are {KINDS}, and token ids .npy")


def _whole_text(path: Path, opened: Opened) -> Iterator[str]:
    with opened() as file:
        yield _decoded(file.read(), path).replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path, opened: Opened) -> Iterator[str]:
    with opened() as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if (text := _decoded(line, where)).strip():
                yield _text_of(text, where)


def _decoded(content: bytes, where: str | Path) -> str:
    """Text, without a mark of its byte order: other encodings would be counted as other tokens, not be noticed."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start:,} is {content[error.start]:#04x}"
        raise DataError(f"{where} is no text in UTF-8 ({wrong}); convert it, as with iconv -t UTF-8") from error


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{where}: expected an object with a "text", received {line[:60]!r}') from error
    if not isinstance(text, str):
        raise DataError(f'{where}: "text" should be a string, received {type(text).__name__}')
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell what no tokenizer takes
        half = text[error.start]
        raise DataError(f"{where}: {half!r} is half a character; leave it or the line out") from error
    return text


def _parquet(path: Path, _: Opened) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _saved_texts(path: Path, _: Opened) -> Iterator[str]:
    import datasets

    if (path / "dataset_dict.json").is_file():
        splits = [part for part in sorted(path.iterdir()) if part.is_dir()]
        names, one = ", ".join(part.name for part in splits), "".join(f", as {part}" for part in splits[:1])
        raise DataError(f"{path} holds a data set in parts, {names}; give one{one}")
    if not (path / "state.json").is_file():
        raise DataError(f"{path} is a directory without a saved data set; texts are {KINDS}, and token ids .npy")
    try:
        if not json.loads((path / "state.json").read_text())["_data_files"]:
            return  # there is no row, which `load_from_disk` trips over
        dataset: Any = datasets.load_from_disk(str(path))
    except OSError:
        raise
    except Exception as error:  # whatever arrow and JSON raise
        raise DataError(f"{path} is no readable data set of datasets' save_to_disk: {error}") from error
    _check_column(path, dataset.features.arrow_schema)
    rows = dataset.with_format(None).select_columns("text")  # it may have been saved with that of tensors, or of pandas
    yield from (row["text"] for row in rows if row["text"])


def _check_column(path: Path, schema: Any) -> None:
    import pyarrow as pa

    if "text" not in schema.names:
        raise DataError(f'{path} has no column "text"; its columns are {schema.names}')
    kind = schema.field("text").type
    if pa.types.is_dictionary(kind):  # what pandas calls a category
        kind = kind.value_type
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):  # null where there is no row
        raise DataError(f'the column "text" of {path} should hold strings, and holds {kind}')
