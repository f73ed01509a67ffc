"""Text on the hub, streamed: what *Geometry* trains on (OpenWebText, appendix A.2) and measures on (Wikipedia)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from normgeo.errors import DataError

__all__ = ["HUB", "check_hub", "name_of", "opened", "texts", "unreachable"]

HUB = {"openwebtext": ("Skylion007/openwebtext",), "wikipedia": ("wikimedia/wikipedia", "20231101.en")}
"""Repositories, and which of their data sets, by the names that `--data` takes; text is in the column "text"."""

PATIENCE = 10.0
"""Seconds to wait for the hub before it is called out of reach."""


def name_of(data: str) -> str:
    """What a data set in `HUB` is told from others by."""
    return "@".join(HUB[data])


def check_hub(data: str) -> None:
    """Ask the hub once for a data set in `HUB`, before anything else is done: clients retry for a minute.

    Raises:
        DataError: the hub or the data set cannot be reached.
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(HUB[data][0], timeout=PATIENCE)
    except Exception as error:  # whatever the hub, its client or the connection raises
        raise unreachable(data, error) from error


def opened(data: str) -> Any:
    """The rows of a data set in `HUB`, as `datasets` streams them.

    Raises:
        DataError: it cannot be reached.
    """
    import datasets

    check_hub(data)
    try:
        return datasets.load_dataset(*HUB[data], split="train", streaming=True)
    except Exception as error:  # whatever the hub, its client or the connection raises
        raise unreachable(data, error) from error


def texts(data: str) -> Iterator[str]:
    """The documents of a data set in `HUB`.

    Raises:
        DataError: it cannot be reached, or no longer.
    """
    rows = opened(data)
    try:
        for row in rows:
            yield row["text"]
    except Exception as error:  # whatever the hub, its client or the connection raises
        raise unreachable(data, error) from error


def unreachable(data: str, error: Exception) -> DataError:
    """What is said where the hub cannot be read, in one line."""
    why = f"{type(error).__name__}: {str(error)[:200].strip()}".rstrip(".")
    name = " ".join(HUB.get(data, (data,)))
    return DataError(f"could not stream {name}: {why}. Without a network, give --data a file of text, or --data sample")
