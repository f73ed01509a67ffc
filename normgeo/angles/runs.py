"""Runs: a directory that an analysis writes, that a kill cannot damage, and that `resume` finishes.

run.json                what was run on what: configuration, models and data by hash, versions, command line
state/                  the statistics so far and their checksums, renamed into place after every block of tokens
scalars.zarr/<model>    per-token scalars, where kept
angles.parquet, sinks.parquet, verdict.md, figures/, report.html   written when every model is done

Several processes divide the blocks of each model's tokens. Batches are the same whoever computes them, and sums of
statistics are exact, so that the numbers are the same to the last bit for any number of processes and interruptions.
"""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normgeo import figures
from normgeo.angles.cost import check_space, cost
from normgeo.angles.job import Job, RunConfig, RunRecord, check_same, empty_statistics, prepare, revision_in
from normgeo.angles.measure import AngleTable, check_seen
from normgeo.angles.report import page
from normgeo.angles.scalars import ScalarWriter, bytes_needed
from normgeo.angles.state import Span, State, joined, missing, n_tokens
from normgeo.angles.statistics import AngleStatistics
from normgeo.cards import EMBEDDED
from normgeo.errors import NormGeoError, RunError
from normgeo.loading import check_there, label_of
from normgeo.models import on_cpu
from normgeo.stream import stream
from normgeo.system.files import check_folder, disk_explained, is_full, unreadable, write_json, write_whole
from normgeo.system.folders import alone, nothing_left, taken
from normgeo.system.progress import progress_bar
from normgeo.system.ranks import Ranks
from normgeo.system.records import parsed, read_as
from normgeo.system.versions import command_line, versions
from normgeo.tokens import TokenBatch

__all__ = [
    "RunConfig", "as_begun", "begun", "new_record", "now", "resume_run", "run_name", "safe_name", "start_run",
    "write_results",
]  # fmt: skip


def run_name(models: tuple[str, ...]) -> str:
    """What a run of these is called, for `claimed`."""
    if models == tuple(EMBEDDED):
        return "embedded"
    return Path(*models[:1]).resolve().name + (f"-and-{len(models) - 1}-more" if len(models) > 1 else "")


