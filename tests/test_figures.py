import itertools
from dataclasses import replace

import matplotlib.figure
import pandas as pd
import pytest
import seaborn as sns
import zoo
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analyses import _axes, masks
from normgeo import compare, figures, find_sites
from normgeo.angles.measure import AngleTable, measure_angles
from normgeo.errors import DataError


@pytest.fixture(scope="module")
def tables(tiny, ids):
    one = {
        name: measure_angles(tiny(name), ids, name=name, null=16, progress=False)
        for name in ("gpt2", "llama", "t5", "bert", "gptj", "gemma2")
    }
    return one | {"pair": AngleTable.concatenated([one["gpt2"], one["llama"]]),
                  "triple": AngleTable.concatenated([one["gpt2"], one["llama"], one["t5"]])}  # fmt: skip


def drawn(figure):
    """How many axes of a figure show something."""
    assert isinstance(figure, matplotlib.figure.Figure)
    return sum(bool(axes.lines or axes.collections or axes.containers) for axes in figure.axes)


def test_both_files_are_of_one_layout_whatever_the_settings(tmp_path):
    places = []
    with matplotlib.rc_context({"figure.autolayout": True}):
        alone = figures.styled(lambda figure, stem: figure.savefig(f"{stem}.png", dpi=300))
        for save in (alone, figures.save):
            figure = matplotlib.figure.Figure(layout="constrained")
            grid = figure.subplots(2, 2)
            figure.colorbar(grid[0, 0].imshow([[1, 2], [3, 4]]), ax=grid.ravel().tolist())
            save(figure, tmp_path / "a")
            places.append([axes.get_position().bounds for axes in figure.axes])
            assert isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)
    assert places[0] == places[1]
    assert (tmp_path / "a.svg").stat().st_size


def test_the_palette_is_seaborns():
    assert list(figures.PALETTE) == sns.color_palette("colorblind").as_hex()


@pytest.mark.parametrize("kind", figures.KINDS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "gptj", "gemma2"])
def test_every_kind_draws_for_one_model(tables, kind, name):
    figure = tables[name].plot(kind)
    if kind == "angles":
        panels = tables[name].frame[["stack", "role"]].drop_duplicates()
        assert drawn(figure) == len(figure.axes) == 2 * len(panels)
        assert name in figure.get_suptitle()
    else:
        assert drawn(figure) == len(figure.axes) == 1


@pytest.mark.parametrize("kind", ["energy", "norms", "rotation"])
def test_models_share_a_figure_with_a_panel_each(tables, kind):
    for name, titles in (("pair", ["gpt2", "llama"]), ("triple", ["gpt2", "llama", "t5"])):
        figure = tables[name].plot(kind)
        assert [axes.get_title() for axes in figure.axes] == titles
        assert drawn(figure) == len(titles)


@pytest.mark.parametrize("kind", ["energy", "norms", "rotation"])
def test_a_role_looks_the_same_in_all_models_and_as_no_other_in_any(tables, kind):
    table = AngleTable.concatenated([tables[name] for name in ("gpt2", "bert", "gptj", "gemma2", "t5")])
    looks = {}
    for line in [
        line for axes in table.plot(kind).axes for line in axes.lines if line.get_marker() not in ("None", "_")
    ]:
        looks.setdefault((str(line.get_color()), line.get_marker()), set()).add(line.get_label())
    named = [[label for label in labels if not label.startswith("_")] for labels in looks.values()]
    assert all(len(labels) == 1 for labels in named), looks
    assert len({label for (label,) in named}) == len(named) > 4


def test_angles_are_of_one_model(tables):
    with pytest.raises(DataError, match="name one of the models"):
        tables["pair"].plot("angles")
    assert "llama" in tables["pair"].plot("angles", "llama").get_suptitle()


def test_drawing_leaves_matplotlibs_settings_as_they_were(tables, tmp_path):
    with matplotlib.rc_context({"font.size": 17, "axes.grid": False}):
        before, colors = matplotlib.rcParams.copy(), dict(matplotlib.colors.colorConverter.colors)
        for kind in figures.KINDS:
            figure = tables["gpt2"].plot(kind)
            figures.save(figure, tmp_path / kind)
        assert figure.axes[0].xaxis.get_ticklabels()[0].get_fontsize() == 7
        assert matplotlib.rcParams == before
        assert dict(matplotlib.colors.colorConverter.colors) == colors


