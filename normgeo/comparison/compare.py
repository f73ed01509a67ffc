"""Models side by side on the same tokens: outputs, perplexity, angles at every norm, size and speed."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from normgeo import figures
from normgeo.angles.job import RunConfig
from normgeo.angles.measure import measure_angles
from normgeo.cards import EMBEDDED
from normgeo.comparison import figures as side_by_side
from normgeo.comparison.outputs import agreements
from normgeo.conversion.convert import convert, decompress
from normgeo.converted import is_compressed
from normgeo.errors import DataError, NormGeoError, RunError
from normgeo.examples import max_context
from normgeo.loading import commit_of, label_of, load_model, load_tokenizer
from normgeo.models import dtype_name, on_cpu, plain_parts, usable_device, weights_digest
from normgeo.numbers import check_numbers
from normgeo.sites import find_sites
from normgeo.stream import check_context, forward, vocabulary
from normgeo.system.files import check_folder
from normgeo.system.folders import taken, whole_directory
from normgeo.system.progress import progress_bar
from normgeo.system.timing import devices, interleaved, quartiles, took
from normgeo.tokens import TokenBatch, TokenStream, counted, holds_ids, load_tokens
from normgeo.trace import evaluating

__all__ = ["Comparison", "compare", "compare_run", "comparison_name"]

DEFAULT_TOKENS = 20_000


@dataclass(frozen=True)
class Comparison:
    """Models side by side, against the first of them.

    Attributes:
        frame: one row a model. `output` says what was compared: `logits`, or `last_hidden_state` of a model without a
            head, which has no perplexity, KL and top-1 (NaN). `perplexity` is exp of the mean `cross_entropy` (nats)
            over the `predictions` whose next token is in the same context; NaN for a model that sees later tokens
            (masked language models, encoder-decoders). `kl_mean` and `kl_max` are KL(reference || model) in nats over
            positions, `top1` the share of positions where both prefer the same token. `error_max` is the largest
            |difference| of an output, `error_max_rel` the same relative to the reference's largest, `error_rms_rel`
            the root of sum(difference^2) / sum(reference^2). `time_ratio` is the median over rounds of the time of a
            forward pass over the reference's in the same round, with quartiles `time_ratio_q25` and `time_ratio_q75`.
        angles: the rows of every model's `AngleTable`; `reference_site` is the reference's site that a row's site
            corresponds to (missing where there is none), `stack_index` counts the model's stacks.
        about: the reference, tokens, packing, context and options.
    """

    frame: pd.DataFrame
    angles: pd.DataFrame
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The name of the model that the others are compared with, whichever rows are there and in whatever order."""
        return self.about.get("reference", str(self.frame.model.iloc[0]))

    def by_site(self, column: str = "mean_deg", phase: str = "pre", direction: str = "uniform") -> pd.DataFrame:
        """One column of the angles, a row a site and a column a model.

        Sites are those of the reference, by (site, stack, role, layer), and last those that have no counterpart there.

        Raises:
            DataError: there is no such column, phase or direction.
        """
        rows = self.angles[(self.angles.phase == phase) & (self.angles.direction == direction)]
        if column not in rows or rows.empty:
            raise DataError(f"the angles have no {column!r} of phase {phase!r} and direction {direction!r}")
        rows = rows.assign(place=rows.reference_site.fillna(rows.site))
        first = rows.drop_duplicates(["place", "role"])[["place", "stack", "role", "layer"]]
        wide = rows.pivot(index=["place", "role"], columns="model", values=column)
        wide = wide.loc[list(zip(first.place, first.role, strict=True)), list(self.frame.model)]
        wide.index = pd.MultiIndex.from_frame(first, names=["site", "stack", "role", "layer"])
        return wide.rename_axis(columns=None)

    def to_json(self) -> str:
        """The metrics and what they were measured on, as JSON; what has no meaning is null."""
        rows = [{k: _plain(v) for k, v in row.items()} for row in self.frame.to_dict("records")]
        about = {"reference": self.reference, **self.about}
        return json.dumps(about | {"models": rows}, indent=2, allow_nan=False) + "\n"

    def __repr__(self) -> str:
        return self.table()

    def table(self, width: int = 120) -> str:
        """Metrics with a column a model, then the angles to the uniform vector by layer."""
        before, after = self.by_site(phase="pre"), self.by_site(phase="post")
        return side_by_side.table(self.frame, before, after, self.reference, width)

    def plot(self) -> matplotlib.figure.Figure:
        """Angles to the uniform vector by layer, a color a model and a panel a role, and the metrics below."""
        return side_by_side.plot(self.frame, self.angles)

    def save(self, folder: str | Path) -> None:
        """Write comparison.json, comparison.parquet, angles.parquet and figures/comparison.png and .svg."""
        folder = Path(folder)
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        (folder / "comparison.json").write_text(self.to_json())
        self.frame.to_parquet(folder / "comparison.parquet", index=False)
        self.angles.to_parquet(folder / "angles.parquet", index=False)
        figures.save(self.plot(), folder / "figures" / "comparison")


