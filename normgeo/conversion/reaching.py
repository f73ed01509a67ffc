"""Example inputs that reach as much of a model as can be: images and sounds between tokens, masks, an encoder's states.

Of what no input reaches, neither a gradient nor a comparison of outputs says anything.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from normgeo.conversion.probing import float64_copy, outputs_of, same
from normgeo.examples import example, example_inputs, first_attribute, image_shape, patch_size
from normgeo.trace import evaluating

__all__ = ["beside", "reaching_inputs", "shows_shifts", "without_effect"]

CHOSEN = 1e-3
"""What another choice changes, of an output's largest: far above the rounding of a stream that was shifted by far."""

BETWEEN = (
    (("image_token_id", "image_token_index", "video_token_index"), "pixel_values", "get_image_features"),
    (("video_token_id", "video_token_index"), "pixel_values_videos", "get_video_features"),
    (("audio_token_id", "audio_token_index"), "input_features", "get_audio_features"),
)
"""What is put between tokens: the token that stands for a part of it, the argument, and what gives the parts."""

BESIDE = (
    "image_grid_thw", "spatial_shapes", "pixel_attention_mask", "image_sizes", "image_merge_sizes", "merge_sizes",
    "input_features_mask", "feature_attention_mask", "high_res_pixel_values", "target_sizes",
)  # fmt: skip
"""What a model may need to know of them."""

Extra = Iterator[dict[str, Tensor]]


