"""A forward pass that is timed, as often as one wants: all tokens at once, or one behind those in a cache."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from normgeo.bench.norm_timer import NormTimer
from normgeo.errors import ModelError
from normgeo.kernels import norm_ops
from normgeo.system.timing import Stopwatch, occupy, recorded, synchronize

__all__ = ["Case", "Pass", "unmasked"]

CACHES = ("cache", "past_key_values")
"""What models call their cache, in what they give and take: in older transformers the second."""

AHEAD = 0.1  # seconds that a device is kept waiting at most, so that all of a pass is given to it before it begins


@dataclass(frozen=True)
class Case:
    """What all variants compute, one after the other: dtype, shape, phase and mode."""

    dtype: str
    batch: int
    length: int
    phase: str = "forward"
    mode: str = "eager"


class Pass:
    """A variant's forward pass on a case's inputs, as often as one wants."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor], case: Case) -> None:
        self.model, self.device, self.inputs = model, model.device, inputs
        self.cache: dict[str, Any] = {}
        self.given_in = 0.0
        wanted = {"use_cache": case.phase == "decode", "logits_to_keep": 1}  # as generation does
        self.options = {k: v for k, v in wanted.items() if k in inspect.signature(model.forward).parameters}
        self.autocast = case.dtype == "autocast"
        self.call: Callable[..., Any] = torch.compile(model, dynamic=False) if case.mode == "compiled" else model
        if case.phase == "decode":
            before = self()
            self.cache = {name: value for name, value in before.items() if name in CACHES}
            if not self.cache:
                raise ModelError(f"{type(model).__name__} keeps no cache of tokens before")
            self.inputs = {"input_ids": inputs["input_ids"][:, -1:]}
        if case.mode == "graph":
            with norm_ops.launched_always():  # a graph launches its kernels for nothing
                self.call = recorded(self, self.device)

    def __call__(self, watch: Callable[..., Any] | None = None) -> Any:
        """What the model gives; `watch` calls it instead, where given."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self.autocast:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            # of the cache a copy, for not every kind can give back the token that comes in
            named = self.inputs | self.options | copy.deepcopy(self.cache)
            return watch(self.call, **named) if watch else self.call(**named)

    def output(self) -> Tensor:
        """The first output, in float32."""
        return next(v for v in self().values() if isinstance(v, Tensor)).float().clone()

    def seconds(self) -> float:
        """Of one pass."""
        watch = Stopwatch(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        self(watch)
        self.given_in = time.perf_counter() - began
        return watch.seconds()

    def norm_seconds(self, norms: Sequence[str]) -> float:
        """Of a pass that is given to the device as a whole, after one that was timed."""
        watch = Stopwatch(self.device)
        with NormTimer(self.model, norms, watch), unmasked():
            occupy(self.device, min(4 * self.given_in, AHEAD))  # here giving takes longer
            self()
        return watch.seconds()


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """While inside, models make no mask that masks nothing, and need not ask the device whether they should.

    Whether several texts are packed into a row they ask it, and wait. While a graph is recorded or a compiler traces
    they cannot, and some versions of transformers make a mask then, with which torch has no fast attention in half
    precision.
    """
    masks: Any = masking_utils
    asked = masks.is_tracing

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and asked(tensor)

    with (
        patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None),
        patch.object(masks, "is_tracing", is_tracing),
    ):
        yield
