"""Norms alone, against torch's LayerNorm and against what copying the same memory takes."""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from normgeo.bench.controls import KernelLayerNorm
from normgeo.errors import DataError, ModelError
from normgeo.kernels import norm_ops
from normgeo.models import memory_explained, usable_device
from normgeo.norms import CRMSNorm, RMSNorm
from normgeo.numbers import check_number, check_numbers
from normgeo.system.timing import (
    Stopwatch,
    circumstances,
    compiler_explained,
    interleaved,
    quartiles,
    recorded,
)

__all__ = ["NORMS", "PASSES", "SHAPES", "bench_norms", "norm_summary"]

SHAPES = ((1, 512, 768), (8, 197, 768), (1, 512, 2048), (4, 512, 1024))
"""[batch, tokens, d] of GPT-3 Small, ViT-Base, GPT-3 XL and GPT-3 Medium."""

NORMS = {
    "layer_norm": 2, "layer_norm without affine": 2, "rms_norm": 2, "LayerNorm kernel": 2, "RMSNorm": 2,
    "RMSNorm compiled": 2, "CRMSNorm padded": 2, "CRMSNorm d - 1": 2, "add + layer_norm": 4,
    "add + LayerNorm kernel": 4, "add + RMSNorm": 4, "Liger add + RMSNorm": 4, "Liger RMSNorm": 2, "clone": 2,
    "copy": 2,
}  # fmt: skip
"""What is timed, and how many times it has to pass over memory of the input's size: read once, written once, and with
an addition two read and two written. Names in lower case are torch's own. The LayerNorm kernel, of the same style as
RMSNorm's, tells what the norm saves from what the kernel does. Kernels are there where they compile, what torch.compile
makes where it finds a compiler, Liger's where it is installed."""

PASSES = {False: "forward", True: "forward and backward"}
BOTH = 5
"""Passes over memory where there are gradients: the input once more, the output's gradient and the input's."""

ENOUGH = 4e-3
"""Seconds of calls in a row that one timing takes: against the clock's own cost, and for a cache that others share."""

EPS = 1e-5
FEW = 5  # calls whose time tells how many are enough

NARROWEST = 3
"""Of zero mean and with a zero at the end, narrower inputs are nothing but zeros, whose LayerNorm is 0 / 0."""


