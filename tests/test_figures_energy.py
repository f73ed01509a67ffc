"""Logarithmic axes: the random directions in the figure of energies, and the ticks of norms that are alike."""

import matplotlib.colors
import pytest

from normgeo.angles.measure import measure_angles


def of_random_directions(figure):
    """{label: color} of the lines of random directions."""
    lines = (line for line in figure.axes[0].lines if "random directions" in line.get_label())
    return {line.get_label(): matplotlib.colors.to_hex(line.get_color()) for line in lines}


def test_the_null_of_each_stack_of_an_encoder_decoder_is_told_apart(tiny, ids):
    table = measure_angles(tiny("t5"), ids, null=16, progress=False)
    null = table.frame[(table.frame.direction == "null") & (table.frame.phase == "pre")]
    figure = table.plot("energy")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    for stack, rows in null.groupby("stack"):
        name = stack.split(".")[-2]
        for column, what in (("energy_share", "mean"), ("energy_q95", "95th percentile")):
            drawn = lines[f"{name}: random directions: {what}"].get_ydata()
            assert drawn == pytest.approx(rows.groupby("layer")[column].mean().to_numpy())
    assert len(set(of_random_directions(figure).values())) == 2


def test_the_null_of_what_branches_give_is_not_that_of_the_stream(tiny, ids):
    """Their hidden states are others: one line through both is above the one's percentile and below the other's."""
    table = measure_angles(tiny("gemma2"), ids, null=16, progress=False)
    null = table.frame[(table.frame.direction == "null") & (table.frame.phase == "pre")]
    lines = {line.get_label(): line for line in table.plot("energy").axes[0].lines}
    for given, rows in null.groupby(null.role.str.startswith("post_")):
        drawn = lines[f"random directions{', off the stream' * given}: 95th percentile"].get_ydata()
        assert drawn == pytest.approx(rows.groupby("layer").energy_q95.mean().to_numpy())


def test_norms_that_are_alike_have_ticks_of_few_digits(tiny, ids):
    """As of a single site: 4 x 10^0, where the axis would end in 3.76206 x 10^0 and begin in 3.76192 x 10^0."""
    figure = measure_angles(tiny("gpt2"), ids, sites="final", null=4, progress=False).plot("norms")
    figure.draw_without_rendering()
    ticks = figure.axes[0].yaxis
    labels = [label.get_text() for label in (*ticks.get_ticklabels(), *ticks.get_ticklabels(minor=True))]
    assert not any("." in label for label in labels)
    assert sum(bool(label) for label in labels) > 1
