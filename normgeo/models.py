"""Models: a hub id, a local directory, or the pair that ships with the package; the models of *Geometry* table 1."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
import transformers
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

from normgeo.converted import PREFIX, converted_class
from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs, max_context
from normgeo.norms import RMSNorm

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "TABLE_1",
    "ModelCard",
    "TwinConfig",
    "TwinLMHeadModel",
    "base_model",
    "check_model",
    "config_and_class",
    "default_dtype",
    "example_inputs",
    "explained",
    "load_model",
    "load_tokenizer",
    "max_context",
    "memory_explained",
    "pick_dtype",
    "saved_elsewhere",
    "tokenizer_digest",
    "twin",
    "uncompiled",
    "usable_device",
    "weights_digest",
    "whence",
]

ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {"embedded-layernorm": ASSETS / "layernorm", "embedded-rmsnorm": ASSETS / "rmsnorm"}
"""The pair that ships with the package: GPT-2 twins that differ in nothing but their norm."""

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
"""The dtypes a model can be loaded in, by the names the command line knows them by."""


@dataclass(frozen=True)
class ModelCard:
    """One line of *Geometry* table 1; `revision` pins the commit of the hub repository."""

    name: str
    hub_id: str
    revision: str
    d: int
    layers: int
    norm: Literal["LayerNorm", "RMSNorm"]
    parameters: int

    @property
    def memory_gb(self) -> float:
        """Gigabytes of weights in 16-bit precision."""
        return 2 * self.parameters / 1e9


TABLE_1 = (
    ModelCard("GPT-2 XL", "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", 1600, 48,
              "LayerNorm", 1_557_611_200),
    ModelCard("GPT-Neo 1.3B", "EleutherAI/gpt-neo-1.3B", "dbe59a7f4a88d01d1ba9798d78dbe3fe038792c8", 2048, 24,
              "LayerNorm", 1_315_575_808),
    ModelCard("Pythia-1.4B", "EleutherAI/pythia-1.4b", "fedc38a16eea3bd36a96b906d78d11d2ce18ed79", 2048, 24,
              "LayerNorm", 1_414_647_808),
    ModelCard("GPT-J 6B", "EleutherAI/gpt-j-6b", "47e169305d2e8376be1d31e765533382721b2cc1", 4096, 28,
              "LayerNorm", 6_050_882_784),
    ModelCard("Pythia-6.9B", "EleutherAI/pythia-6.9b", "f271943e880e60c0c715fd10e4dc74ec4e31eb44", 4096, 32,
              "LayerNorm", 6_857_302_016),
    ModelCard("Llama-2-7B", "meta-llama/Llama-2-7b-hf", "01c7f73d771dfac7d292323805ebc428287df4f9", 4096, 32,
              "RMSNorm", 6_738_415_616),
    ModelCard("Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920", 4096, 32,
              "RMSNorm", 8_030_261_248),
)  # fmt: skip
"""The models of *Geometry* table 1, in its order."""


class TwinConfig(GPT2Config):
    """GPT-2's configuration for the RMSNorm twin; the LayerNorm twin is a plain GPT-2."""

    model_type = "normgeo_gpt2_rmsnorm"


