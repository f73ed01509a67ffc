"""Whole numbers that users give: tokens, directions, seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from normgeo.errors import DataError

__all__ = ["LEAST", "check_number", "check_numbers"]

LEAST = {"d": 1, "tokens": 1, "context": 1, "batch": 1, "null": 0, "null_every": 1, "seed": 0, "rounds": 0}
MOST = 2**62
"""Above, numbers of tokens are none of the machine's any more."""


def check_number(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Refuse what is no whole number from `least` to `most`.

    Raises:
        DataError: which option it is, and what it must be.
    """
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DataError(f"{option} must be a whole number, received {value!r}")
    if not least <= value <= most:
        bound = f"least {least}" if value < least else f"most {most}"
        raise DataError(f"{option} must be at {bound}, received {value}")


def check_numbers(**numbers: Any) -> None:
    """Check numbers that mean the same everywhere, by their names in `LEAST`; None is the default.

    Raises:
        DataError: which one it is, and what it must be.
    """
    for name, value in numbers.items():
        if value is not None:
            check_number(name, value, LEAST[name])
