"""Options that commands share, and those that exclude others."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from normgeo.errors import NormGeoError

__all__ = ["Knowing", "Revision", "Trusting", "refuse_beside"]

Revision = Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")]
Trusting = Annotated[bool, typer.Option("--trust-remote-code", help="Run the repository's code.")]

_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())


class Knowing(TyperCommand):
    """A command that knows which of its options were given, and which have their defaults."""

    def invoke(self, ctx: Any) -> Any:
        """Note what was given, and run."""
        sources = [(parameter.opts[0], ctx.get_parameter_source(parameter.name)) for parameter in self.params]
        _given.set(tuple(name for name, source in sources if source is not None and source.name == "COMMANDLINE"))
        return super().invoke(ctx)


def refuse_beside(option: str, *allowed: str) -> None:
    """Refuse what was given to a `Knowing` command beside an option with which it would be ignored.

    Args:
        option: the option.
        allowed: options, and arguments by their names, that may be given too.

    Raises:
        NormGeoError: others were given.
    """
    if others := [name for name in _given.get() if name not in (option, *allowed)]:
        names = ", ".join(name if name.startswith("-") else name.upper() for name in others)
        options = [name for name in allowed if name.startswith("-")]
        beside = f"only {', '.join(options)} may be given" if options else "nothing else may be given"
        raise NormGeoError(f"leave out {names}: beside {option} {beside}")
