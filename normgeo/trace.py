"""One forward pass, written down: which modules were called, in which order, on which tensors."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from normgeo.errors import ModelError, NormGeoError, said
from normgeo.functional import TORCHS, FunctionNorm, function_name, function_norm, levels, rounds
from normgeo.models import default_dtype, uncompiled, widened
from normgeo.wrapping import Wrapped

__all__ = ["Call", "Function", "Trace", "evaluating", "is_leaf", "traced"]


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: the module's dotted name.
        began, ended: when, counted in beginnings and ends of calls.
        inputs: the tensors of floating point that it was given.
        output: what it gave.
        leaf: whether the module has no others inside.
        weight: whether it multiplies with matrices of its own, as leaves do, and attention that calls no module inside
            for it: by torch's function, or by scores behind which it goes on with modules, as dropout or a norm. What
            other modules own beside those inside of them (state-space mixers, hyper-connections) is not in the branch.
        matrices: whether it or modules inside have matrices.
        scored: when it last weighed tokens by their scores, with matrices of its own or of modules inside; 0: never.
        by_torch: whether that was by a function of torch's.
        crosses: whether a function of torch's that has the matrices weighed what the call around it was given as well,
            behind its first argument.
        reads: the memory of its inputs, and of what they are casts, copies or modulations of, or were joined of.
    """

    name: str
    began: int
    inputs: list[Tensor]
    ended: int = 0
    output: Any = None
    leaf: bool = False
    weight: bool = False
    matrices: bool = False
    scored: int = 0
    by_torch: bool = False
    crosses: bool = False
    reads: set[int] = field(default_factory=set)

    def feeds(self, other: Call) -> bool:
        """Whether the other call reads this one's output: a view, cast, copy or modulation of it, or a join."""
        return _storage(self.output) in other.reads

    def reads_from(self, tensor: Tensor) -> bool:
        """Whether it reads this tensor."""
        return _storage(tensor) in self.reads

    def holds(self, other: Call) -> bool:
        """Whether the other call is made within this one."""
        return self.began < other.began and other.ended < self.ended

    @property
    def changes(self) -> bool:
        """Whether it makes something else of what it is given, which dropout does not in evaluation."""
        return not (self.leaf and isinstance(self.output, Tensor) and self.feeds(self))


@dataclass(eq=False)
class Function:
    """Vectors that the code of a module standardizes itself.

    Attributes:
        owner: the call of the module.
        call: of torch's function for it, or of the last that it is written out with; as if that were a module's.
        norm: what it does; None where that does not show: its gains are computed, or it is written out.
    """

    owner: Call
    call: Call
    norm: FunctionNorm | None = None


def _storage(tensor: Tensor) -> int:
    """Where a tensor's numbers are; of one that has none, as in `torch.func`, a number of its own.

    Of one around another, as the part of a tensor that lies with this process, they are where that one's are.
    """
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


@dataclass
class Trace:
    """Everything that happened in one forward pass.

    Attributes:
        calls: in the order in which they began.
        functions: what may be norms that are no modules, in that order.
        sums: the memory of sums of two tensors as large as each other, as a residual stream's.
        lists: names of the modules that list others (`ModuleList`, `ModuleDict`, `Sequential`).
    """

    calls: list[Call] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    sums: set[int] = field(default_factory=set)
    lists: set[str] = field(default_factory=set)

    @cached_property
    def layers(self) -> list[Call]:
        """The calls of what is in a list and has modules inside; of those within each other the outermost is first.

        What multiplies by no matrices, as a module around a norm that has its gain, is a part of a layer.
        """
        listed = [c for c in self.calls if not c.leaf and _listed(c.name, self.lists)]
        return [c for c in listed if c.matrices or any(c.holds(other) for other in self.calls if other.weight)]

    @cached_property
    def runs(self) -> dict[str, list[Call]]:
        """The calls of the layers of each list."""
        runs = defaultdict[str, list[Call]](list)
        for layer in self.layers:
            runs[layer.name.rpartition(".")[0]].append(layer)
        return dict(runs)

    def numbered(self) -> dict[Call, tuple[int, int]]:
        """Which of those by its name every call is, and how many there are, counted as hooks count them."""
        functions, names = {f.call for f in self.functions if f.norm is not None}, defaultdict[str, list[Call]](list)
        for call in sorted({*self.calls, *functions}, key=lambda c: c.began):
            names[call.name].append(call)
        return {call: (i, len(alike)) for alike in names.values() for i, call in enumerate(alike)}

    def running(self, call: Call) -> Call | None:
        """The outermost layer that runs while a module is called."""
        return next((layer for layer in self.layers if layer.holds(call)), None)

    def adds(self, call: Call) -> bool:
        """Whether a module is an addition, as of a residual stream: one without weights that gives a sum."""
        return call.leaf and not call.weight and isinstance(call.output, Tensor) and _storage(call.output) in self.sums

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
    """Whether a module has no others inside but those that make its parameters, where they are parametrized."""
    return all(name == "parametrizations" for name, _ in module.named_children())


ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
ADDS = {"add", "add_"}
MODULATES = {"mul", "multiply", "add", "addcmul"}
"""What scales and shifts a tensor by smaller ones, as adaptive norms do."""
SCALES = {"mul", "multiply", "div", "divide", "true_divide", "normalize", "group_norm"}
"""What a norm that is written out ends with, before its gains."""
JOINS = {"cat", "concat", "concatenate"}
SAME = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "all_gather_into_tensor"}
"""What gives the same again, cast or copied, or what all processes have of it."""


