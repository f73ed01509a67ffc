"""Pre-LN, Pre-RMSNorm and Pre-CRMSNorm in training, from the same weights (*Pre-RMSNorm* section 3.4).

Cross-entropy in nats per token by step of the three forms in float32, AdamW, without dropout, on the embedded sample;
and how far each of the two training forms is from the Pre-LN model.
"""

from __future__ import annotations

import matplotlib.figure
import pandas as pd
import torch

from analyses import _axes
from normgeo import figures
from normgeo.conversion.convert import convert
from normgeo.errors import DataError
from normgeo.loading import load_tokenizer
from normgeo.tokens import load_tokens
from normgeo.training.compressed import compressed, widened
from normgeo.training.corpus import Shuffled
from normgeo.training.recipe import recipe_for
from normgeo.training.train import Trainer
from normgeo.training.twins import build_twin

NAMES = {"pre-ln": "Pre-LN", "pre-rmsnorm": "Pre-RMSNorm", "pre-crmsnorm": "Pre-CRMSNorm"}


def compute(n_tokens: int | None = None) -> pd.DataFrame:
    """One row per form and step.

    Args:
        n_tokens: tokens to train on, in steps of 2,048, at least two; None is 61,440.

    Raises:
        DataError: fewer than one token.
    """
    if n_tokens is not None and n_tokens < 1:
        raise DataError(f"a number of tokens is at least 1; received {n_tokens}")
    at_once = 8 * 256
    steps = max(2, (n_tokens or 30 * at_once) // at_once)
    recipe = recipe_for("tiny", steps=steps, warmup=max(1, steps // 8), dropout=0.0, precision="no")
    tokenizer = load_tokenizer("embedded-layernorm")
    assert tokenizer is not None
    plain = widened(build_twin("layernorm", recipe, len(tokenizer)))  # pyright: ignore
    with torch.random.fork_rng(devices=[]):
        models = {
            "pre-ln": plain,
            "pre-rmsnorm": convert(plain, trainable=True).model,
            "pre-crmsnorm": compressed(plain),
        }
    parts = []
    for form, model in models.items():
        corpus = Shuffled(load_tokens("sample", tokenizer, recipe.context), recipe.context, recipe.seed)
        trainer = Trainer(form, recipe, corpus, len(tokenizer), device="cpu", model=model)
        trainer.run()
        parts.append(trainer.curve[["step", "train_loss"]].assign(form=form))
    frame = pd.concat(parts, ignore_index=True)
    reference = frame[frame.form == "pre-ln"].set_index("step").train_loss
    expected = frame.step.map(reference)
    return frame.assign(difference=(frame.train_loss - expected).abs() / expected)[
        ["form", "step", "train_loss", "difference"]
    ]


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """The three loss curves, and the relative difference of two of them from the first."""
    figure, grid = _axes.grid(
        [""],
        ["loss (nats per token)", "relative difference from Pre-LN (none: drawn at 1e-9)"],
        xlabel="training step",
        height=2.4,
        sharey="none",
    )
    curves, difference = grid[0]
    for k, (form, name) in enumerate(NAMES.items()):
        part = frame[frame.form == form]
        style = {
            "color": figures.PALETTE[k],
            "linewidth": (4.0, 2.0, 0.8)[k],
            "label": name,
            "marker": " s^"[k],
            "markersize": 3,
        }
        curves.plot(part.step, part.train_loss, **style)
        if form != "pre-ln":
            difference.plot(part.step, part.difference.clip(1e-9), **style | {"linewidth": 0.8})
    difference.set_yscale("log")
    difference.axhline(torch.finfo(torch.float32).eps, color="0.5", linewidth=0.8, linestyle=":", label="float32's eps")
    figures.legend(figure)
    figure.suptitle("One model in three forms, training in float32", fontsize=9)
    return figure
