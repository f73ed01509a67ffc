"""The kernels are built once, safely; where they cannot be, torch takes their place and says why."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from test_kernels import expected, vectors

from normgeo import kernels
from normgeo.geometry import Directions
from normgeo.kernels import BINS, compiling, cpu, fallback, launching, norm_ops


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no kernels loaded yet, and a compiler that is not asked for fast ones."""
    monkeypatch.setattr(compiling, "FLAGS", ("-O0", *compiling.FLAGS[1:]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NORMGEO_KERNELS", raising=False)
    cpu.loaded.cache_clear()
    yield tmp_path
    cpu.loaded.cache_clear()


@pytest.fixture
def small(tmp_path):
    """A source that is built in no time."""
    (tmp_path / "small.cpp").write_text('extern "C" int one() { return 1; }\n')
    return tmp_path / "small.cpp"


def shared_objects(cache):
    return sorted(p.name for p in (cache / "normgeo").glob("*.so"))


def test_they_are_built_once_and_kept(cache):
    assert kernels.status().compiled, kernels.status()
    (name,) = shared_objects(cache)
    assert str(cache / "normgeo" / name) == kernels.status().reason
    before = (cache / "normgeo" / name).stat().st_mtime_ns
    cpu.loaded.cache_clear()
    assert kernels.status().compiled
    assert (cache / "normgeo" / name).stat().st_mtime_ns == before


@pytest.mark.parametrize("what", ["source", "flags", "processor", "header", "compiler", "words", "options"])
def test_another_source_header_flag_compiler_or_processor_is_another_file(cache, small, monkeypatch, tmp_path, what):
    before = compiling.compiled(small)
    if what == "source":
        small.write_text(small.read_text() + "// changed\n")
    elif what == "flags":
        monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-g"))
    elif what == "header":
        for header in compiling.HERE.glob("*.h"):
            (tmp_path / header.name).write_text(header.read_text() + "// changed\n" * (header.stem == "lanes"))
        monkeypatch.setattr(compiling, "HERE", tmp_path)
    elif what in ("compiler", "words"):  # as ccache g++ are two
        words = {"compiler": "", "words": "shift;"}[what]
        file, last = tmp_path / "newer", {"compiler": "", "words": " g++"}[what]
        file.write_text(f'#!/bin/sh\n{words} [ "$1" = --version ] && echo 99.1 || exec {GXX} "$@"\n')
        file.chmod(0o755)
        monkeypatch.setenv("CXX", f"{file}{last}")
    elif what == "options":  # that CXX gives the compiler
        monkeypatch.setenv("CXX", f"{GXX} -ffast-math")
    else:
        monkeypatch.setattr(compiling, "_processor", lambda: "another")
    assert {compiling.compiled(small).name, before.name} == set(shared_objects(cache))
    assert len(shared_objects(cache)) == 2


def test_a_file_is_of_its_own_flags_and_safe_before_it_has_its_name(cache, small, monkeypatch):
    synced, renamed, sync, replace = [], [], os.fsync, Path.replace

    def put(self, target):
        renamed.append((self.stat().st_ino, list(synced)))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or sync(descriptor))
    monkeypatch.setattr(Path, "replace", put)
    paths = {compiling.compiled(small, flags) for flags in ((), ("-g",), ())}
    assert len(paths) == len(shared_objects(cache)) == len(renamed) == 2
    assert all(file in before for file, before in renamed)


# of all of x86-64 that come with other vectors; none of them need be this one
PROCESSORS = ["x86-64-v2", "haswell", "skylake-avx512", "sapphirerapids"] if platform.machine() == "x86_64" else []
TORCH = Path(torch.__file__).parent / "include"
ROOT = Path(__file__).parents[1]
GXX = shutil.which("g++")


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("source", ["project", "rms", "checksum", "ensemble", "norms"])
def test_sources_are_valid_for_processors_that_are_not_here(source, processor):
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in compiling.FLAGS]
    command = ["g++", *flags, "-fsyntax-only", f"-I{TORCH}", str(compiling.HERE / f"{source}.cpp")]
    found = subprocess.run(command, capture_output=True, text=True)
    if source == "ensemble" and processor != "sapphirerapids":
        assert "does not multiply bfloat16" in found.stderr
        including = subprocess.run([*command, "-H"], capture_output=True, text=True).stderr.splitlines()
        assert not [line for line in including if line.startswith(".")]  # no header is read before
    else:
        assert found.returncode == 0, found.stderr[:2000]


