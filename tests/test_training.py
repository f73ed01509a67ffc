"""The training loop: its steps are the recipe's, it learns, repeats itself, resumes bit for bit, and fails whole."""

import errno
import io
import json
import math
import re
import resource
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import rich.console
import safetensors.torch
import torch
from training_zoo import small, stopping, text_like, trained

from normgeo.errors import DataError, ModelError, NormGeoError, RunError
from normgeo.system import progress
from normgeo.training import state as training_state
from normgeo.training import train as training
from normgeo.training.corpus import Shuffled
from normgeo.training.recipe import NORMS, learning_rate
from normgeo.training.state import latest_state
from normgeo.training.twins import build_twin


@pytest.mark.parametrize("norm", NORMS)
def test_training_learns_and_repeats_itself(norm):
    recipe = small(steps=60, batch=8, warmup=4, evaluate_every=30)
    runs = [trained(norm, recipe, held_out=text_like(200)) for _ in range(2)]
    curve = runs[0][1]
    assert curve.train_loss.iloc[-10:].mean() < math.log(48) - 1
    assert curve.step.tolist() == list(range(1, 61))
    assert np.isfinite(curve.held_out_loss).sum() == 2
    assert curve.equals(runs[1][1])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True))


def test_twins_begin_where_their_data_do():
    corpus, recipe = Shuffled(text_like(), 16, 0), small(steps=3)
    first, second = (training.train("rmsnorm", recipe, corpus, 48, device="cpu")[1] for _ in range(2))
    assert first.equals(second)


def test_accumulated_passes_give_the_same_steps():
    whole, parts = (trained("rmsnorm", small(dropout=0.0, accumulate=k))[1] for k in (1, 4))
    np.testing.assert_allclose(whole.train_loss, parts.train_loss, rtol=1e-5)
    np.testing.assert_allclose(whole.gradient_norm, parts.gradient_norm, rtol=1e-4)


def test_a_step_is_adamw_of_the_recipe():
    """Clipped gradients, decay of matrices alone, and the recipe's moments, by hand."""
    recipe = small(dropout=0.0, warmup=2, clip=0.3, weight_decay=0.5, beta2=0.9, lr=1e-2)
    trainer = training.Trainer("layernorm", recipe, Shuffled(text_like(), 16, 0), 48, device="cpu")
    model, corpus = training.build_twin("layernorm", recipe, 48), Shuffled(text_like(), 16, 0)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(3):
        _, norm, rate = trainer.take_step()
        ids = corpus.take(recipe.batch)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        whole = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert norm > recipe.clip
        torch.testing.assert_close(norm, whole.item(), rtol=1e-5, atol=0)
        assert rate == learning_rate(step, recipe)
        with torch.no_grad():
            for name, p in model.named_parameters():
                gradient, (m, v) = p.grad * recipe.clip / (whole + 1e-6), moments[name]
                m.mul_(0.9).add_(0.1 * gradient)
                v.mul_(0.9).add_(0.1 * gradient.square())
                p.mul_(1 - rate * (0.5 if p.ndim > 1 else 0.0))
                p -= rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
    for (name, found), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_of_a_model_in_double_precision_is_one():
    corpus, model = Shuffled(text_like(), 16, 0), build_twin("rmsnorm", small(), 48).double()
    trainer = training.Trainer("rmsnorm", small(), corpus, 48, device="cpu", model=model)
    assert trainer._loss(corpus.take(2)).dtype is torch.float64


def test_dropout_is_of_the_embedding_and_behind_each_branch():
    model = training.build_twin("layernorm", small(dropout=0.3), 48)
    found = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p}
    assert found == {
        "transformer.drop": 0.3, "transformer.h.0.attn.resid_dropout": 0.3, "transformer.h.0.mlp.dropout": 0.3
    }  # fmt: skip


@pytest.mark.parametrize("norm", ["pre-rmsnorm", "pre-crmsnorm"])
def test_a_model_that_would_be_saved_as_another_is_refused(norm, tmp_path):
    recipe = small(steps=1)
    given = build_twin(norm, recipe, 48)
    training.Trainer(norm, recipe, Shuffled(text_like(), 16, 0), 48, tmp_path / "a", device="cpu", model=given)
    given.config.activation_function = "relu"
    with pytest.raises(NormGeoError, match=f"a {norm} model is saved as the GPT-2 of its recipe.* activation_function"):
        training.Trainer(norm, recipe, Shuffled(text_like(), 16, 0), 48, tmp_path / "b", device="cpu", model=given)
    other = build_twin(norm, small(steps=1, layers=3), 48)
    with pytest.raises(NormGeoError, match="and this one has another shape"):
        training.Trainer(norm, recipe, Shuffled(text_like(), 16, 0), 48, tmp_path / "b", device="cpu", model=other)
    assert not (tmp_path / "b").exists()


