r"""Pre-CRMSNorm models that train like their Pre-LN originals (*Pre-RMSNorm* section 3.4.2).

A stream of d numbers x stands for the zero-mean vector (x, -sum x) of R^(d+1). Each writer keeps the parameter V of the
Pre-LN model of width d + 1 and acts with the first d rows of center(V); each reader keeps its parameter too and acts
with gamma and beta folded into it, on d numbers. The loss is the same function of the same parameters, so that every
optimizer takes the same steps, and no activation of a stream is wider than d. Dropout needs no recentering: what it
leaves stands for a zero-mean vector too. Its masks are then not those of the Pre-LN model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from normgeo.conversion.gauge import find_gauge
from normgeo.conversion.trainable import Centered
from normgeo.converted import SIZES, reshape
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs
from normgeo.norms import CRMSNorm

__all__ = ["Compressed", "Reader", "UnscaledCRMSNorm", "compressed", "widened"]


class Compressed(Centered):
    r"""W = the first d of the d + 1 rows of V - mean(V), along an axis (*Pre-RMSNorm* section 3.2)."""

    def forward(self, v: Tensor) -> Tensor:
        """The centered parameter without its last row, of the dtype of V."""
        return super().forward(v).narrow(self.axis, 0, v.shape[self.axis] - 1)


class UnscaledCRMSNorm(CRMSNorm):
    """CRMSNorm that keeps gamma and beta, d + 1 wide, for its reader and gives y alone, d wide."""

    def __init__(self, d: int, eps: float, **options: Any) -> None:
        super().__init__(d, eps, expand=True, **options)
        self.expand = False

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The standardized x [..., d], in its dtype; half precision is computed in float32."""
        return self.standardized(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).to(x.dtype)


class Reader(nn.Module):
    r"""A linear layer A, b of d + 1 inputs, on the d numbers y of a norm with gamma and beta (*Pre-RMSNorm* eq. 6).

    With B = A diag(gamma), B (y, -sum y) + A beta + b = (B_1..d - B_d+1 1^T) y + (A beta + b).
    """

    def __init__(self, inner: nn.Module, norm: UnscaledCRMSNorm) -> None:
        super().__init__()
        self.inner = inner
        self._norm = (norm,)  # in a tuple: its parameters stay its own

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """The weight [out, d] and bias [out] that it acts with."""
        weight: Any = self.inner.weight
        weight = weight.T if isinstance(self.inner, Conv1D) else weight  # [out, in]
        gamma, beta = self._norm[0].weight, self._norm[0].bias
        scaled, bias = weight * gamma, getattr(self.inner, "bias", None)
        if beta is not None:
            bias = weight @ beta if bias is None else weight @ beta + bias
        return scaled[:, :-1] - scaled[:, -1:], bias

    def forward(self, y: Tensor) -> Tensor:
        """What the layer would give for gamma * (y, -sum y) + beta."""
        return functional.linear(y, *self.folded())


def compressed(model: PreTrainedModel) -> PreTrainedModel:
    """The Pre-CRMSNorm training form of a GPT-2 of width d + 1: a copy with streams of width d, readers too.

    Raises:
        ConversionError: it is no GPT-2 with a language model's head, or has other norms than LayerNorms.
    """
    gauge = find_gauge(model, example_inputs(model))
    plain = all(isinstance(model.get_submodule(s.name), nn.LayerNorm) for s in gauge.layernorms)
    if not (isinstance(model, GPT2LMHeadModel) and gauge.layernorms and plain) or gauge.raw:
        raise ConversionError(f"{type(model).__name__} has no Pre-CRMSNorm training form; train it as pre-rmsnorm")
    result: Any = copy.deepcopy(model)
    for shift in gauge.writers:
        owner, _, last = shift.parameter.rpartition(".")
        module = result.get_submodule(owner)
        width = getattr(module, last).shape[shift.axis]
        parametrize.register_parametrization(module, last, Compressed(shift.axis), unsafe=True)
        for attribute, axis in SIZES.items():  # the sizes that the module has noted of its weight
            if last == "weight" and axis == shift.axis and getattr(module, attribute, None) == width:
                setattr(module, attribute, width - 1)
    for block in result.transformer.h:
        block.ln_1 = _unscaled(block.ln_1)
        block.ln_2 = _unscaled(block.ln_2)
        block.attn.c_attn = Reader(block.attn.c_attn, block.ln_1)
        block.mlp.c_fc = Reader(block.mlp.c_fc, block.ln_2)
    result.transformer.ln_f = _unscaled(result.transformer.ln_f)
    result.lm_head = Reader(result.lm_head, result.transformer.ln_f)
    return result


def _unscaled(old: nn.LayerNorm) -> UnscaledCRMSNorm:
    d, weight = old.normalized_shape[0], old.weight
    new = UnscaledCRMSNorm(d - 1, old.eps, bias=old.bias is not None, dtype=weight.dtype, device=weight.device)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


@torch.no_grad()
def widened(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """A fresh GPT-2 with one more number in its stream, in place; heads and hidden layers keep their widths.

    The new row or column of each parameter is drawn as the others were; the rest stays what it is.
    """
    std = model.config.initializer_range
    for name in [name for name, _ in model.named_parameters()]:  # a tied head once
        old, (owner, _, last) = model.get_parameter(name), name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, nn.LayerNorm):
            fill = torch.tensor([1.0 if last == "weight" else 0.0]).to(old)
            setattr(module, last, nn.Parameter(torch.cat([old, fill])))
            module.normalized_shape = (len(old) + 1,)
        elif (axis := _stream_axis(name, module)) is not None:
            size = [1 if i == axis else n for i, n in enumerate(old.shape)]
            scale = std / (2 * model.config.n_layer) ** 0.5 if last == "weight" and ".c_proj." in name else std
            new = torch.zeros(size) if last == "bias" else torch.randn(size) * scale
            reshape(model, name, torch.cat([old, new.to(old)], axis))
    model.lm_head.weight = model.transformer.wte.weight
    model.lm_head.in_features = model.lm_head.weight.shape[1]
    return model


def _stream_axis(name: str, module: nn.Module) -> int | None:
    """Along which axis of a GPT-2 parameter the stream lies, if any."""
    if not isinstance(module, Conv1D):
        return 1  # the embeddings
    writes = ".c_proj." in name
    if name.endswith(".bias"):
        return 0 if writes else None
    return 1 if writes else 0  # weights are [in, out]
