"""Directories that one process writes, and that are there whole or not at all."""

from __future__ import annotations

import datetime
import errno
import glob
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from normgeo.errors import NormGeoError, RunError
from normgeo.system.files import PARTIAL, check_folder, check_name, is_full, on_the_way, sync, unwritable
from normgeo.system.ranks import Ranks

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["alone", "claimed", "nothing_left", "numbered", "remove", "taken", "whole_directory"]

LOCK = ".lock"


def taken(out: Path) -> bool:
    """Whether a new directory cannot be made there: there is a file, or a directory that is not empty."""
    return out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir()))


def numbered(stem: Path) -> Iterator[Path]:
    """The path itself, and then with -2, -3 and so on behind it."""
    names = itertools.chain([stem.name], (f"{stem.name}-{number}" for number in itertools.count(2)))
    return map(stem.with_name, names)


@contextmanager
def claimed(out: Path | None, name: str, ranks: Ranks | None = None) -> Iterator[Path]:
    """The directory to write: what was asked for, or else a new `runs/<name>-<date>` that no other process has taken.

    Args:
        out: what was asked for, which need not be there.
        name: of a new one, with a number behind the date where that is taken. It is removed if it stays empty.
        ranks: this process among those of a run, of which the first makes the one for all; it may be alone.

    Raises:
        RunError: a new one cannot be made.
    """
    if out is not None:
        yield out
        return
    with ExitStack() as held:
        yield Path((ranks or Ranks()).first("out", lambda: str(held.enter_context(_new(name)))))


@contextmanager
def _new(name: str) -> Iterator[Path]:
    stem = Path("runs") / f"{name}-{datetime.date.today()}"
    check_folder(stem.parent)
    with ExitStack() as folders:
        try:
            folders.enter_context(_folders(stem.parent))
            new = next(path for path in numbered(stem) if _made(path))
        except OSError as error:
            raise unwritable(stem, error) from error
        try:
            yield new
        finally:
            with suppress(OSError):
                new.rmdir()


def _made(path: Path) -> bool:
    try:
        path.mkdir(parents=True)  # another process may just have removed an empty one
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
    with _folders(out), (out / LOCK).open("a") as file:
        if not _held(file.fileno(), out / LOCK):
            raise RunError(f"another process writes {out}; wait for it to end, or stop it first")
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


@contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """A directory that is there while inside; what was made for it, and stayed empty, is removed again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _held(file: int, path: Path) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some network disks have no locks
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())  # its holder may just have removed it


@contextmanager
def nothing_left(out: Path, begun: Callable[[NormGeoError], bool]) -> Iterator[None]:
    """Remove what was written to a directory that was empty when an error ends it, unless it can be resumed.

    Args:
        out: the directory.
        begun: whether there is something in it that is worth to be resumed after this error.

    Raises:
        RunError: the disk is full, and nothing is left.
    """
    try:
        yield
    except NormGeoError as error:
        if begun(error):
            raise
        with suppress(OSError):  # it would hide what is wrong
            _emptied(out)
        if is_full(error):
            again = "nothing was left behind: make space and give the same command again"
            raise RunError(f"the disk of {out} is full; {again}") from error
        raise


def _emptied(out: Path) -> None:
    """Remove all of a directory; and what a thread goes on writing for a while."""
    for _ in range(20):
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
        time.sleep(0.05)
        if all(path.name == LOCK for path in out.iterdir()):
            return


def remove(folder: Path) -> None:
    """Remove a directory with all in it, or a link to one, and not what that leads to.

    Raises:
        OSError: it cannot be removed, or is a file.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


