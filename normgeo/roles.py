"""Where a norm sits: which layer it belongs to, and whose input or output it normalizes.

Both are read off one forward pass, from the layer that runs while the norm is called, the order of the calls in it, and
who reads the norm's output. Names tell only what kind of branch a weight is part of, where what it does does not.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from normgeo.trace import Call, Trace

__all__ = ["Placer", "Role", "parts_shared"]

Role = Literal[
    "embedding", "attention", "cross_attention", "mixer", "mlp", "parallel", "post_attention", "post_cross_attention",
    "post_mixer", "post_mlp", "qk", "inner", "final", "head",
]  # fmt: skip

PROJECTIONS = r"w?([qkvo]|qkv)(_?proj)?|out_proj|query|key|value|query_key_value"
"""Names of the matrices of an attention that is no module of its own in a layer."""

ATTENTION = re.compile(rf"attn|attention|(^|\.)q_proj$|^({PROJECTIONS})$", re.IGNORECASE)
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.IGNORECASE)
MIXER = re.compile(
    r"mamba|mixer|ssm|lstm|recurrent|retention|hyena|temporal|time_mix|token_mix|^conv\.|(^|\.)(gru|rnn|gla|s4d?|s6|t?mix)(\.|$)",
    re.IGNORECASE,
)


def parts_shared(a: str, b: str) -> int:
    """How many parts two dotted names begin with alike.

    >>> parts_shared("model.encoder.layers", "model.encoder.norm")
    2
    """
    pairs = zip(a.split("."), b.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class _Block:
    """One run of a layer.

    Attributes:
        prefix: how the names of the layer's own modules begin.
        calls: the calls in it.
        trace: the forward pass.
        layer: its own call, where it is called.
    """

    prefix: str
    calls: list[Call]
    trace: Trace
    layer: Call | None = None

    def inner_name(self, call: Call) -> str:
        """A call's name inside the layer: of another layer's module that it shares as in that one, or as in a model."""
        if call.name.startswith(self.prefix):
            return call.name[len(self.prefix) :]
        named, own = self.trace.layer_of(call.name), self.trace.layer_of(self.prefix)
        prefix = f"{named[0]}.{named[1]}." if named else own[0].rpartition(".")[0] + "." if own else ""
        return call.name.removeprefix(prefix)

    @property
    def scored(self) -> int:
        """When the layer itself weighed tokens by their scores, which no module in it does for it; 0: it did not."""
        return 0 if self.layer is None or any(c.scored for c in self.calls) else self.layer.scored

    def is_inline(self, call: Call) -> bool:
        """Whether a call is in the attention of a layer in which that is no module: before scores, or next behind."""
        behind = next((c for c in self.calls if c.weight and c.began > self.scored), None)
        return bool(self.scored) and (call.began < self.scored or call is behind)

    def attention_of(self, call: Call) -> Call | None:
        """The attention that a call is in, or is."""
        around = (c for c in reversed(self.calls) if c.scored and (c is call or c.holds(call)))
        return next(around, self.layer if self.is_inline(call) else None)

    def branch(self, call: Call) -> str:
        """The kind of residual branch that a module is part of: from what is done around it, or else from its name."""
        name, attention = self.inner_name(call), self.attention_of(call)
        if call.leaf and name.count(".") > 1 and call.name.rpartition(".")[0] in self.trace.lists:
            name = name.rpartition(".")[0]  # a key that somebody gave, as adapters in a layer's modules have
        if ATTENTION.search(name) or attention is not None:
            crosses = CROSS.search(name) or (attention is not None and attention.crosses)
            return "cross_attention" if crosses else "attention"
        return "mixer" if MIXER.search(name) else "mlp"

    def part(self, call: Call) -> tuple[str, str]:
        """What a weight is part of: the kind of branch, and the layer's module around it, if any is."""
        module, _, inner = self.inner_name(call).partition(".")
        return self.branch(call), module if (inner or not call.leaf) and not self.is_inline(call) else ""


