"""Which operands of a function's additions it reads again: what they hold may not be written over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

__all__ = ["Operand", "Written", "added_in", "operands_of", "parameters", "read_behind"]

Operand = Literal["read", "name", "value"]
"""Of an operand: the function may read it again; it is the value of a name that nothing reads again; or of none."""

Written = Literal["+", "+=", ".add", "torch.add"]
"""How an addition is written."""

LOOPS = (ast.For, ast.AsyncFor, ast.While)
CATCHING = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
"""What may go on behind whatever was raised in it, a context manager as `suppress` too."""

INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
REPEATED = (ast.ListComp, ast.SetComp, ast.DictComp)
SAME = (ast.Name, ast.Subscript, ast.Starred, ast.Tuple, ast.List, ast.IfExp, ast.NamedExpr, ast.Attribute)
"""What may give the tensor that a name in it holds, or a view of it."""

FACTS = {"shape", "dtype", "device", "ndim", "training", "is_cuda", "requires_grad"}
"""What of a tensor, or of a module, is no tensor."""

ANY_NAME = {"locals", "vars", "eval", "exec", "globals"}
"""Functions that may read whatever there is."""

Path = list[tuple[Sequence[ast.stmt], int, ast.stmt | None]]
"""Lists of statements around one, from the outermost on: the list, the place in it, and the statement that has it."""


def operands_of(function: ast.FunctionDef) -> dict[ast.AST, tuple[Operand, Operand]]:
    """For each addition (`added_in`) what its operands are.

    Names that are assigned from each other are taken for one. That a tensor has holders of which code does not tell, as
    lists and modules, is seen where it runs.
    """
    within = [node for statement in function.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Name) and node.id in ANY_NAME for node in within):
        return {}
    shared = _shared(within)
    repeated = {id(part) for node in within if isinstance(node, REPEATED) for part in ast.walk(node)}
    alike, found = _aliases(function), dict[ast.AST, tuple[Operand, Operand]]()
    for node, (a, b), path in _additions(function):
        if id(node) not in repeated:
            found[node] = _kind(a, node, path, alike, shared), _kind(b, node, path, alike, shared)
    return found


def read_behind(function: ast.FunctionDef) -> dict[ast.AST, frozenset[str]]:
    """For each addition the names that the function may read again behind it, whatever they hold.

    Which of them hold what is added, for a function that was called gave it back, is seen where it runs.
    """
    shared = _shared([node for statement in function.body for node in ast.walk(statement)])
    every = {name for statement in function.body for name in _names(statement)} | set(parameters(function))
    found = dict[ast.AST, frozenset[str]]()
    for node, _, path in _additions(function):
        found[node] = frozenset(shared | {name for name in every if _read_again(name, node, path)})
    return found


def _additions(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, tuple[ast.expr, ast.expr], Path]]:
    """Every addition, its operands, and where its statement is."""
    for path in _paths(function.body, []):
        for node in _own_nodes(_innermost(path)):
            if (operands := added_in(node)) is not None:
                yield node, operands, path


def _shared(within: list[ast.AST]) -> set[str]:
    """The names that other functions, and those inside, may read whenever they run."""
    inner = {name for node in within if isinstance(node, INNER) for name in _loads(node)}
    return inner | {name for node in within if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}


def _kind(operand: ast.expr, of: ast.AST, path: Path, alike: dict[str, set[str]], shared: set[str]) -> Operand:
    whole = operand
    while isinstance(whole, (ast.Attribute, ast.Subscript)):
        whole = whole.value
    if not isinstance(whole, ast.Name):
        return "value"
    if not isinstance(operand, ast.Name):
        return "read"  # what it is an item or an attribute of holds it
    names = alike.get(operand.id, {operand.id})
    return "read" if names & shared or any(_read_again(name, of, path) for name in names) else "name"


def _aliases(function: ast.FunctionDef) -> dict[str, set[str]]:
    """For each name those that may hold the same tensor, or a view of it: assigned from it, or it from them."""
    within, alike = [n for statement in function.body for n in ast.walk(statement)], dict[str, set[str]]()
    local = {n.id for n in within if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= set(parameters(function)[1:])  # neither libraries nor the block itself hand on themselves
    for node in within:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            handed = _handed(node.value) & local
            names = {name for target in targets for name in _names(target)} | handed if handed else set[str]()
            together = set[str]().union(names, *(alike[name] for name in names if name in alike))
            alike |= dict.fromkeys(together, together)
    return alike


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of what a function is given, however that is given."""
    args = function.args
    every = (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg)
    return [arg.arg for arg in every if arg is not None]


