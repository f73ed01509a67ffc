"""The processes of one run, as `torchrun` starts them: each does its share, and the first speaks for all.

What they tell each other is a few lines of JSON through the launcher's own key-value store, which needs no process
group and no network between the processes but the one that the launcher has.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from normgeo.errors import NormGeoError, first_line
from normgeo.system.processes import has_ended, machine

__all__ = ["Ranks", "is_first"]

T = TypeVar("T")
POLL_SECONDS = 0.05
BEAT_SECONDS = 5.0
MEETING_SECONDS = 600.0
SILENCE_SECONDS = 300.0
"""After which a process that was not heard of is taken for dead: one that loads a model may be silent for long."""

FAILED = b"failed"
SAFE = "what is committed is safe: give --resume"
_meetings = itertools.count()


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _met() -> tuple[Store, int, int]:
    """The launcher's store, and who this process is of how many; torch waits without an end where others listen."""
    found: Future[tuple[Store, int, int]] = Future()

    def meet() -> None:
        try:
            found.set_result(next(rendezvous("env://")))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=meet, daemon=True).start()
    try:
        return found.result(timeout=MEETING_SECONDS)
    except TimeoutError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"the first one did not answer at {where} for {MEETING_SECONDS:.0f} s") from error


@dataclass(frozen=True)
class Ranks:
    """One process among those of its run.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        local: its number on its machine, and that of its GPU.
        store: what they share; None where there is one process.
        said: how often the processes have met by each name, which all do in the same order.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    store: Store | None = None
    said: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_environment(cls) -> Ranks:
        """What the launcher says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; else one process.

        Raises:
            NormGeoError: the launcher's store cannot be reached.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1":
            return cls()
        try:
            shared, rank, size = _met()
        except (RuntimeError, ValueError, OSError) as error:
            raise NormGeoError(f"WORLD_SIZE is {size}, and the other processes cannot be met: {error}") from error
        # names of an earlier run are not met again, nor those of before a launcher started all processes again
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"normgeo/{again}/{next(_meetings)}", shared)
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", "0")), store)

    def share(self, of: Sequence[T]) -> Sequence[T]:
        """The part of this process: neighbours stay together, parts are equal to one, and the first's is a longest."""
        start, stop = (-(-len(of) * rank // self.size) for rank in (self.rank, self.rank + 1))
        return of[start:stop]

    def first(self, name: str, do: Callable[[], T]) -> T:
        """What the first process gets from `do`, in all of them; as JSON holds it.

        Raises:
            SystemExit: in the others, silently, where the first failed; it says why itself.
            NormGeoError: the launcher's store is gone.
        """
        if self.store is None:
            return do()
        name = self._again(name)
        if self.rank == 0:
            try:
                value = do()
            except BaseException:
                with suppress(RuntimeError):  # nobody listens, and what went wrong is to be said
                    self.store.set(name, "null")
                raise
            with self._reached() as store:
                store.set(name, json.dumps([value]))
            return value
        answer = json.loads(self._get(name))
        if answer is None:
            raise SystemExit(1)
        return answer[0]

    def done(self, name: str) -> None:
        """Say that this process has done its share; the first waits for the others to say so."""
        if self.store is None:
            return
        name = self._again(name)
        with self._reached() as store:
            store.set(f"{name}/{self.rank}", "done")
        for other in range(1, self.size if self.rank == 0 else 1):
            self._get(f"{name}/{other}", other)

    def _again(self, name: str) -> str:
        """A name for what is said now, which was never said before."""
        self.said[name] += 1
        return f"{name}/{self.said[name]}"

    def _get(self, name: str, of: int = 0) -> bytes:
        """Wait for what a process says as long as it lives, and not in C, where signals would wait too.

        Raises:
            SystemExit: silently, where it is the first and failed.
            NormGeoError: another failed, has ended, or was not heard of for long.
        """
        heard, at = b"", time.monotonic()
        with self._reached() as store:
            while not store.check([name]):
                now, beat, ended = time.monotonic(), f"alive/{of}", of and self._ended(of)
                if store.check([beat]) and (last := store.get(beat)) != heard:
                    heard, at = last, now
                if heard == FAILED and not store.check([name]):
                    if of == 0:
                        raise SystemExit(1)
                    raise NormGeoError(f"process {of} of the run failed, and says why itself; {SAFE}")
                if ended and not store.check([name]):
                    raise NormGeoError(f"process {of} of the run has ended without a word; {SAFE}")
                if of and now - at > SILENCE_SECONDS:
                    raise NormGeoError(f"process {of} of the run was not heard of for {now - at:.0f} s; {SAFE}")
                time.sleep(POLL_SECONDS)
            return store.get(name)

    def _ended(self, of: int) -> bool:
        """Whether it is known of a process that it is no more: one of this machine."""
        with self._reached() as store:
            return store.check([f"at/{of}"]) and has_ended(*json.loads(store.get(f"at/{of}")))

    @contextmanager
    def _reached(self) -> Iterator[Store]:
        """What all share. It is the first process's, or its launcher's, and ends with it."""
        assert self.store is not None
        try:
            yield self.store
        except RuntimeError as error:
            why = first_line(error)
            raise NormGeoError(f"the first process of the run, or what launched it, has ended: {why}") from error

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While inside, the first process hears that this one lives, and at the end of it whether it failed.

        A launcher ends all processes when one dies. Others do not (`srun`, a shell), and the first would wait forever.
        Of the first the others hear whether it failed; if it dies, so does what all share.
        """
        if self.store is None:
            yield
            return
        store, over = self.store, threading.Event()
        with self._reached():
            store.set(f"at/{self.rank}", json.dumps([machine(), os.getpid()]))

        def beat() -> None:
            with suppress(RuntimeError):  # nobody listens
                for number in itertools.count():
                    store.set(f"alive/{self.rank}", str(number))
                    if over.wait(BEAT_SECONDS):
                        return

        beating = threading.Thread(target=beat, daemon=True)
        if self.rank:
            beating.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            over.set()
            if self.rank:
                beating.join()
            if failed:
                with suppress(RuntimeError):
                    store.set(f"alive/{self.rank}", FAILED.decode())

    @contextmanager
    def told_to_end(self) -> Iterator[None]:
        """While inside, SIGTERM, by which a launcher ends all processes when one died, is an interruption."""
        if self.size == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def take_gpu(self, device: str, device_map: str | None) -> None:
        """Make this process's GPU the one that `cuda` means: of those that it sees, which may be one (`srun`).

        Raises:
            NormGeoError: every process would spread a model over all GPUs of its machine, or there are more processes
                than GPUs.
        """
        if self.size == 1:
            return
        if device_map is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise NormGeoError("--device-map gives a model all GPUs of a machine; start one process on each machine")
        if device in ("auto", "cuda") and torch.cuda.is_available():
            there = torch.cuda.device_count()
            index = self.local % there
            with self._reached() as store:
                store.set(f"gpu/{self.rank}", own := str(torch.cuda.get_device_properties(index).uuid))
            before = range(self.rank if self.local >= there else 0)
            if any(self._get(f"gpu/{other}", other).decode() == own for other in before):
                raise NormGeoError(
                    f"process {self.local} of this machine has no GPU of its own: it sees {there}; start as many "
                    "processes (--nproc-per-node), or give --device cpu"
                )
            torch.cuda.set_device(index)
