"""Small random inputs for any transformers model, made from its configuration and its signature."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from normgeo.errors import ModelError

__all__ = [
    "TIMES", "example", "example_inputs", "first_attribute", "image_shape", "max_context", "patch_size",
    "processes_of", "several_inputs",
]  # fmt: skip

TIMES = (2, 7, 16)
"""Tokens of inputs to compare outputs on, where a model takes as many."""

GRID = 4
"""Patches along each side of an image, where a model is given patches."""
PAIRED = ("input_ids", "pixel_values")
"""What a model that reads text and images side by side is given."""
MODALITIES = (*PAIRED, "input_features", "input_values")
"""What a model that compares two modalities is given, as far as it takes it."""
WITH = {
    "input_ids": ("visual_feats", "visual_pos"),
    "pixel_values": ("noise", "spatial_shapes", "target_sizes", "image_embeds_position_mask"),
    "input_features": ("input_features_mask", "is_longer"),
    "query_embeds": ("encoder_hidden_states",),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
    "past_time_features": (
        "future_values", "future_time_features", "static_categorical_features", "static_real_features",
    ),
}  # fmt: skip
"""What a model takes with its main input, and needs although its signature has a default."""


def max_context(model: PreTrainedModel) -> int | None:
    """The longest context the model has positions for, or None where its configuration names no bound."""
    text = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    found = (getattr(text, name, None) for name in names)
    longest = next((value for value in found if isinstance(value, int) and value > 0), None)
    if longest is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == longest:
            padding: int | None = module.padding_idx
            if padding is not None:  # positions are counted from behind it
                return longest - padding - 1
    return longest


def processes_of(model: nn.Module) -> int:
    """Among how many processes a model's weights are divided (DTensor); 1 where they are whole."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return max((mesh.size() for mesh in meshes if mesh is not None), default=1)


