"""`normgeo bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column

from normgeo.cli.app import bench_app, console, note, quiet
from normgeo.cli.options import Batch, Context, Device, Dtype, Revision, Trusting, words
from normgeo.errors import NormGeoError
from normgeo.system.files import check_file, write_table
from normgeo.system.progress import table

if TYPE_CHECKING:
    import pandas as pd


def _numbers(text: str, option: str) -> list[int]:
    found = words(text, option)
    if not all(word.isdecimal() and int(word) for word in found):
        raise NormGeoError(f"{option} takes whole numbers above 0, comma-separated; received {text!r}")
    return [int(word) for word in found]


def _time(seconds: float) -> float:
    if not seconds >= 0:  # neither below, nor no number
        raise NormGeoError(f"--seconds takes a number from 0 on; received {seconds}")
    return seconds


@bench_app.command("inference")
def bench_inference(
    models: Annotated[
        list[str],
        typer.Argument(help="vit-tiny to vit-giant, gpt-small to gpt-2.7b, hub ids, directories.", metavar="MODEL"),
    ],
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16, float16, autocast (bfloat16), int8, int8-dynamic; comma-separated."),
    ] = "float32",
    batch: Annotated[str, typer.Option(help="Sequences or images in a batch, comma-separated.")] = "1",
    length: Annotated[str, typer.Option(help="Tokens in a sequence, comma-separated; images set their own.")] = "512",
    decode: Annotated[
        bool, typer.Option("--decode", help="Also time decoding: one token, with LENGTH tokens in the cache.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Also time torch.compile.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Also time CUDA graphs.")] = False,
    variants: Annotated[
        str | None,
        typer.Option(
            help="Only these, comma-separated: original, original-kernel, pre-rmsnorm, pre-rmsnorm-torch, "
            "pre-crmsnorm, pre-crmsnorm-padded, fused, no-norm.",
            show_default="all",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Largest number of timings of every variant.", min=3)] = 100,
    seconds: Annotated[float, typer.Option(help="Seconds for the rounds of one case.", callback=_time)] = 60.0,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of random weights and of the order of timing.")] = 0,
    revision: Revision = None,
    trust_remote_code: Trusting = False,
    out: Annotated[Path | None, typer.Option(help="Write the raw timings here, as .parquet, after every case.")] = None,
) -> None:
    """Time a Pre-LN model, its conversions and its floor without norms: whole passes, and the norms inside them."""
    import pandas as pd

    from normgeo.bench import inference as inference_bench
    from normgeo.bench.inference_models import build
    from normgeo.models import usable_device

    quiet()
    check_file(out)
    batches, lengths = _numbers(batch, "--batch"), _numbers(length, "--length")
    dtypes, wanted = words(dtype, "--dtype"), None if variants is None else words(variants, "--variants")
    inference_bench.check_names(dtypes, variants=wanted or ())
    where, named = usable_device(device), {"revision": revision, "trust_remote_code": trust_remote_code}
    if compiled:
        inference_bench.check_compiler(where)
    frames: list[pd.DataFrame] = []

    def keep(raw: pd.DataFrame) -> None:
        frames.append(raw)
        _inference(inference_bench.summary(raw))
        write_table(pd.concat(frames, ignore_index=True), out)

    for name in dict.fromkeys(models):  # each once: times of one name could not be told apart
        inference_bench.bench_inference(
            build(name, device=where, seed=seed, **named), name, variants=wanted, dtypes=dtypes, batches=batches,
            lengths=lengths, phases=("forward", *["decode"] * decode),
            modes=("eager", *["compiled"] * compiled, *["graph"] * graphs), rounds=rounds, seconds=seconds,
            seed=seed, announce=note, keep=keep,
        )  # fmt: skip


@bench_app.command("norms")
def bench_norms(
    shapes: Annotated[
        str | None, typer.Option(help="BATCHxTOKENSxWIDTH, comma-separated.", show_default="of ViTs and GPTs")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; comma-separated.")] = "float32,bfloat16",
    backward: Annotated[
        bool, typer.Option("--backward", help="Include the gradients of input, gamma and beta.")
    ] = False,
    beta: Annotated[bool, typer.Option(help="Norms with a beta, as converted models have, or without.")] = True,
    rounds: Annotated[int, typer.Option(help="Largest number of timings of every norm.", min=3)] = 100,
    seconds: Annotated[
        float, typer.Option(help="Seconds for the rounds of one shape and dtype.", callback=_time)
    ] = 10.0,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the order of timing.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the raw timings here, as .parquet.")] = None,
) -> None:
    """Time norms alone, against torch's LayerNorm and a copy of the same memory."""
    from normgeo.bench import norms as norm_bench

    quiet()
    check_file(out)
    wanted = norm_bench.SHAPES if shapes is None else [_shape(text) for text in words(shapes, "--shapes")]
    raw = norm_bench.bench_norms(
        wanted, dtypes=words(dtype, "--dtype"), backward=backward, beta=beta, device=device, rounds=rounds,
        seconds=seconds, seed=seed,
    )  # fmt: skip
    _norms(norm_bench.norm_summary(raw))
    write_table(raw, out)


