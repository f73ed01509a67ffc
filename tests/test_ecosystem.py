"""Converted checkpoints in the hands of transformers: losses, models without heads, generation, pickles, processors."""

import copy
import json
import pickle

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from zoo import SMALL, perturb, tiny

from normgeo import convert, decompress, load_model, optimize
from normgeo.conversion.checkpoint import save
from normgeo.conversion.runs import convert_checkpoint
from normgeo.conversion.sharded import convert_sharded
from normgeo.errors import ConversionError, ModelError, NormGeoError
from normgeo.examples import example_inputs

IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
DROPLESS = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "classifier_dropout": 0.0,
            "attention_probs_dropout_prob": 0.0}  # fmt: skip


def built(cls, **settings):
    torch.manual_seed(0)
    return perturb(cls(cls.config_class(**SMALL, **DROPLESS, **settings)).eval())


def auto_models(conversion, folder, auto):
    """A converted model as it is in memory, and as everybody loads its checkpoint."""
    save(conversion, folder)
    with_code = getattr(hf, auto).from_pretrained(folder, trust_remote_code=True).eval()
    return {"in memory": conversion.model, "loaded here": load_model(folder), "by transformers": with_code}


# --- what transformers chooses by the name of a class or the type of a model ------------------------------------------


@pytest.mark.parametrize(
    ("cls", "auto", "settings", "labels"),
    [
        (hf.RobertaPreLayerNormForMaskedLM, "AutoModelForMaskedLM", {}, {"labels": IDS}),
        (hf.GPTNeoXForTokenClassification, "AutoModelForTokenClassification", {"num_labels": 4}, {"labels": IDS % 4}),
        (
            hf.GPTNeoXForSequenceClassification, "AutoModelForSequenceClassification",
            {"num_labels": 3, "pad_token_id": 0}, {"labels": torch.tensor([1, 2])},
        ),
        (
            hf.GPTNeoXForQuestionAnswering, "AutoModelForQuestionAnswering", {},
            {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_the_loss_is_that_of_the_original(cls, auto, settings, labels, tmp_path):
    model = built(cls, **settings)
    wanted = model(input_ids=IDS, **labels).loss
    for how, read in auto_models(convert(model), tmp_path / "out", auto).items():
        torch.testing.assert_close(read(input_ids=IDS, **labels).loss, wanted, msg=lambda m, how=how: f"{how}: {m}")


def test_trainer_reads_labels_as_those_of_a_causal_model(tmp_path):
    model = tiny("gpt2")
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    losses = {}
    models = auto_models(convert(model), tmp_path / "out", "AutoModelForCausalLM")
    for how, read in {"original": model, **models}.items():
        options = hf.TrainingArguments(
            str(tmp_path / "trainer"), label_smoothing_factor=0.1, report_to="none", use_cpu=True, disable_tqdm=True
        )
        losses[how] = hf.Trainer(read, options, eval_dataset=rows).evaluate()["eval_loss"]
    assert all(loss == pytest.approx(losses["original"], rel=1e-5) for loss in losses.values()), losses


def test_whisper_goes_on_from_the_tokens_it_is_given(tmp_path):
    model = tiny("whisper")
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    given = {"decoder_input_ids": torch.tensor([[5, 7, 1]] * 2), "max_new_tokens": 6, "do_sample": False}
    conversion = convert(model)
    wanted = model.generate(features, **given)
    for how, read in auto_models(conversion, tmp_path / "out", "AutoModelForSpeechSeq2Seq").items():
        read.generation_config = copy.deepcopy(model.generation_config)
        assert torch.equal(read.generate(features, **given), wanted), how
        assert read.config.model_type == "whisper"
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "normgeo_whisper"


# --- without heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {}), ("gpt2", {"keep_tie": True}), ("opt", {}), ("gpt_neox", {}), ("whisper", {}), ("vit", {})],
)
def test_hidden_states_are_those_of_the_original(name, options, tmp_path):
    model = tiny(name)
    inputs = example_inputs(model)
    save(convert(model, **options), tmp_path / "out")
    base = hf.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert isinstance(base, type(model.base_model))
    wanted = model.base_model(**inputs).last_hidden_state
    torch.testing.assert_close(base(**inputs).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)
    base.save_pretrained(tmp_path / "again")
    for read in (
        hf.AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True).eval(), load_model(tmp_path / "again"),
    ):  # fmt: skip
        torch.testing.assert_close(read(**inputs).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"keep_tie": True}, {"fold_affine": True}], ids=str)
@pytest.mark.parametrize(("name", "task"), [("gpt2", "SequenceClassification"), ("bert", "TokenClassification")])
def test_a_new_head_is_given_what_that_of_the_original_is(name, task, options, tmp_path):
    model, auto = tiny(name), getattr(hf, f"AutoModelFor{task}")
    if "fold_affine" in options:  # without a head there is none that the last norm's gamma and beta could be in
        model = type(model.base_model)(model.config).eval()
    model.save_pretrained(tmp_path / "in")
    save(convert(model, **options), tmp_path / "out")
    given = {"num_labels": 3, "pad_token_id": 0}
    original = auto.from_pretrained(tmp_path / "in", **given).eval()
    new = auto.from_pretrained(tmp_path / "out", trust_remote_code=True, **given).eval()
    head = {k: v for k, v in original.state_dict().items() if not k.startswith(model.base_model_prefix)}
    assert not new.load_state_dict(head, strict=False).unexpected_keys
    wanted = original(input_ids=IDS).logits
    new.save_pretrained(tmp_path / "tuned")
    for read in (new, load_model(tmp_path / "tuned")):
        torch.testing.assert_close(read(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"fold_affine": True}, {"to": "crmsnorm"}], ids=["folded", "compressed"])
