"""Text as contexts: documents' ids one after the other, special tokens included, cut every so many ids, no padding."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from normgeo.encoding import Encoder
from normgeo.errors import DataError

__all__ = ["Context", "Contexts", "Packed", "remembered", "watched"]

MARK_EVERY = 1 << 20

Context = tuple[np.ndarray, np.ndarray]
"""Token ids and the document each belongs to, both int64 [time]."""

Contexts = Callable[[int], Iterator[Context]]
"""Those from a token on that begins one."""


class Packed:
    """Contexts of text, from any of their beginnings on.

    Text can be entered at a token only where it is known how many tokens come before, so every pass leaves marks behind
    it, and a later one begins at the last mark before its start instead of tokenizing all that comes before.

    Attributes:
        marks: (token, document, offset), once in about a million tokens: the context that begins with this token of the
            stream begins so many tokens into this document. Those of another pass over the same text may be put here.
        between: what separates documents, in words.
    """

    def __init__(self, documents: Callable[[], Iterable[str]], tokenizer: Any, context: int) -> None:
        self._documents, self._encode, self._context = documents, Encoder(tokenizer), context
        self.between = self._encode.between
        self.marks: list[tuple[int, int, int]] = []

    def __call__(self, start: int = 0) -> Iterator[Context]:
        """The contexts from this token on, which begins one of them."""
        done, first, skipped = max((mark for mark in self.marks if mark[0] <= start), default=(0, 0, 0))
        waiting, rest = list[Context](), 0  # what is no whole context yet, and how many tokens these are
        begin = last = -1
        for number, encoded in self._encoded(first):
            if number != last:
                last, begin = number, done + rest - skipped  # of this document in the stream
            some, skipped = encoded[skipped:], max(0, skipped - len(encoded))
            waiting.append((some, np.full(len(some), number)))
            rest += len(some)
            if rest < self._context:  # not joined one by one: a context may be thousands of documents
                continue
            ids, owner = map(np.concatenate, zip(*waiting, strict=True))
            whole = len(ids) - len(ids) % self._context
            for cut in range(0, whole, self._context):
                if done + cut >= begin:
                    self._mark(done + cut, number, done + cut - begin)
                if done + cut >= start:
                    yield ids[cut : cut + self._context], owner[cut : cut + self._context]
            done, rest = done + whole, len(ids) - whole
            waiting = [(ids[whole:], owner[whole:])]
        if rest and done >= start:
            ids, owner = map(np.concatenate, zip(*waiting, strict=True))
            yield ids, owner

    def _mark(self, token: int, document: int, offset: int) -> None:
        if token >= (self.marks[-1][0] if self.marks else 0) + MARK_EVERY:
            self.marks.append((token, document, offset))

    def _encoded(self, first: int) -> Iterator[tuple[int, np.ndarray]]:
        """The numbers and ids of the documents from this one on; those without text are none."""
        texts = itertools.islice((text for text in self._documents() if text.strip()), first, None)
        return ((first + i, ids) for i, ids in self._encode(texts))


def remembered(contexts: Contexts, context: int, most: int) -> Contexts:
    """The same contexts, of which the first `most` are made once: from a token on that begins one, all of one length.

    They are kept as they pass by, and nothing is read before it is asked for.
    """
    kept, whole = list[Context](), False

    def passing(start: int = 0) -> Iterator[Context]:
        nonlocal whole
        at = start // context
        while at < len(kept):
            yield kept[at]
            at += 1
        for found in () if whole else contexts(at * context):
            if at == len(kept) < most:
                kept.append(found)
            yield found
            at += 1
        whole = whole or at == len(kept)  # behind the last there is nothing to look for

    return passing


def watched(path: Path) -> Callable[[Contexts, Callable[[], bool]], Contexts]:
    """Contexts of a file that lies in memory only where it is read, as it was now: what is written to it is seen there.

    A file that takes the name of this one is another, and does not matter; nor does it that what is there was written
    again, as by a copy or `touch`, which the function beside the contexts tells.

    Raises:
        DataError: from the contexts, once something else was written to it.
    """
    first = path.stat()
    known = {(first.st_mtime_ns, first.st_size)}

    def watching(contexts: Contexts, same: Callable[[], bool]) -> Contexts:
        def written() -> tuple[int, int]:
            """When the file was written to at last, and its size."""
            try:
                now = path.stat()
            except OSError:
                now = first
            if not os.path.samestat(now, first):
                now = first
            if (last := (now.st_mtime_ns, now.st_size)) not in known:
                if now.st_size != first.st_size or not same():  # in this order: of a shorter file nothing can be asked
                    raise DataError(
                        f"{path} was written to while it was read, and its ids may be others now; start again"
                    )
                known.add(last)
            return last

        def unchanged(start: int = 0) -> Iterator[Context]:
            last = written()
            for context in contexts(start):
                while (now := written()) != last:  # of a copy, of what may have been there for a moment: once more
                    last, context = now, next(contexts(start))
                yield context
                start += len(context[0])
                written()  # beyond its end the system ends whoever looks for more

        return unchanged

    return watching
