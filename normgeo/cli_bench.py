"""The command line of the benchmarks of inference: arguments and printing, no logic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from normgeo.errors import NormGeoError
from normgeo.files import check_file, write_table

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["register"]

Out = Annotated[Path | None, typer.Option(help="Write the raw timings here, as .parquet, after every model.")]


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise NormGeoError(f"{option} takes one or more, comma-separated; received {text!r}")
    return words


def _numbers(text: str, option: str) -> list[int]:
    words = _words(text, option)
    if not all(word.isdecimal() and int(word) for word in words):
        raise NormGeoError(f"{option} takes whole numbers above 0, comma-separated; received {text!r}")
    return [int(word) for word in words]


def _time(seconds: float) -> float:
    if not seconds >= 0:  # neither below, nor no number
        raise NormGeoError(f"--seconds takes a number from 0 on; received {seconds}")
    return seconds


def register(bench: typer.Typer, console: Console, quiet: Callable[[], None]) -> None:
    """Add `bench inference` and `bench norms`; `quiet` keeps other libraries from printing."""

    @bench.command("inference")
    def bench_inference(
        models: Annotated[
            list[str],
            typer.Argument(
                help="vit-tiny to vit-giant, gpt-small to gpt-2.7b, hub ids, directories.", metavar="MODEL..."
            ),
        ],
        dtype: Annotated[
            str, typer.Option(help="Of float32, bfloat16, autocast, int8 and int8-dynamic, comma-separated.")
        ] = "float32",
        batch: Annotated[str, typer.Option(help="Sequences or images at once, comma-separated.")] = "1",
        length: Annotated[str, typer.Option(help="Tokens, comma-separated; images have their own.")] = "512",
        decode: Annotated[
            bool, typer.Option("--decode", help="Also one token with LENGTH of them in the cache.")
        ] = False,
        compiled: Annotated[bool, typer.Option("--compile", help="Also through torch.compile.")] = False,
        graphs: Annotated[bool, typer.Option("--graphs", help="Also as CUDA graphs.")] = False,
        variants: Annotated[str | None, typer.Option(help="Only these, comma-separated.", show_default="all")] = None,
        rounds: Annotated[int, typer.Option(help="Timings of every variant, at most.", min=3)] = 100,
        seconds: Annotated[float, typer.Option(help="Time for the rounds of one case.", callback=_time)] = 60.0,
        device: Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")] = "cpu",
        seed: Annotated[int, typer.Option(help="Of random weights and of the order.")] = 0,
        out: Out = None,
    ) -> None:
        """Time a Pre-LN model, its conversions and its floor without norms, whole and in their norms alone."""
        import pandas as pd

        from normgeo import inference_bench
        from normgeo.inference_models import build
        from normgeo.models import usable_device

        quiet()
        check_file(out)
        batches, lengths = _numbers(batch, "--batch"), _numbers(length, "--length")
        dtypes, wanted = _words(dtype, "--dtype"), None if variants is None else _words(variants, "--variants")
        inference_bench.check_names(dtypes, variants=wanted or ())
        where = usable_device(device)
        if compiled:
            inference_bench.check_compiler(where)
        frames: list[pd.DataFrame] = []
        for name in models:
            raw = inference_bench.bench_inference(
                build(name, device=where, seed=seed), name, variants=wanted, dtypes=dtypes, batches=batches,
                lengths=lengths, phases=("forward", *["decode"] * decode),
                modes=("eager", *["compiled"] * compiled, *["graph"] * graphs), rounds=rounds, seconds=seconds,
                seed=seed,
                announce=lambda line: console.print(line, highlight=False, markup=False),
            )  # fmt: skip
            frames.append(raw)
            _inference(inference_bench.summary(raw), console)
            write_table(pd.concat(frames, ignore_index=True), out)

    @bench.command("norms")
    def bench_norms(
        shapes: Annotated[
            str | None, typer.Option(help="BATCHxTOKENSxWIDTH, comma-separated.", show_default="of ViTs and GPTs")
        ] = None,
        dtype: Annotated[str, typer.Option(help="Of float32, bfloat16 and float16.")] = "float32,bfloat16",
        rounds: Annotated[int, typer.Option(help="Timings of every norm, at most.", min=3)] = 100,
        seconds: Annotated[
            float, typer.Option(help="Time for the rounds of one shape and dtype.", callback=_time)
        ] = 10.0,
        device: Annotated[str, typer.Option(help="auto (CUDA, MPS, CPU) or a torch device.")] = "cpu",
        seed: Annotated[int, typer.Option(help="Of the inputs and of the order.")] = 0,
        out: Out = None,
    ) -> None:
        """Time norms alone, against torch's LayerNorm and a copy of the same memory."""
        from normgeo import norm_bench

        quiet()
        check_file(out)
        wanted = norm_bench.SHAPES if shapes is None else [_shape(text) for text in _words(shapes, "--shapes")]
        raw = norm_bench.bench_norms(
            wanted, dtypes=_words(dtype, "--dtype"), device=device, rounds=rounds, seconds=seconds, seed=seed
        )
        _norms(norm_bench.norm_summary(raw), console)
        write_table(raw, out)


