"""The gauge from a few layers, and conversion shard by shard."""

import json

import pytest
import torch
import transformers as hf
import zoo
from forked import Forked
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from zoo import DEPTH, converted, tiny

from normgeo import convert, load_model, shrinking
from normgeo.cli.main import app
from normgeo.conversion import runs as converting
from normgeo.conversion import sharded
from normgeo.conversion.checkpoint import describe, save
from normgeo.conversion.gauge import find_gauge
from normgeo.conversion.reaching import reaching_inputs
from normgeo.conversion.shallow import empty_model, shallow_gauge, shallow_model, spread
from normgeo.conversion.sharded import convert_sharded
from normgeo.errors import ConversionError, NormGeoError
from normgeo.examples import example_inputs

EMBEDDINGS = "transformer.wte.weight"
AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSpeechSeq2Seq")


@pytest.fixture
def deep(monkeypatch):
    """Any architecture, of five layers."""
    few = shrinking._n_layers
    monkeypatch.setattr(shrinking, "LAYERS", 5)
    monkeypatch.setattr(shrinking, "_kept_layers", lambda config: list(range(min(5, few(config) or 5))))
    return zoo.by_type


@pytest.mark.parametrize("name", DEPTH)
def test_four_layers_tell_the_gauge_of_all(name):
    model, whole = converted(name)
    deep, shallow = find_gauge(model), shallow_gauge(type(model), model.config)
    assert set(shallow.writers) == set(deep.writers)
    assert set(shallow.readers) == set(deep.readers)
    assert set(shallow.invisible) == set(deep.invisible)
    assert shallow.sites == deep.sites
    given = convert(model, gauge=shallow)
    assert given.certificate.passed
    assert given.recipe == whole.recipe


@pytest.mark.parametrize("name", DEPTH)
def test_by_shard_gives_the_weights_of_the_conversion_in_memory(name, tmp_path):
    model, whole = converted(name)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    conversion = convert_sharded(tmp_path / "in", tmp_path / "out")
    assert conversion.certificate.passed
    loaded, expected = load_model(tmp_path / "out"), whole.model
    about = json.loads((tmp_path / "out" / "conversion.json").read_text())
    told = json.loads(json.dumps(describe(whole) | {"layers_certified": 4, "certificate": about["certificate"]}))
    assert [sorted(told.pop("recentered"))] == [sorted(about.pop("recentered"))]  # layer by layer, or kind by kind
    assert about == told
    assert about["certificate"].items() >= {"replaced": len(whole.replaced), "weights_sha256": ""}.items()
    state = expected.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    inputs = example_inputs(model, 9)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, expected(**inputs).logits)


@pytest.mark.parametrize(("told", "stored", "some", "others"), [
    ("bfloat16", torch.float32, ".ln_", torch.float32), ("float32", torch.bfloat16, ".ln_", torch.float32),
    ("float32", torch.float64, ".ln_", torch.float64), (None, torch.float32, ".bias", torch.bfloat16),
])  # fmt: skip
def test_a_checkpoint_of_other_dtypes_is_converted_as_it_is_loaded(told, stored, some, others, tmp_path):
    model = tiny("gpt2", n_layer=4)
    model.to(stored).save_pretrained(tmp_path / "in")
    path, about = tmp_path / "in/model.safetensors", json.loads((tmp_path / "in/config.json").read_text())
    content = {k: v.to(others if some in k else stored) for k, v in load_file(path).items()}
    save_file(content | {"transformer.h.0.attn.bias": torch.ones(64, dtype=torch.int64)}, path, {"format": "pt"})
    (tmp_path / "in/config.json").write_text(json.dumps(about | {"dtype": told}))
    assert convert_sharded(tmp_path / "in", tmp_path / "out").certificate.passed
    expected = convert(load_model(tmp_path / "in")).model.state_dict()
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert all(v.dtype == expected[k].dtype and torch.equal(v, expected[k]) for k, v in loaded.items())


