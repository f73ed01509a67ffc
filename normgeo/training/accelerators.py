"""The processes and devices that a twin is trained on, which accelerate knows of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from normgeo.errors import NormGeoError, first_line
from normgeo.training.recipe import Recipe

__all__ = [
    "by_first",
    "check_agreed",
    "check_sharding",
    "loss_explained",
    "part_tensor",
    "prepared",
    "processes",
    "ready",
    "start_accelerator",
]

T = TypeVar("T")


def processes(device: str) -> accelerate.PartialState:
    """The processes that train, which are those that were launched: on CPUs, where `auto` finds nothing else.

    Raises:
        NormGeoError: they know nothing of each other, so that each would train for itself.
    """
    state = accelerate.PartialState(cpu=_on_cpu(device))
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if state.num_processes != launched:
        raise NormGeoError(
            f"{launched} processes were launched, and each would train for itself on {state.device}: there is no "
            "device for them together; give --device cpu, or launch them where there are GPUs"
        )
    return state


def _on_cpu(device: str) -> bool:
    """Whether to train on the CPU; accelerate, left to itself, does not have several processes there."""
    return device == "cpu" or (
        device == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available())
    )


def check_agreed(told: dict[str, Any], hint: str) -> None:
    """Refuse, in all processes, a training for which they were given different things.

    Raises:
        NormGeoError: what differs, and what to do.
    """
    everyone: list[dict[str, Any]] = gather_object([told])
    for key, first in everyone[0].items():
        if others := [each[key] for each in everyone if each[key] != first]:
            raise NormGeoError(f"the processes of this training have another {key}: {first} and {others[0]}; {hint}")


def by_first(do: Callable[[], T]) -> T | None:
    """What the first process gets from `do`; None in the others.

    Raises:
        SystemExit: in the others, silently, where the first failed; it says why itself.
    """
    result = None
    if accelerate.PartialState().is_main_process:
        try:
            result = do()
        except BaseException:
            with suppress(RuntimeError):  # nobody listens, and what went wrong is to be said
                broadcast_object_list([True])
            raise
    failed: list[Any] = broadcast_object_list([False])
    if failed[0]:
        raise SystemExit(1)
    return result


@contextmanager
def loss_explained() -> Iterator[None]:
    """That another process has ended, as whatever is exchanged with it next shows, as one line.

    Raises:
        NormGeoError: that line.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, distributed.DistError) or "gloo" in str(error)  # whose errors have no type
        if not lost or "invalid usage" in str(error):
            raise
        safe = "what was saved is safe: --resume goes on from there"
        raise NormGeoError(f"another process of this training has ended; {safe} ({first_line(error)})") from error


def start_accelerator(recipe: Recipe, device: str = "auto") -> accelerate.Accelerator:
    """The processes and devices to train on: those of `accelerate launch` or torchrun, or this process alone.

    Raises:
        NormGeoError: the device, the precision or what was launched cannot be had, or the batch cannot be divided.
    """
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise NormGeoError(f"train on auto, cpu, cuda or mps, not {device!r}; choose GPUs with accelerate launch")
    if device in ("cuda", "mps") and not getattr(torch, device).is_available():
        raise NormGeoError(f"there is no {device} device here; give --device cpu")
    processes(device)
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=False)  # a process may train with another precision than before
    try:
        accelerator = accelerate.Accelerator(
            cpu=_on_cpu(device),
            mixed_precision=recipe.precision,
            gradient_accumulation_steps=recipe.accumulate,
        )
    except ValueError as error:
        raise NormGeoError(f"cannot train in {recipe.precision} here: {error}") from error
    except ImportError as error:  # what a launcher was told to use
        raise NormGeoError(f"cannot train as this process was launched: {error}") from error
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise NormGeoError(
            f"{kind} takes steps of its own; launch with torchrun, or accelerate's --multi_gpu or FSDP 2"
        )
    if device != "auto" and accelerator.device.type != device:
        raise NormGeoError(f"this process trains on {accelerator.device} already; train on {device} in another one")
    if recipe.precision == "fp16" and accelerator.device.type == "cpu":  # accelerate would train in float32
        raise NormGeoError("cannot train in fp16 on a CPU; give --precision bf16 or no")
    parts = accelerator.num_processes * recipe.accumulate
    if recipe.batch % parts:
        raise NormGeoError(
            f"a batch of {recipe.batch} sequences cannot be divided among {accelerator.num_processes} processes with "
            f"{recipe.accumulate} passes each; give --batch a multiple of {parts}, or launch as many as divide it"
        )
    return accelerator


def prepared(
    accelerator: accelerate.Accelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """What runs a model for these processes and devices, and what takes its steps.

    The model's forward stays its own: mixed precision is for training, not for evaluation.
    """
    own = {name: value for name, value in vars(model).items() if name == "forward"}
    running, stepping = accelerator.prepare(model, optimizer)
    for name in ("forward", "_original_forward"):
        vars(model).pop(name, None)
    vars(model).update(own)
    in_order = accelerator.device.type == "cpu" and accelerator.num_processes > 2  # of two numbers any is the same
    if isinstance(running, DistributedDataParallel) and in_order:
        running.register_comm_hook(None, lambda _, bucket: _mean_gradients(bucket))  # which refuses types as strings
    return running, stepping


def _mean_gradients(bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore
    """The mean of the processes' gradients, each parameter's added up on its own, in the place of what they were.

    The order in which gloo adds up what several processes have of a number depends on where it lies, and DDP lays
    gradients anew after its first step: added up together, those of a resumed run would have other last bits.
    """
    together = bucket.buffer().div_(distributed.get_world_size())
    each = together.split([parameter.numel() for parameter in bucket.parameters()])
    added = [distributed.all_reduce(part, async_op=True).get_future() for part in each]  # pyright: ignore
    return torch.futures.collect_all(added).then(lambda _: together)


def ready(accelerator: accelerate.Accelerator, recipe: Recipe) -> accelerate.Accelerator:
    """The accelerator at the beginning of an optimizer step of this recipe.

    Its state is the whole process's: another trainer, or a variable of the environment, may have set it.

    Raises:
        NormGeoError: the process computes in another precision by now.
    """
    if accelerator.mixed_precision != recipe.precision:
        raise NormGeoError(
            f"another Trainer has set this process to the precision {accelerator.mixed_precision}, and this one trains "
            f"in {recipe.precision}: train them one after the other"
        )
    accelerator.gradient_accumulation_steps = recipe.accumulate
    accelerator.step = 0
    return accelerator


def check_sharding(norm: str, accelerator: accelerate.Accelerator) -> None:
    """Refuse what FSDP cannot do.

    Raises:
        NormGeoError: it is version 1, or the form recenters what the processes would share.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    if not accelerator.is_fsdp2:
        raise NormGeoError("models are sharded by FSDP 2; launch with --fsdp_version 2")
    if norm not in ("layernorm", "rmsnorm"):
        raise NormGeoError(
            f"FSDP cannot shard the {norm} training form, which recenters its parameters where they are read; train it "
            "with torchrun or accelerate launch --multi_gpu, the whole model on each device"
        )


def part_tensor(value: Tensor, like: Tensor) -> Tensor:
    """What this process has of a tensor that is divided as another is; all of it, if that is not."""
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value
