"""Norms on heads: their vectors reach the sinks in token order, however a model lays them out."""

import numpy as np
import pytest
import torch
import transformers as hf
import zoo

from normgeo import find_sites
from normgeo.stream import stream
from normgeo.tokens import TokenStream

IDS = np.random.default_rng(0).integers(3, 96, (3, 11))


def model(name):
    if name != "gemma3":
        return zoo.tiny(name)
    shape = zoo.SMALL | {"num_key_value_heads": 2, "head_dim": 8}
    return zoo.perturb(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**shape)).eval())


class Keep:
    """A sink that keeps everything."""

    def begin(self, batch):
        self.taken = {}

    def take(self, site, phase, hidden):
        self.taken[site, phase] = hidden.clone()

    def end(self):
        pass


@pytest.mark.parametrize(("name", "head_major"), [("qwen3", False), ("gemma3", True)])
def test_vectors_of_heads_come_in_token_order(name, head_major):
    net = model(name)
    sites = [s for s in find_sites(net, qk=True) if s.role == "qk" and s.layer == 0]
    assert [s.heads for s in sites] == [4, 2]
    assert all(s.head_major == head_major for s in sites)
    keep, seen = Keep(), {}
    for i, site in enumerate(sites):
        net.get_submodule(site.name).register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0].clone()}))
    list(stream(net, sites, TokenStream.from_array(IDS).batches(None, 3), [keep]))
    for i, site in enumerate(sites):
        x = seen[i].transpose(1, 2) if head_major else seen[i]
        assert x.shape == (3, 11, site.heads, 8)
        for row, time, head in ((0, 0, 0), (1, 7, 1), (2, 10, site.heads - 1)):
            vector = keep.taken[i, "pre"][(row * 11 + time) * site.heads + head]
            assert torch.equal(vector, x[row, time, head])
