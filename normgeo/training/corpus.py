"""What twins are trained on: contexts in an order that a seed decides, from any position on.

Text is packed as everywhere (`normgeo.packing`). That of files is kept in memory as ids, and shuffled anew in every
pass; that of the hub is streamed in its own order. Either way a position is plain JSON, so
that a run that is killed goes on with the context it would have had.
"""

from __future__ import annotations

import array
import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from normgeo.encoding import Encoder
from normgeo.errors import DataError
from normgeo.hub import opened, unreachable
from normgeo.tokens import ROWS, TokenStream, load_tokens, on_hub

__all__ = ["Corpus", "Shuffled", "Streamed", "kept", "open_corpus"]


@runtime_checkable
class Corpus(Protocol):
    """Contexts without end.

    Attributes:
        digest: sha256 of the data, or the data set's name: what a resumed run compares.
        packing: how documents became contexts, in words.
    """

    digest: str
    packing: str

    def take(self, rows: int) -> Int64[Tensor, "rows time"]:
        """The next contexts."""
        ...

    def position(self) -> dict[str, Any]:
        """Where the next context is, as plain JSON."""
        ...

    def seek(self, position: dict[str, Any] | None = None) -> None:
        """Go where `position` was, or to the beginning, as every training does at its start."""
        ...


class Shuffled:
    """Contexts of ids in memory: each pass cuts the ids at another offset and shuffles, as the seed decides.

    Rows of an array are sequences of their own: no context goes on from one to the next, and they are always cut at
    their beginning, into whole contexts.

    Raises:
        DataError: fewer ids than one context needs.
    """

    def __init__(self, tokens: TokenStream, context: int, seed: int) -> None:
        self.largest = last = n_tokens = 0
        ids = array.array("i")  # which grows in its place: pieces to put together would be as much again
        for batch in tokens.batches(None, 64):
            self.largest = max(self.largest, int(batch.ids.max(initial=0)))  # before it may become another id
            last, n_tokens = int(batch.document[-1, -1]), n_tokens + batch.n_tokens
            if tokens.row is None or batch.ids.shape[1] == context:
                ids.frombytes(batch.ids.astype(np.int32).tobytes())
        self.digest, self.packing = tokens.digest, tokens.packing
        self._context, self._seed, self._next = context, seed, 0
        self._pass: tuple[int, int, np.ndarray] | None = None
        if rows := 0 if tokens.row is None else last + 1:
            self.packing = f"{ROWS}, cut into whole contexts"
        self._ids = np.frombuffer(ids, np.int32)
        self._rows = len(self._ids) // context if rows else (len(self._ids) - 1) // context
        if not self._rows:
            needed, there = ("rows of at least", f" in {rows:,} rows") if rows else ("more than", "")
            raise DataError(
                f"training needs {needed} {context:,} tokens, one context; {tokens.source} has {n_tokens:,}{there}; "
                "give more, or a smaller --context"
            )

    def _order(self, number: int) -> tuple[int, np.ndarray]:
        """The offset and the order of the contexts in a pass."""
        if self._pass is None or self._pass[0] != number:
            rng = np.random.default_rng([self._seed, number])
            offset = int(rng.integers(0, max(1, len(self._ids) - self._rows * self._context)))
            self._pass = number, offset, rng.permutation(self._rows)
        return self._pass[1:]

    def take(self, rows: int) -> Int64[Tensor, "rows time"]:
        """The next contexts.

        Raises:
            DataError: they do not fit into memory.
        """
        try:
            out = np.empty((rows, self._context), np.int64)
        except MemoryError as error:
            size = f"{rows:,} contexts of {self._context:,} tokens"
            raise DataError(f"{size} do not fit into memory; give a smaller --batch") from error
        for i in range(rows):
            number, row = divmod(self._next, self._rows)
            offset, order = self._order(number)
            start = offset + int(order[row]) * self._context
            out[i] = self._ids[start : start + self._context]
            self._next += 1
        return torch.from_numpy(out)

    def position(self) -> dict[str, Any]:
        """How many contexts came."""
        return {"next": self._next}

    def seek(self, position: dict[str, Any] | None = None) -> None:
        """Go where `position` was, or to the beginning."""
        self._next = 0 if position is None else position["next"]


