"""Who writes a store in an object store, as its lock says."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normgeo.system.processes import has_ended, machine

__all__ = ["Held", "holder", "is_dead", "read_holder", "still_held", "version_of"]

UNKNOWN = {"run": None, "host": "an unknown host", "pid": "unknown", "machine": None, "shared": True}
"""Who holds a lock that cannot be read."""


def holder(run: str, shared: bool = False, renewed: int = 0) -> bytes:
    """Who writes; never twice the same, since S3's tag is a hash of the content."""
    about = {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "machine": machine(), "shared": shared}
    return json.dumps(about | {"renewed": renewed}).encode()


def read_holder(content: bytes) -> dict[str, Any]:
    """What `holder` wrote; nobody known for anything else, as another tool or version may leave."""
    try:
        return UNKNOWN | json.loads(content)
    except (ValueError, TypeError):
        return UNKNOWN


def is_dead(found: Mapping[str, Any]) -> bool:
    """Whether a process was here, and is no more."""
    return has_ended(found["machine"], found["pid"])


def still_held(where: str, writer: Mapping[str, Any], silent: float, lease: float) -> str:
    """In words, who writes there, and how many seconds after it was heard of it is taken for dead."""
    return (
        f"another process writes {where}: process {writer['pid']} of {writer['host']}, last heard of "
        f"{max(0, silent):.0f} s ago; wait for it to end, or give another --store. If it is dead, --resume {where} "
        f"takes over {lease:.0f} s after it was last heard of"
    )


@dataclass
class Held:
    """A lock that is held: by which run, of several processes or one, in which version, renewed how often."""

    run: str
    shared: bool
    version: Any
    times: int = 0
    renewing: Any = field(default_factory=threading.Lock)


def version_of(found: Mapping[str, Any]) -> Any:
    """What tells an object from a later one of its name: S3's tag, Google's generation."""
    return {key: found[key] for key in ("e_tag", "version") if found.get(key) is not None}
