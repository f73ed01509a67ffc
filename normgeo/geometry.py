r"""The geometry of normalization: pure tensor functions, and the directions that angles are measured to.

Notation follows Gupta et al., "LayerNorm vs RMSNorm: A Geometric Perspective and the Case Against Mean Subtraction"
(*Geometry* below). Vectors lie along the last axis; d is its length; **1** is the uniform vector (1, ..., 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normgeo.numbers import check_numbers

__all__ = [
    "NAMES",
    "Directions",
    "angle",
    "mean_vector",
    "orthogonal_component",
    "rotation",
    "standardize",
    "uniform_vector",
]

NAMES = ("uniform", "random_a", "random_b")
"""The named directions, in the order of `Directions.named`."""


def uniform_vector(d: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, " d"]:
    r"""**1** = (1, ..., 1) in R^d; its norm is sqrt(d) (*Geometry* section 2.1)."""
    return torch.ones(d, dtype=dtype)


def mean_vector(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    r"""Mu = (1.x / d) **1** = (x.û) û with û = **1**/sqrt(d) (*Geometry* eq. 2 and 7).

    >>> mean_vector(torch.tensor([1.0, 2.0, 6.0]))
    tensor([3., 3., 3.])
    """
    return x.mean(-1, keepdim=True).expand_as(x)


def orthogonal_component(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    r"""x_perp = x - mu, the part of x orthogonal to the uniform vector (*Geometry* eq. 8)."""
    return x - x.mean(-1, keepdim=True)


def _of_size_one(x: Tensor) -> Tensor:
    """Vectors of the same directions, over their largest component, in float32 or float64.

    Their squares neither over- nor underflow, and equal components are 1 exactly. What is not finite becomes NaN.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    return wide / torch.where(largest == 0, 1.0, largest)


def standardize(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    r"""LayerNorm's standardization in three steps, y = sqrt(d) x_perp / |x_perp| (*Geometry* eq. 9, algorithm 1).

    1. throw away the component along the uniform vector, 2. normalize what remains, 3. scale by sqrt(d).
    A vector with equal components has nothing left after step 1 and gives the zero vector, as in *Geometry*
    section 2; one with a component that is not finite gives NaN. Half precision is computed in float32, and whole
    numbers are floats.

    >>> standardize(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.2247,  0.0000,  1.2247])
    """
    y = orthogonal_component(_of_size_one(x))
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    z = torch.where(norm == 0, 0.0, math.sqrt(x.shape[-1]) * y / norm)
    return z.to(x.dtype) if x.is_floating_point() else z


def angle(x: Float[Tensor, "*batch d"], u: Float[Tensor, " d"]) -> Float[Tensor, "*batch"]:
    r"""Angle between x and u in degrees, in [0, 180]; NaN for a zero vector, and for one that is not finite.

    Computed as atan2(|x - (x.û)û|, x.û), which equals arccos(x.û / |x|) and, unlike it, keeps full precision near 0
    and 180 degrees. Of half precision in float32, and so given.

    >>> angle(torch.tensor([[3.0, 3.0], [1.0, -1.0], [-2.0, -2.0]]), uniform_vector(2)).round(decimals=3)
    tensor([  0.,  90., 180.])
    """
    x = _of_size_one(x)
    unit = _scaled(_of_size_one(u.double())[None])[0].to(x)
    along = (x * unit).sum(-1)  # a matrix product is of half precision under autocast
    across = torch.linalg.vector_norm(x - along[..., None] * unit, dim=-1)
    degrees = torch.rad2deg(torch.atan2(across, along))
    return torch.where((x == 0).all(-1), math.nan, degrees)


def rotation(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    r"""Angle in degrees by which LayerNorm's standardization turns x: between x and x_perp.

    It is |90 - angle(x, **1**)|, between 0 (nothing to remove) and 90 degrees (nothing left).
    """
    return (90.0 - angle(x, uniform_vector(x.shape[-1]).to(x))).abs()


@dataclass(frozen=True)
class Directions:
    """The vectors of R^d that angles are measured to.

    Attributes:
        named: rows are the uniform vector, `random_a` (isotropic direction, the uniform vector's norm) and `random_b`
            (isotropic direction, a norm drawn from [1/2, 2] times it), as in *Geometry* section 3.3. float64 [3, d].
        ensemble: isotropic vectors of nearly unit length: the null hypothesis that **1** is a direction like any other.
            bfloat16 [K, d], so that products with half precision, too, are with these vectors and no others.
    """

    named: Float[Tensor, "three d"]
    ensemble: Float[Tensor, "k d"]

    @classmethod
    def seeded(cls, d: int, null: int = 256, seed: int = 0) -> Directions:
        """The directions of one seed and width; the same on every machine, and for every K a prefix of a larger one.

        Raises:
            DataError: a number is none, or too small.
        """
        check_numbers(d=d, null=null, seed=seed)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, d, 0])))
        raw = rng.standard_normal((2, d))
        raw *= math.sqrt(d) / np.linalg.norm(raw, axis=1, keepdims=True)
        raw[1] *= 2.0 ** rng.uniform(-1, 1)
        named = torch.from_numpy(np.concatenate([np.ones((1, d)), raw]))
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, d, 1])))
        return cls(named, _scaled(torch.from_numpy(rng.standard_normal((null, d)))).bfloat16())

    @property
    def units(self) -> Float[Tensor, "three d"]:
        """The named directions scaled to unit norm, float64."""
        return _scaled(self.named)

    @property
    def null(self) -> Float[Tensor, "k d"]:
        """The ensemble scaled to unit norm, float64."""
        return _scaled(self.ensemble.double())


def _scaled(vectors: Tensor) -> Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