@bench_app.command("stream")
def bench_stream(
    model: Annotated[str, typer.Argument(help="Hub id or local directory.", metavar="MODEL")] = "embedded-layernorm",
    data: Annotated[str, typer.Option(help="Text, as for `angles --data`.")] = "sample",
    context: Annotated[int, typer.Option(help="Tokens in a context: what the model sees together.")] = 256,
    batch: Annotated[int, typer.Option(help="Contexts in a forward pass.")] = 8,
    rounds: Annotated[int, typer.Option(help="Interleaved batches that every variant runs.")] = 7,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16, float16.")] = "float32",
    device: Device = "cpu",
    revision: Revision = None,
    trust_remote_code: Trusting = False,
    out: Annotated[Path | None, typer.Option(help="Write the table here, as .parquet.")] = None,
) -> None:
    """Compare the base model's forward pass with ways of measuring its hidden states."""
    from normgeo.bench.stream import VARIANTS, bench_stream
    from normgeo.loading import load_model, load_tokenizer
    from normgeo.tokens import holds_ids, load_tokens

    quiet()
    check_file(out)
    named = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded = load_model(model, dtype=dtype, device=device, **named)
    tokens = load_tokens(data, None if holds_ids(data) else load_tokenizer(model, **named), context)
    frame = bench_stream(loaded, tokens, batch=batch, rounds=rounds)
    shown = table(Column("variant", no_wrap=True), "ratio to base", "quartiles", "seconds a batch")
    for row in frame.to_dict("records"):
        shown.add_row(
            VARIANTS[row["variant"]], f"{row['ratio']:.3f}", f"{row['ratio_q25']:.3f} to {row['ratio_q75']:.3f}",
            f"{row['seconds']:.3f}",
        )  # fmt: skip
    first = frame.iloc[0]  # of a short text there are fewer tokens than were asked for
    console.print(
        f"{model}, {first.batch} x {first.context} tokens, {first['dtype']}, rounds: {rounds}, {first.device}"
    )
    console.print(shown)
    write_table(frame, out)


