"""What large captures need, on paper: bytes, files, time and machines of Llama-3-8B and Llama-3-70B.

Bytes are counted by the functions that `normgeo angles` and `normgeo capture` use for their own estimates. Time is
arithmetic on rates, each with its source: what `normgeo bench store` measured on a CPU, and what is assumed of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.figure
import pandas as pd
import torch
from transformers import LlamaConfig, LlamaModel

from normgeo import figures
from normgeo.angles.scalars import bytes_needed
from normgeo.angles.statistics import AngleStatistics
from normgeo.geometry import Directions
from normgeo.sites import NormSite
from normgeo.store.layout import Layout

LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA_70B = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
PLANS = (("Llama-3-70B", LLAMA_70B, 10**6), ("Llama-3-8B", LLAMA_8B, 10**9))
TIERS = {"statistics": (), "scalars": (), "pre": ("pre",), "all phases": ("pre", "standardized", "post")}
CONTEXT, BLOCK, NULL = 1024, 16_384, 256
ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Machine:
    """How fast a machine is; one that computes, measures and writes at the same time is as slow as the slowest.

    Attributes:
        name: what it is.
        source: where its rates are from, `measured` or `assumed`.
        flops: floating-point operations a second that a forward pass gets.
        statistics: bytes of hidden states a second that the angles take.
        link: bytes a second from the device to the host's memory.
        write: bytes a second that a store takes.
        disk: bytes that fit.
        overlap: whether computing, copying and writing are done by different parts; otherwise times add up.
    """

    name: str
    source: str
    flops: float
    statistics: float
    link: float
    write: float
    disk: float
    overlap: bool


CPU = Machine(
    # normgeo bench store SmolLM2-135M --dtype bfloat16 on two cores of an AMD EPYC: 1,007 tokens/s forward, 1.0054 of
    # its time with statistics, 2,623 MB/s into a store; 248 MFLOP and 141 kB of hidden states a token
    "CPU of 2 cores", "measured", 1007.1 * 248e6, 140.5e3 * 1007.1 / 0.0054, float("inf"), 2622.7e6, 252e9,
    False,
)  # fmt: skip
NODE = Machine(
    # eight GPUs, each of 989 dense bfloat16 TFLOP/s at 40% of it, 3.35 TB/s of memory and 50 GB/s of PCIe; eight NVMe
    # drives, each of 15.36 TB and 5 GB/s
    "8-GPU node", "assumed", 8 * 0.4 * 989e12, 8 * 3.35e12, 8 * 50e9, 8 * 5e9, 8 * 15.36e12, True,
)  # fmt: skip


def sites_of(config: LlamaConfig) -> list[NormSite]:
    """The norms of a Llama: two in every layer, and the final one."""
    d, eps, n = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
    found = []
    for layer in range(n):
        at = f"layers.{layer}"
        found.append(NormSite(f"{at}.input_layernorm", "rmsnorm", "attention", layer, "layers", d, eps))
        found.append(NormSite(f"{at}.post_attention_layernorm", "rmsnorm", "mlp", layer, "layers", d, eps))
    return [*found, NormSite("norm", "rmsnorm", "final", n, "layers", d, eps)]


def flops_per_token(config: LlamaConfig, context: int = CONTEXT) -> float:
    """Of a forward pass without the head: two a weight, and what attention does with half a context on average."""
    with torch.device("meta"):
        weights = sum(p.numel() for name, p in LlamaModel(config).named_parameters() if "embed" not in name)
    return 2 * weights + 2 * config.num_hidden_layers * context * config.hidden_size


def bytes_and_files(sites: Sequence[NormSite], tier: str, n_tokens: int, **cut: int) -> tuple[int, int]:
    """What a tier takes: the statistics, those and the scalars of `normgeo angles`, or a store's chunks, as it says.

    The statistics take 16 bytes for every bin of their histograms that has something in it, at most all of them. A
    store keeps those of every row of chunks beside its chunks; few of their bins have anything in them.

    Args:
        sites: the norms.
        tier: of `TIERS`.
        n_tokens: how many tokens.
        cut: `chunk_bytes`, the largest chunk of a store.
    """
    if not TIERS[tier]:
        directions = {d: Directions.seeded(d, NULL) for d in {site.d for site in sites}}
        statistics = AngleStatistics(sites, directions)
        state = statistics.state_bytes(n_tokens)
        scalars = bytes_needed(sites, n_tokens, min(BLOCK, n_tokens)) if tier == "scalars" else 0
        arrays = 3 + 2 * len(sites)  # of tokens; of norm and angles, before and after
        return state + scalars, 1 + (arrays * -(-n_tokens // BLOCK) if scalars else 0)
    layout = Layout.of(sites, ["bfloat16"] * len(sites), TIERS[tier], n_tokens, **cut)
    return layout.nbytes, layout.rows * (len(layout.arrays) + 2)  # and a record and statistics a row


def compute(machines: Sequence[Machine] = (CPU, NODE)) -> pd.DataFrame:
    """One row a model, tier and machine: bytes, files, hours of one machine, and machines that take it within a day."""
    rows = []
    for model, config, n_tokens in PLANS:
        sites, flops = sites_of(config), flops_per_token(config)
        hidden = 2 * sum(site.d * site.heads for site in sites) * ITEM  # a token's, before and after
        for tier, phases in TIERS.items():
            nbytes, files = bytes_and_files(sites, tier, n_tokens)
            for m in machines:
                seconds = {
                    "forward pass": n_tokens * (flops / m.flops),
                    "statistics": n_tokens * (hidden / m.statistics),
                    "copy to the host": n_tokens * len(phases) * (hidden / 2 / m.link),
                    "writing": nbytes / m.write,
                }
                device = seconds["forward pass"] + seconds["statistics"]  # the same processor does both
                others = seconds["copy to the host"], seconds["writing"]
                total = max(device, *others) if m.overlap else device + sum(others)
                rows.append(
                    {"model": model, "tokens": n_tokens, "sites": len(sites), "d": config.hidden_size, "tier": tier,
                     "bytes": nbytes, "files": files, "machine": m.name, "rates": m.source, "hours": total / 3600,
                     "slowest": max(seconds, key=lambda k: seconds[k]),
                     "machines": max(math.ceil(total / 86_400), math.ceil(nbytes / m.disk))}
                    | {f"hours_{name.replace(' ', '_')}": took / 3600 for name, took in seconds.items()}
                )  # fmt: skip
    return pd.DataFrame(rows)


@figures.styled
def plot(frame: pd.DataFrame) -> matplotlib.figure.Figure:
    """Bytes by tier, and hours of one machine by tier."""
    figure = matplotlib.figure.Figure(figsize=(figures.WIDTH, 4.6), layout="constrained")
    grid = figure.subplots(2, frame.model.nunique(), squeeze=False, sharex="row", sharey="all")
    for column, (model, part) in enumerate(frame.groupby("model", sort=False)):
        size, time = grid[:, column]
        once = part.drop_duplicates("tier")
        bars = size.barh(once.tier, once.bytes, height=0.6, color="0.6")
        size.bar_label(bars, [_size(n) for n in once.bytes], padding=2, fontsize=7)
        for k, (name, each) in enumerate(part.groupby("machine", sort=False)):
            at = [list(TIERS).index(tier) + 0.36 * k - 0.18 for tier in each.tier]
            label = f"{name} ({each.rates.iloc[0]} rates)"
            bars = time.barh(at, each.hours, height=0.34, color=figures.PALETTE[k], label=label)
            time.bar_label(bars, [_duration(h) for h in each.hours], padding=2, fontsize=7)
        size.set_title(f"{model}, {part.tokens.iloc[0]:,} tokens", fontsize=9)
        for axes, label, limits in ((size, "bytes", (1e5, 1e17)), (time, "hours of one machine", (1e-3, 1e8))):
            axes.set_xscale("log")
            axes.set_xlim(*limits)
            axes.set_xlabel(label)
            axes.grid(visible=False, axis="y")
    grid[0, 0].invert_yaxis()
    figures.legend(figure)
    return figure


def markdown(frame: pd.DataFrame) -> str:
    """The plan as a table."""
    lines = [
        "| model, tokens | tier | bytes | files | machine | rates | time | slowest | machines for a day |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in frame.to_dict("records"):
        lines.append(
            f"| {row['model']}, {row['tokens']:,} | {row['tier']} | {_size(row['bytes'])} | {row['files']:,} | "
            f"{row['machine']} | {row['rates']} | {_duration(row['hours'])} | {row['slowest']} | "
            f"{row['machines']:,} |"
        )
    return "\n".join(lines) + "\n"


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:  # which three digits would round to 1e+03
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} PB"


def _duration(hours: float) -> str:
    for unit, length in (("s", 1 / 3600), ("min", 1 / 60), ("h", 1.0)):
        if hours / length < (99.5 if unit != "h" else 48):
            return f"{hours / length:.2g} {unit}"
    return f"{hours / 24:,.0f} days" if hours < 24 * 365 else f"{float(f'{hours / 24 / 365:.2g}'):,g} years"
