"""Training twins: one GPT-2 with LayerNorm and one with RMSNorm, on the same data, in the same order, from one seed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from normgeo.errors import DataError, NormGeoError
from normgeo.models import TwinConfig, TwinLMHeadModel
from normgeo.tokens import TokenStream

__all__ = ["SIZES", "Recipe", "build_twin", "evaluate", "learning_rate", "train", "train_tokenizer"]

Norm = Literal["layernorm", "rmsnorm"]


@dataclass(frozen=True)
class Recipe:
    """How a twin is made: architecture, optimization, and the seed that the twins share.

    AdamW with decoupled decay on matrices, linear warm-up, cosine decay to 10% of the peak (*Geometry* appendix A.2).
    """

    layers: int
    d: int
    heads: int
    lr: float
    steps: int
    context: int = 1024
    batch: int = 64
    warmup: int = 1000
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    dropout: float = 0.0
    bf16: bool = False
    seed: int = 0


SIZES = {
    "tiny": Recipe(6, 192, 6, 2e-3, 2400, context=256, batch=8, warmup=100, dropout=0.1, bf16=True),
    "70m": Recipe(6, 512, 8, 10e-4, 100_000),
    "160m": Recipe(12, 768, 12, 6e-4, 100_000),
    "410m": Recipe(24, 1024, 16, 3e-4, 50_000),
    "1b": Recipe(16, 2048, 8, 3e-4, 50_000),
}
"""*Geometry* table 2, and `tiny`, which made the embedded pair."""


def train_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in GPT-2's form, learnt from `texts`; it puts nothing between documents."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=["<|endoftext|>"], show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)


def build_twin(norm: Norm, recipe: Recipe, vocabulary: int) -> GPT2LMHeadModel:
    """A freshly initialized twin: LayerNorm and RMSNorm twins of one recipe share every parameter they both have."""
    shape = {
        "n_layer": recipe.layers,
        "n_embd": recipe.d,
        "n_head": recipe.heads,
        "n_positions": recipe.context,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": None,
        "embd_pdrop": recipe.dropout,
        "attn_pdrop": 0.0,
        "resid_pdrop": recipe.dropout,
    }
    torch.manual_seed(recipe.seed)
    return GPT2LMHeadModel(GPT2Config(**shape)) if norm == "layernorm" else TwinLMHeadModel(TwinConfig(**shape))


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up to `recipe.lr`, then cosine decay to a tenth of it at the last step."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def _contexts(ids: np.ndarray, recipe: Recipe) -> Iterator[Tensor]:
    """Endless batches of contexts: each epoch cuts the ids at another offset and shuffles; a function of the seed."""
    rng = np.random.default_rng(recipe.seed)
    pool = np.empty((0, recipe.context), np.int64)
    while True:
        while len(pool) < recipe.batch:
            rows = (len(ids) - recipe.context) // recipe.context
            offset = rng.integers(0, len(ids) - rows * recipe.context)
            epoch = ids[offset : offset + rows * recipe.context].reshape(rows, recipe.context)
            pool = np.concatenate([pool, epoch[rng.permutation(rows)]])
        yield torch.from_numpy(pool[: recipe.batch])
        pool = pool[recipe.batch :]


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, tokens: TokenStream, rows: int = 16) -> float:
    """Mean cross-entropy in nats a token, dropout off, over every prediction inside the contexts of `tokens`."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in tokens.batches(None, rows):
        ids = torch.from_numpy(batch.ids).to(model.device)
        if ids.shape[1] < 2:
            continue
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        total += torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    model.train(was_training)
    if not count:
        raise DataError(f"{tokens.source} has no two tokens in a row to predict")
    return total / count


def _optimizer(model: GPT2LMHeadModel, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2))


def train(
    norm: Norm,
    recipe: Recipe,
    tokens: TokenStream,
    vocabulary: int,
    *,
    held_out: TokenStream | None = None,
    evaluate_every: int = 100,
    device: str = "cpu",
    report: Callable[[dict[str, float]], None] = lambda row: None,
) -> tuple[GPT2LMHeadModel, pd.DataFrame]:
    """Train one twin.

    Returns:
        The model in evaluation mode, and its learning curve: a row per `evaluate_every` steps with the mean training
        loss since the last, the held-out loss (nats a token) and the learning rate.

    Raises:
        DataError: fewer tokens than one batch needs.
        NormGeoError: the loss is not finite.
    """
    ids = np.concatenate([batch.ids.ravel() for batch in tokens.batches(None, 64)])
    if len(ids) <= recipe.context * recipe.batch:
        raise DataError(
            f"training needs more than {recipe.context * recipe.batch:,} tokens, {tokens.source} has {len(ids):,}"
        )
    model = build_twin(norm, recipe, vocabulary).to(device).train()  # pyright: ignore[reportArgumentType]
    optimizer, batches = _optimizer(model, recipe), _contexts(ids, recipe)
    torch.manual_seed(recipe.seed)  # dropout masks are the twins' own, and the same for both
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        batch = next(batches).to(device)
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=recipe.bf16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NormGeoError(
                f"the loss became {losses[-1]} at step {step + 1}; lower the learning rate ({recipe.lr})"
            )
        if (step + 1) % evaluate_every == 0 or step + 1 == recipe.steps:
            row = {"step": step + 1, "train_loss": float(np.mean(losses)), "lr": learning_rate(step, recipe)}
            if held_out is not None:
                row["held_out_loss"] = evaluate(model, held_out)
            curve.append(row)
            losses.clear()
            report(row)
    return model.eval(), pd.DataFrame(curve)


def save_twin(model: GPT2LMHeadModel, tokenizer: Any, out: Path, dtype: torch.dtype, note: dict[str, Any]) -> None:
    """Save a twin as safetensors with its tokenizer and `training.json`; the directory appears whole or not at all."""
    scratch = out.with_name(out.name + ".partial")
    model.to(dtype).save_pretrained(scratch)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(scratch)
    (scratch / "training.json").write_text(json.dumps(note, indent=2) + "\n")
    os.replace(scratch, out)


def recipe_for(size: str, **changes: Any) -> Recipe:
    """The recipe of a size with some fields changed; None leaves a field as it is.

    Raises:
        NormGeoError: there is no such size.
    """
    if size not in SIZES:
        raise NormGeoError(f"no size {size!r}; the sizes are {', '.join(SIZES)}")
    return replace(SIZES[size], **{k: v for k, v in changes.items() if v is not None})


def described(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, for the records."""
    return asdict(recipe)
