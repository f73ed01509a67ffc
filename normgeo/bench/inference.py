r"""What replacing a model's norms saves in inference: whole forward passes, and the norms inside them.

Matrix products are 90 percent of a forward pass and differ by 2 to 5 percent from run to run, more than norms can save.
So variants are interleaved, every one is compared with the original of the same round, and beside the whole pass the
time in norms and residual additions is measured inside the running model.

    ratio = t(variant) / t(original)        share = (t(original) - t(variant)) / (t(original) - t(no norm))

A share of 1 is all that norms cost. Where the floor's upper quartile reaches 1 there is no gap to take a share of.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.bench.inference_models import (
    DTYPES,
    VARIANTS,
    Bases,
    available,
    bases,
    check_variants,
    derived,
    in_dtype,
    main_sites,
    quantizer,
    vectors_given,
)
from normgeo.bench.passes import Case, Pass, unmasked
from normgeo.errors import DataError, ModelError, NormGeoError, said
from normgeo.examples import example_inputs, max_context
from normgeo.models import memory_explained
from normgeo.numbers import check_number, check_numbers
from normgeo.sites import NormSite
from normgeo.system.timing import (
    circumstances,
    compiler_explained,
    interleaved,
    quartiles,
)
from normgeo.wrapping import called

__all__ = ["COMPILED", "MODES", "PHASES", "bench_inference", "check_compiler", "check_names", "summary"]

PHASES = ("forward", "decode")
"""All tokens at once without a cache, or one token after `length` of them that are in the cache."""
MODES = ("eager", "compiled", "graph")
"""As it is, through torch.compile, or replayed as a CUDA graph."""
COMPILED = ("original", "pre-rmsnorm", "pre-crmsnorm-padded", "no-norm")
"""What is compiled: compilers make the same code of the others."""

LAST = {"float32": 0.0, "float16": 2.0**-10}  # a last digit that outputs are rounded to; in all others bfloat16's
ROUNDING = 1e-4  # relative error that rounding may make in float32, far below what any mistake makes


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """While inside, float32 is float32 in CUDA's convolutions too."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    # not by `fp32_precision` of convolutions alone: who asks for `allow_tf32` then, as compilers do, gets an error
    with cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, allow_tf32=False):
        yield


def check_names(
    dtypes: Sequence[str], phases: Sequence[str] = PHASES, modes: Sequence[str] = MODES, variants: Sequence[str] = ()
) -> None:
    """Refuse names that are nothing's, before a model is loaded or converted. Without variants all are meant.

    Raises:
        ModelError: there is no such dtype, phase, mode or variant, or none is given, or a dtype needs torchao.
    """
    given = {"dtype": (dtypes, DTYPES), "phase": (phases, PHASES), "mode": (modes, MODES)}
    for what, (names, there) in (given | ({"variant": (variants, tuple(VARIANTS))} if variants else {})).items():
        if not names:
            raise ModelError(f"no {what} was given; choose {', '.join(there)}")
        if unknown := [name for name in names if name not in there]:
            raise ModelError(f"no {what} {', '.join(unknown)!r}; choose {', '.join(there)}")
    for dtype in dtypes:
        quantizer(dtype)


def check_compiler(device: str) -> None:
    """Refuse a device for which torch.compile makes no code.

    Raises:
        ModelError: it does not, for want of a compiler.
    """
    with compiler_explained(f"for {device}"):
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(1, device=device))