def _numbered(norms: list[Call], trace: Trace) -> tuple[Trace, dict[Call, Call]]:
    """A forward pass as if layers that are called by name and number (`encoder_layer_0`) had a list of their own.

    In a list they all are; of a module's attributes (`self.block0`) those that `_attributes` gives. Also its calls, and
    functions', by those of before.
    """
    layers, attributes = dict[str, tuple[str, int]](), _attributes(norms, trace)
    for call in trace.calls:
        parent, stem, number = _split(call.name)
        within = parent in trace.lists or (parent, stem) in attributes
        if within and stem and number and call.matrices and not call.leaf:
            layers[call.name] = stem, int(number)
    if not layers:
        return trace, {}

    def renamed(name: str) -> str:
        parts = name.split(".")
        places = [layers.get(".".join(parts[: i + 1]), (part,)) for i, part in enumerate(parts)]
        return ".".join(str(part) for place in places for part in place)

    every = {*trace.calls, *(function.call for function in trace.functions)}
    calls = {call: replace(call, name=renamed(call.name)) for call in every}
    lists = {renamed(name) for name in trace.lists} | {renamed(name).rpartition(".")[0] for name in layers}
    return Trace([calls[call] for call in trace.calls], trace.functions, trace.sums, lists), calls


def _attributes(norms: list[Call], trace: Trace) -> set[tuple[str, str]]:
    """The parents and stems of attributes that are numbered as layers are, several of which have norms.

    Where a norm is in a layer of a list none are, as a stem's parts or heads; nor are those that have such in them, as
    towers and stages.
    """
    if any(trace.running(norm) is not None for norm in norms):
        return set()
    numbers = defaultdict[tuple[str, str], set[str]](set)
    for norm in norms:
        for name in itertools.accumulate(norm.name.split(".")[:-1], "{}.{}".format):
            parent, stem, number = _split(name)
            if number:
                numbers[parent, stem].add(number)
    several = {place for place, found in numbers.items() if len(found) > 1}
    outer = (name for parent, _ in several for name in itertools.accumulate(parent.split("."), "{}.{}".format))
    return several - {_split(name)[:2] for name in outer}


def _split(name: str) -> tuple[str, str, str]:
    """A dotted name as that of the module around it, its last part without the number at its end, and that number."""
    parent, _, last = name.rpartition(".")
    stem = last.rstrip("0123456789")
    return parent, stem.rstrip("_"), last[len(stem) :]


def _joined(norms: list[Call], trace: Trace) -> tuple[Trace, dict[Call, Call]]:
    """A forward pass as if layers that are spread over lists had one of their own, and its calls by those of before.

    What has no other part in its layer, as a final norm at the end of a list of norms, is in none.
    """
    placed, parts = _listed(norms, trace), defaultdict[tuple[str, int], set[str]](set)
    names = _spread(norms, placed, trace)
    for stack, i in placed.values():
        parts[names.get(stack, ""), i].add(stack)
    calls = dict[Call, Call]()
    for call, (stack, i) in placed.items():
        if stack in names and len(parts[names[stack], i]) > 1:
            own = trace.layer_of(call.name)  # of another layer's module that it shares
            inner = call.name.removeprefix(f"{own[0]}.{own[1]}") if own else f".{call.name}"
            calls[call] = replace(call, name=f"{names[stack]}.{i}.{stack.rpartition('.')[2]}{inner}")
    lists = (trace.lists - names.keys()) | {*names.values()}
    return Trace([calls.get(call, call) for call in trace.calls], trace.functions, trace.sums, lists), calls


def _listed(norms: list[Call], trace: Trace) -> dict[Call, tuple[str, int]]:
    """The list of modules that each call is in, or that around it, and the index there, in the order of calls."""
    placed, outer = dict[Call, tuple[str, int]](), None
    for call in sorted({*trace.calls, *norms}, key=lambda call: call.began):
        if outer is not None and outer.holds(call):
            placed[call] = placed[outer]
        elif (place := trace.layer_of(call.name)) is not None:
            placed[call], outer = place, call
    return placed


