"""Twins: GPT-2s of one recipe that differ in their norm, to train and to save (*Geometry* section 3.3)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int64
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from normgeo.conversion import checkpoint
from normgeo.conversion.convert import convert
from normgeo.conversion.shallow import empty_model, shapes_of
from normgeo.errors import DataError, NormGeoError
from normgeo.models import TwinConfig, TwinLMHeadModel, seeded
from normgeo.stream import check_context, vocabulary
from normgeo.tokens import TokenStream
from normgeo.trace import evaluating
from normgeo.training.compressed import compressed, widened
from normgeo.training.recipe import NORMS, Recipe

__all__ = [
    "adamw",
    "build_twin",
    "check_trains",
    "evaluate",
    "kept_like",
    "logits_of",
    "loss_of",
    "plain_name",
    "save_twin",
    "train_tokenizer",
]

END = "<|endoftext|>"
PIECES = re.compile(r"[\s\S]{1,65536}[ \n\t\r]*[^ \n\t\r]*")
"""Of a text, each before white space: a word is learnt with that which is before it."""
ACTS_BY = (
    "activation_function", "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "n_head",
)  # fmt: skip
"""What of a configuration no shape shows."""
ELSEWHERE = "train it without a folder, and save it yourself"


def train_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in GPT-2's form, learnt from `texts`; its end-of-text token goes between documents."""
    bpe = ByteLevelBPETokenizer()
    pieces = (piece[0] for text in texts for piece in PIECES.finditer(text))  # a text in whole takes 90 times its size
    bpe.train_from_iterator(pieces, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)


def _shape(recipe: Recipe, vocabulary: int, end: int | None) -> dict[str, Any]:
    return {
        "n_layer": recipe.layers, "n_embd": recipe.d, "n_head": recipe.heads, "n_positions": recipe.context,
        "vocab_size": operator.index(vocabulary), "bos_token_id": end, "eos_token_id": end,
        "embd_pdrop": recipe.dropout, "attn_pdrop": 0.0, "resid_pdrop": recipe.dropout,
        "tie_word_embeddings": recipe.tied,
    }  # fmt: skip


def _pre_ln(norm: str, recipe: Recipe, vocabulary: int, end: int | None) -> PreTrainedModel:
    """The Pre-LN model whose parameters a twin has; for Pre-CRMSNorm of width d it is one wider."""
    with seeded(recipe.seed):
        model = GPT2LMHeadModel(GPT2Config(**_shape(recipe, vocabulary, end)))
        return widened(model) if norm == "pre-crmsnorm" else model


def build_twin(norm: str, recipe: Recipe, vocabulary: int, end: int | None = None) -> PreTrainedModel:
    """A freshly initialized twin: twins of one recipe share every parameter they both have.

    Args:
        norm: `layernorm`: GPT-2. `rmsnorm`: RMSNorm in the place of each LayerNorm. `pre-rmsnorm`: the training form of
            the converted GPT-2, which trains as the first does. `pre-crmsnorm`: streams of width d with CRMSNorm,
            standing for a GPT-2 of width d + 1 (*Pre-RMSNorm* section 3.4.2).
        recipe: the architecture and the seed.
        vocabulary: number of tokens.
        end: id of the end-of-text token.

    Raises:
        NormGeoError: there is no such norm.
    """
    if norm not in NORMS:
        raise NormGeoError(f"no norm {norm!r} to train; choose {', '.join(NORMS)} or both")
    if norm == "rmsnorm":
        with seeded(recipe.seed):
            return TwinLMHeadModel(TwinConfig(**_shape(recipe, vocabulary, end)))
    model = _pre_ln(norm, recipe, vocabulary, end)
    if norm == "pre-rmsnorm":
        return convert(model, trainable=True).model
    return compressed(model) if norm == "pre-crmsnorm" else model


def check_trains(model: PreTrainedModel, recipe: Recipe, largest: int) -> None:
    """Refuse a model that cannot take a step of a recipe on ids up to the largest.

    Raises:
        DataError: its vocabulary is smaller, or it has positions for fewer tokens.
        NormGeoError: none of its parameters is trained.
    """
    check_context(model, recipe.context)
    _check_id(model, largest, "the text")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NormGeoError("no parameter of the model is trained; call its requires_grad_() before")


def _check_id(model: PreTrainedModel, largest: int, source: str) -> None:
    if largest >= (rows := vocabulary(model)):
        raise DataError(f"{source} has the id {largest}, beyond a vocabulary of {rows:,}")


