"""The time of norms inside a running model, where matrix products' noise does not hide it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normgeo.bench.controls import given
from normgeo.kernels import norm_ops
from normgeo.system.timing import Stopwatch

__all__ = ["NormTimer"]

ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}


class NormTimer(TorchFunctionMode):
    """While inside, adds up the time that a model spends in its norms and in residual additions.

    Fused kernels do both at once, so that only the sum of both can be compared. A residual addition is one of two
    tensors that both have the shape of what a norm was given before. Eager models only: compiled code passes by.

    Args:
        model: it is as it was afterwards.
        norms: names of its norms.
        watch: what adds up the time.
    """

    def __init__(self, model: nn.Module, norms: Sequence[str], watch: Stopwatch) -> None:
        super().__init__()
        self._norms = {id(module): module for module in map(model.get_submodule, norms)}
        self._watch = watch
        self._shapes: set[torch.Size] = set()
        self._patches = ExitStack()

    def __enter__(self) -> NormTimer:
        # where classes keep it: an optimized model's norms have a forward of their own, which need not compute anything
        kinds = {type(module) for module in self._norms.values()}
        for cls in {next(c for c in kind.__mro__ if "forward" in vars(c)) for kind in kinds}:
            self._patches.enter_context(patch.object(cls, "forward", self._of_norms(cls.forward)))
        self._patches.enter_context(patch.object(norm_ops, "add_norm_", partial(self._alone, norm_ops.add_norm_)))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        self._shapes.clear()

    def _of_norms(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._norms:
                return forward(module, *args, **kwargs)
            self._shapes.add(given(args, kwargs).shape)
            return self._alone(forward, module, *args, **kwargs)

        return timed

    def _alone(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time a call whose operations the mode does not look at: that would take time too."""
        with torch._C.DisableTorchFunction():  # pyright: ignore
            return self._watch(function, *args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        timed = func in ADDITIONS and self._residual(*args, **named)
        return self._watch(func, *args, **named) if timed else func(*args, **named)

    def _residual(self, input: Any, other: Any = None, **_: Any) -> bool:
        return all(isinstance(value, Tensor) and value.shape in self._shapes for value in (input, other))
