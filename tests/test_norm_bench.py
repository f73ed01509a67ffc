"""The benchmark of norms alone: its formulas against hand numbers, its check against sabotage; no times are judged."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from analyses import norm_kernels
from normgeo.bench import norms
from normgeo.bench.norms import NORMS, SHAPES, bench_norms, norm_summary
from normgeo.cli import main as cli
from normgeo.errors import DataError, ModelError, NormGeoError
from normgeo.kernels import norm_ops
from normgeo.norms import CRMSNorm, RMSNorm
from normgeo.system import timing


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)


def test_every_norm_is_timed_in_every_round():
    raw = bench_norms(((2, 3, 16), (1, 2, 9), (2, 3, 16)), rounds=3, seconds=1.0)  # a shape given twice is one
    assert raw.groupby(["shape", "dtype"]).ngroups == 4
    here = set(NORMS) - {"Liger add + RMSNorm", "Liger RMSNorm"}
    for (shape, dtype), part in raw.groupby(["shape", "dtype"]):
        assert set(part.norm) <= here
        assert set(part.norm) >= here - {n for n in here if "kernel" in n or n == "add + RMSNorm"}
        assert (part.groupby("norm").size() == 3).all()
        numbers = {"2x3x16": 96, "1x2x9": 18}[shape] * {"float32": 4, "bfloat16": 2}[dtype]
        nbytes = part.drop_duplicates("norm").set_index("norm").bytes
        assert nbytes["RMSNorm"] == nbytes["copy"] == 2 * numbers
        assert nbytes["add + layer_norm"] == 4 * numbers
    assert (raw.seconds > 0).all()


def test_with_gradients_the_same_norms_are_timed_without_additions():
    raw = bench_norms(((2, 3, 16),), backward=True, rounds=3, seconds=0.5)
    for dtype, part in raw.groupby("dtype"):
        assert set(part.norm) >= {"layer_norm", "rms_norm", "RMSNorm", "CRMSNorm padded", "CRMSNorm d - 1", "copy"}
        assert not [name for name in part.norm if name.startswith("add")]
        nbytes = part.drop_duplicates("norm").set_index("norm").bytes
        assert nbytes["RMSNorm"] == 2.5 * nbytes["copy"] == 5 * 96 * (4 if dtype == "float32" else 2)
    assert set(raw.passes) == {"forward and backward"}
    assert norm_summary(raw).ratio.notna().all()


def test_a_time_is_of_one_call_and_of_enough_of_them_in_a_row(monkeypatch):
    """Of calls that take known times on the clock."""
    now, calls, takes = [0.0], dict.fromkeys("ab", 0), {"a": 2e-6, "b": 3e-3}

    def running(name):
        def run():
            now[0] += takes[name]
            calls[name] += 1

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    runs = {name: running(name) for name in takes}
    found = norms._timed(runs, torch.device("cpu"), rounds=4, seconds=1e9, seed=0)
    assert [number for number, _, _ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {name: seconds for _, name, seconds in found} == pytest.approx(takes)
    for name, each in takes.items():
        assert calls[name] * each >= 5 * norms.ENOUGH  # four rounds and the one before them


def test_without_a_kernel_for_gradients_there_is_no_control(monkeypatch):
    """As for widths whose gradients no registers of a GPU hold."""
    monkeypatch.setattr(norm_ops, "takes", lambda x: True)
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    runs = norms._runs((2, 3, 16), torch.float32, torch.device("cpu"), 0, True, True)
    assert "RMSNorm" in runs
    assert "LayerNorm kernel" not in runs


def test_without_kernels_norms_are_those_of_a_converted_model(monkeypatch):
    """Which has what it is given without a mean: torch's LayerNorm then does as well."""
    monkeypatch.setattr(norm_ops, "norm", lambda *_: None)
    calls = []
    with torch.inference_mode():
        runs = norms._runs((2, 3, 16), torch.float32, torch.device("cpu"), 0, False, True)
        monkeypatch.setattr(
            torch, "native_layer_norm", lambda *a: calls.append(a) or torch.ops.aten.native_layer_norm(*a)
        )
        runs["RMSNorm"]()
    assert len(calls) == 1


