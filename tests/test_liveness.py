"""What additions may be written over: nothing that the code around them reads again."""

import ast
import textwrap

import pytest
import torch
from torch import nn

from normgeo import convert, optimize, wrap
from normgeo.conversion import liveness
from normgeo.conversion.additions import rewritten
from normgeo.conversion.liveness import operands_of

CASES = {
    "rebound": ("x = r + x", {"r + x": "name name"}),
    "a method": ("r = r.add(x)\nreturn r", {"r.add(x)": "name name"}),
    "a method whose sum has a name": (
        "y = r.add(x)\nz = f(y)\nreturn y.add(z)",
        {"r.add(x)": "name name", "y.add(z)": "name name"},
    ),
    "a method whose operand is read behind": ("y = r.add(x)\nreturn y, x", {"r.add(x)": "name read"}),
    "a function": ("y = torch.add(r, x)\nreturn y, r", {"torch.add(r, x)": "read name"}),
    "a function that scales": ("return torch.add(r, x, alpha=2)", {}),
    "read behind": ("y = r + x\nreturn y, x", {"r + x": "name read"}),
    "the other": ("y = r + x\nreturn y, r.norm()", {"r + x": "read name"}),
    "under another name": (
        "before = r\nr = r + x\nreturn r - before",
        {
            "r + x": "read name",
        },
    ),
    "a view": ("z = x.view(-1)\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "its shape": ("z = x.shape\ny = r + x\nreturn y.view(z)", {"r + x": "name name"}),
    "in a tuple": ("z = (x, 1)\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "read in a branch": ("y = r + x\nif flag:\n    kept.append(x)\nreturn y", {"r + x": "name read"}),
    "made in a branch": ("y = r + x\nif flag:\n    x = y\n    x = x * x\nreturn y", {"r + x": "name name"}),
    "another by then": ("y = r + x\nx = f(y)\nreturn x", {"r + x": "name name"}),
    "another in a branch alone": ("y = r + x\nif flag:\n    x = f(y)\nreturn x", {"r + x": "name read"}),
    "another in both": ("y = r + x\nif flag:\n    x = f(y)\nelse:\n    x = g(y)\nreturn x", {"r + x": "name name"}),
    "a call": ("y = r + drop(x)\nreturn y, x", {"r + drop(x)": "name value"}),
    "computed": ("y = r + (x * 2)\nreturn y, x", {"r + x * 2": "name value"}),
    "an attribute": ("y = r + self.x\nreturn y", {"r + self.x": "name read"}),
    "an item": ("y = r + out[0]\nreturn y", {"r + out[0]": "name read"}),
    "an item of a call": ("y = r + f(norm(r))[0]\nreturn y", {"r + f(norm(r))[0]": "name value"}),
    "in the same statement": ("y, z = r + x, x\nreturn y", {"r + x": "name read"}),
    "a loop": ("for _ in z:\n    y = r + x\nreturn y", {"r + x": "read read"}),
    "a loop that makes it": ("for _ in z:\n    x = f(r)\n    r = r + x\nreturn r", {"r + x": "name name"}),
    "a loop that goes on": (
        "for _ in z:\n    r = r + x\n    if flag:\n        continue\n    x = f(r)\nreturn r, x",
        {"r + x": "read read"},
    ),
    "a loop that breaks off": (
        "while True:\n    r = r + x\n    if flag:\n        break\n    return r\nreturn r, x",
        {"r + x": "read read"},
    ),
    "a loop that repeats it": (
        "for _ in z:\n    y = r + x\n    if flag:\n        continue\n    x = f(y)\nreturn y",
        {"r + x": "read read"},
    ),
    "a loop that changes it": (
        "for _ in z:\n    x = f(z)\n    y = g() + x\n    x *= 2\n    if flag:\n        break\nreturn y",
        {"g() + x": "value read"},
    ),
    "a loop that makes it and goes on": (
        "for _ in z:\n    x = f(z)\n    y = g() + x\n    if flag:\n        continue\nreturn y",
        {"g() + x": "value name"},
    ),
    "behind a loop that makes it": ("for _ in z:\n    x = f(r)\n    r = r + x\nreturn r, x", {"r + x": "name read"}),
    "in a loop's else": (
        "for _ in z:\n    x = f(z)\n    y = g() + x\nelse:\n    kept.append(x)\nreturn y",
        {"g() + x": "value read"},
    ),
    "where it is not made anew": (
        "try:\n    y = r + x\n    x = f(y)\nexcept E:\n    y = z\nreturn y, x",
        {"r + x": "name read"},
    ),
    "where it is not made anew and nobody says so": (
        "with suppress(E):\n    y = r + x\n    x = f(y)\nreturn y, x",
        {"r + x": "name read"},
    ),
    "in a context": ("with f():\n    y = r + x\nreturn y", {"r + x": "name name"}),
    "while": ("while x.any():\n    r = r + x\nreturn r", {"r + x": "name read"}),
    "augmented": ("r += x\nreturn r, x", {"r += x": "name read"}),
    "augmented alone": ("r += x\nreturn r", {"r += x": "name name"}),
    "augmented from itself": ("r += f(norm(r))\nreturn r", {"r += f(norm(r))": "name value"}),
    "a function's": ("g = lambda: x\ny = r + x\nreturn y, g", {"r + x": "name read"}),
    "a generator's": ("z = (x for _ in r)\ny = r + x\nreturn y, z", {"r + x": "read read"}),
    "again and again": ("y = [r + x for _ in z]\nreturn y", {}),
    "returned": ("return r + x", {"r + x": "name name"}),
    "finally": ("try:\n    return r + x\nfinally:\n    kept.append(x)", {"r + x": "name read"}),
    "a handler's": ("try:\n    return f(r + x)\nexcept E:\n    return x", {"r + x": "name read"}),
    "another handler's": ("try:\n    y = r + x\nexcept E:\n    y = z\nreturn y", {"r + x": "name name"}),
    "whatever there is": ("y = r + x\nreturn y, locals()", {}),
    "again and again, in a dict": ("y = {z: r + x for z in r}\nreturn y", {}),
    "again and again, in a set": ("y = {r + x for z in r}\nreturn y", {}),
    "a part": ("z = x[:1]\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "a view by an attribute": ("z = x.T\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "one of two": ("z = x if flag else None\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "starred": ("z = [*x]\ny = r + x\nreturn y, z", {"r + x": "name read"}),
    "named on the way": ("w = (z := x)\ny = r + x\nreturn y, w", {"r + x": "name read"}),
    "under a third name": ("a = x\nb = a\ny = r + x\nreturn y, b", {"r + x": "name read"}),
    "where nothing is raised": (
        "try:\n    y = r + x\nexcept E:\n    pass\nelse:\n    kept.append(x)\nreturn y",
        {"r + x": "name read"},
    ),
    "augmented behind": ("y = r + x\nx *= 2\nreturn y", {"r + x": "name read"}),
    "a condition's": ("y = r + x\nif x.any():\n    return y\nreturn y", {"r + x": "name read"}),
    "what returns before": ("if flag:\n    y = r + x\n    return y\nreturn x", {"r + x": "name name"}),
    "what returns it": ("if flag:\n    return r + x\nreturn x", {"r + x": "name name"}),
    "a named function's": ("def g():\n    return x\ny = r + x\nreturn y, g", {"r + x": "name read"}),
    "a case's": ("match flag:\n    case 1:\n        y = r + x\n        return y\nreturn r", {"r + x": "name name"}),
    "in a condition": ("if f(r + x):\n    kept.append(x)\nreturn r", {"r + x": "read read"}),
    "in a loop's condition": ("while f(r + x):\n    flag = z\nreturn flag", {"r + x": "read read"}),
    "of a loop": ("for z in f(r + x):\n    kept.append(x)\nreturn flag", {"r + x": "name read"}),
    "in a guard": ("match r + x:\n    case y if x.any():\n        return y", {"r + x": "name read"}),
    "another in its own loop": ("y = f(r + x, [0 for x in z])\nreturn x", {"r + x": "name read"}),
    "everybody's": ("global x\nx = f(r)\ny = r + x\nreturn y", {"r + x": "name read"}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_operands(case):
    code, expected = CASES[case]
    function = ast.parse("def forward(self, r, x, flag, kept, z):\n" + textwrap.indent(code, "    ")).body[0]
    found = operands_of(function)
    assert [(ast.unparse(node), " ".join(kinds)) for node, kinds in found.items()] == list(expected.items())
    behind, alike = liveness.read_behind(function), liveness._aliases(function)
    for node, kinds in found.items():
        for operand, kind in zip(liveness.added_in(node), kinds, strict=True):
            if isinstance(operand, ast.Name):
                assert (kind == "read") == bool(alike.get(operand.id, {operand.id}) & behind[node])


@pytest.mark.parametrize("given", ["self, x", "self, *, x", "self, x, /", "self, *x", "self, **x"])
def test_what_comes_in_may_have_other_names_however_it_is_given(given):
    code = f"def forward({given}):\n    z = x\n    y = f(x) + x\n    return y, z"
    assert [*operands_of(ast.parse(code).body[0]).values()] == [("value", "read")]


class ByName(nn.Module):
    def forward(self, /, x):
        x -= 1
        return x + 2


def test_the_block_is_the_first_that_comes_in():
    seen = []
    forward = rewritten(ByName, lambda block, *told: seen.append(block) or sum(told[-2:]))
    block = ByName()
    assert forward(block, 2) == 3
    assert seen == [block]


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


class Growing(Named):
    """It reads what it was given again, under another name."""

    def forward(self, x):
        before = x
        x = x + self.f(self.n1(x))
        x = x + self.g(self.n2(x))
        self.kept = ((x - before).norm(), before.norm())
        return x


class Listed(Named):
    """What its branches give has other holders."""

    def forward(self, x):
        a = self.f(self.n1(x))
        both, d = [a], self.dropout(a)
        x = x + d
        m = self.g(self.n2(x))
        both.append(m)
        x = x + m
        self.kept = tuple(b.norm() for b in both)
        return x

    dropout = staticmethod(lambda x: x)


class Cleared(Inside):
    """They keep it until it has been read."""

    def forward(self, x):
        x = x + self.f(self.n1(x))
        first, self.f.kept = self.f.kept.norm(), None
        x = x + self.g(self.n2(x))
        self.kept = first, self.g.kept.norm()
        self.g.kept = None
        return x


class Flagged(Named):
    """It reads what its branches give where it is told to, afterwards."""

    told = False

    def forward(self, x):
        a = self.f(self.n1(x))
        other = [a] if self.told else []
        x = x + a
        y = x + self.g(self.n2(x))
        self.kept = x, y
        return y + other[0] if other else y


class Guarded(Flagged):
    """It adds in a condition, and once more where that holds."""

    def forward(self, x):
        a = self.f(self.n1(x))
        if (y := x + a).any() and self.told:
            y = x + a / 2
        y = y + self.g(self.n2(y))
        self.kept = [y.norm()]
        return y


class Turning(Named):
    """It keeps what a branch gives in its second turn alone."""

    def forward(self, x):
        self.kept = []
        for turn in range(2):
            a = self.f(self.n1(x))
            if turn:
                self.kept.append(a)
            x = x + a
        return x + self.g(self.n2(x))


@torch.no_grad()
@pytest.mark.parametrize("block", [Named, Lengths, Inside, Growing, Listed, Cleared, Flagged, Guarded, Turning])
def test_branches_that_are_kept_are_not_written_over(block):
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 32), block(), block(), nn.LayerNorm(32), nn.Linear(32, 64)]
    model = convert(wrap(nn.Sequential(*layers).eval())).model
    ids = torch.arange(12).view(2, 6)
    kept = lambda: [[x.clone() for x in model.module[i].kept] for i in (1, 2)]  # noqa: E731
    Flagged.told = True
    expected, truth = model(ids)["logits"], kept()
    Flagged.told = False
    optimize(model)
    Flagged.told = True
    torch.testing.assert_close(model(ids)["logits"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept(), truth, rtol=1e-5, atol=1e-5)