class TwinLMHeadModel(GPT2LMHeadModel):
    """GPT-2 with RMSNorm in the place of every LayerNorm and nothing else changed (*Geometry* section 3.3)."""

    config_class = TwinConfig

    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        for parent in list(self.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, name, RMSNorm(child.normalized_shape[0], child.eps))


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: torch.device | str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model for inference from safetensors.

    Args:
        name: a hub id, a local directory, or a name in `EMBEDDED`. A model of table 1 comes at its pinned revision.
        dtype: "auto" is the checkpoint's own dtype.
        device: where to put it; None leaves it on the CPU.
        device_map: "auto" spreads the layers over all GPUs through accelerate.
        revision: commit, branch or tag on the hub.
        trust_remote_code: run the modelling code of the repository. Off unless asked for.

    Raises:
        ModelError: the model is missing, gated, without safetensors weights, or its class is not known.
    """
    path, options = whence(name, revision)
    try:
        config, cls = config_and_class(path, options, trust_remote_code)
        model = cls.from_pretrained(
            path, config=config, dtype=dtype, device_map=device_map, use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise explained(str(name), error) from error
    model = cast(PreTrainedModel, model.eval().requires_grad_(False))
    if str(config.model_type).startswith(PREFIX) and cls is not TwinLMHeadModel:
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
        if _out_of_memory(error):
            raise ModelError(f"{name} does not fit on {device}; give --device-map auto or a smaller --dtype") from error
        raise ModelError(f"cannot use the device {device!r}: {str(error).splitlines()[0]}") from error


def _out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine, has too little memory; CUDA's illegal accesses speak of memory as well."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        said in str(error).lower() for said in ("out of memory", "allocate memory", "not enough memory")
    )


def whence(name: str | Path, revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """The path or hub id that a model is loaded from, and its revision as an option: table 1's are pinned.

    Raises:
        ModelError: a revision of what is on this machine, or something else than a name.
    """
    if not isinstance(name, (str, Path)):
        raise ModelError(f"a model is loaded by its hub id or directory, received {name!r}")
    path = str(EMBEDDED.get(str(name), name))
    if revision and Path(path).is_dir():
        raise ModelError(f"{name} is on this machine, where it has no revision {revision!r}: leave out --revision")
    revision = revision or {card.hub_id: card.revision for card in TABLE_1}.get(path)
    return path, {"revision": revision} if revision else {}


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
    names = config.architectures or []
    return config, next((c for n in names if (c := getattr(transformers, n, None))), transformers.AutoModel)


def _converted(raw: dict[str, Any]) -> tuple[PretrainedConfig, Any]:
    """The class of a converted model, built here instead of by the code in its checkpoint."""
    kind = raw.pop("model_type").removeprefix(PREFIX)
    native = type(transformers.AutoConfig.for_model(kind))
    config = type("ConvertedConfig", (native,), {"model_type": PREFIX + kind, "__module__": __name__})
    model = getattr(transformers, raw["architectures"][0], None)
    if model is None:  # saved again by the class in the checkpoint, whose name does not say what it was
        auto = next(name for name in raw["auto_map"] if name != "AutoConfig")
        model = getattr(transformers, auto)._model_mapping[native]
    return config.from_dict(raw), converted_class(model, config)


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
        "save_pretrained would write a converted model as the native one: call normgeo.conversion.checkpoint.save("
        "conversion, folder), or for one that was loaded, load it by from_pretrained(..., trust_remote_code=True) of "
        "transformers; "
        "to train one, convert(..., trainable=True), which saves as the model that it trains as"
    )


def explained(name: str, error: Exception) -> ModelError:
    """What is wrong with a model's name, in one line, from what loading it raised."""
    text = " ".join(str(error).split())
    low, path = text.lower(), Path(name)
    if path.is_file():
        hint, text = "it is a file, and a model is a directory or a hub id", ""
    elif path.is_dir() and not (path / "config.json").exists():
        hint, text = "the directory has no config.json", ""
    elif not path.exists() and not _hub_id(name):
        hint, text = "there is no such directory", ""
    elif "gated" in low or "401" in low or "403" in low:
        hint = "the repository is gated: accept its terms on the hub and log in with `hf auth login`"
    elif "trust_remote_code" in low:
        hint = "it brings its own code, which is run only with --trust-remote-code"
    elif "safetensors" in low and ("no file" in low or "does not appear" in low or "error no file" in low):
        hint = "it has no safetensors weights; pickled weights are not read: convert them first"
    elif "connect" in low or "offline" in low or "not a valid model identifier" in low:
        hint = "there is no such local directory, and the hub does not have it or cannot be reached"
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
    """The tokenizer that goes with a model; None where there is none, or it needs what is not installed."""
    path, options = whence(name, revision)
    own = path in map(str, EMBEDDED.values())  # the twins' configuration is not one that transformers knows
    auto: Any = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except ImportError as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        warnings.warn(f"{name} goes without its tokenizer: {line}", stacklevel=2)
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # what a missing tokenizer raises, by kind
        return None
    if tokenizer is None:
        return None
    # where a checkpoint has no vocabulary transformers makes one up, of special tokens alone
    made_up = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return tokenizer if tokenizer.vocab_size > len(made_up) else None


def usable_device(name: str) -> str:
    """The torch device a name stands for, where numbers can be computed; `auto` is CUDA, else MPS, else the CPU.

    Raises:
        ModelError: there is no such device here, or it holds no numbers, as `meta` does.
    """
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = best if name == "auto" else name
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ModelError(f"cannot use the device {device!r}: {why}; give one that this machine has, as cpu") from error
    return device


@contextmanager
def memory_explained(what: str, hint: str) -> Iterator[None]:
    """While inside, what does not fit into memory, or has more numbers than can be counted, is an error of one line.

    Raises:
        ModelError: something does not fit.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        if not (isinstance(error, MemoryError | OverflowError) or _out_of_memory(error) or "verflow" in str(error)):
            raise
        raise ModelError(f"{what} does not fit into memory; {hint}") from error


def pick_dtype(name: str | None, device: str) -> torch.dtype | Literal["auto"]:
    """The dtype a name stands for; None is float32 on the CPU and the checkpoint's own elsewhere.

    Raises:
        ModelError: there is no such dtype.
    """
    if name not in (None, "auto", *DTYPES):
        raise ModelError(f"no dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES.get(name or ("float32" if device == "cpu" else "auto"), "auto")


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in modules of their own: hooks on one are not on the other."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def check_model(model: Any) -> None:
    """Refuse what is no model of transformers, or one in a wrapper; adapters, which hand its attributes on, are taken.

    Raises:
        ModelError: what was received, and what to give.
    """
    if isinstance(model, PreTrainedModel):
        return
    within = next((name for name in ("_orig_mod", "module") if isinstance(getattr(model, name, None), nn.Module)), None)
    if within is None and hasattr(model, "main_input_name"):
        return
    give = f"the model within, its .{within}" if within else "what load_model returns"
    raise ModelError(f"received a {type(model).__name__}, which is no model of transformers; give {give}")


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: hidden states do not need logits, and the head costs a quarter of a small model."""
    return cast(PreTrainedModel, model.base_model)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Models make constants in the default dtype; in float64 these have to be float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def uncompiled() -> AbstractContextManager[Any]:
    """While inside, compiled models run as they are written: their hooks would be compiled too, some without an end."""
    return torch.compiler.set_stance("force_eager")


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names, dtypes, shapes and bytes of every parameter and persistent buffer."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta" and tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over all that decides which ids a text becomes: vocabulary, merges, normalization, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        content: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        content = json.loads(backend.to_str())
        for of_the_last_call in ("truncation", "padding"):
            content.pop(of_the_last_call, None)
    content["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