def test_points_and_bars_are_the_tables_means_and_deviations(tables):
    frame, figure = tables["gpt2"].frame, tables["gpt2"].plot("angles")
    panels = [(phase, role) for phase in ("pre", "post") for role in ("attention", "mlp", "final")]
    for axes, (phase, role) in zip(figure.axes, panels, strict=True):
        bars = {bar.get_label(): bar for bar in axes.containers}
        for direction, label in figures.LABELS.items():
            here = frame[(frame.phase == phase) & (frame.role == role) & (frame.direction == direction)]
            rows, (points, _, (segments,)) = here.sort_values("layer"), bars[label].lines
            assert points.get_ydata() == pytest.approx(rows.mean_deg.to_numpy()), (phase, role, direction)
            assert points.get_xdata() == pytest.approx(rows.layer.to_numpy(), abs=0.25)  # beside each other
            assert matplotlib.colors.same_color(points.get_color(), figures.COLORS[direction])
            heights = [(s[1, 1] - s[0, 1]) / 2 for s in segments.get_segments()]
            assert heights == pytest.approx(rows.std_deg.tolist())


@pytest.mark.parametrize(("row", "phase"), [(0, "pre"), (1, "post")])
@pytest.mark.parametrize(
    ("label", "bounds"), [("means of random directions: all", ["min_deg", "max_deg"]), ("central 90%", ["q05", "q95"])]
)
def test_shaded_bands_are_those_of_the_null_ensemble(tables, row, phase, label, bounds):
    frame, axes = tables["gpt2"].frame, tables["gpt2"].plot("angles").axes[3 * row]
    (band,) = (found for found in axes.collections if found.get_label() == label)
    drawn_at = {tuple(point) for point in band.get_paths()[0].vertices.round(6).tolist()}
    null = frame[(frame.phase == phase) & (frame.role == "attention") & (frame.direction == "null")]
    for column in bounds:
        assert set(zip(null.layer, null[column].round(6), strict=True)) <= drawn_at


@pytest.mark.parametrize(
    ("kind", "phase", "column"),
    [("energy", "pre", "energy_share"), ("norms", "pre", "mean_norm"), ("rotation", "standardized", "rotation_deg")],
)
def test_lines_by_layer_are_the_tables(tables, kind, phase, column):
    for axes, model in zip(tables["pair"].plot(kind).axes, ("gpt2", "llama"), strict=True):
        frame, lines = tables[model].frame, {line.get_label(): line for line in axes.lines}
        rows = frame[(frame.phase == phase) & (frame.direction == "uniform")]
        for role, own in rows.sort_values("layer").groupby("role"):
            line = lines[figures.ROLE_LABELS[role]]
            assert line.get_xdata().tolist() == own.layer.tolist()
            assert line.get_ydata() == pytest.approx(own[column].to_numpy(), rel=1e-9), (model, role)


@pytest.mark.parametrize("kind", figures.KINDS)
def test_figures_are_saved_as_png_and_svg_the_same_every_time(tables, kind, tmp_path):
    for stem in ("once", "again"):
        figures.save(tables["gpt2"].plot(kind), tmp_path / stem)
    png, svg = ((tmp_path / f"once.{suffix}").read_bytes() for suffix in ("png", "svg"))
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg
    assert png == (tmp_path / "again.png").read_bytes()
    assert svg == (tmp_path / "again.svg").read_bytes()


def test_two_stacks_are_told_apart_in_titles(tables):
    titles = [axes.get_title() for axes in tables["t5"].plot("angles").axes]
    assert len([t for t in titles if t]) == len({t for t in titles if t}) == 7


def test_an_unknown_kind_names_the_known_ones(tables):
    with pytest.raises(DataError, match="no figure 'pie'; there are angles, energy, norms, rotation"):
        tables["gpt2"].plot("pie")


def test_a_table_without_a_null_ensemble_draws(tiny, ids):
    table = measure_angles(tiny("gpt2"), ids, null=0, progress=False)
    for kind in figures.KINDS:
        assert drawn(table.plot(kind))


def boxes(figure, artists):
    """Where a figure shows some of its artists, each within the figure and beside the others."""
    figure.draw_without_rendering()
    found = [artist.get_window_extent() for artist in artists]
    for k, box in enumerate(found):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
        assert not any(box.overlaps(other) for other in found[:k])
    return found


