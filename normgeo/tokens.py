"""Token streams: text from the hub, files, arrays of ids, and the sample that ships with the package.

A stream is a sequence of contexts: runs of token ids that a model sees together. Text is packed, without padding.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from normgeo.documents import digest_of, holds_texts, located, read_documents, whole
from normgeo.errors import DataError
from normgeo.hub import HUB, LARGE, HubText, texts
from normgeo.packing import Context, Contexts, Packed, remembered, watched

__all__ = ["ROWS", "SAMPLE", "TokenBatch", "TokenStream", "absolute", "counted", "holds_ids", "load_tokens", "on_hub"]

SAMPLE = Path(__file__).parent / "assets" / "sample.jsonl"
KEPT_TOKENS = 1 << 22
"""Of so many tokens of text the ids are kept, 64 MiB of them, and not made again."""

CHECKED_AT_ONCE = 1 << 20

ROWS = "each row is a sequence"
"""The packing of an array's contexts."""


@dataclass(frozen=True)
class TokenBatch:
    """Contexts of one length that go through the model together.

    Attributes:
        ids: token ids, int64 [rows, time].
        document: index of the document each token is from, int64 [rows, time].
        start: how many tokens of the stream come before this batch.
    """

    ids: np.ndarray
    document: np.ndarray
    start: int

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the batch."""
        return self.ids.size

    @property
    def position(self) -> np.ndarray:
        """Position of each token within its context, int64 [rows, time]."""
        return np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape)


@dataclass(frozen=True)
class TokenStream:
    """A source of contexts that can be read from its beginning any number of times.

    Attributes:
        contexts: starts a new pass over the contexts, from a token on that begins one.
        context: the length of every context but the last, and the last of every row of an array.
        source: what the tokens come from, in words.
        digest: sha256 of the file or array, or the data set's own name and revision.
        packing: how documents became contexts, in words.
        n_tokens: how many tokens there are, where that is known before reading.
        marks: where text can be entered: the list that `Packed` reads and adds to.
        row: of an array of several rows how long these are: a context ends where its row does.
        revision: of a data set that is read from the hub its commit.
    """

    contexts: Contexts
    context: int
    source: str
    digest: str
    packing: str
    n_tokens: int | None = None
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    row: int | None = None
    revision: str | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What records say of it, from which the same tokens can be had again."""
        return {
            "data": self.source, "data_sha256": self.digest, "data_revision": self.revision, "packing": self.packing,
            "context": self.context, "row": self.row,
        }  # fmt: skip

    @classmethod
    def from_array(cls, ids: Any, *, context: int | None = None, source: str = "array") -> TokenStream:
        """Token ids whose rows are sequences, or one long sequence; rows longer than `context` are cut.

        An array in a file (`np.load(path, mmap_mode="r")`) stays there: of it only what is being read is in memory.

        Raises:
            DataError: the array is empty or holds something else than ids >= 0, or `context` is below 1.

        >>> stream = TokenStream.from_array([[5, 6, 7], [8, 9, 10]], context=2)
        >>> [ids.tolist() for ids, _ in stream.contexts(0)]
        [[5, 6], [7], [8, 9], [10]]
        """
        try:
            rows = np.atleast_2d(np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids))
        except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths, a dtype numpy has none like
            raise DataError(f"{source}: token ids must be integers >= 0 in rows of one length ({error})") from error
        digest = _digest(rows) if rows.ndim == 2 and rows.size and rows.dtype.kind in "iu" else None
        if digest is None:
            found = f", from {rows.min()} to {rows.max()}" if rows.size and rows.dtype.kind in "iu" else ""
            raise DataError(
                f"{source}: token ids must be a non-empty [sequences, time] array of integers >= 0; received "
                f"shape {rows.shape}, dtype {rows.dtype}{found}"
            )
        width = rows.shape[1]
        length = min(_length(context, width), width)

        def contexts(start: int = 0) -> Iterator[Context]:
            for document in range(start // width, len(rows)):
                for cut in range(max(0, start - document * width), width, length):
                    piece = rows[document, cut : cut + length].astype(np.int64)
                    yield piece, np.full(len(piece), document)

        return cls(contexts, length, source, digest, ROWS, rows.size, row=width if len(rows) > 1 else None)

    def remembered(self) -> TokenStream:
        """The same stream, of which the first `KEPT_TOKENS` tokens of text are not read and made again."""
        if self.n_tokens is not None:
            return self
        return replace(self, contexts=remembered(self.contexts, self.context, KEPT_TOKENS // self.context))

    def counted(self, most: int) -> tuple[TokenStream, int]:
        """The same stream, and how many tokens it has: all there are, or `most` where there are more.

        Text is read for it, marked, and remembered.
        """
        if self.n_tokens is not None:
            return self, min(self.n_tokens, most)
        stream, total = self.remembered(), 0
        for ids, _ in stream.contexts(0):
            total += len(ids)
            if total >= most:
                break
        return stream, min(total, most)

    def batch_start(self, token: int, rows: int) -> int:
        """Where a batch of up to `rows` contexts begins that has this token, or some batch before it."""
        return token - token % self.period(rows)

    def period(self, rows: int) -> int:
        """At every multiple of so many tokens a batch of up to `rows` contexts begins."""
        return self.row if self.row and self.row % self.context else rows * self.context

    def lengths(self, limit: int | None) -> set[int]:
        """How long the contexts of the first `limit` tokens are, as far as that is known before they are read.

        >>> sorted(TokenStream.from_array([[1] * 10, [2] * 10], context=4).lengths(17))
        [2, 3, 4]
        """
        total = limit or self.n_tokens or self.context
        rows = {total % self.row, min(self.row, total)} if self.row else {total}
        return {length for row in rows for length in (min(self.context, row), row % self.context)} - {0}

    def batches(self, limit: int | None, rows: int, start: int = 0) -> Iterator[TokenBatch]:
        """Batches of up to `rows` contexts of equal length: the tokens from `start` up to exactly `limit`.

        `start` must be the beginning of a context, and of a batch if those that come should be the same. With `limit`
        None all tokens come.

        Raises:
            DataError: the stream ends before `limit`, or `limit` or `rows` is below 1.
        """
        if rows < 1 or (limit is not None and limit < 1):
            raise DataError(f"at least one token and one context at once are needed, received {limit} and {rows}")
        done, uneven = start, self.row and self.row % self.context  # then none has contexts of two rows
        key = lambda context: (len(context[0]), uneven and context[1][0])  # noqa: E731
        for _, alike in itertools.groupby(self._between(start, limit), key):
            while chunk := list(itertools.islice(alike, rows)):
                batch = TokenBatch(np.stack([i for i, _ in chunk]), np.stack([d for _, d in chunk]), done)
                yield batch
                done += batch.n_tokens

    def alike(self, limit: int | None, rows: int, most: int) -> list[TokenBatch]:
        """Of the first `most` batches those of the first one's shape, to time passes on.

        Raises:
            DataError: there is none.
        """
        found = list(itertools.islice(self.batches(limit, rows), most))
        return [batch for batch in found if batch.ids.shape == found[0].ids.shape]

    def _between(self, start: int, limit: int | None) -> Iterator[Context]:
        """The contexts from token `start` on, the last one cut so that they end exactly at token `limit`."""
        done = start
        for ids, document in self.contexts(start) if limit is None or start < limit else ():
            yield (ids, document) if limit is None else (ids[: limit - done], document[: limit - done])
            done += len(ids)
            if limit is not None and done >= limit:  # before another is read: it may begin a book
                return
        if limit is not None and done < limit:
            raise self.too_short(done, limit)
        if not done:  # of a text of which the tokenizer makes nothing
            raise DataError(f"{self.source} holds no tokens")

    def too_short(self, there: int, asked: int) -> DataError:
        """What is wrong where so many tokens are asked for, and fewer are there."""
        return DataError(
            f"{self.source} ends after {there:,} tokens, {asked:,} were asked for; ask for fewer, or give more data"
        )


def _length(context: int | None, usual: int) -> int:
    """The length of contexts that was asked for, or else the usual one."""
    if context is not None and (not isinstance(context, Integral) or isinstance(context, bool) or context < 1):
        raise DataError(f"context must be a whole number of at least 1, received {context!r}; {usual:,} is usual")
    return usual if context is None else int(context)


def _digest(rows: np.ndarray) -> str | None:
    """sha256 of the shape and of all ids as int64; None where one is negative, as int64 too."""
    digest, ids = hashlib.sha256(repr(rows.shape).encode()), rows.reshape(-1)
    for start in range(0, len(ids), CHECKED_AT_ONCE):
        some = ids[start : start + CHECKED_AT_ONCE].astype(np.int64)  # of unsigned ids the largest are negative too
        if some.min() < 0:
            return None
        digest.update(some.tobytes())
    return digest.hexdigest()


def holds_ids(data: str | Path | Any) -> bool:
    """Whether it is token ids that are given, or that a file of this name holds, and no text: no tokenizer is needed.

    Raises:
        DataError: what is given is neither.
    """
    if isinstance(data, (str, Path)):
        return Path(data).suffix.lower() == ".npy"
    return _given_texts(data) is None


def on_hub(data: str | Path) -> HubText | None:
    """The data set on the hub that is named, where it is no path: nothing is there, nor would texts be called so."""
    if str(data) not in HUB and ((path := located(data)[0]).exists() or holds_texts(path) or holds_ids(path)):
        return None
    return HubText.named(str(data))


def absolute(data: str) -> str:
    """The same for a process that works in another directory."""
    here = data not in ("sample", *HUB) and located(data)[0].exists()
    return str(Path(data).absolute()) if here else data


def load_tokens(
    data: str | Path | Any,
    tokenizer: Any = None,
    context: int | None = None,
    exclude: Collection[str] = frozenset(),
    revision: str | None = None,
) -> TokenStream:
    """Open a stream of tokens.

    Args:
        data: "sample" (embedded text); "wikipedia", "openwebtext" or "ORG/NAME[@CONFIGURATION[@SPLIT]]" (streamed from
            the hub); a path of text (.jsonl, .txt, .parquet, a directory), with ":COLUMN" where that is not "text"; of
            ids (.npy); an array of ids whose rows are sequences; a list of strings; or a data set with a "text".
        tokenizer: the model's tokenizer; not needed for ids.
        context: tokens that the model sees together; None is 1024 for text, the row length for ids.
        exclude: documents to leave out, by their whole text.
        revision: of a data set on the hub the commit to read; None is what it is at now, for which the hub is asked.

    Raises:
        DataError: data that is missing, empty or of an unknown format, text without a tokenizer, contexts of less than
            a token, a revision of what is not on the hub, or texts to leave out of token ids.
    """
    hub = on_hub(data) if isinstance(data, (str, Path)) and not holds_ids(data) else None
    if revision is not None and hub is None:
        raise DataError(f"only a data set on the hub has revisions; leave {revision!r} out")
    if exclude and holds_ids(data):
        raise DataError("the data is token ids, of which no texts can be left out")
    if not isinstance(data, (str, Path)):
        if (documents := _given_texts(data)) is None:
            return TokenStream.from_array(data, context=context)
        digest = functools.partial(_of_texts, documents)
        return _packed(documents, tokenizer, _length(context, 1024), exclude, "the given texts", digest)
    if holds_ids(data):
        ids, watching = _load_ids(Path(data)), watched(Path(data))  # before its digest is taken
        stream = TokenStream.from_array(ids, context=context, source=str(data))
        return replace(stream, contexts=watching(stream.contexts, lambda: _digest(ids) == stream.digest))
    context = _length(context, 1024)
    if hub is not None:
        _check_tokenizer(tokenizer, hub.name)
        hub = replace(hub, revision=revision) if revision else hub.pinned()
        packed = _packed(functools.partial(texts, hub), tokenizer, context, exclude, hub.name, lambda: hub.name)
        return replace(packed, revision=hub.revision)
    path = SAMPLE if data == "sample" else data
    digest = functools.partial(digest_of, path)
    return _packed(functools.partial(read_documents, path), tokenizer, context, exclude, str(data), digest)


def _given_texts(data: Any) -> Callable[[], Iterator[str]] | None:
    """Texts that are given as such, by themselves or in rows of a data set; None for what may be ids."""
    if isinstance(data, Iterator):
        raise DataError("an iterator can be read once, and tokens are read several times; give a list of what it has")
    if hasattr(data, "columns"):
        raise DataError(f"received a {type(data).__name__}; give its column of text, or of token ids, alone")
    if isinstance(data, Mapping) and data and all(hasattr(part, "features") for part in data.values()):
        raise DataError(
            f"received the parts {', '.join(map(str, data))} of a data set; give one, as data[{next(iter(data))!r}]"
        )
    if isinstance(data, Mapping):
        raise DataError(f"received a {type(data).__name__} with {', '.join(map(str, data))}; give its token ids alone")
    try:
        first = next((row for row in data if row is not None), None)
    except TypeError:  # nothing to iterate over
        return None
    if isinstance(first, str):
        return lambda: map(_checked, itertools.count(), data)
    if not isinstance(first, Mapping):
        return None
    if "text" not in first or not isinstance(first["text"], (str, type(None))):
        raise DataError(f'rows with {", ".join(first)} have no "text"; give the column of text, or of token ids, alone')
    return lambda: (_checked(number, row.get("text", row)) for number, row in enumerate(data))


def _checked(number: int, text: Any) -> str:
    if text is None:  # as in files
        return ""
    if not isinstance(text, str):
        raise DataError(f"text {number} should be a string, received {text!r}; leave it out")
    return whole(text, f"text {number}")


def _of_texts(documents: Callable[[], Iterator[str]]) -> str:
    digest = hashlib.sha256()
    for text in documents():
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _packed(
    documents: Callable[[], Iterator[str]], tokenizer: Any, context: int, exclude: Collection[str], source: str,
    digest: Callable[[], str],
) -> TokenStream:  # fmt: skip
    kept = (lambda: (text for text in documents() if text not in exclude)) if exclude else documents
    if not any(text.strip() for text in kept()):  # up to the first; tokens of a long one would take their time
        raise DataError(f"{source} has no text in it{', beside what is left out' if exclude else ''}")
    _check_tokenizer(tokenizer, source)  # behind what is wrong with a path or a format
    packed = Packed(kept, tokenizer, context)
    packing = f"documents packed one after the other ({packed.between}), cut every {context} tokens, no padding"
    return TokenStream(packed, context, source, digest(), packing, marks=packed.marks)


def _check_tokenizer(tokenizer: Any, source: str) -> None:
    if tokenizer is None:
        raise DataError(
            f"{source} cannot become tokens: the model has no tokenizer; put its files beside the model's, give one in "
            "Python, or token ids as .npy"
        )
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise DataError(
            f"a tokenizer is what load_tokenizer gives, one of transformers'; received {type(tokenizer).__name__}"
        )


def _load_ids(path: Path) -> np.ndarray:
    try:  # not `load`, which would rather unpickle what is no array
        return np.atleast_2d(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # whatever numpy raises of a header that anybody may have written
        advice = "" if isinstance(error, OSError) else "; give whole numbers as numpy.save does"
        raise DataError(f"cannot read token ids from {path}: {error}{advice}") from error


def counted(
    tokens: TokenStream, asked: int | None, default: int,
    first: Callable[[str, Callable[[], Any]], Any] = lambda name, do: do(),
) -> tuple[TokenStream, int]:  # fmt: skip
    """The tokens, and so many of them as were asked for; else the default, or all where a local source has fewer.

    Raises:
        DataError: a local source has fewer than were asked for. Said before anything is measured or written.
    """
    most = int(asked or default)
    if tokens.revision and (asked is not None or tokens.digest in LARGE):  # not to be read before it is measured
        return tokens, most

    def count() -> tuple[int, list[Any]]:
        nonlocal tokens
        tokens, there = tokens.counted(most)
        if asked is not None and there < asked:
            raise tokens.too_short(there, asked)
        return there, tokens.marks

    there, marks = first("tokens", count)
    tokens.marks[:] = map(tuple, marks)
    return tokens, there
