"""Tiny random models of every architecture that transformers offers, generated from its own tables.

The list is what transformers' auto classes name; nothing here is picked by hand, and `normgeo.shrinking` makes each
configuration small. No weights are read and nothing is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

from normgeo.errors import ModelError, said
from normgeo.models import seeded
from normgeo.shrinking import tiny_config

__all__ = ["TASKS", "Architecture", "architectures", "tiny"]

TASKS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq",
    "SPEECH_SEQ_2_SEQ": "speech",
    "MASKED_LM": "masked",
    "CAUSAL_LM": "causal",
    "CTC": "speech",
    "IMAGE_CLASSIFICATION": "vision",
    "AUDIO_CLASSIFICATION": "audio",
    "VIDEO_CLASSIFICATION": "video",
}
"""transformers' tables of classes with a head, the first that has a model type wins, and the task each stands for."""

MAX_PARAMETERS = 15_000_000
"""What a tiny model may have: more means that no rule of `normgeo.shrinking` made it small."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers: a model type, and the class that stands for it.

    Attributes:
        model_type: the name its configuration goes by.
        task: what the class is for: `causal`, `masked`, `seq2seq`, `vision`, `speech`, ..., or `base` without a head.
        cls: the name of the model's class in transformers.
        config: the name of its configuration's class.
    """

    model_type: str
    task: str
    cls: str
    config: str


def architectures() -> list[Architecture]:
    """Every architecture that transformers' auto classes name, one class for a model type, by model type."""
    configs: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    tables = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in TASKS]
    rest = sorted(n for n in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", n))
    ordered = [*zip(TASKS.values(), tables, strict=True), ("base", modeling_auto.MODEL_MAPPING_NAMES)]
    ordered += [(n[10:-14].lower().replace("_", "-"), getattr(modeling_auto, n)) for n in rest]
    found: dict[str, Architecture] = {}
    classes: set[str] = set()
    for task, table in ordered:
        named = [(k, v if isinstance(v, str) else v[0]) for k, v in table.items() if k in configs]
        for model_type, name in sorted(named, key=lambda pair: not _is_named_after(pair[1], pair[0])):
            if model_type not in found and name not in classes:
                classes.add(name)
                found[model_type] = Architecture(model_type, task, name, configs[model_type])
    return [found[k] for k in sorted(found)]


def _is_named_after(cls: str, model_type: str) -> bool:
    """Whether a class carries a model type's name: of several types that share a class, the one it is made for."""
    return cls.lower().startswith(re.sub(r"[^a-z0-9]", "", model_type.lower()))


def tiny(architecture: Architecture, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of an architecture in float32, in evaluation mode, with no parameter at a special value.

    Raises:
        ModelError: it cannot be built: its configuration has no defaults, it needs a library that is not there, or it
            does not become small.
    """
    try:
        cls = getattr(transformers, architecture.cls, None)
        config_cls = getattr(cls, "config_class", None) or getattr(transformers, architecture.config, None)
    except ImportError as error:
        raise ModelError(f"{architecture.cls} cannot be built: {said(error)}") from error
    if cls is None or config_cls is None:
        raise ModelError(f"transformers has no {architecture.cls} or no {architecture.config}")
    try:
        config = config_cls()
    except Exception as error:  # whatever a configuration that has no defaults raises
        raise ModelError(f"{config_cls.__name__} has no defaults: {said(error)}") from error
    return perturb(_built(cls, tiny_config(config), seed), seed)


def _built(cls: Any, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model from its configuration, or from the part for text where the class takes only that."""
    failed = ""
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(part).parameters())
            if size <= MAX_PARAMETERS:
                with seeded(seed):
                    return cls(part).float().eval()
            failed = failed or f"it stays large: {size / 1e6:.0f} million parameters"
        except Exception as error:  # whatever building a model raises
            failed = failed or said(error)
    raise ModelError(f"{cls.__name__} cannot be built: {failed}")


@torch.no_grad()
def perturb(model: Any, seed: int = 0) -> Any:
    """Move every vector parameter and every constant one off its initial value: gamma 1 and beta 0 hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        constant = parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())
        if parameter.ndim == 1 or (parameter.ndim > 1 and constant):
            parameter += (0.3 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    for buffer in model.buffers():  # a codebook that is all zero has one code
        if buffer.is_floating_point() and buffer.ndim > 1 and len(buffer) > 1 and not buffer.any():
            buffer += torch.randn(buffer.shape, generator=generator).to(buffer)
    return model
