"""Models: the registry, the embedded pair, and what loading refuses."""

import hashlib
import json
import operator
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HieraConfig, HieraModel, RobertaConfig, RobertaModel
from zoo import CONFIGS, tiny

from normgeo import convert, load_model, load_tokenizer, load_tokens, measure_angles
from normgeo.cards import ASSETS, EMBEDDED, TABLE_1
from normgeo.conversion.runs import convert_checkpoint
from normgeo.errors import DataError, ModelError
from normgeo.examples import example_inputs, max_context, several_inputs
from normgeo.loading import explained
from normgeo.models import base_model, copied, default_dtype, tokenizer_digest, uncompiled, weights_digest
from normgeo.tokens import SAMPLE, TokenStream
from normgeo.training.train import evaluate


def test_table_1_is_the_papers():
    assert [c.norm for c in TABLE_1] == ["LayerNorm"] * 5 + ["RMSNorm"] * 2
    assert [c.d for c in TABLE_1] == [1600, 2048, 2048, 4096, 4096, 4096, 4096]
    assert [c.layers for c in TABLE_1] == [48, 24, 24, 28, 32, 32, 32]
    assert [f"{c.parameters / 1e9:.1f}" for c in TABLE_1] == ["1.6", "1.3", "1.4", "6.1", "6.9", "6.7", "8.0"]
    assert all(len(c.revision) == 40 for c in TABLE_1)


def test_the_pair_is_small_alike_and_as_good_as_its_cards_say():
    """On a twelfth of the sample; on all of it, which takes a minute, these very files have their cards' losses."""
    parameters, losses = [], []
    cards = [json.loads((path / "training.json").read_text()) for path in EMBEDDED.values()]
    for (name, path), card in zip(EMBEDDED.items(), cards, strict=True):
        model, tokenizer = load_model(name), load_tokenizer(name)
        weights = path / "model.safetensors"
        assert weights.stat().st_size < 10e6
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == card["model_sha256"]
        assert (model.dtype, model.name_or_path) == (torch.float32, name)
        assert 3e6 < model.num_parameters() < 5e6
        rows = [ids for ids, _ in load_tokens("sample", tokenizer, 256).contexts(0)][:-1:12]
        losses.append([evaluate(model, TokenStream.from_array([row])) for row in rows])
        parameters.append({n: p.shape for n, p in model.named_parameters()})
    held_out = np.array([card["curve"][-1]["held_out_loss"] for card in cards])
    found = np.array([*losses, np.subtract(*losses)])  # of each, and of what is between them, which is known better
    error = found.std(1) / np.sqrt(len(rows))
    assert (np.abs(found.mean(1) - [*held_out, np.subtract(*held_out)]) < 3 * error).all()
    assert (error < [0.15, 0.15, 0.02]).all()
    part = [card["held_out_loss_of_every_twelfth_context"] for card in cards]
    assert (np.abs(found.mean(1)[:2] - part) < 1e-3).all()
    more, fewer = parameters
    assert all(more[n] == shape for n, shape in fewer.items())
    assert all(n.split(".")[-2].startswith("ln_") and n.endswith("bias") for n in more.keys() - fewer.keys())
    assert cards[0]["recipe"] == cards[1]["recipe"]
    assert cards[0]["data_sha256"] == cards[1]["data_sha256"]
    assert (ASSETS / "layernorm/tokenizer.json").read_text() == (ASSETS / "rmsnorm/tokenizer.json").read_text()


def test_the_sample_is_text_of_a_few_hundred_kilobytes():
    articles = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    assert 200_000 < sum(len(a["text"]) for a in articles) < 500_000
    assert all(a["title"] and a["text"].strip() for a in articles)


@pytest.mark.parametrize("name", CONFIGS)
def test_example_inputs_are_accepted(name):
    model = tiny(name)
    with torch.no_grad():
        model(**example_inputs(model))


def test_patches_that_are_given_by_height_and_width_have_example_inputs():
    config = HieraConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 2], num_query_pool=1, image_size=[64, 64])
    model = HieraModel(config)
    with torch.no_grad():
        assert torch.isfinite(model(**example_inputs(model)).last_hidden_state).all()


def test_models_without_embeddings_to_load_are_explained(tmp_path):
    with pytest.raises(ModelError, match="there is no such directory"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match="unheard_of"):
        load_model(tmp_path)


def test_an_adapter_alone_is_no_model_and_is_not_left_out_beside_one(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="it is an adapter: merge it into its model"):
        load_model(tmp_path)
    tiny("gpt2").save_pretrained(tmp_path)
    monkeypatch.setattr("normgeo.loading.is_peft_available", lambda: False)
    with pytest.raises(ModelError, match="which would be left out: install peft, or merge it"):
        load_model(tmp_path)


