"""What a training step costs: parts that are really taken away, and times that add up."""

from dataclasses import replace

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.utils.parametrize import is_parametrized
from training_zoo import small
from transformers import ViTConfig
from zoo import tiny

from analyses import training_cost
from normgeo.bench import training as training_bench
from normgeo.bench.training import FORMS, PLAIN, ablated, bench_training, breakdown, images, task_of, text
from normgeo.errors import DataError, NormGeoError
from normgeo.training import twins
from normgeo.training.recipe import SIZES
from normgeo.training.twins import build_twin

IDS = torch.arange(32).view(2, 16)


def twin(form):
    """A form in float64, with gains, biases and means that are not those of the start."""
    model, generator = build_twin(form, small(dropout=0.0), 48).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype) + 0.1)
    return model


def gradients(model, name):
    model.zero_grad()
    model(input_ids=IDS).logits.square().mean().backward()
    return model.get_parameter(name).grad


@pytest.mark.parametrize("form", FORMS[1:])
def test_forms_without_recentering_act_the_same_and_recenter_nothing(form):
    whole = twin(form)
    names = {"linears": "transformer.h.0.mlp.c_proj", "input": "transformer.wpe"}
    for part, module in names.items():
        without = ablated(whole, part)
        torch.testing.assert_close(without(input_ids=IDS).logits, whole(input_ids=IDS).logits, rtol=0, atol=1e-12)
        recentered = gradients(whole, f"{module}.parametrizations.weight.original")
        assert recentered.sum(1).abs().max() < 1e-12  # centering takes the mean out of the gradient...
        plain = gradients(without, f"{module}.weight")
        assert plain.sum(1).abs().max() > 1e-6 * plain.abs().max()  # ... which is no longer done
        other = next(name for p, name in names.items() if p != part)
        assert gradients(without, f"{other}.parametrizations.weight.original").sum(1).abs().max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_forms_without_norms_have_none(form):
    """Without norms and biases a block's input could be doubled, and so would be what the attention reads."""
    seen = []
    for model in (twin(form), ablated(twin(form), "norms")):
        block = model.transformer.h[0]
        block.attn.c_attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        block(x)
        block(2 * x)
    normed, doubled, plain, twice = seen
    torch.testing.assert_close(normed, doubled, rtol=1e-3, atol=1e-3)
    assert torch.equal(twice, 2 * plain)
    assert torch.equal(plain, x)


def test_plain_crmsnorm_is_the_form_with_nothing_to_recenter():
    """The same function of weights as narrow as the stream, each of them a parameter that gradients reach."""
    task = text(small(dropout=0.0, tied=False), vocabulary=48)
    whole, plain = task.build("pre-crmsnorm"), training_bench._built(task, PLAIN)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=IDS).logits, whole(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert not any(is_parametrized(module) for module in plain.modules())
    plain(input_ids=IDS).logits.square().mean().backward()
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters() if p.grad is not None}
    assert shapes["transformer.h.0.mlp.c_proj.weight"] == (128, 32)
    assert shapes["transformer.h.0.mlp.c_fc.weight"] == (128, 32)
    assert 33 not in {n for shape in shapes.values() for n in shape}


def test_plain_crmsnorm_has_as_many_parameters_as_the_model_it_stands_beside():
    """A tied head stays tied: an embedding matrix more would be counted as what norms cost."""
    task = text(small(), vocabulary=48)
    plain, layernorm = (training_bench._built(task, form) for form in (PLAIN, "layernorm"))
    names = {name for name, _ in plain.named_parameters()}
    assert not any("lm_head" in name for name in names)
    trained = sum(p.numel() for name, p in plain.named_parameters() if ".ln_" not in name)
    assert trained == sum(p.numel() for name, p in layernorm.named_parameters() if ".ln_" not in name)


def test_what_is_not_there_cannot_be_taken_away():
    with pytest.raises(NormGeoError, match="no linears to take away"):
        ablated(twin("layernorm"), "linears")
    with pytest.raises(NormGeoError, match="--rounds must be at least 1"):
        bench_training(text(small()), rounds=0)


