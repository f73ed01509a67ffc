"""`normgeo capture` and `normgeo verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from normgeo.cli.app import app, console, note, quiet, resumable
from normgeo.cli.options import Knowing, Revision, Trusting, refuse_beside
from normgeo.errors import NormGeoError, StoreError


@app.command(cls=Knowing)
def capture(
    model: Annotated[str | None, typer.Argument(help="Hub id, local directory, or embedded name.")] = None,
    store: Annotated[str | None, typer.Option(help="A new directory for it, or s3://BUCKET/PREFIX, gs://...")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Exactly so many tokens.", show_default="1,000,000, or all")
    ] = None,
    phases: Annotated[str, typer.Option(help="Of pre, standardized and post.")] = "pre",
    sites: Annotated[str | None, typer.Option(help="Only these: roles or name patterns.")] = None,
    data: Annotated[str | None, typer.Option(help="What `angles` takes.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens the model sees together.")] = None,
    batch: Annotated[int, typer.Option(help="Contexts that go through the model together.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="What `angles` takes.")] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="auto: spread the layers over all GPUs.")] = None,
    null: Annotated[int, typer.Option(help="Random directions in the null ensemble.")] = 256,
    null_every: Annotated[int, typer.Option(help="The null ensemble meets about one token in so many.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the random directions.")] = 0,
    qk: Annotated[bool, typer.Option("--qk", help="Also the norms on the heads of queries and keys.")] = False,
    chunk_mib: Annotated[int, typer.Option(help="Largest chunk, in MiB.")] = 16,
    revision: Revision = None,
    trust_remote_code: Trusting = False,
    resume: Annotated[
        str | None, typer.Option(help="Finish the interrupted store in this directory or at this URL.")
    ] = None,
) -> None:
    """Keep the hidden states at every norm in a store, while the statistics run."""
    from normgeo.angles.runs import RunConfig
    from normgeo.store import capture as capturing
    from normgeo.store.objects import storage_at
    from normgeo.system.ranks import is_first

    quiet()
    where = resume or store
    if where is None or (resume is None and model is None):
        raise NormGeoError("give a MODEL and a --store to write, or --resume a store")
    with resumable("capture", where, lambda: storage_at(where).size("store.json") is not None, trust_remote_code):
        if resume:
            refuse_beside("--resume", "--trust-remote-code")
            capturing.resume_capture(resume, trust_remote_code=trust_remote_code, announce=note)
        else:
            run = RunConfig(
                (str(model),), data=data, tokens=tokens, context=context, batch=batch, dtype=dtype, device=device,
                device_map=device_map, null=null, null_every=null_every, seed=seed, sites=sites, qk=qk, keep="none",
                revision=revision, trust_remote_code=trust_remote_code,
            )  # fmt: skip
            config = capturing.CaptureConfig(run, tuple(p.strip() for p in phases.split(",")), chunk_mib << 20)
            capturing.start_capture(config, where, announce=note)
    if is_first():
        console.print(f"{where}: hidden.zarr, commits/, report.html, angles.parquet, figures/, verdict.md, store.json")


@app.command()
def verify(
    store: Annotated[str, typer.Argument(help="What `capture` wrote: a directory, s3://BUCKET/PREFIX or gs://...")],
) -> None:
    """Read every byte of a store and name what is damaged."""
    from normgeo.store.check import verify as verifying
    from normgeo.store.reader import HiddenStateStore

    checked, problems = verifying(store)
    for problem in problems:
        console.print(problem, highlight=False, markup=False, soft_wrap=True)
    if problems:
        raise StoreError(f"{store}: {len(problems)} files are missing or damaged")
    console.print(f"{store}: {checked:,} chunks are what was committed")
    if incomplete := HiddenStateStore(store).incomplete:
        console.print(incomplete)
