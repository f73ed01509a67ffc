"""Files that are there whole or not at all, and can be written: known before what goes into them is measured."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgeo.errors import RunError
from normgeo.system.records import parsed

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "PARTIAL", "check_file", "check_folder", "check_name", "disk_explained", "file_digest", "is_full", "on_the_way",
    "passing_folder", "read_table", "status_in", "sync", "unreadable", "unwritable", "write_json", "write_synced",
    "write_table", "write_whole",
]  # fmt: skip

PARTIAL = ".partial"
"""What the names of files and directories end with that are not whole."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_IN_WORDS = ("No space left", "File too large")  # what safetensors hands on of an error of the system
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO)
IN_THE_WAY = (errno.EISDIR, errno.EEXIST)  # a directory where a file should be, or a file where a directory should


def check_file(out: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured for it; None is no file.

    Raises:
        RunError: it is a directory, or named as another format, its directory is missing, or nothing can be written
            there.
    """
    if out is None:
        return
    if (suffix := out.suffix) not in ("", ".parquet") and not out.is_dir():
        raise RunError(f"tables are written as .parquet, not {suffix}; give --out {out.with_suffix('.parquet')}")
    try:
        if out.exists() and not out.is_file():
            raise RunError(f"cannot write a table to {out}, which is no file; give the name of one as --out")
        if not out.parent.is_dir():
            raise RunError(f"there is no directory {out.parent} to write {out.name} in; make it first")
        _try(out.parent, out.name)
    except OSError as error:
        raise unwritable(out, error) from error


def check_folder(out: Path, option: str | None = "--out") -> None:
    """Refuse a directory that could not be written, before anything is measured for it; it need not be there yet.

    Args:
        out: the directory.
        option: what gives another; None where it has to be this one, in which something was begun.

    Raises:
        RunError: it, or what it would be made in, is no directory, nothing can be written there, or its name is none
            that the libraries that write to it could pass on.
    """
    check_name(out, option or "directory")
    try:
        there = next(path for path in (out, *out.parents) if os.path.lexists(path))
        if not there.exists():
            link = f"{'it' if there == out else there} is a link to {there.readlink()}"
            raise RunError(f"cannot write to {out}: {link}, and nothing is there; make that first")
        if not there.is_dir():
            raise RunError(f"cannot write to {out}: {there} is no directory; give another {option or 'directory'}")
        _try(there)
    except OSError as error:
        raise unwritable(out, error, option) from error


def check_name(out: Path, option: str = "directory") -> None:
    """Refuse a name that the libraries that write to it could not pass on.

    Raises:
        RunError: it is none in the file system's encoding.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"cannot write to {os.fsencode(out)!r}: Python takes file names to be {sys.getfilesystemencoding()} here, "
            f"which that is not; set PYTHONUTF8=1, or give another {option}"
        ) from error


def _try(folder: Path, name: str | None = None) -> None:
    """Write a file, for rights alone do not tell: with a name, as long a one as that of `write_whole`'s scratch.

    Where none is given it has none, so that a kill leaves nothing in a folder that has to be empty.
    """
    with tempfile.TemporaryFile(dir=folder) if name is None else tempfile.NamedTemporaryFile(dir=folder, prefix=name):
        pass


def unwritable(out: Path, error: OSError, option: str | None = "--out") -> RunError:
    """What is said of a place that the system does not let write to; see `check_folder`."""
    otherwise = "make it writable" if option is None else f"give another {option}"
    return RunError(f"cannot write {out}: {error.strerror or error}; {otherwise}")


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
        raise unwritable(out, error) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or, after a kill or on a full disk, as it was before.

    A link stays one: the file that it names is written.
    """
    path = path.resolve() if path.is_symlink() else path
    scratch = path.with_name(path.name + PARTIAL)
    try:
        write_synced(scratch, content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, whose bytes, though not yet its name, then survive a power cut.

    What is there goes: a writer that was killed left it, or somebody who knew the name put a link there, and what that
    leads to is not to be written.
    """
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_whole` does."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def status_in(record: Path) -> str | None:
    """How far a run has come, as its record says; None where there is no record that can be read."""
    try:
        return parsed(record.read_text())["status"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def unreadable(path: Path | str, error: Exception, instead: str) -> RunError:
    """What is said of a record that is damaged, or lacks what this version of normgeo reads or has what it does not."""
    return RunError(
        f"{path} is damaged, or was written by another version of normgeo ({type(error).__name__}: {error}); resume "
        f"with that version, or {instead}"
    )


def file_digest(path: Path) -> str:
    """sha256 of what is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path) -> pd.DataFrame:
    """A table of a parquet file.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise RunError(f"{path} cannot be read as a table ({' '.join(str(error).split())[:200]})") from error


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error."""
    while error is not None:
        if getattr(error, "errno", None) in FULL or any(words in str(error) for words in FULL_IN_WORDS):
            return True
        error = error.__cause__
    return False


@contextmanager
def disk_explained(out: Path | str) -> Iterator[None]:
    """A full disk of a run that can be resumed, what is in its way, or a place that nobody can write to, as one line.

    Raises:
        RunError: that line.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            safe = f"what was committed is safe: make space and give --resume {out}"
            raise RunError(f"the disk of {out} is full; {safe}") from error
        gone = error.errno == errno.ENOENT and "://" not in str(out) and not os.path.lexists(out)
        if not gone and error.errno not in (*UNWRITABLE, *IN_THE_WAY):
            raise
        if error.filename is not None and not on_the_way(error.filename, out):
            raise  # of another place
        if gone:
            raise RunError(f"{out} is gone: it was removed while it was written; begin again") from error
        if error.errno in IN_THE_WAY:
            there = error.filename2 or error.filename
            raise RunError(f"{there} is in the way ({error.strerror}); move it and give --resume {out}") from error
        raise RunError(f"{out} cannot be written: {error.strerror}; give another place") from error


@contextmanager
def passing_folder() -> Iterator[Path]:
    """A directory that is gone afterwards, where the system has such.

    Raises:
        RunError: there is no room.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="normgeo-") as folder:
            yield Path(folder)
    except OSError as error:
        if not is_full(error):
            raise
        where = f"{tempfile.gettempdir()}, where files wait until they are put, is full"
        raise RunError(f"{where}: make space there, or name another directory in TMPDIR, and resume") from error


def on_the_way(path: Any, place: Path | str) -> bool:
    """Whether a path is a place, below it or above it."""
    a, b = Path(os.path.abspath(path)), Path(os.path.abspath(place))
    return a.is_relative_to(b) or b.is_relative_to(a)
