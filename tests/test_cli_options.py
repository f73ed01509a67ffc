"""Every option of a command reaches what it is of, zeros too."""

import gc
from pathlib import Path

import pytest

from normgeo.angles import runs
from normgeo.angles.job import RunConfig
from normgeo.bench import inference as inference_bench
from normgeo.bench import inference_models
from normgeo.bench import norms as norm_bench
from normgeo.bench import store as store_bench
from normgeo.comparison import compare as comparison
from normgeo.conversion import runs as conversion_runs
from normgeo.errors import ModelError, NormGeoError
from normgeo.hub import FORM
from normgeo.store import capture as capturing
from normgeo.store import scan
from normgeo.store.capture import CaptureConfig
from normgeo.system.ranks import Ranks
from normgeo.training import checkpoint_angles
from normgeo.training import runs as training_runs
from normgeo.training.recipe import recipe_for
from normgeo.training.runs import TrainConfig


@pytest.fixture
def called(normgeo, monkeypatch):
    """Run a command up to one function; gives what that was given, callbacks aside."""

    def call(module, function, *words):
        given = []

        def stop(*args, **options):
            options = {k: v for k, v in options.items() if not callable(v)}
            given.append((args, options))
            assert gc.isenabled()  # it is not while libraries are loaded
            raise NormGeoError("enough")

        monkeypatch.setattr(module, function, stop)
        status, _, said = normgeo(*words)
        assert (status, said) == (1, "error: enough"), said
        assert gc.isenabled()
        return given[0]

    return call


ANGLES = {
    "data": "ids.npy", "tokens": 70, "context": 9, "batch": 3, "dtype": "float64", "device": "cpu", "null": 0,
    "null_every": 5, "seed": 7, "sites": "final", "revision": "main",
}  # fmt: skip


def words(options, *flags):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)] + list(flags)


def test_angles(called):
    options = ANGLES | {"keep": "none", "device": "auto", "device_map": "auto"}
    config = RunConfig(("m",), qk=True, trust_remote_code=True, **options)
    given = called(runs, "start_run", "angles", "m", *words(options, "--qk", "--trust-remote-code", "--out", "here"))
    assert given == ((config, Path("here")), {"ranks": Ranks()})
    config = RunConfig((), qk=True, trust_remote_code=True, **ANGLES)
    of = words(ANGLES, "--checkpoints", "x", "--qk", "--trust-remote-code", "--out", "here")
    given = called(checkpoint_angles, "start_checkpoints", "angles", *of)
    assert given == (("x", config, Path("here")), {"ranks": Ranks()})


def test_angles_of_a_store(called):
    options = {name: ANGLES[name] for name in ("null", "null_every", "seed", "sites")}
    options |= {"keep": "none", "scheduler": "tcp://a:1"}
    given = called(scan, "run_from_store", "angles", "--store", "s", *words(options, "--out", "here"))
    assert given == (("s", Path("here")), options)
    assert called(scan, "run_from_store", "angles", "--store", "s")[1] == dict.fromkeys(options)


def test_capture(called):
    options = ANGLES | {"device": "auto", "device_map": "auto"}
    config = RunConfig(("m",), qk=True, keep="none", trust_remote_code=True, **options)
    more = ("--phases", "pre, post", "--chunk-mib", 3, "--qk", "--trust-remote-code", "--store", "s")
    given = called(capturing, "start_capture", "capture", "m", *words(options, *more))
    assert given == ((CaptureConfig(config, ("pre", "post"), 3 * 2**20), "s"), {})


def test_what_was_interrupted_goes_on_with_a_repositorys_code(called):
    for flags, trusted in (((), False), (("--trust-remote-code",), True)):
        for module, function, command in ((runs, "resume_run", "angles"), (capturing, "resume_capture", "capture")):
            (where,), options = called(module, function, command, "--resume", "here", *flags)
            assert (str(where), options) == ("here", {"trust_remote_code": trusted})


def test_convert(called):
    options = {name: ANGLES[name] for name in ("data", "tokens", "context", "dtype", "device", "revision")}
    flags = "--keep-tie", "--fold-affine", "--padded", "--in-memory", "--trust-remote-code"
    more = words(options | {"to": "crmsnorm", "outputs": "logits, a.b"}, *flags)
    given = called(conversion_runs, "convert_checkpoint", "convert", "m", "here", *more)
    options["n_tokens"] = options.pop("tokens")
    flags = dict.fromkeys(("keep_tie", "fold_affine", "padded", "trust_remote_code"), True) | {"by_shard": False}
    assert given == (("m", Path("here")), options | flags | {"to": "crmsnorm", "outputs": ["logits", "a.b"]})


def test_compare(called):
    options = {name: ANGLES[name] for name in ANGLES if name not in ("null_every", "sites")}
    more = words(options | {"rounds": 2}, "--naive", "--trust-remote-code", "--out", "here")
    for models in (("a", "b"), ("a",)):
        given = called(comparison, "compare_run", "compare", *models, *more)
        config = RunConfig(models, trust_remote_code=True, **options)
        assert given == ((config, Path("here")), {"naive": True, "rounds": 2})


