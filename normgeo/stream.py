"""Model + tokens -> hooks -> sinks: every norm's input and output, batch by batch, without keeping any of it."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.errors import DataError, ModelError, NormGeoError, said
from normgeo.examples import example, max_context
from normgeo.functional import watched
from normgeo.models import base_model, check_model, default_dtype, memory_explained, on_cpu, uncompiled, whole, widened
from normgeo.numbers import check_numbers
from normgeo.sites import NormSite, sites_of
from normgeo.system.memory import memory_kept
from normgeo.tokens import TokenBatch, TokenStream, load_tokens
from normgeo.trace import evaluating

__all__ = [
    "Sink",
    "check_context",
    "check_pass",
    "check_sites",
    "forward",
    "hooked",
    "in_memory",
    "observe",
    "own_errors",
    "stream",
    "vocabulary",
]


@runtime_checkable
class Sink(Protocol):
    """Anything that takes hidden states from the stream, which `observe` runs.

    >>> from normgeo import load_model, observe
    >>> class Largest:
    ...     value = 0.0
    ...     def begin(self, batch): pass
    ...     def take(self, site, phase, hidden): self.value = max(self.value, float(hidden.abs().max()))
    ...     def end(self): pass
    >>> largest = Largest()
    >>> observe(load_model("embedded-layernorm"), [[5, 6, 7, 8]], [largest])
    4
    >>> largest.value > 0
    True
    """

    def begin(self, batch: TokenBatch) -> None:
        """A batch is about to go through the model."""

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Float[Tensor, "vectors d"]) -> None:
        """What goes into (`pre`) or comes out of (`post`) the norm with this index, one vector a row, in token order.

        The tensor is the model's own and may be overwritten after the call: keep a copy or a result, never the tensor.
        """

    def end(self) -> None:
        """The batch has gone through the model."""


@dataclass
class Pass:
    """A forward pass of the stream's.

    Attributes:
        handed: how many vectors a site, by its index, gave of a phase.
        calls: how many there were, by the names of the norms.
        thread: the one in which the model runs for the stream: in others, and in what sinks do, it may run too.
    """

    handed: dict[tuple[int, str], int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    thread: int | None = None

    @contextmanager
    def begun(self, names: Iterable[str]) -> Iterator[None]:
        """While inside, the model runs for the stream, and nothing has been called yet."""
        self.handed.clear()
        self.calls = dict.fromkeys(names, 0)
        self.thread = threading.get_ident()
        try:
            yield
        finally:
            self.thread = None

    def runs(self) -> bool:
        """Whether what runs here is this pass."""
        return self.thread == threading.get_ident()


@contextmanager
def hooked(model: nn.Module, sites: Sequence[NormSite], sinks: Sequence[Sink]) -> Iterator[Pass]:
    """While inside, every call of a norm in a pass of the stream's hands its input and output to the sinks.

    Afterwards nothing stays.
    """
    by_name: dict[str, dict[int, int]] = defaultdict(dict)
    for index, site in enumerate(sites):
        by_name[site.name][site.call] = index
    now = Pass()

    def hand(site: int, phase: Literal["pre", "post"], hidden: Tensor) -> None:
        hidden = whole(hidden.detach())  # of a part of it there is no angle
        if sites[site].head_major:
            hidden = hidden.transpose(1, 2)  # token order
        elif sites[site].time_major:
            hidden = hidden.transpose(0, 1)
        rows = hidden.reshape(-1, sites[site].d)
        now.handed[site, phase] = len(rows)
        here, now.thread = now.thread, None
        try:
            for sink in sinks:
                sink.take(site, phase, rows)
        finally:
            now.thread = here  # what a sink raises the model may catch, and go on

    def hooks(name: str) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        by_call = by_name[name]

        def before(x: Tensor) -> None:
            now.calls[name] += 1
            if (site := by_call.get(now.calls[name] - 1)) is not None:
                hand(site, "pre", x)

        def after(output: Tensor) -> None:
            if (site := by_call.get(now.calls[name] - 1)) is not None:
                hand(site, "post", output)

        return before, after

    with watched(model, {name: hooks(name) for name in by_name}, now.runs):
        yield now


def check_context(model: PreTrainedModel, context: int) -> None:
    """Refuse what is no model, or takes no tokens, and contexts that are longer than it has positions for.

    Raises:
        ModelError: it is no model of transformers, or takes no token ids.
        DataError: the context is too long.
    """
    check_model(model)
    if model.main_input_name != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{type(model).__name__} takes {model.main_input_name}, not token ids")
    longest = max_context(model)
    if longest is not None and context > longest:
        raise DataError(
            f"contexts of {context} tokens are longer than the model's {longest}; give --context {longest} "
            f"(load_tokens(..., context={longest}))"
        )


def check_sites(model: PreTrainedModel, sites: Sequence[NormSite]) -> None:
    """Refuse what are not sites of this model, each once.

    Raises:
        DataError: something is no site, a site of another model, or there twice.
    """
    modules, keys = dict(model.named_modules()), set[str]()
    for site in sites:
        if not isinstance(site, NormSite):
            raise DataError(
                f"{site!r} is no site; give some that find_sites returned, or roles and name patterns in one string, "
                "as 'mlp,*ln_1'"
            )
        if site.owner not in modules:
            raise DataError(
                f"{type(model).__name__} has no module {site.owner}: it is a site of another model; give some that "
                "find_sites returned for this one"
            )
        if site.key in keys:
            raise DataError(f"the site {site.key} is there twice; give every site once")
        keys.add(site.key)


@contextmanager
def own_errors(model: PreTrainedModel) -> Iterator[None]:
    """What a model raises itself at token ids alone, as one line."""
    try:
        yield
    except NormGeoError:
        raise
    except Exception as error:  # whatever a model raises
        raise ModelError(
            f"{type(model).__name__} failed on token ids alone: {said(error)}; {widened(model, error)}give a model of "
            "text, or the part of this one that reads it"
        ) from error


def vocabulary(model: PreTrainedModel) -> int:
    """How many token ids a model has an embedding for.

    Raises:
        ModelError: it has no table of embeddings.
    """
    try:
        return int(model.get_input_embeddings().weight.shape[0])  # pyright: ignore
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ModelError(
            f"{type(model).__name__} has no table of token embeddings: its get_input_embeddings() has to return the "
            "nn.Embedding of its tokens"
        ) from error


def check_pass(model: PreTrainedModel, sites: Sequence[NormSite], context: int) -> None:
    """Refuse, before anything is measured, a model that a context of token ids does not take through all its sites.

    Raises:
        ModelError: the pass fails, or does not call a site once for every token.
    """
    with own_errors(model):
        ids = example("input_ids", model, context, torch.Generator().manual_seed(0))[:1].numpy()
        list(stream(model, sites, [TokenBatch(ids, ids, 0)], []))


def _check_handed(
    model: PreTrainedModel, sites: Sequence[NormSite], handed: dict[tuple[int, str], int], batch: TokenBatch
) -> None:
    """Refuse a pass in which a site has not seen every token: vectors would be taken for those of other tokens."""
    for index, site in enumerate(sites):
        for phase in ("pre", "post"):
            if (vectors := handed.get((index, phase), 0)) != batch.n_tokens * site.heads:
                at = f", from token {batch.start:,} on" if batch.start else ""
                raise ModelError(
                    f"{site.key} sees {vectors} vectors when {type(model).__name__} is given {batch.n_tokens} token "
                    f"ids alone{at}, not {site.heads} for each; leave it out (--sites, sites=, takes roles and name "
                    "patterns of others), or, where the model pads, give --tokens (n_tokens=) in whole contexts of a "
                    "length that it takes as they are"
                )


def _check_calls(model: PreTrainedModel, sites: Sequence[NormSite], calls: Sequence[int]) -> None:
    """Refuse a pass in which a norm was called another number of times than when it was found."""
    for site, made in zip(sites, calls, strict=True):
        if site.calls and made not in (0, site.calls):
            raise ModelError(
                f"{type(model).__name__} calls {site.name} {made} times in this pass, and {site.calls} times where its "
                "norms were found, so that which call is which does not show; leave it out (--sites, sites=, takes "
                "roles and name patterns of others), or, in Python, find the sites with inputs= as long as these"
            )


def _runner(model: PreTrainedModel, sites: Sequence[NormSite]) -> PreTrainedModel:
    """The base model where it holds all the sites, and calls them all, else the whole model.

    What is around the base does nothing before it in classes of transformers, as long as nobody hooks into it or puts
    another forward in its place: mixed precision as accelerate prepares it, or code that changes what comes in.
    """
    replaced = "forward" in vars(model) and not hasattr(model, "_hf_hook")  # which only moves what comes in
    own = not str(type(model).forward.__module__).startswith(("transformers.", "normgeo."))
    if replaced or own or model._forward_pre_hooks:
        return model
    base = base_model(model)
    inside = {id(m) for m in base.modules()}
    modules = dict(model.named_modules())
    again = any(site.calls > 1 and site.role in ("final", "head") for site in sites)  # by what is around the base
    return base if not again and all(id(modules[site.owner]) in inside for site in sites) else model


def in_memory(model: PreTrainedModel, batch: TokenBatch) -> AbstractContextManager[None]:
    """Have a batch that does not fit into memory be an error of one line."""
    rows, context = batch.ids.shape
    return memory_explained(
        f"a batch of {rows} contexts of {context} tokens on {model.device}",
        "give a smaller --context" if rows == 1 else f"give a smaller --batch (try {rows // 2}) or --context",
    )


def forward(model: PreTrainedModel, batch: TokenBatch, vocabulary: int, **options: Any) -> Any:
    """Run a model on a batch of token ids, without a cache, with other `options` of its own; gives what it returns.

    Raises:
        DataError: a token id is beyond the vocabulary.
        ModelError: the model takes no token ids, or the device is out of memory.
    """
    if batch.ids.max() >= vocabulary:
        raise DataError(
            f"token id {batch.ids.max()} is beyond the model's vocabulary of {vocabulary}: these ids come from another "
            "tokenizer"
        )
    accepted = inspect.signature(model.forward).parameters
    options |= {"use_cache": False} if "use_cache" in accepted else {}
    with in_memory(model, batch), uncompiled(), default_dtype(model.dtype):
        ids = torch.from_numpy(batch.ids).to(model.device, non_blocking=model.device.type == "cuda")
        if "decoder_input_ids" in accepted:
            options["decoder_input_ids"] = ids
        return model(input_ids=ids, **options)


def stream(
    model: PreTrainedModel, sites: Sequence[NormSite], batches: Iterable[TokenBatch], sinks: Sequence[Sink], *,
    every_token: bool = True,
) -> Iterator[TokenBatch]:  # fmt: skip
    """Run the batches through the model; yields each batch when the sinks have it.

    Args:
        model: what takes token ids.
        sites: of the model.
        batches: to run.
        sinks: what takes the hidden states.
        every_token: refuse sites that do not see every token of a batch.

    Raises:
        ModelError: the device is out of memory, a norm is called another number of times than when it was found, or a
            site does not see every token, as where data decide what runs.
        DataError: a token id is beyond the vocabulary, or the sites are not the model's.
    """
    check_sites(model, sites)
    runner = _runner(model, sites)
    known = vocabulary(model)
    prefix = next((n for n, m in model.named_modules() if m is runner), "")
    local = [_renamed(site, prefix) for site in sites]
    settings = model.config.get_text_config()
    pad = getattr(settings, "pad_token_id", None)
    ends = getattr(settings, "eos_token_id", None)
    told = pad in (ends if isinstance(ends, (list, tuple)) else [ends])  # where it may end a document
    names = {site.name for site in local}
    with memory_kept(), evaluating(model), hooked(runner, local, sinks) as now:
        for batch in batches:
            if pad is not None and not told and _padded(batch, pad):
                told = True
                warnings.warn(
                    f"rows begin or end with the padding token {pad}, whose hidden states count like all others; give "
                    "contexts without padding", stacklevel=2,
                )  # fmt: skip
            with torch.no_grad(), in_memory(model, batch):  # not around the yield, which is others' code
                for sink in sinks:
                    sink.begin(batch)
                with now.begun(names):
                    forward(runner, batch, known)
                _check_calls(model, sites, [now.calls[site.name] for site in local])
                if every_token:
                    _check_handed(model, sites, now.handed, batch)
                for sink in sinks:
                    sink.end()
            yield batch


def _padded(batch: TokenBatch, pad: int) -> bool:
    return any(bool((end == pad).all(1).any()) for end in (batch.ids[:, :3], batch.ids[:, -3:]) if end.shape[1] == 3)


@on_cpu
def observe(
    model: PreTrainedModel,
    tokens: TokenStream | Any,
    sinks: Sequence[Sink],
    *,
    sites: str | Sequence[NormSite] | None = None,
    qk: bool = False,
    n_tokens: int | None = None,
    batch: int = 8,
) -> int:
    """Give the hidden states before and after every norm to sinks: what measures, and whatever you write.

    Args:
        model: any transformers model that takes token ids.
        tokens: a stream, or an array of token ids whose rows are sequences.
        sinks: what takes them; see `Sink`.
        sites: from `find_sites`, or roles or patterns of names, comma-separated; None is all of them. A sink is told of
            a site by its index here.
        qk: also the norms on the heads of queries and keys, where `sites` are not given themselves.
        n_tokens: exactly so many tokens; None takes all.
        batch: contexts that go through the model together.

    Returns:
        How many tokens there were.

    Raises:
        DataError: ids beyond the vocabulary, contexts too long for the model, too few tokens, sites of another model,
            a number out of range, or what is no list of sinks.
        ModelError: what is no model of transformers, takes no tokens or has no norms.
    """
    check_numbers(tokens=n_tokens, batch=batch)
    given = [sinks] if isinstance(sinks, Sink) or not isinstance(sinks, Iterable) else list(sinks)
    for sink in given:
        if not isinstance(sink, Sink) or isinstance(sink, type) or sink is sinks:
            raise DataError(f"sinks are a list of objects with begin, take and end; received {type(sink).__name__}")
    source = tokens if isinstance(tokens, TokenStream) else load_tokens(tokens)
    check_context(model, source.context)
    chosen = sites_of(model, sites, qk=qk)
    running = stream(model, chosen, source.batches(n_tokens, batch), given, every_token=False)
    return sum(done.n_tokens for done in running)


def _renamed(site: NormSite, prefix: str) -> NormSite:
    return replace(site, name=site.name.removeprefix(f"{prefix}.")) if prefix else site
