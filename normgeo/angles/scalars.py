"""Per-token scalars in zarr: norms and angles, for any mask chosen afterwards.

Layout of `scalars.zarr/<model>` (zarr v3, opened by zarr, xarray and dask alike):

    tokens/id, tokens/document, tokens/position     [token]
    sites/<key>/pre, sites/<key>/post               [vector, quantity], float32
    sites/<key>/standardized                        the same, for LayerNorm

Chunks are plain numbers and their crc32c, by which whoever reads one sees that it is what was written; those of earlier
versions have none.

A site's vectors are its tokens in order (times its heads for a norm on heads). The quantities are the norm and, in
degrees, how far the vector's angles to the run's directions are short of a right angle, 90 - theta: the very numbers
that the statistics have added up. Those of the uniform vector are left out for standardized vectors, where they are
zero; RMSNorm's standardized vectors have the angles of its input. theta is resolved to 1e-5 degrees, near a direction
as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from jaxtyping import Float
from torch import Tensor
from zarr.codecs import Crc32cCodec

from normgeo.angles.statistics import PHASES, AngleStatistics, standardized_norm
from normgeo.errors import RunError
from normgeo.geometry import NAMES, Directions
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

__all__ = ["Rows", "ScalarStore", "ScalarWriter", "bytes_needed", "scalar_rows", "together"]

QUANTITIES = ("norm", *NAMES)
TOKENS = {"tokens/id": "ids", "tokens/document": "document", "tokens/position": "position"}
"""What is kept of tokens, and what a batch calls it."""

CHECKED = [Crc32cCodec()]
CHECKSUM = 4  # bytes of it a chunk

WHOLE: Any = {"write_empty_chunks": True}
"""Chunks of which all is zero or NaN are written as others are, so that one that is not there is missing."""

RESTORE = "put it back, or measure again with --keep scalars"
AGAIN = "put it back, or start again in another directory"
DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What zarr raises where its metadata is missing or damaged."""

Rows = dict[tuple[int, str], Tensor]
"""By a site's index and the phase: norms and angles, [vectors, quantities]."""


