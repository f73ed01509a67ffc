"""Normalization sites: found by what passes through them, classified by what they do.

No list of class names is involved. A module is a norm when its output is gamma * y + beta with y the LayerNorm or the
RMSNorm of its input (*Geometry* eq. 9 and 11; *Pre-RMSNorm* eq. 1 and 2), which three probes with random vectors
decide. Where it sits is read off one forward pass on a few tokens: which layer it belongs to, and who reads its output.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.behaviour import Behaviour, Kind, behaviour_of
from normgeo.converted import is_compressed
from normgeo.errors import ModelError, NormGeoError
from normgeo.examples import example_inputs
from normgeo.models import check_model, default_dtype, on_cpu, uncompiled

__all__ = ["NormSite", "Role", "find_sites", "is_leaf"]

Role = Literal[
    "embedding", "attention", "cross_attention", "mixer", "mlp", "parallel", "post_attention", "post_cross_attention",
    "post_mixer", "post_mlp", "qk", "inner", "final", "head",
]  # fmt: skip

PROJECTIONS = r"w?([qkvo]|qkv)(_?proj)?|out_proj|query|key|value|query_key_value"
"""Names of the matrices of an attention that is no module of its own in a layer."""

ATTENTION = re.compile(rf"attn|attention|(^|\.)q_proj$|^({PROJECTIONS})$", re.IGNORECASE)
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.IGNORECASE)
MIXER = re.compile(r"mamba|mixer|ssm|lstm|recurrent|temporal|time_mix|^conv\.", re.IGNORECASE)


@dataclass(frozen=True)
class NormSite:
    """One normalization module of a model.

    Attributes:
        name: the module's dotted name.
        kind: `layernorm` when a shift of its input along the uniform vector changes nothing, else `rmsnorm`.
        role: who reads its output (`attention`, `mlp`, both: `parallel`), whose output it normalizes (`post_*`), or
            where it sits: `embedding`, `final`, `qk` (on heads), `inner` (inside a branch), `head` (after the model).
        layer: index of its layer; 0 for `embedding`, the number of layers for `final`.
        stack: dotted name of the list its layer is in ("" outside of any).
        d: width of the vectors it normalizes.
        eps: the constant added to the mean square.
        gain, bias: whether it has a gamma and a beta.
        heads: how many vectors it normalizes for each token (more than 1 for norms on heads).
        head_major: whether its input is laid out [batch, heads, time, d] instead of [batch, time, heads, d].
        call: which of several calls in one forward pass, for modules that layers share.
        dtype: of the vectors, as torch names it.
        time_major: whether its input is laid out [time, batch, d].
    """

    name: str
    kind: Kind
    role: Role
    layer: int
    stack: str
    d: int
    eps: float
    gain: bool = True
    bias: bool = False
    heads: int = 1
    head_major: bool = False
    call: int = 0
    dtype: str = "float32"
    time_major: bool = False

    @property
    def key(self) -> str:
        """The dotted name, with the call where the module is shared: unique within a model."""
        return f"{self.name}@{self.call}" if self.call else self.name


@dataclass
class _Call:
    """One call of a module: when it began and ended, and the tensors that went in and out."""

    name: str
    began: int
    inputs: list[Tensor]
    ended: int = 0
    output: Any = None
    leaf: bool = False
    has_matrix: bool = False

    def feeds(self, other: _Call) -> bool:
        """Whether the other call reads this one's output, or a view of it."""
        return _storage(self.output) in {_storage(t) for t in other.inputs}

    @property
    def changes(self) -> bool:
        """Whether it makes something else of what it is given, which dropout does not in evaluation."""
        return not (self.leaf and isinstance(self.output, Tensor) and self.feeds(self))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class _Trace:
    """Everything that happened in one forward pass, in order; which stacks are known to be Post-LN, or not to be."""

    calls: list[_Call] = field(default_factory=list)
    lists: set[str] = field(default_factory=set)
    post: dict[str, bool] = field(default_factory=dict)


@on_cpu
def find_sites(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, *, qk: bool = False) -> list[NormSite]:
    """Find every normalization module that the model calls, in the order of the forward pass.

    Args:
        model: any transformers model.
        inputs: keyword arguments for one small forward pass; made from the configuration when None.
        qk: also return the norms on the heads of queries and keys.

    Raises:
        ModelError: it is no model of transformers, no input could be made, the forward pass failed, there is no norm,
            or a device map offloaded one.
    """
    check_model(model)
    made = example_inputs(model, cross=False) if inputs is None else inputs  # a stream of text has no encoder
    trace, found = _norms(model, made)
    heads = {call.inputs[0].shape[1] for call, _ in found if call.inputs[0].ndim == 4}
    if inputs is None and any(_is_square(call.inputs[0]) for call, _ in found) and "input_ids" in made:
        other = max(set(range(2, 7)) - heads)  # as many heads as tokens: which are which would not show
        made = example_inputs(model, other, cross=False)
        trace, found = _norms(model, made)
    if not found:
        hint = "; it is compressed, decompress it (normgeo convert --to rmsnorm)" if is_compressed(model) else ""
        raise ModelError(f"{type(model).__name__} called no LayerNorm and no RMSNorm in a forward pass{hint}")
    sites = _placed(found, trace, _bases(model), made.get("input_ids"))
    return [site for site in sites if qk or site.role != "qk"]


