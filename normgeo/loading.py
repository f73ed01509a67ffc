"""Loading: a model and its tokenizer, from a hub id, a local directory, or the pair that ships with the package."""

from __future__ import annotations

import difflib
import re
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils.import_utils import is_peft_available

from normgeo.cards import EMBEDDED, TABLE_1
from normgeo.converted import PREFIX, converted_class
from normgeo.errors import ConversionError, ModelError, first_line
from normgeo.models import TwinConfig, TwinLMHeadModel, out_of_memory, pick_dtype, usable_device
from normgeo.stored import check_complete, check_unpickled, restore_constants, runs, warn_if_unpacked

__all__ = [
    "ADAPTER",
    "UNLOADABLE",
    "check_there",
    "commit_of",
    "config_and_class",
    "explained",
    "label_of",
    "load_model",
    "load_tokenizer",
    "saved_elsewhere",
    "whence",
]

UNLOADABLE = (
    OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError, ArithmeticError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises of checkpoints that it cannot load, by what is wrong with them."""

ADAPTER = "adapter_config.json"
"""What transformers looks for beside a model, and leaves out where peft is not installed."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model for inference from safetensors.

    Args:
        name: a hub id, a local directory, `embedded-layernorm` or `embedded-rmsnorm`. A model of *Geometry* table 1
            comes at its pinned revision.
        dtype: a torch dtype, or float64, float32, bfloat16 or float16. "auto" is the checkpoint's own (of the embedded
            pair float32); None is float32 on a CPU, else "auto".
        device: where to put it: a torch device, or "auto" for CUDA, MPS or the CPU; None leaves it on the CPU.
        device_map: "auto" spreads the layers over all GPUs through accelerate; None leaves them on one device.
        revision: commit, branch or tag on the hub.
        trust_remote_code: run the modelling code of the repository. Off unless asked for.

    Raises:
        ModelError: the model is missing, gated, damaged, or without (all of its) safetensors weights, its class is not
            known, or there is no such dtype, device or device map.

    >>> model = load_model("embedded-layernorm")
    >>> model.config.n_embd, model.dtype
    (192, torch.float32)
    """
    if device_map not in (None, "auto"):
        raise ModelError(f"--device-map (device_map=) takes auto, received {device_map!r}; one device is --device's")
    path, options = whence(name, revision)
    device = None if device is None else usable_device(str(device))
    if not isinstance(dtype, torch.dtype):
        dtype = pick_dtype(dtype, device or "cpu")
    if Path(path, ADAPTER).is_file() and Path(path, "config.json").is_file() and not is_peft_available():
        raise ModelError(
            f"{name} has an adapter beside its model, which would be left out: install peft, or merge it "
            "(merge_and_unload) and save that"
        )
    try:
        config, cls = config_and_class(path, options, trust_remote_code)
        check_unpickled(path, config, options.get("revision"))
        model = cls.from_pretrained(
            path, config=config, dtype=dtype, device_map=device_map, use_safetensors=True, **options,
            **({"output_loading_info": True} if (told := _tells(cls)) else {}),
        )  # fmt: skip
        model, found = model if told else (model, None)
        restore_constants(model)
    except UNLOADABLE as error:
        raise explained(str(name), error) from error
    if found is not None:
        check_complete(str(name), model, found)
    warn_if_unpacked(str(name), config, model)
    model = cast(PreTrainedModel, model.eval().requires_grad_(False))
    if type(config).model_type.startswith(PREFIX) and cls is not TwinLMHeadModel:
        saved_elsewhere(model)
    if str(name) in EMBEDDED:
        model.name_or_path = str(name)
    if str(name) in EMBEDDED and dtype == "auto":
        model.float()  # stored in half precision to stay small, meant to compute in float32
    if device is None or device_map is not None:
        return model
    try:
        return model.to(device)  # pyright: ignore
    except (RuntimeError, AssertionError) as error:
        if out_of_memory(error):
            raise ModelError(f"{name} does not fit on {device}; give --device-map auto or a smaller --dtype") from error
        raise ModelError(f"cannot use the device {device!r}: {first_line(error)}") from error


def check_there(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """See that there is a model of this name, without loading its weights.

    Raises:
        ModelError: there is none, or its configuration is one that cannot be loaded.
    """
    path, options = whence(name, revision)
    try:
        config_and_class(path, options, trust_remote_code)
    except UNLOADABLE as error:
        raise explained(str(name), error) from error


def _tells(cls: Any) -> bool:
    """Whether loading can be asked what it found: classes that load in their own way take the model alone."""
    own = getattr(cls.from_pretrained, "__func__", None)
    return own is PreTrainedModel.from_pretrained.__func__  # pyright: ignore


def whence(name: str | Path, revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """The path or hub id that a model is loaded from, and its revision as an option: table 1's are pinned.

    Raises:
        ModelError: a revision of what is on this machine, or something else than a name.
    """
    if not isinstance(name, (str, Path)):
        raise ModelError(f"a model is loaded by its hub id or directory, received {name!r}")
    if name == "":  # else it would be the directory that one is in
        raise ModelError("the name of the model is empty; give a hub id, a directory or a name of the embedded pair")
    path = str(EMBEDDED.get(str(name), name))
    if revision and Path(path).is_dir():
        raise ModelError(f"{name} is on this machine, where it has no revision {revision!r}: leave out --revision")
    revision = revision or {card.hub_id: card.revision for card in TABLE_1}.get(path)
    return path, {"revision": revision} if revision else {}


def label_of(name: str) -> str:
    """What a model is called in tables and figures: a directory by its own name."""
    return name if name in EMBEDDED or not Path(name).is_dir() else Path(name).resolve().name


def commit_of(name: str | Path, revision: str | None = None) -> str | None:
    """The commit on the hub that a model was loaded from; None of what is no repository there.

    Args:
        name: what `load_model` took.
        revision: likewise.
    """
    path, options = whence(name, revision)
    if not _hub_id(path) or Path(path).is_dir():
        return None
    file = huggingface_hub.try_to_load_from_cache(path, "config.json", **options)
    return Path(file).parent.name if isinstance(file, str) else None  # snapshots/COMMIT/config.json


def config_and_class(path: str, options: dict[str, Any], trust: bool) -> tuple[PretrainedConfig, Any]:
    """The configuration of a checkpoint and the class that its model is of; `options` gets what loading it needs."""
    raw, _ = PretrainedConfig.get_config_dict(path, **options)
    if raw.get("model_type") == TwinConfig.model_type:
        raw = {k: v for k, v in raw.items() if k not in ("model_type", "_commit_hash")}  # said by class and path
        return TwinConfig.from_dict(raw), TwinLMHeadModel  # not registered: loading must not change transformers
    if str(raw.get("model_type", "")).startswith(PREFIX) and "normgeo" in raw:
        return _converted(raw)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust, **options)
    if "auto_map" in raw and trust:
        options["trust_remote_code"] = True
        causal = "AutoModelForCausalLM" in raw["auto_map"]
        return config, transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return config, _named(config) or _registered(config) or _headless(config)


def _named(config: PretrainedConfig) -> Any | None:
    """The class of transformers that a configuration names first; None where it names none."""
    found = (getattr(transformers, str(name), None) for name in config.architectures or ())
    models = (cls for cls in found if isinstance(cls, type) and issubclass(cls, PreTrainedModel))
    return next(filter(runs, models), None)  # the others are what models build on


def _registered(config: PretrainedConfig) -> Any | None:
    """The class of one's own that a configuration names first, of those that an Auto class of transformers was told."""
    tables = (
        getattr(auto, "_model_mapping", {}) for n, auto in vars(modeling_auto).items() if n.startswith("AutoModel")
    )
    told = (table.get(type(config), None) for table in tables)
    classes = {cls.__name__: cls for cls in told if isinstance(cls, type)}
    return next((classes[name] for name in config.architectures or () if name in classes), None)


