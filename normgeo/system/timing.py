"""Timing that can be trusted: functions interleaved in random order, memory kept, the clock of the device."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from normgeo.errors import ModelError, first_line
from normgeo.numbers import check_number
from normgeo.system.memory import memory_kept
from normgeo.system.versions import versions

__all__ = [
    "Stopwatch", "circumstances", "compiler_explained", "device_name", "devices", "interleaved",
    "occupy", "quartiles", "recorded", "synchronize", "took",
]  # fmt: skip

CYCLES = 2e9
"""A second of a GPU's clock, about."""

LEAST = 3
"""Rounds that are timed however little time there is: fewer have no quartiles."""


def synchronize(*devices: torch.device) -> None:
    """Wait until the devices have done what they were given."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)


def devices(model: nn.Module) -> set[torch.device]:
    """What a model is on: as many as a device map gave it."""
    return {parameter.device for parameter in model.parameters()}


def took(do: Callable[[], Any], *places: torch.device) -> float:
    """Seconds until these devices have done what a function gives them."""
    synchronize(*places)
    began = time.perf_counter()
    do()
    synchronize(*places)
    return time.perf_counter() - began


def quartiles(name: str, values: Any) -> dict[str, Any]:
    """The median of values over rounds, their first axis, as `name`, and their quartiles as `name_q25`, `name_q75`."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75), axis=0)
    return {name: middle, f"{name}_q25": low, f"{name}_q75": high}


def recorded(function: Callable[[], Any], device: torch.device) -> Callable[..., Any]:
    """The work of a function as a CUDA graph, whose launch costs the same however many kernels it has.

    It reads and writes the same memory each time, and gives what the function gave.
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            result = function()

    def replay(**_: Any) -> Any:
        graph.replay()
        return result

    return replay


def occupy(device: torch.device, seconds: float) -> None:
    """Let a CUDA device do nothing for about so long before what it is given next, so that who gives gets ahead of it.

    Events around a kernel time the way to it where the device waits for its work.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * CYCLES))


@contextmanager
def compiler_explained(what: str) -> Iterator[None]:
    """While inside, what torch.compile cannot compile, most often for want of a compiler, is an error of one line.

    Raises:
        ModelError: it cannot.
    """
    try:
        yield
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException  # slow to import, and there where this is needed

        if not isinstance(error, TorchDynamoException):
            raise
        raise ModelError(
            f"torch.compile cannot compile {what}: {first_line(error)}; install a compiler, or leave out --compile"
        ) from error


def device_name(device: torch.device) -> str:
    """The model of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
    return device.type


def circumstances(device: torch.device) -> dict[str, Any]:
    """What a measured time depends on beside what was measured: device, threads, versions and the code's commit."""
    return {
        "device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "transformers": transformers.__version__, **versions("normgeo"), "commit": _commit(),
    }  # fmt: skip


def _commit() -> str:
    """The commit of this code, with a + where files were changed since; empty outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


class Stopwatch:
    """Adds up the time that calls take: by events on a CUDA device's stream, elsewhere by the clock.

    Args:
        device: where the calls compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and give what it returns."""
        if self._device.type == "cuda":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record(torch.cuda.current_stream(self._device))  # which need not be the current device's
            result = function(*args, **kwargs)
            ended.record(torch.cuda.current_stream(self._device))
            self._events.append((began, ended))
            return result
        synchronize(self._device)  # other accelerators too do later what they are given
        start = time.perf_counter()
        result = function(*args, **kwargs)
        synchronize(self._device)
        self._total += time.perf_counter() - start
        return result

    def seconds(self) -> float:
        """Seconds of all calls so far; on CUDA waits for them."""
        if self._events:
            self._events[-1][1].synchronize()
            self._total += sum(a.elapsed_time(b) for a, b in self._events) / 1e3
            self._events.clear()
        return self._total


def interleaved(
    measures: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float, seed: int = 0
) -> Iterator[tuple[int, str, Any]]:
    """Call every function once a round, in a random order each round, and give (round, name, what it returned).

    A round before the first warms up. Rounds end after `rounds`, or where the next would take longer than what is left
    of `seconds`, but not before three. Memory is kept meanwhile, the same for all.

    Args:
        measures: functions, each of which measures itself.
        rounds: how many rounds at most.
        seconds: for all rounds together.
        seed: of the order.

    Raises:
        DataError: fewer than one round.
    """
    check_number("rounds", rounds, 1)
    order = random.Random(seed)
    with memory_kept():
        for measure in measures.values():
            measure()
        began = time.perf_counter()
        for number in range(rounds):
            spent = time.perf_counter() - began
            if number >= LEAST and spent * (number + 1) > seconds * number:
                return
            for name in order.sample(list(measures), len(measures)):
                yield number, name, measures[name]()