@pytest.mark.parametrize("layers", [2, 6])
def test_titles_of_two_stacks_lie_beside_each_other(ids, layers):
    table = measure_angles(zoo.tiny("t5", num_layers=layers), ids, null=2, progress=False)
    figure = table.plot("angles")
    titles = [axes.title for axes in figure.axes[:7]]
    assert titles[3].get_text() == "decoder\npre-cross-attention"
    boxes(figure, [*titles, figure.legends[0]])


@pytest.mark.parametrize("within", ["", "k1/", "/home/someone/experiments/2026/of-normalization/in-transformers/"])
def test_long_names_fit_into_the_legend_of_a_comparison(ids, tiny, within):
    names = [f"{within}{norm}/checkpoints/step-00000030" for norm in ("layernorm", "rmsnorm")]
    models = dict(zip([*names, f"{names[0]}, naive RMSNorm"], map(tiny, ("gpt2", "llama", "llama")), strict=True))
    figure = compare(models, ids[:2, :9], null=2, rounds=0, progress=False).plot()
    boxes(figure, figure.legends)
    shown = ["".join(text.get_text().split()) for text in figure.legends[0].get_texts()]  # whole, on however many lines
    assert shown == [name.replace(" ", "") for name in models]


@pytest.mark.parametrize("kind", figures.KINDS)
@pytest.mark.parametrize("models", [1, 3])
def test_long_names_fit_above_their_panels(tables, kind, models):
    names = [f"organisation/A-Model-3.1-of-a-long-name-70B-instruct-{k}" for k in range(models)]
    parts = [tables["gpt2"].frame.assign(model=name) for name in names]
    figure = AngleTable(pd.concat(parts, ignore_index=True)).plot(kind, names[0] if kind == "angles" else None)
    texts = [text for text in (*(axes.title for axes in figure.axes), figure._suptitle) if text.get_text()]
    boxes(figure, texts)
    assert names[0] in "".join(text.get_text() for text in texts).replace("\n", "")


def test_short_names_share_a_line_of_the_legend(ids, tiny):
    figure = compare({"a": tiny("gpt2"), "b": tiny("llama")}, ids[:2, :9], null=2, rounds=0, progress=False).plot()
    figure.draw_without_rendering()
    assert len({text.get_window_extent().y0 for text in figure.legends[0].get_texts()}) == 1


def layer_ticks(figure):
    """The numbers below axes that are labelled with layers."""
    figure.draw_without_rendering()
    below = [axes for axes in figure.axes if axes.get_xlabel() == "layer"]
    shown = [tick for axes in below for tick in axes.get_xticks() if axes.viewLim.x0 <= tick <= axes.viewLim.x1]
    assert len(shown) >= len(below) > 0
    return set(shown)


def test_one_layer_has_one_tick(ids):
    model = zoo.tiny("gpt2", n_layer=1)
    table = measure_angles(model, ids, null=2, progress=False)
    attention = AngleTable(table.frame[table.frame.role == "attention"], table.sinks)
    for kind in ("energy", "norms", "rotation"):
        assert layer_ticks(attention.plot(kind)) == {0}
    models = {"a": model, "b": zoo.tiny("llama", num_hidden_layers=1)}
    figure = compare(models, ids[:2, :9], null=2, rounds=0, progress=False).plot()
    assert layer_ticks(figure) == {0}
    figure, grid = _axes.grid(["degrees"], ["a model"])
    grid[0, 0].plot([3], [90], "o")
    assert layer_ticks(figure) == {3}


