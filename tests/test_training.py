"""The twins' trainer: recipes, the same start and data, kill and resume, full disks, lost losses, and equal forms."""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

from normgeo import convert, find_sites, load_model, load_tokenizer, load_tokens, training, training_state, twins
from normgeo.compressed_training import compressed
from normgeo.corpus import Shuffled, Streamed, open_corpus
from normgeo.errors import ConversionError, DataError, NormGeoError, RunError
from normgeo.norms import CRMSNorm
from normgeo.recipe import NORMS, SIZES, checkpoint_steps, learning_rate, recipe_for
from normgeo.tokens import TokenStream
from normgeo.training_state import latest_state
from normgeo.twins import build_twin, evaluate, save_twin, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"layers": 1, "d": 32, "heads": 2, "context": 16, "batch": 4, "warmup": 2, "precision": "no"}


def small(**changes):
    return recipe_for("tiny", **({"steps": 12} | SMALL | changes))


def text_like(n=3000, vocabulary=48):
    rng = np.random.default_rng(0)
    return TokenStream.from_array(np.cumsum(rng.integers(0, 3, n)) % vocabulary, context=16)


def trained(norm, recipe, folder=None, **options):
    return training.train(norm, recipe, Shuffled(text_like(), 16, 0), 48, folder, device="cpu", **options)


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_table_2():
    rows = {k: (r.layers, r.d, r.heads, r.lr, r.steps, r.context, r.batch) for k, r in SIZES.items()}
    assert rows["70m"] == (6, 512, 8, 1e-3, 100_000, 1024, 64)
    assert rows["160m"] == (12, 768, 12, 6e-4, 100_000, 1024, 64)
    assert rows["410m"] == (24, 1024, 16, 3e-4, 50_000, 1024, 64)
    assert rows["1b"] == (16, 2048, 8, 3e-4, 50_000, 1024, 64)


def test_checkpoints_are_those_of_appendix_a2():
    thousands = [*range(1000, 10_000, 1000), *range(10_000, 100_001, 10_000)]
    assert checkpoint_steps(SIZES["70m"]) == thousands
    assert checkpoint_steps(SIZES["1b"]) == [step for step in thousands if step <= 50_000]
    assert checkpoint_steps(recipe_for("70m", steps=2500)) == [1000, 2000, 2500]


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    recipe = recipe_for("70m")
    rates = [learning_rate(s, recipe) for s in range(recipe.steps + 1)]
    assert rates[0] == recipe.lr / recipe.warmup
    assert max(rates) == rates[recipe.warmup] == recipe.lr
    assert math.isclose(rates[-1], recipe.lr / 10)
    assert all(b <= a for a, b in zip(rates[recipe.warmup :], rates[recipe.warmup + 1 :], strict=False))


def test_recipes_that_make_no_sense_are_refused():
    for changes, says in (
        ({"steps": 0}, "--steps must be at least 1"), ({"lr": -1.0}, "learning rate"), ({"heads": 5}, "multiple"),
        ({"precision": "fp8"}, "no precision 'fp8'"), ({"checkpoint_every": 0}, "--checkpoint-every"),
    ):  # fmt: skip
        with pytest.raises(NormGeoError, match=says):
            recipe_for("tiny", **changes)
    with pytest.raises(NormGeoError, match="no size 'huge'"):
        recipe_for("huge")
    with pytest.raises(NormGeoError, match="multiple of 3"):
        trained("rmsnorm", small(accumulate=3))
    with pytest.raises(NormGeoError, match="no norm 'batchnorm'"):
        build_twin("batchnorm", small(), 48)


# --- twins ------------------------------------------------------------------------------------------------------------


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


