"""What measuring costs: the stream against the base model's own forward pass."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.angles.measure import new_statistics
from normgeo.functional import watched
from normgeo.models import base_model, dtype_name, shared_copy
from normgeo.numbers import check_number, check_numbers
from normgeo.sites import NormSite, find_sites
from normgeo.stream import check_context, forward, stream, vocabulary
from normgeo.system.memory import memory_kept
from normgeo.system.timing import device_name, quartiles, took
from normgeo.tokens import TokenBatch, TokenStream

__all__ = ["VARIANTS", "bench_stream"]

VARIANTS = {
    "base": "base model", "full": "causal LM with logits", "output_hidden_states": "output_hidden_states",
    "cosine_hooks": "a cosine with 1 in each hook", "clone_hooks": "cloning everything to memory",
    "statistics": "normgeo, 3 directions", "statistics_null": "normgeo, with the null ensemble",
}  # fmt: skip
"""What is compared, in words: besides the model three common ways to look at hidden states, and this package's."""


def bench_stream(
    model: PreTrainedModel,
    tokens: TokenStream,
    *,
    batch: int = 8,
    rounds: int = 7,
    null: int = 256,
    null_every: int = 16,
    seed: int = 0,
) -> pd.DataFrame:
    """Time the stream and its alternatives, interleaved: every variant once a round, in random order, on one batch.

    The base model runs before and after every other variant, which is compared with the mean of the two, so that what
    changes while the benchmark runs (clock rates, other processes) changes both. Every variant has modules of its own
    around the same weights, since some of them leave hooks behind, and while the benchmark runs memory is not given
    back to the system, so that none pays for what another has freed.

    Args:
        model: a model that takes token ids.
        tokens: the stream; each round takes its next batch of equal shape, and starts again where it ends.
        batch: contexts that go through the model together.
        rounds: how many rounds; one more, before them, warms up.
        null: number of random directions in `statistics_null`.
        null_every: the null ensemble meets one token in so many.
        seed: of the order.

    Returns:
        One row a variant. `ratio` is the median over rounds of the time over that of `base` just before and after, with
        quartiles `ratio_q25` and `ratio_q75`; `seconds` is the median time itself.

    Raises:
        DataError: the stream is empty, its contexts are longer than the model has positions for, or there are fewer
            than one round or one context in a batch.
    """
    check_number("rounds", rounds, 1)
    check_numbers(batch=batch, seed=seed)
    check_context(model, tokens.context)
    sites = find_sites(model)
    batches = tokens.alike(None, batch, rounds + 1)
    runs = _variants(model, sites, null, null_every)
    order = random.Random(seed)
    seconds, ratios = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def timed(name: str, chunk: TokenBatch) -> float:
        return took(lambda: runs[name](chunk), model.device)

    with memory_kept():
        for number, chunk in zip(range(rounds + 1), itertools.cycle(batches), strict=False):
            before = timed("base", chunk)
            for name in order.sample([*VARIANTS][1:], len(VARIANTS) - 1):
                found, after = timed(name, chunk), timed("base", chunk)
                if number:
                    seconds[name].append(found)
                    seconds["base"].append(after)
                    ratios[name].append(2 * found / (before + after))
                before = after
    ratios["base"] = [1.0]
    about = {
        "device": device_name(model.device), "torch": torch.__version__,
        "dtype": dtype_name(model.dtype), "threads": torch.get_num_threads(),
        "batch": batches[0].ids.shape[0], "context": batches[0].ids.shape[1],
        "d": max(site.d for site in sites), "sites": len(sites), "rounds": rounds, "null": null,
        "null_every": null_every,
    }  # fmt: skip
    return pd.DataFrame([
        {"variant": name, **quartiles("ratio", ratios[name]), "seconds": float(np.median(seconds[name])), **about}
        for name in VARIANTS
    ])  # fmt: skip


def _variants(
    model: PreTrainedModel, sites: Sequence[NormSite], null: int, null_every: int
) -> dict[str, Callable[[TokenBatch], Any]]:
    ids = vocabulary(model)

    def plain(runner: PreTrainedModel, **options: Any) -> Callable[[TokenBatch], None]:
        def run(chunk: TokenBatch) -> None:
            with torch.inference_mode():
                forward(runner, chunk, ids, **options)

        return run

    def looked(twin: PreTrainedModel, look: Callable[[Tensor], Tensor]) -> Callable[[TokenBatch], None]:
        forward_pass = plain(base_model(twin))

        def run(chunk: TokenBatch) -> None:
            kept: list[Tensor] = []

            def keep(x: Tensor) -> None:
                kept.append(look(x))

            with watched(twin, {site.name: (keep, keep) for site in sites}):
                forward_pass(chunk)

        return run

    def measured(twin: PreTrainedModel, k: int) -> Callable[[TokenBatch], None]:
        statistics = new_statistics(twin, sites, null=k, seed=0, null_every=null_every, bos=None)
        waiting: list[TokenBatch] = []
        # one stream for all batches, as in a run: its hooks are put on once
        running = stream(twin, sites, iter(waiting.pop, None), [statistics])

        def run(chunk: TokenBatch) -> None:
            waiting.append(chunk)
            next(running)

        return run

    return {
        "base": plain(base_model(shared_copy(model))),
        "full": plain(shared_copy(model)),
        "output_hidden_states": plain(base_model(shared_copy(model)), output_hidden_states=True),
        "cosine_hooks": looked(shared_copy(model), lambda x: torch.cosine_similarity(x, torch.ones_like(x), dim=-1)),
        "clone_hooks": looked(shared_copy(model), torch.clone),
        "statistics": measured(shared_copy(model), 0),
        "statistics_null": measured(shared_copy(model), null),
    }