def _norms(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[_Trace, list[tuple[_Call, Behaviour]]]:
    """What happened in a forward pass, and the calls in it of modules that are norms."""
    trace = _traced(model, inputs)
    modules = dict(model.named_modules())
    verdicts: dict[str, Behaviour | None] = {}
    found: list[tuple[_Call, Behaviour]] = []
    for call in sorted((c for c in trace.calls if c.leaf), key=lambda c: c.began):
        if not _could_be_a_norm(call, modules[call.name]):
            continue
        if any(parameter.is_meta for parameter in modules[call.name].parameters()):
            hint = "the model does not fit on the GPUs: give more of them, or a smaller --dtype"
            raise ModelError(f"{call.name} was left on the CPU or the disk, where it is not measured; {hint}")
        if call.name not in verdicts:
            verdicts[call.name] = behaviour_of(modules[call.name], call.inputs[0].shape)
        if (behaviour := verdicts[call.name]) is not None:
            found.append((call, behaviour))
    return trace, found


def _bases(model: PreTrainedModel) -> list[tuple[str, str]]:
    """How names begin in a model and in its base, for every model within: what is in the first alone is its head."""
    found = []
    for name, module in model.named_modules():
        base = module.base_model_prefix if isinstance(module, PreTrainedModel) else ""
        if base and hasattr(module, base):
            whole = f"{name}." if name else ""
            found.append((whole, f"{whole}{base}."))
    return found


def _is_time_major(x: Tensor, ids: Tensor | None) -> bool:
    """Whether a norm's input has time first; with as many sequences as tokens in each that would not show."""
    return ids is not None and ids.ndim == 2 and x.ndim > 2 and x.shape[:2] == ids.shape[::-1] != ids.shape


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no others inside."""
    return next(module.children(), None) is None


@contextmanager
def _hooked(model: nn.Module, trace: _Trace) -> Iterator[None]:
    clock, stack = iter(range(1 << 62)), []

    def before(name: str, module: nn.Module) -> Any:
        leaf, matrix = is_leaf(module), any(p.ndim > 1 for p in module.parameters(recurse=False))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = _tensors([*args, *kwargs.values()])
            call = _Call(name, next(clock), inputs, leaf=leaf, has_matrix=leaf and matrix)
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


def _traced(model: PreTrainedModel, inputs: dict[str, Tensor]) -> _Trace:
    trace = _Trace()
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


def _could_be_a_norm(call: _Call, module: nn.Module) -> bool:
    out = call.output
    table = bool(call.inputs) and isinstance(call.inputs[0], nn.Parameter) and call.inputs[0].ndim == 2
    return (
        not table  # of weights, such as relative positions, which are no hidden states
        and len(call.inputs) == 1
        and isinstance(out, Tensor)
        and out.shape == call.inputs[0].shape
        and out.ndim >= 2
        and out.shape[-1] > 1
        and out.numel() > 0
        and all(p.numel() <= call.inputs[0].numel() for p in module.parameters())
    )


def _placed(
    found: list[tuple[_Call, Behaviour]], trace: _Trace, bases: list[tuple[str, str]], ids: Tensor | None
) -> list[NormSite]:
    """Give every norm its layer and role from the order of calls and from who reads its output."""
    n_tokens = None if ids is None else ids.numel()
    norms = [call for call, _ in found]
    calls: dict[str, int] = defaultdict(int)
    sites = []
    for call, behaviour in found:
        index, calls[call.name] = calls[call.name], calls[call.name] + 1
        role, stack, layer = _place(call, norms, trace)
        heads = [whole for whole, base in bases if call.name.startswith(whole) and not call.name.startswith(base)]
        if "" in heads or (heads and role == "final"):  # a model within may have other towers beside its base
            role = "head"
        d = call.inputs[0].shape[-1]
        vectors = call.inputs[0].numel() // d
        several = role in ("qk", "inner") or call.inputs[0].ndim > 3  # vectors a token
        per_head = several and n_tokens is not None and vectors % n_tokens == 0
        heads = vectors // n_tokens if per_head and n_tokens else 1
        sites.append(
            NormSite(
                call.name, behaviour.kind, role, _layer_at(call, stack, layer, trace), stack, d, behaviour.eps,
                behaviour.gain, behaviour.bias, heads, heads > 1 and _is_head_major(call.inputs[0], heads), index,
                str(call.inputs[0].dtype).removeprefix("torch."), _is_time_major(call.inputs[0], ids),
            )
        )  # fmt: skip
    return sites


def _is_square(x: Tensor) -> bool:
    return x.ndim == 4 and x.shape[1] == x.shape[2]


def _is_head_major(x: Tensor, heads: int) -> bool:
    """Whether heads come before tokens; where both are as many, as in inputs of a user's, whether they were moved."""
    return x.ndim == 4 and x.shape[1] == heads and (x.shape[2] != heads or x.stride(1) < x.stride(2))


def _layer_of(name: str, trace: _Trace) -> tuple[str, int] | None:
    """The outermost list of modules that the name passes through, and the index in it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and ".".join(parts[:i]) in trace.lists:
            return ".".join(parts[:i]), int(part)
    return None


def _layer_at(call: _Call, stack: str, named: int, trace: _Trace) -> int:
    """The layer that runs while a norm is called: not the one it is named by where layers share their modules."""
    layers = [c for c in trace.calls if stack and c.name.rpartition(".")[0] == stack]
    at = next((i for i, c in enumerate(layers) if c.began <= call.began <= c.ended), None)
    if at is None:
        return named
    if len({c.name for c in layers}) < len(layers):  # a layer is run again and again: as the one it is then
        return at
    return int(layers[at].name.rpartition(".")[2])


def _branch(call: _Call, prefix: str) -> str:
    """The kind of residual branch that a module inside a layer is part of, from the words of its name."""
    name = call.name[len(prefix) :]
    if ATTENTION.search(name):
        return "cross_attention" if CROSS.search(name) else "attention"
    return "mixer" if MIXER.search(name) else "mlp"


def _part(call: _Call, prefix: str) -> tuple[str, str]:
    """What a weight inside a layer is part of: the kind of branch, and the layer's module around it, if any is."""
    module, _, inner = call.name[len(prefix) :].partition(".")
    return _branch(call, prefix), module if inner else ""


def _is_post_norm(stack: str, norms: list[_Call], trace: _Trace) -> bool:
    """Whether all layers of a stack begin with a weight, not a norm. A first layer may: its norm is the embedding's."""
    if stack not in trace.post:
        first: dict[int, dict[bool, int]] = defaultdict(dict)
        known = {id(norm) for norm in norms}
        for call in trace.calls:
            if (call.leaf and call.has_matrix) or id(call) in known:
                place = _layer_of(call.name, trace)
                if place is not None and place[0] == stack:
                    first[place[1]].setdefault(id(call) in known, call.began)
        both = [began for began in first.values() if len(began) == 2]
        trace.post[stack] = bool(both) and all(began[False] < began[True] for began in both)
    return trace.post[stack]


def _place(call: _Call, norms: list[_Call], trace: _Trace) -> tuple[Any, str, int]:
    """(role, stack, layer) of one call of a norm."""
    place = _layer_of(call.name, trace)
    if place is None:
        return _place_outside(call, trace)
    prefix = f"{place[0]}.{place[1]}."
    begin, end = _block(call, prefix, trace)
    inside = [c for c in trace.calls if begin <= c.began <= end and c.name.startswith(prefix)]
    weights = [c for c in inside if c.leaf and c.has_matrix]
    before, after = [c for c in weights if c.ended < call.began], [c for c in weights if c.began > call.ended]
    readers = [c for c in inside if c.began > call.ended and call.feeds(c) and c.changes]
    if before and after and _part(before[-1], prefix) == _part(after[0], prefix):
        module = _part(call, prefix)[1]
        beside = [w for w in weights if module and _part(w, prefix)[1] == module]  # a q_proj tells of the others
        heads = any(_branch(c, prefix).endswith("attention") for c in (call, before[-1], after[0], *beside))
        return ("qk" if heads and not any(r.has_matrix for r in readers) else "inner"), *place
    if before and (_is_post_norm(place[0], norms, trace) or not readers):
        return f"post_{_branch(before[-1], prefix)}", *place
    kinds = {_branch(r, prefix) for r in readers if r not in norms} or {_branch(w, prefix) for w in after[:1]}
    if {"attention", "mlp"} <= kinds:
        return "parallel", *place
    order = ("cross_attention", "attention", "mixer", "mlp")
    return next((k for k in order if k in kinds), "inner"), *place


def _block(call: _Call, prefix: str, trace: _Trace) -> tuple[int, int]:
    """When the call of the layer around a norm began and ended (the whole pass where a layer is not called itself)."""
    spans = [(c.began, c.ended) for c in trace.calls if c.name == prefix[:-1] and c.began < call.began < c.ended]
    return spans[0] if spans else (0, 1 << 62)


def _place_outside(call: _Call, trace: _Trace) -> tuple[Any, str, int]:
    """A norm outside the layers: before them an embedding's, after them the final one, of the stack nearest by name."""
    spans: dict[str, tuple[int, int]] = {}
    for other in trace.calls:
        place = _layer_of(other.name, trace)
        if place is not None and not (other.leaf and other.name == f"{place[0]}.{place[1]}"):  # tables are no layers
            began, layers = spans.get(place[0], (other.began, 0))
            spans[place[0]] = (began, max(layers, place[1] + 1))
    if not spans:
        return "final", "", 0

    def shared(stack: str) -> int:
        pairs = zip(stack.split("."), call.name.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    stack = max(spans, key=lambda s: (shared(s), spans[s][1]))
    began, layers = spans[stack]
    return ("embedding", stack, 0) if call.began < began else ("final", stack, layers)
