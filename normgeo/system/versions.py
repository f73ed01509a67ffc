"""Which versions of packages a result was made with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions"]


def versions(*packages: str) -> dict[str, str]:
    """The versions of packages; empty for one that is not installed but found on a path, as a source tree may be."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
