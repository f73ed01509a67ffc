"""One forward pass, written down: which modules were called, in which order, on which tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from normgeo.errors import ModelError, NormGeoError
from normgeo.models import default_dtype, uncompiled

__all__ = ["Call", "Trace", "evaluating", "is_leaf", "traced"]


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: the module's dotted name.
        began, ended: when, counted in beginnings and ends of calls.
        inputs: the tensors of floating point that it was given.
        output: what it gave.
        leaf: whether the module has no others inside.
        weight: whether it multiplies with matrices of its own, as leaves do, and torch's attention. What other modules
            own beside those inside of them (state-space mixers, hyper-connections) is not in the branch.
        attends: whether it mixes tokens by their scores, with matrices of its own or of modules inside.
    """

    name: str
    began: int
    inputs: list[Tensor]
    ended: int = 0
    output: Any = None
    leaf: bool = False
    weight: bool = False
    attends: bool = False

    def feeds(self, other: Call) -> bool:
        """Whether the other call reads this one's output, or a view of it."""
        return _storage(self.output) in {_storage(t) for t in other.inputs}

    def holds(self, other: Call) -> bool:
        """Whether the other call is made within this one."""
        return self.began < other.began and other.ended < self.ended

    @property
    def changes(self) -> bool:
        """Whether it makes something else of what it is given, which dropout does not in evaluation."""
        return not (self.leaf and isinstance(self.output, Tensor) and self.feeds(self))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Trace:
    """Everything that happened in one forward pass.

    Attributes:
        calls: in the order in which they began.
        lists: names of the modules that list others (`ModuleList`, `Sequential`).
    """

    calls: list[Call] = field(default_factory=list)
    lists: set[str] = field(default_factory=set)

    @cached_property
    def layers(self) -> list[Call]:
        """The calls of what is in a list and has modules inside; of those within each other the outermost is first."""
        return [c for c in self.calls if not c.leaf and _listed(c.name, self.lists)]

    def running(self, call: Call) -> Call | None:
        """The outermost layer that runs while a module is called."""
        return next((layer for layer in self.layers if layer.holds(call)), None)

    def layer_of(self, name: str) -> tuple[str, int] | None:
        """The outermost list of modules that a name passes through, and the index in it."""
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[:i]) in self.lists:
                return ".".join(parts[:i]), int(part)
        return None


def _listed(name: str, lists: set[str]) -> bool:
    parent, _, index = name.rpartition(".")
    return index.isdigit() and parent in lists


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no others inside."""
    return next(module.children(), None) is None


class _Attention(TorchFunctionMode):
    """Notes which call weighs tokens by their scores: a softmax of one score for every pair, or torch's attention."""

    def __init__(self, running: list[Call], matrices: set[str]) -> None:
        super().__init__()
        self.running, self.matrices = running, matrices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function gives."""
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        pairs = name == "softmax" and out.ndim > 2 and out.shape[-1] == out.shape[-2] > 1
        if pairs or name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            owner = next((call for call in reversed(self.running) if call.name in self.matrices), None)
            if owner is not None:
                owner.attends, owner.weight = True, owner.weight or name.startswith("multi_head")
        return out


@contextmanager
def _hooked(model: nn.Module, trace: Trace) -> Iterator[None]:
    clock, stack = iter(range(1 << 62)), []

    def before(name: str, module: nn.Module) -> Any:
        leaf, matrix = is_leaf(module), any(p.ndim > 1 for p in module.parameters(recurse=False))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(name, next(clock), _tensors([*args, *kwargs.values()]), leaf=leaf, weight=leaf and matrix)
            trace.calls.append(call)
            stack.append(call)

        return hook

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = stack.pop()
        call.ended, call.output = next(clock), output

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                trace.lists.add(name)
            hooks.enter_context(module.register_forward_pre_hook(before(name, module), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        matrices = {n for n, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters())}
        hooks.enter_context(_Attention(stack, matrices))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While inside, the model is in evaluation mode; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def traced(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Trace:
    """What happens in one forward pass on these inputs.

    Raises:
        ModelError: the model fails on them.
    """
    trace = Trace()
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        with torch.no_grad(), evaluating(model), _hooked(model, trace), default_dtype(model.dtype), uncompiled():
            model(**options | inputs)
    except NormGeoError:  # which says itself what to do
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} failed on the inputs { ({k: tuple(v.shape) for k, v in inputs.items()}) }: "
            f"{type(error).__name__}: {str(error)[:200]}; in Python, pass inputs=... that it accepts"
        ) from error
    return trace
