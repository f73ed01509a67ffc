"""The additions in the source of a module's `forward`, as calls that know where they are written."""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from normgeo.conversion.liveness import Written, added_in, operands_of, parameters, read_behind

__all__ = ["rewritten"]

ADD = "_normgeo_add"


class _Additions(ast.NodeTransformer):
    """Turns every addition into a call that knows its block, its place and how it is written."""

    def __init__(self, function: ast.FunctionDef, torchs: set[str]) -> None:
        self.block, self.count, self.operands = parameters(function)[0], 0, operands_of(function)
        self.behind, self.torchs = read_behind(function), torchs

    def _call(self, node: ast.AST, a: ast.expr, b: ast.expr, written: Written) -> ast.Call:
        self.count += 1
        operands = self.operands.get(node, ("read", "read"))
        behind: Any = self.behind.get(node, frozenset())  # a set of names is a constant, too
        told = [ast.Constant(value) for value in (self.count, written, *operands, behind)]
        return ast.Call(ast.Name(ADD, ast.Load()), [ast.Name(self.block, ast.Load()), *told, a, b], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self._call(node, node.left, node.right, "+") if isinstance(node.op, ast.Add) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
            return node
        a = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], self._call(node, a, node.value, "+="))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (operands := added_in(node)) is None or not isinstance(node.func, ast.Attribute):
            return node
        if len(node.args) == 1:
            return self._call(node, *operands, ".add")
        library = node.func.value
        is_torchs = isinstance(library, ast.Name) and library.id in self.torchs
        return self._call(node, *operands, "torch.add") if is_torchs else node


def _private(node: ast.AST) -> bool:
    """Whether a name is one that a class makes its own, which it is not outside of it."""
    names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    return any(isinstance(n, str) and n.startswith("__") and not n.endswith("__") for n in names)


def rewritten(cls: type[nn.Module], add: Callable[..., Any]) -> Callable[..., Any] | None:
    """A class's `forward` with its additions as calls; None where there are none, or its source cannot be had.

    Args:
        cls: a class of blocks.
        add: takes the block, which of its additions it is (from 1, as they are written), how it is `Written`, what a
            and b are (`liveness.Operand`), the names that may be read behind it, and the two that are added.
    """
    inner = inspect.unwrap(cls.forward)
    if not isinstance(inner, FunctionType) or inner.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not [*function.args.posonlyargs, *function.args.args]:
        return None
    if any(map(_private, ast.walk(function))):
        return None
    additions = _Additions(function, {name for name, value in inner.__globals__.items() if value is torch})
    function.body = [additions.visit(line) for line in function.body]
    if not additions.count:
        return None
    # inside another function, so that the module's globals stay its own
    outer = ast.parse(f"def outer({ADD}):\n    return {function.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, function)
    tree.body = [outer]
    flags, names = __future__.annotations.compiler_flag, {}
    code = compile(ast.fix_missing_locations(tree), inner.__code__.co_filename, "exec", flags)
    try:
        exec(code, inner.__globals__, names)
        return names["outer"](add)
    except Exception:  # a decorator or a default of its class's, which has a name there alone
        return None