def _headless(config: PretrainedConfig) -> Any:
    """The class of the model without a head, which goes with a configuration that names none."""
    try:
        cls = transformers.AutoModel._model_mapping[type(config)]  # pyright: ignore
    except KeyError:
        return transformers.AutoModel  # which says what is wrong
    return cls if isinstance(cls, type) else transformers.AutoModel  # of several its configuration chooses


def _converted(raw: dict[str, Any]) -> tuple[PretrainedConfig, Any]:
    """The class of a converted model, built here instead of by the code in its checkpoint."""
    kind = raw.pop("model_type").removeprefix(PREFIX)
    native = transformers.AutoConfig.for_model(kind)
    native.architectures = raw.get("architectures")
    if (cls := _named(native)) is None:
        raise ValueError(f"its architectures name no class of transformers: {native.architectures}")
    model = converted_class(cls, type(native))
    return model.config_class.from_dict(raw), model  # pyright: ignore


def saved_elsewhere(model: nn.Module) -> None:
    """Let neither a converted model nor a part of it be saved by transformers, which leaves out what its code does."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = _refuse_saving  # pyright: ignore


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    """The `save_pretrained` of converted models.

    Raises:
        ConversionError: always; it says what to call.
    """
    raise ConversionError(
        "save_pretrained would write a converted model as the original architecture: call save(conversion, folder) of "
        "normgeo.conversion.checkpoint; one that was loaded from a checkpoint is saved by save_pretrained after "
        "from_pretrained(..., trust_remote_code=True) of transformers; to train one, convert(..., trainable=True), "
        "which saves as the model that it trains as"
    )


def explained(name: str, error: Exception) -> ModelError:
    """What is wrong with a model's name, in one line, from what loading it raised."""
    text = " ".join(str(error).split())
    low, path = text.lower().replace(name.lower(), ""), Path(name)  # what it is called tells nothing
    if path.is_file():
        hint, text = "it is a file, and a model is a directory or a hub id", ""
    elif (path / ADAPTER).is_file():
        hint, text = "it is an adapter: merge it into its model (merge_and_unload) and save that", ""
    elif path.is_dir() and not (path / "config.json").exists():
        hint, text = "the directory has no config.json", ""
    elif not path.exists() and not _hub_id(name):
        hint, text = "there is no such directory", ""
    elif not path.is_dir() and re.search(r"gated repo|\b40[13] client error", low):
        hint = "the repository is gated: accept its terms on the hub and log in with `hf auth login`"
    elif "trust_remote_code" in low:
        hint = "it brings its own code, which is run only with --trust-remote-code"
    elif "safetensors" in low and ("no file" in low or "does not appear" in low):
        hint = "it has no safetensors weights; pickled weights are not read: convert them first"
    elif "ignore_mismatched_sizes" in low:  # and of a report that is not shown
        hint, text = "its weights have other shapes than its config.json says; get it again, or correct that", ""
    elif isinstance(error, SafetensorError):
        hint = "a file of its weights is damaged, or was not downloaded whole"
    elif not path.is_dir() and ("connect" in low or "offline" in low or "not a valid model identifier" in low):
        known = [*EMBEDDED, *(card.hub_id for card in TABLE_1)]
        near = [] if name in known else difflib.get_close_matches(name, known, 1, 0.8)
        hint = f"there is no such directory; did you mean {near[0]}?" if near else (
            "there is no such local directory, and the hub does not have it or cannot be reached"
        )  # fmt: skip
        text = "" if near else text
    else:
        hint = type(error).__name__
    return ModelError(f"cannot load the model {name!r}: {hint}" + (f" ({text[:300]})" if text else ""))


