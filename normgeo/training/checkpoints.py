"""The checkpoints of a training: below a directory, or among the revisions of a repository of the hub."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normgeo.errors import ModelError
from normgeo.hub import revisions
from normgeo.loading import ADAPTER
from normgeo.system.listing import below

__all__ = ["Checkpoint", "find_checkpoints", "is_on_hub"]

STEP = re.compile(r"(?:step|checkpoint|global_step)[-_]?(\d+)")
REVISION = re.compile(rf"(?:.*[-_/])?{STEP.pattern}(?:[-_/].*)?")
"""Revisions tell more than the step: stage1-step1000-tokens3B."""


@dataclass(frozen=True)
class Checkpoint:
    """A model after so many steps of training, and the name of what is trained.

    Attributes:
        model: the name.
        step: how many steps.
        path: what it is loaded from: a directory, or a repository of the hub.
        revision: of the repository; a directory has none.
    """

    model: str
    step: int
    path: Path | str
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.revision is None:
            object.__setattr__(self, "path", Path(self.path))

    @property
    def described(self) -> dict[str, Any]:
        """What it is made of, as JSON holds it."""
        return asdict(self) | {"path": str(self.path)}

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
    if is_on_hub(where):
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


def is_on_hub(where: Path | str) -> bool:
    """Whether this names a repository of the hub, and no directory."""
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
    steps = dict(sorted(_steps_below(folder)))
    homes = {path: path.parent.parent if path.parent.name == "checkpoints" else path.parent for path in steps}
    names = _names(set(homes.values()), folder)
    found = [Checkpoint(names[homes[path]], step, path) for path, step in steps.items()]
    if not found:
        raise ModelError(f"no checkpoints in {folder}: directories named step-N or checkpoint-N with a config.json")
    return found


def _names(homes: set[Path], folder: Path) -> dict[Path, str]:
    """What the models in these directories are called."""
    short = {home: home.resolve().name for home in homes}
    several = {name for name in short.values() if list(short.values()).count(name) > 1}
    inside = {home: home.relative_to(folder).as_posix() if home.is_relative_to(folder) else "." for home in homes}
    return {home: inside[home] if name in several and inside[home] != "." else name for home, name in short.items()}


def _steps_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """The directories below this one that are named as steps and hold a config.json, each once.

    One that is called `latest` too goes by its step.
    """
    found = set[Path]()
    for path, files in below(folder, _warn_of_denied):
        if (step := STEP.fullmatch(path.name)) and (home := path.resolve()) not in found:
            found.add(home)
            if "config.json" in files:
                yield path, int(step[1])
            else:
                _warn_of_weights(path, files)


def _warn_of_weights(path: Path, files: list[str]) -> None:
    """Say that a directory without a config.json is left out, if one may take it for a checkpoint."""
    if any(file.endswith(".safetensors") for file in files):
        adapter = "an adapter that is not merged (merge_and_unload)"
        held = adapter if ADAPTER in files else "weights and no config.json"
        warnings.warn(f"{path} holds {held}: it is left out", stacklevel=2)


def _warn_of_denied(error: OSError) -> None:
    warnings.warn(f"cannot read {error.filename}: {error.strerror}; it is left out", stacklevel=2)