class _Functions(TorchFunctionMode):
    """Notes which call weighs tokens by their scores, what is made of what, and norms that are no modules.

    Scores are a softmax of one for every pair of tokens, or torch's attention. A softmax of what comes straight out of
    a matrix is a router's, whose experts may be as many as tokens.
    """

    def __init__(self, trace: Trace, running: list[Call], matrices: set[str], clock: Iterator[int]) -> None:
        super().__init__()
        self.trace, self.running, self.matrices, self.clock = trace, running, matrices, clock
        self.made: set[int] = set()  # by modules without others inside, whose outputs the trace keeps
        self.sources: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # memory that is freed is given to others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the function gives."""
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        given = next((value for value in args if isinstance(value, Tensor)), None)
        if name in SAME and given is not None and isinstance(out, Tensor):
            self._is_made_of(out, given)
        elif name in JOINS and isinstance(out, Tensor):
            self._is_made_of(out, *(args[0] if args else kwargs["tensors"]))
        elif name in ATTENTION or (name == "softmax" and given is not None and self._scores(given)):
            owner = next((call for call in reversed(self.running) if call.name in self.matrices), None)
            if owner is not None:
                owner.scored, owner.by_torch = next(self.clock), name in ATTENTION
                if name == "multi_head_attention_forward":
                    owner.crosses = self._given(_storage(args[2]), owner)
        elif self.running and func in TORCHS:
            self._norm(TORCHS[func], out, function_norm(TORCHS[func], args, kwargs))
        elif self.running and name == "native_layer_norm":  # gives means and scales too: no norm that is measured
            self._norm(name, out[0], None)
        elif self.running and isinstance(out, Tensor):
            self._written(name, [x for x in args if isinstance(x, Tensor) and x.numel() == out.numel()], out)
        return out

    def _is_made_of(self, out: Tensor, *given: Tensor) -> None:
        found, memory = set[int](), _storage(out)
        for source in map(_storage, given):
            found |= self.sources.get(source, {source} & self.made)  # not of weights, which are large
        if memory not in found and found:
            self.sources[memory] = found
            self._kept.append(out)

    def _written(self, name: str, given: list[Tensor], out: Tensor) -> None:
        """Note sums, modulations and norms in the code of a module, by what is given that is as large as what comes."""
        owner = self.running[-1]
        if name in ADDS and len(given) == 2:
            self.trace.sums.add(_storage(out))
            self.made.add(_storage(out))
            self._kept.append(out)
        elif owner.leaf and not owner.weight:  # what such a module does as a whole is looked at
            return
        elif name in MODULATES | SCALES and len(given) == 1:
            if name in MODULATES:
                self._is_made_of(out, given[0])
            if name in SCALES and levels(given[0], out) and not any(rounds(x, out) for x in owner.inputs):
                self._norm(name, out, None)

    def _norm(self, name: str, out: Tensor, found: tuple[Tensor, FunctionNorm] | None) -> None:
        owner, begins, (x, norm) = self.running[-1], next(self.clock), found or (None, None)
        call = Call(function_name(owner.name, name), begins, [] if x is None else [x], next(self.clock), out, leaf=True)
        call.reads = self.read(call.inputs)
        self.trace.functions.append(Function(owner, call, norm))
        self.made.add(_storage(out))

    def read(self, inputs: list[Tensor]) -> set[int]:
        """The memory of tensors, and of what they are made of."""
        memory = {_storage(x) for x in inputs}
        return memory.union(*(self.sources.get(m, ()) for m in memory))

    def _given(self, memory: int, owner: Call) -> bool:
        """Whether a call around this one was given that memory, but not as what comes first."""
        for call in reversed(self.running[: self.running.index(owner)]):
            given = [_storage(x) for x in call.inputs]
            if memory in given:
                return memory != given[0]
        return False

    def _scores(self, x: Tensor) -> bool:
        square = x.ndim > 1 and x.shape[-1] > 1 and x.shape[-1] - x.shape[-2] in (0, 1)  # 1: a sink
        weights = (c for c in reversed(self.trace.calls) if c.leaf and c.weight and isinstance(c.output, Tensor))
        return square and not any(_storage(call.output) == _storage(x) for call in weights)


