"""The folder a converted checkpoint is saved in: where it may be, what is in it, and who can read it."""

import copy
import errno
import json
import os
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from zoo import by_type, perturb, tiny

from normgeo import convert, load_model
from normgeo.cli.main import app
from normgeo.conversion import runs, sharded
from normgeo.conversion.certify import certificate_inputs
from normgeo.conversion.checkpoint import save
from normgeo.conversion.companions import copy_companions
from normgeo.conversion.shallow import shallow_model
from normgeo.conversion.sharded import Shards, convert_sharded
from normgeo.errors import ConversionError, ModelError, RunError
from normgeo.system.folders import whole_directory

TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
EMPTY = {"linked": "a link to an empty directory", ".": "where it runs", "empty": "an empty directory"}


@pytest.fixture
def templated():
    """Of no more words than the models have embeddings for."""
    vocabulary = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{i}": i for i in range(3, 96)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", bos_token="[BOS]")
    tokenizer.chat_template = dict(TEMPLATES)
    return tokenizer


@pytest.fixture(scope="module")
def conversion():
    return convert(tiny("gpt2"))


def modes(folder):
    return {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def check_readable(folder):
    assert (folder / "additional_chat_templates" / "rag.jinja").is_file()
    assert all(mode == (0o755 if path.is_dir() else 0o644) for path, mode in modes(folder).items())
    assert hf.AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATES


# --- that it is the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_configuration_does_not_tell_is_noticed_in_every_precision(dtype, tmp_path):
    """Its rotary frequencies were cast with it, and are not where it is read again, which is no difference."""
    whole = tiny("gpt_neox", rotary_pct=1.0, initializer_range=0.1).to(dtype)
    scaled, turned = copy.deepcopy(whole), copy.deepcopy(whole)
    for layer in scaled.gpt_neox.layers:
        layer.attention.scaling *= 1.02
    turned.gpt_neox.rotary_emb.inv_freq *= 1.02
    for model in (scaled, turned):
        with pytest.raises(ConversionError, match="its checkpoint is read as another model"):
            save(convert(model), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    save(convert(whole), tmp_path / "out")


def test_a_model_that_only_a_user_can_give_inputs_is_compared_on_those(tmp_path, monkeypatch):
    def none(*_, **__):
        raise ModelError("InstructBlip takes 'qformer_input_ids', for which no example can be made")

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    model = perturb(hf.InstructBlipForConditionalGeneration(
        hf.InstructBlipConfig(
            vision_config={**shape, "image_size": 16, "patch_size": 8},
            qformer_config={**shape, "vocab_size": 96, "encoder_hidden_size": 32, "max_position_embeddings": 64},
            text_config={
                "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
                "vocab_size": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1,
            },
            num_query_tokens=4, image_token_index=95,
        )
    )).eval()  # fmt: skip
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, :4] = 95
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "qformer_input_ids": ids[:, 5:], "input_ids": ids}
    inputs["attention_mask"] = torch.ones_like(ids)
    monkeypatch.setattr("normgeo.conversion.certify.several_inputs", none)
    assert certificate_inputs(model) == []
    save(convert(model, inputs=inputs), tmp_path / "same")
    for layer in model.language_model.model.decoder.layers:
        layer.activation_fn = torch.nn.Tanh()
    with pytest.raises(ConversionError, match="its checkpoint is read as another model"):
        save(convert(model, inputs=inputs), tmp_path / "other")


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_directories_can_be_entered_and_files_read_by_others(conversion, templated, tmp_path):
    save(conversion, tmp_path / "out", extras=[templated])
    check_readable(tmp_path / "out")


def test_the_embedded_model_is_converted_by_shard_in_the_dtype_that_it_is_loaded_in(tmp_path):
    """It is stored in float16, and computes in float32."""
    conversion, _ = runs.convert_checkpoint("embedded-layernorm", tmp_path / "out", by_shard=True)
    assert conversion.certificate.own_dtype == "float32"
    assert {value.dtype for value in load_model(tmp_path / "out").parameters()} == {torch.float32}
    assert {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("how", ["--in-memory", "--by-shard"])
def test_of_a_read_only_checkpoint_files_are_written_that_are_not(how, templated, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    templated.save_pretrained(tmp_path / "in")
    for file in (tmp_path / "in").rglob("*.*"):
        file.chmod(0o444)
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), str(tmp_path / "out"), how])
    assert result.exit_code == 0, result.output
    check_readable(tmp_path / "out")  # where nobody is root the tokenizer could not be written over the copy of its own


