"""Which values a function's additions may write over: those that nothing in it reads again."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

__all__ = ["free_operands"]

LOOPS = (ast.For, ast.AsyncFor, ast.While)
INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
REPEATED = (ast.ListComp, ast.SetComp, ast.DictComp)


def free_operands(function: ast.FunctionDef) -> dict[ast.AST, tuple[bool, bool]]:
    """For each addition, a + b or a += b, whether what a and what b gives is read by nothing behind it.

    A value is what a name holds, an item of that, or what a call may have handed on of what it was given first, as
    dropout and `view` do. What was computed in the place of an operand is read by nobody else; an attribute may be.
    """
    within = [node for statement in function.body for node in ast.walk(statement)]
    shared = {name for node in within if isinstance(node, INNER) for name in _loads(node)}  # whenever they run
    repeated = {id(part) for node in within if isinstance(node, REPEATED) for part in ast.walk(node)}
    local = {arg.arg for arg in function.args.args[1:]} | {n for statement in function.body for n in _stores(statement)}
    found: dict[ast.AST, tuple[bool, bool]] = {}
    for path in _paths(function.body, []):
        for node in _own_nodes(path[-1][0][path[-1][1]]):
            operands = _operands(node)
            if operands is not None and id(node) not in repeated:
                values = [_values(operand, local) for operand in operands]
                free = [v is not None and not v & shared and _unread(v, operands, path) for v in values]
                found[node] = (free[0], free[1])
    return found


Path = list[tuple[Sequence[ast.stmt], int, ast.stmt | None]]
"""Lists of statements around one, from the outermost on: the list, the place in it, and the statement that has it."""


def _paths(body: Sequence[ast.stmt], around: Path, parent: ast.stmt | None = None) -> Iterator[Path]:
    """Where every statement is."""
    for i, statement in enumerate(body):
        path: Path = [*around, (body, i, parent)]
        yield path
        for part in _bodies(statement):
            yield from _paths(part, path, statement)


def _bodies(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    if isinstance(statement, INNER):
        return
    for name in ("body", "orelse", "finalbody"):
        if part := getattr(statement, name, None):
            yield part
    for name in ("handlers", "cases"):
        yield from (part.body for part in getattr(statement, name, ()))


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, but for those of statements in it, and of functions."""
    within = {id(s) for part in _bodies(statement) for s in part}
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        children = [c for c in ast.iter_child_nodes(node) if id(c) not in within]
        waiting += [c for c in children if not isinstance(c, (*INNER, ast.ExceptHandler, ast.match_case))]


def _operands(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        return node.target, node.value
    return None


def _loads(node: ast.AST) -> list[str]:
    """The names that are read, one for each time."""
    found = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    targets = [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)]
    return found + [target.id for target in targets if isinstance(target, ast.Name)]


def _stores(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))}


def _values(operand: ast.expr, local: set[str]) -> set[str] | None:
    """The names whose values an operand may be; None where it may be something else's."""
    if isinstance(operand, ast.Name):
        return {operand.id}
    if isinstance(operand, ast.Subscript):
        return _values(operand.value, local)
    if isinstance(operand, ast.Call):
        of = operand.func.value if isinstance(operand.func, ast.Attribute) else None
        given = [*operand.args[:1], *([of] if isinstance(of, (ast.Call, ast.Subscript)) else [])]
        handed = [_values(value, local) for value in given]
        own = {of.id} & local if isinstance(of, ast.Name) else set[str]()
        return None if None in handed else own.union(*filter(None, handed))
    return set() if isinstance(operand, (ast.BinOp, ast.UnaryOp, ast.Constant)) else None


def _unread(names: set[str], operands: tuple[ast.expr, ast.expr], path: Path) -> bool:
    """Whether nothing but an addition's operands reads any of these names, in its statement or behind it."""
    body, i, _ = path[-1]
    here, own = _loads_of(body[i]), [name for operand in operands for name in _loads(operand)]
    own += [operand.id for operand in operands if isinstance(operand, ast.Name) and isinstance(operand.ctx, ast.Store)]
    if any(here.count(name) > own.count(name) for name in names):
        return False
    stored = _stores_of(body[i])
    return isinstance(body[i], ast.Return) or not any(_read_behind(name, path) for name in names - stored)


def _loads_of(statement: ast.stmt) -> list[str]:
    return [
        n.id for n in _own_nodes(statement)
        if isinstance(n, ast.Name) and (isinstance(n.ctx, ast.Load) or _is_target(n, statement))
    ]  # fmt: skip


def _is_target(name: ast.Name, statement: ast.stmt) -> bool:
    return isinstance(statement, ast.AugAssign) and statement.target is name


def _stores_of(statement: ast.stmt) -> set[str]:
    return _stores(statement) if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else set()


def _read_behind(name: str, path: Path) -> bool:
    """Whether a name is read behind a statement before it is something else."""
    for body, i, parent in reversed(path):
        behind = list(body[i + 1 :])
        if isinstance(parent, LOOPS):
            behind += [parent, *body[: i + 1]]  # once more
        for statement in behind:
            if statement is parent:  # a loop's own condition
                if name in _loads(parent.test if isinstance(parent, ast.While) else ast.Pass()):
                    return True
                continue
            if name in _loads(statement):
                return True
            if name in _stores_of(statement) or isinstance(statement, (ast.Return, ast.Raise)):
                return False
    return False
