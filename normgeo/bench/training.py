r"""What a training step costs, and what of it the norms and the recentering are (*Pre-RMSNorm* section 3.4.1, fig. 4a).

By ablation: of each form copies run that lack one part, and a part is what the step takes longer with it. That counts
all a part causes (kernels, autograd's records, memory traffic), forward and backward, which timers around modules do
not see. Every part is taken away from the whole form on its own, so that nothing makes them add up; how far they do is
in the result (`unexplained`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from normgeo.conversion.trainable import unparametrized
from normgeo.errors import NormGeoError
from normgeo.models import usable_device
from normgeo.norms import CRMSNorm, RMSNorm
from normgeo.system.progress import progress_bar
from normgeo.system.timing import circumstances, interleaved, synchronize
from normgeo.training.compressed import Reader
from normgeo.training.recipe import Recipe
from normgeo.training.twins import build_twin

__all__ = ["FORMS", "PARTS", "ablated", "bench_training", "breakdown"]

FORMS = ("layernorm", "pre-rmsnorm", "pre-crmsnorm")
"""The Pre-LN model and its two training forms."""

PARTS = ("norms", "linears", "input", "rest", "optimizer")
"""Norms; recentered and folded linear layers; recentered embeddings; forward and backward without these; AdamW."""

WITHOUT = {"layernorm": ("norms",), "pre-rmsnorm": PARTS[:3], "pre-crmsnorm": PARTS[:3]}


@torch.no_grad()
def ablated(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """A copy of a GPT-2 in one of its forms without a part: `norms`, `linears` or `input`; what is left is shared.

    Norms become the identity. Recentered and folded parameters become plain ones of the values that they act with, so
    that without `linears` or `input` the outputs are the same.

    Raises:
        NormGeoError: the model has no such part.
    """
    result, found = copy.deepcopy(model, {id(p): p for p in model.parameters()}), False
    for name, module in list(result.named_modules()):
        owner, _, last = name.rpartition(".")
        if part == "norms" and isinstance(module, nn.LayerNorm | RMSNorm | CRMSNorm):
            setattr(result.get_submodule(owner), last, nn.Identity())
        elif part == "linears" and isinstance(module, Reader):
            setattr(result.get_submodule(owner), last, _plain(module))
        elif part == ("input" if isinstance(module, nn.Embedding) else "linears") and is_parametrized(module):
            unparametrized(module)
        else:
            continue
        found = True
    if not found:
        raise NormGeoError(f"{type(model).__name__} has no {part} to take away")
    return result


def _plain(reader: Reader) -> nn.Linear:
    weight, bias = reader.folded()
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight)
    new.weight = nn.Parameter(weight)
    if bias is not None:
        new.bias = nn.Parameter(bias)
    return new


def bench_training(
    recipe: Recipe,
    *,
    vocabulary: int = 4096,
    rounds: int = 100,
    device: str = "cpu",
    seed: int = 0,
    progress: bool = False,
) -> pd.DataFrame:
    """Time training steps of the three forms, of copies without one part, and of the model without norms, interleaved.

    Every variant takes one step a round, in random order, on the same random ids, in float32 without dropout; a round
    before them warms up. Only whole forms have an optimizer, whose learning rate is 0: it does its work, and the
    weights stay where they are. Memory is not given back to the system meanwhile.

    Args:
        recipe: width, layers, heads, `batch` x `context` tokens a step, and AdamW's numbers.
        vocabulary: tokens that there are: rows of the embedding, which the training forms recenter whole.
        rounds: how many; quartiles want 100.
        device: cpu or a CUDA device.
        seed: of the ids and of the order.
        progress: show a progress bar.

    Returns:
        Raw times: one row per round and variant (`form`, and `without` which part, "" for the whole form), with
        seconds of `forward_backward` and, for whole forms, of the `optimizer` (clipping and AdamW), and what was run
        where. The form without norms is `layernorm` without `norms`. `breakdown` makes shares of them.

    Raises:
        NormGeoError: fewer than one round or token, or no such device.
    """
    if rounds < 1:
        raise NormGeoError(f"a benchmark takes at least 1 round, received {rounds}")
    if vocabulary < 1:
        raise NormGeoError(f"a vocabulary has at least 1 token, received {vocabulary}")
    device = usable_device(device)
    ids = torch.randint(vocabulary, (recipe.batch, recipe.context), generator=torch.Generator().manual_seed(seed))
    steps = _variants(recipe, vocabulary, ids.to(device))
    measures = {" without ".join(name): step for name, step in steps.items()}
    rows, total = [], rounds * len(steps) * ids.numel()
    with progress_bar("steps", total, enabled=progress) as advance:
        for number, name, (passes, optimizer) in interleaved(measures, rounds=rounds, seconds=math.inf, seed=seed):
            form, _, without = name.partition(" without ")
            found = {"round": number, "form": form, "without": without}
            rows.append(found | {"forward_backward": passes, "optimizer": optimizer})
            advance(ids.numel())
    return pd.DataFrame(rows).assign(
        **circumstances(torch.device(device)), layers=recipe.layers, d=recipe.d, heads=recipe.heads,
        batch=recipe.batch, context=recipe.context, vocabulary=vocabulary, rounds=rounds,
    )  # fmt: skip


Step = Callable[[], tuple[float, float]]


def _variants(recipe: Recipe, vocabulary: int, ids: Tensor) -> dict[tuple[str, str], Step]:
    """By form and what it lacks: a step, which gives seconds of forward and backward, and of the optimizer."""
    recipe, steps = replace(recipe, dropout=0.0), {}
    for form in FORMS:
        whole = build_twin(form, recipe, vocabulary).to(ids.device).train()  # pyright: ignore[reportArgumentType]
        for part in WITHOUT[form]:
            steps[form, part] = _step(ablated(whole, part), whole, None, ids)
        steps[form, ""] = _step(whole, whole, recipe, ids)
    return steps


def _step(model: PreTrainedModel, whole: PreTrainedModel, recipe: Recipe | None, ids: Tensor) -> Step:
    """A step of a whole form, or without `recipe` and optimizer of an ablated copy, which shares parameters with it."""
    parameters, adam = [*model.parameters(), *whole.parameters()], None
    if recipe is not None:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, recipe.beta2))

    def clock() -> float:
        synchronize(model.device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        start = clock()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        cross_entropy(logits, ids[:, 1:].flatten()).backward()
        middle = clock()
        if adam is not None and recipe is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            adam.step()
        end = clock()
        for p in parameters:
            p.grad = None
        return middle - start, end - middle if adam is not None else float("nan")

    return step


def breakdown(raw: pd.DataFrame) -> pd.DataFrame:
    """Medians and quartiles of every part of a step, from `bench_training`'s raw times.

    Returns:
        One row per form (`no-norm` among them) and part: `whole`, the parts it has, and `unexplained`, the whole minus
        them. `seconds` with `seconds_q25` and `seconds_q75`, and `ratio` with `q25` and `q75`: the part over the whole
        step of `layernorm` in the same round. Medians of parts do not add up to the median of the whole, quite.
    """
    passes = raw.pivot(index="round", columns=["form", "without"], values="forward_backward")
    adam = raw[raw.without == ""].pivot(index="round", columns="form", values="optimizer")
    rest = passes["layernorm", "norms"]
    of_one = {"no-norm": {"rest": rest, "optimizer": adam["layernorm"]}}
    wholes = {"no-norm": rest + adam["layernorm"]}
    for form in FORMS:
        whole = passes[form, ""]
        taken = {part: whole - passes[form, part] for part in WITHOUT[form]}
        of_one[form], wholes[form] = taken | {"rest": rest, "optimizer": adam[form]}, whole + adam[form]
    rows = []
    for form, parts in of_one.items():
        left = wholes[form] - sum(parts.values())
        for part, seconds in {"whole": wholes[form], **parts, "unexplained": left}.items():
            low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
            q25, ratio, q75 = np.quantile(seconds / wholes["layernorm"], [0.25, 0.5, 0.75])
            found = {"form": form, "part": part, "ratio": ratio, "q25": q25, "q75": q75}
            rows.append(found | {"seconds": middle, "seconds_q25": low, "seconds_q75": high})
    about = raw.drop(columns=["round", "form", "without", "forward_backward", "optimizer"]).iloc[0]
    return pd.DataFrame(rows).assign(**{str(name): value for name, value in about.items()})
