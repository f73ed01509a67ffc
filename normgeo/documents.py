"""Texts of files, and of directories of them: .jsonl, .txt, .parquet, and data sets that were saved to disk."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from normgeo.errors import DataError
from normgeo.hub import FORM, HUB
from normgeo.system.files import file_digest
from normgeo.system.listing import below

__all__ = ["KINDS", "TEXT", "digest_of", "holds_texts", "located", "read_documents", "whole"]

KINDS = ".jsonl or .txt (.gz too), .parquet, or a directory of these or of datasets' save_to_disk"
"""What texts can be in, in words."""

TEXT = "text"
"""The column that text is in, or the key, where none is named."""


def located(data: str | Path) -> tuple[Path, str]:
    """The file or directory that texts are in, and their column: PATH, or PATH:COLUMN.

    Raises:
        DataError: the name is empty.

    >>> located("articles.parquet:body")
    (PosixPath('articles.parquet'), 'body')
    """
    path = Path(data)
    if not str(data):
        raise DataError(
            f"the name of the data is empty; give the path of some, or {', '.join(('sample', *HUB))}, or {FORM}"
        )
    if ":" not in path.name or path.exists():
        return path, TEXT
    name, _, column = str(data).rpartition(":")
    return Path(name), column


def read_documents(data: str | Path) -> Iterator[str]:
    """The texts of a file, of a data set that was saved to a directory, or of all in one by their names' order.

    That is the "text" of each line of .jsonl, the column "text" of .parquet or of the data set, or all of a .txt; with
    PATH:COLUMN another column, or key.

    Raises:
        DataError: it is missing, damaged, of another format, or without the text it should have.
    """
    path, column = located(data)
    if not path.exists():
        raise DataError(f"no such data file: {path}; give the path of one, or {', '.join(('sample', *HUB))}, or {FORM}")
    for part in _parts(path):
        yield from _read(part, column)


def _parts(path: Path) -> list[Path]:
    """What texts are in one by one: a file or a saved data set as it is given, or those of a directory."""
    if not path.is_dir() or _is_saved(path):
        return [path]

    def denied(error: OSError) -> None:
        raise _unreadable(path, error) from error

    first = {home.resolve(): (home, files) for home, files in reversed([*below(path, denied)])}  # each directory once
    found = sorted(part for home, files in first.values() for part in _in(home, files))
    if not found:
        raise DataError(f"{path} is a directory with no texts in it; they are {KINDS}, and token ids .npy")
    return found


def _in(folder: Path, files: list[str]) -> list[Path]:
    """A directory itself, where it is a saved data set, or those of its files that can hold texts."""
    return [folder] if _is_saved(folder) else [folder / file for file in files if holds_texts(Path(file))]


def _is_saved(path: Path) -> bool:
    """Whether a directory is a data set of datasets' `save_to_disk`.

    Raises:
        DataError: it is one in parts, which are alternatives.
    """
    if (path / "dataset_dict.json").is_file():
        splits = [part for part in sorted(path.iterdir()) if part.is_dir()]
        names, one = ", ".join(part.name for part in splits), "".join(f", as {part}" for part in splits[:1])
        raise DataError(f"{path} holds a data set in parts, {names}; give one{one}")
    return (path / "state.json").is_file()


def holds_texts(path: Path) -> bool:
    """Whether a file of this name holds texts."""
    return _reader_of(path) is not None


def _read(path: Path, column: str) -> Iterator[str]:
    reader, opened = _opener(path)
    try:
        yield from reader(path, opened, column)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged, or not compressed with gzip: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def digest_of(data: str | Path) -> str:
    """sha256 of a file, or over those of the files that a directory or a saved data set is in; and the column.

    Raises:
        DataError: one cannot be read.
    """
    path, column = located(data)
    try:
        digests = [file_digest(file) for part in _parts(path) for file in _files(part)]
    except OSError as error:
        raise _unreadable(path, error) from error
    digest = hashlib.sha256("".join(digests).encode()).hexdigest() if path.is_dir() else digests[0]
    return digest if column == TEXT else f"{digest}:{column}"


def _files(path: Path) -> list[Path]:
    """Where the bytes are."""
    if not path.is_dir():
        return [path]
    return [path / part["filename"] for part in json.loads((path / "state.json").read_text())["_data_files"]]


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {error.filename or path}: {error.strerror or error}")


LINES = json.JSONDecoder(parse_int=float)
"""Numbers in other columns may have any number of digits: Python makes integers of 4,300 at most."""

AT_ONCE = 1 << 20  # bytes
COPIES = 4  # of a text that are in memory together: its bytes, what they decode to, that with other line ends, tokens

Opened = Callable[[], Any]
"""Opens a file whose bytes are read."""

Reader = Callable[[Path, Opened, str], Iterator[str]]


def _opener(path: Path) -> tuple[Reader, Opened]:
    """What reads texts of this kind, and what opens the file for it."""
    if path.is_dir():
        return _saved_texts, lambda: path.open("rb")
    packed = path.suffix.lower() == ".gz"
    if reader := _reader_of(path):
        return reader, (lambda: gzip.open(path)) if packed else (lambda: path.open("rb"))
    suffix = "".join(path.suffixes[-2:]) if packed else path.suffix
    if suffix.lower() == ".npy":  # named with a column, for else it would not be read as text
        raise DataError(f"{path} holds token ids, which have no columns; leave out what is behind the colon")
    raise DataError(f"unknown data format {suffix or '(no suffix)'!r} of {path}; texts are {KINDS}, and token ids .npy")


def _reader_of(path: Path) -> Reader | None:
    plain, packed = path, path.suffix.lower() == ".gz"
    readers: dict[str, Reader] = {".txt": _whole_text, ".jsonl": _lines}
    if packed:
        plain = path.with_suffix("")
    else:
        readers[".parquet"] = _parquet
    return readers.get(plain.suffix.lower())


def _room() -> int:
    """Bytes that one text may have in the memory there is."""
    return psutil.virtual_memory().available // COPIES


def _check_room(n: int, room: int, where: str | Path) -> None:
    """Refuse a text of more bytes than there is room for: a small file may hold any number, compressed."""
    if n > room:
        raise DataError(
            f"{where} is one text of more than {room:,} bytes, too much for the memory of this machine; give it as "
            "several documents, as the lines of a .jsonl"
        )


def _whole_text(path: Path, opened: Opened, column: str) -> Iterator[str]:
    if column != TEXT:
        raise DataError(f"{path} is text as a whole, and has no column {column!r}; leave out :{column}")
    content, room = bytearray(), _room()
    with opened() as file:
        while piece := file.read(AT_ONCE):
            content += piece
            _check_room(len(content), room, path)
        yield _decoded(content, path).replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path, opened: Opened, column: str) -> Iterator[str]:
    room = _room()
    with opened() as file:
        for number, line in enumerate(iter(lambda: file.readline(room + 1), b""), 1):
            where = f"{path}, line {number}"
            _check_room(len(line), room, where)
            if (text := _decoded(line, where)).strip():
                yield _text_of(text, where, column)


def _decoded(content: bytes | bytearray, where: str | Path) -> str:
    """Text, without a mark of its byte order: other encodings would be counted as other tokens, not be noticed."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start:,} is {content[error.start]:#04x}"
        raise DataError(f"{where} is no text in UTF-8 ({wrong}); convert it, as with iconv -t UTF-8") from error