def _handed(value: ast.expr) -> set[str]:
    """The names whose tensors an expression may give: themselves, parts, or views by methods of theirs."""
    if isinstance(value, ast.Call):
        if added_in(value) is not None:  # a tensor of its own
            return set()
        return _handed(value.func.value) if isinstance(value.func, ast.Attribute) else set()
    if isinstance(value, ast.Name):
        return {value.id}
    if isinstance(value, ast.Attribute) and value.attr in FACTS:
        return set()
    parts = ast.iter_child_nodes(value) if isinstance(value, SAME) else ()
    return {name for part in parts if isinstance(part, ast.expr) for name in _handed(part)}


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


def added_in(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The operands of an addition: a + b, a += b, a.add(b), or add(a, b) of a library; of others called so too."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        return node.target, node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
        given = [node.func.value, *node.args][-2:]
        plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
        return (given[0], given[1]) if plain and len(node.args) in (1, 2) else None
    return None


def _names(node: ast.AST) -> list[str]:
    """The names in it, read or written, one for each time."""
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _loads(node: ast.AST) -> set[str]:
    """The names that are read in it."""
    return set(_loads_of(node))


def _loads_of(node: ast.AST) -> list[str]:
    """The same, one for each time: of a statement with others in it theirs too, which run behind what its head does."""
    within = list(ast.walk(node))
    changed = {id(n.target) for n in within if isinstance(n, ast.AugAssign)}
    found = [n for n in within if isinstance(n, ast.Name)]
    return [n.id for n in found if isinstance(n.ctx, ast.Load) or id(n) in changed]


def _stores_of(statement: ast.stmt) -> set[str]:
    """The names that a statement surely gives another value."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    stored = (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    return {n.id for n in stored if isinstance(n.ctx, ast.Store)}


def _innermost(path: Path) -> ast.stmt:
    body, i, _ = path[-1]
    return body[i]


def _read_again(name: str, addition: ast.AST, path: Path) -> bool:
    """Whether a name may be read beside an addition, in its statement, or behind it, before it is something else."""
    inner, own = _innermost(path), _loads_of(addition)
    if _loads_of(inner).count(name) > own.count(name):
        return True
    around = [parent for *_, parent in path if parent is not None]
    loops = [parent for parent in around if isinstance(parent, LOOPS)]
    jumps = any(isinstance(node, (ast.Break, ast.Continue)) for loop in loops for node in ast.walk(loop))
    jumps = jumps or any(isinstance(parent, CATCHING) for parent in around)
    if jumps and sum(_loads_of(statement).count(name) for statement in path[0][0]) > own.count(name):
        return True
    if isinstance(inner, ast.While) and name in _loads(inner.test):
        return True
    if name in _stores_of(inner) or isinstance(inner, (ast.Return, ast.Raise)):
        return False
    for body, i, parent in reversed(path):
        use = None if jumps else _use(body[i + 1 :], name)
        if use is not None:
            return use == "read"
        if isinstance(parent, LOOPS):  # it goes on in one of these ways, or ends
            condition = [ast.Expr(parent.test)] if isinstance(parent, ast.While) else []
            if "read" in (_use([*condition, *body[: i + 1]], name), _use([*condition, *parent.orelse], name)):
                return True
    return False


def _use(statements: Sequence[ast.stmt], name: str) -> Literal["read", "stored"] | None:
    """What statements do first with a name, one after the other."""
    for statement in statements:
        use = _use_of(statement, name)
        if use is not None:
            return use
    return None


def _use_of(statement: ast.stmt, name: str) -> Literal["read", "stored"] | None:
    if isinstance(statement, ast.If):
        ways = [_use(statement.body, name), _use(statement.orelse, name)]
        if name in _loads(statement.test) or "read" in ways:
            return "read"
        return "stored" if ways == ["stored", "stored"] else None
    if name in _loads(statement):
        return "read"
    ends = isinstance(statement, (ast.Return, ast.Raise))
    return "stored" if ends or name in _stores_of(statement) else None
