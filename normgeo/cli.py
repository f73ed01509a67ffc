"""The command line: arguments and printing, no logic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.callback()
def root() -> None:
    """Geometric analysis of the normalization layers of transformers."""


@app.command()
def train(
    data: Annotated[str, typer.Option(help="What `angles` takes as --data: wikipedia, or a file with text.")],
    out: Annotated[Path, typer.Option(help="Where the twins go: OUT/layernorm and OUT/rmsnorm.")],
    norm: Annotated[str, typer.Option(help="layernorm, rmsnorm or both.")] = "both",
    size: Annotated[str, typer.Option(help="tiny, 70m, 160m, 410m or 1b.")] = "tiny",
    vocabulary: Annotated[int, typer.Option(help="Size of the BPE vocabulary learnt from the data.")] = 4096,
    exclude: Annotated[Path | None, typer.Option(help="A file of documents to leave out: the held-out text.")] = None,
    steps: Annotated[int | None, typer.Option()] = None,
    batch: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    device: Annotated[str, typer.Option()] = "cpu",
) -> None:
    """Train twins: one GPT-2 with LayerNorm and one with RMSNorm, alike in everything else."""
    import torch

    from normgeo import tokens, training

    recipe = training.recipe_for(size, steps=steps, batch=batch, seed=seed)
    left_out = set(tokens.read_documents(exclude)) if exclude else set()
    texts = (text for text in tokens.read_documents(Path(data)) if text not in left_out)
    tokenizer = training.train_tokenizer(texts, vocabulary)
    stream = tokens.load_tokens(data, tokenizer, recipe.context, exclude=left_out)
    held_out = tokens.load_tokens(exclude, tokenizer, recipe.context) if exclude else None
    for kind in ("layernorm", "rmsnorm") if norm == "both" else (norm,):
        model, curve = training.train(
            kind, recipe, stream, len(tokenizer), held_out=held_out, device=device,
            report=lambda row, kind=kind: console.print(kind, {k: round(v, 4) for k, v in row.items()}),
        )  # fmt: skip
        note = {
            "norm": kind, "recipe": training.described(recipe), "vocabulary": len(tokenizer),
            "data_sha256": stream.digest, "command": " ".join(["normgeo", *sys.argv[1:]]),
            "versions": {"torch": torch.__version__}, "curve": curve.to_dict("records"),
        }  # fmt: skip
        training.save_twin(model, tokenizer, out / kind, torch.float32, note)


def main() -> None:
    """Run the command line."""
    app()
