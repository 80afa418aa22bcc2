"""Finds numbers that the user's code computes from the number of replicas, and sets others.

A loop of one's own divides by it, because it sums the gradients of the replicas. ctl divides once, by
the weight of the global batch, so the update would depend on the split. Code that uses the number is
traced again as that of one replica, whose update is compared.
"""

from collections.abc import Iterator, MutableMapping, Sequence
import contextlib
import inspect
from typing import Any, NamedTuple

from ctl.built.built_step import BuiltStep
from ctl.built.observers import Losses, Observer, TraceAgain
from ctl.checks import number_flow, users_code
from ctl.configs.error_location import user_frame
from ctl.keras import models
from ctl.rows.row_mask import Rows


class ReplicaCount(Observer):
    """Names what a step may read of the number of replicas that nothing could compare."""

    @classmethod
    def check_losses(
        cls, step: BuiltStep, losses: Losses | None, trace_again: TraceAgain | None, name: str
    ) -> None:
        """Notes which lines read it for the losses of the first trace; later ones may be cached."""
        vars(step)["read_before"] = losses.trace.call.get("replica_count", {}) if losses else {}

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Prints a line for each place that has kept the number before the step."""
        step = self.step
        if rows.earlier is not None or step.plan.options.allow_row_coupling:
            return
        # Other models and trainers may be in the same file.
        parts = [step.attributes.owner, *map(models.inner, step.attributes.layers())]
        classes = set[str]().union(*map(_class_names, parts))
        compared = {each.key for each in find_stored(step, 1)}
        read = rows.trace.call.get("replica_count", {})
        places = dict.fromkeys(vars(step).get("read_before", {}).keys() - read)
        for file, text, first in users_code.texts(step):
            for use in number_flow.find_uses(text):
                begin, end = use.lines
                of_function = {user_frame([(file, first - 1 + i)]) for i in range(begin, end + 1)}
                is_compared = use.name in compared or of_function.intersection(read)
                if not is_compared and (not use.is_derived or use.owner in classes):
                    places[user_frame([(file, first - 1 + use.line)])] = None
        for place in places:
            self.warn_once(
                f"{place} uses num_replicas_in_sync before the step. If a loss, a weight, a penalty or "
                "a learning rate contains it, the update depends on how the batch is split: leave it "
                "out, since ctl divides by the weight of the global batch, or read it in the step, "
                "where ctl tests it."
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

    They are attributes and outer variables in the files of the functions that contain it: the number,
    its inverse, or the rows of a replica.

    Args:
        step: the `BuiltStep`.
        number: another number of replicas.
    """
    replicas, batch = step.plan.layout.replicas, step.plan.layout.global_batch_size
    others = {1 / replicas: 1 / number, batch / replicas: batch / number}
    others |= {batch // replicas: batch // number, replicas: number}
    texts = (each.text for each in users_code.texts(step))
    uses = [use for text in texts for use in number_flow.find_uses(text) if use.name]
    for values, classes in _namespaces(step) if uses else ():
        names = {use.name for use in uses if not use.is_attribute or use.owner in classes}
        for key in names & values.keys():
            old = values[key]
            if isinstance(old, int | float) and old in others:
                yield _Stored(values, key, old, others[old])


def _class_names(value: Any) -> set[str]:
    return {cls.__name__ for cls in type(value).__mro__}


def _namespaces(step: BuiltStep) -> Iterator[tuple[MutableMapping[str, Any], set[str]]]:
    """Yields what holds the attributes and outer variables of a step's functions.

    With attributes come the names of the classes of their object.
    """
    functions = [getattr(each, "__func__", each) for each in step.functions()]
    objects = [getattr(each, "__self__", each) for each in step.functions()]
    objects += [step.attributes.owner, *map(models.inner, step.attributes.layers())]
    for each in {id(x): x for x in objects}.values():  # an object may compute the loss
        yield getattr(each, "__dict__", {}), _class_names(each)
    for function in filter(inspect.isfunction, map(inspect.unwrap, functions)):
        outer = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield function.__globals__, set()
        yield _Cells(outer), set()


class _Cells(dict[str, Any]):
    """The outer variables of a function, by their names."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        super().__getitem__(key).cell_contents = value
