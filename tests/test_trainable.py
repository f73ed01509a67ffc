"""Trainable conversions take the same steps as the Pre-LN models they come from."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as hf
from forked import free_port
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from zoo import apart, fresh, perturb, tiny, trained

from normgeo import convert, wrap
from normgeo.conversion.gauge import Shift, find_gauge
from normgeo.conversion.trainable import bake
from normgeo.errors import ConversionError
from normgeo.examples import example_inputs
from normgeo.norms import RMSNorm
from normgeo.training.compressed import compressed

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, "gpt_neox": {"hidden_dropout": 0.2},
    "opt": {"dropout": 0.2}, "vit": {"hidden_dropout_prob": 0.2},
}  # fmt: skip
NONE = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "gpt_neox": {}, "opt": {"dropout": 0.0},
    "vit": {}, "bloom": {}, "stablelm": {},
}  # fmt: skip


def batch(model, seed=3):
    inputs = example_inputs(model, 9, seed=seed)
    return inputs, inputs.get("input_ids", torch.tensor([0, 1])).flatten()


def values(model):
    """Every parameter under its plain name."""
    names = ((n.replace("parametrizations.", "").replace(".original", ""), p) for n, p in model.named_parameters())
    return {name.removeprefix("module."): p.detach() for name, p in names}


def distance(a, b, writers):
    """Largest relative difference of the parameters' part that the gauge does not touch."""
    worst = 0.0
    for name, x in values(a).items():
        y = values(b)[name]
        for axis in (s.axis for s in writers if s.parameter == name):
            x, y = x - x.mean(axis, keepdim=True), y - y.mean(axis, keepdim=True)
        worst = max(worst, ((x - y).norm() / x.norm()).item())
    return worst


def test_what_leaves_out_layers_at_random_is_not_trained():
    """A mean that is removed in one of them would come through, and the gauge would be of those that ran."""
    shape = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    shape |= {"encoder_layers": 3, "decoder_layers": 3, "vocab_size": 96, "d_model": 32, "max_position_embeddings": 64}
    for often in (0.5, 0.0):
        torch.manual_seed(0)
        model = hf.MBartForConditionalGeneration(hf.MBartConfig(**shape, decoder_layerdrop=often, pad_token_id=0))
        if often:
            with pytest.raises(ConversionError, match=r"leaves out layers .*\(decoder_layerdrop=0.5\).*with 0"):
                convert(model, trainable=True)
        assert convert(model, trainable=not often).certificate.passed


@pytest.mark.parametrize(
    ("name", "changes"), [*((n, c) for n, c in DROPOUT.items()), *((n, c) for n, c in NONE.items())],
    ids=[*(f"{n}-dropout" for n in DROPOUT), *NONE],
)  # fmt: skip
def test_training_follows_the_original(name, changes):
    model = tiny(name, **changes).double()
    conversion = convert(model, trainable=True)
    inputs, labels = batch(model)
    original, converted = copy.deepcopy(model), conversion.model
    expected, losses = trained(original, inputs, labels), trained(converted, inputs, labels)
    assert expected[-1] < 0.9 * expected[0]  # it learns something
    assert apart(expected, losses) < 1e-9
    tied = {id(p) for p in original.get_output_embeddings().parameters()} if "gpt" in name or name == "opt" else set()
    writers = [s for s in find_gauge(model).writers if id(original.get_parameter(s.parameter)) not in tied]
    assert distance(original, converted, writers) < 1e-9
    assert sum(isinstance(m, RMSNorm) for m in converted.modules()) == len(conversion.replaced) > 2


def test_its_norms_are_what_trainers_know():
    """Who asks for torch's LayerNorm also reads what one has."""
    norms = [m for m in convert(tiny("gpt2"), trainable=True).model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert {(m.normalized_shape, m.elementwise_affine) for m in norms} == {((32,), True)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}), ("bloom", {}), ("gpt2", {})],
)
def test_a_new_model_is_trained_as_the_original(name, changes):
    """gamma * y + beta has no mean before gamma and beta have moved, nor has dropout of what is zero at first."""
    model = fresh(name, **changes).double()
    if name == "gpt2":
        with torch.no_grad():
            for block in model.transformer.h:
                block.attn.c_proj.weight.zero_()
                block.mlp.c_proj.weight.zero_()
    converted, inputs, labels = convert(model, trainable=True).model, *batch(model)
    expected, losses = trained(model, inputs, labels, steps=8), trained(converted, inputs, labels, steps=8)
    assert apart(expected, losses) < 1e-12


