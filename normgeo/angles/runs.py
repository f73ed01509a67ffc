"""Runs: a directory that an analysis writes, that a kill cannot damage, and that `resume` finishes.

run.json            what was run on what: configuration, models and data by hash, versions, command line
state/<model>.safetensors   the statistics so far and their checksum, renamed into place after every block of tokens
scalars.zarr/<model>        per-token scalars, where kept
angles.parquet, sinks.parquet, verdict.md, figures/, report.html   written when every model is done
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from normgeo import figures
from normgeo.angles.cost import check_space, cost
from normgeo.angles.job import Job, RunConfig, check_same, prepare, revision_in
from normgeo.angles.measure import AngleTable, check_seen, new_statistics
from normgeo.angles.report import page
from normgeo.angles.scalars import ScalarWriter, bytes_needed
from normgeo.angles.statistics import AngleStatistics
from normgeo.cards import EMBEDDED
from normgeo.errors import NormGeoError, RunError
from normgeo.loading import check_there, label_of
from normgeo.models import on_cpu
from normgeo.stream import stream
from normgeo.system.files import check_folder, disk_explained, is_full, unreadable, write_json, write_whole
from normgeo.system.folders import alone, nothing_left, taken
from normgeo.system.progress import progress_bar
from normgeo.system.versions import command_line, versions

__all__ = [
    "RunConfig", "new_record", "now", "resume_run", "run_name", "safe_name", "start_run", "write_results",
]  # fmt: skip


def run_name(models: tuple[str, ...]) -> str:
    """What a run of these is called, for `claimed`."""
    if models == tuple(EMBEDDED):
        return "embedded"
    return Path(*models[:1]).resolve().name + (f"-and-{len(models) - 1}-more" if len(models) > 1 else "")


def start_run(config: RunConfig, out: str | Path, **options: Any) -> AngleTable:
    """Start a run in an empty directory; see `_execute` for the options.

    Raises:
        RunError: the directory holds something else, another process writes it, or the disk is full.
        NormGeoError: whatever is wrong with the model, the data or the hidden states.
    """
    out = Path(out)
    check_folder(out)
    _check_labels(config)
    for name in config.models[1:]:  # else it would be said after all before it were measured, which nothing finishes
        check_there(name, config.revision, config.trust_remote_code)
    with alone(out):
        _check_free(out)
        with nothing_left(out, lambda _: any(out.glob("state/*.safetensors"))):
            return _execute(config.absolute(), out, {"status": "new", "models": {}}, **options)


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


def resume_run(out: str | Path, *, trust_remote_code: bool = False, **options: Any) -> AngleTable:
    """Finish an interrupted run with the configuration it was started with.

    Args:
        out: its directory.
        trust_remote_code: run the repository's own code, as the run did so far.
        **options: see `_execute`.

    Raises:
        RunError: there is no run, it is complete, another process is at it, the model or the data are no longer those
            it was started with, or it runs a repository's code and `trust_remote_code` does not say so.
    """
    out = Path(out)
    if not (out / "run.json").is_file():
        raise RunError(f"{out} holds no run.json; there is nothing to resume")
    if _read(out)["status"] == "complete":
        raise RunError(f"the run in {out} is complete; its table is {out / 'angles.parquet'}")
    check_folder(out, "--resume")
    with alone(out):
        record = _read(out)
        config = RunConfig.recorded(record["config"], out / "run.json").consented(trust_remote_code, out / "run.json")
        return _execute(config, out, record, **options)


def _read(out: Path) -> dict[str, Any]:
    try:
        record = json.loads((out / "run.json").read_text())
    except ValueError as error:
        raise RunError(f"{out / 'run.json'} is damaged ({error}); start again in another directory") from error
    if not isinstance(record, dict) or not {"status", "config"} <= record.keys():
        raise RunError(f"{out / 'run.json'} is no record of a run; give another directory")
    return record


@on_cpu
def _execute(
    config: RunConfig,
    out: Path,
    record: dict[str, Any],
    *,
    announce: Callable[[str], None] = lambda line: None,
    progress: bool = True,
) -> AngleTable:
    """Run every model, committing as it goes, then write tables, verdict and figures.

    A model that fails when another was measured before it is left out, and said at the end.

    Args:
        config: what to run.
        out: where.
        record: `run.json` so far.
        announce: called with one line before each model: what will be measured and what it will cost.
        progress: show a progress bar.
    """
    tables: dict[str, AngleTable] = {}
    failed: list[tuple[str, NormGeoError]] = []

    def write() -> AngleTable:
        table = AngleTable.concatenated(list(tables.values()))
        write_results(table, out, [record["models"][name] for name in tables])
        return table

    for name in config.models:
        try:
            tables[name] = _measured(config, name, out, record, announce, progress)
        except NormGeoError as error:
            if not tables or is_full(error):
                raise
            failed.append((name, error))
            _forget(error)
            if not _state(out, name).is_file():  # it may be another one when it is tried again
                record["models"].pop(name, None)
    with disk_explained(out):
        table = write()
        if not failed:
            write_json(out / "run.json", record | {"status": "complete", "finished": now()})
            return table
        write_json(out / "run.json", record)
    said = "; ".join(f"{name}: {error}" for name, error in failed)
    done = ", ".join(map(label_of, tables))
    raise RunError(f"{said}; the results of {done} are in {out}; --resume tries again what failed") from failed[0][1]


def _measured(
    config: RunConfig, name: str, out: Path, record: dict[str, Any], announce: Callable[[str], None], progress: bool
) -> AngleTable:
    """The table of one model, which is gone then: there is room for the parameters of one at a time."""
    models = record["models"]
    job = prepare(config, name, before=models.get(name), revision=revision_in(models.values()))
    if record["status"] == "new":  # only now is it known that the model and the data exist
        record |= new_record(config)
    check_same(record["models"].setdefault(name, job.about), job.about, out)
    with disk_explained(out):
        (out / "state").mkdir(parents=True, exist_ok=True)
        write_json(out / "run.json", record)
        statistics = _measure(config, job, out, announce, progress)
    return AngleTable.from_statistics(statistics, job.label)


def _forget(error: BaseException | None) -> None:
    """Let go of what an error that is kept holds: the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _state(out: Path, name: str) -> Path:
    """Where the statistics of a model so far are."""
    return out / "state" / f"{safe_name(label_of(name))}.safetensors"


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
    config: RunConfig, job: Job, out: Path, announce: Callable[[str], None], progress: bool
) -> AngleStatistics:
    statistics = new_statistics(
        job.model, job.sites, null=config.null, seed=config.seed, null_every=config.null_every, bos=job.bos
    )
    path, of = _state(out, job.about["model"]), _measured_what(config, job)
    done = _restore(path, statistics, of)
    if done >= job.n_tokens:
        return statistics
    writer = None
    if job.keep:
        writer = ScalarWriter(out / "scalars.zarr" / safe_name(job.label), job.sites, job.n_tokens, job.block)
        if not done:
            check_space(out, bytes_needed(job.sites, job.n_tokens, job.block))
            writer.create(statistics.directions)
        writer.check(done)
    announce(_plan(config, job, done))
    batches = job.tokens.batches(job.n_tokens, config.batch, done)
    uncommitted = 0
    with progress_bar(job.label, job.n_tokens, done=done, enabled=progress) as advance:
        for batch in stream(job.model, job.sites, batches, [statistics]):
            if writer is not None:
                writer.take(batch, statistics)
            done += batch.n_tokens
            uncommitted += batch.n_tokens
            if uncommitted >= job.block or done == job.n_tokens:
                check_seen(statistics)  # where nothing in a whole block has an angle, nothing will
                if writer is not None:
                    writer.flush()
                write_whole(path, _saved(statistics, done, of))
                uncommitted = 0
            advance(batch.n_tokens)
    return statistics


