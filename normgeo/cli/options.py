"""Options that commands share, and those that exclude others."""

from __future__ import annotations

from typing import Annotated

import typer

from normgeo.errors import NormGeoError

__all__ = [
    "Batch", "Context", "Data", "Device", "DeviceMap", "Dtype", "Null", "NullEvery", "Qk", "Revision", "Seed",
    "Tokens", "Trusting", "refuse_beside", "words",
]  # fmt: skip

Data = Annotated[
    str | None,
    typer.Option(
        help="sample, wikipedia or openwebtext; ORG/NAME[@CONFIGURATION\\[@SPLIT]] on the hub; or a path: text in "
        ".jsonl, .txt, .parquet or a directory, or token ids in .npy. End it with :COLUMN to read another column than "
        "'text'.",
        show_default="sample for embedded models, else wikipedia",
    ),
]
Tokens = Annotated[int | None, typer.Option(help="Number of tokens, exactly.", show_default="1,000,000, or all")]
Context = Annotated[
    int | None, typer.Option(help="Tokens in a context: what the model sees together.", show_default="up to 1024")
]
Batch = Annotated[int, typer.Option(help="Contexts in a forward pass.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float64, float32, bfloat16, float16.", show_default="float32 on CPU, else auto"),
]
Device = Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread the layers over all GPUs.")]
Null = Annotated[int, typer.Option(help="Number of random directions in the null ensemble.")]
NullEvery = Annotated[int, typer.Option(help="Measure the null ensemble on about one token in N.")]
Seed = Annotated[int, typer.Option(help="Seed of the random directions.")]
Qk = Annotated[bool, typer.Option("--qk", help="Include the norms on the heads of queries and keys.")]
Revision = Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")]
Trusting = Annotated[bool, typer.Option("--trust-remote-code", help="Allow the repository's own code to run.")]


def words(text: str, option: str) -> list[str]:
    """What commas separate.

    Raises:
        NormGeoError: there is nothing.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise NormGeoError(f"{option} takes one or more, comma-separated; received {text!r}")
    return found


def refuse_beside(given: typer.Context, option: str, *allowed: str) -> None:
    """Refuse what was given beside an option with which it would be ignored.

    Args:
        given: of the command.
        option: the option.
        allowed: options, at least one, and arguments by their names, that may be given too.

    Raises:
        NormGeoError: others were given.
    """
    sources = [(p, given.get_parameter_source(p.name)) for p in given.command.params if p.name]
    said = [p for p, source in sources if source is not None and source.name == "COMMANDLINE"]
    if others := [p for p in said if p.opts[0] not in (option, *allowed)]:
        names = ", ".join(p.opts[0] if p.opts[0].startswith("-") else str(p.metavar or p.name).upper() for p in others)
        options = ", ".join(name for name in allowed if name.startswith("-"))
        raise NormGeoError(f"leave out {names}: beside {option} only {options} may be given")
