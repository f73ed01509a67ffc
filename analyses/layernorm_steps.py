"""The steps of LayerNorm on a vector of three numbers (*Geometry* fig. 1; section 2.1, eq. 5 to 9).

LayerNorm throws away the component along the uniform vector **1**, scales what is left to length 1 and then to sqrt(d),
and scales and shifts. RMSNorm leaves out the first of these.
"""

from __future__ import annotations

from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
import seaborn as sns
import torch

from normgeo import figures
from normgeo.geometry import angle, mean_vector, orthogonal_component, standardize, uniform_vector

VECTOR, GAMMA, BETA = (1.9, 0.3, -0.4), (1.3, 0.7, 1.1), (0.2, 0.5, -0.3)
STEPS = {
    "(a) the vector": ("x",),
    "(b) its component along 1": ("x", "along 1"),
    "(c) what is left": ("x", "along 1", "left"),
    "(d) of length 1": ("left", "of length 1"),
    "(e) of length sqrt(d)": ("of length 1", "of length sqrt(d)"),
    "(f) scaled and shifted": ("of length sqrt(d)", "scaled and shifted"),
}
"""What each panel shows; what is new in it comes last."""


def compute(
    vector: tuple[float, ...] = VECTOR, gamma: tuple[float, ...] = GAMMA, beta: tuple[float, ...] = BETA
) -> pd.DataFrame:
    """The vector of each step, and its length and angle to the uniform vector in degrees; a row each."""
    x, gain, shift = (torch.tensor(v, dtype=torch.float64) for v in (vector, gamma, beta))
    left, y, one = orthogonal_component(x), standardize(x), uniform_vector(len(x), torch.float64)
    vectors = {
        "x": x, "along 1": mean_vector(x), "left": left, "of length 1": left / left.norm(), "of length sqrt(d)": y,
        "scaled and shifted": gain * y + shift,
    }  # fmt: skip
    rows = [
        {
            "vector": name, **{f"x{i + 1}": float(value) for i, value in enumerate(v)}, "length": float(v.norm()),
            "angle_deg": float(angle(v, one)),
        }
        for name, v in vectors.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """A panel for each step, with the plane of the vectors of mean 0."""
    sns.set_style("white")
    figure = matplotlib.figure.Figure(figsize=(figures.WIDTH, 4.6), layout="constrained")
    vectors = {row["vector"]: np.array([row["x1"], row["x2"], row["x3"]]) for row in frame.to_dict("records")}
    colors = dict(zip(vectors, figures.PALETTE, strict=False))
    for k, (title, shown) in enumerate(STEPS.items()):
        axes: Any = figure.add_subplot(2, 3, k + 1, projection="3d", computed_zorder=False)
        _backdrop(axes)
        longest_first = sorted(shown, key=lambda name: -np.linalg.norm(vectors[name]))  # else they hide what is shorter
        for name in longest_first:
            new = name == shown[-1]
            axes.quiver(
                0, 0, 0, *vectors[name], color=colors[name], label=name, linewidth=1.8 if new else 1.0,
                alpha=1.0 if new else 0.45, arrow_length_ratio=0.12,
            )  # fmt: skip
        if title.startswith("(c)"):
            axes.plot(*np.stack([vectors["x"], vectors["left"]]).T, color="0.5", linewidth=0.7, linestyle=":")
        axes.set_title(title, pad=-2)
    figures.legend(figure)
    figure.suptitle("LayerNorm of a vector in three dimensions, step by step", fontsize=9)
    return figure


def _backdrop(axes: Any) -> None:
    """The uniform direction, and the plane through zero perpendicular to it."""
    size = 2.0
    a, b = np.array([1, -1, 0]) / np.sqrt(2), np.array([1, 1, -2]) / np.sqrt(6)
    s, t = np.meshgrid([-size, size], [-size, size])
    axes.plot_surface(*(s * a[i] + t * b[i] for i in range(3)), color="0.6", alpha=0.12, linewidth=0)
    end = size / np.sqrt(3)
    axes.plot(
        [-end, end], [-end, end], [-end, end], color="0.4", linewidth=0.8, linestyle="--", label="uniform vector 1"
    )
    axes.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), zlim=(-1.6, 1.6), xticklabels=[], yticklabels=[], zticklabels=[])
    axes.set_box_aspect((1, 1, 1), zoom=1.15)
    axes.view_init(elev=18, azim=-50)
