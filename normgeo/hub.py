"""What the hub is asked for beside models: the names of their revisions, and text.

Text is streamed: what *Geometry* trains on (OpenWebText, appendix A.2) and measures on (Wikipedia).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from normgeo.errors import DataError, ModelError

__all__ = ["HUB", "check_hub", "name_of", "opened", "revisions", "texts", "unreachable"]

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


def revisions(repository: str) -> list[str]:
    """The names of a model's branches and tags on the hub; offline (`HF_HUB_OFFLINE`) of those in its cache.

    Raises:
        ModelError: there is no such repository, or it cannot be asked for.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    if huggingface_hub.is_offline_mode():
        return _in_the_cache(repository)
    try:
        refs = huggingface_hub.HfApi().list_repo_refs(repository)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no directory {repository!r}, and the hub has no model of that name, or none that you may read "
            "without logging in (`hf auth login`)"
        ) from error
    except Exception as error:  # whatever the hub, its client or the connection raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".")
        raise ModelError(
            f"there is no directory {repository!r}, and the hub cannot be asked for its revisions: {why}. Without a "
            "network, download them before and set HF_HUB_OFFLINE=1"
        ) from error
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))


def _in_the_cache(repository: str) -> list[str]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    found = [name for r in repositories if (r.repo_id, r.repo_type) == (repository, "model") for name in r.refs]
    if not found:
        raise ModelError(
            f"there is no directory {repository!r}, and the hub's cache has no revision of such a model, which is all "
            "that there is offline"
        )
    return found
