"""`normgeo train`: a directory of twins that a kill cannot damage and that `--resume` finishes.

train.json                  what is trained, on what, how
tokenizer/                  the tokenizer that all twins share
<norm>/state-*/, <norm>/checkpoints/, <norm>/curve/     see `state.py`
<norm>/tensorboard/         with --tensorboard, every step's losses
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import accelerate
import numpy as np
from accelerate.utils import broadcast_object_list

from normgeo.documents import KINDS, located, read_documents
from normgeo.errors import DataError, ModelError, NormGeoError, RunError
from normgeo.loading import load_tokenizer
from normgeo.models import tokenizer_digest
from normgeo.numbers import check_number
from normgeo.system.files import check_folder, disk_explained, status_in, unreadable, write_json
from normgeo.system.folders import alone, claimed, nothing_left, taken, whole_directory
from normgeo.system.records import parsed, read_as
from normgeo.system.versions import command_line, versions
from normgeo.tokens import SAMPLE, TokenStream, absolute, holds_ids, load_tokens, on_hub
from normgeo.training.accelerators import by_first, check_agreed, loss_explained, processes, start_accelerator
from normgeo.training.corpus import Corpus, Shuffled, kept, open_corpus
from normgeo.training.log import tensorboard
from normgeo.training.recipe import MOST, NORMS, Recipe
from normgeo.training.state import checkpoint_path
from normgeo.training.train import train
from normgeo.training.twins import train_tokenizer

__all__ = ["TrainConfig", "output", "resume_training", "start_training"]

GPT2 = "openai-community/gpt2"
VOCABULARY, SMALLEST = 4096, 257


@dataclass(frozen=True)
class TrainConfig:
    """What to train on what.

    Attributes:
        norm: one of the norms, or `both`: layernorm and rmsnorm.
        data: openwebtext, wikipedia, sample, or what else `load_tokens` takes by name or path.
        exclude: a file of documents to leave out, or sample: the held-out text.
        tokenizer: hub id or directory; None learns one from a file of text, and is GPT-2's for what is streamed.
        vocabulary: size of the vocabulary that is learnt, or of the ids in a .npy file; None is 4096.
        device: auto, cpu, cuda or mps.
    """

    norm: str = "both"
    data: str = "openwebtext"
    exclude: str | None = None
    tokenizer: str | None = None
    vocabulary: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.norm not in (*NORMS, "both"):
            raise NormGeoError(f"no norm {self.norm!r} to train; choose {', '.join(NORMS)} or both")
        for name, value in vars(self).copy().items():  # JSON knows neither numpy's numbers nor paths
            if isinstance(value, np.integer | Path):
                object.__setattr__(self, name, int(value) if isinstance(value, np.integer) else str(value))

    @property
    def norms(self) -> tuple[str, ...]:
        """The twins to train, in order."""
        return ("layernorm", "rmsnorm") if self.norm == "both" else (self.norm,)

    def absolute(self) -> TrainConfig:
        """The same for a process that works in another directory; of the tokenizer the run has a copy."""
        return replace(self, data=absolute(self.data), exclude=self.exclude and absolute(self.exclude))


SAME = "give all of them the same, in one directory that all of them see"


@contextmanager
def output(out: Path | None, size: str, device: str = "auto") -> Iterator[Path]:
    """The directory to train in, the same for all processes: `out`, or a new `runs/train-<size>-<date>` of this run.

    Raises:
        RunError: a new one cannot be made.
    """
    main = processes(device).is_main_process
    with claimed(out, f"train-{size}") if main else nullcontext(out) as where:
        shared: list[Any] = broadcast_object_list([where])
        yield shared[0]


def start_training(config: TrainConfig, recipe: Recipe, out: str | Path, **options: Any) -> dict[str, Path]:
    """Train twins in a new directory.

    Returns:
        The last checkpoint of each.

    Raises:
        RunError: the directory holds something, or the disk is full.
        NormGeoError: whatever is wrong with the data or the recipe, a loss that is not finite, or another process of
            the training has ended.
    """
    out, state = Path(out), processes(config.device)
    occupied = taken(out)
    state.wait_for_everyone()  # no process writes before every one has looked
    if occupied:
        raise _occupied(out)
    check_folder(out)
    _check(config)
    start_accelerator(recipe, config.device)
    given = _prepared(config, recipe, None)
    check_agreed({"out": str(out.absolute()), "norm": config.norm, **asdict(recipe), **given.about()}, SAME)
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(alone(out)))
        # by a run that came and went while this one prepared its data
        gone: list[Any] = broadcast_object_list([state.is_main_process and taken(out)])
        if gone[0]:
            raise _occupied(out)

        def begun(error: NormGeoError) -> bool:
            steps = any(path for name in ("curve", "state-*") for path in out.glob(f"*/{name}"))
            resumes = (out / "train.json").is_file() and (steps or isinstance(error, RunError))
            return resumes or not state.is_main_process

        with nothing_left(out, begun):
            if state.is_main_process and given.tokenizer is not None:
                with whole_directory(out / "tokenizer", replace=True) as scratch:
                    given.tokenizer.save_pretrained(scratch)
            state.wait_for_everyone()
            if given.tokenizer is not None:  # as a resumed run reads it, which notes where it comes from
                stored = _tokenizer(config, out / "tokenizer", given.excluded)
                if tokenizer_digest(stored) == tokenizer_digest(given.tokenizer):
                    given = given._replace(tokenizer=stored)
                else:
                    given = _prepared(config, recipe, out / "tokenizer", given.revision)
            record = _record(config, recipe, out, given)
            state.wait_for_everyone()  # what fails now may be removed while others are still about to read it
            if state.is_main_process:
                with disk_explained(out):
                    write_json(out / "train.json", record)
            return _train_all(config, recipe, out, record, given, **options)


def resume_training(out: str | Path, **options: Any) -> dict[str, Path]:
    """Finish an interrupted training with the settings it was started with.

    Raises:
        RunError: there is none, it is complete, another process is at it, the data or the tokenizer are others now or
            missing, or nothing can be written.
    """
    record, config, recipe = _read(out := Path(out))
    check_folder(out, None)
    processes(config.device)
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(alone(out)))
        given = _prepared(config, recipe, _stored(out, config), record.get("data_revision"))
        found = given.about()
        check_agreed({"out": str(out.absolute()), "norm": config.norm, **asdict(recipe), **found}, SAME)
        found["tokenizer_sha256"] = _tokenizer_digest(out)
        for key, now in found.items():
            if record.get(key) != now:
                raise RunError(f"{out} was started with another {key}: {record.get(key)}, now {now}; start a new run")
        return _train_all(config, recipe, out, record, given, **options)


def _record(config: TrainConfig, recipe: Recipe, out: Path, given: _Given) -> dict[str, Any]:
    """What is trained, on what, how: train.json."""
    return {
        "config": asdict(config.absolute()), "recipe": asdict(recipe), **given.about(), "status": "running",
        "command": command_line(),
        "versions": versions("normgeo", "torch", "transformers", "accelerate", "datasets"),
        "tokenizer_sha256": _tokenizer_digest(out), "data_revision": given.revision,
    }  # fmt: skip


def _occupied(out: Path) -> RunError:
    hint = f"finish it with --resume {out}, or " if status_in(out / "train.json") == "running" else ""
    return RunError(f"{out} exists already; {hint}give another --out")


class _Given(NamedTuple):
    """What a configuration stands for."""

    tokenizer: Any
    corpus: Corpus
    vocabulary: int
    excluded: set[str]
    held_out: TokenStream | None
    revision: str | None

    def about(self) -> dict[str, Any]:
        """What a run records of it, and compares when it is resumed."""
        return {
            "data_sha256": self.corpus.digest, "packing": self.corpus.packing, "vocabulary": self.vocabulary,
            "exclude_sha256": _digest(self.excluded),
        }  # fmt: skip


def _digest(documents: set[str]) -> str:
    """sha256 of documents, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(documents)).encode()).hexdigest()


