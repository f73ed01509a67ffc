"""The command line: arguments and printing, no logic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normgeo import cli_bench
from normgeo.cli_options import Knowing, refuse_beside
from normgeo.cli_store import register
from normgeo.errors import NormGeoError
from normgeo.files import check_file, write_table

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(width=None if sys.stdout.isatty() else 132)  # a pipe or a log has no width of its own


@app.callback()
def root(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Geometric analysis of the normalization layers of transformers."""


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
    from normgeo import runs
    from normgeo.checkpoint_angles import default_out
    from normgeo.cli_train import angles_by_step

    quiet()
    if store is not None:
        from normgeo.scan import run_from_store

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
    where = resume or out or (default_out(checkpoints) if checkpoints else runs.default_out(names))
    drawn = {"null": null, "null_every": null_every, "seed": seed}
    config = runs.RunConfig(
        names, data, tokens, context, batch, dtype, device, device_map, sites=sites, qk=qk, keep=keep,
        revision=revision, trust_remote_code=trust_remote_code,
        **{name: value for name, value in drawn.items() if value is not None},
    )  # fmt: skip
    try:
        if angles_by_step(resume) if resume else checkpoints and angles_by_step(where, checkpoints, config):
            return
        if resume:
            table = runs.resume_run(resume, announce=console.print)
        else:
            table = runs.start_run(config, where, announce=console.print)
    except KeyboardInterrupt:
        console.print(f"interrupted; finish it with: normgeo angles --resume {where}")
        raise typer.Exit(130) from None
    _summary(table.frame, where)


