"""Norms on heads: their vectors reach the sinks in token order, however a model lays them out."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
import zoo

from analyses import masks
from normgeo import find_sites, measure_angles
from normgeo.stream import stream
from normgeo.tokens import TokenStream

IDS = np.random.default_rng(0).integers(3, 96, (3, 11))


def model(name, heads):
    width = {"hidden_size": 8 * heads[0], "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    shape = zoo.SMALL | width | {"head_dim": 8}
    kind, config = {
        "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig), "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config)
    }[name]  # fmt: skip
    return zoo.perturb(kind(config(**shape)).eval())


class Keep:
    """A sink that keeps everything."""

    def begin(self, batch):
        self.taken = {}

    def take(self, site, phase, hidden):
        self.taken[site, phase] = hidden.clone()

    def end(self):
        pass


@pytest.mark.parametrize("heads", [(4, 2), (7, 7), (14, 7), (7, 1), (11, 11)], ids=str)
@pytest.mark.parametrize("length", [None, 7, 11])
@pytest.mark.parametrize(("name", "head_major"), [("qwen3", False), ("gemma3", True)])
def test_vectors_of_heads_come_in_token_order(name, head_major, length, heads):
    """Also where heads are as many as tokens: of those that it is traced with, of a user's, or of those measured."""
    net = model(name, heads)
    inputs = None if length is None else {"input_ids": torch.ones(2, length, dtype=torch.int64)}
    sites = [s for s in find_sites(net, inputs, qk=True) if s.role == "qk" and s.layer == 0]
    assert [s.heads for s in sites] == list(heads)
    assert all(s.head_major == (head_major and s.heads > 1) for s in sites)
    keep, seen = Keep(), {}
    for i, site in enumerate(sites):
        net.get_submodule(site.name).register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0].clone()}))
    list(stream(net, sites, TokenStream.from_array(IDS).batches(None, 3), [keep]))
    for i, site in enumerate(sites):
        x = seen[i].transpose(1, 2) if head_major else seen[i]
        assert x.shape == (3, 11, site.heads, 8)
        for row, time, head in ((0, 0, 0), (1, 7, site.heads // 2), (2, 10, site.heads - 1)):
            vector = keep.taken[i, "pre"][(row * 11 + time) * site.heads + head]
            assert torch.equal(vector, x[row, time, head])


def test_norms_on_heads_are_measured_where_they_are_asked_for():
    given = model("qwen3", (2, 1))
    plain, both = (measure_angles(given, IDS, null=4, qk=qk, progress=False).frame for qk in (False, True))
    assert set(both.role) - set(plain.role) == {"qk"}
    assert set(measure_angles(given, IDS, null=4, sites="qk", qk=True, progress=False).frame.role) == {"qk"}


def test_norms_of_keys_are_known_by_the_weights_beside_them():
    """An attention of another name has a q_proj, which its norm of keys does not follow."""
    mixing = model("qwen3", (2, 2))
    for layer in mixing.model.layers:
        layer.token_mixer = layer.self_attn
        del layer.self_attn
        layer.__class__ = type("Layer", (type(layer),), {"self_attn": property(lambda self: self.token_mixer)})
    assert {s.role for s in find_sites(mixing, qk=True) if "k_norm" in s.name} == {"qk"}


def test_a_mask_of_tokens_is_that_of_all_vectors_of_each():
    class Store:
        position = np.array([0, 1, 2])

        def angles(self, site, phase, direction):
            return np.array([10.0, 30.0, 50.0, 60.0, 70.0, 80.0])

        def norms(self, site, phase):
            return np.array([1.0, 2.0, 9.0, 9.0, 9.0, 9.0])

    rows = masks._rows(pd.DataFrame([{"model": "m", "site": "q_norm"}]), {"m": Store()}, masks.MASKS)
    first = next(row for row in rows if row["mask"] == "first position only")
    assert (first["mean_deg"], first["mean_norm"], first["n_tokens"]) == (20.0, 1.5, 2)
