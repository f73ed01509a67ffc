"""Texts as token ids, a long one in pieces: what a tokenizer keeps for each character is a hundred times as large.

Ids depend on what is near alone, but that is a matter of the tokenizer, which nobody promises. So pieces overlap, and
are joined where both have the same tokens at the same characters; where they have none, the text is taken as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Encoder"]

PIECES_AT_ONCE = 16  # of a tokenizer that has many cores
PIECE = 1 << 17  # characters
REACH = 1 << 11  # characters that a piece has of its neighbours on either side
ALIKE = 8  # tokens in a row that two pieces must have in common


@dataclass(frozen=True)
class _Piece:
    """A document's number, its text, and the characters that are meant; all of them are where it is in one piece."""

    document: int
    text: str
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """Whether nothing comes before."""
        return self.begin == 0

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.end == len(self.text)

    @property
    def start(self) -> int:
        """The first character that the tokenizer sees."""
        return max(0, self.begin - REACH)

    @property
    def seen(self) -> str:
        """What the tokenizer sees."""
        return self.text[self.start : self.end + REACH]


class Encoder:
    """Documents' ids as they are packed: with the tokenizer's special tokens, or else its end-of-text token, if any.

    Attributes:
        between: what separates documents, in words.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = [i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None]  # an id can be 0
        whole, alone = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
        by_itself = len(whole) > len(alone)
        self._separator = [] if by_itself else ends[:1]
        between = f"token {self._separator[0]} after each" if self._separator else "nothing between"
        self.between = "the tokenizer's special tokens" if by_itself else between
        around = [i for i in range(len(whole) - len(alone) + 1) if whole[i : i + len(alone)] == alone]
        self._cuts = bool(getattr(tokenizer, "is_fast", False) and alone and around)  # others do not say what is where
        self._before = around[0] if around else 0
        self._after = len(whole) - len(alone) - self._before

    def __call__(self, texts: Iterable[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Each text's number and its ids, those of a long one in several parts.

        No text is asked for before the ids of those before it were taken, but for a few at once.
        """
        for document, pieces in itertools.groupby(self._encoded(texts), key=lambda found: found[0].document):
            for ids in self._joined(pieces):
                yield document, ids

    def _encoded(self, texts: Iterable[str]) -> Iterator[tuple[_Piece, np.ndarray]]:
        """Every piece and its tokens, [tokens, 3]: the id, and of a piece of several where it begins and ends."""
        pieces, at_once = itertools.chain.from_iterable(map(self._cut, itertools.count(), texts)), 1
        while chunk := list(itertools.islice(pieces, at_once)):
            places = not all(piece.first and piece.last for piece in chunk)
            options = {"return_offsets_mapping": True} if places else {}
            found = self._tokenizer([piece.seen for piece in chunk], verbose=False, **options)
            for i, piece in enumerate(chunk):
                tokens = np.zeros((len(found["input_ids"][i]), 3), np.int64)
                tokens[:, 0] = found["input_ids"][i]
                if places and len(tokens):
                    tokens[:, 1:] = np.asarray(found["offset_mapping"][i]) + piece.start
                yield piece, tokens
            at_once = min(2 * at_once, PIECES_AT_ONCE)  # a few tokens are in the first document

    def _cut(self, document: int, text: str) -> Iterator[_Piece]:
        pieces = max(1, len(text) // PIECE) if self._cuts else 1
        ends = [*(PIECE * i for i in range(1, pieces)), len(text)]
        return (_Piece(document, text, begin, end) for begin, end in zip([0, *ends], ends, strict=False))

    def _joined(self, pieces: Iterable[tuple[_Piece, np.ndarray]]) -> Iterator[np.ndarray]:
        """The ids of one document: those of each piece up to where the next one has the same."""
        left, taken = np.empty((0, 3), np.int64), 0
        for piece, tokens in pieces:
            here = tokens[0 if piece.first else self._before : None if piece.last else len(tokens) - self._after]
            if not piece.first:
                if (seam := _seam(left, here, piece.begin)) is None:
                    rest = self._tokenizer(piece.text, verbose=False)["input_ids"][taken:]
                    yield np.asarray(rest + self._separator, np.int64)
                    return
                yield left[: seam[0], 0]
                taken, here = taken + seam[0], here[seam[1] :]
            left = here
            if piece.last:  # before another is asked for
                yield np.append(left[:, 0], np.asarray(self._separator, np.int64))
                return


def _seam(left: np.ndarray, right: np.ndarray, near: int) -> tuple[int, int] | None:
    """Of two pieces' tokens one that is in both, behind a character, amid others that are; None where there is none."""
    first, beyond = np.searchsorted(left[:, 1], [near - REACH // 2, near + REACH // 2])
    for i in range(first, min(beyond, len(left) - ALIKE + 1)):
        j = np.searchsorted(right[:, 1], left[i, 1])
        if np.array_equal(left[i : i + ALIKE], right[j : j + ALIKE]):
            return int(i) + ALIKE // 2, int(j) + ALIKE // 2
    return None