def _summary(frame: pd.DataFrame, where: Path) -> None:
    from normgeo.verdict import already_centered

    excluded = frame[frame.direction == "uniform"].n_excluded.max()
    if excluded:
        console.print(f"[yellow]warning[/]: up to {excluded:,} vectors at a site were zero or not finite; left out")
    centered = already_centered(frame)
    for name, part in centered.groupby("model"):
        console.print(
            f"[yellow]warning[/]: {name} is already centered: at {len(part)} sites the inputs have no component along "
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


@app.command(cls=Knowing)
def convert(
    model: Annotated[str, typer.Argument(help="Hub id or local directory.")],
    out: Annotated[Path, typer.Argument(help="A new directory for the converted checkpoint.")],
    to: Annotated[str, typer.Option(help="rmsnorm or crmsnorm.")] = "rmsnorm",
    data: Annotated[
        str | None,
        typer.Option(help="Certify on this: what `angles` takes.", show_default="the sample, for text models"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to certify on.")] = 2048,
    context: Annotated[
        int | None, typer.Option(help="Tokens the model sees together.", show_default="up to 256")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), float64, float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.", show_default="the CPU")] = None,
    keep_tie: Annotated[bool, typer.Option("--keep-tie", help="Keep a tied head tied (rank-one correction).")] = False,
    fold: Annotated[bool, typer.Option("--fold", help="Fold gamma and beta into what reads each norm.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="crmsnorm at width d, the last number zero.")] = False,
    by_shard: Annotated[
        bool | None,
        typer.Option("--by-shard/--in-memory", help="Tensor by tensor.", show_default="where memory is short"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the repository's code.")] = False,
) -> None:
    """Convert a Pre-LN model to an equal Pre-RMSNorm or Pre-CRMSNorm one, certify it and save it."""
    from normgeo.certify import listed
    from normgeo.converting import convert_checkpoint

    quiet()
    if by_shard:
        refuse_beside("--by-shard", "model", "out", "--to", "--revision", "--trust-remote-code")
    conversion, how = convert_checkpoint(
        model, out, to=to, data=data, n_tokens=tokens, context=context, dtype=dtype, device=device, keep_tie=keep_tie,
        fold_affine=fold, padded=padded, by_shard=by_shard, revision=revision, trust_remote_code=trust_remote_code,
        announce=console.print,
    )  # fmt: skip
    console.print(
        f"{len(conversion.replaced)} norms replaced, {len(conversion.kept)} kept, "
        f"{len(conversion.untouched)} untouched, {len(conversion.recentered)} explicit recenters"
    )
    for name, why in conversion.kept.items():
        console.print(f"  kept {name}: {why}")
    for place in conversion.recentered:
        console.print(
            f"  recentered {place.module} ({place.side} {place.argument}): costs what a LayerNorm's mean cost"
        )
    console.print(conversion.certificate.table())
    if unreached := conversion.certificate.unreached:
        console.print(
            f"[yellow]warning[/]: no input reached {listed(unreached)}; for inputs that do, nothing is certified: "
            "convert(model, inputs=...) in Python takes them"
        )
    code = ", trust_remote_code=True" if how == "remote" else ""
    console.print(f"{out}: load it with from_pretrained({str(out)!r}{code})")


bench_app = typer.Typer(no_args_is_help=True, help="Measure what things cost.")
app.add_typer(bench_app, name="bench")
register(app, bench_app, console, lambda: quiet())
cli_bench.register(bench_app, console, lambda: quiet())


@bench_app.command("stream")
def bench_stream(
    model: Annotated[str, typer.Argument(help="Hub id or local directory.")] = "embedded-layernorm",
    data: Annotated[str, typer.Option(help="What `angles` takes as --data.")] = "sample",
    context: Annotated[int, typer.Option(help="Tokens the model sees together.")] = 256,
    batch: Annotated[int, typer.Option(help="Contexts that go through the model together.")] = 8,
    rounds: Annotated[int, typer.Option(help="Batches that every variant runs, interleaved.")] = 7,
    device: Annotated[str | None, typer.Option(help="A torch device.", show_default="the CPU")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table here, as .parquet.")] = None,
) -> None:
    """Compare the base model's forward pass with ways of measuring its hidden states."""
    import torch

    from normgeo.bench import bench_stream
    from normgeo.models import load_model, load_tokenizer, usable_device
    from normgeo.tokens import load_tokens

    quiet()
    check_file(out)
    loaded = load_model(model, dtype=torch.float32, device=usable_device(device or "cpu"))
    tokens = load_tokens(data, load_tokenizer(model), context)
    frame = bench_stream(loaded, tokens, batch=batch, rounds=rounds)
    table = Table("variant", "ratio to base", "quartiles", "seconds a batch", box=SIMPLE)
    for row in frame.to_dict("records"):
        table.add_row(
            row["variant"], f"{row['ratio']:.3f}", f"{row['q25']:.3f} to {row['q75']:.3f}", f"{row['seconds']:.3f}"
        )
    console.print(f"{model}, {batch} x {context} tokens, {rounds} interleaved rounds, {frame.device.iloc[0]}")
    console.print(table)
    write_table(frame, out)


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


def quiet() -> None:
    """Leave the terminal to our own output: one progress bar, one line for an error."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # its retries without a network, a line each
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: hub id, local directory, or embedded name.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to compare with it.")],
    data: Annotated[
        str | None, typer.Option(help="What `angles` takes.", show_default="sample for the pair, else wikipedia")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Exactly so many tokens.", show_default="20,000, or all")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a model sees together.", show_default="up to 1024")
    ] = None,
    batch: Annotated[int, typer.Option(help="Contexts that go through a model together.")] = 8,
    naive: Annotated[bool, typer.Option("--naive", help="Also A with its LayerNorms swapped for RMSNorms.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/compare-<A>-<B>-<date>")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="What `angles` takes as --dtype.")] = None,
    null: Annotated[int, typer.Option(help="Random directions in the null ensemble.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds of timing, every model once a round; 0 for none.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of random directions and of the order of timing.")] = 0,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the repository's code.")] = False,
) -> None:
    """Compare two models on the same tokens: outputs, perplexity, angles by layer, size and speed."""
    from normgeo.comparison import compare_run, default_out

    quiet()
    where = out or default_out(a, b)
    result = compare_run(
        a, b, where, data=data, n_tokens=tokens, context=context, batch=batch, naive=naive, device=device, dtype=dtype,
        null=null, rounds=rounds, seed=seed, trust_remote_code=trust_remote_code, announce=console.print,
    )  # fmt: skip
    console.print(result.table(console.width), highlight=False, markup=False)
    console.print(f"{where}: comparison.json, comparison.parquet, angles.parquet, figures/")


def main() -> None:
    """Run the command line: an error that normgeo raises on purpose, or the system, is one line, and the status 1."""
    from normgeo import cli_train  # noqa: F401  (its commands register themselves)

    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    try:
        app()
    except (NormGeoError, OSError) as error:
        if debug:
            raise
        line = str(error) if isinstance(error, NormGeoError) else f"{error}; --debug shows where"
        Console(stderr=True).print(f"[red]error[/]: {escape(line)}", highlight=False, soft_wrap=True)
        sys.exit(1)
