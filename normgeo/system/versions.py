"""What a result was made with: versions of packages, and the command."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["command_line", "versions"]


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
