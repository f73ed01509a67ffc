"""Converted models as Hugging Face checkpoints that load anywhere without this package.

A checkpoint is the weights as safetensors, the native configuration with the recipe in it, and a small modelling file
that builds the native model and gives it the recipe's structure; `auto_map` names it, so that

    AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)

needs torch and transformers alone. Its `model_type` is its own, so that no Auto class loads it as the native model; the
native class itself does, with transformers' warning of another type. Where the converted model is a native architecture
(norms without affine in Llama's layout) it is saved as that, without code.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from normgeo import converted, loading, norms
from normgeo.conversion.certify import TOLERANCE_FLOAT32
from normgeo.conversion.companions import copy_companions
from normgeo.conversion.convert import Conversion
from normgeo.conversion.native import native_model
from normgeo.conversion.probing import float64_copy, outputs_of, same, tied
from normgeo.conversion.shallow import empty_model
from normgeo.conversion.trainable import Centered
from normgeo.converted import PREFIX, part_of, rebuild
from normgeo.errors import ConversionError, ModelError
from normgeo.models import dtype_name, loaded_dtype, weights_digest
from normgeo.system.folders import whole_directory
from normgeo.trace import evaluating

__all__ = ["auto_map", "check_read", "describe", "native_class", "save", "write_config"]

CAST = 2.0**-7
"""How far constants, relative to the largest, may be from those of the checkpoint read again, which were not cast."""

CONFIG = """

class Converted{config}(Native{config}):
    model_type = "{model_type}"
"""
MODEL = """

class {model}(Native{model}):
    config_class = Converted{config}

    def __init__(self, config, *args, **kwargs):
        initialize(self, Native{model}, config, *args, **kwargs)
"""
"""A model is called as that of transformers, which looks by this name for its loss, and Trainer for its labels; its
configuration is not, by whose name the Auto classes would take it for the native one."""
NEW_HEADS = "", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForImageClassification"
"""What AutoModel with this behind it loads of a model that had another head: none, or a new one, to be trained. These
read what the model gives without its head, and none of its other hidden states."""


def save(
    conversion: Conversion,
    out: Path | str,
    *,
    beside: Path | None = None,
    extras: Iterable[Any] = (),
    shard: str = "5GB",
    about: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Save a converted model; everything or nothing.

    Args:
        conversion: what `convert` gave, certified.
        out: a new directory.
        beside: the original's checkpoint, of which everything but the model itself is copied.
        extras: tokenizer, image processor and the like, saved along.
        shard: largest size of a file.
        about: what conversion.json says besides, as of which model this is a conversion.

    Returns:
        How to load it: `native` (plain transformers) or `remote` (with trust_remote_code=True).

    Raises:
        ConversionError: the certificate has not passed, the model has hooks or a structure that a checkpoint does not
            tell, or the model's code is not part of transformers.
        RunError: the directory exists, or cannot be written.

    >>> from normgeo import convert, load_model
    >>> save(convert(load_model("openai-community/gpt2")), "converted")     # doctest: +SKIP
    'remote'
    """
    if not conversion.certificate.passed:
        raise ConversionError("the certificate did not pass; such a model is not saved")
    model = conversion.model
    _check_told(model, conversion.recipe)
    changed = weights_digest(model) != conversion.certificate.weights_sha256  # as by training, or an adapter
    native = native_model(conversion)
    with whole_directory(Path(out)) as folder:
        if beside is not None:
            copy_companions(beside, folder, native_class(type(model.config)).model_type)  # pyright: ignore
        if native is not None:
            native.save_pretrained(folder, max_shard_size=shard)
        else:
            write_config(conversion, model.config, type(model), conversion.recipe, folder)
            state = {name: value.detach().contiguous().cpu() for name, value in _stored(model).items()}
            save_torch_state_dict(state, folder, max_shard_size=shard, metadata={"format": "pt"})
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(folder)  # pyright: ignore
        for extra in extras:
            extra.save_pretrained(folder)
        told = {**about, **describe(conversion), "changed_since_certified": changed}
        (folder / "conversion.json").write_text(json.dumps(told, indent=2))
        try:
            read = _read(model, folder)
        except ModelError as error:  # a weight is missing that the class does not tie
            raise _read_as_another(model) from error
        check_read(conversion, read)
    return "remote" if native is None else "native"