def bench_inference(
    model: PreTrainedModel,
    name: str | None = None,
    *,
    variants: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] = (512,),
    phases: Sequence[str] = ("forward",),
    modes: Sequence[str] = ("eager",),
    rounds: int = 100,
    seconds: float = 60.0,
    seed: int = 0,
    announce: Callable[[str], Any] = lambda _: None,
    keep: Callable[[pd.DataFrame], Any] = lambda _: None,
) -> pd.DataFrame:
    """Time a model and its variants in every combination of dtype, shape, phase and mode.

    Before they are timed all variants compute the same inputs. One whose outputs are off by more than rounding is an
    error (the floor excepted): in float32 by more than 1e-4 of their rms, in other dtypes by more than a last digit
    and four times what the original's are off in that dtype.

    Args:
        model: in float32, on the device to measure; it is not changed. See `inference_models.build`.
        name: what to call it; None is what it was loaded by, or its class.
        variants: of `VARIANTS`; None is all that can be made of the model. `original` is always among them.
        dtypes: of `DTYPES`.
        batches: sequences or images at once.
        lengths: tokens; images have their own.
        phases: of `PHASES`; decoding only where the model generates text.
        modes: of `MODES`; `compiled` times the variants in `COMPILED`, `graph` needs CUDA and the phase `forward`.
        rounds: how many timings of each at most.
        seconds: for all the rounds of one case, warm-up and checks aside; at least three rounds are run.
        seed: of the order.
        announce: told what is being measured.
        keep: given each case's rows of the result when it is measured: what comes after may take long, or fail.

    Returns:
        The raw timings, one row for each case, variant and round: `seconds` of the whole pass; `norm_seconds` in norms
        and residual additions of another pass, eager only; the `error` against the original in float32; and what was
        measured on what. `summary` gives medians, ratios and shares.

    Raises:
        NormGeoError: there is no such variant, dtype, phase or mode, a variant's outputs are wrong, or the model cannot
            be converted.
    """
    check_names(dtypes, phases, modes)
    cases: Any = dtypes, batches, lengths, phases, modes  # each once: two of one name could not be told apart
    dtypes, batches, lengths, phases, modes = (list(dict.fromkeys(values)) for values in cases)
    check_number("rounds", rounds, 1)
    check_numbers(seed=seed)
    if not batches or not lengths:
        raise ModelError(f"received {len(batches)} batches and {len(lengths)} lengths; give one of each at least")
    if "graph" in modes and model.device.type != "cuda":
        raise ModelError(f"CUDA graphs need a CUDA device; the model is on {model.device.type}")
    sites = main_sites(model)
    wanted = list(dict.fromkeys(["original", *(variants or available(model, sites))]))
    check_variants(model, sites, wanted)
    name = name or called(model)
    is_text, undecoded = "input_ids" in example_inputs(model), _undecoded(model) if "decode" in phases else ""
    lengths = lengths if is_text else (0,)
    for batch, length, phase in itertools.product(batches, lengths, phases):
        with _fitting(batch, length):
            _inputs(model, batch, length, phase)  # what the model does not take, before anything is measured
    announce(f"{name}: {model.num_parameters():,} parameters, {len(sites)} norms of width {sites[0].d}; converting")
    say = None if variants else lambda what, error: announce(f"without {what}: {error}")
    models = bases(model, sites, wanted, say)
    wanted = [name for name in wanted if VARIANTS[name].base in models]
    if undecoded and "forward" in phases:
        announce(f"without decoding: {undecoded}")
    about = {
        "model": name, "parameters": model.num_parameters(), "norm": sites[0].kind, "norms": len(sites),
        "d": sites[0].d, **circumstances(model.device), "seed": seed,
    }  # fmt: skip
    frames = []
    with _full_precision(model.device):
        for dtype in dtypes:
            typed = {key: in_dtype(base, dtype) for key, base in models.items()}
            ready = _made(wanted, typed, sites, dtype, say)
            for batch, length, phase, mode in itertools.product(batches, lengths, phases, modes):
                if phase == "decode" and (mode != "eager" or undecoded):
                    continue
                with _fitting(batch, length), contextlib.nullcontext() if mode == "eager" else unmasked():
                    inputs = _inputs(model, batch, length, phase)
                    case = Case(dtype, batch, length or vectors_given(model, sites[0], inputs), phase, mode)
                    truth = Pass(model, inputs, Case("float32", batch, case.length, phase)).output()
                    raw = _timed(case, ready, [site.name for site in sites], inputs, truth, rounds, seconds, seed)
                frames.append(raw.assign(**about, **asdict(case)))
                keep(frames[-1])
    if not frames:
        why = undecoded or "decoding is measured in mode eager alone"
        raise ModelError(f"{name} has nothing to measure: {why}")
    return pd.concat(frames, ignore_index=True)


def _fitting(batch: int, length: int) -> contextlib.AbstractContextManager[None]:
    of = f" x {length} tokens" if length else ""
    return memory_explained(f"a batch of {batch}{of}", "give a smaller --batch or --length", counted=True)


def _undecoded(model: PreTrainedModel) -> str:
    """Why a model gives no text one token after the other, each with those before in its cache; empty where it does."""
    inputs = example_inputs(model)
    if "input_ids" not in inputs or not model.can_generate() or model.config.is_encoder_decoder:
        return f"{type(model).__name__} generates no text one token after the other"
    try:
        Pass(model, inputs, Case("float32", 0, 0, "decode"))()
    except ModelError as error:
        return str(error)
    except Exception as error:  # whatever a model raises
        return f"{type(model).__name__} fails on a token behind those in its cache: {said(error)}"
    return ""


def _made(
    names: Sequence[str], models: Bases, sites: Sequence[NormSite], dtype: str,
    without: Callable[[str, NormGeoError], Any] | None,
) -> dict[str, PreTrainedModel]:  # fmt: skip
    """The variants of models in a dtype; `without` is told of one that there is not in it, and None is that none may.

    It is a matter of the dtype: Mamba's stream is of float32, with whose sums norms of bfloat16 cannot be fused.
    """
    made = {}
    for name in names:
        try:
            made[name] = derived(name, models, sites)
        except NormGeoError as error:
            if without is None:
                raise
            without(f"{name} in {dtype}", error)
    return made


