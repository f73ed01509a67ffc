"""`normgeo angles` and `normgeo models`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from normgeo.cli.app import app, console, quiet, warn
from normgeo.cli.options import Knowing, refuse_beside
from normgeo.errors import NormGeoError

if TYPE_CHECKING:
    import pandas as pd

    from normgeo.angles.runs import RunConfig

Resume = Annotated[Path | None, typer.Option(help="Finish the interrupted run in this directory.")]


@app.command(cls=Knowing)
def angles(
    model: Annotated[str | None, typer.Argument(help="Hub id or local directory; default: the embedded pair.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="sample, wikipedia, or a path: .jsonl, .parquet or .txt with text, .npy with token ids."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Exactly so many tokens.", show_default="1,000,000, or all")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens the model sees together.", show_default="up to 1024")
    ] = None,
    batch: Annotated[int, typer.Option(help="Contexts that go through the model together.")] = 8,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float64, float32, bfloat16, float16.", show_default="float32 on CPU, else auto"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="auto: spread the layers over all GPUs.")] = None,
    null: Annotated[
        int | None,
        typer.Option(help="Random directions in the null ensemble.", show_default="256, or the store's"),
    ] = None,
    null_every: Annotated[
        int | None,
        typer.Option(help="The null ensemble meets one token in so many.", show_default="16, or the store's"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random directions.", show_default="0, or the store's")
    ] = None,
    sites: Annotated[str | None, typer.Option(help="Only these: roles or name patterns, comma-separated.")] = None,
    qk: Annotated[bool, typer.Option("--qk", help="Also the norms on the heads of queries and keys.")] = False,
    keep: Annotated[
        str | None, typer.Option(help="scalars or none.", show_default="scalars for runs up to 2M tokens")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the repository's code.")] = False,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Measure every checkpoint below this directory, by training step.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write.", show_default="runs/<model>-<date>")] = None,
    resume: Resume = None,
    store: Annotated[
        str | None, typer.Option(help="From the hidden states in this store, a directory or a URL, without the model.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="With --store: on the dask cluster whose scheduler has this address.")
    ] = None,
) -> None:
    """Measure the angles of hidden states before and after every norm."""
    from normgeo.angles import runs
    from normgeo.system.files import claimed
    from normgeo.training.checkpoint_angles import default_stem

    quiet()
    if store is not None:
        from normgeo.store.scan import run_from_store

        refuse_beside("--store", "--null", "--null-every", "--seed", "--sites", "--scheduler", "--out")
        table, where = run_from_store(
            store, out, null=null, null_every=null_every, seed=seed, sites=sites, scheduler=scheduler,
            announce=console.print,
        )  # fmt: skip
        _summary(table.frame, where)
        return
    if scheduler is not None:
        raise NormGeoError("--scheduler goes with --store: a cluster reads a store, it runs no model")
    if resume:
        refuse_beside("--resume")
    if model and checkpoints:
        raise NormGeoError(f"give a model or --checkpoints, not both: {model}, {checkpoints}")
    if checkpoints:
        refuse_beside(
            "--checkpoints", "--data", "--tokens", "--context", "--batch", "--dtype", "--device", "--device-map",
            "--null", "--null-every", "--seed", "--sites", "--qk", "--trust-remote-code", "--out",
        )  # fmt: skip
    names = (model,) if model else () if checkpoints else runs.RunConfig().models
    stem = default_stem(checkpoints) if checkpoints else runs.default_stem(names)
    drawn = {"null": null, "null_every": null_every, "seed": seed}
    config = runs.RunConfig(
        names, data, tokens, context, batch, dtype, device, device_map, sites=sites, qk=qk, keep=keep,
        revision=revision, trust_remote_code=trust_remote_code,
        **{name: value for name, value in drawn.items() if value is not None},
    )  # fmt: skip
    with claimed(resume or out, stem) as where:
        try:
            if _angles_by_step(resume) if resume else checkpoints and _angles_by_step(where, checkpoints, config):
                return
            if resume:
                table = runs.resume_run(resume, announce=console.print)
            else:
                table = runs.start_run(config, where, announce=console.print)
        except KeyboardInterrupt:
            begun = (where / "run.json").is_file()
            console.print(f"interrupted; finish it with: normgeo angles --resume {where}" if begun else "interrupted")
            raise typer.Exit(130) from None
    _summary(table.frame, where)


def _summary(frame: pd.DataFrame, where: Path) -> None:
    from normgeo.angles.verdict import already_centered

    excluded = frame[frame.direction == "uniform"].n_excluded.max()
    if excluded:
        warn(f"up to {excluded:,} vectors at a site were zero or not finite; left out")
    centered = already_centered(frame)
    for name, part in centered.groupby("model"):
        warn(
            f"{name} is already centered: at {len(part)} sites the inputs have no component along "
            "the uniform vector beyond rounding, so its angles of 90° were made, not found"
        )
    table = Table("model", "role", "norm", "sites", "before", "after", "energy along 1", "null percentile", box=SIMPLE)
    uniform = frame[frame.direction == "uniform"]
    for (name, role, kind), part in uniform.groupby(["model", "role", "kind"], sort=False):
        pre, post = part[part.phase == "pre"], part[part.phase == "post"]
        table.add_row(
            str(name), str(role), str(kind), str(len(pre)), f"{pre.mean_deg.mean():.2f} ± {pre.std_deg.mean():.2f}°",
            f"{post.mean_deg.mean():.2f} ± {post.std_deg.mean():.2f}°", f"{100 * pre.energy_share.mean():.3f}%",
            f"{pre.null_percentile.median():.0f}",
        )  # fmt: skip
    console.print("Angles to the uniform vector (mean over sites of mean ± standard deviation over tokens)")
    console.print(table)
    console.print(f"{where}: angles.parquet, figures/, verdict.md, run.json")


def _angles_by_step(where: Path, checkpoints: Path | None = None, config: RunConfig | None = None) -> bool:
    """`normgeo angles --checkpoints` or its resumption; whether `where` is of this kind."""
    from normgeo.training import checkpoint_angles

    if checkpoints is None or config is None:
        frame = checkpoint_angles.resume_checkpoints(where, announce=console.print)
    else:
        frame = checkpoint_angles.start_checkpoints(checkpoints, config, where, announce=console.print)
    if frame is None:
        return False
    table = Table("model", "step", "before", "after", "energy along 1", "null percentile", box=SIMPLE)
    for (model, step), part in frame[frame.direction == "uniform"].groupby(["model", "step"], sort=False):
        pre, post = part[part.phase == "pre"], part[part.phase == "post"]
        table.add_row(
            str(model), f"{step:,}", f"{pre.mean_deg.mean():.2f} ± {pre.std_deg.mean():.2f}°",
            f"{post.mean_deg.mean():.2f} ± {post.std_deg.mean():.2f}°", f"{100 * pre.energy_share.mean():.3f}%",
            f"{pre.null_percentile.median():.0f}",
        )  # fmt: skip
    console.print("Angles to the uniform vector by training step (mean over norms of mean ± deviation over tokens)")
    console.print(table)
    console.print(f"{where}: angles.parquet, figures/, run.json")
    return True


@app.command()
def models() -> None:
    """List the models of Geometry table 1 and the embedded pair."""
    from normgeo.models import EMBEDDED, TABLE_1

    table = Table("model", "hub id", "revision", "d", "layers", "norm", "parameters", "memory (16 bit)", box=SIMPLE)
    for card in TABLE_1:
        table.add_row(
            card.name, card.hub_id, card.revision[:10], str(card.d), str(card.layers), card.norm,
            f"{card.parameters / 1e9:.2f}B", f"{card.memory_gb:.1f} GB",
        )  # fmt: skip
    for name, norm in zip(EMBEDDED, ("LayerNorm", "RMSNorm"), strict=True):
        table.add_row(name, "(embedded)", "", "192", "6", norm, "3.5M", "7 MB")
    console.print(table)
