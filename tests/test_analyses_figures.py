"""What the figures and pages of analyses show is what their tables say."""

import contextlib
import itertools
import sys

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest

from analyses import (
    _source,
    angles_by_layer,
    efficiency,
    masks,
    norm_kernels,
    null_ensemble,
    sinks,
    store_plan,
    stream_cost,
    twins_loss,
    workload,
)
from analyses.__main__ import main
from normgeo import figures
from normgeo.angles.scalars import ScalarStore
from normgeo.angles.verdict import GROUP_LABELS
from normgeo.bench.stream import VARIANTS
from normgeo.errors import DataError

MODELS = {"one": "layernorm", "two": "rmsnorm"}
SITES = [(f"h.{layer}.{name}", layer, role) for layer in range(3) for name, role in (("b", "attention"), ("a", "mlp"))]
SITES += [("norm", 3, "final")]
DEPTH = [0, 0.5, 1, 1.5, 2, 2.5, 3]


def table(**columns):
    """A row for each combination of site and `columns`, with numbers of its own."""
    rng, names = np.random.default_rng(0), ["model", "site", "layer", "role", *columns]
    rows = [(m, *site, *which) for m in MODELS for site in SITES for which in itertools.product(*columns.values())]
    frame = pd.DataFrame(rows, columns=names).assign(stack="h", n_directions=32)
    for name, low, high in (("mean_deg", 80, 100), ("std_deg", 1, 3), ("mean_norm", 1, 99), ("null_z", -3, 3),
                            ("null_percentile", 0, 100), ("q05", 60, 70), ("q95", 110, 120), ("min_deg", 40, 50),
                            ("max_deg", 130, 140)):  # fmt: skip
        frame[name] = rng.uniform(low, high, len(frame))
    return frame.assign(kind=frame.model.map(MODELS))


def drawn(axes):
    """Points with bars on some axes by label: x, y and half the bars' heights."""
    found = {}
    for bars in axes.containers:
        points, _, (segments,) = bars.lines
        heights = [(s[1, 1] - s[0, 1]) / 2 for s in segments.get_segments()]
        found[bars.get_label()] = points.get_xdata(), points.get_ydata(), heights
    return found


def agrees(found, x, rows):
    assert found[0] == pytest.approx(np.asarray(x), abs=0.21)  # beside each other
    assert found[1] == pytest.approx(rows.mean_deg.to_numpy())
    assert found[2] == pytest.approx(rows.std_deg.tolist())


def test_groups_of_tokens_have_their_angles_and_norms():
    frame = table(tokens=list(GROUP_LABELS)).assign(on_stream=True)
    axes = sinks.plot(frame).axes
    for column, model in enumerate(MODELS):
        angles, lines = drawn(axes[column]), {line.get_label(): line for line in axes[2 + column].lines}
        for group, label in GROUP_LABELS.items():
            rows = frame[(frame.model == model) & (frame.tokens == group)]
            agrees(angles[label], DEPTH, rows)
            assert lines[label].get_xdata().tolist() == DEPTH
            assert lines[label].get_ydata() == pytest.approx(rows.mean_norm.to_numpy())


def test_masks_have_the_angles_to_the_uniform_vector_before_and_after():
    frame = table(phase=["pre", "post"], direction=["random_a", "uniform"], mask=["all", "late"])
    axes = iter(masks.plot(frame).axes)
    for phase, model in itertools.product(("pre", "post"), MODELS):
        found = drawn(next(axes))
        for mask in ("all", "late"):
            here = frame[(frame.model == model) & (frame.phase == phase) & (frame["mask"] == mask)]
            agrees(found[mask], DEPTH, here[here.direction == "uniform"])


class Scalars(ScalarStore):
    """Of a model whose first token is a zero vector."""

    def __init__(self):
        self.position = np.arange(3)

    def norms(self, site, phase="pre"):
        return np.array([0, 1, 3], np.float32)

    def angles(self, site, phase="pre", direction="uniform"):
        return np.array([np.nan, 80, 90])


def test_of_a_mask_that_leaves_no_angle_there_is_none(monkeypatch):
    sites = table().query("model == 'one' and layer == 0")[["model", "site", "layer", "role", "kind", "stack"]]
    monkeypatch.setattr(_source, "scalars", lambda *_: contextlib.nullcontext((sites, {"one": Scalars()})))
    found = masks.compute().drop_duplicates("mask").set_index("mask").loc[:, "mean_deg":"n_tokens"]
    assert found.loc["first position only"].tolist() == pytest.approx([np.nan] * 4 + [0], nan_ok=True)
    assert found.loc["without the first position"].tolist() == [85, 5, 85, 2, 2]
    assert found.loc["all tokens"].tolist() == [85, 5, 85, 2, 2]


