"""The statistics of a run so far, on the disk: of which tokens, and measured by one process or by several.

state/<model>.safetensors              what the first process has, with all that was measured before
state/parts/<model>/<n>.safetensors    what process n has, until the first puts all of it together
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from normgeo.angles.statistics import AngleStatistics
from normgeo.system.files import PARTIAL, unreadable, write_whole

__all__ = ["Span", "State", "joined", "missing", "n_tokens"]

Span = tuple[int, int]
"""Tokens: from that of the first number up to that of the second."""

AGAIN = "start again in another directory"
WITHOUT = "remove it: what it is of is measured again"


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same tokens in as few spans as possible, in order.

    >>> joined([(6, 8), (0, 2), (2, 5)])
    [(0, 5), (6, 8)]
    """
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def n_tokens(spans: Iterable[Span]) -> int:
    """How many tokens these spans are of, none twice."""
    return sum(stop - start for start, stop in spans)


def missing(done: Iterable[Span], whole: int, block: int) -> list[Span]:
    """What is left of so many tokens, in order and divided where a block ends.

    >>> missing([(2, 4), (6, 7)], 9, 4)
    [(0, 2), (4, 6), (7, 8), (8, 9)]
    """
    out, begin = [], 0
    for start, stop in [*joined(done), (whole, whole)]:
        while begin < start:
            end = min(start, begin - begin % block + block)
            out.append((begin, end))
            begin = end
        begin = stop
    return out


class State:
    """Where the statistics of a model are kept, of the tokens that were measured so far.

    Args:
        folder: where runs keep them.
        name: what the model is called there.
        of: what is measured of what: the statistics of another model or run are not gone on with.
    """

    def __init__(self, folder: Path, name: str, of: str) -> None:
        self.file, self.parts, self.of = folder / f"{name}.safetensors", folder / "parts" / name, of

    def save(self, statistics: AngleStatistics, done: Sequence[Span], rank: int = 0) -> None:
        """Write what this process has measured. A kill leaves the new file or the one before it, never a part.

        Raises:
            OSError: the disk is full.
        """
        state, tokens = statistics.state_dict(), json.dumps(joined(done))
        path = self.parts / f"{rank}.safetensors" if rank else self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path, safetensors.torch.save(state, {"tokens_done": tokens, "sha256": _checksum(state, tokens, self.of)})
        )

    def restored(self, statistics: AngleStatistics) -> list[Span]:
        """Add all that was measured so far to empty statistics; the tokens that it is of."""
        done = self._added(self.file, statistics, [], AGAIN) if self.file.is_file() else []
        return self.gathered(statistics, done)

    def gathered(self, statistics: AngleStatistics, done: Sequence[Span]) -> list[Span]:
        """Add what the other processes measured to the statistics of these tokens, and save everything in one file.

        A kill in between may leave parts that are in that file already: their tokens count once.

        Raises:
            RunError: a file is damaged.
        """
        for part in (parts := sorted(self.parts.glob("*.safetensors"))):
            done = self._added(part, statistics, done, WITHOUT)
        if parts:
            self.save(statistics, done)
        for file in (*parts, *self.parts.glob(f"*{PARTIAL}")):  # or what a process was writing when it was killed
            file.unlink()
        with suppress(OSError):  # there are none, or a file system may show one late
            self.parts.rmdir()
            self.parts.parent.rmdir()
        return list(done)

    def _added(self, path: Path, statistics: AngleStatistics, done: Sequence[Span], otherwise: str) -> list[Span]:
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["sha256"] != _checksum(state, about["tokens_done"], self.of):
                raise ValueError("its checksum is wrong")
            spans = [(int(start), int(stop)) for start, stop in json.loads(about["tokens_done"])]
            if (both := joined([*done, *spans])) != list(done):
                if n_tokens(both) != n_tokens(done) + n_tokens(spans):
                    raise ValueError("some of its tokens were measured elsewhere too")
                statistics.add_state_dict(state)
        except (safetensors.SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise unreadable(path, error, otherwise) from error
        return both


def _checksum(state: Mapping[str, Tensor], tokens_done: str, of: str) -> str:
    digest = hashlib.sha256(json.dumps([of, tokens_done]).encode())
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()
