"""What branches add to the stream: against what the branches themselves give, module by module."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from zoo import perturb, tiny

from analyses import branches, irreversibility, masks, sinks, uncertainty
from normgeo import measure_angles, wrap
from normgeo.angles.runs import RunConfig, start_run

BRANCHES = {  # what is added to the stream, by the model's own modules, and the stream itself
    "gpt2": {"attention": ["transformer.h.{}.attn"], "mlp": ["transformer.h.{}.mlp"]},
    "llama": {"attention": ["model.layers.{}.self_attn"], "mlp": ["model.layers.{}.mlp"]},
    "bloom": {"attention": ["transformer.h.{}.self_attention.dense"], "mlp": ["transformer.h.{}.mlp.dense_4h_to_h"]},
    "gpt_neox": {"parallel": ["gpt_neox.layers.{}.attention", "gpt_neox.layers.{}.mlp"]},
    "bert": {
        "attention": ["bert.encoder.layer.{}.attention.output.dense"], "mlp": ["bert.encoder.layer.{}.output.dense"],
    },
}  # fmt: skip


def handed(model, ids, names, what):
    """What modules give (`out`), or are given (`given`), [tokens, d], of one pass."""
    found = {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in names:

            def keep(_, given, out, name=name):
                value = given[0] if what == "given" else out
                found[name] = (value[0] if isinstance(value, tuple) else value).double().flatten(0, 1).clone()

            hooks.enter_context(model.get_submodule(name).register_forward_hook(keep))
        model(input_ids=ids)
    return found


@pytest.mark.parametrize("name", BRANCHES)
def test_what_is_added_is_what_the_branches_give(name, ids):
    model = tiny(name).double()
    frame = branches.compute([model], ids)
    layers = model.config.num_hidden_layers
    assert len(frame) == layers * len(BRANCHES[name])  # and none for what a norm of embeddings makes of them
    tokens = torch.from_numpy(np.asarray(ids))
    for row in frame.to_dict("records"):
        modules = [module.format(row["layer"]) for module in BRANCHES[name][row["role"]]]
        added = sum(handed(model, tokens, modules, "out").values())
        stream = handed(model, tokens, [row["site"]], "given")[row["site"]]
        if name == "bert":  # the stream is what the norm before gives, of which this one reads the sum
            stream = stream - added
        cosine = (added * stream).sum(1) / (added.norm(dim=1) * stream.norm(dim=1))
        expected = {
            "norm": added.norm(dim=1), "relative_norm": added.norm(dim=1) / stream.norm(dim=1), "cosine": cosine,
            "energy_share": added.sum(1) ** 2 / (added.shape[1] * added.norm(dim=1) ** 2),
        }  # fmt: skip
        for column, values in expected.items():
            assert row[column] == pytest.approx(values.mean().item(), rel=1e-6), (row["site"], column)
        assert row["n_tokens"] == tokens.numel()


class Encoder(nn.Module):
    """Post-LN, with a final norm behind the last of its norms."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.tok, self.encoder = nn.Embedding(96, 32), nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))

    def forward(self, ids):
        return self.encoder(self.tok(ids))


def test_norms_behind_additions_are_on_the_stream_though_a_final_one_comes_behind_them(ids, tmp_path, monkeypatch):
    """Which numbers tell, of which these tables have not all."""
    torch.manual_seed(0)
    model = wrap(perturb(Encoder()))
    names = [f"module.encoder.layers.{layer}.norm{norm}" for layer in (0, 1) for norm in (1, 2)]
    assert branches.compute([model], ids).site.tolist() == names[1:]  # before the first there is no stream
    lost = irreversibility.compute([model], ids)
    assert list(dict.fromkeys(lost.site[lost.on_stream])) == [*names, "module.encoder.norm"]
    measure_angles(model, ids, null=0, progress=False).save(tmp_path / "run")
    apart = sinks.compute(tmp_path / "run")
    assert list(dict.fromkeys(apart.site[apart.on_stream])) == [*names, "module.encoder.norm"]
    monkeypatch.setattr("normgeo.angles.job.load_model", lambda *_, **__: model)
    np.save(tmp_path / "ids.npy", ids)
    config = RunConfig(("embedded-layernorm",), data=str(tmp_path / "ids.npy"), null=0, keep="scalars")
    start_run(config, tmp_path / "scalars", progress=False)
    for analysis in (masks, uncertainty):
        figure = analysis.plot(analysis.compute(tmp_path / "scalars"))
        assert max(len(line.get_xdata()) for axes in figure.axes for line in axes.lines) == 5


def test_streams_of_encoder_and_decoder_are_apart(ids):
    frame = branches.compute([tiny("t5")], ids)
    added = {stack: part.role.tolist() for stack, part in frame.groupby("stack")}
    assert added == {
        "encoder.block": ["attention", "mlp"] * 2, "decoder.block": ["attention", "cross_attention", "mlp"] * 2,
    }  # fmt: skip
    titles = [axes.get_title() for axes in branches.plot(frame).axes[:2]]
    assert len({*titles}) == 2


def test_a_figure_has_what_the_table_has(ids):
    frame = branches.compute([tiny("gpt2"), tiny("gpt_neox")], ids)
    axes = branches.plot(frame).axes
    lines = {line.get_label(): line for line in axes[0].lines}
    here = frame[(frame.model == frame.model.iloc[0]) & (frame.role == "mlp")]
    np.testing.assert_allclose(lines["MLP"].get_ydata(), here.relative_norm)
    assert "attention and MLP" in {line.get_label() for line in axes[1].lines}
    energy = next(panel for panel in axes if panel.get_ylabel() == "share of energy along 1")
    assert energy.yaxis.get_major_formatter()(0.001) == "0.1%"  # as in the figure of what mean subtraction removes
