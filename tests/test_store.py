"""The store of hidden states: what is in it, and that the angles of it are those of the model."""

import hashlib
import shutil
import threading
from copy import deepcopy as copied
from dataclasses import replace

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
import transformers as hf
import zarr
from stores import CONTEXT, N, captured, config, unfinished
from zoo import by_type

from normgeo import AngleTable, HiddenStateStore, find_sites, load_model
from normgeo.angles.runs import RunConfig, start_run
from normgeo.errors import DataError, StoreError
from normgeo.store import capture, scan
from normgeo.store.capture import CaptureConfig, start_capture
from normgeo.store.check import verify
from normgeo.store.rebuild import RECIPES, find_rebuild, same_bits
from normgeo.store.records import read_record, write_record
from normgeo.store.scan import angles_from_store
from normgeo.store.storage import Disk


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


def test_a_dask_array_is_of_the_store_that_was_opened(home, tmp_path):
    """Another capture in the same place has as many tokens, and other numbers."""
    pytest.importorskip("dask.array")
    for model in ("gpt2", "other"):
        states = HiddenStateStore(captured(home, tmp_path / "s", model)).open("transformer.h.0.ln_1")
        np.testing.assert_array_equal(states.dask().compute(scheduler="synchronous"), states[:])
        shutil.rmtree(tmp_path / "s")


def test_dask_arrays_of_two_stores_are_computed_together(home, tmp_path, store):
    """dask takes what has one name for one."""
    dask = pytest.importorskip("dask")
    other = captured(home, tmp_path / "s", "other", n=100)
    both = [HiddenStateStore(path).open("transformer.h.0.ln_1") for path in (store, other)]
    found = dask.compute(*(states.dask() for states in both), scheduler="synchronous")
    for states, numbers in zip(both, found, strict=True):
        np.testing.assert_array_equal(numbers, states[:])


def test_a_dask_array_of_a_store_that_was_replaced_is_refused(home, tmp_path):
    pytest.importorskip("dask.array")
    lazily = HiddenStateStore(captured(home, tmp_path / "s", "gpt2")).open("transformer.h.0.ln_1").dask()
    shutil.rmtree(tmp_path / "s")
    captured(home, tmp_path / "s", "other")
    with pytest.raises(StoreError, match="holds another capture than when this dask array was made"):
        lazily.compute(scheduler="synchronous")


def test_a_dask_array_of_a_store_that_grows_stays_good(copy):
    pytest.importorskip("dask.array")
    unfinished(copy)
    last = sorted((copy / "commits").iterdir())[-1]
    kept = last.read_bytes()
    last.unlink()
    states = HiddenStateStore(copy).open("transformer.ln_f")
    lazily, truth = states.dask(), states[:]
    last.write_bytes(kept)
    np.testing.assert_array_equal(lazily.compute(scheduler="synchronous"), truth)


def test_a_dask_array_of_nothing_is_empty(copy):
    pytest.importorskip("dask.array")
    unfinished(copy)
    shutil.rmtree(copy / "commits")
    states = HiddenStateStore(copy).open("transformer.ln_f")
    assert states.dask().compute(scheduler="synchronous").shape == states[:].shape == (0, 32)


def test_a_dask_array_is_computed_from_another_directory(store, tmp_path, monkeypatch):
    pytest.importorskip("dask.array")
    monkeypatch.chdir(store.parent)
    states = HiddenStateStore(store.name).open("transformer.ln_f")
    lazily, truth = states.dask(), states[:]
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(lazily.compute(scheduler="synchronous"), truth)


def test_the_bytes_are_those_that_were_said(home, tmp_path):
    lines = []
    start_capture(config(home), tmp_path / "s", announce=lines.append, progress=False)
    files = [f for f in (tmp_path / "s/hidden.zarr").rglob("c.*") if f.parent.name not in ("gain", "bias")]
    assert f"exactly {sum(f.stat().st_size for f in files):,} bytes" in lines[0]
    beside = [f for folder in ("commits", "state") for f in (tmp_path / "s" / folder).iterdir()]
    on_disk = sum(512 * f.stat().st_blocks for f in files + beside)
    most = int(lines[0].split("up to ")[1].split()[0].replace(",", ""))
    assert on_disk < most < 2 * on_disk
    assert not (tmp_path / "s/scratch").exists()


