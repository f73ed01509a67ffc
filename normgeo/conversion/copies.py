"""Whether a copy of a model runs on weights of its own: functions around the model itself are copied as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normgeo.errors import ModelError

__all__ = ["around_another", "independent"]


def around_another(copied: nn.Module) -> str:
    """What to say of functions put into a copy that run the model it was copied from: copying leaves functions be."""
    inside = {id(value) for value in (*copied.modules(), *copied.parameters())}
    for name, module in copied.named_modules():
        for attribute, function in vars(module).items():
            if isinstance(function, FunctionType) and any(id(held) not in inside for held in _held(function, set())):
                place = f"{name}.{attribute}" if name else attribute
                return (
                    f"; {place} is a function around the model itself, which a copy does not run on its own weights: "
                    "make it a method of its class, or bind it by types.MethodType"
                )
    return ""


class _Reads(TorchDispatchMode):
    """Notices whether any operation reads, or writes, one of these places in memory."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.memory, self.found = memory, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self.found = self.found or not self.memory.isdisjoint(_memory(given))
        return func(*args, **(kwargs or {}))


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    """Where tensors are, but for empty ones and those that have several places, as sparse ones."""
    return {x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided and x.numel()}


@contextmanager
def independent(copied: nn.Module, model: nn.Module) -> Iterator[None]:
    """While inside, passes of a copy have to be on weights of its own.

    In another dtype weights of the model do not fit what they are multiplied by; in the same one they would pass unseen
    for what is changed in the copy.

    Raises:
        ModelError: they read weights of the model that it is a copy of.
    """
    with _Reads(_memory(model.parameters()) - _memory(copied.parameters())) as reads:
        yield
    if reads.found:
        hint = around_another(copied)
        raise ModelError(f"a copy of {type(model).__name__} reads weights of the model that it is a copy of{hint}")


def _held(function: FunctionType, seen: set[int]) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters that a function is around: by its closure, or by a global name."""
    seen.add(id(function))
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a name that has no value yet
        return
    for value in (*found.nonlocals.values(), *found.globals.values()):
        value = getattr(value, "__self__", value)  # of a bound method
        if isinstance(value, (nn.Module, nn.Parameter)):
            yield value
        elif isinstance(value, FunctionType) and id(value) not in seen:
            yield from _held(value, seen)
