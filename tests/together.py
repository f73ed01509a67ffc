"""Several processes of one run, in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch.distributed import HashStore

from normgeo.angles import job
from normgeo.system.ranks import Ranks


def by_ranks(size, do, alike=True):
    """What `do(ranks=...)` gives in each of several ranks. They are threads, except that models are loaded in turn.

    Where they are alike all load as many, and nobody measures while another loads.
    """
    meeting, loading, load_model = HashStore(), threading.Lock(), job.load_model
    begun, loaded = threading.Barrier(size), threading.Barrier(size)

    def load(*args, **options):
        with loading:  # transformers changes what is global meanwhile
            model = load_model(*args, **options)
        with suppress(threading.BrokenBarrierError):
            if alike:
                loaded.wait(200)
        return model

    def done(rank):
        begun.wait(200)  # else one that has ended may leave its thread to another
        try:
            return do(ranks=Ranks(rank, size, rank, meeting))
        except BaseException:
            loaded.abort()  # it loads no more
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(job, "load_model", load)
        futures = [pool.submit(done, rank) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]
