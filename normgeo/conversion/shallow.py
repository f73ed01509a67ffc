"""The gauge of a large model from a copy of its architecture with few layers, mapped back by name.

Which parameters write into a stream is a property of the architecture: two layers with made-up weights tell it for all
thirty-two, and a model of billions of parameters needs no backward pass in float64.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from normgeo.conversion.gauge import Gauge, Reader, Shift, find_gauge
from normgeo.errors import ConversionError
from normgeo.sites import NormSite

__all__ = ["Spread", "empty_model", "shallow_gauge", "shallow_model", "spread"]


def empty_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def _lists(model: nn.Module) -> dict[str, int]:
    """The outermost lists of layers, and their lengths."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{p}.") for p in found):
            found[name] = len(module)
    return found


def shallow_model(cls: type[PreTrainedModel], config: PretrainedConfig, depth: int = 2) -> PreTrainedModel:
    """The same architecture with at most `depth` layers in every list, with made-up weights.

    Raises:
        ConversionError: the configuration has no number of layers that could be reduced.
    """
    lengths = {n for n in _lists(empty_model(cls, config)).values() if n > depth}
    small = copy.deepcopy(config)
    parts = [small, *(v for v in vars(small).values() if isinstance(v, PretrainedConfig))]
    for part in parts:
        for name, value in list(vars(part).items()):
            if isinstance(value, int) and value in lengths and any(w in name for w in ("layer", "depth")):
                setattr(part, name, depth)
            elif isinstance(value, (list, tuple)) and len(value) in lengths:
                setattr(part, name, value[:depth])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not torch's own, which seeds the GPUs' as well
        model = cls(small).eval()
    if any(n > depth for n in _lists(model).values()):
        raise ConversionError(f"{cls.__name__} cannot be built with fewer layers from its configuration")
    return model


@dataclass(frozen=True)
class Spread:
    """From names in a shallow model to names in the deep one.

    Attributes:
        assigned: for each list of layers, which layer of the shallow model each layer of the deep one is like.
    """

    assigned: Mapping[str, tuple[int, ...]]

    def __call__(self, name: str) -> list[str]:
        """All the names that one name stands for."""
        return [full for full, _ in self.numbered(name)]

    def numbered(self, name: str) -> list[tuple[str, int | None]]:
        """The names, and the layer each is in."""
        place = self.place(name)
        if place is None:
            return [(name, None)]
        prefix, number, rest = place
        layers = [i for i, like in enumerate(self.assigned[prefix]) if like == number]
        return [(".".join(filter(None, (prefix, str(i), rest))), i) for i in layers]

    def place(self, name: str) -> tuple[str, int, str] | None:
        """The list of layers that a name is in, the layer, and the rest of the name."""
        for prefix in self.assigned:
            number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            if name.startswith(f"{prefix}.") and number.isdigit():
                return prefix, int(number), rest
        return None


def spread(deep: nn.Module, shallow: nn.Module) -> Spread:
    """Find for each layer of the deep model one of the shallow model with the same parameters.

    Raises:
        ConversionError: a layer is like none of them.
    """
    mine = {n: p.shape for n, p in shallow.named_parameters(remove_duplicate=False)}
    theirs = {n: p.shape for n, p in deep.named_parameters(remove_duplicate=False)}
    few, assigned = _lists(shallow), {}

    def kind(names: dict[str, torch.Size], prefix: str, i: int) -> frozenset[Any]:
        start = f"{prefix}.{i}."
        return frozenset((n.removeprefix(start), s) for n, s in names.items() if n.startswith(start))

    for prefix, length in _lists(deep).items():
        kinds = [kind(mine, prefix, j) for j in range(few.get(prefix, 0))]
        layers = []
        for i in range(length):
            alike = [j for j, k in enumerate(kinds) if k == kind(theirs, prefix, i)]
            if not alike:
                raise ConversionError(f"layer {prefix}.{i} is like none of the first {len(kinds)}")
            layers.append(i if i in alike else alike[-1])
        assigned[prefix] = tuple(layers)
    return Spread(assigned)


def shallow_gauge(
    cls: type[PreTrainedModel], config: PretrainedConfig, depth: int = 2, *, training: bool = False
) -> Gauge:
    """The gauge of a model of this class and configuration, whatever its weights.

    Args:
        cls: the model's class.
        config: its configuration.
        depth: layers to look at.
        training: as for `find_gauge`.

    Raises:
        ConversionError: the architecture cannot be built with fewer layers, or its layers differ.
        ModelError: as `find_gauge`.
    """
    small = shallow_model(cls, config, depth)
    return deepened(find_gauge(small, training=training), spread(empty_model(cls, config), small))


def deepened(gauge: Gauge, to: Spread) -> Gauge:
    """A shallow model's gauge in the names of the deep one."""
    shifts = lambda found: tuple(Shift(name, axis) for s, axis in found for name in to(s))  # noqa: E731
    return Gauge(
        writers=shifts(gauge.writers),
        scaled={
            Shift(name, shift.axis): scale
            for shift, by in gauge.scaled.items()
            for name, scale in zip(to(shift.parameter), _alongside(to, by, shift.parameter), strict=True)
        },
        tables=shifts(gauge.tables),
        readers=tuple(reader for short in gauge.readers for reader in _readers(short, to)),
        invisible=tuple(place._replace(module=name) for place in gauge.invisible for name in to(place.module)),
        raw={name: who for key, who in gauge.raw.items() for name in to(key)},
        sites=tuple(_sites(gauge.sites, to)),
        idle=tuple(name for key in gauge.idle for name in to(key)),
        unreached=tuple(name for short in gauge.unreached for name in to(short)),
    )


def _readers(reader: Reader, to: Spread) -> list[Reader]:
    """A reader in the same list of layers as its norm reads one as many layers before it; else the last layer's."""
    mine, theirs = to.place(reader.parameter), to.place(reader.norm)
    if mine is None or theirs is None or mine[0] != theirs[0]:
        norm = to(reader.norm)[-1]
        return [Reader(name, reader.axis, norm) for name in to(reader.parameter)]
    prefix, number, _ = mine
    return [
        Reader(name, reader.axis, f"{prefix}.{i - number + theirs[1]}.{theirs[2]}")
        for name, i in to.numbered(reader.parameter) if i is not None
    ]  # fmt: skip


def _alongside(to: Spread, name: str, other: str) -> list[str]:
    """The names for one, repeated where the other stands for more."""
    names = to(name)
    return names * len(to(other)) if len(names) == 1 else names


def _sites(sites: tuple[NormSite, ...], to: Spread) -> list[NormSite]:
    """The sites of the deep model, in its order: layer by layer where the shallow model's follow each other."""
    found: list[tuple[tuple[int, int, int], NormSite]] = []
    group, before = 0, None
    for number, site in enumerate(sites):
        prefix = next((p for p in to.assigned if site.name.startswith(f"{p}.")), None)
        group, before = group + (prefix != before), prefix
        for name, i in to.numbered(site.name):
            layer = i if i is not None else _depth(site, to) if site.role in ("final", "head") else site.layer
            found.append(((group, -1 if i is None else i, number), replace(site, name=name, layer=layer)))
    return [site for _, site in sorted(found, key=lambda pair: pair[0])]


def _depth(site: NormSite, to: Spread) -> int:
    """The number of layers before a norm behind them: of the list whose name has most in common with its own."""

    def common(prefix: str) -> int:
        pairs = zip(prefix.split("."), site.name.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return len(to.assigned[max(to.assigned, key=common)]) if to.assigned else site.layer
