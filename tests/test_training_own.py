"""Training with what one hands over in Python: models of one's own, and held-out text."""

from types import MethodType

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from training_zoo import small, stopping, text_like, trained
from transformers import GPT2LMHeadModel, GPT2Model

from normgeo import convert, wrap
from normgeo.angles.runs import RunConfig
from normgeo.comparison.compare import compare_run
from normgeo.errors import DataError, ModelError, NormGeoError, RunError
from normgeo.training import train as training
from normgeo.training.checkpoint_angles import measure_checkpoints, resume_checkpoints, start_checkpoints
from normgeo.training.checkpoints import find_checkpoints
from normgeo.training.runs import TrainConfig, resume_training, start_training
from normgeo.training.twins import build_twin


class Counting(GPT2LMHeadModel):
    """A GPT-2 that counts its passes in training, in a buffer that its checkpoints have."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, *args, **options):
        self.passes += self.training
        return super().forward(*args, **options)


def counting():
    return Counting(build_twin("layernorm", small(), 48).config)


def test_buffers_are_kept_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Trainer, "_draw", lambda self: None)  # which takes most of the time
    recipe = small(steps=5, save_every=2, checkpoint_every=3)
    with monkeypatch.context() as stopped:
        stopped.setattr(training.Trainer, "take_step", stopping(training.Trainer.take_step, 4))
        with pytest.raises(KeyboardInterrupt):
            trained("layernorm", recipe, tmp_path, model=counting())
    model, _ = trained("layernorm", recipe, tmp_path, model=counting())
    files = sorted(tmp_path.glob("checkpoints/*/model.safetensors"))
    assert [int(safetensors.torch.load_file(file)["passes"]) for file in files] == [0, 3, 5]
    assert model.passes == 5


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        (lambda: text_like(200, context=17), "contexts of 17 tokens are longer than the model's 16"),
        (lambda: text_like(200, vocabulary=60), "array has the id 58, beyond a vocabulary of 48"),
    ],
)
def test_held_out_text_of_another_model_is_refused(held_out, says):
    with pytest.raises(DataError, match=says):
        trained("rmsnorm", small(steps=2, evaluate_every=1), held_out=held_out())


def test_directories_may_be_strings(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Trainer, "_draw", lambda self: None)
    run, ids = str(tmp_path / "run"), str(tmp_path / "ids.npy")
    np.save(ids, np.arange(64).reshape(4, 16) % 48)
    trained("rmsnorm", small(steps=1, checkpoint_every=1), run)
    points, config = find_checkpoints(run), RunConfig((), ids, null=2, device="cpu")
    measure_checkpoints(points, config, str(tmp_path / "parts"), progress=False)
    with pytest.raises(DataError, match="could not stream wikimedia/wikipedia"):  # unless something else is said
        measure_checkpoints(points, RunConfig((), device="cpu"))
    with pytest.raises(ModelError, match="there are no checkpoints to measure"):
        measure_checkpoints(points[:0], config)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [f"run-0000000{n}.parquet" for n in (0, 1)]
    with pytest.raises(RunError, match="exists already"):
        start_checkpoints(run, config, run)
    assert resume_checkpoints(run) is None
    with pytest.raises(RunError, match="exists already"):
        start_training(TrainConfig("rmsnorm", ids, device="cpu"), small(steps=1), run)
    with pytest.raises(RunError, match="there is no training to resume"):
        resume_training(run)
    with pytest.raises(RunError, match="is not an empty directory"):
        compare_run(RunConfig(("a", "b"), ids), run)


class Table(nn.Module):
    """A model of one's own: the next token by the last one."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(48, 8), nn.Linear(8, 48)

    def forward(self, ids):
        return self.head(self.rows(ids))


def swapped():
    model = build_twin("layernorm", small(), 48)
    model.transformer.ln_f = nn.RMSNorm(32)
    return model


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (swapped, "which has another transformer.ln_f"),
        (lambda: convert(build_twin("layernorm", small(), 48).eval()).model, "which has another transformer.h.0.ln_1"),
        (lambda: wrap(Table()), "Wrapped is not made of its configuration alone"),
    ],
    ids=["swapped", "converted", "wrapped"],
)
def test_a_model_is_not_kept_as_another_and_trains_without_a_folder(given, says, tmp_path):
    """Its checkpoints would load as what its class makes of its configuration."""
    with pytest.raises(NormGeoError, match=f"{says}.*; train it without a folder, and save it yourself$"):
        trained("layernorm", small(steps=2), tmp_path / "run", model=given())
    assert not (tmp_path / "run").exists()
    curve = trained("layernorm", small(steps=2, evaluate_every=2), model=given(), held_out=text_like(64))[1]
    assert curve.held_out_loss.iloc[-1] > 0


def test_a_forward_of_its_own_is_what_a_model_is_trained_by_and_keeps():
    model, calls = build_twin("layernorm", small(), 48), []
    own = MethodType(lambda self, *given, **named: calls.append(1) or type(self).forward(self, *given, **named), model)
    model.forward = own
    trained("layernorm", small(steps=2), model=model)
    assert (len(calls), model.forward) == (2, own)


def test_a_model_without_a_head_is_one_line():
    with pytest.raises(NormGeoError, match="GPT2Model gives no logits to train on"):
        trained("layernorm", small(steps=1), model=GPT2Model(build_twin("layernorm", small(), 48).config))
