r"""What a converted model is made of: from a native model and a recipe to the model's structure.

This module needs torch and `norms.py` alone, and knows no architecture: the checkpoint of a converted model carries a
copy of both, so that it loads without this package. A recipe is plain JSON:

    to         rmsnorm, crmsnorm or naive-rmsnorm
    norms      name -> {kind: rmsnorm | crmsnorm, d, eps, affine, bias, offset, centered, padded, expand}
    recenter   [module, input | output, argument, keep | drop | pad]: where a mean is removed explicitly
    tables     buffers whose centered values belong to the checkpoint
    biases     modules that got a bias they did not have (a norm's beta, folded)
    heads      tied heads: name -> width of what they read
    shapes     parameter -> its new shape, null for an axis that stays as it is
    folded     norm -> the parameters of its readers, that its gamma and beta went into
    scales     what multiplied writers of what is compressed (LayerScale)
    writers, readers   [parameter, axis] of what is compressed
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from normgeo.norms import CRMSNorm, RMSNorm

__all__ = [
    "OF_WEIGHTS", "PREFIX", "SIZES", "TiedHead", "add_bias", "converted_class", "converted_config", "held_by",
    "is_compressed", "keep_hooks", "part_of", "put", "rebuild", "recenter_at", "replaced", "reshape",
]  # fmt: skip

PREFIX = "normgeo_"
"""What the `model_type` of a converted checkpoint begins with."""
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
OF_WEIGHTS = BasePruningMethod, WeightNorm, SpectralNorm
"""Hooks that make a module's weights and look at no hidden states; a norm in its place has plain weights."""

SIZES = {
    "in_features": 1, "out_features": 0, "num_embeddings": 0, "embedding_dim": 1, "nx": 0, "nf": 1, "out_channels": 0,
}  # fmt: skip
"""Attributes of torch's and transformers' layers that repeat a size of their weight, and the axis they repeat."""


class TiedHead(nn.Linear):
    r"""A head that shares its weight E - m 1^T with a centered embedding and still gives the logits of E.

    E y = (E - m 1^T) y + m (1^T y), with m the mean of each row of E: a correction of rank one.
    """

    mean: nn.Parameter

    @classmethod
    def of(cls, head: nn.Module) -> TiedHead:
        """A tied head in the place of a linear one, sharing its weight and bias."""
        weight, bias = head.weight, getattr(head, "bias", None)
        new = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")  # pyright: ignore
        new.weight, new.bias = weight, bias  # pyright: ignore
        mean = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)  # pyright: ignore
        new.mean = nn.Parameter(mean, weight.requires_grad)  # pyright: ignore
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., d].

        Raises:
            ValueError: the vocabulary was resized.
        """
        if len(self.mean) != len(self.weight):
            raise ValueError(
                f"the vocabulary of {len(self.mean)} tokens was resized to {len(self.weight)}, which a head that is "
                "tied to centered embeddings does not follow: resize the original, or convert without keeping the tie"
            )
        logits = functional.linear(input, self.weight, self.bias)
        return logits + (input.sum(-1, keepdim=True) * self.mean).to(logits.dtype)  # narrower than these under autocast


def put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules in the places of those with these dotted names, under every name that each has.

    In evaluation torch's encoder layers call no module inside them, but compute LayerNorms of the weights of their
    norms, unless their activation is neither ReLU nor GELU: they are told that it is not.
    """
    new = {id(model.get_submodule(name)): module for name, module in modules.items()}
    _unnest(model, new)
    for parent in list(model.modules()):
        for key, module in [(key, new[id(old)]) for key, old in parent._modules.items() if id(old) in new]:
            setattr(parent, key, module)
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0


def _unnest(model: nn.Module, inside: Container[int]) -> None:
    """Have torch's encoders around modules of these ids hand on padding as it is, not nested: it would become zero."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(id(module) in inside for module in encoder.modules()):
            encoder.use_nested_tensor = False


def replaced(values: Any, index: int, new: Any) -> Any:
    """A tuple or list like this one with another value at an index."""
    parts = [*values[:index], new, *values[index + 1 :]]
    return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)


@cache
def _class(cls: type, how: str) -> type:
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**names, "__reduce_ex__": _reduced, "_recentered": (cls, how)})


def _kind(cls: type, how: str) -> type:
    """A class like this one, for modules that are recentered in this way, too."""
    base, before = getattr(cls, "_recentered", (cls, ""))
    return cls if how in before.split(", ") else _class(base, f"{before}, {how}" if before else how)


def _new(cls: type, how: str) -> Any:
    kind: Any = _class(cls, how)
    return kind.__new__(kind)


def _reduced(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickled by what its class is like."""
    return _new, self._recentered, self.__getstate__()