NARROWER = """
import contextlib
import os

def pytest_sessionstart(session):
    from normgeo.kernels import compiling, norm_ops
    compiling.FLAGS = tuple(flag.replace("native", os.environ["PROCESSOR"]) for flag in compiling.FLAGS)
    norm_ops._directly = lambda flags: None  # the same kernels, which take half of all the time to build once more

def pytest_sessionfinish(session):
    from normgeo import kernels
    from normgeo.kernels import norm_ops, rms
    assert kernels.status().compiled and rms.loaded() is not None and norm_ops.loaded().compiled
"""
THEIRS = "projections or read_as_it_is or every_recipe or definition or sum_and_its_norm or smallest_numbers"


@pytest.mark.skipif(not PROCESSORS, reason="needs a processor of x86-64")
def test_narrower_vectors_give_the_same(tmp_path):
    """What the next processor with fewer instructions runs."""
    processor = "haswell" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "x86-64-v2"
    (tmp_path / "narrower.py").write_text(NARROWER)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"PROCESSOR": processor, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment.pop("NORMGEO_KERNELS", None)
    files = ["test_kernels.py", "test_rebuild.py", "test_norm_ops.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "narrower", "-p", "no:cacheprovider", "-k", THEIRS, *files]
    found = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]


def fails():
    """Kernels are off, the reason is said, and projections are right all the same."""
    cpu.loaded.cache_clear()
    status = kernels.status()
    assert not status.compiled
    assert str(status).startswith("torch: ")
    x, units = vectors(5, 12), Directions.seeded(12, 0).units
    np.testing.assert_allclose(kernels.project(x, units, centered=True), expected(x, units), rtol=1e-12, atol=1e-12)
    return status.reason


def test_they_can_be_turned_off(cache, monkeypatch):
    monkeypatch.setenv("NORMGEO_KERNELS", "0")
    assert fails() == "NORMGEO_KERNELS=0"
    assert not (cache / "normgeo").exists()


def test_without_a_compiler_torch_is_used(cache, monkeypatch):
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in fails()


def test_a_compiler_that_fails_is_named_with_its_first_complaint(cache, monkeypatch):
    broken = cache / "g++"
    broken.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo broken 1.0;; *) echo "In f:\nerror: no such" >&2; exit 3;; esac\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cache}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert fails() == f"{broken} failed (error: no such); the environment's CXX names another compiler"
    assert shared_objects(cache) == []


def test_a_cache_that_is_full_is_no_fault_of_the_compilers(cache, monkeypatch):
    says = "ld: final link failed: No space left on device"
    (cache / "g++").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo "{says}\ncollect2: error: ld" >&2; exit 1; }}\n'
    )
    (cache / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(cache / "g++"))
    assert fails() == f"nothing can be built in {cache / 'normgeo'} ({says}); XDG_CACHE_HOME names another cache"


def test_a_compiler_may_complain_in_any_encoding(cache, monkeypatch):
    (cache / "g++").write_text('#!/bin/sh\nprintf "K\\344fer 1.0, error: ung\\374ltig\n" | tee /dev/stderr; exit 1\n')
    (cache / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(cache / "g++"))
    assert fails().startswith(f"{cache / 'g++'} failed (K\ufffdfer 1.0, error: ung\ufffdltig)")


def test_a_compiler_that_builds_nothing_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    assert fails() == f"{shutil.which('true')} built nothing; the environment's CXX names another compiler"


def test_a_cache_that_cannot_be_written_is_no_error(cache):
    (cache / "normgeo").write_text("in the way")
    assert "normgeo" in fails()


@pytest.mark.parametrize("mode", [0o777, 0o770, None])
def test_a_cache_that_others_may_write_is_not_loaded_from(cache, small, monkeypatch, mode):
    """Where XDG_CACHE_HOME is in /tmp, say, somebody else may have made it before."""
    folder = compiling.compiled(small).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    if mode is not None:
        folder.chmod(mode)
    elif os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match="others may write there, and what they write would be run") as refused:
        compiling.compiled(small)
    remedy = f"chmod go-w {folder}"
    assert (remedy in str(refused.value)) is (mode is not None)  # another's directory is not one's own to change
    if mode is not None:
        subprocess.run(remedy, shell=True, check=True)
        compiling.compiled(small)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:0], lambda b: b[:5000], lambda b: b[:-1], lambda b: b[:9000] + b"\1" + b[9001:]]
)
def test_a_damaged_file_is_built_again(cache, small, damage):
    path = compiling.compiled(small)
    whole = path.read_bytes()
    assert whole != damage(whole)
    path.write_bytes(damage(whole))
    again = compiling.compiled(small)
    assert again.read_bytes() == whole
    assert shared_objects(cache) == [again.name]


def test_a_damaged_library_is_never_loaded(cache):
    """The end of one that is not there would end the process."""
    path = compiling.compiled(cpu.SOURCE)
    whole = path.read_bytes()
    path.write_bytes(whole[:9000] + b"\1" + whole[9001:])
    assert kernels.status().compiled
    assert path.read_bytes() == whole