def test_a_model_that_takes_no_step_is_refused():
    recipe, corpus = small(steps=1), Shuffled(text_like(), 16, 0)
    with pytest.raises(DataError, match=f"has the id {corpus.largest}, beyond a vocabulary of {corpus.largest:,}"):
        training.train("rmsnorm", recipe, corpus, corpus.largest, device="cpu")
    frozen = build_twin("layernorm", recipe, 48).requires_grad_(False)
    with pytest.raises(NormGeoError, match="no parameter of the model is trained"):
        training.train("layernorm", recipe, corpus, 48, device="cpu", model=frozen)
    short = build_twin("layernorm", small(context=8), 48)
    with pytest.raises(DataError, match="contexts of 16 tokens are longer than the model's 8"):
        training.train("layernorm", recipe, corpus, 48, device="cpu", model=short)


def test_passes_and_processes_have_dropout_of_their_own(monkeypatch):
    trainer = training.Trainer("rmsnorm", small(accumulate=2), Shuffled(text_like(), 16, 0), 48, device="cpu")
    seeds, real = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or real(seed))
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    for index, trainer.step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        monkeypatch.setattr(type(trainer.accelerator), "process_index", index)
        trainer.take_step()
    assert len(seeds) == len(set(seeds)) == 8


def test_what_is_reported_is_the_mean_loss_since_the_last_report():
    """Also of the last steps, of which there are fewer."""
    rows, recipe = [], small(steps=11, evaluate_every=4)
    trainer = training.Trainer("rmsnorm", recipe, Shuffled(text_like(), 16, 0), 48, device="cpu")
    trainer.run(report=rows.append)
    assert [row["lr"] for row in rows] == list(trainer.curve.lr.iloc[[3, 7, 10]])
    expected = [losses.mean() for losses in np.split(trainer.curve.train_loss.to_numpy(), [4, 8])]
    for found in (pd.DataFrame(rows), training_state.evaluated(trainer.curve, recipe.evaluate_every)):
        assert found.step.tolist() == [4, 8, 11]
        np.testing.assert_allclose(found.train_loss, expected, rtol=1e-12)


def test_the_recipe_says_how_many_passes_a_step_has(monkeypatch):
    """Not a variable that a launcher sets, nor another trainer of this process."""
    recipe = small(dropout=0.0, accumulate=2)
    expected = trained("rmsnorm", recipe)[1]
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert trained("rmsnorm", recipe)[1].equals(expected)
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    corpora = [Shuffled(text_like(), 16, 0) for _ in range(2)]
    first = training.Trainer("rmsnorm", recipe, corpora[0], 48, device="cpu")
    beside = training.Trainer("layernorm", small(accumulate=1), corpora[1], 48, device="cpu")
    for _, row in expected.iterrows():
        assert first.take_step()[0] == row.train_loss
        assert math.isfinite(beside.take_step()[0])
    training.Trainer("layernorm", small(precision="bf16"), corpora[1], 48, device="cpu")
    with pytest.raises(NormGeoError, match="another Trainer has set this process to the precision bf16"):
        first.take_step()


def test_what_would_take_steps_of_its_own_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(NormGeoError, match="cannot train as this process was launched: DeepSpeed is not installed"):
        trained("rmsnorm", small())


def test_a_last_checkpoint_that_was_moved_away_is_made_again(tmp_path):
    recipe = small(checkpoint_every=12)
    trained("rmsnorm", recipe, tmp_path)
    last = tmp_path / "checkpoints/step-00000012"
    weights = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    trained("rmsnorm", recipe, tmp_path)
    assert (last / "model.safetensors").read_bytes() == weights


def test_a_checkpoint_says_what_it_was_trained_on(tmp_path):
    recipe, text = small(steps=3, checkpoint_every=3), text_like()
    corpus = Shuffled(text, recipe.context, recipe.seed)
    training.train("rmsnorm", recipe, corpus, 48, tmp_path, held_out=text, device="cpu")
    about = {"norm": "rmsnorm", "data_sha256": corpus.digest, "packing": corpus.packing, "held_out": text.digest}
    for step in (0, 3):
        note = json.loads((tmp_path / f"checkpoints/step-0000000{step}/training.json").read_text())
        assert note.items() >= (about | {"step": step, "recipe": asdict(recipe)}).items()


