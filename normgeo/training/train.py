"""Training a twin: the loop, on accelerate, that can be killed after any step and goes on as if it had not been.

Everything random is a function of the seed and the step, so that a state is parameters, AdamW's moments, a position in
the data and the losses so far. On a CPU a resumed run is bit-identical to one that was not interrupted.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import broadcast_object_list
from jaxtyping import Int64
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from normgeo import figures
from normgeo.errors import NormGeoError, RunError
from normgeo.models import memory_explained, whole
from normgeo.stream import check_context
from normgeo.system.files import unreadable, write_json
from normgeo.system.folders import whole_directory
from normgeo.system.progress import progress_bar
from normgeo.tokens import TokenStream
from normgeo.training import figures as training_figures
from normgeo.training.accelerators import (
    by_first,
    check_agreed,
    check_sharding,
    part_tensor,
    prepared,
    ready,
    start_accelerator,
)
from normgeo.training.corpus import Corpus
from normgeo.training.log import Log
from normgeo.training.recipe import Recipe, is_kept, learning_rate, mixed
from normgeo.training.state import (
    AFRESH,
    checkpoint_path,
    evaluated,
    latest_state,
    load_state,
    named,
    save_state,
    step_of,
    tensors_of,
    weights_in,
)  # fmt: skip
from normgeo.training.twins import (
    adamw,
    build_twin,
    check_trains,
    evaluate,
    kept_like,
    logits_of,
    loss_of,
    save_twin,
)  # fmt: skip

__all__ = ["Trainer", "train"]

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
COLUMNS = ("train_loss", "gradient_norm", "lr", "held_out_loss")
Report = Callable[[dict[str, float]], None]


class Trainer:
    """One twin in training.

    Args:
        norm: which twin.
        recipe: how it is trained.
        corpus: on what, from its beginning on or where a state says.
        vocabulary: number of tokens.
        folder: where states and checkpoints go; None keeps nothing.
        tokenizer: saved along with every checkpoint.
        device: auto, cpu, cuda or mps.
        model: trained instead of a fresh twin; with a folder it is kept as what its class makes of its configuration.

    Attributes:
        step: how many steps were taken.
        curve: a row per step: loss before the step (nats a token), the gradient's norm before clipping, the learning
            rate, and after the step the held-out loss, where it was evaluated.
    """

    def __init__(
        self,
        norm: str,
        recipe: Recipe,
        corpus: Corpus,
        vocabulary: int,
        folder: str | Path | None = None,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        model: PreTrainedModel | None = None,
    ) -> None:
        self.norm, self.recipe, self.corpus, self.tokenizer = norm, recipe, corpus, tokenizer
        self.folder = folder = None if folder is None else Path(folder)
        self.accelerator = start_accelerator(recipe, device)
        check_sharding(norm, self.accelerator)
        end = getattr(tokenizer, "eos_token_id", None)
        built = build_twin(norm, recipe, vocabulary, end) if model is None else model
        check_trains(built, recipe, getattr(corpus, "largest", -1))
        if folder is not None:
            self._empty = kept_like(norm, built, recipe, vocabulary, end, given=model is not None)
        self.model = built.to(self.accelerator.device).train()  # pyright: ignore[reportArgumentType]
        self._adam = adamw(self.model, recipe)
        self._wrapped, self._optimizer = prepared(self.accelerator, self.model, self._adam)
        self.step = 0
        self.rows: list[tuple[float, ...]] = []
        state = None if folder is None else latest_state(folder)
        found = {"state": None if state is None else named(state)}
        hint = (
            "give all of them the same" if folder is None else f"{folder} has to be one directory that all of them see"
        )
        check_agreed(self._identity() | found, hint)
        if state is None:
            corpus.seek()  # another twin may have been trained on it
        else:
            self._restore(state)

    @property
    def curve(self) -> pd.DataFrame:
        """The learning curve so far."""
        steps = pd.DataFrame({"step": np.arange(1, len(self.rows) + 1)})
        return steps.join(pd.DataFrame(self.rows, columns=list(COLUMNS), dtype=np.float64))

    def take_step(self) -> tuple[float, float, float]:
        """One optimizer step; its loss, the norm of its gradient, and its learning rate.

        Raises:
            NormGeoError: the loss or the gradient is not finite; no parameter has changed.
        """
        recipe, accelerator = self.recipe, ready(self.accelerator, self.recipe)
        rate = learning_rate(self.step, recipe)
        for group in self._adam.param_groups:
            group["lr"] = rate
        shape = (recipe.accumulate, accelerator.num_processes, -1, recipe.context)
        mine = self.corpus.take(recipe.batch).view(shape)[:, accelerator.process_index]
        losses: list[Tensor] = []
        norm = loss = math.nan
        self.model.zero_grad(set_to_none=True)  # of a step that failed
        for micro, ids in enumerate(mine):
            torch.manual_seed(mixed(recipe.seed, self.step, micro, accelerator.process_index))
            with accelerator.accumulate(self._wrapped):
                losses.append(self._loss(ids.to(accelerator.device)))
                accelerator.backward(losses[-1])
                if accelerator.sync_gradients:
                    mean = accelerator.reduce(torch.stack([part.detach() for part in losses]).mean(), "mean")
                    loss = self._finite("loss", float(mean.item()))  # pyright: ignore
                    clipped = accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
                    if clipped is not None:
                        norm = self._finite("gradient", float(whole(clipped).item()))
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm, rate

    def _loss(self, ids: Int64[Tensor, "rows time"]) -> Tensor:
        with self.accelerator.autocast():
            logits = logits_of(self._wrapped, ids)
        return loss_of(logits, ids)

    def _finite(self, what: str, value: float, step: int | None = None) -> float:
        """A loss, or the gradient's norm, of this step or the next; a scaler leaves out steps of lost gradients."""
        if math.isfinite(value) or (what == "gradient" and self.accelerator.scaler is not None):
            return value
        with suppress(RunError):
            self._draw()
        self.accelerator.wait_for_everyone()  # for all end here: a launcher ends the others as soon as one has
        safe = latest_state(self.folder) if self.folder is not None else None
        kept = f": --resume goes on at the same rate from the state before it, {safe}" if safe else ""
        raise NormGeoError(
            f"the {what} of the {self.norm} twin became {value} at step {step or self.step + 1}; lower the learning "
            f"rate (--lr, now {self.recipe.lr}) in a new run{kept}"
        )

    def run(
        self,
        held_out: TokenStream | None = None,
        report: Report = lambda row: None,
        progress: bool = False,
        log: Log = lambda step, row: None,
    ) -> None:
        """Take the steps that are left, keeping states and checkpoints.

        Args:
            held_out: text to evaluate on every `evaluate_every` steps.
            report: called with the row of each step that was evaluated, its loss the mean since the last.
            progress: show a progress bar.
            log: called with every step and its row of the curve.

        Raises:
            DataError: held-out text in contexts that are too long, or of another tokenizer.
            NormGeoError: a loss or the gradient is not finite.
            RunError: the disk is full.
        """
        recipe, main = self.recipe, self.accelerator.is_main_process
        tokens = recipe.batch * recipe.context
        if held_out is not None:  # before any step
            check_context(self.model, held_out.context)
        if self.step == 0 and is_kept(0, recipe):
            self._keep(held_out)
        if self.step == recipe.steps and self.folder is not None:
            gone = not checkpoint_path(self.folder, self.step).exists()
            self.accelerator.wait_for_everyone()  # all have looked before one writes
            if gone:
                self._keep(held_out)
        label, total = self.norm, recipe.steps * tokens
        with progress_bar(label, total, done=self.step * tokens, enabled=progress and main) as advance:
            try:
                while self.step < recipe.steps:
                    self._go_on(held_out, report, log)
                    advance(tokens)
            except Exception as error:  # whose reason the curve up to here may show
                if type(error) is not NormGeoError:  # of what is not finite, which has drawn it
                    with suppress(RunError):
                        self._draw()
                raise

    def _go_on(self, held_out: TokenStream | None, report: Report, log: Log) -> None:
        """A step, and what is due after it."""
        recipe, main = self.recipe, self.accelerator.is_main_process
        row = self.take_step()
        evaluated = self.step == recipe.steps or self.step % recipe.evaluate_every == 0
        loss = self._held_out_loss(held_out) if evaluated and held_out is not None else math.nan
        self.rows.append((*row, loss))
        if main:
            log(self.step, dict(zip(COLUMNS, self.rows[-1], strict=True)))
        if evaluated and held_out is not None:
            self._finite("held-out loss", loss, self.step)
        if evaluated and main:
            report(self._summary(recipe.evaluate_every))
        if is_kept(self.step, recipe):
            self._keep(held_out)
        if is_kept(self.step, recipe) or self.step % recipe.save_every == 0:
            self._save()

    def _held_out_loss(self, held_out: TokenStream) -> float:
        """The same in all processes, which all stop where it is not finite."""
        recipe, loss = self.recipe, math.nan
        if self.accelerator.is_main_process or isinstance(self.model, FSDPModule):  # which lies with all processes
            loss = evaluate(self.model, held_out, recipe.batch // (recipe.accumulate * self.accelerator.num_processes))
        shared: list[Any] = broadcast_object_list([loss])
        return shared[0]

    def _summary(self, since: int) -> dict[str, float]:
        losses = [row[0] for row in self.rows[-((self.step - 1) % since + 1) :]]
        row = {"step": float(self.step), "train_loss": float(np.mean(losses)), "lr": self.rows[-1][2]}
        return row if math.isnan(self.rows[-1][3]) else row | {"held_out_loss": self.rows[-1][3]}

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _keep(self, held_out: TokenStream | None) -> None:
        """The model after this step, as a checkpoint that `load_model` takes."""
        if self.folder is None:
            return
        folder, values = checkpoint_path(self.folder, self.step), self._values()

        def write() -> None:
            note = {
                "norm": self.norm, "step": self.step, "recipe": asdict(self.recipe),
                "data_sha256": self.corpus.digest, "packing": self.corpus.packing,
                "held_out": None if held_out is None else held_out.digest,
                "curve": json.loads(evaluated(self.curve, self.recipe.evaluate_every).to_json(orient="records")),
            }  # fmt: skip
            with whole_directory(folder, replace=True) as scratch:
                save_twin(self.norm, self._empty, values, self.recipe, scratch, self.tokenizer)
                write_json(scratch / "training.json", note | {"model_sha256": weights_in(scratch)})

        by_first(write)

    def _values(self, moment: str | None = None) -> dict[str, Tensor]:
        """What is kept of the model by name, or a moment of AdamW's; in the first process alone. All have to ask."""
        found = {}
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves some parameters whole
        for name, tensor in tensors_of(self.model).items():
            value = tensor if moment is None else self._adam.state.get(tensor, {}).get(moment)
            if value is not None:
                gathered = whole(value.detach())
                if self.accelerator.is_main_process:
                    found[name] = gathered.cpu().contiguous()
        return found

    def _save(self) -> None:
        if self.folder is None:
            return
        tensors = {f"parameter.{name}": value for name, value in self._values().items()}
        for moment in MOMENTS:
            tensors |= {f"{moment}.{name}": value for name, value in self._values(moment).items()}
        folder, scaler = self.folder, self.accelerator.scaler
        about = {
            "of": self._identity(), "data": self.corpus.position(), "processes": self.accelerator.num_processes,
            "scaler": None if scaler is None else scaler.state_dict(),
        }  # fmt: skip

        def write() -> None:
            self._draw()  # first: a state says that all before it is there
            save_state(folder, self.step, tensors | {"curve": torch.tensor(self.rows, dtype=torch.float64)}, about)

        by_first(write)

    def _draw(self) -> None:
        """The learning curve, of the steps that there are."""
        if self.folder is None or not self.rows or not self.accelerator.is_main_process:
            return
        with whole_directory(self.folder / "curve", replace=True) as scratch:
            self.curve.to_parquet(scratch / "curve.parquet", index=False)
            figures.save(training_figures.curves({self.norm: self.curve}), scratch / "curve")

    def _identity(self) -> dict[str, Any]:
        """What makes a training the one it is: another one's state is none to go on from."""
        about = {"norm": self.norm, "data_sha256": self.corpus.digest, "packing": self.corpus.packing}
        when = ("checkpoint_every", "save_every", "evaluate_every")
        return about | {key: value for key, value in asdict(self.recipe).items() if key not in when}

    @torch.no_grad()
    def _restore(self, path: Path) -> None:
        tensors, about = load_state(path)
        for key, here in self._identity().items():
            if (there := about.get("of", {}).get(key)) != here:
                raise RunError(f"{path} is of a training whose {key} is {there}, here {here}; give another folder")
        before, now = about.get("processes"), self.accelerator.num_processes
        if self.recipe.dropout and before not in (None, now) and self.accelerator.is_main_process:
            said = "each draws its own dropout, and the curve will not be that of a run in one piece"
            warnings.warn(f"{path} is of a run of {before} processes, this one has {now}: {said}", stacklevel=4)
        for name, tensor in tensors_of(self.model).items():
            stored = tensors.get(f"parameter.{name}")
            if stored is None or stored.shape != tensor.shape:
                raise RunError(f"{path} is of another model: {name} does not fit; start a new run")
            tensor.copy_(part_tensor(stored, tensor))
            if moments := {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}:
                self._adam.state[tensor] = {m: v if m == "step" else part_tensor(v, tensor) for m, v in moments.items()}
        try:
            if self.accelerator.scaler is not None and about["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(about["scaler"])
            self.corpus.seek(about["data"])
            self.step, self.rows = int(about["step"]), [tuple(row) for row in tensors["curve"].tolist()]
            if self.step != step_of(path) or len(self.rows) > self.step:
                raise ValueError(f"it is of step {self.step} and has a curve of {len(self.rows)} steps")
        except (LookupError, TypeError, ValueError) as error:
            raise unreadable(path, error, AFRESH) from error


def train(
    norm: str,
    recipe: Recipe,
    corpus: Corpus,
    vocabulary: int,
    folder: str | Path | None = None,
    *,
    held_out: TokenStream | None = None,
    tokenizer: Any = None,
    device: str = "auto",
    model: PreTrainedModel | None = None,
    report: Report = lambda row: None,
    progress: bool = False,
    log: Log = lambda step, row: None,
) -> tuple[PreTrainedModel, pd.DataFrame]:
    """Train one twin, or go on where `folder` says that its training stopped: that of the same recipe on the same data.

    Arguments are those of `Trainer`; `held_out` is evaluated on, `report` gets rows to print, `log` every step and row.

    Returns:
        The model in evaluation mode, and its learning curve: a row per step (`Trainer.curve`).

    Raises:
        DataError: too little text, ids beyond the vocabulary, or contexts of held-out text that are too long.
        ModelError: it does not fit into memory.
        NormGeoError: a loss or the gradient is not finite, or the batch cannot be divided.
        RunError: the disk is full; the last state and checkpoints are intact. Or the folder is another training's.

    >>> from normgeo.training.corpus import Shuffled
    >>> from normgeo.training.recipe import recipe_for
    >>> from normgeo.tokens import TokenStream
    >>> recipe = recipe_for("tiny", layers=1, d=8, heads=2, steps=3, batch=2, context=8, precision="no")
    >>> corpus = Shuffled(TokenStream.from_array(list(range(16)) * 9), recipe.context, recipe.seed)
    >>> train("rmsnorm", recipe, corpus, vocabulary=16, device="cpu")[1].step.tolist()
    [1, 2, 3]
    """
    what = f"a step of {recipe.batch:,} sequences of {recipe.context:,} tokens, in {recipe.accumulate:,} passes,"
    with memory_explained(what, "give a new run a smaller --batch or a larger --accumulate"):
        trainer = Trainer(norm, recipe, corpus, vocabulary, folder, tokenizer=tokenizer, device=device, model=model)
        trainer.run(held_out, report, progress, log)
    return trainer.model.eval(), trainer.curve
