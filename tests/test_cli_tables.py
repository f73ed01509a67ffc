"""The numbers that commands print are the tables' own, in the units of their columns."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from normgeo.angles.measure import measure_angles
from normgeo.bench import training as training_bench
from normgeo.bench.inference import summary as inference_summary
from normgeo.bench.norms import NORMS, norm_summary
from normgeo.bench.stream import VARIANTS
from normgeo.cards import TABLE_1
from normgeo.cli import angles as angles_command
from normgeo.cli import bench as bench_command
from normgeo.cli import conversion as conversion_command
from normgeo.conversion.probing import Place
from normgeo.errors import ModelError


@pytest.fixture
def printed(capsys, monkeypatch):
    """Call something that prints a table; gives its lines as lists of cells."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(show, *args):
        show(*args)
        return [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]

    return call


def test_angles_are_in_degrees_and_energies_in_percent(tiny, ids, printed, tmp_path):
    frame = measure_angles(tiny("gpt2"), ids, name="tiny", null=16, null_every=1, progress=False).frame
    frame.loc[frame.index[3], "n_excluded"] = 1234
    rows = {cells[1]: cells for cells in printed(angles_command._summary, frame, tmp_path) if cells[0] == "tiny"}
    assert set(rows) == {"attention", "mlp", "final"}
    for role, cells in rows.items():
        here = frame[(frame.role == role) & (frame.direction == "uniform")]
        pre, post = here[here.phase == "pre"], here[here.phase == "post"]
        angle = [f"{part.mean_deg.mean():.2f} ± {part.std_deg.mean():.2f}°" for part in (pre, post)]
        percentile = f"{pre.null_percentile.median():.0f}" if len(ids.ravel()) >= 30 else "-"
        share = f"{100 * pre.energy_share.mean():.3f}%"
        assert cells == ["tiny", role, "layernorm", str(len(pre)), *angle, share, percentile]


def test_names_that_begin_alike_are_told_apart_on_a_narrow_terminal(tiny, ids, capsys, monkeypatch, tmp_path):
    frame = measure_angles(tiny("gpt2"), ids, null=0, progress=False).frame
    names = ["EleutherAI/pythia-160m-deduped", "EleutherAI/pythia-410m-deduped"]
    monkeypatch.setattr(angles_command.console, "width", 80)
    angles_command._summary(pd.concat([frame.assign(model=name) for name in names]), tmp_path)
    table = capsys.readouterr().out.partition("Scenario")[0]
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    first = "".join(cells[0] for cells in lines)
    assert [first.count(name) for name in names] == [3, 3]


def test_the_most_vectors_that_were_left_out_are_said(tiny, ids, capsys, tmp_path):
    frame = measure_angles(tiny("gpt2"), ids, null=0, progress=False).frame
    uniform = frame.index[frame.direction == "uniform"]
    frame.loc[uniform[:3], "n_excluded"] = [7, 1234, 5]
    angles_command._summary(frame, tmp_path)
    assert "up to 1,234 vectors at a site were zero or not finite" in capsys.readouterr().err


def test_models_are_listed_with_their_sizes(printed):
    rows = {cells[1]: cells for cells in printed(angles_command.models) if len(cells) > 6}
    for card in TABLE_1:
        size, memory = f"{card.parameters / 1e9:.2f}B", f"{2 * card.parameters / 1e9:.1f} GB"
        width = [str(card.d), str(card.layers), card.norm]
        assert rows[card.hub_id] == [card.name, card.hub_id, card.revision[:10], *width, size, memory]
    assert rows["(embedded)"] == ["embedded-rmsnorm", "(embedded)", "192", "6", "RMSNorm", "3.5M", "7 MB"]


