"""What the benchmark of inference runs: models of *Pre-RMSNorm*'s sizes, and each of them in several variants."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from normgeo.bench.controls import KernelLayerNorm, given
from normgeo.conversion.centering import SIDE
from normgeo.conversion.convert import convert
from normgeo.conversion.optimize import optimize
from normgeo.conversion.replacing import affine_of, replace_norms, spec_of, wide
from normgeo.conversion.shallow import gauge_of
from normgeo.converted import keep_hooks, put
from normgeo.errors import ModelError, NormGeoError
from normgeo.kernels import norm_ops
from normgeo.loading import load_model
from normgeo.models import seeded, shared_copy
from normgeo.norms import RMSNorm
from normgeo.sites import NormSite, find_sites

__all__ = [
    "DTYPES", "SIZES", "VARIANTS", "Bases", "available", "bases", "build", "check_variants", "derived", "in_dtype",
    "main_sites", "quantizer", "vectors_given",
]  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------


def _vit(d: int, depth: int, heads: int, patch: int = 16, mlp: int | None = None) -> PretrainedConfig:
    return ViTConfig(
        hidden_size=d, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=mlp or 4 * d,
        patch_size=patch, num_labels=1000,  # pyright: ignore
    )  # fmt: skip


def _gpt(d: int, depth: int, heads: int) -> PretrainedConfig:
    return GPT2Config(n_embd=d, n_layer=depth, n_head=heads, n_positions=2048, vocab_size=50257)


SIZES: dict[str, Callable[[], PretrainedConfig]] = {
    "vit-tiny": lambda: _vit(192, 12, 3), "vit-small": lambda: _vit(384, 12, 6), "vit-base": lambda: _vit(768, 12, 12),
    "vit-large": lambda: _vit(1024, 24, 16), "vit-huge": lambda: _vit(1280, 32, 16, 14),
    "vit-giant": lambda: _vit(1664, 48, 16, 14, 8192), "gpt-small": lambda: _gpt(768, 12, 12),
    "gpt-medium": lambda: _gpt(1024, 24, 16), "gpt-large": lambda: _gpt(1536, 24, 16),
    "gpt-xl": lambda: _gpt(2048, 24, 16), "gpt-2.7b": lambda: _gpt(2560, 32, 32),
}  # fmt: skip
"""ViTs of *Pre-RMSNorm* table 2 and GPTs of its figure 5, by name; GPT-3 XL's heads are those that divide its width."""