@contextmanager
def whole_directory(out: Path, *, replace: bool = False, keep: bool = True) -> Iterator[Path]:
    """A directory to write into, which is there as `out` when everything in it is safely written, or not at all.

    An empty directory stays the one it is and gets the content: it may be a mount, or where somebody works. A link
    stays one: what it names is written. What a process left that was killed at it is removed by the next.

    Args:
        out: where.
        replace: in the place of what is there, which stays as it is until all is written: for what can be made again,
            since a kill between its removal and the renaming leaves neither. Only one process may do so. A link itself
            is replaced: what it leads to is nobody's to remove.
        keep: False leaves nothing behind: it was a trial.

    Raises:
        RunError: it cannot be written or the disk is full; or, where nothing is to be replaced, it is not empty.
    """
    check_name(out)
    # `.` has no name, and what a link names need not be there yet
    where = Path(os.path.realpath(out.parent)) / out.name if replace else Path(os.path.realpath(out))
    for home in (where, where.parent):
        _clear(home, where.name)
    if not replace and (taken(where) or where.is_symlink()):  # a link that is left leads to itself
        raise RunError(f"{out} exists already; choose another directory, nothing was written")
    home = where if where.exists() and not replace else where.parent
    with ExitStack() as folders:
        try:
            folders.enter_context(_folders(home))
            scratch = folders.enter_context(_scratch(home, where.name, fixed=replace))
        except OSError as error:
            is_file = isinstance(error, (FileExistsError, NotADirectoryError))
            why = "it is no directory" if is_file else error.strerror
            raise RunError(f"cannot write to {home}: {why}; nothing was written") from error
        try:
            yield scratch
            if keep:
                _settle(scratch)
                if replace and os.path.lexists(where):
                    remove(where)
                _moved_up(scratch) if home == where else os.replace(scratch, where)
        except Exception as error:
            if isinstance(error, OSError) or is_full(error):
                raise _unwritten(out, scratch, error, replace) from error
            raise


def _unwritten(out: Path, scratch: Path, error: Exception, replace: bool) -> RunError:
    """What a directory could not be written for, in one line."""
    if is_full(error):
        before = "what was there before is intact: make space and resume" if replace else "nothing was left behind"
        return RunError(f"cannot write {out}: the disk is full; {before}")
    path = getattr(error, "filename", None)
    elsewhere = path is not None and not on_the_way(path, scratch)  # as of what is copied
    why = str(error) if elsewhere else getattr(error, "strerror", None) or str(error)
    return RunError(f"cannot write {out}: {why}; nothing was left behind")


@contextmanager
def _scratch(home: Path, name: str, *, fixed: bool) -> Iterator[Path]:
    """A new directory beside what it becomes, removed if it is still there at the end.

    One of a fixed name takes the place of that of a process that died. Another is locked while its process lives.
    """
    scratch = home / (f".{name}{PARTIAL}" if fixed else f".{name}-{secrets.token_hex(4)}{PARTIAL}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    lock = os.open(scratch, os.O_RDONLY) if fcntl is not None else None
    try:
        if lock is not None and not _held(lock, scratch):
            raise OSError(errno.EAGAIN, "another process took its scratch directory for left behind")
        yield scratch
    finally:
        if lock is not None:
            os.close(lock)
        with suppress(OSError):  # it is renamed by now, or it would hide what is wrong
            _emptied(scratch)
            scratch.rmdir()


def _clear(home: Path, name: str) -> None:
    """Remove the scratch directories of processes that were killed, whose locks are free: they may be large."""
    if fcntl is None:
        return
    for left in home.glob(f".{glob.escape(name)}-{'[0-9a-f]' * 8}{PARTIAL}"):
        with suppress(OSError):  # it is in use, or not ours, or the disk has no locks
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _settle(folder: Path) -> None:
    """Have it all on the disk, for those to read who may read the folder: safetensors writes for its owner alone."""
    mode = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)
        if path.is_file():
            sync(path)


def _moved_up(folder: Path) -> None:
    """Move what a directory holds beside it, where there must be nothing else, as `rename` would have it."""
    if any(path != folder and path.name != LOCK for path in folder.parent.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    with ExitStack() as back:
        # without these nothing is loaded, or taken for whole
        for path in sorted(folder.iterdir(), key=lambda path: path.name in ("config.json", "run.json")):
            back.callback(path.rename(folder.with_name(path.name)).rename, path)
        back.pop_all()
