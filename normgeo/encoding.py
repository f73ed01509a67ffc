"""Texts as token ids, a long one in pieces: what a tokenizer keeps for each character is a hundred times as large.

Pieces overlap, and are joined where both have the same tokens of the same characters, cut into the same words: from
there on a tokenizer does what it does in the whole. Where there is no such place, the text is taken as a whole.

A word is what a tokenizer's model is given. Merges of BPE depend on what is beside them, so that pieces may be joined
within one; Unigram's split of a word is that of the largest sum, and of equal sums the rounding of all before decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from tokenizers.models import BPE

__all__ = ["Encoder"]

PIECES_AT_ONCE = 16  # of a tokenizer that has many cores
PIECE = 1 << 17  # characters
REACH = 1 << 12  # characters that a piece has of its neighbours on either side
ALIKE = 8  # tokens in a row that two pieces must have in common


class _Piece(NamedTuple):
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
        self._cuts = bool(alone and around) and _says_where(tokenizer)
        self._within = self._cuts and isinstance(
            getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), BPE
        )
        self._before = around[0] if around else 0
        self._after = len(whole) - len(alone) - self._before

    def __call__(self, texts: Iterable[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Each text's number and its ids, those of a long one in several parts.

        No text is asked for before the ids of those before it were taken, but for a few at once.
        """
        whole = set[int]()  # documents that cannot be joined, of which no more pieces are wanted
        found = self._encoded(texts, whole)
        for piece, tokens in found:
            if piece.first and piece.last:
                yield piece.document, np.asarray(tokens + self._separator, np.int64)
            elif piece.document not in whole:
                for ids in self._joined(itertools.chain([(piece, tokens)], found), whole):
                    yield piece.document, ids

    def _encoded(self, texts: Iterable[str], whole: Container[int]) -> Iterator[tuple[_Piece, Any]]:
        """Every piece and its tokens, [tokens, 4]: id, first character, end, whether it begins a word.

        Of a document that is one piece they are a list of ids.
        """
        cut = itertools.chain.from_iterable(map(self._cut, itertools.count(), texts))
        pieces, at_once = (piece for piece in cut if piece.document not in whole), 1
        while chunk := list(itertools.islice(pieces, at_once)):
            places = not all(piece.first and piece.last for piece in chunk)
            options = {"return_offsets_mapping": True} if places else {}
            found = self._tokenizer([piece.seen for piece in chunk], verbose=False, **options)
            for i, (piece, ids) in enumerate(zip(chunk, found["input_ids"], strict=True)):
                if piece.first and piece.last:
                    yield piece, ids
                    continue
                tokens = np.zeros((len(ids), 4), np.int64)
                tokens[:, 0] = ids
                if len(ids):
                    tokens[:, 1:3] = np.asarray(found["offset_mapping"][i]) + piece.start
                    words = [-1 if word is None else word for word in found.word_ids(i)]
                    tokens[:, 3] = np.diff(words, prepend=-2) != 0
                yield piece, tokens
            at_once = min(2 * at_once, PIECES_AT_ONCE)  # a few tokens are in the first document

    def _cut(self, document: int, text: str) -> Iterator[_Piece]:
        pieces = max(1, len(text) // PIECE) if self._cuts else 1
        ends = [*(PIECE * i for i in range(1, pieces)), len(text)]
        return (_Piece(document, text, begin, end) for begin, end in zip([0, *ends], ends, strict=False))

    def _joined(self, pieces: Iterable[tuple[_Piece, np.ndarray]], whole: set[int]) -> Iterator[np.ndarray]:
        """The ids of one document: those of each piece up to where the next one has the same."""
        left, taken = np.empty((0, 4), np.int64), 0
        for piece, tokens in pieces:
            here = tokens[0 if piece.first else self._before : None if piece.last else len(tokens) - self._after]
            if not piece.first:
                if (seam := self._seam(left, here, piece)) is None:
                    whole.add(piece.document)
                    rest = self._tokenizer(piece.text, verbose=False)["input_ids"][taken:]
                    yield np.asarray(rest + self._separator, np.int64)
                    return
                yield left[: seam[0], 0]
                taken, here = taken + seam[0], here[seam[1] :]
            left = here
            if piece.last:  # before another is asked for
                yield np.append(left[:, 0], np.asarray(self._separator, np.int64))
                return

    def _seam(self, left: np.ndarray, right: np.ndarray, piece: _Piece) -> tuple[int, int] | None:
        """Of two pieces' tokens one that is in both near where the second begins, amid others that are; None without.

        White space as far as either sees is no place: a token behind it may take it in.
        """
        first, beyond = np.searchsorted(left[:, 1], [piece.begin - REACH // 2, piece.begin + REACH // 2])
        for i in range(first, min(beyond, len(left) - ALIKE + 1)):
            j = np.searchsorted(right[:, 1], left[i, 1])
            if not np.array_equal(left[i : i + ALIKE], right[j : j + ALIKE]):
                continue
            among = np.arange(1, ALIKE) if self._within else np.flatnonzero(left[i : i + ALIKE, 3])
            at = left[i, 1]
            if len(among) and piece.text[piece.start : at].strip() and piece.text[at : piece.begin + REACH].strip():
                return int(i + among[-1]), int(j + among[-1])
        return None


def _says_where(tokenizer: Any) -> bool:
    """Whether a tokenizer tells the characters and the word of each token."""
    try:
        found = tokenizer(["a"], return_offsets_mapping=True)
        return len(found["offset_mapping"][0]) == len(found.word_ids(0)) == len(found["input_ids"][0])
    except Exception:  # whatever one raises that does not know of it
        return False