def test_train(called):
    changes = {
        "steps": 9, "batch": 4, "accumulate": 2, "context": 8, "lr": 0.5, "warmup": 0, "dropout": 0.0,
        "precision": "no", "checkpoint_every": 3, "save_every": 4, "evaluate_every": 5, "seed": 0,
    }  # fmt: skip
    about = {"norm": "rmsnorm", "data": "ids.npy", "exclude": "e.jsonl", "tokenizer": "t", "vocabulary": 90}
    more = words(changes | about | {"device": "cpu", "size": "70m", "out": "here"})
    other = {"seed": 7, "dropout": 0.5, "precision": "bf16"}  # than what a recipe has by itself
    for flags, differ in ((), {"tied": True}), ((*words(other), "--untie"), other | {"tied": False}):
        given = called(training_runs, "start_training", "train", *more, *flags)
        recipe = recipe_for("70m", **changes | differ)
        assert given == ((TrainConfig(*about.values(), "cpu"), recipe, Path("here")), {"board": False})


def test_what_is_not_given_is_as_in_python(called):
    run = RunConfig(("m",))
    assert called(runs, "start_run", "angles", "m", "--out", "here")[0] == (run, Path("here"))
    capture = CaptureConfig(RunConfig(("m",), keep="none"))
    assert called(capturing, "start_capture", "capture", "m", "--store", "s")[0] == (capture, "s")
    assert called(comparison, "compare_run", "compare", "m", "--out", "here") == (
        (run, Path("here")),
        {"naive": False, "rounds": 7},
    )
    train = TrainConfig(), recipe_for("tiny"), Path("here")
    assert called(training_runs, "start_training", "train", "--out", "here") == (train, {"board": False})


NAMED = ("--revision", "main", "--trust-remote-code")
OF_A_MODEL = {"revision": "main", "trust_remote_code": True}


def test_benchmarks(called, monkeypatch):
    built = []
    monkeypatch.setattr(inference_models, "build", lambda *given, **options: built.append((given, options)))
    monkeypatch.setattr(inference_bench, "check_compiler", lambda where: built.append(where))
    timing = {"rounds": 4, "seconds": 0.0, "seed": 7}
    more = words(timing | {"dtype": "float32,bfloat16", "batch": "1,2", "length": "8", "variants": "fused"})
    modes = "--decode", "--compile", "--graphs"
    for flags, phases, found in ((modes, ("forward", "decode"), inference_bench.MODES), ((), ("forward",), ("eager",))):
        given = called(inference_bench, "bench_inference", "bench", "inference", "m", *more, *flags, *NAMED)
        about = {"variants": ["fused"], "dtypes": ["float32", "bfloat16"], "batches": [1, 2], "lengths": [8]}
        assert given == ((None, "m"), timing | about | {"phases": phases, "modes": found})
    assert built == ["cpu", *[(("m",), {"device": "cpu", "seed": 7} | OF_A_MODEL)] * 2]
    more = words(timing | {"shapes": "1x2x9,3x4x16", "dtype": "float16", "device": "cpu"})
    for flags in (("--backward",), ("--no-beta",), ()):
        given = called(norm_bench, "bench_norms", "bench", "norms", *more, *flags)
        about = {"dtypes": ["float16"], "backward": "--backward" in flags, "beta": "--no-beta" not in flags}
        about["device"] = "cpu"
        assert given == (([(1, 2, 9), (3, 4, 16)],), timing | about)
    options = {name: ANGLES[name] for name in ("data", "context", "batch", "tokens", "dtype", "device")}
    more = words(options | {"folder": "f", "rounds": 2}, *NAMED)
    given = called(store_bench, "bench_store", "bench", "store", "m", *more)
    assert given == ((RunConfig(("m",), **options, **OF_A_MODEL), Path("f")), {"rounds": 2})


def test_models_of_benchmarks_may_bring_their_code(monkeypatch, normgeo):
    asked = []

    def loaded(name, **options):
        asked.append({key: options[key] for key in OF_A_MODEL})
        raise ModelError("seen")

    for module in ("normgeo.loading", "normgeo.bench.training", "normgeo.bench.inference_models", "normgeo.angles.job"):
        monkeypatch.setattr(f"{module}.load_model", loaded)
    for command in (("stream", "a/b"), ("store", "a/b"), ("inference", "a/b"), ("train", "--sizes", "a/b")):
        assert normgeo("bench", *command, *NAMED)[2].endswith("error: seen")
    assert asked == [OF_A_MODEL] * 4
    for command in (("inference", "vit-tiny"), ("train", "--sizes", "tiny"), ("train", "--sizes", "vit-tiny")):
        assert "is made up, and has no revision 'main'" in normgeo("bench", *command, *NAMED)[2]


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"WORLD_SIZE": "2"}, False),  # of a batch system, which launches one
        ({"LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, True),
    ],
)
def test_one_process_is_alone_wherever_it_was_launched(told, refused, normgeo, monkeypatch):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    status, _, said = normgeo("models")
    assert (status, "models is done by one process, and 2 were launched" in said) == (refused, refused)
    monkeypatch.setenv("RANK", "1")
    status, _, said = normgeo("models")
    assert (status, said) == (refused, "")  # the first says it for all


def test_brackets_in_help_are_shown(normgeo):
    for command in ("angles", "capture", "compare"):
        shown = "".join(normgeo(command, "--help")[1].replace("│", "").split())
        assert FORM.partition("[:")[0] in shown


def test_a_working_directory_that_is_removed_meanwhile_is_said_to_be(normgeo, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    status, _, said = normgeo("angles", "embedded-rmsnorm")
    assert (status, said.startswith("error: the directory that this works in was removed")) == (1, True)
