r"""What a training step costs, and what of it the norms and the recentering are (*Pre-RMSNorm* section 3.4.1, fig. 4).

By ablation: of each form copies run that lack one part, and a part is what the step takes longer with it. That counts
all a part causes (kernels, autograd's records, memory traffic), forward and backward, which timers around modules do
not see. Every part is taken away from the whole form on its own, so that nothing makes them add up; how far they do is
in the result (`unexplained`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers.pytorch_utils import Conv1D

from normgeo.bench.inference_models import SIZES, main_sites, vectors_given
from normgeo.cards import EMBEDDED
from normgeo.conversion.convert import convert
from normgeo.conversion.shallow import gauge_of
from normgeo.conversion.trainable import unparametrized
from normgeo.converted import held_by
from normgeo.errors import DataError, NormGeoError
from normgeo.examples import example_inputs
from normgeo.loading import load_model
from normgeo.models import memory_explained, seeded, usable_device
from normgeo.norms import CRMSNorm, RMSNorm
from normgeo.numbers import check_number, check_numbers
from normgeo.stream import check_context
from normgeo.system.progress import progress_bar
from normgeo.system.timing import circumstances, interleaved, quartiles, synchronize
from normgeo.training import recipe as recipes
from normgeo.training.compressed import Reader, compressed, widened
from normgeo.training.recipe import Recipe, recipe_for
from normgeo.training.twins import adamw, build_twin

__all__ = [
    "FORMS", "MIXED", "PARTS", "PLAIN", "Task", "ablated", "bench_training", "breakdown", "images", "own", "task_of",
    "text",
]  # fmt: skip

FORMS = ("layernorm", "pre-rmsnorm", "pre-crmsnorm")
"""The Pre-LN model and its two training forms."""

PLAIN = "crmsnorm"
"""Pre-CRMSNorm with parameters of its own and nothing to recenter or fold, which is what *Pre-RMSNorm* times. It does
not train as the Pre-LN model does, and where a head is tied, which folding would undo, it is another function."""

PARTS = ("norms", "linears", "input", "rest", "optimizer")
"""Norms; recentered and folded linear layers; recentered embeddings; forward and backward without these; AdamW."""

MIXED = ("no", "bf16")
"""Precisions that a step is timed in; fp16 wants losses scaled, which is no part of a step that could be taken away."""

WITHOUT = {"layernorm": ("norms",), "pre-rmsnorm": PARTS[:3], "pre-crmsnorm": PARTS[:3], PLAIN: ("norms",)}


@dataclass(frozen=True)
class Task:
    """What a step trains, and on what.

    Attributes:
        build: a fresh model in one of `FORMS`.
        inputs: what it is given, on the CPU.
        labels: what it should say.
        loss: of its logits and the labels.
        recipe: AdamW's numbers.
        about: what is noted in the result; `context` is the number of tokens in a sequence, for an image of those that
            its norms are given, and `vocabulary` the number of tokens or classes to choose from.
    """

    build: Callable[[str], PreTrainedModel]
    inputs: dict[str, Tensor]
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    recipe: Recipe
    about: dict[str, int]


def text(recipe: Recipe, *, vocabulary: int = 4096, seed: int = 0) -> Task:
    """The next token of random ids by a GPT-2, `batch` x `context` of its recipe in a step, without dropout.

    Raises:
        NormGeoError: there is no token.
    """
    check_number("vocabulary", vocabulary, 1)
    recipe = replace(recipe, dropout=0.0)
    ids = torch.randint(vocabulary, (recipe.batch, recipe.context), generator=torch.Generator().manual_seed(seed))
    return Task(
        lambda form: build_twin(form, recipe, vocabulary),
        {"input_ids": ids},
        ids[:, 1:].flatten(),
        _next_token,
        recipe,
        _about(recipe.layers, recipe.d, recipe.heads, recipe.batch, recipe.context, vocabulary),
    )


def images(config: ViTConfig, *, batch: int = 4, seed: int = 0) -> Task:
    """Classes of random images by a ViT, without dropout, as DeiT is trained (*Pre-RMSNorm* section 4.1).

    The Pre-CRMSNorm form has streams of the configuration's width, and stands for a ViT that is one wider.

    Raises:
        NormGeoError: there is no image.
    """
    check_numbers(batch=batch)
    side: Any = config.image_size
    patches, classes = (side // config.patch_size) ** 2, int(config.num_labels)  # pyright: ignore
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch, config.num_channels, side, side, generator=generator)
    labels = torch.randint(classes, (batch,), generator=generator)

    def build(form: str) -> PreTrainedModel:
        with seeded(seed):
            model = ViTForImageClassification(config)
            model = widened(model) if form == "pre-crmsnorm" else model
        return _in_form(form, model)

    return Task(
        build,
        {"pixel_values": pixels},
        labels,
        cross_entropy,
        recipe_for("tiny"),
        _about(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, batch, patches + 1, classes),
    )


def own(name: str, *, batch: int = 4, context: int = 256, seed: int = 0, **named: Any) -> Task:
    """The next token of random ids by a Pre-LN model of one's own, or classes of random images; float32, no dropout.

    Its Pre-CRMSNorm form has streams that are one narrower. What else is `named` goes to `load_model`.

    Raises:
        NormGeoError: there is no such model, it is no causal language model nor classifies images, or lacks a form.
    """

    def build(form: str) -> PreTrainedModel:
        return _in_form(form, _without_dropout(load_model(name, dtype=torch.float32, **named)).requires_grad_(True))

    model = build("layernorm")
    config: Any = model.config.get_text_config()
    is_image, classes = model.main_input_name == "pixel_values", int(getattr(config, "num_labels", 0))
    if not (is_image and classes) and not model.can_generate():
        raise NormGeoError(f"{type(model).__name__} is no causal language model, nor a classifier of images")
    recipe = recipe_for("tiny", batch=batch, context=None if is_image else context)  # refuses what is no step
    for form in FORMS[1:]:
        _in_form(form, model)  # a model that has none is refused here, before others are timed
    shape = (config.num_hidden_layers, config.hidden_size, getattr(config, "num_attention_heads", 0))
    generator = torch.Generator().manual_seed(seed)
    if is_image:
        inputs = {k: v[:1].repeat(batch, *[1] * (v.ndim - 1)) for k, v in example_inputs(model).items()}
        labels = torch.randint(classes, (batch,), generator=generator)
        about = _about(*shape, batch, vectors_given(model, main_sites(model)[0], inputs), classes)
        return Task(build, inputs, labels, cross_entropy, recipe, about)
    check_context(model, context)
    ids = torch.randint(config.vocab_size, (batch, context), generator=generator)
    inputs, about = {"input_ids": ids}, _about(*shape, batch, context, config.vocab_size)
    return Task(build, inputs, ids[:, 1:].flatten(), _next_token, recipe, about)


def _in_form(form: str, model: PreTrainedModel) -> PreTrainedModel:
    """A Pre-LN model, or its training form of that name."""
    if form == "pre-rmsnorm":
        return convert(model, gauge=gauge_of(model, training=True), trainable=True).model
    return compressed(model) if form == "pre-crmsnorm" else model


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for config in (model.config, model.config.get_text_config()):
        for key, value in list(vars(config).items()):
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def _about(layers: int, d: int, heads: int, batch: int, context: int, vocabulary: int) -> dict[str, int]:
    return {"layers": layers, "d": d, "heads": heads, "batch": batch, "context": context, "vocabulary": vocabulary}


def task_of(
    size: str, *, batch: int = 4, context: int = 256, vocabulary: int = 4096, seed: int = 0, **named: Any
) -> Task:
    """The task of a size: a GPT-2 that `train` takes, a ViT or GPT of *Pre-RMSNorm* table 2 and figure 5, or a model.

    Raises:
        NormGeoError: there is no such size, nor a model of that name.
    """
    with _fitting(batch, context):
        return _task_of(size, batch, context, vocabulary, seed, named)


def _fitting(batch: int, context: int) -> AbstractContextManager[None]:
    return memory_explained(f"a step of {batch} x {context}", "give a smaller --batch or --context", counted=True)


def _task_of(size: str, batch: int, context: int, vocabulary: int, seed: int, named: dict[str, Any]) -> Task:
    made_up = size in (*recipes.SIZES, *SIZES)  # whatever lies here by that name, which ./ goes before
    if size in EMBEDDED or "/" in size or (Path(size).is_dir() and not made_up):
        return own(size, batch=batch, context=context, seed=seed, **named)
    if not made_up:
        raise NormGeoError(
            f"no size {size!r}; the sizes are {', '.join((*recipes.SIZES, *SIZES))}, and a model of yours is named by "
            "its directory or hub id"
        )
    if named.get("revision") is not None:
        raise NormGeoError(f"{size} is made up, and has no revision {named['revision']!r}")
    if size.startswith("vit-"):
        return images(SIZES[size](), batch=batch, seed=seed)  # pyright: ignore[reportArgumentType]
    config: Any = SIZES[size]() if size in SIZES else None
    shape = {} if config is None else {"layers": config.n_layer, "d": config.n_embd, "heads": config.n_head}
    recipe = recipe_for("tiny" if shape else size, batch=batch, context=context, **shape)
    return text(recipe, vocabulary=vocabulary, seed=seed)


@torch.no_grad()
def ablated(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """A copy of a model in one of its forms without a part: `norms`, `linears` or `input`; what is left is shared.

    Norms become the identity. Recentered and folded parameters become plain ones of the values that they act with, so
    that without `linears` or `input` the outputs are the same.

    Raises:
        NormGeoError: the model has no such part.
    """
    result, found = copy.deepcopy(model, {id(p): p for p in model.parameters()}), False
    for name, module in list(result.named_modules()):
        if part == "norms" and isinstance(module, nn.LayerNorm | RMSNorm | CRMSNorm):
            setattr(*held_by(result, name), nn.Identity())
        elif part == "linears" and isinstance(module, Reader):
            setattr(*held_by(result, name), _plain(module))
        elif part == ("linears" if isinstance(module, nn.Linear | Conv1D) else "input") and is_parametrized(module):
            unparametrized(module)
        else:
            continue
        found = True
    if not found:
        raise NormGeoError(f"{type(model).__name__} has no {part} to take away; give a Pre-LN model")
    return result


def _plain(reader: Reader) -> nn.Linear:
    weight, bias = reader.folded()
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight)
    new.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias}, assign=True)
    return new


def bench_training(
    task: Task, *, rounds: int = 100, precision: str = "no", device: str = "cpu", progress: bool = False
) -> pd.DataFrame:
    """Time training steps of all forms, of copies without one part, and of the model without norms, interleaved.

    Every variant takes one step a round, in random order, on the same inputs; a round before them warms up. Only whole
    forms have an optimizer, whose learning rate is 0: it does its work, and the weights, of float32, stay where they
    are. Memory is not given back to the system meanwhile.

    Args:
        task: what is trained, as `text` and `images` make it.
        rounds: how many; quartiles want 100.
        precision: mixed precision: no or bf16.
        device: cpu or a CUDA device.
        progress: show a progress bar.

    Returns:
        Raw times: one row per round and variant (`form`, and `without` which part, "" for the whole form), with
        seconds of `forward_backward` and, for whole forms, of the `optimizer` (clipping and AdamW), and what was run
        where. The form without norms is `layernorm` without `norms`. `breakdown` makes shares of them.

    Raises:
        NormGeoError: fewer than one round, no such precision, or no such device.
    """
    check_number("rounds", rounds, 1)
    if precision not in MIXED:
        raise NormGeoError(f"no precision {precision!r} here; choose {' or '.join(MIXED)}")
    with _fitting(task.about["batch"], task.about["context"]):
        return _timed(task, usable_device(device), rounds, precision, progress)


def _timed(task: Task, device: str, rounds: int, precision: str, progress: bool) -> pd.DataFrame:
    steps = _variants(task, device, precision)
    measures = {" without ".join(name): step for name, step in steps.items()}
    tokens = task.about["batch"] * task.about["context"]
    rows = []
    with progress_bar("steps", rounds * len(steps) * tokens, enabled=progress) as advance:
        for number, name, (passes, optimizer) in interleaved(measures, rounds=rounds, seconds=math.inf):
            form, _, without = name.partition(" without ")
            found = {"round": number, "form": form, "without": without}
            rows.append(found | {"forward_backward": passes, "optimizer": optimizer})
            advance(tokens)
    about = {**circumstances(torch.device(device)), **task.about, "rounds": rounds, "precision": precision}
    return pd.DataFrame(rows).assign(**about)


Step = Callable[[], tuple[float, float]]


def _variants(task: Task, device: str, precision: str) -> dict[tuple[str, str], Step]:
    """By form and what it lacks: a step, which gives seconds of forward and backward, and of the optimizer."""
    task = replace(task, inputs={k: v.to(device) for k, v in task.inputs.items()}, labels=task.labels.to(device))
    steps = {}
    for form in WITHOUT:
        whole = _built(task, form).to(device).train()  # pyright: ignore[reportArgumentType]
        for part in WITHOUT[form]:
            steps[form, part] = _step(task, precision, ablated(whole, part), whole)
        steps[form, ""] = _step(task, precision, whole)
    return steps


def _built(task: Task, form: str) -> PreTrainedModel:
    if form != PLAIN:
        return task.build(form)
    model = ablated(ablated(task.build("pre-crmsnorm"), "linears"), "input")
    if (head := model.get_output_embeddings()) is not None and model.config.tie_word_embeddings:
        head.weight, head.bias = model.get_input_embeddings().weight, None  # folding gave it both
    return model


def _step(task: Task, precision: str, model: PreTrainedModel, whole: PreTrainedModel | None = None) -> Step:
    """A step of a whole form, or without optimizer of an ablated copy of `whole`, which shares parameters with it."""
    parameters, adam = [*model.parameters(), *(whole.parameters() if whole else ())], None
    options = {"use_cache": False} if "input_ids" in task.inputs else {}
    if whole is None:
        adam = adamw(model, task.recipe)
        for group in adam.param_groups:
            group["lr"] = 0.0  # all rounds are of the same weights

    def clock() -> float:
        synchronize(model.device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        start = clock()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = task.loss(model(**task.inputs, **options).logits, task.labels)
        loss.backward()
        middle = clock()
        if adam is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.recipe.clip)
            adam.step()
        end = clock()
        for p in parameters:
            p.grad = None
        return middle - start, end - middle if adam is not None else float("nan")

    return step


def breakdown(raw: pd.DataFrame) -> pd.DataFrame:
    """Medians and quartiles of every part of a step, from `bench_training`'s raw times.

    Returns:
        One row per form (`no-norm` among them) and part: `whole`, the parts it has, and `unexplained`, the whole minus
        them. `seconds` is its time and `ratio` that over the whole step of `layernorm` in the same round, each with its
        quartiles `*_q25` and `*_q75`. Medians of parts do not add up to the median of the whole, quite.

    Raises:
        DataError: there are times of a form without those of it whole, or without one of its parts.
    """
    forms = [form for form in WITHOUT if form == "layernorm" or form in set(raw.form)]
    wanted = {(form, part) for form in forms for part in ("", *WITHOUT[form])}
    if absent := wanted - {*zip(raw.form, raw["without"], strict=True)}:
        form, part = min(absent)
        raise DataError(f"there are no times of {form}" + f" without its {part}" * bool(part))
    passes = raw.pivot(index="round", columns=["form", "without"], values="forward_backward")
    adam = raw[raw.without == ""].pivot(index="round", columns="form", values="optimizer")
    rest = passes["layernorm", "norms"]
    of_one = {"no-norm": {"rest": rest, "optimizer": adam["layernorm"]}}
    wholes = {"no-norm": rest + adam["layernorm"]}
    for form in forms:
        whole = passes[form, ""]
        taken = {part: whole - passes[form, part] for part in WITHOUT[form]}
        of_one[form], wholes[form] = taken | {"rest": rest, "optimizer": adam[form]}, whole + adam[form]
    rows = []
    for form, parts in of_one.items():
        left = wholes[form] - sum(parts.values())
        for part, seconds in {"whole": wholes[form], **parts, "unexplained": left}.items():
            ratios = quartiles("ratio", seconds / wholes["layernorm"])
            rows.append({"form": form, "part": part, **ratios, **quartiles("seconds", seconds)})
    about = raw.drop(columns=["round", "form", "without", "forward_backward", "optimizer"]).iloc[0]
    return pd.DataFrame(rows).assign(**{str(name): value for name, value in about.items()})
