r"""Online, mergeable statistics of angles.

For every site and phase, and for each named direction u, with theta = arccos(x.u / |x||u|) in degrees: count, mean,
standard deviation, extremes and a fine histogram of theta; the mean of cos^2 (the share of energy along u) and of |x|.
For a null ensemble of random directions the mean angle, its spread and the energy, on every n-th token.

Two properties make the results safe to split, merge and resume in any order. Per-token values are rounded to multiples
of a power of two (2^-20 degrees) before they are added in float64, so that sums are exact and addition is associative;
and which tokens meet the null ensemble depends on the token's index alone.

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


def project(x: Float[Tensor, "vectors d"], units: Float[Tensor, "three d"]) -> Float[Tensor, "vectors four"]:
    """(|x|, x.û, x.â, x.b̂) for each row, in float32 whatever the dtype of x (float64 for float64)."""
    x = x if x.dtype == torch.float64 else x.float()
    out = x.new_empty((x.shape[0], 4))
    torch.linalg.vector_norm(x, dim=1, out=out[:, 0])
    torch.mm(x, units.to(x.dtype).T, out=out[:, 1:])
    return out


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
    cosine = (dots / norm[..., None]).clamp(-1.0, 1.0)
    return torch.rad2deg(torch.asin(cosine)), norm


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
        null_every: int = 8,
    ) -> None:
        self.sites, self.directions, self.bos, self.null_every = list(sites), directions, bos, null_every
        self.home = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        n, k = len(self.sites), min(len(d.null) for d in directions.values())
        self.k = k
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=self.home)  # noqa: E731
        self.state: dict[str, Tensor] = {
            "count": zeros(3, n, 3),
            "excluded": zeros(3, n, 3),
            "norm": zeros(3, n, 3),
            "deviation": zeros(3, n, 3, 3),
            "square": zeros(3, n, 3, 3),
            "energy": zeros(3, n, 3, 3),
            "least": torch.full((3, n, 3, 3), torch.inf, dtype=torch.float64, device=self.home),
            "most": torch.full((3, n, 3, 3), -torch.inf, dtype=torch.float64, device=self.home),
            "rotation": zeros(3, n),
            "rotation_square": zeros(3, n),
            "null_count": zeros(n, 3),
            "null_deviation": zeros(n, 3, k + 1),
            "null_square": zeros(n, 3, k + 1),
            "null_energy": zeros(n, 3, k + 1),
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
                block = torch.stack([self.scalars[i, phase] for i in alike]).to(self.home)
                self._add(alike, phase, block[..., 0], block[..., 1:])
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
        members = self._group_members(norm.shape[1])
        self._accumulate(alike, PHASES.index(phase), *angles_from_scalars(norm, dots, site.kind, phase, gram), members)
        if phase == "pre":
            deviation, length = angles_from_scalars(norm, dots, site.kind, "standardized", gram)
            eps = torch.tensor([self.sites[i].eps for i in alike], dtype=length.dtype, device=length.device)[:, None]
            scaled = length * torch.rsqrt(length.square() / site.d + eps)
            self._accumulate(alike, 1, deviation, torch.where(length > 0, scaled, length), members)
            if site.kind == "layernorm":
                self._rotate(alike, norm, dots, members)

    def _group_members(self, vectors: int) -> list[Tensor]:
        if vectors not in self._members:
            group = self._group.repeat_interleave(vectors // self._n_tokens)
            self._members[vectors] = [(group == g).nonzero()[:, 0].to(self.home) for g in range(3)]
        return self._members[vectors]

    def _accumulate(self, alike: list[int], phase: int, deviation: Tensor, norm: Tensor, members: list[Tensor]) -> None:
        """Add [sites, vectors, 3] deviations from the right angle, in degrees, and [sites, vectors] norms."""
        s, where = self.state, torch.tensor(alike, device=self.home)
        valid = (norm > 0) & torch.isfinite(norm) & torch.isfinite(deviation).all(-1)
        all_valid = bool(valid.all())
        if not all_valid:
            deviation = torch.where(valid[..., None], deviation, torch.zeros_like(deviation))
            norm = torch.where(valid, norm, torch.zeros_like(norm))
        deviation = torch.round(deviation * UNIT)
        square = torch.round(deviation * deviation * (1 / UNIT))
        energy = torch.round(torch.sin(torch.deg2rad(deviation * (1 / UNIT))).square_() * ENERGY_UNIT)
        lengths = torch.round(norm * UNIT)
        self._fill(where, phase, deviation, valid, all_valid)
        for g, rows in enumerate(members):
            if len(rows) == 0:
                continue
            whole = len(rows) == norm.shape[1]
            pick = (lambda t: t) if whole else (lambda t, rows=rows: t.index_select(1, rows))
            n_valid = pick(valid).sum(1, dtype=torch.float64)
            s["count"][g, where, phase] += n_valid
            s["excluded"][g, where, phase] += len(rows) - n_valid
            s["norm"][g, where, phase] += pick(lengths).sum(1, dtype=torch.float64)
            chosen = pick(deviation)
            s["deviation"][g, where, phase] += chosen.sum(1, dtype=torch.float64)
            s["square"][g, where, phase] += pick(square).sum(1, dtype=torch.float64)
            s["energy"][g, where, phase] += pick(energy).sum(1, dtype=torch.float64)
            least, most = chosen, chosen
            if not all_valid:
                hole = ~pick(valid)[..., None]
                least, most = chosen.masked_fill(hole, torch.inf), chosen.masked_fill(hole, -torch.inf)
            s["least"][g, where, phase] = torch.minimum(s["least"][g, where, phase], least.amin(1).double())
            s["most"][g, where, phase] = torch.maximum(s["most"][g, where, phase], most.amax(1).double())

    def _fill(self, where: Tensor, phase: int, deviation: Tensor, valid: Tensor, all_valid: bool) -> None:
        bins = ((90.0 - deviation * (1 / UNIT)) * (1 / BIN_DEGREES)).clamp_(0, BINS - 1).to(torch.int64)
        row = ((where * 3 + phase) * 3)[:, None, None] + torch.arange(3, device=self.home)
        flat = row * BINS + bins
        flat = flat.flatten() if all_valid else flat[valid].flatten()
        self.state["histogram"].view(-1).index_add_(0, flat, torch.ones_like(flat))

    def _rotate(self, alike: list[int], norm: Tensor, dots: Tensor, members: list[Tensor]) -> None:
        """The angle between x and y: arcsin(|x.û| / |x|)."""
        where = torch.tensor(alike, device=self.home)
        turned = torch.rad2deg(torch.asin((dots[..., 0].abs() / norm).clamp(max=1.0)))
        turned = torch.round(torch.nan_to_num(turned, posinf=0.0) * UNIT)
        for g, rows in enumerate(members):
            part = turned.index_select(1, rows)
            self.state["rotation"][g, where] += part.sum(1, dtype=torch.float64)
            self.state["rotation_square"][g, where] += torch.round(part * part * (1 / UNIT)).sum(1, dtype=torch.float64)

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
        x = hidden.index_select(0, rows).to(null.dtype)
        dots, norm = x @ null.T, torch.linalg.vector_norm(x, dim=1, keepdim=True)
        self._add_null(site, PHASES.index(phase), dots, norm)
        if phase == "pre" and self.sites[site].kind == "layernorm":
            along = dots[:, :1]
            rest = dots - along * gram
            rest[:, 0] = 0.0
            self._add_null(site, 1, rest, _left(norm, along))

    def _add_null(self, site: int, phase: int, dots: Tensor, norm: Tensor) -> None:
        valid = (norm > 0) & torch.isfinite(norm)
        cosine = torch.where(valid, dots / norm, torch.zeros_like(dots)).clamp_(-1.0, 1.0)
        deviation = torch.asin(cosine)
        phases = [phase, 1] if phase == 0 and self.sites[site].kind == "rmsnorm" else [phase]
        degrees = 180 / torch.pi
        sums = {
            "null_count": valid.sum(),
            "null_deviation": torch.round(deviation.sum(0, dtype=torch.float64) * (degrees * UNIT)),
            "null_square": torch.round(deviation.square_().sum(0, dtype=torch.float64) * (degrees**2 * UNIT)),
            "null_energy": torch.round(cosine.square_().sum(0, dtype=torch.float64) * ENERGY_UNIT),
        }
        for name, value in sums.items():
            value = value.to(self.home)
            for p in phases:
                self.state[name][site, p] += value

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
        out = {name: value.cpu().clone() for name, value in self.state.items() if name != "histogram"}
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
