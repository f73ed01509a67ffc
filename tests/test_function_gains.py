"""Norms that are functions and are given parameters as their gains: measured as those that are modules."""

import numpy as np
import pandas as pd
import pytest
import torch
from oracle import degrees
from stores import captured
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from normgeo import HiddenStateStore, convert, find_sites, measure_angles, observe, wrap
from normgeo.errors import ConversionError
from normgeo.store.scan import angles_from_store

D, HEADS, VOCABULARY = 32, 4, 96
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 12))

KINDS = {
    "layer": (lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b), lambda d: nn.LayerNorm(d)),
    "eps": (
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], bias=b, weight=w, eps=1e-3),
        lambda d: nn.LayerNorm(d, 1e-3),
    ),
    "rms": (lambda x, w, b: torch.rms_norm(x, (x.shape[-1],), w, 1e-6), lambda d: nn.RMSNorm(d, 1e-6)),
}


class Block(nn.Module):
    """Attention and an MLP whose norms are parameters of the block, or modules."""

    def __init__(self, kind, modular):
        super().__init__()
        self.mix, self.out, self.up, self.down = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 64),
            nn.Linear(64, D),
        )
        function, module = KINDS[kind]
        for i, d in enumerate((D, D // HEADS, D)):
            norm = module(d)
            weight, bias = norm.weight, getattr(norm, "bias", None)
            nn.init.uniform_(weight, 0.5, 1.5)
            if bias is not None:
                nn.init.normal_(bias)
            if modular:
                setattr(self, f"norm{i}", norm)
            else:
                self.register_parameter(f"weight{i}", weight)
                self.register_parameter(f"bias{i}", bias)
        self.function, self.modular = function, modular

    def normed(self, x, i):
        if self.modular:
            return getattr(self, f"norm{i}")(x)
        return self.function(x, getattr(self, f"weight{i}"), getattr(self, f"bias{i}"))

    def forward(self, x):
        q, k, v = self.mix(self.normed(x, 0)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (self.normed(q, 1), self.normed(k, 1), v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.normed(x, 2)).relu())


def made(kind, modular=False, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [Block(kind, modular) for _ in range(2)]
    whole = nn.Sequential(nn.Embedding(VOCABULARY, D), *layers, nn.LayerNorm(D), nn.Linear(D, VOCABULARY))
    return wrap(whole.eval().to(dtype), "0")


@pytest.mark.parametrize("kind", list(KINDS))
def test_they_are_sites_as_modules_are(kind):
    found, truth = (find_sites(made(kind, modular), qk=True) for modular in (False, True))
    assert [s.is_function for s in found] == [True] * 8 + [False]
    for one, other in zip(found, truth, strict=True):
        parts = ("kind", "role", "layer", "stack", "d", "eps", "gain", "bias", "heads", "head_major", "dtype")
        assert [getattr(one, part) for part in parts] == [getattr(other, part) for part in parts]
    assert [s.gain_name for s in found[:4]] == [f"module.1.weight{i}" for i in (0, 1, 1, 2)]
    assert found[0].bias_name == ("module.1.bias0" if found[0].bias else "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_their_angles_are_those_of_modules(kind, dtype):
    frames = [
        measure_angles(made(kind, modular, dtype), IDS, null=8, batch=2, qk=True, name="m", progress=False).frame
        for modular in (False, True)
    ]
    pd.testing.assert_frame_equal(*(f.drop(columns="site") for f in frames), check_exact=True)


def test_the_module_of_one_does_what_the_function_does():
    model = made("layer")
    x = torch.randn(3, D)
    for site in find_sites(model)[:4]:
        weight, bias = (model.get_parameter(name) for name in (site.gain_name, site.bias_name))
        assert torch.equal(site.module_of(model)(x), functional.layer_norm(x, (D,), weight, bias))


class Config(PretrainedConfig):
    model_type = "gains"

    def __init__(self, kind="layer", vocab_size=VOCABULARY, hidden_size=D, **rest):
        self.kind, self.vocab_size, self.hidden_size = kind, vocab_size, hidden_size
        super().__init__(**rest)


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.table, self.layers = nn.Embedding(VOCABULARY, D), nn.ModuleList(Block(config.kind, False) for _ in "12")
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids=None, **_):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": x}


class Keeping:
    """A sink that keeps all."""

    def __init__(self):
        self.kept = {}

    def begin(self, batch): ...

    def take(self, site, phase, hidden):
        self.kept.setdefault((site, phase), []).append(hidden.clone())

    def end(self): ...


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_store_gives_their_outputs_from_their_inputs(kind, home, tmp_path, monkeypatch):
    """With gamma and beta, which it keeps, to the last bit; and their angles without the model."""
    torch.manual_seed(0)
    model = Model(Config(kind)).eval()
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("normgeo.angles.job.load_model", lambda *_, **__: model)
    captured(home, tmp_path / "store", str(tmp_path / "model"), n=400)
    store, sink = HiddenStateStore(tmp_path / "store"), Keeping()
    observe(model, np.load(home / "ids.npy"), [sink], n_tokens=400)
    assert [site.gain_name for site in store.sites] == [f"layers.{i}.weight{j}" for i in (0, 1) for j in (0, 2)]
    for i, site in enumerate(store.sites):
        inputs, outputs = (torch.cat(sink.kept[i, phase]) for phase in ("pre", "post"))
        assert torch.equal(store.open(site.key, "pre").torch(), inputs)
        assert torch.equal(store.derived(site.key, "post", inputs), outputs)
    truth = measure_angles(model, np.load(home / "ids.npy"), n_tokens=400, null=8, progress=False, name="m")
    found = angles_from_store(tmp_path / "store", null=8, progress=False)
    np.testing.assert_allclose(found.frame.mean_deg, truth.frame.mean_deg, atol=1e-4)


class Computed(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.weight, self.up, self.gain = nn.Parameter(torch.zeros(D)), nn.Linear(D, D), gain

    def forward(self, x):
        return x + self.up(functional.rms_norm(x, (D,), self.gain(self.weight)))


STRANGER = nn.Parameter(torch.ones(D))


@pytest.mark.parametrize("gain", [lambda w: 1 + w, lambda w: STRANGER], ids=["computed", "of no model"])
def test_gains_that_no_name_leads_to_are_said(gain):
    model = wrap(nn.Sequential(nn.Embedding(VOCABULARY, D), Computed(gain), nn.LayerNorm(D)).eval())
    with pytest.warns(UserWarning, match=r"to normalize in the code of module\.1, which is not measured"):
        assert [site.key for site in find_sites(model)] == ["module.2"]


def test_conversion_leaves_them_and_says_so():
    with pytest.raises(ConversionError, match=r"module\.1\.layer_norm\(\): a function, not a module"):
        convert(made("layer"), to="crmsnorm")
    kept = convert(made("layer")).kept
    assert [*kept] == [f"module.{i}.layer_norm(){call}" for i in (1, 2) for call in ("", "@3")]


class ChannelsFirst(nn.LayerNorm):
    """As in SqueezeBERT and ConvNeXt: what is normalized is moved to the end, and back."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.seen = ChannelsFirst(D), nn.Conv1d(D, D, 1), None

    def forward(self, x):
        self.seen = x
        return x + self.mix(self.norm(x.transpose(1, 2))).transpose(1, 2)


@torch.no_grad()
def test_a_norm_over_another_dimension_is_measured_where_it_calls_the_function():
    model = wrap(nn.Sequential(nn.Embedding(VOCABULARY, D), Convolution(), nn.LayerNorm(D)).eval(), "0")
    frame = measure_angles(model, IDS, null=0, batch=6, name="m", progress=False).frame
    assert [*frame.site.unique()] == ["module.1.norm.layer_norm()", "module.2"]
    row = frame[(frame.site == "module.1.norm.layer_norm()") & (frame.phase == "pre") & (frame.direction == "uniform")]
    expected = degrees(model.module[1].seen.double().flatten(0, 1).numpy(), np.ones(D)).mean()
    assert float(row.mean_deg.iloc[0]) == pytest.approx(float(expected), abs=1e-4)
