"""The fused inference mode: residual additions and the norms that follow them, in one pass over the stream.

A Pre-LN block computes x + f(norm(x)), and the next norm reads the sum: three passes over the stream, of which the
fused kernel makes one, adding in place (*Pre-RMSNorm* section 4, appendix C). What f gave is of no use then, and the
norm is written over it, so that no memory is touched but what an addition touches. The additions are found where they
are written, in the source of the blocks' `forward`; which norm reads which sum is seen in a run.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops
from normgeo.probing import outputs_of, same
from normgeo.sites import evaluating

__all__ = ["fused_norms", "optimize"]

is_grad_enabled = torch.is_grad_enabled  # looked up once; what is asked at every norm may take no longer than it saves

ADD = "_normgeo_add"
RECENTERS = {"_at_input", "_at_output"}  # the hooks of a converted model, which are part of it
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}  # of the largest output; rounding adds up


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


class _Stream:
    """What one forward pass knows of its residual stream.

    Attributes:
        mode: `watch`: note which norm reads which sum; `exact`: in place, in torch's arithmetic; `fast`: by kernel.
        narrow: whether, under autocast, blocks read what norms give in the narrower dtype anyway.
        given: where the inputs are, which are the caller's.
        last: what a norm was given last.
        own: the sum that this mode has made, which may be added to in place.
        ready: the norm of `own`, and `reader`, whose it is.
    """

    def __init__(self) -> None:
        self.mode: Literal["watch", "exact", "fast"] = "watch"
        self.narrow = False
        self.seen: list[tuple[Tensor, nn.Module, int, bool]] = []
        self.reset()

    def reset(self, *inputs: Any) -> None:
        self.given = {value.data_ptr() for value in inputs if isinstance(value, Tensor)}
        self.last: Tensor | None = None
        self.own: Tensor | None = None
        self.ready: Tensor | None = None
        self.reader: nn.Module | None = None


def _is(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors that are both alive are the same numbers, in whatever shape."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def _begins(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in; 0 where it is in none of its own, as quantized weights are."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _norm(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The forward of a norm in this mode: what is ready, or the norm."""
    stream: _Stream = self.normgeo_stream
    if is_grad_enabled():
        raise ConversionError("an optimized model is for inference: call it under torch.no_grad() or inference_mode()")
    stream.last, own = x, stream.own
    if stream.reader is self and (x is own or _is(own, x)):
        z, stream.ready, stream.reader = stream.ready, None, None
        return z if x is own else z.view(x.shape)  # pyright: ignore
    if stream.mode == "watch":
        for total, block, place, over in stream.seen:
            if _is(total, x):
                block.normgeo_next.setdefault(place, _Reader(self, self.normgeo_inner, over))  # pyright: ignore
    return type(self).forward(self, x) if stream.mode == "fast" else self.plain(x)


def _add(block: Any, place: int, a: Any, b: Any) -> Any:
    """A + b; where one is the residual stream, in place, and with the norm that reads it next."""
    stream: _Stream = block.normgeo_stream
    residual, x = (a, b) if a is stream.last else (b, a)
    if residual is not stream.last or not isinstance(x, Tensor) or x.shape != residual.shape:
        return a + b
    if stream.mode == "watch":
        total = a + b
        stream.seen.append((total, block, place, _begins(x) not in block.normgeo_kept))
        return total
    reader, own = block.normgeo_next.get(place), stream.own
    stream.ready = stream.reader = None
    same = x.dtype is residual.dtype
    alike = same or torch.result_type(residual, x) is residual.dtype
    if reader is None or not alike or not (residual is own or _is(own, residual)):
        stream.own = a + b
        return stream.own
    norm, inner, over = reader
    over = over and (same or (inner and stream.narrow)) and x.data_ptr() not in stream.given
    z = None
    if stream.mode == "fast":
        of = norm._parameters  # as attributes they take as long as the rest of this function
        weight, bias = (of["weight"], of["bias"]) if len(of) == 2 else (norm.weight, norm.bias)  # parametrized
        z = norm_ops.add_norm_(residual, x, weight, bias, norm.eps, norm.offset, norm.kernel, over)
    if z is None:
        residual.add_(x)
        z = norm.plain(residual) if stream.mode == "exact" else type(norm).forward(norm, residual)
        if stream.mode == "exact" and over and x.is_contiguous():
            z = x.copy_(z)
    stream.ready, stream.reader = z, norm
    return residual