def test_times_of_passes_are_in_milliseconds_and_shares_in_percent(printed):
    """Of a gap of 10% half is saved, of one of 80% inside the norms a quarter."""
    whole = {"original": 2.0, "fused": 1.9, "no-norm": 1.8}
    inside = {"original": 0.5, "fused": 0.4, "no-norm": 0.1}
    raw = pd.DataFrame([
        {"variant": name, "round": k, "seconds": whole[name], "norm_seconds": inside[name], "error": 2e-6}
        for name in whole for k in range(3)
    ])  # fmt: skip
    about = {"model": "m", "dtype": "float32", "batch": 2, "length": 8, "phase": "forward", "mode": "eager"}
    raw = raw.assign(**about, device="a", threads=1)
    rows = {cells[0]: cells[1:] for cells in printed(bench_command._inference, inference_summary(raw))}
    spread = "0.950 (0.950-0.950)", "0.800 (0.800-0.800)"
    assert rows["fused"] == ["1900.000", spread[0], "50%", "400.000", spread[1], "25%", "2e-06"]
    assert "m, float32, 2 x 8, forward, eager; rounds: 3, a, threads: 1" in rows
    noisy = raw.assign(seconds=raw.seconds.where(raw.variant != "no-norm", 2.2))
    rows = {cells[0]: cells[1:] for cells in printed(bench_command._inference, inference_summary(noisy))}
    assert (rows["fused"][2], rows["fused"][5]) == ("no clear gap", "25%")


def test_rates_of_a_disk_are_per_second_and_ratios_to_what_they_are_of(printed, monkeypatch, tmp_path):
    about = {"model": "m", "dtype": "float32", "tokens": 1234, "context": 16, "device": "a", "threads": 3}
    frame = pd.DataFrame([
        {"variant": "forward", "seconds": 2.0, "mb_per_s": np.nan, "tokens_per_s": 617.0, "baseline": "forward",
         "ratio": 1.0, "ratio_q25": 1.0, "ratio_q75": 1.0},
        {"variant": "capture", "seconds": 3.0, "mb_per_s": 5678.0, "tokens_per_s": 411.3, "baseline": "forward",
         "ratio": 1.5, "ratio_q25": 1.4, "ratio_q75": 1.6},
    ]).assign(**about)  # fmt: skip
    monkeypatch.setattr("normgeo.bench.store.bench_store", lambda *_, **__: frame)
    out = tmp_path / "raw.parquet"
    rows = {cells[0]: cells[1:] for cells in printed(lambda: bench_command.bench_store(folder=tmp_path, out=out))}
    assert rows["forward"] == ["2", "617"]
    assert rows["capture"] == ["3", "5,678", "411", "1.500 (1.400-1.600)", "forward"]
    assert "m, 1,234 tokens in contexts of 16, float32, rounds: 3, a, threads: 3" in rows
    pd.testing.assert_frame_equal(pd.read_parquet(out), frame)


def test_ways_to_measure_have_their_ratios_and_quartiles(printed, monkeypatch, ids, tmp_path):
    rows = [
        {"variant": name, "ratio": 1.0 + k, "ratio_q25": 0.5 + k, "ratio_q75": 1.25 + k, "seconds": 2.0 + k}
        for k, name in enumerate(VARIANTS)
    ]
    frame = pd.DataFrame(rows).assign(batch=2, context=16, dtype="float32", device="a")
    monkeypatch.setattr("normgeo.bench.stream.bench_stream", lambda *_, **__: frame)
    monkeypatch.setattr("normgeo.loading.load_model", lambda *_, **__: None)
    np.save(tmp_path / "ids.npy", ids)
    options = {"data": str(tmp_path / "ids.npy"), "rounds": 3, "device": "cpu", "out": tmp_path / "raw.parquet"}
    lines = printed(lambda: bench_command.bench_stream("m", **options))
    assert ["m, 2 x 16 tokens, float32, rounds: 3, a"] in lines
    for k, name in enumerate(VARIANTS.values()):
        assert [name, f"{1 + k}.000", f"{0.5 + k:.3f} to {1.25 + k:.3f}", f"{2 + k}.000"] in lines
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "raw.parquet"), frame)


