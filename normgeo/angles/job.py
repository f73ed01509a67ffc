"""What a run is given, and what it is of: a model, its norms and its tokens, ready to be measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from normgeo.angles.measure import new_statistics
from normgeo.angles.statistics import AngleStatistics
from normgeo.cards import EMBEDDED
from normgeo.errors import NormGeoError, RunError
from normgeo.examples import max_context
from normgeo.loading import commit_of, label_of, load_model, load_tokenizer
from normgeo.models import dtype_name, pick_dtype, tokenizer_digest, usable_device, weights_digest
from normgeo.numbers import LEAST, check_numbers
from normgeo.sites import NormSite, find_sites, select_sites
from normgeo.stream import check_context, check_pass
from normgeo.system.files import unreadable
from normgeo.system.records import read_as
from normgeo.system.timing import device_name
from normgeo.tokens import TokenStream, absolute, counted, holds_ids, load_tokens, on_hub

__all__ = ["SAME", "About", "Job", "RunConfig", "RunRecord", "check_same", "empty_statistics", "prepare", "revision_in"]

BLOCK_TOKENS = 16_384
KEEP_SCALARS_UP_TO = 2_000_000
DEFAULT_TOKENS = 1_000_000
TEXTS = ("data", "device", "device_map", "sites", "revision")
"""The options that take any text."""
SWITCHES = ("qk", "trust_remote_code")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run's numbers are, as the options of `normgeo angles` of the same names do.

    Attributes:
        models: hub ids, local directories or names of the embedded pair.
        data: text or token ids, as `load_tokens` takes them by name or path, `:COLUMN` included; None is the embedded
            sample for embedded models, else Wikipedia.
        tokens: how many are measured, exactly; None is 1,000,000, or all that the data has.
        context: tokens that a model sees together; None is up to 1024.
        batch: contexts in a forward pass.
        dtype: auto, float64, float32, bfloat16 or float16; None is float32 on a CPU, else auto.
        device: auto (CUDA, MPS, CPU) or a torch device.
        device_map: "auto" spreads the layers over all GPUs.
        null: number of random directions in the null ensemble.
        null_every: the null ensemble is measured on about one token in so many.
        seed: of the random directions.
        sites: only these norms: roles or patterns of names, comma-separated.
        qk: include the norms on the heads of queries and keys.
        keep: `scalars` keeps norm and angles of every token, `none` nothing; None keeps them of up to 2M tokens.
        revision: commit, branch or tag on the hub.
        trust_remote_code: run the code of the model's repository.

    Raises:
        NormGeoError: a number or a word is out of range.

    >>> RunConfig(("embedded-layernorm",), tokens=2000, context=64).source
    'sample'
    """

    models: tuple[str, ...] = tuple(EMBEDDED)
    data: str | None = None
    tokens: int | None = None
    context: int | None = None
    batch: int = 8
    dtype: str | None = None
    device: str = "auto"
    device_map: str | None = None
    null: int = 256
    null_every: int = 16
    seed: int = 0
    sites: str | None = None
    qk: bool = False
    keep: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.models, str | Path):  # one, and not its letters
            object.__setattr__(self, "models", (self.models,))
        for name in TEXTS:
            if not isinstance(value := getattr(self, name), str | Path | None):
                raise NormGeoError(f"--{name.replace('_', '-')} must be text, received {value!r}")
        numbers = {name: getattr(self, name) for name in LEAST if getattr(self, name, None) is not None}
        check_numbers(**numbers)
        texts = (*TEXTS, "dtype", "keep")
        plain: dict[str, Any] = dict.fromkeys(numbers, int) | dict.fromkeys(texts, str) | dict.fromkeys(SWITCHES, bool)
        for name, kind in plain.items():  # records know neither numpy's values nor paths
            if (value := getattr(self, name)) is not None or kind is bool:
                object.__setattr__(self, name, kind(value))
        named = tuple(str(name) if isinstance(name, str) else name for name in self.models)  # a path is no hub id
        object.__setattr__(self, "models", named)
        pick_dtype(self.dtype, self.device)
        if self.device_map is not None and self.device != "auto":
            raise NormGeoError(
                f"--device {self.device} is one device, and --device-map {self.device_map} takes all; give one of them"
            )
        if self.keep not in (None, "scalars", "none"):
            raise NormGeoError(f"--keep takes scalars or none, received {self.keep!r}")

    @classmethod
    def recorded(cls, record: Any, where: Path | str) -> RunConfig:
        """What `dataclasses.asdict` and JSON made of one, in the file `where`.

        Raises:
            RunError: it is damaged, or of another version of normgeo.
        """
        try:
            given = {"models": None} | read_as(dict[str, Any], record, "config")  # no record means the default ones
            return read_as(cls, given, "config")
        except (TypeError, NormGeoError) as error:
            raise unreadable(where, error, "start again in another directory") from error

    def consented(self, trust_remote_code: bool, where: Path | str) -> RunConfig:
        """The same. That a repository's code may run is said by who resumes a run, not by a file that may be anyone's.

        Raises:
            RunError: it runs such code, and nobody said so now.
        """
        if self.trust_remote_code and not trust_remote_code:
            raise RunError(
                f"{where} says to run the code of {', '.join(self.models)}: resume it with --trust-remote-code "
                "(trust_remote_code=True) if you trust that"
            )
        return self

    @property
    def source(self) -> str:
        """What the tokens come from: the embedded sample for the embedded models, else Wikipedia, unless said."""
        default = "sample" if set(self.models) <= set(EMBEDDED) else "wikipedia"
        return default if self.data is None else self.data  # an empty name is none

    def keeps_scalars(self, n_tokens: int) -> bool:
        """Whether a run of so many tokens keeps theirs."""
        return self.keep == "scalars" or (self.keep is None and n_tokens <= KEEP_SCALARS_UP_TO)

    def block(self, n_tokens: int, context: int, period: int | None = None) -> int:
        """How many tokens are committed at once: whole batches, or whole periods of batches where these are short."""
        at_once = period if period is not None and period <= BLOCK_TOKENS else self.batch * context
        return min(n_tokens, max(1, round(BLOCK_TOKENS / at_once)) * at_once)

    def absolute(self) -> RunConfig:
        """The same for a process that works in another directory."""

        def path(name: str) -> str:
            return str(Path(name).absolute()) if name not in ("", *EMBEDDED) and Path(name).exists() else name

        return replace(self, models=tuple(map(path, self.models)), data=self.data and absolute(self.data))