@pytest.mark.parametrize(
    ("name", "phases", "changes"),
    [("gpt2", ("pre",), {}), ("llama", ("pre", "post"), {"dtype": "bfloat16"}), ("gemma", ("pre",), {"context": 7}),
     ("qwen3", ("pre",), {"qk": True, "batch": 16}), ("gpt2", ("pre",), {"context": 1, "batch": 1, "n": 90}),
     ("other", ("pre",), {"context": 5, "batch": 3, "n": 313, "null": 70, "null_every": 2, "seed": 9})],
)  # fmt: skip
def test_angles_of_the_store_are_those_of_the_model(home, tmp_path, monkeypatch, name, phases, changes):
    setup = config(home, name, phases, **changes)
    whole = start_run(setup.run, tmp_path / "run", progress=False)
    during = start_capture(setup, tmp_path / "s", progress=False)
    lines = []
    after = [angles_from_store(tmp_path / "s", announce=lines.append, progress=False)]
    monkeypatch.setattr(scan, "TASKS_A_WORKER", 100)  # every site alone
    after.append(angles_from_store(tmp_path / "s", announce=lines.append, progress=False))
    assert not lines
    for table in (during, *after):
        pd.testing.assert_frame_equal(table.frame, whole.frame, check_exact=True)
        pd.testing.assert_frame_equal(table.sinks, whole.sinks, check_exact=True)


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "context": 1, "batch": 1, "null": 16, "tokens": 60}])
def test_the_packages_own_norms_are_rebuilt_to_the_last_bit(tmp_path, changes):
    lines, options = [], {"data": "sample", "tokens": 150, "null": 4, "device": "cpu"} | changes
    setup = CaptureConfig(RunConfig(("embedded-rmsnorm",), **options))
    during = start_capture(setup, tmp_path / "s", announce=lines.append, progress=False)
    assert "post is rebuilt from pre, to the last bit" in lines.pop()
    after = angles_from_store(tmp_path / "s", announce=lines.append, progress=False)
    assert not lines
    pd.testing.assert_frame_equal(after.frame, during.frame, check_exact=True)


def test_a_norm_that_no_recipe_follows_is_refused_without_its_outputs(home, tmp_path, monkeypatch):
    monkeypatch.setattr(
        capture, "find_rebuild", lambda *given: replace(find_rebuild(*given), bit_equal=False, error=0.02)
    )
    with pytest.raises(
        StoreError, match=r"the output of transformer\.h\.0\.ln_1 cannot be rebuilt .* --phases pre,post"
    ):
        captured(home, tmp_path / "s", n=100)
    assert not (tmp_path / "s").exists()
    captured(home, tmp_path / "s", phases=("pre", "post"), n=100)


def test_a_norm_of_another_dtype_than_its_inputs_is_refused(home, tmp_path, monkeypatch):
    keep = capture._Probe.take

    def widened(self, site, phase, hidden):
        keep(self, site, phase, hidden.double() if phase == "post" else hidden)

    monkeypatch.setattr(capture._Probe, "take", widened)
    with pytest.raises(StoreError, match=r"ln_1 turns torch\.float32 into torch\.float64; give --dtype float32"):
        captured(home, tmp_path / "s", n=100)


