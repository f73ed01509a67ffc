"""What a training run leaves on the disk: whole directories, or none.

state-00000500/              training.safetensors: parameters, AdamW's moments, the curve; state.json: the rest
checkpoints/step-00001000/   the model as `load_model` takes it, with its tokenizer and training.json

A directory is written under another name and renamed; a state is removed when a later one is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors
import safetensors.torch
from torch import Tensor, nn

from normgeo.errors import RunError
from normgeo.system.files import file_digest, unreadable
from normgeo.system.folders import remove, whole_directory
from normgeo.system.records import parsed

__all__ = [
    "AFRESH", "check_weights", "checkpoint_path", "evaluated", "latest_state", "load_state", "named",
    "save_state", "step_of", "tensors_of", "weights_in",
]  # fmt: skip

AFRESH = "remove it, and the run starts from its beginning"


def _states(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("state-*") if re.fullmatch(r"state-\d+", p.name))


def latest_state(folder: Path) -> Path | None:
    """The state to resume from."""
    return next(reversed(_states(folder)), None)


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write the state after a step, then remove earlier ones.

    Raises:
        RunError: the disk is full; the last state is intact.
    """
    out = folder / f"state-{step:08}"
    with whole_directory(out, replace=True) as scratch:
        safetensors.torch.save_file(tensors, scratch / "training.safetensors")
        whole = {"step": step, "sha256": file_digest(scratch / "training.safetensors")} | about
        (scratch / "state.json").write_text(json.dumps(whole) + "\n")
    for earlier in _states(folder):
        if earlier != out:
            remove(earlier)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the scalars of a state.

    Raises:
        RunError: it is damaged.
    """
    content = path / "training.safetensors"
    try:
        about = dict(parsed((path / "state.json").read_text()))
        if about["sha256"] != file_digest(content):
            raise RunError(f"{path} is damaged: {content.name} is not what was written; {AFRESH}")
        return safetensors.torch.load_file(content), about
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise unreadable(path, error, AFRESH) from error


def step_of(state: Path) -> int:
    """The step that a state is of, by its name."""
    return int(state.name.removeprefix("state-"))


def named(state: Path) -> str:
    """A state's name, with what tells it from another of that name.

    Raises:
        RunError: it is damaged.
    """
    try:
        return f"{state.name} ({file_digest(state / 'state.json')[:8]})"
    except OSError as error:
        raise unreadable(state, error, AFRESH) from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What a state and a checkpoint have of a model, by name: its parameters, and buffers that are no constants.

    That is not its `state_dict`, in which training forms go by the names of the model that they train as.
    """
    lasting = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) in lasting}
    return {**dict(model.named_parameters()), **buffers}


def evaluated(curve: pd.DataFrame, every: int) -> pd.DataFrame:
    """What a checkpoint says of a curve, a row per evaluation: the mean training loss since the one before."""
    group = (curve.step - 1) // every
    last = {name: curve.groupby(group)[name].last() for name in ("step", "lr", "held_out_loss")}
    return pd.DataFrame({"train_loss": curve.groupby(group).train_loss.mean()} | last)


def weights_in(folder: Path) -> str:
    """sha256 of the weights in a checkpoint; of several files, of theirs in the order of their names."""
    digests = [file_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint of a training whose weights are not those that were written.

    Raises:
        RunError: they are others.
    """
    try:
        written = parsed((folder / "training.json").read_text()).get("model_sha256")
    except (OSError, ValueError, AttributeError):  # of another training
        return
    if written is not None and written != weights_in(folder):
        raise RunError(f"{folder} is damaged: its weights are not those that were written; leave it out (move it away)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the model after a step is kept."""
    return folder / "checkpoints" / f"step-{step:08}"