def _text_of(line: str, where: str, column: str) -> str:
    try:
        text = LINES.decode(line)[column]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f'{where}: expected an object with a "{column}", received {line[:60]!r}') from error
    if text is None:  # none, as an empty one; so it is in tables
        return ""
    if not isinstance(text, str):
        raise DataError(f'{where}: "{column}" should be a string, received {type(text).__name__}')
    return whole(text, where)


def whole(text: str, where: str) -> str:
    """The text.

    Raises:
        DataError: there is half of a character in it, which JSON and Python can spell, and no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise DataError(f"{where}: {half!r} is half a character; leave it or the line out") from error
    return text


def _parquet(path: Path, _: Opened, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, column)
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from (text for text in batch.column(column).to_pylist() if text)  # a.b brings a with b in it
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _saved_texts(path: Path, _: Opened, column: str) -> Iterator[str]:
    import datasets

    try:
        if not json.loads((path / "state.json").read_text())["_data_files"]:
            return  # there is no row, which `load_from_disk` trips over
        dataset: Any = datasets.load_from_disk(str(path))
    except OSError:
        raise
    except Exception as error:  # whatever arrow and JSON raise
        raise DataError(f"{path} is no readable data set of datasets' save_to_disk: {error}") from error
    _check_column(path, dataset.features.arrow_schema, column)
    rows = dataset.with_format(None).select_columns(column)  # it may have been saved with that of tensors, or of pandas
    try:
        yield from (row[column] for row in rows if row[column])
    except UnicodeDecodeError as error:
        raise DataError(f"{path} holds what is no text in UTF-8: {error}") from error


def _check_column(path: Path, schema: Any, column: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise DataError(f'{path} has no column "{column}"; its columns are {schema.names}: give it as PATH:COLUMN')
    if schema.names.count(column) > 1:
        raise DataError(f'{path} has more than one column "{column}"; give them names of their own')
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):  # what pandas calls a category
        kind = kind.value_type
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):  # null where there is no row
        raise DataError(f'the column "{column}" of {path} should hold strings, and holds {kind}')
