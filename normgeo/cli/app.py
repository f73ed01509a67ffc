"""What all commands share: the application they belong to, and the terminal they print on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

__all__ = ["app", "bench_app", "console", "quiet", "warn"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure what things cost.")
app.add_typer(bench_app, name="bench")
console = Console(
    width=None if sys.stdout.isatty() else 132,  # a pipe or a log has no width of its own
    markup=False, emoji=False,  # names of models and files may have brackets and colons in them
)  # fmt: skip


@app.callback()
def root(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Geometric analysis of the normalization layers of transformers."""


def warn(text: str) -> None:
    """Print a warning."""
    console.print(Text.assemble(("warning", "yellow"), f": {text}"))


def quiet() -> None:
    """Leave the terminal to our own output: one progress bar, one line for an error."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # its retries without a network, a line each
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
