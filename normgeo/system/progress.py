"""The terminal: results and tables, and meanwhile, on standard error, lines and a bar of tokens done and time left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from normgeo.errors import RunError

__all__ = ["meanwhile", "plain", "printer", "printing", "progress_bar", "table"]


TURNS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # the order in which what follows is shown
CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160), *TURNS) if chr(code) not in "\n\t"
}
"""Characters that a terminal acts on: names, and whatever else files of others say, may hold any."""


def plain(text: str) -> str:
    """Text without characters that a terminal acts on, line ends and tabs aside."""
    return text.translate(CONTROL)


@contextmanager
def printing() -> Iterator[None]:
    """While results go to standard output; where it takes no more, what is left of them goes nowhere.

    Raises:
        RunError: it takes no more, as a file on a full disk.
    """
    try:
        yield
        if (stream := sys.stdout) is not None:  # as where a process was started without
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # pyright: ignore
        raise RunError(
            f"results could not be printed: {error.strerror}; files were written as far as the command writes any"
        ) from error


class _Printer(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Rich does; results in whole, or not without a word."""
        with nullcontext() if self.stderr else printing():
            super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """What is printed, of which only what Rich itself makes controls the terminal."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)


def printer(stderr: bool = False) -> Console:
    """A console that takes text as it is, since names of models and files may have brackets and colons in them."""
    stream = sys.stderr if stderr else sys.stdout  # None where a process was started without
    width = None if stream is not None and stream.isatty() else 132  # a pipe or a log has none of its own
    return _Printer(stderr=stderr, width=width, markup=False, emoji=False)


def table(*headers: str | Column) -> Table:
    """A table of results. What has no room in its column is broken: cut off, names that begin alike would be one."""
    columns = (Column(header, overflow="fold") if isinstance(header, str) else header for header in headers)
    return Table(*columns, box=SIMPLE)


meanwhile = printer(stderr=True)
"""One for lines and bars, so that lines go above the bar."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")


MEMORY = 3600.0
"""Seconds that a rate is the mean of, or the last 1,000 calls: a training step may take minutes."""


@contextmanager
def progress_bar(label: str, total: int, *, done: int = 0, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on standard error with a label; gives the function to call with the number of tokens just finished."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=meanwhile, disable=not enabled, speed_estimate_period=MEMORY) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda tokens: bar.advance(task, tokens)
