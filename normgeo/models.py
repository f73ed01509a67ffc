"""Models: a hub id, a local directory, or the pair that ships with the package; the models of *Geometry* table 1."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

from normgeo.errors import ModelError
from normgeo.norms import RMSNorm

__all__ = [
    "EMBEDDED",
    "TABLE_1",
    "ModelCard",
    "TwinConfig",
    "TwinLMHeadModel",
    "base_model",
    "example_inputs",
    "load_model",
    "load_tokenizer",
    "max_context",
    "weights_digest",
]

ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {"embedded-layernorm": ASSETS / "layernorm", "embedded-rmsnorm": ASSETS / "rmsnorm"}
"""The pair that ships with the package: GPT-2 twins that differ in nothing but their norm."""


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
    path = str(EMBEDDED.get(str(name), name))
    revision = revision or {card.hub_id: card.revision for card in TABLE_1}.get(path)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        config, cls = _config_and_class(path, options, trust_remote_code)
        model = cls.from_pretrained(
            path, config=config, dtype=dtype, device_map=device_map, use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _explained(str(name), error) from error
    model = cast(PreTrainedModel, model.eval().requires_grad_(False))
    if str(name) in EMBEDDED:
        model.name_or_path = str(name)
    if str(name) in EMBEDDED and dtype == "auto":
        model.float()  # stored in half precision to stay small, meant to compute in float32
    if device is None or device_map is not None:
        return model
    try:
        return model.to(device)  # pyright: ignore
    except (RuntimeError, AssertionError) as error:
        if "memory" in str(error).lower():
            raise ModelError(f"{name} does not fit on {device}; give --device-map auto or a smaller --dtype") from error
        raise ModelError(f"cannot use the device {device!r}: {str(error).splitlines()[0]}") from error


def _config_and_class(path: str, options: dict[str, Any], trust: bool) -> tuple[PretrainedConfig, Any]:
    raw, _ = PretrainedConfig.get_config_dict(path, **options)
    if raw.get("model_type") == TwinConfig.model_type:
        raw.pop("model_type")  # the class says it
        return TwinConfig.from_dict(raw), TwinLMHeadModel  # not registered: loading must not change transformers
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust, **options)
    if "auto_map" in raw and trust:
        options["trust_remote_code"] = True
        causal = "AutoModelForCausalLM" in raw["auto_map"]
        return config, transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    names = config.architectures or []
    return config, next((c for n in names if (c := getattr(transformers, n, None))), transformers.AutoModel)


def _explained(name: str, error: Exception) -> ModelError:
    text = " ".join(str(error).split())
    low = text.lower()
    if "gated" in low or "401" in low or "403" in low:
        hint = "the repository is gated: accept its terms on the hub and log in with `hf auth login`"
    elif "trust_remote_code" in low:
        hint = "it brings its own code, which is run only with --trust-remote-code"
    elif "safetensors" in low and ("no file" in low or "does not appear" in low or "error no file" in low):
        hint = "it has no safetensors weights; pickled weights are not read: convert them first"
    elif "connect" in low or "offline" in low or "not a valid model identifier" in low or "repo id must be" in low:
        hint = "there is no such local directory, and the hub does not have it or cannot be reached"
    else:
        hint = type(error).__name__
    return ModelError(f"cannot load the model {name!r}: {hint} ({text[:300]})")


def load_tokenizer(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any | None:
    """The tokenizer that goes with a model, or None where the model has none."""
    path = str(EMBEDDED.get(str(name), name))
    revision = revision or {card.hub_id: card.revision for card in TABLE_1}.get(path)
    options = {"revision": revision} if revision else {}
    own = path in map(str, EMBEDDED.values())  # the twins' configuration is not one that transformers knows
    auto: Any = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # what a missing tokenizer raises, by kind
        return None
    return tokenizer if tokenizer is not None and tokenizer.vocab_size else None


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: hidden states do not need logits, and the head costs a quarter of a small model."""
    return cast(PreTrainedModel, model.base_model)