def test_quantized_weights_that_are_loaded_as_plain_numbers_are_said(tmp_path):
    """As those of 8 bits of a floating point are where there is no GPU."""
    method = {"quant_method": "fp8", "weight_block_size": [8, 8], "dequantize": True}
    model = tiny("gpt_neox")
    model.save_pretrained(tmp_path)
    weights, linears = load_file(tmp_path / "model.safetensors"), re.compile(r".*layers.*(dense|value).*weight")
    for name in filter(linears.fullmatch, list(weights)):
        weights[f"{name}_scale_inv"] = torch.full([size // 8 for size in weights[name].shape], 2.0)
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.warns(UserWarning, match=r"is stored quantized \(fp8\), and is loaded as plain float32: it computes"):
        loaded = load_model(tmp_path)
    torch.testing.assert_close(loaded.state_dict()[name], 2 * model.state_dict()[name], rtol=0.1, atol=0.01)


def test_code_of_others_is_not_run_unless_asked(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}})
    )
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("message", "hint"),
    [("You are trying to access a gated repo.", "hf auth login"), ("Can't connect to the hub", "cannot be reached")],
)
def test_what_the_hub_says_is_explained(monkeypatch, message, hint):
    def refuse(*args, **kwargs):
        raise OSError(message)

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", refuse)
    with pytest.raises(ModelError, match=hint):
        load_model("meta-llama/Meta-Llama-3-8B")


def test_pinned_revisions_are_what_is_asked_of_the_hub(monkeypatch):
    asked = []

    def record(name, **options):
        asked.append((name, options))
        raise OSError("offline")

    monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", record)
    for card in TABLE_1:
        with pytest.raises(ModelError):
            load_model(card.hub_id)
    assert asked == [(card.hub_id, {"revision": card.revision}) for card in TABLE_1]


def test_what_is_downloaded_whole_is_pinned_too(monkeypatch, tmp_path):
    asked = []

    def record(name, **options):
        asked.append((name, options["revision"]))
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", record)
    for revision in (None, "main"):
        with pytest.raises(ModelError):
            convert_checkpoint(TABLE_1[0].hub_id, tmp_path / "out", revision=revision)
    assert asked == [(TABLE_1[0].hub_id, TABLE_1[0].revision), (TABLE_1[0].hub_id, "main")]


def test_what_is_on_this_machine_has_no_revision(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    for name in ("embedded-layernorm", tmp_path / "in"):
        for refused in (load_model, load_tokenizer):
            with pytest.raises(ModelError, match="where it has no revision 'v1': leave out --revision"):
                refused(name, revision="v1")


def test_what_is_set_for_the_whole_process_is_put_back_by_the_last_of_several_threads():
    def set_now():
        return torch.get_default_dtype(), torch._dynamo.eval_frame._stance.stance

    before = set_now()
    for first, second in ((0, 1), (1, 0)):  # who enters last leaves last, and first
        inside = [(default_dtype(torch.float64), uncompiled()) for _ in range(2)]
        for settings in inside:
            for setting in settings:
                setting.__enter__()
        for settings in (inside[first], inside[second]):
            assert set_now() == (torch.float64, "force_eager")
            for setting in settings:
                setting.__exit__(None, None, None)
        assert set_now() == before


def test_digest_sees_every_weight():
    one, same, other = tiny("gpt2"), tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.ln_f.bias[3] += 1e-7
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)
    assert weights_digest(one) != weights_digest(tiny("gpt2").to(torch.bfloat16))


def test_what_a_tokenizer_was_last_asked_for_is_no_part_of_its_digest():
    tokenizer = load_tokenizer("embedded-layernorm")
    before = tokenizer_digest(tokenizer)
    tokenizer("one two three four", truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    before = tokenizer_digest(tokenizer)
    tokenizer(["one two three", "four"], padding=True)
    assert tokenizer_digest(tokenizer) == before


def test_longest_context_and_base():
    assert max_context(tiny("gpt2")) == 64
    assert max_context(tiny("mpt")) == 64
    assert max_context(tiny("t5")) is None
    model = tiny("llama")
    assert base_model(model) is model.model


def test_positions_behind_the_paddings_are_all_there_are():
    config = RobertaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=18, pad_token_id=1,
    )  # fmt: skip
    model = RobertaModel(config).eval()
    assert max_context(model) == 16
    assert measure_angles(model, np.full((2, 16), 5), null=4, progress=False).frame.n_tokens.max() == 32
    with pytest.raises(DataError, match="longer than the model's 16; give --context 16"):
        measure_angles(model, np.full((2, 17), 5), progress=False)


