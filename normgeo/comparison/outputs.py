"""Models' outputs on the tokens of a stream, each against the first one's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.agreement import Agreement, next_tokens, wide
from normgeo.errors import DataError, ModelError
from normgeo.stream import forward, in_memory, own_errors, vocabulary
from normgeo.tokens import TokenBatch, TokenStream
from normgeo.trace import evaluating

__all__ = ["agreements"]

HALF = {torch.float16, torch.bfloat16}

UNSEEN, UNSEEN_HALF = 1e-4, 5e-3
"""A first output that later tokens move by less, relative to its norm, does not see them: that is rounding, where
experts get other batches. Tokens that are seen move it by 0.2% or more, in masked language models with random weights;
in half precision a model that could be one must know how to generate too."""


def _output(name: str, model: PreTrainedModel, batch: TokenBatch) -> tuple[str, Tensor]:
    """What a model gives for each token, and whether that is its logits or its last hidden states."""
    with torch.no_grad(), own_errors(model), in_memory(model, batch):
        result = forward(model, batch, vocabulary(model))
    kind = next((k for k in ("logits", "last_hidden_state") if isinstance(_part(result, k), Tensor)), None)
    if kind is None:
        given = ", ".join(result) if isinstance(result, Mapping) else type(result).__name__
        raise ModelError(
            f"{name} ({type(model).__name__}) gives neither logits nor a last hidden state to compare, but {given}; "
            "load it as a class that does"
        )
    value = _part(result, kind)
    if value.ndim == 2:  # scores of tokens, one each, or of whole contexts: as if each were one position
        value = value[..., None] if value.shape == batch.ids.shape and _by_token(model, batch, kind) else value[:, None]
    if not torch.isfinite(torch.stack(torch.aminmax(value))).all():  # which NaN come through; of all it takes a copy
        bad, narrow = int((~torch.isfinite(value)).any(-1).sum()), {value.dtype, model.dtype} & HALF
        raise ModelError(
            f"the {kind} of {name} are NaN or infinite at {bad} of {value.shape[0] * value.shape[1]} positions of the "
            f"batch from token {batch.start} on ({value.dtype}); nothing can be said of it. "
            + ("Try --dtype float32" if narrow else "Look for such values in its weights")
        )
    return kind, value


def _by_token(model: PreTrainedModel, batch: TokenBatch, kind: str) -> bool:
    """Whether scores are one for each token, and not classes of the whole: of fewer tokens there are fewer."""
    ids = batch.ids[:1, :-1] if batch.ids.shape[1] > 1 else np.repeat(batch.ids[:1], 2, axis=1)
    with torch.no_grad(), own_errors(model):
        return _part(forward(model, TokenBatch(ids, ids, 0), vocabulary(model)), kind).shape == ids.shape


def _part(result: Any, kind: str) -> Any:
    return result.get(kind) if isinstance(result, Mapping) else getattr(result, kind, None)


def _predicts(name: str, model: PreTrainedModel, batch: TokenBatch) -> bool:
    """Whether the output at a token is a distribution of the next one: all the vocabulary, and later tokens unseen.

    The first position's output must not change when all tokens behind it do. An encoder sees them all.
    """
    if model.config.is_encoder_decoder:
        return False
    ids, size = batch.ids[:1, :16], vocabulary(model)
    changed = np.concatenate([ids[:, :1], (ids[:, 1:] + 1) % size], axis=1)
    kind, a = _output(name, model, TokenBatch(ids, ids, 0))
    _, b = _output(name, model, TokenBatch(changed, ids, 0))
    if kind != "logits" or a.shape[1] != ids.shape[1] or a.shape[-1] < model.config.get_text_config().vocab_size:
        return False
    first, other = wide(a[0, 0]), wide(b[0, 0])
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
    sums, predicts = {name: Agreement() for name in models}, dict[str, bool]()
    kind, classes, seen = "logits", False, 0
    with ExitStack() as modes:
        for model in models.values():
            modes.enter_context(evaluating(model))
        for chunk in source.batches(n_tokens, batch):
            kind, classes = _add(models, chunk, sums, predicts)
            seen += chunk.n_tokens
            advance(chunk.n_tokens)
    if not seen:
        raise DataError(f"{source.source} holds no tokens")
    return {
        name: {"output": kind, "tokens": seen, "predictions": s.predictions, **s.metrics(logits=classes)}
        for name, s in sums.items()
    }


def _add(
    models: Mapping[str, PreTrainedModel], chunk: TokenBatch, sums: Mapping[str, Agreement], predicts: dict[str, bool]
) -> tuple[str, bool]:
    """Run all models on a batch; gives the kind of their outputs, and whether these are logits of several classes.

    There are never more outputs than the reference's and another's: of a large vocabulary they are gigabytes.
    """
    reference, following = next(iter(models)), next_tokens(torch.from_numpy(chunk.ids)).flatten()
    first = _output(reference, models[reference], chunk)
    kind, truth = first[0], first[1].flatten(0, 1)
    classes = kind == "logits" and truth.shape[-1] > 1
    for name, model in models.items():
        other = first if name == reference else _output(name, model, chunk)
        _check_alike(reference, first, name, other)
        if name not in predicts:
            predicts[name] = _predicts(name, model, chunk)
        value = truth if name == reference else other[1].flatten(0, 1)
        sums[name].add(truth, value, following if predicts[name] else None, logits=classes)
        del other, value  # before the next are made
    return kind, classes
