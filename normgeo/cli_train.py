"""The training commands of the command line: arguments and printing, no logic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from normgeo.cli import app, bench_app, console, quiet
from normgeo.cli_options import Knowing, refuse_beside
from normgeo.files import check_file, write_table

if TYPE_CHECKING:
    from normgeo.runs import RunConfig

__all__ = ["angles_by_step", "bench_train", "train"]


@app.command(cls=Knowing)
def train(
    norm: Annotated[
        str, typer.Option(help="layernorm, rmsnorm, pre-rmsnorm, pre-crmsnorm, or both (the first two).")
    ] = "both",
    size: Annotated[str, typer.Option(help="tiny, 70m, 160m, 410m or 1b (Geometry table 2).")] = "tiny",
    data: Annotated[
        str, typer.Option(help="openwebtext or wikipedia (streamed), or what `angles` takes.")
    ] = "openwebtext",
    exclude: Annotated[Path | None, typer.Option(help="A file of documents to leave out: the held-out text.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or directory.", show_default="learnt from a file; GPT-2's for streams")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Size of the vocabulary learnt from a file, or of its ids.", show_default="4096")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step, over all processes.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Passes that a process makes for one step.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Of the embedding and behind each branch.")] = None,
    precision: Annotated[str | None, typer.Option(help="Mixed precision: no, bf16 or fp16.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between kept models.", show_default="1K, ..., 10K, 20K, ...")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between the states to resume from.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between held-out losses.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initialization, data order and dropout.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log every step for TensorBoard.")] = False,
    out: Annotated[Path | None, typer.Option(help="A new directory.", show_default="runs/train-<size>-<date>")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Finish the training in this directory, as it was started.")
    ] = None,
) -> None:
    """Train twins: GPT-2s alike in everything but their norm. Under accelerate launch or torchrun, on many devices."""
    import accelerate

    from normgeo import training_runs
    from normgeo.recipe import recipe_for
    from normgeo.training_log import check_tensorboard

    quiet()
    if tensorboard:
        check_tensorboard()
    where = resume or out or training_runs.default_out(size)

    def report(kind: str, row: dict[str, float]) -> None:
        console.print(kind, {"step": int(row["step"])} | {k: round(v, 4) for k, v in row.items() if k != "step"})

    try:
        if resume:
            refuse_beside("--resume", "--tensorboard")
            done = training_runs.resume_training(resume, report=report, board=tensorboard)
        else:
            recipe = recipe_for(
                size, steps=steps, batch=batch, accumulate=accumulate, context=context, lr=lr, warmup=warmup,
                dropout=dropout, precision=precision, checkpoint_every=checkpoint_every, save_every=save_every,
                evaluate_every=evaluate_every, seed=seed,
            )  # fmt: skip
            config = training_runs.TrainConfig(
                norm, data, str(exclude) if exclude else None, tokenizer, vocabulary, device
            )
            done = training_runs.start_training(config, recipe, where, report=report, board=tensorboard)
    except KeyboardInterrupt:
        console.print(f"interrupted; finish it with: normgeo train --resume {where}")
        raise typer.Exit(130) from None
    for kind, path in done.items() if accelerate.PartialState().is_main_process else ():
        console.print(f"{kind}: {path}, learning curve in {where / kind / 'curve'}")


@bench_app.command("train")
def bench_train(
    sizes: Annotated[str, typer.Option(help="Sizes that `train` takes, with commas between.")] = "tiny,70m",
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Tokens that there are.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Steps that every variant takes, interleaved.")] = 100,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the raw times here, as .parquet, after every size.")] = None,
) -> None:
    """Time training steps of Pre-LN, Pre-RMSNorm and Pre-CRMSNorm, and what the parts of a step cost."""
    import pandas as pd

    from normgeo import training_bench
    from normgeo.recipe import recipe_for

    quiet()
    check_file(out)
    raw = []
    recipes = {size: recipe_for(size, batch=batch, context=context) for size in sizes.split(",")}
    for size, recipe in recipes.items():
        times = training_bench.bench_training(
            recipe, vocabulary=vocabulary, rounds=rounds, device=device, progress=True
        )
        raw.append(times.assign(size=size))
        frame = training_bench.breakdown(times)
        about = frame.iloc[0]
        table = Table("form", "part", "share of Pre-LN's step", "quartiles", "seconds", box=SIMPLE)
        for row in frame.to_dict("records"):
            table.add_row(
                row["form"] if row["part"] == "whole" else "", row["part"], f"{100 * row['ratio']:.2f}%",
                f"{100 * row['q25']:.2f} to {100 * row['q75']:.2f}%", f"{row['seconds']:.4f}",
            )  # fmt: skip
        console.print(
            f"{size}: {batch} x {context} tokens, {rounds} interleaved steps, float32, {about.threads} threads of "
            f"{about.device}, torch {about.torch}"
        )
        console.print(table)
        write_table(pd.concat(raw, ignore_index=True), out)


def angles_by_step(where: Path, checkpoints: Path | None = None, config: RunConfig | None = None) -> bool:
    """`normgeo angles --checkpoints` or its resumption; whether `where` is of this kind."""
    from normgeo import checkpoint_angles

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