def build(
    name: str, *, device: str | None = None, seed: int = 0, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model in float32: of a size in `SIZES` with random weights, else what `load_model` finds by that name.

    Every gain and bias of a random model is off its initial value: gamma 1 and beta 0 would hide mistakes. Weights are
    drawn on the device, where billions take seconds: a GPU's are not the CPU's.

    Raises:
        ModelError: there is no such size and no such model, or a revision is given of a size.
    """
    if name not in SIZES:
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        return load_model(name, dtype=torch.float32, device=device, **options)
    if revision is not None:
        raise ModelError(f"{name} is made up, and has no revision {revision!r}")
    config, where = SIZES[name](), torch.device(device or "cpu")
    with seeded(seed, [where]), where, torch.no_grad():
        model = (ViTForImageClassification if isinstance(config, ViTConfig) else GPT2LMHeadModel)(config)  # pyright: ignore
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def main_sites(model: PreTrainedModel) -> list[NormSite]:
    """The norms of the main branch that are modules, each once; all of one kind.

    Raises:
        ModelError: there is none.
    """
    sites = {site.name: site for site in find_sites(model) if site.role not in SIDE and not site.is_function}
    kinds = {site.kind for site in sites.values()}
    if len(kinds) != 1:
        raise ModelError(f"{type(model).__name__} has {'both kinds' if kinds else 'none'} of norm; compare one kind")
    return list(sites.values())


# --- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16", "autocast", "int8", "int8-dynamic")
"""`autocast`: float32 weights under bfloat16 autocast; `int8`: weights quantized by torchao, activations in bfloat16;
`int8-dynamic`: activations quantized too, so that matrix products are of int8."""

QUANTIZED = {"int8": "Int8WeightOnlyConfig", "int8-dynamic": "Int8DynamicActivationInt8WeightConfig"}


def in_dtype(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """A model of float32 weights in one of `DTYPES`; the model itself where no weight changes.

    Raises:
        ModelError: there is no such dtype, or torchao is not installed.
    """
    if dtype not in DTYPES:
        raise ModelError(f"no dtype {dtype!r}; choose {', '.join(DTYPES)}")
    if dtype in ("float32", "autocast"):
        return model
    model, half = copy.deepcopy(model), torch.float16 if dtype == "float16" else torch.bfloat16
    for tensor in model.state_dict(keep_vars=True).values():  # tables that are made anew stay in float32
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(half)
    if quantize := quantizer(dtype):  # linear layers alone
        put(model, {name: _linear(module) for name, module in model.named_modules() if isinstance(module, Conv1D)})
        quantize(model)
    return model


def quantizer(dtype: str) -> Callable[[nn.Module], None] | None:
    """What quantizes a model's linear layers for one of `DTYPES`; None for those that need no such thing.

    Raises:
        ModelError: torchao is not installed.
    """
    if dtype not in QUANTIZED:
        return None
    try:
        torchao = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ModelError(f"{dtype} needs torchao: pip install 'normgeo[int8]'") from error
    return lambda model: torchao.quantize_(model, getattr(torchao, QUANTIZED[dtype])(version=2))


def _linear(conv: Any) -> nn.Linear:
    linear = nn.Linear(conv.nx, conv.nf, device="meta")
    linear.weight = nn.Parameter(conv.weight.T.contiguous(), requires_grad=False)
    linear.bias = conv.bias
    return linear


# --- variants ---------------------------------------------------------------------------------------------------------


class _TorchRMSNorm(nn.Module):
    """An RMSNorm of this package as torch has it: F.rms_norm, and its beta added."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        weight = norm.weight
        self.weight = weight if weight is None or not norm.offset else nn.Parameter(weight + norm.offset, False)
        self.bias, self.d, self.eps = norm.bias, norm.d, norm.eps
        keep_hooks(self, norm)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Gamma * x / sqrt(|x|^2 / d + eps) + beta of x [..., d]."""
        x = given(args, named)
        z = functional.rms_norm(x, (self.d,), self.weight, self.eps)
        return z if self.bias is None else z + self.bias


def _with_torch_norms(model: PreTrainedModel, sites: Sequence[NormSite]) -> PreTrainedModel:
    norms = {site.name: model.get_submodule(site.name) for site in sites}
    put(model, {name: _TorchRMSNorm(norm) for name, norm in norms.items() if isinstance(norm, RMSNorm)})
    return model


def _with_own_norms(model: PreTrainedModel, sites: Sequence[NormSite]) -> PreTrainedModel:
    norms = {site.name: spec_of(wide(model, site), site, centered=False) for site in sites}
    with torch.no_grad():
        replace_norms(model, sites, norms)
    return model


def _with_layernorm_kernels(model: PreTrainedModel, sites: Sequence[NormSite]) -> PreTrainedModel:
    old = {site: model.get_submodule(site.name) for site in sites}
    put(model, {site.name: KernelLayerNorm(*affine_of(norm, site), site.eps) for site, norm in old.items()})
    return model


def _fused(model: PreTrainedModel, _: Sequence[NormSite]) -> PreTrainedModel:
    return optimize(model)


class _NoNorm(nn.Module):
    """What gives its input, with the parameters of the norm that was there: Mamba's blocks read their dtype."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        for name, parameter in norm.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return given(args, named)


def _without_norms(model: PreTrainedModel, sites: Sequence[NormSite]) -> PreTrainedModel:
    put(model, {site.name: _NoNorm(model.get_submodule(site.name)) for site in sites})
    return model


@dataclass(frozen=True)
class Variant:
    """A way to compute what a model computes.

    Attributes:
        base: whose weights it runs: `original`, or a conversion.
        words: what it is.
        make: changes a shared_copy of the base in place; None where it is the base itself.
        equal: whether its outputs are the original's.
        layernorm: whether only models with LayerNorm have it.
    """

    base: str
    words: str
    make: Callable[[PreTrainedModel, Sequence[NormSite]], PreTrainedModel] | None = None
    equal: bool = True
    layernorm: bool = False


VARIANTS = {
    "original": Variant("original", "the model as transformers has it"),
    "original-kernel": Variant(
        "original", "LayerNorm by a kernel like RMSNorm's", _with_layernorm_kernels, layernorm=True
    ),
    "pre-rmsnorm": Variant("pre-rmsnorm", "this package's RMSNorm"),
    "pre-rmsnorm-torch": Variant("pre-rmsnorm", "the same with F.rms_norm", _with_torch_norms),
    "pre-crmsnorm": Variant("pre-crmsnorm", "CRMSNorm, width d - 1", layernorm=True),
    "pre-crmsnorm-padded": Variant("pre-crmsnorm-padded", "CRMSNorm, width d", layernorm=True),
    "fused": Variant("pre-rmsnorm", "additions and norms fused, in place", _fused),
    "no-norm": Variant("original", "without norms: the floor", _without_norms, equal=False),
}
"""What is compared, by name. `original` is what all are compared with: Pre-LN, or a model that has RMSNorm already."""


Bases = dict[str, PreTrainedModel]
"""Models of different weights, by `Variant.base`."""


def available(model: PreTrainedModel, sites: Sequence[NormSite]) -> list[str]:
    """The variants that there are of a model where it is: of kernels, only where they compile and take its device."""
    with torch.inference_mode():
        kernels = norm_ops.takes(torch.empty(1024, 1024, device=model.device))
    layernorm = sites[0].kind == "layernorm"
    without = {name for name, variant in VARIANTS.items() if variant.layernorm and not layernorm}
    without |= set() if kernels else {"original-kernel"}
    return [name for name in VARIANTS if name not in without]


def check_variants(original: PreTrainedModel, sites: Sequence[NormSite], variants: Sequence[str]) -> None:
    """Refuse variants that there are not of a model.

    Raises:
        NormGeoError: there is no such variant of this model.
    """
    there = available(original, sites)
    if unknown := [name for name in variants if name not in there]:
        raise NormGeoError(f"no variant {', '.join(unknown)} of {type(original).__name__}; it has {', '.join(there)}")


def bases(
    original: PreTrainedModel, sites: Sequence[NormSite], variants: Sequence[str],
    without: Callable[[str, NormGeoError], Any] | None = None,
) -> Bases:  # fmt: skip
    """The models whose weights these variants need, in the original's dtype; conversions are certified.

    Args:
        original: the model.
        sites: its norms.
        variants: what is to be made.
        without: told of a conversion that failed, which is then left out; None is that none may.

    Raises:
        NormGeoError: a conversion failed, or all of them.
    """
    is_layernorm = sites[0].kind == "layernorm"
    wanted = {VARIANTS[name].base for name in variants} - {"original"}
    if not is_layernorm:
        return {"original": original} | {name: _with_own_norms(shared_copy(original), sites) for name in wanted}
    gauge = gauge_of(original) if wanted else None
    options: dict[str, dict[str, Any]] = {
        "pre-rmsnorm": {}, "pre-crmsnorm": {"to": "crmsnorm"}, "pre-crmsnorm-padded": {"to": "crmsnorm", "padded": True}
    }  # fmt: skip
    found, failed = {"original": original}, {}
    for name in [name for name in options if name in wanted]:
        try:
            found[name] = convert(original, gauge=gauge, **options[name]).model
        except NormGeoError as error:
            failed[name] = error
    if failed and (without is None or len(found) == 1):
        raise next(iter(failed.values()))
    for name, error in failed.items():
        without(name, error)  # pyright: ignore[reportOptionalCall]
    return found


def derived(name: str, models: Bases, sites: Sequence[NormSite]) -> PreTrainedModel:
    """A variant in modules of its own around the weights of its base."""
    variant = VARIANTS[name]
    model = shared_copy(models[variant.base])
    return variant.make(model, sites) if variant.make else model


def vectors_given(model: PreTrainedModel, site: NormSite, inputs: dict[str, Tensor]) -> int:
    """How many vectors of each image the norms are given."""
    shapes: list[torch.Size] = []
    norm, note = model.get_submodule(site.name), lambda _, *of: shapes.append(given(*of).shape)
    with norm.register_forward_pre_hook(note, with_kwargs=True), torch.inference_mode():
        model(**inputs)
    return shapes[0][1:-1].numel()
