"""Every output is compared, also one that is inside another, unless fewer are asked for."""

import json

import pytest
import torch
import transformers as hf
import zoo
from torch import nn
from typer.testing import CliRunner

from normgeo import convert, decompress, load_model
from normgeo.cli.main import app
from normgeo.conversion.probing import looking_at, outputs_of
from normgeo.errors import ModelError
from normgeo.examples import example_inputs

TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = TOWER | {"vocab_size": 96, "max_position_embeddings": 32, "eos_token_id": 95, "pad_token_id": 0}
IMAGE = TOWER | {"image_size": 16, "patch_size": 8}
NEEDED = ("logits_per_image", "text_model_output", "vision_model_output.pooler_output")


@pytest.fixture
def clip():
    config = hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)
    return zoo.perturb(hf.CLIPModel(config).eval())


@torch.no_grad()
def errors(original, converted):
    """By name, in their own dtype."""
    inputs = example_inputs(original, seed=5)
    a, b = original(**inputs), converted(**inputs)
    flat = {key: (a[key], b[key]) for key in a if isinstance(a[key], torch.Tensor)}
    for key in ("text_model_output", "vision_model_output"):
        flat |= {f"{key}.{part}": (a[key][part], b[key][part]) for part in a[key]}
    return {key: float((x - y).abs().max() / x.abs().max()) for key, (x, y) in flat.items()}


def test_an_output_inside_another_is_an_output(clip):
    """The last hidden state of CLIP's images is the stream itself, whose mean everybody sees."""
    conversion = convert(clip)
    assert len(conversion.replaced) == 6  # of text; and what is pooled, of which no output gives the input
    assert all("vision_model" in key for key in conversion.kept)
    assert max(errors(clip, conversion.model).values()) < 1e-5
    assert len(outputs_of(clip, example_inputs(clip))) == 8


def test_what_nobody_needs_may_change(clip):
    conversion = convert(clip, outputs=NEEDED)
    assert not conversion.kept
    assert len(conversion.replaced) == 11
    found = errors(clip, conversion.model)
    changed = {key for key, error in found.items() if error > 1e-3}
    assert changed == {"vision_model_output.last_hidden_state"}
    assert conversion.certificate.outputs == NEEDED
    assert "pooler_output alone" in conversion.certificate.table()
    assert len(convert(clip, outputs="logits_per_image").replaced) == 11
    assert len(convert(clip, "crmsnorm", outputs=NEEDED).replaced) == 11


def test_the_outputs_that_are_looked_at(clip):
    inputs = example_inputs(clip)
    with looking_at(["text_model_output"]):
        assert len(outputs_of(clip, inputs)) == 2
    assert len(outputs_of(clip, inputs)) == 8
    with pytest.raises(ModelError, match=r"no output 'logits' for .*; it gives logits_per_image, logits_per_text"):
        convert(clip, outputs=["logits"])


@pytest.mark.parametrize("how", ["--in-memory", "--by-shard"])
def test_the_command_takes_outputs(clip, tmp_path, how):
    clip.save_pretrained(tmp_path / "clip")

    def run(name, *options):
        return CliRunner().invoke(app, ["convert", str(tmp_path / "clip"), str(tmp_path / name), how, *options])

    result = run("all")
    assert result.exit_code == 0
    assert "--outputs with those that you need" in result.stdout
    result = run("some", "--outputs", ", ".join(NEEDED))
    assert result.exit_code == 0
    assert "11 norms replaced, 0 kept" in result.stdout
    written = json.loads((tmp_path / "some/conversion.json").read_text())
    assert written["certificate"]["outputs"] == list(NEEDED)
    loaded = load_model(tmp_path / "some")
    assert max(e for key, e in errors(clip, loaded).items() if "last_hidden" not in key) < 1e-5
    result = run("none", "--outputs", "logits")
    assert result.exit_code == 1
    assert not (tmp_path / "none").exists()


def test_of_a_compressed_model_the_outputs_that_were_asked_for_come_back(clip, tmp_path):
    """The others are streams, narrower by one while it is compressed."""
    clip.save_pretrained(tmp_path / "clip")
    for to, source, more in (("crmsnorm", "clip", ["--outputs", ", ".join(NEEDED)]), ("rmsnorm", "crmsnorm", [])):
        words = ["convert", str(tmp_path / source), str(tmp_path / to), "--to", to, *more]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    conversion = decompress(load_model(tmp_path / "crmsnorm"))
    assert conversion.certificate.outputs == NEEDED
    for model in (conversion.model, load_model(tmp_path / "rmsnorm")):
        assert max(e for key, e in errors(clip, model).items() if "last_hidden" not in key) < 1e-5


class Encoder(hf.PreTrainedModel):
    """Torch's own encoder layers, which in evaluation call nothing inside them; it gives a tensor without a name."""

    config_class = hf.GPT2Config

    def __init__(self, config):
        super().__init__(config)
        self.table, self.head = nn.Embedding(96, 32), nn.Linear(32, 8)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)

    def forward(self, input_ids):
        return self.head(self.encoder(self.table(input_ids)))


@pytest.mark.parametrize("how", [{}, {"to": "crmsnorm", "padded": True}, {"trainable": True}])
def test_layers_that_call_no_module_inside_them_use_the_norms_that_they_got(how):
    torch.manual_seed(0)
    model = zoo.perturb(Encoder(hf.GPT2Config()).double().eval())
    conversion = convert(model, inputs={"input_ids": torch.randint(0, 96, (2, 7))}, **how)
    assert len(conversion.replaced) == 5
    ids = torch.randint(0, 96, (3, 9))
    with torch.no_grad():
        ours, theirs = conversion.model(ids), model(ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-13
    conversion.model.encoder.layers[1].norm2 = nn.Identity()
    with torch.no_grad():  # which torch, if it went on by itself, would not call
        assert not torch.allclose(conversion.model(ids), ours)