def start_run(
    config: RunConfig, out: str | Path, *, ranks: Ranks | None = None,
    announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable | None:  # fmt: skip
    """Start a run in an empty directory, by as many processes as there are: each measures its share of the tokens.

    Args:
        config: what to run.
        out: where: a directory on a file system that all the processes share.
        ranks: this process among them; those that `torchrun` started, unless said.
        announce: gets one line before each model, in the first process: what will be measured, and what it will cost.
        progress: show a bar, of the first process's share.

    Returns:
        The table, in the first process.

    Raises:
        RunError: the directory holds something else, another process writes it, or the disk is full.
        NormGeoError: whatever is wrong with the model, the data or the hidden states.
    """
    out, config, ranks = Path(out), config.absolute(), ranks or Ranks.from_environment()

    def begin(held: ExitStack) -> dict[str, Any]:
        check_folder(out)
        _check_labels(config)
        for name in config.models:  # else it is said by every process, and after all before it were measured
            check_there(name, config.revision, config.trust_remote_code)
        held.enter_context(alone(out))
        _check_free(out)
        if ranks.size == 1:  # others may be writing
            held.enter_context(nothing_left(out, lambda _: any(out.glob("state/*.safetensors"))))
        return {"status": "new", "models": {}, "config": asdict(config)}

    with begun(ranks, begin, lambda record: as_begun(record, config, out)) as (record, run):
        return _execute(run, out, record, ranks, announce, progress)


@contextmanager
def begun(
    ranks: Ranks, begin: Callable[[ExitStack], dict[str, Any]], given: Callable[[dict[str, Any]], RunConfig]
) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """What the first process has begun, to be done by all.

    Args:
        ranks: this process among them.
        begin: what the first does: the record of what is to be done. What it enters is held while they are at it.
        given: what of it this process is to do.
    """
    with ranks.heard(), ExitStack() as held, ranks.told_to_end():
        record = ranks.first("begun", lambda: begin(held))
        config = given(record)
        ranks.take_gpu(config.device, config.device_map)
        yield record, config


def as_begun(record: dict[str, Any], config: RunConfig, out: Path) -> RunConfig:
    """What this process was given, which must be what the first one was.

    Raises:
        RunError: it is not.
    """
    first = RunConfig.recorded(record["config"], out)
    check_same({"config": asdict(first)}, {"config": asdict(config)}, out, ("config",))
    return config


def _check_labels(config: RunConfig) -> None:
    """Refuse models whose rows and files could not be told apart, and none."""
    if not config.models:
        raise RunError("there is no model to measure; give at least one")
    labels = [safe_name(label_of(name)) for name in config.models]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise RunError(
            f"two models of the run would be called {twice!r}; rename the directory of one, or measure it apart"
        )


def _check_free(out: Path) -> None:
    if (out / "run.json").is_file():
        status = _read(out)["status"]
        finish = f"finish it with --resume {out}, or " if status != "complete" else ""
        raise RunError(f"{out} already holds a run ({status}); {finish}give another --out")
    if taken(out):
        raise RunError(f"{out} exists and is no run; give another --out")


def resume_run(
    out: str | Path, *, trust_remote_code: bool = False, ranks: Ranks | None = None,
    announce: Callable[[str], None] = lambda line: None, progress: bool = True,
) -> AngleTable | None:  # fmt: skip
    """Finish an interrupted run with the configuration it was started with, to the same numbers.

    By any number of processes, whatever the number of those that began it; see `start_run`.

    Args:
        out: its directory.
        trust_remote_code: run the repository's own code, as the run did so far.
        ranks: this process among them.
        announce: gets one line before each model that is left.
        progress: show a bar.

    Raises:
        RunError: there is no run, it is complete, another process is at it, the model or the data are no longer those
            it was started with, or it runs a repository's code and `trust_remote_code` does not say so.
    """
    out = Path(out)

    def begin(held: ExitStack) -> dict[str, Any]:
        if not (out / "run.json").is_file():
            raise RunError(f"{out} holds no run.json; there is nothing to resume")
        if _read(out)["status"] == "complete":
            raise RunError(f"the run in {out} is complete; its table is {out / 'angles.parquet'}")
        check_folder(out, None)
        held.enter_context(alone(out))
        return _read(out)

    def given(record: dict[str, Any]) -> RunConfig:
        config = RunConfig.recorded(record["config"], out / "run.json")
        _check_labels(config)
        return config.consented(trust_remote_code, out / "run.json")

    ranks = ranks or Ranks.from_environment()
    with begun(ranks, begin, given) as (record, config):
        return _execute(config, out, record, ranks, announce, progress)


def _read(out: Path) -> dict[str, Any]:
    file = out / "run.json"
    try:
        record = parsed(file.read_text())
        if not isinstance(record, dict) or not RunRecord.__required_keys__ <= record.keys():
            raise RunError(f"{file} is no record of a run; give another directory")
        read_as(RunRecord, record)
    except (ValueError, TypeError) as error:
        raise unreadable(file, error, "start again in another directory") from error
    return record


@on_cpu
def _execute(
    config: RunConfig, out: Path, record: dict[str, Any], ranks: Ranks, announce: Callable[[str], None], progress: bool
) -> AngleTable | None:
    """Run every model, committing as it goes, then write tables, verdict and figures.

    A model that fails when another was measured before it is left out, and said at the end. Of several processes only
    one may have failed, and all of them end.
    """
    tables: dict[str, AngleTable] = {}
    failed: list[tuple[str, NormGeoError]] = []

    for name in config.models:
        try:
            if (table := _measured(config, name, out, record, ranks, announce, progress)) is not None:
                tables[name] = table
        except NormGeoError as error:
            if not tables or is_full(error) or ranks.size > 1:
                raise
            _check_kept(out)
            failed.append((name, error))
            _forget(error)
            if not (out / "state" / f"{safe_name(label_of(name))}.safetensors").is_file():
                record["models"].pop(name, None)  # it may be another one when it is tried again
    if ranks.rank:
        return None
    with disk_explained(out):
        _check_kept(out)
        table = AngleTable.concatenated(list(tables.values()))
        write_results(table, out, [record["models"][name] for name in tables])
        if not failed:
            write_json(out / "run.json", record | {"status": "complete", "finished": now()})
            return table
        write_json(out / "run.json", record)
    said = "; ".join(f"{name}: {error}" for name, error in failed)
    done = ", ".join(map(label_of, tables))
    raise RunError(f"{said}; the results of {done} are in {out}; --resume tries again what failed") from failed[0][1]


def _check_kept(out: Path) -> None:
    """Refuse to go on where what was measured is gone: the record is written before, and is not to be made again."""
    if not (out / "run.json").is_file():
        raise RunError(f"{out} was removed while it was written, and what was measured with it; begin again")


def _measured(
    config: RunConfig, name: str, out: Path, record: dict[str, Any], ranks: Ranks, announce: Callable[[str], None],
    progress: bool,
) -> AngleTable | None:  # fmt: skip
    """The table of one model, which is gone then: there is room for the parameters of one at a time."""
    models = record["models"]
    before, revision = models.get(name), revision_in(models.values())
    job = prepare(config, name, before=before, revision=revision, first=ranks.first)

    def noted() -> dict[str, Any]:
        if record["status"] == "new":  # only now is it known that the model and the data exist
            record.update(new_record(config))
        else:
            _check_kept(out)
        for other in record["models"].values():  # models are compared on one text, which may be another file by now
            check_same(other, job.about, out, ("data_sha256",))
        check_same(record["models"].setdefault(name, job.about), job.about, out)
        write_json(out / "run.json", record)
        return record["models"][name]

    with disk_explained(out):
        models[name] = ranks.first("model", noted)
        check_same(models[name], job.about, out)
        if not (out / "run.json").is_file():
            raise RunError(f"process {ranks.rank} does not see {out}: all processes need one file system")
        statistics = _measure(config, job, out, ranks, announce, progress)
    return AngleTable.from_statistics(statistics, job.label) if statistics is not None else None


def _forget(error: BaseException | None) -> None:
    """Free what a kept error holds in its frames: the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def write_results(table: AngleTable, out: Path, about: Iterable[Mapping[str, Any]]) -> list[Path]:
    """Write the tables, `verdict.md`, `figures/` and `report.html`, which says what it is `about`; gives all files."""
    table.save(out)
    verdict = table.verdict()
    write_whole(out / "verdict.md", verdict.encode())
    _draw(table, out / "figures")
    write_whole(out / "report.html", page(table, verdict, out / "figures", about).encode())
    names = ("angles.parquet", "sinks.parquet", "verdict.md", "report.html")
    return [*(out / name for name in names), *sorted((out / "figures").glob("*"))]


def _draw(table: AngleTable, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for model in table.frame.model.unique():
        figures.save(table.plot("angles", model), folder / f"angles-{safe_name(model)}")
    for kind in ("energy", "norms", "rotation"):
        figures.save(table.plot(kind), folder / kind)


def new_record(config: RunConfig) -> dict[str, Any]:
    """`run.json` of what begins: when, by which command, with which versions and options."""
    packages = versions("normgeo", "torch", "transformers", "numpy", "zarr", "datasets")
    return {
        "status": "running",
        "started": now(),
        "command": command_line(),
        "versions": {"python": platform.python_version()} | packages,
        "config": asdict(config),
        "models": {},
    }


def now() -> str:
    """The time, as records have it: of UTC, in ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def safe_name(name: str) -> str:
    """A model's name as the name of a file: what `state` and `scalars.zarr` call it."""
    return name.strip("/").replace("/", "--")


def _measure(
    config: RunConfig, job: Job, out: Path, ranks: Ranks, announce: Callable[[str], None], progress: bool
) -> AngleStatistics | None:
    """The statistics of all tokens, in the first process; each measures its share of those that are missing."""
    statistics = empty_statistics(config, job)
    state, writer = State(out / "state", safe_name(job.label), _measured_what(config, job)), None
    if job.keep:
        writer = ScalarWriter(out / "scalars.zarr" / safe_name(job.label), job.sites, job.n_tokens, job.block)
    done: list[Span] = []

    def begin() -> list[Span]:
        done.extend(state.restored(statistics))
        left = missing(done, job.n_tokens, job.block if job.divisible else job.n_tokens)
        if writer is not None:
            if not done:
                check_space(out, bytes_needed(job.sites, job.n_tokens, job.block))
                writer.create(statistics.directions)
            writer.check(done)
        if left:
            announce(_plan(config, job, left, ranks.size))
        return left

    mine = joined((start, stop) for start, stop in ranks.share(ranks.first("left", begin)))
    others = job.n_tokens - n_tokens(mine)
    with progress_bar(job.label, job.n_tokens, done=others, enabled=progress and not ranks.rank) as advance:
        for batch, whole in _blocks(config, job, mine, statistics):
            done = joined([*done, (batch.start, batch.start + batch.n_tokens)])
            if writer is not None:
                writer.take(batch, statistics)
            if whole:
                if not ranks.rank:
                    check_seen(statistics)  # where nothing in a whole block has an angle, nothing will
                if writer is not None:
                    writer.flush()
                state.save(statistics, done, ranks.rank)
            advance(batch.n_tokens)
    ranks.done("measured")
    if ranks.rank:
        return None
    if lost := missing(state.gathered(statistics, done), job.n_tokens, job.n_tokens):
        raise RunError(
            f"{out}: tokens {lost[0][0]:,} to {lost[0][1]:,} were measured and are not there; do all processes see "
            f"one file system? What is there is safe: give --resume {out}"
        )
    check_seen(statistics)
    return statistics


def _blocks(
    config: RunConfig, job: Job, spans: Sequence[Span], statistics: AngleStatistics
) -> Iterator[tuple[TokenBatch, bool]]:
    """The batches of these tokens, each when the statistics have it, and whether it is time to commit them."""
    batches = itertools.chain.from_iterable(job.tokens.batches(stop, config.batch, start) for start, stop in spans)
    ends, uncommitted = {stop for _, stop in spans}, 0
    for batch in stream(job.model, job.sites, batches, [statistics]):
        uncommitted += batch.n_tokens
        whole = uncommitted >= job.block or batch.start + batch.n_tokens in ends
        yield batch, whole
        uncommitted = 0 if whole else uncommitted


def _measured_what(config: RunConfig, job: Job) -> str:
    """What statistics are of, so that those of another model or run are not gone on with."""
    known = [job.about[key] for key in ("weights_sha256", "data_sha256", "packing", "dtype")]
    drawn = [config.null, config.null_every, config.seed]
    return json.dumps([*known, job.n_tokens, [site.key for site in job.sites], *drawn])


def _plan(config: RunConfig, job: Job, left: Sequence[Span], processes: int) -> str:
    """One line: what will be measured, and what that will cost from now on."""
    n_left = n_tokens(left)
    gone_on = n_left < job.n_tokens
    disk = bytes_needed(job.sites, job.n_tokens, job.block) if job.keep and not gone_on else 0
    done = f", of which {job.n_tokens - n_left:,} are done," if gone_on else ""
    longest = -(-len(left) // processes) * job.block if processes > 1 and job.divisible else n_left
    by = f" by {processes} processes, each" if processes > 1 else ""
    return (
        f"{job.label}: {len(job.sites)} norms, before and after, {job.n_tokens:,} tokens{done} of {job.tokens.source} "
        f"in contexts of {job.tokens.context}, {config.null} random directions, {job.about['dtype']} on "
        f"{job.about['device']};{by} {cost(job.model, min(n_left, longest), job.tokens.context, config.batch, disk)}"
    )
