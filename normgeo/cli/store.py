"""`normgeo capture` and `normgeo verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from normgeo.cli.app import app, console, note, quiet, resumable
from normgeo.cli.options import (
    Batch,
    Context,
    Data,
    Device,
    DeviceMap,
    Dtype,
    Null,
    NullEvery,
    Qk,
    Revision,
    Seed,
    Tokens,
    Trusting,
    refuse_beside,
    words,
)
from normgeo.errors import NormGeoError, StoreError


@app.command()
def capture(
    given: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Hub id, local directory, or embedded name.")] = None,
    store: Annotated[
        str | None, typer.Option(help="The store to write: a new directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.")
    ] = None,
    tokens: Tokens = None,
    phases: Annotated[str, typer.Option(help="Phases to keep, comma-separated: pre, standardized, post.")] = "pre",
    sites: Annotated[
        str | None, typer.Option(help="Only these norms: roles or name patterns, comma-separated.")
    ] = None,
    data: Data = None,
    context: Context = None,
    batch: Batch = 8,
    dtype: Dtype = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    null: Null = 256,
    null_every: NullEvery = 16,
    seed: Seed = 0,
    qk: Qk = False,
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
        missing = " and ".join([*["a MODEL"] * (model is None), *["a --store to write"] * (store is None)])
        raise NormGeoError(f"give {missing}, or --resume a store")
    with resumable("capture", where, lambda: storage_at(where).size("store.json") is not None, trust_remote_code):
        if resume:
            refuse_beside(given, "--resume", "--trust-remote-code")
            capturing.resume_capture(resume, trust_remote_code=trust_remote_code, announce=note)
        else:
            run = RunConfig(
                (str(model),), data=data, tokens=tokens, context=context, batch=batch, dtype=dtype, device=device,
                device_map=device_map, null=null, null_every=null_every, seed=seed, sites=sites, qk=qk, keep="none",
                revision=revision, trust_remote_code=trust_remote_code,
            )  # fmt: skip
            config = capturing.CaptureConfig(run, tuple(words(phases, "--phases")), chunk_mib << 20)
            capturing.start_capture(config, where, announce=note)
    if is_first():
        console.print(f"{where}: hidden.zarr, commits/, report.html, angles.parquet, figures/, verdict.md, store.json")


@app.command()
def verify(
    store: Annotated[
        str, typer.Argument(help="What `capture` wrote: a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.")
    ],
) -> None:
    """Read every byte of a store and name what is damaged."""
    from normgeo.store.check import verify as verifying
    from normgeo.store.reader import HiddenStateStore

    quiet()
    checked, problems = verifying(store)
    for problem in problems:
        console.print(problem, highlight=False, soft_wrap=True)
    if problems:
        damaged = "1 file is" if len(problems) == 1 else f"{len(problems):,} files are"
        raise StoreError(
            f"{store}: {damaged} missing or damaged; remove the records of damaged rows (in commits/), and "
            f"normgeo capture --resume {store} captures them again"
        )
    console.print(f"{store}: {checked:,} chunks are what was committed")
    if incomplete := HiddenStateStore(store).incomplete:
        console.print(incomplete)