@on_cpu
def compare(
    models: Mapping[str, PreTrainedModel],
    tokens: TokenStream | Any,
    *,
    n_tokens: int | None = None,
    batch: int = 8,
    null: int = 256,
    rounds: int = 7,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Compare models on the same tokens; the first is the reference.

    Args:
        models: by the names they have in the result; two at least, with one vocabulary.
        tokens: a stream, or an array of token ids whose rows are sequences.
        n_tokens: exactly so many tokens; None takes all.
        batch: contexts that go through a model together; it changes nothing but rounding.
        null: random directions in the null ensemble of the angles.
        rounds: how often every model is timed, interleaved in random order; 0 leaves the times out (NaN).
        seed: of the random directions and of the order of the rounds.
        progress: show a progress bar.

    Raises:
        DataError: other vocabularies or widths, ids beyond a vocabulary, contexts too long, too few tokens.
        ModelError: outputs that are NaN or infinite, or that cannot be compared; a model that takes no tokens.
        NormGeoError: no mapping by names, fewer than two models, or a number below zero.

    Compressed models (CRMSNorm) are decompressed for their angles and norms, and for nothing else.

    >>> from normgeo import compare, load_model, load_tokenizer, load_tokens
    >>> models = {name: load_model(name) for name in ("embedded-layernorm", "embedded-rmsnorm")}
    >>> tokens = load_tokens("sample", load_tokenizer("embedded-layernorm"), context=64)
    >>> result = compare(models, tokens, n_tokens=500, null=8, rounds=1, progress=False)
    >>> result.frame[["model", "layernorms", "rmsnorms"]].to_numpy().tolist()
    [['embedded-layernorm', 13, 0], ['embedded-rmsnorm', 0, 13]]
    """
    if not isinstance(models, Mapping):
        kind = type(models).__name__
        raise NormGeoError(f"compare takes models by name, as {{'a': model, 'b': other}}, not a {kind}")
    if unnamed := [name for name in models if not isinstance(name, str)]:
        raise NormGeoError(f"compare takes models by name, and names are words; received {unnamed[0]!r}")
    if len(models) < 2:
        raise NormGeoError(f"a comparison takes at least two models, received {len(models)}")
    check_numbers(tokens=n_tokens, batch=batch, null=null, rounds=rounds, seed=seed)
    source = tokens if isinstance(tokens, TokenStream) else load_tokens(tokens)
    for model in models.values():
        check_context(model, source.context)
    whole = {name: decompress(m).model if is_compressed(m) else m for name, m in models.items()}
    total = n_tokens or source.n_tokens or 0
    with progress_bar("comparing", total * (1 + len(models)), enabled=progress) as advance:
        metrics = agreements(models, source, n_tokens, batch, advance)
        tables = {}
        for name, model in whole.items():
            tables[name] = measure_angles(
                model, source, n_tokens=n_tokens, batch=batch, null=null, seed=seed, name=name, progress=False,
                on_batch=lambda done: advance(done.n_tokens),
            ).frame  # fmt: skip
    times = _times(models, source.alike(n_tokens, batch, rounds + 1), rounds, seed)
    frame = pd.DataFrame(
        [{"model": name, **_size(model, whole[name]), **metrics[name], **times[name]} for name, model in models.items()]
    )
    frame["perplexity_difference"] = frame.perplexity - frame.perplexity.iloc[0]
    about = {
        "reference": next(iter(models)), **source.about, "tokens": int(frame.tokens.iloc[0]),
        "batch": int(batch), "null": int(null), "rounds": int(rounds), "seed": int(seed),
        "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return Comparison(frame, _matched(tables), about)


def _size(model: PreTrainedModel, whole: PreTrainedModel) -> dict[str, Any]:
    kinds = [site.kind for site in find_sites(whole, qk=True)]
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return {
        "dtype": dtype_name(model.dtype), "device": device,
        "parameters": model.num_parameters(), "bytes": _memory(model),
        "layernorms": kinds.count("layernorm"), "rmsnorms": kinds.count("rmsnorm"),
    }  # fmt: skip


def _memory(model: nn.Module) -> int:
    """The memory of all weights: also of those packed for a kernel, as many bytes as they are when unpacked."""
    held = {id(value): value for module in model.modules() for value in vars(module).values()}
    packed = [value for value in held.values() if type(value) is torch.ScriptObject]
    weights = [*model.parameters(), *model.buffers()]
    seen = set(map(id, weights))  # one may hang on another
    plain = (weight for weight in weights if not is_traceable_wrapper_subclass(weight))  # of others all is known
    scales = [x for w in plain for x in _within(vars(w), seen) if x.data_ptr() != w.data_ptr()]
    return sum(map(_bytes, [*weights, *packed, *scales]))


def _within(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in what hangs on a weight, each once: bitsandbytes' have an object there that has their scales."""
    for leaf in tree_leaves(held):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, (nn.Module, type, ModuleType)):
            yield from _within(getattr(leaf, "__dict__", {}), seen)


