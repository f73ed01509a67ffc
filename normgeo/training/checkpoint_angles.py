"""`normgeo angles --checkpoints`: the angles of every checkpoint of a training (*Geometry* section 3.3).

run.json                  what is measured on what: configuration, versions and command line; at the end checkpoints and
                          data by hash
parts/<model>-<step>.parquet    one per checkpoint that is done, with what it was measured on: what a resumed run does
                          not do again, and what the others of several processes have measured
angles.parquet            all of them, with a column `step`
figures/                  angles by step, of every layer and of the middle one of those that all models have,
                          and a map of layers by steps
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from normgeo import figures
from normgeo.angles.job import SAME, Job, RunConfig, check_same, prepare, revision_in
from normgeo.angles.measure import measure_angles
from normgeo.angles.runs import as_begun, begun, new_record, now, safe_name
from normgeo.conversion.convert import decompress
from normgeo.converted import is_compressed
from normgeo.errors import ModelError, RunError
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
from normgeo.system.ranks import Ranks
from normgeo.system.records import parsed
from normgeo.tokens import TokenStream, on_hub
from normgeo.training import figures as training_figures
from normgeo.training.checkpoints import Checkpoint, find_checkpoints, is_on_hub
from normgeo.training.state import check_weights

__all__ = ["draw", "is_of_checkpoints", "measure_checkpoints", "resume_checkpoints", "start_checkpoints"]

DRAWN = ("null", "null_every", "seed")
MEASURED = (*SAME, "context", *DRAWN)
OF_A_MODEL = ("data_sha256", "tokenizer_sha256", "packing", "context", "n_tokens")


def start_checkpoints(
    where: Path | str, config: RunConfig, out: str | Path, *, ranks: Ranks | None = None, **options: Any
) -> pd.DataFrame | None:
    """Measure every checkpoint that `find_checkpoints` finds, in a new directory; see `measure_checkpoints`.

    By as many processes as there are, each of which measures its share of the checkpoints.

    Args:
        where: a directory, or a hub id.
        config: as for one model; of a repository `revision` says which are chosen.
        out: the new directory, on a file system that all the processes share.
        ranks: this process among them; those that `torchrun` started, unless said.
        **options: of `measure_checkpoints`.

    Returns:
        The table, in the first process.

    Raises:
        RunError: the directory holds something, another process writes it, or the disk is full.
        NormGeoError: whatever is wrong with a model or the data.
    """
    out, config, ranks = Path(out), config.absolute(), ranks or Ranks.from_environment()

    def begin(held: ExitStack) -> dict[str, Any]:
        check_folder(out)
        held.enter_context(alone(out))
        if taken(out):
            hint = f", or --resume {out}" if status_in(out / "run.json") == "running" else ""
            raise RunError(f"{out} exists already; give another --out{hint}")
        points = find_checkpoints(where, config.revision)
        if ranks.size == 1:  # others may be writing
            held.enter_context(nothing_left(out, lambda _: any(out.glob("parts/*.parquet"))))
        record = new_record(config) | {"checkpoints": str(where if is_on_hub(where) else Path(where).absolute())}
        return record | {"points": [point.described for point in points]}

    with begun(ranks, begin, lambda record: as_begun(record, config, out)) as (record, run):
        return _finish(record, run, out, ranks, **options)


def is_of_checkpoints(out: str | Path) -> bool:
    """Whether it is `start_checkpoints` that began what is in this directory."""
    return _recorded(Path(out)) is not None


def _recorded(out: Path) -> dict[str, Any] | None:
    try:
        record = parsed((out / "run.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "checkpoints" in record else None


def resume_checkpoints(
    out: str | Path, *, trust_remote_code: bool = False, ranks: Ranks | None = None, **options: Any
) -> pd.DataFrame | None:
    """Finish what `start_checkpoints` began in a directory; None where it began something else.

    Checkpoints that are there by now are measured too. Those that are gone since they were measured keep their rows.
    By any number of processes, whatever the number of those that began it; the table is the first one's.

    Raises:
        RunError: it is complete or damaged, another process is at it, or the data, a tokenizer or a measured
            checkpoint are no longer those it began with, or it runs a repository's code and `trust_remote_code` does
            not say so now.
    """
    out = Path(out)
    if _recorded(out) is None:
        return None
    ranks, file = ranks or Ranks.from_environment(), out / "run.json"

    def given(record: dict[str, Any]) -> RunConfig:
        return RunConfig.recorded(record["config"], file).consented(trust_remote_code, file)

    def begin(held: ExitStack) -> dict[str, Any]:
        record = _recorded(out) or {}
        try:
            status, where, _ = record["status"], str(record["checkpoints"]), record["config"]
        except (KeyError, TypeError) as error:
            raise unreadable(file, error, "start again in another directory") from error
        if status == "complete":
            raise RunError(f"the run in {out} is complete; its table is {out / 'angles.parquet'}")
        check_folder(out, None)
        held.enter_context(alone(out))
        points = _with_measured(find_checkpoints(where, given(record).revision), out / "parts")
        return record | {"points": [point.described for point in points]}

    with begun(ranks, begin, given) as (record, run):
        return _finish(record, run, out, ranks, resumed=True, **options)


def _with_measured(found: list[Checkpoint], parts: Path) -> list[Checkpoint]:
    """These checkpoints, and those whose tables are kept and that are gone: a training may remove its oldest ones."""
    names, gone = {*map(_name, found)}, list[Checkpoint]()
    for file in parts.glob("*.parquet"):
        if file.stem not in names:
            frame = read_table(file)
            about, row = frame.attrs.get("about", {}), frame.iloc[0]
            path, revision = about.get("model", ""), about.get("revision")
            if not Path(path).exists():  # else it is called otherwise now, and is among those that were found
                gone.append(Checkpoint(str(row.model), int(row.step), path, revision))
    return sorted([*found, *gone], key=lambda point: (point.model, point.step))


def _finish(record: dict[str, Any], config: RunConfig, out: Path, ranks: Ranks, **options: Any) -> pd.DataFrame | None:
    points = [Checkpoint(**point) for point in record["points"]]
    record = {key: value for key, value in record.items() if key != "points"}

    def note() -> None:  # only now is it known that a model and the data exist
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "run.json", record)

    with disk_explained(out):
        frames = _frames(points, config, out / "parts", ranks, lambda: ranks.first("noted", note), **options)
        if ranks.rank:
            return None
        record["models"] = {_name(point): frame.attrs["about"] for point, frame in frames.items()}
        frame = _table(frames)
        write_whole(out / "angles.parquet", frame.to_parquet(None, index=False))
        with whole_directory(out / "figures", replace=True) as scratch:
            draw(frame, scratch)
        write_json(out / "run.json", record | {"status": "complete", "finished": now()})
    return frame


def measure_checkpoints(
    points: list[Checkpoint],
    config: RunConfig,
    parts: str | Path | None = None,
    *,
    announce: Callable[[str], None] = lambda line: None,
    progress: bool = True,
) -> pd.DataFrame:
    """The angles of every checkpoint on the same tokens: an `AngleTable`'s frame with a column `step`.

    Args:
        points: from `find_checkpoints`.
        config: data, tokens and directions, as for one model.
        parts: keep every checkpoint's table here, and do not measure those that are there.
        announce: called with a line for each checkpoint.
        progress: show progress bars.

    Raises:
        ModelError: there are no checkpoints.
        RunError: the checkpoints have different data, those of one model different tokens, or a table was kept of other
            weights, tokens or random directions.
        NormGeoError: whatever is wrong with a model or the data.

    >>> from normgeo.training.checkpoints import find_checkpoints                                   # doctest: +SKIP
    >>> points = find_checkpoints("EleutherAI/pythia-160m", "step?000")                             # doctest: +SKIP
    >>> measure_checkpoints(points, RunConfig(tokens=20_000)).groupby("step").energy_share.mean()   # doctest: +SKIP
    """
    where = None if parts is None else Path(parts)
    return _table(_frames(points, config, where, Ranks(), lambda: None, announce=announce, progress=progress))


def _table(frames: dict[Checkpoint, pd.DataFrame]) -> pd.DataFrame:
    table = pd.concat(frames.values(), ignore_index=True)
    table.attrs = {}
    return table


@on_cpu
def _frames(
    points: list[Checkpoint], config: RunConfig, parts: Path | None, ranks: Ranks, note: Callable[[], None], *,
    announce: Callable[[str], None] = lambda line: None, progress: bool = True, resumed: bool = False,
) -> dict[Checkpoint, pd.DataFrame]:  # fmt: skip
    """The tables of all checkpoints, each with what it was measured on: in the first process, when all are done.

    `resumed`: the tables there are of this very configuration. Of a commit on the hub none is looked at again, where
    the cache has it still: there may be hundreds to load. A checkpoint that is gone cannot be.
    """
    if not points:
        raise ModelError("there are no checkpoints to measure; give at least one")
    config = replace(config, data="wikipedia" if config.data is None else config.data)
    announce, progress = (announce, progress) if not ranks.rank else (lambda line: None, False)
    where = "the measurement" if parts is None else str(parts.parent)
    files = {point: None if parts is None else parts / f"{_name(point)}.parquet" for point in points}
    kept = ranks.first("kept", lambda: [_name(point) for point, file in files.items() if file and file.is_file()])
    done = {point: read_table(file) for point, file in files.items() if file and _name(point) in kept}
    abouts = {point: frame.attrs.get("about", {}) for point, frame in done.items()}
    again = ranks.first("again", lambda: [
        _name(point) for point in done if not resumed or _to_be_compared(point, abouts[point], announce)
    ])  # fmt: skip
    mine = ranks.share(left := [point for point in points if point not in done])
    if ranks.size > 1 and left:
        announce(f"{len(left)} checkpoints are left for {ranks.size} processes, at most {len(mine)} for each")
    revision, read = _revision(config, abouts, ranks), dict[str, TokenStream]()
    for number, point in enumerate((*ranks.share([point for point in done if _name(point) in again]), *mine)):
        job = _prepared(point, config, abouts, revision, where, read)
        if not number:
            note()
        if point in done:
            continue
        check_weights(Path(point.path))
        announce(f"{point.model}, step {point.step:,} ({points.index(point) + 1} of {len(points)})")
        done[point] = _measured(point, job, config, progress)
        done[point].attrs = {"about": abouts[point]}
        if (file := files[point]) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, done[point].to_parquet(None, index=False))
        del job  # before the next model is loaded
    ranks.done("measured")
    if ranks.rank:
        return {}
    return {
        point: done[point] if point in done else _of_another(point, files[point], abouts, where) for point in points
    }


def _revision(config: RunConfig, abouts: dict[Checkpoint, dict[str, Any]], ranks: Ranks) -> str | None:
    """Of text on the hub the commit that all checkpoints are given."""
    revision, hub = revision_in(abouts.values()), on_hub(config.source)
    if revision is None and hub is not None:
        return ranks.first("revision", lambda: hub.pinned().revision)
    return revision


def _prepared(
    point: Checkpoint, config: RunConfig, abouts: dict[Checkpoint, dict[str, Any]], revision: str | None, where: str,
    read: dict[str, TokenStream],
) -> Job:  # fmt: skip
    """A checkpoint that is ready to be measured, on what the others are measured on."""
    before = next((about for other, about in abouts.items() if other.model == point.model), None)
    of = replace(config, revision=point.revision)
    job = prepare(of, str(point.path), before=before, revision=revision, made=_whole, read=read)
    drawn = {name: getattr(config, name) for name in DRAWN}
    about = job.about | drawn | {"sites": [site.key for site in job.sites]}
    _check_text(point, about, abouts, where)
    then = drawn | abouts.setdefault(point, about)  # earlier versions tell no drawn
    check_same(then, about, _at(point, where), MEASURED)
    return job


def _check_text(point: Checkpoint, about: dict[str, Any], abouts: dict[Checkpoint, dict[str, Any]], where: str) -> None:
    """Refuse what is of another text than the others, or of a model's text that is cut in another way."""
    for other, then in abouts.items():
        check_same(then, about, _at(point, where), OF_A_MODEL if other.model == point.model else OF_A_MODEL[:1])


def _at(point: Checkpoint, where: str) -> str:
    return f"{where} ({point.model}, step {point.step})"


def _of_another(
    point: Checkpoint, file: Path | None, abouts: dict[Checkpoint, dict[str, Any]], where: str
) -> pd.DataFrame:
    """The table of a checkpoint that another process has measured."""
    if file is None or not file.is_file():
        raise RunError(
            f"{file} was written by another process and is not there; do all processes see one file system? What is "
            f"there is safe: give --resume {where}"
        )
    frame = read_table(file)
    _check_text(point, frame.attrs["about"], abouts, where)
    abouts[point] = frame.attrs["about"]
    return frame


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


def _measured(point: Checkpoint, job: Job, config: RunConfig, progress: bool) -> pd.DataFrame:
    table = measure_angles(
        job.model, job.tokens, n_tokens=job.n_tokens, sites=job.sites, bos=job.bos, name=point.model,
        batch=config.batch, progress=progress, **{name: getattr(config, name) for name in DRAWN},
    )  # fmt: skip
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
