"""Norms that are functions in somebody's code: measured as those that are modules, or named where they cannot be."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from stores import captured
from torch import library, nn
from torch.nn import functional
from torch.overrides import _len_torch_function_stack

from normgeo import HiddenStateStore, compare, convert, find_sites, measure_angles, observe, wrap
from normgeo.bench.inference_models import main_sites
from normgeo.errors import ConversionError, DataError, ModelError
from normgeo.store.scan import angles_from_store

D, HEADS, VOCABULARY = 32, 4, 96
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 12))

FUNCTIONS = {
    "rms": lambda x: functional.rms_norm(x, (x.shape[-1],)),
    "torch's": lambda x: torch.rms_norm(x, [x.shape[-1]], None, 1e-6),
    "layer": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "by name": lambda x: functional.layer_norm(eps=1e-3, normalized_shape=(x.shape[-1],), input=x),
}
MODULES = {
    "rms": lambda d: nn.RMSNorm(d, elementwise_affine=False),
    "torch's": lambda d: nn.RMSNorm(d, 1e-6, elementwise_affine=False),
    "layer": lambda d: nn.LayerNorm(d, elementwise_affine=False),
    "by name": lambda d: nn.LayerNorm(d, 1e-3, elementwise_affine=False),
}


class Attention(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.mix, self.out, self.q_norm, self.k_norm = nn.Linear(D, 3 * D), nn.Linear(D, D), norm(8), norm(8)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.attn, self.mlp, self.first, self.second = Attention(norm), nn.Sequential(), norm(D), norm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))

    def forward(self, x):
        x = x + self.attn(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """Its norms are what `norm` gives for a width: modules, or a function that all use."""

    def __init__(self, norm, loops=1):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.loops = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY), loops
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.zero, self.last = norm(D), norm(D)

    def forward(self, ids):
        x = self.zero(self.table(ids))
        for block in [*self.blocks] * self.loops:
            x = block(x)
        return self.head(self.last(x))


def written(kind, **options):
    """With functions."""
    return wrap(GPT(lambda d: FUNCTIONS[kind], **options).eval(), "table")


def modular(kind, **options):
    """With modules, and the same weights."""
    return wrap(GPT(MODULES[kind], **options).eval(), "table")


def numbers(model):
    return measure_angles(model, IDS, null=8, batch=2, qk=True, name="m", progress=False).frame


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_they_are_sites_as_modules_are(kind, loops):
    found, truth = (find_sites(make(kind, loops=loops), qk=True) for make in (written, modular))
    assert [s.is_function for s in found] == [True] * len(found)
    assert len({s.key for s in found}) == len(found)
    for one, other in zip(found, truth, strict=True):
        parts = ("kind", "role", "layer", "stack", "d", "eps", "gain", "bias", "heads", "head_major", "dtype")
        assert [getattr(one, part) for part in parts] == [getattr(other, part) for part in parts]


def test_they_go_by_what_calls_them():
    assert [site.key for site in find_sites(written("rms"), qk=True)][:6] == [
        "module.rms_norm()", "module.blocks.0.rms_norm()", "module.blocks.0.attn.rms_norm()",
        "module.blocks.0.attn.rms_norm()@1", "module.blocks.0.rms_norm()@1", "module.blocks.1.rms_norm()",
    ]  # fmt: skip


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_their_angles_are_those_of_modules(kind, loops):
    found, truth = numbers(written(kind, loops=loops)), numbers(modular(kind, loops=loops))
    pd.testing.assert_frame_equal(found.drop(columns="site"), truth.drop(columns="site"), check_exact=True)


def test_some_of_them_are_measured_alone():
    model = written("rms")
    frame = measure_angles(model, IDS, null=0, sites="mlp", name="m", progress=False).frame
    assert [*frame.site.unique()] == ["module.blocks.0.rms_norm()@1", "module.blocks.1.rms_norm()@1"]
    other = find_sites(written("layer"))
    with pytest.raises(ModelError, match="sees 0 vectors"):
        measure_angles(model, IDS, null=0, sites=other, name="m", progress=False)
    with pytest.raises(DataError, match=r"has no module module\.blocks\.0: it is a site of another"):
        measure_angles(wrap(nn.Sequential(model.module.table, nn.LayerNorm(D))), IDS, sites=find_sites(model, qk=True))


class Raising:
    """A sink that fails at its second vector."""

    def __init__(self):
        self.seen = 0

    def begin(self, batch): ...

    def take(self, site, phase, hidden):
        self.seen += 1
        if self.seen == 2:
            raise KeyError("enough")

    def end(self): ...


def test_nothing_of_it_stays():
    model = written("rms")
    hooks = lambda: [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]  # noqa: E731
    before = _len_torch_function_stack()
    numbers(model)
    with pytest.raises(KeyError, match="enough"):
        observe(model, IDS, [Raising()])
    assert not hooks()
    assert _len_torch_function_stack() == before


CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class Config(PretrainedConfig):
    model_type = "written"
    def __init__(self, vocab_size=96, hidden_size=32, num_hidden_layers=2, final="rms_norm", **rest):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.final = final
        super().__init__(**rest)

class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down, self.more = nn.LayerNorm(d), nn.Linear(d, 64), nn.Linear(64, d), nn.Linear(d, d)
    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).relu())
        return x + self.more(nn.functional.layer_norm(x, x.shape[-1:]))

class Model(PreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.post_init()
    def get_input_embeddings(self):
        return self.table
    def forward(self, input_ids=None, **_):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": getattr(nn.functional, self.config.final)(x, x.shape[-1:])}
"""


