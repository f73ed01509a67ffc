"""Twins: the same start, forms that train as one, and what is saved."""

import json

import numpy as np
import pytest
import torch
import transformers
import zoo
from tokenizers import ByteLevelBPETokenizer
from training_zoo import small, trained

from normgeo import convert, find_sites, load_model
from normgeo.errors import ConversionError, DataError
from normgeo.examples import example_inputs
from normgeo.norms import CRMSNorm
from normgeo.tokens import TokenStream
from normgeo.training import twins
from normgeo.training.compressed import Reader, compressed, widened
from normgeo.training.recipe import NORMS, recipe_for
from normgeo.training.twins import PIECES, build_twin, evaluate, save_twin, train_tokenizer


def test_twins_start_from_the_same_weights():
    built = {norm: build_twin(norm, small(), 48) for norm in NORMS}
    values = {n: {twins.plain_name(k): p for k, p in m.named_parameters()} for n, m in built.items()}
    layernorm, rmsnorm, pre, crms = (values[norm] for norm in NORMS)
    assert all(torch.equal(p, layernorm[n]) for n, p in rmsnorm.items())
    assert layernorm.keys() == pre.keys() == crms.keys()
    assert all(torch.equal(p, pre[n]) for n, p in layernorm.items())
    for name, p in layernorm.items():
        assert torch.equal(p, crms[name][tuple(slice(n) for n in p.shape)])
    for norm in ("layernorm", "rmsnorm"):
        assert {s.kind for s in find_sites(built[norm])} == {norm}
    assert all(m.d == 32 for m in built["pre-crmsnorm"].modules() if isinstance(m, CRMSNorm))


def test_twins_with_heads_of_their_own_train_as_one():
    """The head is trained, and the training forms' losses are the Pre-LN model's, as with a tied head."""
    losses = {}
    for norm in ("layernorm", "pre-rmsnorm"):
        model, curve = trained(norm, small(tied=False, steps=6, dropout=0.0))
        losses[norm] = curve.train_loss.to_numpy()
        start = build_twin(norm, small(tied=False), 48).lm_head.weight
        assert not torch.equal(model.lm_head.weight, start)
        assert not torch.equal(start, model.transformer.wte.weight)
    np.testing.assert_allclose(*losses.values(), rtol=1e-5)


def test_what_a_wider_model_has_more_is_drawn_as_the_rest_was():
    """Of what writes into the stream of a GPT-2 a sqrt(2 * layers)-th as large."""
    config = transformers.GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=300, n_positions=256)
    wide = widened(transformers.GPT2LMHeadModel(config))
    block, tokens = wide.transformer.h[1], wide.transformer.wte.weight
    for weight in (block.mlp.c_proj.weight, block.attn.c_proj.weight, tokens, block.mlp.c_fc.weight.T):
        assert weight[:, -1].std().item() == pytest.approx(weight[:, :-1].std().item(), rel=0.25)
    assert wide.lm_head.weight is tokens
    assert (block.mlp.c_proj.bias == 0).all()
    assert (block.ln_1.weight == 1).all()


