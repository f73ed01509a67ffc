"""How twins are trained: *Geometry* table 2 and appendix A.2, and the recipe of the embedded pair."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from normgeo.errors import NormGeoError
from normgeo.numbers import check_number

__all__ = ["MOST", "NORMS", "SIZES", "Recipe", "is_kept", "learning_rate", "mixed", "recipe_for"]

NORMS = ("layernorm", "rmsnorm", "pre-rmsnorm", "pre-crmsnorm")
"""The twins there are; `both` on the command line is the first two."""

PRECISIONS = ("no", "bf16", "fp16")
LEAST = {"warmup": 0, "seed": 0, "context": 2}  # a context of one token predicts nothing
PLAIN = {"int": int, "int | None": int, "float": float, "bool": bool}
"""What fields are, by how their types are written."""

MOST = 2**31 - 1
SEEDS = 2**63 - 1


@dataclass(frozen=True)
class Recipe:
    """How a twin is made: architecture, optimization, what is kept, and the seed that the twins share.

    AdamW with decoupled decay on matrices, linear warm-up, cosine decay to 10% of the peak (*Geometry* appendix A.2).

    Attributes:
        layers: blocks. `d`: width of the stream. `heads`: attention heads.
        lr: the peak learning rate, reached after `warmup` steps. `steps`: optimizer steps.
        context: tokens in a sequence. `batch`: sequences in an optimizer step, over all processes.
        accumulate: forward and backward passes that a process makes for one optimizer step.
        weight_decay: of matrices; vectors have none. `beta2`: AdamW's. `clip`: largest norm of the gradient.
        dropout: of the embedding and behind each branch.
        precision: mixed precision: no, bf16 or fp16.
        checkpoint_every: steps between the models that are kept, step 0 included; None is the paper's 1K, 2K, ..., 10K,
            20K, ... The last step is always kept.
        save_every: steps between the states that a killed run resumes from.
        evaluate_every: steps between held-out losses.
        seed: of initialization, data order and dropout.
        tied: the head is the embedding, as in GPT-2. What table 2's names count has heads of its own: 70.9M, 163M,
            406M and 1,014M parameters with GPT-2's vocabulary, of which tied ones have 45M, 124M, 355M and 911M.
    """

    layers: int
    d: int
    heads: int
    lr: float
    steps: int
    context: int = 1024
    batch: int = 64
    accumulate: int = 1
    warmup: int = 1000
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    dropout: float = 0.0
    precision: str = "no"
    checkpoint_every: int | None = None
    save_every: int = 500
    evaluate_every: int = 1000
    seed: int = 0
    tied: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not isinstance(value, numbers.Real):
                raise NormGeoError(f"--{field.name.replace('_', '-')} must be a number, received {value!r}")
            if field.type == "int" or (field.name == "checkpoint_every" and value is not None):
                most = SEEDS if field.name == "seed" else MOST
                check_number(field.name, value, LEAST.get(field.name, 1), most)
            if value is not None:  # numpy's are none that JSON knows
                object.__setattr__(self, field.name, PLAIN.get(str(field.type), lambda same: same)(value))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise NormGeoError(f"--lr, the learning rate, must be finite and above 0, received {self.lr}")
        if not 0 <= self.dropout < 1:
            raise NormGeoError(f"--dropout must be at least 0 and below 1, received {self.dropout}")
        if not (0 <= self.weight_decay < math.inf and self.clip > 0 and 0 <= self.beta2 < 1):
            raise NormGeoError(
                "weight_decay is finite and at least 0, clip above 0 (inf does not clip), and beta2 in [0, 1): "
                f"{self.weight_decay}, {self.clip}, {self.beta2}"
            )
        if self.precision not in PRECISIONS:
            raise NormGeoError(f"no precision {self.precision!r}; choose {', '.join(PRECISIONS)}")
        if self.d % self.heads:
            raise NormGeoError(f"the width {self.d} is no multiple of the number of heads, {self.heads}")


SIZES = {
    "tiny": Recipe(
        6, 192, 6, 2e-3, 2400, context=256, batch=8, warmup=100, dropout=0.1, precision="bf16", checkpoint_every=100,
        save_every=100, evaluate_every=100,
    ),
    "70m": Recipe(6, 512, 8, 10e-4, 100_000),
    "160m": Recipe(12, 768, 12, 6e-4, 100_000),
    "410m": Recipe(24, 1024, 16, 3e-4, 50_000),
    "1b": Recipe(16, 2048, 8, 3e-4, 50_000),
}  # fmt: skip
"""*Geometry* table 2, and `tiny`, which made the embedded pair."""


def recipe_for(size: str, **changes: Any) -> Recipe:
    """The recipe of a size with some fields changed; None leaves a field as it is.

    Raises:
        NormGeoError: there is no such size, or a value is out of range.

    >>> recipe_for("70m", steps=10).lr
    0.001
    """
    if size not in SIZES:
        raise NormGeoError(f"no size {size!r}; the sizes are {', '.join(SIZES)}")
    return replace(SIZES[size], **{k: v for k, v in changes.items() if v is not None})


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up to `recipe.lr`, then cosine decay to a tenth of it, which the step after the last would have."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def is_kept(step: int, recipe: Recipe) -> bool:
    """Whether the model is kept after a step: 1K, 2K, ..., 10K, 20K, ... (*Geometry* appendix A.2), and the last.

    >>> [step for step in range(50_001) if is_kept(step, recipe_for("410m"))][8:]
    [9000, 10000, 20000, 30000, 40000, 50000]
    >>> [step for step in range(501) if is_kept(step, recipe_for("tiny", steps=500, checkpoint_every=200))]
    [0, 200, 400, 500]
    """
    every = recipe.checkpoint_every or (1000 if step < 10_000 else 10_000)
    return step == recipe.steps or (step % every == 0 and (step > 0 or recipe.checkpoint_every is not None))


def mixed(*numbers: int) -> int:
    """A seed that is a function of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
