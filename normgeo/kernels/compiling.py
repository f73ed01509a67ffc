"""C++ built by the system's compiler on first use, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["FLAGS", "compiled", "function"]

FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared",
)  # fmt: skip
HERE = Path(__file__).parent
SECONDS = 120  # a compiler that takes longer is not waited for


def compiled(source: Path, flags: Sequence[str] = ()) -> Path:
    """The shared object of a source, built if these flags, this compiler and this processor have not met it before.

    Raises:
        RuntimeError: there is no compiler, or it fails, or NORMGEO_KERNELS=0 says to do without.
        OSError: the cache cannot be written.
    """
    if os.environ.get("NORMGEO_KERNELS") == "0":
        raise RuntimeError("NORMGEO_KERNELS=0")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler: neither g++ nor clang++ is installed")
    if sys.byteorder != "little" or sys.platform == "win32":
        raise RuntimeError(f"not built on {sys.platform}, {sys.byteorder} endian")
    texts = [path.read_text() for path in (source, *sorted(HERE.glob("*.h")))]
    key = "\0".join([*texts, *FLAGS, *flags, _run(compiler, "--version"), _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normgeo"
    path = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # others may be building the same: each builds its own file, and the last to finish puts its in place
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
            fresh = Path(scratch) / path.name
            _run(compiler, *FLAGS, f"-I{HERE}", str(source), "-o", str(fresh), *flags)
            fresh.replace(path)
    except OSError as error:
        raise OSError(f"nothing can be built in {folder} ({error}); XDG_CACHE_HOME names another cache") from error
    return path


def function(source: Path, name: str, result: Any, *arguments: Any, flags: Sequence[str] = ()) -> Any:
    """A function of a source that needs no headers, with these types of ctypes; None where it cannot be built."""
    try:
        found = getattr(ctypes.CDLL(str(compiled(source, flags))), name)
    except (OSError, RuntimeError):
        return None
    found.restype, found.argtypes = result, arguments
    return found


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[0] if lines else error.returncode)
        raise RuntimeError(f"{command[0]} failed ({why}); the environment's CXX names another compiler") from error
    except subprocess.SubprocessError as error:
        raise RuntimeError(str(error)) from error


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU ")))