def bytes_needed(sites: Sequence[NormSite], n_tokens: int, block: int) -> int:
    """Size in bytes of the scalars of `n_tokens` tokens in whole chunks of `block` tokens."""
    blocks, kept = -(-n_tokens // block), _kept(sites)
    numbers = len(TOKENS) * 8 + sum(4 * len(_quantities(phase)) * sites[i].heads for i, phase in kept)
    return blocks * (block * numbers + CHECKSUM * (len(TOKENS) + len(kept)))


def _phases(kind: str) -> tuple[str, ...]:
    """The phases that are kept."""
    return PHASES if kind == "layernorm" else ("pre", "post")


def _kept(sites: Sequence[NormSite]) -> list[tuple[int, str]]:
    return [(i, phase) for i, site in enumerate(sites) for phase in _phases(site.kind)]


def _quantities(phase: str) -> tuple[str, ...]:
    return tuple(q for q in QUANTITIES if phase != "standardized" or q != "uniform")


def _on_cpu(rows: list[Tensor]) -> list[Tensor]:
    """The same in the computer's memory, from a device at once: every copy is waited for."""
    if all(row.is_cpu for row in rows):
        return rows
    flat = torch.cat([row.flatten() for row in rows]).cpu()
    return [part.view_as(row) for part, row in zip(flat.split([row.numel() for row in rows]), rows, strict=True)]


def scalar_rows(statistics: AngleStatistics) -> Rows:
    """Norms and angles of the batch that has just gone through the statistics, in the computer's memory."""
    kept, rows = _kept(statistics.sites), []
    for i, phase in kept:
        norm, degrees = statistics.scalars[i, phase]
        rows.append(torch.stack([norm, *degrees[phase == "standardized" :]], 1))
    return dict(zip(kept, _on_cpu(rows), strict=True))


def together(parts: Sequence[Rows]) -> Rows:
    """The rows of several batches, one behind the other."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


class ScalarWriter:
    """Collects the scalars of a block of tokens and writes them as whole chunks.

    A block that was written but not committed by the caller is written again, with the same content, on resume.
    """

    def __init__(self, path: Path, sites: Sequence[NormSite], n_tokens: int, block: int) -> None:
        self.path, self.sites, self.n_tokens, self.block = path, list(sites), n_tokens, block
        self._batches: list[TokenBatch] = []
        self._rows = defaultdict[tuple[int, str], list[Tensor]](list)
        self._root: zarr.Group | None = None
        self._arrays: dict[str, zarr.Array] = {}

    def create(self, directions: dict[int, Directions]) -> None:
        """Make the empty store."""
        if self.path.parent.suffix == ".zarr":  # several models' groups lie side by side in one store
            zarr.open_group(self.path.parent, mode="a")
        norms = {str(d): torch.linalg.vector_norm(v.named, dim=1).tolist() for d, v in directions.items()}
        sites = [site.key for site in self.sites]
        attributes = {"quantities": list(QUANTITIES), "random_norms": norms, "sites": sites}
        root = zarr.create_group(self.path, overwrite=True, attributes=attributes)
        for name in TOKENS:
            self._arrays[name] = root.create_array(
                name, shape=(self.n_tokens,), chunks=(self.block,), dtype="int64", compressors=CHECKED,
                dimension_names=("token",), config=WHOLE,
            )  # fmt: skip
        for i, phase in _kept(self.sites):
            site, quantities = self.sites[i], _quantities(phase)
            name = f"sites/{site.key}/{phase}"
            self._arrays[name] = root.create_array(
                name, shape=(self.n_tokens * site.heads, len(quantities)),
                chunks=(self.block * site.heads, len(quantities)), dtype="float32", fill_value=float("nan"),
                compressors=CHECKED, dimension_names=("vector", "quantity"), config=WHOLE,
                attributes={**asdict(site), "quantities": list(quantities)},
            )  # fmt: skip

    def check(self, done: Sequence[tuple[int, int]]) -> None:
        """See that all of these tokens is there, by its length, before others are measured and written beside them.

        Chunks that zarr was writing when it was killed, beside their names, are removed.

        Raises:
            RunError: it is not, or what says how it lies is damaged.
        """
        for left in self.path.rglob("*.partial"):
            left.unlink(missing_ok=True)
        of_sites = (f"sites/{self.sites[i].key}/{phase}" for i, phase in _kept(self.sites))
        ends = dict.fromkeys(TOKENS, "") | dict.fromkeys(of_sites, "/0")
        rows = sorted({row for start, stop in done for row in range(start // self.block, -(-stop // self.block))})
        for name, end in ends.items():
            about, *chunks = (self.path / name / file for file in ("zarr.json", *(f"c/{row}{end}" for row in rows)))
            if absent := [file for file in (about, *chunks) if not file.is_file()]:
                n_done = sum(stop - start for start, stop in done)
                raise RunError(f"{absent[0]} is missing, of {n_done:,} tokens that were measured; {AGAIN}")
            try:
                array = self._array(name)
            except DAMAGED as error:
                raise RunError(f"{self.path / name} is damaged ({error}); {AGAIN}") from error
            whole = math.prod(array.chunks) * array.dtype.itemsize + CHECKSUM * len(array.compressors)
            if cut := [file for file in chunks if file.stat().st_size != whole]:  # as a power cut may leave them
                found = cut[0].stat().st_size
                raise RunError(f"{cut[0]} is damaged: it has {found:,} bytes instead of {whole:,}; {AGAIN}")

    def take(self, batch: TokenBatch, statistics: AngleStatistics) -> None:
        """Keep the norms and angles of the batch that has just gone through the statistics."""
        self.put([batch], scalar_rows(statistics))

    def put(self, batches: Sequence[TokenBatch], rows: Rows, first: int = 0) -> None:
        """Keep the scalars of batches that follow each other.

        Args:
            batches: what the rows are of; none where rows of other sites come with them.
            rows: as `scalar_rows` gives them.
            first: which of the writer's sites is theirs of index 0.
        """
        self._batches += batches
        for (i, phase), block in rows.items():
            self._rows[first + i, phase].append(block)

    @property
    def is_full(self) -> bool:
        """Whether a whole block was collected."""
        return sum(batch.n_tokens for batch in self._batches) >= self.block

    def flush(self) -> None:
        """Write what was collected since the last flush.

        Raises:
            OSError: the disk is full.
        """
        if not self._batches:
            return
        batches, start = self._batches, self._batches[0].start
        for name, attribute in TOKENS.items():
            self._write(name, start, np.concatenate([getattr(batch, attribute).ravel() for batch in batches]))
        for (i, phase), blocks in self._rows.items():
            site = self.sites[i]
            self._write(f"sites/{site.key}/{phase}", start * site.heads, torch.cat(blocks).numpy())
        self._batches.clear()
        self._rows.clear()

    def _write(self, name: str, start: int, values: np.ndarray) -> None:
        self._array(name)[start : start + len(values)] = values

    def _array(self, name: str) -> zarr.Array:
        if name not in self._arrays:
            self._root = self._root or zarr.open_group(self.path, mode="r+")
            with zarr.config.set({f"array.{option}": value for option, value in WHOLE.items()}):
                self._arrays[name] = self._root[name]  # pyright: ignore
        return self._arrays[name]


class ScalarStore:
    """Reads a `scalars.zarr/<model>`.

    Attributes:
        sites: the sites' keys, in the order of the forward pass.
        id, document, position: of every token.

    >>> store = ScalarStore(path)                                        # doctest: +SKIP
    >>> late = store.position > 8                                        # doctest: +SKIP
    >>> store.angles("transformer.h.0.ln_1", "pre", "uniform")[late]     # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = Path(path)
            self.root = zarr.open_group(path, mode="r", zarr_format=3)
            self.id, self.document, self.position = (self._read(self.root[name]) for name in TOKENS)  # pyright: ignore
            self.sites: list[str] = list(self.root.attrs["sites"])  # pyright: ignore
        except DAMAGED as error:
            models = sorted(p.parent.name for p in Path(path).glob("*/tokens"))
            hint = f"; give that of a model in it: {', '.join(models)}" if models else f": {error}"
            raise RunError(f"{path} holds no model's scalars{hint}") from error

    def _read(self, array: zarr.Array) -> np.ndarray:
        """All of an array. A chunk that is not there would be read as NaN, or as zeros.

        Raises:
            RunError: it is not whole.
        """
        if (there := array.nchunks_initialized) < array.nchunks:
            raise RunError(
                f"{self.path}, {array.path}: {array.nchunks - there} of {array.nchunks} chunks are missing; {RESTORE}"
            )
        try:
            return np.asarray(array[:])
        except (ValueError, OSError, RuntimeError) as error:  # whatever zarr and its codecs raise
            raise RunError(f"{self.path}, {array.path} is damaged: {error}; {RESTORE}") from error

    def _array(self, site: str, phase: str) -> zarr.Array:
        if phase not in PHASES:
            raise RunError(f"no phase {phase!r}; a site has {', '.join(PHASES)}")
        try:
            about = self.root[f"sites/{site}/pre"].attrs
            kept = phase if phase in _phases(str(about["kind"])) else "pre"
            return self.root[f"sites/{site}/{kept}"]  # pyright: ignore
        except DAMAGED as error:
            if site in self.sites:
                raise RunError(f"{self.path}, sites/{site} is damaged: {error!r}; {RESTORE}") from error
            raise RunError(f"no site {site!r} in this store; it has {', '.join(self.sites)}") from error

    def norms(self, site: str, phase: str = "pre") -> Float[np.ndarray, " vectors"]:
        """Norm of every vector of a site: pre, standardized or post."""
        array = self._array(site, phase)
        norm = self._read(array)[:, 0]
        if phase == "standardized" and array.attrs["kind"] != "layernorm":
            eps = torch.tensor(float(array.attrs["eps"]), dtype=torch.float32, device="cpu")  # pyright: ignore
            return standardized_norm(torch.from_numpy(norm), int(array.attrs["d"]), eps).numpy()  # pyright: ignore
        return norm

    def angles(self, site: str, phase: str = "pre", direction: str = "uniform") -> Float[np.ndarray, " vectors"]:
        """Angle in degrees of every vector of a site to a direction; NaN where it was excluded.

        Args:
            site: key of the site.
            phase: pre, standardized or post.
            direction: uniform, random_a or random_b.

        Raises:
            RunError: there is no such site, phase or direction.
        """
        if direction not in NAMES:
            raise RunError(f"no direction {direction!r}; angles are kept to {', '.join(NAMES)}")
        array = self._array(site, phase)
        block, quantities = self._read(array), list(array.attrs["quantities"])  # pyright: ignore
        valid = (block[:, 0] > 0) & np.isfinite(block.sum(1))
        column = quantities.index(direction) if direction in quantities else None
        short_of = np.zeros(len(block)) if column is None else block[:, column].astype(np.float64)
        return np.where(valid, 90.0 - short_of, np.nan)
