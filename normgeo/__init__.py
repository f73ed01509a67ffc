"""normgeo: geometric analysis of the normalization layers of transformers.

The public names below are imported when first used, so that `import normgeo` is quick and has no side effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normgeo.angles.measure import AngleTable, measure_angles
    from normgeo.angles.scalars import ScalarStore
    from normgeo.comparison.compare import Comparison, compare
    from normgeo.conversion.convert import Conversion, convert, decompress
    from normgeo.conversion.gauge import find_gauge
    from normgeo.conversion.optimize import optimize
    from normgeo.errors import NormGeoError
    from normgeo.geometry import Directions, angle, standardize, uniform_vector
    from normgeo.loading import load_model, load_tokenizer
    from normgeo.norms import CRMSNorm, LayerNorm, RMSNorm
    from normgeo.sites import NormSite, find_sites
    from normgeo.store.reader import HiddenStateStore
    from normgeo.stream import Sink, observe
    from normgeo.tokens import TokenStream, load_tokens
    from normgeo.wrapping import wrap

__all__ = [
    "AngleTable",
    "CRMSNorm",
    "Comparison",
    "Conversion",
    "Directions",
    "HiddenStateStore",
    "LayerNorm",
    "NormGeoError",
    "NormSite",
    "RMSNorm",
    "ScalarStore",
    "Sink",
    "TokenStream",
    "angle",
    "compare",
    "convert",
    "decompress",
    "find_gauge",
    "find_sites",
    "load_model",
    "load_tokenizer",
    "load_tokens",
    "measure_angles",
    "observe",
    "optimize",
    "standardize",
    "uniform_vector",
    "wrap",
]

_HOME = {
    "AngleTable": "angles.measure",
    "measure_angles": "angles.measure",
    "ScalarStore": "angles.scalars",
    "Comparison": "comparison.compare",
    "compare": "comparison.compare",
    "Conversion": "conversion.convert",
    "convert": "conversion.convert",
    "decompress": "conversion.convert",
    "find_gauge": "conversion.gauge",
    "optimize": "conversion.optimize",
    "NormGeoError": "errors",
    "Directions": "geometry",
    "angle": "geometry",
    "standardize": "geometry",
    "uniform_vector": "geometry",
    "load_model": "loading",
    "load_tokenizer": "loading",
    "CRMSNorm": "norms",
    "LayerNorm": "norms",
    "RMSNorm": "norms",
    "NormSite": "sites",
    "find_sites": "sites",
    "HiddenStateStore": "store.reader",
    "Sink": "stream",
    "observe": "stream",
    "TokenStream": "tokens",
    "load_tokens": "tokens",
    "wrap": "wrapping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'normgeo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"normgeo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