def _tokenizer_digest(out: Path) -> str | None:
    """sha256 of the tokenizer that a resumed run would load; None where there is none."""
    tokenizer = load_tokenizer(out / "tokenizer") if (out / "tokenizer").is_dir() else None
    return None if tokenizer is None else tokenizer_digest(tokenizer)


class _Record(TypedDict):
    """What is read again of `train.json`."""

    status: str
    config: TrainConfig
    recipe: Recipe


def _read(out: Path) -> tuple[dict[str, Any], TrainConfig, Recipe]:
    """The record of a training that is to be finished, and the settings in it."""
    path = out / "train.json"
    if not path.is_file():
        raise RunError(f"{out} holds no train.json; there is no training to resume")
    try:
        record = parsed(path.read_text())
        found = read_as(_Record, record)
    except (ValueError, TypeError, NormGeoError) as error:
        raise unreadable(path, error, "start again in another directory") from error
    if found["status"] == "complete":
        raise RunError(f"the training in {out} is complete")
    return record, found["config"], found["recipe"]


def _stored(out: Path, config: TrainConfig) -> Path | None:
    """The tokenizer that all twins share; None where they are trained on ids."""
    folder = out / "tokenizer"
    if holds_ids(config.data):
        return None
    if not folder.is_dir():
        raise RunError(f"{folder}, the tokenizer of the run, is missing; put it back, or start a new run")
    return folder


