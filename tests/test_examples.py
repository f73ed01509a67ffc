"""Inputs made for models that need more than their main input, and what those models become when they are converted."""

from typing import Any

import pytest
import torch
import transformers as hf
import zoo

from analyses import coverage
from normgeo import convert
from normgeo.architectures import architectures
from normgeo.conversion.certify import TOLERANCE_FLOAT64
from normgeo.conversion.probing import outputs_of
from normgeo.conversion.reaching import reaching_inputs
from normgeo.examples import example_inputs

ALL = {a.model_type: a for a in architectures()}
SIZE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def shapes(model, **options):
    return {name: tuple(value.shape) for name, value in example_inputs(model, **options).items()}


@pytest.mark.filterwarnings("ignore:.* to normalize in the code of:UserWarning")  # Kosmos-2 its images
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("blip-2", "partial"), ("blip_2_qformer", "partial"), ("idefics", "partial"), ("instructblip", "partial"),
        ("kosmos-2", "partial"), ("lxmert", "complete"), ("omniasr_ctc", "partial"),
        ("time_series_transformer", "partial"),
    ],
)  # fmt: skip
def test_models_of_several_inputs_are_converted(name, verdict):
    row = coverage.cover(ALL[name])
    assert row.verdict == verdict, row
    assert row.error_rel < TOLERANCE_FLOAT64, row
    assert row.replaced > 0


@pytest.mark.parametrize("name", ["chameleon", "csm", "gemma3n_audio", "hunyuan_vl_vision", "pix2struct", "timesfm"])
def test_models_that_keep_all_their_norms_run_on_what_is_made(name):
    model = zoo.by_type(name)
    with torch.no_grad():
        outputs = outputs_of(model, example_inputs(model))
    assert outputs
    assert all(output.isfinite().all() for output in outputs if output.is_floating_point())


def test_an_image_has_its_places_before_the_text():
    """Kosmos-2 reads an image where a mask says so; what it says of the text depends on it."""
    model: Any = zoo.by_type("kosmos-2")
    inputs = example_inputs(model, 5)
    mask = inputs["image_embeds_position_mask"]
    assert mask.sum(1).tolist() == [model.config.latent_query_num] * 2
    assert not mask[:, -5:].any()
    assert inputs["input_ids"].shape == mask.shape
    with torch.no_grad():
        a, b = (model(**inputs | {"pixel_values": inputs["pixel_values"] * sign}).last_hidden_state for sign in (1, -1))
    assert (a[:, -1] - b[:, -1]).abs().max() > 1e-3


def test_a_film_has_a_place_in_the_text_too():
    model: Any = zoo.by_type("instructblipvideo")
    assert example_inputs(model)["pixel_values"].ndim == 5
    assert (reaching_inputs(model)["input_ids"] == model.config.video_token_index).any()


def test_a_series_has_its_lags_features_and_categories():
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=6, context_length=8, lags_sequence=[1, 4], num_time_features=2, d_model=32,
        num_static_categorical_features=1, cardinality=[5], embedding_dimension=[3], num_static_real_features=1,
    )  # fmt: skip
    model = zoo.perturb(hf.TimeSeriesTransformerModel(config).eval())
    made = {
        "past_values": (2, 12), "past_time_features": (2, 12, 2), "past_observed_mask": (2, 12),
        "future_values": (2, 6), "future_time_features": (2, 6, 2), "static_categorical_features": (2, 1),
        "static_real_features": (2, 1),
    }  # fmt: skip
    assert shapes(model) == made
    conversion = convert(model)
    assert conversion.certificate.passed
    assert not conversion.certificate.unreached
    config = hf.InformerConfig(prediction_length=6, context_length=8, input_size=3, d_model=32)
    assert shapes(hf.InformerModel(config))["past_values"] == (2, 15, 3)
    assert "static_real_features" not in shapes(hf.InformerModel(config))


def test_a_spectrogram_is_an_image_or_four_parts_of_one():
    audio = {
        "spec_size": 64, "num_mel_bins": 32, "patch_embeds_hidden_size": 16, "hidden_size": 128, "depths": [1] * 4,
        "num_attention_heads": [2] * 4, "window_size": 2, "aff_block_r": 2, "projection_dim": 32,
    }  # fmt: skip
    text = SIZE | {"vocab_size": 96, "max_position_embeddings": 64, "projection_dim": 32}
    for fusion, crops in ((False, 1), (True, 4)):
        config = hf.ClapConfig(text_config=text, audio_config=audio | {"enable_fusion": fusion}, projection_dim=32)
        model = hf.ClapModel(config).eval()
        assert shapes(model) == {"input_ids": (2, 7), "input_features": (2, crops, 128, 32), "is_longer": (2, 1)}
        with torch.no_grad():
            model(**example_inputs(model))


def test_images_that_show_a_model_its_task_are_made_with_the_others():
    config = hf.SegGptConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=[64, 32], patch_size=8, mlp_dim=64,
        pretrain_image_size=32, merge_index=1, intermediate_hidden_state_indices=[2], decoder_hidden_size=16,
    )  # fmt: skip
    model = hf.SegGptModel(config).eval()
    assert set(shapes(model).values()) == {(2, 3, 32, 32)}
    with torch.no_grad():
        assert model(**example_inputs(model)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (hf.LiltModel, hf.LiltConfig(vocab_size=96, max_position_embeddings=64, **SIZE)),
        (hf.LxmertModel, hf.LxmertConfig(vocab_size=96, hidden_size=48, num_attention_heads=4, intermediate_size=64,
                                         l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=20)),
    ],
)  # fmt: skip
def test_words_are_read_with_where_they_are_and_with_what_is_seen(cls, config):
    torch.manual_seed(0)
    model = zoo.perturb(cls(config).eval())
    conversion = convert(model)
    assert conversion.certificate.passed
    assert conversion.kept == {}


def test_sound_of_one_channel_has_an_axis_for_it_where_the_documentation_says_so():
    assert shapes(zoo.by_type("dac")) == {"input_values": (2, 1, 4000)}
    assert shapes(zoo.by_type("wav2vec2")) == {"input_values": (2, 4000)}