def _bytes(held: Any) -> int:
    """The memory of a tensor: of a quantized one that of what it is made of, for it says what it stands for.

    Of what a kernel packed torch lists only the state, which may hold others: one after the other is unpacked. What
    several processes have a part of each counts as a whole, as its parameters do.
    """
    if type(held) is torch.ScriptObject:
        has_state = held._has_method("__getstate__")  # pyright: ignore
        return sum(map(_bytes, tree_leaves(held.__getstate__()))) if has_state else 0
    if not isinstance(held, Tensor):
        return 0
    return held.nbytes if hasattr(held, "device_mesh") else sum(part.nbytes for part in plain_parts(held))


def _times(
    models: Mapping[str, PreTrainedModel], batches: Sequence[TokenBatch], rounds: int, seed: int
) -> dict[str, dict[str, float]]:
    """Time every model's forward pass: each once a round on one batch, in random order, after a round to warm up."""
    if not rounds:
        return dict.fromkeys(models, {"seconds": math.nan} | quartiles("time_ratio", [math.nan]))
    seconds = defaultdict[str, list[float]](list)
    chunks = {name: itertools.cycle(batches) for name in models}
    measures = {name: lambda name=name: _timed(models[name], next(chunks[name])) for name in models}
    with ExitStack() as modes:
        for model in models.values():
            modes.enter_context(evaluating(model))
        for _, name, spent in interleaved(measures, rounds=rounds, seconds=math.inf, seed=seed):
            seconds[name].append(spent)
    base = np.array(seconds[next(iter(models))])
    return {
        name: {"seconds": float(np.median(seconds[name]))} | quartiles("time_ratio", np.array(seconds[name]) / base)
        for name in models
    }


def _timed(model: PreTrainedModel, chunk: TokenBatch) -> float:
    """Seconds of one forward pass."""
    with torch.no_grad():
        return took(lambda: forward(model, chunk, vocabulary(model)), *devices(model))


def _places(frame: pd.DataFrame) -> pd.DataFrame:
    """The sites of a model, each with its place: stack, layer (-1: behind the last), role, and which of them."""
    sites = frame.drop_duplicates("site")[["site", "stack", "layer", "role"]].copy()
    sites["stack_index"] = pd.factorize(sites["stack"])[0]
    sites["layer"] = sites.layer.where(sites.role != "final", -1)
    key = ["stack_index", "layer", "role"]
    sites["place"] = list(zip(*(sites[c] for c in key), sites.groupby(key).cumcount(), strict=True))
    return sites


