"""What the hub is asked for beside models: the names of their revisions, and text.

Text is streamed: what *Geometry* trains on (OpenWebText, appendix A.2) and measures on (Wikipedia), and any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from normgeo.errors import DataError, ModelError, said

__all__ = ["FORM", "HUB", "LARGE", "HubText", "opened", "revisions", "texts", "unreachable"]

HUB = {"openwebtext": "Skylion007/openwebtext", "wikipedia": "wikimedia/wikipedia@20231101.en"}
"""The data sets that `--data` takes by a name of their own."""

FORM = "ORG/NAME[@CONFIGURATION[@SPLIT]][:COLUMN]"
"""How any other is named."""

NAMED = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<configuration>[\w.-]+)(@(?P<split>[\w.-]+))?)?(:(?P<column>[^/]+))?"
)

LARGE = frozenset(HUB.values())
"""The names of those, which have more tokens than a run takes where nobody says how many."""

PATIENCE = 10.0
"""Seconds to wait for the hub before it is called out of reach."""


@dataclass(frozen=True)
class HubText:
    """Text in a data set on the hub.

    Attributes:
        repository: ORG/NAME.
        configuration: which of its data sets; None where it has one.
        split: which part of that.
        column: of its rows the one that is text.
        revision: the commit to read; None is what it is at when it is opened.
    """

    repository: str
    configuration: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None

    @classmethod
    def named(cls, data: str) -> HubText | None:
        """What `--data` names in that form, or by a name of its own; None for what is in no such form.

        >>> HubText.named("allenai/c4@en@validation")
        HubText(repository='allenai/c4', configuration='en', split='validation', column='text', revision=None)
        """
        found = NAMED.fullmatch(HUB.get(data, data))
        return cls(**{key: value for key, value in found.groupdict().items() if value}) if found else None

    @property
    def name(self) -> str:
        """What it is told from others by.

        >>> HubText.named("wikipedia").name
        'wikimedia/wikipedia@20231101.en'
        """
        split = f"@{self.split}" * (self.split != "train")
        part = f"@{self.configuration or 'default'}{split}" if self.configuration or split else ""
        return f"{self.repository}{part}{f':{self.column}' * (self.column != 'text')}"

    def of(self, row: Any) -> str:
        """The text of a row; a missing one is empty.

        Raises:
            DataError: the rows have no such column, or it is no text.
        """
        if self.column not in row:
            raise DataError(
                f"{self.name} has no column {self.column!r}; its columns are {', '.join(map(str, row))}: give --data "
                f"{replace(self, column='').name}COLUMN"
            )
        text = row[self.column]
        if not isinstance(text, str | None):
            raise DataError(f"the column {self.column!r} of {self.name} should hold strings, received {text!r:.60}")
        return text or ""

    def pinned(self, revision: str | None = None) -> HubText:
        """The same at the commit that it is at now, or at another, so that what is read later is what is read first.

        That asks the hub once, before anything else is done: clients retry for a minute.

        Raises:
            DataError: it is not there, or the hub cannot be reached.
        """
        import huggingface_hub
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = huggingface_hub.HfApi().dataset_info(self.repository, revision=revision, timeout=PATIENCE)
            return replace(self, revision=info.sha)
        except RepositoryNotFoundError as error:
            raise DataError(
                f"there is no file {self.name!r}, and the hub has no data set {self.repository}, or none that you may "
                "read without logging in (`hf auth login`)"
            ) from error
        except Exception as error:  # whatever the hub, its client or the connection raises
            raise unreachable(self.name, error) from error


def opened(data: HubText) -> Any:
    """The rows of a data set on the hub, as `datasets` streams them.

    Raises:
        DataError: it has no such part, or cannot be reached.
    """
    import datasets

    of = (data.repository, data.configuration) if data.configuration else (data.repository,)
    try:
        return datasets.load_dataset(*of, split=data.split, revision=data.revision, streaming=True)
    except ValueError as error:  # no such configuration, or no such split, and which there are
        raise DataError(f"{data.name}: {' '.join(str(error).split())[:400]}; give --data {FORM}") from error
    except Exception as error:  # whatever the hub, its client or the connection raises
        raise unreachable(data.name, error) from error


def texts(data: HubText) -> Iterator[str]:
    """The documents of a data set on the hub.

    Raises:
        DataError: it cannot be reached, or no longer, or has no such column.
    """
    rows = opened(data)
    try:
        for row in rows:
            yield data.of(row)
    except DataError:
        raise
    except Exception as error:  # whatever the hub, its client or the connection raises
        raise unreachable(data.name, error) from error


def unreachable(name: str, error: Exception) -> DataError:
    """What is said where the hub cannot be read, in one line."""
    why = said(error).rstrip(".")
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
        why = said(error).rstrip(".")
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
