"""Files that are there whole or not at all, and can be written: known before what goes into them is measured."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from normgeo.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_file", "check_folder", "emptied", "numbered", "taken", "write_table", "write_whole"]

PARTIAL = ".partial"


def check_file(out: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured for it; None is no file.

    Raises:
        RunError: it is a directory, its directory is missing, or nothing can be written there.
    """
    if out is None:
        return
    try:
        if out.exists() and not out.is_file():
            raise RunError(f"cannot write a table to {out}, which is no file; give the name of one as --out")
        if not out.parent.is_dir():
            raise RunError(f"there is no directory {out.parent} to write {out.name} in; make it first")
        _try(out.parent, out.name)
    except OSError as error:
        raise _unwritable(out, error) from error


def taken(out: Path) -> bool:
    """Whether a new directory cannot be made there: there is a file, or a directory that is not empty."""
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def numbered(stem: Path) -> Path:
    """A path that is not there yet: this one, or with -2, -3 and so on behind it."""
    names = itertools.chain([stem.name], (f"{stem.name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(stem.with_name, names) if not path.exists())


def emptied(out: Path, *, whole: bool) -> None:
    """Remove what was written to a directory that was empty or not there; the directory too, if `whole`."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if whole:
        out.rmdir()


def check_folder(out: Path, option: str = "--out") -> None:
    """Refuse a directory that could not be written, before anything is measured for it; it need not be there yet.

    Args:
        out: the directory.
        option: what gives another.

    Raises:
        RunError: it, or what it would be made in, is no directory, or nothing can be written there.
    """
    try:
        there = next(path for path in (out, *out.parents) if path.exists())
        if not there.is_dir():
            raise RunError(f"cannot write to {out}: {there} is no directory; give another {option}")
        _try(there)
    except OSError as error:
        raise _unwritable(out, error, option) from error


def _try(folder: Path, name: str = "normgeo") -> None:
    """Write a file that is as long in its name as `write_whole`'s scratch: rights alone do not tell."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=name):
        pass


def _unwritable(out: Path, error: OSError, option: str = "--out") -> RunError:
    return RunError(f"cannot write {out}: {error.strerror or error}; give another {option}")


def write_table(frame: pd.DataFrame, out: Path | None) -> None:
    """Write a table as parquet, whole or not at all; None is nowhere.

    Raises:
        RunError: it cannot be written.
    """
    if out is None:
        return
    try:
        write_whole(out, frame.to_parquet(None, index=False))
    except OSError as error:
        raise _unwritable(out, error) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or, after a kill or on a full disk, as it was before.

    A link stays one: the file that it names is written.
    """
    path = path.resolve() if path.is_symlink() else path
    scratch = path.with_name(path.name + PARTIAL)
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