def raw(extra=0.0):
    """Times of three rounds made of known parts; `extra` belongs to no part."""
    parts = {"layernorm": [3.0, 0, 0], "pre-rmsnorm": [2.0, 0.5, 0.25], "pre-crmsnorm": [1.0, 0.75, 0.5]}
    rows = []
    for number, speed in enumerate((1.0, 2.0, 1.5)):
        for form, (norms, linears, recentering) in parts.items():
            has = {"norms": norms} | ({"linears": linears, "input": recentering} if form != "layernorm" else {})
            whole = 10 + sum(has.values()) + (extra if form != "layernorm" else 0)
            for without in ("", *has):
                times = {"forward_backward": speed * (whole - has.get(without, 0.0)), "optimizer": speed * 4}
                rows.append({"round": number, "form": form, "without": without} | times)
    frame = pd.DataFrame(rows)
    frame.loc[frame.without != "", "optimizer"] = np.nan
    return frame.assign(device="a cpu", threads=1, batch=2, context=16, rounds=3)


def test_known_parts_are_found_and_add_up():
    found = breakdown(raw()).set_index(["form", "part"])
    expected = {
        "no-norm": {"whole": 14, "rest": 10, "optimizer": 4, "unexplained": 0},
        "layernorm": {"whole": 17, "norms": 3, "rest": 10, "optimizer": 4, "unexplained": 0},
        "pre-rmsnorm": {"norms": 2, "linears": 0.5, "input": 0.25, "rest": 10, "optimizer": 4, "unexplained": 0},
        "pre-crmsnorm": {"norms": 1, "linears": 0.75, "input": 0.5, "rest": 10, "optimizer": 4, "unexplained": 0},
    }
    for form, parts in expected.items():
        for part, cost in parts.items():
            assert abs(found.seconds[form, part] - 1.5 * cost) < 1e-12
            for column in ("ratio_q25", "ratio", "ratio_q75"):  # a slow round is slow for all
                assert abs(found[column][form, part] - cost / 17) < 1e-12
    assert abs(found.seconds_q75["layernorm", "whole"] - 1.75 * 17) < 1e-12
    assert abs(breakdown(raw(1.0)).set_index(["form", "part"]).ratio["pre-rmsnorm", "unexplained"] - 1 / 17) < 1e-12