@torch.no_grad()
def reaching_inputs(model: PreTrainedModel, time: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """`example_inputs`, and with them all else that can be made and that the model's outputs show, also in float64.

    That is an image, a film or a sound before the text of a model that puts them between its tokens, every second patch
    of an image masked (`bool_masked_pos`), and an encoder's hidden states for a decoder that can do without.

    Raises:
        ModelError: as `example_inputs`.
    """
    plain = inputs = example_inputs(model, time, seed)
    generator = torch.Generator().manual_seed(seed)
    makers: list[Callable[[], Extra]] = [lambda k=kind: _between(model, inputs, generator, *k) for kind in BETWEEN]
    with evaluating(model):
        for extras in (*makers, lambda: _masked(model), lambda: _encoded(model, generator)):
            inputs = inputs | next((extra for extra in extras() if _shows(model, inputs, extra)), {})
    if (
        inputs.keys() > plain.keys()
        and model.dtype is not torch.float64
        and not _shows(float64_copy(model), plain, inputs)
    ):
        return plain
    return inputs


@torch.no_grad()
def without_effect(
    model: PreTrainedModel, names: Iterable[str], batches: Sequence[dict[str, Tensor]]
) -> tuple[str, ...]:
    """Those of these parameters whose values change no output on any of these inputs; the model is left as it is."""
    truth = [outputs_of(model, inputs) for inputs in batches]

    def changed(parameters: Sequence[str]) -> bool:
        with _put_back(model, parameters):
            for name in parameters:
                parameter = model.get_parameter(name)
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
            try:
                return any(not same(a, outputs_of(model, b), 0.0) for a, b in zip(truth, batches, strict=True))
            except Exception:  # whatever the model says of such values: they matter
                return True

    def left(names: tuple[str, ...]) -> tuple[str, ...]:
        """All at once where none matters, else by halves."""
        if not names or not changed(names):
            return names
        half = len(names) // 2
        return left(names[:half]) + left(names[half:]) if half else ()

    return left(tuple(names))


@torch.no_grad()
def shows_shifts(model: PreTrainedModel, shifts: Sequence[tuple[str, int]], inputs: dict[str, Tensor]) -> bool:
    """Whether outputs change where parameters are shifted along an axis by far; the model is left as it is.

    Gradients say nothing of what chooses: an argmax of hidden states sees their mean, and has none.
    """
    truth, generator = outputs_of(model, inputs), torch.Generator().manual_seed(0)
    with _put_back(model, [name for name, _ in shifts]):
        for name, axis in shifts:
            parameter = model.get_parameter(name)
            size = [1 if i == axis else n for i, n in enumerate(parameter.shape)]
            far = 10 * parameter.square().mean().sqrt() * torch.randn(size, generator=generator).to(parameter)
            parameter.add_(far)
        return not same(truth, outputs_of(model, inputs), CHOSEN)


@contextmanager
def _put_back(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """While inside, these parameters may have other values."""
    kept = {name: model.get_parameter(name).detach().clone() for name in names}
    try:
        yield
    finally:
        for name, value in kept.items():
            model.get_parameter(name).copy_(value)


def beside(model: nn.Module, name: str) -> tuple[str, str, list[str]]:
    """Where a parameter is in the innermost list or dict of modules: which of them, its name there, and the others."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        inside = model.get_submodule(".".join(parts[: i - 1]))
        if isinstance(inside, (nn.ModuleList, nn.ModuleDict)):
            keys = [key for key, _ in inside.named_children() if key != parts[i - 1]]
            return ".".join(parts[:i]), ".".join(parts[i:]), [".".join([*parts[: i - 1], key]) for key in keys]
    return "", name, []


def _shows(model: PreTrainedModel, inputs: dict[str, Tensor], extra: dict[str, Tensor]) -> bool:
    """Whether the model runs with more inputs, and gives something else then."""
    try:
        return not same(outputs_of(model, inputs), outputs_of(model, inputs | extra), 0.0)
    except Exception:  # whatever a model's own checks raise
        return False


def _between(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    generator: torch.Generator,
    tokens: tuple[str, ...],
    main: str,
    method: str,
) -> Extra:
    """Two images, films or sounds, and as many tokens for each before the text as the model makes of it."""
    taken = inspect.signature(model.forward).parameters
    token = first_attribute(model.config, *tokens)
    features: Any = next((getattr(m, method) for m in [*model.modules()][::-1] if hasattr(m, method)), None)
    if token is None or main not in taken or "input_ids" not in inputs:
        return
    if main in inputs and (inputs["input_ids"] == token).any():  # an image may be there already, and no place for it
        return
    if "video_grid_thw" in taken and main == "pixel_values_videos":
        return  # by the way of images
    known = inspect.signature(features).parameters if features is not None else taken
    beside = {name: _made(name, model, generator) for name in BESIDE if name in known}
    needed = {name: value for name, value in beside.items() if known[name].default is inspect.Parameter.empty}
    forms = list(_forms(_made(main, model, generator), model))
    for value, more in itertools.product(forms, (needed, beside)):
        try:  # some call it by another name; without it, a model puts as many as it makes for one token
            many = _vectors(features(value, **more)) // 2 if features is not None else 1
        except Exception:  # whatever a model's own checks raise
            continue
        ids = torch.cat([torch.full((2, many), token, device=model.device), inputs["input_ids"]], 1)
        more |= {"attention_mask": torch.ones_like(ids)} if features is None else {}
        kinds = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in taken else {}
        for taken_as in (value, value.unflatten(0, (2, -1))) if value.ndim == 2 else (value,):
            yield {main: taken_as} | more | kinds | {"input_ids": ids}


def _vectors(found: Any) -> int:
    """How many vectors there are in what a model makes of images: a tensor, several, or an output that has them."""
    named = [getattr(found, name, None) for name in ("pooler_output", "last_hidden_state")]
    found = next((value for value in named if value is not None), found)
    parts = found if isinstance(found, (tuple, list)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _forms(value: Tensor, model: PreTrainedModel) -> Iterator[Tensor]:
    """What models take two images or sounds as.

    One after the other, one for each text, time last, cut into flat patches, side by side, or as many tiles as a grid
    has.
    """
    yield value
    yield value[:, None]
    if value.ndim == 3:
        yield value.mT
    if value.ndim != 4:
        return
    patch = patch_size(model.config)
    yield functional.unfold(value, patch, stride=patch).mT
    yield torch.cat([*value], -1)[None]
    height, width = value.shape[-2:]
    grids = first_attribute(model.config, "image_grid_pinpoints", default=())
    for tiles in sorted({(h // height) * (w // width) + 1 for h, w in grids}):
        yield torch.stack([value.roll(tile, -1) for tile in range(tiles)], 1)


def _masked(model: PreTrainedModel) -> Extra:
    if "bool_masked_pos" in inspect.signature(model.forward).parameters:
        patches = math.prod(size // patch_size(model.config) for size in image_shape(model.config)[1:])
        yield {"bool_masked_pos": (torch.arange(patches) % 2 == 0).expand(2, patches).to(model.device)}


def _encoded(model: PreTrainedModel, generator: torch.Generator) -> Extra:
    taken = inspect.signature(model.forward).parameters
    if "encoder_hidden_states" in taken and not model.config.is_encoder_decoder:
        yield {"encoder_hidden_states": _made("encoder_hidden_states", model, generator)}


def _made(name: str, model: PreTrainedModel, generator: torch.Generator) -> Tensor:
    made = example(name, model, 7, generator)
    return made.to(model.device, model.dtype if made.is_floating_point() else made.dtype)
