"""The fused inference mode: residual additions and the norms that follow them, in one pass over the stream.

A Pre-LN block computes x + f(norm(x)), and the next norm reads the sum: three passes over the stream, of which the
fused kernel makes one, adding in place (*Pre-RMSNorm* section 4, appendix C). What f gave is of no use then, and the
norm is written over it, so that no memory is touched but what an addition touches. The additions are found where they
are written, in the source of the blocks' `forward`; which norm reads which sum is seen in a run.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from normgeo.conversion.additions import rewritten
from normgeo.conversion.centering import SIDE
from normgeo.conversion.fused import NO_GRAD, Stream, added, norm_forward
from normgeo.conversion.probing import outputs_of, same
from normgeo.converted import OF_WEIGHTS
from normgeo.errors import ConversionError, ModelError
from normgeo.examples import example_inputs
from normgeo.kernels import norm_ops
from normgeo.models import check_model, on_cpu, shared_copy
from normgeo.sites import find_sites
from normgeo.trace import evaluating

__all__ = ["fused_norms", "optimize"]

is_compiling, is_tracing = torch.compiler.is_compiling, torch.jit.is_tracing  # pyright: ignore

RECENTERS = {"_at_input", "_at_output"}  # the hooks of a converted model, which are part of it
CAPTURES = "transformers.utils.output_capturing"  # its hooks stay once any output was asked for, and then do nothing
GLOBAL = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
NO_STATES = "an optimized model has no hidden states to give: its stream is added to in place"
NO_ATTENTIONS = "an optimized model has no attentions to give where they are what its blocks add to the stream"
NO_TRACE = "an optimized model cannot be compiled, exported or traced whole: compile, export or trace the converted one"
CHANGED = (
    "modules were put in, or given another forward, after optimize, which overwrites hidden states: change the "
    "converted model, and optimize it last"
)
REFUSED = {"output_hidden_states": NO_STATES, "output_attentions": NO_ATTENTIONS}
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}  # of the largest output; rounding adds up


# --- where passes begin ----------------------------------------------------------------------------------------------


def _allowed(hook: Any, module: nn.Module) -> bool:
    return (
        getattr(getattr(hook, "func", None), "__name__", "") in RECENTERS
        or (isinstance(hook, OF_WEIGHTS) and not hasattr(module, "kernel"))  # gamma is read before they run
        or getattr(hook, "__module__", "") == CAPTURES  # when it captures hidden states, that was asked for and refused
    )


def _hooked(modules: Iterable[nn.Module]) -> str | None:
    """The name of the first of these that somebody else's hooks are on."""
    if any(GLOBAL):
        return "every module (a global one of torch's, as FlopCounterMode sets)"
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks and not all(_allowed(hook, module) for hook in hooks.values()):
                return type(module).__name__
    return None


def _runs_another(module: nn.Module) -> bool:
    """Whether a module has a forward that is not its class's, which what somebody put back is, as accelerate does."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _entry(forward: Callable[..., Any], block: bool) -> Callable[..., Any]:
    """A forward at which a pass may begin: it refuses what it would give wrong values to, and leaves nothing behind."""
    names = list(inspect.signature(forward).parameters)[1:]
    places = {option: names.index(option) if option in names else None for option in REFUSED}

    @functools.wraps(forward)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_tracing():
            raise ConversionError(NO_TRACE)
        stream: Stream = self.normgeo_stream
        turn = stream.turns.thread
        running = turn is not None and turn == get_ident()  # which nothing that traces knows
        if block and running:
            return forward(self, *args, **kwargs)
        for option, place in places.items():
            given = args[place] if place is not None and place < len(args) else None
            wanted = kwargs.get(option, given)
            wanted = wanted or (wanted is None and getattr(getattr(self, "config", None), option, False))
            if wanted and option in stream.refused:
                raise ConversionError(REFUSED[option])
        if running:
            return _within(stream, self, forward, args, kwargs)
        if torch.is_grad_enabled():
            raise ConversionError(NO_GRAD)
        if (any(stream.hooks) or any(GLOBAL)) and (name := _hooked(stream.inside)) is not None:
            raise ConversionError(f"a hook on {name} needs hidden states that an optimized model overwrites")
        if stream.changed:
            raise ConversionError(CHANGED)
        return _pass(stream, self, forward, args, kwargs)

    return entry


@torch.compiler.disable()
def _pass(stream: Stream, module: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A pass from its beginning to its end, of which `torch.compile` makes no pieces."""
    with stream.turns.lock:
        stream.reset(*args, *kwargs.values(), thread=get_ident())
        try:
            return _within(stream, module, forward, args, kwargs)
        finally:
            stream.reset()