def test_what_is_rebuilt_only_to_rounding_is_said(copy):
    file = next((copy / "hidden.zarr").rglob("gain/c.0"))
    raw = bytearray(file.read_bytes())
    values = np.frombuffer(raw, np.float32, 32).copy()
    values[3] = np.nextafter(values[3], 9)
    array = zarr.open_group(copy / "hidden.zarr", mode="r+")[str(file.parent.relative_to(copy / "hidden.zarr"))]
    array[:] = values
    manifest, lines = read_record(Disk(copy), "manifest.json"), []
    name = str(file.relative_to(copy / "hidden.zarr"))
    manifest["files"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_record(
        lambda name, raw: (copy / name).write_bytes(raw), "manifest.json", manifest
    )  # as if the store had been made so
    angles_from_store(copy, null=4, announce=lines.append, progress=False)
    assert "at 1 of 5 sites are the model's to rounding" in lines[0]
    assert verify(copy)[1] == []


def test_no_checksums_are_kept_of_outputs_that_are_not_rebuilt_exactly(home, tmp_path, monkeypatch):
    """As those of a GPU, where all of them would have to be fetched."""

    def found(module, site, *args):
        return replace(find_rebuild(module, site, *args), bit_equal=site.role == "mlp")

    monkeypatch.setattr("normgeo.store.capture.find_rebuild", found)
    said, read = [], []
    during = start_capture(config(home), tmp_path / "s", announce=said.append, progress=False)
    kept = {key for commit in HiddenStateStore(tmp_path / "s").commit_log for key in commit.post}
    assert kept == {site.key for site in HiddenStateStore(tmp_path / "s").sites if site.role == "mlp"}
    assert "post is rebuilt from pre, to rounding only at 3 sites" in said[0]
    after = angles_from_store(tmp_path / "s", null=8, announce=read.append, progress=False)
    assert "at 3 of 5 sites are the model's to rounding" in read[0]
    pd.testing.assert_frame_equal(after.frame, during.frame, check_exact=True)
    assert verify(tmp_path / "s")[1] == []


def test_a_store_that_gives_no_angles_says_so_before_it_is_written(home, tmp_path):
    said = []
    start_capture(config(home, phases=("standardized",)), tmp_path / "s", announce=said.append, progress=False)
    assert "without pre, which is left out, no angles can be computed from the store" in said[0]
    with pytest.raises(StoreError, match="capture with --phases pre"):
        angles_from_store(tmp_path / "s", progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "olmo", "cohere", "llama", "gemma", "gemma2", "nemotron", "olmo2", "t5"])
def test_outputs_are_rebuilt_to_the_last_bit(tiny, name, dtype):
    model = copied(tiny(name)).to(dtype)
    modules = dict(model.named_modules())
    for site in find_sites(model):
        x = (3 * torch.randn(9, site.d)).to(dtype)
        with torch.no_grad():
            assert find_rebuild(modules[site.name], site, x, modules[site.name](x)).bit_equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["olmo", "cohere"])
def test_of_recipes_that_agree_on_a_few_vectors_the_right_one_is_found(tiny, name, dtype):
    """One vector that two recipes round alike tells nothing; thousands do."""
    model = copied(tiny(name)).to(dtype)
    site, modules = find_sites(model)[0], dict(model.named_modules())
    module, generator = modules[site.name], torch.Generator().manual_seed(3)
    x = (3 * torch.randn(4000, site.d, generator=generator)).to(dtype)
    with torch.no_grad():
        z = module(x)
        rebuild = find_rebuild(module, site, x[:1], z[:1])
        assert same_bits(rebuild(x, site.eps), z)
        gain, bias = rebuild.gain, rebuild.bias
        others = [replace(rebuild, recipe=name) for name in RECIPES if name.startswith("layernorm")]
        assert any((other(x, site.eps) != z).any() for other in others), (gain, bias)


def test_bfloat16_is_numbers_for_numpy_too(home, tmp_path):
    """Not the bits that are stored, which look like large numbers."""
    found = HiddenStateStore(captured(home, tmp_path / "s", dtype="bfloat16"))
    states = found.open(found.sites[1].key)
    expected = states.torch().float().numpy()
    assert states.torch().dtype is torch.bfloat16
    for given in (np.asarray(states), np.asarray(states, np.float64), states[:], np.stack(list(states))):
        np.testing.assert_array_equal(given, expected)
    np.testing.assert_array_equal(torch.as_tensor(np.asarray(states[3:9])), expected[3:9])
    np.testing.assert_array_equal(states[-1], expected[-1])
    assert states.array.dtype == np.uint16
    assert np.mean(states) == np.mean(expected)


