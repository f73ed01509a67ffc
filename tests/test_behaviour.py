"""What modules do, however they are written: those that are norms are found as such, with the eps that they have."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from normgeo import convert, wrap
from normgeo.behaviour import behaviour_of
from normgeo.models import copied

D = 16
SHAPE = torch.Size((2, 5, D))


class OpenAIs(nn.LayerNorm):
    """As in CLIP's own code: it computes in float32, whatever its weights are in."""

    def forward(self, x):
        return super().forward(x.type(torch.float32)).type(x.dtype)


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.g * x / x.norm(dim=-1, keepdim=True)


class Slim(nn.LayerNorm):
    """It takes narrower vectors too, as in MatFormers."""

    def forward(self, x):
        d = x.shape[-1]
        return functional.layer_norm(x, (d,), self.weight[:d], self.bias[:d], self.eps)


class Groups(nn.Module):
    """A gain for every row: no norm of vectors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        return functional.layer_norm(x, x.shape[-1:]) * self.weight


class OverDeviation(nn.Module):
    """As in the Annotated Transformer."""

    def __init__(self, eps=1e-3):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(D) + 0.5), eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class OtherEps(nn.LayerNorm):
    """What it is called is not what it uses."""

    def forward(self, x):
        return functional.layer_norm(x, (D,), self.weight, self.bias, 1e-3)


class OfSums(nn.Module):
    """Its eps is added to a sum of squares."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return x * D**0.5 * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


def patched():
    norm = nn.LayerNorm(D)
    old = norm.forward
    norm.forward = lambda x: old(x) * 2
    return norm


class Learned(nn.Module):
    """Its eps is learned, and 0 so far."""

    def __init__(self):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps.abs() + 1e-6)


class TwoEps(nn.LayerNorm):
    def __init__(self):
        super().__init__(D)
        self.min_eps, self.eps = 0.0, 1e-4


class Buffered(nn.Module):
    """Its gain and its bias, if it has them, are no parameters."""

    def __init__(self, gain, bias):
        super().__init__()
        self.register_buffer("gain", torch.rand(D) + 0.5 if gain else None)
        self.register_buffer("bias", torch.randn(D) if bias else None)

    def forward(self, x):
        return functional.layer_norm(x, (D,), self.gain, self.bias)


class Constant(nn.Module):
    def forward(self, x):
        return torch.arange(1.0, D + 1).to(x).expand_as(x)


NORMS = {
    "torch's": (lambda: nn.LayerNorm(D, 1e-4), "layernorm", 1e-4),
    "OpenAI's": (lambda: OpenAIs(D, 1e-4), "layernorm", 1e-4),
    "patched": (patched, "layernorm", 1e-5),
    "ScaleNorm": (ScaleNorm, "rmsnorm", 0.0),
    "slim": (lambda: Slim(D, 1e-4), "layernorm", 1e-4),
    "another eps": (lambda: OtherEps(D, 1e-8), "layernorm", 1e-3),
    "of sums": (OfSums, "rmsnorm", 1e-6 / D),
    "learned": (Learned, "rmsnorm", 1e-6),
    "two": (TwoEps, "layernorm", 1e-4),
    "no eps": (lambda: nn.LayerNorm(D, 0.0), "layernorm", 0.0),
}


@pytest.mark.parametrize("name", list(NORMS))
def test_norms(name):
    make, kind, eps = NORMS[name]
    found = behaviour_of(make(), SHAPE)
    assert found is not None
    assert found.kind == kind
    assert found.eps == pytest.approx(eps, rel=1e-3, abs=1e-11)


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gains_and_biases_that_are_no_parameters(gain, bias):
    found = behaviour_of(Buffered(gain, bias), SHAPE)
    assert (found.gain, found.bias) == (gain, bias)
    parts = nn.Embedding(48, D), *(Buffered(gain, bias), nn.Linear(D, D)) * 2, Buffered(gain, bias), nn.Linear(D, 48)
    assert len(convert(wrap(nn.Sequential(*parts))).replaced) >= 1


def test_gains_of_another_axis_are_no_norms():
    two = nn.GroupNorm(2, 2)
    two.weight.data[:] = torch.tensor([1.0, 5.0])
    assert behaviour_of(two, torch.Size((8, 2, D))) is None
    assert behaviour_of(nn.InstanceNorm1d(2, affine=True), torch.Size((8, 2, D))) is None
    assert behaviour_of(Groups(), SHAPE) is None
    assert behaviour_of(nn.Linear(D, D), SHAPE) is None
    assert behaviour_of(Constant(), SHAPE) is None
    assert behaviour_of(nn.GroupNorm(5, 5), SHAPE) is None


class Held:
    """What copying fails on."""

    def __init__(self, error):
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


@pytest.mark.parametrize("module", [nn.GELU(), nn.Linear(D, D)], ids=["no parameters", "larger ones"])
def test_what_cannot_be_copied_and_is_too_large_or_too_small_for_a_norm_is_none(module):
    module.held = Held(ValueError("pointers"))
    assert behaviour_of(module, SHAPE) is None


def test_memory_that_runs_out_is_no_fault_of_what_is_copied():
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        module = nn.Linear(D, D)
        module.held = Held(error)
        with pytest.raises(type(error)):
            copied(module)


def test_what_saturates_is_no_layernorm_of_two_numbers():
    """As a router of two experts: of long vectors its softmax makes two values, as LayerNorm of two numbers does."""
    for tokens in range(2, 8):
        shape = torch.Size((1, tokens, 2))
        assert behaviour_of(nn.Softmax(-1), shape) is None
        assert behaviour_of(nn.LayerNorm(2), shape).eps == 1e-5


def test_an_eps_that_is_added_to_a_deviation_is_no_variance():
    """Vectors as long as eps would otherwise be standardized to a hundredth of what comes out."""
    norm = OverDeviation()
    found = behaviour_of(norm, SHAPE)
    assert found.kind == "layernorm"
    x = torch.randn(64, D) * 0.05
    truth = (norm(x) / norm.weight).detach()
    y = functional.layer_norm(x, (D,), eps=found.eps)
    assert float((y - truth).abs().max()) < 0.1
    assert float((functional.layer_norm(x, (D,), eps=norm.eps) - truth).abs().max()) > 0.3
