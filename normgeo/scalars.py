"""Per-token scalars in zarr: |x| and the dot products that every angle follows from, for any mask chosen afterwards.

Layout of a `scalars.zarr` (zarr v3, opened by zarr, xarray and dask alike):

    tokens/id, tokens/document, tokens/position     [token]
    sites/<key>/pre, sites/<key>/post               [vector, quantity], float32

A site's vectors are its tokens in order (times its heads for a norm on heads). The quantities are |x|, x.û, x.â and
x.b̂ with û = 1/sqrt(d), â, b̂ the unit vectors of the run's directions.
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

from normgeo.errors import RunError
from normgeo.geometry import NAMES, Directions
from normgeo.sites import NormSite
from normgeo.statistics import AngleStatistics, angles_from_scalars
from normgeo.tokens import TokenBatch

__all__ = ["ScalarStore", "ScalarWriter", "bytes_needed"]

QUANTITIES = ("norm", *NAMES)


def bytes_needed(sites: Sequence[NormSite], n_tokens: int, block: int) -> int:
    """Size in bytes of the scalars of `n_tokens` tokens in whole chunks of `block` tokens."""
    n_tokens = -(-n_tokens // block) * block
    return n_tokens * (3 * 8 + sum(2 * 4 * len(QUANTITIES) * site.heads for site in sites))


class ScalarWriter:
    """Collects the scalars of a block of tokens and writes them as whole chunks.

    A block that was written but not committed by the caller is written again, with the same content, on resume.
    """

    def __init__(self, path: Path, sites: Sequence[NormSite], n_tokens: int, block: int) -> None:
        self.path, self.sites, self.n_tokens, self.block = path, list(sites), n_tokens, block
        self._parts: list[tuple[TokenBatch, list[tuple[Tensor, Tensor]]]] = []
        self._arrays: dict[str, zarr.Array] = {}

    def create(self, directions: dict[int, Directions]) -> None:
        """Make the empty store."""
        zarr.open_group(self.path.parent, mode="a")  # several models' groups lie side by side in one store
        root = zarr.create_group(self.path, overwrite=True)
        root.attrs["quantities"] = list(QUANTITIES)
        root.attrs["random_norms"] = {str(d): torch.linalg.vector_norm(v.named, dim=1).tolist()
                                      for d, v in directions.items()}  # fmt: skip
        for name in ("id", "document", "position"):
            root.create_array(f"tokens/{name}", shape=(self.n_tokens,), chunks=(self.block,), dtype="int64",
                              compressors=None, dimension_names=("token",))  # fmt: skip
        for site in self.sites:
            gram = (directions[site.d].units @ directions[site.d].units[0]).tolist()
            for phase in ("pre", "post"):
                array = root.create_array(
                    f"sites/{site.key}/{phase}", shape=(self.n_tokens * site.heads, len(QUANTITIES)),
                    chunks=(self.block * site.heads, len(QUANTITIES)), dtype="float32", fill_value=float("nan"),
                    compressors=None, dimension_names=("vector", "quantity"),
                )  # fmt: skip
                array.attrs.update({**asdict(site), "gram": gram})

    def take(self, batch: TokenBatch, statistics: AngleStatistics) -> None:
        """Keep a copy of the projections of the batch that has just gone through the statistics."""
        scalars = statistics.scalars
        rows = [(scalars[i, "pre"].cpu(), scalars[i, "post"].cpu()) for i in range(len(self.sites))]
        self._parts.append((batch, rows))

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
            names += [f"sites/{s.key}/{p}" for s in self.sites for p in ("pre", "post")]
            self._arrays = {name: root[name] for name in names}  # pyright: ignore
        batches = [batch for batch, _ in self._parts]
        start = batches[0].start
        for name, values in (
            ("id", [b.ids for b in batches]),
            ("document", [b.document for b in batches]),
            ("position", [b.position for b in batches]),
        ):
            self._write(f"tokens/{name}", start, np.concatenate([v.ravel() for v in values]))
        for i, site in enumerate(self.sites):
            for p, phase in enumerate(("pre", "post")):
                block = torch.cat([rows[i][p] for _, rows in self._parts]).float().numpy()
                self._write(f"sites/{site.key}/{phase}", start * site.heads, block)
        self._parts.clear()

    def _write(self, name: str, start: int, values: np.ndarray) -> None:
        self._arrays[name][start : start + len(values)] = values


class ScalarStore:
    """Reads a `scalars.zarr`.

    >>> store = ScalarStore(path)                                        # doctest: +SKIP
    >>> late = store.position > 8                                        # doctest: +SKIP
    >>> store.angles("transformer.h.0.ln_1", "pre", "uniform")[late]     # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.root = zarr.open_group(path, mode="r")
            self.id, self.document, self.position = (self._token(n) for n in ("id", "document", "position"))
        except (FileNotFoundError, KeyError, OSError) as error:
            raise RunError(f"{path} is not a scalars.zarr: {error}") from error
        groups = self.root["sites"]
        self.sites: list[str] = sorted(
            name.removesuffix("/pre") for name in self._leaves(groups) if name.endswith("/pre")
        )

    def _token(self, name: str) -> np.ndarray:
        return np.asarray(self.root[f"tokens/{name}"][:])  # pyright: ignore

    @staticmethod
    def _leaves(group: Any) -> list[str]:
        return [name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]

    def _block(self, site: str, phase: str) -> tuple[Tensor, dict]:
        source = "post" if phase == "post" else "pre"
        try:
            array = self.root[f"sites/{site}/{source}"]
        except KeyError as error:
            raise RunError(f"no site {site!r} in this store; it has {', '.join(self.sites)}") from error
        return torch.from_numpy(np.asarray(array[:])), dict(array.attrs)  # pyright: ignore

    def norms(self, site: str, phase: str = "pre") -> Float[np.ndarray, " vectors"]:
        """|x| of every vector of a site, pre or post."""
        return self._block(site, phase)[0][:, 0].numpy()

    def angles(self, site: str, phase: str, direction: str) -> Float[np.ndarray, " vectors"]:
        """Angle in degrees of every vector of a site to a direction; NaN where it was excluded.

        Args:
            site: key of the site.
            phase: pre, standardized or post.
            direction: uniform, random_a or random_b.
        """
        block, about = self._block(site, phase)
        gram = torch.tensor(about["gram"], dtype=block.dtype)
        deviation, norm = angles_from_scalars(block[:, 0], block[:, 1:], about["kind"], phase, gram)
        valid = (norm > 0) & torch.isfinite(norm) & torch.isfinite(deviation).all(-1)
        degrees = 90.0 - deviation[:, NAMES.index(direction)].double()
        return torch.where(valid, degrees, torch.nan).numpy()