def test_a_gauge_of_evaluation_is_none_of_training():
    """Dropout multiplies means by its mask."""
    model = tiny("gpt2")
    with pytest.raises(ConversionError, match="not equal to its original in training"):
        convert(model, trainable=True, gauge=find_gauge(model))
    gauge = find_gauge(model, training=True)
    assert convert(model, trainable=True, gauge=gauge).certificate.passed
    seen = replace(gauge, writers=(*gauge.writers, Shift("transformer.h.0.mlp.c_fc.weight", 0)))
    with pytest.raises(ConversionError, match="not equal to its original in evaluation"):
        convert(model, trainable=True, gauge=seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert"])
def test_half_precision_converts_exactly(name, dtype):
    """Gains and offsets are read off the norms in float64, whatever the dtype they train in."""
    conversion = convert(tiny(name).to(dtype), trainable=True)
    assert conversion.certificate.error_rel < 1e-12
    assert {p.dtype for p in conversion.model.parameters()} == {dtype}


def test_a_baked_conversion_does_drift():
    """Why the parametrization is there: plain converted weights train to another model."""
    model = tiny("gpt_neox").double()
    inputs, labels = batch(model)
    conversion = convert(model)
    expected, losses = trained(copy.deepcopy(model), inputs, labels), trained(conversion.model, inputs, labels)
    assert apart(expected, losses) > 1e-6


def test_baking_gives_plain_weights_and_the_same_outputs():
    model = tiny("gpt2", **NONE["gpt2"]).double()
    conversion = convert(model, trainable=True)
    inputs, labels = batch(model)
    trained(conversion.model, inputs, labels, steps=3)
    plain = bake(conversion.model).eval()
    assert not any(parametrize.is_parametrized(m) for m in plain.modules())
    assert {type(m) for m in plain.modules()} <= {type(m) for m in model.modules()} | {RMSNorm}  # which pickles
    conversion.model.eval()
    plain.tie_weights()  # as whatever saves or resizes it: the head has weights of its own by now
    with torch.no_grad():
        difference = plain(**inputs).logits - conversion.model(**inputs).logits
    assert difference.abs().max() < 1e-14
    assert any(parametrize.is_parametrized(m) for m in conversion.model.modules())  # the trained one is as it was


def test_dropout_moves_the_recenter_behind_it():
    with_dropout = convert(tiny("gpt2"), trainable=True)
    assert {p.module for p in with_dropout.recentered} == {
        "transformer.drop", "transformer.h.0.attn.resid_dropout", "transformer.h.0.mlp.dropout",
        "transformer.h.1.attn.resid_dropout", "transformer.h.1.mlp.dropout",
    }  # fmt: skip
    without = convert(tiny("gpt2", **NONE["gpt2"]), trainable=True)
    assert without.recentered == ()
    with pytest.raises(ConversionError, match="trainable=True goes with"):
        convert(tiny("gpt2"), to="crmsnorm", trainable=True)
    with pytest.raises(ConversionError, match="leave out keep_tie and fold_affine"):
        convert(tiny("gpt2"), fold_affine=True, trainable=True)


def test_a_frozen_model_is_baked_frozen():
    baked = bake(convert(tiny("gpt_neox").requires_grad_(False), trainable=True).model)
    assert not any(parameter.requires_grad for parameter in baked.parameters())


def test_a_trainer_treats_it_as_it_treats_the_original(tmp_path):
    """transformers' own: it asks norms for their class, ties weights when it resumes, and saves plain models."""
    model = tiny("gpt2", **NONE["gpt2"])
    ids = torch.randint(0, model.config.vocab_size, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def losses(model, name, resume=None):
        arguments = hf.TrainingArguments(
            str(tmp_path / name), max_steps=4, per_device_train_batch_size=4, weight_decay=0.5, learning_rate=1e-2,
            save_steps=2, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = hf.Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    converted = convert(model, trainable=True).model
    again, original = copy.deepcopy(converted), copy.deepcopy(model)
    expected, found = losses(original, "original"), losses(converted, "converted")
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 4
    gains = [torch.stack([block.ln_1.weight for block in m.transformer.h]) for m in (original, converted)]
    torch.testing.assert_close(*gains, rtol=1e-4, atol=1e-5)  # decayed, they are 2% smaller
    assert losses(again, "converted", str(tmp_path / "converted/checkpoint-2")) == found
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "converted/checkpoint-4").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, converted.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_model_in_training_stays_tied_and_is_not_resized():
    model = convert(tiny("gpt2", **NONE["gpt2"]), trainable=True).model
    head = model.lm_head.weight
    model.tie_weights()
    assert model.lm_head.weight is head is model.transformer.wte.parametrizations.weight.original
    with pytest.raises(ConversionError, match="resize those of the original"):
        model.resize_token_embeddings(200)
    with pytest.raises(ConversionError, match=r"other embeddings would not be centered: set those of the original"):
        model.set_input_embeddings(torch.nn.Embedding(*model.get_input_embeddings().weight.shape))
    baked = bake(model)
    assert {type(norm) for name, norm in baked.named_modules() if "ln_" in name} == {RMSNorm}
    baked.resize_token_embeddings(200)
    assert baked(torch.tensor([[199]])).logits.shape[-1] == 200


def rank(number, port, out):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    torch.set_num_threads(1)
    dropped, plain = tiny("gpt2").double(), tiny("gpt2", **NONE["gpt2"]).double()
    converted = convert(dropped, trainable=True).model
    inputs, labels = batch(dropped, seed=10 + number)
    models = {
        "dropped": copy.deepcopy(dropped), "dropped pre-rmsnorm": converted,
        "plain": copy.deepcopy(plain), "plain pre-rmsnorm": convert(plain, trainable=True).model,
        "plain pre-crmsnorm": compressed(plain), "plain baked": convert(plain).model,
    }  # fmt: skip
    losses = {name: trained(DistributedDataParallel(m), inputs, labels, steps=12) for name, m in models.items()}
    if number == 0:
        torch.save({"losses": losses, "values": values(converted)}, out)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_give_the_same(tmp_path):
    """Pre-LN and both training forms under two processes: one curve; plain converted weights leave it."""
    mp.start_processes(rank, (free_port(), str(tmp_path / "out.pt")), nprocs=2, start_method="forkserver")
    found = torch.load(tmp_path / "out.pt", weights_only=True)

    def far(form):
        expected, losses = found["losses"][form.split()[0]], found["losses"][form]
        assert len(losses) == len(expected) == 12
        return apart(expected, losses)

    for form in ("dropped pre-rmsnorm", "plain pre-rmsnorm", "plain pre-crmsnorm"):
        assert far(form) < 1e-9, form
    assert far("plain baked") > 1e-7
    alone = convert(tiny("gpt2").double(), trainable=True).model
    trained(alone, *batch(alone, seed=10), steps=12)
    differs = max((alone_value - found["values"][n]).abs().max() for n, alone_value in values(alone).items())
    assert differs > 1e-6  # the other rank's gradients took part


def test_branches_that_both_bring_a_mean_are_recentered_whichever_is_larger():
    """Post-LN: a residual's mean hides that of the dropout beside it until it is gone."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    model = perturb(hf.BertForMaskedLM(hf.BertConfig(vocab_size=50, num_hidden_layers=3, **small)).eval())
    plain, trains = convert(model), convert(model, trainable=True)
    assert len(trains.replaced) == len(plain.replaced) == 1 + len(plain.recentered) == 7
    assert not trains.kept


@pytest.mark.parametrize(
    "options", [{"to": "crmsnorm"}, {"to": "crmsnorm", "padded": True}, {"trainable": True}], ids=str
)
def test_sounds_that_are_recentered_once_after_their_features_and_once_after_their_positions(options):
    """Where positions are convolved is superfluous by what follows; spans of a sound are masked by NumPy's dice."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    convolved = {
        "conv_dim": (24, 24),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "do_stable_layer_norm": True,
        "feat_extract_norm": "layer",
    }
    torch.manual_seed(1)
    model = perturb(hf.HubertModel(hf.HubertConfig(**sizes, layerdrop=0.0, **convolved)).eval())
    before = np.random.get_state()[1].copy()
    conversion = convert(model, **options)
    assert (np.random.get_state()[1] == before).all()
    assert len(conversion.replaced) == 6
    behind = 2 if "trainable" in options else 0  # dropouts
    assert len(conversion.recentered) == 2 + behind
    if "trainable" in options:
        baked = bake(conversion.model)
        assert baked.state_dict().keys() == model.state_dict().keys()  # of a weight that the model normalizes, too
        trained, plain = (m(**conversion.inputs[0]).last_hidden_state for m in (conversion.model, baked))
        assert torch.equal(trained, plain)


def test_weights_that_a_model_parametrizes_itself_stay_so_and_its_own_are_left_alone():
    """A bias that is centered is beside a weight that is normalized, in one module, whose class a copy shares."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
    parametrizations.weight_norm(layer.linear2)
    parts = torch.nn.Embedding(50, 16), layer, torch.nn.LayerNorm(16), torch.nn.Linear(16, 50)
    model, ids = wrap(torch.nn.Sequential(*parts).eval()), torch.arange(50)[None]
    truth, names = model(ids)["logits"], model.state_dict().keys()
    conversion = convert(model, trainable=True)
    assert parametrize.is_parametrized(conversion.model.module[1].linear2, "bias")
    baked = bake(conversion.model)
    assert not parametrize.is_parametrized(baked.module[1].linear2, "bias")
    for each in (model, conversion.model, baked):
        assert each.state_dict().keys() == names
        assert torch.allclose(each(ids)["logits"], truth, atol=1e-5)
