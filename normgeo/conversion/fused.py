"""One forward pass of an optimized model: what it knows of its stream, and what norms and additions do in it."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from normgeo.conversion.liveness import Operand, Written
from normgeo.errors import ConversionError
from normgeo.kernels import norm_ops

__all__ = ["NO_GRAD", "Stream", "added", "norm_forward"]

storage_users = torch._C._storage_Use_Count  # pyright: ignore
refcount = sys.getrefcount
is_inference = torch.is_inference_mode_enabled
is_grad_enabled = torch.is_grad_enabled  # looked up once; what is asked at every norm may take no longer than it saves

NOBODY = 0, 0, 0, 0
"""How many hold a residual, by references and aside, and what is added to it."""

NO_GRAD = "an optimized model is for inference: call it under torch.no_grad() or inference_mode()"


class _Reader(NamedTuple):
    """The norm that reads a sum.

    Attributes:
        norm: it.
        inner: whether only its block reads what it gives.
        over: whether what is added may be written over, for it is of this pass alone.
    """

    norm: nn.Module
    inner: bool
    over: bool


class _Turns:
    """A lock, and the thread in whose pass it is held. Copies of a model have their own, as have forked processes."""

    def __init__(self) -> None:
        self.begin()
        TURNS.add(self)

    def begin(self) -> None:
        """Nobody is in a pass."""
        self.lock = threading.Lock()
        self.thread: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Turns:
        return _Turns()


TURNS = WeakSet[_Turns]()


def _forked() -> None:
    """A thread in a pass while the process forks is not in the child, where another one may go by its number."""
    for turns in TURNS:
        turns.begin()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


class Stream:
    """What one forward pass knows of its residual stream. Passes of several threads take turns.

    Attributes:
        inside: the modules that give hidden states which the mode overwrites.
        hooks: their hooks, which are looked at in every pass.
        parts: the children of every module, which are looked at too.
        were: what the modules were, by these and by the forwards of their own.
        refused: options that ask for what would be wrong.
        turns: whose `lock` is held in a pass, and `thread` the one in which it has begun: at the model, or at whatever
            part of it was called.
        mode: `watch`: note which norm reads which sum; `exact`: in place, in torch's arithmetic; `fast`: by kernel.
        narrow: whether, under autocast, blocks read what norms give in the narrower dtype anyway.
        given: in which memory the inputs are, which is the caller's.
        last: what a norm was given last.
        seen: the sum that a pass in mode `watch` has made last, and where.
        added_to: the memory of what it has added to, but for x += y, and where: a tensor may be gone and its numbers
            kept, as by a detached one.
        addends: the memory of what it has added, and where.
        own: the sum that this mode has made, which may be added to in place.
        ready: the norm of `own` as it was at `version`, and `reader`, whose it is.
    """

    def __init__(self, inside: list[nn.Module]) -> None:
        self.inside = inside
        self.hooks = [hooks for m in inside for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.parts: list[dict[str, Any]] = []
        self.were: tuple[list[Any], ...] | None = None
        self.mode: Literal["watch", "exact", "fast"] = "watch"
        self.narrow, self.refused = False, {"output_hidden_states"}
        self.seen: tuple[Tensor, nn.Module, int, bool] | None = None
        self.added_to: list[tuple[StorageWeakRef, Any, int]] = []
        self.addends: list[tuple[StorageWeakRef, Any, int]] = []
        self.turns = _Turns()
        self.reset()

    def reset(self, *inputs: Any, thread: int | None = None) -> None:
        """Know nothing but the inputs of a pass that begins, or has ended."""
        self.turns.thread = thread
        self.given = set(map(_begins, _tensors(inputs)))
        self.last: Tensor | None = None
        self.own: Tensor | None = None
        self.ready: Tensor | None = None
        self.version = 0
        self.reader: nn.Module | None = None

    def without_kept(self) -> None:
        """Stop adding in place to what still exists behind all blocks: somebody may read it."""
        for memory, block, place in self.added_to:
            if not memory.expired():
                block.normgeo_next[place] = None

    def forget(self) -> None:
        """Forget what a pass in mode `watch` has made, and stop writing over what has outlived it."""
        self.seen = None
        self.added_to.clear()
        for memory, block, place in self.addends:
            if not memory.expired() and (reader := block.normgeo_next.get(place)):
                block.normgeo_next[place] = reader._replace(over=False)
        self.addends.clear()

    def settle(self, model: nn.Module) -> None:
        """Note which modules there are: nobody has checked whether later ones keep what they give."""
        self.parts = [m._modules for m in model.modules() if m._modules]
        self.were = self._are()

    def _are(self) -> tuple[list[Any], ...]:
        """How many children each module has, which, and the own forwards of those inside."""
        children = list(chain.from_iterable(map(dict.values, self.parts)))
        return list(map(len, self.parts)), children, [m.__dict__.get("forward") for m in self.inside]

    @property
    def changed(self) -> bool:
        """Whether modules, or their forwards, are others since."""
        return self.were is not None and self._are() != self.were


def _is(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors that are both alive are the same numbers, in whatever shape."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among values, and in containers of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def _begins(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in; 0 where it is in none of its own, as quantized weights are."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _alone() -> int:
    """How many references there are to a tensor that a view alone is of."""
    with torch.inference_mode(False):  # in which this may be imported, and where there are no views
        view = torch.ones(1)[:]
    base = view._base
    return refcount(base)


def _aside(tensor: Tensor) -> int:
    """How many hold its memory by other tensors: by views, or by the one that it is a view of, which a view holds too.

    In inference mode no view does, so that this one is not counted.
    """
    try:
        users = storage_users(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return 0
    base = tensor._base
    return users if base is None else users - 1 + refcount(base) - ALONE


ALONE = _alone()


def norm_forward(self: Any, x: Tensor | None = None, *_: Any, **named: Any) -> Tensor:
    """The forward of a norm in this mode: what is ready, or the norm."""
    if x is None:
        x = next(value for value in named.values() if isinstance(value, Tensor))
    stream: Stream = self.normgeo_stream
    if is_grad_enabled():
        raise ConversionError(NO_GRAD)
    stream.last, own = x, stream.own
    if stream.reader is self and (x is own or _is(own, x)) and own._version == stream.version:  # pyright: ignore
        z, stream.ready, stream.reader = stream.ready, None, None
        return z if x is own else z.view(x.shape)  # pyright: ignore
    if stream.mode == "watch":
        if not self.normgeo_inner:
            stream.without_kept()
        if stream.seen is not None and _is(stream.seen[0], x):
            block, place, over = stream.seen[1:]
            block.normgeo_next.setdefault(place, _Reader(self, self.normgeo_inner, over))  # pyright: ignore
    return type(self).forward(self, x) if stream.mode == "fast" else self.plain(x)


def _bare(a: object) -> int:
    """How many references a function sees to an argument that nobody else holds: more under torch.compile."""
    x = a
    return refcount(x)


def _summed(stream: Stream, plus: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """A + b, which the stream owns from now on.

    The sum is made outside of inference mode, whose tensors do not count their changes. If the code itself adds in
    place to such a tensor (a += b), the stream does not own it: nobody could tell whether its norm is up to date.
    """
    if plus is not operator.iadd and is_inference():
        with torch.inference_mode(False), torch.no_grad():
            total = plus(a, b)
    else:
        total = plus(a, b)
    stream.own = None if total.is_inference() or _begins(total) in stream.given else total
    return total


def _in_names(x: Tensor, names: frozenset[str], frame: Any, block: Any) -> bool:
    """Whether variables of these names, where the block runs, hold the memory of x: by whatever was called for them."""
    while frame is not None and all(value is not block for value in frame.f_locals.values()):
        frame = frame.f_back
    held = () if frame is None else (value for name, value in frame.f_locals.items() if name in names)
    return _begins(x) in map(_begins, _tensors(held))


PLUS: dict[Written, Callable[[Any, Any], Any]] = {
    "+": operator.add, "+=": operator.iadd, ".add": lambda a, b: a.add(b), "torch.add": torch.add,
}  # fmt: skip
"""What an addition does as it is written: a may be a view, a list or a set, which others see change."""


def added(
    block: Any, place: int, written: Written, of_a: Operand, of_b: Operand, behind: frozenset[str], a: Any, b: Any
) -> Any:
    """The sum of a and b. If one is the residual stream, in place, and together with the norm that reads the sum.

    The norm is written over what was added, if no name holds that, or only one that the code does not read again. And
    the stream is added to in place only if no name for it is read again, unless the code itself does so (a += b).
    """
    stream: Stream = block.normgeo_stream
    plus, augmented = PLUS[written], written == "+="
    if augmented or a is stream.last:
        residual, x, of_residual, of_x = a, b, of_a, of_b
    else:
        residual, x, of_residual, of_x = b, a, of_b, of_a
    if residual is not stream.last or not isinstance(x, Tensor) or x.shape != residual.shape:
        if augmented:
            stream.ready = stream.reader = None  # what is ready may be of what this changes
        return plus(a, b)
    if stream.mode == "watch":
        total = plus(a, b)
        if not augmented and stream.seen is not None and _is(stream.seen[0], residual):
            stream.added_to.append((StorageWeakRef(residual.untyped_storage()), block, place))
        alone = of_x != "read" and refcount(x) - _bare(object()) <= (of_x == "name")
        frame = sys._getframe(1)
        alone = alone and _begins(x) != 0 and not _in_names(x, behind, frame, block)
        stream.seen = (total, block, place, alone)
        if not augmented and _in_names(residual, behind, frame, block):
            block.normgeo_next[place] = None
        elif not alone and (known := block.normgeo_next.get(place)):
            block.normgeo_next[place] = known._replace(over=False)
        if alone:
            stream.addends.append((StorageWeakRef(x.untyped_storage()), block, place))
        return total
    reader, own = block.normgeo_next.get(place), stream.own
    stream.ready = stream.reader = None
    same = x.dtype is residual.dtype
    alike = same or torch.result_type(residual, x) is residual.dtype
    again = of_residual == "read" and not augmented
    if reader is None or again or not alike or not (residual is own or _is(own, residual)):
        return _summed(stream, plus, a, b)
    bare, most = _bare(object()), block.normgeo_held.get(place, NOBODY)
    held = refcount(residual) - bare, _aside(residual), refcount(x) - bare, _aside(x)
    if stream.mode == "exact":
        most = block.normgeo_held[place] = tuple(map(max, held, most))
    elif held[0] > most[0] or held[1] > most[1]:  # by somebody who was not there when this was verified
        return _summed(stream, plus, a, b)
    norm, inner, over = reader
    over = over and (same or (inner and stream.narrow)) and _begins(x) not in stream.given
    over = over and held[2] <= most[2] and held[3] <= most[3]
    z = None
    if stream.mode == "fast":
        try:  # as attributes they take as long as the rest of this function
            weight, bias = norm._parameters["weight"], norm._parameters["bias"]
        except KeyError:  # parametrized, or pruned
            weight, bias = norm.weight, norm.bias
        z = norm_ops.add_norm_(residual, x, weight, bias, norm.eps, norm.offset, norm.kernel, over)
    if z is None:
        residual.add_(x)
        z = norm.plain(residual) if stream.mode == "exact" else type(norm).forward(norm, residual)
        if stream.mode == "exact" and over and x.is_contiguous():
            z = x.copy_(z)
    stream.ready, stream.reader, stream.version = z, norm, residual._version
    return residual
