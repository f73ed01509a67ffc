"""What a result was made with: versions of packages, and the command."""

from __future__ import annotations

import functools
import hashlib
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["code_digest", "command_line", "versions"]


def command_line() -> str:
    """The command that runs, as a shell takes it again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def versions(*packages: str) -> dict[str, str]:
    """The versions of packages; empty for one that is not installed but found on a path, as a source tree may be."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


@functools.cache
def code_digest() -> str:
    """sha256 of the code of this package, which may differ where its version does not."""
    home, digest = Path(__file__).parents[1], hashlib.sha256()
    names = {path.relative_to(home) for path in home.rglob("*") if path.suffix in (".py", ".cpp", ".h")}
    for name in sorted(name for name in names if not any(part.startswith(".") for part in name.parts)):
        digest.update(name.as_posix().encode() + b"\0" + (home / name).read_bytes())
    return digest.hexdigest()