def test_masks_of_what_is_no_run(tmp_path):
    with pytest.raises(DataError, match=r"holds no angles\.parquet"):
        masks.compute(tmp_path)


def test_of_several_models_the_first_norm_of_every_layer_is_drawn():
    frame = table(phase=["pre", "post"], direction=[*figures.COLORS, "null"])
    axes = iter(angles_by_layer.plot(frame).axes)
    for phase, model in itertools.product(("pre", "post"), MODELS):
        panel, here = next(axes), frame[(frame.model == model) & (frame.phase == phase) & (frame.role == "attention")]
        for direction, label in figures.LABELS.items():
            agrees(drawn(panel)[label], range(3), here[here.direction == direction])
        null, bands = here[here.direction == "null"], {found.get_label(): found for found in panel.collections}
        edges = {"means of random directions: all": ("min_deg", "max_deg"), "central 90%": ("q05", "q95")}
        for label, columns in edges.items():
            box = {tuple(point) for point in bands[label].get_paths()[0].vertices.round(6).tolist()}
            for column in columns:
                assert set(zip(null.layer, null[column].round(6), strict=True)) <= box


def test_the_band_of_a_single_layer_has_a_width():
    frame = table(phase=["pre", "post"], direction=[*figures.COLORS, "null"])
    for axes in angles_by_layer.plot(frame[frame.layer == 1]).axes:
        (band,) = axes.collections[:1]
        x = band.get_paths()[0].vertices[:, 0]
        assert x.min() < 1 - 0.2 < 1 + 0.2 < x.max()


def test_the_place_among_random_directions_is_drawn_before_and_after_every_norm():
    frame = table(phase=["pre", "post"])
    axes = iter(null_ensemble.plot(frame).axes)
    for value, model in itertools.product(("null_z", "null_percentile"), MODELS):
        panel = next(axes)
        for role, label in (("attention", "pre-attention"), ("mlp", "pre-MLP"), ("final", "final")):
            here = frame[(frame.model == model) & (frame.role == role)]
            before, after = (here[here.phase == phase][value].to_numpy() for phase in ("pre", "post"))
            (line,) = (line for line in panel.lines if line.get_label() == label)
            assert line.get_ydata() == pytest.approx(before)
            (other,) = (
                found for found in panel.lines
                if found.get_markerfacecolor() == "white" and len(found.get_xdata()) == len(after)
                and matplotlib.colors.same_color(found.get_color(), line.get_color())
            )  # fmt: skip
            assert other.get_ydata() == pytest.approx(after)
            assert line.get_xdata().tolist() == other.get_xdata().tolist() == sorted(set(here.layer))


def test_of_few_random_directions_no_percentile_is_expected():
    """Of 8, a direction like any other is beyond all in two cases of nine."""
    frame = table(phase=["pre", "post"]).assign(n_directions=64)
    figure = null_ensemble.plot(frame)
    assert "pre-MLP" in {text.get_text() for text in figure.legends[0].texts}
    assert figure.get_suptitle() == "Mean angle to the uniform vector among those to 64 random directions"
    assert [panel.get_title() for panel in figure.axes[:2]] == list(MODELS)
    frame.loc[frame.model == "two", "n_directions"] = 8
    figure = null_ensemble.plot(frame)
    assert "64" not in figure.get_suptitle()
    assert [panel.get_title() for panel in figure.axes[:2]] == ["one\n64 directions", "two\n8 directions"]
    banded = [any("95%" in patch.get_label() for patch in panel.patches) for panel in figure.axes]
    assert banded == [True, True, True, False]


def test_the_twins_difference_is_what_rmsnorm_loses_more():
    frame = twins_loss.compute()
    curves, difference = twins_loss.plot(frame).axes
    by_norm = {norm: part.set_index("step") for norm, part in frame.groupby("norm")}
    wanted = by_norm["rmsnorm"].held_out_loss - by_norm["layernorm"].held_out_loss
    (line,) = (line for line in difference.lines if len(line.get_xdata()) == len(wanted))
    assert line.get_xdata().tolist() == wanted.index.tolist()
    assert line.get_ydata() == pytest.approx(wanted.to_numpy())
    lines = {line.get_label(): line.get_ydata() for line in curves.lines}
    for norm, name in (("layernorm", "LayerNorm"), ("rmsnorm", "RMSNorm")):
        for column, what in (("held_out_loss", "held-out"), ("train_loss", "training")):
            assert lines[f"{name}, {what}"] == pytest.approx(by_norm[norm][column].to_numpy())