def test_steps_leave_weights_as_they_are_and_no_gradients(monkeypatch):
    """Every round is of the same weights, and of what a step of a training does: its loss, clipping and AdamW."""
    task, built, clipped, losses = text(small(), vocabulary=48), [], [], []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: clipped.append(a[1]) or clip(*a))

    def loss(logits, labels):
        found = task.loss(logits, labels)
        losses.append(found.item())
        return found

    of = replace(task, build=lambda form: built.append(task.build(form)) or built[-1], loss=loss)
    steps = training_bench._variants(of, "cpu", "no")
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in built]
    for (form, part), step in steps.items():
        clipped.clear()
        losses.clear()
        passes, optimizer = step()
        assert passes > 0
        assert clipped == ([] if part else [task.recipe.clip])
        assert np.isnan(optimizer) if part else optimizer > 0
        assert all(p.grad is None for model in built for p in model.parameters())
        if part != "norms" and form != PLAIN:
            with torch.no_grad():
                expected = built[[*FORMS, PLAIN].index(form)](**task.inputs, labels=task.inputs["input_ids"]).loss
            assert losses == pytest.approx([expected.item()], rel=1e-4)
    for model, values in zip(built, before, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def measured():
    return bench_training(text(small(), vocabulary=48), rounds=3)


def test_a_time_for_every_variant_in_every_round(measured):
    variants = {("layernorm", ""), ("layernorm", "norms")}
    variants |= {(form, part) for form in FORMS[1:] for part in ("", "norms", "linears", "input")}
    variants |= {(PLAIN, ""), (PLAIN, "norms")}
    for _, one in measured.groupby("round"):
        assert sorted(zip(one.form, one.without, strict=True)) == sorted(variants)
    assert measured["round"].unique().tolist() == [0, 1, 2]
    assert (measured.forward_backward > 0).all()
    assert (measured.optimizer.notna() == (measured.without == "")).all()
    orders = {tuple(zip(one.form, one.without, strict=True)) for _, one in measured.groupby("round")}
    assert len(orders) == 3
    about = {"device", "threads", "torch", "transformers", "d", "layers", "batch", "context", "vocabulary", "commit"}
    assert about <= {*measured.columns}


def test_parts_add_up_to_the_step(measured):
    found = breakdown(measured)
    assert set(found.form) == {"no-norm", *FORMS, PLAIN}
    assert (found.ratio_q25 <= found.ratio).all()
    assert (found.ratio <= found.ratio_q75).all()
    one = measured[measured["round"] == 1]
    alone = breakdown(one).set_index(["form", "part"]).seconds
    for form in FORMS:
        whole = one[(one.form == form) & (one.without == "")].iloc[0]
        assert abs(alone[form].drop("whole").sum() - (whole.forward_backward + whole.optimizer)) < 1e-9
    assert found[(found.form == "layernorm") & (found.part == "whole")].ratio.item() == 1


def test_plot(measured):
    found = breakdown(measured)
    parts = [found.assign(size="a"), found.assign(size="b"), found.assign(size="b", batch=7)]
    figure = training_cost.plot(pd.concat(parts))
    assert isinstance(figure, matplotlib.figure.Figure)
    drawn = [axes.get_title() for axes in figure.axes if axes.patches]
    ticks = figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == [training_cost.NAMES[form] for form in found.form.unique()]
    batch, context = measured[["batch", "context"]].iloc[0]
    assert drawn == [f"{size} x {context} tokens" for size in (f"a, {batch}", f"b, {batch}", "b, 7")]


def test_a_part_that_seems_to_cost_less_than_nothing_is_drawn_below_it():
    """With few rounds that is noise, and no cost of the same size."""
    frame = raw()
    without = (frame.form == "pre-rmsnorm") & (frame["without"] == "norms")
    frame.loc[without, "forward_backward"] *= 2
    found = breakdown(frame)
    figure = training_cost.plot(found.assign(size="a", precision="no"))
    axes = next(axes for axes in figure.axes if axes.patches)
    share = found.set_index(["form", "part"]).ratio["pre-rmsnorm", "norms"]
    assert share < 0
    lowest = min(patch.get_y() + min(patch.get_height(), 0) for patch in axes.patches)
    assert lowest == pytest.approx(100 * share)
    tops = [patch for patch in axes.patches if patch.get_height() > 0 and abs(patch.get_x() - 1.65) < 1e-9]
    assert max(p.get_y() + p.get_height() for p in tops) == pytest.approx(100 * (10 + 4 + 0.5 + 0.25) / 17)


def test_the_command_writes_what_the_analysis_reads(tmp_path, normgeo, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", small())
    out = tmp_path / "cost.parquet"
    options = {
        "sizes": "tiny",
        "context": 16,
        "batch": 2,
        "vocabulary": 48,
        "rounds": 1,
        "precision": "bf16",
        "out": out,
    }
    status, printed, _ = normgeo("bench", "train", *(w for name, v in options.items() for w in (f"--{name}", v)))
    assert not status
    assert "unexplained" in printed
    assert "100.00%" in printed
    frame, raw = training_cost.compute(out), pd.read_parquet(out)
    assert frame[["size", "context", "batch"]].drop_duplicates().to_numpy().tolist() == [["tiny", 16, 2]]
    pd.testing.assert_frame_equal(frame, breakdown(raw), check_like=True)
    assert "mixed precision, bfloat16" in training_cost.plot(frame).get_suptitle()
    other = frame.assign(size="other", device="another")
    words, *lines = training_cost.plot(pd.concat([frame, other])).get_suptitle().splitlines()
    assert (words.rsplit(", ", 1)[1], lines[0].rsplit(", ", 1)[1]) == (frame.device[0], "another")
    for kept, said in (
        (raw.form != "layernorm", "there are no times of layernorm"),
        ((raw.form != PLAIN) | (raw["without"] == ""), "there are no times of crmsnorm without its norms"),
    ):
        raw[kept].to_parquet(out)
        with pytest.raises(DataError, match=said):
            training_cost.compute(out)
    pd.concat([raw, raw.assign(device="another")]).to_parquet(out)
    with pytest.raises(DataError, match="holds more than one time of the same, as of two devices"):
        training_cost.compute(out)
    out.unlink()
    with pytest.raises(DataError, match=r"there is no file .*cost\.parquet; give one that"):
        training_cost.compute(out)


def test_mixed_precision_is_what_a_step_computes_in(monkeypatch):
    task, seen = text(small(), vocabulary=48), set()
    spied = replace(task, loss=lambda logits, labels: (seen.add(logits.dtype), task.loss(logits, labels))[1])
    frame = bench_training(spied, rounds=1, precision="bf16")
    assert set(frame.precision) == {"bf16"}
    assert seen == {torch.bfloat16}
    with pytest.raises(NormGeoError, match="no precision 'fp16' here; choose no or bf16"):
        bench_training(task, precision="fp16")


def test_contexts_shorter_than_the_examples():
    frame = bench_training(text(small(context=4), vocabulary=48), rounds=1)
    assert set(frame.form) == {*FORMS, PLAIN}


def vit(**changes):
    options = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTConfig(**options | {"image_size": 32, "patch_size": 8, "num_labels": 5} | changes)


def test_a_vit_in_all_forms():
    frame = bench_training(images(vit(), batch=2), rounds=1)
    assert set(zip(frame.form, frame.without, strict=True)) >= {(form, "norms") for form in FORMS}
    assert frame[["layers", "d", "heads", "batch", "context", "vocabulary"]].iloc[0].tolist() == [3, 32, 4, 2, 17, 5]
    assert set(breakdown(frame).form) == {"no-norm", *FORMS, PLAIN}


@pytest.mark.parametrize("form", FORMS[1:])
def test_what_a_vit_writes_besides_linear_layers_is_its_input(form):
    model = images(vit()).build(form)
    found = lambda m: {name for name, module in m.named_modules() if is_parametrized(module)}  # noqa: E731
    embeddings = {"vit.embeddings", "vit.embeddings.patch_embeddings.projection"}
    assert found(ablated(model, "linears")) == embeddings
    assert found(ablated(model, "input")) == found(model) - embeddings


def test_forms_of_a_vit_have_its_width():
    built = {form: images(vit()).build(form) for form in FORMS}
    widths = {form: built[form](pixel_values=torch.zeros(1, 3, 32, 32), output_hidden_states=True) for form in FORMS}
    assert {form: out.hidden_states[1].shape[-1] for form, out in widths.items()} == dict.fromkeys(FORMS, 32)
    values = [dict(built[form].named_parameters()) for form in FORMS]
    for name, value in values[0].items():  # all start from the same numbers
        other = next(v for k, v in values[2].items() if twins.plain_name(k) == name)
        torch.testing.assert_close(other[tuple(slice(n) for n in value.shape)], value, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neox", "vit"])
def test_models_of_ones_own_in_all_forms(arch, tmp_path):
    """Of a directory: whole forms give the model's outputs, and one that cannot be is one line."""
    model = tiny(arch, **({"embd_pdrop": 0.1, "resid_pdrop": 0.1} if arch == "gpt2" else {}))
    model.save_pretrained(tmp_path / "model")
    task = task_of(str(tmp_path / "model"), batch=2, context=8)
    with torch.no_grad():
        expected = model.eval()(**task.inputs).logits
        for form in (*FORMS, *[PLAIN] * (arch != "gpt2")):  # whose head is tied
            found = training_bench._built(task, form).eval()(**task.inputs).logits
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    frame = bench_training(task, rounds=1)
    assert set(frame.form) == {*FORMS, PLAIN}
    assert frame[["layers", "d", "batch", "context"]].iloc[0].tolist() == [2, 32, 2, 5 if arch == "vit" else 8]


def test_models_that_are_not_timed_are_one_line(tmp_path):
    for arch in ("llama", "bert"):
        tiny(arch).save_pretrained(tmp_path / arch)
    with pytest.raises(NormGeoError, match="has no LayerNorm: all its norms are RMSNorm already"):
        task_of(str(tmp_path / "llama"), batch=2, context=8)  # before anything is timed
    with pytest.raises(NormGeoError, match="is no causal language model, nor a classifier of images"):
        task_of(str(tmp_path / "bert"))
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(NormGeoError, match="longer than the model's 64; give --context 64"):
        task_of(str(tmp_path / "gpt2"), context=65)
    for name, least in {"batch": 1, "context": 2}.items():  # of one token there is no next
        with pytest.raises(NormGeoError, match=f"--{name} must be at least {least}, received {least - 1}$"):
            task_of(str(tmp_path / "gpt2"), **{"batch": 2, "context": 8, name: least - 1})


def test_sizes_that_there_are():
    assert task_of("vit-tiny", batch=2).about["context"] == 197
    about = task_of("gpt-small", batch=2, context=8, vocabulary=50).about
    assert about == {"layers": 12, "d": 768, "heads": 12, "batch": 2, "context": 8, "vocabulary": 50}
    assert task_of("tiny", batch=2, context=8).about["context"] == 8
    with pytest.raises(NormGeoError, match=r"the sizes are tiny, 70m.*vit-tiny, vit-small.*gpt-small"):
        task_of("vit-nano")
    with pytest.raises(NormGeoError, match=r"--batch must be at least 1, received 0$"):
        task_of("tiny", batch=0)
    with pytest.raises(NormGeoError, match="--batch must be at least 1"):
        task_of("vit-tiny", batch=0)
