"""Options that decide what others may be given."""

from __future__ import annotations

import typer

from normgeo.errors import NormGeoError

__all__ = ["refuse_beside"]


def refuse_beside(ctx: typer.Context, option: str, *allowed: str) -> None:
    """Refuse what was given to a command beside an option with which it would be ignored.

    Args:
        ctx: of the command.
        option: the option.
        allowed: options, and arguments by their names, that may be given too.

    Raises:
        NormGeoError: others were given.
    """
    sources = [(parameter.opts[0], ctx.get_parameter_source(parameter.name or "")) for parameter in ctx.command.params]
    given = [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]
    if others := [name for name in given if name not in (option, *allowed)]:
        names = ", ".join(name if name.startswith("-") else name.upper() for name in others)
        options = [name for name in allowed if name.startswith("-")]
        beside = f"only {', '.join(options)} may be given" if options else "nothing else may be given"
        raise NormGeoError(f"leave out {names}: beside {option} {beside}")
