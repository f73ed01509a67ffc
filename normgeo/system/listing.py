"""What lies below a directory, whatever the order in which the system lists it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["below"]


def below(folder: Path, denied: Callable[[OSError], None]) -> Iterator[tuple[Path, list[str]]]:
    """A directory and all below it, through links too, each with the names of its files; hidden ones are left out.

    What lies here comes before what links lead to, so that it goes by its own name first. A directory with several
    names comes under each of them, and what is below it under the first.

    Args:
        folder: the directory.
        denied: called with the error of one that may not be read; one that is gone since it was listed is none.
    """

    def failed(error: OSError) -> None:
        if isinstance(error, PermissionError):
            denied(error)

    seen, starts = set[Path](), [folder]
    for start in starts:  # to which links are added
        for name, inside, files in os.walk(start, onerror=failed):
            path = Path(name)
            inside[:] = [] if (home := path.resolve()) in seen else sorted(filter(_shown, inside))
            starts += [path / each for each in inside if (path / each).is_symlink()]
            seen.add(home)
            yield path, sorted(filter(_shown, files))


def _shown(name: str) -> bool:
    return not name.startswith(".")
