"""The twins of *Geometry* table 2 and appendix A.2: shape, size and schedule, with the embedded pair's beside them."""

from __future__ import annotations

from dataclasses import asdict, replace

import matplotlib.figure
import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import MaxNLocator
from transformers import AutoConfig

from analyses import _axes
from normgeo import figures
from normgeo.cards import EMBEDDED
from normgeo.training.recipe import SIZES, Recipe, is_kept, learning_rate
from normgeo.training.twins import build_twin

VOCABULARY = 50257  # of GPT-2's tokenizer


def compute() -> pd.DataFrame:
    """One row per size: its recipe, the tokens that it is trained on, how many models are kept, and its size.

    `parameters` are those of the LayerNorm twin, whose head is tied, and `parameters_untied` of one with a head of its
    own, which is what the paper's names of the sizes count.
    """
    return pd.DataFrame([_row(size, recipe) for size, recipe in SIZES.items()])


def _row(size: str, recipe: Recipe) -> dict[str, object]:
    vocabulary = AutoConfig.from_pretrained(EMBEDDED["embedded-layernorm"]).vocab_size if size == "tiny" else VOCABULARY
    with torch.device("meta"):
        parameters, untied = (
            build_twin("layernorm", replace(recipe, tied=tied), vocabulary).num_parameters() for tied in (True, False)
        )
    kept = sum(is_kept(step, recipe) for step in range(recipe.steps + 1))
    counts: dict[str, object] = {
        "parameters": parameters,
        "parameters_untied": untied,
        "tokens": recipe.steps * recipe.batch * recipe.context,
        "checkpoints": kept,
    }
    return {"size": size, "vocabulary": vocabulary, **asdict(recipe), **counts}


def _millions(count: float) -> str:
    return f"{count:,.{int(count < 10)}f}M"


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The learning rate by step, with a mark at each model that is kept."""
    sizes = [str(size) for size in frame["size"]]
    counts = zip(sizes, frame.parameters / 1e6, frame.parameters_untied / 1e6, strict=True)
    titles = [f"{size}\n{_millions(tied)}, untied {_millions(untied)}" for size, tied, untied in counts]
    figure, grid = _axes.grid(
        ["learning rate (thousandths)"], titles, xlabel="step (thousands)", sharey="all", across=6
    )
    for axes, size in zip(grid[0], sizes, strict=True):
        recipe = SIZES[size]
        steps = range(0, recipe.steps + 1, recipe.steps // 400)
        rates = [1000 * learning_rate(step, recipe) for step in steps]
        axes.plot(np.array(steps) / 1000, rates, color="0.3", linewidth=1, label="rate")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        kept = [step for step in range(recipe.steps + 1) if is_kept(step, recipe)]
        rates = [1000 * learning_rate(step, recipe) for step in kept]
        axes.plot(np.array(kept) / 1000, rates, ".", color=figures.PALETTE[1], markersize=3, label="model kept")
    figures.legend(figure)
    figure.suptitle("How the twins of Geometry table 2 are trained, and their parameters", fontsize=9)
    return figure