def _measured_what(config: RunConfig, job: Job) -> str:
    """What statistics are of, so that those of another model or run are not gone on with."""
    known = [job.about[key] for key in ("weights_sha256", "data_sha256", "packing", "dtype")]
    drawn = [config.null, config.null_every, config.seed]
    return json.dumps([*known, job.n_tokens, [site.key for site in job.sites], *drawn])


def _saved(statistics: AngleStatistics, done: int, of: str) -> bytes:
    """The file of the statistics of so many tokens."""
    state, tokens_done = statistics.state_dict(), str(done)
    return safetensors.torch.save(state, {"tokens_done": tokens_done, "sha256": _checksum(state, tokens_done, of)})


def _checksum(state: Mapping[str, Tensor], tokens_done: str, of: str) -> str:
    digest = hashlib.sha256(json.dumps([of, tokens_done]).encode())
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()


def _restore(path: Path, statistics: AngleStatistics, of: str) -> int:
    """Load the committed statistics, if any, and say of how many tokens they are."""
    if not path.is_file():
        return 0
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        done = int(about["tokens_done"])
        if about["sha256"] != _checksum(state, about["tokens_done"], of):
            raise ValueError("its checksum is wrong")
        statistics.load_state_dict(state)
    except (safetensors.SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise unreadable(path, error, "start again in another directory") from error
    return done


def _plan(config: RunConfig, job: Job, done: int) -> str:
    """One line: what will be measured, and what that will cost from now on."""
    disk = bytes_needed(job.sites, job.n_tokens, job.block) if job.keep and not done else 0
    left = f", of which {done:,} are done," if done else ""
    return (
        f"{job.label}: {len(job.sites)} norms, before and after, {job.n_tokens:,} tokens{left} of {job.tokens.source} "
        f"in contexts of {job.tokens.context}, {config.null} random directions, {job.about['dtype']} on "
        f"{job.about['device']}; {cost(job.model, job.n_tokens - done, job.tokens.context, config.batch, disk)}"
    )