def test_layerscale_is_folded_by_shard(tmp_path):
    """Into weights and biases alike, wherever they lie."""
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, mlp_ratio=2, image_size=16, patch_size=8,
        layerscale_value=0.5, num_labels=3,
    )  # fmt: skip
    model = zoo.perturb(hf.Dinov2ForImageClassification(config).eval())
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    convert_sharded(tmp_path / "in", tmp_path / "out")
    read, expected = load_model(tmp_path / "out").state_dict(), convert(model).model.state_dict()
    assert (read["dinov2.encoder.layer.3.layer_scale1.lambda1"] == 1).all()
    for name, value in expected.items():
        torch.testing.assert_close(read[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_layers_that_differ_are_not_guessed(tmp_path):
    """A model whose third layer has another parameter is refused, not converted by analogy."""
    model = tiny("gpt2", n_layer=4)
    deep, (shallow, _) = empty_model(type(model), model.config), shallow_model(type(model), model.config)
    deep.transformer.h[2].mlp.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConversionError, match=r"transformer\.h\.2 is like none"):
        spread(deep, shallow)


def test_the_last_layer_may_be_treated_as_no_other_is(tmp_path, deep):
    """A Conformer's blocks end in a norm: the last one's output is what the model gives, the others' is recentered."""
    model = deep("nemotron_asr_streaming_encoder")
    model.save_pretrained(tmp_path / "in")
    conversion = convert_sharded(tmp_path / "in", tmp_path / "out")
    whole = convert(model)
    assert sorted(conversion.recentered) == sorted(whole.recentered)
    assert {place.module for place in whole.recentered} == {f"layers.{i}.norm_out" for i in range(4)}
    inputs, loaded = reaching_inputs(model, seed=2), load_model(tmp_path / "out")
    with torch.no_grad():
        a, b = (one(**inputs).last_hidden_state for one in (model, loaded))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    given = convert(model, gauge=shallow_gauge(type(model), model.config))
    assert given.recipe == whole.recipe


@pytest.mark.parametrize(("name", "why"), [
    ("esm", "EsmForMaskedLM of fewer layers takes other weights"),
    ("granite_speech5_ctc", "layers of encoder.layers are treated in different ways"),
])  # fmt: skip
def test_what_fewer_layers_do_not_tell_is_refused(name, why, tmp_path, deep):
    """ESM's contact head is as wide as there are heads in all layers; a Conformer reads its stream halfway as it is."""
    deep(name).save_pretrained(tmp_path / "in")
    with pytest.raises(ConversionError, match=rf"{why}; convert it in memory"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_that_check_the_class_of_their_configuration_are_loaded(tmp_path):
    image = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    text = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 96, "add_cross_attention": True}
    parts = hf.ViTConfig(**image, image_size=16, patch_size=8), hf.GPT2Config(**text, is_decoder=True)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    model = zoo.perturb(hf.VisionEncoderDecoderModel(config).eval())
    model.save_pretrained(tmp_path / "in")
    convert_sharded(tmp_path / "in", tmp_path / "shards")
    save(convert(model), tmp_path / "memory")
    inputs = example_inputs(model)
    for name in ("shards", "memory"):
        loaded = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / name, trust_remote_code=True)
        with torch.no_grad():
            a, b = (one(**inputs).logits for one in (model, loaded.eval()))
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def check_same(model, folder):
    """Whether what is loaded gives what the model gives."""
    inputs = example_inputs(model)
    with torch.no_grad():
        a, b = (one(**inputs).logits for one in (model, load_model(folder)))
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def edited(folder, edit):
    """A checkpoint in one file, with other tensors in it."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_buffers_that_older_versions_stored_are_left_out_as_loading_does(name, tmp_path):
    """As those of Pythia and GPT-2 on the hub."""
    model = tiny(name)
    model.save_pretrained(tmp_path / "in")

    def add(weights):
        first = next(k for k in weights if "0" in k and k.endswith("bias")).rpartition("0.")[0]
        for end in ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq", "attn.bias"):
            weights[f"{first}0.{end}"] = torch.ones(2)

    edited(tmp_path / "in", add)
    convert_sharded(tmp_path / "in", tmp_path / "out")
    assert not [
        key for key in load_file(tmp_path / "out" / "model.safetensors") if key.endswith(("inv_freq", "0.attn.bias"))
    ]
    check_same(model, tmp_path / "out")


def test_weights_of_more_layers_are_said(tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path / "in")
    edited(tmp_path / "in", lambda weights: weights.update({"gpt_neox.layers.9.attention.dense.bias": torch.zeros(32)}))
    with pytest.warns(UserWarning, match=r"more layers than its config.json tells of: gpt_neox.layers.9"):
        convert_sharded(tmp_path / "in", tmp_path / "out")


def test_some_tensors_may_be_of_another_dtype(tmp_path):
    """Files by safetensors have the widest dtype first."""
    tiny("gpt_neox").bfloat16().save_pretrained(tmp_path / "in")
    name = "gpt_neox.layers.0.input_layernorm.weight"
    edited(tmp_path / "in", lambda weights: weights.update({name: weights[name].float() + 0.001}))
    assert convert_sharded(tmp_path / "in", tmp_path / "out").certificate.own_dtype == "bfloat16"
    assert load_file(tmp_path / "out" / "model.safetensors")[name].dtype == torch.bfloat16  # as it is loaded


def test_a_shard_may_have_the_name_of_what_is_untied(tmp_path):
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    index = tmp_path / "in" / "model.safetensors.index.json"
    first = min(tmp_path.glob("in/*.safetensors"))
    first.rename(first.with_name("model-untied.safetensors"))
    index.write_text(index.read_text().replace(first.name, "model-untied.safetensors"))
    convert_sharded(tmp_path / "in", tmp_path / "out")
    check_same(model, tmp_path / "out")


def test_names_that_are_not_the_models_are_refused(tmp_path):
    tiny("opt").save_pretrained(tmp_path / "in")
    edited(tmp_path / "in", lambda weights: weights.pop("model.decoder.layers.0.fc1.bias"))
    with pytest.raises(ConversionError, match=r"it has no model.decoder.layers.0.fc1.bias, nor 0 others"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | {"quantization_config": {"quant_method": "q"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))  # whose tensors are named otherwise
    with pytest.raises(ConversionError, match="by shard: its weights are quantized: load it without"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    (tmp_path / "none").mkdir()
    tiny("opt").config.save_pretrained(tmp_path / "none")
    with pytest.raises(ConversionError, match="no safetensors"):
        convert_sharded(tmp_path / "none", tmp_path / "out")


def test_a_head_of_its_own_where_the_configuration_ties_it_is_refused(tmp_path):
    """Loading unties them and warns; the shallow model has them tied. The same head stored twice is one."""
    tiny("gpt2").save_pretrained(tmp_path / "in")
    edited(tmp_path / "in", lambda weights: weights.update({"lm_head.weight": weights[EMBEDDINGS].clone()}))
    assert convert_sharded(tmp_path / "in", tmp_path / "out").certificate.passed
    edited(tmp_path / "in", lambda weights: weights["lm_head.weight"].mul_(2))
    with pytest.raises(ConversionError, match=rf"another lm_head.weight than {EMBEDDINGS}.* or convert it in memory"):
        convert_sharded(tmp_path / "in", tmp_path / "other")
    assert convert(load_model(tmp_path / "in")).certificate.passed


def test_the_command_by_shard(tmp_path):
    tiny("gpt2", n_layer=4).save_pretrained(tmp_path / "in", max_shard_size="50KB")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--by-shard"]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None
    assert "shard by shard" in result.stderr
    about = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert about["layers_certified"] == 4
    assert about["original"] == {"name": "in", "revision": None}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(value.nbytes for shard in stored for value in shard.values())
    refused = CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "other"), "--by-shard", "--to", "crmsnorm"])
    assert isinstance(refused.exception, ConversionError)


SMALL_MEMORY = """
import resource, sys, pathlib
import normgeo.conversion.sharded, normgeo.conversion.convert, normgeo.loading
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[3]), used + int(sys.argv[3])))
source, out = map(pathlib.Path, sys.argv[1:3])
if sys.argv[4] == "by shard":
    normgeo.conversion.sharded.convert_sharded(source, out)