def _spread(norms: list[Call], placed: dict[Call, tuple[str, int]], trace: Trace) -> dict[str, str]:
    """Lists of which each has a part of every layer (`norms`, `attns`, `mlps`), and one name for those that belong so.

    One is of norms, or of modules around them, the others lie beside it, and they run in turns. Where one is of lists
    of layers, as `block` beside `patch_embeddings` and `layer_norm`, what they have parts of are stages and no layers.
    """
    turns, names = defaultdict[str, list[tuple[int, int]]](list), dict[str, str]()
    called, layers = {call.name for call in placed}, {layer.name for layer in trace.layers}
    for call, (stack, i) in placed.items():
        turns[stack].append((call.began, i))
    places = (placed[norm] for norm in norms if norm in placed)
    for stack in dict.fromkeys(stack for stack, i in places if f"{stack}.{i}" not in layers):
        group, together, parent = [stack], turns.get(stack, []), stack.rpartition(".")[0]
        for other in turns:
            beside = other != stack and other not in names and other.rpartition(".")[0] == parent
            if beside and _in_turns(together, turns[other]):
                group, together = [*group, other], [*together, *turns[other]]
        stages = any(f"{other}.{i}" not in called for other in group for _, i in turns[other])
        if len(group) > 1 and stack not in names and not stages:
            own = "+".join(other.rpartition(".")[2] for other in turns if other in group)
            names |= dict.fromkeys(group, f"{parent}.{own}" if parent else own)
    return names