def _stored(model: PreTrainedModel) -> dict[str, Any]:
    """The state, of tied parameters the one that is no head's: a model without its head has to find it."""
    if any(getattr(module, "layers_are_rescaled", False) for module in model.modules()):  # RWKV's, to infer by
        model = copy.deepcopy(model).train()
        for rescale in [m._rescale_layers for m in model.modules() if hasattr(m, "_rescale_layers")]:
            rescale()  # pyright: ignore
    state = model.state_dict()
    for group in tied(model):
        _, *others = sorted(group, key=lambda name: not name.startswith(f"{model.base_model_prefix}."))
        for name in others:
            state.pop(name, None)
    return state


def _check_told(model: PreTrainedModel, recipe: dict[str, Any]) -> None:
    """Refuse what class, configuration and recipe do not tell: another model would be loaded, or none."""
    if absent := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ConversionError(
            f"{absent} of {type(model).__name__} is on the disk or waits on the CPU: save it before it is offloaded"
        )
    for name, module in model.named_modules():
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        if not all(map(_told, hooks)):
            raise ConversionError(
                f"{name or 'the model'} has a forward hook, which no checkpoint keeps; remove it and convert again"
            )
    told = empty_model(native_class(type(model)), model.config)
    rebuild(told, recipe)
    wanted, have = ({name: value.shape for name, value in m.state_dict().items()} for m in (told, model))
    if wrong := sorted(name for name in wanted.keys() | have.keys() if wanted.get(name) != have.get(name)):
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConversionError(
            f"{type(model).__name__} is not what its class and configuration tell: {wrong[0]}{others} would be "
            "missing or have another shape where it is loaded; let the configuration say what was "
            "changed, merge adapters, and take pruning and parametrizations off"
        )
    if any(isinstance(module, Centered) for module in model.modules()):
        raise ConversionError(
            f"{type(model).__name__} still trains, with weights that are centered as they are read: bake it first, by "
            "normgeo.conversion.trainable.bake"
        )


