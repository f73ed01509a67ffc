"""Whole numbers that users give: tokens, directions, seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from normgeo.errors import DataError

__all__ = ["LEAST", "check_numbers"]

LEAST = {"d": 1, "tokens": 1, "context": 1, "batch": 1, "null": 0, "null_every": 1, "seed": 0, "rounds": 0}
MOST = 2**62
"""Above, numbers of tokens are none of the machine's any more."""


def check_numbers(**numbers: Any) -> None:
    """Refuse what is no whole number, or too small or too large, by its name in `LEAST`; None is the default.

    Raises:
        DataError: which one it is, and what it must be.
    """
    for name, value in numbers.items():
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise DataError(f"{option} must be a whole number, received {value!r}")
        if value < LEAST[name]:
            raise DataError(f"{option} must be at least {LEAST[name]}, received {value}")
        if value > MOST:
            raise DataError(f"{option} must be at most {MOST}, received {value}")
