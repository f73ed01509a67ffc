"""What additions may be written over: nothing that the code around them reads again."""

import ast
import textwrap

import pytest
import torch
from torch import nn

from normgeo import convert, optimize, wrap
from normgeo.conversion.liveness import free_operands

CASES = {
    "rebound": ("x = r + x", {"r + x": (True, True)}),
    "read behind": ("y = r + x\nreturn y, x", {"r + x": (True, False)}),
    "read in a branch": ("y = r + x\nif flag:\n    kept.append(x)\nreturn y", {"r + x": (True, False)}),
    "another by then": ("y = r + x\nx = f(y)\nreturn x", {"r + x": (True, True)}),
    "another in a branch alone": ("y = r + x\nif flag:\n    x = y\nreturn x", {"r + x": (True, False)}),
    "handed on by a call": ("y = r + drop(x)\nreturn y, x", {"r + drop(x)": (True, False)}),
    "a call": ("y = r + f(norm(r))\nreturn y, mask", {"r + f(norm(r))": (True, True)}),
    "a view": ("y = r + x.view(r.shape)\nreturn y, x", {"r + x.view(r.shape)": (True, False)}),
    "a view of a call": ("y = r + f(x)[0].mean(1)\nreturn y, x", {"r + f(x)[0].mean(1)": (True, False)}),
    "a function of a library": ("y = r + F.drop(x)\nx = F.f(y)\nreturn x", {"r + F.drop(x)": (True, True)}),
    "a constant": ("y = r + f(1)[0]\nreturn y", {"r + f(1)[0]": (True, True)}),
    "computed": ("y = r + (x * 2)\nreturn y, x", {"r + x * 2": (True, True)}),
    "an attribute": ("y = r + self.x\nreturn y", {"r + self.x": (True, False)}),
    "an item": ("y = r + out[0]\nreturn y", {"r + out[0]": (True, True)}),
    "an item of what is read": ("y = r + out[0]\nreturn y, out[1:]", {"r + out[0]": (True, False)}),
    "an item of a call": ("y = r + f(norm(r))[0]\nreturn y", {"r + f(norm(r))[0]": (True, True)}),
    "in the same statement": ("y, kept = r + x, x\nreturn y", {"r + x": (True, False)}),
    "a loop": ("for _ in z:\n    y = r + x\nreturn y", {"r + x": (False, False)}),
    "a loop that makes it": ("for _ in z:\n    x = f(r)\n    r = r + x\nreturn r", {"r + x": (True, True)}),
    "while": ("while x.any():\n    r = r + x\nreturn r", {"r + x": (True, False)}),
    "augmented": ("r += x\nreturn r, x", {"r += x": (False, False)}),
    "augmented from itself": ("r += f(norm(r))\nreturn r", {"r += f(norm(r))": (True, True)}),
    "augmented alone": ("r += x\nreturn r", {"r += x": (False, True)}),
    "a function's": ("g = lambda: x\ny = r + x\nreturn y, g", {"r + x": (True, False)}),
    "a generator's": ("z = (x for _ in r)\ny = r + x\nreturn y, z", {"r + x": (False, False)}),
    "again and again": ("y = [r + x for _ in z]\nreturn y", {}),
    "returned": ("return r + x", {"r + x": (True, True)}),
    "a handler's": ("try:\n    y = r + x\nexcept E:\n    y = r\nreturn y", {"r + x": (True, True)}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_free_operands(case):
    code, expected = CASES[case]
    function = ast.parse("def forward(self, r, x, flag, kept, z):\n" + textwrap.indent(code, "    ")).body[0]
    found = {ast.unparse(node): free for node, free in free_operands(function).items()}
    assert {text: free[1] for text, free in found.items()} == {text: free[1] for text, free in expected.items()}
    assert "augmented" in case or found == expected


class Named(nn.Module):
    """A block that keeps what its branches give, under a name, and reads it behind the addition."""

    def __init__(self, d=32):
        super().__init__()
        self.n1, self.n2, self.f, self.g = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)
        self.kept = None

    def forward(self, x):
        a = self.f(self.n1(x))
        x = x + a
        m = self.g(self.n2(x))
        x = x + m
        self.kept = a, m
        return x


class Lengths(Named):
    def forward(self, x):
        a = self.f(self.n1(x))
        x = x + a
        m = self.g(self.n2(x))
        x = x + m
        self.kept = a.norm(), m.norm()
        return x


class Keeping(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Inside(Named):
    """Its branches keep what they give."""

    def __init__(self, d=32):
        super().__init__(d)
        self.f, self.g = Keeping(d, d), Keeping(d, d)

    def forward(self, x):
        x = x + self.f(self.n1(x))
        x = x + self.g(self.n2(x))
        self.kept = self.f.kept, self.g.kept
        return x


@torch.no_grad()
@pytest.mark.parametrize("block", [Named, Lengths, Inside])
def test_branches_that_are_kept_are_not_written_over(block):
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 32), block(), block(), nn.LayerNorm(32), nn.Linear(32, 64)]
    model = convert(wrap(nn.Sequential(*layers).eval())).model
    ids = torch.arange(12).view(2, 6)
    kept = lambda: [[x.clone() for x in model.module[i].kept] for i in (1, 2)]  # noqa: E731
    expected, truth = model(ids)["logits"], kept()
    optimize(model)
    torch.testing.assert_close(model(ids)["logits"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept(), truth, rtol=1e-5, atol=1e-5)