class Called(TorchFunctionMode):
    """Notes the names of torch's functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.__dict__.setdefault("names", set()).add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_timed_is_what_its_name_says(backward):
    with torch.inference_mode(not backward):
        runs = norms._runs((2, 3, 16), torch.float32, torch.device("cpu"), 0, backward, True)
        for name in ("layer_norm", "rms_norm"):
            with Called() as called:
                runs[name]()
            assert called.names & {"layer_norm", "rms_norm"} == {name}
        outputs = {name: run()[0] if backward else run() for name, run in runs.items()}
        assert {name for name, out in outputs.items() if out.shape == (2, 3, 15)} == {"CRMSNorm d - 1"}
        for name in outputs.keys() & {"add + LayerNorm kernel", "add + RMSNorm"}:
            assert runs[name]() is outputs[name]  # which is written over what is added


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_norm_with_wrong_gradients_is_refused(which, monkeypatch):
    right = norms._gradients

    def wrong(function, given, dz):
        found = list(right(function, given, dz))
        found[which] = found[which] * (1.01 if given[0].dtype is torch.float32 else 1)
        return tuple(found)

    monkeypatch.setattr(norms, "_gradients", wrong)
    with pytest.raises(ModelError, match=r"gives wrong gradients for .* torch.float32"):
        bench_norms(((2, 3, 16),), dtypes=("float32",), backward=True, rounds=1)


def test_the_analysis(tmp_path):
    bench_norms(((2, 3, 16), (1, 2, 9)), rounds=3, seconds=1.0).to_parquet(tmp_path / "raw.parquet")
    frame = norm_kernels.compute(tmp_path / "raw.parquet")
    assert len(norm_kernels.plot(frame).axes) == 2
    lines = norm_kernels.markdown(frame).splitlines()
    assert len(lines) == 2 + frame.norm.nunique()
    assert lines[0].count("|") == 2 + 4
    raw = pd.read_parquet(tmp_path / "raw.parquet")
    raw[:0].to_parquet(tmp_path / "empty.parquet")
    raw.drop(columns="passes").to_parquet(tmp_path / "other.parquet")
    pd.concat([raw, raw.assign(device="another")]).to_parquet(tmp_path / "two.parquet")
    for name, norm in (("torch", "layer_norm"), ("copy", "copy")):
        raw[raw.norm != norm].to_parquet(tmp_path / f"no {name}.parquet")
    said = {"missing": "there is no file", "two": r"two\.parquet holds more than one time of the same, as of two"}
    said |= {"no torch": "times of norms without those of 'layer_norm'", "no copy": "without those of 'copy'"}
    said |= dict.fromkeys(("empty", "other"), "no table that `normgeo bench norms")
    for wrong, says in said.items():
        with pytest.raises(DataError, match=says):
            norm_kernels.compute(tmp_path / f"{wrong}.parquet")
    assert {"device", "torch", "commit"} <= set(norm_kernels.compute())


def test_summary_by_hand():
    """100 bytes a microsecond are 0.1 GB/s; an addition with a norm is compared with an addition with a norm."""
    times = {
        "layer_norm": [4e-6, 8e-6, 4e-6], "RMSNorm": [2e-6, 2e-6, 3e-6], "add + layer_norm": [8e-6, 8e-6, 8e-6],
        "add + RMSNorm": [4e-6, 2e-6, 4e-6], "copy": [1e-6, 1e-6, 1e-6],
    }  # fmt: skip
    rows = [
        {"norm": name, "round": k, "seconds": t, "bytes": 50 * NORMS[name], "shape": "s", "dtype": "float32"}
        for name, values in times.items() for k, t in enumerate(values)
    ]  # fmt: skip
    found = norm_summary(pd.DataFrame(rows).sample(frac=1, random_state=0)).set_index("norm")
    assert list(found.index) == ["layer_norm", "RMSNorm", "add + layer_norm", "add + RMSNorm", "copy"]
    assert found.ratio["RMSNorm"] == pytest.approx(0.5)
    assert found.ratio_q25["RMSNorm"] == pytest.approx(0.375)
    assert found.ratio["add + RMSNorm"] == pytest.approx(0.5)
    np.testing.assert_allclose(found.gb_per_s[["copy", "RMSNorm", "add + layer_norm"]], [0.1, 0.05, 0.025])
    assert found.copy_share["RMSNorm"] == pytest.approx(0.5)


@pytest.mark.parametrize("factor", [1.01, 1.00001, float("nan")])
@pytest.mark.parametrize(("cls", "name"), [(RMSNorm, "RMSNorm"), (CRMSNorm, "CRMSNorm padded")])
def test_a_norm_with_wrong_results_is_refused(cls, name, factor, monkeypatch):
    right = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: factor * right(self, x))
    with pytest.raises(ModelError, match=f"{name} gives wrong results for .* torch.float32"):
        bench_norms(((2, 3, 16),), dtypes=("float32",), rounds=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("backward", "beta"), [(False, True), (True, False)])
def test_on_cuda(backward, beta):
    raw = bench_norms(((4, 256, 1024),), backward=backward, beta=beta, device="cuda", rounds=3)
    assert {"LayerNorm kernel", "RMSNorm" if backward else "add + RMSNorm"} <= set(raw.norm)


@pytest.mark.parametrize("backward", [False, True])
def test_without_a_beta_nothing_is_added_to_a_norm(backward):
    plain = {}
    with torch.inference_mode(not backward):
        for beta in (True, False):
            run = norms._runs((2, 3, 16), torch.float32, torch.device("cpu"), 0, backward, beta)["rms_norm"]
            with Called() as called:
                plain[beta] = run()
            assert ("add" in called.names) is beta
    if backward:
        assert (len(plain[True]), len(plain[False])) == (3, 2)
    else:
        assert float((plain[True] - plain[False]).std()) > 0.5
    raw = bench_norms(((2, 3, 16),), dtypes=("float32",), backward=backward, beta=False, rounds=3, seconds=0.1)
    assert not raw.beta.any()


def test_shapes_are_of_models_with_even_widths():
    assert all(len(shape) == 3 and shape[2] % 64 == 0 for shape in SHAPES)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "norms", *map(str, arguments)])


def test_command(tmp_path):
    out = tmp_path / "raw.parquet"
    sizes = "--shapes", "1x2x16,2x2x8", "--dtype", "float32", "--rounds", "3", "--seconds", "0.5"
    done = run(*sizes, "--no-beta", "--out", out)
    assert done.exit_code == 0, done.output
    assert "1x2x16, float32; rounds: 3, forward, without beta" in done.output
    assert set(pd.read_parquet(out)["shape"]) == {"1x2x16", "2x2x8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "1x512"), "BATCHxTOKENSxWIDTH"),
        (("--shapes", "1x2xd"), "whole numbers above 0, as 1x512x768; received '1x2xd'"),
        (("--dtype", "int8"), "no dtype 'int8'; choose float32, bfloat16, float16"),
    ],
)
def test_command_says_what_is_wrong(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, NormGeoError)
    assert message in str(done.exception)