def _check(config: TrainConfig) -> None:
    """Refuse what would be ignored, and a vocabulary that cannot hold every byte and the end of a text."""
    ids, name = holds_ids(config.data), config.tokenizer or (GPT2 if on_hub(config.data) else None)
    if ids and config.tokenizer:
        raise NormGeoError(f"{config.data} holds token ids, which need no tokenizer: leave out --tokenizer")
    if ids and config.exclude:
        raise NormGeoError(f"{config.data} holds token ids, which have no documents to leave out: leave out --exclude")
    if config.exclude and holds_ids(config.exclude):
        raise NormGeoError(f"--exclude takes documents ({KINDS}), no token ids: {config.exclude}")
    if config.exclude and not located(_named(config.exclude))[0].exists():
        raise DataError(f"no such file of documents to leave out: {config.exclude}; give one ({KINDS}), or sample")
    if config.vocabulary is None:
        return
    if name:
        raise NormGeoError(f"the tokenizer {name} has a vocabulary of its own: leave out --vocabulary")
    check_number("vocabulary", config.vocabulary, 1 if ids else SMALLEST, MOST)


def _prepared(config: TrainConfig, recipe: Recipe, stored: Path | None, revision: str | None = None) -> _Given:
    if hub := on_hub(config.data):  # which is said first where it is out of reach
        pinned: list[Any] = broadcast_object_list([hub.pinned(revision).revision])
        revision = pinned[0]
    excluded = set(read_documents(_named(config.exclude))) if config.exclude else set()
    tokenizer = _tokenizer(config, stored, excluded)
    corpus = open_corpus(config.data, tokenizer, recipe.context, recipe.seed, excluded, revision)
    vocabulary = (config.vocabulary or VOCABULARY) if tokenizer is None else _size(tokenizer)
    if isinstance(corpus, Shuffled) and corpus.largest >= vocabulary:
        raise DataError(f"{config.data} has the id {corpus.largest}, beyond a vocabulary of {vocabulary:,}")
    held_out = kept(load_tokens(config.exclude, tokenizer, recipe.context)) if config.exclude else None
    return _Given(tokenizer, corpus, vocabulary, excluded, held_out, revision)


def _size(tokenizer: Any) -> int:
    """Ids that a tokenizer has, with those between that it leaves out: a model has a row for each."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def _named(data: str) -> str | Path:
    """Where the texts of a file are that goes by its path or is the sample."""
    return SAMPLE if data == "sample" else data


def _tokenizer(config: TrainConfig, stored: Path | None, excluded: set[str]) -> Any:
    if holds_ids(config.data):
        return None
    name = stored or config.tokenizer or (GPT2 if on_hub(config.data) else None)
    if name is None:
        texts = (text for text in read_documents(_named(config.data)) if text not in excluded)
        return train_tokenizer(texts, config.vocabulary or VOCABULARY)
    unknown = f"cannot load the tokenizer {name!r}; give --tokenizer a directory or a hub id"
    try:
        tokenizer = load_tokenizer(name)
    except ModelError as error:  # which is of a model, that nobody asked for
        raise DataError(f"{unknown} that there is") from error
    if tokenizer is None and stored is not None:
        raise RunError(f"the tokenizer in {stored} is damaged; start a new run")
    if tokenizer is None:
        raise DataError(unknown)
    return tokenizer


@loss_explained()
def _train_all(
    config: TrainConfig,
    recipe: Recipe,
    out: Path,
    record: dict[str, Any],
    given: _Given,
    *,
    report: Callable[[str, dict[str, float]], None] = lambda norm, row: None,
    progress: bool = True,
    board: bool = False,
) -> dict[str, Path]:
    for norm in config.norms:
        logging = tensorboard(out / norm / "tensorboard") if board else nullcontext(lambda step, row: None)
        with disk_explained(out), logging as log:
            train(
                norm, recipe, given.corpus, given.vocabulary, out / norm, held_out=given.held_out,
                tokenizer=given.tokenizer, device=config.device, progress=progress, log=log,
                report=lambda row, norm=norm: report(norm, row),
            )  # fmt: skip
    if accelerate.PartialState().is_main_process:
        with disk_explained(out):
            write_json(out / "train.json", record | {"status": "complete"})
    return {norm: checkpoint_path(out / norm, recipe.steps) for norm in config.norms}
