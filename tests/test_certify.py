"""Certificates: every sabotage is noticed, and each number is of what it says."""

import copy
import dataclasses
import functools
import json
import re

import pytest
import torch
import transformers as hf
import zoo
from test_convert import worst_error
from test_reaching import Two
from torch import nn
from zoo import perturb, tiny

from normgeo import convert
from normgeo.conversion.certify import certificate_inputs, certify
from normgeo.conversion.gauge import center
from normgeo.conversion.probing import float64_copy, looking_at
from normgeo.conversion.runs import convert_checkpoint
from normgeo.errors import DataError
from normgeo.examples import example_inputs

COUNTS = {"replaced": 5, "kept": 0, "untouched": 0, "recentered": 0}
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


def with_itself(model, batch, real=(), unreached=()):
    """The certificate of a model that was not changed."""
    exact = float64_copy(model)
    more = {"site_mean": 0.0, "counts": COUNTS, "real": real, "unreached": unreached}
    return certify(exact, exact, model, model, [batch], **more)


def sabotaged(kind):
    """A GPT-2, and a conversion of it with one thing wrong."""
    model = tiny("gpt2")
    conversion = convert(model)
    bad = copy.deepcopy(conversion.model).double()
    with torch.no_grad():
        if kind == "a writer that is not centered":
            bad.transformer.h[0].mlp.c_proj.weight += 0.1
        elif kind == "a wrong eps":
            bad.transformer.h[1].ln_1.eps = 1e-2
        elif kind == "a bias dropped":
            bad.transformer.h[1].ln_2.bias.zero_()
        elif kind == "a head that stayed tied":
            bad.lm_head.weight = bad.transformer.wte.weight
        elif kind == "a gain forgotten":
            bad.transformer.ln_f.weight.fill_(1.0)
    return model, conversion.model, bad


@pytest.mark.parametrize(
    "kind",
    ["a writer that is not centered", "a wrong eps", "a bias dropped", "a head that stayed tied", "a gain forgotten"],
)
def test_the_certificate_fails_on_a_sabotaged_conversion(kind):
    model, converted, bad = sabotaged(kind)
    args = (model, converted, certificate_inputs(model))
    certificate = certify(float64_copy(model), bad, *args, site_mean=0.0, counts=COUNTS)
    assert not certificate.passed
    good = copy.deepcopy(converted).double()
    assert certify(float64_copy(model), good, *args, site_mean=0.0, counts=COUNTS).error_rel < 1e-6


def test_the_certificate_fails_on_an_rmsnorm_model_whose_embedding_was_centered():
    model = tiny("llama")
    bad = float64_copy(model)
    center(bad.model.embed_tokens.weight, 1)
    assert worst_error(float64_copy(model), bad, example_inputs(model)) > 1e-3
    args = (model, copy.deepcopy(bad).float(), certificate_inputs(model))
    assert not certify(float64_copy(model), bad, *args, site_mean=0.0, counts=COUNTS).passed
    good = (float64_copy(model), float64_copy(model), model, model, certificate_inputs(model))
    assert certify(*good, site_mean=0.0, counts=COUNTS).passed
    assert not certify(*good, site_mean=0.0, counts=COUNTS | {"replaced": 0}).passed  # nothing replaced is a failure