def _in_turns(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    """Whether of two lists, given when each index runs, all of an index is before the next; two they have in common."""
    indices = [i for _, i in sorted([*a, *b])]
    return indices == sorted(indices) and len({i for _, i in a} & {i for _, i in b}) > 1


def _unwrapped(layer: Call, calls: list[Call]) -> tuple[Call, list[Call]]:
    """A layer and the calls in it, without modules around it that give what it gives, as those of `torch.compile`."""
    while calls and not calls[0].leaf and calls[0].output is layer.output and all(map(calls[0].holds, calls[1:])):
        layer, *calls = calls
    return layer, calls


class Placer:
    """Gives the norms of one forward pass their places.

    Args:
        norms: the calls of norms.
        trace: everything that was called.
    """

    def __init__(self, norms: list[Call], trace: Trace) -> None:
        trace, numbered = _numbered(norms, trace)
        norms = [numbered.get(norm, norm) for norm in norms]
        self.trace, joined = _joined(norms, trace)
        self._calls = joined | {call: joined.get(new, new) for call, new in numbered.items()}
        self.known = {id(self._calls.get(norm, norm)) for norm in norms}
        self.post: dict[str, bool] = {}

    def place(self, norm: Call) -> tuple[Any, str, int]:
        """The role of one call of a norm, the name of the list its layer is in, and the layer's index."""
        norm = self._calls.get(norm, norm)
        running, place = self.trace.running(norm), self._layer(norm)
        if place is None:
            return self._outside(norm)
        stack, named = place
        return self._role(norm, stack, self._block(running, place)), stack, self._index(norm, stack, named)

    def _layer(self, call: Call) -> tuple[str, int] | None:
        """The layer that runs while a module is called, or the one it is named by where layers are not called."""
        if (running := self.trace.running(call)) is not None:
            return self.trace.layer_of(running.name)
        place = self.trace.layer_of(call.name)
        runs = self.trace.runs.get(place[0], []) if place is not None else []
        if place is None or not runs:
            called = place is not None and any(c.name == place[0] for c in self.trace.calls)
            return None if called and self.trace.runs else place  # a `Sequential`, as of a head, is no list of layers
        itself = call.name == f"{place[0]}.{place[1]}" and id(call) in self.known  # as behind those of a `Sequential`
        named = any(layer.name == f"{place[0]}.{place[1]}" for layer in runs)
        beside = call.ended < runs[0].began or call.began > max(layer.ended for layer in runs)
        return None if itself or (named and beside) else place

    def _block(self, running: Call | None, place: tuple[str, int]) -> _Block:
        if running is not None:
            layer, calls = _unwrapped(running, [c for c in self.trace.calls if running.holds(c)])
            return _Block(f"{layer.name}.", calls, self.trace, layer)
        prefix = f"{place[0]}.{place[1]}."
        return _Block(prefix, [c for c in self.trace.calls if c.name.startswith(prefix)], self.trace)

    def _index(self, norm: Call, stack: str, named: int) -> int:
        """The layer's index: not the one it is named by where it is run again and again."""
        layers = self.trace.runs.get(stack, [])
        at = next((i for i, c in enumerate(layers) if c.holds(norm)), None)
        if at is None or len({c.name for c in layers}) == len(layers):
            return named
        return at

    def _role(self, norm: Call, stack: str, block: _Block) -> str:
        weights = [c for c in block.calls if c.weight]
        around = [c for c in weights if c.holds(norm) and c.scored > norm.ended]  # attention that normalizes for itself
        before = [c for c in weights if c.ended < norm.began or (c.holds(norm) and 0 < c.scored < norm.began)]
        after = around + [c for c in weights if c.began > norm.ended]
        later = (c for c in block.calls if c.began > norm.ended and norm.feeds(c) and c.changes)
        readers = [c for c in later if not self.trace.adds(c)]  # which a residual stream goes on from
        readers = [c for c in readers if not any(c.holds(other) for other in readers)]  # of wrappers what is in them
        readers = around or readers
        attention = block.attention_of(norm)
        late = attention is not None and norm.began > attention.scored  # on what attention gives
        inside = attention is not None and not late and bool(before) and attention.holds(before[-1])
        if before and after and not self._on_sum(norm) and (inside or block.part(before[-1]) == block.part(after[0])):
            module = block.part(norm)[1]
            beside = [w for w in weights if module and block.part(w)[1] == module]  # a q_proj tells of the others
            heads = any(block.branch(c).endswith("attention") for c in (norm, before[-1], after[0], *beside))
            return "qk" if heads and not late and not any(r.weight for r in readers) else "inner"
        if before and (self._is_post_norm(stack) or not readers):
            return f"post_{block.branch(before[-1])}"
        kinds = {block.branch(r) for r in readers if id(r) not in self.known} or {block.branch(w) for w in after[:1]}
        if {"attention", "mlp"} <= kinds:
            return "parallel"
        return next((k for k in ("cross_attention", "attention", "mixer", "mlp") if k in kinds), "inner")

    def _on_sum(self, norm: Call) -> bool:
        """Whether it normalizes what its layer is given, or a sum that is like it, and so is not inside a branch."""
        layer = self.trace.running(norm)
        if layer is None or not layer.inputs or layer.inputs[0].shape[-1] != norm.inputs[0].shape[-1]:
            return False
        alike = layer.inputs[0].shape == norm.inputs[0].shape  # which what is joined to others is not
        return norm.reads_from(layer.inputs[0]) or (alike and not self.trace.sums.isdisjoint(norm.reads))

    def _is_post_norm(self, stack: str) -> bool:
        """Whether all layers of a stack that have both begin with a weight, not a norm.

        With that of them which reads what the layer is given, where one does: others read what it is conditioned on. A
        first layer may begin with a norm: it is the embedding's.
        """
        if stack not in self.post:
            begins: dict[int, list[tuple[bool, int, bool]]] = defaultdict(list)
            for call in self.trace.calls:
                if call.weight or id(call) in self.known:
                    place = self._layer(call)
                    if place is not None and place[0] == stack:
                        begins[place[1]].append((not self._reads_input(call), call.began, id(call) in self.known))
            both = [min(calls) for calls in begins.values() if len({is_norm for *_, is_norm in calls}) == 2]
            self.post[stack] = bool(both) and not any(is_norm for *_, is_norm in both)
        return self.post[stack]

    def _reads_input(self, call: Call) -> bool:
        """Whether it reads what comes first of what its layer is given: nothing, where that is a list of parts."""
        layer, place = self.trace.running(call), self._layer(call)
        if layer is None or place is None or layer.name != f"{place[0]}.{place[1]}":
            return False
        return bool(layer.inputs) and call.reads_from(layer.inputs[0])

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """When each stack of layers begins, and how many layers it has."""
        spans: dict[str, tuple[int, int]] = {}
        for call in self.trace.calls:
            place = self._layer(call)
            if place is not None and not (call.leaf and call.name == f"{place[0]}.{place[1]}"):  # tables are no layers
                began, layers = spans.get(place[0], (call.began, 0))
                spans[place[0]] = (began, max(layers, place[1] + 1))
        return spans

    def _outside(self, norm: Call) -> tuple[str, str, int]:
        """Outside the layers: before them an embedding's, after them the final one, of the nearest stack."""
        if not self._spans:
            return "final", "", 0

        def ended(stack: str) -> int:
            return max((run.ended for run in self.trace.runs.get(stack, []) if run.ended < norm.began), default=-1)

        stack = max(self._spans, key=lambda s: (parts_shared(s, norm.name), ended(s), self._spans[s][1]))
        began, layers = self._spans[stack]
        runs = self.trace.runs.get(stack, [])
        if len({layer.name for layer in runs}) < len(runs):  # some are run again and again: those before it count
            layers = sum(1 for layer in runs if layer.ended < norm.began)
        return ("embedding", stack, 0) if norm.began < began else ("final", stack, layers)