class _Later(TypedDict, total=False):
    """What earlier versions did not record."""

    data_revision: str | None
    marks: list[tuple[int, int, int]]
    row: int | None


class About(_Later):
    """What is read again of what a run records of a model and its tokens; the rest is compared, or for people."""

    model: str
    data_sha256: str
    packing: str
    context: int
    n_tokens: int
    sites: list[NormSite]


class RunRecord(TypedDict):
    """What is read again of `run.json`."""

    status: str
    config: dict[str, Any]
    models: dict[str, About]


@dataclass(frozen=True)
class Job:
    """What `prepare` gives.

    Attributes:
        label: what the model is called in tables and figures.
        model: the model, on its device.
        tokens: what it will see.
        sites: its norms.
        n_tokens: how many of the tokens.
        bos: the id that begins a document, if any: those vectors are counted apart.
        keep: keep per-token scalars.
        block: tokens between two commits.
        divisible: batches begin where blocks do, so that several processes may divide the blocks.
        about: what a run records, and compares when it is resumed.
    """

    label: str
    model: PreTrainedModel
    tokens: TokenStream
    sites: list[NormSite]
    n_tokens: int
    bos: int | None
    keep: bool
    block: int
    divisible: bool
    about: dict[str, Any]


def prepare(
    config: RunConfig, name: str, *, before: dict[str, Any] | None = None, revision: str | None = None,
    first: Callable[[str, Callable[[], Any]], Any] = lambda name, do: do(),
    made: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model,
    read: dict[str, TokenStream] | None = None,
) -> Job:  # fmt: skip
    """A model, its sites and its tokens, ready to be measured, and what they are, as JSON holds it.

    Args:
        config: of the run.
        name: of the model.
        before: what they were when the run was begun.
        revision: the commit of the text on the hub that the run's other models were given.
        first: what the first of several processes does for all of them; see `Ranks.first`.
        made: what is measured, of what was loaded.
        read: tokens of earlier models, which are used again where they are the same; this model's are added.
    """
    device = usable_device(config.device)
    trust = config.trust_remote_code
    model = made(load_model(
        name, dtype=config.dtype, device=device, device_map=config.device_map, revision=config.revision,
        trust_remote_code=trust,
    ))  # fmt: skip
    is_ids = holds_ids(config.source)
    tokenizer = None if is_ids else load_tokenizer(name, revision=config.revision, trust_remote_code=trust)
    context = config.context or (None if is_ids else min(1024, max_context(model) or 1024))
    if context is not None:
        check_context(model, context)
    revision = (before or {}).get("data_revision") or revision
    if (hub := on_hub(config.source)) and tokenizer is not None:
        revision = first("revision", lambda: hub.pinned(revision).revision)
    tokens = load_tokens(config.source, tokenizer, context, revision=revision)
    check_context(model, tokens.context)
    tokenizer_sha256 = None if tokenizer is None else tokenizer_digest(tokenizer)
    if read is not None:
        tokens = read.setdefault(json.dumps([tokenizer_sha256, tokens.about]), tokens.remembered())
    if before and "n_tokens" in before:  # of all processes or of none: counting is the first's, for all
        n_tokens = before["n_tokens"]
        tokens.marks[:] = map(tuple, before.get("marks", ()))
    else:
        tokens, n_tokens = counted(tokens, config.tokens, DEFAULT_TOKENS, first)
    digest = weights_digest(model)  # before it runs
    sites = select_sites(find_sites(model, qk=config.qk), config.sites)
    for length in tokens.lengths(n_tokens):
        check_pass(model, sites, length)
    bos = getattr(model.config.get_text_config(), "bos_token_id", None)
    about = {
        "model": name,
        "class": type(model).__name__,
        "config": _lasting(json.loads(model.config.to_json_string(use_diff=False))),
        "parameters": model.num_parameters(),
        "weights_sha256": digest,
        "revision": commit_of(name, config.revision),
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
        "tokenizer_sha256": tokenizer_sha256,
        "vocabulary": None if tokenizer is None else len(tokenizer),
        **tokens.about,
        "n_tokens": n_tokens,
        "marks": [list(mark) for mark in tokens.marks if mark[0] < n_tokens],
        "bos": bos,
        "dtype": dtype_name(model.dtype),
        "device": device_name(torch.device(device)) if device.startswith("cuda") else device,
        "sites": [asdict(site) for site in sites],
    }
    block = config.block(n_tokens, tokens.context, period := tokens.period(config.batch))
    keep, divisible = config.keeps_scalars(n_tokens), block == n_tokens or block % period == 0
    return Job(label_of(name), model, tokens, sites, n_tokens, bos, keep, block, divisible, about)