def bench_norms(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    backward: bool = False,
    beta: bool = True,
    device: str = "cpu",
    rounds: int = 100,
    seconds: float = 10.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Time every norm of `NORMS` on zero-mean inputs of these shapes, interleaved, with gamma.

    Before they are timed all norms compute the same input; one that is off by more than rounding is an error. A timing
    is of as many calls in a row as take four milliseconds, on the same input, which is in the cache if it fits; on a
    CUDA device they are one graph.

    Args:
        shapes: [batch, tokens, d], d at least 3.
        dtypes: float32, bfloat16 or float16.
        backward: of every norm that has them the gradients of input, gamma and beta as well.
        beta: with a beta, as a converted LayerNorm has it, which is an addition more to RMSNorms that have none.
        device: a torch device, or auto.
        rounds: how many timings of each at most.
        seconds: for all the rounds of one shape and dtype; at least three rounds are run.
        seed: of the inputs and of the order.

    Returns:
        The raw timings: `seconds` of one call in each round, `bytes` that it has to read and write, which `passes` it
        is, and on what.
        `norm_summary` gives medians, ratios and bandwidths.

    Raises:
        ModelError: there is no such dtype or device, a shape is of no use or does not fit into memory, nothing is to be
            measured, or a norm gives wrong results.
    """
    check_number("rounds", rounds, 1)
    check_numbers(seed=seed)
    there = ("float32", "bfloat16", "float16")
    if unknown := [name for name in dtypes if name not in there]:
        raise ModelError(f"no dtype {', '.join(unknown)!r}; choose {', '.join(there)}")
    if not dtypes or not shapes:
        raise ModelError(f"received {len(shapes)} shapes and {len(dtypes)} dtypes; give one of each at least")
    if wrong := [_name(shape) for shape in shapes if min(shape) < 1 or shape[-1] < NARROWEST]:
        least = f"sizes of at least 1 and a width of at least {NARROWEST}"
        raise ModelError(f"a shape has {least}: less has no LayerNorm to compare with; received {', '.join(wrong)}")
    shapes, dtypes = list(dict.fromkeys(shapes)), list(dict.fromkeys(dtypes))  # each once
    where = torch.device(usable_device(device))
    for shape in shapes:
        with _fitting(shape):
            torch.empty(shape, dtype=torch.float64, device=where)  # what can never fit, before others are measured
    about = circumstances(where)
    frames = []
    with torch.inference_mode(not backward), norm_ops.launched_always():  # graphs launch their kernels for nothing
        for shape in shapes:
            for dtype in dtypes:
                with _fitting(shape):
                    runs = _runs(shape, getattr(torch, dtype), where, seed, backward, beta)
                    rows = _timed(runs, where, rounds, seconds, seed)
                size = math.prod(shape) * getattr(torch, dtype).itemsize
                frame = pd.DataFrame(rows, columns=["round", "norm", "seconds"])
                times = {name: BOTH if backward and name not in ("clone", "copy") else NORMS[name] for name in runs}
                frame["bytes"] = frame.norm.map(times) * size
                frames.append(
                    frame.assign(
                        shape=_name(shape), d=shape[-1], dtype=dtype, passes=PASSES[backward], beta=beta, **about
                    )
                )
    return pd.concat(frames, ignore_index=True)


def _name(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


def _fitting(shape: tuple[int, int, int]) -> AbstractContextManager[None]:
    return memory_explained(f"the shape {_name(shape)}", "give smaller --shapes", counted=True)


def _runs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int, backward: bool, with_beta: bool
) -> dict[str, Callable]:
    """Functions of no arguments that compute what they are named after, each checked against float64."""
    generator = torch.Generator().manual_seed(seed)
    d = shape[-1]
    x, residual = (torch.randn(shape, generator=generator) for _ in range(2))
    x, residual = (v - v[..., :-1].mean(-1, keepdim=True) for v in (x, residual))
    x[..., -1] = residual[..., -1] = 0  # one input for all, padded or not: another would have to come into the caches
    gamma, shift = (torch.randn(d, generator=generator) for _ in range(2))
    x, residual, gamma, shift = (v.to(device, dtype) for v in (x, residual, gamma, shift))
    beta = shift if with_beta else None
    if backward:
        return _with_gradients(x, residual, gamma, beta) | _copies(x)
    runs = _plain(x, gamma, beta) | _fused(x, residual, gamma, beta)
    _check(runs, x, residual, gamma, beta)
    return runs | _copies(x)


def _copies(x: Tensor) -> dict[str, Callable]:
    """What passing over the same memory takes, into new memory and into that of before.

    On CUDA a kernel reads and writes it: in a graph torch's own copies are the driver's, of no even speed.
    """
    copied = torch.empty_like(x)
    if x.device.type == "cuda":
        return {"clone": x.neg, "copy": lambda: torch.neg(x, out=copied)}
    return {"clone": x.clone, "copy": lambda: copied.copy_(x)}


def _norm(cls: type, width: int, gamma: Tensor, beta: Tensor | None, **options: bool) -> torch.nn.Module:
    options |= {"bias": beta is not None}
    norm = cls(width, EPS, dtype=gamma.dtype, device=gamma.device, **options).eval().requires_grad_(False)
    norm.weight.copy_(gamma[:width])
    if beta is not None:
        norm.bias.copy_(beta[:width])
    return norm


def _plus(z: Tensor, beta: Tensor | None) -> Tensor:
    return z if beta is None else z + beta


def _ending_in_zero(beta: Tensor | None) -> Tensor | None:
    """A beta that keeps zero what is zero."""
    return None if beta is None else torch.cat([beta[:-1], beta.new_zeros(1)])


def _plain(x: Tensor, gamma: Tensor, beta: Tensor | None) -> dict[str, Callable]:
    d = x.shape[-1]
    rms, crms = _norm(RMSNorm, d, gamma, beta, centered=True), _norm(CRMSNorm, d - 1, gamma, beta)
    crms_padded = _norm(CRMSNorm, d, gamma, _ending_in_zero(beta), padded=True)
    short = x[..., :-1].contiguous()
    torch.compiler.reset()
    compiled = torch.compile(rms, dynamic=False)
    runs: dict[str, Callable] = {
        "layer_norm": lambda: functional.layer_norm(x, (d,), gamma, beta, EPS),
        "layer_norm without affine": lambda: functional.layer_norm(x, (d,), eps=EPS),
        "rms_norm": lambda: _plus(functional.rms_norm(x, (d,), gamma, EPS), beta),
        "RMSNorm": lambda: rms(x),
        "CRMSNorm padded": lambda: crms_padded(x),
        "CRMSNorm d - 1": lambda: crms(short),
    }
    with suppress(ModelError), compiler_explained("RMSNorm"):
        compiled(x)
        runs["RMSNorm compiled"] = lambda: compiled(x)
    if norm_ops.takes(x):
        kernel = KernelLayerNorm(gamma, beta, EPS)  # a module, as the others are
        runs["LayerNorm kernel"] = lambda: kernel(x)
    return runs


def _fused(x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None) -> dict[str, Callable]:
    """The residual addition and the norm of the sum: torch's two operations, and what fuses them."""
    d = x.shape[-1]

    def torchs() -> Tensor:
        return functional.layer_norm(residual + x, (d,), gamma, beta, EPS)

    def fused(kind: str) -> Callable[[], Any]:
        stream, branch = residual.clone(), x.clone()  # one grows with every call, the other is written over
        return lambda: norm_ops.add_norm_(stream, branch, gamma, beta, EPS, 0.0, kind, True)

    runs: dict[str, Callable] = {"add + layer_norm": torchs}
    if norm_ops.takes(x):
        runs |= {"add + LayerNorm kernel": fused("layernorm"), "add + RMSNorm": fused("rmsnorm")}
    if x.device.type == "cuda":
        try:
            liger = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        except ImportError:
            return runs
        runs["Liger add + RMSNorm"] = lambda: _plus(liger.apply(x, residual, gamma, EPS, 0.0, "llama", False)[0], beta)
    return runs


def _with_gradients(x: Tensor, dz: Tensor, gamma: Tensor, beta: Tensor | None) -> dict[str, Callable]:
    """Functions of no arguments that give the gradients of x, gamma and beta, each checked against its own float64."""
    d = x.shape[-1]

    def module(cls: type, width: int, bias: Tensor | None, **options: bool) -> tuple[Any, ...]:
        norm = _norm(cls, width, gamma, bias, **options)
        return _of_parameters(norm), _of_parameters(copy.deepcopy(norm).double()), width, bias

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.layer_norm(x, (d,), weight, bias, EPS)

    def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _plus(functional.rms_norm(x, (d,), weight, EPS), bias)

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return norm_ops.norm(x, weight, bias, EPS, 0.0, "layernorm")

    norms = {
        "layer_norm": (layer_norm, layer_norm, d, beta),
        "rms_norm": (rms_norm, rms_norm, d, beta),
        "RMSNorm": module(RMSNorm, d, beta, centered=True),
        "CRMSNorm padded": module(CRMSNorm, d, _ending_in_zero(beta), padded=True),
        "CRMSNorm d - 1": module(CRMSNorm, d - 1, beta),
    }
    torch.compiler.reset()
    compiled = torch.compile(rms_norm, dynamic=False)
    with suppress(ModelError), compiler_explained("RMSNorm"):
        compiled(x.clone().requires_grad_(), *(v for v in (gamma, beta) if v is not None))
        norms["RMSNorm compiled"] = compiled, rms_norm, d, beta
    if norm_ops.takes(x) and kernel(x.clone().requires_grad_(), gamma, beta) is not None:
        norms["LayerNorm kernel"] = kernel, layer_norm, d, beta
    if x.device.type == "cuda":
        with suppress(ImportError):
            liger = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
            norms["Liger RMSNorm"] = (
                lambda x, w, b=None: _plus(liger.apply(x, w, EPS, 0.0, "llama", False), b), rms_norm, d, beta
            )  # fmt: skip
    runs = {}
    for name, (function, exact, width, bias) in norms.items():
        given = [v[..., :width].clone().requires_grad_() for v in (x, gamma, bias) if v is not None]
        of = dz[..., :width].contiguous()
        runs[name] = functools.partial(_gradients, function, given, of)
        _check_gradients(name, runs[name], lambda: _gradients(exact, [v.double() for v in given], of.double()))  # noqa: B023
    return runs


def _of_parameters(norm: torch.nn.Module) -> Callable[..., Tensor]:
    """A norm as a function of its input, gamma and beta."""

    def applied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        norm._parameters["weight"], norm._parameters["bias"] = weight, bias  # pyright: ignore
        return norm(x)

    return applied


def _gradients(function: Callable, given: list[Tensor], dz: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*given), given, dz)


