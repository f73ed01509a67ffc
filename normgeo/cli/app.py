"""What all commands share: the application they belong to, and the terminal they print on."""

from __future__ import annotations

import gc
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from normgeo.errors import NormGeoError
from normgeo.system.progress import meanwhile, printer
from normgeo.system.versions import versions

__all__ = ["app", "bench_app", "check_alone", "console", "note", "quiet", "resumable", "warn"]


class Interruptible(TyperGroup):
    """Commands that a signal ends as a shell expects."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _interruptions():
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _ended(error) from None


app = typer.Typer(cls=Interruptible, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure what things cost, as ratios to a baseline.")
app.add_typer(bench_app, name="bench")
console = printer()
"""For results; what is said meanwhile goes to standard error, by `note` and `warn`."""

TOGETHER = ("angles", "capture", "train")
"""What several processes do together, where they are launched for it."""


def _version(wanted: bool | None) -> None:
    if wanted:
        console.print(f"normgeo {versions('normgeo')['normgeo'] or '(not installed)'}")
        raise typer.Exit


def check_alone(command: str) -> None:
    """Refuse several processes for what one does: each would do all of it."""
    if "LOCAL_RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    from normgeo.system.ranks import is_first

    if not is_first():
        raise SystemExit(1)
    raise NormGeoError(
        f"{command} is done by one process, and {os.environ['WORLD_SIZE']} were launched; what several do together is "
        "angles of models and of checkpoints, capture and train"
    )


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Works anywhere on the command line.")
    ] = False,
    version: Annotated[
        bool | None, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = None,
) -> None:
    """Geometric analysis of the normalization layers of transformers."""
    if context.invoked_subcommand not in TOGETHER:
        check_alone(str(context.invoked_subcommand))


def note(*parts: object) -> None:
    """Say what is going on."""
    meanwhile.print(*parts)


def warn(text: str) -> None:
    """Say what may be wrong."""
    meanwhile.print(Text.assemble(("warning", "yellow"), f": {text}"))


class Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems send it: handled as Ctrl-C is, so that nothing is left half-written."""


_came: list[type[KeyboardInterrupt]] = []
"""The interruptions that signals were in this process."""


def _interrupt_at(number: int, interruption: type[KeyboardInterrupt]) -> None:
    """Raise an interruption at a signal from now on."""
    own = os.getpid()

    def handle(*_: object) -> None:
        if os.getpid() == own:
            _came.append(interruption)
            raise interruption
        signal.signal(number, signal.SIG_DFL)  # a process that was forked, whose parent ends it
        os.kill(os.getpid(), number)

    with suppress(ValueError):  # not in another thread than the main one
        signal.signal(number, handle)


@contextmanager
def _interruptions() -> Iterator[None]:
    """What escapes after a signal is its interruption: compiled code that it is raised in may turn it into an error."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception:
        if not _came:
            raise
        raise _came[-1] from None


def quiet() -> None:
    """Leave the terminal to our own output: one progress bar, one line for an error; Ctrl-C is an exception again.

    So is SIGTERM; in a rank not, for one that waits for others that died would not come to it. All that is large is
    loaded by then, and garbage is collected from now on.
    """
    import huggingface_hub
    import transformers

    gc.enable()
    huggingface_hub.utils.logging.set_verbosity_error()  # its retries without a network, a line each
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `main`
        _interrupt_at(signal.SIGINT, KeyboardInterrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:
        _interrupt_at(signal.SIGTERM, Terminated)


def _ended(error: KeyboardInterrupt, go_on: str = "") -> typer.Exit:
    """Say that a command was interrupted; gives the status of the signal that did it."""
    from normgeo.system.ranks import is_first

    if is_first():
        note(f"interrupted{go_on}")
    return typer.Exit(143 if isinstance(error, Terminated) else 130)


@contextmanager
def resumable(
    command: str, where: Path | str, begun: Callable[[], bool], trust_remote_code: bool = False
) -> Iterator[None]:
    """Of an interrupted command say how to go on, where anything was begun."""
    try:
        with _interruptions():
            yield
    except KeyboardInterrupt as error:
        trust = " --trust-remote-code" if trust_remote_code else ""
        go_on = f"; finish it with: normgeo {command} --resume {shlex.quote(str(where))}{trust}" if begun() else ""
        raise _ended(error, go_on) from None