def test_a_certificate_is_json_and_a_table():
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(8))
    certificate = convert(tiny("gpt2"), certify_on=[{"input_ids": ids}]).certificate
    facts = json.loads(certificate.to_json())
    assert facts["tokens"] == 22
    assert facts["replaced"] == 5
    lines = dict(re.split(" {2,}", line, maxsplit=1) for line in certificate.table().splitlines())
    assert lines["certificate"] == "passed"
    assert lines["what was done"].startswith("5 norms replaced, 0 kept")
    assert float(lines["perplexity"].split()[0]) == pytest.approx(facts["perplexity_original"], rel=1e-6)
    assert dataclasses.replace(certificate, passed=False).table().startswith("certificate          NOT passed")
    with torch.no_grad():
        logits = tiny("gpt2")(ids).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert facts["perplexity_original"] == pytest.approx(loss.exp().item(), rel=1e-9)
    assert convert(tiny("bert"), certify_on=[{"input_ids": ids}]).certificate.perplexity_original is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_a_certificates_perplexity(side):
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, : 5 if side == "left" else None] = 0
    if side == "right":
        mask[0, :7] = 1
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    certificate = convert(tiny("gpt2"), certify_on=[batch]).certificate
    assert certificate.tokens == 6 + 11
    with torch.no_grad():
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 1:][mask[:, :-1] == 0] = -100  # the first token behind padding is not predicted
        logits = tiny("gpt2")(**batch).logits[:, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert certificate.perplexity_original == pytest.approx(loss.exp().item(), rel=1e-9)


def test_padding_is_no_part_of_a_certificates_divergence():
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, 3:], ids[0, 3:] = 0, 2  # whose embedding is another in the other model
    model, other = tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.ln_f.weight[0] += 1
        other.transformer.wte.weight[2] *= 9
        batch = {"input_ids": ids, "attention_mask": mask}
        p, q = (m(**batch).logits.double().log_softmax(-1) for m in (model, other))
    wide = model.double(), other.double()
    certificate = certify(*wide, *wide, [batch], site_mean=0.0, counts=COUNTS)
    kl, same = (p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).double()
    assert certificate.kl == pytest.approx(kl[mask == 1].mean().item(), rel=1e-5)
    assert kl.mean() > 2 * certificate.kl  # padding would have shown
    assert certificate.top1 == pytest.approx(same[mask == 1].mean().item())


def test_a_certificate_is_of_the_worst_input_and_tells_whose_error_is_whose():
    model, other = tiny("gpt2"), tiny("gpt2")
    with torch.no_grad():
        other.transformer.wpe.weight[9] *= 2  # a position that the second input does not reach
    batches = [{"input_ids": torch.arange(3, 3 + 2 * n).view(2, n)} for n in (12, 6)]
    wide = float64_copy(model), float64_copy(other)
    certificate = certify(*wide, model, other, batches, site_mean=0.25, counts=COUNTS)
    assert not certificate.passed
    assert certificate.error_rel > 1e-3
    assert certificate.error_abs > 1e-4
    assert certificate.own_error > 1e-3 > 1e-5 > certificate.original_error
    assert certificate.site_mean == 0.25


def test_a_certificate_allows_no_more_than_rounding_in_float64():
    model = tiny("gpt2")
    close, exact = float64_copy(model), float64_copy(model)
    with torch.no_grad():
        close.transformer.ln_f.bias += 1e-8
    batch = {"input_ids": torch.arange(3, 15).view(2, 6)}
    certificate = certify(exact, close, model, model, [batch], site_mean=0.0, counts=COUNTS)
    assert 1e-10 < certificate.error_rel < 1e-7
    assert not certificate.passed


@torch.no_grad()
def test_a_certificate_allows_no_more_than_rounding_where_single_precision_is_inside():
    model, batch = tiny("gpt_neox"), {"input_ids": torch.arange(3, 15).view(2, 6)}
    close = float64_copy(model)
    close.gpt_neox.final_layer_norm.bias += 3e-5
    certificate = certify(float64_copy(model), close, model, model, [batch], site_mean=0.0, counts=COUNTS)
    assert certificate.single_inside
    assert 1e-5 < certificate.error_rel < 1e-3
    assert not certificate.passed


class Half(nn.Linear):
    shortest = 0

    def forward(self, x):
        out = super().forward(x)
        return out.half().to(x.dtype) if x.shape[1] >= self.shortest else out


def test_half_precision_inside_is_seen():
    """Be it that some inputs alone make a model use it, as interpolated positions do."""
    model, batch, longer = tiny("gpt2"), *({"input_ids": torch.arange(3, 15).view(2, -1)[:, :n]} for n in (5, 6))
    assert not with_itself(model, batch, [longer]).single_inside
    model.lm_head = Half(32, 96)
    assert with_itself(model, batch).single_inside
    model.lm_head.shortest = 6
    assert with_itself(model, batch, [longer]).single_inside