def _check_gradients(name: str, run: Callable, exact: Callable) -> None:
    for found, truth in zip(run(), exact(), strict=True):
        error = float((found - truth).norm() / truth.norm())
        if not error <= 8 * torch.finfo(found.dtype).eps:
            raise ModelError(
                f"{name} gives wrong gradients for {tuple(found.shape)} {found.dtype}: relative error {error:.1e}"
            )


def _check(runs: dict[str, Callable], x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor | None) -> None:
    """Compare one call of each with float64; where rounding leaves a mean, RMSNorm differs by less than it allows."""
    d = x.shape[-1]
    wide, more, weight = (v.double() for v in (x, residual, gamma))
    bias = None if beta is None else beta.double()
    affine = functional.layer_norm(wide, (d,), weight, bias, EPS)
    added = functional.layer_norm(wide + more, (d,), weight, bias, EPS)
    plain = functional.layer_norm(wide, (d,), eps=EPS)
    for name, run in runs.items():
        truth = added if NORMS[name] == 4 else plain if "without" in name else affine
        width = d - 1 if "CRMSNorm" in name else d
        error = float((run()[..., :width] - truth[..., :width]).norm() / truth.norm())
        if not error <= 8 * torch.finfo(x.dtype).eps:
            raise ModelError(f"{name} gives wrong results for {tuple(x.shape)} {x.dtype}: relative error {error:.1e}")


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