else:
    normgeo.conversion.convert.convert(normgeo.loading.load_model(source))
"""


def test_memory_is_less_than_the_checkpoint(tmp_path):
    """A checkpoint of 256 MB in shards of 10 MB, in a process that may use 160 MB more than its libraries."""
    config = hf.GPT2Config(n_embd=256, n_layer=80, n_head=4, n_positions=32, vocab_size=128)
    model = hf.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "in", max_shard_size="10MB")
    del model
    size = sum(path.stat().st_size for path in (tmp_path / "in").glob("*.safetensors"))
    allowed = 160 * 2**20
    assert size > 1.4 * allowed

    by_shard, in_memory = (
        Forked(SMALL_MEMORY, tmp_path / "in", tmp_path / "out", allowed, how) for how in ("by shard", "in memory")
    )
    by_shard.done()
    assert in_memory.ended().returncode != 0  # what the limit is there to show
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "falcon", "bert", "whisper"])
def test_a_tied_head_is_found_when_the_checkpoint_is_loaded(name, size, tmp_path):
    """transformers reads `model.safetensors` and, where there is one, no index and no other file beside it."""
    model = tiny(name)
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "in", max_shard_size=size)
    assert (tmp_path / "in" / "model.safetensors").is_file() == (size == "1GB")
    convert_sharded(tmp_path / "in", tmp_path / "out")
    auto = next(a for a in AUTO if a in json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"])
    options = {"trust_remote_code": True, "output_loading_info": True}
    loaded, info = getattr(hf, auto).from_pretrained(tmp_path / "out", **options)
    assert not any(info.values()), info
    with torch.no_grad():
        inputs = example_inputs(model.double(), 9)
        expected = model(**inputs).logits
        difference = loaded.double()(**inputs).logits - expected
    assert difference.norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("change", ["lost", "added", "another file"])
def test_a_checkpoint_that_would_not_load_is_not_left_behind(change, size, tmp_path, monkeypatch):
    tiny("gpt2").save_pretrained(tmp_path / "in", max_shard_size=size)
    write = sharded.save_file

    def sabotaged(tensors, path, metadata):
        head = tensors.pop("lm_head.weight", None) if change == "lost" else tensors.get("lm_head.weight")
        if head is not None and change == "added":
            tensors["other"] = head.clone()
        if head is not None and change == "another file":
            write({"lm_head.weight": head.clone()}, path.with_name("model.safetensors"), metadata)
            if size == "1GB":
                return
        if tensors:
            write(tensors, path, metadata)
        else:
            write({"transformer.wpe.weight": torch.zeros(2)}, path, metadata)

    monkeypatch.setattr(sharded, "save_file", sabotaged)
    with pytest.raises(ConversionError, match="what was written is not the converted model"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_other_values_than_the_certified_ones_are_not_left_behind(tmp_path, monkeypatch):
    tiny("gpt2").save_pretrained(tmp_path / "in", max_shard_size="20KB")
    write = sharded.save_file

    def sabotaged(tensors, path, metadata):
        write(
            {k: v + 0.01 if k == "transformer.h.1.mlp.c_proj.bias" else v for k, v in tensors.items()}, path, metadata
        )

    monkeypatch.setattr(sharded, "save_file", sabotaged)
    with pytest.raises(ConversionError, match="read as another model"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


UNUSED = {
    "data": "nofile.txt", "tokens": "-1", "context": "8", "dtype": "foo", "device": "bar"
}  # fmt: skip


@pytest.mark.parametrize("option", UNUSED)
def test_by_shard_refuses_what_it_would_ignore(option, tmp_path, monkeypatch):
    """Asked for, and where memory is short; in memory the option is what it always was."""
    value = UNUSED[option]
    arguments = ["convert", "embedded-layernorm", str(tmp_path / "out"), f"--{option}", *([value] if value else [])]
    asked = CliRunner().invoke(app, [*arguments, "--by-shard"])
    assert isinstance(asked.exception, NormGeoError)
    assert "\n" not in str(asked.exception)
    assert str(asked.exception).startswith(f"leave out --{option}: beside --by-shard only --to, ")
    monkeypatch.setattr(converting, "_available", lambda: 0)
    short = CliRunner().invoke(app, arguments)
    assert isinstance(short.exception, ConversionError)
    assert f"memory is short, so that it is converted by shard; by shard these would be ignored: {option};" in str(
        short.exception
    )
    python = {"n_tokens" if option == "tokens" else option: {"tokens": 8, "context": 8}.get(option, value or True)}
    with pytest.raises(ConversionError, match=f"^by shard these would be ignored: {option}; leave them out$"):
        converting.convert_checkpoint("embedded-layernorm", tmp_path / "out", by_shard=True, **python)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name", "dtype"), [
    ("videoprism", "text_model.embeddings.position_embedding", torch.float32),
    ("voxtral", "model.audio_tower.embed_positions.weight", torch.bfloat16),
    ("qwen3_asr", "model.audio_tower.positional_embedding.positional_embedding", torch.float16),
])  # fmt: skip
def test_a_table_that_is_stored_is_centered_where_it_lies(kind, name, dtype, tmp_path):
    """The positions of VideoPrism's text model are no parameter; Voxtral's are loaded in single precision always."""
    model = zoo.by_type(kind)
    model.to(dtype).save_pretrained(tmp_path / "in", max_shard_size="200KB")
    expected = convert(load_model(tmp_path / "in")).model.state_dict()[name]
    convert_sharded(tmp_path / "in", tmp_path / "out")
    (found,) = [f for path in (tmp_path / "out").glob("*.safetensors") if (f := load_file(path).get(name)) is not None]
    torch.testing.assert_close(found, expected)
    assert found.mean(-1).abs().max() < 1e-6


def test_by_shard_takes_what_it_honours(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    honoured = ["--to", "rmsnorm", "--trust-remote-code"]
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--by-shard", *honoured])
    assert result.exception is None
