"""`normgeo train`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from normgeo.cli.app import app, console, note, quiet, resumable, warn
from normgeo.cli.options import refuse_beside


@app.command()
def train(
    given: typer.Context,
    norm: Annotated[
        str, typer.Option(help="layernorm, rmsnorm, pre-rmsnorm, pre-crmsnorm, or both (the first two).")
    ] = "both",
    size: Annotated[
        str,
        typer.Option(
            help="tiny, 70m, 160m, 410m or 1b (Geometry table 2); sets the defaults of steps, batch, lr and so on."
        ),
    ] = "tiny",
    data: Annotated[
        str, typer.Option(help="Text, as for `angles --data`; hub data sets are streamed.")
    ] = "openwebtext",
    exclude: Annotated[
        Path | None, typer.Option(help="Held-out documents, left out of training and evaluated on: a file, or sample.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Hub id or directory of a tokenizer.", show_default="learnt from a file; GPT-2's for streams"
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="Size of the vocabulary to learn from a file, or of the ids in it.", show_default="4096"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step, summed over processes.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Gradient accumulation: passes of a process for one step.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout of the embedding and behind each branch.")] = None,
    precision: Annotated[str | None, typer.Option(help="Mixed precision: no, bf16 or fp16.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between models that are kept.", show_default="1K, ..., 10K, 20K, ...")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between the states to resume from.")] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between held-out losses, each over all held-out documents, and between the lines printed, "
            "whose train loss is the mean since the line before."
        ),
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give the model a head of its own, apart from the embedding's weights.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of initialization, data order and dropout.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log every step for TensorBoard.")] = False,
    out: Annotated[Path | None, typer.Option(help="A new directory.", show_default="runs/train-<size>-<date>")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Finish the training in this directory, as it was started.")
    ] = None,
) -> None:
    """Train twins: GPT-2s alike in everything but their norm. Under accelerate launch or torchrun, on many devices."""
    from normgeo.system.ranks import is_first
    from normgeo.training import runs as training_runs
    from normgeo.training.log import check_tensorboard
    from normgeo.training.recipe import recipe_for

    quiet()
    if tensorboard:
        check_tensorboard()

    def report(kind: str, row: dict[str, float]) -> None:
        values = [f"{name.replace('_', ' ')} {value:.5g}" for name, value in row.items() if name != "step"]
        note(f"{kind}, step {int(row['step']):,}: {', '.join(values)}")

    chosen = nullcontext(resume) if resume else training_runs.output(out, size, device)
    with chosen as where, resumable("train", where, (where / "train.json").is_file):
        if resume:
            refuse_beside(given, "--resume", "--tensorboard")
            done = training_runs.resume_training(resume, report=report, board=tensorboard)
        else:
            recipe = recipe_for(
                size, steps=steps, batch=batch, accumulate=accumulate, context=context, lr=lr, warmup=warmup,
                dropout=dropout, precision=precision, checkpoint_every=checkpoint_every, save_every=save_every,
                evaluate_every=evaluate_every, seed=seed, tied=False if untie else None,
            )  # fmt: skip
            if recipe.warmup > recipe.steps and is_first():
                warn(
                    f"the warm-up takes {recipe.warmup:,} steps and the training {recipe.steps:,}: the rate never "
                    f"comes to {recipe.lr}; give a shorter --warmup"
                )
            config = training_runs.TrainConfig(
                norm, data, str(exclude) if exclude else None, tokenizer, vocabulary, device
            )
            done = training_runs.start_training(config, recipe, where, report=report, board=tensorboard)
    for kind, path in done.items() if is_first() else ():
        console.print(f"{kind}: {path}, learning curve in {where / kind / 'curve'}")