@bench_app.command("store")
def bench_store(
    model: Annotated[
        str, typer.Argument(help="Hub id, local directory, or embedded name.", metavar="MODEL")
    ] = "embedded-layernorm",
    folder: Annotated[Path, typer.Option(help="A directory on the disk to measure.")] = Path(),
    data: Annotated[str, typer.Option(help="Text, as for `angles --data`.")] = "sample",
    context: Context = None,
    batch: Batch = 8,
    tokens: Annotated[int, typer.Option(help="Tokens in each measurement.")] = 32_768,
    dtype: Dtype = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: Trusting = False,
    out: Annotated[Path | None, typer.Option(help="Write the table here, as .parquet.")] = None,
) -> None:
    """Compare the disk, the store, the forward pass with and without capture, and the store read again."""
    from normgeo.angles.job import RunConfig
    from normgeo.bench.store import bench_store

    quiet()
    check_file(out)
    run = RunConfig(
        (model,), data=data, tokens=tokens, context=context, batch=batch, dtype=dtype, device=device,
        revision=revision, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    frame = bench_store(run, folder, rounds=rounds)
    first = frame.iloc[0]
    console.print(
        f"{first.model}, {first.tokens:,} tokens in contexts of {first.context}, {first['dtype']}, rounds: {rounds}, "
        f"{first.device}, threads: {first.threads}",
        highlight=False,
    )
    shown = table(Column("variant", no_wrap=True), "seconds", "MB/s", "tokens/s", "ratio", "to")
    for row in frame.to_dict("records"):
        rate = "" if row["mb_per_s"] != row["mb_per_s"] else f"{row['mb_per_s']:,.0f}"
        same = row["baseline"] == row["variant"]
        shown.add_row(
            row["variant"], f"{row['seconds']:.3g}", rate, f"{row['tokens_per_s']:,.0f}",
            "" if same else _spread(row, "ratio"), "" if same else row["baseline"],
        )  # fmt: skip
    console.print(shown)
    write_table(frame, out)


@bench_app.command("train")
def bench_train(
    sizes: Annotated[
        str,
        typer.Option(
            help="Sizes of `train`, vit-tiny to vit-giant, gpt-small to gpt-2.7b, or models; comma-separated."
        ),
    ] = "tiny,70m",
    batch: Annotated[int, typer.Option(help="Sequences or images in a step.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens in a sequence of text.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Size of the vocabulary that random text is drawn from.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Interleaved steps that every variant takes.")] = 100,
    precision: Annotated[str, typer.Option(help="Mixed precision: no or bf16.")] = "no",
    device: Device = "cpu",
    revision: Revision = None,
    trust_remote_code: Trusting = False,
    out: Annotated[Path | None, typer.Option(help="Write the raw times here, as .parquet, after every size.")] = None,
) -> None:
    """Time training steps of Pre-LN, Pre-RMSNorm and Pre-CRMSNorm, and what the parts of a step cost."""
    import pandas as pd

    from normgeo.bench import training as training_bench

    quiet()
    check_file(out)
    raw, options = [], {"batch": batch, "context": context, "vocabulary": vocabulary}
    named = {"revision": revision, "trust_remote_code": trust_remote_code}
    tasks = {size: training_bench.task_of(size, **options, **named) for size in words(sizes, "--sizes")}
    for size, task in tasks.items():
        times = training_bench.bench_training(task, rounds=rounds, precision=precision, device=device, progress=True)
        raw.append(times.assign(size=size))
        frame = training_bench.breakdown(times)
        about = frame.iloc[0]
        shown = table("form", "part", "share of Pre-LN's step", "quartiles", "seconds")
        for row in frame.to_dict("records"):
            shown.add_row(
                row["form"] if row["part"] == "whole" else "", row["part"], f"{100 * row['ratio']:.2f}%",
                f"{100 * row['ratio_q25']:.2f} to {100 * row['ratio_q75']:.2f}%", f"{row['seconds']:.4f}",
            )  # fmt: skip
        console.print(
            f"{size}: {batch} x {about.context} tokens, interleaved steps: {rounds}, mixed precision: {precision}, "
            f"{about.device}, threads: {about.threads}, torch {about.torch}"
        )
        console.print(shown)
        write_table(pd.concat(raw, ignore_index=True), out)


def _shape(text: str) -> tuple[int, int, int]:
    sizes = [int(size) for size in text.split("x") if size.strip().isdecimal()]
    if len(sizes) != 3 or text.count("x") != 2 or not all(sizes):
        raise NormGeoError(f"a shape is BATCHxTOKENSxWIDTH, whole numbers above 0, as 1x512x768; received {text!r}")
    return sizes[0], sizes[1], sizes[2]


def _spread(row: dict, name: str) -> str:
    if row[name] != row[name]:
        return ""
    return f"{row[name]:.3f} ({row[f'{name}_q25']:.3f}-{row[f'{name}_q75']:.3f})"


def _share(row: dict, prefix: str, floor: bool) -> str:
    if not floor or row[f"{prefix}ratio"] != row[f"{prefix}ratio"]:
        return ""
    share = row[f"{prefix}share"]
    return f"{100 * share:.0f}%" if row[f"{prefix}gap_clear"] else "no clear gap"


def _inference(frame: pd.DataFrame) -> None:
    keys = ["dtype", "batch", "length", "phase", "mode"]
    for _, part in frame.groupby(["model", *keys], sort=False):
        rows, floor = part.to_dict("records"), "no-norm" in set(part.variant)
        names = ("ms", "ratio", "share", "norms ms", "norms ratio", "norms share", "error")
        shown = table(Column("variant", no_wrap=True), *names)
        for row in rows:
            inside = row["norm_seconds"]
            shown.add_row(
                row["variant"], f"{1e3 * row['seconds']:.3f}", _spread(row, "ratio"), _share(row, "", floor),
                "" if inside != inside else f"{1e3 * inside:.3f}", _spread(row, "norm_ratio"),
                _share(row, "norm_", floor),
                f"{row['error']:.0e}",
            )  # fmt: skip
        first = rows[0]
        console.print(
            f"{first['model']}, {first['dtype']}, {first['batch']} x {first['length']}, {first['phase']}, "
            f"{first['mode']}; rounds: {first['rounds']}, {first['device']}, threads: {first['threads']}",
            highlight=False,
        )
        console.print(shown)


def _norms(frame: pd.DataFrame) -> None:
    for (shape, dtype), part in frame.groupby(["shape", "dtype"], sort=False):
        shown = table(Column("norm", no_wrap=True), "us", "ratio to torch's LayerNorm", "GB/s", "of copy")
        rows = part.to_dict("records")
        for row in rows:
            shown.add_row(
                row["norm"], f"{1e6 * row['seconds']:.1f}", _spread(row, "ratio"), f"{row['gb_per_s']:.1f}",
                f"{100 * row['copy_share']:.0f}%",
            )  # fmt: skip
        passes = rows[0]["passes"] + ("" if rows[0]["beta"] else ", without beta")
        about = f"rounds: {rows[0]['rounds']}, {passes}, {rows[0]['device']}, threads: {rows[0]['threads']}"
        console.print(f"{shape}, {dtype}; {about}", highlight=False)
        console.print(shown)