def test_an_evaluation_has_as_many_rows_at_once_as_a_pass(monkeypatch):
    """What fits into memory in training does in evaluation."""
    rows, real = [], training.evaluate
    monkeypatch.setattr(training, "evaluate", lambda *given: rows.append(given[2]) or real(*given))
    trained("rmsnorm", small(steps=1, accumulate=2), held_out=text_like(200))
    assert rows == [2]


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: not enough memory"), torch.OutOfMemoryError()])
def test_what_does_not_fit_into_memory_is_one_line(error, monkeypatch):
    def full(*_):
        raise error

    monkeypatch.setattr(training, "evaluate", full)
    says = "a step of 4 sequences of 16 tokens, in 1 passes, does not fit into memory; give a new run a smaller --batch"
    with pytest.raises(ModelError, match=says):
        trained("rmsnorm", small(steps=1), held_out=text_like(200))


def test_mixed_precision_trains():
    curve = trained("layernorm", small(steps=60, precision="bf16"))[1]
    assert curve.train_loss.iloc[-1] < curve.train_loss.iloc[0] - 0.5


def test_mixed_precision_is_for_training_and_not_for_evaluation():
    trainer = training.Trainer("rmsnorm", small(precision="bf16"), Shuffled(text_like(), 16, 0), 48, device="cpu")
    trainer.take_step()
    plain = training.build_twin("rmsnorm", trainer.recipe, 48)
    plain.load_state_dict(trainer.model.state_dict())
    assert training.evaluate(trainer.model, text_like(200)) == training.evaluate(plain, text_like(200))


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
        with pytest.raises(RunError, match="state-00000006: the disk is full; what was there before is intact"):
            trained("rmsnorm", recipe, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").glob("*state*")) == ["state-00000003"]
    assert not list(tmp_path.rglob("*.partial"))
    assert trained("rmsnorm", recipe, tmp_path / "run")[1].equals(trained("rmsnorm", recipe)[1])


def test_a_run_stopped_at_its_last_save_gets_its_whole_curve(tmp_path, monkeypatch):
    recipe = small(steps=6, save_every=3, checkpoint_every=100)
    with monkeypatch.context() as patch:
        written = stopping(training.whole_directory, at=4)  # model 0, curve 3, model 6, curve 6
        patch.setattr(training, "whole_directory", written)
        with pytest.raises(KeyboardInterrupt):
            trained("rmsnorm", recipe, tmp_path)
    assert len(pd.read_parquet(tmp_path / "curve/curve.parquet")) == 3
    _, curve = trained("rmsnorm", recipe, tmp_path)
    assert pd.read_parquet(tmp_path / "curve/curve.parquet").equals(curve)
    assert len(curve) == 6


def test_a_lost_loss_stops_before_the_step(tmp_path):
    recipe = small(steps=9, save_every=3)
    trainer = training.Trainer("rmsnorm", recipe, Shuffled(text_like(), 16, 0), 48, tmp_path, device="cpu")
    real = trainer._loss
    trainer._loss = lambda ids: real(ids) * (math.nan if trainer.step == 4 else 1.0)
    with pytest.raises(NormGeoError, match=r"at step 5; lower .* in a new run: --resume goes on .*state-00000003"):
        trainer.run()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert latest_state(tmp_path).name == "state-00000003"
    trainer._loss = real
    assert math.isfinite(trainer.take_step()[1])  # nothing is left of the gradient that was lost


def test_a_damaged_state_and_another_model_are_said(tmp_path):
    recipe = small(steps=3, save_every=3)
    trained("rmsnorm", recipe, tmp_path)
    about = latest_state(tmp_path) / "state.json"
    of_now = about.read_text()
    of = json.loads(of_now)
    about.write_text(json.dumps(of | {"of": of["of"] | {"d": 64}}))  # the weights tell all the same
    with pytest.raises(RunError, match="is of another model"):
        trained("rmsnorm", small(steps=3, d=64), tmp_path)
    about.write_text(json.dumps({k: v for k, v in of.items() if k != "sha256"}))
    with pytest.raises(RunError, match="is damaged"):
        trained("rmsnorm", recipe, tmp_path)
    about.write_text(of_now)
    path = latest_state(tmp_path) / "training.safetensors"
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"is damaged: training\.safetensors is not what was written; remove it"):
        trained("rmsnorm", recipe, tmp_path)
    path.write_bytes(content[:100])
    with pytest.raises(RunError, match="is damaged"):
        trained("rmsnorm", recipe, tmp_path)


