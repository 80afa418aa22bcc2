"""Follows the number of replicas through the text of the user's code, to what a step may read.

A number that was computed before the step, such as in a constructor, is a constant of its trace. The
text shows which attributes, outer variables and arguments of functions contain it.
"""

import ast
from collections.abc import Iterator
import contextlib
import functools
import re
import textwrap
from typing import Any, NamedTuple

_NAME = "num_replicas_in_sync"
# Calls that print a number, or divide a dataset by it.
_HARMLESS = re.compile("print|debug|info|warning|error|format|(padded_)?batch|shard|range")
# Calls whose result contains the number; others get it as an argument that they may keep.
_VALUES = re.compile(
    "int|float(32|64)?|abs|min|max|round|sqrt|log2?|pow|cast|constant|convert_to_tensor|as_?array|dict|"
    "list|tuple"
)


class Use(NamedTuple):
    """What a step may read of the number of replicas.

    Attributes:
        name: the attribute or outer variable; "" for an argument of a function.
        line: the line.
        lines: the first and the last line of the function whose code it is.
        owner: the class whose code it is; "" for other code.
        is_attribute: whether `name` is an attribute.
        is_derived: whether the class has a base class.
    """

    name: str
    line: int
    lines: tuple[int, int]
    owner: str
    is_attribute: bool
    is_derived: bool


@functools.cache
def find_uses(text: str) -> list[Use]:
    """Returns the places where code keeps a number that it has computed from the number of replicas.

    Args:
        text: the text of a file or a function.
    """
    found: dict[Use, None] = {}
    if _NAME in text:
        with contextlib.suppress(SyntaxError):
            found = dict.fromkeys(_Flow(ast.parse(textwrap.dedent(text))).run())
    return [*found]


class _Flow:
    """The names that contain the number.

    Args:
        tree: the code.
    """

    def __init__(self, tree: ast.Module):
        self._tree = tree
        self._parents = {x: node for node in ast.walk(tree) for x in ast.iter_child_nodes(node)}
        self._known: set[tuple[ast.AST, str]] = set()

    def run(self) -> Iterator[Use]:
        found = [
            x for x in ast.walk(self._tree) if isinstance(x, ast.Attribute) and x.attr == _NAME
        ]
        # Each with whether it is the number itself, and not computed from it; and its name outside.
        pending: list[tuple[ast.AST, bool, str]] = [(x, True, "") for x in found]
        while pending:
            node, is_raw, outer = pending.pop()
            end, is_raw = self._follow(node, is_raw)
            if end is None:
                continue
            if outer or isinstance(end, ast.Call | ast.arguments):
                yield self._use(outer, node)
            for target in self._targets(end):
                if isinstance(target, ast.Name):
                    pending += self._loads(target, is_raw)
                else:
                    yield self._use(getattr(target, "attr", ""), node, is_attribute=True)

    def _use(self, name: str, node: ast.AST, *, is_attribute: bool = False) -> Use:
        scope: Any = self._scope(node)
        lines = (0, 0) if isinstance(scope, ast.Module) else (scope.lineno, scope.end_lineno)
        while not isinstance(scope, ast.ClassDef | ast.Module):
            scope = self._parents[scope]
        owner, bases = getattr(scope, "name", ""), getattr(scope, "bases", [])
        return Use(name, node.lineno, lines, owner, is_attribute, bool(bases))  # type: ignore[attr-defined]

    def _follow(self, node: ast.AST, is_raw: bool) -> tuple[ast.AST | None, bool]:
        """Returns where a value goes, and whether it is the number itself; None if that is harmless."""
        is_optimizer = getattr(self._scope(node), "name", "") == "build_optimizer"
        while parent := self._parents[node]:
            is_test = node is getattr(parent, "test", None)
            if is_test or isinstance(parent, ast.Compare | ast.JoinedStr):
                break
            if isinstance(parent, ast.BinOp):
                factors = [getattr(x, "value", None) for x in (parent.left, parent.right)]
                is_rate = is_optimizer or any(isinstance(x, float) for x in factors)
                if is_raw and isinstance(parent.op, ast.Mult) and not is_rate:
                    break  # the global batch size
                is_raw = False
            if isinstance(parent, ast.Call) and node is not parent.func:
                name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
                if _HARMLESS.fullmatch(name):
                    break
                if not _VALUES.fullmatch(name):
                    return parent, is_raw
                is_raw = False
            if isinstance(parent, ast.stmt | ast.Lambda | ast.arguments):
                return parent, is_raw
            node = parent
        return None, is_raw

    def _targets(self, end: ast.AST) -> Iterator[ast.AST]:
        """Yields what a statement assigns."""
        targets = end.targets if isinstance(end, ast.Assign) else [getattr(end, "target", None)]
        for target in targets if isinstance(end, ast.Assign | ast.AnnAssign) else ():
            yield from target.elts if isinstance(target, ast.Tuple) else [target]  # type: ignore[misc]

    def _loads(self, target: ast.Name, is_raw: bool) -> list[tuple[ast.AST, bool, str]]:
        """Returns where code of the same function, or one inside of it, reads a variable."""
        scope, name = self._scope(target), target.id
        if (scope, name) in self._known:
            return []
        self._known.add((scope, name))
        loads = [
            x for x in ast.walk(scope)
            if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load)
        ]  # fmt: skip
        return [(x, is_raw, "" if self._scope(x) is scope else name) for x in loads]

    def _scope(self, node: ast.AST) -> ast.AST:
        """Returns the innermost function that contains a node, or the module."""
        while not isinstance(node, ast.Module):
            before, node = node, self._parents[node]
            if isinstance(node, ast.FunctionDef | ast.Lambda) and before is not node.args:
                return node
        return node