def coded(**config):
    """A model of transformers."""
    space: dict = {}
    exec(CODE, space)
    torch.manual_seed(0)
    return space["Model"](space["Config"](**config)).eval()


def test_a_store_holds_them(home, tmp_path, monkeypatch):
    """And gives their angles without the model, as of modules."""
    model = coded()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/mine.py").write_text(CODE)
    path = tmp_path / "model/config.json"
    auto = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto, "architectures": ["Model"]}))
    captured(home, tmp_path / "store", str(tmp_path / "model"), n=400, trust_remote_code=True)
    store = HiddenStateStore(tmp_path / "store")
    assert [site.key for site in store.sites] == [
        "layers.0.norm", "layers.0.layer_norm()", "layers.1.norm", "layers.1.layer_norm()", "rms_norm()",
    ]  # fmt: skip
    assert store.open("layers.1.layer_norm()", "pre").shape == (400, D)
    truth = measure_angles(model, np.load(home / "ids.npy"), n_tokens=400, null=8, progress=False, name="m")
    found = angles_from_store(tmp_path / "store", null=8, progress=False)
    assert found.frame.site.tolist() == truth.frame.site.tolist()
    np.testing.assert_allclose(found.frame.mean_deg, truth.frame.mean_deg, atol=1e-4)


class Mixed(nn.Module):
    """A block with a norm that is a module, and one that is a function."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))
        self.more = nn.Linear(D, D)

    def forward(self, x):
        x = x + self.mlp(self.norm(x))
        return x + self.more(functional.layer_norm(x, (D,)))


def mixed():
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Embedding(VOCABULARY, D), Mixed(), Mixed(), nn.LayerNorm(D), nn.Linear(D, 9)).eval())


@torch.no_grad()
def test_conversion_leaves_them_and_says_so():
    conversion = convert(mixed())
    assert [site.name for site in conversion.replaced] == ["module.1.norm", "module.2.norm", "module.3"]
    assert conversion.kept == dict.fromkeys(
        ["module.1.layer_norm()", "module.2.layer_norm()"], "a function, not a module"
    )
    expected, ids = mixed()(torch.from_numpy(IDS))["logits"], torch.from_numpy(IDS)
    assert float((conversion.model(ids)["logits"] - expected).abs().max() / expected.abs().max()) < 1e-5
    with pytest.raises(ConversionError, match=r"kept: module\.1\.layer_norm\(\): a function, not a module"):
        convert(mixed(), to="crmsnorm")
    with pytest.raises(ConversionError, match=r"has no LayerNorm that is a module: module\.layer_norm\(\): a function"):
        convert(written("layer"))


def test_conversion_says_so_of_large_models_too(monkeypatch):
    """Whose gauge is that of a copy with few layers."""
    monkeypatch.setattr("normgeo.conversion.convert.LARGE", 0)
    conversion = convert(coded(num_hidden_layers=5, final="layer_norm"))
    assert list(conversion.kept) == [*(f"layers.{i}.layer_norm()" for i in range(5)), "layer_norm()"]
    assert (conversion.certificate.kept, conversion.certificate.replaced) == (6, 5)


def test_a_naive_swap_that_is_none_is_said():
    with pytest.warns(
        UserWarning, match=r"the naive swap still subtracts a mean at module\.1\.layer_norm\(\): a function"
    ):
        convert(mixed(), to="naive-rmsnorm")


def test_comparisons_count_them_and_benches_leave_them():
    pair = {"one": written("layer"), "other": written("rms")}
    frame = compare(pair, IDS, null=0, rounds=0, progress=False).frame.groupby("model").first()
    assert frame.layernorms.tolist() == [10, 0]
    assert frame.rmsnorms.tolist() == [0, 10]
    assert [site.name for site in main_sites(mixed())] == ["module.1.norm", "module.2.norm", "module.3"]
    with pytest.raises(ModelError, match="has none of norm"):
        main_sites(written("layer"))


class Interrupted(Raising):
    def take(self, site, phase, hidden):
        raise KeyboardInterrupt


def test_an_interrupted_pass_leaves_nothing():
    before = _len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt):
        observe(written("rms"), IDS, [Interrupted()])
    assert _len_torch_function_stack() == before


class Keeping:
    """A sink that keeps all; and calls norms itself, if it is asked to."""

    def __init__(self, calls=False):
        self.kept, self.calls = [], calls

    def begin(self, batch): ...

    def take(self, site, phase, hidden):
        if self.calls:
            functional.layer_norm(hidden, (hidden.shape[-1],))
        self.kept.append(hidden.clone())

    def end(self): ...


def test_what_sinks_call_is_not_the_models():
    sinks = Keeping(), Keeping(calls=True)
    for sink in sinks:
        observe(mixed(), IDS, [sink])
    assert all(torch.equal(*pair) for pair in zip(sinks[0].kept, sinks[1].kept, strict=True))


class Trying(nn.Module):
    """A block that tries a norm that fails, and calls others of no tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x):
        try:
            functional.rms_norm(x, (D + 1,))
        except RuntimeError:
            functional.rms_norm(x[..., :1], (1,))
        functional.rms_norm(x[0, 0], (D,))
        return x + self.up(functional.rms_norm(x, (D,)))