def test_the_state_of_another_training_is_not_gone_on_from(tmp_path):
    """One with as many parameters of the same names too; nor is a finished one made longer, whose rates were others."""
    recipe = small(steps=3, save_every=3)
    trained("layernorm", recipe, tmp_path)
    for norm, changes, says in (
        ("rmsnorm", {}, "norm is layernorm, here rmsnorm"), ("layernorm", {"seed": 1}, "seed is 0, here 1"),
        ("layernorm", {"lr": 0.1}, r"lr is 0\.002, here 0\.1"), ("layernorm", {"steps": 4}, "steps is 3, here 4"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=f"state-00000003 is of a training whose {says}; give another folder"):
            trained(norm, small(**({"steps": 3, "save_every": 3} | changes)), tmp_path)
    other = Shuffled(text_like(2000), 16, 0)
    with pytest.raises(RunError, match="is of a training whose data_sha256 is"):
        training.train("layernorm", recipe, other, 48, tmp_path, device="cpu")
    trained("layernorm", small(steps=3, save_every=2, evaluate_every=1), tmp_path)  # when something is kept may change


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_dropout_of_another_number_of_processes_is_said(dropout, tmp_path):
    recipe = small(steps=2, dropout=dropout)
    trained("rmsnorm", recipe, tmp_path)
    file = latest_state(tmp_path) / "state.json"
    about = json.loads(file.read_text())
    assert about["processes"] == 1
    file.write_text(json.dumps(about | {"processes": 4}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained("rmsnorm", recipe, tmp_path)
    assert ["of 4 processes, this one has 1" in str(warning.message) for warning in said] == [True] * bool(dropout)


def test_a_lost_gradient_stops_before_the_step(tmp_path):
    """A loss that is finite, though its gradient is not, as of sqrt at 0."""
    recipe = small(steps=9, save_every=1)
    trainer = training.Trainer("rmsnorm", recipe, Shuffled(text_like(), 16, 0), 48, tmp_path, device="cpu")
    real = trainer._loss
    trainer._loss = lambda ids: real(ids) + (real(ids) * 0).sqrt() if trainer.step == 4 else real(ids)
    with pytest.raises(NormGeoError, match=r"the gradient of the rmsnorm twin became nan at step 5.*state-00000004"):
        trainer.run()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_lost_held_out_loss_ends_a_run_and_is_kept_in_no_state(tmp_path, monkeypatch):
    real = training.evaluate
    monkeypatch.setattr(training, "evaluate", lambda *given: real(*given) * (math.nan if calls.pop() else 1))
    calls = [True, False]
    with pytest.raises(NormGeoError, match=r"the held-out loss of the rmsnorm twin became nan at step 4; .*00000002"):
        trained("rmsnorm", small(steps=4, evaluate_every=2, save_every=2), tmp_path, held_out=text_like(200))
    assert latest_state(tmp_path).name == "state-00000002"
    assert not list(tmp_path.glob("checkpoints/step-00000004"))


@pytest.mark.parametrize(
    ("kilobytes", "what"), [(20, "step-00000000"), (170, "state-00000003")], ids=["checkpoint", "state"]
)
def test_the_system_refusing_to_write_is_a_full_disk(kilobytes, what, tmp_path):
    """Real refusals: a process may not write files larger than so much."""
    recipe, limits = small(steps=4, save_every=3, checkpoint_every=100), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kilobytes, limits[1]))
    try:
        with pytest.raises(RunError, match=f"{what}: the disk is full; what was there before is intact"):
            trained("rmsnorm", recipe, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [p for p in tmp_path.rglob("*") if "partial" in p.name]
    assert not latest_state(tmp_path / "run")
    assert trained("rmsnorm", recipe, tmp_path / "run")[1].equals(trained("rmsnorm", recipe)[1])


def plain(screen):
    """What is on a screen, without what moves the cursor and colors."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


def test_progress_shows_tokens_and_time_left(tmp_path, monkeypatch):
    screen = io.StringIO()
    terminal = rich.console.Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "meanwhile", terminal)
    trained("rmsnorm", small(), tmp_path, progress=True)
    text = plain(screen)
    assert re.search(r"rmsnorm .*768/768 [\d,]+ tokens/s 0:00:00", text)  # 12 steps of 4 x 16 tokens
    screen.truncate(0)
    trained("rmsnorm", small(), progress=False)
    assert "rmsnorm" not in screen.getvalue()


def test_progress_of_long_steps_has_a_rate_and_a_time_left(monkeypatch):
    clock, screen = [0.0], io.StringIO()
    terminal = rich.console.Console(file=screen, force_terminal=True, width=120, get_time=lambda: clock[0])
    monkeypatch.setattr(progress, "meanwhile", terminal)
    with progress.progress_bar("long", 10_000) as advance:
        for _ in range(3):
            clock[0] += 100
            advance(1000)
    assert "3000/10000 10 tokens/s 0:11:40" in plain(screen)