def test_all_outputs_of_what_has_no_head_are_compared():
    model, batch = tiny("gpt2"), {"input_ids": torch.arange(3, 15).view(2, 6)}
    assert with_itself(model, batch).headless
    assert with_itself(model.transformer, batch).headless  # it has none
    with looking_at(("logits",)):  # which are the head's
        assert with_itself(model, batch).headless


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, input_ids):
        return self.head(self.norm(self.wte(input_ids)))


class Around(hf.PreTrainedModel):
    """As models with code of their own are: around a module that is no model of transformers, with its own outputs."""

    config_class, base_model_prefix = hf.PretrainedConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = Within()
        self.post_init()

    def get_input_embeddings(self):
        return self.model.wte

    def forward(self, input_ids):
        return Answer(self.model(input_ids))


def test_a_model_around_a_mere_module_that_gives_a_dataclass_is_certified():
    model = perturb(Around(hf.PretrainedConfig(vocab_size=32, hidden_size=8))).eval()
    certificate = convert(model).certificate
    assert certificate.passed
    assert not certificate.headless
    assert convert(model, outputs=["scores"]).certificate.outputs == ("scores",)


def test_what_only_real_text_reaches_is_reached():
    model = Two(hf.GPT2Config()).double()
    made_up, real = ({"input_ids": torch.tensor([[token, 2]])} for token in (1, 60))
    assert with_itself(model, made_up, unreached=["idle", "gated"]).unreached == ("idle", "gated")
    assert with_itself(model, made_up, [real], ["idle", "gated"]).unreached == ("idle",)


def test_a_mask_of_what_is_read_is_none_of_what_is_written():
    model, ids = perturb(hf.BartForConditionalGeneration(hf.BartConfig(**BART)).eval()), torch.arange(3, 27).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :5]}
    assert with_itself(model, batch).passed


def test_an_encoder_decoder_has_no_perplexity():
    """Its encoder has seen all that its decoder is given."""
    ids = torch.arange(3, 27).view(2, 12)
    model = perturb(hf.BartForConditionalGeneration(hf.BartConfig(**BART)).eval())
    certificate = convert(model, certify_on=[{"input_ids": ids, "decoder_input_ids": ids}]).certificate
    assert (certificate.tokens, certificate.perplexity_original, certificate.perplexity_converted) == (0, None, None)


def test_a_certificate_tells_what_mean_is_left():
    certificate = convert(tiny("gpt2")).certificate
    assert 0 < certificate.site_mean < 1e-14  # rounding, which is hardly ever nothing at all
    assert float(re.search(r"means left at norms +(\S+) of the rms", certificate.table())[1]) > 0


def test_a_short_text_is_certified_on_as_it_is(tmp_path):
    (tmp_path / "short.txt").write_text("A river is a natural stream of water that flows to the sea.")
    convert_it = functools.partial(convert_checkpoint, "embedded-layernorm", data=str(tmp_path / "short.txt"))
    conversion, _ = convert_it(tmp_path / "out")
    text = json.loads((tmp_path / "out/conversion.json").read_text())["text"]
    assert conversion.certificate.tokens == text["tokens"] - 1 > 10
    with pytest.raises(DataError, match=rf"ends after {text['tokens']} tokens, 500 were asked for"):
        convert_it(tmp_path / "more", n_tokens=500)
    with pytest.raises(DataError, match="--tokens must be at least 1, received 0"):
        convert_it(tmp_path / "none", n_tokens=0)


def test_made_up_inputs_that_a_model_cannot_run_are_left_out():
    """Of three dimensions the second are choices: two ids a row are two choices, and seven are none."""
    model = zoo.perturb(hf.MegatronBertForMultipleChoice(hf.MegatronBertConfig(**zoo.SMALL)).eval())
    ids = torch.randint(3, 96, (3, 2, 4, 5), generator=torch.Generator().manual_seed(0))
    conversion = convert(model, inputs={"input_ids": ids[0]})
    assert conversion.certificate.inputs == ("input_ids (2, 4, 5)", "input_ids (2, 2)")
    with torch.no_grad():
        assert torch.allclose(conversion.model(ids[1]).logits, model(ids[1]).logits, atol=1e-5)
