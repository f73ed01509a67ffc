r"""How far one model's outputs are from another's: sums over positions in float64, batch by batch.

With p and q the softmax of the reference's and the other model's logits at a position, in nats:

    KL(p || q) = sum_i p_i (log p_i - log q_i)        perplexity = exp(mean over predictions of -log q[next token])

Nothing that is kept grows with the number of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.errors import DataError, ModelError
from normgeo.sites import evaluating
from normgeo.stream import forward, in_memory, own_errors, vocabulary
from normgeo.tokens import TokenBatch, TokenStream

__all__ = ["Agreement", "agreements", "next_tokens"]

AT_ONCE = 1 << 18
"""Logits in float64 at once on a CPU: 2 MiB stay in the cache, which is three times as fast as 32 MiB."""
ON_A_DEVICE = 1 << 23
"""And elsewhere, where every sum is waited for: 64 MiB, of which there are half a dozen."""

HALF = {torch.float16, torch.bfloat16}

UNSEEN, UNSEEN_HALF = 1e-4, 5e-3
"""A first output that later tokens move by less, relative to its norm, does not see them: that is rounding, where
experts get other batches. Tokens that are seen move it by 0.2% or more, in masked language models with random weights;
in half precision a model that could be one must know how to generate too."""


def next_tokens(ids: Int[Tensor, "rows time"]) -> Int[Tensor, "rows time"]:
    """The token behind each token in the same context, -1 behind the last: what a causal model predicts there.

    >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -1]]
    """
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], dim=1)


def _wide(x: Tensor) -> Tensor:
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


@dataclass
class Agreement:
    """Sums over positions of what tells a model's outputs from the reference's.

    Attributes:
        positions: positions compared.
        error_max, error_square: largest |difference| of an output, and the sum of squared differences.
        reference_max, reference_square: the same of the reference's outputs themselves.
        kl_sum, kl_max: KL(reference || model) in nats, summed and largest over positions.
        same_top: positions where both prefer the same token.
        nats, predictions: -log q of the next tokens, summed, and how many there were.
    """

    positions: int = 0
    error_max: float = 0.0
    error_square: float = 0.0
    reference_max: float = 0.0
    reference_square: float = 0.0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    same_top: int = 0
    nats: float = 0.0
    predictions: int = 0

    def add(
        self,
        reference: Float[Tensor, "positions width"],
        other: Float[Tensor, "positions width"],
        following: Int[Tensor, " positions"] | None = None,
        *,
        logits: bool = True,
    ) -> None:
        """Take the outputs of both models at the same positions.

        Args:
            reference: the reference's outputs.
            other: the model's.
            following: the next token at each position, -1 where there is none; None where none is predicted.
            logits: whether the outputs are logits of several classes; of hidden states, and of a single score, there is
                no KL, no token preferred, no loss.
        """
        step = max(1, (AT_ONCE if reference.device.type in ("cpu", "mps") else ON_A_DEVICE) // reference.shape[-1])
        for start in range(0, len(reference), step):
            part = slice(start, start + step)
            x = _wide(reference[part])
            y = x if other is reference else _wide(other[part]).to(x.device)
            self._errors(x, y)
            if logits:
                self._probabilities(x, y, None if following is None else following[part].to(x.device))

    def _errors(self, x: Tensor, y: Tensor) -> None:
        difference = x - y
        self.positions += len(x)
        self.error_max = max(self.error_max, difference.abs().max().item())
        self.error_square += difference.square().sum().item()
        self.reference_max = max(self.reference_max, x.abs().max().item())
        self.reference_square += x.square().sum().item()

    def _probabilities(self, x: Tensor, y: Tensor, following: Tensor | None) -> None:
        log_p = x.log_softmax(-1)
        log_q = log_p if y is x else y.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)  # never negative but by rounding
        self.kl_sum += kl.sum().item()
        self.kl_max = max(self.kl_max, kl.max().item())
        self.same_top += int((x.argmax(-1) == y.argmax(-1)).sum())
        if following is not None:
            known = following >= 0
            self.nats -= log_q[known, following[known]].sum().item()
            self.predictions += int(known.sum())

    def metrics(self, *, logits: bool = True) -> dict[str, float]:
        """What the sums come to; NaN where it has no meaning (see `add`)."""
        n = self.positions
        loss = self.nats / self.predictions if self.predictions else math.nan
        return {
            "cross_entropy": loss,
            "perplexity": math.exp(loss) if not loss > 700 else math.inf,
            "kl_mean": self.kl_sum / n if logits else math.nan,
            "kl_max": self.kl_max if logits else math.nan,
            "top1": self.same_top / n if logits else math.nan,
            "error_max": self.error_max,
            "error_max_rel": _ratio(self.error_max, self.reference_max),
            "error_rms_rel": math.sqrt(_ratio(self.error_square, self.reference_square)),
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else (0.0 if a == 0 else math.inf)


def _output(name: str, model: PreTrainedModel, batch: TokenBatch) -> tuple[str, Tensor]:
    """What a model gives for each token, and whether that is its logits or its last hidden states."""
    with torch.inference_mode(), own_errors(model), in_memory(model, batch):
        result = forward(model, batch, vocabulary(model))
    kind = next((k for k in ("logits", "last_hidden_state") if isinstance(getattr(result, k, None), Tensor)), None)
    if kind is None:
        raise ModelError(f"{name} ({type(model).__name__}) gives neither logits nor hidden states to compare")
    value = getattr(result, kind)
    if value.ndim == 2:  # scores of tokens, one each, or of whole contexts: as if each were one position
        value = value[..., None] if value.shape == batch.ids.shape else value[:, None]
    if not torch.isfinite(value).all():
        bad, narrow = int((~torch.isfinite(value)).any(-1).sum()), {value.dtype, model.dtype} & HALF
        raise ModelError(
            f"the {kind} of {name} are NaN or infinite at {bad} of {value.shape[0] * value.shape[1]} positions of the "
            f"batch from token {batch.start} on ({value.dtype}); nothing can be said of it. "
            + ("Try --dtype float32" if narrow else "Look for such values in its weights")
        )
    return kind, value


def _predicts(name: str, model: PreTrainedModel, batch: TokenBatch) -> bool:
    """Whether the output at a token is a distribution of the next one: all the vocabulary, and later tokens unseen.

    The first position's output must not change when all tokens behind it do.
    """
    ids, size = batch.ids[:1, :16], vocabulary(model)
    changed = np.concatenate([ids[:, :1], (ids[:, 1:] + 1) % size], axis=1)
    kind, a = _output(name, model, TokenBatch(ids, ids, 0))
    _, b = _output(name, model, TokenBatch(changed, ids, 0))
    if kind != "logits" or a.shape[1] != ids.shape[1] or a.shape[-1] < model.config.get_text_config().vocab_size:
        return False
    first, other = _wide(a[0, 0]), _wide(b[0, 0])
    moved = float((first - other).norm() / first.norm().clamp(min=1e-300))
    return moved <= UNSEEN or (moved <= UNSEEN_HALF and bool({a.dtype, model.dtype} & HALF) and model.can_generate())


def _check_alike(a: str, first: tuple[str, Tensor], b: str, second: tuple[str, Tensor]) -> None:
    (kind, x), (other_kind, y) = first, second
    if kind != other_kind:
        raise DataError(f"{a} gives {kind} and {b} gives {other_kind}; they cannot be compared")
    if x.shape != y.shape:
        hint = "their vocabularies differ" if kind == "logits" else "they are of different widths"
        raise DataError(
            f"the {kind} of {a} are {x.shape[-1]} wide and those of {b} {y.shape[-1]}: {hint}; compare models with "
            "the same tokenizer and width of output"
        )


def agreements(
    models: Mapping[str, PreTrainedModel],
    source: TokenStream,
    n_tokens: int | None,
    batch: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, dict[str, Any]]:
    """The metrics of every model's outputs against the first one's, on the tokens of a stream.

    Args:
        models: by name; the first is the reference.
        source: the tokens.
        n_tokens: exactly so many; None takes all.
        batch: contexts that go through a model together.
        advance: called with the number of tokens just done.

    Returns:
        By model: what was compared (`output`), `tokens`, `predictions` and `Agreement.metrics`.

    Raises:
        DataError: no tokens, too few, or outputs that are not alike in kind and shape.
        ModelError: a model without outputs to compare, or with outputs that are not finite.
    """
    sums = {name: Agreement() for name in models}
    reference, predicts, kind, classes, seen = next(iter(models)), {}, "logits", False, 0
    with ExitStack() as modes:
        for model in models.values():
            modes.enter_context(evaluating(model))
        for chunk in source.batches(n_tokens, batch):
            following = next_tokens(torch.from_numpy(chunk.ids)).flatten()
            first = _output(reference, models[reference], chunk)
            kind, truth = first[0], first[1].flatten(0, 1)
            classes = kind == "logits" and truth.shape[-1] > 1
            for name, model in models.items():
                value = truth
                if name != reference:
                    other = _output(name, model, chunk)
                    _check_alike(reference, first, name, other)
                    value = other[1].flatten(0, 1)
                if name not in predicts:
                    predicts[name] = _predicts(name, model, chunk)
                sums[name].add(truth, value, following if predicts[name] else None, logits=classes)
            seen += chunk.n_tokens
            advance(chunk.n_tokens)
    if not seen:
        raise DataError(f"{source.source} holds no tokens")
    return {
        name: {"output": kind, "tokens": seen, "predictions": s.predictions, **s.metrics(logits=classes)}
        for name, s in sums.items()
    }
