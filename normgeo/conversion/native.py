"""Converted models that are a native architecture already: RMSNorm in another one's layout."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from normgeo.conversion.certify import TOLERANCE_FLOAT32
from normgeo.conversion.convert import Conversion
from normgeo.conversion.probing import outputs_of, same
from normgeo.conversion.shallow import empty_model
from normgeo.examples import several_inputs

__all__ = ["native_model"]

CANDIDATES: tuple[tuple[Any, Any], ...] = ((LlamaConfig, LlamaForCausalLM),)
"""(configuration, model) whose layout a converted model may have: tried, and compared by its outputs."""


@torch.no_grad()
def native_model(conversion: Conversion) -> PreTrainedModel | None:
    """The same model as a class of transformers, or None where there is none.

    The candidate gets every setting that both configurations have, and every parameter by its name; it is taken when
    the names and shapes are the same, gains of ones aside, and the outputs are equal in float32.
    """
    recipe = conversion.recipe
    epses = {spec["eps"] for spec in recipe["norms"].values()}
    if conversion.kept or conversion.recentered or recipe["to"] != "rmsnorm" or recipe.get("heads") or len(epses) != 1:
        return None
    (eps,) = epses
    for config_class, model_class in CANDIDATES:
        model = _candidate(conversion.model, config_class, model_class, eps)
        if model is not None and _equal(conversion.model, model):
            return model
    return None


def _candidate(converted: PreTrainedModel, config_class: Any, model_class: Any, eps: float) -> PreTrainedModel | None:
    settings = converted.config.to_dict()
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class().to_dict())
    try:
        if _changed(converted.config) - known:
            return None
        known -= {"model_type", "architectures", "transformers_version", "rms_norm_eps", "_name_or_path"}
        config = config_class(**{k: v for k, v in settings.items() if k in known}, rms_norm_eps=eps)
        empty = empty_model(model_class, config)
    except Exception:
        return None  # settings of another architecture, each refused in its own way
    state = {k: v.detach() for k, v in converted.state_dict().items()}
    wanted = {k: v.shape for k, v in empty.state_dict().items()}
    for name in wanted.keys() - state.keys():
        if name.rpartition(".")[0] in converted.config.normgeo["norms"]:
            state[name] = torch.ones(wanted[name], dtype=converted.dtype, device=converted.device)
    if {k: v.shape for k, v in state.items()} != wanted:
        return None
    model = model_class(config).to(converted.dtype)
    model.load_state_dict(state)
    model.generation_config = copy.deepcopy(converted.generation_config)
    return model.to(converted.device).eval()


def _changed(config: Any) -> set[str]:
    """Settings unlike their architecture's own, eps aside: one that is lost may show on inputs that are not tried."""
    usual = type(config)().to_dict()
    return {k for k, v in config.to_dict().items() if k != "normgeo" and not k.endswith("eps") and v != usual.get(k)}


def _equal(converted: PreTrainedModel, model: PreTrainedModel) -> bool:
    a, b = copy.deepcopy(converted).float().eval(), copy.deepcopy(model).float().eval()
    return all(
        same(outputs_of(a, inputs), outputs_of(b, inputs), TOLERANCE_FLOAT32) for inputs in several_inputs(converted)
    )
