"""Offline, one thread, no logging from transformers, and hypothesis that gives the same examples every time."""

import errno
import functools
import gc
import io
import os
import shutil
import sys
import tracemalloc
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)  # fmt: skip

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels run on the CPU then

import jaxtyping
import numpy as np
import pytest
import zoo
from hypothesis import settings
from matplotlib.figure import Figure

_jaxtyped = jaxtyping.jaxtyped


def _where_arrays_are(it=None, **typechecker):
    """jaxtyping, for classes and for functions of arrays: other types are pyright's, and to check them in every call,
    and functions inside others whenever these are called, took half of all tests' time."""
    if it is None:
        return functools.partial(_where_arrays_are, **typechecker)
    given = [str(annotation) for annotation in getattr(it, "__annotations__", {}).values()]
    arrays = any("[Tensor, " in annotation or "[np.ndarray, " in annotation for annotation in given)
    return _jaxtyped(it, **typechecker) if arrays or isinstance(it, type) else it


jaxtyping.jaxtyped = _where_arrays_are

settings.register_profile("normgeo", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("normgeo")


def pytest_collection_finish():
    """What is imported by now stays: to look through it for garbage again and again took a tenth of all tests' time.

    What tests leave behind in cycles is looked through a tenth as often as it would be, which takes 3% less of theirs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(autouse=True)
def no_gpu_unless_asked_for(request, monkeypatch):
    """`auto` is the CPU in tests that are not of a GPU, wherever they run, and in the processes that they start."""
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors are tiny: threads only wait for each other, on a busy machine for 50 times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ids():
    """Seven sequences of 37 random ids; 7 * 37 times any quantile in use is no whole number."""
    return torch.randint(3, 96, (7, 37), generator=torch.Generator().manual_seed(5)).numpy()


@pytest.fixture(scope="session")
def tiny():
    """`zoo.tiny`, each model built once; for tests that leave models as they are."""
    built = {}

    def get(name):
        if name not in built:
            model = zoo.tiny(name)
            built[name] = model, zoo.fingerprint(model)
        get.given.add(name)
        return built[name][0]

    get.built, get.given = built, set()
    return get


@pytest.fixture(autouse=True)
def shared_models_stay_as_they_are(request):
    """Others are given them: which tests come after one that changes a model is another question in every run."""
    yield
    if "tiny" in request.fixturenames:
        get = request.getfixturevalue("tiny")
        changed = [name for name in get.given if zoo.fingerprint(get.built[name][0]) != get.built[name][1]]
        get.given.clear()
        for name in changed:
            del get.built[name]
        assert not changed, f"the test changed {', '.join(changed)}, which other tests are given: take zoo.tiny"


@pytest.fixture(scope="session")
def tokenizer():
    from normgeo import load_tokenizer

    return load_tokenizer("embedded-layernorm")  # its end-of-text token has the id 0, which is an id like any other


@pytest.fixture(scope="module", params=["compiled", "torch"])
def passes(request):
    """Both ways to pass over hidden states on a CPU, for modules that ask for them."""
    from normgeo import kernels

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels.cpu, "loaded", lambda: kernels.cpu.Library(None, "not in this test"))
        elif not kernels.status().compiled:
            pytest.skip(f"needs a compiler: {kernels.status().reason}")
        yield request.param


@pytest.fixture
def normgeo(monkeypatch, capsys, tmp_path):
    """Run a command in a scratch directory that has some ids; gives (exit status, output, errors)."""
    from normgeo.cli import main as cli

    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.random.default_rng(0).integers(3, 96, (8, 16)))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["normgeo", *map(str, words)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        out = capsys.readouterr()
        return status, " ".join(out.out.split()), " ".join(out.err.split())

    return run


@pytest.fixture
def untyped(monkeypatch):
    """Calls as users make them: without jaxtyping, which refuses arguments of other types before normgeo can."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def full_disk(monkeypatch):
    """Let the disk be full at the n-th fsync while inside."""
    from contextlib import contextmanager

    real = os.fsync

    @contextmanager
    def at(n):
        calls = []

        def full(descriptor):
            calls.append(descriptor)
            if len(calls) == n:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            yield
        assert len(calls) >= n

    return at


@pytest.fixture
def journal(monkeypatch):
    """What is synced, as its number in the file system, and the paths that get a file, in order."""
    done, sync = [], os.fsync

    def synced(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def naming(real):
        def named(source, path, **options):
            done.append(Path(path))
            real(source, path, **options)

        return named

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("link", "rename", "replace"):
        monkeypatch.setattr(os, name, naming(getattr(os, name)))
    return done


@pytest.fixture(scope="session")
def peak_memory():
    """(what it gave, bytes at most while it ran) of a function: of three times the one with the least.

    What the process does but once, as when the table of all names in it doubles, is not the function's.
    """

    def measure(do):
        found = []
        for _ in range(3):
            tracemalloc.start()
            try:
                result = do()
                found.append((result, tracemalloc.get_traced_memory()[1]))
            finally:
                tracemalloc.stop()
        return min(found, key=lambda pair: pair[1])

    return measure


BY_STEP = ("heat_map", "one_layer", "all_layers", "curves")
BLANK = {kind: io.BytesIO() for kind in ("png", "svg")}
for _kind, _file in BLANK.items():
    Figure((1, 1)).savefig(_file, format=_kind, dpi=10)


def _blanked(patch):
    patch.setattr(Figure, "savefig", lambda _, to, format, **how: to.write(BLANK[format].getvalue()))
    for drawn in ("angles.measure.AngleTable.plot", *(f"training.figures.{name}" for name in BY_STEP)):
        patch.setattr(f"normgeo.{drawn}", lambda *_, **__: Figure((1, 1)))


def _coarse(patch):
    real = Figure.savefig
    patch.setattr(Figure, "savefig", lambda self, to, dpi=None, **how: real(self, to, dpi=dpi and 80, **how))


@pytest.fixture(autouse=True, scope="module")
def blank_figures(request):
    """Where no test looks at them: to draw and render them takes most of the time of a run this small.

    Of a whole module, whose own fixtures run before those of its tests. Where they are not what is tested, but are
    there, they have fewer pixels.
    """
    about = {*request.path.stem.split("_")}
    with pytest.MonkeyPatch.context() as patch:
        if not {"figures", "report", "analyses", "docs"} & about:
            _blanked(patch)
        elif "figures" not in about:
            _coarse(patch)
        if "analyses" in about:  # which do not look at the figures of a run
            patch.setattr("normgeo.angles.runs._draw", lambda table, folder: None)
        yield patch


@pytest.fixture
def rendered(blank_figures):
    """Figures as users get them, in the files of a test that is not of figures."""
    blank_figures.undo()
    yield
    _blanked(blank_figures)


@pytest.fixture
def unrendered(monkeypatch):
    """Figures that are laid out once, and whose files, which the test does not look into, are empty."""

    def laid_out(figure, to, format, **how):
        if format == "png":
            figure.draw_without_rendering()

    monkeypatch.setattr(Figure, "savefig", laid_out)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Saved tiny models and token ids: 40 sequences of 20."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "llama", "qwen3", "gemma"):
        zoo.tiny(name).save_pretrained(folder / name)
    zoo.tiny("gpt2", seed=1).save_pretrained(folder / "other")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 96, (40, 20)))
    return folder


@pytest.fixture(scope="session")
def store(home, tmp_path_factory):
    """A store that tests only read."""
    from stores import captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normgeo.angles.runs._draw", lambda table, folder: None)
        return captured(home, tmp_path_factory.mktemp("store") / "s")


@pytest.fixture
def threads():
    """Three threads for a scan; torch has one otherwise."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def copy(store, tmp_path):
    return shutil.copytree(store, tmp_path / "copy")
