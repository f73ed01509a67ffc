"""Every step of a training in TensorBoard, for those who have it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from normgeo.errors import NormGeoError

__all__ = ["Log", "check_tensorboard", "tensorboard"]

Log = Callable[[int, dict[str, float]], None]
"""Takes the step that was just made and its row of the learning curve."""


def check_tensorboard() -> None:
    """Refuse before anything is trained.

    Raises:
        NormGeoError: TensorBoard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise NormGeoError(
            "no TensorBoard is installed: pip install 'normgeo[tensorboard]', or leave out --tensorboard"
        )


@contextmanager
def tensorboard(folder: Path) -> Iterator[Log]:
    """A log into a directory for `tensorboard --logdir`; what a resumed run does again replaces what was there.

    Raises:
        NormGeoError: TensorBoard is not installed.
    """
    check_tensorboard()
    from torch.utils.tensorboard.writer import SummaryWriter

    writer: SummaryWriter | None = None

    def log(step: int, row: dict[str, float]) -> None:
        nonlocal writer
        if writer is None:
            writer = SummaryWriter(str(folder), purge_step=step)
        for name, value in row.items():
            if not math.isnan(value):
                writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        if writer is not None:
            writer.close()
