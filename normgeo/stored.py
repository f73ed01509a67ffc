"""What a checkpoint has stored of a model: all of it, more, quantized, or in files that are none of safetensors."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from normgeo.errors import ModelError
from normgeo.models import dtype_name

__all__ = ["check_complete", "check_unpickled", "restore_constants", "runs", "warn_if_unpacked", "warn_of_more"]

DIGITS = re.compile(r"\d+")


def check_unpickled(path: str, config: PretrainedConfig, revision: str | None) -> None:
    """Refuse weights that transformers would unpickle though it is told not to, for a checkpoint names them itself.

    Raises:
        ValueError: its configuration, or the index of its files, names a file that is no safetensors.
    """
    named = getattr(config, "transformers_weights", None)
    if not named and Path(path, SAFE_WEIGHTS_NAME).is_file():
        return  # an index beside it is not read
    files = [named := named or SAFE_WEIGHTS_INDEX_NAME]
    if named.endswith(".index.json"):
        quietly = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
        index = cached_file(path, named, revision=revision, **quietly)  # without one, one file has all weights
        files = [] if index is None else json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    if other := next((file for file in files if not str(file).endswith(".safetensors")), None):
        raise ValueError(f"{other}, which it names as its weights, is no file of safetensors")


def check_complete(name: str, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Refuse layers and embeddings that the checkpoint lacks, which are random; warn of others, and of more layers.

    What is only for training, or a pooler or a head that nobody trained, is often not stored.
    """
    missing = sorted(found["missing_keys"])
    ends = [part.weight for part in _embeddings(model)]
    names = {key for key, value in model.named_parameters(remove_duplicate=False) if any(value is end for end in ends)}
    if needed := [key for key in missing if DIGITS.search(key) or key in names]:
        raise ModelError(
            f"the checkpoint of {name} has not all of its model: {_counted(needed)} missing, and would be random; get "
            "it again, or correct what its config.json says of layers and classes"
        )
    if missing:
        warnings.warn(f"{name} is loaded with random numbers where {_counted(missing)} not stored", stacklevel=3)
    warn_of_more(name, model, found["unexpected_keys"])


@torch.no_grad()
def restore_constants(model: PreTrainedModel) -> None:
    """Give a model whose code is not transformers' the constants that its class computes and no checkpoint stores.

    transformers builds models without memory, and then gives buffers that are not stored whatever the memory holds: it
    expects `_init_weights` to compute them again. Code that was written for older versions does that in `__init__`
    alone. Tensors that are mere attributes are left without memory.
    """
    unstored = dict(model.named_non_persistent_buffers())
    absent = [(name, key) for name, module in model.named_modules() for key in _without_memory(module)]
    if type(model).__module__.startswith(("transformers.", "normgeo.")) or not (unstored or absent):
        return
    with torch.random.fork_rng(devices=()), init_empty_weights(include_buffers=False):
        built = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    computed = dict(built.named_buffers())
    for name in unstored.keys() & computed.keys():
        unstored[name].copy_(computed[name])
    for name, key in absent:
        setattr(model.get_submodule(name), key, getattr(built.get_submodule(name), key).to(model.device))


def _without_memory(module: nn.Module) -> list[str]:
    """The attributes of a module that are tensors without memory."""
    return [key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]


def warn_if_unpacked(name: str, config: Any, model: PreTrainedModel) -> None:
    """Warn of quantized weights that transformers made plain numbers of, as it does where it cannot run them."""
    stored = getattr(config, "quantization_config", None)
    if stored and not getattr(model.config, "quantization_config", None):
        method = stored.get("quant_method") if isinstance(stored, dict) else type(stored).__name__
        warnings.warn(
            f"{name} is stored quantized ({method}), and is loaded as plain {dtype_name(model.dtype)}: it computes as "
            "that, and takes its memory and time, unlike where it runs quantized",
            stacklevel=3,
        )


def warn_of_more(name: str, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Warn of weights that a checkpoint has and its model does not: of more layers, or of a head that nothing names."""
    known = {DIGITS.sub("0", key) for key in model.state_dict()}
    unexpected = sorted(unexpected)
    if unused := [key for key in unexpected if DIGITS.sub("0", key) in known]:
        warnings.warn(
            f"{name} has weights of more layers than its config.json tells of: {_counted(unused)} left out",
            stacklevel=4,
        )
    elif unexpected and not _classes(model) & set(map(str, model.config.architectures or ())):
        warnings.warn(
            f"{name} is loaded as {type(model).__name__}, since the architectures in its config.json name no class of "
            f"transformers: {_counted(unexpected)} left out",
            stacklevel=4,
        )


def _classes(model: PreTrainedModel) -> set[str]:
    """The names of a model's classes, without those that others build on."""
    return {cls.__name__ for cls in filter(runs, type(model).__mro__)}


def runs(cls: type) -> bool:
    """Whether a class has a forward pass, of its own or not: `PreTrainedModel` and the like have none."""
    return getattr(cls, "forward", nn.Module.forward) is not nn.Module.forward


def _embeddings(model: PreTrainedModel) -> Iterator[Any]:
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        with suppress(NotImplementedError, AttributeError):
            if isinstance(getattr(part := get(), "weight", None), nn.Parameter):
                yield part


def _counted(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} others are"