def max_context(model: PreTrainedModel) -> int | None:
    """The longest context the model has positions for, or None where its configuration names no bound."""
    text = model.config.get_text_config(decoder=True)
    for name in (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
    ):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def example_inputs(model: PreTrainedModel, time: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """A small random input that the model accepts, made from its configuration: two sequences of `time` tokens.

    Made are the main input, everything else that the forward pass requires, and the other modality of a model that
    reads text and images side by side. A model that puts images between its tokens is given text alone.

    Raises:
        ModelError: the model requires an input of a kind this function cannot make.
    """
    config, main = model.config, model.main_input_name
    taken = inspect.signature(model.forward).parameters
    names = [n for n in ([main] if isinstance(main, str) else main) if n in taken]
    names += [n for n, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    between = any(re.fullmatch(r"(image|vision|media).*_(id|index)", name) for c in _parts(config) for name in vars(c))
    names += [n for n in ("input_ids", "pixel_values", "bbox") if n in taken and main in PAIRED and not between]
    names += [n for n in WITH.get(names[0] if names else "", ()) if n in taken]
    if config.is_encoder_decoder and "decoder_input_ids" in taken:
        names.append("decoder_input_ids")
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: _example(name, model, time, generator) for name in dict.fromkeys(names)}
    return {k: v.to(model.device, model.dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}


PAIRED = ("input_ids", "pixel_values")
WITH = {
    "pixel_values": ("noise", "spatial_shapes", "target_sizes"),
    "input_features": ("input_features_mask",),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
}
"""What a model takes with its main input, and needs although its signature has a default."""


def _example(name: str, model: PreTrainedModel, time: int, generator: torch.Generator) -> Tensor:
    config = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if name == "inputs":
        name = "input_ids" if hasattr(config, "vocab_size") else "input_values"
    if name in ("input_ids", "decoder_input_ids"):
        text = config.get_text_config(decoder=True) if name == "decoder_input_ids" else config.get_text_config()
        rows = 2 * getattr(text, "num_codebooks", 1) if hasattr(text, "audio_channels") else 2
        return _ids(text, (rows, time), generator)
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return noise(2, config.max_length, config.num_mel_bins)  # a spectrogram in the place of an image
        channels = getattr(config, "audio_channels", None)
        return noise(2, *([channels] if channels else []), 4000)
    simple: dict[str, Callable[[], Tensor]] = {
        "inputs_embeds": lambda: noise(2, time, config.get_text_config().hidden_size),
        "query_embeds": lambda: noise(2, time, config.get_text_config().hidden_size),
        "bbox": lambda: torch.randint(0, 100, (2, time, 4), generator=generator).sort(-1).values,
        "pixel_values": lambda: noise(*_pixels_shape(name, model)),
        "pixel_values_videos": lambda: noise(*_pixels_shape(name, model)),
        "hidden_states": lambda: noise(*_pixels_shape(name, model)),
        "grid_thw": lambda: torch.tensor([[1, GRID, GRID]] * 2),
        "image_grid_thw": lambda: torch.tensor([[1, GRID, GRID]] * 2),
        "spatial_shapes": lambda: torch.tensor([[GRID, GRID]] * 2),
        "target_sizes": lambda: torch.tensor([[GRID, GRID]] * 2),
        "pixel_attention_mask": lambda: torch.ones(2, GRID * GRID, dtype=torch.long),
        "merge_sizes": lambda: torch.ones(2, dtype=torch.long),
        "noise": lambda: noise(2, math.prod(s // config.patch_size for s in _image_shape(config)[1:])),
        "input_features": lambda: noise(*_features_shape(model, time)),
        "input_features_mask": lambda: torch.ones(2, _frames(model, time), dtype=torch.long),
        "past_values": lambda: noise(2, config.context_length, *_series_channels(config)),
        "past_values_padding": lambda: torch.zeros(2, config.context_length, dtype=torch.long),
        "states": lambda: noise(2, time, config.state_dim),
        "actions": lambda: noise(2, time, config.act_dim),
        "rewards": lambda: noise(2, time, 1),
        "returns_to_go": lambda: noise(2, time, 1),
        "timesteps": lambda: torch.arange(time).expand(2, time),
    }
    if name not in simple:
        raise ModelError(f"{type(model).__name__} takes {name!r}, for which no example can be made; pass inputs=...")
    return simple[name]()


GRID = 4
"""Patches along each side of an image, where a model is given patches."""


def _series_channels(config: PretrainedConfig) -> tuple[int, ...]:
    return (config.num_input_channels,) if hasattr(config, "num_input_channels") else ()


def _pixels_shape(name: str, model: PreTrainedModel) -> tuple[int, ...]:
    config, taken = model.config, inspect.signature(model.forward).parameters
    channels, height, width = _image_shape(config)
    patch = _first(config, "patch_size", default=1)
    patch = patch if isinstance(patch, int) else patch[-1]
    first = _first_map(model)
    if taken.keys() & {"grid_thw", "image_grid_thw"} and name != "pixel_values_videos":
        if isinstance(first, nn.Conv2d):
            return 2 * GRID * GRID, channels, patch, patch
        flat = channels * _first(config, "temporal_patch_size", default=1) * patch**2
        return 2 * GRID * GRID, int(first.in_features) if isinstance(first, nn.Linear) else flat
    if "spatial_shapes" in taken:
        return 2, GRID * GRID, channels * patch**2
    if "target_sizes" in taken:
        return 2, channels, patch, patch * GRID * GRID
    if name == "pixel_values_videos" or _first(config, "num_frames", "tubelet_size") is not None:
        return 2, _first(config, "frames_per_clip", "num_frames", default=2), channels, height, width
    return 2, channels, height, width


def _first_map(model: nn.Module) -> Any:
    return next((m for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))), None)


def _frames(model: PreTrainedModel, time: int) -> int:
    return 2 * _first(model.config, "max_source_positions", default=8 * (time // 2 + 2))


def _features_shape(model: PreTrainedModel, time: int) -> tuple[int, ...]:
    """(2, mels, frames) where a convolution reads the mels as channels, else (2, frames, mels)."""
    config, first = model.config, _first_map(model)
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "feature_size")
    known = [v for v in (_first(config, n) for n in names) if v is not None] or [16]
    flat = isinstance(first, nn.Linear) and not any(isinstance(m, nn.Conv2d) for m in model.modules())
    mels = first.in_features if flat and isinstance(first, nn.Linear) else known[0]
    channels = isinstance(first, nn.Conv1d) and _first(config, "num_mel_bins") == first.in_channels
    return (2, mels, _frames(model, time)) if channels else (2, _frames(model, time), mels)


def _ids(text: PretrainedConfig, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random tokens that the configuration does not name as special ones."""
    vocabulary = getattr(text, "vocab_size", 128)
    special = [v for k, v in vars(text).items() if re.fullmatch(r".*_token_(id|index)", k) and isinstance(v, int)]
    plain = torch.arange(min(3, vocabulary - 1), vocabulary)
    plain = plain[~torch.isin(plain, torch.tensor(special))]
    return plain[torch.randint(0, len(plain), shape, generator=generator)]


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and, after it, all those inside it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


def _first(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the configuration or one of those inside it has."""
    values = (getattr(part, name, None) for name in names for part in _parts(config))
    return next((value for value in values if value is not None), default)


def _image_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    size = _first(config, "image_size", "img_size", "crop_size", "input_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    return (channels if isinstance(channels, int) else 3), height, width


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names, dtypes, shapes and bytes of every parameter and persistent buffer."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta" and tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