def test_what_is_nested_deeper_can_be_read_too(tmp_path):
    with whole_directory(tmp_path / "out") as folder:
        (folder / "a" / "b").mkdir(parents=True, mode=0o700)
        (folder / "a" / "b" / "c").touch(0o600)
    assert list(modes(tmp_path / "out").values()) == [0o755, 0o755, 0o755, 0o644]


def test_by_shard_the_templates_come_along_and_other_directories_do_not(templated, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    tiny("gpt2").save_pretrained(source)
    templated.save_pretrained(source)
    (source / "additional_chat_templates" / "training.pt").write_bytes(b"pickle")
    others = "rust_model.ot", "64.tflite", "pytorch_model.bin.index.fp16.json"  # as GPT-2 has, and variants
    for other in others:
        (source / other).write_text("{}")
    for other in ("checkpoint-5", "onnx", ".cache"):  # whose weights are not converted
        (source / other).mkdir()
        (source / other / "config.json").write_text("{}")
    convert_sharded(source, out)
    check_readable(out)
    left = {"training.pt", "checkpoint-5", "onnx", ".cache", *others}
    assert {path.name for path in out.rglob("*")} & left == set()


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("whisper", "clip") for how in ("--in-memory", "--by-shard")]
    + [("wav2vec2", "--in-memory")],
)
def test_what_prepares_a_models_inputs_comes_along(name, how, templated, tmp_path):
    """A tokenizer, and what makes of sounds and images what the model takes; CLIP is not certified on text alone."""
    source, out = tmp_path / "in", tmp_path / "out"
    if name == "clip":
        by_type("clip").save_pretrained(source)
        hf.CLIPImageProcessor(crop_size=16).save_pretrained(source)
    else:
        model = tiny(name) if name == "whisper" else by_type("wav2vec2")
        model.save_pretrained(source)
        extractor = hf.WhisperFeatureExtractor(feature_size=8) if name == "whisper" else hf.Wav2Vec2FeatureExtractor()
        extractor.save_pretrained(source)
    if name != "wav2vec2":
        templated.save_pretrained(source)
    (source / "pytorch_model.bin.index.json").write_text("{}")
    result = CliRunner().invoke(app, ["convert", str(source), str(out), how])
    assert result.exit_code == 0, result.output
    prepares = "preprocessor_config.json"
    before, after = (json.loads((folder / prepares).read_text()) for folder in (source, out))
    assert before.items() <= after.items()
    assert after.keys() - before.keys() <= {"processor_class"}  # else the type of the model alone would tell
    assert not (out / "pytorch_model.bin.index.json").exists()
    if name != "wav2vec2":
        assert hf.AutoTokenizer.from_pretrained(out).get_vocab() == templated.get_vocab()


def test_files_beside_a_model_that_hold_other_json_are_no_error(tmp_path):
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("[1]")
    (tmp_path / "out").mkdir()
    copy_companions(tmp_path / "in", tmp_path / "out", "clip")
    assert (tmp_path / "out/processor_config.json").read_text() == "[1]"


@pytest.mark.parametrize("how", ["--in-memory", "--by-shard"])
def test_a_tokenizer_that_its_model_names_is_named_by_itself(how, tokenizer, tmp_path):
    """As GPT-2's on the hub, of which only the model's type tells the class."""
    source, out = tmp_path / "in", tmp_path / "out"
    tiny("gpt2", vocab_size=4096).save_pretrained(source)
    hf.GPT2TokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(source)
    (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    assert CliRunner().invoke(app, ["convert", str(source), str(out), how]).exit_code == 0
    told = hf.AutoTokenizer.from_pretrained(out)
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"].startswith("GPT2Tokenizer")
    assert isinstance(told, hf.PreTrainedTokenizerBase)
    assert told.get_vocab() == tokenizer.get_vocab()


def test_the_templates_of_a_hub_are_downloaded(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda path, **options: asked.update(options) or str(tmp_path)
    )
    runs._folder("some/model", None)
    assert "*.jinja" in asked["allow_patterns"]


# --- where it may be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_directory_is_filled_and_stays_the_one_it_is(name, conversion, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty" if name == "." else tmp_path)
    before = os.stat(name)
    save(conversion, name)
    assert os.path.samestat(os.stat(name), before)
    assert os.path.samestat(os.stat("."), os.stat(os.getcwd()))
    assert (tmp_path / "linked").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "linked"]
    assert not [path for path in Path(name).iterdir() if path.name.startswith(".")]
    assert type(load_model(name).config).model_type == "normgeo_gpt2"


