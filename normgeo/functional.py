"""Norms that are no modules: torch's `layer_norm` and `rms_norm`, called in the code of one.

Such a norm goes by the name of the module whose code calls it and of the function, as `transformer.h.0.rms_norm()`. Its
gamma and beta are parameters of some module, or it has none; one whose gains are computed is not measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["TORCHS", "FunctionNorm", "function_name", "function_norm", "function_of", "levels", "rounds", "watched"]

FUNCTIONS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
"""torch's norms, and their parameters in order."""

TORCHS: dict[Any, str] = {
    getattr(where, name): name for where in (nn.functional, torch, torch.ops.aten) for name in FUNCTIONS
}
"""What is called where one of them is; libraries have functions of the same names, with other parameters."""


class FunctionNorm(nn.Module):
    """A call of torch's `layer_norm` or `rms_norm`, as a module.

    Args:
        function: its name.
        d: width of the vectors.
        eps: None for torch's own, which is that of the input's dtype.
        weight, bias: gamma and beta; None where it has none.
    """

    def __init__(
        self,
        function: str,
        d: int,
        eps: float | None,
        weight: nn.Parameter | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.function, self.d, self.eps, self.weight, self.bias = function, d, eps, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """What the function gives."""
        options = {"weight": self.weight, "bias": self.bias, "eps": self.eps}
        given = {name: value for name, value in options.items() if value is not None}
        return getattr(nn.functional, self.function)(x, (self.d,), **given)


_Found = tuple[Tensor, FunctionNorm]


def function_name(owner: str, function: str) -> str:
    """How a norm is called that the code of a module (its dotted name; "" for the model) calls as a function."""
    return f"{owner}.{function}()" if owner else f"{function}()"


def function_of(name: str) -> tuple[str, str] | None:
    """The owner's name and the function's of a norm that is called as a function; None of one that is a module."""
    owner, _, function = name.rpartition(".")
    return (owner, function.removesuffix("()")) if function.endswith("()") else None


def function_norm(function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Found | None:
    """The input of a call of torch's norm, and the norm; None where gains are no parameters, or it has several axes."""
    given = dict(zip(FUNCTIONS[function], args, strict=False)) | dict(kwargs)
    shape = given["normalized_shape"]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    weight, bias = given.get("weight"), given.get("bias")
    if len(shape) != 1 or any(gain is not None and not isinstance(gain, nn.Parameter) for gain in (weight, bias)):
        return None
    eps = given.get("eps", 1e-5 if function == "layer_norm" else None)
    return given["input"], FunctionNorm(function, shape[0], eps, weight, bias)


Hooks = tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]


class _Intercepting(TorchFunctionMode):
    """Shows what goes into the norms of some names, and what comes out."""

    def __init__(self, hooks: Mapping[str, Hooks], ours: Callable[[], bool]) -> None:
        super().__init__()
        self.hooks, self.ours, self.running = hooks, ours, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function gives."""
        kwargs, function = kwargs or {}, TORCHS.get(func)
        if function is None or not self.running or not self.ours():
            return func(*args, **kwargs)
        hooks, found = self.hooks.get(function_name(self.running[-1], function)), function_norm(function, args, kwargs)
        if hooks is None or found is None:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)  # which may raise, and somebody go on
        hooks[0](found[0])
        hooks[1](out)
        return out


@contextmanager
def watched(model: nn.Module, hooks: Mapping[str, Hooks], ours: Callable[[], bool] | None = None) -> Iterator[None]:
    """While inside, norms show what they are given and what they give, in every call; afterwards nothing stays.

    Args:
        model: that has the norms.
        hooks: by the names of norms, modules or functions: what is given the input, and the output.
        ours: whether what runs is what is watched; None: whatever this thread runs, for others may run the model too.
    """
    modules, thread = dict(model.named_modules()), threading.get_ident()
    ours = ours or (lambda: threading.get_ident() == thread)
    with ExitStack() as registered:
        for name in hooks:
            if function_of(name) is None:
                before, after = _of_module(*hooks[name], ours)
                registered.enter_context(modules[name].register_forward_pre_hook(before, with_kwargs=True))
                registered.enter_context(modules[name].register_forward_hook(after))
        if functions := {name: pair for name, pair in hooks.items() if function_of(name) is not None}:
            _intercept(modules, functions, registered, ours)
        yield


def _of_module(
    before: Callable[[Tensor], Any], after: Callable[[Tensor], Any], ours: Callable[[], bool]
) -> tuple[Any, Any]:
    def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if ours():  # while it is registered, torch may call it without kwargs in another thread
            before(next(v for v in (*args[:1], *(kwargs or {}).values()) if isinstance(v, Tensor)))

    def post(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if ours():
            after(output)

    return pre, post


def _intercept(
    modules: Mapping[str, nn.Module], hooks: Mapping[str, Hooks], registered: ExitStack, ours: Callable[[], bool]
) -> None:
    """Follow which module runs, and show the functions that it calls."""
    mode = _Intercepting(hooks, ours)

    def entered(name: str) -> Any:
        def hook(*_: Any) -> None:
            if not ours():
                return
            if not mode.running:
                mode.__enter__()  # while the model runs, not around it, where other code would come in between
            mode.running.append(name)

        return hook

    def left(name: str) -> Any:
        def hook(*_: Any) -> None:
            if ours() and mode.running and mode.running[-1] == name:  # else another hook refused it before it began
                mode.running.pop()
                if not mode.running:
                    mode.__exit__(None, None, None)

        return hook

    def interrupted() -> None:  # by what torch calls no hooks for
        if mode.running:
            mode.running.clear()
            mode.__exit__(None, None, None)

    registered.callback(interrupted)
    for name, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):  # takes no such hooks
            # around the norm's own hooks: what sinks call is not the model's
            registered.enter_context(module.register_forward_pre_hook(entered(name), prepend=True))
            registered.enter_context(module.register_forward_hook(left(name), always_call=True))


def levels(x: Tensor, y: Tensor) -> bool:
    """Whether tokens' vectors x [..., d] of different lengths come out of a function, as y, all of one length.

    Where activations are quantized it is their largest numbers, or all that they range over, that become the same.
    """
    if x.shape != y.shape or x.ndim not in (2, 3) or x.shape[-1] < 4 or not y.is_floating_point():
        return False
    if x.numel() < 3 * x.shape[-1]:
        return False
    try:
        x, y = _here(x).float(), _here(y).float()
        low, high = y.aminmax(dim=-1)
        sizes = x.norm(dim=-1), y.norm(dim=-1), torch.maximum(-low, high), high - low
        before, after, largest, range_ = (float(size.std() / size.mean()) for size in sizes)
    except RuntimeError:  # there are no numbers to look at: it is transformed, or on no device
        return False
    return before > 1e-3 and after < min(0.1 * before, largest, range_)


def rounds(x: Tensor, y: Tensor) -> bool:
    """Whether y [..., d] are the numbers of x, but for what quantizing them and back leaves out.

    So may be what a norm gives of vectors that have its length already; but for their means those are multiples.
    """
    x, y = _here(x), _here(y)
    if x.numel() != y.numel() or not x.is_floating_point():
        return False
    exact = max(1e-4, *(torch.finfo(z.dtype).eps / 2 for z in (x, y)))
    x, y = x.reshape(y.shape).to(y.device).float(), y.float()  # what a module was given may lie on another device
    if (x - y).norm() >= 0.1 * x.norm():
        return False
    u, v = (z - z.mean(-1, keepdim=True) for z in (x, y))
    along = (u * v).sum(-1, keepdim=True) / u.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return bool((v - along * u).norm() > exact * y.norm())


def _here(x: Any) -> Tensor:
    """Of a tensor that is divided among processes the part that is here: sums over them the model makes once."""
    return x.to_local() if hasattr(x, "to_local") else x
