"""Where a norm sits: which layer it belongs to, and whose input or output it normalizes.

Both are read off one forward pass, from the layer that runs while the norm is called, the order of the calls in it, and
who reads the norm's output. Names tell only what kind of branch a weight is part of, where what it does does not.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from normgeo.trace import Call, Trace

__all__ = ["Placer", "Role"]

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
class _Block:
    """One run of a layer.

    Attributes:
        prefix: how the names of the layer's own modules begin.
        calls: the calls in it.
        trace: the forward pass.
    """

    prefix: str
    calls: list[Call]
    trace: Trace

    def inner_name(self, call: Call) -> str:
        """A call's name inside the layer: of another layer's module that it shares as in that one, or as in a model."""
        if call.name.startswith(self.prefix):
            return call.name[len(self.prefix) :]
        named, own = self.trace.layer_of(call.name), self.trace.layer_of(self.prefix)
        prefix = f"{named[0]}.{named[1]}." if named else own[0].rpartition(".")[0] + "." if own else ""
        return call.name.removeprefix(prefix)

    def branch(self, call: Call) -> str:
        """The kind of residual branch that a module is part of: from what is done around it, or else from its name."""
        name = self.inner_name(call)
        if ATTENTION.search(name) or any(c.attends and (c is call or c.holds(call)) for c in self.calls):
            return "cross_attention" if CROSS.search(name) else "attention"
        return "mixer" if MIXER.search(name) else "mlp"

    def part(self, call: Call) -> tuple[str, str]:
        """What a weight is part of: the kind of branch, and the layer's module around it, if any is."""
        module, _, inner = self.inner_name(call).partition(".")
        return self.branch(call), module if inner or not call.leaf else ""


class Placer:
    """Gives the norms of one forward pass their places.

    Args:
        norms: the calls of norms.
        trace: everything that was called.
    """

    def __init__(self, norms: list[Call], trace: Trace) -> None:
        self.norms, self.trace = norms, trace
        self.known = {id(norm) for norm in norms}
        self.post: dict[str, bool] = {}

    def place(self, norm: Call) -> tuple[Any, str, int]:
        """The role of one call of a norm, the name of the list its layer is in, and the layer's index."""
        running, place = self.trace.running(norm), self._layer(norm)
        if place is None:
            return self._outside(norm)
        stack, named = place
        return self._role(norm, stack, self._block(running, place)), stack, self._index(norm, stack, named)

    def _layer(self, call: Call) -> tuple[str, int] | None:
        """The layer that runs while a module is called, or the one it is named by where layers are not called."""
        running = self.trace.running(call)
        return self.trace.layer_of((running or call).name)

    def _block(self, running: Call | None, place: tuple[str, int]) -> _Block:
        if running is not None:
            return _Block(f"{running.name}.", [c for c in self.trace.calls if running.holds(c)], self.trace)
        prefix = f"{place[0]}.{place[1]}."
        return _Block(prefix, [c for c in self.trace.calls if c.name.startswith(prefix)], self.trace)

    def _index(self, norm: Call, stack: str, named: int) -> int:
        """The layer's index: not the one it is named by where it is run again and again."""
        layers = [c for c in self.trace.layers if c.name.rpartition(".")[0] == stack]
        at = next((i for i, c in enumerate(layers) if c.holds(norm)), None)
        if at is None or len({c.name for c in layers}) == len(layers):
            return named
        return at

    def _role(self, norm: Call, stack: str, block: _Block) -> str:
        weights = [c for c in block.calls if c.weight]
        before, after = [c for c in weights if c.ended < norm.began], [c for c in weights if c.began > norm.ended]
        readers = [c for c in block.calls if c.began > norm.ended and norm.feeds(c) and c.changes]
        if before and after and block.part(before[-1]) == block.part(after[0]):
            module = block.part(norm)[1]
            beside = [w for w in weights if module and block.part(w)[1] == module]  # a q_proj tells of the others
            heads = any(block.branch(c).endswith("attention") for c in (norm, before[-1], after[0], *beside))
            return "qk" if heads and not any(r.weight for r in readers) else "inner"
        if before and (self._is_post_norm(stack) or not readers):
            return f"post_{block.branch(before[-1])}"
        kinds = {block.branch(r) for r in readers if id(r) not in self.known} or {block.branch(w) for w in after[:1]}
        if {"attention", "mlp"} <= kinds:
            return "parallel"
        return next((k for k in ("cross_attention", "attention", "mixer", "mlp") if k in kinds), "inner")

    def _is_post_norm(self, stack: str) -> bool:
        """Whether all layers of a stack begin with a weight, not a norm. A first may: its norm is the embedding's."""
        if stack not in self.post:
            first: dict[int, dict[bool, int]] = defaultdict(dict)
            for call in self.trace.calls:
                if call.weight or id(call) in self.known:
                    place = self._layer(call)
                    if place is not None and place[0] == stack:
                        first[place[1]].setdefault(id(call) in self.known, call.began)
            both = [began for began in first.values() if len(began) == 2]
            self.post[stack] = bool(both) and all(began[False] < began[True] for began in both)
        return self.post[stack]

    def _outside(self, norm: Call) -> tuple[str, str, int]:
        """Outside the layers: before them an embedding's, after them the final one, of the stack nearest by name."""
        spans: dict[str, tuple[int, int]] = {}
        for other in self.trace.calls:
            place = self.trace.layer_of(other.name)
            if place is not None and not (other.leaf and other.name == f"{place[0]}.{place[1]}"):  # tables: no layers
                began, layers = spans.get(place[0], (other.began, 0))
                spans[place[0]] = (began, max(layers, place[1] + 1))
        if not spans:
            return "final", "", 0

        def shared(stack: str) -> int:
            pairs = zip(stack.split("."), norm.name.split("."), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        stack = max(spans, key=lambda s: (shared(s), spans[s][1]))
        began, layers = spans[stack]
        return ("embedding", stack, 0) if norm.began < began else ("final", stack, layers)