def _within(stream: Stream, module: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a module around blocks: what hooks see go in or come out of it is not added to in place."""
    hooked = _hooked([module]) is not None
    stream.own = None if hooked else stream.own
    before = module.__dict__.get("normgeo_forward")
    result = before(*args, **kwargs) if before else forward(module, *args, **kwargs)
    stream.own = None if hooked else stream.own
    return result


# --- the mode --------------------------------------------------------------------------------------------------------

OURS = {
    "forward", "normgeo_stream", "normgeo_inner", "normgeo_next", "normgeo_held", "normgeo_forward",
    "__getstate__", "__deepcopy__",
}  # fmt: skip
"""What the mode gives to modules, each for itself. Classes stay as they are: others share them."""


def _unfused(self: nn.Module) -> dict[str, Any]:
    """A module's state without this mode, which is what is pickled: it depends on the code of this process."""
    state = {name: value for name, value in self.__dict__.items() if name not in OURS}
    return state | ({"forward": before} if (before := self.__dict__.get("normgeo_forward")) else {})


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy in the same mode."""
    memo[id(self)] = new = type(self).__new__(type(self))
    new.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return new


def _blocks(model: nn.Module, norms: Iterable[str]) -> list[nn.Module]:
    """The innermost modules that own norms."""
    owners = {name.rpartition(".")[0] for name in norms}
    outer = {name for name in owners if any(other.startswith(name and f"{name}.") for other in owners - {name})}
    return [model.get_submodule(name) for name in sorted(owners - outer)]


def fused_norms(model: nn.Module) -> list[str]:
    """Names of the norms that an optimized model computes together with the addition before them."""
    readers = {
        id(reader.norm) for m in model.modules() for reader in m.__dict__.get("normgeo_next", {}).values() if reader
    }
    return [name for name, module in model.named_modules() if id(module) in readers]


@on_cpu
def optimize(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """Fuse, in place, residual additions with the RMSNorm or CRMSNorm that reads their sum, for inference.

    The outputs are compared before it is given back: with torch's arithmetic they are those of the unfused model to the
    last bit, and with the kernels close to them. An optimized model, and every part of it that is called alone, refuses
    to run under autograd, with hooks on its norms or in its blocks, and where hidden states are asked for. Its
    parameters, state dict and `generate` are as before; passes of several threads take turns. It is pickled as the
    model it was. To compile, export or trace a model, take the converted one: what `model.compile()` did is undone.

    Args:
        model: a converted model, in evaluation mode; it is changed and given back.
        inputs: what to compare on; made up where none are given.

    Raises:
        ConversionError: there is nothing to fuse, hooks are in the way, or the outputs differ; the model is as it was.
        ModelError: it is in a wrapper, no input could be made, or the model fails on it.

    >>> from normgeo import convert, load_model, optimize
    >>> fast = optimize(convert(load_model("openai-community/gpt2")).model)     # doctest: +SKIP
    """
    if not isinstance(model, PreTrainedModel):
        if isinstance(model, nn.Module) and any(isinstance(part, PreTrainedModel) for part in model.modules()):
            check_model(model)  # says what to give of what is around one
        raise ConversionError(f"optimize takes a model, as in optimize(convert(...).model), not a {_kind(model)}")
    norms = {name: m for name, m in model.named_modules() if getattr(m, "kernel", None) and hasattr(m, "plain")}
    if not norms:
        raise ConversionError(_unconverted(model, inputs))
    if any("normgeo_stream" in m.__dict__ for m in norms.values()):
        return model
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConversionError("some weights are on the disk or wait on the CPU: optimize takes a model on its devices")
    inputs = example_inputs(model) if inputs is None else inputs
    blocks = _blocks(model, norms)
    # all that gives hidden states which the mode overwrites
    inside = list(dict.fromkeys([*norms.values(), *(module for block in blocks for module in block.modules())]))
    if (name := _hooked(inside)) is not None:
        raise ConversionError(f"{name} has hooks, which a fused stream would mislead; remove them")
    if blocks and all(map(_runs_another, blocks)):
        raise ConversionError(
            f"{type(blocks[0]).__name__} runs another forward than its class's, as with accelerate's hooks: it cannot "
            "be fused before that is removed"
        )
    stream = Stream(inside)
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
            with _by_torch(norms.values()):  # as the rewritten code is run first
                truth, attentions = outputs_of(model, inputs), _with_attentions(model, inputs)
            with norm_ops.launched_always():
                unfused = outputs_of(model, inputs)
            _install(model, list(norms.values()), blocks, stream)
            _verify(model, inputs, stream, truth, unfused, attentions)
            stream.settle(model)
    except BaseException:
        for module in model.modules():
            if "normgeo_stream" in module.__dict__:
                module.__dict__ = _unfused(module)
        raise
    for module in model.modules():  # no pass is compiled any more, and one that has to be whole would be refused
        module._compiled_call_impl = None
    return model


@contextmanager
def _by_torch(norms: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, these norms have no kernels."""
    own = [(vars(norm), {"kernel": vars(norm)["kernel"]} if "kernel" in vars(norm) else {}) for norm in norms]
    try:
        for attributes, _ in own:
            attributes["kernel"] = None
        yield
    finally:
        for attributes, before in own:
            del attributes["kernel"]
            attributes.update(before)


def _kind(value: Any) -> str:
    within = {"certificate": "model", "peft_config": "get_base_model(), which has the adapters in it"}
    give = next((f": give it its .{name}" for has, name in within.items() if hasattr(value, has)), "")
    return f"{type(value).__name__}{give}"


def _unconverted(model: PreTrainedModel, inputs: dict[str, Tensor] | None) -> str:
    if any(hasattr(module, "plain") for module in model.modules()):  # CRMSNorms that nothing could be folded from
        return f"all norms of {type(model).__name__} give back wider vectors than they are given; nothing to fuse"
    if any(site.kind == "layernorm" and site.role not in SIDE for site in find_sites(model, inputs)):
        return f"{type(model).__name__} has no converted norms; convert it first"
    return f"{type(model).__name__} has no LayerNorm to convert, and only norms that convert made are fused"


def _install(model: nn.Module, norms: list[nn.Module], blocks: list[nn.Module], stream: Stream) -> None:
    inside = set(map(id, stream.inside))
    around = [m for m in model.modules() if id(m) not in inside and any(id(part) in inside for part in m.modules())]
    around = [m for m in around if type(m).forward is not nn.Module.forward]  # a list is not called
    inner = {id(child) for block in blocks for child in block.children()}
    sums = {cls: rewritten(cls, added) for cls in {type(block) for block in blocks}}
    fused = {cls: _entry(forward, True) for cls, forward in sums.items() if forward is not None}
    entries = {cls: _entry(cls.forward, False) for cls in {type(module) for module in around}}
    blocks = [block for block in blocks if type(block) in fused]
    own: dict[nn.Module, dict[str, Any]] = {
        **{norm: {"forward": norm_forward, "normgeo_inner": id(norm) in inner} for norm in norms},
        **{block: {"forward": fused[type(block)], "normgeo_next": {}, "normgeo_held": {}} for block in blocks},
    }
    own = {module: values for module, values in own.items() if not _runs_another(module)}
    own |= {m: {"forward": entries[type(m)], "normgeo_forward": m.__dict__.get("forward")} for m in around}
    for module, values in own.items():
        methods = {"forward": values["forward"], "__getstate__": _unfused, "__deepcopy__": _copied}
        bound = {name: MethodType(function, module) for name, function in methods.items()}
        module.__dict__.update({**values, **bound, "normgeo_stream": stream})


def _with_attentions(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor] | None:
    """What a model gives that is asked for its attentions too, which leaves hooks in it; None where it cannot be."""
    try:
        return outputs_of(shared_copy(model), inputs, output_attentions=True)
    except ModelError:
        return None


def _verify(
    model: PreTrainedModel, inputs: dict[str, Tensor], stream: Stream, truth: list[Tensor], unfused: list[Tensor],
    attentions: list[Tensor] | None,
) -> None:  # fmt: skip
    """See which norm reads which sum, and that nothing differs from what the model gave in its own code.

    That is `truth` with torch's arithmetic and `unfused` with the kernels, whose rounding is a step of quantized
    activations here and there, and so may differ from the former by more.
    """
    try:
        watched = outputs_of(model, inputs)
    except ConversionError as error:
        if str(error) != NO_STATES:
            raise
        raise ConversionError(
            f"{type(model).__name__} reads the hidden states of its own layers: it cannot be fused"
        ) from error
    stream.seen = None
    stream.without_kept()
    stream.forget()
    if not fused_norms(model):
        raise ConversionError(f"no norm of {type(model).__name__} reads a sum that its blocks compute; nothing to fuse")
    if not _equal(watched, truth):
        raise ConversionError(
            f"rewritten to be fused, {type(model).__name__} gives something else; nothing was changed"
        )
    stream.mode = "exact"
    if not _equal(outputs_of(model, inputs), truth):
        raise ConversionError(f"the stream of {type(model).__name__} is read after it is added to: it cannot be fused")
    if attentions is not None and not _equal(_with_attentions(model, inputs) or [], attentions):
        stream.refused.add("output_attentions")  # by that name some give what their blocks add to the stream
    stream.narrow = model.dtype is torch.float32 and _may_narrow(model, inputs, stream)
    stream.mode = "fast"
    with norm_ops.launched_always():  # these inputs are few, later ones may be many
        fused = outputs_of(model, inputs)
    if not any(same(before, fused, CLOSE.get(model.dtype, 1e-9)) for before in (truth, unfused)):
        raise ConversionError(f"the fused {type(model).__name__} is not equal to its original; nothing was changed")


def _may_narrow(model: PreTrainedModel, inputs: dict[str, Tensor], stream: Stream) -> bool:
    """Whether under autocast the outputs are the same to the last bit with norms in the dtype of what is added."""
    try:
        with torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False):  # else all weights are held twice
            stream.mode = "watch"
            truth = outputs_of(model, inputs)
            stream.forget()
            stream.mode, stream.narrow = "exact", True
            return _equal(outputs_of(model, inputs), truth)
    except ModelError:
        return False  # it does not run under autocast


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