def losses_in_float64(model, ids, steps=50):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    for _ in range(steps):
        loss = cross_entropy(model.train()(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_forms_follow_the_pre_ln_model():
    """Pre-RMSNorm and Pre-CRMSNorm from converted weights: one loss curve (*Pre-RMSNorm* section 3.4)."""
    plain = twins._pre_ln("pre-crmsnorm", small(layers=2, dropout=0.0), 48, 0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in plain.parameters():  # gains and biases that are not 1 and 0
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    ids = torch.randint(0, 48, (4, 16), generator=generator)
    forms = [convert(plain.eval(), trainable=True).model, compressed(plain)]
    expected = losses_in_float64(plain, ids)
    assert expected[-1] < 0.6 * expected[0]
    for form in forms:
        losses = losses_in_float64(form, ids)
        assert max(abs(a - b) / a for a, b in zip(expected, losses, strict=True)) < 1e-9


def test_only_gpt2_has_a_compressed_form(tiny):
    with pytest.raises(ConversionError, match="no Pre-CRMSNorm training form"):
        compressed(tiny("gpt_neox"))


@pytest.mark.parametrize("norm", NORMS)
def test_saved_twins_are_the_trained_ones(norm, tmp_path):
    recipe = small(steps=3, checkpoint_every=3)
    model, _ = trained(norm, recipe, tmp_path)
    ids = torch.arange(32).view(2, 16)
    back = load_model(tmp_path / "checkpoints/step-00000003")
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert back.transformer.wte.weight.shape[1] == 32
    kind = {"pre-rmsnorm": "rmsnorm", "pre-crmsnorm": "crmsnorm"}.get(norm, norm)
    assert {type(m).__name__.lower() for m in back.modules() if "Norm" in type(m).__name__} == {kind}


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_training_learns_and_repeats_itself(norm):
    recipe = small(steps=100, batch=8, warmup=4, evaluate_every=50)
    runs = [trained(norm, recipe, held_out=text_like(200)) for _ in range(2)]
    curve = runs[0][1]
    assert curve.train_loss.iloc[-10:].mean() < math.log(48) - 1
    assert curve.step.tolist() == list(range(1, 101))
    assert np.isfinite(curve.held_out_loss).sum() == 2
    assert curve.equals(runs[1][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True))


def test_accumulated_passes_give_the_same_steps():
    whole, parts = (trained("rmsnorm", small(dropout=0.0, accumulate=k))[1] for k in (1, 4))
    np.testing.assert_allclose(whole.train_loss, parts.train_loss, rtol=1e-5)
    np.testing.assert_allclose(whole.gradient_norm, parts.gradient_norm, rtol=1e-4)


def test_mixed_precision_trains():
    curve = trained("layernorm", small(steps=60, precision="bf16"))[1]
    assert curve.train_loss.iloc[-1] < curve.train_loss.iloc[0] - 0.5


def test_ids_come_in_an_order_that_is_a_function_of_the_seed():
    corpus, again, other = Shuffled(text_like(), 16, 0), Shuffled(text_like(), 16, 0), Shuffled(text_like(), 16, 1)
    first = corpus.take(300)  # more than one pass
    assert not torch.equal(first, other.take(300))
    again.seek({"next": 250})
    assert torch.equal(again.take(50), first[250:])
    assert again.position() == corpus.position() == {"next": 300}
    with pytest.raises(DataError, match="training needs more than 16 tokens"):
        Shuffled(text_like(16), 16, 0)


def test_a_stream_resumes_where_it_was(tmp_path, tokenizer):
    lines = [json.dumps({"text": f"Number {i}. " + "A fox and a dog. " * (i % 5)}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))

    def dataset():
        return datasets.load_dataset(
            "json", data_files=str(tmp_path / "text.jsonl"), split="train", streaming=True, cache_dir=str(tmp_path)
        )

    stream = Streamed(dataset, tokenizer, 16, "test", {"Number 0. "})
    stream.take(7)
    position = json.loads(json.dumps(stream.position()))
    after = stream.take(200)  # into the next pass
    resumed = Streamed(dataset, tokenizer, 16, "test", {"Number 0. "})
    resumed.seek(position)
    assert torch.equal(resumed.take(200), after)
    assert (after == tokenizer.eos_token_id).sum() > 20
    with pytest.raises(DataError, match=r"could not stream .*--data a file"):
        open_corpus("openwebtext", tokenizer, 16, 0)


# --- kills, full disks, lost losses -----------------------------------------------------------------------------------


def test_a_resumed_run_is_bit_identical(tmp_path):
    for norm in NORMS:
        recipe = small(steps=11, save_every=3, checkpoint_every=5, evaluate_every=4)
        whole, curve = trained(norm, recipe, tmp_path / "whole" / norm)
        trainer = training.Trainer(norm, recipe, Shuffled(text_like(), 16, 0), 48, tmp_path / norm, device="cpu")
        trainer.take_step = stopping(trainer.take_step, at=8)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        assert latest_state(tmp_path / norm).name == "state-00000006"
        resumed, again = trained(norm, recipe, tmp_path / norm)
        assert again.equals(curve)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        names = sorted(p.name for p in (tmp_path / norm).iterdir())
        assert names == ["checkpoints", "curve", "state-00000011"]
        assert pd.read_parquet(tmp_path / norm / "curve/curve.parquet").equals(curve)


def stopping(take_step, at):
    taken = []

    def step():
        taken.append(0)
        if len(taken) == at:
            raise KeyboardInterrupt
        return take_step()

    return step


def articles(folder):
    texts = [{"text": f"Article {i}. " + "The quick brown fox jumps over the lazy dog. " * 40} for i in range(12)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, texts[:2])))


def command(folder, out, *more):
    words = [
        "train", "--data", folder / "text.jsonl", "--exclude", folder / "held.jsonl", "--out", folder / out,
        "--vocabulary", 300, "--context", 16, "--batch", 4, "--warmup", 2, "--checkpoint-every", 4, "--save-every", 2,
        "--precision", "no", "--device", "cpu", "--evaluate-every", 100, *more,
    ]  # fmt: skip
    return [sys.executable, "-m", "normgeo", *map(str, words)]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_killed_command_is_resumed(tmp_path):
    articles(tmp_path)
    steps = ("--norm", "rmsnorm", "--steps", 24)
    killed = subprocess.Popen(command(tmp_path, "killed", *steps), env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("killed/rmsnorm/state-*")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = int(latest_state(tmp_path / "killed/rmsnorm").name.removeprefix("state-"))
    assert done < 24
    resume = [sys.executable, "-m", "normgeo", "train", "--resume", str(tmp_path / "killed")]
    for words in (resume, command(tmp_path, "whole", *steps)):
        subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=120)
    curves = [pd.read_parquet(tmp_path / name / "rmsnorm/curve/curve.parquet") for name in ("killed", "whole")]
    assert len(curves[0]) == 24
    assert curves[0].equals(curves[1])
    last = "rmsnorm/checkpoints/step-00000024/model.safetensors"
    assert (tmp_path / "killed" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_a_full_disk_leaves_the_last_state_intact(tmp_path, monkeypatch):
    recipe = small(steps=8, save_every=3, checkpoint_every=100)
    real = safetensors.torch.save_file

    def save_file(tensors, path, *args, **kwargs):
        if "state-00000006" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training_state.safetensors.torch, "save_file", save_file)
        with pytest.raises(RunError, match="is full: state-00000006 was not written"):
            trained("rmsnorm", recipe, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").glob("*state*")) == ["state-00000003"]
    assert not list(tmp_path.rglob("*.partial"))
    assert trained("rmsnorm", recipe, tmp_path / "run")[1].equals(trained("rmsnorm", recipe)[1])


def test_a_lost_loss_stops_before_the_step(tmp_path):
    recipe = small(steps=9, save_every=3)
    trainer = training.Trainer("rmsnorm", recipe, Shuffled(text_like(), 16, 0), 48, tmp_path, device="cpu")
    real = trainer._loss
    trainer._loss = lambda ids: real(ids) * (math.nan if trainer.step == 4 else 1.0)
    with pytest.raises(NormGeoError, match=r"became nan at step 5; lower the learning rate .*state-00000003"):
        trainer.run()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert latest_state(tmp_path).name == "state-00000003"


def test_a_damaged_state_and_another_model_are_said(tmp_path):
    recipe = small(steps=3, save_every=3)
    trained("rmsnorm", recipe, tmp_path)
    with pytest.raises(RunError, match="is of another model"):
        trained("rmsnorm", small(steps=3, d=64), tmp_path)
    path = latest_state(tmp_path) / "training.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match="is damaged"):
        trained("rmsnorm", recipe, tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def normgeo(monkeypatch, capsys):
    from normgeo import cli

    def call(*words):
        monkeypatch.setattr("sys.argv", ["normgeo", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr()

    return call


def test_the_command_trains_saves_reloads_and_measures(tmp_path, normgeo, monkeypatch):
    articles(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", small(steps=8))
    words = command(tmp_path, "twins")[3:]
    status, (out, _) = normgeo(*words)
    assert not status
    assert "rmsnorm: " in out.replace("\n", "")
    curves = []
    for norm in ("layernorm", "rmsnorm"):
        last = tmp_path / "twins" / norm / "checkpoints/step-00000008"
        note = json.loads((last / "training.json").read_text())
        assert note["norm"] == norm
        assert "after each" in note["packing"]
        tokenizer = load_tokenizer(last)
        assert tokenizer.decode(tokenizer("lazy dog")["input_ids"]) == "lazy dog"
        loss = evaluate(load_model(last), load_tokens(tmp_path / "held.jsonl", tokenizer, 16))
        assert abs(loss - note["curve"][-1]["held_out_loss"]) < 1e-4
        curves.append(pd.read_parquet(tmp_path / "twins" / norm / "curve/curve.parquet"))
    assert curves[0].lr.equals(curves[1].lr)
    assert json.loads((tmp_path / "twins/train.json").read_text())["command"].startswith("normgeo train")
    for again, says in (
        (words, "exists already; finish it with --resume"), (["train", "--resume", tmp_path / "twins"], "is complete"),
        (["train", "--resume", tmp_path], "holds no train.json"), (["train", "--norm", "x"], "no norm 'x'"),
        (["train", "--data", "nothing.txt", "--out", tmp_path / "new"], "no such data file"),
        (["train", "--device", "tpu", "--data", tmp_path / "text.jsonl", "--out", tmp_path / "new"], "not 'tpu'"),
    ):  # fmt: skip
        status, (_, error) = normgeo(*again)
        assert status == 1
        assert says in " ".join(error.split())


def test_another_text_is_not_resumed(tmp_path, normgeo):
    articles(tmp_path)
    assert not normgeo(*command(tmp_path, "twins", "--norm", "rmsnorm", "--steps", 2)[3:])[0]
    record = json.loads((tmp_path / "twins/train.json").read_text())
    (tmp_path / "twins/train.json").write_text(json.dumps(record | {"status": "running"}))
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    status, (_, error) = normgeo("train", "--resume", tmp_path / "twins")
    assert status == 1
    assert "another data_sha256" in error


def test_two_processes_train_one_model(tmp_path):
    articles(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    torchrun += ["--master-port", port]
    words = command(tmp_path, "two", "--norm", "pre-rmsnorm", "--steps", 4, "--dropout", "0.0", "--accumulate", 2)
    subprocess.run([*torchrun, *words[1:]], env=environment(), check=True, capture_output=True, timeout=120)
    one = command(tmp_path, "one", "--norm", "pre-rmsnorm", "--steps", 4, "--dropout", "0.0")
    subprocess.run(one, env=environment(), check=True, capture_output=True, timeout=120)
    a, b = (pd.read_parquet(tmp_path / name / "pre-rmsnorm/curve/curve.parquet") for name in ("one", "two"))
    np.testing.assert_allclose(a.train_loss, b.train_loss, rtol=1e-5)
    np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=1e-3)


def test_a_tokenizer_is_a_function_of_its_text():
    a, b = (train_tokenizer(["some text", "more text"], 280) for _ in range(2))
    assert a.get_vocab() == b.get_vocab()
    assert a.eos_token == "<|endoftext|>"


def test_a_converted_twin_is_certified(tmp_path):
    model = build_twin("pre-rmsnorm", small(), 48, 0)
    save_twin("pre-rmsnorm", model, small(), tmp_path / "model", None)
    assert json.loads((tmp_path / "model/conversion.json").read_text())["certificate"]["passed"]


def test_the_forms_overlap_in_float32(tmp_path):
    from analyses import training_forms
    from normgeo import figures

    frame = training_forms.compute(n_tokens=2 * 2048)
    assert frame.groupby("form").step.max().tolist() == [2, 2, 2]
    assert frame.difference.max() < 1e-5
    figures.save(training_forms.plot(frame), tmp_path / "forms")
