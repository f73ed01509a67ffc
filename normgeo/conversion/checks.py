"""What `convert` does not take, each refused with what was received and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.errors import ConversionError
from normgeo.models import check_model
from normgeo.norms import CRMSNorm, RMSNorm
from normgeo.trace import is_leaf

__all__ = [
    "REMEDY", "check_convertible", "check_inputs", "check_options", "check_trainable", "check_unconverted",
    "check_weights",
]  # fmt: skip

REMEDY = {
    "quantization_config": "its weights are quantized: load it without quantization, or what it was made of; convert "
    "that, and quantize what comes of it",
    "peft_config": "it has adapters that are not merged: call merge_and_unload() first",
}
"""What to do about an attribute that a model or its configuration has."""

QUANTIZING = "torch.ao.nn.", "torch.nn.quantized.", "torchao.", "optimum.quanto."
"""How the names of Python's modules begin whose classes quantize their weights, some only as they run."""


def check_options(
    to: str, *, keep_tie: bool = False, padded: bool = False, trainable: bool = False, fold_affine: bool = False
) -> None:
    """Refuse options that do not go together.

    Raises:
        ConversionError: which, and what to do.
    """
    if to not in ("rmsnorm", "crmsnorm", "naive-rmsnorm"):
        raise ConversionError(f"convert to rmsnorm, crmsnorm or naive-rmsnorm, not {to!r}")
    if keep_tie and to == "crmsnorm":
        raise ConversionError(
            "a compressed model cannot keep its head tied: its two weights are compressed differently"
        )
    if padded and to != "crmsnorm":
        raise ConversionError("--padded (padded=True) goes with --to crmsnorm")
    if trainable and to != "rmsnorm":
        raise ConversionError(f"trainable=True goes with to='rmsnorm', not {to!r}")
    if trainable and (keep_tie or fold_affine):
        raise ConversionError("trainable=True keeps every weight as it is: leave out keep_tie and fold_affine")


def check_convertible(model: PreTrainedModel, *, by_gradients: bool = True) -> None:
    """Refuse models that cannot be converted, or not as they are.

    Args:
        model: what is to be converted, or decompressed.
        by_gradients: whether they are looked at by their gradients.

    Raises:
        ConversionError: what is wrong, and what to do.
        ModelError: it is no model of transformers.
    """
    check_model(model)
    name = type(model).__name__
    if by_gradients and torch.is_inference_mode_enabled():
        raise ConversionError(
            "what to center is found by gradients, which torch.inference_mode forbids: leave it first"
        )
    if any("normgeo_stream" in module.__dict__ for module in model.modules()):
        raise ConversionError(
            f"{name} is optimized, which is for inference: take the model that it was, and optimize what comes of that"
        )
    for attribute, remedy in REMEDY.items():
        if getattr(model.config, attribute, None) or getattr(model, attribute, None):
            raise ConversionError(f"{name} cannot be converted: {remedy}")
    if not isinstance(model, PreTrainedModel):
        raise ConversionError(f"convert takes a model of transformers, as load_model gives, not a {name}")
    if getattr(model, "_hf_peft_config_loaded", False) or any("lora_" in n for n, _ in model.named_parameters()):
        raise ConversionError(f"{name} cannot be converted: {REMEDY['peft_config']}")
    for module_name, module in model.named_modules():
        if module_name.endswith("._orig_mod") and is_leaf(module):
            compiled = module_name.removesuffix("._orig_mod")
            raise ConversionError(f"{compiled} is compiled by itself: put its _orig_mod there, and compile the result")
    check_weights(model)


def check_weights(model: PreTrainedModel) -> None:
    """Refuse models whose weights are not plain numbers, for they have no gradients.

    Raises:
        ConversionError: which, and what to do.
        ModelError: it is no model of transformers.
    """
    check_model(model)
    name = type(model).__name__
    for module_name, module in model.named_modules():
        if type(module).__module__.startswith(QUANTIZING):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise ConversionError(f"{name} has no plain weights: {module_name} is of {kind}; convert it before that")
    sharded = any(hasattr(module, "reshard") for module in model.modules())  # FSDP 2, whose weights may be whole by now
    if sharded or any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ConversionError(
            f"the weights of {name} are divided among processes (DTensor): convert the whole model, and divide what "
            "comes of it"
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ConversionError(
                f"{name} has no weights: {parameter_name} is on the meta device; load it, and do not offload it"
            )
        if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConversionError(f"{name} has packed weights: {parameter_name} is {parameter.dtype}; load it unpacked")
        if type(parameter.data) is not Tensor:  # as a library's that quantizes
            kind = type(parameter.data).__name__
            raise ConversionError(f"{name} has no plain weights: {parameter_name} is of {kind}; convert it before that")


def check_trainable(model: PreTrainedModel) -> None:
    """Refuse to train a model of which layers are left out at random: what is recentered in them would be, too.

    Nor can tables be centered whose gradients are sparse.

    Raises:
        ConversionError: how often they are left out, or which table it is, and what to do.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            raise ConversionError(
                f"{name} asks for sparse gradients, which a centered table has not: set its .sparse to False first"
            )
    for config in (model.config, *(getattr(module, "config", None) for module in model.modules())):
        often = {k: v for k, v in getattr(config, "__dict__", {}).items() if k.endswith("layerdrop") and v}
        if said := ", ".join(f"{name}={value}" for name, value in often.items()):
            raise ConversionError(
                f"{type(model).__name__} leaves out layers at random while it trains ({said}), and what is recentered "
                "in them: load it with 0 for these in its configuration, and convert that"
            )


def check_unconverted(model: PreTrainedModel) -> None:
    """Refuse a model whose other norms were converted before: two recipes in a row are none that a checkpoint tells.

    Raises:
        ConversionError: what to do.
    """
    recipe: Any = getattr(model.config, "normgeo", None)
    if isinstance(recipe, dict) and any(isinstance(module, (RMSNorm, CRMSNorm)) for module in model.modules()):
        raise ConversionError(
            f"{type(model).__name__} is converted already, with the norms that were kept: convert its original again, "
            "with --outputs (outputs=) that let more of them be replaced"
        )


def check_inputs(batches: Sequence[Any]) -> None:
    """Refuse inputs that are not tensors by the names of arguments.

    Raises:
        ConversionError: what was received.
    """
    for batch in batches:
        if not (isinstance(batch, Mapping) and batch and all(isinstance(v, Tensor) for v in batch.values())):
            kind = f"{{{', '.join(batch)}}}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ConversionError(
                "inputs= takes a dict of tensors by argument name, as {'input_ids': ids}, and certify_on= a list of "
                f"such dicts; received {kind}"
            )