# --- where the additions are -----------------------------------------------------------------------------------------


class _Additions(ast.NodeTransformer):
    """Turns every a + b into a call that knows its block and its place."""

    def __init__(self, block: str) -> None:
        self.block, self.count = block, 0

    def _call(self, a: ast.expr, b: ast.expr) -> ast.Call:
        self.count += 1
        place: list[ast.expr] = [ast.Name(self.block, ast.Load()), ast.Constant(self.count)]
        return ast.Call(ast.Name(ADD, ast.Load()), [*place, a, b], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self._call(node.left, node.right) if isinstance(node.op, ast.Add) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
            return node
        return ast.Assign([node.target], self._call(ast.Name(node.target.id, ast.Load()), node.value))


def _rewritten(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """A class's `forward` with its additions as calls; None where there are none, or its source cannot be had."""
    inner = inspect.unwrap(cls.forward)
    if not isinstance(inner, FunctionType) or inner.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return None
    additions = _Additions(function.args.args[0].arg)
    function.body = [additions.visit(line) for line in function.body]
    if not additions.count:
        return None
    # inside another function, so that the module's globals stay its own
    outer = ast.parse(f"def outer({ADD}):\n    return {function.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, function)
    tree.body = [outer]
    flags, names = __future__.annotations.compiler_flag, {}
    exec(compile(ast.fix_missing_locations(tree), inner.__code__.co_filename, "exec", flags), inner.__globals__, names)
    return names["outer"](_add)


# --- the mode --------------------------------------------------------------------------------------------------------


def _own_hook(hook: Any) -> bool:
    return getattr(getattr(hook, "func", None), "__name__", "") in RECENTERS


def _hooked(modules: Iterable[nn.Module]) -> nn.Module | None:
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks and not all(map(_own_hook, hooks.values())):
                return module
    return None


def _before(modules: list[nn.Module], stream: _Stream, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what the mode would give wrong values to."""
    stream.reset(*args, *kwargs.values())
    if torch.is_grad_enabled():
        raise ConversionError("an optimized model is for inference: call it under torch.no_grad() or inference_mode()")
    wanted = kwargs.get("output_hidden_states")
    if wanted or (wanted is None and getattr(model.config, "output_hidden_states", False)):
        raise ConversionError("an optimized model has no hidden states to give: its stream is added to in place")
    if (module := _hooked(modules)) is not None:
        raise ConversionError(
            f"a hook on {type(module).__name__} needs hidden states that an optimized model overwrites"
        )


def _after(stream: _Stream, *_: Any) -> None:
    stream.reset()


def _blocks(model: nn.Module, norms: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """The innermost modules that own norms."""
    owners = {name.rpartition(".")[0] for name in norms}
    for name in sorted(owners):
        if not any(other.startswith(f"{name}." if name else "") for other in owners - {name}):
            yield name, model.get_submodule(name)


def fused_norms(model: nn.Module) -> list[str]:
    """Names of the norms that an optimized model computes together with the addition before them."""
    readers = {id(reader.norm) for m in model.modules() for reader in m.__dict__.get("normgeo_next", {}).values()}
    return [name for name, module in model.named_modules() if id(module) in readers]


def optimize(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """Fuse, in place, residual additions with the RMSNorm or CRMSNorm that reads their sum, for inference.

    The outputs are compared before it is given back: with torch's arithmetic they are those of the unfused model to the
    last bit, and with the kernels close to them. An optimized model refuses to run under autograd, with hooks on its
    norms or in its blocks, and where hidden states are asked for. Its parameters, state dict and `generate` are as
    before; it is for one thread. To compile a model, compile the converted one.

    Args:
        model: a converted model, in evaluation mode; it is changed and given back.
        inputs: what to compare on; made up where none are given.

    Raises:
        ConversionError: there is nothing to fuse, hooks are in the way, or the outputs differ; the model is as it was.
    """
    norms = {name: m for name, m in model.named_modules() if getattr(m, "kernel", None) and hasattr(m, "plain")}
    if not norms:
        raise ConversionError(f"{type(model).__name__} has no converted norms; convert it first")
    if any("normgeo_stream" in m.__dict__ for m in norms.values()):
        return model
    stream, inputs = _Stream(), example_inputs(model) if inputs is None else inputs
    blocks, undo = [block for _, block in _blocks(model, norms)], []
    if (module := _hooked(_inside(blocks, norms.values()))) is not None:
        raise ConversionError(f"{type(module).__name__} has hooks, which a fused stream would mislead; remove them")
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
            _install(model, list(norms.values()), blocks, stream, undo)
            _verify(model, inputs, stream)
    except BaseException:
        for take_back in undo:
            take_back()
        raise
    return model


def _inside(blocks: list[nn.Module], norms: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules that give hidden states which the mode overwrites."""
    return list(dict.fromkeys([*norms, *(module for block in blocks for module in block.modules())]))


def _install(
    model: nn.Module, norms: list[nn.Module], blocks: list[nn.Module], stream: _Stream, undo: list[Callable[[], Any]]
) -> None:
    forwards = {cls: _rewritten(cls) for cls in {type(block) for block in blocks}}
    inner = {id(child) for block in blocks for child in block.children()}
    kept = {0, *map(_begins, (*model.parameters(), *model.buffers()))}
    own = {
        **{norm: {"forward": _norm, "normgeo_inner": id(norm) in inner} for norm in norms},
        **{block: {"forward": forwards[type(block)], "normgeo_next": {}, "normgeo_kept": kept} for block in blocks},
    }
    for module, values in own.items():
        if values["forward"] is None or "forward" in module.__dict__:
            continue
        values = {**values, "forward": MethodType(values["forward"], module), "normgeo_stream": stream}
        module.__dict__.update(values)
        undo += [lambda m=module, names=tuple(values): [m.__dict__.pop(name) for name in names]]
    handles = [
        model.register_forward_pre_hook(partial(_before, _inside(blocks, norms), stream), with_kwargs=True),
        model.register_forward_hook(partial(_after, stream), always_call=True),
    ]
    undo += [handle.remove for handle in handles]


def _verify(model: PreTrainedModel, inputs: dict[str, Tensor], stream: _Stream) -> None:
    """See which norm reads which sum, and that fusing them changes nothing."""
    truth = outputs_of(model, inputs)
    stream.seen.clear()
    if not fused_norms(model):
        raise ConversionError(f"no norm of {type(model).__name__} reads a sum that its blocks compute; nothing to fuse")
    stream.mode = "exact"
    if not _equal(outputs_of(model, inputs), truth):
        raise ConversionError(f"the stream of {type(model).__name__} is read after it is added to: it cannot be fused")
    stream.narrow = model.dtype is torch.float32 and _may_narrow(model, inputs, stream)
    stream.mode = "fast"
    if not same(truth, outputs_of(model, inputs), CLOSE.get(model.dtype, 1e-9)):
        raise ConversionError(f"the fused {type(model).__name__} is not equal to its original; nothing was changed")


def _may_narrow(model: PreTrainedModel, inputs: dict[str, Tensor], stream: _Stream) -> bool:
    """Whether under autocast the outputs are the same to the last bit with norms in the dtype of what is added."""
    try:
        with torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False):  # else all weights are held twice
            stream.mode = "watch"
            truth = outputs_of(model, inputs)
            stream.seen.clear()
            stream.mode, stream.narrow = "exact", True
            return _equal(outputs_of(model, inputs), truth)
    except ModelError:
        return False  # it does not run under autocast


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