def _read(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1  # it may not fit on one device
    return loading.load_model(
        folder, dtype=loaded_dtype(model), device=model.device, device_map="auto" if spread else None
    )


@torch.no_grad()
def check_read(conversion: Conversion, read: PreTrainedModel) -> None:
    """Refuse a checkpoint that is not read as the model that it was written from, on the certificate's inputs.

    Raises:
        ConversionError: their outputs differ.
    """
    model = conversion.model
    if loaded_dtype(model) not in (torch.float32, torch.float64):  # whose rounding would hide what differs
        model, read = float64_copy(model), float64_copy(read)
        _take_constants(read, model)
    with evaluating(model):
        for inputs in conversion.inputs:
            if not same(outputs_of(model, inputs), outputs_of(read, inputs), TOLERANCE_FLOAT32):
                raise _read_as_another(conversion.model)


def _take_constants(read: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a model another's constants, where they are the same but for having been cast to half precision."""
    stored = read.state_dict().keys()
    other = dict(model.named_buffers())
    for name, own in read.named_buffers():
        given = other.get(name)
        if name in stored or given is None or not own.is_floating_point() or own.shape != given.shape:
            continue
        if not own.numel() or (own - given).abs().max() <= CAST * own.abs().max():
            own.copy_(given)


def _read_as_another(model: PreTrainedModel) -> ConversionError:
    return ConversionError(
        f"{type(model).__name__} is not what its class and configuration tell: its checkpoint is read as another "
        "model, whose outputs differ; let the configuration say what was changed, and share no weights but those that "
        "it ties"
    )


def _told(hook: Any) -> bool:
    """Whether a hook is there again when the model is loaded: one of the recipe's, or of transformers' own."""
    home = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return home == converted.__name__ or home.startswith(("transformers", "accelerate"))


def describe(conversion: Conversion) -> dict[str, Any]:
    """What was done and how equal it is, as JSON."""
    return {
        "to": conversion.recipe["to"],
        "certificate": asdict(conversion.certificate),
        "replaced": [site.key for site in conversion.replaced],
        "kept": conversion.kept,
        "untouched": [site.key for site in conversion.untouched],
        "recentered": [list(place) for place in conversion.recentered],
    }


def auto_map(cls: type) -> dict[str, str]:
    """The Auto classes of transformers that load this class."""
    tables = {
        id(getattr(modeling_auto, name.removesuffix("_NAMES"), None))
        for name, mapping in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES") and cls.__name__ in _names(mapping)
    }
    kinds = {
        name for name, auto in vars(modeling_auto).items()
        if name.startswith("AutoModel") and id(getattr(auto, "_model_mapping", None)) in tables
    }  # fmt: skip
    return dict.fromkeys(sorted(kinds) or ["AutoModel"], f"modeling_normgeo.{cls.__name__}")


def _others(cls: type, within: type, config: PretrainedConfig, recipe: dict[str, Any]) -> dict[str, type]:
    """What Auto classes load of a model with a head, without it or with a new one, around the same base class."""
    found: dict[str, type] = {}
    for auto in map("AutoModel{}".format, NEW_HEADS):
        other: Any = getattr(transformers, auto)._model_mapping.get(native_class(type(config)), None)
        if not isinstance(other, type) or other is cls:
            continue
        try:
            model = empty_model(other, config)
            rebuild(model, part_of(recipe, model))
        except (AttributeError, ConversionError, KeyError, ValueError):  # it has not the parts that the recipe names
            continue
        if native_class(type(model.base_model)) is within:  # as the decoder of two stacks alone is not
            found[auto] = other
    return found


def _names(mapping: dict[str, Any]) -> list[str]:
    return [name for value in mapping.values() for name in (value if isinstance(value, (tuple, list)) else [value])]


def native_class(cls: type) -> type:
    """The class of transformers that this is, or was before it was converted.

    Raises:
        ConversionError: the model's code is not part of transformers.
    """
    for base in cls.__mro__:
        if base.__module__.startswith("transformers."):
            return base
        if not base.__module__.endswith((converted.__name__, "modeling_normgeo")):
            break
    raise ConversionError(
        f"{cls.__name__} comes with its own code, and a checkpoint cannot rely on that; use the converted model in "
        "memory, or save its state dict and the conversion's recipe, from which normgeo.converted rebuilds it"
    )


def write_config(
    conversion: Conversion, config: PretrainedConfig, cls: type, recipe: dict[str, Any], folder: Path
) -> None:
    """Write config.json and the modelling files.

    Args:
        conversion: what was certified, of which the model may have fewer layers.
        config: of all layers.
        cls: the model's class.
        recipe: for all layers.
        folder: where.

    Raises:
        ConversionError: the model's code is not part of transformers.
    """
    cls, settings = native_class(cls), native_class(type(config))
    within = native_class(type(conversion.model.base_model))
    others = _others(cls, within, config, recipe) if conversion.certificate.headless else {}
    model_type, module = PREFIX + str(config.model_type).removeprefix(PREFIX), "modeling_normgeo"
    headless = {auto: f"{module}.{other.__name__}" for auto, other in others.items()}
    raw = config.to_dict() | {
        "model_type": model_type, "architectures": [cls.__name__], "normgeo": recipe,
        "auto_map": {"AutoConfig": f"{module}.Converted{settings.__name__}"} | headless | auto_map(cls),
        "dtype": dtype_name(loaded_dtype(conversion.model)),
        "transformers_version": transformers.__version__,
    }  # fmt: skip
    for name in ("_name_or_path", "transformers_weights"):  # the original's
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True))
    code = inspect.getsource(converted).replace("from normgeo.norms import", "from .normgeo_norms import")
    classes = list(dict.fromkeys([cls, *others.values()]))
    code += "\n\n# --- this checkpoint's model ---\n\n"
    for kind in (settings, *classes):
        code += f"from {kind.__module__} import {kind.__name__} as Native{kind.__name__}  # noqa: E402\n"
    code += CONFIG.format(config=settings.__name__, model_type=model_type)
    code += "".join(MODEL.format(model=kind.__name__, config=settings.__name__) for kind in classes)
    (folder / f"{module}.py").write_text(code)
    (folder / "normgeo_norms.py").write_text(inspect.getsource(norms))