class Streamed:
    """Contexts of a data set that is streamed, in its own order, packed as all text is.

    Args:
        dataset: opens the data set, an iterable of rows that knows its position (`state_dict`).
        tokenizer: what makes ids of text.
        context: tokens in a context.
        digest: the data set's name.
        exclude: documents to leave out, by their whole text.
        of: the text of a row.
    """

    def __init__(
        self,
        dataset: Callable[[], Any],
        tokenizer: Any,
        context: int,
        digest: str,
        exclude: Collection[str] = frozenset(),
        of: Callable[[Any], str] = itemgetter("text"),
    ) -> None:
        self.digest, self._of, self._context, self._exclude = digest, of, context, exclude
        self._encode = Encoder(tokenizer)
        self.packing = f"documents packed in the data set's order, {self._encode.between}"
        self._open = dataset
        self.seek()

    def _document(self) -> str:
        row = next(self._documents, None)
        if row is None:  # the next pass
            if not self._seen or self._useless >= self._seen:
                raise DataError(
                    f"{self.digest} has no text in it{', beside what is excluded' if self._exclude else ''}"
                )
            self._pass, self._seen = self._pass + 1, 0
            self._dataset, self._at = self._open(), None  # one that was sent to a position begins there again
            self._documents = iter(self._dataset)
            return self._document()
        self._seen, self._at = self._seen + 1, None
        return self._of(row)

    def take(self, rows: int) -> Int64[Tensor, "rows time"]:
        """The next contexts.

        Raises:
            DataError: the connection is lost, or there is no text.
        """
        parts, count, needed = [self._left], len(self._left), rows * self._context
        while count < needed:
            try:
                text = self._document()
            except DataError:
                raise
            except Exception as error:  # whatever the hub, its client or the connection raises
                raise unreachable(self.digest, error) from error
            self._useless += 1
            if text.strip() and text not in self._exclude:
                self._useless = 0
                new = [ids for _, ids in self._encode([text])]
                parts += new  # in place: a step may take a hundred thousand short documents
                count += sum(map(len, new))
        ids = np.concatenate(parts)
        self._left = ids[needed:]
        return torch.from_numpy(ids[:needed].reshape(rows, self._context).copy())

    def position(self) -> dict[str, Any]:
        """The data set's own position, the pass, and the ids that are left over."""
        at = self._dataset.state_dict() if self._at is None else self._at
        return {"pass": self._pass, "seen": self._seen, "dataset": at, "left": self._left.tolist()}

    def seek(self, position: dict[str, Any] | None = None) -> None:
        """Go where `position` was, or to the beginning."""
        at = {"dataset": None, "pass": 0, "seen": 0, "left": []} if position is None else position
        self._dataset, self._at = self._open(), at["dataset"]  # it does not know where it was sent before it is read
        if self._at is not None:
            self._dataset.load_state_dict(copy.deepcopy(self._at))
        self._documents = iter(self._dataset)
        self._pass, self._seen = at["pass"], at["seen"]
        self._useless = 0  # documents since one that was taken
        self._left = np.asarray(at["left"], np.int64)


def kept(tokens: TokenStream) -> TokenStream:
    """The same packed text, its ids in memory: whatever becomes of its file, it is read and tokenized once."""
    contexts = list(tokens.contexts(0))
    return replace(tokens, contexts=lambda start=0: iter(contexts[start // tokens.context :]))


def open_corpus(
    data: str, tokenizer: Any, context: int, seed: int, exclude: Collection[str] = frozenset(),
    revision: str | None = None,
) -> Corpus:  # fmt: skip
    """What `normgeo train --data` names: text on the hub, the sample, or a path of text or ids.

    Raises:
        DataError: data that is missing, of an unknown format or too little, or cannot be streamed.
    """
    if hub := on_hub(data):
        hub = replace(hub, revision=revision) if revision else hub.pinned()
        return Streamed(lambda: opened(hub), tokenizer, context, hub.name, exclude, hub.of)
    return Shuffled(load_tokens(data, tokenizer, context, exclude=exclude), context, seed)