@pytest.mark.parametrize(("columns", "across"), [(1, 1), (3, 3), (4, 2), (8, 3)])
def test_columns_that_do_not_fit_beside_each_other_continue_below(columns, across):
    """Every label is there once for its band or column, and none lies over another."""
    names = [f"organisation/a-model-1.4b-{i} (2026-11-21-$a-long-run$)" for i in range(columns)]
    figure, grid = figures.styled(_axes.grid)(["before the norm (degrees)", "after"], names, xlabel=_axes.DEPTH)
    for i, axes in enumerate(grid.flat):
        axes.plot([0, 5], [80 + i, 95])
    figures.legend(figure)
    figure.draw_without_rendering()
    shown = [axes.get_title().replace("\n", " ").replace("\\$", "$") for axes in grid[0]]
    assert shown == names
    assert len(figure.axes) == 2 * columns
    labelled = [[axes for axes in figure.axes if get(axes)] for get in (Axes.get_ylabel, Axes.get_xlabel)]
    assert [len(axes) for axes in labelled] == [2 * -(-columns // across), min(columns, across)]
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert len({axes.get_ylim() for axes in grid[0]}) == 1  # a quantity has one scale, wherever it is


def test_the_null_of_energies_is_of_the_width_of_the_norm(ids):
    """A random direction has 1/d of the energy, on heads more than on the residual stream."""
    model = zoo.tiny("qwen3")
    table = measure_angles(model, ids, sites=find_sites(model, qk=True), null=16, progress=False)
    lines = {line.get_label(): line for axes in table.plot("energy").axes for line in axes.lines}
    null = table.frame[(table.frame.direction == "null") & (table.frame.phase == "pre")]
    assert set(null.d) == {8, 32}
    for d, rows in null.groupby("d"):
        for column, what in (("energy_share", "mean"), ("energy_q95", "95th percentile")):
            drawn_at = lines[f"random directions of width {d}{', off the stream' * (d == 8)}: {what}"].get_ydata()
            assert drawn_at == pytest.approx(rows.groupby("layer")[column].mean().to_numpy())
    assert {"query/key: q_norm", "query/key: k_norm"} <= lines.keys()


@pytest.mark.parametrize("others", ["gpt2", "null", "none"])
def test_energies_of_zero_are_at_the_bottom_of_the_axis(tables, others):
    """As of a centered model, beside another, random directions or nothing."""
    frame, uniform = tables["llama"].frame, tables["llama"].frame.direction == "uniform"
    zeros = frame.assign(energy_share=frame.energy_share.where(~uniform, 0.0))[uniform | (others != "none")]
    figure = figures.draw(pd.concat([zeros, tables["gpt2"].frame] if others == "gpt2" else [zeros]), "energy")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert [y for line in axes.lines if "random" not in line.get_label() for y in line.get_ydata()] == [0.0] * 5
    assert dict(zip(axes.get_yticks(), [text.get_text() for text in axes.get_yticklabels()], strict=True))[0.0] == "0%"
    _, low, _, high = axes.get_window_extent().extents
    assert low + 3 < axes.transData.transform((0, 0))[1] < (9 * low + high) / 10


def rounded(rows):
    """Angles that differ from 90 degrees by rounding, as behind norms without gamma and beta."""
    return rows.assign(mean_deg=[90 + 1e-7 * (k % 5 - 2) for k in range(len(rows))], std_deg=1e-7)


def spans(figure, axes):
    """From where to where each axis of degrees goes; its numbers are the degrees, with nothing to add."""
    figure.draw_without_rendering()
    assert not any(panel.yaxis.get_offset_text().get_text() for panel in axes)
    return [panel.get_ylim() for panel in axes]


def test_rounding_does_not_fill_an_axis_of_degrees(tables, tiny, ids):
    frame = tables["gpt2"].frame
    rows = rounded(frame[frame.direction.isin([*figures.COLORS])])
    rows["rotation_deg"] = [1e-7 * (k % 5) for k in range(len(rows))]
    chosen = pd.concat([rows.assign(mask=name) for name in ("all", "late")])
    result = compare({"a": tiny("gpt2"), "b": tiny("llama")}, ids[:2, :9], null=2, rounds=0, progress=False)
    side_by_side = replace(result, angles=rounded(result.angles)).plot()
    for figure in (figures.draw(rows, "angles"), masks.plot(chosen), side_by_side):
        for low, high in spans(figure, figure.axes[:6]):
            assert 89 < low < 89.51 < 90.49 < high < 91
    rotation = figures.draw(rows, "rotation")
    ((low, high),) = spans(rotation, rotation.axes)
    assert -0.001 < low <= 0 < 0.01 <= high < 0.02


def test_norms_of_queries_and_of_keys_have_panels_of_their_own(ids):
    model = zoo.tiny("qwen3")
    table = measure_angles(model, ids, sites=find_sites(model, qk=True), null=4, progress=False)
    titles = [axes.get_title() for axes in table.plot("angles").axes if axes.get_title()]
    assert titles == ["pre-attention", "query/key\nq_norm", "query/key\nk_norm", "pre-MLP", "final"]
    bars = [axes.containers[0] for axes in table.plot("angles").axes[:5]]
    for name, bar in zip(("input_layernorm", "q_norm", "k_norm"), bars, strict=False):
        rows = table.frame[table.frame.site.str.endswith(name)].query("phase == 'pre' and direction == 'uniform'")
        assert bar.lines[0].get_ydata() == pytest.approx(rows.mean_deg.to_numpy())


def test_growth_is_of_the_residual_stream(tables):
    def labels(name):
        figure = figures.draw(tables[name].frame, "norms")
        return {line.get_label() for line in figure.axes[0].lines}

    assert labels("gemma2") == {"pre-attention", "pre-MLP", "final"}
    assert labels("bert") == {"embedding", "post-attention", "post-MLP"}


def test_growth_without_first_positions_and_bos_is_drawn_in_broken_lines(tables):
    table = tables["gpt2"]
    lines = [line for line in table.plot("norms").axes[0].lines if line.get_linestyle() == "--"]
    assert lines.pop().get_label() == "the same without first positions and BOS"
    pre = table.frame[(table.frame.phase == "pre") & (table.frame.direction == "uniform")].set_index("site")
    groups = table.sinks[(table.sinks.phase == "pre") & (table.sinks.direction == "uniform")].set_index("site")
    sinks = groups[groups.tokens != "rest"]
    left = pre.mean_norm * pre.n_tokens - (sinks.mean_norm * sinks.n_tokens).groupby("site").sum()
    pre["rest"] = left / (pre.n_tokens - sinks.n_tokens.groupby("site").sum())
    assert (pre.rest - pre.mean_norm).abs().min() > 1e-6
    drawn = sorted(y for line in lines for y in line.get_ydata())
    assert drawn == pytest.approx(sorted(pre.rest), rel=1e-6)


def test_norms_of_what_is_measured_off_the_stream_alone_are_drawn(tiny, ids):
    model = tiny("qwen3")
    sites = [site for site in find_sites(model, qk=True) if site.role == "qk"]
    assert drawn(measure_angles(model, ids, sites=sites, null=4, progress=False).plot("norms")) == 1


def test_a_model_that_is_not_there_is_named(tables):
    for kind in figures.KINDS:
        with pytest.raises(DataError, match="no model 'gpt' in the table; there are gpt2, llama"):
            tables["pair"].plot(kind, "gpt")


@pytest.mark.parametrize("kind", figures.KINDS)
def test_what_is_drawn_of_rows_that_are_not_there_names_them(tables, kind):
    frame = tables["gpt2"].frame
    for part in (frame[frame.phase == "post"], frame[frame.direction != "uniform"], frame[:0]):
        with pytest.raises(DataError, match=f"{kind} is drawn of rows of phase '[a-z]+' and direction 'uniform'"):
            figures.draw(part, kind)


@pytest.mark.parametrize("layers", [figures.MOST_BARS, figures.MOST_BARS + 1])
def test_of_many_layers_lines_show_the_spread_that_bars_would_hide(tables, layers):
    """80 layers of three bars each are one area, behind which nothing is seen."""
    frame = tables["gpt2"].frame
    frame = frame[(frame.role == "attention") & (frame.phase == "pre") & (frame.layer == 0)]
    many = pd.concat([frame.assign(layer=i, mean_deg=90 + i, std_deg=i / 9) for i in range(layers)])
    axes = matplotlib.figure.Figure().subplots()
    figures.mean_angles(axes, many, "layer")
    lines = [line for line in axes.lines if line.get_linestyle() == "--"]
    expected = [90 + i + side * i / 9 for side in (-1, 1) for i in range(layers)]
    if layers > figures.MOST_BARS:
        assert not axes.containers
        assert [y for line in lines[:2] for y in line.get_ydata()] == pytest.approx(expected)
        assert len(lines) == 6
    else:
        assert (len(axes.containers), lines) == (3, [])
    assert axes.get_legend_handles_labels()[1][-3:] == list(figures.LABELS.values())


@pytest.mark.parametrize("kind", sorted({*figures.KINDS} - {"angles"}))
def test_of_many_layers_marks_do_not_hide_the_lines_behind_them(tables, kind):
    """Of 400 layers each mark is as wide as ten, and all of them are a band."""
    frame = tables["gpt2"].frame
    frame = frame[frame.layer == 0]
    many = pd.concat([frame.assign(layer=i) for i in range(400)], ignore_index=True)
    lines = [line for axes in AngleTable(many).plot(kind).axes for line in axes.lines]
    marked = [line for line in lines if len(line.get_xdata()) == 400 and line.get_marker() != "None"]
    assert len(marked) > 1
    assert all(len(line.get_xdata()[:: line.get_markevery() or 1]) <= 2 * figures.MOST_BARS for line in marked)