def moved(model):
    """A model in float64 with gains and biases that are not 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.double().parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model.eval()


@pytest.mark.parametrize("arch", ["gpt2", "vit"])
def test_forms_follow_the_pre_ln_model(arch):
    """Pre-RMSNorm and Pre-CRMSNorm from converted weights: one loss curve (*Pre-RMSNorm* section 3.4)."""
    generator = torch.Generator().manual_seed(2)
    if arch == "gpt2":
        plain = moved(twins._pre_ln("pre-crmsnorm", small(layers=2, dropout=0.0), 48, 0))
        inputs, labels = {"input_ids": torch.randint(48, (4, 16), generator=generator)}, 48
    else:
        plain = moved(widened(zoo.tiny("vit")))
        size = plain.config.image_size
        inputs = {"pixel_values": torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)}
        labels = plain.config.num_labels
    forms = [convert(plain, trainable=True).model, compressed(plain)]
    width = plain.config.hidden_size
    assert {m.d for m in forms[1].modules() if isinstance(m, CRMSNorm)} == {width}
    with torch.no_grad():
        labels = torch.randint(labels, plain(**inputs).logits.shape[:-1], generator=generator)
    expected = zoo.trained(plain, inputs, labels)
    assert expected[-1] < 0.8 * expected[0]
    for form in forms:
        assert zoo.apart(expected, zoo.trained(form, inputs, labels)) < 1e-9


@pytest.mark.parametrize("arch", ["gpt_neox", "opt"])
def test_compressed_forms_of_others(arch):
    plain = moved(zoo.tiny(arch))
    form, inputs = compressed(plain), example_inputs(plain)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(form(**inputs).logits, plain(**inputs).logits, rtol=1e-9, atol=1e-9)
    assert max(m.d for m in form.modules() if isinstance(m, CRMSNorm)) == plain.config.hidden_size - 1


@pytest.mark.parametrize(("arch", "why"), [("bert", "reads its stream"), ("bloom", "no LayerNorm that linear layers")])
def test_models_without_a_compressed_form(arch, why, tiny):
    with pytest.raises(ConversionError, match=f"no Pre-CRMSNorm training form: .*{why}.*train it as pre-rmsnorm"):
        compressed(tiny(arch))


def test_a_compressed_form_with_other_outputs_is_refused(tiny, monkeypatch):
    """Folding that forgets the sum of what the norm gives."""
    monkeypatch.setattr(Reader, "folded", lambda self: (self.inner.weight.T[:, :-1], self.inner.bias))
    with pytest.raises(ConversionError, match="outputs would change"):
        compressed(tiny("gpt2"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_saved_twins_are_the_trained_ones(norm, tied, tmp_path):
    recipe = small(steps=3, checkpoint_every=3, tied=tied)
    model, _ = trained(norm, recipe, tmp_path)
    heads = sum(name.startswith("lm_head") for name, _ in model.named_parameters())
    assert heads == (not tied)
    ids = torch.arange(32).view(2, 16)
    back = load_model(tmp_path / "checkpoints/step-00000003")
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert back.transformer.wte.weight.shape[1] == 32
    kind = {"pre-rmsnorm": "rmsnorm", "pre-crmsnorm": "crmsnorm"}.get(norm, norm)
    assert {type(m).__name__.lower() for m in back.modules() if "Norm" in type(m).__name__} == {kind}


def test_a_converted_twin_is_certified(tmp_path):
    model = build_twin("pre-rmsnorm", small(), 48, 0)
    save_twin("pre-rmsnorm", model, dict(model.named_parameters()), small(), tmp_path / "model", None)
    assert json.loads((tmp_path / "model/conversion.json").read_text())["certificate"]["passed"]


def test_a_tokenizer_is_a_function_of_its_text():
    a, b = (train_tokenizer(["some text", "more text"], 280) for _ in range(2))
    assert a.get_vocab() == b.get_vocab()
    assert a.eos_token == "<|endoftext|>"


def test_a_long_text_is_learnt_from_in_pieces_and_alike():
    words = np.random.default_rng(0).choice(["a", "of", "norm", "  mean", "\n\nangle,", "x" * 300, "\t"], 60_000)
    text = " ".join(words)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    assert len(pieces := [piece[0] for piece in PIECES.finditer(text)]) > 10
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 66_000
    assert train_tokenizer([text], 400).backend_tokenizer.to_str() == bpe._tokenizer.to_str()


def test_the_forms_overlap_in_float32(tmp_path, monkeypatch):
    from analyses import training_forms
    from normgeo import figures

    few = {"layers": 2, "batch": 2, "context": 64}  # of as many steps, which is what errors would grow with
    monkeypatch.setattr(training_forms, "recipe_for", lambda size, **options: recipe_for(size, **options | few))
    frame = training_forms.compute(n_tokens=2 * 2048)
    assert frame.groupby("form").step.max().tolist() == [2, 2, 2]
    assert frame.difference.max() < 1e-5
    figures.save(training_forms.plot(frame), tmp_path / "forms")


@pytest.mark.parametrize("last", [5, 2, 1])
def test_a_held_out_loss_is_the_mean_over_predictions(last):
    """Of contexts of 16 tokens, and of a shorter one: each has a prediction less than tokens."""
    recipe, rng = small(), np.random.default_rng(0)
    model = build_twin("layernorm", recipe, 48).eval()
    ids = rng.integers(0, 48, 3 * 16 + last)
    found = evaluate(model, TokenStream.from_array(ids, context=16), rows=2)
    losses = []
    for context in np.split(ids, [16, 32, 48]):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(context[None])).logits[0].double()
        log_p = logits - logits.logsumexp(-1, keepdim=True)
        losses += [-log_p[k, context[k + 1]].item() for k in range(len(context) - 1)]
    assert len(losses) == 3 * 15 + last - 1
    assert found == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(DataError, match="has no two tokens in a row to predict"):
        evaluate(model, TokenStream.from_array(ids[:, None]))


def test_a_loss_is_in_float64_where_the_model_is():
    model = build_twin("layernorm", small(), 48).double().eval()
    ids = np.random.default_rng(0).integers(0, 48, (3, 16))
    found = evaluate(model, TokenStream.from_array(ids))
    with torch.no_grad():
        log_p = model(input_ids=torch.from_numpy(ids)).logits.log_softmax(-1).numpy()
    picked = np.take_along_axis(log_p[:, :-1], ids[:, 1:, None], -1)
    assert found == pytest.approx(-picked.mean(), rel=1e-13)