def several_inputs(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Inputs of several lengths up to the longest that the model takes, each with its own random content.

    Raises:
        ModelError: as for `example_inputs`.
    """
    longest = max_context(model) or max(TIMES)
    return [example_inputs(model, time, seed=time) for time in dict.fromkeys(min(time, longest) for time in TIMES)]


def example_inputs(
    model: PreTrainedModel, time: int | None = None, seed: int = 0, *, cross: bool = True
) -> dict[str, Tensor]:
    """A small random input that the model accepts, made from its configuration: two sequences of `time` tokens.

    Of 7 tokens, unless said, of fewer where the model has positions for fewer, and of a whole window where it pads to
    one (Longformer): gradients of padding are NaN. Of somewhat more where its weights lie with several processes, which
    may divide a sequence too, and then into equal parts.

    Made are the main input, everything else that the forward pass requires, the other modality of a model that reads
    two side by side or compares them, and, unless `cross` is off, an encoder's hidden states for a decoder alone that
    has cross-attention to them. A model that can put images between its tokens is given text alone.

    Raises:
        ModelError: the model requires an input of a kind this function cannot make.
    """
    config = model.config
    if time is None:
        window = getattr(config, "attention_window", None) or 7
        longest = max(7, *window) if isinstance(window, (list, tuple)) else max(7, window)
        even = processes_of(model)
        longest = -(-longest // even) * even
        time = min(longest, max_context(model) or longest)
    names = _names(model, cross=cross)
    places = config.latent_query_num if "image_embeds_position_mask" in names else 0  # of an image, before the text
    length, generator = places + time, torch.Generator().manual_seed(seed)
    inputs = {name: example(name, model, length, generator) for name in names}
    return {k: v.to(model.device, model.dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}


def _names(model: PreTrainedModel, *, cross: bool) -> list[str]:
    """What a model is given, by its forward pass's signature and its configuration."""
    config, main, taken = model.config, model.main_input_name, inspect.signature(model.forward).parameters
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    tokens = r"(image|vision|media).*_(id|index)|vocabulary_map"
    between = any(re.fullmatch(tokens, name) for c in _parts(config) for name in vars(c))
    names = [n for n in ([main] if isinstance(main, str) else main) if n in taken] + needed
    if "return_loss" in taken:  # it compares what one modality says with what the other does
        names += [n for n in MODALITIES if n in taken]
    elif main in PAIRED and (not between or "pixel_values" in needed):
        names += [n for n in (*PAIRED, "bbox") if n in taken]
    beside = [n for name in names for n in WITH.get(name, ()) if n in taken]
    names += [n for n in beside if getattr(config, f"num_{n}", 1)]
    if "image_encoder_embeddings" in taken:  # text attends to images, and the mask says which token to which
        names.append("image_attention_mask")
    if config.is_encoder_decoder and "decoder_input_ids" in taken:
        names.append("decoder_input_ids")
    if cross and getattr(config, "add_cross_attention", False) and "encoder_hidden_states" in taken:
        names.append("encoder_hidden_states")  # without it a part of the model does not run
    return list(dict.fromkeys(names))


def example(name: str, model: PreTrainedModel, time: int, generator: torch.Generator) -> Tensor:
    """One random argument of a model's forward pass, by its name, for two sequences of `time` tokens or two images.

    Raises:
        ModelError: no example of this name can be made.
    """
    config, taken = model.config, inspect.signature(model.forward).parameters

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if name == "inputs":
        name = "input_ids" if hasattr(config, "vocab_size") else "input_values"
    own = getattr(config, f"{name.removesuffix('_input_ids')}_config", None)
    if isinstance(own, PretrainedConfig) and name.endswith("_input_ids"):
        return _ids(config, own, (2, time), generator)
    if name in ("input_ids", "decoder_input_ids"):
        text = config.get_text_config(decoder=True) if name == "decoder_input_ids" else config.get_text_config()
        rows = 2 * getattr(text, "num_codebooks", 1) if hasattr(text, "audio_channels") else 2
        return _ids(config, text, (rows, time), generator)
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return noise(2, config.max_length, config.num_mel_bins)  # a spectrogram in the place of an image
        mono = "padding_mask" in taken or _documented(model, name)[1:2] in (["1"], ["channels"])
        channels = getattr(config, "audio_channels", None) or (1 if mono else None)
        return noise(2, *([channels] if channels else []), 4000)
    simple: dict[str, Callable[[], Tensor]] = {
        "inputs_embeds": lambda: noise(2, time, config.get_text_config().hidden_size),
        "query_embeds": lambda: noise(2, time, config.get_text_config().hidden_size),
        "attention_mask": lambda: torch.ones(2, time, dtype=torch.long),
        "encoder_hidden_states": lambda: noise(2, time, _encoder_width(config)),
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
        "image_merge_sizes": lambda: torch.ones(2, dtype=torch.long),
        "image_sizes": lambda: torch.tensor([image_shape(config)[1:]] * 2),
        "image_attention_mask": lambda: torch.ones(2, time, 1, dtype=torch.long),
        "image_embeds_position_mask": lambda: (torch.arange(time) < config.latent_query_num).expand(2, time),
        "flattened_patches": lambda: _placed_patches(model, generator),
        "prompt_pixel_values": lambda: noise(*_pixels_shape(name, model)),
        "prompt_masks": lambda: noise(*_pixels_shape(name, model)),
        "task_inputs": lambda: _ids(config, config, (2, config.task_seq_len), generator),
        "visual_feats": lambda: noise(2, GRID, config.visual_feat_dim),
        "visual_pos": lambda: torch.rand(2, GRID, config.visual_pos_dim, generator=generator),
        "is_longer": lambda: torch.tensor([[True], [False]]),
        "noise": lambda: noise(2, math.prod(s // patch_size(config) for s in image_shape(config)[1:])),
        "input_features": lambda: noise(*_features_shape(model, time)),
        "input_features_mask": lambda: torch.ones(2, _frames(model, time), dtype=torch.long),
        "feature_attention_mask": lambda: torch.ones(2, _frames(model, time), dtype=torch.long),
        "high_res_pixel_values": lambda: noise(2, *_high_resolution(config)),
        "audio_mel": lambda: noise(*_features_shape(model, time)),
        "audio_mel_mask": lambda: torch.zeros(2, _frames(model, time), dtype=torch.bool),
    } | _of_series(config, time, noise)
    if name not in simple:
        kind = type(model).__name__
        raise ModelError(f"{kind} takes {name!r}, for which no example can be made; in Python, pass inputs=...")
    return simple[name]()


def _of_series(config: PretrainedConfig, time: int, noise: Callable[..., Tensor]) -> dict[str, Callable[[], Tensor]]:
    """What models of series and of trajectories take."""
    return {
        "past_values": lambda: noise(2, *_past(config)),
        "past_values_padding": lambda: torch.zeros(2, config.context_length, dtype=torch.long),
        "past_observed_mask": lambda: torch.ones(2, *_past(config)),
        "past_time_features": lambda: noise(2, _past(config)[0], config.num_time_features),
        "future_values": lambda: noise(2, config.prediction_length, *_past(config)[1:]),
        "future_time_features": lambda: noise(2, config.prediction_length, config.num_time_features),
        "static_real_features": lambda: noise(2, config.num_static_real_features),
        "static_categorical_features": lambda: torch.tensor([[kinds - 1 for kinds in config.cardinality]] * 2),
        "freq": lambda: torch.arange(2)[:, None] % config.freq_size,
        "states": lambda: noise(2, time, config.state_dim),
        "actions": lambda: noise(2, time, config.act_dim),
        "rewards": lambda: noise(2, time, 1),
        "returns_to_go": lambda: noise(2, time, 1),
        "timesteps": lambda: torch.arange(time).expand(2, time),
    }


def _high_resolution(config: PretrainedConfig) -> tuple[int, int, int]:
    return image_shape(getattr(config, "high_res_vision_config", config))


def _encoder_width(config: PretrainedConfig) -> int:
    own = getattr(config, "cross_attention_hidden_size", None) or getattr(config, "encoder_hidden_size", None)
    return own or config.get_text_config().hidden_size


def _past(config: PretrainedConfig) -> tuple[int, ...]:
    """Steps of a series, those that lag behind its context too, and its channels if it has any."""
    steps = config.context_length + max(getattr(config, "lags_sequence", [0]))
    several = getattr(config, "input_size", 1)
    channels = getattr(config, "num_input_channels", several if several > 1 else None)
    return (steps,) if channels is None else (steps, channels)


def _placed_patches(model: PreTrainedModel, generator: torch.Generator) -> Tensor:
    """Flat patches behind their row and column, which count from one."""
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    places = 1 + torch.stack([rows, columns], -1).flatten(0, 1).expand(2, -1, -1)
    width = first_attribute(model.config, "patch_embed_hidden_size")
    return torch.cat([places, torch.randn(2, GRID * GRID, width, generator=generator)], -1)


def _pixels_shape(name: str, model: PreTrainedModel) -> tuple[int, ...]:
    config, taken = model.config, inspect.signature(model.forward).parameters
    channels, height, width = image_shape(config)
    patch, vision = patch_size(config), _vision(model)
    first = next((m for m in vision.modules() if isinstance(m, nn.Conv3d)), None) or _first_map(vision)
    if taken.keys() & {"grid_thw", "image_grid_thw"} and name != "pixel_values_videos":
        if isinstance(first, nn.Conv2d) and _documented(model, name)[:1] != ["num_patches"]:
            return 2 * GRID * GRID, channels, patch, patch
        flat = channels * first_attribute(config, "temporal_patch_size", default=1) * patch**2
        return 2 * GRID * GRID, int(first.in_features) if isinstance(first, nn.Linear) else flat
    if "spatial_shapes" in taken:
        return 2, GRID * GRID, channels * patch**2
    if "target_sizes" in taken:
        return 2, channels, patch, patch * GRID * GRID
    if "image_encoder_embeddings" in taken:
        return 2, 1, channels, height, width
    if "prompt_pixel_values" in taken:  # it stands above the image
        return 2, channels, height // 2, width
    film = hasattr(config, "video_token_index") and not hasattr(config, "image_token_index")
    film = film or first_attribute(config, "num_frames", "tubelet_size") is not None
    if name == "pixel_values_videos" or film:
        return 2, first_attribute(config, "frames_per_clip", "num_frames", default=2), channels, height, width
    return 2, channels, height, width


def _first_map(model: nn.Module) -> Any:
    return next((m for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))), None)


def _vision(model: nn.Module) -> nn.Module:
    """What looks at images, where a model has a name for it."""
    names = ("visual", "vision_tower", "vision_model", "image_tower")
    return next((m for name, m in model.named_modules() if name.rpartition(".")[2] in names), model)


def _documented(model: PreTrainedModel, name: str) -> list[str]:
    """The axes of an argument, as the forward pass's documentation names them, as far as it does."""
    found = re.search(rf"^\s*{name} \(.*of shape `?\(([^)]*)\)", inspect.getdoc(model.forward) or "", re.MULTILINE)
    return found[1].split(", ") if found else []


def _frames(model: PreTrainedModel, time: int) -> int:
    if (half := first_attribute(model.config, "max_source_positions")) is not None:
        return 2 * half
    window = 2 * first_attribute(model.config, "n_window", default=8)  # frames are taken by whole windows
    return -(-16 * (time // 2 + 2) // window) * window


def _features_shape(model: PreTrainedModel, time: int) -> tuple[int, ...]:
    """(2, mels, frames) where a convolution reads the mels as channels, else (2, frames, mels)."""
    config, first = model.config, _first_map(model)
    if (size := first_attribute(config, "spec_size")) is not None:  # a spectrogram, or four parts of it, as an image
        crops, mels = 4 if first_attribute(config, "enable_fusion") else 1, first_attribute(config, "num_mel_bins")
        return 2, crops, size * (size // mels), mels
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "feature_size",
             "input_feat_size")  # fmt: skip
    known = [v for v in (first_attribute(config, n) for n in names) if v is not None] or [16]
    flat = isinstance(first, nn.Linear) and not any(isinstance(m, nn.Conv2d) for m in model.modules())
    mels = first.in_features if flat and isinstance(first, nn.Linear) else known[0]
    conv = next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None)
    channels = conv is not None and first_attribute(config, "num_mel_bins", "feature_size") == conv.in_channels
    return (2, mels, _frames(model, time)) if channels else (2, _frames(model, time), mels)


def _ids(
    config: PretrainedConfig, text: PretrainedConfig, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """Random tokens that the configuration does not name as special ones."""
    vocabulary = getattr(text, "vocab_size", 128)
    named = [item for part in _parts(config) for item in vars(part).items()]
    special = [v for k, v in named if re.fullmatch(r".*_token_(id|index)", k) and isinstance(v, int)]
    plain = torch.arange(min(3, vocabulary - 1), vocabulary)
    plain = plain[~torch.isin(plain, torch.tensor(special))]
    return plain[torch.randint(0, len(plain), shape, generator=generator)]


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and, after it, all those inside it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


def first_attribute(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the configuration or one of those inside it has."""
    values = (getattr(part, name, None) for name in names for part in _parts(config))
    return next((value for value in values if value is not None), default)


def patch_size(config: PretrainedConfig) -> int:
    """The width in pixels of the patches that images are cut into; 1 where they are cut into none."""
    patch = first_attribute(config, "patch_size", default=1)
    return patch if isinstance(patch, int) else patch[-1]


def image_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    size = first_attribute(config, "image_size", "img_size", "max_img_size", "crop_size", "input_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = first_attribute(config, "num_channels", "in_channels", "in_chans", default=3)
    return (channels if isinstance(channels, int) else 3), height, width