def _shape(text: str) -> tuple[int, int, int]:
    sizes = _numbers(text.replace("x", ","), "--shapes")
    if len(sizes) != 3:
        raise NormGeoError(f"a shape is BATCHxTOKENSxWIDTH, as 1x512x768; received {text!r}")
    return sizes[0], sizes[1], sizes[2]


def _spread(row: dict, name: str) -> str:
    if row[name] != row[name]:
        return ""
    return f"{row[name]:.3f} ({row[f'{name}_q25']:.3f} to {row[f'{name}_q75']:.3f})"


def _share(row: dict, prefix: str) -> str:
    if row[f"{prefix}ratio"] != row[f"{prefix}ratio"]:
        return ""
    share = row[f"{prefix}share"]
    return f"{100 * share:.0f}%" if row[f"{prefix}gap_clear"] else "no clear gap"


def _inference(frame: pd.DataFrame, console: Console) -> None:
    keys = ["dtype", "batch", "length", "phase", "mode"]
    for _, part in frame.groupby(["model", *keys], sort=False):
        rows = part.to_dict("records")
        table = Table("variant", "ms", "ratio", "share", "norms ms", "norms ratio", "norms share", "error", box=SIMPLE)
        for row in rows:
            inside = row["norm_seconds"]
            table.add_row(
                row["variant"], f"{1e3 * row['seconds']:.3f}", _spread(row, "ratio"), _share(row, ""),
                "" if inside != inside else f"{1e3 * inside:.3f}", _spread(row, "norm_ratio"), _share(row, "norm_"),
                f"{row['error']:.0e}",
            )  # fmt: skip
        first = rows[0]
        console.print(
            f"{first['model']}, {first['dtype']}, {first['batch']} x {first['length']}, {first['phase']}, "
            f"{first['mode']}; {first['rounds']} rounds, {first['device']}, {first['threads']} threads",
            highlight=False,
        )
        console.print(table)


def _norms(frame: pd.DataFrame, console: Console) -> None:
    for (shape, dtype), part in frame.groupby(["shape", "dtype"], sort=False):
        table = Table("norm", "us", "ratio to torch's LayerNorm", "GB/s", "of copy", box=SIMPLE)
        rows = part.to_dict("records")
        for row in rows:
            table.add_row(
                row["norm"], f"{1e6 * row['seconds']:.1f}", _spread(row, "ratio"), f"{row['gb_per_s']:.1f}",
                f"{100 * row['copy_share']:.0f}%",
            )  # fmt: skip
        about = f"{rows[0]['rounds']} rounds, {rows[0]['device']}, {rows[0]['threads']} threads"
        console.print(f"{shape}, {dtype}; {about}", highlight=False)
        console.print(table)