def test_a_file_that_is_no_library_is_no_error(cache, monkeypatch):
    odd = cache / "g++"
    find = 'while [ "$1" != -o ]; do shift; done'
    odd.write_text(f'#!/bin/sh\ncase "$1" in --version) echo odd 1.0;; *) {find}; echo none > "$2";; esac\n')
    odd.chmod(0o755)
    monkeypatch.setenv("CXX", str(odd))
    assert "normgeo/project-" in fails()


def test_a_compiler_that_takes_too_long_is_ended_with_what_it_started(cache, monkeypatch):
    slow, started = cache / "g++", cache / "started"
    slow.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo slow 1.0;; *) sleep 100 & echo $! > {started}; wait;; esac\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiling, "SECONDS", 1)
    assert fails() == f"{slow} took more than 1 s; the environment's CXX names another compiler"
    process = Path(f"/proc/{started.read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while process.exists() and process.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists() or process.read_text().split()[2] == "Z"  # nobody may be there to bury it
    assert shared_objects(cache) == []


def test_a_library_that_computes_something_else_is_not_used(cache, monkeypatch, tmp_path):
    source = cpu.SOURCE.read_text().replace("out[r] = std::sqrt(squares);", "out[r] = squares;")
    assert source != cpu.SOURCE.read_text()
    (tmp_path / "other.cpp").write_text(source)
    monkeypatch.setattr(cpu, "SOURCE", tmp_path / "other.cpp")
    assert "wrong results" in fails()


def test_of_several_processes_one_builds_and_the_others_wait(cache, monkeypatch):
    counting = cache / "g++"
    counting.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo >> {cache / "built"}\nexec {GXX} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("CXX", str(counting))
    runs = [Forked("from normgeo import kernels; print(kernels.status().compiled)") for _ in range(3)]
    assert [run.done().stdout.strip() for run in runs] == ["True"] * 3
    assert len(shared_objects(cache)) == 1
    assert (cache / "built").read_text() == "\n"


@pytest.mark.skipif(compiling.fcntl is None, reason="needs the system's locks")
def test_a_process_that_is_forked_meanwhile_keeps_nobody_waiting(tmp_path):
    def opened(name):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            return os.path.samefile(f"/dev/fd/{name}", tmp_path / "lock")

    with compiling._alone(tmp_path / "lock"):
        (own,) = list(filter(opened, os.listdir("/dev/fd")))
        forked = os.dup(int(own))
    with (tmp_path / "lock").open("w") as file:
        compiling.fcntl.flock(file, compiling.fcntl.LOCK_EX | compiling.fcntl.LOCK_NB)
    os.close(forked)


def test_the_source_ships_with_the_package():
    assert cpu.SOURCE.is_file()
    assert fallback.BINS == BINS == 18000


class Triton:
    """A module of kernels that cannot be built."""

    launches = 0

    def launch_smallest(self, device):
        self.launches += 1
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")


def test_triton_that_builds_nothing_is_found_out_once_by_its_smallest_launch(monkeypatch):
    kernels, name, device = Triton(), "normgeo.kernels.triton_norms", torch.device("cuda")
    capturing = [True]
    monkeypatch.setattr(launching, "_tried", {})
    monkeypatch.setitem(sys.modules, name, kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert norm_ops.on_cuda() is kernels  # nobody named a device
    assert norm_ops.on_cuda(device) is None  # while a graph is recorded nothing can be built
    assert kernels.launches == 0
    capturing[0] = False
    with pytest.warns(UserWarning, match=r"Triton fails \(Failed to find C compiler\.\)$"):
        assert norm_ops.on_cuda(device) is None
    assert norm_ops.on_cuda(device) is norm_ops.on_cuda() is None
    assert kernels.launches == 1


@pytest.mark.parametrize(
    ("error", "again"), [(torch.OutOfMemoryError("out of memory"), 2), (RuntimeError("no compiler"), 1)]
)
def test_a_full_device_says_nothing_of_triton_and_a_warning_that_is_an_error_is_raised_once(error, again, monkeypatch):
    kernels, name, device = Triton(), "normgeo.kernels.triton_norms", torch.device("cuda")
    monkeypatch.setattr(kernels, "launch_smallest", lambda _: (tries.append(1), (_ for _ in ()).throw(error)))
    monkeypatch.setattr(launching, "_tried", {})
    monkeypatch.setitem(sys.modules, name, kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tries = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with contextlib.suppress(torch.OutOfMemoryError, UserWarning):
                assert norm_ops.on_cuda(device) is None
    assert len(tries) == again
