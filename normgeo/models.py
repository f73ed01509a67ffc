"""Models: their dtypes and devices, copies, checks and digests, and the RMSNorm twin that ships with the package."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from normgeo.errors import ModelError, first_line
from normgeo.norms import RMSNorm

__all__ = [
    "DTYPES",
    "OfAllThreads",
    "TwinConfig",
    "TwinLMHeadModel",
    "base_model",
    "check_model",
    "copied",
    "default_dtype",
    "dtype_name",
    "loaded_dtype",
    "memory_explained",
    "on_cpu",
    "out_of_memory",
    "pick_dtype",
    "plain_parts",
    "seeded",
    "shared_copy",
    "tokenizer_digest",
    "uncompiled",
    "usable_device",
    "weights_digest",
    "whole",
    "widened",
]

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
"""The dtypes a model can be loaded in, by the names the command line knows them by."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name: `bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def widened(model: nn.Module, error: Exception) -> str:
    """What may help a model with weights in half precision that fails, in words.

    Loading leaves some of XLNet's in single precision; and not all that torch computes it computes in half.
    """
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    of_types = len(dtypes) > 1 or re.search(r"dtype|Half|BFloat16|not implemented for", str(error))
    return "try --dtype float32 (dtype=), or " if of_types and dtypes & {torch.float16, torch.bfloat16} else ""


class TwinConfig(GPT2Config):
    """GPT-2's configuration for the RMSNorm twin; the LayerNorm twin is a plain GPT-2."""

    model_type = "normgeo_gpt2_rmsnorm"


class TwinLMHeadModel(GPT2LMHeadModel):
    """GPT-2 with RMSNorm in the place of every LayerNorm and nothing else changed (*Geometry* section 3.3)."""

    config_class = TwinConfig

    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        for parent in list(self.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.LayerNorm):
                    setattr(parent, name, RMSNorm(child.normalized_shape[0], child.eps))


def out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine, has too little memory; CUDA's illegal accesses speak of memory as well."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        said in str(error).lower() for said in ("out of memory", "allocate memory", "not enough memory")
    )


def usable_device(name: str) -> str:
    """The torch device a name stands for, where numbers can be computed; `auto` is CUDA, else MPS, else the CPU.

    Raises:
        ModelError: there is no such device here, or it holds no numbers, as `meta` does.
    """
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = best if name == "auto" else name
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        why = first_line(error).rstrip(".")
        if "device type at start of device string" in why:  # and a list of all that torch has ever had
            raise ModelError(f"there is no device {device!r}; give auto, cpu, cuda, cuda:1, mps ...") from error
        why = why.partition(". ")[0]  # a list of all backends may follow
        raise ModelError(f"cannot use the device {device!r}: {why}; give one that this machine has, as cpu") from error
    return device


@contextmanager
def memory_explained(what: str, hint: str, *, counted: bool = False) -> Iterator[None]:
    """While inside, what does not fit into memory is an error of one line.

    Args:
        what: it.
        hint: what to do.
        counted: there are sizes of a user's inside, and more numbers than can be counted do not fit either.

    Raises:
        ModelError: something does not fit.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        uncountable = counted and (isinstance(error, OverflowError) or "verflow" in str(error))
        if not (isinstance(error, MemoryError) or out_of_memory(error) or uncountable):
            raise
        raise ModelError(f"{what} does not fit into memory; {hint}") from error


def pick_dtype(name: str | None, device: str) -> torch.dtype | Literal["auto"]:
    """The dtype a name stands for; None is float32 on the CPU and the checkpoint's own elsewhere.

    Raises:
        ModelError: there is no such dtype.
    """
    if name not in (None, "auto", *DTYPES):
        raise ModelError(f"no dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES.get(name or ("float32" if device == "cpu" else "auto"), "auto")


def on_cpu(function: F) -> F:
    """A function whose own tensors are on the CPU where it does not say otherwise, whatever torch's default device is.

    Where that is the CPU already nothing is entered, which would cost every operation a microsecond.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return function(*args, **kwargs)

    return called  # pyright: ignore[reportReturnType]


