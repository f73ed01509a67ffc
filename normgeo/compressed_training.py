r"""Pre-CRMSNorm models that train like their Pre-LN originals (*Pre-RMSNorm* section 3.4.2).

A stream of d numbers x stands for the zero-mean vector (x, -sum x) of R^(d+1). Each writer keeps the parameter V of the
Pre-LN model of width d + 1 and acts with the first d rows of center(V); CRMSNorm gives its readers all d + 1 numbers,
with the Pre-LN model's gamma and beta. The loss is the same function of the same parameters, so that every optimizer
takes the same steps. Dropout needs no recentering, for what is dropped stands for a zero-mean vector too; its masks are
then another model's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from normgeo.converted import SIZES, put, reshape
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs
from normgeo.gauge import find_gauge
from normgeo.norms import CRMSNorm
from normgeo.sites import NormSite
from normgeo.trainable import Centered

__all__ = ["Compressed", "compressed", "widened"]


class Compressed(Centered):
    r"""W = the first d of the d + 1 rows of V - mean(V), along an axis (*Pre-RMSNorm* section 3.2)."""

    def forward(self, v: Tensor) -> Tensor:
        """The centered parameter without its last row, of the dtype of V."""
        return super().forward(v).narrow(self.axis, 0, v.shape[self.axis] - 1)


def compressed(model: PreTrainedModel) -> PreTrainedModel:
    """The Pre-CRMSNorm training form of a Pre-LN model of width d + 1: a copy with streams of width d.

    Raises:
        ConversionError: a norm cannot become CRMSNorm: its stream carries a mean that no plain parameter writes, or
            something else reads it, or its gain is not a plain gamma.
    """
    gauge = find_gauge(model, example_inputs(model))
    if gauge.scaled or gauge.tables or gauge.raw or not gauge.layernorms:
        raise ConversionError(f"{type(model).__name__} has no Pre-CRMSNorm training form; train it as pre-rmsnorm")
    result = copy.deepcopy(model)
    for shift in gauge.writers:
        owner, _, last = shift.parameter.rpartition(".")
        module = result.get_submodule(owner)
        width = getattr(module, last).shape[shift.axis]
        parametrize.register_parametrization(module, last, Compressed(shift.axis), unsafe=True)
        for attribute, axis in SIZES.items():  # the sizes that the module has noted of its weight
            if last == "weight" and axis == shift.axis and getattr(module, attribute, None) == width:
                setattr(module, attribute, width - 1)
    for site in gauge.layernorms:
        put(result, site.name, _norm(result.get_submodule(site.name), site))
    return result


def _norm(old: Any, site: NormSite) -> CRMSNorm:
    if not isinstance(old, nn.LayerNorm) or old.weight is None:
        raise ConversionError(f"{site.key} is no plain LayerNorm with a gamma; train the model as pre-rmsnorm")
    has_bias = old.bias is not None
    new = CRMSNorm(site.d - 1, old.eps, expand=True, bias=has_bias, dtype=old.weight.dtype, device=old.weight.device)
    new.weight = old.weight
    new.bias = old.bias
    return new.train(old.training)


@torch.no_grad()
def widened(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """A fresh GPT-2 with one more number in its stream, in place; heads and hidden layers keep their widths.

    The new row or column of each parameter is drawn as the others were; the rest stays what it is.
    """
    d, std = model.config.n_embd, model.config.initializer_range
    names = [name for name, _ in model.named_parameters()]  # a tied head once
    for name in names:
        old = model.get_parameter(name)
        module = model.get_submodule(name.rpartition(".")[0])
        for axis in _stream_axes(name, module):
            size = [n if i != axis else 1 for i, n in enumerate(old.shape)]
            fill = {"weight": 1.0, "bias": 0.0}[name.rpartition(".")[2]]
            scale = std / (2 * model.config.n_layer) ** 0.5 if name.endswith("c_proj.weight") else std
            new = torch.full(size, fill) if old.ndim == 1 else torch.randn(size) * scale
            reshape(model, name, torch.cat([old, new.to(old)], axis))
        if isinstance(module, nn.LayerNorm):
            module.normalized_shape = (d + 1,)
    model.lm_head.weight = model.transformer.wte.weight
    model.lm_head.in_features = d + 1
    return model


def _stream_axes(name: str, module: nn.Module) -> list[int]:
    """Along which axis of a GPT-2 parameter the stream lies, if any."""
    is_bias, writes = name.endswith(".bias"), ".c_proj." in name
    if isinstance(module, nn.LayerNorm):
        return [0]
    if isinstance(module, Conv1D):  # weights are [in, out]
        return [] if is_bias and not writes else [0] if is_bias else [1] if writes else [0]
    return [1]  # the embeddings
