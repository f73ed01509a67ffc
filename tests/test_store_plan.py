"""The plan on paper: its bytes are those of real captures, its sites those of real models, its time arithmetic."""

import dataclasses

import pandas as pd
import pytest
from stores import N, captured
from stores import config as capture_of
from transformers import LlamaConfig, LlamaModel

from analyses import store_plan
from analyses.store_plan import CPU, NODE, TIERS, Machine, bytes_and_files, flops_per_token, sites_of
from normgeo import HiddenStateStore, find_sites
from normgeo.angles.runs import start_run

SMALL = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def frame():
    return store_plan.compute()


def files_below(folder, *skip):
    return [file for file in folder.rglob("*") if file.is_file() and file.name not in skip]


@pytest.mark.parametrize("tier", ["pre", "all phases"])
def test_bytes_and_files_are_those_of_a_capture(home, tmp_path, tier):
    path = captured(home, tmp_path / "s", "llama", TIERS[tier], dtype="bfloat16", null=store_plan.NULL)
    expected = bytes_and_files(HiddenStateStore(path).sites, tier, N, chunk_bytes=capture_of(home).chunk_bytes)
    chunks = [f for f in files_below(path / "hidden.zarr", "zarr.json") if f.parent.name not in ("gain", "bias")]
    records = files_below(path / "state") + files_below(path / "commits")
    assert (sum(file.stat().st_size for file in chunks), len(chunks + records)) == expected


def test_scalars_are_those_of_a_run(home, tmp_path):
    run = dataclasses.replace(capture_of(home, "llama", context=16, batch=8, null=store_plan.NULL).run, keep="scalars")
    table = start_run(run, tmp_path / "run", progress=False)
    chunks = files_below(tmp_path / "run/scalars.zarr", "zarr.json")
    sites = sites_of(SMALL)[: table.frame.site.nunique()]
    scalars, files = bytes_and_files(sites, "scalars", N)
    statistics, one = bytes_and_files(sites, "statistics", N)
    assert sum(file.stat().st_size for file in chunks) == scalars - statistics
    assert len(chunks) == files - one
    state = max(file.stat().st_size for file in files_below(tmp_path / "run/state"))
    assert state < statistics + 10_000


def test_sites_are_those_that_normgeo_finds():
    found = find_sites(LlamaModel(SMALL))
    assert [(s.name, s.kind, s.role, s.d) for s in found] == [(s.name, s.kind, s.role, s.d) for s in sites_of(SMALL)]


def test_sizes_of_the_models(frame):
    sizes = frame.groupby("model")[["sites", "d", "tokens"]].first()
    assert sizes.loc["Llama-3-8B"].tolist() == [65, 4096, 10**9]
    assert sizes.loc["Llama-3-70B"].tolist() == [161, 8192, 10**6]
    # 8.03e9 and 70.6e9 weights, less two embeddings of 128,256; attention adds a few percent
    assert flops_per_token(store_plan.LLAMA_8B, 0) == 2 * (8_030_261_248 - 2 * 128_256 * 4096)
    assert flops_per_token(store_plan.LLAMA_70B, 0) == 2 * (70_553_706_496 - 2 * 128_256 * 8192)
    pre = frame[(frame.tier == "pre") & (frame.model == "Llama-3-8B")].bytes.iloc[0]
    assert 65 * 4096 * 2 * 10**9 < pre < 1.002 * 65 * 4096 * 2 * 10**9


def test_time_is_what_the_rates_say():
    slow = Machine("slow", "assumed", 1e12, 1e10, 1e9, 1e8, 1e15, False)
    fast = dataclasses.replace(slow, name="fast", overlap=True)
    frame = store_plan.compute((slow, fast))
    for row in frame[frame.tier == "all phases"].to_dict("records"):
        config = store_plan.LLAMA_8B if row["model"] == "Llama-3-8B" else store_plan.LLAMA_70B
        forward = row["tokens"] * flops_per_token(config) / 1e12
        vectors = row["tokens"] * row["sites"] * row["d"] * 2
        device, copy, write = forward + 2 * vectors / 1e10, 3 * vectors / 1e9, row["bytes"] / 1e8
        expected = device + copy + write if row["machine"] == "slow" else max(device, copy, write)
        assert row["hours"] * 3600 == pytest.approx(expected)
        assert row["slowest"] == ("writing" if write > forward else "forward pass")
        assert row["machines"] == -(-expected // 86_400)


def test_rates_say_where_they_are_from(frame):
    assert dict(zip(frame.machine, frame.rates, strict=True)) == {CPU.name: "measured", NODE.name: "assumed"}
    for machine in (CPU, NODE):
        part = frame[frame.machine == machine.name]
        assert (part.machines * machine.disk >= part.bytes).all()
    text = store_plan.markdown(frame)
    assert text.count("assumed") == text.count("measured") == 2 * len(TIERS)
    assert len(store_plan.plot(pd.DataFrame(frame)).axes) == 4
