"""Training with what one hands over in Python: models of one's own, and held-out text."""

import pytest
import safetensors.torch
import torch
from training_zoo import small, stopping, text_like, trained
from transformers import GPT2LMHeadModel

from normgeo.errors import DataError
from normgeo.training import train as training
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