def test_reading(store):
    found = HiddenStateStore(store)
    states = found.open(found.sites[1].key)
    assert found.complete
    assert states.shape == (N, 32)
    reading, before = states.batches(33), {*threading.enumerate()}  # a worker of a cluster keeps threads to read with
    next(reading)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("read")]
    assert same_bits(torch.cat(list(states.batches(33))), states.torch())
    assert np.asarray(states).shape == (N, 32)
    assert [c.stop for c in found.commit_log][-1] == N
    whole = np.asarray(states)
    for part in (
        slice(None), slice(None, None, -1), slice(10, 2, -2), slice(60, 200, 7), slice(-5, None), slice(5, 5),
        slice(900, 1000), slice(700, -800, -65),
    ):  # fmt: skip
        np.testing.assert_array_equal(states[part], whole[part])
    np.testing.assert_array_equal(states[N - 1], whole[-1])
    np.testing.assert_array_equal(states[-1], whole[-1])
    np.testing.assert_array_equal(np.stack(list(states)), whole)
    with pytest.raises(IndexError):
        states[N]
    for n in (0, -1):
        with pytest.raises(DataError, match="--batch must be at least 1"):
            states.batches(n)
    with pytest.raises(StoreError, match="id, document, position, received 'ids'"):
        found.tokens("ids")
    with pytest.raises(StoreError, match="it follows from inputs"):
        found.open(found.sites[1].key, "post")
    norm, x = found.rebuild(site := found.sites[1]), states.torch(0, 3)
    y = torch.nn.functional.layer_norm(x.double(), (32,), eps=site.eps)
    for phase, expected in (("standardized", y), ("post", y * (norm.gain.double() + norm.offset) + norm.bias.double())):
        torch.testing.assert_close(found.derived(site.key, phase, x).double(), expected, rtol=0.02, atol=1e-3)
    said = f"no site 'model.{site.key}' in the store; of its 5 sites the nearest are {site.key}, "
    for ask in (found.open, lambda key: found.derived(key, "post", states.torch(0, 3))):
        with pytest.raises(StoreError, match=said) as error:
            ask(f"model.{site.key}")
        assert str(error.value).count(",") == 2  # not all of them
    for wrong in (torch.ones(3, 31), states.torch(0, 3).double()):
        said = rf"inputs of .* are a Tensor \(vectors, 32\) in torch.* received a Tensor \(3, {wrong.shape[1]}\) in"
        with pytest.raises(StoreError, match=said):
            found.derived(found.sites[1].key, "standardized", wrong)
    assert [list(ids) for ids, _ in found.stream().contexts(N - CONTEXT)] == [found.tokens("id")[-CONTEXT:].tolist()]
    assert list(found.stream().contexts(N)) == []
    with pytest.raises(ValueError, match="makes a copy"):
        states.__array__(copy=False)
    with pytest.raises(StoreError, match="is no store"):
        HiddenStateStore(store / "state")


def test_a_model_that_fills_up_its_contexts_is_captured_in_whole_ones(tmp_path):
    """Longformer's are a multiple of its window, here of more tokens than a norm's arithmetic is found out on."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.LongformerConfig(vocab_size=96, max_position_embeddings=260, attention_window=[128], **sizes)
    hf.LongformerModel(config).save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(3, 96, (2, 128))
    np.save(tmp_path / "ids.npy", ids)
    run = RunConfig((str(tmp_path / "model"),), data=str(tmp_path / "ids.npy"), null=4, device="cpu")
    table = start_capture(CaptureConfig(run), tmp_path / "s", progress=False)
    assert table.frame.n_tokens.max() > 128
    pd.testing.assert_frame_equal(angles_from_store(tmp_path / "s", null=4, progress=False).frame, table.frame)


def test_another_default_device_is_the_callers_affair(home, tmp_path):
    """As a script for one GPU sets it; here one on which nothing can be computed."""
    alone = captured(home, tmp_path / "alone")
    with torch.device("meta"):
        path = captured(home, tmp_path / "s")
        frame = angles_from_store(path, null=8, progress=False).frame
        run = start_run(replace(config(home).run, keep="none"), tmp_path / "run", progress=False).frame
    expected = AngleTable.load(alone).frame
    pd.testing.assert_frame_equal(frame, expected)
    pd.testing.assert_frame_equal(run, expected)


def test_a_norm_of_several_vectors_a_token_is_stored(tmp_path, home):
    """Gemma 3n's norm of what each layer is given apart sees a vector a layer and token."""
    by_type("gemma3n_text").save_pretrained(home / "gemma3n")
    table = start_capture(config(home, "gemma3n", n=90), tmp_path / "s", progress=False)
    assert {site.heads for site in HiddenStateStore(tmp_path / "s").sites} == {1, 2}
    pd.testing.assert_frame_equal(angles_from_store(tmp_path / "s", progress=False).frame, table.frame)