def kept_like(
    norm: str, model: PreTrainedModel, recipe: Recipe, vocabulary: int, end: int | None, *, given: bool
) -> PreTrainedModel:
    """What `save_twin` takes beside a model's numbers: an empty one of its class and configuration.

    Args:
        norm: which twin.
        model: what is trained.
        recipe: how.
        vocabulary: number of tokens.
        end: id of the end-of-text token.
        given: it was not built as a twin of the recipe, and might be saved as another model.

    Raises:
        NormGeoError: it would; what differs.
    """
    try:
        like = empty_model(type(model), model.config)
    except TypeError as error:
        name = type(model).__name__
        raise NormGeoError(f"{name} is not made of its configuration alone ({error}); {ELSEWHERE}") from error
    if given and norm in ("layernorm", "rmsnorm"):
        _check_class(model, like)
    elif given:
        _check_form(norm, model, build_twin(norm, recipe, vocabulary, end))
    return like


def _check_class(model: PreTrainedModel, like: PreTrainedModel) -> None:
    here, there = (
        {name: type(part) for name, part in each.named_modules()} | shapes_of(each) for each in (model, like)
    )
    if other := [name for name in here | there if here.get(name) != there.get(name)]:
        name = type(model).__name__
        raise NormGeoError(f"a {name} is saved as that of its configuration, which has another {other[0]}; {ELSEWHERE}")


def _check_form(norm: str, model: PreTrainedModel, twin: PreTrainedModel) -> None:
    other = [key for key in ACTS_BY if getattr(model.config, key, None) != getattr(twin.config, key)]
    if other or shapes_of(model) != shapes_of(twin):
        raise NormGeoError(
            f"a {norm} model is saved as the GPT-2 of its recipe, and this one has another "
            f"{', '.join(other) or 'shape'}; train it without a folder, and save what trainable.bake makes of it"
        )


def plain_name(name: str) -> str:
    """A parameter's name in the Pre-LN model of which a training form has it parametrized."""
    return name.replace("parametrizations.", "").replace(".original", "").replace(".inner.", ".")


@torch.no_grad()
def save_twin(
    norm: str, model: PreTrainedModel, values: dict[str, Tensor], recipe: Recipe, folder: Path, tokenizer: Any
) -> None:
    """Save a twin for inference: training forms with plain weights, converted from their Pre-LN model and certified.

    Args:
        norm: which twin.
        model: one of its class and configuration, which may be empty.
        values: the twin's parameters and buffers by name.
        recipe: how it was trained.
        folder: where to.
        tokenizer: saved along, if there is one.

    Raises:
        ConversionError: the plain model is not equal to the trained one.
        RunError: it cannot be written.
    """
    extras = [] if tokenizer is None else [tokenizer]
    if norm in ("layernorm", "rmsnorm"):
        plain = empty_model(type(model), model.config)
        plain.load_state_dict(values, strict=False, assign=True)  # a tied head is not among the parameters
        plain.tie_weights()
        plain.save_pretrained(folder)
        for extra in extras:
            extra.save_pretrained(folder)
        return
    end = getattr(model.config, "eos_token_id", None)
    plain = _pre_ln(norm, recipe, model.config.vocab_size, end)
    values = {plain_name(name): value for name, value in values.items()}
    for name, parameter in plain.named_parameters():
        parameter.copy_(values[name])
    conversion = convert(plain.eval(), to="rmsnorm" if norm == "pre-rmsnorm" else "crmsnorm")
    checkpoint.save(conversion, folder, extras=extras)


def logits_of(model: nn.Module, ids: Int64[Tensor, "rows time"]) -> Float[Tensor, "rows time vocabulary"]:
    """The scores of every token's successor.

    Raises:
        NormGeoError: the model has no head that gives some.
    """
    output = model(input_ids=ids, use_cache=False)
    if "logits" not in output:
        raise NormGeoError(f"{type(model).__name__} gives no logits to train on; give a model with a head, a causal LM")
    return output["logits"]


def loss_of(
    logits: Float[Tensor, "rows time vocabulary"], ids: Int64[Tensor, "rows time"], reduction: str = "mean"
) -> Float[Tensor, ""]:
    """Cross-entropy in nats of every token's successor: in float64 where the logits are, in float32 otherwise."""
    scores = logits[:, :-1].flatten(0, 1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return cross_entropy(wide, ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: TokenStream, rows: int = 16) -> float:
    """Mean cross-entropy in nats a token, dropout off, over every prediction inside the contexts of `tokens`.

    Raises:
        DataError: there are no two tokens in a row, or an id is beyond the vocabulary.
    """
    total, count = 0.0, 0
    with evaluating(model):
        for batch in tokens.batches(None, rows):
            _check_id(model, int(batch.ids.max()), tokens.source)
            ids = torch.from_numpy(batch.ids).to(model.device)
            total += loss_of(logits_of(model, ids), ids, "sum").item()
            count += ids[:, 1:].numel()
    if not count:
        raise DataError(f"{tokens.source} has no two tokens in a row to predict")
    return total / count


def adamw(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """The optimizer of a recipe, with decoupled decay on matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2))
