"""`normgeo angles --checkpoints`: the angles of every checkpoint of a training (*Geometry* section 3.3).

run.json                  what is measured on what
parts/<model>-<step>.parquet    one per checkpoint that is done; what a resumed run does not do again
angles.parquet            all of them, with a column `step`
figures/                  angles by step, of every layer and of the middle one, and a map of layers by steps
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from normgeo import figures, training_figures
from normgeo.angles import measure_angles
from normgeo.errors import ModelError, RunError
from normgeo.models import load_model, load_tokenizer, max_context, pick_dtype, usable_device
from normgeo.runs import RunConfig, safe_name
from normgeo.tokens import load_tokens
from normgeo.training_state import whole_directory, write_json

__all__ = ["Checkpoint", "draw", "find_checkpoints", "measure_checkpoints", "resume_checkpoints", "start_checkpoints"]

STEP = re.compile(r"(?:step|checkpoint|global_step)[-_]?(\d+)")
DEFAULT_TOKENS = 1_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A model after so many steps of training, and the name of what is trained."""

    model: str
    step: int
    path: Path


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints below a directory: those of `normgeo train`, or any directories named step-N or checkpoint-N.

    Raises:
        ModelError: there are none, or two have one name and one step.
    """
    found = []
    for config in sorted(folder.rglob("config.json")):
        path = config.parent
        number = STEP.fullmatch(path.name)
        if number and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            home = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            found.append(Checkpoint(home.resolve().name, int(number[1]), path))
    if not found:
        raise ModelError(f"no checkpoints in {folder}: directories named step-N or checkpoint-N with a config.json")
    taken: dict[tuple[str, int], Path] = {}
    for point in found:
        if other := taken.get((point.model, point.step)):
            raise ModelError(f"{point.path} and {other} have the same name and step; measure them apart")
        taken[point.model, point.step] = point.path
    return sorted(found, key=lambda point: (point.model, point.step))


def default_out(folder: Path) -> Path:
    """`runs/<folder>-checkpoints-<date>`, with a number behind it where that is taken."""
    stem = Path("runs") / f"{folder.resolve().name}-checkpoints-{datetime.date.today()}"
    numbers = (stem.with_name(f"{stem.name}-{n}") if n > 1 else stem for n in itertools.count(1))
    return next(path for path in numbers if not path.exists())


def start_checkpoints(folder: Path, config: RunConfig, out: Path, **options: Any) -> pd.DataFrame:
    """Measure every checkpoint in a new directory; see `measure_checkpoints`.

    Raises:
        RunError: the directory holds something, or the disk is full.
        NormGeoError: whatever is wrong with a model or the data.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists already; give another --out, or --resume {out}")
    points = find_checkpoints(folder)
    out.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in asdict(config).items() if k != "models"}
    record = {"checkpoints": str(folder), "config": kept, "status": "running"}
    write_json(out / "run.json", record)
    return _finish(points, config, out, record, **options)


def resume_checkpoints(out: Path, **options: Any) -> pd.DataFrame | None:
    """Finish what `start_checkpoints` began in a directory; None where it began something else.

    Raises:
        RunError: it is complete.
    """
    try:
        record = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        return None
    if "checkpoints" not in record:
        return None
    if record["status"] == "complete":
        raise RunError(f"the run in {out} is complete; its table is {out / 'angles.parquet'}")
    points = find_checkpoints(Path(record["checkpoints"]))
    return _finish(points, RunConfig(**record["config"]), out, record, **options)


def _finish(
    points: list[Checkpoint], config: RunConfig, out: Path, record: dict[str, Any], **options: Any
) -> pd.DataFrame:
    frame = measure_checkpoints(points, config, out / "parts", **options)
    with whole_directory(out / "figures") as scratch:
        draw(frame, scratch)
    scratch = out / ".angles.parquet.partial"
    frame.to_parquet(scratch, index=False)
    scratch.replace(out / "angles.parquet")
    write_json(out / "run.json", record | {"status": "complete"})
    return frame


def measure_checkpoints(
    points: list[Checkpoint],
    config: RunConfig,
    parts: Path | None = None,
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
    """
    frames = []
    for number, point in enumerate(points, 1):
        part = None if parts is None else parts / f"{safe_name(point.model)}-{point.step:08}.parquet"
        if part is not None and part.is_file():
            frames.append(pd.read_parquet(part))
            continue
        announce(f"{point.model}, step {point.step:,} ({number} of {len(points)})")
        frames.append(_measured(point, config, progress))
        if part is not None:
            part.parent.mkdir(parents=True, exist_ok=True)
            scratch = part.with_name(f".{part.name}.partial")
            frames[-1].to_parquet(scratch, index=False)
            scratch.replace(part)
    return pd.concat(frames, ignore_index=True)


def _measured(point: Checkpoint, config: RunConfig, progress: bool) -> pd.DataFrame:
    device = usable_device(config.device)
    model = load_model(
        point.path, dtype=pick_dtype(config.dtype, device), device=device, device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
    )  # fmt: skip
    is_ids = str(config.data).endswith(".npy")
    context = config.context or (None if is_ids else min(1024, max_context(model) or 1024))
    tokenizer = load_tokenizer(point.path, trust_remote_code=config.trust_remote_code)
    tokens = load_tokens(config.data or "wikipedia", tokenizer, context)
    wanted = config.tokens or (DEFAULT_TOKENS if config.data in (None, "wikipedia") else None)
    table = measure_angles(
        model, tokens, n_tokens=wanted, batch=config.batch, null=config.null, null_every=config.null_every,
        seed=config.seed, sites=config.sites, name=point.model, progress=progress,
    )  # fmt: skip
    table.frame.insert(1, "step", point.step)
    return table.frame


def draw(frame: pd.DataFrame, folder: Path) -> None:
    """Every figure of the angles by step, as .png and .svg."""
    layers = sorted(frame[~frame.role.isin(training_figures.SINGLE)].layer.unique())
    middle = int(layers[len(layers) // 2])
    figures.save(training_figures.one_layer(frame, middle), folder / f"by-step-layer-{middle}")
    for direction in figures.COLORS:
        figures.save(training_figures.all_layers(frame, direction), folder / f"by-step-{direction}")
    figures.save(training_figures.heat_map(frame), folder / "layers-by-steps")
