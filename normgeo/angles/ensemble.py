"""The null ensemble: mean angle, spread and energy of every one of K random directions, on a part of the tokens.

The chosen rows of several sites are collected, scaled to unit length, until a few megabytes are full: then one product
with all directions gives their cosines, and one pass the moments of the angles. Memory does not grow with the tokens or
the sites. For LayerNorm the rows are collected without their mean, c = x - (x.û)û, of which the cosines of the
standardized vectors follow directly, even where little is left, and those of x by x.v = c.v + (x.û)(û.v).

Rows of bfloat16 are multiplied where they lie, by processors that can (unless a mean is taken from them) and by GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normgeo import kernels
from normgeo.geometry import Directions
from normgeo.kernels import ENERGY_UNIT, UNIT
from normgeo.kernels.ensemble import packed
from normgeo.models import OfAllThreads
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

__all__ = ["DEGREES", "NullEnsemble"]

DEGREES = 180 / torch.pi
COLLECTED = 1 << 21  # elements: with fewer, preparing the directions takes longer than multiplying
ON_A_DEVICE = 1 << 24  # on other devices, where each product is launched and waited for
FOUND = 64  # sites whose moments wait, in parts, to be added up together
FEWEST = 32  # rows a thread: with fewer, sums are in another order, and depend on which rows wait together
NARROWEST = 16  # directions: with fewer the order may depend on a row's place among the others
PHASES_OF = {("pre", False): [[0, 1]], ("post", False): [[2]], ("pre", True): [[0], [1]]}
"""By phase, and whether the mean is taken away: the phases that the vectors' angles belong to, and, where it is, those
of what is left."""

STATE = ("null_count", "null_deviation", "null_square", "null_energy")


@dataclass
class _Chunk:
    """Rows of unit length [rows, d] that wait to be multiplied: equally many for each site, and room for so many sites.

    Some rows may be spare, so that every product has enough of them.
    """

    rows: Tensor
    room: int
    scalars: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    phases: list[list[list[int]]] = field(default_factory=list)


class NullEnsemble:
    """Sums over every `every`-th token; which tokens is a matter of their indices alone.

    Args:
        sites: the sites.
        directions: for each width among the sites, the directions.
        home: where the sums live.
        every: one token in so many.
    """

    def __init__(
        self, sites: Sequence[NormSite], directions: dict[int, Directions], home: torch.device, every: int
    ) -> None:
        self.sites, self.directions, self.home, self.every = sites, directions, home, every
        self.k = min(len(d.ensemble) for d in directions.values())
        self.count = torch.zeros((len(sites), 3), dtype=torch.float64, device=home)
        self.sums = torch.zeros((len(sites), 3, 3, self.k + 1), dtype=torch.float64, device=home)
        units = torch.tensor([[DEGREES * UNIT], [DEGREES**2 * UNIT], [ENERGY_UNIT]], dtype=torch.float64)
        self._units = units.to(home)
        self._on: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._chunks: dict[tuple, _Chunk] = {}
        self._packed: dict[tuple[int, bool, torch.device], Any] = {}
        self._found: list[tuple[int, list[list[int]], Tensor]] = []
        self._rows: dict[tuple, Sequence[Tensor]] = {}
        self._at: dict[tuple, Tensor] = {}
        self._n_tokens = 0

    @property
    def state(self) -> dict[str, Tensor]:
        """The sums by name: count [sites, phases]; angle, square and energy of û and K directions, in whole units."""
        return dict(zip(STATE, (self.count, *self.sums.unbind(2)), strict=True))

    def begin(self, batch: TokenBatch) -> None:
        """Choose tokens of the batch by a hash of their index, which favors no position in a context."""
        index = batch.start + np.arange(batch.n_tokens, dtype=np.uint64)
        chosen = (_mixed(index) >> np.uint64(32)) * np.uint64(self.every) < np.uint64(1 << 32)
        self._chosen, self._n_tokens = torch.from_numpy(chosen).nonzero()[:, 0], batch.n_tokens
        for waiting in (self._rows, self._found, self._chunks):  # of a batch that was broken off, too
            waiting.clear()

    def rows(self, vectors: int, device: torch.device) -> Tensor:
        """Indices of the chosen among a site's vectors."""
        key = (vectors, device)
        if key not in self._rows:
            heads = vectors // self._n_tokens
            rows = (self._chosen[:, None] * heads + torch.arange(heads, device="cpu")).flatten()
            self._rows[key] = [rows.to(device, non_blocking=device.type == "cuda")]
        return self._rows[key][0]

    def take(self, site: int, phase: str, hidden: Float[Tensor, "vectors d"], scalars: Tensor) -> None:
        """Collect the chosen rows of a site; `scalars` are what `kernels.project` gave for all of them."""
        d, device = hidden.shape[1], hidden.device
        centered = phase == "pre" and self.sites[site].kind == "layernorm"
        if hidden.dtype is torch.bfloat16:
            if (of := (d, centered, device)) not in self._packed:
                self._packed[of] = packed(self.directions[d].ensemble[: self.k], device, centered=centered)
            if (ensemble := self._packed[of]) is not None:
                found = ensemble.moments(hidden, self.rows(hidden.shape[0], device), scalars)
                self._found.append((site, PHASES_OF[phase, centered], found.to(self.home)))
                if len(self._found) == FOUND:
                    self._add_found()
                return
        for index in self._pieces(hidden.shape[0], d, device):
            n = len(index)
            key = (d, n, centered, device)
            if key not in self._chunks:
                slots = max(1, COLLECTED // (n * d) if device.type == "cpu" else ON_A_DEVICE // (n * max(d, self.k)))
                rows = torch.empty((max(slots * n, _fewest(device)), d), dtype=torch.float32, device=device)
                self._chunks[key] = _Chunk(rows, slots)
            chunk = self._chunks[key]
            at = len(chunk.sites) * n
            kernels.gather(hidden, index, scalars, centered=centered, out=chunk.rows[at : at + n])
            chunk.sites.append(site)
            chunk.phases.append(PHASES_OF[phase, centered])
            if centered:
                chunk.scalars.append(scalars.index_select(1, index))
            if len(chunk.sites) == chunk.room:
                self._multiply(key)

    def _pieces(self, vectors: int, d: int, device: torch.device) -> Sequence[Tensor]:
        """The chosen rows, in equal parts no larger than what is collected."""
        key = (vectors, d, device)
        if key not in self._rows:
            rows = self.rows(vectors, device)
            parts = -(-len(rows) * d // COLLECTED)
            self._rows[key] = rows.tensor_split(parts) if parts else []
        return self._rows[key]

    def end(self) -> None:
        """Multiply what is still waiting."""
        self._add_found()
        for key in list(self._chunks):
            self._multiply(key)
        self._chunks.clear()  # the next batch has another number of chosen tokens

    def uniform(self, sites: Tensor, phases: Sequence[int], degrees: Tensor, sines: Tensor, valid: Tensor) -> None:
        """Add the uniform vector's own angles, on the same tokens.

        Args:
            sites: indices of the sites.
            phases: which have these angles.
            degrees: [sites, vectors] whole 2^-20 of 90 - theta.
            sines: [sites, vectors] cos(theta).
            valid: [sites, vectors] which have an angle.
        """
        rows = self.rows(degrees.shape[1], self.home)
        degrees, sines, valid = (t.index_select(1, rows) for t in (degrees.double(), sines, valid))
        values = [degrees * UNIT, (degrees * degrees * UNIT).round_(), (sines * sines * ENERGY_UNIT).round_()]
        sums = torch.stack(values, 1).masked_fill_(~valid[:, None], 0.0).sum(2)
        count = valid.sum(1).double()
        for p in phases:
            self.count[:, p].index_add_(0, sites, count)
            self.sums[:, p, :, 0].index_add_(0, sites, sums)

    def _multiply(self, key: tuple) -> None:
        chunk, (d, n, centered, device) = self._chunks[key], key
        slots = len(chunk.sites)
        if not slots:
            return
        null, gram = self._directions(d, device)
        used = slots * n
        at_least = max(used, _fewest(device))
        chunk.rows[used:at_least] = 0
        with WHOLE_FLOAT32, torch.autocast(device.type, enabled=False):  # which callers may be under
            cosines = (chunk.rows[:at_least] @ null)[:used, : self.k]
        moments = kernels.moments(cosines.view(slots, -1, self.k))
        self._add(chunk.sites, moments, [phases[-1] for phases in chunk.phases])
        if centered:
            whole, along, left = (torch.cat([s[q] for s in chunk.scalars]) for q in (0, 1, 4))
            some = (whole > 0) & torch.isfinite(whole)
            share, along = (torch.where(some, q / whole, 0.0).to(cosines.dtype) for q in (left, along))
            cosines.mul_(share[:, None]).addr_(along, gram)
            moments = kernels.moments(cosines.view(slots, -1, self.k))
            self._add(chunk.sites, moments, [phases[0] for phases in chunk.phases])
        for waiting in (chunk.sites, chunk.phases, chunk.scalars):
            waiting.clear()

    def _add_found(self) -> None:
        """Add the moments that were found where rows lie; devices have them in as many parts as suits each."""
        for shape in {found.shape for *_, found in self._found}:
            sites, phases, found = zip(*(each for each in self._found if each[2].shape == shape), strict=True)
            for i, moments in enumerate(torch.stack(found).sum(1).split(3, 1)):
                self._add(sites, moments, [of[i] for of in phases])
        self._found.clear()

    def _add(self, sites: Sequence[int], moments: Tensor, phases: Sequence[Sequence[int]]) -> None:
        """Add the moments [slots, 3, K] of these sites to these phases of theirs."""
        sums = moments.to(self.home).double().mul_(self._units).round_()
        pairs = [(slot, 3 * site + p) for slot, site in enumerate(sites) for p in phases[slot]]
        if (at := self._at.get(tuple(pairs))) is None:  # the same in every batch; copying it to a device waits
            at = self._at[tuple(pairs)] = torch.tensor(pairs, device=self.home).T
        slot, where = at
        self.sums.view(-1, 3, self.k + 1)[..., 1:].index_add_(0, where, sums.index_select(0, slot))

    def _directions(self, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ensemble's directions [d, K], with zeros beside them where they are few, and their products with û."""
        if (d, device) not in self._on:
            null, uniform = self.directions[d].null[: self.k], self.directions[d].units[0]
            wide = torch.nn.functional.pad(null.T, (0, max(0, NARROWEST - self.k)))
            self._on[d, device] = tuple(t.to(device, torch.float32).contiguous() for t in (wide, null @ uniform))  # pyright: ignore
        return self._on[d, device]


def _mixed(index: np.ndarray) -> np.ndarray:
    """64 bits that tell nothing of the index they are of (the last steps of SplitMix64), of 0 zero.

    With anything simpler some lengths of contexts would have positions that are never chosen.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        index = (index ^ (index >> np.uint64(shift))) * np.uint64(factor)
    return index


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Products of float32 are of all its bits, whatever the user (TF32, bfloat16) lets the model's be."""
    settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyright: ignore
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


WHOLE_FLOAT32 = OfAllThreads(_whole_float32)


def _fewest(device: torch.device) -> int:
    """Rows under which a row's product depends on how many there are."""
    return FEWEST * torch.get_num_threads() if device.type == "cpu" else 0
