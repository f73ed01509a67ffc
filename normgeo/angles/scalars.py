"""Per-token scalars in zarr: norms and angles, for any mask chosen afterwards.

Layout of `scalars.zarr/<model>` (zarr v3, opened by zarr, xarray and dask alike):

    tokens/id, tokens/document, tokens/position     [token]
    sites/<key>/pre, sites/<key>/post               [vector, quantity], float32
    sites/<key>/standardized                        the same, for LayerNorm

A site's vectors are its tokens in order (times its heads for a norm on heads). The quantities are the norm and, in
degrees, how far the vector's angles to the run's directions are short of a right angle, 90 - theta: the very numbers
that the statistics have added up. Those of the uniform vector are left out for standardized vectors, where they are
zero; RMSNorm's standardized vectors have the angles of its input. theta is resolved to 1e-5 degrees, near a direction
as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from jaxtyping import Float
from torch import Tensor

from normgeo.angles.statistics import PHASES, AngleStatistics, standardized_norm
from normgeo.errors import RunError
from normgeo.geometry import NAMES, Directions
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

__all__ = ["ScalarStore", "ScalarWriter", "bytes_needed"]

QUANTITIES = ("norm", *NAMES)


def bytes_needed(sites: Sequence[NormSite], n_tokens: int, block: int) -> int:
    """Size in bytes of the scalars of `n_tokens` tokens in whole chunks of `block` tokens."""
    n_tokens = -(-n_tokens // block) * block
    return n_tokens * (3 * 8 + sum(4 * len(_quantities(p)) * site.heads for site in sites for p in _phases(site.kind)))


def _phases(kind: str) -> tuple[str, ...]:
    """The phases that are kept."""
    return PHASES if kind == "layernorm" else ("pre", "post")


def _quantities(phase: str) -> tuple[str, ...]:
    return tuple(q for q in QUANTITIES if phase != "standardized" or q != "uniform")


def _on_cpu(rows: list[Tensor]) -> list[Tensor]:
    """The same in the computer's memory, from a device at once: every copy is waited for."""
    if all(row.is_cpu for row in rows):
        return rows
    flat = torch.cat([row.flatten() for row in rows]).cpu()
    return [part.view_as(row) for part, row in zip(flat.split([row.numel() for row in rows]), rows, strict=True)]


class ScalarWriter:
    """Collects the scalars of a block of tokens and writes them as whole chunks.

    A block that was written but not committed by the caller is written again, with the same content, on resume.
    """

    def __init__(self, path: Path, sites: Sequence[NormSite], n_tokens: int, block: int) -> None:
        self.path, self.sites, self.n_tokens, self.block = path, list(sites), n_tokens, block
        self._kept = [(i, p) for i, site in enumerate(self.sites) for p in _phases(site.kind)]
        self._parts: list[tuple[TokenBatch, list[Tensor]]] = []
        self._arrays: dict[str, zarr.Array] = {}

    def create(self, directions: dict[int, Directions]) -> None:
        """Make the empty store."""
        zarr.open_group(self.path.parent, mode="a")  # several models' groups lie side by side in one store
        norms = {str(d): torch.linalg.vector_norm(v.named, dim=1).tolist() for d, v in directions.items()}
        attributes = {"quantities": list(QUANTITIES), "random_norms": norms}
        root = zarr.create_group(self.path, overwrite=True, attributes=attributes)
        for name in ("id", "document", "position"):
            root.create_array(f"tokens/{name}", shape=(self.n_tokens,), chunks=(self.block,), dtype="int64",
                              compressors=None, dimension_names=("token",))  # fmt: skip
        for i, phase in self._kept:
            site, quantities = self.sites[i], _quantities(phase)
            root.create_array(
                f"sites/{site.key}/{phase}", shape=(self.n_tokens * site.heads, len(quantities)),
                chunks=(self.block * site.heads, len(quantities)), dtype="float32", fill_value=float("nan"),
                compressors=None, dimension_names=("vector", "quantity"),
                attributes={**asdict(site), "quantities": list(quantities)},
            )  # fmt: skip

    def take(self, batch: TokenBatch, statistics: AngleStatistics) -> None:
        """Keep the norms and angles of the batch that has just gone through the statistics."""
        rows = []
        for i, phase in self._kept:
            norm, degrees = statistics.scalars[i, phase]
            rows.append(torch.stack([norm, *degrees[phase == "standardized" :]], 1))
        self._parts.append((batch, _on_cpu(rows)))

    def flush(self) -> None:
        """Write what was collected since the last flush.

        Raises:
            OSError: the disk is full.
        """
        if not self._parts:
            return
        if not self._arrays:
            root = zarr.open_group(self.path, mode="r+")
            names = [f"tokens/{n}" for n in ("id", "document", "position")]
            names += [f"sites/{self.sites[i].key}/{p}" for i, p in self._kept]
            self._arrays = {name: root[name] for name in names}  # pyright: ignore
        batches = [batch for batch, _ in self._parts]
        start = batches[0].start
        for name, values in (
            ("id", [b.ids for b in batches]),
            ("document", [b.document for b in batches]),
            ("position", [b.position for b in batches]),
        ):
            self._write(f"tokens/{name}", start, np.concatenate([v.ravel() for v in values]))
        for row, (i, phase) in enumerate(self._kept):
            block = torch.cat([rows[row] for _, rows in self._parts]).numpy()
            self._write(f"sites/{self.sites[i].key}/{phase}", start * self.sites[i].heads, block)
        self._parts.clear()

    def _write(self, name: str, start: int, values: np.ndarray) -> None:
        self._arrays[name][start : start + len(values)] = values