def _without_mean(value: Any, argument: int | str, mode: str) -> Any:
    """Recenter(x) = x - mu(x) 1 (*Pre-RMSNorm* section 3.1) of one of several values; then drop or zero the last."""
    if isinstance(value, (tuple, list)):
        return replaced(value, int(argument), _without_mean(value[int(argument)], 0, mode))
    wide = value if value.dtype == torch.float64 else value.float()
    wide = wide - wide.mean(-1, keepdim=True)
    if mode != "keep":
        wide = wide[..., :-1]
    if mode == "pad":
        wide = functional.pad(wide, (0, 1))
    return wide.to(value.dtype)


def _at_input(argument: int | str, mode: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(argument, str):
        given = kwargs.get(argument)  # an encoder's hidden states may be left out
        return args, kwargs if given is None else kwargs | {argument: _without_mean(given, 0, mode)}
    return args if args[argument] is None else _without_mean(args, argument, mode), kwargs


def _at_output(mode: str, _: nn.Module, args: Any, output: Any) -> Any:
    return _without_mean(output, 0, mode)


def recenter_at(
    model: nn.Module, module: str, side: str, argument: int | str = 0, mode: str = "keep"
) -> RemovableHandle:
    """Remove the mean of what goes into a module (an argument, by position or name) or comes out of it.

    The module gets a class of its own that is like its own: what `torch.compile` made of a module without this hook
    would be used for it as well, for it tells modules apart by their types and not by their hooks.
    """
    where = model.get_submodule(module)
    _unnest(model, {id(where)})
    if not is_parametrized(where):  # that has a class of its own already, and takes it back
        where.__class__ = _kind(type(where), f"{side} {argument} {mode}")
    if side == "input":
        return where.register_forward_pre_hook(partial(_at_input, argument, mode), with_kwargs=True)
    return where.register_forward_hook(partial(_at_output, mode))


def add_bias(module: nn.Module) -> None:
    """Give a linear layer a bias of zeros, in its weight's dtype."""
    weight: Any = module.weight
    size = weight.shape[SIZES["nf"] if hasattr(module, "nf") else SIZES["out_features"]]
    bias = torch.zeros(size, dtype=weight.dtype, device=weight.device)
    module.register_parameter("bias", nn.Parameter(bias, weight.requires_grad))


def held_by(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has what goes by this dotted name in a model, and the name that it has there."""
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner), last


def reshape(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by one of another shape, and the sizes that its module has noted of it."""
    module, last = held_by(model, name)
    old = getattr(module, last)
    for attribute, axis in SIZES.items():
        if last == "weight" and axis < old.ndim and getattr(module, attribute, None) == old.shape[axis]:
            setattr(module, attribute, value.shape[axis])
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, old.requires_grad)
    setattr(module, last, value)


def keep_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give a module the hooks of that in whose place it comes: the user's, and it may be recentered too."""
    for hooks in HOOKS:
        vars(new)[hooks].update({k: hook for k, hook in vars(old)[hooks].items() if not isinstance(hook, OF_WEIGHTS)})


def _norm(old: nn.Module, spec: dict[str, Any], like: Tensor) -> nn.Module:
    options = dict(spec)
    cls = {"rmsnorm": RMSNorm, "crmsnorm": CRMSNorm}[options.pop("kind")]
    own = next(old.parameters(), like)
    new = cls(**options, dtype=own.dtype, device=own.device)
    keep_hooks(new, old)
    new.train(old.training).requires_grad_(own.requires_grad)
    for name, parameter in new.named_parameters():  # where betas alone are trained, or none of them
        if isinstance(same := getattr(old, name, None), nn.Parameter):
            parameter.requires_grad_(same.requires_grad)
    return new


def is_compressed(model: Any) -> bool:
    """Whether a model's streams lack their last number (CRMSNorm)."""
    return (getattr(model.config, "normgeo", None) or {}).get("to") == "crmsnorm"


def rebuild(model: nn.Module, recipe: dict[str, Any]) -> None:
    """Give a native model the structure that the recipe tells; the values come with the checkpoint."""
    like, cut = next(model.parameters()), dict[Tensor, Tensor]()
    for name, sizes in recipe.get("shapes", {}).items():
        old = getattr(*held_by(model, name))
        if old not in cut:  # what is tied stays so
            part = tuple(slice(size) for size in sizes)
            value = old.detach()[part].clone(memory_format=torch.contiguous_format)
            cut[old] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        reshape(model, name, cut[old])
    for name in recipe.get("biases", ()):
        add_bias(model.get_submodule(name))
    norms = {name: _norm(model.get_submodule(name), spec, like) for name, spec in recipe["norms"].items()}
    put(model, norms | {name: TiedHead.of(model.get_submodule(name)) for name in recipe.get("heads", ())})
    for name in recipe.get("tables", ()):
        module, last = held_by(model, name)
        module._non_persistent_buffers_set.discard(last)
        module._buffers[last] = module.get_buffer(last).detach().clone()  # an nn.Buffer says of itself it is not kept
    for place in recipe.get("recenter", ()):
        recenter_at(model, *place)


def part_of(recipe: dict[str, Any], model: Any) -> dict[str, Any]:
    """What a recipe says of a model that is loaded without its head, with another, or with a first one."""
    prefix, norms = model.base_model_prefix, recipe["norms"]
    start, base = f"{prefix}.", getattr(model, prefix, None) if prefix else None

    def has(module: Any, name: str) -> bool:
        return hasattr(module, name.partition(".")[0])

    if not prefix:
        return recipe
    if any(name.startswith(start) for name in norms):
        if base is not None:
            return _renamed(recipe, lambda name: name if has(model, name) else None)
        return _renamed(recipe, lambda name: name.removeprefix(start) if name.startswith(start) else None)
    if base is not None and not any(has(model, name) for name in norms):
        return _renamed(recipe, lambda name: start + name if has(base, name) else None)
    return recipe


def _renamed(recipe: dict[str, Any], new: Callable[[str], str | None]) -> dict[str, Any]:
    """A recipe with other names, without what gets none."""

    def own(names: Any) -> Any:
        cut = {to: name for name in names if (to := new(name)) is not None}
        return {to: names[name] for to, name in cut.items()} if isinstance(names, dict) else list(cut)

    named = {key: own(recipe[key]) for key in ("norms", "heads", "shapes", "biases", "tables") if key in recipe}
    places = [[to, *rest] for name, *rest in recipe.get("recenter", ()) if (to := new(name)) is not None]
    if isinstance(folded := recipe.get("folded"), dict):
        named["folded"] = {to: [new(reader) or reader for reader in readers] for to, readers in own(folded).items()}
    return recipe | named | {"recenter": places}


def _as_deep(recipe: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """What a recipe says of a model that is loaded with fewer layers, by `num_hidden_layers=4` or the like.

    Raises:
        ValueError: norms are folded into what is left out, or those left out into what is there, as the next layer.
    """

    def there(name: str) -> bool:
        module: Any = model
        for part in name.split("."):
            if isinstance(module, nn.ModuleList) and int(part) >= len(module):
                return False
            module = getattr(module, part, None)
        return True

    folded = recipe.get("folded", {})
    if not isinstance(folded, dict):  # of earlier versions, who tell of no readers: any
        folded = dict.fromkeys(folded, ("",))
    for name, readers in folded.items():
        if any(there(reader) != there(name) for reader in readers):
            raise ValueError(
                f"{name} is folded into what reads it, and the configuration tells of fewer layers: load all of them, "
                "or convert the original with fewer layers"
            )
    return _renamed(recipe, lambda name: name if there(name) else None)


def initialize(model: Any, native: type, config: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize a converted model as the native class does, and give it the structure that its recipe tells.

    Some heads look up by the class of the configuration what they are put on, and some models refuse any other:
    meanwhile it is the native one. Others, as generation, ask for the type of the model, which is the native one from
    then on; files have that of the class.
    """
    own = type(config)
    config.__class__ = vars(model)["config_class"] = own.__base__
    try:
        native.__init__(model, config, *args, **kwargs)
    finally:
        config.__class__ = own
        config.model_type = own.__base__.model_type  # pyright: ignore
        del vars(model)["config_class"]
    rebuild(model, _as_deep(part_of(config.normgeo, model), model))


@cache
def converted_config(native: type) -> type:
    """The native configuration class, as that of a converted model.

    It has another name than the native one, by which the Auto classes would take it for that.
    """
    body = {"model_type": PREFIX + native.model_type, "__reduce_ex__": _reduced_config}  # pyright: ignore
    return _named(native, body, f"Converted{native.__name__}")


@cache
def converted_class(native: type, config: type) -> type:
    """The native model class with the structure that its configuration's recipe tells.

    It has the name of the native one, by which transformers chooses the loss, and Trainer how labels are read.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialize(self, native, config, *args, **kwargs)

    settings = converted_config(config)
    return _named(native, {"__init__": __init__, "config_class": settings, "__reduce_ex__": _reduced_model})


def _named(native: type, body: dict[str, Any], name: str | None = None) -> type:
    about = {"__doc__": native.__doc__, "__module__": __name__, "_native": native}
    return type(name or native.__name__, (native,), about | body)


def _new_converted(native: type, config: type | None = None) -> Any:
    """An empty one of a class that is made here, and that pickle therefore does not find by its name."""
    kind: Any = converted_config(native) if config is None else converted_class(native, config)
    return kind.__new__(kind)


def _reduced_config(self: Any, protocol: int) -> tuple[Any, ...]:
    return _new_converted, (self._native,), self.__getstate__()


def _reduced_model(self: Any, protocol: int) -> tuple[Any, ...]:
    return _new_converted, (self._native, self.config_class._native), self.__getstate__()