@contextmanager
def seeded(seed: int, devices: Collection[torch.device] = ()) -> Iterator[None]:
    """While inside, what the CPU and these devices draw comes from a seed; afterwards all is as if nothing had been.

    Of devices other than CUDA's nothing is seeded.
    """
    on_cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(on_cuda):
        torch.default_generator.manual_seed(seed)  # torch's own function seeds every GPU that there is
        for device in on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def copied(module: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of a module, with `memo` in the place of what has these ids.

    Raises:
        ModelError: it cannot be copied, as what holds a lock, an open file or what cannot be copied itself.
    """
    # every module has ten sets and dictionaries of hooks, mostly empty, which take half the time to copy
    empty = (
        value for part in module.modules() for value in vars(part).values()
        if type(value) in (OrderedDict, set) and not value
    )  # fmt: skip
    # what a pass has computed and the module keeps, as a loss of its own or a pruned weight, is copied as numbers alone
    kept = (tensor for part in module.modules() for tensor in _tensors(vars(part)) if tensor.grad_fn is not None)
    instead: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in kept}
    try:
        return copy.deepcopy(module, instead | {id(value): type(value)() for value in empty} | (memo or {}))
    except Exception as error:  # whatever copying a part of a model raises
        if isinstance(error, MemoryError) or out_of_memory(error):
            raise
        what = f"{type(module).__name__} cannot be copied, which this takes"
        raise ModelError(f"{what}: {first_line(error)}") from error


def _tensors(value: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors in a value, in lists and in dictionaries, which may contain themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in within:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part, (*within, id(value)))


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in modules of their own: hooks that either gets from now on are not on the other."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copied(model, {id(tensor): tensor for tensor in shared})


def whole(value: Tensor) -> Tensor:
    """A tensor whose parts lie with several processes (DTensor), all of which have to ask for it; others as they are.

    What is still on its way from them is waited for.
    """
    held: Any = value
    held = held.full_tensor() if hasattr(held, "full_tensor") else held
    return held.trigger_wait() if hasattr(held, "trigger_wait") else held


def check_model(model: Any) -> None:
    """Refuse what is no model of transformers, one in a wrapper, and what is sharded by FSDP 1.

    Adapters, which hand a model's attributes on, are taken.

    Raises:
        ModelError: what was received, and what to give.
    """
    parts = list(model.named_modules()) if isinstance(model, nn.Module) else []
    if any("_fsdp_wrapped_module" in part._modules for _, part in parts):
        raise ModelError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel, whose weights are there while it runs "
            "alone: shard it by FSDP 2 (fully_shard) to measure it, or load its full state dict into a whole model"
        )
    if isinstance(model, PreTrainedModel):
        return
    within = next((name for name in ("_orig_mod", "module") if isinstance(getattr(model, name, None), nn.Module)), None)
    if within is None and hasattr(model, "main_input_name"):
        _check_adapters(model)
        return
    give = "what load_model returns, or a module of your own as normgeo.wrap makes one of it"
    if within:
        give = f"the model within, its .{within}"
    elif inner := next((name for name, part in parts if isinstance(part, PreTrainedModel)), None):
        give = (
            f"the model within, its .get_submodule({inner!r}), or, if it takes token ids, what normgeo.wrap makes of it"
        )
    raise ModelError(f"received a {type(model).__name__}, which is no model of transformers; give {give}")


def _check_adapters(model: Any) -> None:
    """Refuse adapters around a model, of which what runs within tells nothing, and those that hide what it takes."""
    name, configs = type(model).__name__, getattr(model, "peft_config", None) or {}
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise ModelError(
            f"the soft prompts of this {name} are no part of the model within, and change what its norms are given: "
            "it can be neither measured nor converted with them; without them, give its .get_base_model()"
        )
    taken = inspect.signature(model.forward).parameters.values()
    if configs and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken):
        raise ModelError(
            f"received a {name}, which does not tell what its model takes: give the model within, its "
            ".get_base_model(), which has the adapters in it"
        )


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: hidden states do not need logits, and the head costs a quarter of a small model."""
    return cast(PreTrainedModel, model.base_model)


def loaded_dtype(model: PreTrainedModel) -> torch.dtype:
    """What a model is loaded in: its narrowest parameters' dtype, for some keep a few in single precision always."""
    return min((p.dtype for p in model.parameters() if p.is_floating_point()), key=lambda dtype: dtype.itemsize)


class OfAllThreads:
    """A setting of the whole process, in which several threads may be at once: the last one out puts it back."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make, self.lock, self.within = make, threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.within:
                self.setting = self.make()
                self.setting.__enter__()
            self.within += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.within -= 1
            if not self.within:
                self.setting.__exit__(None, None, None)


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DOUBLE = OfAllThreads(_double)


@contextmanager
def _as_written() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


EAGER = OfAllThreads(_as_written)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Models make constants in the default dtype; in float64 these have to be float64 too."""
    return DOUBLE if dtype == torch.float64 else contextlib.nullcontext()


def uncompiled() -> AbstractContextManager[Any]:
    """While inside, compiled models run as they are written: their hooks would be compiled too, some without an end.

    So do torch's encoders, which in evaluation call no modules, or give them nested tensors.
    """
    return EAGER


def weights_digest(model: nn.Module) -> str:
    """sha256 over the names, dtypes, shapes and bytes of every parameter and persistent buffer.

    Take it before the model runs: some quantized weights are laid out anew in a forward pass, and to tell of them after
    that (`state_dict`) changes what they compute.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in plain_parts(whole(tensor)):
            if part.device.type != "meta" and part.numel():
                digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors in memory that one is made of: itself, or of a quantized one its integers, scales and zeros."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over all that decides which ids a text becomes: vocabulary, merges, normalization, special tokens.

    Of a tokenizer in Python, of which no file tells all, the class stands for what is beside its vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        content: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        content = json.loads(backend.to_str())
        for of_the_last_call in ("truncation", "padding"):
            content.pop(of_the_last_call, None)
    content["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