class ScalarStore:
    """Reads a `scalars.zarr/<model>`.

    >>> store = ScalarStore(path)                                        # doctest: +SKIP
    >>> late = store.position > 8                                        # doctest: +SKIP
    >>> store.angles("transformer.h.0.ln_1", "pre", "uniform")[late]     # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.root = zarr.open_group(path, mode="r", zarr_format=3)
            self.id, self.document, self.position = (self._token(n) for n in ("id", "document", "position"))
        except (FileNotFoundError, KeyError, OSError) as error:
            models = sorted(p.parent.name for p in Path(path).glob("*/tokens"))
            hint = f"; give that of a model in it: {', '.join(models)}" if models else f": {error}"
            raise RunError(f"{path} holds no model's scalars{hint}") from error
        groups = self.root["sites"]
        self.sites: list[str] = sorted(
            name.removesuffix("/pre") for name in self._leaves(groups) if name.endswith("/pre")
        )

    def _token(self, name: str) -> np.ndarray:
        return np.asarray(self.root[f"tokens/{name}"][:])  # pyright: ignore

    @staticmethod
    def _leaves(group: Any) -> list[str]:
        return [name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]

    def _array(self, site: str, phase: str) -> zarr.Array:
        if phase not in PHASES:
            raise RunError(f"no phase {phase!r}; a site has {', '.join(PHASES)}")
        try:
            about = self.root[f"sites/{site}/pre"].attrs
            kept = phase if phase in _phases(str(about["kind"])) else "pre"
            return self.root[f"sites/{site}/{kept}"]  # pyright: ignore
        except KeyError as error:
            raise RunError(f"no site {site!r} in this store; it has {', '.join(self.sites)}") from error

    def norms(self, site: str, phase: str = "pre") -> Float[np.ndarray, " vectors"]:
        """Norm of every vector of a site: pre, standardized or post."""
        array = self._array(site, phase)
        norm = np.asarray(array[:, 0])
        if phase == "standardized" and array.attrs["kind"] != "layernorm":
            eps = torch.tensor(float(array.attrs["eps"]))  # pyright: ignore
            return standardized_norm(torch.from_numpy(norm), int(array.attrs["d"]), eps).numpy()  # pyright: ignore
        return norm

    def angles(self, site: str, phase: str, direction: str) -> Float[np.ndarray, " vectors"]:
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
        block, quantities = np.asarray(array[:]), list(array.attrs["quantities"])  # pyright: ignore
        valid = (block[:, 0] > 0) & np.isfinite(block.sum(1))
        column = quantities.index(direction) if direction in quantities else None
        short_of = np.zeros(len(block)) if column is None else block[:, column].astype(np.float64)
        return np.where(valid, 90.0 - short_of, np.nan)
