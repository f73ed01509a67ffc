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
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from normgeo.conversion.gauge import Gauge, find_gauge
from normgeo.conversion.probing import INVISIBLE, float64_copy, outputs_of, same
from normgeo.conversion.shallow import gauge_of
from normgeo.conversion.trainable import Centered
from normgeo.converted import SIZES, held_by, put, reshape
from normgeo.errors import ConversionError, NormGeoError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops
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
        y = norm_ops.norm(x, None, None, self.eps, 0.0, "crmsnorm") if x.shape[-1:] == (self.d,) else None
        if y is not None:
            return y
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
    """The Pre-CRMSNorm training form of a Pre-LN model: an equal copy that trains as it does (*Pre-RMSNorm* eq. 5, 6).

    Of a model of width d + 1, streams and what the readers are given have width d: x stands for (x, -sum x). A writer
    keeps its parameter V and acts with the first d rows of center(V); a reader keeps its own and acts with gamma and
    beta folded into it.

    Args:
        model: one all of whose norms are LayerNorms that only linear layers read, and whose streams only parameters
            write: GPT-2, ViT, GPT-NeoX and their like. It is not changed.

    Raises:
        ConversionError: the model is no such, or the copy does not give its outputs.

    >>> from normgeo.loading import load_model
    >>> form = compressed(load_model("embedded-layernorm"))
    >>> form.transformer.wte.weight.shape, form.transformer.wte.parametrizations.weight.original.shape
    (torch.Size([4096, 191]), torch.Size([4096, 192]))
    """
    inputs = example_inputs(model)
    gauge = find_gauge(model, inputs)
    readers = _readers(model, gauge)
    result = copy.deepcopy(model)
    for shift in gauge.writers:
        module, last = held_by(result, shift.parameter)
        width = getattr(module, last).shape[shift.axis]
        parametrize.register_parametrization(module, last, Compressed(shift.axis), unsafe=True)
        for attribute, axis in SIZES.items():  # the sizes that the module has noted of its weight
            if last == "weight" and axis == shift.axis and getattr(module, attribute, None) == width:
                setattr(module, attribute, width - 1)
    for name, reading in readers.items():
        norm = _unscaled(result.get_submodule(name))  # pyright: ignore[reportArgumentType]
        put(result, {name: norm} | {reader: Reader(result.get_submodule(reader), norm) for reader in reading})
    try:
        with torch.no_grad():
            truth, found = (outputs_of(float64_copy(m, tied=True), inputs) for m in (model, result))
        equal = same(truth, found, INVISIBLE)
    except NormGeoError:
        equal = False
    if not equal:
        raise _formless(model, "its outputs would change")
    return result


def _readers(model: PreTrainedModel, gauge: Gauge) -> dict[str, list[str]]:
    """The linear layers that read each norm, by name."""
    if gauge.raw or gauge.scaled or gauge.tables or not gauge.sites:
        raise _formless(model, "something else than LayerNorms reads its stream, or than parameters writes it")
    found: dict[str, list[str]] = {site.name: [] for site in gauge.sites}
    for name, _, norm in gauge.readers:
        owner = model.get_submodule(name.rpartition(".")[0])
        if norm in found and isinstance(owner, nn.Linear | Conv1D):
            found[norm].append(name.rpartition(".")[0])
    for norm, reading in found.items():
        if not isinstance(model.get_submodule(norm), nn.LayerNorm) or not reading:
            raise _formless(model, f"{norm} is no LayerNorm that linear layers read")
    return found


def _formless(model: PreTrainedModel, why: str) -> ConversionError:
    name = type(model).__name__
    return ConversionError(f"{name} has no Pre-CRMSNorm training form: {why}; train it as pre-rmsnorm")


def _unscaled(old: nn.LayerNorm) -> UnscaledCRMSNorm:
    d, weight = old.normalized_shape[0], old.weight
    new = UnscaledCRMSNorm(d - 1, old.eps, bias=old.bias is not None, dtype=weight.dtype, device=weight.device)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


@torch.no_grad()
def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A fresh Pre-LN model with one more number in its stream, in place; heads and hidden layers keep their widths.

    The new row or column of each parameter is drawn as the others of a GPT-2 or a ViT were; the rest stays what it is.
    """
    with torch.random.fork_rng(devices=[]):
        gauge = gauge_of(model)
    axes = {name: axis for name, axis, *_ in (*gauge.readers, *gauge.writers)}
    std = getattr(model.config, "initializer_range", 0.02)
    depth = getattr(model.config, "num_hidden_layers", 1)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name in [first for first, *_ in names.values()]:  # a tied head once
        old, (module, last) = model.get_parameter(name), held_by(model, name)
        if isinstance(module, nn.LayerNorm):
            fill = torch.tensor([1.0 if last == "weight" else 0.0]).to(old)
            setattr(module, last, nn.Parameter(torch.cat([old, fill]), old.requires_grad))
            module.normalized_shape = (len(old) + 1,)
        elif (axis := axes.get(name)) is not None:
            size = [1 if i == axis else n for i, n in enumerate(old.shape)]
            scale = std / (2 * depth) ** 0.5 if last == "weight" and ".c_proj." in name else std
            new = torch.zeros(size) if last == "bias" else torch.randn(size) * scale
            value = nn.Parameter(torch.cat([old, new.to(old)], axis), old.requires_grad)
            for shared in names[old]:
                reshape(model, shared, value)
    return model
