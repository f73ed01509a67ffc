"""A module of one's own as a model of transformers, which is what everything here takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig, PreTrainedModel

from normgeo.errors import ModelError

__all__ = ["Wrapped", "called", "wrap"]


class Wrapped(PreTrainedModel):
    """A module that takes token ids first, as a model of transformers: `module` is the module itself."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PretrainedConfig, module: nn.Module, table: str) -> None:
        super().__init__(config)
        self.module, self.training = module, module.training
        self.__dict__["_table"] = table

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        return self.module.get_submodule(self.__dict__["_table"])

    def forward(self, input_ids: Tensor, **inputs: Any) -> Mapping[str, Any]:
        """Everything that the module gives, by name.

        Of what has none the first is `logits`, or `last_hidden_state` where it is as wide as embeddings and the
        vocabulary is not; others are called by their places.
        """
        for name in ("return_dict", "use_cache"):  # which models of transformers take
            inputs.pop(name, None)
        out = self.module(input_ids, **inputs)
        if is_dataclass(out) and not isinstance(out, Mapping):
            return {field.name: getattr(out, field.name) for field in fields(out)}
        return out if isinstance(out, Mapping) else self._named(out if isinstance(out, (tuple, list)) else [out])

    def _named(self, parts: Sequence[Any]) -> dict[str, Any]:
        named, width = dict[str, Any](), self.config.hidden_size
        for i, part in enumerate(parts):
            name = f"output_{i}"
            if isinstance(part, Tensor) and part.is_floating_point() and part.ndim > 1:
                kind = "last_hidden_state" if part.shape[-1] == width != self.config.vocab_size else "logits"
                name = name if kind in named else kind
            named[name] = part
        return dict(sorted(named.items(), key=lambda pair: pair[0].startswith("output_")))  # a loss is not the first


def wrap(module: nn.Module, embeddings: str | None = None, context: int | None = None) -> Wrapped:
    """A module whose forward pass takes token ids as its first argument, as a model of transformers.

    It can be measured, compared, converted and optimized as any. Tables call it by its class, and `.module` of what is
    given back is the module. What `convert` gives is saved by its state dict, for the module's code is the user's; a
    trainable one is baked first.

    Args:
        module: the module; it is used as it is, not copied.
        embeddings: the name of its table of token embeddings; when None the `nn.Embedding` that is given the ids in a
            forward pass on two tokens, or else the first.
        context: how many tokens it has positions for; None for as many as come.

    Raises:
        ModelError: it is a model of transformers already, or in DistributedDataParallel, or there is no such table.

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
    if isinstance(module, DistributedDataParallel):  # which would not know of the parameters that a conversion makes
        raise ModelError("received a DistributedDataParallel: give wrap the module within, its .module")
    tables = {name: m for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    name = _read(module, tables) if embeddings is None else embeddings
    if name is None or name not in tables:
        there = f"its tables are {', '.join(tables)}" if tables else "it has no nn.Embedding"
        called = "" if embeddings is None else f" {embeddings}"
        raise ModelError(f"{type(module).__name__} has no table of token embeddings{called}: {there}")
    table = tables[name]
    sizes: dict[str, Any] = {"vocab_size": table.num_embeddings, "hidden_size": table.embedding_dim}
    if context is not None:
        sizes["max_position_embeddings"] = context
    return Wrapped(PretrainedConfig(**sizes), module, name)


@torch.no_grad()
def _read(module: nn.Module, tables: Mapping[str, nn.Embedding]) -> str | None:
    """Which table is given the ids that the module is given, where that shows; else the first."""
    found, modes = list[str](), {m: m.training for m in module.modules()}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)

    def given(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].data_ptr() == ids.data_ptr():
                found.append(name)

        return hook

    with ExitStack() as hooks:
        for name, table in tables.items():
            hooks.callback(table.register_forward_pre_hook(given(name)).remove)
        try:
            module.eval()(ids)
        except Exception:  # whatever it raises, it raises again when it is measured
            found.clear()
        finally:
            for part, mode in modes.items():
                part.training = mode
    return next(iter([*found, *tables]), None)


def called(model: PreTrainedModel) -> str:
    """What tables call a model that is given no name: what it was loaded by, or else its class.

    Of a module of one's own that is the module's, as it is before `torch.compile`.
    """
    own = model.module if isinstance(model, Wrapped) else model
    return model.name_or_path or type(getattr(own, "_orig_mod", own)).__name__
