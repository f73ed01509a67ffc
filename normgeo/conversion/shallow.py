"""The gauge of a large model from a copy of its architecture with few layers, mapped back by name.

Which parameters write into a stream is a property of the architecture: four layers with made-up weights, the first,
the last and two between, tell it for all thirty-two; a model of billions needs no backward pass in float64. There are
two between because one may have something of its own, like the layer halfway whose predictions a Conformer reads: where
the two differ, neither tells what the other layers have.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from normgeo.conversion.gauge import Gauge, Reader, Shift, find_gauge
from normgeo.errors import ConversionError, NormGeoError
from normgeo.models import seeded
from normgeo.roles import parts_shared
from normgeo.sites import NormSite

__all__ = [
    "Spread", "check_alike", "deepened", "empty_model", "gauge_of", "shallow_gauge", "shallow_model", "shapes_of",
    "spread",
]  # fmt: skip

DEPTHS = (4, 5, 6)


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


def shallow_config(config: PretrainedConfig, lists: Mapping[str, int], depth: int) -> PretrainedConfig:
    """The configuration with at most `depth` layers in every list, of which there are as many now as `lists` says.

    Where it numbers single layers, as those whose hidden states something else reads, these are in the small one, too.
    """
    lengths = {n for n in lists.values() if n > depth}
    small = copy.deepcopy(config)
    parts = [small, *(v for v in vars(small).values() if isinstance(v, PretrainedConfig))]
    for part in parts:
        depths = {name: value for name, value in vars(part).items() if _is_depth(name, value) and value in lengths}
        own = max(depths.values(), default=0)
        for name, value in list(vars(part).items()):
            if name in depths:
                setattr(part, name, depth)
            elif isinstance(value, (list, tuple)) and len(value) in lengths:
                setattr(part, name, value[:depth])
            elif _numbers_layers(name, value, own):
                setattr(part, name, type(value)(_earlier(i, own, depth) for i in value))
    return small


def _is_depth(name: str, value: Any) -> bool:
    return isinstance(value, int) and any(word in name for word in ("layer", "depth"))


def _numbers_layers(name: str, value: Any, length: int) -> bool:
    """Whether a configuration's attribute numbers single layers, of a list that is cut and was so long."""
    called = length > 0 and any(word in name for word in ("layer", "index", "indices"))
    return called and isinstance(value, (list, tuple)) and all(type(i) is int and 0 <= i <= length for i in value)


def _earlier(i: int, length: int, depth: int) -> int:
    """The number of a layer, of `length`, among `depth`.

    Some count from 0 and some from 1: what reads one of the layers between reads behind all of those here, either way.
    """
    return depth if i == length else min(i, depth - 1)


def shallow_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[PreTrainedModel, Spread]:
    """The same architecture with few layers in every list, with made-up weights, and what each stands for.

    It has at least four layers, and enough for a first, a last and those between of the deep model's kinds.

    Raises:
        ConversionError: the configuration has no number of layers that could be reduced, or layers are like none.
    """
    deep, found, why = empty_model(cls, config), [], ""
    for depth in DEPTHS:
        try:
            small = shallow_config(config, _lists(deep), depth)
            empty = empty_model(cls, small)
            if any(n > depth for n in _lists(empty).values()):
                raise ConversionError(f"{cls.__name__} cannot be built with fewer layers from its configuration")
            found.append((small, spread(deep, empty)))
            if not found[-1][1].unsure:
                break
        except ConversionError as error:
            why = str(error)
        except Exception as error:  # whatever a model's own code raises
            why = f"{cls.__name__} cannot be built with fewer layers: {type(error).__name__}"
    if not found:
        raise ConversionError(f"{why}; convert it in memory")
    small, to = next((pair for pair in found if not pair[1].unsure), found[0])
    with seeded(0):
        return cls(small).float().eval(), to  # pyright: ignore (parts are built in the dtypes of their configurations)


@dataclass(frozen=True)
class Spread:
    """From names in a shallow model to names in the deep one.

    Attributes:
        assigned: for each list of layers, which layer of the shallow model each layer of the deep one is like.
        unsure: for a list, layers of the shallow model of one kind, of which one stands for a layer at another place:
            for the last of all though it is not the last itself, or the other way round.
        between: for a list, layers of the shallow model of one kind between its first and its last, of which one stands
            for more than itself.
    """

    assigned: Mapping[str, tuple[int, ...]]
    unsure: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    between: frozenset[tuple[str, tuple[int, ...]]] = frozenset()

    @property
    def depth(self) -> int:
        """How many layers the shallow model has, in its longest list."""
        return max((max(layers) + 1 for layers in self.assigned.values()), default=0)

    def __call__(self, name: str) -> list[str]:
        """All the names that one name stands for."""
        return [full for full, _ in self.numbered(name)]

    def first(self, name: str) -> str:
        """The first of the names that one name stands for."""
        return next(iter(self(name)), name)

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

    def beside(self, name: str, site: str, deep: str) -> str:
        """What a name of the shallow model is beside one of those that a site stands for.

        In the site's list of layers it is as many layers away, as a reader of a norm is; else the first it stands for.
        """
        mine, theirs, there = self.place(name), self.place(site), self.place(deep)
        if mine is None or theirs is None or there is None or mine[0] != theirs[0]:
            return self.first(name)
        return ".".join(filter(None, (mine[0], str(there[1] + mine[1] - theirs[1]), mine[2])))