def test_examples_fit_short_contexts():
    model = tiny("gpt2", n_positions=5)
    assert [inputs["input_ids"].shape[1] for inputs in several_inputs(model)] == [2, 5]
    assert example_inputs(model)["input_ids"].shape == (2, 5)
    assert example_inputs(tiny("gpt2"))["input_ids"].shape == (2, 7)
    assert convert(model).certificate.passed


CONSTANTS = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
class Config(PretrainedConfig):
    model_type = "constants"
class Model(PreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("frequencies", 10000 ** -(torch.arange(4) / 4), persistent=False)
        self.register_buffer("filled", torch.empty(4), persistent=False)
        self.register_buffer("stored", torch.arange(4.0))
        self.turns = torch.polar(torch.ones(4), torch.arange(4.0))
        self.post_init()
    def _init_weights(self, module):
        if module is self:
            torch.nn.init.constant_(self.filled, 3.0)
"""


def test_constants_that_are_not_stored_are_as_the_models_own_code_computes_them(tmp_path):
    space = {"__name__": "mine"}
    exec(CONSTANTS, space)
    model = space["Model"](space["Config"]())
    model.stored.mul_(2)
    model.save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text(CONSTANTS)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    before = torch.get_rng_state()
    read = load_model(tmp_path, trust_remote_code=True)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("linear.weight", "frequencies", "filled", "stored", "turns"):
        assert torch.equal(*(operator.attrgetter(name)(m) for m in (model, read))), name


def test_a_tokenizer_with_code_of_its_own_is_said_to_be_left_out(tmp_path):
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "tokenizer_config.json").read_text())
    raw |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(raw))
    code = "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n"
    (tmp_path / "mine.py").write_text(code)
    tiny("vit").save_pretrained(tmp_path)  # for whose kind there is no other
    with pytest.warns(UserWarning, match="without its tokenizer: it brings its own code"):
        assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path, trust_remote_code=True) is not None


def test_a_tokenizer_that_needs_what_is_not_installed_is_said(monkeypatch):
    def absent(*_, **__):
        raise ImportError("\nYou need to install sacremoses to use BioGptTokenizer.\nSee there.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", absent)
    with pytest.warns(UserWarning, match=r"^some/model goes without its tokenizer: You need to install sacremoses"):
        assert load_tokenizer("some/model") is None


def test_a_damaged_tokenizer_is_said_to_be_left_out(tmp_path):
    load_tokenizer("embedded-layernorm").save_pretrained(tmp_path)
    for content in ((tmp_path / "tokenizer.json").read_text()[:300], '{"version": "1.0", "model": {"type": "Foo"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.warns(UserWarning, match="goes without its tokenizer: its files are damaged"):
            assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["org/gated-mlp-1b", "org/model-401", "org/plain-403"])
def test_what_a_model_is_called_is_not_what_is_wrong_with_it(name):
    lines = (
        f"{name} is not a local folder and is not a valid model identifier",
        "401 Client Error. Cannot access gated repo",
    )
    told = [str(explained(name, OSError(line))) for line in lines]
    assert ["the hub does not have it" in line for line in told] == [True, False]
    assert ["accept its terms" in line for line in told] == [False, True]


@pytest.mark.parametrize("line", ["size mismatch for mlp.gated_proj: [401, 8]", "no multi_modal_connector.weight"])
def test_of_a_local_model_nothing_is_said_of_the_hub(line, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert str(explained(str(tmp_path), RuntimeError(line))).endswith(f": RuntimeError ({line})")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"n_embd": 64}, "its weights have other shapes than its config.json says; get it again, or correct that"),
        ({"n_embd": 0}, r"ZeroDivisionError \(.*"),
    ],
)
def test_a_configuration_of_another_width_is_one_line(tmp_path, wrong, why):
    tiny("gpt2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(ModelError, match=f"cannot load the model '{tmp_path}': {why}$"):
        load_model(tmp_path)


def test_a_copy_has_the_hooks_that_there_were_and_any_more_for_itself():
    model = tiny("gpt2")
    model.transformer.ln_f.register_forward_hook(lambda *_: None)
    copy = copied(model)
    for name, module in model.named_modules():
        other, hooks = copy.get_submodule(name), int(name == "transformer.ln_f")
        assert len(module._forward_hooks) == len(other._forward_hooks) == hooks
        other.register_forward_hook(lambda *_: None)
        other._non_persistent_buffers_set.add("other")
        assert len(module._forward_hooks) == hooks
        assert "other" not in module._non_persistent_buffers_set