@contextmanager
def _hooked(model: nn.Module, trace: Trace) -> Iterator[None]:
    clock, stack, here = iter(range(1, 1 << 62)), list[Call](), threading.get_ident()  # others may run the model too
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
    own = {name for name, m in modules.items() if any(p.ndim > 1 for p in m.parameters(recurse=is_leaf(m)))}
    matrices = {name for name, m in modules.items() if any(p.ndim > 1 for p in m.parameters())}
    functions = _Functions(trace, stack, matrices, clock)

    def before(name: str, module: nn.Module) -> Any:
        leaf = is_leaf(module)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if threading.get_ident() != here:  # torch may call it without kwargs there, while it is registered here
                return
            given = _tensors([*args, *(kwargs or {}).values()])
            call = Call(name, next(clock), given, leaf=leaf, weight=leaf and name in own, matrices=name in matrices)
            call.reads = functions.read(call.inputs)
            trace.calls.append(call)
            stack.append(call)

        return hook

    def after(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if threading.get_ident() != here:
                return
            if not stack or stack[-1].name != name:  # another hook refused it before it began
                return
            call = stack.pop()
            call.ended, call.output = next(clock), output
            if call.leaf and isinstance(output, Tensor):
                functions.made.add(_storage(output))
            if output is None and sys.exc_info()[1] is not None:  # it raised; somebody may go on
                trace.calls[:] = [c for c in trace.calls if c is not call and not call.holds(c)]
                trace.functions[:] = [f for f in trace.functions if not call.holds(f.call)]
            within = [c for c in trace.calls if call.holds(c)] if call.scored and name in own else []
            goes_on = any(c.began > call.scored for c in within) and not _listed(name, trace.lists)
            if name in own and (call.by_torch or goes_on) and not any(c.weight for c in within):
                call.weight = True

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                trace.lists.add(name)
            hooks.enter_context(module.register_forward_pre_hook(before(name, module), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after(name), always_call=True))
        hooks.enter_context(functions)
        yield


_switching = threading.Lock()
_evaluated: dict[int, int] = {}  # how many are in `evaluating` of a module that was in training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While inside, the model is in evaluation mode; afterwards every module is in the mode it was in."""
    with _switching:
        changed = [module for module in model.modules() if module.training or id(module) in _evaluated]
        for module in changed:
            _evaluated[id(module)] = _evaluated.get(id(module), 0) + 1
    try:
        model.eval()  # which a module may refuse after others have gone into evaluation mode
        yield
    finally:
        with _switching:
            for module in changed:
                _evaluated[id(module)] -= 1
                if not _evaluated[id(module)]:  # else another thread is not done with it
                    del _evaluated[id(module)]
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
        absent = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
        hint = f"its {absent} is on the meta device: load it" if absent else _given_instead(model, error)
        whole = model.module if isinstance(model, Wrapped) else model
        raise ModelError(
            f"{type(whole).__name__} failed on the inputs { ({k: tuple(v.shape) for k, v in inputs.items()}) }: "
            f"{said(error)}; {hint}"
        ) from error
    return trace


def _given_instead(model: PreTrainedModel, error: Exception) -> str:
    parts = model.module.named_modules() if isinstance(model, Wrapped) else ()
    inner = next((name for name, part in parts if isinstance(part, PreTrainedModel)), None)
    beside = f", or give the model within, its .get_submodule({inner!r}), instead" if inner else ""
    return f"{widened(model, error)}in Python, pass inputs=... that it accepts{beside}"
