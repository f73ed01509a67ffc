"""Who does the tasks of a scan: threads of this process, or the workers of a cluster of dask's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from normgeo.errors import NormGeoError, first_line

__all__ = ["cluster", "in_order", "threads"]

WORKERS_A_THREAD = 2  # one computes while the other's chunks are read
CONNECT_SECONDS = 10
PATIENCE_SECONDS = 60  # for workers to come in the place of those that are gone

Submit = Callable[..., Any]
T = TypeVar("T")


def in_order(tasks: Iterable[T], begin: Callable[[T], Any], at_most: int) -> Iterator[tuple[T, Any]]:
    """Tasks and their results, in order, so many of which are under way or waiting to be taken: all would fill memory.

    Args:
        tasks: taken as others are done; there may be millions.
        begin: gives the future of one.
        at_most: how many.
    """
    begun = deque[tuple[T, Any]]()
    for task in tasks:
        begun.append((task, begin(task)))
        if len(begun) == at_most:
            task, future = begun.popleft()
            yield task, future.result()
    while begun:
        task, future = begun.popleft()
        yield task, future.result()


_scanning, _of_torch = 0, 0  # scans on threads, and how many threads torch had when the first of them began
_changing = threading.Lock()


@contextmanager
def _alone() -> Iterator[int]:
    """Have torch compute on this thread alone; gives how many threads it had.

    Another would wait, on a worker's processor, for what there is to add up. The number is that of new threads too, and
    so of a scan that begins in one while another scan is under way.
    """
    global _scanning, _of_torch
    with _changing:
        _of_torch = _of_torch if _scanning else torch.get_num_threads()
        _scanning += 1
        torch.set_num_threads(1)
    try:
        yield _of_torch
    finally:
        with _changing:
            _scanning -= 1
            torch.set_num_threads(_of_torch)


@contextmanager
def threads() -> Iterator[tuple[Submit, int]]:
    """Threads, each with one of torch's own: reading and arithmetic are done outside Python's lock."""
    with _alone() as of_torch:
        workers = WORKERS_A_THREAD * of_torch
        pool = ThreadPoolExecutor(workers, "scan", initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield pool.submit, workers
        finally:
            pool.shutdown(cancel_futures=True)


class _Awaited:
    """What a cluster will give, as long as it has workers."""

    def __init__(self, client: Any, future: Any) -> None:
        self._client, self._future = client, future

    def result(self) -> Any:
        """What it gave.

        Raises:
            NormGeoError: for a while it has had no workers.
        """
        lost = 0
        while True:
            try:
                return self._future.result(timeout=CONNECT_SECONDS)
            except TimeoutError:
                if self._future.status == "error":  # it is the task's own; one that is done was about to come
                    raise
                lost = 0 if self._client.nthreads() else lost + 1
                if lost * CONNECT_SECONDS >= PATIENCE_SECONDS:
                    address = self._client.scheduler.address
                    raise NormGeoError(
                        f"the dask cluster at {address} lost its workers, and no others came; their logs say why (one "
                        "that lacks what this version of normgeo has ends when it is given a task)"
                    ) from None


@contextmanager
def cluster(address: str) -> Iterator[tuple[Submit, int]]:
    """The workers of a dask.distributed cluster.

    Raises:
        NormGeoError: dask is not installed, nobody answers at the address, there are no workers, or they die.
    """
    try:
        import distributed
        from distributed.comm.addressing import get_address_host_port
    except ImportError as error:
        raise NormGeoError("--scheduler needs dask.distributed: pip install 'normgeo[dask]'") from error
    try:
        if not address.startswith("inproc://"):  # of this process's own cluster, which has neither
            get_address_host_port(address, strict=True)
        client: Any = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # TypeError: a tls:// address without certificates
        raise NormGeoError(f"no dask scheduler answers at {address!r}: {first_line(error)}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError as error:
            raise NormGeoError(f"the dask scheduler at {address} has no workers: start some") from error
        try:
            yield (lambda *of: _Awaited(client, client.submit(*of, pure=False))), sum(client.nthreads().values())
        except (distributed.KilledWorker, CancelledError) as error:
            raise NormGeoError(f"the dask cluster at {address} lost its workers: {error}") from error
        except ModuleNotFoundError as error:
            raise NormGeoError(f"the workers of {address} lack a package ({error}); install normgeo there") from error