@pytest.mark.parametrize(("how", "code"), [("native", ""), ("remote", ", trust_remote_code=True")])
def test_what_a_conversion_kept_recentered_and_did_not_reach_is_said(how, code, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    certificate = SimpleNamespace(table=lambda: "the certificate", unreached=("a.weight",))
    done = SimpleNamespace(
        certificate=certificate, kept={"h.1.ln": "its stream is read by the model's output"},
        recentered=(Place("h.0.drop", "output", 0),),
    )  # fmt: skip
    monkeypatch.setattr("normgeo.conversion.runs.convert_checkpoint", lambda *_, **__: (done, how))
    conversion_command.convert(None, "m", Path("out"))
    out, err = capsys.readouterr()
    assert [line.strip() for line in out.splitlines()] == [
        "the certificate",
        "kept h.1.ln: its stream is read by the model's output",
        "--outputs with those that you need may let the norms before others be replaced",
        "recentered h.0.drop (output 0): costs what a LayerNorm's mean cost",
        f"out: load it with from_pretrained('out'{code})",
    ]
    assert "no input reached 1: a.weight; for inputs that do, nothing is certified" in err
    done.kept, certificate.unreached = {"h.1.ln": "its stream is read by h.2"}, ()
    conversion_command.convert(None, "m", Path("out"))
    out, err = capsys.readouterr()
    assert ("--outputs" in out, err) == (False, "")


def test_times_of_norms_are_in_microseconds_and_of_a_copy_in_percent(printed):
    times = {"layer_norm": 4e-6, "RMSNorm": 3e-6, "copy": 2e-6}
    raw = pd.DataFrame([
        {"norm": name, "round": k, "seconds": t, "bytes": 3000 * NORMS[name]}
        for name, t in times.items() for k in range(3)
    ]).assign(shape="1x2x9", d=9, dtype="float32", passes="forward", beta=True, device="a", threads=1)  # fmt: skip
    rows = {cells[0]: cells[1:] for cells in printed(bench_command._norms, norm_summary(raw))}
    assert rows["RMSNorm"] == ["3.0", "0.750 (0.750-0.750)", "2.0", "67%"]
    assert rows["copy"] == ["2.0", "0.500 (0.500-0.500)", "3.0", "100%"]


def test_parts_of_a_step_are_percents_of_the_whole(printed, monkeypatch, tmp_path):
    rows = []
    for number, slow in enumerate((1.0, 2.0, 4.0)):
        for form in training_bench.FORMS:
            times = {"": 3 + slow} | dict.fromkeys(training_bench.WITHOUT[form], 2.5 + slow)
            rows += [
                {"round": number, "form": form, "without": part, "forward_backward": t,
                 "optimizer": np.nan if part else 1.0}
                for part, t in times.items()
            ]  # fmt: skip
    raw = pd.DataFrame(rows).assign(batch=3, context=5, threads=1, device="a", torch=torch.__version__)
    given = []
    monkeypatch.setattr(training_bench, "bench_training", lambda *_, **options: given.append(options) or raw)
    out = tmp_path / "raw.parquet"
    options = {"sizes": "tiny,70m", "batch": 3, "context": 5, "vocabulary": 40, "rounds": 3, "device": "cpu"}
    lines = printed(lambda: bench_command.bench_train(**options, out=out))
    assert [row["rounds"] for row in given] == [3, 3]
    rows = [cells for cells in lines if cells[-3:-2] and cells[-4:-3] == ["norms"]]
    assert len(rows) == 2 * 3
    assert {tuple(cells[-3:]) for cells in rows} == {("8.33%", "7.29 to 9.17%", "0.5000")}  # 0.5 of 5, 6 and 8
    assert pd.read_parquet(out).groupby("size").size().to_dict() == {"tiny": len(raw), "70m": len(raw)}


def test_times_of_all_cases_are_written_together_as_they_come(tmp_path, monkeypatch, capsys):
    raw = pd.DataFrame({
        "variant": ["original"] * 3, "round": range(3), "seconds": 1.0, "norm_seconds": 1.0, "error": 0.0,
    })  # fmt: skip
    about = {"dtype": "float32", "length": 8, "phase": "forward", "mode": "eager", "device": "a"}

    def measured(_, name, *, batches, keep, **__):
        for batch in batches:
            if (name, batch) == ("n", 2):
                raise ModelError("out of memory")
            keep(raw.assign(model=name, threads=1, batch=batch, **about))

    monkeypatch.setattr("normgeo.bench.inference_models.build", lambda *_, **__: None)
    monkeypatch.setattr("normgeo.bench.inference.bench_inference", measured)
    out = tmp_path / "raw.parquet"
    with pytest.raises(ModelError):
        bench_command.bench_inference(["m", "n"], batch="1,2", out=out)
    found = pd.read_parquet(out).groupby(["model", "batch"]).size().to_dict()
    assert found == {("m", 1): 3, ("m", 2): 3, ("n", 1): 3}
    assert "n, float32, 1 x 8, forward, eager; rounds: 3" in capsys.readouterr().out
