r"""Converted models that train like their originals (*Pre-RMSNorm* section 3.4.1 and 4.1).

Fine-tuning a converted model drifts away from what the Pre-LN model would have become: an optimizer moves the means
that the conversion removed. Here each writer keeps its parameter V and acts with W = center(V): the gradient for V is
what the Pre-LN model's is, which has no mean along the gauge's axis either, so that all optimizers take the same steps.
Dropout, stochastic depth and LayerScale do not commute with centering: where one of them follows a writer, its output
is recentered instead.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from normgeo.conversion.centering import recenter_sources, site_means
from normgeo.conversion.gauge import Gauge
from normgeo.conversion.probing import Place, generic_copy, untie
from normgeo.conversion.replacing import Learned
from normgeo.converted import held_by, recenter_at
from normgeo.errors import ConversionError
from normgeo.loading import saved_elsewhere
from normgeo.models import copied
from normgeo.norms import RMSNorm

__all__ = ["Centered", "bake", "parametrized", "trains_as", "unparametrized"]


class Centered(nn.Module):
    r"""W = V - mean(V) along an axis (*Pre-RMSNorm* lemma 3.1)."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, v: Tensor) -> Tensor:
        """The centered parameter, of the shape and dtype of V; half precision is computed in float32."""
        wide = v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
        return (wide - wide.mean(self.axis, keepdim=True)).to(v.dtype)


def parametrized(
    model: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor]
) -> tuple[PreTrainedModel, list[Place], dict[str, float]]:
    """A copy whose writers are centered while it trains.

    Returns:
        The copy, still with LayerNorms; where it recenters activations; and the mean that is left at each LayerNorm, in
        training or in evaluation.
    """
    result = copied(model)
    for name, axis in gauge.writers:
        _center(*held_by(result, name), axis)
    exact = generic_copy(result, inputs, tied=True).train()  # a new model has means that are zero, but do not stay so
    places = recenter_sources(exact, gauge, inputs)
    train = site_means(exact, gauge.layernorms, inputs)
    evaluated = site_means(exact.eval(), gauge.layernorms, inputs)
    for place in places:
        recenter_at(result, *place)
    return result, places, {name: max(train[name], evaluated[name]) for name in train}