def test_norms_alone_are_bars_of_their_ratios_with_quartiles():
    frame = norm_kernels.compute()
    page, parts = norm_kernels.markdown(frame), list(frame.groupby("dtype", sort=False))
    for axes, (dtype, part) in zip(norm_kernels.plot(frame).axes, parts, strict=True):
        shapes = list(part["shape"].unique())
        for name, label in norm_kernels.SHOWN.items():
            (bars,) = (b for b in axes.containers if b.get_label() == label and hasattr(b, "patches"))
            rows = part[part.norm == name].set_index("shape").loc[shapes]
            assert [bar.get_height() for bar in bars.patches] == pytest.approx(rows.ratio.tolist()), (dtype, name)
            ends = [(s[0, 1], s[1, 1]) for s in bars.errorbar.lines[2][0].get_segments()]
            assert ends == [pytest.approx(each) for each in zip(rows.ratio_q25, rows.ratio_q75, strict=True)]
    columns = [cell.strip() for cell in page.splitlines()[0].split("|")[2:-1]]
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in page.splitlines()[2:]}
    for (norm, dtype, shape), rows in frame.groupby(["norm", "dtype", "shape"]):
        assert float(lines[norm][columns.index(f"{dtype}, {shape}")]) == round(rows.ratio.item(), 2)


def test_passes_are_points_and_what_is_inside_is_bars():
    frame = efficiency.compute()
    here = frame[(frame.phase == "forward") & (frame["mode"] == "eager") & (frame.dtype == frame.dtype.iloc[0])]
    whole, inside = efficiency.plot(here).axes[:2]
    names = [name for name in efficiency.LABELS if name in set(here.variant)]
    points = drawn(whole)
    drawn_inside = {b.get_label(): b for b in inside.containers if hasattr(b, "patches")}
    bars = {label: [bar.get_height() for bar in b.patches] for label, b in drawn_inside.items()}
    ends = {
        label: [(s[0, 1], s[1, 1]) for s in b.errorbar.lines[2][0].get_segments()] for label, b in drawn_inside.items()
    }
    for name in names:
        rows = here[here.variant == name]
        assert points[efficiency.LABELS[name]][1] == pytest.approx(rows.ratio.to_numpy())
        assert bars[efficiency.LABELS[name]] == pytest.approx(rows.norm_ratio.tolist())
        quartiles = zip(rows.norm_ratio_q25, rows.norm_ratio_q75, strict=True)
        assert ends[efficiency.LABELS[name]] == [pytest.approx(each) for each in quartiles]
        heights = ((rows.ratio_q75 - rows.ratio_q25) / 2).tolist()
        assert points[efficiency.LABELS[name]][2] == pytest.approx(heights)
    for axes, (low, high) in ((whole, (here.ratio.min(), here.ratio.max())), (inside, (0, here.norm_ratio.max()))):
        assert axes.get_ylim()[0] <= low < high <= axes.get_ylim()[1]


def test_plain_passes_have_a_row_for_each_dtype_and_few_others_one_together():
    frame = efficiency.compute()
    decoded = frame[frame.phase == "decode"]
    many = pd.concat([frame, *(decoded.assign(model=f"{k} {decoded.model.iloc[0]}") for k in range(efficiency.MANY))])
    for table, together in ((frame, ["decode, eager"]), (many, ["float32, decode, eager", "bfloat16, decode, eager"])):
        titles = [axes.get_title() for axes in efficiency.plot(table).axes if axes.get_ylabel()]
        for title in (*(f"{dtype}, forward, eager" for dtype in ("float32", "bfloat16", "autocast")), *together):
            assert sum(each.startswith(title) for each in titles) == 1
        assert sum("decode" in each for each in titles) == len(together)


def test_a_page_is_written_beside_its_table(tmp_path, monkeypatch, unrendered):
    monkeypatch.setattr(sys, "argv", ["analyses", "norm_kernels", "--out", str(tmp_path)])
    assert main() == 0
    frame = pd.read_parquet(tmp_path / "norm_kernels.parquet")
    assert (tmp_path / "norm_kernels.md").read_text() == norm_kernels.markdown(frame)