def _timed(
    runs: dict[str, Callable], device: torch.device, rounds: int, seconds: float, seed: int
) -> list[tuple[int, str, float]]:
    def repeated(run: Callable) -> Callable[[], float]:
        few = functools.partial(_repeat, run, FEW)
        if device.type == "cuda":
            few = recorded(few, device)  # called from Python they would take their launches' time
        few()
        watch = Stopwatch(device)
        watch(few)
        times = max(1, math.ceil(FEW * ENOUGH / max(watch.seconds(), 1e-6)))

        again, warm = (functools.partial(_repeat, run, n) for n in (times, 1 + times // 4))
        if device.type == "cuda":
            again = warm = recorded(again, device)  # a launch from Python takes longer than a small norm

        def measure() -> float:
            warm()  # brings its input back into the cache, and the memory that the result is put in
            watch = Stopwatch(device)
            watch(again)
            return watch.seconds() / times

        return measure

    return list(interleaved({n: repeated(r) for n, r in runs.items()}, rounds=rounds, seconds=seconds, seed=seed))


def norm_summary(raw: pd.DataFrame) -> pd.DataFrame:
    """Medians over rounds of what `bench_norms` measured, one row for each shape, dtype and norm.

    `ratio` is the time over that of torch's LayerNorm (where something is added, of addition and LayerNorm) in the same
    round, with its quartiles; `gb_per_s` is what has to be read and written a second, `copy_share` that over `copy`'s.

    Raises:
        DataError: there are times without those that they are compared with.
    """
    same = [column for column in raw.columns if column not in ("norm", "round", "seconds", "bytes")]
    parts = []
    for _, part in raw.groupby(same, sort=False, dropna=False):
        times = part.pivot(index="round", columns="norm", values="seconds")
        torchs = ["add + layer_norm" if NORMS[name] == 4 else "layer_norm" for name in times.columns]
        if absent := {*torchs, "copy"} - {*times}:
            raise DataError(f"there are times of norms without those of {min(absent)!r} beside them")
        base = times[torchs].set_axis(times.columns, axis=1)
        out = part.groupby("norm", sort=False).agg(rounds=("round", "size"), bytes=("bytes", "first"))
        found = quartiles("seconds", times) | quartiles("ratio", times / base)
        out = out.join(pd.DataFrame(found, index=times.columns))
        out["gb_per_s"] = out.bytes / out.seconds / 1e9
        out["copy_share"] = out.gb_per_s / out.gb_per_s["copy"]
        order = [name for name in NORMS if name in out.index]
        parts.append(out.loc[order].reset_index().merge(part[same].head(1), how="cross"))
    frame = pd.concat(parts, ignore_index=True)
    return frame[[*same, *(column for column in frame.columns if column not in same)]]
