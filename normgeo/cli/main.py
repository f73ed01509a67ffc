"""The command `normgeo`: all its commands, and errors as one line."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import warnings

from rich.text import Text

from normgeo.cli import angles, bench, conversion, store, train  # noqa: F401  (they register themselves)
from normgeo.cli.app import app, warn
from normgeo.errors import NormGeoError
from normgeo.system.progress import meanwhile

__all__ = ["app", "main"]


def _shown(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of Python's as one of ours: where in the code it was given is of no use on a terminal."""
    warn(str(message))


def _line(error: Exception) -> str:
    """What is said of an error."""
    if isinstance(error, NormGeoError):
        return str(error)
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        return "the directory that this works in was removed meanwhile; begin again in another"
    return f"{error or 'out of memory'}; --debug shows where"


def _is_somewhere() -> bool:
    """Whether the working directory has a path, which no relative name can do without."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    """Run the command line: an error that normgeo raises on purpose, or the system, is one line, and the status 1."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `quiet`: libraries that are being loaded do not bear it
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # in a terminal that is not UTF-8 results are worth more than lines
    warnings.showwarning = _shown
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    # to look for garbage in all that is imported takes a second: in the end, and again and again while it is loaded
    atexit.register(gc.freeze)
    gc.disable()  # until `quiet`
    try:
        app()
    except (NormGeoError, OSError, MemoryError) as error:
        if debug:
            raise
        meanwhile.print(Text.assemble(("error", "red"), f": {_line(error)}"), soft_wrap=True)
        sys.exit(1)
    finally:
        gc.enable()