class _TrainedNorm(RMSNorm, nn.LayerNorm):
    """An RMSNorm that stands for a torch LayerNorm also where trainers ask for the class, to decay no gains."""

    @property
    def normalized_shape(self) -> tuple[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As torch's has it."""
        return (self.d,)

    @property
    def elementwise_affine(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it has a gamma."""
        return self.weight is not None


def _tied_already(*_: Any, **__: Any) -> None:
    """The `tie_weights` of a model in training: what is tied to a writer shares its V, under another name."""


def _resized_before(*_: Any, **__: Any) -> NoReturn:
    """The `resize_token_embeddings` of a model in training.

    Raises:
        ConversionError: always; it says what to do.
    """
    raise ConversionError(
        "embeddings that are centered as they are read cannot be resized: resize those of the original, and convert it"
    )


def _set_before(*_: Any, **__: Any) -> NoReturn:
    """The `set_input_embeddings` of a model in training.

    Raises:
        ConversionError: always; it says what to do.
    """
    raise ConversionError(
        "other embeddings would not be centered: set those of the original, and convert it, or load their values by "
        "load_state_dict"
    )


LEARNED = "normgeo_learned"
"""What a norm learns, where its original calls or shapes it otherwise: its state is the original's."""

IN_TRAINING = {
    "tie_weights": _tied_already, "resize_token_embeddings": _resized_before, "set_input_embeddings": _set_before,
}  # fmt: skip
"""What transformers' own of these would do to a writer: fail, nothing, or leave it uncentered, without a word."""


def trains_as(original: nn.Module, converted: nn.Module, norms: Mapping[str, Learned]) -> None:
    """Let a trainer that goes by classes, methods and states treat a model as it treats its original.

    Args:
        original: the Pre-LN model.
        converted: its trainable conversion, which is changed.
        norms: what the norms that were replaced learn, by their names.
    """
    for name, learned in norms.items():
        norm = converted.get_submodule(name)
        if isinstance(original.get_submodule(name), nn.LayerNorm):
            norm.__class__ = _TrainedNorm
        if [*learned.names] != [*learned.names.values()] or any(len(shape) > 1 for shape in learned.shapes.values()):
            vars(norm)[LEARNED] = learned
            norm.register_state_dict_post_hook(_named_before)
            norm.register_load_state_dict_pre_hook(_named_now)
    for module in converted.modules():
        if isinstance(module, PreTrainedModel):
            vars(module).update(IN_TRAINING)


def _center(module: nn.Module, name: str, axis: int) -> None:
    """Let a parameter be centered while its state is that of the plain one, under the name that it had."""
    if not _originals(module):
        module.register_state_dict_post_hook(_plainly_named)
        module.register_load_state_dict_pre_hook(_as_parametrized)
    if parametrize.is_parametrized(module):
        _give_own_class(module)
    parametrize.register_parametrization(module, name, Centered(axis))


def _give_own_class(module: nn.Module, without: Container[str] = ()) -> None:
    """Give a parametrized module a class like its own, which copies share, without what reads some parameters."""
    cls: Any = type(module)
    kept = {name: value for name, value in vars(cls).items() if name not in without}
    module.__class__ = type(cls.__name__, cls.__bases__, kept)  # pyright: ignore


def _plainly_named(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in _originals(module):
        state[f"{prefix}{name}"] = state.pop(f"{prefix}parametrizations.{name}.original")


def _as_parametrized(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _originals(module):
        if f"{prefix}{name}" in state:
            state[f"{prefix}parametrizations.{name}.original"] = state.pop(f"{prefix}{name}")


def _named_before(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if (learned := vars(module).get(LEARNED)) is not None:
        values = {part: state.pop(prefix + part) for part in learned.names}  # before any is put: they may be crossed
        for part, value in values.items():
            shape = learned.shapes[part]
            state[prefix + learned.names[part]] = value if value.shape == shape else value.view(shape)


def _named_now(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if (learned := vars(module).get(LEARNED)) is not None:
        values = {part: state.pop(prefix + name, None) for part, name in learned.names.items()}
        state.update({prefix + part: value.flatten() for part, value in values.items() if value is not None})


def _originals(module: nn.Module) -> list[str]:
    """The parameters that are centered as they are read; others may be parametrized by the model's own code."""
    every: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    return [name for name, ways in every.items() if any(isinstance(way, Centered) for way in ways)]


@torch.no_grad()
def bake(model: PreTrainedModel) -> PreTrainedModel:
    """A copy for inference with plain centered parameters in the place of the parametrized ones.

    A head that was tied to a centered embedding gets weights of its own.
    """
    result = copied(model)
    for module in list(result.modules()):
        unparametrized(module)
    untie(result, always=True)
    for module in result.modules():
        if isinstance(module, _TrainedNorm):
            module.__class__ = RMSNorm  # pyright: ignore
        vars(module).pop(LEARNED, None)
        if isinstance(module, PreTrainedModel):
            for name in IN_TRAINING:
                module.__dict__.pop(name, None)
    saved_elsewhere(result)
    return result


@torch.no_grad()
def unparametrized(module: nn.Module) -> None:
    """Give a module plain parameters in the place of centered ones, with the values they have, in place."""
    names = _originals(module)
    if not names:
        return
    values = {name: getattr(module, name).detach().clone() for name in names}
    trains = {name: module.parametrizations[name].original.requires_grad for name in names}  # pyright: ignore
    # not remove_parametrizations: it would change the class, which a copy shares with its original
    if len(names) < len(module.parametrizations):  # pyright: ignore
        _give_own_class(module, names)
        for name in names:
            del module.parametrizations[name]  # pyright: ignore
    else:
        module.__class__ = type(module).__bases__[0]
        del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value.contiguous(), trains[name]))