def _hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def load_tokenizer(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any | None:
    """The tokenizer that goes with a model; None where there is none, or it needs what is not installed.

    Raises:
        ModelError: there is no such model, or a revision is asked for of one that is not on the hub.
    """
    path, options = whence(name, revision)
    own = path in map(str, EMBEDDED.values())  # the twins' configuration is not one that transformers knows
    auto: Any = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except ImportError as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        warnings.warn(f"{name} goes without its tokenizer: {line}", stacklevel=2)
        return None
    except Exception as error:  # what a missing one raises, by kind, and a damaged one
        if why := _why_unread(path, error):
            warnings.warn(f"{name} goes without its tokenizer: {why}", stacklevel=2)
        elif not Path(path).is_dir():
            check_there(name, revision, trust_remote_code)  # else a name that is none would be a model without
        return None
    if tokenizer is None:
        return None
    # where a checkpoint has no vocabulary transformers makes one up, of special tokens alone
    made_up = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return tokenizer if tokenizer.vocab_size > len(made_up) else None


def _why_unread(path: str, error: Exception) -> str | None:
    """Why there is a tokenizer that cannot be read; None where there is none."""
    text = " ".join(str(error).split())[:200]
    if "trust_remote_code" in str(error):
        return "it brings its own code, which is run only with --trust-remote-code"
    if any(Path(path, file).is_file() for file in TOKENIZER_FILES):
        return f"its files are damaged ({text})"
    return f"the hub does not give it ({text})" if isinstance(error, HfHubHTTPError) else None
