"""The store of hidden states: what is in it, that nothing is lost, and that damage and mixtures are refused."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
import zarr
from zoo import tiny

from normgeo import HiddenStateStore, capture, cli, find_sites, load_model, runs, stream
from normgeo.capture import CaptureConfig, angles_from_store, resume_capture, start_capture
from normgeo.errors import RunError, StoreError
from normgeo.rebuild import find_rebuild, same_bits
from normgeo.runs import RunConfig, start_run
from normgeo.store import verify
from normgeo.store_layout import locked
from normgeo.store_writer import StoreWriter
from normgeo.tokens import load_tokens

N, CONTEXT = 700, 20


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Saved tiny models and token ids: 40 sequences of 20."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "llama", "qwen3", "gemma"):
        tiny(name).save_pretrained(folder / name)
    tiny("gpt2", seed=1).save_pretrained(folder / "other")
    ids = np.random.default_rng(0).integers(3, 96, (40, CONTEXT))
    np.save(folder / "ids.npy", ids)
    return folder


def config(home, model="gpt2", phases=("pre",), n=N, **changes):
    options = {"data": str(home / "ids.npy"), "tokens": n, "batch": 3, "null": 8, "device": "cpu"} | changes
    return CaptureConfig(RunConfig((str(home / model),), **options), phases, 64 * 32 * 4)


def captured(home, path, *args, **changes):
    start_capture(config(home, *args, **changes), path, progress=False)
    return path


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """Drawing takes most of the time of a capture this small."""
    if request.node.name != "test_commands":
        monkeypatch.setattr(runs, "_draw", lambda table, folder: None)


@pytest.fixture(scope="module")
def store(home, tmp_path_factory):
    return captured(home, tmp_path_factory.mktemp("store") / "s")


@pytest.fixture
def copy(store, tmp_path):
    return shutil.copytree(store, tmp_path / "copy")


def content(path):
    """Every byte that counts: all but dates and command lines."""
    found = {}
    for part in ("hidden.zarr", "commits", "state"):
        for file in sorted((path / part).rglob("*")):
            if file.is_file() and file != path / "hidden.zarr/zarr.json":
                found[str(file.relative_to(path))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", None), ("llama", "bfloat16"), ("qwen3", "float16")])
def test_plain_zarr_reads_what_naive_hooks_see(home, tmp_path, name, dtype):
    path = captured(home, tmp_path / "s", name, ("pre", "standardized", "post"), dtype=dtype, qk=True, batch=35)
    model = load_model(home / name, dtype=getattr(torch, dtype or "float32"))
    sites = find_sites(model, qk=True)
    ids = np.load(home / "ids.npy")[:35]
    kept = oracle.capture(model, ids, [site.name for site in sites])
    root = zarr.open_group(path / "hidden.zarr", mode="r")
    np.testing.assert_array_equal(root["tokens/id"][:], ids.ravel())
    np.testing.assert_array_equal(root["tokens/position"][:], np.tile(np.arange(CONTEXT), 35))
    np.testing.assert_array_equal(root["tokens/document"][:], np.repeat(np.arange(35), CONTEXT))
    for site in sites:
        for phase, truth in zip(("pre", "post"), kept[site.name][site.call], strict=True):
            array = root[f"sites/{site.key}/{phase}"]
            assert array.shape == (N * site.heads, site.d)
            assert array.chunks[0] & (array.chunks[0] - 1) == 0
            values = array[:]
            if dtype == "bfloat16":
                assert values.dtype == np.uint16
                values = (values.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(values.astype(np.float64), truth)
        y = oracle.standardized(kept[site.name][site.call][0], site.kind, site.eps)
        found = HiddenStateStore(path).open(site.key, "standardized").torch().double().numpy()
        np.testing.assert_allclose(found, y, rtol=0.01 if dtype else 1e-4, atol=0.01 if dtype else 1e-4)
        assert root[f"sites/{site.key}"].attrs["eps"] == site.eps
    assert root.attrs["identity"]["about"]["weights_sha256"]
    assert set(root.attrs["versions"]) >= {"torch", "zarr"}


def test_xarray_and_dask_open_it(store):
    xarray, dask = pytest.importorskip("xarray"), pytest.importorskip("dask.array")
    site = HiddenStateStore(store).sites[0]
    expected = HiddenStateStore(store).open(site.key).torch().numpy()
    lazily = dask.from_zarr(str(store / "hidden.zarr"), component=f"sites/{site.key}/pre")
    np.testing.assert_array_equal(lazily.compute(scheduler="synchronous"), expected)
    with xarray.open_zarr(store / "hidden.zarr", group=f"sites/{site.key}", consolidated=False) as found:
        np.testing.assert_array_equal(found["pre"].values, expected)


def test_the_bytes_are_those_that_were_said(home, tmp_path):
    lines = []
    start_capture(config(home), tmp_path / "s", announce=lines.append, progress=False)
    files = [f for f in (tmp_path / "s/hidden.zarr").rglob("c.*") if f.parent.name not in ("gain", "bias")]
    assert f"exactly {sum(f.stat().st_size for f in files):,} bytes" in lines[0]
    assert not (tmp_path / "s/scratch").exists()


@pytest.mark.parametrize(
    ("name", "phases", "changes"),
    [("gpt2", ("pre",), {}), ("llama", ("pre", "post"), {"dtype": "bfloat16"}), ("gemma", ("pre",), {"context": 7}),
     ("qwen3", ("pre",), {"qk": True, "batch": 16})],
)  # fmt: skip
def test_angles_of_the_store_are_those_of_the_model(home, tmp_path, name, phases, changes):
    setup = config(home, name, phases, **changes)
    whole = start_run(setup.run, tmp_path / "run", progress=False)
    during = start_capture(setup, tmp_path / "s", progress=False)
    lines = []
    after = angles_from_store(tmp_path / "s", null=8, announce=lines.append, progress=False)
    assert not lines
    for table in (during, after):
        pd.testing.assert_frame_equal(table.frame, whole.frame, check_exact=True)
        pd.testing.assert_frame_equal(table.sinks, whole.sinks, check_exact=True)


def test_what_is_rebuilt_only_to_rounding_is_said(copy):
    file = next((copy / "hidden.zarr").rglob("gain/c.0"))
    raw = bytearray(file.read_bytes())
    values = np.frombuffer(raw, np.float32, 32).copy()
    values[3] = np.nextafter(values[3], 9)
    array = zarr.open_group(copy / "hidden.zarr", mode="r+")[str(file.parent.relative_to(copy / "hidden.zarr"))]
    array[:] = values
    lines = []
    angles_from_store(copy, null=4, announce=lines.append, progress=False)
    assert "at 1 of 5 sites are the model's to rounding" in lines[0]
    assert any("gain/c.0 is damaged" in line for line in verify(copy)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "olmo", "cohere", "llama", "gemma", "gemma2", "nemotron", "olmo2", "t5"])
def test_outputs_are_rebuilt_to_the_last_bit(tiny, name, dtype):
    import copy

    model = copy.deepcopy(tiny(name)).to(dtype)
    modules = dict(model.named_modules())
    for site in find_sites(model):
        x = (3 * torch.randn(9, site.d)).to(dtype)
        with torch.no_grad():
            assert find_rebuild(modules[site.name], site, x, modules[site.name](x)).bit_equal


def test_reading(store):
    found = HiddenStateStore(store)
    states = found.open(found.sites[1].key)
    assert found.complete
    assert states.shape == (N, 32)
    assert same_bits(torch.cat(list(states.batches(33))), states.torch())
    assert np.asarray(states).shape == (N, 32)
    assert [c.stop for c in found.commit_log][-1] == N
    with pytest.raises(StoreError, match="phases pre"):
        found.open(found.sites[1].key, "post")
    with pytest.raises(StoreError, match="is no store"):
        HiddenStateStore(store / "state")


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"context": 7}, {"batch": 16}])
def test_an_interrupted_capture_is_resumed_bit_identically(home, tmp_path, monkeypatch, changes):
    whole = content(captured(home, tmp_path / "whole", **changes))
    for after in (1, 2, 1):

        def dying(*args, after=after):
            for n, batch in enumerate(stream.stream(*args), 1):
                if n == after and any(isinstance(sink, StoreWriter) for sink in args[3]):
                    raise KeyboardInterrupt
                yield batch

        monkeypatch.setattr(capture, "stream", dying)
        begun = (tmp_path / "cut").exists()
        go = resume_capture if begun else lambda path, progress: captured(home, path, **changes)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "cut", progress=False)
        monkeypatch.undo()
        assert HiddenStateStore(tmp_path / "cut").n_tokens < N
    monkeypatch.setattr(runs, "_draw", lambda table, folder: None)
    resume_capture(tmp_path / "cut", progress=False)
    assert content(tmp_path / "cut") == whole


CODE = """
import sys, time
from pathlib import Path
import torch; torch.set_num_threads(1)
from normgeo import capture, runs
from normgeo.runs import RunConfig
runs._draw = lambda table, folder: None
home, out = Path(sys.argv[1]), Path(sys.argv[2])
run = RunConfig((str(home / "gpt2"),), str(home / "many.npy"), batch=3, null=8, device="cpu")
config = capture.CaptureConfig(run, ("pre", "post"), 256 * 32 * 4)
print("ready", flush=True)
go = capture.resume_capture if (out / "store.json").exists() else lambda o, **k: capture.start_capture(config, o, **k)
go(out, progress=False)
"""


def launch(home, out):
    return subprocess.Popen([sys.executable, "-c", CODE, str(home), str(out)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


def killed(home, out, rounds, rng, longest):
    """Kill a capture at random moments; gives how many kills met it at work."""
    met = 0
    for _ in range(rounds):
        process = launch(home, out)
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, longest))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            met += 1
        process.communicate()
    return met


def test_killed_processes_lose_nothing(home, tmp_path):
    np.save(home / "many.npy", np.random.default_rng(1).integers(3, 96, (int(os.environ.get("ROWS", 600)), CONTEXT)))
    whole = launch(home, tmp_path / "whole")
    whole.stdout.readline()
    began = time.monotonic()
    _, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err.decode()
    rounds = int(os.environ.get("ROUNDS", 2))
    met = killed(home, tmp_path / "cut", rounds, random.Random(rounds), 0.8 * (time.monotonic() - began))
    print("kills", met, "of", rounds)
    if not (tmp_path / "cut/angles.parquet").exists():
        last = launch(home, tmp_path / "cut")
        _, err = last.communicate(timeout=300)
        assert last.returncode == 0, err.decode()
    assert met
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert verify(tmp_path / "cut")[1] == []


def test_a_full_disk_stops_cleanly_and_resumes(home, tmp_path, monkeypatch, store):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 150:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"disk .* is full.*--resume"):
            captured(home, tmp_path / "s")
    assert len(calls) >= 150
    assert not list((tmp_path / "s").rglob("*.chunk"))
    resume_capture(tmp_path / "s", progress=False)
    assert content(tmp_path / "s") == content(store)


def test_what_cannot_fit_is_refused_before_anything(home, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StoreError, match="the hidden states need"):
        captured(home, tmp_path / "s")
    assert not (tmp_path / "s").exists()


# --- sabotage ---------------------------------------------------------------------------------------------------------


def a_chunk(path, row=2):
    return sorted((path / "hidden.zarr").rglob(f"pre/c.{row}.0"))[1]


def test_a_flipped_bit_is_named_wherever_it_is(copy):
    metadata = sorted((copy / "hidden.zarr").rglob("zarr.json"))[3]
    for file in (a_chunk(copy), metadata, copy / "commits/00000003.json", next((copy / "state").iterdir())):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        _, problems = verify(copy)
        assert len(problems) == 1
        assert str(file) in problems[0]
        if file == a_chunk(copy):
            with pytest.raises(StoreError, match=rf"{file.name} is damaged"):
                angles_from_store(copy, null=4, progress=False)
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    assert verify(copy)[1] == []


def test_truncated_and_missing_chunks_and_commits_are_named(copy):
    file, commit = a_chunk(copy), copy / "commits/00000004.json"
    file.write_bytes(file.read_bytes()[:-100])
    commit.unlink()
    a_chunk(copy, 1).unlink()
    problems = " ".join(verify(copy)[1])
    assert f"{file} is truncated" in problems
    assert f"{commit} is missing" in problems
    assert "c.1.0 is missing" in problems
    assert HiddenStateStore(copy).n_tokens == HiddenStateStore(copy).commit_log[3].stop


def test_stores_are_never_mixed(home, copy, tmp_path):
    other = captured(home, tmp_path / "other", "other")
    shutil.copy(other / "commits/00000002.json", copy / "commits/00000002.json")
    with pytest.raises(StoreError, match="belongs to another store"):
        HiddenStateStore(copy)
    record = json.loads((other / "store.json").read_text())
    (other / "store.json").write_text(json.dumps(record | {"status": "running"}))
    shutil.copytree(home / "gpt2", home / "other", dirs_exist_ok=True)
    with pytest.raises(RunError, match="another weights sha256"):
        resume_capture(other, progress=False)
    tiny("gpt2", seed=1).save_pretrained(home / "other")


def test_other_tokens_are_refused_on_resume(home, copy):
    found = HiddenStateStore(copy)
    others = load_tokens(np.load(home / "ids.npy") + 1)
    with pytest.raises(StoreError, match="another tokenizer or other data"):
        capture._check_tokens(found, others)


def test_a_second_writer_is_refused(home, tmp_path, copy):
    record = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(record | {"status": "running"}))
    with locked(copy), pytest.raises(StoreError, match="another process writes"):
        resume_capture(copy, progress=False)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def normgeo(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

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


def test_commands(normgeo, home, tmp_path):
    words = ("capture", home / "gpt2", "--store", "s", "--data", home / "ids.npy", "--tokens", 300, "--null", 4)
    status, out, err = normgeo(*words)
    assert status == 0, err
    assert "exactly" in out
    assert normgeo("verify", "s")[0] == 0
    assert normgeo("angles", "--store", "s", "--null", 4, "--out", "a")[0] == 0
    assert json.loads((tmp_path / "a/run.json").read_text())["status"] == "complete"
    assert (tmp_path / "a/figures/energy.svg").exists()
    for command, message in (
        (words, "already holds a store (complete)"),
        (("capture", "--resume", "s"), "is complete"),
        (("capture", "--resume", "a"), "nothing to resume"),
        (("capture", home / "gpt2"), "--store to write"),
        ((*words[:2], "--store", "a", *words[4:]), "is no store"),
        ((*words[:2], "--store", "b", *words[4:], "--phases", "before"), "--phases takes some of"),
        (("angles", home / "gpt2", "--store", "s"), "--store says which model"),
        (("angles", "--store", "a"), "is no store"),
        (("verify", "a"), "is no store"),
    ):
        status, _, err = normgeo(*command)
        assert status == 1
        assert message in err
    assert not (tmp_path / "b").exists()
    next((tmp_path / "s/hidden.zarr").rglob("pre/c.0.0")).write_bytes(b"")
    status, out, err = normgeo("verify", "s")
    assert status == 1
    assert "is truncated" in out


def test_bench(home, tmp_path, monkeypatch):
    from normgeo import store_bench

    monkeypatch.setattr(store_bench, "disk_rate", lambda folder, n: runs.BLOCK_TOKENS * 1.0)
    monkeypatch.setattr(store_bench, "store_rate", lambda folder: 1e9)
    frame = store_bench.bench_store("embedded-layernorm", tmp_path, context=64, batch=4, n_tokens=1024, rounds=1)
    assert len(frame) == 5
    assert list(tmp_path.iterdir()) == []
