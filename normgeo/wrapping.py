"""A module of one's own as a model of transformers, which is what everything here takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from normgeo.errors import ModelError

__all__ = ["Wrapped", "wrap"]


class Wrapped(PreTrainedModel):
    """A module that takes token ids first, as a model of transformers: `module` is the module itself."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PretrainedConfig, module: nn.Module, embeddings: nn.Embedding) -> None:
        super().__init__(config)
        self.module = module
        self.__dict__["_table"] = next(name for name, m in module.named_modules() if m is embeddings)

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        return self.module.get_submodule(self.__dict__["_table"])

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Mapping[str, Any]:
        """What the module gives, as `logits` where that is a tensor, or the first of several values."""
        for name in ("return_dict", "use_cache"):  # which models of transformers take
            inputs.pop(name, None)
        out = self.module(input_ids, **inputs)
        if isinstance(out, Mapping):
            return out
        return {"logits": out[0] if isinstance(out, (tuple, list)) else out}


def wrap(module: nn.Module, embeddings: str | None = None, context: int | None = None) -> Wrapped:
    """A module whose forward pass takes token ids as its first argument, as a model of transformers.

    It can be measured, compared, converted and optimized as any; `.module` of what is given back is the module. What
    `convert` gives is saved by its state dict, for the module's code is the user's.

    Args:
        module: the module; it is used as it is, not copied.
        embeddings: the name of its table of token embeddings; the first `nn.Embedding` when None.
        context: how many tokens it has positions for; None for as many as come.

    Raises:
        ModelError: it is a model of transformers already, or there is no such table.

    >>> import torch
    >>> from normgeo import convert, wrap
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    >>> norm, head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 50)
    >>> conversion = convert(wrap(torch.nn.Sequential(torch.nn.Embedding(50, 16), layer, norm, head).eval()))
    >>> len(conversion.replaced), conversion.certificate.passed
    (3, True)
    """
    if isinstance(module, PreTrainedModel) or not isinstance(module, nn.Module):
        raise ModelError(f"wrap takes a torch module of one's own, received a {type(module).__name__}")
    tables = {name: m for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    table = next(iter(tables.values()), None) if embeddings is None else tables.get(embeddings)
    if table is None:
        there = f"its tables are {', '.join(tables)}" if tables else "it has no nn.Embedding"
        raise ModelError(f"{type(module).__name__} has no table of token embeddings {embeddings or ''}: {there}")
    sizes: dict[str, Any] = {"vocab_size": table.num_embeddings, "hidden_size": table.embedding_dim}
    if context is not None:
        sizes["max_position_embeddings"] = context
    config = PretrainedConfig(**sizes)
    return Wrapped(config, module, table).train(module.training)
