"""`normgeo angles` and `normgeo models`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normgeo.cli.app import app, check_alone, console, note, quiet, resumable, warn
from normgeo.cli.options import Batch, Context, Data, Device, DeviceMap, Dtype, Qk, Tokens, Trusting, refuse_beside
from normgeo.errors import NormGeoError
from normgeo.system.progress import table

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pandas as pd


@app.command()
def angles(
    given: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Hub ids or local directories; default: the embedded pair.", metavar="MODEL"),
    ] = None,
    data: Data = None,
    tokens: Tokens = None,
    context: Context = None,
    batch: Batch = 8,
    dtype: Dtype = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    null: Annotated[
        int | None,
        typer.Option(help="Number of random directions in the null ensemble.", show_default="256, or the store's"),
    ] = None,
    null_every: Annotated[
        int | None,
        typer.Option(help="Measure the null ensemble on about one token in N.", show_default="16, or the store's"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random directions.", show_default="0, or the store's")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="Only these norms: roles or name patterns, comma-separated.")
    ] = None,
    qk: Qk = False,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Per-token results to keep: scalars, or none.", show_default="scalars for runs up to 2M tokens"
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag on the hub; patterns with --checkpoints.")
    ] = None,
    trust_remote_code: Trusting = False,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Measure every checkpoint in this directory, or every revision of this hub id, by training step."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write.", show_default="runs/<model>-<date>")] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the interrupted run in this directory.")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Measure the hidden states in this store (a directory or URL) instead of running a model."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="With --store: run on the dask cluster whose scheduler has this address.")
    ] = None,
) -> None:
    """Measure the angles of hidden states before and after every norm. Under torchrun, on many devices."""
    from normgeo.angles import runs
    from normgeo.system.folders import claimed
    from normgeo.system.ranks import Ranks
    from normgeo.training import checkpoint_angles

    quiet()
    if store is not None:
        from normgeo.store.scan import run_from_store

        check_alone("angles --store")
        refuse_beside(given, "--store", "--null", "--null-every", "--seed", "--sites", "--keep", "--scheduler", "--out")
        measured, where = run_from_store(
            store, out, null=null, null_every=null_every, seed=seed, sites=sites, keep=keep, scheduler=scheduler,
            announce=note,
        )  # fmt: skip
        _summary(measured.frame, where)
        return
    if scheduler is not None:
        raise NormGeoError("--scheduler goes with --store: a cluster reads a store, it runs no model")
    if resume is not None:
        refuse_beside(given, "--resume", "--trust-remote-code")
        options = {"trust_remote_code": trust_remote_code, "announce": note}
        with _resumable(resume, trust_remote_code):
            if checkpoint_angles.is_of_checkpoints(resume):
                frame = checkpoint_angles.resume_checkpoints(resume, **options)
            else:
                measured = runs.resume_run(resume, **options)
                frame = None if measured is None else measured.frame
        if frame is not None:
            _summary(frame, resume)
        return
    if checkpoints is not None and checkpoints.startswith("-"):  # as in --checkpoints --resume DIR
        alone = "; --resume goes alone" if checkpoints == "--resume" else ""
        raise NormGeoError(f"--checkpoints takes a directory or a hub id, received {checkpoints}{alone}")
    if models and checkpoints is not None:
        raise NormGeoError(f"give models or --checkpoints, not both: {', '.join(models)}, {checkpoints}")
    names = tuple(models) if models else () if checkpoints is not None else runs.RunConfig().models
    drawn = {"null": null, "null_every": null_every, "seed": seed}
    config = runs.RunConfig(
        names, data=data, tokens=tokens, context=context, batch=batch, dtype=dtype, device=device,
        device_map=device_map, sites=sites, qk=qk, keep=keep, revision=revision, trust_remote_code=trust_remote_code,
        **{name: value for name, value in drawn.items() if value is not None},
    )  # fmt: skip
    ranks = Ranks.from_environment()
    if checkpoints is not None:
        refuse_beside(
            given, "--checkpoints", "--data", "--tokens", "--context", "--batch", "--dtype", "--device", "--device-map",
            "--null", "--null-every", "--seed", "--sites", "--qk", "--revision", "--trust-remote-code", "--out",
        )  # fmt: skip
        name = f"{Path(checkpoints).resolve().name}-checkpoints"
        with claimed(out, name, ranks) as where, _resumable(where, trust_remote_code):
            frame = checkpoint_angles.start_checkpoints(checkpoints, config, where, ranks=ranks, announce=note)
        if frame is not None:
            _summary(frame, where)
        return
    with claimed(out, runs.run_name(names), ranks) as where, _resumable(where, trust_remote_code):
        measured = runs.start_run(config, where, ranks=ranks, announce=note)
    if measured is not None:
        _summary(measured.frame, where)


def _resumable(where: Path, trust_remote_code: bool) -> AbstractContextManager[None]:
    return resumable("angles", where, (where / "run.json").is_file, trust_remote_code)


def _summary(frame: pd.DataFrame, where: Path) -> None:
    from normgeo.angles.report import in_short
    from normgeo.angles.verdict import already_centered, answers

    excluded = frame[frame.direction == "uniform"].n_excluded.max()
    if excluded:
        warn(f"up to {excluded:,} vectors at a site were zero or not finite; left out")
    centered = already_centered(frame)
    for name, part in centered.groupby("model"):
        warn(
            f"{name} is already centered: at {part.site.nunique()} sites the inputs have no component along "
            "the uniform vector beyond rounding, so its angles of 90° were made, not found"
        )
    console.print("Angles to the uniform vector (mean over sites of mean ± standard deviation over tokens)")
    short = in_short(frame)
    shown = table(*map(str, short))
    for row in short.itertuples(index=False):
        shown.add_row(*row)
    console.print(shown)
    if "step" not in short:
        for sentence in answers(frame):
            console.print(sentence, markup=False)
    files = "angles.parquet, figures/" if "step" in short else "report.html, angles.parquet, figures/, verdict.md"
    console.print(f"{where}: {files}, run.json")


@app.command()
def models() -> None:
    """List the models of Geometry table 1 and the embedded pair."""
    from normgeo.cards import EMBEDDED, TABLE_1

    shown = table("model", "hub id", "revision", "d", "layers", "norm", "parameters", "memory (16 bit)")
    for card in TABLE_1:
        shown.add_row(
            card.name, card.hub_id, card.revision[:10], str(card.d), str(card.layers), card.norm,
            f"{card.parameters / 1e9:.2f}B", f"{card.memory_gb:.1f} GB",
        )  # fmt: skip
    for name, norm in zip(EMBEDDED, ("LayerNorm", "RMSNorm"), strict=True):
        shown.add_row(name, "(embedded)", "", "192", "6", norm, "3.5M", "7 MB")
    console.print(shown)
