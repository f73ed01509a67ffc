"""`normgeo angles --checkpoints`: the angles of every checkpoint of a training (*Geometry* section 3.3).

run.json                  what is measured on what: configuration, checkpoints and data by hash, versions, command line
parts/<model>-<step>.parquet    one per checkpoint that is done, with what it was measured on: what a resumed run does
                          not do again
angles.parquet            all of them, with a column `step`
figures/                  angles by step, of every layer and of the middle one of those that all models have,
                          and a map of layers by steps
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from normgeo import figures
from normgeo.angles.job import SAME, Job, RunConfig, check_same, prepare, revision_in
from normgeo.angles.measure import measure_angles
from normgeo.angles.runs import new_record, now, safe_name
from normgeo.conversion.convert import decompress
from normgeo.converted import is_compressed
from normgeo.errors import ModelError, RunError
from normgeo.hub import revisions
from normgeo.loading import commit_of
from normgeo.models import on_cpu
from normgeo.rows import SINGLE
from normgeo.system.files import (
    check_folder,
    disk_explained,
    read_table,
    status_in,
    unreadable,
    write_json,
    write_whole,
)  # fmt: skip
from normgeo.system.folders import alone, nothing_left, taken, whole_directory
from normgeo.training import figures as training_figures
from normgeo.training.state import check_weights

__all__ = [
    "Checkpoint", "draw", "find_checkpoints", "is_of_checkpoints", "measure_checkpoints", "resume_checkpoints",
    "start_checkpoints",
]  # fmt: skip

STEP = re.compile(r"(?:step|checkpoint|global_step)[-_]?(\d+)")
REVISION = re.compile(rf"(?:.*[-_/])?{STEP.pattern}(?:[-_/].*)?")
"""Revisions tell more than the step: stage1-step1000-tokens3B."""
DRAWN = ("null", "null_every", "seed")
MEASURED = (*SAME, "context", *DRAWN)
OF_A_MODEL = ("data_sha256", "tokenizer_sha256", "packing", "context", "n_tokens")


@dataclass(frozen=True)
class Checkpoint:
    """A model after so many steps of training, and the name of what is trained.

    Attributes:
        model: the name.
        step: how many steps.
        path: what it is loaded from: a directory, or a repository of the hub.
        revision: of the repository.
    """

    model: str
    step: int
    path: Path | str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.path}@{self.revision}" if self.revision else str(self.path)


def find_checkpoints(where: Path | str, chosen: str | None = None) -> list[Checkpoint]:
    """The checkpoints below a directory, or among the revisions of a repository of the hub.

    Args:
        where: a directory, below which they are those of `normgeo train`, or any directories named step-N or
            checkpoint-N. Models are called what the directory around their checkpoints is, and where several are called
            so, by their path. Else a hub id, whose branches and tags have such names, alone or among others
            (step1000-tokens4B).
        chosen: of a repository only these revisions: names or patterns with commas between.

    Raises:
        ModelError: there are none, or two have one name and one step.
    """
    if _on_hub(where):
        found = _revisions(str(where), chosen)
    elif chosen:
        raise ModelError(f"{where} is on this machine, where it has no revision {chosen!r}: leave out --revision")
    else:
        found = _below(Path(where))
    taken: dict[tuple[str, int], Checkpoint] = {}
    for point in found:
        if other := taken.get((point.model, point.step)):
            which = ", by --revision" if point.revision else ""
            raise ModelError(f"{point} and {other} have the same name and step; measure them apart{which}")
        taken[point.model, point.step] = point
    return sorted(found, key=lambda point: (point.model, point.step))


def _on_hub(where: Path | str) -> bool:
    return isinstance(where, str) and not Path(where).exists() and not Path(where).is_absolute()


def _revisions(repository: str, chosen: str | None) -> list[Checkpoint]:
    names = revisions(repository)
    steps = {name: int(number[1]) for name in names if (number := REVISION.fullmatch(name))}
    patterns = [pattern.strip() for pattern in chosen.split(",")] if chosen else ["*"]
    for pattern in patterns:
        if not fnmatch.filter(steps, pattern):
            other = f"; {pattern} is a revision without a step in its name" if pattern in names else ""
            raise ModelError(
                f"no revision of {repository} that is {pattern!r} is named as a step of training is (step1000), of "
                f"{len(names)}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}{other}"
            )
    wanted = {name for pattern in patterns for name in fnmatch.filter(steps, pattern)}
    return [Checkpoint(repository, step, repository, name) for name, step in steps.items() if name in wanted]


def _below(folder: Path) -> list[Checkpoint]:
    paths = [(path, STEP.fullmatch(path.name)) for path in sorted(_with_configuration(folder))]
    homes = {
        path: path.parent.parent if path.parent.name == "checkpoints" else path.parent
        for path, number in paths
        if number and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
    names = _names(set(homes.values()), folder)
    found = [Checkpoint(names[homes[path]], int(number[1]), path) for path, number in paths if number and path in homes]
    if not found:
        raise ModelError(f"no checkpoints in {folder}: directories named step-N or checkpoint-N with a config.json")
    return found


def _names(homes: set[Path], folder: Path) -> dict[Path, str]:
    """What the models in these directories are called."""
    short = {home: home.resolve().name for home in homes}
    several = {name for name in short.values() if list(short.values()).count(name) > 1}
    below = {home: home.relative_to(folder).as_posix() if home.is_relative_to(folder) else "." for home in homes}
    return {home: below[home] if name in several and below[home] != "." else name for home, name in short.items()}


def _with_configuration(folder: Path) -> Iterator[Path]:
    """The directories below this one that hold a config.json, through links too, each once."""
    seen = set()
    for name, inside, files in os.walk(folder, followlinks=True):
        home = Path(name).resolve()
        if home in seen:
            inside.clear()  # a link back, or a second one
        elif "config.json" in files:
            yield Path(name)
        elif STEP.fullmatch(Path(name).name) and any(file.endswith(".safetensors") for file in files):
            warnings.warn(f"{name} holds weights and no config.json: it is left out", stacklevel=2)
        seen.add(home)


def start_checkpoints(where: Path | str, config: RunConfig, out: str | Path, **options: Any) -> pd.DataFrame:
    """Measure every checkpoint that `find_checkpoints` finds, in a new directory; see `measure_checkpoints`.

    Args:
        where: a directory, or a hub id.
        config: as for one model; of a repository `revision` says which are chosen.
        out: the new directory.
        **options: of `measure_checkpoints`.

    Raises:
        RunError: the directory holds something, another process writes it, or the disk is full.
        NormGeoError: whatever is wrong with a model or the data.
    """
    check_folder(out := Path(out))
    with alone(out):
        if taken(out):
            hint = f", or --resume {out}" if status_in(out / "run.json") == "running" else ""
            raise RunError(f"{out} exists already; give another --out{hint}")
        points, config = find_checkpoints(where, config.revision), config.absolute()
        record = new_record(config) | {"checkpoints": str(where if _on_hub(where) else Path(where).absolute())}
        with nothing_left(out, lambda _: any(out.glob("parts/*.parquet"))):
            return _finish(points, config, out, record, **options)


def is_of_checkpoints(out: str | Path) -> bool:
    """Whether it is `start_checkpoints` that began what is in this directory."""
    return _recorded(Path(out)) is not None


def _recorded(out: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "checkpoints" in record else None


def resume_checkpoints(out: str | Path, *, trust_remote_code: bool = False, **options: Any) -> pd.DataFrame | None:
    """Finish what `start_checkpoints` began in a directory; None where it began something else.

    Checkpoints that are there by now are measured too. Those that are gone since they were measured keep their rows.

    Raises:
        RunError: it is complete or damaged, another process is at it, or the data, a tokenizer or a measured
            checkpoint are no longer those it began with, or it runs a repository's code and `trust_remote_code` does
            not say so now.
    """
    out = Path(out)
    if (record := _recorded(out)) is None:
        return None
    try:
        status, where, config = record["status"], str(record["checkpoints"]), record["config"]
    except (KeyError, TypeError) as error:
        raise unreadable(out / "run.json", error, "start again in another directory") from error
    if status == "complete":
        raise RunError(f"the run in {out} is complete; its table is {out / 'angles.parquet'}")
    check_folder(out, "--resume")
    with alone(out):
        run = RunConfig.recorded(config, out / "run.json").consented(trust_remote_code, out / "run.json")
        points = _with_measured(find_checkpoints(where, run.revision), out / "parts")
        return _finish(points, run, out, record, resumed=True, **options)


def _with_measured(found: list[Checkpoint], parts: Path) -> list[Checkpoint]:
    """These checkpoints, and those whose tables are kept and that are gone: a training may remove its oldest ones."""
    names, gone = {*map(_name, found)}, list[Checkpoint]()
    for file in parts.glob("*.parquet"):
        if file.stem not in names:
            frame = read_table(file)
            about, row = frame.attrs.get("about", {}), frame.iloc[0]
            path, revision = about.get("model", ""), about.get("revision")
            if not Path(path).exists():  # else it is called otherwise now, and is among those that were found
                gone.append(Checkpoint(str(row.model), int(row.step), path if revision else Path(path), revision))
    return sorted([*found, *gone], key=lambda point: (point.model, point.step))


def _finish(
    points: list[Checkpoint], config: RunConfig, out: Path, record: dict[str, Any], **options: Any
) -> pd.DataFrame:
    models: dict[str, Any] = record.setdefault("models", {})

    def note(point: Checkpoint, about: dict[str, Any]) -> None:
        models[_name(point)] = about
        with disk_explained(out):
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "run.json", record)

    with disk_explained(out):
        frame = measure_checkpoints(points, config, out / "parts", note=note, **options)
        write_whole(out / "angles.parquet", frame.to_parquet(None, index=False))
        with whole_directory(out / "figures", replace=True) as scratch:
            draw(frame, scratch)
        write_json(out / "run.json", record | {"status": "complete", "finished": now()})
    return frame


@on_cpu
def measure_checkpoints(
    points: list[Checkpoint],
    config: RunConfig,
    parts: str | Path | None = None,
    *,
    announce: Callable[[str], None] = lambda line: None,
    note: Callable[[Checkpoint, dict[str, Any]], None] = lambda point, about: None,
    progress: bool = True,
    resumed: bool = False,
) -> pd.DataFrame:
    """The angles of every checkpoint on the same tokens: an `AngleTable`'s frame with a column `step`.

    Args:
        points: from `find_checkpoints`.
        config: data, tokens and directions, as for one model.
        parts: keep every checkpoint's table here, and do not measure those that are there.
        announce: called with a line for each checkpoint.
        note: called with each checkpoint and its weights, tokenizer and data by hash, before it is measured.
        progress: show progress bars.
        resumed: the tables there are of this very configuration. Of a commit on the hub none is looked at again, where
            the cache has it still: there may be hundreds to load. A checkpoint that is gone cannot be.

    Raises:
        ModelError: there are no checkpoints.
        RunError: the checkpoints have different data, those of one model different tokens, or a table was kept of other
            weights, tokens or random directions.
        NormGeoError: whatever is wrong with a model or the data.
    """
    if not points:
        raise ModelError("there are no checkpoints to measure; give at least one")
    config = replace(config, data="wikipedia" if config.data is None else config.data)
    drawn = {name: getattr(config, name) for name in DRAWN}
    options: dict[str, Any] = {"batch": config.batch, "progress": progress} | drawn
    parts = None if parts is None else Path(parts)
    files = {point: None if parts is None else parts / f"{_name(point)}.parquet" for point in points}
    done = {point: read_table(file) for point, file in files.items() if file is not None and file.is_file()}
    abouts = {point: frame.attrs.get("about", {}) for point, frame in done.items()}
    for number, (point, file) in enumerate(files.items(), 1):
        if resumed and point in done and not _to_be_compared(point, abouts[point], announce):
            continue
        before = next((about for other, about in abouts.items() if other.model == point.model), None)
        of_point = replace(config, revision=point.revision)
        revision = revision_in(abouts.values())
        job = prepare(of_point, str(point.path), before=before, revision=revision, made=_whole)
        about = job.about | drawn | {"sites": [site.key for site in job.sites]}
        where = f"{parts.parent if parts else 'the measurement'} ({point.model}, step {point.step})"
        for other, then in abouts.items():  # a table of one model is of one text, cut in one way
            check_same(then, about, where, OF_A_MODEL if other.model == point.model else OF_A_MODEL[:1])
        check_same(drawn | abouts.setdefault(point, about), about, where, MEASURED)  # earlier versions tell no drawn
        note(point, about)
        if point not in done:
            check_weights(Path(point.path))
            announce(f"{point.model}, step {point.step:,} ({number} of {len(points)})")
            done[point] = _measured(point, job, options)
            done[point].attrs = {"about": about}
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, done[point].to_parquet(None, index=False))
        del job  # before the next model is loaded
    table = pd.concat([done[point] for point in points], ignore_index=True)
    table.attrs = {}
    return table


def _to_be_compared(point: Checkpoint, about: dict[str, Any], announce: Callable[[str], None]) -> bool:
    """Whether a checkpoint has to be looked at again whose table is kept."""
    if isinstance(point.path, Path) and not point.path.exists():
        announce(f"{point.model}, step {point.step:,} is gone since it was measured, and keeps its rows")
        return False
    commit = about.get("revision")
    return not commit or commit != commit_of(point.path, point.revision)


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with all its numbers: of a compressed one the Pre-RMSNorm model that it stands for."""
    return decompress(model).model if is_compressed(model) else model


def _name(point: Checkpoint) -> str:
    return f"{safe_name(point.model)}-{point.step:08}"


def _measured(point: Checkpoint, job: Job, options: dict[str, Any]) -> pd.DataFrame:
    table = measure_angles(
        job.model, job.tokens, n_tokens=job.n_tokens, sites=job.sites, bos=job.bos, name=point.model, **options
    )
    table.frame.insert(1, "step", point.step)
    return table.frame


def draw(frame: pd.DataFrame, folder: Path) -> None:
    """Every figure of the angles by step, as .png and .svg."""
    figures.save(training_figures.heat_map(frame), folder / "layers-by-steps")
    if frame.role.isin(SINGLE).all():  # --sites final: none of the norms is a layer's
        return
    middle = training_figures.middle_layer(frame)
    if middle is not None:
        figures.save(training_figures.one_layer(frame, middle), folder / f"by-step-layer-{middle}")
    for direction in figures.COLORS:
        figures.save(training_figures.all_layers(frame, direction), folder / f"by-step-{direction}")
