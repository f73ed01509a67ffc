"""What all commands share: the application they belong to, and the terminal they print on."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from normgeo.system.progress import meanwhile, printer

__all__ = ["app", "bench_app", "console", "note", "quiet", "resumable", "warn"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure what things cost.")
app.add_typer(bench_app, name="bench")
console = printer()
"""For results; what is said meanwhile goes to standard error, by `note` and `warn`."""


def _version(wanted: bool | None) -> None:
    if wanted:
        console.print(f"normgeo {version('normgeo')}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool | None, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = None,
) -> None:
    """Geometric analysis of the normalization layers of transformers."""


def note(*parts: object) -> None:
    """Say what is going on."""
    meanwhile.print(*parts)


def warn(text: str) -> None:
    """Say what may be wrong."""
    meanwhile.print(Text.assemble(("warning", "yellow"), f": {text}"))


def quiet() -> None:
    """Leave the terminal to our own output: one progress bar, one line for an error; Ctrl-C is an exception again."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # its retries without a network, a line each
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `main`
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def resumable(command: str, where: Path | str, begun: Callable[[], bool]) -> Iterator[None]:
    """End an interrupted command as a shell expects, and say how to go on where anything was begun."""
    try:
        yield
    except KeyboardInterrupt:
        from normgeo.system.ranks import is_first

        if is_first():
            go_on = f"; finish it with: normgeo {command} --resume {shlex.quote(str(where))}" if begun() else ""
            note(f"interrupted{go_on}")
        raise typer.Exit(130) from None