def spread(deep: nn.Module, shallow: nn.Module) -> Spread:
    """Find for each layer of the deep model one of the shallow model with the same parameters, and at the same place.

    The first are like the first, the last like the last, and those between like the last that is between.

    Raises:
        ConversionError: a layer is like none of them.
    """
    mine, theirs = shapes_of(shallow), shapes_of(deep)
    few, assigned, unsure, between = _lists(shallow), {}, set(), set()

    def kind(names: dict[str, torch.Size], prefix: str, i: int) -> frozenset[Any]:
        start = f"{prefix}.{i}."
        return frozenset((n.removeprefix(start), s) for n, s in names.items() if n.startswith(start))

    for prefix, length in _lists(deep).items():
        kinds = [kind(mine, prefix, j) for j in range(few.get(prefix, 0))]
        last, layers = len(kinds) - 1, list[int]()
        for i in range(length):
            own = kind(theirs, prefix, i)
            alike = [j for j, k in enumerate(kinds) if k == own]
            if not alike:
                raise ConversionError(f"layer {prefix}.{i} is like none of the first {len(kinds)}")
            there = [j for j in alike if (j == last) == (i == length - 1)]
            layers.append(i if i in there else (there or alike)[-1])
            if not there:
                unsure.add((prefix, tuple(alike)))
            elif i not in there and len(inner := [j for j in there if 0 < j < last]) > 1:
                between.add((prefix, tuple(inner)))
        assigned[prefix] = tuple(layers)
    return Spread(assigned, frozenset(unsure), frozenset(between))


def check_alike(to: Spread, names: Iterable[tuple[str, Any]]) -> None:
    """Refuse layers that are treated in different ways, of which one stands for others, at another place or between.

    Args:
        to: which.
        names: what was done: names of the shallow model, and what to it.

    Raises:
        ConversionError: there are some, or there is only one of a kind.
    """
    done = defaultdict[tuple[str, int], set[Any]](set)
    for name, what in names:
        if (place := to.place(name)) is not None:
            done[place[:2]].add((place[2], what))
    for prefix, alike in to.unsure | to.between:
        if len(alike) < 2 or any(done[prefix, j] != done[prefix, alike[0]] for j in alike):
            raise ConversionError(f"layers of {prefix} are treated in different ways; convert it in memory")


def shallow_gauge(
    cls: type[PreTrainedModel], config: PretrainedConfig, inputs: dict[str, Tensor] | None = None, *,
    training: bool = False,
) -> Gauge:  # fmt: skip
    """The gauge of a model of this class and configuration, whatever its weights.

    Args:
        cls: the model's class.
        config: its configuration.
        inputs: as for `find_gauge`, on any device.
        training: as for `find_gauge`.

    Raises:
        ConversionError: the architecture cannot be built with fewer layers, or its layers differ.
        ModelError: as `find_gauge`.
    """
    small, to = shallow_model(cls, config)
    inputs = inputs and {name: value.to(small.device) for name, value in inputs.items()}
    return deepened(find_gauge(small, inputs, training=training), to)


def gauge_of(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, *, training: bool = False) -> Gauge:
    """A model's gauge from few of its layers where they are alike, whatever its weights; else `find_gauge`'s."""
    if _as_told(model):
        with suppress(NormGeoError):  # an architecture that is not the same with fewer layers
            return shallow_gauge(type(model), model.config, inputs, training=training)
    return find_gauge(model, inputs, training=training)


def _as_told(model: PreTrainedModel) -> bool:
    """Whether a model is what its class and configuration tell: nobody took layers out, or put others in."""
    try:
        told = empty_model(type(model), model.config)
    except Exception:  # whatever a model's own code raises
        return False
    parts = [{name: type(module) for name, module in each.named_modules()} for each in (told, model)]
    return parts[0] == parts[1] and shapes_of(told) == shapes_of(model)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of every parameter, by each of its names."""
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def deepened(gauge: Gauge, to: Spread) -> Gauge:
    """A shallow model's gauge in the names of the deep one."""
    shifts = lambda found: tuple(Shift(name, axis) for s, axis in found for name in to(s))  # noqa: E731
    return replace(
        gauge,
        writers=shifts(gauge.writers),
        scaled={
            Shift(name, shift.axis): scale
            for shift, by in gauge.scaled.items()
            for name, scale in zip(to(shift.parameter), _alongside(to, by, shift.parameter), strict=True)
        },
        tables=shifts(gauge.tables),
        readers=tuple(reader for short in gauge.readers for reader in _readers(short, to)),
        invisible=tuple(place._replace(module=name) for place in gauge.invisible for name in to(place.module)),
        raw={
            name: tuple(to.beside(one, key, name) for one in who) for key, who in gauge.raw.items() for name in to(key)
        },
        sites=tuple(_sites(gauge.sites, to)),
        functions=tuple(_sites(gauge.functions, to)),
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
    """The number of layers before a norm behind them: of its stack, or the list whose name is most like its own."""
    if site.stack in to.assigned:
        return len(to.assigned[site.stack])
    nearest = max(to.assigned, key=lambda prefix: parts_shared(prefix, site.name), default=None)
    return site.layer if nearest is None else len(to.assigned[nearest])