def test_calls_that_are_no_norms_of_tokens_are_counted_but_not_measured():
    model, seen, sink = (
        wrap(nn.Sequential(nn.Embedding(VOCABULARY, D), Trying(), nn.LayerNorm(D)).eval()),
        [],
        Keeping(),
    )
    assert [site.key for site in find_sites(model)] == ["module.1.rms_norm()@2", "module.2"]
    with model.module[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone())):
        observe(model, IDS, [sink])
    assert torch.equal(sink.kept[0], seen[-1].flatten(0, 1))


@pytest.mark.parametrize(
    ("pattern", "roles"),
    [("module.blocks.1.rms_norm()", ["attention"]), ("*blocks.1.rms_norm()*", ["attention", "mlp"])],
)
def test_a_key_chooses_one_call(pattern, roles):
    frame = measure_angles(written("rms"), IDS, null=0, sites=pattern, name="m", progress=False).frame
    assert [*frame.role.unique()] == roles


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, D), nn.LayerNorm(D)

    def forward(self, ids, scale=None, loud=False):
        return self.norm(self.table(ids) * (1 if scale is None else scale))


def test_inputs_may_be_numbers(untyped):
    inputs = {"input_ids": torch.from_numpy(IDS), "scale": torch.tensor(2.0), "loud": True}
    assert [site.name for site in find_sites(wrap(Scaled().eval()), inputs)] == ["module.norm"]


@library.custom_op("others::rms_norm", mutates_args=())
def others(x: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), None, eps)


class Libraries(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(VOCABULARY, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.up(torch.ops.others.rms_norm(x, 1e-6))
        return self.norm(x + torch.ops.aten.rms_norm(x, [D]))


def test_a_librarys_function_of_the_same_name_is_not_torchs():
    model = wrap(Libraries().eval())
    assert [site.key for site in find_sites(model)] == ["module.rms_norm()", "module.norm"]
    assert len(measure_angles(model, IDS, null=0, name="m", progress=False).frame.site.unique()) == 2
