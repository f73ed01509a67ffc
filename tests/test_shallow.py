"""Which of a deep model's layers a shallow one's stand for."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
from zoo import perturb, tiny

from normgeo.conversion import sharded
from normgeo.conversion.gauge import find_gauge
from normgeo.conversion.probing import looking_at
from normgeo.conversion.shallow import Spread, check_alike, shallow_config, shallow_gauge, shallow_model, spread
from normgeo.conversion.sharded import convert_sharded
from normgeo.errors import ConversionError


def test_layers_at_other_places_are_not_guessed():
    """Where the last layer is of a kind that no shallow model ends with, all layers of its kind must be alike."""
    shallow, deep = (torch.nn.ModuleDict({"h": torch.nn.ModuleList()}) for _ in range(2))
    for model, kinds in ((shallow, "aba"), (deep, "ababab")):
        for kind in kinds:
            model["h"].append(torch.nn.Linear(2, 2 + (kind == "b")))
    to = spread(deep, shallow)
    assert to.assigned == {"h": (0, 1, 0, 1, 0, 1)}
    assert to.unsure == {("h", (1,))}
    with pytest.raises(ConversionError, match="layers of h are treated in different ways"):
        check_alike(to, [])
    to = Spread(to.assigned, frozenset({("h", (0, 2))}))
    check_alike(to, [("h.0.weight", 1), ("h.2.weight", 1), ("h.1.bias", 0)])
    with pytest.raises(ConversionError, match="convert it in memory"):
        check_alike(to, [("h.0.weight", 1), ("h.2.weight", 0)])


def test_by_shard_layers_that_may_be_treated_in_other_ways_are_refused(tmp_path, monkeypatch):
    """Of the deep model's layers only those are certified that the shallow one has."""
    tiny("gpt2").save_pretrained(tmp_path / "in")
    model, to = shallow_model(hf.GPT2LMHeadModel, tiny("gpt2").config)
    unsure = replace(to, unsure=frozenset({("transformer.h", (0,))}))
    monkeypatch.setattr(sharded, "shallow_model", lambda cls, config: (model, unsure))
    with pytest.raises(ConversionError, match=r"layers of transformer\.h are treated in different ways"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_as_many_layers_are_looked_at_as_end_like_the_model():
    """GPT-Neo's layers alternate; of six, four are looked at: the first, the last and two between."""
    model = tiny("gpt_neo", num_layers=6, attention_types=[[["global", "local"], 3]])
    _, to = shallow_model(type(model), model.config)
    assert not to.unsure
    assert to.depth == 4  # they have the same parameters
    assert to.between == {("transformer.h", (1, 2))}


def test_what_is_read_behind_a_layer_by_its_number_is_read_in_few_layers_too():
    """Qwen3-VL's language model is given what another norm makes of the image as it is behind some layers."""
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision = sizes | {"depth": 8, "patch_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 4}
    text = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = hf.Qwen3VLConfig(
        text_config=text | {"vocab_size": 16, "rope_parameters": rope, "pad_token_id": 0},
        vision_config=vision | {"out_hidden_size": 16, "deepstack_visual_indexes": [4]}, image_token_id=10,
    )  # fmt: skip
    ids = torch.tensor([[1, 10, 10, 10, 10, 2]])
    image = {"pixel_values": torch.randn(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with looking_at(["logits"]):
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == 10).long(), **image}
        gauge = shallow_gauge(hf.Qwen3VLForConditionalGeneration, config, inputs)
    free = {shift.parameter for shift in gauge.writers}
    assert free.isdisjoint(f"model.visual.blocks.{i}.mlp.linear_fc2.weight" for i in range(5))


def test_layers_that_are_few_already_keep_their_numbers():
    """Only the image's are cut here: the first layer of text is the first one still."""
    config = hf.PreTrainedConfig(num_hidden_layers=2, mlp_only_layers=[0], vision_config=hf.ViTConfig())
    small = shallow_config(config, {"vision.layers": 12}, 3)
    assert (small.num_hidden_layers, small.mlp_only_layers, small.vision_config.num_hidden_layers) == (2, [0], 3)


def test_parts_of_half_precision_are_looked_at_in_one_dtype():
    """Configurations of parts say what they were saved in, in which they alone are built, and not what is around."""
    image = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64}
    text = {"n_embd": 16, "n_layer": 5, "n_head": 4, "n_positions": 64, "vocab_size": 96, "add_cross_attention": True}
    parts = hf.ViTConfig(**image, image_size=16, patch_size=8), hf.GPT2Config(**text, is_decoder=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.encoder.dtype = config.decoder.dtype = torch.bfloat16
    gauge = shallow_gauge(hf.VisionEncoderDecoderModel, config)
    assert {"encoder.layers.4.mlp.fc2.bias", "decoder.transformer.h.4.mlp.c_proj.bias"} <= {s[0] for s in gauge.writers}


def test_what_reads_a_stream_is_named_in_its_own_layer(tmp_path):
    """A Post-LN model's queries read what a norm has given; of the layers between one is looked at for the others."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 6, "decoder_layers": 5}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    model = perturb(hf.BlenderbotSmallModel(hf.BlenderbotSmallConfig(**sizes, **heads, vocab_size=48)).eval())
    whole = find_gauge(model)
    assert shallow_gauge(type(model), model.config).raw == whole.raw
    model.save_pretrained(tmp_path / "in")
    kept = convert_sharded(tmp_path / "in", tmp_path / "out").kept
    assert all(", ".join(whole.raw[name][:3]) in why for name, why in kept.items())
    assert "encoder.layers.4.fc1" in kept["encoder.layers.4.final_layer_norm"]