def test_hidden_states_that_are_others_are_not_given(options, tmp_path):
    """The last norm's gamma and beta are in the head then."""
    conversion = convert(tiny("gpt2"), **options)
    assert not conversion.certificate.headless
    save(conversion, tmp_path / "out")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        hf.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)


def test_by_shard_hidden_states_are_those_of_the_original(tmp_path):
    model = tiny("gpt_neox")
    model.save_pretrained(tmp_path / "in")
    convert_sharded(tmp_path / "in", tmp_path / "out")
    base = hf.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    wanted = model.base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(base(input_ids=IDS).last_hidden_state, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "auto", "options"),
    [
        ("gpt_neox", "CausalLM", {}), ("bert", "MaskedLM", {}),
        ("gpt_neox", "CausalLM", {"fold_affine": True}), ("gpt_neox", "CausalLM", {"to": "crmsnorm", "padded": True}),
    ],
)  # fmt: skip
def test_a_model_of_fewer_layers_is_that_of_the_original(name, auto, options, tmp_path):
    """As a draft for assisted generation."""
    model, load = tiny(name), getattr(hf, f"AutoModelFor{auto}").from_pretrained
    model.save_pretrained(tmp_path / "in")
    save(convert(model, **options), tmp_path / "out")
    wanted = load(tmp_path / "in", num_hidden_layers=1).eval()(input_ids=IDS).logits
    read = load(tmp_path / "out", num_hidden_layers=1, trust_remote_code=True).eval()
    torch.testing.assert_close(read(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-5)


def test_fewer_layers_are_refused_where_norms_are_folded_into_the_next(tmp_path):
    save(convert(tiny("bert"), fold_affine=True), tmp_path / "out")
    load, settings = hf.AutoModelForMaskedLM.from_pretrained, tmp_path / "out/config.json"
    for _ in ("by this version", "by earlier ones"):  # whose recipes tell of no readers
        with pytest.raises(ValueError, match=r"layer\.\d\.\S+ is folded .* fewer layers: load all of them"):
            load(tmp_path / "out", num_hidden_layers=1, trust_remote_code=True)
        raw = json.loads(settings.read_text())
        raw["normgeo"]["folded"] = [*raw["normgeo"]["folded"]]
        settings.write_text(json.dumps(raw))


# --- pickles ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("mode", [lambda model: model, optimize], ids=["plain", "optimized"])
def test_what_is_loaded_can_be_pickled_and_copied(mode, tmp_path):
    save(convert(tiny("gpt2")), tmp_path / "out")
    read = mode(load_model(tmp_path / "out"))
    wanted = read(IDS).logits
    for other in (pickle.loads(pickle.dumps(read)), copy.deepcopy(read)):
        torch.testing.assert_close(other(IDS).logits, wanted, rtol=1e-6, atol=1e-6)
        assert other.config.to_dict() == read.config.to_dict()


# --- checkpoints that are not whole -----------------------------------------------------------------------------------


def test_missing_weights_are_not_made_up(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"n_layer": 3}))
    for attempt in (
        lambda: load_model(tmp_path / "in"), lambda: convert_checkpoint(str(tmp_path / "in"), tmp_path / "out"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=r"has not all of its model: transformer\.h\.2\.attn.* are missing"):
            attempt()
    assert not (tmp_path / "out").exists()


def test_weights_that_nobody_stores_are_told(tmp_path):
    """A pooler, or what is only for training; outputs that are looked at may well be the same."""
    model = tiny("bert")
    hf.BertModel(model.config, add_pooling_layer=False).save_pretrained(tmp_path / "in")
    with pytest.warns(UserWarning, match=r"random numbers where pooler\.dense\.bias and 1 others are not stored"):
        load_model(tmp_path / "in")


def test_classes_that_load_in_their_own_way_are_loaded(tmp_path, monkeypatch):
    class Own(hf.GPT2LMHeadModel):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model = super().from_pretrained(*args, **kwargs)
            model.spoken = True
            return model

    monkeypatch.setattr(hf, "GPT2LMHeadModel", Own)
    tiny("gpt2").save_pretrained(tmp_path / "in")
    assert load_model(tmp_path / "in").spoken  # pyright: ignore


def test_the_decoder_of_two_stacks_alone_is_not_given_an_encoder(tmp_path):
    config = tiny("whisper").config
    torch.manual_seed(0)
    model = perturb(hf.WhisperForCausalLM(config).eval())
    save(convert(model), tmp_path / "out")
    assert "AutoModel" not in json.loads((tmp_path / "out/config.json").read_text())["auto_map"]


def test_layers_that_are_left_out_are_told(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.warns(UserWarning, match=r"weights of more layers than its config\.json tells of: \S+h\.1\.attn"):
        load_model(tmp_path / "in")


@pytest.mark.parametrize("by_shard", [False, True])
@pytest.mark.parametrize("left", [0, 5, 4000])
def test_damaged_weights_are_said(by_shard, left, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    weights = tmp_path / "in/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(ModelError, match="a file of its weights is damaged, or was not downloaded whole"):
        convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=by_shard)


@pytest.mark.parametrize("by_shard", [False, True])
def test_a_shard_without_its_embedding_is_said(by_shard, tmp_path):
    """Tied to a head, of which nothing is stored either."""
    tiny("gpt2").save_pretrained(tmp_path / "in", max_shard_size="20KB")
    index = tmp_path / "in/model.safetensors.index.json"
    record = json.loads(index.read_text())
    (tmp_path / "in" / record["weight_map"].pop("transformer.wte.weight")).unlink()
    record["weight_map"] = {k: f for k, f in record["weight_map"].items() if (tmp_path / "in" / f).is_file()}
    index.write_text(json.dumps(record))
    with pytest.raises(NormGeoError, match=r"lm_head\.weight|wte\.weight"):
        convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=by_shard)


def test_a_weight_of_another_shape_is_said_whatever_layer_it_is_of(tmp_path):
    config = hf.GPTNeoXConfig(**SMALL | {"num_hidden_layers": 8})
    hf.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "in")
    weights, name = tmp_path / "in/model.safetensors", "gpt_neox.layers.6.mlp.dense_h_to_4h.bias"
    save_file(load_file(weights) | {name: torch.zeros(60)}, weights, {"format": "pt"})
    with pytest.raises(ConversionError, match=rf"has {name} of shape \(60,\), and its config\.json tells of \(64,\)"):
        convert_sharded(tmp_path / "in", tmp_path / "out")


