"""Processes to start, watch and kill, forked from one that has imported what they import: that takes eight seconds."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import secrets
import shutil
import socket
import sys
import tempfile
import time
import weakref
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "torch.distributed", "transformers.models.gpt2.modeling_gpt2", "accelerate", "pandas", "pyarrow.parquet", "zarr",
    "seaborn", "normgeo.cli.main", "normgeo.store.capture", "normgeo.training.runs", "normgeo.conversion.runs",
])  # fmt: skip
NORMGEO = "from normgeo.cli.main import main; main()"


def wait_before(owner, name, when=lambda *_: True):
    """Have this process wait to be killed before it calls a function of which `when` is true: it cannot be done before,
    however late whoever kills it comes to do so."""
    call = getattr(owner, name)

    def waiting(*given, **options):
        if when(*given):
            time.sleep(600)
        return call(*given, **options)

    setattr(owner, name, waiting)


def begin():
    """Start the process to fork from, for others that fork."""
    multiprocessing.forkserver.ensure_running()


def _begin(code, words, folder, environment):
    """As a new interpreter would, with these words as its arguments."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, environment.get("PYTHONPATH", ""))
    import torch

    torch.set_num_threads(1)  # threads of several processes would only wait for each other
    if isinstance(code, Path):
        sys.argv = [str(code), *words]
        runpy.run_path(str(code), run_name="__main__")
    else:
        sys.argv = ["normgeo", *words]
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


class Forked:
    """A process that runs code, or the file of a path, with words as arguments; variables are its environment's."""

    def __init__(self, code, *words, **environment):
        self._folder = Path(tempfile.mkdtemp(prefix="forked"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        for name in ("out", "err"):
            (self._folder / name).touch()
        given = (code, list(map(str, words)), self._folder, os.environ | environment)
        self.process = _context.Process(target=_begin, args=given, daemon=True)
        self.process.start()
        self.kill, self.pid = self.process.kill, self.process.pid

    @property
    def stdout(self):
        return (self._folder / "out").read_text()

    @property
    def stderr(self):
        return (self._folder / "err").read_text()

    @property
    def returncode(self):
        """None while it runs; that of a signal is negative."""
        return self.process.exitcode

    def until(self, there, seconds=300):
        """Wait for something, which the process must be alive to see: a folder may go while it is searched."""

        def seen():
            with contextlib.suppress(FileNotFoundError):
                return there()

        end = time.monotonic() + seconds
        while not seen():
            assert self.returncode is None, f"it ended with {self.returncode}: {self.stderr}"
            assert time.monotonic() < end, f"nothing for {seconds} s: {self.stderr}"
            time.sleep(0.001)

    def ended(self, seconds=300):
        """Itself, when it has ended."""
        self.process.join(seconds)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"not done after {seconds} s: {self.stderr}")
        return self

    def done(self):
        """Itself, when it has ended well."""
        assert self.ended().returncode == 0, self.stderr
        return self


def free_port():
    """One that nothing has, below those that connections are given: any of a test beside this one may be given one of
    those before it is listened at, and keeps it for a minute."""
    while True:
        with contextlib.closing(socket.socket()) as free, contextlib.suppress(OSError):
            free.bind(("", port := 10_000 + secrets.randbelow(20_000)))
            return port


def ranks(code, *words, n=2, **environment):
    """As many processes as torchrun would start, and what it would tell them."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    told |= {"LOCAL_WORLD_SIZE": str(n)} | environment
    return [Forked(code, *words, RANK=str(rank), LOCAL_RANK=str(rank), **told) for rank in range(n)]
