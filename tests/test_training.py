"""The twins' trainer."""

import json
import math

import numpy as np
import pytest
import torch

from normgeo import find_sites, load_tokens, training
from normgeo.errors import DataError, NormGeoError
from normgeo.tokens import TokenStream
from normgeo.training import SIZES, build_twin, learning_rate, recipe_for, train, train_tokenizer

TINY = recipe_for("tiny", layers=1, d=32, heads=2, steps=12, batch=4, context=16, warmup=2, bf16=False)


def text_like(n=3000, vocabulary=48):
    rng = np.random.default_rng(0)
    return TokenStream.from_array(np.cumsum(rng.integers(0, 3, n)) % vocabulary, context=16)


def test_sizes_are_those_of_table_2():
    rows = {k: (r.layers, r.d, r.heads, r.lr, r.steps, r.context, r.batch) for k, r in SIZES.items()}
    assert rows["70m"] == (6, 512, 8, 1e-3, 100_000, 1024, 64)
    assert rows["160m"] == (12, 768, 12, 6e-4, 100_000, 1024, 64)
    assert rows["410m"] == (24, 1024, 16, 3e-4, 50_000, 1024, 64)
    assert rows["1b"] == (16, 2048, 8, 3e-4, 50_000, 1024, 64)


def test_twins_start_from_the_same_weights():
    layernorm, rmsnorm = (build_twin(norm, TINY, 48) for norm in ("layernorm", "rmsnorm"))
    shared = dict(rmsnorm.named_parameters())
    assert all(torch.equal(p, shared[n]) for n, p in layernorm.named_parameters() if n in shared)
    assert {s.kind for s in find_sites(layernorm)} == {"layernorm"}
    assert {s.kind for s in find_sites(rmsnorm)} == {"rmsnorm"}
    assert len(find_sites(rmsnorm)) == 3


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    recipe = recipe_for("70m")
    rates = [learning_rate(s, recipe) for s in range(recipe.steps + 1)]
    assert rates[0] == recipe.lr / recipe.warmup
    assert max(rates) == rates[recipe.warmup] == recipe.lr
    assert math.isclose(rates[-1], recipe.lr / 10)
    assert all(b <= a for a, b in zip(rates[recipe.warmup :], rates[recipe.warmup + 1 :], strict=False))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_training_learns_and_repeats_itself(norm):
    recipe = recipe_for("tiny", layers=1, d=32, heads=2, steps=120, batch=8, context=16, warmup=4, bf16=False)
    runs = [train(norm, recipe, text_like(), 48, held_out=text_like(200), evaluate_every=60) for _ in range(2)]
    curve = runs[0][1]
    assert curve.train_loss.iloc[-1] < math.log(48) - 1
    assert curve.equals(runs[1][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True))


def test_twins_see_the_same_data_in_the_same_order(monkeypatch):
    seen = []
    real = training._contexts

    def recorded(ids, recipe):
        for batch in real(ids, recipe):
            seen[-1].append(batch.clone())
            yield batch

    monkeypatch.setattr(training, "_contexts", recorded)
    for norm in ("layernorm", "rmsnorm"):
        seen.append([])
        train(norm, TINY, text_like(), 48)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_too_little_text_and_a_lost_loss_are_errors(monkeypatch):
    with pytest.raises(DataError, match="training needs more than 64 tokens"):
        train("layernorm", TINY, text_like(60), 48)
    monkeypatch.setattr(training, "build_twin", lambda *a: broken(*a))
    with pytest.raises(NormGeoError, match="the loss became nan at step 1"):
        train("layernorm", TINY, text_like(), 48)
    with pytest.raises(NormGeoError, match="no size 'huge'"):
        recipe_for("huge")


def broken(*args):
    model = build_twin(*args)
    with torch.no_grad():
        model.transformer.wte.weight[:] = torch.nan
    return model


def test_the_command_trains_saves_and_reloads(tmp_path, monkeypatch):
    from normgeo import cli, load_model, load_tokenizer

    articles = [{"text": f"Article {i}. " + "The quick brown fox jumps over the lazy dog. " * 40} for i in range(12)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, articles)))
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, articles[:2])))
    monkeypatch.setitem(training.SIZES, "tiny", TINY)
    words = f"normgeo train --data {tmp_path}/text.jsonl --exclude {tmp_path}/held.jsonl --out {tmp_path}/twins"
    monkeypatch.setattr("sys.argv", [*words.split(), "--vocabulary", "300"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    for norm in ("layernorm", "rmsnorm"):
        note = json.loads((tmp_path / "twins" / norm / "training.json").read_text())
        assert note["norm"] == norm
        assert note["command"].startswith("normgeo train")
        tokenizer = load_tokenizer(tmp_path / "twins" / norm)
        assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"
        model = load_model(tmp_path / "twins" / norm)
        loss = training.evaluate(model, load_tokens(tmp_path / "held.jsonl", tokenizer, 16))
        assert abs(loss - note["curve"][-1]["held_out_loss"]) < 1e-4


def test_a_tokenizer_is_a_function_of_its_text():
    a, b = (train_tokenizer(["some text", "more text"], 280) for _ in range(2))
    assert a.get_vocab() == b.get_vocab()
    assert a.eos_token is None
