"""Conversion of a checkpoint shard by shard: one tensor in float64 at a time, whatever the size of the model.

The gauge comes from a shallow copy of the architecture; the certificate from a few of the model's own; every tensor
of the checkpoint is then read, centered if it is a writer, and written, so that memory holds about one shard.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, build_glob_alternation, rename_source_key
from transformers.modeling_utils import local_torch_dtype

from normgeo.conversion.centering import center_writers
from normgeo.conversion.checkpoint import check_read, describe, write_config
from normgeo.conversion.checks import REMEDY
from normgeo.conversion.companions import copy_companions
from normgeo.conversion.convert import Conversion, convert
from normgeo.conversion.gauge import Gauge, find_gauge
from normgeo.conversion.probing import Place, looking_at, tied
from normgeo.conversion.shallow import Spread, check_alike, deepened, empty_model, shallow_model
from normgeo.converted import PREFIX, rebuild
from normgeo.errors import ConversionError, said
from normgeo.loading import UNLOADABLE, config_and_class, explained, load_tokenizer
from normgeo.stored import warn_of_more
from normgeo.system.folders import whole_directory

__all__ = ["Shards", "convert_sharded"]

PLAIN, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shards:
    """The tensors of a safetensors checkpoint, by their names in the model, one at a time.

    Raises:
        ConversionError: the directory holds no safetensors, its index names files elsewhere, or loading merges tensors.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.files: list[str] = []
        if (folder / PLAIN).is_file():  # what transformers reads, whatever an index beside it says
            self.files = [PLAIN]
        elif (folder / INDEX).is_file():
            self.files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if not self.files:
            raise ConversionError(f"{folder} holds no safetensors weights; pickled weights are not read")
        if elsewhere := [file for file in self.files if Path(file).name != file]:  # written under the same names
            raise ConversionError(
                f"{folder / INDEX} names {elsewhere[0]!r}, which is no file right in that directory; convert it in "
                "memory, by --in-memory (by_shard=False)"
            )
        self.folder, self.home, self.stored, self.shapes = folder, {}, {}, {}
        named = _namer(model)
        for file in self.files:
            with safe_open(folder / file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    name = named(key)
                    self.home[name], self.stored[name] = file, key
                    self.shapes[name] = tuple(opened.get_slice(key).get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """What transformers loads all in where the configuration names no dtype: that of the first real numbers."""
        dtypes = (self.read(name).dtype for name in self.home)
        return next((d for d in dtypes if d.is_floating_point and d.itemsize > 1), torch.float32)

    def leave_out(self, names: set[str]) -> None:
        """Act as if there were no such tensors."""
        self.home = {name: file for name, file in self.home.items() if name not in names}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self.folder / self.home[name], "pt") as opened:
            return opened.get_tensor(self.stored[name]).clone()  # what it gives keeps the whole file mapped

    def of(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one file, one after the other."""
        for name, home in self.home.items():
            if home == file:
                yield name, self.read(name)


def _namer(model: PreTrainedModel) -> Callable[[str], str]:
    """What transformers calls a tensor of a checkpoint in the model; raises where it makes one tensor of several."""
    mapping = get_model_conversion_mapping(model)
    merging = [m for m in mapping if isinstance(m, WeightConverter)]
    renaming: Any = [m for m in mapping if not isinstance(m, WeightConverter)]
    known = model.state_dict()

    def named(key: str) -> str:
        name, merged = rename_source_key(key, renaming, merging, model.base_model_prefix, known)
        if name not in known and key in known:  # a name of the model's own, which looks like one of older checkpoints
            return key
        if merged is not None:
            raise ConversionError(f"{key} is merged with other tensors when it is loaded; convert the model in memory")
        return name

    return named


def convert_sharded(
    source: Path,
    out: Path,
    *,
    outputs: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Conversion:
    """Convert a local checkpoint to RMSNorm with the memory of about one of its shards.

    Args:
        source: a directory with safetensors.
        out: a new directory.
        outputs: what must not change, as for `convert`.
        dtype: what it is loaded, converted and written in; None is the checkpoint's own.
        trust_remote_code: run the checkpoint's own code.
        about: what conversion.json says besides, as of which model this is a conversion.

    Returns:
        What was done to all layers; its model and certificate are those of the first. Everything is in `out`.

    Raises:
        ConversionError: as `convert`; or it is converted already; or the checkpoint's names are not the model's, so
            that it has to be converted in memory; or what was written lacks a tensor of the converted model, or has
            another, or is read as other layers, or cannot be loaded.
        ModelError: the checkpoint cannot be loaded.
        RunError: as `save`.
    """
    try:
        config, cls = config_and_class(str(source), {}, trust_remote_code)
        _check_configuration(source, config)
        deep = empty_model(cls, config)
        shards = Shards(source, deep)
        loaded: torch.dtype = dtype or getattr(config, "dtype", None) or shards.dtype  # before any is left out
        _check_names(deep, shards, source)
        shallow, to = shallow_model(cls, config)
        first = _with_weights(shallow, shards, to, loaded)
    except UNLOADABLE as error:
        raise explained(str(source), error) from error
    with looking_at(outputs):
        gauge = find_gauge(shallow)
    conversion = convert(first, outputs=outputs, gauge=gauge)
    check_alike(to, _treated(conversion, gauge))
    recipe, whole = _spread_recipe(conversion.recipe, to), deepened(gauge, to)
    done = _of_all_layers(conversion, recipe, whole, to)
    with whole_directory(out) as folder:
        dtypes = {name: value.dtype for short, value in first.state_dict().items() for name in to(short)}
        _write(shards, folder, whole, _untied(first, conversion.model, to), conversion, to, dtypes)
        final = _config(config, conversion.model.config, loaded)
        written = _check_written(folder, empty_model(cls, final), recipe)
        check_read(conversion, _few_layers(conversion.model, written, to))
        write_config(conversion, final, cls, recipe, folder)
        copy_companions(source, folder, config.model_type)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)  # with its class, which is not told by a configuration of another type
        _check_loads(folder)
        told = {**about, **describe(done), "layers_certified": to.depth}
        (folder / "conversion.json").write_text(json.dumps(told, indent=2))
    return done


def _check_configuration(source: Path, config: PretrainedConfig) -> None:
    """Refuse quantized weights, and a checkpoint that was written here.

    Its recipe names layers that a shallow copy does not have. Nor is one taken whose weights have a name of their own.
    """
    if named := getattr(config, "transformers_weights", None):  # which is what transformers reads, whatever lies beside
        raise ConversionError(
            f"{source} names {named!r} as its weights (transformers_weights), which is not read by shard; convert it "
            "in memory, by --in-memory (by_shard=False)"
        )
    if getattr(config, "quantization_config", None):  # whose tensors have other names and shapes than the model's
        raise ConversionError(f"{source} cannot be converted by shard: {REMEDY['quantization_config']}")
    if not str(config.model_type).startswith(PREFIX) or not hasattr(config, "normgeo"):
        return  # a Pre-LN model that was trained as a converted one has a recipe, but a plain model's type
    if config.normgeo.get("to") == "crmsnorm":
        raise ConversionError(
            f"{source} is compressed, and gets all its numbers again in memory alone: ask for --in-memory "
            "(by_shard=False)"
        )
    raise ConversionError(
        f"{source} is converted already: all its norms that can be are RMSNorm; use it as it is, or convert the "
        "original again"
    )


def _check_names(deep: PreTrainedModel, shards: Shards, source: Path) -> None:
    """Refuse a checkpoint without all of its model; what is not of the model is left out, as loading does."""
    shapes = {name: tuple(value.shape) for name, value in deep.state_dict().items()}
    wanted, have = set(shapes), set(shards.home)
    if missing := sorted(wanted - have - _stored_once(deep, have)):
        first, *others = missing
        raise ConversionError(
            f"the checkpoint's names are not those of {type(deep).__name__} (it has no {first}, nor {len(others)} "
            "others); convert it in memory, where what is wrong with it is told"
        )
    warn_of_more(str(source), deep, have - wanted)  # others are buffers that older versions of transformers stored
    shards.leave_out(have - wanted)
    if wrong := sorted(name for name in shards.home if shards.shapes[name] != shapes[name]):
        raise ConversionError(
            f"the checkpoint has {wrong[0]} of shape {shards.shapes[wrong[0]]}, and its config.json tells of "
            f"{shapes[wrong[0]]}; get it again, or correct that"
        )
    for name, *others in ([name for name in group if name in have] for group in tied(deep)):
        if another := next((n for n in others if not torch.equal(shards.read(n), shards.read(name))), None):
            raise ConversionError(
                f"the checkpoint has another {another} than {name}, with which its configuration ties it: loading "
                "unties them; say so there (tie_word_embeddings), or convert it in memory"
            )


def _stored_once(model: PreTrainedModel, have: set[str]) -> set[str]:
    """Names of tied parameters of which one is there."""
    return {name for group in tied(model) if have.intersection(group) for name in group}


def _check_written(folder: Path, model: PreTrainedModel, recipe: dict[str, Any]) -> Shards:
    """Refuse files in which loading would not find exactly the tensors of the model that they are to be loaded into.

    Args:
        folder: where they are, and the index if there is one.
        model: an empty one, in which what the conversion has untied is not tied.
        recipe: the conversion's, for all layers.
    """
    rebuild(model, recipe)
    shards = Shards(folder, model)
    have, wanted = set(shards.home), set(model.state_dict())
    lacking = wanted - have - _stored_once(model, have)
    if wrong := sorted(lacking | (have - wanted)):
        first, *others = wrong
        raise ConversionError(
            f"what was written is not the converted model: {first} {'is missing' if first in lacking else 'is not its'}"
            f", and {len(others)} others; nothing was left behind"
        )
    return shards


def _check_loads(folder: Path) -> None:
    """Refuse a folder from which no model can be built, weights aside."""
    try:
        config, cls = config_and_class(str(folder), {}, trust=True)
        empty_model(cls, config)
    except Exception as error:  # whatever the model's own code raises
        raise ConversionError(f"what was written cannot be loaded ({said(error)})") from error


def _few_layers(model: PreTrainedModel, written: Shards, to: Spread) -> PreTrainedModel:
    """A copy of the certified layers with the values that were written."""
    read = copy.deepcopy(model)
    for value in read.state_dict().values():
        value.zero_()
    read.load_state_dict(_values(read, written, to), strict=False)
    return read


def _with_weights(shallow: PreTrainedModel, shards: Shards, to: Spread, dtype: torch.dtype) -> PreTrainedModel:
    """The shallow model with the weights of layers that it stands for, in the dtypes that they are loaded in."""
    cls, config = type(shallow), shallow.config
    with local_torch_dtype(dtype):  # as it is loaded
        made = dict(empty_model(cls, config).named_buffers())
    model: PreTrainedModel = cls(config).eval()  # pyright: ignore
    plan, stored = model._get_dtype_plan(dtype), model.state_dict().keys()
    wide = build_glob_alternation(list(plan))[0].search if plan else lambda name: None  # in single precision always
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            own = made[name].dtype if name not in stored else torch.float32 if wide(name) else dtype
            value.data = value.to(own)
    try:
        model.load_state_dict(_values(model, shards, to), strict=False)
    except RuntimeError as error:  # a size goes with the number of layers
        name = type(model).__name__
        raise ConversionError(f"{name} of fewer layers takes other weights; convert it in memory") from error
    model.tie_weights()
    return model


def _values(shallow: PreTrainedModel, shards: Shards, to: Spread) -> dict[str, Tensor]:
    deep = {name: to.first(name) for name in shallow.state_dict()}
    return {name: shards.read(full) for name, full in deep.items() if full in shards.home}


def _treated(conversion: Conversion, gauge: Gauge) -> Iterator[tuple[str, Any]]:
    """Names, and what was done to them."""
    yield from ((name, ("center", axis)) for name, axis in (*gauge.writers, *gauge.scaled, *gauge.tables))
    yield from ((place.module, place[1:]) for place in conversion.recentered)
    yield from ((site.name, "replaced") for site in conversion.replaced)


def _spread_recipe(recipe: dict[str, Any], to: Spread) -> dict[str, Any]:
    return recipe | {
        "norms": {name: spec for short, spec in recipe["norms"].items() for name in to(short)},
        "recenter": [[name, *place[1:]] for place in recipe["recenter"] for name in to(place[0])],
        "tables": [name for short in recipe.get("tables", ()) for name in to(short)],
    }


def _of_all_layers(conversion: Conversion, recipe: dict[str, Any], gauge: Gauge, to: Spread) -> Conversion:
    """What was done to all layers, for what was done to the first."""
    beside = {name for site in conversion.untouched for name in to(site.name)}
    kept = {name: _why(why, key, name, to) for key, why in conversion.kept.items() for name in to(key)}
    replaced = tuple(site for site in gauge.layernorms if site.name in recipe["norms"])
    untouched = tuple(site for site in gauge.layernorms if site.name in beside)
    places = tuple(Place(*place[:3]) for place in recipe["recenter"])
    counts = {"replaced": len(replaced), "kept": len(kept), "untouched": len(untouched), "recentered": len(places)}
    certificate = replace(conversion.certificate, **counts, weights_sha256="")  # which was of the first layers
    return replace(
        conversion, certificate=certificate, replaced=replaced, kept=kept, untouched=untouched, recentered=places,
    )  # fmt: skip


def _why(why: str, key: str, name: str, to: Spread) -> str:
    """Why a norm is kept, for another that it stands for: what reads its input is in that one's layers."""
    return re.sub(r"[\w.]+", lambda word: to.beside(word[0], key, name), why)


def _untied(first: PreTrainedModel, converted: PreTrainedModel, to: Spread) -> list[list[str]]:
    """Groups of names that were one parameter and are several now."""
    still = {frozenset(group) for group in tied(converted)}
    return [[to.first(name) for name in group] for group in tied(first) if frozenset(group) not in still]


def _config(config: PretrainedConfig, converted: PretrainedConfig, dtype: torch.dtype) -> PretrainedConfig:
    """The configuration that is saved, which ties what the converted one ties: also that of a part for text."""
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):  # as it is loaded
        if part is not None:
            part.dtype = dtype
    for saved, other in ((config, converted), (config.get_text_config(), converted.get_text_config())):
        if hasattr(other, "tie_word_embeddings"):
            saved.tie_word_embeddings = other.tie_word_embeddings
    return config


def _write(
    shards: Shards, folder: Path, gauge: Gauge, untied: list[list[str]], conversion: Conversion, to: Spread,
    dtypes: Mapping[str, torch.dtype],
) -> None:  # fmt: skip
    home: dict[str, str] = {}
    size = 0
    scales = {name: shards.read(name).to(dtypes[name]) for name in set(gauge.scaled.values())}
    copies = {name: next(n for n in group if n in shards.home) for group in untied for name in group}

    def edited(name: str, value: Tensor) -> Tensor:
        value = value.to(dtypes[name])  # at first, as where it is loaded and converted in memory
        center_writers({name: value} | {k: v.clone() for k, v in scales.items() if k != name}, gauge)
        return value

    def save(tensors: dict[str, Tensor], file: str) -> None:
        nonlocal size
        if damaged := [name for name, value in tensors.items() if value.itemsize > 1 and value.isnan().any()]:
            raise ConversionError(f"{damaged[0]} has NaN in it: nothing can be said of its model, and nothing was kept")
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file, {"format": "pt"})
        home.update(dict.fromkeys(tensors, file))
        size += sum(value.nbytes for value in tensors.values())

    extra = {name: edited(name, shards.read(source)) for name, source in copies.items() if name not in shards.home}
    buffers = dict(conversion.model.named_buffers())
    tables = {name: short for short in conversion.recipe.get("tables", ()) for name in to(short)}
    extra |= {name: buffers[short] for name, short in tables.items() if name not in shards.home}
    alone = shards.files == [PLAIN]  # beside a file of that name no other and no index would be read
    for file in shards.files:
        save({name: edited(name, value) for name, value in shards.of(file)} | (extra if alone else {}), file)
    if extra and not alone:
        names = (f"model-untied{'-' * i}.safetensors" for i in itertools.count())
        save(extra, next(name for name in names if name not in shards.files))
    if not alone:
        index = {"metadata": {"total_size": size}, "weight_map": home}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
