r"""Online, mergeable statistics of angles.

For every site and phase, and for each named direction u, with theta = arccos(x.u / |x||u|) in degrees: count, mean,
standard deviation, extremes and a fine histogram of theta; the mean of cos^2 (the share of energy along u) and of |x|.
For a null ensemble of random directions the mean angle, its spread and the energy, on every n-th token.

Two properties make the results safe to merge and resume in any order. Per-token values are rounded to multiples of a
power of two (2^-20 degrees) before they are added in float64, so that sums are exact and addition is associative: the
same batches give the same sums to the last bit, however they are spread and merged. (Other batches give other roundings
in the projections: 1e-6 degrees.) And which tokens meet the null ensemble depends on the token's index alone.

The standardized vector y needs no pass of its own: for LayerNorm y is parallel to x_perp = x - (x.û)û (*Geometry* eq.
8-9), so that y.v = (x.v - (x.û)(û.v)) / |x_perp| up to scale; for RMSNorm it is parallel to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normgeo.geometry import Directions
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

__all__ = ["BIN_DEGREES", "GROUPS", "PHASES", "AngleStatistics", "angles_from_scalars", "project"]

PHASES = ("pre", "standardized", "post")
GROUPS = ("first", "bos", "rest")
"""Disjoint kinds of tokens: the first of a context, a BOS elsewhere, and all others."""

BIN_DEGREES = 0.01
BINS = round(180 / BIN_DEGREES)
UNIT = 2.0**20  # parts of a degree, of a squared degree and of a norm that sums are exact in
ENERGY_UNIT = 2.0**32
DEGREES = 180 / torch.pi


def project(x: Float[Tensor, "vectors d"], units: Float[Tensor, "three d"]) -> Float[Tensor, "vectors four"]:
    """(|x|, x.û, x.â, x.b̂) for each row, in float32 whatever the dtype of x (float64 for float64)."""
    x = x if x.dtype == torch.float64 else x.float()
    out = x.new_empty((4, x.shape[0]))  # one row a quantity: units @ x.T takes half the time of x @ units.T
    torch.linalg.vector_norm(x, dim=1, out=out[0])
    torch.mm(units.to(x.dtype), x.T, out=out[1:])
    return out.T


def angles_from_scalars(
    norm: Float[Tensor, "*shape"],
    dots: Float[Tensor, "*shape three"],
    kind: str,
    phase: str,
    gram: Float[Tensor, " three"],
) -> tuple[Float[Tensor, "*shape three"], Float[Tensor, "*shape"]]:
    """Degrees short of a right angle, 90 - theta, and the norm of the vector the angle is of.

    Args:
        norm: |x|, of the site's input (phases pre and standardized) or output (post).
        dots: x.û, x.â, x.b̂ of the same vectors.
        kind: the norm's kind.
        phase: pre, standardized or post.
        gram: û.û, û.â, û.b̂.
    """
    if phase == "standardized" and kind == "layernorm":
        along = dots[..., :1]
        dots = dots - along * gram
        # û lies in the null space of mean subtraction: what is left along it is rounding
        dots = dots * torch.tensor([0.0, 1.0, 1.0], dtype=dots.dtype, device=dots.device)
        norm = _left(norm, along[..., 0])
    return (dots / norm[..., None]).clamp_(-1.0, 1.0).asin_().rad2deg_(), norm


def _left(norm: Tensor, along: Tensor) -> Tensor:
    """|x_perp| from |x| and x.û; zero where all that is left is rounding, as for a vector of equal components."""
    left = norm.square() - along.square()
    resolved = left > 8 * torch.finfo(norm.dtype).eps * norm.square()
    return torch.where(resolved, left.clamp(min=0).sqrt(), torch.zeros_like(left))


class AngleStatistics:
    """A sink that keeps sums instead of vectors; its size does not depend on the number of tokens.

    Args:
        sites: the sites, in the order of the stream's indices.
        directions: for each width among the sites, the directions to measure to.
        device: where the accumulators live.
        bos: token id that counts as BOS.
        null_every: the null ensemble meets one token in so many, chosen by a hash of the token's index.
    """

    def __init__(
        self,
        sites: Sequence[NormSite],
        directions: dict[int, Directions],
        *,
        device: torch.device | str = "cpu",
        bos: int | None = None,
        null_every: int = 16,
    ) -> None:
        self.sites, self.directions, self.bos, self.null_every = list(sites), directions, bos, null_every
        self.home = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        n, k = len(self.sites), min(len(d.null) for d in directions.values())
        self.k = k
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=self.home)  # noqa: E731
        # what is added together lies together: one addition a group and phase, one a site for the null ensemble
        self._sums, self._null_sums = zeros(3, n, 3, 12), zeros(n, 3, 3, k + 1)
        self._null_units = torch.tensor([[DEGREES * UNIT], [DEGREES**2 * UNIT], [ENERGY_UNIT]], dtype=torch.float64)
        self._null_units = self._null_units.to(self.home)
        self.state: dict[str, Tensor] = {
            "count": self._sums[..., 0],
            "excluded": self._sums[..., 1],
            "norm": self._sums[..., 2],
            "deviation": self._sums[..., 3:6],
            "square": self._sums[..., 6:9],
            "energy": self._sums[..., 9:12],
            "least": torch.full((3, n, 3, 3), torch.inf, dtype=torch.float64, device=self.home),
            "most": torch.full((3, n, 3, 3), -torch.inf, dtype=torch.float64, device=self.home),
            "rotation": zeros(3, n),
            "rotation_square": zeros(3, n),
            "null_count": zeros(n, 3),
            "null_deviation": self._null_sums[:, :, 0],
            "null_square": self._null_sums[:, :, 1],
            "null_energy": self._null_sums[:, :, 2],
            "histogram": torch.zeros((n, 3, 3, BINS), dtype=torch.int64, device=self.home),
        }
        self._compiled: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}
        self._gram = {d: (v.units @ v.units[0]).to(self.home) for d, v in directions.items()}
        self._null_gram = {d: v.null @ v.units[0] for d, v in directions.items()}
        self.scalars: dict[tuple[int, str], Tensor] = {}

    # --- the stream's side -------------------------------------------------------------------------------------------

    def begin(self, batch: TokenBatch) -> None:
        """Decide which tokens of the batch belong to which group, and which meet the null ensemble."""
        group = np.full(batch.ids.shape, 2)
        if self.bos is not None:
            group[batch.ids == self.bos] = 1
        group[:, 0] = 0
        index = batch.start + np.arange(batch.n_tokens, dtype=np.uint64)
        chosen = (((index * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)) >> np.uint64(12)) % self.null_every == 0
        self._group, self._chosen = torch.from_numpy(group.ravel()), torch.from_numpy(chosen).nonzero()[:, 0]
        self._n_tokens = batch.n_tokens
        self._members: dict[int, list[Tensor]] = {}
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        self.scalars.clear()

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Float[Tensor, "vectors d"]) -> None:
        """Project the vectors onto the directions; the rest waits until the batch ends."""
        if hidden.shape[0] % self._n_tokens:
            raise ValueError(
                f"{self.sites[site].key} saw {hidden.shape[0]} vectors for {self._n_tokens} tokens; it is not called "
                "once for every token"
            )
        units, null, null_gram = self._on(hidden.shape[1], hidden)
        self.scalars[site, phase] = project(hidden, units)
        if self.k:
            self._take_null(site, phase, hidden, null, null_gram)

    def end(self) -> None:
        """Turn the batch's projections into angles and add them up."""
        for phase in ("pre", "post"):
            for alike in self._alike(phase):
                block = torch.stack([self.scalars[i, phase].T for i in alike]).to(self.home)
                self._add(alike, phase, block[:, 0], block[:, 1:].mT)
        # the scalars stay until the next batch begins, for whoever keeps them

    def _alike(self, phase: str) -> list[list[int]]:
        """Indices of the sites whose projections stack: same width, kind, number of vectors and device."""
        groups: dict[tuple, list[int]] = {}
        for (i, p), block in self.scalars.items():
            if p == phase:
                groups.setdefault((self.sites[i].d, self.sites[i].kind, len(block), block.device), []).append(i)
        return list(groups.values())

    def _on(self, d: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (d, like.device, dtype)
        if key not in self._compiled:
            directions = self.directions[d]
            null = torch.cat([directions.units[:1], directions.null])
            gram = torch.cat([torch.zeros(1, dtype=torch.float64), self._null_gram[d]])
            self._compiled[key] = tuple(t.to(like.device, dtype) for t in (directions.units, null, gram))  # pyright: ignore
        return self._compiled[key]

    # --- the named directions ----------------------------------------------------------------------------------------

    def _add(self, alike: list[int], phase: str, norm: Tensor, dots: Tensor) -> None:
        site = self.sites[alike[0]]
        gram = self._gram[site.d].to(norm.dtype)
        deviation, _ = angles_from_scalars(norm, dots, site.kind, phase, gram)
        if phase == "post":
            self._accumulate(alike, {2: norm}, deviation)
            return
        turns = site.kind == "layernorm"
        # where nothing is subtracted the angles of the standardized vector are the input's
        standard, length = (
            angles_from_scalars(norm, dots, site.kind, "standardized", gram) if turns else (deviation, norm)
        )
        eps = torch.tensor([self.sites[i].eps for i in alike], dtype=length.dtype, device=length.device)[:, None]
        scaled = length * torch.rsqrt(length.square() / site.d + eps)
        scaled = torch.where(length > 0, scaled, length)
        if turns:
            self._accumulate(alike, {0: norm}, deviation, turns=True)
            self._accumulate(alike, {1: scaled}, standard)
        else:
            self._accumulate(alike, {0: norm, 1: scaled}, deviation)

    def _group_members(self, vectors: int) -> list[Tensor]:
        if vectors not in self._members:
            group = self._group.repeat_interleave(vectors // self._n_tokens)
            self._members[vectors] = [(group == g).nonzero()[:, 0].to(self.home) for g in range(3)]
        return self._members[vectors]

    def _accumulate(self, alike: list[int], norms: dict[int, Tensor], deviation: Tensor, turns: bool = False) -> None:
        """Add [sites, vectors, 3] deviations from the right angle, in degrees, and [sites, vectors] norms.

        Args:
            alike: indices of the sites.
            norms: for each phase that has these angles, the norms of its vectors.
            deviation: 90 - theta; an angle is bounded, so that a sum of angles is finite when all of them are.
            turns: add up the angle between x and y too, arcsin(|x.û| / |x|), which is |deviation| from û.
        """
        first, p = next(iter(norms.values())), len(norms)
        valid = (first > 0) & torch.isfinite(first + deviation.sum(-1))
        all_valid = bool(valid.all())
        # rows: a norm for each phase, deviation, square and energy of three directions each, |deviation| from û
        block = first.new_empty((len(alike), p + 9 + turns, first.shape[1]))
        for row, norm in enumerate(norms.values()):
            torch.mul(norm if all_valid else norm.where(valid, 0.0), UNIT, out=block[:, row]).round_()
        deviation = deviation.mT if all_valid else deviation.mT.where(valid[:, None], 0.0)
        units = torch.mul(deviation, UNIT, out=block[:, p : p + 3]).round_()
        torch.mul(units, units, out=block[:, p + 3 : p + 6]).mul_(1 / UNIT).round_()
        rounded = torch.mul(units, 1 / UNIT)
        energy = torch.mul(rounded, 1 / DEGREES, out=block[:, p + 6 : p + 9])
        energy.sin_().square_().mul_(ENERGY_UNIT).round_()
        if turns:
            torch.abs(units[:, 0], out=block[:, -1])
        low = high = units
        if not all_valid:
            low, high = (units.masked_fill(~valid[:, None], edge) for edge in (torch.inf, -torch.inf))
        self._fill(alike, list(norms), rounded, None if all_valid else valid)
        self._add_groups(alike, list(norms), block, low, high, valid)

    def _add_groups(
        self, alike: list[int], phases: list[int], block: Tensor, low: Tensor, high: Tensor, valid: Tensor
    ) -> None:
        """Reduce over the tokens of each group: the small ones are gathered, then blotted out for the largest."""
        members, where = self._group_members(block.shape[2]), torch.tensor(alike, device=self.home)
        *small, big = sorted(range(3), key=lambda g: len(members[g]))
        small = [g for g in small if len(members[g])]
        reduced = {}
        for g in small:
            part, least, most, seen = (t.index_select(-1, members[g]) for t in (block, low, high, valid))
            reduced[g] = least.amin(-1), most.amax(-1), seen.sum(-1), part.sum(-1, dtype=torch.float64)
        others = torch.cat([members[g] for g in small]) if small else members[big][:0]
        for edge in (low, high):
            edge.index_copy_(2, others, edge[..., members[big][:1]].expand(-1, -1, len(others)))
        least, most = low.amin(-1), high.amax(-1)
        block.index_fill_(2, others, 0.0)
        valid.index_fill_(1, others, False)
        reduced[big] = least, most, valid.sum(-1), block.sum(-1, dtype=torch.float64)
        p = len(phases)
        for g, (least, most, seen, sums) in reduced.items():
            seen = seen[:, None].double()
            counts = torch.cat([seen, len(members[g]) - seen], 1)
            for row, phase in enumerate(phases):
                found = torch.cat([counts, sums[:, row : row + 1], sums[:, p : p + 9]], 1)
                self._sums[g, :, phase].index_add_(0, where, found)
                for name, edge, keep in (("least", least, torch.minimum), ("most", most, torch.maximum)):
                    kept = self.state[name][g, :, phase]
                    kept[where] = keep(kept[where], edge.double())
            if sums.shape[1] > p + 9:
                self.state["rotation"][g].index_add_(0, where, sums[:, -1])
                self.state["rotation_square"][g].index_add_(0, where, sums[:, p + 3])

    def _fill(self, alike: list[int], phases: list[int], degrees: Tensor, valid: Tensor | None) -> None:
        bins = degrees.neg_().add_(90.0).mul_(1 / BIN_DEGREES).clamp_(0, BINS - 1).to(torch.int64)
        site = torch.tensor(alike, device=self.home)[:, None, None]
        flat = bins.add_((site * 9 + torch.arange(3, device=self.home)[:, None]) * BINS)
        flat = flat.flatten() if valid is None else flat[valid[:, None].expand_as(flat)]
        once = torch.ones_like(flat)
        for phase in phases:
            self.state["histogram"].view(-1)[phase * 3 * BINS :].index_add_(0, flat, once)

    # --- the null ensemble -------------------------------------------------------------------------------------------

    def _take_null(self, site: int, phase: str, hidden: Tensor, null: Tensor, gram: Tensor) -> None:
        key = (hidden.shape[0], hidden.device)
        if key not in self._rows:
            heads = hidden.shape[0] // self._n_tokens
            rows = (self._chosen[:, None] * heads + torch.arange(heads)).flatten()
            self._rows[key] = rows.to(hidden.device)
        rows = self._rows[key]
        if len(rows) == 0:
            return
        dots = null @ hidden.index_select(0, rows).to(null.dtype).T
        norm = self.scalars[site, phase][:, 0].index_select(0, rows)
        if dots.device.type != self.home.type:  # MPS has no float64
            dots, norm, gram = dots.to(self.home), norm.to(self.home), gram.to(self.home)
        turns = self.sites[site].kind == "layernorm"
        if phase == "pre" and turns:
            rest = torch.addr(dots, gram, dots[0], alpha=-1)
            rest[0] = 0.0
            self._add_null(site, [1], rest, _left(norm, dots[0]))
        self._add_null(site, [2] if phase == "post" else [0] if turns else [0, 1], dots, norm)

    def _add_null(self, site: int, phases: list[int], dots: Tensor, norm: Tensor) -> None:
        """Add [k + 1, vectors] dot products, which are overwritten, of vectors with these norms."""
        valid = (norm > 0) & torch.isfinite(norm)
        cosine = dots.div_(norm).masked_fill_(~valid, 0.0).clamp_(-1.0, 1.0)
        moments = cosine.new_empty((3, *cosine.shape))
        deviation = torch.asin(cosine, out=moments[0])
        torch.mul(deviation, deviation, out=moments[1])
        torch.mul(cosine, cosine, out=moments[2])
        sums = moments.sum(2, dtype=torch.float64).to(self.home).mul_(self._null_units).round_()
        count = valid.sum().to(self.home)
        for p in phases:
            self._null_sums[site, p] += sums
            self.state["null_count"][site, p] += count

    # --- merging and resuming ----------------------------------------------------------------------------------------

    def merge(self, other: AngleStatistics) -> None:
        """Add what another instance has seen of other tokens at the same sites."""
        for name, mine in self.state.items():
            theirs = other.state[name].to(self.home)
            if name in ("least", "most"):
                mine.copy_(torch.minimum(mine, theirs) if name == "least" else torch.maximum(mine, theirs))
            else:
                mine += theirs

    def state_dict(self) -> dict[str, Tensor]:
        """Everything accumulated so far, on the CPU, the histogram as its non-empty bins."""
        out = {
            name: value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in self.state.items()
            if name != "histogram"
        }
        flat = self.state["histogram"].view(-1).cpu()
        out["histogram_bins"] = flat.nonzero()[:, 0]
        out["histogram_counts"] = flat[out["histogram_bins"]]
        return out

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Continue from a `state_dict`."""
        for name, value in self.state.items():
            if name != "histogram":
                value.copy_(saved[name])
        flat = self.state["histogram"].view(-1).zero_()
        flat[saved["histogram_bins"].to(self.home)] = saved["histogram_counts"].to(self.home)