def test_weights_that_the_configuration_names_are_those_that_are_converted(tmp_path):
    """Also where others lie beside them, under the usual name."""
    model, settings = tiny("gpt_neox"), tmp_path / "in/config.json"
    model.save_pretrained(tmp_path / "in")
    save_file(load_file(tmp_path / "in/model.safetensors"), tmp_path / "in/own.safetensors", {"format": "pt"})
    perturb(model, 1).save_pretrained(tmp_path / "in")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"transformers_weights": "own.safetensors"}))
    with pytest.raises(ConversionError, match=r"names 'own\.safetensors' .*not read by shard; convert it in memory"):
        convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=True)
    convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=False)
    read, wanted = load_model(tmp_path / "out"), tiny("gpt_neox")
    torch.testing.assert_close(read(input_ids=IDS).logits, wanted(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{"model_type": "no-such"}, {"architectures": ["ViTModel"]}], ids=["type", "class"])
@pytest.mark.parametrize("by_shard", [False, True])
def test_a_configuration_of_another_model_is_said(by_shard, change, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | change))
    with pytest.raises(NormGeoError):
        convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=by_shard)
    assert not (tmp_path / "out").exists()


# --- processors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_shard", [False, True])
def test_processors_that_are_found_by_the_type_of_the_model(by_shard, tmp_path):
    tiny("vit").save_pretrained(tmp_path / "in")
    about = {"do_resize": True, "size": {"height": 16, "width": 16}}  # as of before they named their class
    (tmp_path / "in/preprocessor_config.json").write_text(json.dumps(about))
    wanted = type(hf.AutoImageProcessor.from_pretrained(tmp_path / "in"))
    convert_checkpoint(str(tmp_path / "in"), tmp_path / "out", by_shard=by_shard)
    assert type(hf.AutoImageProcessor.from_pretrained(tmp_path / "out")) is wanted


# --- what cannot be converted or optimized, said before the work ------------------------------------------------------


class _Packed(torch.Tensor):
    """As the weights of libraries that quantize."""


def test_weights_that_are_no_plain_numbers_are_refused():
    model = tiny("gpt2")
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone().as_subclass(_Packed))
    with pytest.raises(ConversionError, match=r"lm_head\.weight is of _Packed; convert it before that"):
        convert(model)


def test_offloaded_models_are_not_optimized():
    model = convert(tiny("gpt2")).model
    model.transformer.h[1].mlp.to("meta")
    with pytest.raises(ConversionError, match="optimize takes a model on its devices"):
        optimize(model)


@pytest.mark.parametrize(("to", "options"), [("rmsnorm", {"padded": True}), ("crmsnorm", {"keep_tie": True})])
def test_options_that_do_not_go_together_are_refused_before_anything_is_loaded(to, options, tmp_path):
    with pytest.raises(ConversionError, match=r"goes with|cannot keep its head tied"):
        convert_checkpoint("no/such-model", tmp_path / "out", to=to, **options)


def test_what_is_decompressed_has_a_cache_as_the_original(tmp_path):
    model = convert(tiny("gpt2"), to="crmsnorm").model
    assert model.config.use_cache
    save(decompress(model), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()).get("use_cache", True), name
