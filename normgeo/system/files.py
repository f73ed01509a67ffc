"""Files that are there whole or not at all, and can be written: known before what goes into them is measured."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from normgeo.errors import RunError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "alone", "check_file", "check_folder", "claimed", "emptied", "numbered", "taken", "write_table", "write_whole",
]  # fmt: skip

PARTIAL, LOCK = ".partial", ".lock"


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
    return out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir()))


def numbered(stem: Path) -> Iterator[Path]:
    """The path itself, and then with -2, -3 and so on behind it."""
    names = itertools.chain([stem.name], (f"{stem.name}-{number}" for number in itertools.count(2)))
    return map(stem.with_name, names)


@contextmanager
def claimed(out: Path | None, stem: Path) -> Iterator[Path]:
    """The directory to write: what was asked for, or else a new one that no other process has taken.

    Args:
        out: what was asked for, which need not be there.
        stem: what a new one is called, with a number behind it where that is taken. It is removed if it stays empty.

    Raises:
        RunError: a new one cannot be made.
    """
    if out is not None:
        yield out
        return
    check_folder(stem.parent)
    home = not stem.parent.exists()
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        new = next(path for path in numbered(stem) if _made(path))
    except OSError as error:
        raise _unwritable(stem, error) from error
    try:
        yield new
    finally:
        with suppress(OSError):
            new.rmdir()
            if home:
                new.parent.rmdir()


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep all other processes from writing to a directory while inside.

    It is made where there is none, and removed again if it stays empty. The system's lock on a file is free again when
    its holder has ended, however it ended.

    Raises:
        RunError: another process writes there.
    """
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("a") as file:
        if not _held(file.fileno(), out / LOCK):
            raise RunError(f"another process writes {out}; wait for it to end, or stop it first")
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)
            if made:
                with suppress(OSError):
                    out.rmdir()


def _held(file: int, path: Path) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some network disks have no locks
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())  # its holder may just have removed it


def emptied(out: Path) -> None:
    """Remove what was written to a directory that was empty."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)


def check_folder(out: Path, option: str = "--out") -> None:
    """Refuse a directory that could not be written, before anything is measured for it; it need not be there yet.

    Args:
        out: the directory.
        option: what gives another.

    Raises:
        RunError: it, or what it would be made in, is no directory, or nothing can be written there.
    """
    try:
        if out.is_symlink() and not out.exists():
            raise RunError(
                f"cannot write to {out}: it is a link to {out.readlink()}, which is not there; make that first"
            )
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
