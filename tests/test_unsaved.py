"""What a checkpoint would not tell is refused, and nothing is left behind."""

import copy
import json
from dataclasses import replace

import accelerate
import pytest
import torch
import zoo

from normgeo import convert
from normgeo.conversion.checkpoint import save
from normgeo.conversion.trainable import bake
from normgeo.errors import ConversionError


def weights_normed(model):
    torch.nn.utils.parametrizations.weight_norm(model.gpt_neox.layers[0].mlp.dense_4h_to_h)


def layers_cut(model):
    model.gpt_neox.layers = model.gpt_neox.layers[:1]


def steered(model):
    model.gpt_neox.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 1)


def other_activation(model):
    model.gpt_neox.layers[1].mlp.act = torch.nn.ReLU()


def rescaled(model):
    model.gpt_neox.layers[0].attention.scaling *= 3


def edited_afterwards(model):
    model.config.hidden_act = "relu"


def shared_by_layers(model):
    first, second = (layer.mlp.dense_h_to_4h for layer in model.gpt_neox.layers)
    second.weight = first.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_activation, "its checkpoint is read as another model, whose outputs differ"),
        (rescaled, "its checkpoint is read as another model"),
        (edited_afterwards, "its checkpoint is read as another model"),
        (shared_by_layers, "share no weights but those that it ties"),
        (weights_normed, r"GPTNeoX\w+ is not what its class and configuration tell: \S+mlp.dense_4h_to_h"),
        (layers_cut, r"not what its class and configuration tell: gpt_neox\.layers\.1\."),
        (steered, r"gpt_neox\.layers\.0\.mlp has a forward hook, which no checkpoint keeps"),
    ],
)
def test_what_a_checkpoint_would_not_tell_is_not_saved(change, message, tmp_path):
    model = zoo.tiny("gpt_neox")
    change(model)
    conversion = convert(model)
    assert conversion.certificate.passed  # in memory it is equal
    with pytest.raises(ConversionError, match=message):
        save(conversion, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_offloaded_or_adapted_since_is_not_saved(tmp_path):
    conversion = convert(zoo.tiny("gpt_neox"))
    adapted = replace(conversion, model=copy.deepcopy(conversion.model))
    adapted.model.gpt_neox.layers[0].mlp.lora_A = torch.nn.Linear(32, 4)
    with pytest.raises(ConversionError, match=r"mlp\.lora_A\.bias and 1 more would be missing.*merge adapters"):
        save(adapted, tmp_path / "out")
    accelerate.cpu_offload(conversion.model, execution_device="cpu")
    with pytest.raises(
        ConversionError, match=r"embed_in\.weight of GPTNeoX\w+ is on the disk or waits on the CPU: save"
    ):
        save(conversion, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_it_is_told_where_weights_are_no_longer_those_of_the_certificate(tmp_path):
    conversion, told = convert(zoo.tiny("gpt_neox")), []
    for step in (0.0, 0.01):  # as an adapter that is merged
        conversion.model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.data += step
        save(conversion, tmp_path / str(step))
        told.append(json.loads((tmp_path / f"{step}/conversion.json").read_text())["changed_since_certified"])
    assert told == [False, True]


def test_a_model_that_still_trains_is_not_saved(tmp_path):
    with pytest.raises(ConversionError, match=r"still trains.*bake"):
        save(convert(zoo.tiny("gpt_neox"), trainable=True), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_baked_model_is_not_converted_again_without_the_first_ones_recenters():
    baked = bake(convert(zoo.tiny("opt"), trainable=True).model)
    with pytest.raises(ConversionError, match="is converted already"):
        convert(baked)