def _inputs(model: PreTrainedModel, batch: int, length: int, phase: str) -> dict[str, Tensor]:
    """A batch of random inputs that the model accepts."""
    if batch < 1 or length < 0:
        raise ModelError(f"a batch is at least 1, and a length at least 0; received {batch} and {length}")
    longest, more = max_context(model) if length else None, int(phase == "decode")
    if longest is not None and length + more > longest:
        why = f"{longest} positions{', of which decoding takes one' if more else ''}"
        raise ModelError(f"{type(model).__name__} has {why}: give a --length up to {longest - more}, received {length}")
    inputs = example_inputs(model, max(length, 1))
    return {name: value[torch.arange(batch, device=value.device) % 2].contiguous() for name, value in inputs.items()}


def _timed(
    case: Case, models: dict[str, PreTrainedModel], norms: Sequence[str], inputs: dict[str, Tensor], truth: Tensor,
    rounds: int, seconds: float, seed: int,
) -> pd.DataFrame:  # fmt: skip
    if case.mode == "compiled":
        torch.compiler.reset()
        models = {name: model for name, model in models.items() if name in COMPILED}
    dtype = models["original"].dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    passes = {name: Pass(model, inputs, case) for name, model in models.items()}
    with compiler_explained(type(models["original"]).__name__):
        errors = {name: _error(forward.output(), truth) for name, forward in passes.items()}
    # of few numbers those of the original may be next to exact by chance
    allowed = ROUNDING + LAST.get(case.dtype, 2.0**-7) + 4 * errors["original"]
    for name in models:
        if VARIANTS[name].equal and not errors[name] <= allowed:
            raise NormGeoError(
                f"{name} gives other outputs than the original in {', '.join(map(str, asdict(case).values()))}: "
                f"relative error {errors[name]:.1e}, allowed {allowed:.1e}; nothing was timed"
            )

    def both(forward: Pass) -> tuple[float, float]:
        return forward.seconds(), forward.norm_seconds(norms) if case.mode == "eager" else np.nan

    measures = {name: lambda forward=forward: both(forward) for name, forward in passes.items()}
    rows = [
        {"variant": name, "round": number, "seconds": whole, "norm_seconds": inside, "error": errors[name]}
        for number, name, (whole, inside) in interleaved(measures, rounds=rounds, seconds=seconds, seed=seed)
    ]
    return pd.DataFrame(rows)


def _error(output: Tensor, truth: Tensor) -> float:
    return float((output - truth).norm() / truth.norm())


# --- medians and quartiles --------------------------------------------------------------------------------------------

MEASURED = ("variant", "round", "seconds", "norm_seconds", "error")


def summary(raw: pd.DataFrame) -> pd.DataFrame:
    """Medians and quartiles over rounds of what `bench_inference` measured, one row for each case and variant.

    `seconds` is of the whole pass, `ratio` that to the original of the same round, `share` the part of the gap between
    the original and the floor that a variant captures, (1 - ratio) / (1 - ratio of `no-norm`), of medians. `norm_*` are
    the same of the time in norms and residual additions. Each has its quartiles `*_q25` and `*_q75`. Where the floor's
    `ratio_q75` is not below 1, or none was timed, `gap_clear` is False, and there is no share.

    Raises:
        DataError: there is a case without its original.
    """
    same = [column for column in raw.columns if column not in MEASURED]
    order, parts = {name: place for place, name in enumerate(VARIANTS)}, []
    for _, part in raw.groupby(same, sort=False, dropna=False):
        if "original" not in set(part.variant):
            raise DataError(f"there are times of {part.model.iloc[0]} without those of the original beside them")
        out = part.groupby("variant", sort=False).agg(rounds=("round", "size"), error=("error", "first"))
        out = out.join(_quartiles(part, "seconds", "")).join(_quartiles(part, "norm_seconds", "norm_"))
        out = out.sort_index(key=lambda names: names.map(order))
        parts.append(out.reset_index().merge(part[same].head(1), how="cross"))
    frame = pd.concat(parts, ignore_index=True)
    return frame[[*same, *(column for column in frame.columns if column not in same)]]


def _quartiles(part: pd.DataFrame, column: str, prefix: str) -> pd.DataFrame:
    times = part.pivot(index="round", columns="variant", values=column)
    ratios = times.div(times["original"], axis=0)
    found = quartiles(f"{prefix}seconds", times) | quartiles(f"{prefix}ratio", ratios)
    out = pd.DataFrame(found, index=times.columns)
    floor = out.reindex(["no-norm"]).iloc[0]  # NaN where it was not timed
    clear = bool(floor[f"{prefix}ratio_q75"] < 1)
    gap = 1 - floor[f"{prefix}ratio"] if clear else np.nan
    out[f"{prefix}share"] = (1 - out[f"{prefix}ratio"]) / gap
    out[f"{prefix}gap_clear"] = clear
    return out