@pytest.mark.parametrize("how", ["--in-memory", "--by-shard"])
def test_the_command_writes_where_it_runs(how, tmp_path, monkeypatch):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), ".", how])
    assert result.exception is None, result.exception
    assert type(load_model(".").config).model_type == "normgeo_gpt2"
    again = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), ".", how])
    assert "exists already" in str(again.exception)


def test_a_snapshot_without_what_it_links_to_is_said_to_have_no_weights(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / "model.safetensors").symlink_to("../blobs/elsewhere")
    with pytest.raises(ModelError, match="it has no safetensors weights"):
        runs.convert_checkpoint(str(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_link_names_need_not_be_there_yet(conversion, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    save(conversion, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "model" / "model.safetensors").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_link_to_itself_is_refused_before_the_work(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunError, match="loop exists already"), whole_directory(tmp_path / "loop", keep=False):
        pytest.fail("nothing can be written there")


@pytest.mark.parametrize("keep", [True, False])
def test_what_fails_leaves_an_empty_directory_empty(keep, tmp_path, monkeypatch):
    """Also on a disk that is full when the last file is moved."""
    rename = Path.rename

    def full(path, target):
        if path.name == "config.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    def write():
        with whole_directory(tmp_path, keep=keep) as folder:
            (folder / "config.json").touch()
            (folder / "model.safetensors").touch()

    monkeypatch.setattr(Path, "rename", full)
    if keep:
        with pytest.raises(RunError, match="the disk is full; nothing was left behind"):
            write()
    else:
        write()
    assert not list(tmp_path.iterdir())


def test_what_others_write_into_it_meanwhile_is_not_overwritten(tmp_path):
    def write():
        with whole_directory(tmp_path) as folder:
            (folder / "config.json").write_text("mine")
            (tmp_path / "config.json").write_text("theirs")

    with pytest.raises(RunError, match="not empty"):
        write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


# --- by shard, what is refused and what is left alone -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "converted already: all its norms that can be are RMSNorm"),
     ({"to": "crmsnorm"}, r"compressed, and gets all its numbers again in memory alone: ask for --in-memory"),
     ({"to": "crmsnorm", "padded": True}, "compressed")], ids=str,
)  # fmt: skip
def test_by_shard_refuses_what_is_converted_already(options, says, tmp_path):
    save(convert(tiny("gpt2", n_layer=3), **options), tmp_path / "in")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--by-shard"])
    with pytest.raises(ConversionError, match=f"^{tmp_path / 'in'} is {says}"):
        raise result.exception
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_by_shard_takes_what_was_trained_as_pre_ln(tmp_path):
    """Its configuration has a recipe as well, and its model is a plain one."""
    model = convert(tiny("gpt2", n_layer=3), trainable=True).model
    model.save_pretrained(tmp_path / "in")
    assert convert_sharded(tmp_path / "in", tmp_path / "out").certificate.passed


def test_a_shallow_model_leaves_the_random_numbers_of_others_alone(monkeypatch):
    model = tiny("gpt2", n_layer=4)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("it seeds the GPUs"))
    made = [shallow_model(type(model), model.config)[0].state_dict() for _ in range(2)]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())


def test_by_shard_what_is_untied_and_the_dtype_are_so_for_the_part_for_text():
    """Whose own configuration would tie the head again."""
    config = hf.Blip2Config(text_config={"model_type": "opt"})
    converted = copy.deepcopy(config)
    for part in (converted, converted.text_config):
        part.tie_word_embeddings = False
    saved = sharded._config(config, converted, torch.float16)
    assert config.text_config.tie_word_embeddings is False
    assert saved.tie_word_embeddings is False
    assert {part.dtype for part in (saved, saved.text_config, saved.vision_config)} == {torch.float16}


def test_by_shard_a_models_own_names_are_not_taken_for_older_ones(tmp_path):
    """DINOv3's `layer_scale1` has `layer.` in it, which checkpoints say for `model.layer.`, where `.` is any letter."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    model = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(num_hidden_layers=1, **sizes))
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert Shards(tmp_path, model).stored == {name: name for name in model.state_dict()}


def test_a_model_that_keeps_its_first_parameters_in_single_precision_is_saved_in_half(tmp_path):
    """BLIP-2's queries, whatever all others are loaded in."""
    by_type("blip-2").half().save_pretrained(tmp_path / "in")
    conversion = convert(load_model(tmp_path / "in"))
    assert conversion.certificate.own_dtype == "float16"
    save(conversion, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