def empty_statistics(config: RunConfig, job: Job) -> AngleStatistics:
    """Statistics that have seen nothing of a job yet, with the random directions of its run."""
    return new_statistics(
        job.model, job.sites, null=config.null, seed=config.seed, null_every=config.null_every, bos=job.bos
    )


def revision_in(abouts: Iterable[dict[str, Any]]) -> str | None:
    """The commit of the text that models of a run were given, by what is recorded of them."""
    return next((about["data_revision"] for about in abouts if about.get("data_revision")), None)


def _lasting(config: Any) -> Any:
    """A configuration without what differs between two copies of one model."""
    if not isinstance(config, dict):
        return config
    return {key: _lasting(value) for key, value in config.items() if key not in PASSING}


PASSING = {"_name_or_path", "_commit_hash", "transformers_version"}
SAME = ("weights_sha256", "config", "tokenizer_sha256", "data_sha256", "n_tokens", "packing", "sites", "dtype")


def check_same(then: dict[str, Any], now: dict[str, Any], out: Path | str, keys: Sequence[str] = SAME) -> None:
    """Refuse to go on where what a run was started with is no longer what is there."""
    for key in keys:
        if (changed := _changed(key, then.get(key), now[key])) is not None:
            name, before, after = changed
            raise RunError(
                f"{out} was started with another {name.replace('_', ' ')}: {str(before)[:80]}, now {str(after)[:80]}; "
                "start a new run"
            )


def _changed(name: str, then: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The first entry that differs, of those that both have: a later version of a library knows more options."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        then, now = dict(enumerate(then)), dict(enumerate(now))
    if not isinstance(then, dict) or not isinstance(now, dict):
        return None if then == now else (name, then, now)
    both = (_changed(f"{name} {key}", then[key], now[key]) for key in then if key in now)
    return next((changed for changed in both if changed is not None), None)
