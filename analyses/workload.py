"""What norms and recentering compute, next to a model's matrix products (*Pre-RMSNorm* tables 1 and 2).

Table 1 says "same", "a little increase" and "decrease"; here are the numbers, counted from the architecture: additions
and multiplications, where a vector's square root is nothing. A backward pass counts as two forward passes. Parameters
are centered once a step, however many tokens it has, so that their part falls with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.figure
import pandas as pd

from analyses import _axes
from normgeo import figures
from normgeo.bench.inference_models import SIZES

PER_NUMBER = {"layernorm": 5, "rmsnorm": 3, "crmsnorm": 4}
"""Operations of a norm for each number of its input: its mean, x less it, squares, their sum, and the scale (eq. 1);
RMSNorm has the last three (eq. 2), CRMSNorm a sum as well (eq. 5). Gamma and beta, which any of them can fold into what
reads it, are not counted."""

CENTER = 2  # a sum and a difference
BACKWARD = 2  # a backward pass, in forward passes


def compute(sizes: Sequence[str] = tuple(SIZES), sequences: int = 64) -> pd.DataFrame:
    """One row per size: its shape, as in table 2, and operations of an inference of a sequence and of a training step.

    Args:
        sizes: names in `normgeo.bench.inference_models.SIZES`.
        sequences: how many a step has; images, or contexts of 512 tokens as in figure 5.

    `products` are the matrix products of a forward pass of one sequence, `layernorm`, `rmsnorm` and `crmsnorm` its
    norms; `step_...` the same of a training step, `step_linear` the centering of the linear layers that write into the
    stream, and `step_recenter` that of the embeddings. At inference there is neither: parameters were centered before.
    """
    return pd.DataFrame([_row(name, sequences) for name in sizes])


def _row(name: str, sequences: int) -> dict[str, object]:
    config = SIZES[name]()
    is_image = hasattr(config, "image_size")
    d, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    inner = config.intermediate_size if is_image else 4 * d
    patches = (config.image_size // config.patch_size) ** 2 if is_image else 0
    tokens = patches + 1 if is_image else 512
    per_layer = tokens * (4 * d * d + 2 * d * inner) + 2 * tokens * tokens * d
    ends = patches * 3 * config.patch_size**2 * d + d * 1000 if is_image else tokens * d * config.vocab_size
    forward = {"products": 2 * (layers * per_layer + ends)}
    forward |= {norm: (2 * layers + 1) * tokens * d * each for norm, each in PER_NUMBER.items()}
    step = {f"step_{part}": (1 + BACKWARD) * sequences * count for part, count in forward.items()}
    written = layers * (d * d + d + inner * d + d)
    # gradients are centered as parameters are
    step |= {"step_linear": 2 * CENTER * written, "step_recenter": 2 * CENTER * sequences * tokens * d}
    shape = {"d": d, "layers": layers, "heads": heads, "mlp": inner, "tokens": tokens, "sequences": sequences}
    return {"model": name, **shape, **forward, **step}


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """What norms and centering are of the matrix products of a step; for norms it is the same in inference."""
    figure, grid = _axes.grid([""], [f"steps of {frame.sequences[0]} sequences"], xlabel="", height=2.8)
    parts = {
        "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "crmsnorm": "CRMSNorm",
        "linear": "centered linear layers, in training", "recenter": "recentered embeddings, in training",
    }  # fmt: skip
    axes = grid[0, 0]
    for k, (part, label) in enumerate(parts.items()):
        share = 1000 * frame[f"step_{part}"] / frame.step_products
        axes.plot(frame.model, share, "osD^v"[k], color=figures.PALETTE[k], markersize=5, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("operations for 1,000\nof matrix products")
    axes.set_xticks(range(len(frame)), frame.model, rotation=30)
    figures.legend(figure)
    figure.suptitle("What norms and recentering compute, as counted", fontsize=9)
    return figure
