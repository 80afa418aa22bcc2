"""Finds numbers that the user's code computes from the number of replicas, and sets others.

A loop of one's own divides by it, because it sums the gradients of the replicas. ctl divides once, by
the weight of the global batch, so the update would depend on the split. Code that uses the number is
traced again as that of one replica, whose update is compared.
"""

import ast
from collections.abc import Iterator, MutableMapping
import contextlib
import inspect
import logging
import textwrap
from typing import Any, NamedTuple

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Losses, Observer, TraceAgain
from ctl.checks import users_code
from ctl.configs.error_location import name_function
from ctl.keras import models

_LOG = logging.getLogger("ctl")
_NAME = "num_replicas_in_sync"


class ReplicaCount(Observer):
    """Names functions that may have put the number of replicas into a regularizer or an optimizer."""

    @classmethod
    def check_losses(
        cls, step: BuiltStep, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Prints a line if a function that builds the model or the optimizer reads the number."""
        if step.plan.layout.replicas == 1 or step.plan.options.allow_row_coupling:
            return
        owner = type(step.attributes.owner)
        penalties = any(layer._callable_losses for layer in step.attributes.layers())
        for name, what, is_used in (
            ("build_model", "factors of regularizers", penalties),
            ("build_optimizer", "the learning rate or the steps of a schedule", True),
        ):
            build: Any = getattr(owner, name, None)
            if is_used and _names_count(getattr(build, "__code__", None)):
                _LOG.warning(
                    "%s reads num_replicas_in_sync. If the number changes %s, the update depends on it: "
                    "leave it out, since ctl adds up the gradients and penalties of the global batch.",
                    name_function(build), what,
                )  # fmt: skip


def _names_count(code: Any) -> bool:
    """Returns whether the code of a function, or of one inside of it, names the number of replicas."""
    return inspect.iscode(code) and (
        _NAME in code.co_names or any(map(_names_count, code.co_consts))
    )


@contextlib.contextmanager
def changing(step: BuiltStep, number: int) -> Iterator[None]:
    """Lets functions read what was computed from another number of replicas, within a `with` block.

    Args:
        step: the `BuiltStep`.
        number: the other number.
    """
    stored = [*find_stored(step, number)]
    try:
        for each in stored:
            each.values[each.key] = each.new
        yield
    finally:
        for each in stored:
            each.values[each.key] = each.old


class _Stored(NamedTuple):
    """A number that was computed from the number of replicas, and what another one gives."""

    values: MutableMapping[str, Any]
    key: str
    old: float
    new: float


def find_stored(step: BuiltStep, number: int) -> Iterator[_Stored]:
    """Yields the numbers that depend on the number of replicas.

    They are the attributes and outer variables that statements in the files of the functions assign,
    from an expression with the number of replicas that is no product: the number, its inverse, or the
    rows of a replica.

    Args:
        step: the `BuiltStep`.
        number: another number of replicas.
    """
    replicas, batch = step.plan.layout.replicas, step.plan.layout.global_batch_size
    others = {1 / replicas: 1 / number, batch / replicas: batch / number}
    others |= {batch // replicas: batch // number, replicas: number}
    names = {target for text in users_code.texts(step) for target in _assigned(text)}
    for values in _namespaces(step) if names else ():
        for key in names & values.keys():
            old = values[key]
            if type(old) in (int, float) and old in others:
                yield _Stored(values, key, old, others[old])


def _assigned(text: str) -> Iterator[str]:
    """Yields the names to which code assigns an expression with the number of replicas."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(textwrap.dedent(text))):
            if isinstance(node, ast.Assign | ast.AnnAssign) and _counts(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (getattr(x, "attr", getattr(x, "id", "")) for x in targets)
                yield from filter(None, names)


def _counts(node: ast.AST | None) -> bool:
    """Returns whether an expression contains the number of replicas, other than in a product."""
    if node is None or isinstance(node, ast.Lambda):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return False
    is_name = _NAME in (getattr(node, "attr", ""), getattr(node, "id", ""))
    return is_name or any(_counts(each) for each in ast.iter_child_nodes(node))


def _namespaces(step: BuiltStep) -> Iterator[MutableMapping[str, Any]]:
    """Yields what holds the attributes and outer variables of the functions of a step."""
    yield vars(step.attributes.owner)
    yield from (vars(models.inner(layer)) for layer in step.attributes.layers())
    for each in step.functions():
        function = inspect.unwrap(getattr(each, "__func__", each))
        if inspect.isfunction(function):
            yield function.__globals__
            yield _Cells(
                zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            )


class _Cells(dict[str, Any]):
    """The outer variables of a function, by their names."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        super().__getitem__(key).cell_contents = value
