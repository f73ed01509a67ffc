"""`normgeo convert` and `normgeo compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normgeo.cli.app import app, console, note, quiet, warn
from normgeo.cli.options import Batch, Context, Data, Device, Dtype, Null, Revision, Trusting, refuse_beside, words


@app.command()
def convert(
    given: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id or local directory.")],
    out: Annotated[Path, typer.Argument(help="A new directory for the converted checkpoint.")],
    to: Annotated[str, typer.Option(help="rmsnorm or crmsnorm.")] = "rmsnorm",
    data: Annotated[
        str | None,
        typer.Option(help="Text to certify on, as for `angles --data`.", show_default="the sample, for text models"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to certify on.", show_default="2,048, or all that there are")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a context: what the model sees together.", show_default="up to 256")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's own), float64, float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.", show_default="cpu")
    ] = None,
    keep_tie: Annotated[bool, typer.Option("--keep-tie", help="Keep a tied head tied (rank-one correction).")] = False,
    fold_affine: Annotated[
        bool, typer.Option("--fold-affine", help="Fold gamma and beta into what reads each norm.")
    ] = False,
    padded: Annotated[
        bool, typer.Option("--padded", help="With --to crmsnorm: keep width d, the last number zero.")
    ] = False,
    outputs: Annotated[
        str | None,
        typer.Option(help="Outputs that must not change, comma-separated; a.b for b inside a.", show_default="all"),
    ] = None,
    by_shard: Annotated[
        bool | None,
        typer.Option(
            "--by-shard/--in-memory",
            help="Convert tensor by tensor, in the memory of a shard, or in memory as a whole.",
            show_default="where memory is short",
        ),
    ] = None,
    revision: Revision = None,
    trust_remote_code: Trusting = False,
) -> None:
    """Convert a Pre-LN model to an equal Pre-RMSNorm or Pre-CRMSNorm one, certify it and save it."""
    from normgeo.system.files import check_name

    check_name(out)  # at once: what follows takes seconds to load
    from normgeo.conversion.certify import listed
    from normgeo.conversion.runs import convert_checkpoint

    quiet()
    if by_shard:
        refuse_beside(given, "--by-shard", "model", "out", "--to", "--outputs", "--revision", "--trust-remote-code")
    names = [] if outputs is None else words(outputs, "--outputs")
    conversion, how = convert_checkpoint(
        model, out, to=to, data=data, n_tokens=tokens, context=context, dtype=dtype, device=device, keep_tie=keep_tie,
        fold_affine=fold_affine, padded=padded, outputs=names, by_shard=by_shard, revision=revision,
        trust_remote_code=trust_remote_code, announce=note,
    )  # fmt: skip
    console.print(conversion.certificate.table())
    for name, why in conversion.kept.items():
        console.print(f"  kept {name}: {why}")
    if any("the model's output" in why for why in conversion.kept.values()):
        console.print("  --outputs with those that you need may let the norms before others be replaced")
    for place in conversion.recentered:
        console.print(
            f"  recentered {place.module} ({place.side} {place.argument}): costs what a LayerNorm's mean cost"
        )
    if unreached := conversion.certificate.unreached:
        warn(
            f"no input reached {listed(unreached)}; for inputs that do, nothing is certified: "
            "convert(model, inputs=...) in Python takes them"
        )
    code = ", trust_remote_code=True" if how == "remote" else ""
    console.print(f"{out}: load it with from_pretrained({str(out)!r}{code})")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: hub id, local directory, or embedded name.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="The model to compare with it.", show_default="none, with --naive"),
    ] = None,
    data: Data = None,
    tokens: Annotated[
        int | None, typer.Option(help="Number of tokens, exactly.", show_default="20,000, or all")
    ] = None,
    context: Context = None,
    batch: Batch = 8,
    naive: Annotated[bool, typer.Option("--naive", help="Add A with its LayerNorms swapped for RMSNorms.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write.", show_default="runs/compare-<A>-<B>-<date>")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    null: Null = 256,
    rounds: Annotated[int, typer.Option(help="Rounds of timing, each with every model once; 0 for no timing.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of the random directions and of the order of timing.")] = 0,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of A and B, where they are on the hub.")
    ] = None,
    trust_remote_code: Trusting = False,
) -> None:
    """Compare models on the same tokens: outputs, perplexity, angles by layer, size and speed."""
    from normgeo.angles.job import RunConfig
    from normgeo.comparison.compare import compare_run, comparison_name
    from normgeo.system.folders import claimed

    quiet()
    config = RunConfig(
        (a,) if b is None else (a, b), data=data, tokens=tokens, context=context, batch=batch, dtype=dtype,
        device=device, null=null, seed=seed, revision=revision, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with claimed(out, comparison_name(config.models)) as where:
        result = compare_run(config, where, naive=naive, rounds=rounds, announce=note)
    console.print(result.table(console.width), highlight=False)
    console.print(f"{where}: comparison.json, comparison.parquet, angles.parquet, figures/")
