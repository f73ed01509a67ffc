r"""Online, mergeable statistics of angles.

For every site and phase, and for each named direction u, with theta = arccos(x.u / |x||u|) in degrees: count, mean,
standard deviation, extremes and a fine histogram of theta; the mean of cos^2 (the share of energy along u) and of |x|.
For a null ensemble of random directions the mean angle, its spread and the energy, on every n-th token.

Angles are computed in float64 from projections summed in float64, whatever the dtype of the hidden states, and so are
as exact near a direction as far from it. Each is kept as float32 and as a whole number of 2^-20 degrees short of a
right angle: sums of those in float64 are exact and addition is associative, so that the same batches give the same sums
to the last bit, however they are spread and merged. So that this holds for billions of tokens too, what is over 2^50 is
carried to a second number. And which tokens meet the null ensemble depends on the token's index alone.

The standardized vector y needs no pass of its own: for LayerNorm y is parallel to x_perp = x - (x.û)û (*Geometry* eq.
8-9), so that y.v = (x.v - (x.û)(û.v)) / |x_perp| up to scale; for RMSNorm it is parallel to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normgeo import kernels
from normgeo.angles.ensemble import DEGREES, NullEnsemble
from normgeo.errors import ModelError
from normgeo.geometry import Directions
from normgeo.kernels import BINS, ENERGY_UNIT, UNIT, Histogram
from normgeo.sites import NormSite
from normgeo.tokens import TokenBatch

__all__ = ["BINS", "BIN_DEGREES", "ENERGY_UNIT", "GROUPS", "PHASES", "UNIT", "AngleStatistics", "standardized_norm"]

PHASES = ("pre", "standardized", "post")
GROUPS = ("first", "bos", "rest")
"""Disjoint kinds of tokens: the first of a context, a BOS elsewhere, and all others."""

BIN_DEGREES = 180 / BINS
CARRY = 2.0**51


@dataclass
class _Pool:
    """Projections of sites that are alike, [sites, quantities, vectors], as `kernels.project` gives them."""

    scalars: Tensor
    sites: list[int] = field(default_factory=list)


def _degrees(cosines: Tensor) -> Tensor:
    """90 - theta as float32 and in whole 2^-20 degrees."""
    return torch.asin(cosines).mul_(DEGREES * UNIT).round_().mul_(1 / UNIT).float()


def settle(low: Tensor, carried: Tensor) -> None:
    """Carry in place until -CARRY / 2 <= low < CARRY / 2; low + CARRY * carried stays the same whole number."""
    over = torch.floor(low / CARRY + 0.5)
    low.sub_(over, alpha=CARRY)
    carried.add_(over)


def standardized_norm(
    length: Float[Tensor, "*shape"], d: int, eps: Float[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """|y| of a norm's input of this length (for LayerNorm, its length without the mean); zero for a zero vector.

    In float64: of float32 squares of large lengths are infinite, and the vectors would be nothing.
    """
    wide = length.double()
    root = torch.sqrt((wide.square() / d + eps).clamp_(min=torch.finfo(wide.dtype).tiny))
    return (wide / root).to(length.dtype)


class AngleStatistics:
    """A sink that keeps sums instead of vectors; its size does not depend on the number of tokens.

    Args:
        sites: the sites, in the order of the stream's indices.
        directions: for each width among the sites, the directions to measure to.
        device: where the accumulators live.
        bos: token id that counts as BOS.
        null_every: the null ensemble meets one token in so many, chosen by a hash of the token's index.

    Attributes:
        state: the sums, extremes and counts of angles by name.
        carried: what was over in the sums, in multiples of CARRY.
        scalars: after a batch, for each site and phase the norms [vectors] and angles [3, vectors], in degrees short of
            a right angle; not for the standardized vectors of RMSNorm, whose angles are the input's.
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
        self.sites, self.directions, self.bos = list(sites), directions, bos
        self.home = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        self.null = NullEnsemble(self.sites, directions, self.home, null_every)
        n, self.k = len(self.sites), self.null.k
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=self.home)  # noqa: E731
        self._sums = zeros(3, n, 3, 12)  # what is added together lies together
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
            **self.null.state,
            "histogram": torch.zeros((n, 3, 3, BINS), dtype=torch.int64, device=self.home),
        }
        edges = ("least", "most", "histogram")
        self.carried = {name: torch.zeros_like(value) for name, value in self.state.items() if name not in edges}
        self._units: dict[tuple[int, torch.device], Tensor] = {}
        self._gram = {d: (v.units @ v.units[0]).to(self.home) for d, v in directions.items()}
        self._pools: dict[tuple, _Pool] = {}
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._n_tokens = 0
        self.scalars: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    # --- the stream's side -------------------------------------------------------------------------------------------

    def begin(self, batch: TokenBatch) -> None:
        """Decide which tokens of the batch belong to which group, and which meet the null ensemble."""
        group = np.full(batch.ids.shape, 2, np.uint8)
        if self.bos is not None:
            group[batch.ids == self.bos] = 1
        group[:, 0] = 0
        if batch.n_tokens != self._n_tokens:
            self._pools.clear()
        self._group, self._n_tokens = torch.from_numpy(group.ravel()), batch.n_tokens
        self._groups: dict[int, Tensor] = {}
        for pool in self._pools.values():
            pool.sites.clear()
        self.scalars.clear()
        self.null.begin(batch)

    def take(self, site: int, phase: Literal["pre", "post"], hidden: Float[Tensor, "vectors d"]) -> None:
        """Project the vectors onto the directions; the rest waits until the batch ends."""
        (vectors, d), device, kind = hidden.shape, hidden.device, self.sites[site].kind
        if vectors != self._n_tokens * self.sites[site].heads:
            raise ModelError(
                f"{self.sites[site].key} saw {vectors} vectors for {self._n_tokens} tokens, not "
                f"{self.sites[site].heads} for each; leave it out: --sites takes roles and name patterns of others"
            )
        centered = phase == "pre" and kind == "layernorm"
        key = (phase, kind, d, vectors, device)
        if key not in self._pools:
            places = sum(s.d == d and s.kind == kind for s in self.sites)
            shape = (places, 4 + centered, vectors)
            self._pools[key] = _Pool(torch.empty(shape, dtype=kernels.precise(device), device=device))
        if (d, device) not in self._units:
            self._units[d, device] = self.directions[d].units.to(device, kernels.precise(device)).contiguous()
        pool = self._pools[key]
        out = pool.scalars[len(pool.sites)]
        pool.sites.append(site)
        kernels.project(hidden, self._units[d, device], centered=centered, out=out)
        if self.k:
            self.null.take(site, phase, hidden, out)

    def end(self) -> None:
        """Turn the batch's projections into angles and add them up."""
        for (phase, *_), pool in self._pools.items():
            if pool.sites:
                self._add(pool.sites, phase, pool.scalars[: len(pool.sites)].to(self.home).double())
        if self.k:
            self.null.end()
        self._settle()
        # the scalars stay until the next batch begins, for whoever keeps them

    # --- the named directions ----------------------------------------------------------------------------------------

    def _add(self, alike: list[int], phase: str, scalars: Float[Tensor, "sites quantities vectors"]) -> None:
        site, norm, dots = self.sites[alike[0]], scalars[:, 0], scalars[:, 1:4]
        turns = site.kind == "layernorm"
        sines = (dots / norm[:, None]).clamp_(-1.0, 1.0)
        degrees, length = _degrees(sines), norm.float()
        self._keep(alike, phase, length, degrees)
        if phase == "post":
            self._accumulate(alike, 2, [length], degrees, sines)
            return
        eps = self._alike(alike)[1]
        if not turns:  # where nothing is subtracted the angles of the standardized vector are the input's
            self._accumulate(alike, 0, [length, standardized_norm(length, site.d, eps)], degrees, sines)
            return
        self._accumulate(alike, 0, [length], degrees, sines, turns=True)
        left = scalars[:, 4]
        sines = torch.addcmul(dots, self._gram[site.d][:, None], dots[:, :1], value=-1).div_(left[:, None])
        sines[:, 0] = 0.0  # û lies in the null space of mean subtraction: what is left along it is rounding
        sines.clamp_(-1.0, 1.0)
        degrees, length = _degrees(sines), standardized_norm(left.float(), site.d, eps)
        self._keep(alike, "standardized", length, degrees)
        self._accumulate(alike, 1, [length], degrees, sines)

    def _keep(self, alike: list[int], phase: str, norm: Tensor, degrees: Tensor) -> None:
        for site, length, angles in zip(alike, norm.unbind(), degrees.unbind(), strict=True):
            self.scalars[site, phase] = length, angles

    def _alike(self, sites: list[int]) -> tuple[Tensor, Tensor]:
        """Their indices and eps [sites, 1]: the same in every batch, and copying them to a device waits for it."""
        if (found := self._known.get(key := tuple(sites))) is None:
            eps = torch.tensor([self.sites[i].eps for i in sites], dtype=torch.float32, device=self.home)[:, None]
            found = self._known[key] = torch.tensor(sites, device=self.home), eps
        return found

    def _vector_groups(self, vectors: int) -> Tensor:
        if vectors not in self._groups:
            group = self._group.repeat_interleave(vectors // self._n_tokens)
            self._groups[vectors] = group.to(self.home, non_blocking=self.home.type == "cuda")
        return self._groups[vectors]

    def _accumulate(
        self, alike: list[int], phase: int, norms: list[Tensor], degrees: Tensor, sines: Tensor, turns: bool = False
    ) -> None:
        """Add angles, of [sites, 3, vectors], to one or two phases with these norms, of [sites, vectors].

        Args:
            alike: indices of the sites.
            phase: the first of the phases.
            norms: of the vectors, for each phase.
            degrees: 90 - theta; an angle is bounded, so that a sum of angles is finite when all of them are.
            sines: cos(theta).
            turns: add up the angle between x and y too, arcsin(|x.û| / |x|), which is |90 - theta| from û.
        """
        where, block = self._alike(alike)[0], torch.stack(norms, 1)
        histogram = Histogram(self.state["histogram"], where, phase)
        found = kernels.tally(block, degrees, sines, self._vector_groups(block.shape[2]), histogram)
        sums = found.sums.transpose(0, 1)
        for p in range(phase, phase + len(norms)):
            norm = sums[..., 12 + p - phase, None]
            self._sums[:, :, p].index_add_(1, where, torch.cat([sums[..., :2], norm, sums[..., 2:11]], -1))
            for name, edge, keep in (("least", found.least, torch.minimum), ("most", found.most, torch.maximum)):
                kept = self.state[name][:, :, p]
                kept[:, where] = keep(kept[:, where], edge.transpose(0, 1))
        if turns:
            self.state["rotation"].index_add_(1, where, sums[..., 11])
            self.state["rotation_square"].index_add_(1, where, sums[..., 5])
        if self.k:
            valid = (norms[0] > 0) & torch.isfinite(norms[0] + degrees.sum(1))
            self.null.uniform(where, range(phase, phase + len(norms)), degrees[:, 0], sines[:, 0], valid)

    # --- merging and resuming ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        for name, carried in self.carried.items():
            settle(self.state[name], carried)

    def totals(self, *names: str) -> dict[str, Tensor]:
        """The state on the CPU, with what was carried added to its sums; only these parts of it, if any are named."""
        whole = {name: self.state[name] + CARRY * carried for name, carried in self.carried.items()}
        return {name: value.cpu() for name, value in (self.state | whole).items() if not names or name in names}

    def clear(self) -> None:
        """Forget everything accumulated so far."""
        for name, value in self.state.items():
            value.fill_({"least": torch.inf, "most": -torch.inf}.get(name, 0))
        for carried in self.carried.values():
            carried.zero_()

    def merge(self, other: AngleStatistics) -> None:
        """Add what another instance has seen of other tokens at the same sites."""
        self.add_state_dict(other.state_dict())

    def state_bytes(self, n_tokens: int) -> int:
        """Bytes of `state_dict` after so many tokens, at most: 16 for every bin that has something in it."""
        bins = sum(9 * min(BINS, n_tokens * site.heads) for site in self.sites)
        sums = sum(value.nbytes for name, value in self.state.items() if name != "histogram")
        return 16 * bins + sums + sum(value.nbytes for value in self.carried.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Everything accumulated so far, on the CPU: of the histogram the bins in use, of carries what is not 0."""
        out = {
            name: value.cpu().clone(memory_format=torch.contiguous_format)
            for name, value in self.state.items()
            if name != "histogram"
        }
        carried = {f"carried_{name}": value.cpu().clone() for name, value in self.carried.items()}
        out |= {name: value for name, value in carried.items() if value.any()}
        flat = self.state["histogram"].view(-1)
        bins = flat.nonzero()[:, 0]  # few, found where they are
        out["histogram_bins"], out["histogram_counts"] = bins.cpu(), flat[bins].cpu()
        return out

    def add_state_dict(self, saved: dict[str, Tensor], sites: range | None = None) -> None:
        """Add the `state_dict` of another instance, which has seen all of these sites, or only those of a range."""
        some = slice(sites.start, sites.stop) if sites is not None else slice(None)
        for name, whole in self.state.items():
            mine = whole[some] if name.startswith(("null", "histogram")) else whole[:, some]  # those have no groups
            if name == "histogram":
                where, counts = (saved[f"histogram_{part}"].to(self.home) for part in ("bins", "counts"))
                mine.view(-1).index_add_(0, where, counts)
            elif name in ("least", "most"):
                reduce = torch.minimum if name == "least" else torch.maximum
                mine.copy_(reduce(mine, saved[name].to(self.home)))
            else:
                mine += saved[name].to(self.home)
                over = self.carried[name][some] if name.startswith("null") else self.carried[name][:, some]
                if (more := saved.get(f"carried_{name}")) is not None:
                    over += more.to(self.home)
                settle(mine, over)