def _matched(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The tables below each other, every site with the reference's of its name and role, or else of its place."""
    first = _places(next(iter(tables.values())))
    parts = []
    for frame in tables.values():
        sites = _places(frame)
        named = set(sites.merge(first, on=["site", "role"]).site)
        free = {place: site for place, site in zip(first.place, first.site, strict=True) if site not in named}
        match = {s: s if s in named else free.get(p) for s, p in zip(sites.site, sites.place, strict=True)}
        index = dict(zip(sites.site, sites.stack_index, strict=True))
        parts.append(frame.assign(reference_site=frame.site.map(match), stack_index=frame.site.map(index)))
    return pd.concat(parts, ignore_index=True)


def _plain(value: Any) -> Any:
    """A value as JSON has it: no NaN, no infinity, no numpy."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_run(
    config: RunConfig,
    out: str | Path,
    *,
    naive: bool = False,
    rounds: int = 7,
    announce: Callable[[str], None] = lambda line: None,
    progress: bool = True,
) -> Comparison:
    """Load models by name, compare them and write the result to a directory, which appears whole or not at all.

    Args:
        config: one or two models, the first of them the reference, and what they are compared on. Its `tokens` are
            20,000 unless said, or all of them where there are fewer; its `revision` is that of both models, or of the
            one that is on the hub; `device_map`, `null_every`, `sites`, `qk` and `keep` are not looked at.
        out: the directory; an empty one may exist.
        naive: add the reference with its LayerNorms swapped for RMSNorms and nothing recentered.
        rounds: how often every model is timed; 0 for never.
        announce: called with one line that says what will be compared.
        progress: show a progress bar.

    Raises:
        RunError: the directory holds something, or cannot be written.
        DataError: there is nothing to compare with.
        ConversionError: `naive`, and the reference has no LayerNorm.
        NormGeoError: whatever is wrong with a model, the data or a number.
    """
    _check_writable(out := Path(out))
    check_numbers(rounds=rounds)
    device, names, trust = usable_device(config.device), config.models, config.trust_remote_code
    if len(names) == 1 and not naive:
        raise DataError(
            f"there is nothing to compare {names[0]} with: give another model, or --naive for its naive swap"
        )
    local = [name in EMBEDDED or Path(name).is_dir() for name in names]
    revisions = [None if here and not all(local) else config.revision for here in local]
    named = list(zip(_labels(names), names, revisions, strict=True))
    options: dict[str, Any] = {"dtype": config.dtype, "device": device, "trust_remote_code": trust}
    models = {label: load_model(name, revision=of, **options) for label, name, of in named}
    for model in models.values():
        check_context(model, config.context or 1)
        vocabulary(model)  # as before the angles of one: a model of text and more may have no table of tokens
    longest = min([1024, *(n for m in models.values() if (n := max_context(m)))])
    is_ids = holds_ids(config.source)
    tokenizer = None if is_ids else _shared_tokenizer(names, revisions, trust)
    tokens = load_tokens(config.source, tokenizer, config.context or (None if is_ids else longest))
    if naive:
        first = next(iter(models))
        models[f"{first}, naive RMSNorm"] = convert(models[first], to="naive-rmsnorm").model
    tokens, n_tokens = counted(tokens, config.tokens, DEFAULT_TOKENS)
    announce(f"{' against '.join(models)}: {n_tokens:,} tokens of {tokens.source} in contexts of {tokens.context}")
    weights = {name: weights_digest(model) for name, model in models.items()}  # before they run
    result = compare(models, tokens, n_tokens=n_tokens, batch=config.batch, null=config.null, rounds=rounds,
                     seed=config.seed, progress=progress)  # fmt: skip
    commits = {label: commit_of(name, of) for label, name, of in named}
    result = replace(result, about=result.about | {"weights_sha256": weights, "revisions": commits})
    with whole_directory(out) as scratch:
        result.save(scratch)
    return result


def comparison_name(models: Sequence[str]) -> str:
    """`compare-<A>-<B>`, for `claimed`."""
    return "-".join(["compare", *(Path(name).resolve().name for name in models)])


def _labels(names: Sequence[str]) -> Sequence[str]:
    """What one or two models are called: directories by their own name, unless that is the other's name too."""
    short = [label_of(name) for name in names]
    if len({*short}) == len(names):
        return short
    return names if len({*names}) == len(names) else [names[0], f"{names[1]} (again)"]


def _shared_tokenizer(names: Sequence[str], revisions: Sequence[str | None], trust_remote_code: bool) -> Any:
    """The tokenizer of all models, or of the one that has one.

    Raises:
        DataError: they have different vocabularies.
    """
    found = (
        load_tokenizer(name, revision=of, trust_remote_code=trust_remote_code)
        for name, of in zip(names, revisions, strict=True)
    )
    first, second = next(found), next(found, None)
    if first is not None and second is not None and first.get_vocab() != second.get_vocab():
        raise DataError(
            f"the tokenizers of {names[0]} and {names[1]} have different vocabularies ({len(first):,} and "
            f"{len(second):,} tokens); compare models with the same tokenizer, or give token ids as .npy"
        )
    return second if first is None else first


def _check_writable(out: Path) -> None:
    if taken(out):
        raise RunError(f"{out} exists and is not an empty directory; give another --out")
    check_folder(out)
