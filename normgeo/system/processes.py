"""Which process is which on which machine, and whether it still lives."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["has_ended", "machine"]


def machine() -> str:
    """What tells process numbers apart: the boot of a machine, and the container."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {container.stat().st_ino}" if boot.exists() else socket.gethostname()


def has_ended(where: str | None, number: int) -> bool:
    """Whether a process of this number was on this machine, and is no more; of other machines nothing is known."""
    if where != machine():
        return False
    if sys.platform == "win32":  # where any signal ends a process
        return not psutil.pid_exists(number)
    try:
        os.kill(number, 0)  # the system is asked: /proc may be of other numbers, or hide what others do
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    own = Path("/proc/self")
    if own.is_symlink() and own.readlink().name != str(os.getpid()):
        return False
    with suppress(psutil.Error):  # it ends just now, or what others do is not told
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE  # nobody has asked yet how it ended
    return False
