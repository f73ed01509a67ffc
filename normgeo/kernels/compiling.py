"""C++ built by the system's compiler on first use, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["FLAGS", "compiled", "failed", "function"]

FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared",
    "-Wfatal-errors",  # a source that is not for this processor says so at once
)  # fmt: skip
HERE = Path(__file__).parent
_said: set[str] = set()
SECONDS = 600  # a compiler that takes longer is not waited for; on a busy machine it takes minutes
INSTEAD = "the environment's CXX names another compiler"
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def compiled(source: Path, flags: Sequence[str] = ()) -> Path:
    """The shared object of a source, built if these flags, this compiler and this processor have not met it before.

    Raises:
        RuntimeError: there is no compiler, or it fails, or NORMGEO_KERNELS=0 says to do without.
        OSError: the cache cannot be written, or others than this user may write it.
    """
    if os.environ.get("NORMGEO_KERNELS") == "0":
        raise RuntimeError("NORMGEO_KERNELS=0")
    if not (compiler := _compiler()):
        raise RuntimeError("no C++ compiler: neither g++ nor clang++ is installed")
    if sys.byteorder != "little" or sys.platform == "win32":
        raise RuntimeError(f"not built on {sys.platform}, {sys.byteorder} endian")
    texts = [path.read_text() for path in (source, *sorted(HERE.glob("*.h")))]
    key = "\0".join([*texts, *FLAGS, *flags, *compiler[1:], _version(*compiler), _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normgeo"
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_own(folder)
        if (path := _whole(folder, name)) is not None:
            return path
        with _alone(folder / f".{name}.lock"):
            return _whole(folder, name) or _built(folder, name, compiler, source, flags)
    except OSError as error:
        raise OSError(f"nothing can be built in {folder} ({error}); XDG_CACHE_HOME names another cache") from error


def failed(reason: str, instead: str = "computes norms in torch") -> None:
    """Say why norms have no kernels and what is done instead, each reason once, unless it is wanted so."""
    if os.environ.get("NORMGEO_KERNELS") != "0" and reason not in _said:
        _said.add(reason)  # before the warning, which may be an error
        warnings.warn(f"normgeo {instead}, which is slower: {reason}", stacklevel=3)


def _compiler() -> list[str]:
    """The words of the command that compiles: what CXX says (which may be `ccache g++`), or else one that there is."""
    named = os.environ.get("CXX", "")
    for command in ([named], named.split(), ["g++"], ["clang++"], ["c++"]):
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    return []


def _check_own(folder: Path) -> None:
    """Refuse a cache that others than this user and root may write: what is loaded from it does what they want.

    Raises:
        OSError: it is such a one.
    """
    about = folder.stat()
    if about.st_uid not in (own := os.geteuid(), 0) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        whose = f"it is user {about.st_uid}'s, mode {stat.S_IMODE(about.st_mode):o}"
        if about.st_uid == own:
            whose += f"; chmod go-w {shlex.quote(str(folder))} keeps them out"
        raise OSError(f"others may write there, and what they write would be run: {whose}")


def _whole(folder: Path, name: str) -> Path | None:
    """The object of this name whose bytes are those that were built; loading a damaged one may end the process."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):
            if path.stem == f"{name}-{_digest(path)}":
                return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process builds the same: together they would take longer than any waits."""
    with lock.open("w") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # some network disks have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a process that was forked meanwhile would hold it on
                    fcntl.flock(file, fcntl.LOCK_UN)


def _built(folder: Path, name: str, compiler: Sequence[str], source: Path, flags: Sequence[str]) -> Path:
    # where there are no locks others may build the same: each puts a file of its own in place, whole
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        fresh = Path(scratch) / f"{name}.so"
        _run(*compiler, *FLAGS, f"-I{HERE}", str(source), "-o", str(fresh), *flags)
        if not fresh.exists():
            raise RuntimeError(f"{' '.join(compiler)} built nothing; {INSTEAD}")
        with fresh.open("rb") as file:
            os.fsync(file.fileno())  # else its name may be kept without its bytes
        path = folder / f"{name}-{_digest(fresh)}.so"
        for damaged in folder.glob(f"{name}-*.so"):
            damaged.unlink(missing_ok=True)
        return fresh.replace(path)


def function(source: Path, name: str, result: Any, *arguments: Any, flags: Sequence[str] = ()) -> Any:
    """A function of a source that needs no headers, with these types of ctypes; None where it cannot be built."""
    try:
        found = getattr(ctypes.CDLL(str(compiled(source, flags))), name)
    except (OSError, RuntimeError):
        return None
    found.restype, found.argtypes = result, arguments
    return found


def _run(*command: str) -> str:
    pipe = subprocess.PIPE
    # it may say what is not in the locale's encoding
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, errors="replace", start_new_session=True) as running:
        try:
            out, complaints = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{command[0]} took more than {SECONDS} s; {INSTEAD}") from error
        finally:
            if running.returncode is None:  # it, and the compilers that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
    if running.returncode:
        lines = complaints.strip().splitlines()
        if full := next((line for line in lines if any(reason in line for reason in FULL)), None):
            raise OSError(full)  # which another compiler would say as well
        first = next((line for line in lines if "error" in line), lines[0] if lines else running.returncode)
        raise RuntimeError(f"{command[0]} failed ({first}); {INSTEAD}")
    return out


@functools.cache
def _version(*compiler: str) -> str:
    return _run(*compiler, "--version")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU ")))