def test_a_file_that_lacks_what_is_read_is_no_table_of_times(tmp_path):
    path, kept = tmp_path / "times.parquet", pd.read_parquet(_source.KEPT / "efficiency.parquet")
    for content in (b"no table", kept.drop(columns="error").to_parquet(), kept.drop(columns="round").to_parquet()):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"times\.parquet is no table that `normgeo bench inference --out` wrote"):
            efficiency.compute(path)


def test_the_page_has_means_of_whole_passes_and_of_what_is_inside():
    frame = efficiency.compute()
    whole, inside = efficiency.markdown(frame).split("Norms and residual additions inside it")
    plain = frame[(frame.phase == "forward") & (frame["mode"] == "eager") & (frame.dtype == "float32")]
    names = [name for name in efficiency.LABELS if name in set(frame.variant)]
    for page, column in ((whole, "ratio"), (inside, "norm_ratio")):
        lines = [line for line in page.splitlines() if line.startswith("| float32, forward, eager;")][:2]
        here = plain[plain.groupby(efficiency.CONDITION, sort=False).ngroup() == 0]
        for line, kind, start in zip(lines, ("ViT", "GPT-3"), ("vit-", "gpt-"), strict=True):
            of = here[here.model.str.startswith(start)]
            means = [f"{of[of.variant == name][column].mean():.4f}" for name in names]
            cells = [cell.strip() for cell in line.split("|")[2:-1]]
            assert cells == [kind, str((of.variant == "original").sum()), *means]


def test_operations_are_drawn_for_1000_of_the_products():
    frame = workload.compute(["vit-tiny", "gpt-small"])
    (axes,) = workload.plot(frame).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for part, label in (("rmsnorm", "RMSNorm"), ("recenter", "recentered embeddings, in training")):
        assert lines[label] == pytest.approx((1000 * frame[f"step_{part}"] / frame.step_products).to_numpy())


def test_ways_to_measure_are_bars_of_their_ratios_with_quartiles():
    rows = [
        {"variant": name, "ratio": 1 + k, "ratio_q25": 0.75 + k, "ratio_q75": 1.5 + k}
        for k, name in enumerate(VARIANTS)
    ]
    about = {"model": "m", "seconds": 2.0, "batch": 8, "context": 16, "d": 4, "sites": 3, "rounds": 5}
    (axes,) = stream_cost.plot(pd.DataFrame(rows).assign(**about, dtype="float32", device="a")).axes
    (bars,) = (b for b in axes.containers if hasattr(b, "patches"))
    assert [bar.get_width() for bar in bars.patches] == [row["ratio"] for row in rows]
    ends = [(s[0, 0], s[1, 0]) for s in bars.errorbar.lines[2][0].get_segments()]
    assert ends == [(row["ratio_q25"], row["ratio_q75"]) for row in rows]
    assert [text.get_text() for text in axes.get_yticklabels()] == [*VARIANTS.values()]


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (999, "999 B"),
        (999_600, "1 MB"),
        (25_600, "25.6 kB"),
        (3e6, "3 MB"),
        (4.5e9, "4.5 GB"),
        (2e12, "2 TB"),
        (7e15, "7 PB"),
    ],
)
def test_bytes_have_units(n, text):
    assert store_plan._size(n) == text


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (30 / 3600, "30 s"),
        (99.7 / 3600, "1.7 min"),
        (5 / 60, "5 min"),
        (36, "36 h"),
        (72, "3 days"),
        (24 * 365 * 2, "2 years"),
        (24 * 365 * 123, "120 years"),
    ],
)
def test_hours_are_said_in_units_of_their_size(hours, text):
    assert store_plan._duration(hours) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("efficiency --run a --run b", "error: efficiency takes one --run, what `normgeo bench inference --out` wrote"),
        (
            "angles_in_training --run a --run b",
            "takes one --run, a finished run of `normgeo angles --checkpoints`; received 2",
        ),
        ("angles_in_training --model a", "error: angles_in_training does not depend on --model; leave it out"),
        ("training_forms --help", "tokens to train on"),
        ("coverage --run a --run b", "error: coverage does not depend on --run"),
        ("nonsense --run a --run b", "error: no analysis 'nonsense'"),
        ("--out masks rotation --help", "rotation: Rotation by standardization"),
    ],
)
def test_what_is_asked_is_looked_at_before_the_runs_are(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["analyses", *arguments.split()])
    with contextlib.suppress(SystemExit):
        assert main() == 1
    out, err = capsys.readouterr()
    assert said in out + err
